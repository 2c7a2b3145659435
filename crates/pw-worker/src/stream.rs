//! The control stream: frames of commands in, one frame of reports out per turn, a heartbeat each second.

use std::sync::Mutex;
use std::time::Duration;

use pw_net::control::{ControlReader, ControlWriter, ControllerFrame, Incoming, Sequence, Stamp, WorkerFrame};
use pw_types::{Incarnation, Report};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::MissedTickBehavior;

use crate::error::WorkerError;
use crate::exec::{ExecSender, Message};
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
    address: String,
    parent_pid: Option<u32>,
    sequence: Mutex<Sequence<()>>,
    acks_due: Notify,
    reader: ControlReader,
    writer: ControlWriter,
}

impl Stream {
    pub(crate) fn new(config: &WorkerConfig, incarnation: Incarnation, reader: ControlReader, writer: ControlWriter) -> Stream {
        Stream {
            address: config.controller.clone(),
            parent_pid: config.parent_pid,
            sequence: Mutex::new(Sequence::new(incarnation, UNACKNOWLEDGED_MAX)),
            acks_due: Notify::new(),
            reader,
            writer,
        }
    }

    /// Ends with the reason why it ended.
    pub(crate) async fn serve(self, link: Link) -> Result<(), WorkerError> {
        let Stream { address, parent_pid, sequence, acks_due, mut reader, mut writer } = self;
        let Link { exec, mut reports, mut fatal } = link;
        let reason = tokio::select! {
            text = fatal.recv() => return Err(WorkerError::Fatal(text.unwrap_or_default())),
            () = watch_parent(parent_pid) => return Err(WorkerError::ParentGone),
            reason = read(&mut reader, &exec, &sequence, &acks_due) => reason,
            reason = write(&mut writer, &mut reports, &sequence, &acks_due) => reason,
        };
        Err(WorkerError::Lost { address, reason })
    }
}

fn locked<T>(sequence: &Mutex<Sequence<()>>, f: impl FnOnce(&mut Sequence<()>) -> T) -> T {
    f(&mut sequence.lock().expect("nothing panics while it holds the numbers"))
}

/// Takes frames until there are no more; says why.
async fn read(reader: &mut ControlReader, exec: &ExecSender, sequence: &Mutex<Sequence<()>>, acks_due: &Notify) -> String {
    loop {
        let frame = match reader.next::<ControllerFrame>().await {
            Ok(Some(frame)) => frame,
            Ok(None) => return "it has ended the connection".to_owned(),
            Err(error) => return error.chain(),
        };
        let stamp = Stamp { seq: frame.seq, ack: frame.ack, incarnation: frame.incarnation };
        let (taken, owed) = locked(sequence, |s| (s.receive(stamp, frame.commands.is_empty()), s.acks_owed()));
        match taken {
            Ok(Incoming::Next) => exec.send(Message::Commands(frame.commands)),
            Ok(Incoming::Heartbeat) => {}
            Err(error) => return format!("it broke the protocol: {error}"),
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
    sequence: &Mutex<Sequence<()>>,
    acks_due: &Notify,
) -> String {
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
        let result = match batch {
            None => Ok((locked(sequence, Sequence::heartbeat), Vec::new())),
            Some(mut batch) => {
                while let Ok(more) = reports.try_recv() {
                    batch.extend(more);
                }
                locked(sequence, |s| s.send(())).map(|stamp| (stamp, batch))
            }
        };
        let (stamp, reports) = match result {
            Ok(frame) => frame,
            Err(error) => return error.to_string(),
        };
        let frame = WorkerFrame { seq: stamp.seq, ack: stamp.ack, incarnation: stamp.incarnation, reports };
        if let Err(error) = writer.send(&frame).await {
            return error.chain();
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
