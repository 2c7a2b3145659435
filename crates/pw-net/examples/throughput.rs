//! GB/s of the data plane on loopback, beside a plain socket that copies nothing: `cargo run --release --example throughput`.
//! Put, pull and plain take turns; the median of each is printed. Not a test.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pw_net::data::{DataClient, DataServer, DownloadSink, UploadSink, UploadTarget};
use pw_types::{Handle, SessionId, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const S: SessionId = SessionId(1);
const SIZE: usize = 256 << 20;
const CHUNK: usize = 1 << 20;
const WINDOW: u64 = 8 << 20;
const ROUNDS: usize = 9;
const SMALL: usize = 2000;

struct Uploads {
    spare: std::sync::Mutex<Vec<Box<dyn UploadTarget>>>,
    landed: mpsc::UnboundedSender<()>,
}

impl UploadSink for Uploads {
    fn begin(&self, _: SessionId, _: Handle, total: u64) -> Result<Box<dyn UploadTarget>, Status> {
        // Memory that was used before, as in a pool.
        let spare = if total == SIZE as u64 { self.spare.lock().unwrap().pop() } else { None };
        Ok(spare.unwrap_or_else(|| Box::new(vec![1; total as usize])))
    }

    fn landed(&self, _: SessionId, _: Handle, mut target: Box<dyn UploadTarget>) {
        if target.bytes().len() == SIZE {
            self.spare.lock().unwrap().push(target);
        }
        let _ = self.landed.send(());
    }

    fn failed(&self, _: SessionId, _: Handle, status: Status) {
        panic!("{status}");
    }

    fn detached(&self, _: SessionId) {}
}

struct Downloads(mpsc::UnboundedSender<usize>);

impl DownloadSink for Downloads {
    fn offered(&self, _: SessionId, _: Handle, _: u64) {}

    fn chunk(&self, _: SessionId, _: Handle, data: Bytes) {
        let _ = self.0.send(data.len());
    }

    fn failed(&self, _: SessionId, _: Handle, status: Status) {
        panic!("{status}");
    }

    fn disconnected(&self, _: &str) {}
}

struct Bench {
    client: DataClient,
    server: DataServer,
    landed: mpsc::UnboundedReceiver<()>,
    chunks: mpsc::UnboundedReceiver<usize>,
    next: u64,
}

impl Bench {
    async fn put(&mut self, data: &Bytes) -> Duration {
        let start = Instant::now();
        self.next += 1;
        self.client.put_begin(S, Handle(self.next), data.len() as u64).await.unwrap();
        for at in (0..data.len()).step_by(CHUNK) {
            let piece = data.slice(at..data.len().min(at + CHUNK));
            self.client.put_chunk(S, Handle(self.next), piece).await.unwrap();
        }
        self.landed.recv().await.unwrap();
        start.elapsed()
    }

    async fn pull(&mut self, data: &Bytes) -> Duration {
        let start = Instant::now();
        self.next += 1;
        self.server.offer(S, Handle(self.next), Arc::new(data.clone()), Box::new(|| ()));
        let mut allowed = 64 << 10;
        let mut received = 0;
        while received < data.len() {
            if allowed < data.len() as u64 && allowed < received as u64 + WINDOW {
                self.client.pull(S, Handle(self.next), WINDOW / 2).await.unwrap();
                allowed += WINDOW / 2;
                continue;
            }
            received += self.chunks.recv().await.unwrap();
        }
        start.elapsed()
    }
}

async fn plain(data: &Bytes) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let reader = tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await.unwrap();
        let mut place = vec![1; CHUNK];
        for _ in 0..SIZE / CHUNK {
            tcp.read_exact(&mut place).await.unwrap();
        }
    });
    let mut tcp = TcpStream::connect(address).await.unwrap();
    let start = Instant::now();
    for at in (0..SIZE).step_by(CHUNK) {
        tcp.write_all(&data[at..at + CHUNK]).await.unwrap();
    }
    reader.await.unwrap();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::main]
async fn main() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (landed_in, landed) = mpsc::unbounded_channel();
    let (chunks_in, chunks) = mpsc::unbounded_channel();
    let uploads = Uploads { spare: std::sync::Mutex::default(), landed: landed_in };
    let server = DataServer::start(listener, String::new(), Arc::new(uploads));
    let client = DataClient::connect(&address, "", Arc::new(Downloads(chunks_in))).await.unwrap();
    client.attach(S).await.unwrap();
    let mut bench = Bench { client, server, landed, chunks, next: 0 };
    let data = Bytes::from(vec![7; SIZE]);
    let (mut puts, mut pulls, mut plains) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        puts.push(bench.put(&data).await);
        pulls.push(bench.pull(&data).await);
        plains.push(plain(&data).await);
    }
    for (name, times) in [("put", puts), ("pull", pulls), ("plain socket", plains)] {
        let time = median(times);
        println!("{name:>12}: {:.2} GB/s", SIZE as f64 / time.as_secs_f64() / 1e9);
    }
    let small = data.slice(..4);
    let (mut puts, mut pulls) = (Vec::new(), Vec::new());
    for _ in 0..SMALL {
        puts.push(bench.put(&small).await);
        pulls.push(bench.pull(&small).await);
    }
    println!("   put of 4 B: {:?} until landed", median(puts));
    println!("  offer of 4 B: {:?} until delivered", median(pulls));
}
