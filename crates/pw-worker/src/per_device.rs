//! Programs for one device at a time, which each member's own thread runs; their collectives meet in this process.
//!
//! One executable serves all members. A member is known to the collectives by the context that it runs with, never by
//! its thread: the plugin may call them on any.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pw_hlo::Collective;
use pw_pjrt::{
    Buffer, CallFrame, ExecuteContext, ExecuteOptions, FfiError, FfiType, Handler, Lane, LoadedExecutable, PjrtError, Plugin, Rendezvous,
};
use pw_types::{RunId, SessionId};

use crate::host_callback::{Callbacks, Caller};
use crate::team::Team;

/// The platform that host code is registered for.
const HOST: &str = "Host";

/// Without a number: that of the cache counts for all files of an entry.
const HEADER: &str = "pathways per-device program";

/// What the compile process leaves in the cache.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct MemberProgram {
    /// Local device indices in execution order; none where the program is for members of a gang.
    pub(crate) devices: Vec<u32>,
    /// By key.
    pub(crate) collectives: Vec<Collective>,
    /// The serialized executable.
    pub(crate) executable: Vec<u8>,
}

impl MemberProgram {
    /// Lines of text, an empty one, and the executable.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let devices: Vec<String> = self.devices.iter().map(u32::to_string).collect();
        let mut text = format!("{HEADER}\ndevices {}\n", devices.join(" "));
        for collective in &self.collectives {
            text.push_str(&collective.to_text());
            text.push('\n');
        }
        text.push('\n');
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(&self.executable);
        bytes
    }

    /// `None` = these bytes are something else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<MemberProgram> {
        let end = bytes.windows(2).position(|w| w == b"\n\n")?;
        let text = std::str::from_utf8(&bytes[..end]).ok()?;
        let mut lines = text.lines();
        if lines.next() != Some(HEADER) {
            return None;
        }
        let devices =
            lines.next()?.strip_prefix("devices ")?.split_terminator(' ').map(|d| d.parse().ok()).collect::<Option<Vec<u32>>>()?;
        let collectives = lines.map(|line| Collective::parse(line).ok()).collect::<Option<Vec<_>>>()?;
        Some(MemberProgram { devices, collectives, executable: bytes[end + 2..].to_vec() })
    }
}

/// What the members share.
struct Meetings {
    rendezvous: Rendezvous,
    collectives: Vec<Collective>,
    /// Where other workers have members.
    team: Option<Team>,
}

/// What the calls of one member find behind their context.
struct Seat {
    member: u32,
    /// Its place among the members of this worker.
    local: u32,
    /// The run that the member is in. A device runs one after the other.
    run: AtomicU64,
    meetings: Arc<Meetings>,
    /// Where the program has host callbacks.
    caller: Option<Arc<Caller>>,
}

/// The type of [`Seat`] in the plugin's registry.
static SEAT: OnceLock<FfiType> = OnceLock::new();

/// Registers the targets that such programs call; they are for these programs only.
pub(crate) fn register(plugin: Plugin) -> Result<(), PjrtError> {
    if SEAT.get().is_none() {
        let seat = plugin.register_ffi_type("pathways seat")?;
        plugin.register_ffi::<Meet>(pw_hlo::COLLECTIVE, HOST)?;
        plugin.register_ffi::<WhoAmI>(pw_hlo::PARTITION_ID, HOST)?;
        plugin.register_ffi::<Zero>(pw_hlo::REPLICA_ID, HOST)?;
        plugin.register_ffi::<After>(pw_hlo::AFTER, HOST)?;
        let _ = SEAT.set(seat);
    }
    Ok(())
}

/// Whether this process can run such programs.
pub(crate) fn is_possible() -> bool {
    SEAT.get().is_some()
}

/// A program for one device at a time, loaded.
pub(crate) struct PerDevice {
    executable: LoadedExecutable,
    seats: Vec<(Arc<Seat>, ExecuteContext)>,
    meetings: Arc<Meetings>,
}

