//! Host buffers: uploads in every order, parked ones, failures; downloads.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pw_edge::EdgeConfig;
use pw_proto::ifrt::pb;
use pw_types::*;
use support::*;

/// An edge with a session and a worker in slot 0.
async fn start(config: EdgeConfig) -> (Rig, Client, Session, Worker) {
    let mut rig = Rig::start(config).await;
    let worker = Worker::start(0).await;
    rig.tell([worker.up()]);
    let client = rig.client().await;
    let session = rig.session(&client).await;
    (rig, client, session, worker)
}

#[tokio::test]
async fn the_store_may_come_first_or_last() {
    let (rig, client, session, mut worker) = start(EdgeConfig::default()).await;
    let data = pattern(1, 300_000);
    // Completely before anybody asks.
    soon("the store", client.store_all(session.id, 1, &data, 100_000)).await.expect("no panic").expect("stored");
    rig.tell([route(session.id, 1, 300_000, &[0])]);
    assert_eq!(worker.next().await, Landed::Bytes(Handle(1), data.to_vec()));
    // Asked for first.
    rig.tell([route(session.id, 2, 300_000, &[0])]);
    soon("the store", client.store_all(session.id, 2, &data, 7_777)).await.expect("no panic").expect("stored");
    assert_eq!(worker.next().await, Landed::Bytes(Handle(2), data.to_vec()));
    // Asked for in the middle: the rest goes through as it comes.
    let (pieces, call) = client.store(session.id, 3, 300_000);
    pieces.send(data.slice(..100_000)).expect("it is open");
    rig.tell([route(session.id, 3, 300_000, &[0])]);
    pieces.send(data.slice(100_000..)).expect("it is open");
    drop(pieces);
    soon("the store", call).await.expect("no panic").expect("stored");
    assert_eq!(worker.next().await, Landed::Bytes(Handle(3), data.to_vec()));
    // Empty.
    soon("the store", client.store_all(session.id, 4, &Bytes::new(), 1)).await.expect("no panic").expect("stored");
    rig.tell([route(session.id, 4, 0, &[0])]);
    assert_eq!(worker.next().await, Landed::Bytes(Handle(4), Vec::new()));
}

#[tokio::test]
async fn several_workers_get_each_their_copy() {
    let (rig, client, session, mut first) = start(EdgeConfig::default()).await;
    let mut second = Worker::start(1).await;
    let data = pattern(2, 3_000_000);
    // The second is not connected when it is asked for.
    rig.tell([second.up(), route(session.id, 1, 3_000_000, &[0, 1])]);
    soon("the store", client.store_all(session.id, 1, &data, 1 << 20)).await.expect("no panic").expect("stored");
    for worker in [&mut first, &mut second] {
        assert!(worker.next().await == Landed::Bytes(Handle(1), data.to_vec()));
    }
}

