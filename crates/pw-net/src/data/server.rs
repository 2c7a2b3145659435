//! The worker's end of the data plane: accepts edges, takes uploads, and keeps downloads until their edge has them.

mod connection;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pw_types::{Cause, Code, Handle, SessionId, Status};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::frame::{Header, Key, Kind, encode_status};
use super::kept::Piece;
use super::outbox::{Flow, Frame, Outbox};
use super::{DownloadSource, FIRST_BYTES, UploadSink};

/// Connections at a time, broken ones that may come back included.
const CONNECTIONS_MAX: usize = 1024;

/// TCP connections at a time, greeted or not.
const SOCKETS_MAX: usize = 2 * CONNECTIONS_MAX;

/// Downloads of one connection, and of all sessions without one.
const DOWNLOADS_MAX: usize = 64 << 10;

/// Control frames that wait to be written on one connection.
const CONTROL_MAX: usize = 64 << 10;

/// Sessions that were left, remembered so that late offers for them are not kept.
const LEFT_MAX: usize = 4 << 10;

/// Worker side. Stops when the last clone is dropped.
#[derive(Clone)]
pub struct DataServer {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop.send_replace(true);
    }
}

struct Shared {
    token: String,
    sink: Arc<dyn UploadSink>,
    /// Taken before the queues of a connection, never after.
    sessions: Mutex<Sessions>,
    /// By the name that the edge chose.
    connections: Mutex<BTreeMap<SessionId, Arc<Connection>>>,
    sockets: AtomicUsize,
    stop: watch::Sender<bool>,
}

#[derive(Default)]
struct Sessions {
    attached: BTreeMap<SessionId, Arc<Connection>>,
    /// Downloads of sessions that no edge has attached yet.
    held: BTreeMap<SessionId, Vec<Held>>,
    held_count: usize,
    left: BTreeSet<SessionId>,
    left_order: VecDeque<SessionId>,
}

struct Held {
    buffer: Handle,
    what: Waiting,
}

enum Waiting {
    Download(Download),
    Failure(Status),
}

/// Whether a session has an edge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    Attached,
    /// Not yet, or not any more while the edge connects again.
    Awaited,
    /// Its edge has left it.
    Left,
}

/// One edge.
struct Connection {
    peer: String,
    outbox: Outbox<Download>,
}

/// Calls `done` when it goes, however it goes.
struct Done(Option<Box<dyn FnOnce() + Send>>);

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done();
        }
    }
}

/// An offer. Dropping one calls its `done`, so no lock may be held then.
struct Download {
    source: Arc<dyn DownloadSource>,
    total: usize,
    offered: bool,
    sent: usize,
    /// How far the edge lets us go, in bytes from the beginning.
    allowed: u64,
    _done: Done,
}

impl Flow for Download {
    fn is_fresh(&self) -> bool {
        !self.offered
    }

    fn is_ready(&self) -> bool {
        !self.offered || (self.sent < self.total && self.allowed > self.sent as u64)
    }

    fn waiting_bytes(&self) -> usize {
        0
    }

    fn is_finished(&self) -> bool {
        self.offered && self.sent == self.total
    }

    fn next(&mut self, key: Key, limit: usize) -> Frame {
        let allowed = usize::try_from(self.allowed).unwrap_or(usize::MAX).min(self.total);
        let range = self.sent..allowed.min(self.sent + limit);
        let (kind, value) = if self.offered { (Kind::Chunk, 0) } else { (Kind::Offer, self.total as u64) };
        self.offered = true;
        self.sent = range.end;
        Frame { header: Header::new(kind, key, value, range.len()), body: Piece::Source(Arc::clone(&self.source), range) }
    }
}

impl DataServer {
    /// Serves on the current tokio runtime.
    pub fn start(listener: TcpListener, token: String, sink: Arc<dyn UploadSink>) -> DataServer {
        let (sessions, connections) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { token, sink, sessions, connections, sockets: AtomicUsize::new(0), stop: watch::Sender::new(false) });
        tokio::spawn(accept_all(listener, Arc::clone(&shared)));
        DataServer { inner: Arc::new(Inner { shared }) }
    }

    /// Offers bytes to whichever edge attached `session`, or will. `done` is called exactly once: when all was handed to the
    /// socket, or dropped, or failed. The source is let go when the edge has acknowledged it. Callable from any thread.
    pub fn offer(&self, session: SessionId, buffer: Handle, source: Arc<dyn DownloadSource>, done: Box<dyn FnOnce() + Send>) {
        let total = source.bytes().len();
        let allowed = FIRST_BYTES as u64;
        let download = Download { source, total, offered: false, sent: 0, allowed, _done: Done(Some(done)) };
        self.inner.shared.hand_over(session, buffer, Waiting::Download(download));
    }

    /// Tells the edge of `session` that the bytes of `buffer` will not come. Callable from any thread.
    pub fn offer_failed(&self, session: SessionId, buffer: Handle, status: Status) {
        self.inner.shared.hand_over(session, buffer, Waiting::Failure(status));
    }

    /// Whoever finds a session attached here hears of its end through [`UploadSink::detached`]. Callable from any thread.
    pub fn presence(&self, session: SessionId) -> Presence {
        let sessions = self.inner.shared.sessions();
        match sessions.attached.contains_key(&session) {
            true => Presence::Attached,
            false if sessions.left.contains(&session) => Presence::Left,
            false => Presence::Awaited,
        }
    }

    /// Drops the downloads of a session, also those that come later, until an edge attaches it again. For sessions
    /// whose end was heard of from somewhere else.
    pub fn forget(&self, session: SessionId) {
        let mut sessions = self.inner.shared.sessions();
        let held = sessions.leave(session);
        let offered = sessions.attached.remove(&session).map(|connection| connection.outbox.lock().remove_session(session));
        drop(sessions);
        drop((held, offered));
    }
}