impl PerDevice {
    /// For these of `total` members, the others being with the `team`; `callbacks` for programs that have some.
    pub(crate) fn new(
        executable: LoadedExecutable,
        (members, total): (&[u32], u32),
        collectives: Vec<Collective>,
        callbacks: Option<&Callbacks>,
        team: Option<Team>,
    ) -> Result<PerDevice, PjrtError> {
        let seat_type = *SEAT.get().ok_or_else(|| PjrtError::unimplemented("the plugin has no FFI extension"))?;
        if let Some(&member) = collectives.iter().flat_map(|c| &c.groups).flatten().find(|&&m| m >= total) {
            return Err(PjrtError::internal(format!("a collective names member {member} of {total}")));
        }
        // Those who are here meet here; who comes last sees to the others.
        let place = |member: &u32| members.iter().position(|m| m == member).and_then(|at| u32::try_from(at).ok());
        let local = |group: &Vec<u32>| group.iter().filter_map(place).collect::<Vec<u32>>();
        let groups: Vec<Vec<Vec<u32>>> =
            collectives.iter().map(|c| c.groups.iter().map(local).filter(|group| !group.is_empty()).collect()).collect();
        let meetings = Arc::new(Meetings { rendezvous: Rendezvous::new(members.len(), &groups), collectives, team });
        let plugin = executable.client().plugin();
        let seat = |(local, &member)| {
            let caller = callbacks.map(Caller::new);
            let seat = Arc::new(Seat { member, local, run: AtomicU64::new(0), meetings: meetings.clone(), caller });
            let mut values: Vec<(FfiType, Arc<dyn Any + Send + Sync>)> = vec![(seat_type, seat.clone())];
            if let Some(caller) = &seat.caller {
                values.push(caller.value()?);
            }
            Ok((seat, ExecuteContext::new(plugin, values)?))
        };
        let seats = (0..).zip(members).map(seat).collect::<Result<_, PjrtError>>()?;
        Ok(PerDevice { executable, seats, meetings })
    }

    /// Its members exchange data.
    pub(crate) fn meets(&self) -> bool {
        !self.meetings.collectives.is_empty()
    }

    /// Runs one member of a launch to its end: its outputs, ready.
    pub(crate) fn run(
        &self,
        run: RunId,
        session: SessionId,
        member: usize,
        device: u32,
        arguments: Vec<&Buffer>,
        options: ExecuteOptions<'_>,
    ) -> Result<Vec<Buffer>, PjrtError> {
        let (seat, context) = &self.seats[member];
        seat.run.store(run.0, Ordering::Release);
        if let Some(caller) = &seat.caller {
            caller.set(session);
        }
        let options = ExecuteOptions { only_device: Some(device as usize), context: Some(context), ..options };
        let mut execution = self.executable.execute(&[arguments], options)?;
        execution.done.iter().try_for_each(|done| done.wait())?;
        execution.outputs.pop().ok_or_else(|| PjrtError::internal("a run on one device has no outputs"))
    }

    /// Every member says this once per run, when it has ended there or will not run. What the run fails with, if it
    /// does.
    pub(crate) fn leave(&self, run: u64, member: usize, result: Result<(), PjrtError>) -> Result<(), PjrtError> {
        if !self.meets() {
            return result;
        }
        self.meetings.rendezvous.leave(run, self.seats[member].0.local, result)
    }
}

fn seat(frame: &CallFrame<'_>) -> Result<Arc<Seat>, FfiError> {
    let seat_type = *SEAT.get().ok_or_else(|| PjrtError::internal("this process runs no per-device programs"))?;
    let value = frame.user_data(seat_type)?;
    let seat = value.and_then(|value| value.downcast::<Seat>().ok());
    seat.ok_or_else(|| PjrtError::invalid("a collective of a per-device program is called outside of a run"))
}

/// A collective.
#[derive(Default)]
struct Meet;

impl Handler for Meet {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let seat = seat(frame)?;
        let key = usize::try_from(frame.attribute_i64("key")?).unwrap_or(usize::MAX);
        let Meetings { rendezvous, collectives, team } = &*seat.meetings;
        let collective = collectives.get(key).ok_or_else(|| PjrtError::internal(format!("the program has no collective {key}")))?;
        let run = seat.run.load(Ordering::Acquire);
        let mut lane = frame.lane()?;
        // Those behind say what had to be done before.
        lane.args.truncate(collective.arrays.len());
        rendezvous.meet(run, seat.local, key, &mut lane, |lanes| match team {
            Some(team) => work_together(team, (run, key), collective, seat.member, lanes),
            None => work(collective, seat.member, lanes),
        })
    }
}

/// Collectives that write more, all members together, are shared out to more threads.
const SHARED_OUT_BYTES: usize = 1 << 20;

/// What a thread takes at a time.
const PART_BYTES: usize = 256 << 10;

fn group_of(collective: &Collective, member: u32) -> Result<&[u32], FfiError> {
    let group = collective.place(member).map(|(group, _)| group);
    group.ok_or_else(|| PjrtError::internal(format!("member {member} is in no group")))
}

