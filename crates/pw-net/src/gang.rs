//! Operands of collectives from worker to worker: named frames over blocking sockets.
//!
//! A worker dials another one when it first has something for it, and only sends over that connection; what the other
//! one has for it comes over another. Whoever waits for a frame waits here, under its name, whichever comes first.
//!
//! Invariants:
//! 1. A frame is handed out once, whole. A connection that breaks in the middle of one loses it.
//! 2. A wait ends with the frame, with its run, or with the connection that the frame would have come over.
//! 3. A reader never waits for anybody who wants frames, so two workers that send to each other do not block.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pw_types::{HostSlot, Status};
use rustc_hash::FxHashMap;

use crate::NetError;
use crate::magic;

const HEADER: usize = 32;
const TOKEN_BYTES_MAX: usize = 4 << 10;
/// No operand is larger.
const FRAME_BYTES_MAX: u64 = 64 << 30;
/// Abandoned runs that are remembered, for frames of theirs that come late.
const ABANDONED_MAX: usize = 4096;
/// How long a frame may keep somebody waiting before others hear of it.
pub const LATE: Duration = Duration::from_secs(1);
/// No cluster has more workers than connections that one of them takes.
const CONNECTIONS_MAX: usize = 4096;

/// Which operands these are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameName {
    pub run: u64,
    /// The collective of the program.
    pub key: u32,
    /// How often the group has met there in this run before.
    pub count: u32,
    /// The lowest member of the group.
    pub group: u32,
    /// The lowest member of the group on the worker that sends.
    pub from: u32,
}

impl FrameName {
    fn encode(self, bytes: u64) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.run.to_le_bytes());
        for (at, value) in [(8, self.key), (12, self.count), (16, self.group), (20, self.from)] {
            header[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        header[24..].copy_from_slice(&bytes.to_le_bytes());
        header
    }

    fn decode(header: &[u8; HEADER]) -> (FrameName, u64) {
        let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let short = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        (FrameName { run: long(0), key: short(8), count: short(12), group: short(16), from: short(20) }, long(24))
    }
}

/// One worker's end of all its connections. It stops listening when the last clone goes.
#[derive(Clone)]
pub struct GangNet {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    listens: SocketAddr,
}

struct Shared {
    slot: Mutex<Option<HostSlot>>,
    token: String,
    mail: Mutex<Mail>,
    /// Something came or ended.
    changed: Condvar,
    lines: Mutex<FxHashMap<HostSlot, Arc<Mutex<Line>>>>,
}

/// The connection to another worker.
#[derive(Default)]
struct Line {
    address: String,
    open: Option<TcpStream>,
}

#[derive(Default)]
struct Mail {
    frames: FxHashMap<FrameName, Vec<u8>>,
    abandoned: FxHashMap<u64, Arc<Status>>,
    /// In the order in which they were.
    order: VecDeque<u64>,
    /// How often a connection of that worker has broken.
    breaks: FxHashMap<HostSlot, u64>,
    connections: usize,
    stopped: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.mail().stopped = true;
        self.shared.changed.notify_all();
        // Wakes whoever accepts.
        let _ = TcpStream::connect(self.listens);
    }
}

