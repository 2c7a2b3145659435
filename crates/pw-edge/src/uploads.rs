//! Host buffers on their way in: where the client's stream and the core's decision about it meet.
//!
//! Either may come first. Until the decision is there, a session's streams may leave up to `parked_bytes` here together; a
//! stream that finds no room is not polled, and HTTP/2 holds it. Once decided, bytes go through as they come.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use pw_types::{Code, Event, Handle, HostSlot, SessionId, Status};
use tokio::sync::Notify;

use crate::grpc::{self, Body};
use crate::hub::Hub;
use crate::session::Session;
use crate::store::StoreDecoder;
use crate::workers::Connection;

/// Host buffers that a session may have named or sent without their other half.
const ENTRIES_MAX: usize = 64 << 10;

/// What the largest HTTP/2 frame can bring.
const FRAME: usize = crate::FRAME as usize;

/// What the core decided about a host buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Decision {
    Route { bytes: u64, hosts: Vec<HostSlot> },
    Discard,
    SessionEnded,
}

enum Store {
    Absent,
    Open,
    Complete(Vec<Bytes>),
    Failed(Status),
}

struct Entry {
    store: Store,
    decision: Option<Decision>,
    /// For the one task that reads the stream.
    decided: Arc<Notify>,
}

pub(crate) struct Uploads {
    table: Mutex<Table>,
    /// Bytes of parked uploads were given back.
    room: Notify,
    limit: usize,
}

#[derive(Default)]
struct Table {
    entries: BTreeMap<Handle, Entry>,
    held: usize,
    ended: bool,
}

impl Table {
    fn entry(&mut self, handle: Handle) -> Result<&mut Entry, Status> {
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&handle) {
            return Err(Status::new(Code::ResourceExhausted, format!("a session may have {ENTRIES_MAX} host buffers under way")));
        }
        let fresh = || Entry { store: Store::Absent, decision: None, decided: Arc::new(Notify::new()) };
        Ok(self.entries.entry(handle).or_insert_with(fresh))
    }
}

/// What is to be done about a decision.
enum Action {
    Nothing,
    Send(Vec<Bytes>),
    Abort(Status),
}