#[tokio::test]
async fn discarded_buffers_are_swallowed() {
    let (rig, client, session, mut worker) = start(EdgeConfig { parked_bytes: 2 << 20, ..EdgeConfig::default() }).await;
    let data = pattern(3, 8 << 20);
    let id = session.id;
    let discard = |buffer| ToEdge::Discard { session: id, buffer: Handle(buffer) };
    // Before it comes.
    rig.tell([discard(1)]);
    soon("the store", client.store_all(session.id, 1, &data, 1 << 20)).await.expect("no panic").expect("swallowed");
    // While it is parked, beyond what may lie there.
    let call = client.store_all(session.id, 2, &data, 1 << 20);
    rig.tell([discard(2)]);
    soon("the store", call).await.expect("no panic").expect("swallowed");
    // After it came: its room is free again for others.
    for buffer in 10..20 {
        soon("the store", client.store_all(session.id, buffer, &data.slice(..1 << 20), 1 << 20)).await.expect("no panic").expect("stored");
        rig.tell([discard(buffer)]);
    }
    soon("the store", client.store_all(session.id, 3, &data.slice(..10), 10)).await.expect("no panic").expect("stored");
    rig.tell([route(session.id, 3, 10, &[0])]);
    assert_eq!(worker.next().await, Landed::Bytes(Handle(3), data[..10].to_vec()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_uploads_do_not_starve_the_one_that_is_needed() {
    const PARKED: u64 = 65;
    const SIZE: usize = 4 << 20;
    let (rig, client, session, mut worker) = start(EdgeConfig { parked_bytes: 8 << 20, ..EdgeConfig::default() }).await;
    let data = pattern(4, SIZE);
    let calls: Vec<_> = (1..=PARKED).map(|handle| client.store_all(session.id, handle, &data, 1 << 20)).collect();
    // The 66th, on the same connection, is the one that the head of the session needs.
    let needed = client.store_all(session.id, 1000, &data, 1 << 20);
    rig.tell([route(session.id, 1000, SIZE as u64, &[0])]);
    soon("the store", needed).await.expect("no panic").expect("stored");
    assert!(worker.next().await == Landed::Bytes(Handle(1000), data.to_vec()));
    assert!(calls.iter().any(|call| !call.is_finished()), "they cannot all fit");
    // Then the others, in another order.
    for handle in (1..=PARKED).rev() {
        rig.tell([route(session.id, handle, SIZE as u64, &[0])]);
        let Landed::Bytes(got, bytes) = worker.next().await else { panic!("it failed") };
        assert_eq!((got, bytes == data), (Handle(handle), true));
    }
    for call in calls {
        soon("the store", call).await.expect("no panic").expect("stored");
    }
}

#[tokio::test]
async fn wrong_sizes_are_data_loss() {
    let (mut rig, client, session, mut worker) = start(EdgeConfig::default()).await;
    let id = session.id;
    let failed = |event: Event, handle| match event {
        Event::HostBufferFailed { session, buffer, status } if session == id && buffer == Handle(handle) => status,
        other => panic!("{other:?}"),
    };
    // Fewer and more bytes than announced, asked for before, in the middle and after.
    for (handle, announced, sent) in [(1, 100, 50), (2, 100, 150), (3, 0, 1)] {
        if handle == 1 {
            rig.tell([route(id, handle, announced as u64, &[0])]);
        }
        let (pieces, call) = client.store(id, handle, announced);
        pieces.send(pattern(5, sent)).expect("it is open");
        drop(pieces);
        let status = soon("the store", call).await.expect("no panic").expect_err("the size is wrong");
        assert_eq!(status.code(), tonic::Code::DataLoss, "{status}");
        assert_eq!(failed(rig.event().await, handle).code, Code::DataLoss);
        if handle != 1 {
            rig.tell([route(id, handle, announced as u64, &[0])]);
        }
        let Landed::Failed(buffer, status) = worker.next().await else { panic!("it landed") };
        assert_eq!((buffer, status.code), (Handle(handle), Code::DataLoss));
    }
    // As announced, but not what the array needs.
    rig.tell([route(id, 4, 99, &[0])]);
    let status =
        soon("the store", client.store_all(id, 4, &pattern(5, 100), 100)).await.expect("no panic").expect_err("not what is needed");
    assert_eq!(status.code(), tonic::Code::DataLoss);
    assert!(failed(rig.event().await, 4).message.contains("100 bytes where its array needs 99"));
    assert!(matches!(worker.next().await, Landed::Failed(Handle(4), _)));
    // Broken off.
    let (pieces, call) = client.store(id, 5, 100);
    pieces.send(pattern(5, 10)).expect("it is open");
    rig.tell([route(id, 5, 100, &[0])]);
    while soon("the upload", worker.begun.recv()).await != Some(Handle(5)) {}
    call.abort();
    drop(pieces);
    failed(rig.event().await, 5);
    assert!(matches!(worker.next().await, Landed::Failed(Handle(5), _)));
    // Twice the same, or of nobody.
    soon("the store", client.store_all(id, 6, &pattern(5, 10), 10)).await.expect("no panic").expect("stored");
    let status = soon("the store", client.store_all(id, 6, &pattern(5, 10), 10)).await.expect("no panic").expect_err("it is there");
    assert_eq!(status.code(), tonic::Code::AlreadyExists);
    let status =
        soon("the store", client.store_all(SessionId(1), 6, &pattern(5, 10), 10)).await.expect("no panic").expect_err("no session");
    assert_eq!(status.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_worker_that_cannot_be_reached_fails_its_uploads() {
    let (mut rig, client, session, _worker) = start(EdgeConfig { connect_wait: Duration::from_millis(100), ..EdgeConfig::default() }).await;
    let failure = async |rig: &mut Rig| match rig.event().await {
        Event::HostBufferFailed { buffer, status, .. } => (buffer, status.code),
        other => panic!("{other:?}"),
    };
    // Nobody listens there.
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").to_string();
    rig.tell([ToEdge::WorkerUp { slot: HostSlot(1), incarnation: Incarnation(1), data_address: nobody }, route(session.id, 1, 10, &[1])]);
    // The client is not punished for it.
    soon("the store", client.store_all(session.id, 1, &pattern(6, 10), 10)).await.expect("no panic").expect("stored");
    assert_eq!(failure(&mut rig).await, (Handle(1), Code::Unavailable));
    // Down while it is waited for.
    rig.tell([ToEdge::WorkerDown { slot: HostSlot(1), incarnation: Incarnation(1) }, route(session.id, 2, 10, &[1])]);
    soon("the store", client.store_all(session.id, 2, &pattern(6, 10), 10)).await.expect("no panic").expect("stored");
    assert_eq!(failure(&mut rig).await, (Handle(2), Code::Unavailable));
}

#[tokio::test]
async fn downloads_wait_at_the_worker() {
    let (mut rig, client, mut session, worker) = start(EdgeConfig::default()).await;
    let id = session.id;
    let offer = |buffer, data: &Bytes| worker.server.offer(id, Handle(buffer), Arc::new(data.clone()), Box::new(|| ()));
    let sizes = [0usize, 4, 70_000, 20 << 20];
    for (buffer, size) in (1u64..).zip(sizes) {
        session.send(copy_to_host(500, buffer)).await;
        let (id, op, request) = rig.request().await;
        assert!(matches!(request, Request::CopyToHost { host_buffer, .. } if host_buffer == Handle(buffer)));
        let data = pattern(buffer, size);
        if buffer % 2 == 0 {
            offer(buffer, &data);
            rig.reply(id, op, Ok(Reply::CopyToHost));
            session.response().await;
            assert!(client.lookup(id, buffer).await.expect("it is offered") == data);
        } else {
            // Looked up before it is offered.
            rig.reply(id, op, Ok(Reply::CopyToHost));
            session.response().await;
            let early = tokio::spawn({
                let client = client.clone();
                async move { client.lookup(id, buffer).await }
            });
            offer(buffer, &data);
            assert!(soon("the lookup", early).await.expect("no panic").expect("it is offered") == data);
        }
        assert_eq!(client.lookup(id, buffer).await.expect_err("it is gone").code(), tonic::Code::NotFound);
    }
    assert_eq!(client.lookup(session.id, 77).await.expect_err("never asked for").code(), tonic::Code::NotFound);
    assert_eq!(client.lookup(SessionId(5), 1).await.expect_err("no session").code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn downloads_fail_with_their_reason_or_are_dropped() {
    let config = EdgeConfig { offer_wait: Duration::from_millis(50), ..EdgeConfig::default() };
    let (mut rig, client, mut session, worker) = start(config).await;
    let id = session.id;
    let ask = async |rig: &mut Rig, session: &mut Session, buffer, result: Result<Reply, Status>| {
        session.send(copy_to_host(500, buffer)).await;
        let (id, op, _) = rig.request().await;
        rig.reply(id, op, result);
        session.response().await;
    };
    // The worker cannot give it.
    ask(&mut rig, &mut session, 1, Ok(Reply::CopyToHost)).await;
    worker.server.offer_failed(id, Handle(1), Status::new(Code::ResourceExhausted, "no memory for it"));
    let status = client.lookup(id, 1).await.expect_err("it failed");
    assert_eq!((status.code(), status.message()), (tonic::Code::ResourceExhausted, "no memory for it"));
    // The core says no: nothing is waited for.
    ask(&mut rig, &mut session, 2, Err(Status::not_found("no array"))).await;
    assert_eq!(client.lookup(id, 2).await.expect_err("refused").code(), tonic::Code::NotFound);
    // Deleted: the worker may free it.
    ask(&mut rig, &mut session, 3, Ok(Reply::CopyToHost)).await;
    let (done, freed) = tokio::sync::oneshot::channel();
    worker.server.offer(id, Handle(3), Arc::new(pattern(7, 1 << 20)), Box::new(move || done.send(()).unwrap_or(())));
    let asked = pb::GrpcHostBufferDeleteRequest { session_id: id.0, handle: 3 };
    let path = "/xla.ifrt.proxy.GrpcIfrtService/HostBufferDelete";
    client.unary::<_, pb::GrpcHostBufferDeleteResponse>(path, asked).await.expect("it may always be deleted");
    soon("the memory", freed).await.expect("it is told");
    // The worker is lost in the middle of it.
    ask(&mut rig, &mut session, 4, Ok(Reply::CopyToHost)).await;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.lookup(id, 4).await }
    });
    worker.server.offer(id, Handle(4), Arc::new(pattern(8, 16 << 20)), Box::new(|| ()));
    rig.tell([ToEdge::WorkerDown { slot: HostSlot(0), incarnation: Incarnation(1) }]);
    // It may have been quicker than the news.
    if let Err(status) = soon("the lookup", waiting).await.expect("no panic") {
        assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    }
}

#[tokio::test]
async fn a_session_that_ends_leaves_nothing_behind() {
    let (mut rig, client, mut session, mut worker) = start(EdgeConfig { parked_bytes: 1 << 20, ..EdgeConfig::default() }).await;
    let id = session.id;
    let parked = client.store_all(id, 1, &pattern(9, 8 << 20), 1 << 20);
    let (open, unfinished) = client.store(id, 2, 100);
    rig.tell([route(id, 2, 100, &[0])]);
    session.send(copy_to_host(500, 3)).await;
    rig.request().await;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.lookup(id, 3).await }
    });
    drop(session);
    assert!(matches!(rig.event().await, Event::SessionClosed { session, .. } if session == id));
    for call in [parked, unfinished] {
        assert!(soon("the store", call).await.expect("no panic").is_err());
    }
    assert!(soon("the lookup", waiting).await.expect("no panic").is_err());
    drop(open);
    loop {
        match worker.next().await {
            Landed::Detached(session) => break assert_eq!(session, id),
            Landed::Failed(..) => {}
            Landed::Bytes(..) => panic!("nothing was complete"),
        }
    }
    // Its number means nothing any more.
    rig.tell([route(id, 9, 1, &[0])]);
    assert_eq!(
        soon("the store", client.store_all(id, 9, &pattern(9, 1), 1)).await.expect("no panic").expect_err("it is over").code(),
        tonic::Code::NotFound
    );
}

#[tokio::test]
async fn a_shared_directory_is_not_served() {
    let (_rig, client, session, _worker) = start(EdgeConfig::default()).await;
    let asked = pb::GrpcHostBufferLookupRequest { session_id: session.id.0, handle: 1 };
    let path = "/xla.ifrt.proxy.GrpcIfrtService/HostBufferReadFromDisk";
    let status = client.unary::<_, pb::GrpcHostBufferStoreResponse>(path, asked).await.expect_err("not served");
    assert_eq!(status.code(), tonic::Code::Unimplemented);
}
