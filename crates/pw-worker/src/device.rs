//! One thread per device: takes launches in order, runs each to its end, fills the outputs, says so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use pw_exec::{ExecEvent, LoadedProgram, Part, StartLaunch};
use pw_pjrt::{Buffer, LoadedExecutable};
use pw_types::Status;

use crate::convert;
use crate::exec::{ExecSender, Message};
use crate::gang::{Call, GangForm, Least, NativeGang};
use crate::store::Stored;

/// A program in this process.
pub(crate) struct Program {
    pub(crate) loaded: Arc<LoadedProgram>,
    form: Box<dyn GangForm>,
    /// Bytes on one device of each output, told by the first run.
    sizes: OnceLock<Arc<[u64]>>,
    times: Mutex<Least>,
}

/// A launch that takes less is not worth waking another thread for.
const TINY_NS: u64 = 80_000;

impl Program {
    pub(crate) fn new(loaded: Arc<LoadedProgram>, executable: LoadedExecutable, single: Option<LoadedExecutable>) -> Program {
        let form = Box::new(NativeGang::new(executable, single));
        Program { loaded, form, sizes: OnceLock::new(), times: Mutex::default() }
    }
}

/// A launch in a device thread's queue.
pub(crate) struct LaunchJob {
    pub(crate) start: Arc<StartLaunch>,
    pub(crate) program: Arc<Program>,
    /// What the parts of the arguments lie in, in their order.
    pub(crate) sources: Vec<Arc<Stored>>,
    pub(crate) outputs: Vec<Arc<Stored>>,
    pub(crate) handed: Instant,
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

    /// The launch is done now on all its devices. The longest, over them, of ready − max(previous ready, handed over).
    fn finish(&self, devices: &[u32], handed: Instant) -> u64 {
        let (now, handed) = (self.since_start(Instant::now()), self.since_start(handed));
        let longest = devices.iter().map(|&device| {
            let previous = self.ready_ns[device as usize].swap(now, Ordering::Relaxed);
            now.saturating_sub(previous.max(handed))
        });
        longest.max().unwrap_or(0)
    }
}

impl Program {
    /// Its launches are so short, as far as is known, and so sure not to wait for anything, that whoever has one may
    /// run it on the spot.
    pub(crate) fn is_tiny(&self) -> bool {
        self.loaded.report.collectives == 0 && self.times().ns().is_some_and(|ns| ns < TINY_NS)
    }

    fn times(&self) -> MutexGuard<'_, Least> {
        self.times.lock().expect("nothing panics while it holds the times")
    }
}

/// Serves a device's queue until nobody can put anything into it.
pub(crate) fn serve(jobs: &Receiver<LaunchJob>, clock: &Clock, exec: &ExecSender) {
    while let Ok(job) = jobs.recv() {
        let thread = job.start.thread;
        exec.send(Message::LaunchDone { thread, event: finish(job, clock) });
    }
}

/// Runs a launch to its end and fills its outputs.
pub(crate) fn finish(job: LaunchJob, clock: &Clock) -> ExecEvent {
    let start = Instant::now();
    let result = run(&job);
    if let Err(status) = &result {
        job.outputs.iter().for_each(|output| output.poison(status));
    }
    job.program.times().note(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let device_ns = clock.finish(&job.start.program.devices, job.handed);
    // The job's hold on its inputs goes before the core hears that they are free.
    ExecEvent::LaunchDone { run: job.start.run, device_ns, result }
}

fn run(job: &LaunchJob) -> Result<Arc<[u64]>, Arc<Status>> {
    let arguments = gather(job)?;
    let non_donatable = non_donatable(job);
    let call = Call { arguments: &arguments, non_donatable: &non_donatable, launch_id: job.start.launch_id };
    let by_member = job.program.form.launch(&call).map_err(|error| {
        let mut status = convert::status(error);
        status.message = format!("{} (run {}): {}", job.program.loaded.report.name, job.start.run, status.message);
        Arc::new(status)
    })?;
    let sizes = sizes(&job.program, &by_member)?;
    for (member, outputs) in by_member.into_iter().enumerate() {
        for ((stored, buffer), &bytes) in job.outputs.iter().zip(outputs).zip(sizes.iter()) {
            stored.fill(member, buffer, bytes);
        }
    }
    Ok(sizes)
}

/// The argument lists by member; the first poison instead, if there is one.
fn gather(job: &LaunchJob) -> Result<Vec<Vec<&Buffer>>, Arc<Status>> {
    let start = &job.start;
    let mut lists: Vec<Vec<&Buffer>> = start.program.devices.iter().map(|_| Vec::with_capacity(start.arguments.len())).collect();
    let mut place = 0;
    for argument in &start.arguments {
        let mut member = 0;
        while place < argument.end as usize {
            let Part { first, count, .. } = start.parts[place];
            for shard in first..first + count {
                lists[member].push(job.sources[place].get(shard)?);
                member += 1;
            }
            place += 1;
        }
    }
    Ok(lists)
}

/// Parameters that the program would take over but must not: others own them, or a download reads them in place.
fn non_donatable(job: &LaunchJob) -> Vec<i64> {
    let keep = |index: usize| {
        let argument = job.start.arguments[index];
        let first = if index == 0 { 0 } else { job.start.arguments[index - 1].end as usize };
        let viewed = |place: usize| {
            let Part { first, count, .. } = job.start.parts[place];
            (first..first + count).any(|shard| job.sources[place].is_viewed(shard))
        };
        !argument.donate || (first..argument.end as usize).any(viewed)
    };
    job.program.loaded.report.donated.iter().filter(|&&index| keep(index as usize)).map(|&index| i64::from(index)).collect()
}

fn sizes(program: &Program, by_member: &[Vec<Buffer>]) -> Result<Arc<[u64]>, Arc<Status>> {
    if let Some(sizes) = program.sizes.get() {
        return Ok(sizes.clone());
    }
    let first = by_member.first().map_or(&[][..], Vec::as_slice);
    let sizes: Result<Arc<[u64]>, _> = first.iter().map(|buffer| buffer.on_device_size().map(|n| n as u64)).collect();
    let sizes = sizes.map_err(|error| Arc::new(convert::status(error)))?;
    Ok(program.sizes.get_or_init(|| sizes).clone())
}
