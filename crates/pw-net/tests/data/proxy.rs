//! A TCP proxy that cuts connections, by order or behind a number of bytes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub(crate) struct Proxy {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

struct Shared {
    target: Mutex<String>,
    plan: Mutex<Plan>,
    /// Counts the cuts by order.
    cut: watch::Sender<usize>,
}

#[derive(Default)]
struct Plan {
    state: u64,
    /// Connections that will be cut by themselves.
    cuts_left: usize,
    cuts_made: usize,
    blocked: bool,
}

impl Plan {
    /// From 16 bytes to 2 MiB, each size of number as likely as any other.
    fn draw(&mut self) -> usize {
        let mut random = || {
            self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        let top = 16_usize << (random() % 17);
        top + random() as usize % top
    }
}

impl Proxy {
    /// Cuts the first `cuts` connections, each behind a number of bytes that the seed gives.
    pub(crate) async fn start(target: &str, seed: u64, cuts: usize) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let plan = Plan { state: seed, cuts_left: cuts, ..Plan::default() };
        let shared = Arc::new(Shared { target: Mutex::new(target.to_owned()), plan: Mutex::new(plan), cut: watch::Sender::new(0) });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        Proxy { address, shared }
    }

    pub(crate) fn cuts_made(&self) -> usize {
        self.shared.plan.lock().unwrap().cuts_made
    }

    /// Cuts all connections.
    pub(crate) fn cut(&self) {
        self.shared.cut.send_modify(|cuts| *cuts += 1);
    }

    /// Cuts all connections, and each that comes.
    pub(crate) fn block(&self) {
        self.shared.plan.lock().unwrap().blocked = true;
        self.cut();
    }

    pub(crate) fn lead_to(&self, target: &str) {
        *self.shared.target.lock().unwrap() = target.to_owned();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let cut = shared.cut.subscribe();
        let behind = {
            let mut plan = shared.plan.lock().unwrap();
            if plan.blocked {
                continue;
            }
            let cuts = plan.cuts_left > 0;
            plan.cuts_left -= usize::from(cuts);
            if cuts { [plan.draw(), plan.draw()] } else { [usize::MAX; 2] }
        };
        let target = shared.target.lock().unwrap().clone();
        tokio::spawn(pass(client, target, behind, cut, Arc::clone(&shared)));
    }
}

async fn pass(mut client: TcpStream, target: String, behind: [usize; 2], mut cut: watch::Receiver<usize>, shared: Arc<Shared>) {
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    let is_cut = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            is_cut = pump(from_client, to_server, behind[0]) => is_cut,
            is_cut = pump(from_server, to_client, behind[1]) => is_cut,
            _ = cut.changed() => true,
        }
    };
    if is_cut {
        shared.plan.lock().unwrap().cuts_made += 1;
        // With whatever is on its way.
        for end in [&client, &server] {
            socket2::SockRef::from(end).set_linger(Some(Duration::ZERO)).unwrap();
        }
    }
}

/// True where it stopped by itself.
async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut left: usize) -> bool {
    let mut piece = vec![0; 32 << 10];
    while left > 0 {
        let most = left.min(piece.len());
        let Ok(count @ 1..) = from.read(&mut piece[..most]).await else { return false };
        if to.write_all(&piece[..count]).await.is_err() {
            return false;
        }
        left -= count;
    }
    true
}
