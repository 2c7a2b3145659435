//! The control stream: frames of commands in, one frame of reports out per turn, a heartbeat each second. A connection
//! that breaks is opened again, and what had not arrived is sent again.

use std::sync::Mutex;
use std::time::Duration;

use pw_net::NetError;
use pw_net::control::{ControlReader, ControlWriter, ControllerFrame, Encoded, Incoming, Sequence, Stamp, WorkerFrame, encode};
use pw_types::{Incarnation, Report, WorkerInfo};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::MissedTickBehavior;

use crate::error::WorkerError;
use crate::exec::{ExecSender, Message};
use crate::registration::{Registered, Registration};
use crate::worker::WorkerConfig;

const HEARTBEAT: Duration = Duration::from_secs(1);

/// Frames that the controller may leave unacknowledged.
const UNACKNOWLEDGED_MAX: usize = 1 << 20;

/// Acknowledgements owed that are worth a frame of their own.
const ACKS_OWED_MAX: u64 = 64;

/// The stream's connections to `Exec`.
pub(crate) struct Link {
    pub(crate) exec: ExecSender,
    pub(crate) reports: UnboundedReceiver<Vec<Report>>,
    pub(crate) fatal: UnboundedReceiver<String>,
}

pub(crate) struct Stream {
    registration: Registration,
    parent_pid: Option<u32>,
    sequence: Mutex<Sequence<Encoded>>,
    acks_due: Notify,
    connection: Registered,
}

/// Why a connection was served no longer.
enum End {
    /// Another one may go on where it ended.
    Broken(String),
    Over(String),
}

impl Stream {
    /// Registers this worker with the controller.
    pub(crate) async fn register(config: &WorkerConfig, info: WorkerInfo, incarnation: Incarnation) -> Result<Stream, WorkerError> {
        let registration = Registration::new(config, info, incarnation);
        Ok(Stream {
            connection: registration.register().await?,
            registration,
            parent_pid: config.parent_pid,
            sequence: Mutex::new(Sequence::new(incarnation, UNACKNOWLEDGED_MAX)),
            acks_due: Notify::new(),
        })
    }

    /// Ends with the reason why it ended.
    pub(crate) async fn serve(self, link: Link) -> Result<(), WorkerError> {
        let Link { exec, mut reports, mut fatal } = link;
        let (parent_pid, address) = (self.parent_pid, self.registration.controller.clone());
        let reason = tokio::select! {
            text = fatal.recv() => return Err(WorkerError::Fatal(text.unwrap_or_default())),
            () = watch_parent(parent_pid) => return Err(WorkerError::ParentGone),
            reason = self.talk(&exec, &mut reports) => reason,
        };
        Err(WorkerError::Lost { address, reason })
    }

    /// Carries frames both ways, over one connection after the other; says why there is none any more.
    async fn talk(self, exec: &ExecSender, reports: &mut UnboundedReceiver<Vec<Report>>) -> String {
        let Stream { registration, sequence, acks_due, mut connection, .. } = self;
        loop {
            let Registered { mut reader, mut writer, received, .. } = connection;
            if let Err(error) = locked(&sequence, |s| s.resume(received)) {
                return format!("it broke the protocol: {error}");
            }
            let end = tokio::select! {
                end = read(&mut reader, exec, &sequence, &acks_due) => end,
                end = write(&mut writer, reports, &sequence, &acks_due) => end,
            };
            let why = match end {
                End::Over(reason) => return reason,
                End::Broken(why) => why,
            };
            drop((reader, writer));
            let received = locked(&sequence, |s| s.received());
            connection = match registration.come_back(received).await {
                Ok(connection) => connection,
                Err(reason) => return format!("{why}; {reason}"),
            };
            tracing::warn!(controller = %registration.controller, why, "the connection to the controller broke and is there again; nothing is lost");
        }
    }
}

fn locked<T>(sequence: &Mutex<Sequence<Encoded>>, f: impl FnOnce(&mut Sequence<Encoded>) -> T) -> T {
    f(&mut sequence.lock().expect("nothing panics while it holds the numbers"))
}

fn ended(error: NetError) -> End {
    match error {
        NetError::Io { .. } | NetError::Closed { .. } => End::Broken(error.chain()),
        _ => End::Over(error.chain()),
    }
}

/// Takes frames until there are no more; says why.
async fn read(reader: &mut ControlReader, exec: &ExecSender, sequence: &Mutex<Sequence<Encoded>>, acks_due: &Notify) -> End {
    loop {
        let frame = match reader.next::<ControllerFrame>().await {
            Ok(Some(frame)) => frame,
            Ok(None) => return End::Broken("it has ended the connection".to_owned()),
            Err(error) => return ended(error),
        };
        let stamp = Stamp { seq: frame.seq, ack: frame.ack, incarnation: frame.incarnation };
        let (taken, owed) = locked(sequence, |s| (s.receive(stamp, frame.commands.is_empty()), s.acks_owed()));
        match taken {
            Ok(Incoming::Next) => exec.send(Message::Commands(frame.commands)),
            Ok(Incoming::Heartbeat) => {}
            Err(error) => return End::Over(format!("it broke the protocol: {error}")),
        }
        if owed >= ACKS_OWED_MAX {
            acks_due.notify_one();
        }
    }
}

/// Sends reports until that fails; says why.
async fn write(
    writer: &mut ControlWriter,
    reports: &mut UnboundedReceiver<Vec<Report>>,
    sequence: &Mutex<Sequence<Encoded>>,
    acks_due: &Notify,
) -> End {
    // What the controller has not seen of an earlier connection comes first.
    let again: Vec<Encoded> = locked(sequence, |s| s.unacknowledged().map(|(_, frame)| frame.clone()).collect());
    for frame in again {
        if let Err(error) = writer.send_encoded(&frame).await {
            return ended(error);
        }
    }
    let mut tick = tokio::time::interval(HEARTBEAT);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let batch = tokio::select! {
            batch = reports.recv() => match batch {
                Some(batch) => Some(batch),
                // `Exec` has ended and has said why elsewhere.
                None => std::future::pending().await,
            },
            _ = tick.tick() => None,
            () = acks_due.notified() => None,
        };
        let frame =
            |stamp: Stamp, reports| encode(&WorkerFrame { seq: stamp.seq, ack: stamp.ack, incarnation: stamp.incarnation, reports });
        let made = match batch {
            None => Ok(frame(locked(sequence, Sequence::heartbeat), Vec::new())),
            Some(mut batch) => {
                while let Ok(more) = reports.try_recv() {
                    batch.extend(more);
                }
                locked(sequence, |s| s.send(|stamp| frame(stamp, batch)).cloned())
            }
        };
        let made = match made {
            Ok(made) => made,
            Err(error) => return End::Over(error.to_string()),
        };
        if let Err(error) = writer.send_encoded(&made).await {
            return ended(error);
        }
    }
}

/// Returns when the process that is to be the parent no longer is.
async fn watch_parent(parent: Option<u32>) {
    let Some(parent) = parent else { return std::future::pending().await };
    while std::os::unix::process::parent_id() == parent {
        tokio::time::sleep(HEARTBEAT / 2).await;
    }
}