impl GangNet {
    /// Listens; gives the address, too.
    pub fn listen(address: SocketAddr, token: String) -> Result<(GangNet, SocketAddr), NetError> {
        let failed = |source| NetError::Io { peer: address.to_string(), what: "listen at", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let listens = listener.local_addr().map_err(failed)?;
        let shared = Shared { slot: Mutex::default(), token, mail: Mutex::default(), changed: Condvar::new(), lines: Mutex::default() };
        let shared = Arc::new(shared);
        let accepting = shared.clone();
        spawn("gang-accept", move || accept_all(&listener, &accepting)).map_err(failed)?;
        Ok((GangNet { inner: Arc::new(Inner { shared, listens }) }, listens))
    }

    /// The slot of this worker, by which the others know it; before anything is sent.
    pub fn is_slot(&self, slot: HostSlot) {
        *lock(&self.inner.shared.slot) = Some(slot);
    }

    /// The worker in this slot takes frames at this address from now on.
    pub fn neighbour(&self, slot: HostSlot, address: &str) {
        let line = lock(&self.inner.shared.lines).entry(slot).or_default().clone();
        let mut line = lock(&line);
        if line.address != address {
            *line = Line { address: address.to_owned(), open: None };
        }
    }

    /// Sends a frame; returns when the socket has it.
    pub fn send(&self, to: HostSlot, name: FrameName, parts: &[&[u8]]) -> Result<(), NetError> {
        let shared = &self.inner.shared;
        let line = lock(&shared.lines).get(&to).cloned();
        let unknown = || NetError::Closed { peer: format!("worker {to}"), reason: "its address is not known".to_owned() };
        let line = line.ok_or_else(unknown)?;
        let mut line = lock(&line);
        // A run is given up before another life of its worker becomes a neighbour, which must not get its frames.
        if let Some(status) = shared.mail().abandoned.get(&name.run) {
            return Err(NetError::GivenUp(status.clone()));
        }
        if line.open.is_none() {
            line.open = Some(self.dial(&line.address)?);
        }
        let tcp = line.open.as_mut().expect("just opened");
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        let header = name.encode(bytes as u64);
        let mut slices: Vec<IoSlice<'_>> = std::iter::once(&header[..]).chain(parts.iter().copied()).map(IoSlice::new).collect();
        if let Err(source) = write_all(tcp, &mut slices) {
            line.open = None;
            return Err(NetError::Io { peer: format!("worker {to} at {}", line.address), what: "send operands to", source });
        }
        Ok(())
    }

    fn dial(&self, address: &str) -> Result<TcpStream, NetError> {
        let shared = &self.inner.shared;
        let slot = lock(&shared.slot)
            .ok_or_else(|| NetError::Closed { peer: address.to_owned(), reason: "this worker has no slot yet".into() })?;
        let failed = |what| move |source| NetError::Io { peer: address.to_owned(), what, source };
        let mut tcp = magic::GANG.dial_blocking(address)?;
        let token = shared.token.as_bytes();
        let hello = [&slot.0.to_le_bytes()[..], &(token.len() as u32).to_le_bytes(), token].concat();
        tcp.write_all(&hello).map_err(failed("greet"))?;
        let mut answer = [0];
        tcp.read_exact(&mut answer).map_err(failed("read the answer of"))?;
        if answer != [1] {
            return Err(NetError::Refused { peer: address.to_owned(), reason: "the token is wrong".to_owned() });
        }
        tcp.set_read_timeout(None).and_then(|()| tcp.set_write_timeout(None)).map_err(failed("set up the connection to"))?;
        Ok(tcp)
    }

    /// How often a connection of this worker has broken.
    pub fn breaks(&self, of: HostSlot) -> u64 {
        self.inner.shared.mail().breaks.get(&of).copied().unwrap_or_default()
    }

    /// Waits for a frame that the worker in slot `from` sends; in vain where a connection of it has broken since
    /// [`GangNet::breaks`] was `breaks`. Every [`LATE`] in vain is told.
    pub fn receive(&self, from: HostSlot, name: FrameName, breaks: u64, late: impl Fn()) -> Result<Vec<u8>, NetError> {
        let shared = &self.inner.shared;
        let ended = |reason: &str| NetError::Closed { peer: format!("worker {from}"), reason: reason.to_owned() };
        let mut mail = shared.mail();
        loop {
            if let Some(frame) = mail.frames.remove(&name) {
                return Ok(frame);
            }
            if let Some(status) = mail.abandoned.get(&name.run) {
                return Err(NetError::GivenUp(status.clone()));
            }
            if mail.breaks.get(&from).copied().unwrap_or_default() != breaks {
                return Err(ended("it broke while operands of a collective were on their way"));
            }
            if mail.stopped {
                return Err(ended("this worker ends"));
            }
            let (woken, waited) = shared.changed.wait_timeout(mail, LATE).unwrap_or_else(PoisonError::into_inner);
            mail = woken;
            if waited.timed_out() {
                late();
            }
        }
    }

    /// Who waits for frames of this run fails with this status, and those that come are dropped.
    pub fn abandon(&self, run: u64, status: Arc<Status>) {
        let mut mail = self.inner.shared.mail();
        if let Entry::Vacant(entry) = mail.abandoned.entry(run) {
            entry.insert(status);
            mail.order.push_back(run);
            if mail.order.len() > ABANDONED_MAX
                && let Some(oldest) = mail.order.pop_front()
            {
                mail.abandoned.remove(&oldest);
            }
        }
        mail.frames.retain(|name, _| name.run != run);
        drop(mail);
        self.inner.shared.changed.notify_all();
    }
}

impl Shared {
    fn mail(&self) -> MutexGuard<'_, Mail> {
        lock(&self.mail)
    }

