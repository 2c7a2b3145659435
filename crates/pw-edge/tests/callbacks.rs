//! Host callbacks: the channel of a client, calls and answers through it, and how they end without one.

mod support;

use std::sync::Arc;

use bytes::Bytes;
use pw_edge::EdgeConfig;
use pw_proto::ifrt::Attribute;
use pw_types::*;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CALL: u32 = 1;
const DATA: u32 = 2;
const CANCEL: u32 = 3;
const ANSWER: u32 = 4;
const ERROR: u32 = 5;

/// The client's end of a channel.
struct Channel(TcpStream);

impl Channel {
    /// The number and the text of the answer to the greeting come with it.
    async fn greet(rig: &Rig, session: SessionId, token: &[u8]) -> (Channel, u32, String) {
        let mut tcp = TcpStream::connect(&rig.callbacks).await.expect("the edge listens");
        let hello = [b"PWCALLS1", &session.0.to_le_bytes()[..], &(token.len() as u32).to_le_bytes(), token].concat();
        tcp.write_all(&hello).await.expect("it reads");
        let mut answer = [0; 8];
        soon("a greeting", tcp.read_exact(&mut answer)).await.expect("it answers");
        assert_eq!(&answer, b"PWCALLS1");
        let code = tcp.read_u32_le().await.expect("a number");
        let mut text = vec![0; tcp.read_u32_le().await.expect("a length") as usize];
        tcp.read_exact(&mut text).await.expect("a text");
        (Channel(tcp), code, String::from_utf8(text).expect("it is one"))
    }

    async fn open(rig: &Rig, session: SessionId) -> Channel {
        let (channel, code, text) = Channel::greet(rig, session, b"").await;
        assert_eq!((code, &*text), (0, ""));
        channel
    }

    async fn frame(&mut self) -> (u32, u64, Vec<u8>) {
        let tcp = &mut self.0;
        let kind = soon("a frame", tcp.read_u32_le()).await.expect("the channel lives");
        let length = tcp.read_u32_le().await.expect("a length");
        let call = tcp.read_u64_le().await.expect("a call");
        let mut body = vec![0; length as usize];
        tcp.read_exact(&mut body).await.expect("a body");
        (kind, call, body)
    }

    /// A whole call.
    async fn call(&mut self) -> (u64, Vec<u8>) {
        let (kind, call, body) = self.frame().await;
        assert_eq!(kind, CALL);
        let total = u64::from_le_bytes(body[..8].try_into().expect("eight bytes")) as usize;
        let mut got = body[8..].to_vec();
        while got.len() < total {
            let (kind, of, body) = self.frame().await;
            assert_eq!((kind, of), (DATA, call));
            got.extend(body);
        }
        assert_eq!(got.len(), total);
        (call, got)
    }

    async fn send(&mut self, kind: u32, call: u64, body: &[u8]) {
        let head = [&kind.to_le_bytes()[..], &(body.len() as u32).to_le_bytes(), &call.to_le_bytes(), body].concat();
        self.0.write_all(&head).await.expect("it reads");
    }

    async fn answer(&mut self, call: u64, bytes: &[u8]) {
        let first = bytes.len().min(1000);
        self.send(ANSWER, call, &[&(bytes.len() as u64).to_le_bytes()[..], &bytes[..first]].concat()).await;
        for piece in bytes[first..].chunks(1 << 20) {
            self.send(DATA, call, piece).await;
        }
    }

    async fn ends(mut self) {
        let mut rest = Vec::new();
        let _ = soon("the end of the channel", self.0.read_to_end(&mut rest)).await;
    }
}

fn name(number: u64) -> Handle {
    Handle(FIRST_CALL_HANDLE | number)
}

fn offer(worker: &Worker, session: SessionId, number: u64, bytes: &Bytes) {
    worker.server.offer(session, name(number), Arc::new(bytes.clone()), Box::new(|| {}));
}

async fn start() -> (Rig, Client, Session, Worker) {
    let mut rig = Rig::start(EdgeConfig::default()).await;
    let worker = Worker::start(0).await;
    rig.tell([worker.up()]);
    let client = rig.client().await;
    let session = rig.session(&client).await;
    (rig, client, session, worker)
}

