//! The data plane over real sockets. Values are checked, never times.

mod broken;
mod proxy;
mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use pw_net::NetError;
use pw_net::data::{DataClient, FIRST_BYTES};
use pw_types::{Cause, Code, Handle, SessionId, Status};
use world::*;

const S: SessionId = SessionId(0x5e55_1011);
const OTHER: SessionId = SessionId(7);

async fn put(client: &DataClient, session: SessionId, buffer: Handle, data: &Bytes, chunk: usize) {
    client.put_begin(session, buffer, data.len() as u64).await.unwrap();
    let mut rest = data.clone();
    while !rest.is_empty() {
        let piece = rest.split_to(chunk.min(rest.len()));
        client.put_chunk(session, buffer, piece).await.unwrap();
    }
}

/// 200 MiB lands identical while 200 small ones pass it by.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_big_upload_and_small_ones() {
    let (mut world, client) = World::connected(S).await;
    let big = pattern(200 << 20, 1);
    let upload = tokio::spawn({
        let (client, big) = (client.clone(), big.clone());
        async move { put(&client, S, Handle(1), &big, 1_000_003).await }
    });
    let small: Vec<Bytes> = (0..200).map(|i| pattern(i * 37, i as u8)).collect();
    for (i, data) in small.iter().enumerate() {
        put(&client, S, Handle(1000 + i as u64), data, 1000).await;
    }
    deadline(upload).await.unwrap();
    let mut landed = Vec::new();
    for _ in 0..201 {
        match world.upload().await {
            Upload::Landed(S, buffer, data) => {
                let expected = if buffer == Handle(1) { &big } else { &small[buffer.0 as usize - 1000] };
                assert!(data == *expected, "bytes of {buffer} differ");
                landed.push(buffer);
            }
            other => panic!("{other:?}"),
        }
    }
    landed.sort();
    landed.dedup();
    assert_eq!(landed.len(), 201);
}

/// An upload that never ends, and one that is refused, do not stop others; the refused one's bytes are thrown away.
#[tokio::test]
async fn unfinished_and_refused_uploads_stop_nobody() {
    let (mut world, client) = World::connected(S).await;
    let data = pattern(3 << 20, 5);
    client.put_begin(S, Handle(1), 1 << 40).await.unwrap();
    client.put_chunk(S, Handle(1), data.slice(..100)).await.unwrap();
    client.put_begin(S, Handle(2), 1 << 20).await.unwrap();
    client.put_chunk(S, Handle(2), data.slice(..10)).await.unwrap();
    put(&client, S, Handle(3), &data, 1 << 20).await;
    // Both `1 << 40` and this one are more than the sink of these tests allows.
    assert_eq!(world.upload().await, Upload::Refused(S, Handle(1)));
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(3), data.clone()));
    client.put_chunk(S, Handle(2), data.slice(10..1 << 20)).await.unwrap();
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(2), data.slice(..1 << 20)));
}

#[tokio::test]
async fn an_upload_is_given_up() {
    let (mut world, client) = World::connected(S).await;
    let status = Status::new(Code::Aborted, "the stream broke").with_cause(Cause::Cancelled);
    client.put_begin(S, Handle(1), 100).await.unwrap();
    client.put_chunk(S, Handle(1), Bytes::from_static(b"abc")).await.unwrap();
    client.put_abort(S, Handle(1), status.clone()).await.unwrap();
    assert_eq!(world.upload().await, Upload::Failed(S, Handle(1), status.clone()));
    let error = client.put_chunk(S, Handle(1), Bytes::from_static(b"abc")).await.unwrap_err();
    assert!(error.to_string().contains("upload of host buffer 1 of session 1582632977 to"), "{error}");
    // One that never began still has somebody waiting for it.
    client.put_abort(S, Handle(2), status.clone()).await.unwrap();
    assert_eq!(world.upload().await, Upload::Failed(S, Handle(2), status));
    // The name is free again.
    put(&client, S, Handle(1), &pattern(10, 0), 10).await;
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(1), pattern(10, 0)));
}

#[tokio::test]
async fn misuse_of_an_upload_is_refused_here() {
    let (mut world, client) = World::connected(S).await;
    client.put_begin(S, Handle(1), 4).await.unwrap();
    assert!(matches!(client.put_begin(S, Handle(1), 4).await, Err(NetError::Upload { .. })));
    assert!(matches!(client.put_chunk(S, Handle(1), pattern(5, 0)).await, Err(NetError::Upload { .. })));
    assert!(matches!(client.put_chunk(S, Handle(9), pattern(1, 0)).await, Err(NetError::Upload { .. })));
    client.put_chunk(S, Handle(1), Bytes::new()).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(4, 3)).await.unwrap();
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(1), pattern(4, 3)));
}

