//! Rewritten programs run, one device at a time on eight threads, and give the bits that the plugin's own run gives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use pw_hlo::{AFTER, COLLECTIVE, Collective, PARTITION_ID, REPLICA_ID, Rewritten, parts, perform, rewrite};
use pw_pjrt::{
    Buffer, BufferType, CallFrame, Client, ExecuteContext, ExecuteOptions, FfiError, FfiType, Handler, LoadedExecutable, Plugin,
};

use crate::{PROGRAMS, client, compile, plugin};

const DEVICES: usize = 8;

/// The type under which a device's seat travels to the handlers.
static SEAT: OnceLock<FfiType> = OnceLock::new();

/// A run of a program by all its devices.
struct Gang {
    collectives: Vec<Collective>,
    partitions: u32,
    /// By key and group.
    meetings: Vec<Vec<(Mutex<Meeting>, Condvar)>>,
}

/// Where the members of a group bring their operands and take their results.
#[derive(Default)]
struct Meeting {
    operands: Vec<Option<Vec<Vec<u8>>>>,
    results: Vec<Option<Vec<Vec<u8>>>>,
}

/// What a device is in its gang.
struct Seat {
    gang: Arc<Gang>,
    member: u32,
    busy: AtomicBool,
}

impl Gang {
    fn new(rewritten: &Rewritten, partitions: u32) -> Self {
        let collectives = rewritten.collectives.clone();
        let of_group = |group: &Vec<u32>| {
            let none = || std::iter::repeat_with(|| None).take(group.len()).collect();
            (Mutex::new(Meeting { operands: none(), results: none() }), Condvar::new())
        };
        let meetings = collectives.iter().map(|c| c.groups.iter().map(of_group).collect()).collect();
        Gang { collectives, partitions, meetings }
    }

    /// Brings the operands of a member, and waits for its results.
    fn meet(&self, key: usize, member: u32, operands: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let collective = &self.collectives[key];
        let (group, rank) = collective.place(member).unwrap();
        let at = collective.groups.iter().position(|g| g == group).unwrap();
        let (meeting, bell) = &self.meetings[key][at];
        let mut state = meeting.lock().unwrap();
        assert!(state.operands[rank].replace(operands).is_none(), "member {member} comes twice");
        if state.operands.iter().all(Option::is_some) {
            let operands: Vec<Vec<Vec<u8>>> = state.operands.iter_mut().map(|o| o.take().unwrap()).collect();
            let results = work(collective, group, &operands);
            state.results = results.into_iter().map(Some).collect();
            bell.notify_all();
        }
        loop {
            if let Some(results) = state.results[rank].take() {
                return results;
            }
            let (next, timeout) = bell.wait_timeout(state, Duration::from_secs(60)).unwrap();
            assert!(!timeout.timed_out(), "member {member} waits for {key} in vain");
            state = next;
        }
    }
}

/// Performs a collective as a whole and in parts, which must agree.
fn work(collective: &Collective, group: &[u32], operands: &[Vec<Vec<u8>>]) -> Vec<Vec<Vec<u8>>> {
    let lent: Vec<Vec<&[u8]>> = operands.iter().map(|rank| rank.iter().map(Vec::as_slice).collect()).collect();
    let sizes = collective.arrays.iter().map(|array| collective.sizes(array, group.len()).unwrap().1);
    let mut results = vec![sizes.map(|size| vec![0xa5_u8; size]).collect::<Vec<_>>(); group.len()];
    let mut again = results.clone();
    let mut memory: Vec<Vec<&mut [u8]>> = results.iter_mut().map(|rank| rank.iter_mut().map(Vec::as_mut_slice).collect()).collect();
    perform(collective, group, &lent, &mut memory).unwrap();
    let memory = again.iter_mut().map(|rank| rank.iter_mut().map(Vec::as_mut_slice).collect()).collect();
    parts(collective, group, lent, memory, 16).unwrap().into_iter().rev().for_each(|part| part.run());
    assert!(results == again, "{} differs in parts", collective.to_text());
    results
}