impl Uploads {
    pub(crate) fn new(limit: usize) -> Uploads {
        Uploads { table: Mutex::default(), room: Notify::new(), limit }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The session is over: everything is dropped, everybody is woken.
    pub(crate) fn end(&self) {
        let entries = {
            let mut table = self.table();
            table.ended = true;
            std::mem::take(&mut table.entries)
        };
        for entry in entries.into_values() {
            entry.decided.notify_one();
        }
    }

    fn open(&self, handle: Handle) -> Result<Arc<Notify>, Status> {
        let mut table = self.table();
        if table.ended {
            return Err(Status::not_found("the session has ended"));
        }
        let entry = table.entry(handle)?;
        if !matches!(entry.store, Store::Absent) {
            return Err(Status::new(Code::AlreadyExists, format!("host buffer {handle} is stored twice")));
        }
        entry.store = Store::Open;
        Ok(Arc::clone(&entry.decided))
    }

    /// The decision about an open stream, which from then on belongs to its reader alone.
    fn take_decision(&self, handle: Handle) -> Option<Decision> {
        let mut table = self.table();
        if table.ended {
            return Some(Decision::SessionEnded);
        }
        let decision = table.entries.get_mut(&handle)?.decision.take()?;
        table.entries.remove(&handle);
        Some(decision)
    }

    /// The stream is here as a whole. Gives it back with the decision when there is one.
    fn complete(&self, handle: Handle, pieces: Vec<Bytes>) -> Option<(Decision, Vec<Bytes>)> {
        let mut table = self.table();
        if table.ended {
            return Some((Decision::SessionEnded, pieces));
        }
        let entry = table.entries.get_mut(&handle)?;
        match entry.decision.take() {
            Some(decision) => {
                table.entries.remove(&handle);
                Some((decision, pieces))
            }
            None => {
                entry.store = Store::Complete(pieces);
                None
            }
        }
    }

    /// Whoever asks for this buffer later hears why there is none. Gives the decision back when it is there already.
    fn fail(&self, handle: Handle, status: &Status) -> Option<Decision> {
        let mut table = self.table();
        let entry = table.entries.get_mut(&handle)?;
        match entry.decision.take() {
            Some(decision) => {
                table.entries.remove(&handle);
                Some(decision)
            }
            None => {
                entry.store = Store::Failed(status.clone());
                None
            }
        }
    }

    fn reserve(&self, bytes: usize) -> bool {
        let mut table = self.table();
        let fits = table.held + bytes <= self.limit;
        if fits {
            table.held += bytes;
        }
        fits
    }

    /// `before` bytes that were reserved are `now` bytes.
    fn adjust(&self, before: usize, now: usize) {
        let mut table = self.table();
        table.held = (table.held + now).saturating_sub(before);
        drop(table);
        if now < before {
            self.room.notify_waiters();
        }
    }

    fn decide(&self, handle: Handle, decision: &Decision) -> Result<Action, Status> {
        let mut table = self.table();
        if table.ended {
            return Ok(Action::Nothing);
        }
        let entry = table.entry(handle)?;
        let action = match std::mem::replace(&mut entry.store, Store::Open) {
            store @ (Store::Absent | Store::Open) => {
                entry.store = store;
                entry.decision = Some(decision.clone());
                entry.decided.notify_one();
                return Ok(Action::Nothing);
            }
            Store::Complete(pieces) => Action::Send(pieces),
            Store::Failed(status) => Action::Abort(status),
        };
        table.entries.remove(&handle);
        Ok(action)
    }
}

fn size(pieces: &[Bytes]) -> usize {
    pieces.iter().map(Bytes::len).sum()
}

/// The core decided about a host buffer. An error ends the session.
pub(crate) fn decide(hub: &Arc<Hub>, session: &Arc<Session>, handle: Handle, decision: Decision) -> Result<(), Status> {
    let action = session.uploads.decide(handle, &decision)?;
    let Decision::Route { bytes, hosts } = decision else {
        if let Action::Send(pieces) = action {
            session.uploads.adjust(size(&pieces), 0);
        }
        return Ok(());
    };
    let (hub, session) = (Arc::clone(hub), Arc::clone(session));
    match action {
        Action::Nothing => {}
        Action::Send(pieces) => {
            tokio::spawn(async move {
                let held = size(&pieces);
                let mut sender = Sender::begin(&hub, &session, handle, held as u64, bytes, &hosts).await;
                for piece in pieces {
                    sender.send(piece).await;
                }
                session.uploads.adjust(held, 0);
            });
        }
        Action::Abort(status) => {
            tokio::spawn(async move { abort(&hub, &session, handle, &hosts, &status).await });
        }
    }
    Ok(())
}

/// Tells the workers that a host buffer will not come.
async fn abort(hub: &Hub, session: &Session, handle: Handle, hosts: &[HostSlot], status: &Status) {
    for &slot in hosts {
        if let Ok(connection) = hub.workers.connection(slot, session).await
            && let Err(error) = connection.client.put_abort(session.id, handle, status.clone()).await
        {
            tracing::debug!(%slot, %error, "a worker could not be told that a host buffer failed");
        }
    }
}

/// Serves one HostBufferStore call.
pub(crate) async fn store(hub: Arc<Hub>, session: Arc<Session>, handle: Handle, total: u64, body: Body) -> Result<(), Status> {
    let decided = session.uploads.open(handle)?;
    let mut reader = Reader { body, decoder: StoreDecoder::default(), frame: Bytes::new(), left: total };
    let mut pieces = Vec::new();
    let outcome = park(&session, handle, &decided, &mut reader, &mut pieces).await;
    let held = size(&pieces);
    let decision = match outcome {
        Ok(Some(decision)) => decision,
        // All of it is here.
        Ok(None) => match session.uploads.complete(handle, std::mem::take(&mut pieces)) {
            None => return Ok(()),
            Some((decision, back)) => {
                pieces = back;
                decision
            }
        },
        Err(status) => {
            session.uploads.adjust(held, 0);
            let decision = session.uploads.fail(handle, &status);
            failed(&hub, &session, handle, &status);
            if let Some(Decision::Route { hosts, .. }) = decision {
                abort(&hub, &session, handle, &hosts, &status).await;
            }
            return Err(status);
        }
    };
    let result = match decision {
        Decision::Route { bytes, hosts } => {
            let mut sender = Sender::begin(&hub, &session, handle, total, bytes, &hosts).await;
            for piece in pieces {
                sender.send(piece).await;
            }
            session.uploads.adjust(held, 0);
            loop {
                match reader.next_of(&session).await {
                    Ok(Some(piece)) => sender.send(piece).await,
                    Ok(None) => break sender.problem.map_or(Ok(()), Err),
                    Err(status) => {
                        sender.fail(status.clone()).await;
                        break Err(status);
                    }
                }
            }
        }
        Decision::Discard => {
            drop(pieces);
            session.uploads.adjust(held, 0);
            loop {
                match reader.next_of(&session).await {
                    Ok(Some(_)) => {}
                    Ok(None) => break Ok(()),
                    Err(status) => break Err(status),
                }
            }
        }
        Decision::SessionEnded => Err(session_ended()),
    };
    match result {
        // A failed store makes the client end its session; a worker's failure is told by the arrays that it poisons.
        Err(status) if status.code == Code::Unavailable => Ok(()),
        result => result,
    }
}

fn failed(hub: &Hub, session: &Session, buffer: Handle, status: &Status) {
    if !session.is_over() {
        hub.emit(Event::HostBufferFailed { session: session.id, buffer, status: status.clone() });
    }
}

/// Reads ahead while nobody has decided. `None` = the stream is complete.
async fn park(
    session: &Session,
    handle: Handle,
    decided: &Notify,
    reader: &mut Reader,
    pieces: &mut Vec<Bytes>,
) -> Result<Option<Decision>, Status> {
    loop {
        if let Some(decision) = session.uploads.take_decision(handle) {
            return Ok(Some(decision));
        }
        let room = session.uploads.room.notified();
        let mut room = std::pin::pin!(room);
        room.as_mut().enable();
        let want = usize::try_from(reader.left).map_or(FRAME, |left| left.clamp(1, FRAME));
        if !session.uploads.reserve(want) {
            tokio::select! {
                _ = room => {}
                _ = decided.notified() => {}
            }
            continue;
        }
        tokio::select! {
            piece = reader.next() => match piece {
                Ok(Some(piece)) => {
                    session.uploads.adjust(want, piece.len());
                    pieces.push(piece);
                }
                other => {
                    session.uploads.adjust(want, 0);
                    return other.map(|_| None);
                }
            },
            _ = decided.notified() => session.uploads.adjust(want, 0),
        }
    }
}

/// The payload of a store call and the check of its length.
struct Reader {
    body: Body,
    decoder: StoreDecoder,
    frame: Bytes,
    left: u64,
}

impl Reader {
    /// The next piece while the session lasts.
    async fn next_of(&mut self, session: &Session) -> Result<Option<Bytes>, Status> {
        tokio::select! {
            biased;
            piece = self.next() => piece,
            _ = session.over() => Err(session_ended()),
        }
    }

