//! Uploads of the data plane: bytes go from the socket into the block that becomes a device buffer, answers to host
//! callbacks to the call that waits.

use std::any::Any;
use std::sync::Arc;

use pw_exec::ExecEvent;
use pw_net::data::{UploadSink, UploadTarget};
use pw_pjrt::AlignedBlock;
use pw_types::{Cause, Code, Handle, SessionId, Status};

use crate::exec::{ExecSender, Message};
use crate::host_callback::{Calls, is_call};

pub(crate) struct Sink {
    exec: ExecSender,
    calls: Arc<Calls>,
    /// No upload can be larger than what the machine has.
    bytes_max: u64,
}

impl Sink {
    pub(crate) fn new(exec: ExecSender, calls: Arc<Calls>) -> Sink {
        Sink { exec, calls, bytes_max: machine_bytes() }
    }
}

fn machine_bytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = info.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    total.map_or(u64::MAX / 2, |kb| kb * 1024)
}

struct Target(AlignedBlock);

impl UploadTarget for Target {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.0)
    }
}

impl UploadSink for Sink {
    fn begin(&self, session: SessionId, buffer: Handle, total: u64) -> Result<Box<dyn UploadTarget>, Status> {
        if is_call(buffer) {
            return self.calls.begin(session, buffer, total).map(|block| Box::new(Target(block)) as Box<dyn UploadTarget>);
        }
        match usize::try_from(total) {
            Ok(bytes) if total <= self.bytes_max => Ok(Box::new(Target(AlignedBlock::to_fill(bytes)))),
            _ => {
                let text = format!("an upload of {total} bytes to a worker with {} bytes of memory", self.bytes_max);
                let status = Status::new(Code::ResourceExhausted, text).with_cause(Cause::OutOfMemory);
                // A refused upload is not heard of again.
                self.failed(session, buffer, status.clone());
                Err(status)
            }
        }
    }

    fn landed(&self, session: SessionId, buffer: Handle, target: Box<dyn UploadTarget>) {
        let block = target.into_any().downcast::<AlignedBlock>().expect("targets are made by `begin`");
        if is_call(buffer) {
            return self.calls.end(session, buffer, Ok(*block));
        }
        self.exec.send(Message::Landed { session, buffer, block: *block });
    }

    fn failed(&self, session: SessionId, buffer: Handle, status: Status) {
        if is_call(buffer) {
            return self.calls.end(session, buffer, Err(status));
        }
        self.exec.send(Message::Event(ExecEvent::UploadFailed { session, buffer, status }));
    }

    fn attached(&self, session: SessionId) {
        self.exec.send(Message::Event(ExecEvent::SessionAttached { session }));
    }

    fn detached(&self, session: SessionId) {
        self.calls.detached(session);
        self.exec.send(Message::Event(ExecEvent::SessionDetached { session }));
    }
}
