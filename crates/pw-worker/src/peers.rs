//! Moves to other workers: shards go from where they lie in memory over the other's data plane, worker to worker.
//!
//! A few connections per worker, its lanes, each dialed when it is first needed and again when it is gone; large items
//! take turns over them. A send ends when all its bytes are in the hands of the connections; each part of a buffer is
//! held until the other worker has acknowledged it. Connections belong to one life of a worker: a later one may have the
//! same address, and what was meant for the earlier one is lost with it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use pw_exec::{ExecEvent, StartSend};
use pw_net::NetError;
use pw_net::data::{DataClient, DownloadSink, DownloadSource, FIRST_BYTES};
use pw_types::{Cause, Code, Handle, Incarnation, RunId, SendShards, SessionId, Status};
use rustc_hash::FxHashMap;
use tokio::sync::OnceCell;
use tokio::task::{AbortHandle, JoinSet};

use crate::exec::{ExecSender, Message};

/// A cell is filled by the first who needs it.
type Cell = Arc<OnceCell<DataClient>>;

/// A life of a worker, and the lane to it.
type Key = (Incarnation, u64);

type Connections = Mutex<FxHashMap<Key, Cell>>;

/// Items from this size on may go another way than over the first lane.
const LANE_BYTES: usize = 1 << 20;

/// One connection moves what one core can copy.
fn lanes() -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    (cores / 4).clamp(2, 8)
}

#[derive(Clone)]
pub(crate) struct Peers {
    shared: Arc<Shared>,
    runtime: tokio::runtime::Handle,
}

struct Shared {
    token: String,
    exec: ExecSender,
    connections: Connections,
    lanes: u64,
    /// Sends under way.
    running: Mutex<FxHashMap<RunId, AbortHandle>>,
}

impl Peers {
    /// The runtime carries the connections.
    pub(crate) fn new(token: String, exec: ExecSender, runtime: tokio::runtime::Handle) -> Peers {
        let shared = Shared { token, exec, connections: Mutex::default(), lanes: lanes(), running: Mutex::default() };
        Peers { shared: Arc::new(shared), runtime }
    }

    /// Sends these bytes, one source per item, and tells `Exec` how it ended.
    pub(crate) fn send(&self, start: &StartSend, sources: Result<Vec<Arc<dyn DownloadSource>>, Arc<Status>>) {
        let (shared, command) = (self.shared.clone(), start.command.clone());
        let run = command.order.run;
        // Held until the task is in the table, so that it cannot leave before it has come.
        let mut running = lock(&self.shared.running);
        let task = self.runtime.spawn(async move {
            let mut ending = Ending { shared: shared.clone(), command: command.clone(), bytes: 0, result: None };
            let result = match sources {
                Ok(sources) => {
                    ending.bytes = sources.iter().map(|s| s.bytes().len() as u64).sum();
                    shared.send(&command, sources).await
                }
                Err(status) => Err(status),
            };
            ending.end(result).await;
        });
        running.insert(run, task.abort_handle());
    }

    /// Gives a send up; it ends with an error.
    pub(crate) fn stop(&self, run: RunId) {
        if let Some(task) = lock(&self.shared.running).get(&run) {
            task.abort();
        }
    }

    /// Tells the other worker that these bytes will not come.
    pub(crate) fn fail(&self, command: Arc<SendShards>, status: Arc<Status>) {
        let shared = self.shared.clone();
        self.runtime.spawn(async move { shared.abort(&command, &status).await });
    }
}

/// Whatever becomes of the task, the send ends once.
struct Ending {
    shared: Arc<Shared>,
    command: Arc<SendShards>,
    bytes: u64,
    result: Option<Result<(), Arc<Status>>>,
}

impl Ending {
    async fn end(mut self, result: Result<(), Arc<Status>>) {
        self.result = Some(result);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let run = self.command.order.run;
        lock(&self.shared.running).remove(&run);
        let given_up = || Status::new(Code::Cancelled, format!("run {run} was given up while it was sent")).with_cause(Cause::Cancelled);
        let result = self.result.take().unwrap_or_else(|| Err(Arc::new(given_up())));
        if let (Err(status), Ok(runtime)) = (&result, tokio::runtime::Handle::try_current()) {
            let (shared, command, status) = (self.shared.clone(), self.command.clone(), status.clone());
            runtime.spawn(async move { shared.abort(&command, &status).await });
        }
        let bytes = if result.is_ok() { self.bytes } else { 0 };
        self.shared.exec.send(Message::Event(ExecEvent::SendDone { run, bytes, result }));
    }
}