/// The first bytes come by themselves, the rest with credit and never more than that.
#[tokio::test]
async fn a_download_with_credit() {
    let (mut world, client) = World::connected(S).await;
    let data = pattern(5_000_000, 9);
    world.offer(S, Handle(1), data.clone());
    assert_eq!(world.download().await, Download::Offered(S, Handle(1), 5_000_000));
    assert_eq!(world.bytes(S, Handle(1), FIRST_BYTES).await, data[..FIRST_BYTES]);
    let mut at = FIRST_BYTES;
    for credit in [1, 100, 1_000_000, 3_000_000] {
        client.pull(S, Handle(1), credit as u64).await.unwrap();
        // `bytes` fails where more come than asked for.
        assert_eq!(world.bytes(S, Handle(1), credit).await, data[at..at + credit]);
        at += credit;
    }
    assert_eq!(world.done(), 0);
    client.pull(S, Handle(1), u64::MAX).await.unwrap();
    client.pull(S, Handle(1), u64::MAX).await.unwrap();
    assert_eq!(world.bytes(S, Handle(1), data.len() - at).await, data[at..]);
    world.until_done(1).await;
}

#[tokio::test]
async fn small_and_empty_downloads_need_no_credit() {
    let (mut world, _client) = World::connected(S).await;
    for (i, size) in [0, 1, FIRST_BYTES].into_iter().enumerate() {
        let buffer = Handle(i as u64);
        world.offer(S, buffer, pattern(size, 2));
        assert_eq!(world.download().await, Download::Offered(S, buffer, size as u64));
        if size > 0 {
            assert_eq!(world.bytes(S, buffer, size).await, pattern(size, 2));
        }
        world.until_done(i + 1).await;
    }
}

/// Five hundred downloads that nobody reads, then one that is read; offers from a thread outside of any runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_downloads_stop_nobody() {
    let (mut world, client) = World::connected(S).await;
    let unread = pattern(FIRST_BYTES + 1, 3);
    let data = pattern(20 << 20, 4);
    let offers = world.offers();
    let (a, b) = (unread.clone(), data.clone());
    std::thread::spawn(move || {
        for i in 0..500 {
            offers.offer(S, Handle(i), a.clone());
        }
        offers.offer(S, Handle(7777), b);
    })
    .join()
    .unwrap();
    for i in 0..500 {
        assert_eq!(world.download().await, Download::Offered(S, Handle(i), unread.len() as u64));
        assert_eq!(world.bytes(S, Handle(i), FIRST_BYTES).await, unread[..FIRST_BYTES]);
    }
    assert_eq!(world.download().await, Download::Offered(S, Handle(7777), data.len() as u64));
    client.pull(S, Handle(7777), data.len() as u64).await.unwrap();
    assert!(world.bytes(S, Handle(7777), data.len()).await == data, "the bytes differ");
    world.until_done(1).await;
    // Dropped ones are done; the last of the others still comes.
    for i in 0..499 {
        client.drop_download(S, Handle(i)).await.unwrap();
    }
    world.until_done(500).await;
    client.pull(S, Handle(499), 1).await.unwrap();
    assert_eq!(world.bytes(S, Handle(499), 1).await, unread[FIRST_BYTES..]);
    world.until_done(501).await;
}

#[tokio::test]
async fn offers_wait_for_their_session() {
    let (mut world, client) = World::connected(S).await;
    let status = Status::new(Code::DataLoss, "poisoned");
    world.offer(OTHER, Handle(1), pattern(10, 1));
    world.server().offer_failed(OTHER, Handle(2), status.clone());
    world.offer(S, Handle(3), pattern(10, 3));
    assert_eq!(world.download().await, Download::Offered(S, Handle(3), 10));
    assert_eq!(world.bytes(S, Handle(3), 10).await, pattern(10, 3));
    client.attach(OTHER).await.unwrap();
    let mut got = [world.download().await, world.download().await, world.download().await];
    got.sort_by_key(|download| matches!(download, Download::Failed(..)));
    assert_eq!(got[0], Download::Offered(OTHER, Handle(1), 10));
    assert_eq!(got[1], Download::Chunk(OTHER, Handle(1), pattern(10, 1)));
    assert_eq!(got[2], Download::Failed(OTHER, Handle(2), status));
    world.until_done(2).await;
}

#[tokio::test]
async fn a_failed_offer_ends_the_download() {
    let (mut world, client) = World::connected(S).await;
    let status = Status::new(Code::DataLoss, "lost");
    world.offer(S, Handle(1), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(1), 1 << 20));
    world.bytes(S, Handle(1), FIRST_BYTES).await;
    world.server().offer_failed(S, Handle(1), status.clone());
    assert_eq!(world.download().await, Download::Failed(S, Handle(1), status));
    world.until_done(1).await;
    client.pull(S, Handle(1), 1 << 20).await.unwrap();
    world.offer(S, Handle(2), pattern(1, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 1));
}

