//! The control stream of one life of a worker, over one connection after the other.
//!
//! A connection that breaks is not the end: frames that the worker has not acknowledged are kept, and sent again over the
//! next one. The worker is lost when nothing was heard of it for a lease, when its process is known to be gone, or when a
//! new life of it comes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pw_net::NetError;
use pw_net::control::{
    Answer, ControlReader, ControlWriter, ControllerFrame, Encoded, Sequence, SequenceError, Stamp, WorkerFrame, encode,
};
use pw_types::{Code, Command, Event, HostSlot, Incarnation, Status};
use tokio::sync::mpsc::{Receiver, Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use crate::LEASE_SECONDS;
use crate::turn::Inbox;

/// Frames that may wait for their acknowledgement.
const UNACKNOWLEDGED_MAX: usize = 1 << 16;

/// Acknowledgements owed that are worth a frame of their own.
const ACKS_OWED_MAX: u64 = 256;

const HEARTBEAT: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(LEASE_SECONDS);

/// A worker that has come back with the frames that it has.
pub(crate) struct Return {
    pub(crate) reader: ControlReader,
    pub(crate) writer: ControlWriter,
    pub(crate) received: u64,
}

/// What a link is told.
enum Call {
    Return(Box<Return>),
    /// A new life of the worker is here. Dropped when the link has ended for it, or goes on in spite of it.
    Superseded(oneshot::Sender<()>),
}

/// The links that there are.
#[derive(Default)]
pub(crate) struct Links {
    table: Mutex<HashMap<Incarnation, Entry>>,
}

struct Entry {
    slot: HostSlot,
    /// Its connection is broken.
    broken: bool,
    calls: Sender<Call>,
}

impl Links {
    fn table(&self) -> MutexGuard<'_, HashMap<Incarnation, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a worker that has come back to its link; says so to the worker where there is none.
    pub(crate) async fn give_back(&self, incarnation: Incarnation, back: Return) -> Result<(), NetError> {
        let calls = self.table().get(&incarnation).map(|entry| entry.calls.clone());
        let mut back = Box::new(back);
        if let Some(calls) = calls {
            match calls.send(Call::Return(back)).await {
                Ok(()) => return Ok(()),
                // It has ended meanwhile.
                Err(unsent) => match unsent.0 {
                    Call::Return(unsent) => back = unsent,
                    Call::Superseded(_) => return Ok(()),
                },
            }
        }
        let status = Status::new(Code::NotFound, "the controller does not know this life of the worker, or has given it up");
        back.writer.send(&Answer::Refused { status }).await
    }

    /// A worker asks for this slot: an earlier life whose connection is broken will not come back. Returns when the core
    /// has been told of its loss.
    pub(crate) async fn supersede(&self, slot: HostSlot) {
        let calls = self.table().values().find(|entry| entry.slot == slot && entry.broken).map(|entry| entry.calls.clone());
        let Some(calls) = calls else { return };
        let (ends, ended) = oneshot::channel();
        if calls.send(Call::Superseded(ends)).await.is_ok() {
            // Never sent: it goes with the link, or at once where the worker has come back meanwhile.
            let _ = ended.await;
        }
    }
}

/// Why a connection was served no longer.
enum End {
    /// The worker may come back, or is back already.
    Broken {
        why: String,
        back: Option<Box<Return>>,
    },
    Lost(String),
}

impl End {
    fn broken(why: impl Into<String>) -> End {
        End::Broken { why: why.into(), back: None }
    }
}

pub(crate) struct Link {
    slot: HostSlot,
    incarnation: Incarnation,
    /// For people.
    name: String,
    /// The process, where it is one of this machine.
    local_pid: Option<u32>,
    commands: UnboundedReceiver<Vec<Command>>,
    inbox: UnboundedSender<Inbox>,
    /// Who waits for the end of this link.
    superseded: Option<oneshot::Sender<()>>,
}

impl Link {
    pub(crate) fn new(
        (slot, incarnation): (HostSlot, Incarnation),
        name: String,
        local_pid: Option<u32>,
        commands: UnboundedReceiver<Vec<Command>>,
        inbox: UnboundedSender<Inbox>,
    ) -> Link {
        Link { slot, incarnation, name, local_pid, commands, inbox, superseded: None }
    }

    /// Serves the worker until it is lost, and tells the core.
    pub(crate) async fn run(mut self, links: &Links, reader: ControlReader, writer: ControlWriter) {
        let (slot, incarnation) = (self.slot, self.incarnation);
        let (calls, mut called) = channel(4);
        links.table().insert(incarnation, Entry { slot, broken: false, calls });
        let mut sequence = Sequence::new(incarnation, UNACKNOWLEDGED_MAX);
        let mut lease = Instant::now() + LEASE;
        let mut connection = (reader, writer);
        let reason = loop {
            let (why, back) = match self.serve(connection, &mut sequence, &mut lease, &mut called).await {
                End::Lost(reason) => break reason,
                End::Broken { why, back } => (why, back),
            };
            if let Some(entry) = links.table().get_mut(&incarnation) {
                entry.broken = true;
            }
            match self.await_return(&why, back, &mut sequence, lease, &mut called).await {
                Ok(again) => connection = again,
                Err(reason) => break reason,
            }
            if let Some(entry) = links.table().get_mut(&incarnation) {
                entry.broken = false;
            }
        };
        links.table().remove(&incarnation);
        tracing::warn!(%slot, worker = self.name, reason, "worker lost");
        let _ = self.inbox.send(Inbox::Event(Event::WorkerLost { slot, incarnation, reason }));
    }

    /// Waits for the worker, over a new connection, until the lease is over.
    async fn await_return(
        &mut self,
        why: &str,
        mut back: Option<Box<Return>>,
        sequence: &mut Sequence<Encoded>,
        lease: Instant,
        called: &mut Receiver<Call>,
    ) -> Result<(ControlReader, ControlWriter), String> {
        let mut look = interval(HEARTBEAT / 10);
        let mut told = false;
        loop {
            let call = tokio::select! {
                biased;
                () = std::future::ready(()), if back.is_some() => back.take().map(Call::Return),
                call = called.recv() => call,
                () = tokio::time::sleep_until(lease) => return Err(format!("{why}, and nothing was heard for {LEASE_SECONDS} s")),
                _ = look.tick() => {
                    if self.local_pid.is_some_and(is_gone) {
                        return Err(why.to_owned());
                    }
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(slot = %self.slot, worker = self.name, why, "the connection of a worker broke; waiting for it to come back");
                    }
                    continue;
                }
            };
            let back = match call {
                Some(Call::Return(back)) => *back,
                Some(Call::Superseded(ends)) => {
                    self.superseded = Some(ends);
                    return Err(why.to_owned());
                }
                None => return Err(why.to_owned()),
            };
            let Return { reader, mut writer, received } = back;
            if let Err(error) = sequence.resume(received) {
                let _ = writer.send(&Answer::Refused { status: Status::internal(error.to_string()) }).await;
                return Err(format!("{why}, and it came back with something else: {error}"));
            }
            let welcome = Answer::Welcome { slot: self.slot, incarnation: self.incarnation, received: sequence.received() };
            if writer.send(&welcome).await.is_ok() {
                let again = sequence.unacknowledged().count();
                tracing::info!(slot = %self.slot, worker = self.name, again, "a worker has come back; frames that it has not seen are sent again");
                return Ok((reader, writer));
            }
        }
    }

    /// Carries frames both ways. This task owns the numbering; a second one does the writing, so that a full socket
    /// never stops the reading.
    async fn serve(
        &mut self,
        (mut reader, mut writer): (ControlReader, ControlWriter),
        sequence: &mut Sequence<Encoded>,
        lease: &mut Instant,
        called: &mut Receiver<Call>,
    ) -> End {
        let again: Vec<Encoded> = sequence.unacknowledged().map(|(_, frame)| frame.clone()).collect();
        // Its bound is that of the frames which are kept; waiting for room here would be waiting without the lease.
        let (outgoing, mut frames) = unbounded_channel::<Encoded>();
        let mut writing = Writing(tokio::spawn(async move {
            for frame in &again {
                writer.send_encoded(frame).await?;
            }
            while let Some(frame) = frames.recv().await {
                writer.send_encoded(&frame).await?;
            }
            Ok::<(), NetError>(())
        }));
        let mut heartbeat = interval(HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        *lease = Instant::now() + LEASE;
        loop {
            tokio::select! {
                biased;
                next = timeout_at(*lease, reader.next::<WorkerFrame>()) => {
                    let received = match next {
                        Err(_) => return End::Lost(format!("nothing was heard for {LEASE_SECONDS} s")),
                        Ok(Err(NetError::Io { source, .. })) => return End::broken(format!("its connection broke: {source}")),
                        Ok(Err(NetError::Closed { reason, .. })) => return End::broken(format!("its connection broke: {reason}")),
                        Ok(Err(error)) => return End::Lost(error.chain()),
                        Ok(Ok(None)) => return End::broken("it closed its connection"),
                        Ok(Ok(Some(received))) => received,
                    };
                    *lease = Instant::now() + LEASE;
                    if let Err(error) = self.take(received, sequence) {
                        return End::Lost(format!("it broke the protocol: {error}"));
                    }
                    if sequence.acks_owed() >= ACKS_OWED_MAX && outgoing.send(empty(sequence)).is_err() {
                        return writing.end().await;
                    }
                }
                call = called.recv() => match call {
                    // It knows of the break before we do.
                    Some(Call::Return(back)) => return End::Broken { why: "it has opened a new connection".to_owned(), back: Some(back) },
                    Some(Call::Superseded(_)) | None => {}
                },
                batch = self.commands.recv(), if sequence.has_room() => {
                    let Some(batch) = batch else { return End::Lost("its slot was given to another one".to_owned()) };
                    let frame = |stamp: Stamp| {
                        encode(&ControllerFrame { seq: stamp.seq, ack: stamp.ack, incarnation: stamp.incarnation, commands: batch })
                    };
                    let Ok(frame) = sequence.send(frame).cloned() else { unreachable!("there was room") };
                    if outgoing.send(frame).is_err() {
                        return writing.end().await;
                    }
                }
                _ = heartbeat.tick() => {
                    if outgoing.send(empty(sequence)).is_err() {
                        return writing.end().await;
                    }
                }
            }
        }
    }

    fn take(&self, received: WorkerFrame, sequence: &mut Sequence<Encoded>) -> Result<(), SequenceError> {
        let stamp = Stamp { seq: received.seq, ack: received.ack, incarnation: received.incarnation };
        sequence.receive(stamp, received.reports.is_empty())?;
        for report in received.reports {
            let _ = self.inbox.send(Inbox::Event(Event::Report { slot: self.slot, incarnation: self.incarnation, report }));
        }
        Ok(())
    }
}

fn empty(sequence: &mut Sequence<Encoded>) -> Encoded {
    let stamp = sequence.heartbeat();
    encode(&ControllerFrame { seq: stamp.seq, ack: stamp.ack, incarnation: stamp.incarnation, commands: Vec::new() })
}

/// No process of this machine has this number any more.
fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    match stat {
        // One that has ended and that nobody has collected: its state comes behind the name.
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound && std::path::Path::new("/proc/self").exists(),
    }
}

struct Writing(tokio::task::JoinHandle<Result<(), NetError>>);

impl Writing {
    /// It has ended; why.
    async fn end(&mut self) -> End {
        match (&mut self.0).await {
            Ok(Err(error)) => End::broken(error.chain()),
            Ok(Ok(())) => End::broken("its connection was closed"),
            Err(error) => End::Lost(format!("writing to it failed: {error}")),
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.abort();
    }
}