    /// Cancel safe.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(piece) = self.decoder.next(&mut self.frame)? {
                self.left = self.left.checked_sub(piece.len() as u64).ok_or_else(|| wrong_size("more"))?;
                return Ok(Some(piece));
            }
            match std::future::poll_fn(|cx| grpc::poll_data(&mut self.body, cx)).await {
                Some(frame) => self.frame = frame.map_err(|status| Status::new(Code::Cancelled, status.message))?,
                None if self.left > 0 => return Err(wrong_size("fewer")),
                None => return self.decoder.finish().map(|()| None),
            }
        }
    }
}

fn session_ended() -> Status {
    Status::new(Code::Cancelled, "the session has ended")
}

fn wrong_size(than: &str) -> Status {
    Status::new(Code::DataLoss, format!("a host buffer's stream has {than} bytes than it announced"))
}

/// Passes a host buffer on to every worker that needs it. The first failure ends it for all.
struct Sender<'a> {
    hub: &'a Hub,
    session: &'a Session,
    handle: Handle,
    targets: Vec<(HostSlot, Arc<Connection>)>,
    problem: Option<Status>,
}

impl<'a> Sender<'a> {
    /// `total`: bytes that the client announced. `wanted`: bytes that the core asked for.
    async fn begin(hub: &'a Hub, session: &'a Session, handle: Handle, total: u64, wanted: u64, hosts: &[HostSlot]) -> Sender<'a> {
        let mut sender = Sender { hub, session, handle, targets: Vec::with_capacity(hosts.len()), problem: None };
        for &slot in hosts {
            match hub.workers.connection(slot, session).await {
                Ok(connection) => sender.targets.push((slot, connection)),
                Err(status) => sender.problem = Some(status),
            }
        }
        if total != wanted {
            let text = format!("host buffer {handle} has {total} bytes where its array needs {wanted}");
            sender.problem = Some(Status::new(Code::DataLoss, text));
        }
        match sender.problem.take() {
            Some(status) => sender.fail(status).await,
            None => {
                for (slot, connection) in sender.targets.clone() {
                    if let Err(error) = connection.client.put_begin(session.id, handle, total).await {
                        sender.lost(slot, &error).await;
                        break;
                    }
                }
            }
        }
        sender
    }

    async fn send(&mut self, piece: Bytes) {
        let mut broken = None;
        for (slot, connection) in &self.targets {
            if let Err(error) = connection.client.put_chunk(self.session.id, self.handle, piece.clone()).await {
                broken = Some((*slot, error));
                break;
            }
        }
        if let Some((slot, error)) = broken {
            self.lost(slot, &error).await;
        }
    }

    async fn lost(&mut self, slot: HostSlot, error: &pw_net::NetError) {
        let text = format!("host buffer {} did not reach worker {slot}: {error}", self.handle);
        self.fail(Status::new(Code::Unavailable, text)).await;
    }

    async fn fail(&mut self, status: Status) {
        for (slot, connection) in std::mem::take(&mut self.targets) {
            if self.session.is_over() {
                // The worker has forgotten it already.
                continue;
            }
            if let Err(error) = connection.client.put_abort(self.session.id, self.handle, status.clone()).await {
                tracing::debug!(%slot, %error, "a worker could not be told that a host buffer failed");
            }
        }
        failed(self.hub, self.session, self.handle, &status);
        self.problem = Some(status);
    }
}

impl std::fmt::Debug for Uploads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = self.table();
        f.debug_struct("Uploads").field("entries", &table.entries.len()).field("held", &table.held).finish()
    }
}

/// A store call whose session is gone.
pub(crate) fn unknown_session(session: SessionId) -> Status {
    Status::not_found(format!("there is no session {}", session.0))
}