#[tokio::test]
async fn a_session_that_leaves_takes_its_transfers_along() {
    let (mut world, client) = World::connected(S).await;
    client.attach(OTHER).await.unwrap();
    client.put_begin(S, Handle(1), 100).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(50, 0)).await.unwrap();
    client.put_begin(OTHER, Handle(1), 100).await.unwrap();
    client.put_chunk(OTHER, Handle(1), pattern(50, 0)).await.unwrap();
    world.offer(S, Handle(2), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 1 << 20));
    world.bytes(S, Handle(2), FIRST_BYTES).await;
    client.detach(S).await.unwrap();
    assert!(matches!(world.upload().await, Upload::Failed(S, Handle(1), Status { code: Code::Cancelled, .. })));
    assert_eq!(world.upload().await, Upload::Detached(S));
    world.until_done(1).await;
    // What comes late is not kept.
    world.offer(S, Handle(3), pattern(10, 1));
    world.until_done(2).await;
    client.put_chunk(OTHER, Handle(1), pattern(50, 0)).await.unwrap();
    assert!(matches!(world.upload().await, Upload::Landed(OTHER, Handle(1), _)));
    // The session may come back.
    client.attach(S).await.unwrap();
    client.put_begin(S, Handle(9), 0).await.unwrap();
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(9), Bytes::new()));
    world.offer(S, Handle(4), pattern(10, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(4), 10));
}

#[tokio::test]
async fn a_worker_forgets_a_session() {
    let (world, _client) = World::connected(S).await;
    world.offer(OTHER, Handle(1), pattern(10, 1));
    world.server().forget(OTHER);
    world.until_done(1).await;
    world.offer(OTHER, Handle(2), pattern(10, 1));
    world.until_done(2).await;
}

#[tokio::test]
async fn an_edge_that_vanishes() {
    let (mut world, client) = World::connected(S).await;
    client.put_begin(S, Handle(1), 100).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(50, 0)).await.unwrap();
    world.offer(S, Handle(2), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 1 << 20));
    world.bytes(S, Handle(2), FIRST_BYTES).await;
    let second = client.clone();
    drop(client);
    second.attach(S).await.unwrap();
    drop(second);
    assert!(matches!(world.upload().await, Upload::Failed(S, Handle(1), Status { code: Code::Unavailable, .. })));
    assert_eq!(world.upload().await, Upload::Detached(S));
    world.until_done(1).await;
    // Its sink hears nothing more: it went by itself. A new edge is served.
    let _client = world.connect().await.unwrap();
    world.offer(OTHER, Handle(1), pattern(1, 1));
    assert_eq!(world.done(), 1);
}

#[tokio::test]
async fn a_worker_that_vanishes() {
    let (mut world, client) = World::connected(S).await;
    world.offer(S, Handle(2), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 1 << 20));
    world.bytes(S, Handle(2), FIRST_BYTES).await;
    world.stop_server();
    assert_eq!(world.download().await, Download::Disconnected("it ended".to_owned()));
    let error = deadline(client.attach(S)).await.unwrap_err();
    assert!(error.to_string().ends_with("is closed: it ended"), "{error}");
    assert!(matches!(deadline(client.put_begin(S, Handle(1), 5)).await, Err(NetError::Closed { .. })));
    world.until_done(1).await;
}

/// The newest edge of a session has it; what the other one had under way is dropped.
#[tokio::test]
async fn an_edge_takes_a_session_over() {
    let (mut world, first) = World::connected(S).await;
    world.offer(S, Handle(1), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(1), 1 << 20));
    world.bytes(S, Handle(1), FIRST_BYTES).await;
    let second = world.connect().await.unwrap();
    second.attach(S).await.unwrap();
    world.until_done(1).await;
    drop(first);
    world.offer(S, Handle(2), pattern(10, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 10));
}

#[tokio::test]
async fn a_wrong_token() {
    let (world, _client) = World::connected(S).await;
    for token in ["", "secreT", "secret "] {
        let error = deadline(DataClient::connect(&world.address, token, world.sink())).await.err().unwrap();
        assert_eq!(error.to_string(), format!("{} refused the connection: the token is wrong", world.address));
    }
}

