//! The session stream: versions, options, order, sequence numbers, bounds.

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use pw_edge::{EdgeConfig, INBOX};
use pw_proto::ifrt::{Attribute, pb};
use pw_types::*;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn versions_are_negotiated() {
    let rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    // jaxlib 0.8.0, 0.10.2, 0.12.0.1, and one to come.
    assert_eq!(client.version(15, 19, 0).await.expect("served"), (19, 0));
    assert_eq!(client.version(16, 25, 3).await.expect("served"), (25, 3));
    assert_eq!(client.version(16, 25, 6).await.expect("served"), (25, 6));
    assert_eq!(client.version(20, 40, 9).await.expect("served"), (25, 9));
    for (min, max) in [(26, 30), (1, 14)] {
        let status = client.version(min, max, 3).await.expect_err("nothing in common");
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        let named = status.message().contains(&format!("{min} to {max}")) && status.message().contains("15 to 25");
        assert!(named, "{}", status.message());
    }
}

#[tokio::test]
async fn options_reach_the_core_and_bad_ones_the_user() {
    let mut rig = Rig::start(EdgeConfig { token: Some("secret".to_owned()), ..EdgeConfig::default() }).await;
    let client = rig.client().await;
    let token = ("pathways.token", Attribute::from("secret"));
    for (options, code, text) in [
        (vec![], Code::Unauthenticated, "PATHWAYS_TOKEN"),
        (vec![("pathways.token", Attribute::from("guess"))], Code::Unauthenticated, "PATHWAYS_TOKEN"),
        (vec![token.clone(), ("pathways.weight", Attribute::Int(0))], Code::InvalidArgument, "PATHWAYS_WEIGHT"),
        (vec![token.clone(), ("pathways.slice", Attribute::from("all"))], Code::InvalidArgument, "PATHWAYS_SLICE"),
    ] {
        let mut session = client.session(&options).await;
        session.send(Wire::InitRequest(pb::InitRequest {})).await;
        let status = session.error().await;
        assert_eq!((status.code, status.message.contains(text)), (code as i32, true), "{}", status.message);
        assert!(soon("the end", session.responses.message()).await.is_err());
    }
    let options = [token, ("pathways.name", "train".into()), ("pathways.weight", Attribute::Int(4)), ("pathways.slice", "2".into())];
    let mut session = client.session(&options).await;
    session.send(Wire::InitRequest(pb::InitRequest {})).await;
    // The refused ones were never opened.
    let Event::SessionOpened { session: id, options } = rig.event().await else { panic!("it was not opened") };
    assert_eq!(options, SessionOptions { name: "train".to_owned(), weight: 4, devices: Some(2) });
    // The core may refuse as well.
    rig.tell([ToEdge::SessionRefused { session: id, status: Status::new(Code::ResourceExhausted, "2 devices of 1") }]);
    assert_eq!(session.error().await.message, "2 devices of 1");
    assert!(matches!(rig.event().await, Event::SessionClosed { session, .. } if session == id));
}

#[tokio::test]
async fn requests_arrive_in_order_and_within_the_inbox() {
    const COUNT: u64 = 5 * INBOX as u64;
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = rig.session(&client).await;
    let id = session.id;
    let sender = tokio::spawn(async move {
        for array in 1..=COUNT {
            session.send(destruct(array)).await;
        }
        session
    });
    for array in 1..=COUNT {
        let event = rig.event().await;
        let Event::Request { session, op, request, bytes } = event else { panic!("{event:?}") };
        assert_eq!((session, op, request), (id, OpId(array + 1), Request::DestructArrays { arrays: vec![Handle(array)] }));
        assert!(bytes > 0);
        // In lumps, so that the reader has to wait.
        if array % 512 == 0 {
            rig.consume(id, 512);
        }
    }
    soon("the sender", sender).await.expect("it sent all");
    assert_eq!(rig.inbox_peak.load(Ordering::SeqCst), INBOX as usize);
}