#[tokio::test]
async fn calls_and_answers_go_through() {
    let (rig, _client, session, mut worker) = start().await;
    let mut channel = Channel::open(&rig, session.id).await;
    for (number, size, answer) in [(0, 16, 0), (1, 100_000, 5), (2, 20 << 20, 30 << 20)] {
        let (call, back) = (pattern(number, size), pattern(number + 100, answer));
        offer(&worker, session.id, number, &call);
        let (id, got) = channel.call().await;
        assert!(got == call);
        channel.answer(id, &back).await;
        assert!(worker.next().await == Landed::Bytes(name(number), back.to_vec()));
    }
    // Several at once, answered the other way round; the text of an error.
    for number in [10, 11, 12] {
        offer(&worker, session.id, number, &pattern(number, 300_000));
    }
    let mut ids = Vec::new();
    while ids.len() < 3 {
        let (kind, id, _) = channel.frame().await;
        if kind == CALL {
            ids.push(id);
        }
    }
    channel.send(ERROR, ids[2], "ValueError: user bug".as_bytes()).await;
    let Landed::Failed(_, status) = worker.next().await else { panic!("an answer") };
    assert_eq!((status.code, &*status.message), (Code::Internal, "ValueError: user bug"));
    for id in [ids[1], ids[0]] {
        channel.answer(id, b"four").await;
        assert!(matches!(worker.next().await, Landed::Bytes(_, bytes) if bytes == b"four"));
    }
    // Nobody has made this one.
    channel.answer(999, b"four").await;
    offer(&worker, session.id, 13, &pattern(0, 16));
    while channel.frame().await.0 != CALL {}
}

#[tokio::test]
async fn without_a_channel_a_call_fails() {
    let (rig, _client, session, mut worker) = start().await;
    offer(&worker, session.id, 1, &pattern(1, 300_000));
    let Landed::Failed(failed, status) = worker.next().await else { panic!("an answer") };
    assert_eq!((failed, status.code), (name(1), Code::FailedPrecondition));
    // One that breaks fails what it had, also an answer that has begun; another one serves again.
    let mut channel = Channel::open(&rig, session.id).await;
    for number in [2, 3] {
        offer(&worker, session.id, number, &pattern(number, 16));
    }
    let (first, _) = channel.call().await;
    channel.call().await;
    channel.send(ANSWER, first, &[&100u64.to_le_bytes()[..], b"begun"].concat()).await;
    drop(channel);
    for _ in 0..2 {
        let Landed::Failed(_, status) = worker.next().await else { panic!("an answer") };
        assert_eq!(status.code, Code::Unavailable);
    }
    let mut channel = Channel::open(&rig, session.id).await;
    offer(&worker, session.id, 4, &pattern(4, 16));
    let (id, _) = channel.call().await;
    channel.answer(id, b"again").await;
    assert_eq!(worker.next().await, Landed::Bytes(name(4), b"again".to_vec()));
}

#[tokio::test]
async fn a_channel_needs_its_session_and_token() {
    let mut rig = Rig::start(EdgeConfig { token: Some("secret".into()), ..EdgeConfig::default() }).await;
    let client = rig.client().await;
    let mut session = client.session(&[("pathways.token", Attribute::from("secret"))]).await;
    session.send(Wire::InitRequest(Default::default())).await;
    let Event::SessionOpened { session: id, .. } = rig.event().await else { panic!("no session") };
    let (_, code, text) = Channel::greet(&rig, id, b"wrong").await;
    assert_eq!(code, Code::Unauthenticated as u32, "{text}");
    let (_, code, _) = Channel::greet(&rig, SessionId(id.0 ^ 1), b"secret").await;
    assert_eq!(code, Code::NotFound as u32);
    let (channel, code, _) = Channel::greet(&rig, id, b"secret").await;
    assert_eq!(code, 0);
    // It ends with the session.
    drop(session);
    channel.ends().await;
}

#[tokio::test]
async fn what_breaks_the_protocol_ends_the_channel() {
    let (rig, _client, session, mut worker) = start().await;
    for (kind, call, body) in [(9, 0, &b""[..]), (ANSWER, 0, b"short"), (CALL, 0, b"")] {
        let mut channel = Channel::open(&rig, session.id).await;
        channel.send(kind, call, body).await;
        channel.ends().await;
    }
    let mut channel = Channel::open(&rig, session.id).await;
    offer(&worker, session.id, 1, &pattern(1, 16));
    let (id, _) = channel.call().await;
    channel.send(ANSWER, id, &[&2u64.to_le_bytes()[..], b"too long"].concat()).await;
    assert!(matches!(worker.next().await, Landed::Failed(..)));
    channel.ends().await;
}

#[tokio::test]
async fn a_worker_that_is_lost_cancels_its_calls() {
    let (rig, _client, session, worker) = start().await;
    let mut channel = Channel::open(&rig, session.id).await;
    // More than the edge lets through before the client reads.
    offer(&worker, session.id, 1, &pattern(1, 256 << 20));
    let (kind, call, _) = channel.frame().await;
    assert_eq!(kind, CALL);
    rig.tell([ToEdge::WorkerDown { slot: worker.slot, incarnation: Incarnation(1) }]);
    drop(worker);
    loop {
        match channel.frame().await {
            (DATA, of, _) if of == call => {}
            other => break assert_eq!(other, (CANCEL, call, Vec::new())),
        }
    }
}
