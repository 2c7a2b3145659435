//! TCP connections that break: nothing is lost, or the end is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use pw_net::NetError;
use pw_net::data::{DataClient, DownloadSource, FIRST_BYTES};
use pw_types::{Code, Handle, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::proxy::Proxy;
use crate::world::*;
use crate::{OTHER, S, put};

const CUTS: usize = 40;

/// First what fits into one frame, so that their order can be told, then others.
const SIZES: [usize; 14] =
    [0, 1, 37, 4095, 4096, 40_000, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, 200_001, 1 << 20, (1 << 20) + 65_000, 2_500_000, 7 << 20];

fn whats_sent(seed: u64) -> BTreeMap<Handle, Bytes> {
    let small = (0..150).map(|i| i * 11);
    let sizes = small.chain(SIZES).chain(SIZES).enumerate();
    sizes.map(|(i, size)| (Handle(i as u64), pattern(size, (seed + i as u64) as u8))).collect()
}

async fn storm(seed: u64) {
    let mut world = World::start().await;
    let proxy = Proxy::start(&world.address, seed, CUTS).await;
    world.address.clone_from(&proxy.address);
    let client = loop {
        // The first greeting is not tried again.
        if let Ok(client) = world.connect().await {
            break client;
        }
    };
    client.attach(S).await.unwrap();
    let data = whats_sent(seed);
    for (buffer, data) in &data {
        world.offer(S, *buffer, data.clone());
    }
    let uploads = tokio::spawn({
        let (client, data) = (client.clone(), data.clone());
        async move {
            for (buffer, data) in &data {
                put(&client, S, *buffer, data, 300_000).await;
            }
        }
    });
    let others = tokio::spawn({
        let client = client.clone();
        async move {
            for _ in 0..50 {
                client.attach(OTHER).await.unwrap();
                client.detach(OTHER).await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    });
    let mut came: BTreeMap<Handle, Vec<u8>> = BTreeMap::new();
    let mut missing: usize = data.values().map(Bytes::len).sum();
    while missing > 0 || came.len() < data.len() {
        match world.download().await {
            Download::Offered(S, buffer, total) => {
                assert_eq!(total, data[&buffer].len() as u64);
                assert_eq!(buffer.0, came.len() as u64, "offers came in another order");
                came.insert(buffer, Vec::new());
                client.pull(S, buffer, total / 2).await.unwrap();
                client.pull(S, buffer, total).await.unwrap();
            }
            Download::Chunk(S, buffer, bytes) => {
                missing -= bytes.len();
                came.get_mut(&buffer).unwrap().extend_from_slice(&bytes);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(came.iter().all(|(buffer, bytes)| *bytes == data[buffer]), "seed {seed}: downloads differ");
    deadline(uploads).await.unwrap();
    deadline(others).await.unwrap();
    let (mut landed, mut left) = (BTreeMap::new(), 0);
    let mut last = None;
    while landed.len() < data.len() || left < 50 {
        match world.upload().await {
            Upload::Landed(S, buffer, bytes) => {
                assert!(bytes == data[&buffer], "seed {seed}: bytes of {buffer} differ");
                if bytes.len() < FIRST_BYTES && buffer.0 < 150 {
                    assert!(last < Some(buffer), "uploads came in another order");
                    last = Some(buffer);
                }
                assert_eq!(landed.insert(buffer, ()), None);
            }
            Upload::Detached(OTHER) => left += 1,
            other => panic!("{other:?}"),
        }
    }
    world.until_done(data.len()).await;
    assert!(world.is_silent());
    assert!(proxy.cuts_made() >= 10, "only {} cuts", proxy.cuts_made());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cuts_at_any_byte_lose_nothing() {
    for seed in 0..12 {
        storm(seed).await;
    }
}

/// Both sides have nothing to say when it happens.
#[tokio::test]
async fn an_idle_connection_is_cut() {
    let mut world = World::start().await;
    let proxy = Proxy::start(&world.address, 0, 0).await;
    world.address.clone_from(&proxy.address);
    let client = world.connect().await.unwrap();
    client.attach(S).await.unwrap();
    client.put_begin(S, Handle(1), 200_000).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(200_000, 1).slice(..100_000)).await.unwrap();
    for turn in 2..12 {
        world.offer(S, Handle(turn), pattern(10, 1));
        assert_eq!(world.download().await, Download::Offered(S, Handle(turn), 10));
        assert_eq!(world.bytes(S, Handle(turn), 10).await, pattern(10, 1));
        proxy.cut();
        put(&client, S, Handle(turn), &pattern(20, turn as u8), 20).await;
        assert_eq!(world.upload().await, Upload::Landed(S, Handle(turn), pattern(20, turn as u8)));
    }
    client.put_chunk(S, Handle(1), pattern(200_000, 1).slice(100_000..)).await.unwrap();
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(1), pattern(200_000, 1)));
    assert!(world.is_silent());
    drop(client);
    assert_eq!(world.upload().await, Upload::Detached(S));
}

/// What stays broken ends as a connection does: each side says so once.
#[tokio::test]
async fn a_connection_that_does_not_come_back() {
    let mut world = World::start().await;
    let proxy = Proxy::start(&world.address, 0, 0).await;
    world.address.clone_from(&proxy.address);
    let client = world.connect().await.unwrap();
    client.attach(S).await.unwrap();
    client.put_begin(S, Handle(1), 100).await.unwrap();
    client.put_chunk(S, Handle(1), pattern(50, 0)).await.unwrap();
    world.offer(S, Handle(2), pattern(1 << 20, 1));
    assert_eq!(world.download().await, Download::Offered(S, Handle(2), 1 << 20));
    world.bytes(S, Handle(2), FIRST_BYTES).await;
    proxy.block();
    // Taken as long as there is hope.
    client.attach(S).await.unwrap();
    match world.download().await {
        Download::Disconnected(reason) => assert!(reason.contains("could not be reached again within 10 s"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(deadline(client.attach(S)).await, Err(NetError::Closed { .. })));
    match world.upload().await {
        Upload::Failed(S, Handle(1), Status { code: Code::Unavailable, message, .. }) => {
            assert!(message.contains("did not come back within 10 s"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.upload().await, Upload::Detached(S));
    world.until_done(1).await;
    assert!(world.is_silent());
}

/// Its owner does not wait for what may come back.
#[tokio::test]
async fn a_broken_connection_is_closed() {
    let mut world = World::start().await;
    let proxy = Proxy::start(&world.address, 0, 0).await;
    world.address.clone_from(&proxy.address);
    let client = world.connect().await.unwrap();
    client.attach(S).await.unwrap();
    client.put_begin(S, Handle(1), 1 << 29).await.unwrap();
    proxy.block();
    let putter = tokio::spawn({
        let client = client.clone();
        async move {
            let data = pattern(1 << 20, 0);
            loop {
                if let Err(error) = client.put_chunk(S, Handle(1), data.clone()).await {
                    return error;
                }
            }
        }
    });
    client.detach(OTHER).await.unwrap();
    client.close();
    let error = deadline(putter).await.unwrap();
    assert!(matches!(error, NetError::Closed { .. }), "{error}");
    assert!(world.is_silent());
}

/// Another worker has come in the place of the one that was connected to.
#[tokio::test]
async fn another_worker_does_not_know_the_connection() {
    let mut world = World::start().await;
    let other = World::start().await;
    let proxy = Proxy::start(&world.address, 0, 0).await;
    world.address.clone_from(&proxy.address);
    let client = world.connect().await.unwrap();
    client.attach(S).await.unwrap();
    proxy.lead_to(&other.address);
    proxy.cut();
    let Download::Disconnected(reason) = world.download().await else { panic!("the end was not told") };
    assert!(reason.ends_with("refused the connection: this worker does not know the connection, or has given it up"), "{reason}");
    let error = deadline(client.attach(S)).await.unwrap_err();
    assert!(error.to_string().ends_with("or has given it up"), "{error}");
}

/// What a worker answers to the beginning of a connection.
async fn refusal(world: &World, bytes: &[u8]) -> String {
    String::from_utf8_lossy(&deadline(raw(&world.address, bytes)).await).into_owned()
}

#[tokio::test]
async fn names_and_counts_are_checked() {
    let (mut world, client) = World::connected(S).await;
    let mut held = TcpStream::connect(&world.address).await.unwrap();
    held.write_all(&[greeting(1, 77, 0), frame(4, 0, OTHER.0, 0, 0), frame(6, 2, OTHER.0, 1, 2)].concat()).await.unwrap();
    let mut welcome = [0; 40];
    deadline(held.read_exact(&mut welcome)).await.unwrap();
    for (bytes, expected) in [
        (greeting(13, 78, 0), "this worker does not know the connection, or has given it up"),
        (greeting(13, 77, 5), "it wants to go on behind byte 5; 0 were acknowledged and 0 sent before"),
        (greeting(1, 77, 0), "there is a connection 77 already"),
        ([&greeting(13, 77, 0)[..45], b"T"].concat(), "the token is wrong"),
    ] {
        let answer = refusal(&world, &bytes).await;
        assert!(answer.contains(expected), "{answer:?} has no {expected:?}");
    }
    // Nobody has noticed; one that knows the name and the counts goes on.
    held.write_all(b"a").await.unwrap();
    let mut again = TcpStream::connect(&world.address).await.unwrap();
    again.write_all(&greeting(13, 77, 0)).await.unwrap();
    deadline(again.read_exact(&mut welcome)).await.unwrap();
    let received = u64::from_le_bytes(std::array::from_fn(|i| welcome[32 + i]));
    assert!(received == 64 || received == 65, "{received}");
    again.write_all(&b"ab"[received as usize - 64..]).await.unwrap();
    assert_eq!(world.upload().await, Upload::Landed(OTHER, Handle(1), Bytes::from_static(b"ab")));
    put(&client, S, Handle(1), &pattern(10, 1), 10).await;
    assert_eq!(world.upload().await, Upload::Landed(S, Handle(1), pattern(10, 1)));
}

/// Takes a greeting and answers it; gives the connection and how many bytes the edge has of an earlier one.
async fn accept(listener: &TcpListener, received: u64) -> (TcpStream, u64) {
    let (mut tcp, _) = listener.accept().await.unwrap();
    let mut start = [0; 46];
    tcp.read_exact(&mut start[..8]).await.unwrap();
    tcp.write_all(&start[..8]).await.unwrap();
    tcp.read_exact(&mut start[8..]).await.unwrap();
    tcp.write_all(&frame(2, 0, 0, 0, received)).await.unwrap();
    (tcp, u64::from_le_bytes(std::array::from_fn(|i| start[32 + i])))
}

#[tokio::test]
async fn a_worker_that_counts_wrongly_loses_its_edge() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let worker = tokio::spawn(async move {
        let (mut tcp, _) = accept(&listener, 0).await;
        tcp.write_all(&frame(14, 0, 0, 0, 9)).await.unwrap();
        let mut rest = Vec::new();
        tcp.read_to_end(&mut rest).await.unwrap();
        drop(accept(&listener, 0).await);
        let (mut tcp, received) = accept(&listener, 1 << 40).await;
        assert_eq!(received, 0);
        let _ = tcp.read_to_end(&mut rest).await;
    });
    let (sink, mut downloads) = sink();
    for reason in [
        "it broke the protocol: it acknowledges 9 bytes, of 0 that were sent",
        "it ended; it broke the protocol: it wants to go on behind byte 1099511627776; 0 were acknowledged and 0 sent before",
    ] {
        let client = deadline(DataClient::connect(&address, "secret", Arc::clone(&sink))).await.unwrap();
        assert_eq!(deadline(downloads.recv()).await, Some(Download::Disconnected(reason.to_owned())));
        drop(client);
    }
    deadline(worker).await.unwrap();
}

/// A worker that reads and never says so stops the one who puts, and only until it does.
#[tokio::test]
async fn what_is_kept_has_a_bound() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let worker = tokio::spawn(async move { accept(&listener, 0).await.0 });
    let (sink, _downloads) = sink();
    let client = deadline(DataClient::connect(&address, "secret", sink)).await.unwrap();
    let (mut from, mut to) = deadline(worker).await.unwrap().into_split();
    let read = Arc::new(AtomicU64::new(0));
    tokio::spawn({
        let read = Arc::clone(&read);
        async move {
            let mut piece = vec![0; 1 << 20];
            while let Ok(count @ 1..) = from.read(&mut piece).await {
                read.fetch_add(count as u64, Ordering::SeqCst);
            }
        }
    });
    let accepted = Arc::new(AtomicUsize::new(0));
    tokio::spawn({
        let (client, accepted) = (client.clone(), Arc::clone(&accepted));
        async move {
            client.put_begin(S, Handle(1), 1 << 40).await.unwrap();
            let data = pattern(1 << 20, 0);
            while client.put_chunk(S, Handle(1), data.clone()).await.is_ok() {
                accepted.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    // Some 16 MiB are kept and 8 wait.
    for round in 1..=3 {
        let least = (round * 15) << 20;
        let (mut before, mut last) = (0, 0);
        let stops = async {
            while before < least || before != last {
                last = before;
                tokio::time::sleep(Duration::from_millis(300)).await;
                before = read.load(Ordering::SeqCst);
            }
        };
        deadline(stops).await;
        assert!(before < least + ((round * 3) << 20), "round {round}: {before} bytes were written");
        assert!(accepted.load(Ordering::SeqCst) < round as usize * 18 + 10);
        to.write_all(&frame(14, 0, 0, 0, before)).await.unwrap();
    }
}

/// Nothing but an acknowledgement lets go of a source: of a transfer's end, or of what came before it was given up.
#[tokio::test]
async fn sources_are_let_go() {
    let (mut world, client) = World::connected(S).await;
    for (i, size) in [100, FIRST_BYTES, FIRST_BYTES + 1, 3_000_000, 500_000].into_iter().enumerate() {
        let buffer = Handle(i as u64);
        let source: Arc<dyn DownloadSource> = Arc::new(pattern(size, 1));
        let weak = Arc::downgrade(&source);
        world.server().offer(S, buffer, source, Box::new(|| ()));
        assert_eq!(world.download().await, Download::Offered(S, buffer, size as u64));
        if size == 500_000 {
            world.bytes(S, buffer, FIRST_BYTES).await;
            client.drop_download(S, buffer).await.unwrap();
        } else {
            client.pull(S, buffer, size as u64).await.unwrap();
            assert!(world.bytes(S, buffer, size).await == pattern(size, 1));
        }
        let gone = async {
            while weak.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        deadline(gone).await;
    }
}