#[tokio::test]
async fn sequence_numbers_and_user_contexts() {
    const COUNT: u64 = 100;
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = rig.session(&client).await;
    for array in 0..COUNT {
        // Every context is brought twice, some requests bring none.
        session.send_with(if array % 5 == 0 { 0 } else { 1000 + array / 2 }, destruct(array)).await;
    }
    let mut ops = Vec::new();
    for _ in 0..COUNT {
        ops.push(rig.request().await.1);
    }
    ops.reverse();
    for &op in &ops {
        let result = if op.0 % 3 == 0 { Err(Status::not_found("gone")) } else { Ok(Reply::DestructArrays) };
        rig.reply(session.id, op, result);
        // An answer too many is not sent.
        rig.reply(session.id, op, Ok(Reply::DestructArrays));
    }
    let mut seq = 1;
    let mut released = std::collections::BTreeMap::new();
    for &op in &ops {
        let response = session.response().await;
        let metadata = response.response_metadata.expect("always");
        assert_eq!(metadata.op_id, op.0);
        if response.response.is_some() {
            assert_eq!((metadata.seq_num, metadata.status.is_none()), (seq, true));
            seq += 1;
        } else {
            assert!(metadata.destroyed_user_context_ids.is_empty(), "clients ignore them there");
        }
        for id in metadata.destroyed_user_context_ids {
            *released.entry(id).or_insert(0) += 1;
        }
    }
    // One more answer, so that nothing is owed by the last errors.
    let op = session.send(destruct(COUNT)).await;
    rig.request().await;
    rig.reply(session.id, OpId(op), Ok(Reply::DestructArrays));
    for id in session.response().await.response_metadata.expect("always").destroyed_user_context_ids {
        *released.entry(id).or_insert(0) += 1;
    }
    let mut expected = std::collections::BTreeMap::new();
    for array in (0..COUNT).filter(|array| array % 5 != 0) {
        *expected.entry(1000 + array / 2).or_insert(0) += 1;
    }
    assert_eq!(released, expected);
}

#[tokio::test]
async fn a_user_context_returns_with_its_own_request() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = rig.session(&client).await;
    for context in [5, 6] {
        session.send_with(context, destruct(1)).await;
        let (id, op, _) = rig.request().await;
        rig.reply(id, op, Ok(Reply::DestructArrays));
        assert_eq!(session.response().await.response_metadata.expect("always").destroyed_user_context_ids, [context]);
    }
}

#[tokio::test]
async fn what_a_program_cannot_tell_stands_in_the_body() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = rig.session(&client).await;
    session.send_with(9, Wire::LoadedExecutableCostAnalysisRequest(Default::default())).await;
    let (id, op, asked) = rig.request().await;
    assert_eq!(asked, Request::Describe { executable: Handle(0), question: Question::Cost });
    rig.reply(id, op, Ok(untold()));
    let response = session.response().await;
    let Some(Body::LoadedExecutableCostAnalysisResponse(body)) = response.response else { panic!("{response:?}") };
    let Some(pb::loaded_executable_cost_analysis_response::Result::Status(status)) = body.result else { panic!("{body:?}") };
    assert_eq!(status.code, Code::NotFound as i32);
    assert_eq!(response.response_metadata.expect("always").destroyed_user_context_ids, [9]);
}

fn untold() -> Reply {
    Reply::Described { question: Question::Cost, result: Err(Status::not_found("no such program")) }
}

/// A request of a number that nobody knows.
#[derive(Clone, PartialEq, prost::Message)]
struct Unknown {
    #[prost(message, optional, tag = "1")]
    request_metadata: Option<pb::RequestMetadata>,
    #[prost(bytes = "vec", optional, tag = "2")]
    init: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "77")]
    unknown: Option<Vec<u8>>,
}

#[tokio::test]
async fn unknown_and_unserved_requests_are_refused_by_the_core() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = client.session_of::<Unknown>(&[]).await;
    let metadata = |op| Some(pb::RequestMetadata { op_id: op, user_context_id: 0 });
    let init = Unknown { request_metadata: metadata(1), init: Some(Vec::new()), unknown: None };
    session.requests.send(init).await.expect("it is open");
    let Event::SessionOpened { session: id, .. } = rig.event().await else { panic!("it was not opened") };
    rig.tell([ToEdge::SessionReady(SessionView {
        session: id,
        platform_name: String::new(),
        platform_version: String::new(),
        devices: Vec::new(),
    })]);
    session.response().await;
    session.requests.send(Unknown { request_metadata: metadata(2), init: None, unknown: Some(vec![1]) }).await.expect("it is open");
    let (_, op, request) = rig.request().await;
    let Request::Refused { status, results, .. } = request else { panic!("{request:?}") };
    assert_eq!((op, status.code, results.len()), (OpId(2), Code::Unimplemented, 0));
    assert!(status.message.contains("77"));
    rig.reply(id, op, Err(status));
    assert_eq!(session.error().await.code, Code::Unimplemented as i32);

    let mut session = rig.session(&client).await;
    session.send(Wire::ReshardArraysRequest(pb::ReshardArraysRequest { array_handles: vec![1], result_handles: vec![2, 3] })).await;
    let (_, _, request) = rig.request().await;
    let Request::Refused { status, results, .. } = request else { panic!("{request:?}") };
    assert_eq!((status.code, results), (Code::Unimplemented, vec![Handle(2), Handle(3)]));
    assert!(status.message.contains("ReshardArrays"));
}

