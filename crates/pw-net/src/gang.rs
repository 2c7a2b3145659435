//! Operands of collectives from worker to worker: named frames over blocking sockets.
//!
//! A worker dials another one when it first has something for it, and only sends over that connection; what the other
//! one has for it comes over another. Whoever waits for a frame waits here, under its name, whichever comes first.
//!
//! Invariants:
//! 1. A frame is handed out once, whole. A connection that breaks in the middle of one loses it.
//! 2. A wait, for a frame or for room to send one, ends with the frame, with its run, or with the connection.
//! 3. Connections belong to lives of workers. What was meant for one life never reaches another one, whatever their addresses.
//! 4. A reader never waits for anybody who wants frames, so two workers that send to each other do not block.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pw_types::{HostSlot, Incarnation, Status};
use rustc_hash::FxHashMap;

use crate::NetError;
use crate::magic;

const HEADER: usize = 32;
const TOKEN_BYTES_MAX: usize = 4 << 10;
/// No operand is larger.
const FRAME_BYTES_MAX: u64 = 64 << 30;
/// Abandoned runs that are remembered, for frames of theirs that come late.
const ABANDONED_MAX: usize = 4096;
/// Answers to a greeting.
const WRONG_TOKEN: u8 = 0;
const WELCOME: u8 = 1;
const OTHER_LIFE: u8 = 2;
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
    /// Of this worker.
    life: Incarnation,
    token: String,
    mail: Mutex<Mail>,
    /// Something came or ended.
    changed: Condvar,
    neighbours: Mutex<FxHashMap<HostSlot, Neighbour>>,
}

/// A life of another worker, and the connection to it.
#[derive(Clone)]
struct Neighbour {
    slot: HostSlot,
    life: Incarnation,
    address: Arc<str>,
    tcp: Arc<Mutex<Option<TcpStream>>>,
}

/// Another worker as it was when somebody began to deal with it.
pub struct Line {
    to: Neighbour,
    /// How often a connection of it had broken.
    breaks: u64,
}

#[derive(Default)]
struct Mail {
    frames: FxHashMap<FrameName, Vec<u8>>,
    abandoned: FxHashMap<u64, Arc<Status>>,
    /// In the order in which they were.
    order: VecDeque<u64>,
    /// How often a connection of that life of a worker has broken.
    breaks: FxHashMap<Incarnation, u64>,
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
    /// Listens, for this life of a worker; gives the address, too.
    pub fn listen(address: SocketAddr, life: Incarnation, token: String) -> Result<(GangNet, SocketAddr), NetError> {
        let failed = |source| NetError::Io { peer: address.to_string(), what: "listen at", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let listens = listener.local_addr().map_err(failed)?;
        let (mail, changed, neighbours) = (Mutex::default(), Condvar::new(), Mutex::default());
        let shared = Arc::new(Shared { life, token, mail, changed, neighbours });
        let accepting = shared.clone();
        spawn("gang-accept", move || accept_all(&listener, &accepting)).map_err(failed)?;
        Ok((GangNet { inner: Arc::new(Inner { shared, listens }) }, listens))
    }

    /// The worker in this slot is in this life now, and takes frames at this address. Waits for nobody.
    pub fn neighbour(&self, slot: HostSlot, life: Incarnation, address: &str) {
        let shared = &self.inner.shared;
        let mut neighbours = lock(&shared.neighbours);
        if neighbours.get(&slot).is_some_and(|known| known.life == life) {
            return;
        }
        let old = neighbours.insert(slot, Neighbour { slot, life, address: address.into(), tcp: Arc::default() });
        drop(neighbours);
        if let Some(old) = old {
            shared.mail().breaks.remove(&old.life);
        }
    }

    /// The worker in this slot.
    pub fn line(&self, slot: HostSlot) -> Result<Line, NetError> {
        let shared = &self.inner.shared;
        let to = lock(&shared.neighbours).get(&slot).cloned();
        let to = to.ok_or_else(|| NetError::Closed { peer: format!("worker {slot}"), reason: "its address is not known".to_owned() })?;
        let breaks = shared.mail().breaks.get(&to.life).copied().unwrap_or_default();
        Ok(Line { to, breaks })
    }

    /// Sends a frame; returns when the socket has it. Every [`LATE`] in vain is told.
    pub fn send(&self, line: &Line, name: FrameName, parts: &[&[u8]], late: impl Fn()) -> Result<(), NetError> {
        let shared = &self.inner.shared;
        let to = &line.to;
        let mut open = lock(&to.tcp);
        shared.goes_on(name.run, to)?;
        let mut tcp = match open.take() {
            Some(tcp) => tcp,
            None => self.dial(to)?,
        };
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        let header = name.encode(bytes as u64);
        let mut slices: Vec<IoSlice<'_>> = std::iter::once(&header[..]).chain(parts.iter().copied()).map(IoSlice::new).collect();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            // Where this fails the connection goes with what it has of the frame.
            match tcp.write_vectored(rest) {
                Ok(0) => return Err(to.broke(io::ErrorKind::WriteZero.into())),
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    shared.goes_on(name.run, to)?;
                    late();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(to.broke(error)),
            }
        }
        *open = Some(tcp);
        Ok(())
    }