impl Shared {
    async fn send(self: &Arc<Shared>, command: &SendShards, sources: Vec<Arc<dyn DownloadSource>>) -> Result<(), Arc<Status>> {
        let unreachable = |error: NetError| {
            Arc::new(Status::new(Code::Unavailable, format!("sending to the worker at {}: {}", command.address, error.chain())))
        };
        let mut by_lane: BTreeMap<u64, Vec<(Handle, Bytes)>> = BTreeMap::new();
        for (item, source) in command.items.iter().zip(sources) {
            // Small ones are acknowledged late.
            let small = source.bytes().len() < FIRST_BYTES;
            let bytes = if small { Bytes::copy_from_slice(source.bytes()) } else { Bytes::from_owner(Owned(source)) };
            let lane = if bytes.len() < LANE_BYTES { 0 } else { item.buffer.0 % self.lanes };
            by_lane.entry(lane).or_default().push((item.buffer, bytes));
        }
        // Ends with this future, whatever becomes of it.
        let mut sending = JoinSet::new();
        for (lane, items) in by_lane {
            let peer = self.connection(command, lane).await.map_err(unreachable)?;
            let session = command.sender;
            sending.spawn(async move {
                for (buffer, bytes) in items {
                    peer.put_begin(session, buffer, bytes.len() as u64).await?;
                    peer.put_chunk(session, buffer, bytes).await?;
                }
                Ok(())
            });
        }
        while let Some(sent) = sending.join_next().await {
            sent.unwrap_or_else(|error| Err(NetError::Closed { peer: command.address.clone(), reason: error.to_string() }))
                .map_err(unreachable)?;
        }
        Ok(())
    }

    /// Best effort: where the other one cannot be reached, the controller tells it.
    async fn abort(self: &Arc<Shared>, command: &SendShards, status: &Status) {
        if let Ok(peer) = self.connection(command, 0).await {
            for item in &command.items {
                let _ = peer.put_abort(command.sender, item.buffer, status.clone()).await;
            }
        }
    }

    async fn connection(self: &Arc<Shared>, command: &SendShards, lane: u64) -> Result<DataClient, NetError> {
        let key = (command.receiver, lane);
        let cell = lock(&self.connections).entry(key).or_default().clone();
        let dial = || async {
            let sink = Arc::new(Gone { shared: self.clone(), key, address: command.address.clone(), cell: Arc::downgrade(&cell) });
            let peer = DataClient::connect(&command.address, &self.token, sink).await?;
            // The session is with the first lane; bytes of it may come over any.
            if lane == 0 {
                peer.attach(command.sender).await?;
            }
            tracing::debug!(address = command.address, lane, "connected to another worker");
            Ok(peer)
        };
        cell.get_or_try_init(dial).await.cloned()
    }
}

/// Forgets a connection that is gone, so that the next send dials again.
struct Gone {
    shared: Arc<Shared>,
    key: Key,
    address: String,
    cell: Weak<OnceCell<DataClient>>,
}

impl DownloadSink for Gone {
    fn offered(&self, _: SessionId, _: Handle, _: u64) {}

    fn chunk(&self, _: SessionId, _: Handle, _: Bytes) {}

    fn failed(&self, _: SessionId, _: Handle, _: Status) {}

    fn disconnected(&self, reason: &str) {
        tracing::info!(address = self.address, lane = self.key.1, reason, "the connection to another worker is gone");
        let mut connections = lock(&self.shared.connections);
        // Unless another one has come in its place.
        if connections.get(&self.key).is_some_and(|cell| std::ptr::eq(Arc::as_ptr(cell), self.cell.as_ptr())) {
            connections.remove(&self.key);
        }
    }
}

/// Bytes of a buffer, as long as anybody has a part of them.
struct Owned(Arc<dyn DownloadSource>);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