#[tokio::test]
async fn garbage_ends_its_own_connection_only() {
    let (mut world, client) = World::connected(S).await;
    client.put_begin(S, Handle(1), 10).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(5, 1)).await.unwrap();
    let with = |rest: Vec<Vec<u8>>| [greeting(1, 1, 0), rest.concat()].concat();
    let attach = frame(4, 0, OTHER.0, 0, 0);
    let cases = [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".to_vec(),
        b"PWDATA\x09\x00".to_vec(),
        [b"PWDATA\x02\x00", &[0xff; 64][..]].concat(),
        with(vec![vec![0xff; 64]]),
        with(vec![attach.clone(), vec![b'P'; 64]]),
        with(vec![frame(200, 0, 0, 0, 0)]),
        with(vec![frame(9, 0, 0, 0, 0)]),
        // Bytes of an upload that has not begun, one that begins twice, one with too many.
        with(vec![frame(7, 1, 0, 5, 0), vec![0]]),
        with(vec![frame(6, 0, 0, 5, 9), frame(6, 0, 0, 5, 9)]),
        with(vec![frame(6, 2, 0, 5, 3), vec![0, 0], frame(7, 2, 0, 5, 0), vec![0, 0]]),
        with(vec![frame(6, 0, 0, 5, 3), frame(7, u32::MAX, 0, 5, 0)]),
        // More acknowledged than was sent.
        with(vec![frame(14, 0, 0, 0, 1)]),
    ];
    for bytes in cases {
        let answer = deadline(raw(&world.address, &bytes)).await;
        // A greeting, a welcome and an end.
        assert!(answer.len() <= 72, "{}", answer.escape_ascii());
    }
    // Whatever those had begun has failed, and this connection lives.
    client.put_chunk(S, Handle(1), pattern(5, 1)).await.unwrap();
    loop {
        match world.upload().await {
            Upload::Failed(SessionId(0), ..) | Upload::Detached(OTHER) => {}
            Upload::Landed(S, Handle(1), data) => break assert_eq!(data.len(), 10),
            other => panic!("{other:?}"),
        }
    }
}

/// A worker that sends garbage loses its edge.
#[tokio::test]
async fn garbage_from_a_worker() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await.unwrap();
        let mut greeting = [0; 8];
        tcp.read_exact(&mut greeting).await.unwrap();
        tcp.write_all(&greeting).await.unwrap();
        let mut hello = [0; 38];
        tcp.read_exact(&mut hello).await.unwrap();
        let mut welcome = [0; 32];
        welcome[..2].copy_from_slice(&[b'P', 2]);
        tcp.write_all(&welcome).await.unwrap();
        tcp.write_all(&[b'x'; 100]).await.unwrap();
        // Until the edge has gone.
        let _ = tcp.read(&mut hello).await;
    });
    let (sink, mut downloads) = sink();
    let client = deadline(DataClient::connect(&address, "secret", sink)).await.unwrap();
    let reason = "it broke the protocol: no frame begins with \"xxxxxxxx\"";
    assert_eq!(deadline(downloads.recv()).await, Some(Download::Disconnected(reason.to_owned())));
    assert!(deadline(client.pull(S, Handle(1), 1)).await.is_err());
}

/// A worker that does not read stops the one who puts, and only until it is dropped.
#[tokio::test]
async fn back_pressure() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let worker = tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await.unwrap();
        let mut start = [0; 46];
        tcp.read_exact(&mut start[..8]).await.unwrap();
        tcp.write_all(&start[..8]).await.unwrap();
        tcp.read_exact(&mut start[8..]).await.unwrap();
        let mut welcome = [0; 32];
        welcome[..2].copy_from_slice(&[b'P', 2]);
        tcp.write_all(&welcome).await.unwrap();
        tcp
    });
    let (sink, _downloads) = sink();
    let client = deadline(DataClient::connect(&address, "secret", sink)).await.unwrap();
    let _worker = deadline(worker).await.unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let putter = tokio::spawn({
        let (client, accepted) = (client.clone(), Arc::clone(&accepted));
        async move {
            client.put_begin(S, Handle(1), 1 << 40).await.unwrap();
            let data = pattern(1 << 20, 0);
            loop {
                match client.put_chunk(S, Handle(1), data.clone()).await {
                    Ok(()) => accepted.fetch_add(1, Ordering::Relaxed),
                    Err(error) => return error,
                };
            }
        }
    });
    // Sockets hold a few MiB, our queue 8: far from the TiB that would be accepted without a bound.
    let mut before = usize::MAX;
    while before != accepted.load(Ordering::Relaxed) {
        before = accepted.load(Ordering::Relaxed);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    }
    assert!(before < 100, "{before} MiB accepted");
    client.put_abort(S, Handle(1), Status::internal("enough")).await.unwrap();
    let error = deadline(putter).await.unwrap();
    assert!(matches!(error, NetError::Upload { .. }), "{error}");
}