    fn dial(&self, to: &Neighbour) -> Result<TcpStream, NetError> {
        let shared = &self.inner.shared;
        let failed = |what| move |source| NetError::Io { peer: to.describe(), what, source };
        let mut tcp = magic::GANG.dial_blocking(&to.address)?;
        let token = shared.token.as_bytes();
        let hello = [&shared.life.0.to_le_bytes()[..], &to.life.0.to_le_bytes(), &(token.len() as u32).to_le_bytes(), token].concat();
        tcp.write_all(&hello).map_err(failed("greet"))?;
        let mut answer = [0];
        tcp.read_exact(&mut answer).map_err(failed("read the answer of"))?;
        let refused = |reason: &str| NetError::Refused { peer: to.describe(), reason: reason.to_owned() };
        match answer[0] {
            WELCOME => {}
            OTHER_LIFE => return Err(refused("another life of the worker is there")),
            _ => return Err(refused("the token is wrong")),
        }
        tcp.set_write_timeout(Some(LATE)).map_err(failed("set up the connection to"))?;
        Ok(tcp)
    }

    /// Waits for a frame of this worker; in vain where a connection of it has broken since the line was asked for. Every
    /// [`LATE`] in vain is told.
    pub fn receive(&self, line: &Line, name: FrameName, late: impl Fn()) -> Result<Vec<u8>, NetError> {
        let shared = &self.inner.shared;
        let mut mail = shared.mail();
        loop {
            if let Some(frame) = mail.frames.remove(&name) {
                return Ok(frame);
            }
            mail.goes_on(name.run, &line.to)?;
            if mail.breaks.get(&line.to.life).copied().unwrap_or_default() != line.breaks {
                return Err(line.to.closed("it broke while operands of a collective were on their way"));
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

impl Neighbour {
    fn describe(&self) -> String {
        format!("worker {} at {}", self.slot, self.address)
    }

    fn closed(&self, reason: &str) -> NetError {
        NetError::Closed { peer: self.describe(), reason: reason.to_owned() }
    }

    fn broke(&self, source: io::Error) -> NetError {
        NetError::Io { peer: self.describe(), what: "send operands to", source }
    }
}

impl Mail {
    /// An error where nobody is to send or wait any more in this run.
    fn goes_on(&self, run: u64, with: &Neighbour) -> Result<(), NetError> {
        match self.abandoned.get(&run) {
            Some(status) => Err(NetError::GivenUp(status.clone())),
            None if self.stopped => Err(with.closed("this worker ends")),
            None => Ok(()),
        }
    }
}

impl Shared {
    fn goes_on(&self, run: u64, with: &Neighbour) -> Result<(), NetError> {
        self.mail().goes_on(run, with)
    }

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
    let life = match greet(&mut tcp, peer, shared) {
        Ok(life) => life,
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
    tracing::debug!(peer, why, "the connection of another worker is gone");
    *shared.mail().breaks.entry(life).or_default() += 1;
    shared.changed.notify_all();
}

/// Which life of a worker it is, if it knows the token and means this one.
fn greet(tcp: &mut TcpStream, peer: &str, shared: &Shared) -> Result<Incarnation, NetError> {
    magic::GANG.accept_blocking(tcp, peer)?;
    let failed = |source| NetError::Io { peer: peer.to_owned(), what: "read the greeting of", source };
    let mut head = [0; 20];
    tcp.read_exact(&mut head).map_err(failed)?;
    let life = |at: usize| Incarnation(u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes")));
    let length = u32::from_le_bytes(head[16..].try_into().expect("four bytes")) as usize;
    if length > TOKEN_BYTES_MAX {
        return Err(NetError::Protocol { peer: peer.to_owned(), what: format!("a token of {length} bytes") });
    }
    let mut theirs = vec![0; length];
    tcp.read_exact(&mut theirs).map_err(failed)?;
    let (answer, why) = match (magic::same_secret(shared.token.as_bytes(), &theirs), life(8) == shared.life) {
        (false, _) => (WRONG_TOKEN, "its token is wrong"),
        (true, false) => (OTHER_LIFE, "it means another life of this worker"),
        (true, true) => (WELCOME, ""),
    };
    tcp.write_all(&[answer]).map_err(failed)?;
    if answer != WELCOME {
        return Err(NetError::Protocol { peer: peer.to_owned(), what: why.to_owned() });
    }
    tcp.set_read_timeout(None).map_err(failed)?;
    Ok(life(0))
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
        let listen = |life| GangNet::listen(SocketAddr::from(([127, 0, 0, 1], 0)), Incarnation(life), "token".to_owned()).unwrap();
        let ((a, at), (b, address)) = (listen(1), listen(2));
        a.neighbour(HostSlot(1), Incarnation(2), &address.to_string());
        b.neighbour(HostSlot(0), Incarnation(1), &at.to_string());
        let name = |run| FrameName { run, key: 0, count: 0, group: 0, from: 0 };
        a.abandon(1, Arc::new(Status::internal("boom")));
        let (to, from) = (a.line(HostSlot(1)).unwrap(), b.line(HostSlot(0)).unwrap());
        assert!(a.send(&to, name(1), &[b"old"], || ()).is_err());
        a.send(&to, name(2), &[b"new"], || ()).unwrap();
        assert_eq!(b.receive(&from, name(2), || ()).unwrap(), b"new");
        assert!(b.inner.shared.mail().frames.is_empty());
    }
}