impl Sessions {
    /// Marks a session as left and gives back what was held for it.
    fn leave(&mut self, session: SessionId) -> Vec<Held> {
        if self.left.insert(session) {
            self.left_order.push_back(session);
            if self.left_order.len() > LEFT_MAX {
                let oldest = self.left_order.pop_front().expect("it is not empty");
                self.left.remove(&oldest);
            }
        }
        let held = self.held.remove(&session).unwrap_or_default();
        self.held_count -= held.len();
        held
    }

    /// Keeps something until the session is attached; gives it back where that cannot be.
    fn hold(&mut self, session: SessionId, held: Held) -> Option<Held> {
        if self.left.contains(&session) {
            return Some(held);
        }
        if self.held_count >= DOWNLOADS_MAX {
            tracing::warn!(%session, buffer = %held.buffer, "too many downloads wait for their edge; this one is dropped");
            return Some(held);
        }
        self.held_count += 1;
        self.held.entry(session).or_default().push(held);
        None
    }

    /// Makes `connection` the one of `session`; gives back the transfers of the one before, and what was held.
    fn attach(&mut self, session: SessionId, connection: &Arc<Connection>) -> (Vec<Download>, Vec<Held>) {
        if self.left.remove(&session) {
            self.left_order.retain(|left| *left != session);
        }
        let held = self.held.remove(&session).unwrap_or_default();
        self.held_count -= held.len();
        let before = self.attached.insert(session, Arc::clone(connection));
        let old = match before {
            Some(before) if !Arc::ptr_eq(&before, connection) => before.outbox.lock().remove_session(session),
            _ => Vec::new(),
        };
        (old, held)
    }
}

impl Shared {
    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().expect("nothing panics while it holds the sessions")
    }

    fn hand_over(&self, session: SessionId, buffer: Handle, what: Waiting) {
        let mut sessions = self.sessions();
        // What is left over must go after the lock: dropping a download calls somebody.
        let rest = match sessions.attached.get(&session) {
            Some(connection) => connection.give(session, buffer, what),
            None => sessions.hold(session, Held { buffer, what }).map(|held| held.what),
        };
        drop(sessions);
        drop(rest);
    }

    fn attach(&self, session: SessionId, connection: &Arc<Connection>) {
        let mut sessions = self.sessions();
        let (old, held) = sessions.attach(session, connection);
        let rest: Vec<Option<Waiting>> = held.into_iter().map(|held| connection.give(session, held.buffer, held.what)).collect();
        drop(sessions);
        drop((old, rest));
    }

    /// The edge on `connection` leaves a session. False where another one has it.
    fn detach(&self, session: SessionId, connection: &Arc<Connection>) -> bool {
        let mut sessions = self.sessions();
        let ours = sessions.attached.get(&session).is_some_and(|c| Arc::ptr_eq(c, connection));
        let held = if ours { sessions.leave(session) } else { Vec::new() };
        if ours {
            sessions.attached.remove(&session);
        }
        let offered = connection.outbox.lock().remove_session(session);
        drop(sessions);
        drop((held, offered));
        ours
    }

    /// The sessions that are attached over `connection`.
    fn sessions_of(&self, connection: &Arc<Connection>) -> Vec<SessionId> {
        let sessions = self.sessions();
        sessions.attached.iter().filter(|(_, c)| Arc::ptr_eq(c, connection)).map(|(session, _)| *session).collect()
    }
}

impl Connection {
    /// Queues something for this edge; gives back what there is to drop.
    fn give(&self, session: SessionId, buffer: Handle, what: Waiting) -> Option<Waiting> {
        let key = (session, buffer);
        let mut queues = self.outbox.lock();
        let (old, rest) = match what {
            Waiting::Download(download) if queues.flows_len() < DOWNLOADS_MAX => (queues.insert(key, download), None),
            Waiting::Download(download) => {
                let text = format!("{DOWNLOADS_MAX} downloads wait for their edge to read them");
                let status = Status::new(Code::ResourceExhausted, text).with_cause(Cause::Limit);
                queues.push(failure(key, &status));
                (None, Some(Waiting::Download(download)))
            }
            Waiting::Failure(status) => {
                let old = queues.remove(key);
                queues.push(failure(key, &status));
                (old, None)
            }
        };
        if queues.control_len() > CONTROL_MAX {
            self.outbox.close("it does not read what it is sent");
        }
        drop(queues);
        self.outbox.wake();
        old.map(Waiting::Download).or(rest)
    }
}

fn failure(key: Key, status: &Status) -> Frame {
    Frame::control(Kind::Failed, key, 0, encode_status(status))
}

async fn accept_all(listener: TcpListener, shared: Arc<Shared>) {
    let mut stop = shared.stop.subscribe();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match accepted {
            Ok((tcp, address)) => admit(tcp, address.to_string(), &shared),
            Err(error) => {
                // Out of descriptors, or the peer is gone already.
                tracing::warn!(%error, "cannot accept a data-plane connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn admit(tcp: TcpStream, peer: String, shared: &Arc<Shared>) {
    if shared.sockets.fetch_add(1, Ordering::Relaxed) >= SOCKETS_MAX {
        shared.sockets.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!(peer, "too many data-plane connections");
        return;
    }
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        connection::serve(tcp, peer, &shared).await;
        shared.sockets.fetch_sub(1, Ordering::Relaxed);
    });
}