fn with_seat<T>(frame: &CallFrame<'_>, f: impl FnOnce(&Seat) -> T) -> T {
    let seat = frame.user_data(*SEAT.get().unwrap()).unwrap().unwrap();
    f(seat.downcast_ref::<Seat>().unwrap())
}

#[derive(Default)]
struct Meet;

impl Handler for Meet {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let key = frame.attribute_i64("key")? as usize;
        // Those behind say what had to be done before.
        let operands = with_seat(frame, |seat| seat.gang.collectives[key].arrays.len());
        let operands = (0..operands).map(|at| Ok(frame.arg(at)?.bytes.to_vec())).collect::<Result<_, FfiError>>()?;
        let results = with_seat(frame, |seat| {
            assert!(!seat.busy.swap(true, Ordering::SeqCst), "two collectives at once on a device");
            let results = seat.gang.meet(key, seat.member, operands);
            seat.busy.store(false, Ordering::SeqCst);
            results
        });
        for (at, result) in results.iter().enumerate() {
            frame.result_bytes(at)?.copy_from_slice(result);
        }
        Ok(())
    }
}

#[derive(Default)]
struct After;

impl Handler for After {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let bytes = frame.arg(0)?.bytes.to_vec();
        frame.result_bytes(0)?.copy_from_slice(&bytes);
        Ok(())
    }
}

#[derive(Default)]
struct PartitionId;

impl Handler for PartitionId {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let id = with_seat(frame, |seat| seat.member % seat.gang.partitions);
        frame.result_bytes(0)?.copy_from_slice(&id.to_ne_bytes());
        Ok(())
    }
}

#[derive(Default)]
struct ReplicaId;

impl Handler for ReplicaId {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let id = with_seat(frame, |seat| seat.member / seat.gang.partitions);
        frame.result_bytes(0)?.copy_from_slice(&id.to_ne_bytes());
        Ok(())
    }
}

fn register(plugin: Plugin) {
    SEAT.get_or_init(|| {
        plugin.register_ffi::<Meet>(COLLECTIVE, "Host").unwrap();
        plugin.register_ffi::<After>(AFTER, "Host").unwrap();
        plugin.register_ffi::<PartitionId>(PARTITION_ID, "Host").unwrap();
        plugin.register_ffi::<ReplicaId>(REPLICA_ID, "Host").unwrap();
        plugin.register_ffi_type("pw.test_seat").unwrap()
    });
}

/// Contents of an argument: small values. Where a float may be anything, the first is NaN and the second -0 on every
/// device, and others are odd too.
fn contents(element: BufferType, count: usize, seed: u64, wild: bool) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 11
    };
    let mut place = 0;
    let mut float = |wild: bool| {
        let random = next();
        place += 1;
        match place {
            1 if wild => return f64::NAN,
            2 if wild => return -0.,
            _ => {}
        }
        let odd = [0., -0., f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-5, 6e4, -6e4];
        if wild && random.is_multiple_of(3) { odd[random as usize / 3 % odd.len()] } else { (random % 2001) as f64 / 333. - 3. }
    };
    match element {
        BufferType::F32 => (0..count).flat_map(|_| (float(wild) as f32).to_ne_bytes()).collect(),
        BufferType::F64 => (0..count).flat_map(|_| float(wild).to_ne_bytes()).collect(),
        BufferType::C64 => (0..2 * count).flat_map(|_| (float(false) as f32).to_ne_bytes()).collect(),
        BufferType::C128 => (0..2 * count).flat_map(|_| float(false).to_ne_bytes()).collect(),
        BufferType::Bf16 => (0..count).flat_map(|_| half::bf16::from_f64(float(wild)).to_ne_bytes()).collect(),
        BufferType::F16 => (0..count).flat_map(|_| half::f16::from_f64(float(wild)).to_ne_bytes()).collect(),
        BufferType::Pred => (0..count).map(|_| next() as u8 & 1).collect(),
        other => (0..count * other.bits() / 8).map(|_| next() as u8).collect(),
    }
}

