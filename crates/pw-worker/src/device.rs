//! One thread per device: takes launches in order, runs each to its end, says so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
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
    times: Mutex<Least>,
}

/// What runs it, by [`pw_exec::Form`].
pub(crate) enum Runner {
    Gang(Gang),
    PerDevice(PerDevice),
}

/// A launch that takes less, all members together, is not worth waking another thread for.
const TINY_NS: u64 = 80_000;

impl Program {
    pub(crate) fn new(loaded: Arc<LoadedProgram>, runner: Runner) -> Program {
        Program { loaded, runner, sizes: OnceLock::new(), times: Mutex::default() }
    }

    /// Its launches are so short, as far as is known, and so sure not to wait for anything, that whoever has one may
    /// run it on the spot.
    pub(crate) fn is_tiny(&self) -> bool {
        let report = &self.loaded.report;
        report.collectives == 0 && !report.host_callbacks && self.times().0.is_some_and(|ns| ns < TINY_NS)
    }

    /// A launch took so long, all members one after the other.
    pub(crate) fn note_time(&self, ns: u64) {
        self.times().note(ns);
    }

    fn times(&self) -> std::sync::MutexGuard<'_, Least> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long something takes when nothing disturbs it: the least seen, which slowly forgets.
#[derive(Clone, Copy, Debug, Default)]
struct Least(Option<u64>);

impl Least {
    fn note(&mut self, ns: u64) {
        self.0 = Some(self.0.map_or(ns, |least| ns.min(least + least / 64 + 1)));
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
    Gang(LaunchJob),
    /// A launch, for the member on this device.
    Member(Arc<LaunchJob>, usize),
}

/// Serves a device's queue until nobody can put anything into it.
pub(crate) fn serve(jobs: &Receiver<DeviceJob>, clock: &Clock, exec: &ExecSender) {
    while let Ok(job) = jobs.recv() {
        let done = match job {
            DeviceJob::Gang(job) => Some(launch::run_gang(job, clock)),
            DeviceJob::Member(job, member) => launch::run_member(job, member, clock),
        };
        if let Some(done) = done {
            exec.send(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_forgets_slowly() {
        let mut least = Least::default();
        for ns in [900, 100, 800] {
            least.note(ns);
        }
        assert_eq!(least.0, Some(102));
        (0..1000).for_each(|_| least.note(800));
        assert_eq!(least.0, Some(800));
    }
}
