//! Random commands against a fake shell: every run ends exactly once, threads are served in order, nothing is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pw_types::*;

use crate::script::{SESSION, per_device, program};
use crate::{ExecConfig, ExecCore, ExecEffect, ExecEvent, Form, StartLaunch};

const DEVICES: u32 = 3;
const PROGRAMS: [&[u32]; 5] = [&[0], &[2], &[0, 1], &[2, 1], &[1, 0, 2]];
/// How each set of devices is used: executable `2 * i` in the one form, `2 * i + 1` in the other.
const FORMS: [Form; 2] = [Form::Gang, Form::PerDevice];

struct Shell {
    core: ExecCore,
    state: u64,
    threads: Vec<VecDeque<Arc<StartLaunch>>>,
    /// What may be answered at any time.
    transfers: Vec<ExecEvent>,
    ended: BTreeMap<RunId, usize>,
    /// Shards made or poisoned, as the threads see it: backing and shard.
    filled: BTreeSet<(u32, u32)>,
    /// Members that a launch still has to run.
    members_left: BTreeMap<RunId, usize>,
}

impl Shell {
    fn new(seed: u64) -> Shell {
        let config = ExecConfig { default_memory_kinds: vec!["device".to_owned(); DEVICES as usize], ahead_max: 3 };
        let threads = (0..DEVICES).map(|_| VecDeque::new()).collect();
        let (state, transfers) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
        Shell {
            core: ExecCore::new(config),
            state,
            threads,
            transfers,
            ended: BTreeMap::new(),
            filled: BTreeSet::new(),
            members_left: BTreeMap::new(),
        }
    }

    fn below(&mut self, n: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % n as u64) as usize
    }

    fn event(&mut self, event: ExecEvent) {
        let mut fx = Vec::new();
        self.core.handle(event, &mut fx);
        self.core.audit().expect("the books balance");
        for effect in fx {
            match effect {
                ExecEffect::Launch(start) => {
                    self.members_left.insert(start.run, start.program.devices.len());
                    start.threads().iter().for_each(|&t| self.threads[t as usize].push_back(start.clone()));
                }
                ExecEffect::Copy(start) => {
                    start.items.iter().for_each(|i| assert!(self.filled.contains(&(i.backing.0, i.shard))));
                    self.fill(start.output.0, start.items.len());
                    self.transfers.push(ExecEvent::CopyDone { run: start.run, result: Ok(vec![16; start.items.len()]) });
                }
                ExecEffect::Write(start) => {
                    let (run, count) = (start.command.order.run, start.command.shards as usize);
                    self.fill(start.output.0, count);
                    self.transfers.push(ExecEvent::WriteDone { run, result: Ok(vec![16; count]) });
                }
                ExecEffect::Read(start) => {
                    self.transfers.push(ExecEvent::ReadDone { run: start.command.order.run, bytes: 0, result: Ok(()) });
                }
                ExecEffect::Drop { backing } => self.filled.retain(|&(b, _)| b != backing.0),
                ExecEffect::Report(Report::Finished { run, .. }) => *self.ended.entry(run).or_default() += 1,
                ExecEffect::Fatal(text) => panic!("{text}"),
                _ => {}
            }
        }
    }

    fn fill(&mut self, backing: u32, shards: usize) {
        self.filled.extend((0..).take(shards).map(|shard| (backing, shard)));
    }

    /// Runs the members of a launch that are this thread's.
    fn run(&mut self, start: &StartLaunch, thread: u32) {
        for (member, &device) in (0..).zip(&start.program.devices).filter(|&(_, &d)| start.thread_of(d) == thread) {
            for index in 0..start.arguments.len() {
                let mut shards = start.argument(index).iter().flat_map(|p| (p.first..p.first + p.count).map(|s| (p.backing.0, s)));
                let shard = shards.nth(member as usize).expect("one shard per member");
                assert!(self.filled.contains(&shard), "run {} starts too early on device {device}", start.run);
            }
            self.filled.extend(start.outputs.iter().map(|o| (o.0, member)));
            *self.members_left.get_mut(&start.run).expect("it is under way") -= 1;
        }
    }

    /// Lets one thing that is under way end; false if nothing is.
    fn progress(&mut self) -> bool {
        let busy: Vec<usize> = (0..self.threads.len()).filter(|&t| !self.threads[t].is_empty()).collect();
        let choice = self.below((busy.len() + self.transfers.len()).max(1));
        if let Some(&thread) = busy.get(choice) {
            let start = self.threads[thread].pop_front().expect("it is busy");
            self.run(&start, thread as u32);
            if self.members_left[&start.run] > 0 {
                return true;
            }
            let failed = self.below(20) == 0;
            let result = if failed { Err(Arc::new(Status::internal("boom"))) } else { Ok(vec![16; start.outputs.len()].into()) };
            let busy_ns = [1, 1, 1_000_000][self.below(3)];
            self.event(ExecEvent::LaunchDone { run: start.run, device_ns: 1, busy_ns, result });
            return true;
        }
        if self.transfers.is_empty() {
            return false;
        }
        let event = self.transfers.swap_remove(choice - busy.len());
        self.event(event);
        true
    }

    fn assert_devices_have_one_thread(&self) {
        for device in 0..DEVICES {
            let runs_here = |s: &StartLaunch, t: u32| s.program.devices.iter().any(|&d| d == device && s.thread_of(d) == t);
            let holders = (0..DEVICES).filter(|&t| self.threads[t as usize].iter().any(|s| runs_here(s, t)));
            assert!(holders.count() <= 1, "device {device} is in the hands of two threads");
        }
    }
}

