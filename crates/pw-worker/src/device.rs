//! One thread per device: takes launches in order, runs each to its end, says so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pw_exec::LoadedProgram;

use crate::exec::ExecSender;
use crate::gang::Gang;
use crate::launch::{self, LaunchJob};
use crate::per_device::PerDevice;

/// A program in this process.
pub(crate) struct Program {
    pub(crate) loaded: Arc<LoadedProgram>,
    pub(crate) runner: Runner,
    /// Bytes on one device of each output, told by the first run.
    pub(crate) sizes: OnceLock<Arc<[u64]>>,
}

/// What runs it, by [`pw_exec::Form`].
pub(crate) enum Runner {
    Gang(Gang),
    PerDevice(PerDevice),
}

impl Program {
    pub(crate) fn new(loaded: Arc<LoadedProgram>, runner: Runner) -> Program {
        Program { loaded, runner, sizes: OnceLock::new() }
    }
}

/// When each device was last done, in nanoseconds since `start`.
pub(crate) struct Clock {
    start: Instant,
    ready_ns: Box<[AtomicU64]>,
}

impl Clock {
    pub(crate) fn new(devices: usize) -> Clock {
        Clock { start: Instant::now(), ready_ns: (0..devices).map(|_| AtomicU64::new(0)).collect() }
    }

    fn since_start(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Something is done now on these devices. The longest, over them, of ready − max(previous ready, handed over).
    pub(crate) fn finish(&self, devices: &[u32], handed: Instant) -> u64 {
        let (now, handed) = (self.since_start(Instant::now()), self.since_start(handed));
        let longest = devices.iter().map(|&device| {
            let previous = self.ready_ns[device as usize].swap(now, Ordering::Relaxed);
            now.saturating_sub(previous.max(handed))
        });
        longest.max().unwrap_or(0)
    }
}

/// What a device thread is given.
pub(crate) enum DeviceJob {
    /// A launch, for all its members.
    All(LaunchJob),
    /// A launch, for the member on this device.
    Member(Arc<LaunchJob>, usize),
}

/// Serves a device's queue until nobody can put anything into it.
pub(crate) fn serve(jobs: &Receiver<DeviceJob>, clock: &Clock, exec: &ExecSender) {
    while let Ok(job) = jobs.recv() {
        let done = match job {
            DeviceJob::All(job) => Some(launch::run_all(job, clock)),
            DeviceJob::Member(job, member) => launch::run_member(job, member, clock),
        };
        if let Some(done) = done {
            exec.send(done);
        }
    }
}