/// Does a collective for a whole group. The members wait meanwhile, so their cores are free.
fn work(collective: &Collective, member: u32, lanes: &mut [&mut Lane<'_>]) -> Result<(), FfiError> {
    let group = group_of(collective, member)?;
    let operands: Vec<Vec<&[u8]>> = lanes.iter().map(|lane| lane.args.clone()).collect();
    let results: Vec<Vec<&mut [u8]>> = lanes.iter_mut().map(|lane| borrow(lane)).collect();
    perform(collective, group, operands, results)
}

/// Does the part of a collective that is for the members of this worker.
fn work_together(
    team: &Team,
    (run, key): (u64, usize),
    collective: &Collective,
    member: u32,
    lanes: &mut [&mut Lane<'_>],
) -> Result<(), FfiError> {
    let group = group_of(collective, member)?;
    if !team.crosses(group) {
        return work(collective, member, lanes);
    }
    // In the order of the group, as the members of a meeting are.
    let mut lent = lanes.iter_mut();
    let mut by_rank: Vec<Option<&mut &mut Lane<'_>>> =
        group.iter().map(|&member| if team.is_elsewhere(member) { None } else { lent.next() }).collect();
    let here: Vec<Vec<&[u8]>> = by_rank.iter().map(|lane| lane.as_ref().map(|lane| lane.args.clone()).unwrap_or_default()).collect();
    let key = u32::try_from(key).map_err(|_| PjrtError::internal("too many collectives"))?;
    let received = team.exchange(run, key, collective, group, &here)?;
    let sizes: Vec<usize> = collective.arrays.iter().filter_map(|a| collective.sizes(a, group.len())).map(|(operand, _)| operand).collect();
    let operands = here.into_iter().enumerate().map(|(rank, here)| match received.get(&rank) {
        Some(bytes) => cut(bytes, &sizes),
        None => here,
    });
    let operands: Vec<Vec<&[u8]>> = operands.collect();
    let results = by_rank.iter_mut().map(|lane| lane.as_mut().map(|lane| borrow(lane)).unwrap_or_default()).collect();
    perform(collective, group, operands, results)
}

/// The arrays of one rank, which lie one behind the other.
fn cut<'b>(mut bytes: &'b [u8], sizes: &[usize]) -> Vec<&'b [u8]> {
    let one = |&size: &usize| {
        let (array, rest) = bytes.split_at(size);
        bytes = rest;
        array
    };
    sizes.iter().map(one).collect()
}

fn borrow<'l>(lane: &'l mut Lane<'_>) -> Vec<&'l mut [u8]> {
    lane.results.iter_mut().map(|result| &mut **result).collect()
}

/// Small ones at once, large ones on as many threads as have nothing else to do.
fn perform<'a>(
    collective: &Collective,
    group: &[u32],
    operands: Vec<Vec<&'a [u8]>>,
    mut results: Vec<Vec<&'a mut [u8]>>,
) -> Result<(), FfiError> {
    let failed = |error: pw_hlo::HloError| PjrtError::internal(error.to_string());
    let bytes: usize = results.iter().flatten().map(|result| result.len()).sum();
    if bytes < SHARED_OUT_BYTES {
        return pw_hlo::perform(collective, group, &operands, &mut results).map_err(failed);
    }
    let parts = pw_hlo::parts(collective, group, operands, results, PART_BYTES).map_err(failed)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(group.len()).min(parts.len());
    let parts = Mutex::new(parts.into_iter());
    let help = || {
        // The guard goes before the part runs.
        while let Some(part) = { parts.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            part.run();
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(std::thread::Builder::new().name("collective".to_owned()).spawn_scoped(scope, help)));
        help();
    });
    Ok(())
}

/// The member's number.
#[derive(Default)]
struct WhoAmI;

impl Handler for WhoAmI {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let member = seat(frame)?.member;
        write_u32(frame, member)
    }
}

/// The first argument, once the others are there.
#[derive(Default)]
struct After;

impl Handler for After {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let mut lane = frame.lane()?;
        let (Some(from), [to]) = (lane.args.first(), lane.results.as_mut_slice()) else {
            return Err(PjrtError::internal("a call that passes an array on has not one argument and one result"));
        };
        if from.len() != to.len() {
            return Err(PjrtError::internal(format!("{} bytes are to be passed on as {}", from.len(), to.len())));
        }
        to.copy_from_slice(from);
        Ok(())
    }
}

/// Programs have one replica.
#[derive(Default)]
struct Zero;

impl Handler for Zero {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        write_u32(frame, 0)
    }
}

fn write_u32(frame: &mut CallFrame<'_>, value: u32) -> Result<(), FfiError> {
    let result = frame.result_bytes(0)?;
    if result.len() != size_of::<u32>() {
        return Err(PjrtError::internal(format!("an id of {} bytes is asked for", result.len())));
    }
    result.copy_from_slice(&value.to_ne_bytes());
    Ok(())
}
