//! One launch in the hands of device threads: its arguments, its outputs, and how it ends.
//!
//! One thread runs it as a whole, or each member's thread runs its part, and then the last one to let go of it says how
//! it ended; a member that fails makes the whole launch fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pw_exec::{ExecEvent, Form, Part, StartLaunch};
use pw_pjrt::{Buffer, ExecuteOptions, PjrtError};
use pw_types::Status;

use crate::convert;
use crate::device::{Clock, Program, Runner};
use crate::exec::Message;
use crate::gang::Call;
use crate::per_device::PerDevice;
use crate::store::Stored;

pub(crate) struct LaunchJob {
    start: Arc<StartLaunch>,
    program: Arc<Program>,
    /// What the parts of the arguments lie in, in their order.
    sources: Vec<Arc<Stored>>,
    outputs: Vec<Arc<Stored>>,
    handed: Instant,
    /// Why it fails; the first reason.
    failed: OnceLock<Arc<Status>>,
    device_ns: AtomicU64,
    /// The least time of a member.
    least_ns: AtomicU64,
}

impl LaunchJob {
    pub(crate) fn new(start: Arc<StartLaunch>, program: Arc<Program>, sources: Vec<Arc<Stored>>, outputs: Vec<Arc<Stored>>) -> LaunchJob {
        let (device_ns, least_ns) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        LaunchJob { start, program, sources, outputs, handed: Instant::now(), failed: OnceLock::new(), device_ns, least_ns }
    }

    /// The shard of argument `index` that a member takes.
    fn shard(&self, index: usize, member: usize) -> (&Stored, u32) {
        let mut place = if index == 0 { 0 } else { self.start.arguments[index - 1].end as usize };
        let mut left = u32::try_from(member).expect("fewer than 2^32 members");
        loop {
            let Part { first, count, .. } = self.start.parts[place];
            if left < count {
                return (&self.sources[place], first + left);
            }
            left -= count;
            place += 1;
        }
    }

    /// Parameters that the program would take over but must not, on any of these members: others own them, or a
    /// download reads them in place.
    fn non_donatable(&self, members: &[usize]) -> Vec<i64> {
        let viewed = |index: usize, member: usize| {
            let (stored, shard) = self.shard(index, member);
            stored.is_viewed(shard)
        };
        let keep = |index: usize| !self.start.arguments[index].donate || members.iter().any(|&member| viewed(index, member));
        let donated = self.program.loaded.report.donated.iter();
        donated.filter(|&&index| keep(index as usize)).map(|&index| i64::from(index)).collect()
    }

    /// The arguments of a member; the first poison instead, if there is one.
    fn arguments(&self, member: usize) -> Result<Vec<&Buffer>, Arc<Status>> {
        let argument = |index| {
            let (stored, shard) = self.shard(index, member);
            stored.get(shard)
        };
        (0..self.start.arguments.len()).map(argument).collect()
    }

    fn fill(&self, member: usize, outputs: Vec<Buffer>) -> Result<(), Arc<Status>> {
        let sizes = match self.program.sizes.get() {
            Some(sizes) => sizes,
            None => {
                let sizes: Result<Arc<[u64]>, _> = outputs.iter().map(|buffer| buffer.on_device_size().map(|n| n as u64)).collect();
                let sizes = sizes.map_err(|error| Arc::new(convert::status(error)))?;
                self.program.sizes.get_or_init(|| sizes)
            }
        };
        let shard = self.start.program.members[member] as usize;
        for ((stored, buffer), &bytes) in self.outputs.iter().zip(outputs).zip(sizes.iter()) {
            stored.fill(shard, buffer, bytes);
        }
        Ok(())
    }

    fn status(&self, error: PjrtError) -> Arc<Status> {
        let mut status = convert::status(error);
        status.message = format!("{} (run {}): {}", self.program.loaded.report.name, self.start.run, status.message);
        Arc::new(status)
    }

