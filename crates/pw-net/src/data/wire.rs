//! The byte stream of a connection, over one TCP connection after the other.
//!
//! Each direction counts its bytes behind the greeting. A sender keeps them until they are acknowledged (`kept.rs`); when
//! TCP breaks, both sides say how much they have, and each sends the rest again, from the very byte on. Reader and writer
//! above notice nothing but a pause.
//!
//! Acknowledgements are frames of the same stream, a few for each MiB, so that they hardly cause others. They are sent even
//! where too much is kept, so two full sides do not wait for each other.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use pw_types::{Handle, SessionId};
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;

use super::frame::{HEADER, Header, Kind};
use super::kept::{KEPT_BYTES_MAX, Kept, PIECE_BYTES, Piece, encode};
use super::outbox::Frame;

/// How long a broken connection may take to come back.
pub(super) const RESUME: Duration = Duration::from_secs(10);

/// Bytes owed that are worth an acknowledgement. Far less than what the peer may keep, also where all are tiny frames.
const OWED_BYTES: usize = 2 << 20;
const _: () = assert!(OWED_BYTES / HEADER * (HEADER + PIECE_BYTES) < KEPT_BYTES_MAX);

pub(super) struct Wire {
    /// Taken before `reading`, never after.
    state: Mutex<State>,
    /// By itself, since it is held while bytes are copied out of the socket.
    reading: Mutex<Reading>,
    phase: watch::Sender<Phase>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// No TCP connection any more, since that of this number, and why.
    Broken(u64, String),
    /// Over the TCP connection of this number.
    Open(u64),
    /// For good.
    Closed,
}

#[derive(Default)]
struct State {
    /// Goes up with each attempt to have a TCP connection: what belongs to an earlier one is void.
    number: u64,
    /// Until the writer takes it.
    write: Option<(u64, OwnedWriteHalf)>,
    /// Received bytes that the peer knows of, or will by `ack`.
    told: u64,
    /// To be acknowledged.
    ack: Option<u64>,
    kept: Kept,
}

#[derive(Default)]
struct Reading {
    number: u64,
    half: Option<OwnedReadHalf>,
    reader: Option<Waker>,
    received: u64,
}

/// What a writer writes on.
pub(super) struct Outgoing {
    number: u64,
    half: OwnedWriteHalf,
    /// To be written before anything else.
    again: Vec<Piece>,
}

/// An attempt to have a TCP connection again, which a later one makes void.
pub(super) struct Attempt {
    number: u64,
    /// Bytes that have been received; stays so until the attempt succeeds.
    pub(super) received: u64,
}

impl Wire {
    /// Without a TCP connection yet.
    pub(super) fn new() -> Arc<Wire> {
        let phase = watch::Sender::new(Phase::Broken(0, "it was not there yet".to_owned()));
        Arc::new(Wire { state: Mutex::default(), reading: Mutex::default(), phase })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().expect("nothing panics while it reads")
    }

    /// Puts an end to the TCP connection, if there is one. Nothing is received until there is another one.
    pub(super) fn suspend(&self, why: &str) -> Attempt {
        let mut state = self.state();
        state.number += 1;
        let halves = self.take_halves(&mut state);
        self.set_broken(why);
        let attempt = Attempt { number: state.number, received: self.reading().received };
        drop(state);
        drop(halves);
        attempt
    }

    /// Goes on over `tcp`, whose other end has the bytes up to `count`. An attempt that came too late is dropped.
    pub(super) fn open(&self, attempt: Attempt, tcp: TcpStream, count: u64) -> Result<(), String> {
        let mut state = self.state();
        if state.number != attempt.number || matches!(*self.phase.borrow(), Phase::Closed) {
            return Ok(());
        }
        state.kept.check(count)?;
        let done = state.kept.acknowledge(count)?;
        let (read, half) = tcp.into_split();
        // It has just been told.
        (state.told, state.ack) = (attempt.received, None);
        state.write = Some((attempt.number, half));
        let mut reading = self.reading();
        (reading.number, reading.half) = (attempt.number, Some(read));
        let reader = reading.reader.take();
        drop(reading);
        self.phase.send_replace(Phase::Open(attempt.number));
        drop(state);
        drop(done);
        if let Some(reader) = reader {
            reader.wake();
        }
        Ok(())
    }

    /// Whether one that has the bytes up to `count` can be served.
    pub(super) fn check(&self, count: u64) -> Result<(), String> {
        self.state().kept.check(count)
    }

    /// The TCP connection of this number does not work any more.
    pub(super) fn broke(&self, number: u64, why: &str) {
        let mut state = self.state();
        if state.number != number {
            return;
        }
        let halves = self.take_halves(&mut state);
        self.set_broken(why);
        drop(state);
        drop(halves);
    }

    fn take_halves(&self, state: &mut State) -> (Option<OwnedReadHalf>, Option<(u64, OwnedWriteHalf)>) {
        (self.reading().half.take(), state.write.take())
    }

    /// The first reason counts. Called with the state held.
    fn set_broken(&self, why: &str) {
        self.phase.send_if_modified(|phase| {
            let Phase::Open(number) = *phase else { return false };
            *phase = Phase::Broken(number, why.to_owned());
            true
        });
    }

    /// Nothing is read any more, and nobody can go on here; what is being written may be finished.
    pub(super) fn close(&self) {
        let mut state = self.state();
        self.phase.send_replace(Phase::Closed);
        let rest = (self.reading().half.take(), std::mem::take(&mut state.kept));
        drop(state);
        drop(rest);
    }