fn play(seed: u64) {
    let mut shell = Shell::new(seed);
    for (id, (devices, form)) in (0..).zip(PROGRAMS.iter().flat_map(|&p| FORMS.map(|f| (p, f)))) {
        shell.event(ExecEvent::Command(Command::Load { executable: ExecutableId(id), fingerprint: bytes::Bytes::new(), gang: None }));
        let donated: &[u32] = if id % 4 == 0 { &[0] } else { &[] };
        let loaded = if form == Form::Gang { program(devices, 1, 2, donated) } else { per_device(devices, 1, 2, donated) };
        shell.event(ExecEvent::Loaded { executable: ExecutableId(id), result: Ok(loaded) });
    }
    // Arrays by the devices that they lie on.
    let mut arrays: Vec<(BufferId, Vec<u32>)> = Vec::new();
    let mut to_land = Vec::new();
    let mut runs = Vec::new();
    for step in 1..=120u64 {
        let order = NodeOrder { run: RunId(step), seq: GrantSeq(step), previous: GrantSeq(step - 1), session: SESSION };
        runs.push(order.run);
        let devices = PROGRAMS[shell.below(PROGRAMS.len())].to_vec();
        let made = |output| BufferId { run: order.run, output };
        let picked = arrays.get(shell.below(arrays.len().max(1))).cloned();
        let command = match (shell.below(6), picked) {
            (0, _) | (_, None) => {
                to_land.push(Handle(step));
                arrays.push((made(0), devices.clone()));
                let targets = (0..).zip(&devices).map(|(shard, &device)| HostWriteTarget { shard, device, region: None }).collect();
                let source = HostWriteSource { buffer: Handle(step), dtype: DType::F32, dims: vec![4], byte_strides: None, targets };
                Command::HostWrite(HostWrite {
                    order,
                    sender: SESSION,
                    sources: vec![source],
                    memory_kind: None,
                    shards: devices.len() as u32,
                })
            }
            (1, Some((id, from))) => {
                arrays.push((made(0), devices.clone()));
                let source = |i: u32| ShardId { buffer: id, shard: i % from.len() as u32 };
                let items = (0..).zip(&devices).map(|(i, &device)| CopyItem { source: source(i), device }).collect();
                Command::Copy(CopyShards { order, items, memory_kind: None })
            }
            (2, Some((id, _))) => {
                let pieces = vec![HostReadPiece { source: ShardId { buffer: id, shard: 0 }, region: None }];
                Command::HostRead(HostRead { order, buffer: Handle(step), dtype: DType::F32, dims: vec![4], byte_strides: None, pieces })
            }
            (_, Some((id, on))) => {
                let place = PROGRAMS.iter().position(|p| *p == on).expect("arrays lie where programs run");
                let executable = (FORMS.len() * place + shell.below(FORMS.len())) as u64;
                arrays.extend([(made(0), on.clone()), (made(1), on.clone())]);
                let donate = shell.below(3) == 0;
                let segments = vec![Segment { buffer: id, first: 0, count: on.len() as u32 }];
                let arguments = vec![Argument { segments, donate }];
                Command::Launch(Launch { order, executable: ExecutableId(executable), arguments, launch_id: 0 })
            }
        };
        shell.event(ExecEvent::Command(command));
        shell.assert_devices_have_one_thread();
        if shell.below(3) == 0 && !to_land.is_empty() {
            let buffer = to_land.swap_remove(shell.below(to_land.len()));
            shell.event(ExecEvent::Landed { session: SESSION, buffer, bytes: 0 });
        }
        if shell.below(4) == 0 && !arrays.is_empty() {
            let (id, _) = arrays.swap_remove(shell.below(arrays.len()));
            shell.event(ExecEvent::Command(Command::Free { buffers: vec![id] }));
        }
        if shell.below(15) == 0 {
            let run = RunId(1 + shell.below(step as usize) as u64);
            shell.event(ExecEvent::Command(Command::Cancel { runs: vec![run], status: Status::new(Code::Cancelled, "nobody wants it") }));
        }
        for _ in 0..shell.below(4) {
            shell.progress();
        }
    }
    if shell.below(2) == 0 {
        to_land.into_iter().for_each(|buffer| shell.event(ExecEvent::Landed { session: SESSION, buffer, bytes: 0 }));
    } else {
        shell.event(ExecEvent::SessionDetached { session: SESSION });
    }
    while shell.progress() {
        shell.assert_devices_have_one_thread();
    }
    let ends: Vec<usize> = runs.iter().map(|run| shell.ended.get(run).copied().unwrap_or(0)).collect();
    assert!(ends.iter().all(|&n| n == 1), "ends by run: {ends:?}");
    shell.event(ExecEvent::Command(Command::Free { buffers: arrays.into_iter().map(|(id, _)| id).collect() }));
    shell.event(ExecEvent::SessionDetached { session: SESSION });
    assert_eq!(shell.core.leftovers(), None);
    assert!(shell.filled.is_empty(), "the shell was not told to drop {:?}", shell.filled);
}

#[test]
fn random_commands_all_end_and_leave_nothing() {
    for seed in 1..=300 {
        let result = std::panic::catch_unwind(|| play(seed));
        assert!(result.is_ok(), "seed {seed}");
    }
}
