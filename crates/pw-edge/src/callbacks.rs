//! Host callbacks: calls of a worker's programs on their way to the client's process, and the answers on theirs back.
//!
//! A call is offered by the worker as a download under a name that no host buffer has; it goes through to the client's
//! channel as the client takes it. The answer goes back as an upload under the same name. What is in a call is between the
//! worker and the client's package.
//!
//! Invariants:
//! 1. Of every call that is taken here the worker hears: an answer, or why there is none. Where its connection is gone, or
//!    the session has left it, it knows by itself.
//! 2. A channel belongs to one session, and ends with it. Without a channel calls fail at once.

mod channel;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use pw_net::data::FIRST_BYTES;
use pw_types::{Code, Handle, SessionId, Status};
use tokio::sync::mpsc;

use crate::session::Session;
use crate::workers::Connection;
use channel::{Frame, Kind};

pub(crate) use channel::serve;

/// Calls of one session that wait for their answer. A device makes one at a time, or a few.
const CALLS_MAX: usize = 16 << 10;

/// Bytes on their way to the client: of one call, and of all of a session together.
const WINDOW_MIN: u64 = 128 << 10;
const WINDOW_MAX: u64 = 4 << 20;
const WINDOWS: u64 = 32 << 20;

pub(crate) struct Callbacks {
    /// Where the channel is opened, for the client: `HOST:PORT`, or `:PORT` where the client knows better.
    address: Option<Arc<str>>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    channel: Option<Channel>,
    /// Counts channels, so that the end of an old one does not end a new one.
    channels: u64,
    calls: BTreeMap<u64, Call>,
    /// By connection and name there.
    names: BTreeMap<(usize, Handle), u64>,
    next: u64,
}

struct Channel {
    number: u64,
    frames: mpsc::Sender<Frame>,
}

/// A call without an answer.
struct Call {
    place: Place,
    /// Its bytes as they come. Bounded by what the worker may send.
    pieces: mpsc::UnboundedSender<Bytes>,
}

/// Where a call comes from.
#[derive(Clone)]
struct Place {
    connection: Arc<Connection>,
    name: Handle,
}

impl Place {
    fn key(&self) -> (usize, Handle) {
        (Arc::as_ptr(&self.connection) as usize, self.name)
    }

    /// Tells the worker that there will be no answer.
    async fn fail(&self, session: SessionId, status: Status) {
        if let Err(error) = self.connection.client.put_abort(session, self.name, status).await {
            tracing::debug!(%session, %error, "a host callback cannot be failed");
        }
    }
}

impl Table {
    fn remove(&mut self, call: u64) -> Option<Place> {
        let place = self.calls.remove(&call)?.place;
        self.names.remove(&place.key());
        Some(place)
    }
}

impl Callbacks {
    pub(crate) fn new(address: Option<Arc<str>>) -> Callbacks {
        Callbacks { address, table: Mutex::default() }
    }

    pub(crate) fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The worker makes a call.
    pub(crate) fn offered(&self, session: &Arc<Session>, name: Handle, total: u64, connection: &Arc<Connection>) {
        let place = Place { connection: Arc::clone(connection), name };
        let mut table = self.table();
        let refused = match &table.channel {
            None => Some(Status::new(
                Code::FailedPrecondition,
                "this program calls a function in its client's process, and the client has no channel open for that",
            )),
            Some(_) if table.calls.len() >= CALLS_MAX => {
                Some(Status::new(Code::ResourceExhausted, format!("{CALLS_MAX} host callbacks of one session wait for their answers")))
            }
            Some(_) => None,
        };
        let id = session.id;
        if let Some(status) = refused {
            drop(table);
            tokio::spawn(async move {
                let _ = place.connection.client.drop_download(id, place.name).await;
                place.fail(id, status).await;
            });
            return;
        }
        let Some(frames) = table.channel.as_ref().map(|channel| channel.frames.clone()) else { return };
        let number = table.next;
        table.next += 1;
        let (pieces, arriving) = mpsc::unbounded_channel();
        table.names.insert(place.key(), number);
        table.calls.insert(number, Call { place: place.clone(), pieces });
        drop(table);
        tokio::spawn(forward(Arc::clone(session), number, total, place, arriving, frames));
    }