    /// All members are done, and nobody else has a hand on it.
    fn conclude(self, busy_ns: u64) -> Message {
        let LaunchJob { start, program, sources, outputs, failed, device_ns, .. } = self;
        // The hold on the inputs goes before the core hears that they are free.
        drop(sources);
        let result = match (failed.into_inner(), program.sizes.get()) {
            (Some(status), _) => Err(status),
            (None, Some(sizes)) => Ok(sizes.clone()),
            (None, None) => Err(Arc::new(Status::internal(format!("run {} has made nothing", start.run)))),
        };
        if let Err(status) = &result {
            outputs.iter().for_each(|output| output.poison(status));
        }
        let event = ExecEvent::LaunchDone { run: start.run, device_ns: device_ns.into_inner(), busy_ns, result };
        Message::LaunchDone { start, event }
    }
}

/// Runs all members of a launch to their end.
pub(crate) fn run_all(job: LaunchJob, clock: &Clock) -> Message {
    let begun = Instant::now();
    match job.start.program.form {
        Form::Gang => {
            if let Err(status) = all_at_once(&job) {
                let _ = job.failed.set(status);
            }
            job.device_ns.store(clock.finish(&job.start.program.devices, job.handed), Ordering::Relaxed);
        }
        // One after the other: a launch that comes here is one whose members do not wait for one another.
        Form::PerDevice => (0..job.start.program.devices.len()).for_each(|member| run_one(&job, member, clock)),
    }
    job.conclude(nanoseconds(begun))
}

fn all_at_once(job: &LaunchJob) -> Result<(), Arc<Status>> {
    let Runner::Gang(gang) = &job.program.runner else { return Err(Arc::new(Status::internal("not a gang's program"))) };
    let members: Vec<usize> = (0..job.start.program.devices.len()).collect();
    let arguments = members.iter().map(|&member| job.arguments(member)).collect::<Result<Vec<_>, _>>()?;
    let non_donatable = job.non_donatable(&members);
    let (launch_id, session) = (job.start.launch_id, job.start.session);
    let call = Call { arguments: &arguments, non_donatable: &non_donatable, launch_id, session };
    let by_member = gang.launch(&call).map_err(|error| job.status(error))?;
    by_member.into_iter().enumerate().try_for_each(|(member, outputs)| job.fill(member, outputs))
}

/// Runs a member of a launch to its end; the last one says how the launch has ended.
pub(crate) fn run_member(job: Arc<LaunchJob>, member: usize, clock: &Clock) -> Option<Message> {
    run_one(&job, member, clock);
    let job = Arc::into_inner(job)?;
    // Members do much the same; the least time is that of one which did not share its core with the others.
    let busy_ns = job.least_ns.load(Ordering::Relaxed).saturating_mul(job.start.program.devices.len() as u64);
    Some(job.conclude(busy_ns))
}

fn run_one(job: &LaunchJob, member: usize, clock: &Clock) {
    let begun = Instant::now();
    let device = job.start.program.devices[member];
    match &job.program.runner {
        Runner::PerDevice(program) => part(job, program, member, device),
        Runner::Gang(_) => drop(job.failed.set(Arc::new(Status::internal("a gang's program is launched by one member")))),
    }
    job.least_ns.fetch_min(nanoseconds(begun), Ordering::Relaxed);
    job.device_ns.fetch_max(clock.finish(&[device], job.handed), Ordering::Relaxed);
}

/// The part of one member.
fn part(job: &LaunchJob, program: &PerDevice, member: usize, device: u32) {
    let run = job.start.run.0;
    let result = job.arguments(member).and_then(|arguments| {
        let non_donatable = job.non_donatable(&[member]);
        let options = ExecuteOptions { non_donatable: &non_donatable, launch_id: job.start.launch_id, ..Default::default() };
        let outputs = program.run(job.start.run, job.start.session, member, device, arguments, options).map_err(|error| job.status(error));
        outputs.and_then(|outputs| job.fill(member, outputs))
    });
    let told = match &result {
        Ok(()) => Ok(()),
        Err(status) => {
            let _ = job.failed.set(status.clone());
            Err(convert::error(status))
        }
    };
    if let Err(error) = program.leave(run, member, told) {
        // Others may have failed it.
        let _ = job.failed.set(job.status(error));
    }
    if let (Err(_), Some(status)) = (&result, job.failed.get()) {
        let shard = job.start.program.members[member] as usize;
        // The next launch on this device looks here before this one has ended elsewhere.
        job.outputs.iter().for_each(|output| output.poison_shard(shard, status));
    }
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
