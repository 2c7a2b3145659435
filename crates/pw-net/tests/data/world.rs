//! A worker's data server and what its sink and an edge's sink hear, as channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use pw_net::NetError;
use pw_net::data::{DataClient, DataServer, DownloadSink, UploadSink, UploadTarget};
use pw_types::{Handle, SessionId, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

pub(crate) async fn deadline<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("the test is stuck")
}

/// Bytes that differ from place to place, and from seed to seed.
pub(crate) fn pattern(length: usize, seed: u8) -> Bytes {
    let mut bytes = Vec::with_capacity(length + 8);
    let mut word = u64::from(seed) << 56;
    while bytes.len() < length {
        bytes.extend_from_slice(&word.to_le_bytes());
        word += 1;
    }
    bytes.truncate(length);
    bytes.into()
}

#[derive(PartialEq, Debug)]
pub(crate) enum Upload {
    Landed(SessionId, Handle, Bytes),
    Refused(SessionId, Handle),
    Failed(SessionId, Handle, Status),
    Detached(SessionId),
}

#[derive(PartialEq, Debug)]
pub(crate) enum Download {
    Offered(SessionId, Handle, u64),
    Chunk(SessionId, Handle, Bytes),
    Failed(SessionId, Handle, Status),
    Disconnected(String),
}

struct Uploads(mpsc::UnboundedSender<Upload>);

impl UploadSink for Uploads {
    fn begin(&self, session: SessionId, buffer: Handle, total: u64) -> Result<Box<dyn UploadTarget>, Status> {
        if total > 1 << 30 {
            let _ = self.0.send(Upload::Refused(session, buffer));
            return Err(Status::internal("too big"));
        }
        Ok(Box::new(vec![0; total as usize]))
    }

    fn landed(&self, session: SessionId, buffer: Handle, target: Box<dyn UploadTarget>) {
        let data = target.into_any().downcast::<Vec<u8>>().unwrap();
        let _ = self.0.send(Upload::Landed(session, buffer, Bytes::from(*data)));
    }

    fn failed(&self, session: SessionId, buffer: Handle, status: Status) {
        let _ = self.0.send(Upload::Failed(session, buffer, status));
    }

    fn detached(&self, session: SessionId) {
        let _ = self.0.send(Upload::Detached(session));
    }
}

struct Downloads(mpsc::UnboundedSender<Download>);

impl DownloadSink for Downloads {
    fn offered(&self, session: SessionId, buffer: Handle, total: u64) {
        let _ = self.0.send(Download::Offered(session, buffer, total));
    }

    fn chunk(&self, session: SessionId, buffer: Handle, data: Bytes) {
        assert!(!data.is_empty());
        let _ = self.0.send(Download::Chunk(session, buffer, data));
    }

    fn failed(&self, session: SessionId, buffer: Handle, status: Status) {
        let _ = self.0.send(Download::Failed(session, buffer, status));
    }

    fn disconnected(&self, reason: &str) {
        let _ = self.0.send(Download::Disconnected(reason.to_owned()));
    }
}

pub(crate) fn sink() -> (Arc<dyn DownloadSink>, mpsc::UnboundedReceiver<Download>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Arc::new(Downloads(sender)), receiver)
}

/// Offers from any thread, counting those that are done.
#[derive(Clone)]
pub(crate) struct Offers {
    server: DataServer,
    done: Arc<AtomicUsize>,
}

impl Offers {
    pub(crate) fn offer(&self, session: SessionId, buffer: Handle, data: Bytes) {
        let done = Arc::clone(&self.done);
        let count = move || {
            done.fetch_add(1, Ordering::SeqCst);
        };
        self.server.offer(session, buffer, Arc::new(data), Box::new(count));
    }
}

pub(crate) struct World {
    pub(crate) address: String,
    offers: Option<Offers>,
    done: Arc<AtomicUsize>,
    uploads: mpsc::UnboundedReceiver<Upload>,
    sink: Arc<dyn DownloadSink>,
    downloads: mpsc::UnboundedReceiver<Download>,
}

impl World {
    /// A worker.
    pub(crate) async fn start() -> World {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, uploads) = mpsc::unbounded_channel();
        let server = DataServer::start(listener, "secret".to_owned(), Arc::new(Uploads(sender)));
        let (sink, downloads) = sink();
        let done = Arc::new(AtomicUsize::new(0));
        let offers = Some(Offers { server, done: Arc::clone(&done) });
        World { address, offers, done, uploads, sink, downloads }
    }

    /// A worker and an edge that is attached to one session.
    pub(crate) async fn connected(session: SessionId) -> (World, DataClient) {
        let world = World::start().await;
        let client = world.connect().await.unwrap();
        client.attach(session).await.unwrap();
        (world, client)
    }

    pub(crate) async fn connect(&self) -> Result<DataClient, NetError> {
        deadline(DataClient::connect(&self.address, "secret", self.sink())).await
    }

    pub(crate) fn sink(&self) -> Arc<dyn DownloadSink> {
        Arc::clone(&self.sink)
    }

    pub(crate) fn offers(&self) -> Offers {
        self.offers.clone().expect("the server was stopped")
    }

    pub(crate) fn server(&self) -> DataServer {
        self.offers().server
    }

    pub(crate) fn stop_server(&mut self) {
        self.offers = None;
    }

    pub(crate) fn offer(&self, session: SessionId, buffer: Handle, data: Bytes) {
        self.offers().offer(session, buffer, data);
    }

    pub(crate) async fn upload(&mut self) -> Upload {
        deadline(self.uploads.recv()).await.unwrap()
    }

    pub(crate) async fn download(&mut self) -> Download {
        deadline(self.downloads.recv()).await.unwrap()
    }

    /// Nothing more was heard.
    pub(crate) fn is_silent(&mut self) -> bool {
        self.downloads.is_empty() && self.uploads.is_empty()
    }

    /// The next bytes of one download; nothing else may come in between, nor more than these.
    pub(crate) async fn bytes(&mut self, session: SessionId, buffer: Handle, length: usize) -> Bytes {
        let mut all = Vec::new();
        while all.len() < length {
            match self.download().await {
                Download::Chunk(s, b, data) if (s, b) == (session, buffer) => all.extend_from_slice(&data),
                other => panic!("{other:?} in place of bytes of {buffer}"),
            }
        }
        assert_eq!(all.len(), length, "bytes without credit");
        all.into()
    }

    pub(crate) fn done(&self) -> usize {
        self.done.load(Ordering::SeqCst)
    }

    pub(crate) async fn until_done(&self, count: usize) {
        let wait = async {
            while self.done() < count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        deadline(wait).await;
        assert_eq!(self.done(), count);
    }
}

/// A frame as it lies on the wire, without its body.
pub(crate) fn frame(kind: u8, body: u32, session: u64, buffer: u64, value: u64) -> Vec<u8> {
    let mut bytes = vec![b'P', kind, 0, 0];
    bytes.extend(body.to_le_bytes());
    bytes.extend([session, buffer, value].iter().flat_map(|n| n.to_le_bytes()));
    bytes
}

/// The beginning of a connection with this name and the token "secret"; `kind` 1 = a new one, 13 = one that broke.
pub(crate) fn greeting(kind: u8, name: u64, received: u64) -> Vec<u8> {
    [b"PWDATA\x02\x00", &frame(kind, 6, name, 0, received)[..], b"secret"].concat()
}

/// Sends bytes on a connection of its own and reads until the other side ends it.
pub(crate) async fn raw(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut tcp = TcpStream::connect(address).await.unwrap();
    let _ = tcp.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = tcp.read_to_end(&mut answer).await;
    answer
}