    fn deliver(&self, name: FrameName, body: Vec<u8>) -> Result<(), String> {
        let mut mail = self.mail();
        if mail.abandoned.contains_key(&name.run) {
            return Ok(());
        }
        if mail.frames.insert(name, body).is_some() {
            return Err(format!("{name:?} came twice"));
        }
        drop(mail);
        self.changed.notify_all();
        Ok(())
    }
}

fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.mail().stopped {
            return;
        }
        let (tcp, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another worker");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        {
            let mut mail = shared.mail();
            if mail.connections >= CONNECTIONS_MAX {
                tracing::warn!(%peer, "too many connections of other workers");
                continue;
            }
            mail.connections += 1;
        }
        let shared = shared.clone();
        let started = spawn("gang-reader", {
            let shared = shared.clone();
            move || {
                serve(tcp, &peer.to_string(), &shared);
                shared.mail().connections -= 1;
            }
        });
        if let Err(error) = started {
            tracing::warn!(%peer, %error, "no thread for a connection of another worker");
            shared.mail().connections -= 1;
        }
    }
}

/// Reads one worker's frames to the end of its connection.
fn serve(mut tcp: TcpStream, peer: &str, shared: &Shared) {
    let slot = match greet(&mut tcp, peer, &shared.token) {
        Ok(slot) => slot,
        Err(error) => return tracing::warn!(peer, "a connection for operands was refused: {}", error.chain()),
    };
    let why = loop {
        match read_frame(&mut tcp) {
            Ok(Some((name, body))) => {
                if let Err(what) = shared.deliver(name, body) {
                    break what;
                }
            }
            Ok(None) => break "it ended".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    tracing::debug!(peer, %slot, why, "the connection of another worker is gone");
    *shared.mail().breaks.entry(slot).or_default() += 1;
    shared.changed.notify_all();
}

fn greet(tcp: &mut TcpStream, peer: &str, token: &str) -> Result<HostSlot, NetError> {
    magic::GANG.accept_blocking(tcp, peer)?;
    let failed = |source| NetError::Io { peer: peer.to_owned(), what: "read the greeting of", source };
    let mut head = [0; 8];
    tcp.read_exact(&mut head).map_err(failed)?;
    let slot = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
    let length = u32::from_le_bytes(head[4..].try_into().expect("four bytes")) as usize;
    if length > TOKEN_BYTES_MAX {
        return Err(NetError::Protocol { peer: peer.to_owned(), what: format!("a token of {length} bytes") });
    }
    let mut theirs = vec![0; length];
    tcp.read_exact(&mut theirs).map_err(failed)?;
    let right = magic::same_secret(token.as_bytes(), &theirs);
    tcp.write_all(&[u8::from(right)]).map_err(failed)?;
    if !right {
        return Err(NetError::Protocol { peer: peer.to_owned(), what: "its token is wrong".to_owned() });
    }
    tcp.set_read_timeout(None).map_err(failed)?;
    Ok(HostSlot(slot))
}

/// `None` = the end, between two frames.
fn read_frame(tcp: &mut TcpStream) -> io::Result<Option<(FrameName, Vec<u8>)>> {
    let mut header = [0; HEADER];
    match tcp.read(&mut header[..])? {
        0 => return Ok(None),
        HEADER => {}
        got => tcp.read_exact(&mut header[got..])?,
    }
    let (name, bytes) = FrameName::decode(&header);
    if bytes > FRAME_BYTES_MAX {
        return Err(io::Error::other(format!("{name:?} of {bytes} bytes")));
    }
    let mut body = Vec::with_capacity(bytes as usize);
    if tcp.take(bytes).read_to_end(&mut body)? as u64 != bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((name, body)))
}

fn write_all(tcp: &mut TcpStream, slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    let mut rest = slices;
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        match tcp.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut rest, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The run may have been one of a life of the worker that is over.
    #[test]
    fn nothing_is_sent_for_a_run_that_was_given_up() {
        let listen = || GangNet::listen(SocketAddr::from(([127, 0, 0, 1], 0)), "token".to_owned()).unwrap();
        let ((a, _), (b, address)) = (listen(), listen());
        a.is_slot(HostSlot(0));
        a.neighbour(HostSlot(1), &address.to_string());
        let name = |run| FrameName { run, key: 0, count: 0, group: 0, from: 0 };
        a.abandon(1, Arc::new(Status::internal("boom")));
        assert!(a.send(HostSlot(1), name(1), &[b"old"]).is_err());
        a.send(HostSlot(1), name(2), &[b"new"]).unwrap();
        assert_eq!(b.receive(HostSlot(0), name(2), 0, || ()).unwrap(), b"new");
        assert!(b.inner.shared.mail().frames.is_empty());
    }
}