#[tokio::test]
async fn sessions_close_once_and_end_with_a_reason() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    // The client goes.
    let session = rig.session(&client).await;
    let id = session.id;
    drop(session);
    assert!(matches!(rig.event().await, Event::SessionClosed { session, .. } if session == id));
    // The core ends it: what was answered before still arrives.
    let mut session = rig.session(&client).await;
    session.send(destruct(1)).await;
    let (id, op, _) = rig.request().await;
    let status = Status::new(Code::Aborted, "evicted");
    rig.tell([ToEdge::Reply { session: id, op, result: Err(status.clone()) }, ToEdge::CloseSession { session: id, status }]);
    assert_eq!(session.error().await.message, "evicted");
    assert_eq!(soon("the end", session.responses.message()).await.expect_err("it is over").message(), "evicted");
    assert!(matches!(rig.event().await, Event::SessionClosed { session, reason } if session == id && reason == "evicted"));
    // The same number twice.
    let mut session = rig.session(&client).await;
    let id = session.id;
    session.send(destruct(1)).await;
    rig.request().await;
    session.next_op -= 1;
    session.send(destruct(1)).await;
    assert!(matches!(rig.event().await, Event::SessionClosed { session, .. } if session == id));
    // A request before the first.
    let mut session = client.session(&[]).await;
    session.send(destruct(1)).await;
    assert!(soon("the end", session.responses.message()).await.is_err());
    // The edge goes: the core hangs up.
    let mut session = rig.session(&client).await;
    let id = session.id;
    drop(rig.to_edge);
    assert!(soon("the end of serving", rig.served).await.expect("it did not panic").is_ok());
    assert!(soon("the end", session.responses.message()).await.is_err());
    let closed = soon("an event", rig.events.recv()).await;
    assert!(matches!(closed, Some(Event::SessionClosed { session, .. }) if session == id), "{closed:?}");
}

#[tokio::test]
async fn garbage_on_the_port_harms_nobody() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let mut session = rig.session(&client).await;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..32 {
        let mut tcp = tokio::net::TcpStream::connect(&rig.address).await.expect("it listens");
        let mut data: Vec<u8> = if round % 2 == 0 { Vec::new() } else { b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec() };
        for _ in 0..200 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            data.push((random >> 33) as u8);
        }
        let _ = tcp.write_all(&data).await;
        let _ = tcp.shutdown().await;
        let _ = soon("the hang-up", tcp.read_to_end(&mut Vec::new())).await;
    }
    session.send(destruct(1)).await;
    let (id, op, _) = rig.request().await;
    rig.reply(id, op, Ok(Reply::DestructArrays));
    assert!(session.response().await.response.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_is_cut_off() {
    let config = EdgeConfig { unread_soft: 16 << 10, unread_wait: Duration::from_millis(50), ..EdgeConfig::default() };
    let mut rig = Rig::start(config).await;
    let client = rig.client().await;
    let session = rig.session(&client).await;
    let id = session.id;
    let sender = tokio::spawn(async move {
        // Answered at once, and never looked at.
        for op in 100.. {
            let wire = Wire::LoadedExecutableCostAnalysisRequest(Default::default());
            if session.requests.send(request(op, 0, wire)).await.is_err() {
                break;
            }
        }
        session
    });
    let (session, reason) = loop {
        match rig.event().await {
            Event::Request { session, op, .. } => {
                rig.reply(session, op, Ok(untold()));
                rig.consume(session, 1);
            }
            Event::SessionClosed { session, reason } => break (session, reason),
            event => panic!("{event:?}"),
        }
    };
    assert_eq!((session, reason.contains("does not read")), (id, true), "{reason}");
    drop(soon("the sender", sender).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_stops_only_its_own_reader() {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let client = rig.client().await;
    let flood = rig.session(&client).await;
    let flooding = flood.id;
    let sender = tokio::spawn(async move {
        for array in 1.. {
            let sent = flood.requests.send(request(array + 1, 0, destruct(array))).await;
            if sent.is_err() {
                break;
            }
        }
        flood
    });
    // The core takes nothing of it: the inbox fills to its bound.
    for _ in 0..INBOX {
        assert!(matches!(rig.event().await, Event::Request { session, .. } if session == flooding));
    }
    let other = rig.client().await;
    let mut session = rig.session(&other).await;
    for array in 0..100 {
        session.send(destruct(array)).await;
        let (id, op, _) = rig.request().await;
        assert_eq!(id, session.id);
        rig.reply(id, op, Ok(Reply::DestructArrays));
        session.response().await;
    }
    assert_eq!(rig.inbox_peak.load(Ordering::SeqCst), INBOX as usize + 1);
    // A paused session is not read either, and goes on afterwards.
    rig.tell([ToEdge::Pause { session: flooding, paused: true }]);
    rig.consume(flooding, INBOX);
    rig.tell([ToEdge::Pause { session: flooding, paused: false }]);
    assert!(matches!(rig.event().await, Event::Request { session, .. } if session == flooding));
    sender.abort();
}