    /// Returns when TCP breaks, with the reason.
    pub(super) async fn broken(&self) -> String {
        let mut phase = self.phase.subscribe();
        let is_broken = |phase: &Phase| matches!(phase, Phase::Broken(..));
        match phase.wait_for(is_broken).await.as_deref() {
            Ok(Phase::Broken(_, why)) => why.clone(),
            // The sender is in `self`, so the wait cannot fail.
            _ => String::new(),
        }
    }

    /// Returns when TCP has been broken for too long, with the reason.
    pub(super) async fn given_up(&self) -> String {
        let mut phase = self.phase.subscribe();
        loop {
            self.broken().await;
            let broken = phase.borrow_and_update().clone();
            let Phase::Broken(last, why) = broken else { continue };
            let other = phase.wait_for(|phase| !matches!(phase, Phase::Broken(number, _) if *number == last));
            if tokio::time::timeout(RESUME, other).await.is_err() {
                return format!("{why}; it did not come back within {} s", RESUME.as_secs());
            }
        }
    }

    /// What to write on, as soon as there is something. What is to be written again is settled only here, by the one who
    /// adds to it.
    pub(super) async fn outgoing(&self) -> Outgoing {
        let mut phase = self.phase.subscribe();
        loop {
            phase.mark_unchanged();
            if let Some(outgoing) = self.take_outgoing() {
                return outgoing;
            }
            // The sender is in `self`, so the wait cannot fail.
            let _ = phase.changed().await;
        }
    }

    fn take_outgoing(&self) -> Option<Outgoing> {
        let mut state = self.state();
        let (number, half) = state.write.take()?;
        Some(Outgoing { number, half, again: state.kept.unacknowledged() })
    }

    /// Returns when there is no use in writing on this any more.
    pub(super) async fn replaced(&self, number: u64) {
        let mut phase = self.phase.subscribe();
        let stays = |phase: &Phase| matches!(phase, Phase::Closed) || matches!(phase, Phase::Open(open) if *open == number);
        let _ = phase.wait_for(|phase| !stays(phase)).await;
    }

    pub(super) fn has_room(&self) -> bool {
        self.state().kept.has_room()
    }

    /// Makes these frames, and an acknowledgement where one is due, part of the stream.
    pub(super) fn keep(&self, frames: &mut Vec<Frame>) -> Vec<Piece> {
        if let Some(received) = self.state().ack.take() {
            frames.insert(0, Frame::control(Kind::Ack, (SessionId(0), Handle(0)), received, Bytes::new()));
        }
        let mut pieces = Vec::with_capacity(frames.len());
        encode(frames, &mut pieces);
        if !pieces.is_empty() {
            let mut state = self.state();
            pieces.iter().cloned().for_each(|piece| state.kept.push(piece));
        }
        pieces
    }

    /// A frame was read, the `last` for which the peer keeps somebody's memory. True where the writer has to acknowledge
    /// something.
    pub(super) fn took(&self, last: bool) -> bool {
        let received = self.reading().received;
        let mut state = self.state();
        let due = last || received.saturating_sub(state.told) >= OWED_BYTES as u64;
        if due {
            state.told = received;
            state.ack = Some(received);
        }
        due
    }

    /// The peer has the bytes up to `count`. True where the writer may have waited for that.
    pub(super) fn acknowledged(&self, count: u64) -> Result<bool, String> {
        let mut state = self.state();
        let full = !state.kept.has_room();
        let done = state.kept.acknowledge(count)?;
        let room = full && state.kept.has_room();
        drop(state);
        drop(done);
        Ok(room)
    }
}

impl Outgoing {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// What the other end may have missed.
    pub(super) async fn repeat(&mut self) -> io::Result<()> {
        let again = std::mem::take(&mut self.again);
        self.write(&again).await
    }

    /// In as few system calls as the socket allows.
    pub(super) async fn write(&mut self, pieces: &[Piece]) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece.bytes())).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let count = self.half.write_vectored(rest).await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut rest, count);
        }
        Ok(())
    }

    /// Says that nothing is to be had back: whoever hears it need not wait.
    pub(super) async fn end(&mut self) -> io::Result<()> {
        let end = Header::new(Kind::End, (SessionId(0), Handle(0)), 0, 0);
        self.half.write_all(&end.encode()).await?;
        self.half.shutdown().await
    }
}

/// Reads what comes; neither fails nor ends.
pub(super) struct Incoming(pub(super) Arc<Wire>);

impl AsyncRead for Incoming {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut reading = self.0.reading();
        let before = buf.filled().len();
        let polled = match &mut reading.half {
            Some(half) => Pin::new(half).poll_read(cx, buf),
            None => Poll::Pending,
        };
        let why = match polled {
            Poll::Ready(Ok(())) if buf.filled().len() > before || buf.remaining() == 0 => {
                reading.received += (buf.filled().len() - before) as u64;
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Ok(())) => Some("it ended".to_owned()),
            Poll::Ready(Err(error)) => Some(format!("reading failed: {error}")),
            Poll::Pending => None,
        };
        // Whatever takes the half away wakes nobody, so the next one does.
        if !reading.reader.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            reading.reader = Some(cx.waker().clone());
        }
        let number = reading.number;
        drop(reading);
        if let Some(why) = why {
            self.0.broke(number, &why);
        }
        Poll::Pending
    }
}