/// Bits of NaN say nothing: which operand's they are is the compiler's choice.
fn without_nan_bits(element: BufferType, bytes: Vec<u8>) -> Vec<u8> {
    let width = element.bits() / 8;
    let is_nan = |e: &[u8]| match element {
        BufferType::F32 => f32::from_ne_bytes(e.try_into().unwrap()).is_nan(),
        BufferType::F64 => f64::from_ne_bytes(e.try_into().unwrap()).is_nan(),
        BufferType::F16 => half::f16::from_ne_bytes(e.try_into().unwrap()).is_nan(),
        BufferType::Bf16 => half::bf16::from_ne_bytes(e.try_into().unwrap()).is_nan(),
        _ => false,
    };
    bytes.chunks(width).flat_map(|e| if is_nan(e) { vec![0xff; width] } else { e.to_vec() }).collect()
}

/// The arguments of all devices.
fn arguments(client: &Client, native: &LoadedExecutable, wild: bool) -> Vec<Vec<Buffer>> {
    let params = native.meta().unwrap().params;
    let argument = |device: usize, at: usize| {
        let meta = &params[at];
        let count = meta.shard_dims.iter().product::<i64>() as usize;
        let bytes = contents(meta.element_type, count, (device * 31 + at + 7) as u64, wild);
        client.buffer_from_slice(&bytes, meta.element_type, &meta.shard_dims, device, None).unwrap()
    };
    (0..DEVICES).map(|device| (0..params.len()).map(|at| argument(device, at)).collect()).collect()
}

fn read(outputs: &[Buffer]) -> Vec<Vec<u8>> {
    outputs.iter().map(|b| without_nan_bits(b.element_type().unwrap(), b.to_vec().unwrap())).collect()
}

/// One thread per device, each with the same executable.
fn run_apart(plugin: Plugin, executable: &LoadedExecutable, gang: &Arc<Gang>, args: &[Vec<Buffer>]) -> Vec<Vec<Vec<u8>>> {
    let one = |device: usize| {
        let seat = Seat { gang: gang.clone(), member: device as u32, busy: AtomicBool::new(false) };
        let context = ExecuteContext::new(plugin, vec![(*SEAT.get().unwrap(), Arc::new(seat))]).unwrap();
        let options = ExecuteOptions { only_device: Some(device), context: Some(&context), ..Default::default() };
        let run = executable.execute(&[args[device].iter().collect()], options).unwrap();
        run.done[0].wait().unwrap();
        read(&run.outputs[0])
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..DEVICES).map(|device| scope.spawn(move || one(device))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rewritten_program_gives_the_same_bits() {
    let Some(plugin) = plugin() else { return };
    register(plugin);
    let client = client(plugin);
    for &(name, replicas, partitions) in PROGRAMS {
        let native = compile(&client, name);
        assert_eq!(native.addressable_device_ids(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let args = arguments(&client, &native, name == "floats8");
        let lists: Vec<Vec<&Buffer>> = args.iter().map(|list| list.iter().collect()).collect();
        let run = native.execute(&lists, ExecuteOptions { non_donatable: &[], ..Default::default() }).unwrap();
        run.done.iter().for_each(|done| done.wait().unwrap());
        let expected: Vec<Vec<Vec<u8>>> = run.outputs.iter().map(|outputs| read(outputs)).collect();

        let rewritten = rewrite(&native.optimized_hlo().unwrap(), replicas, partitions).unwrap();
        assert!(rewritten.asks_who || !rewritten.collectives.is_empty(), "{name}");
        let executable = client.compile_backend(&rewritten.module).unwrap_or_else(|e| panic!("{name}: {e}"));
        let gang = Arc::new(Gang::new(&rewritten, partitions));
        for round in 0..3 {
            let got = run_apart(plugin, &executable, &gang, &args);
            for (device, (got, expected)) in got.iter().zip(&expected).enumerate() {
                for (output, (got, expected)) in got.iter().zip(expected).enumerate() {
                    assert_eq!(got, expected, "{name}: output {output} of device {device}, round {round}");
                }
            }
        }
    }
}