    pub(crate) fn chunk(&self, name: Handle, data: Bytes, connection: &Arc<Connection>) {
        let table = self.table();
        let call = table.names.get(&(Arc::as_ptr(connection) as usize, name)).and_then(|number| table.calls.get(number));
        if let Some(call) = call {
            // Nobody takes it where the channel is gone.
            let _ = call.pieces.send(data);
        }
    }

    /// The worker has given up a call, or is gone with all of them (no name).
    pub(crate) fn withdrawn(&self, name: Option<Handle>, connection: &Arc<Connection>) {
        let from = Arc::as_ptr(connection) as usize;
        let names = name.map_or((from, Handle(0))..=(from, Handle(u64::MAX)), |name| (from, name)..=(from, name));
        let mut table = self.table();
        let calls: Vec<u64> = table.names.range(names).map(|(_, number)| *number).collect();
        for call in calls {
            table.remove(call);
        }
    }

    /// The session is over. Its workers are told elsewhere.
    pub(crate) fn end(&self) {
        let mut table = self.table();
        table.channel = None;
        table.names.clear();
        let calls = std::mem::take(&mut table.calls);
        drop(table);
        drop(calls);
    }

    /// From now on calls go there. A channel that was open before is replaced: its client has opened another one.
    fn open(&self, frames: mpsc::Sender<Frame>) -> u64 {
        let mut table = self.table();
        table.channels += 1;
        let number = table.channels;
        table.channel = Some(Channel { number, frames });
        number
    }

    /// A channel has ended; gives the calls that it leaves without an answer.
    fn close(&self, number: u64) -> Vec<Place> {
        let mut table = self.table();
        if table.channel.as_ref().is_none_or(|channel| channel.number != number) {
            return Vec::new();
        }
        table.channel = None;
        table.names.clear();
        std::mem::take(&mut table.calls).into_values().map(|call| call.place).collect()
    }

    /// A call is being answered.
    fn answered(&self, call: u64) -> Option<Place> {
        self.table().remove(call)
    }

    fn window(&self) -> u64 {
        (WINDOWS / (self.table().calls.len() as u64).max(1)).clamp(WINDOW_MIN, WINDOW_MAX)
    }
}

/// Hands a call on as the channel takes it.
async fn forward(
    session: Arc<Session>,
    number: u64,
    total: u64,
    place: Place,
    mut pieces: mpsc::UnboundedReceiver<Bytes>,
    frames: mpsc::Sender<Frame>,
) {
    let mut granted = FIRST_BYTES as u64;
    let mut sent = 0;
    loop {
        let data = match sent < total {
            true => pieces.recv().await,
            false => Some(Bytes::new()),
        };
        let frame = match data {
            Some(data) if sent == 0 => Frame::begin(Kind::Call, number, total, data),
            Some(data) => Frame { kind: Kind::Data, call: number, value: None, data },
            None => Frame { kind: Kind::Cancel, call: number, value: None, data: Bytes::new() },
        };
        let last = frame.kind == Kind::Cancel;
        sent += frame.data.len() as u64;
        // A channel that is gone has failed its calls.
        if frames.send(frame).await.is_err() || last || sent >= total {
            return;
        }
        let window = session.callbacks.window();
        let ahead = granted.saturating_sub(sent);
        if granted < total && ahead <= window / 2 {
            let more = (window - ahead).min(total - granted);
            granted += more;
            if let Err(error) = place.connection.client.pull(session.id, place.name, more).await {
                tracing::debug!(session = %session.id, %error, "a host callback cannot be fetched");
            }
        }
    }
}
