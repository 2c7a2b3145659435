//! A worker: the real exec core, and a fake shell around it with devices, a buffer store and a data plane.
//!
//! A device thread runs one launch at a time; buffers carry tokens. A program for one device at a time begins on each
//! member's own thread, and its members meet before any of them goes on, as in a collective. The store checks what the
//! core orders: inputs are there when a launch starts, nothing reads storage that was given away, two gangs never share
//! a device.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pw_exec::{
    BackingKey, ExecConfig, ExecCore, ExecEffect, ExecEvent, Form, LoadedProgram, StartCopy, StartLaunch, StartRead, StartSend, StartWrite,
};
use pw_types::*;

use crate::failure::{Check, Invariant, violation};
use crate::gang::{Mail, Posted};
use crate::model::Model;
use crate::program::{ITEM_BYTES, Program, Programs, part_token};
use crate::rng::Rng;

/// What a worker wants to be told later.
#[derive(Debug)]
pub(crate) enum Note {
    Turn,
    Event(ExecEvent),
    ThreadDone(u32),
    TransferDone(u64),
}

/// What a worker works with.
pub(crate) struct Surroundings<'a> {
    pub(crate) rng: &'a mut Rng,
    pub(crate) model: &'a mut Model,
    /// Notes to itself, with their delays.
    pub(crate) notes: Vec<(u64, Note)>,
    /// What it offers to the edge.
    pub(crate) offers: Vec<Offer>,
    /// What it sends to other workers.
    pub(crate) moves: Vec<Moved>,
    /// Its part of collectives over several workers.
    pub(crate) posted: Vec<Posted>,
    /// Reports of this turn.
    pub(crate) reports: Vec<Report>,
}

/// A buffer on its way to the worker at an address, or why it does not come.
#[derive(Debug)]
pub(crate) struct Moved {
    pub(crate) address: String,
    pub(crate) sender: SessionId,
    pub(crate) buffer: Handle,
    pub(crate) content: Result<u64, Status>,
}

/// Bytes of a fetch, or why there are none.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) session: SessionId,
    pub(crate) buffer: Handle,
    pub(crate) result: Result<Vec<(Option<i64>, u64)>, Status>,
}

#[derive(Clone, Debug)]
enum SlotState {
    Pending,
    Ready,
    Poisoned(Arc<Status>),
    Donated(RunId),
}

/// One shard of a backing.
#[derive(Clone, Debug)]
struct Slot {
    state: SlotState,
    token: u64,
    /// Transfers that read it now.
    readers: u32,
}

/// A launch in the hands of threads.
pub(crate) struct Job {
    pub(crate) start: Arc<StartLaunch>,
    pub(crate) program: usize,
    /// By argument, by member of this worker.
    arguments: Vec<Vec<usize>>,
    outputs: Vec<Vec<usize>>,
    /// By argument, by member of all, once the member has begun or its operands are here.
    pub(crate) tokens: Vec<Vec<u64>>,
    /// Members here that have not begun, and that have not ended.
    to_begin: usize,
    to_end: usize,
    /// Other workers whose operands are awaited.
    pub(crate) missing: BTreeSet<HostSlot>,
    device_ns: u64,
    pub(crate) fails: Option<Arc<Status>>,
}

impl Job {
    /// The members here that this thread runs.
    fn members(&self, thread: u32) -> Vec<usize> {
        let devices = &self.start.program.devices;
        (0..devices.len()).filter(|&m| self.start.thread_of(devices[m]) == thread).collect()
    }
}

#[derive(Default)]
struct Thread {
    queue: VecDeque<RunId>,
    running: Option<RunId>,
}

#[derive(Default, Clone)]
struct Device {
    running: Option<RunId>,
    last: GrantSeq,
}

enum Transfer {
    Copy { start: Arc<StartCopy>, sources: Vec<usize>, outputs: Vec<usize> },
    Write { start: Arc<StartWrite>, contents: Vec<u64>, outputs: Vec<usize> },
    Read { start: Arc<StartRead>, sources: Vec<usize> },
    Send { start: Arc<StartSend>, sources: Vec<usize> },
}

pub(crate) struct Worker {
    pub(crate) slot: HostSlot,
    pub(crate) incarnation: Incarnation,
    pub(crate) exec: ExecCore,
    pub(crate) inbox: Vec<ExecEvent>,
    pub(crate) turn_due: bool,
    /// Frames sent and taken.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) programs: Programs,
    threads: Vec<Thread>,
    pub(crate) jobs: BTreeMap<RunId, Job>,
    pub(crate) mail: Mail,
    devices: Vec<Device>,
    store: BTreeMap<BackingKey, Vec<usize>>,
    slots: Vec<Slot>,
    transfers: BTreeMap<u64, Transfer>,
    next_transfer: u64,
    /// Contents of host buffers that have landed.
    uploads: BTreeMap<(SessionId, Handle), u64>,
    /// The cache; without devices what is for members of a gang.
    pub(crate) compiled: BTreeMap<ExecutableId, (usize, Vec<u32>)>,
    /// Planted bug: a thread does not wait for its devices.
    pub(crate) eager: bool,
    pub(crate) launches: u64,
}

impl Worker {
    pub(crate) fn new(slot: HostSlot, incarnation: Incarnation, devices: usize, ahead_max: u32, programs: Programs) -> Worker {
        let config = ExecConfig { default_memory_kinds: vec!["device".to_owned(); devices], ahead_max };
        Worker {
            slot,
            incarnation,
            exec: ExecCore::new(config),
            inbox: Vec::new(),
            turn_due: false,
            sent: 0,
            received: 0,
            programs,
            threads: (0..devices).map(|_| Thread::default()).collect(),
            jobs: BTreeMap::new(),
            mail: Mail::default(),
            devices: vec![Device::default(); devices],
            store: BTreeMap::new(),
            slots: Vec::new(),
            transfers: BTreeMap::new(),
            next_transfer: 0,
            uploads: BTreeMap::new(),
            compiled: BTreeMap::new(),
            eager: false,
            launches: 0,
        }
    }

    pub(crate) fn note(&mut self, note: Note, around: &mut Surroundings) -> Check {
        match note {
            Note::Turn => return self.turn(around),
            Note::Event(event) => self.inbox.push(event),
            Note::ThreadDone(thread) => self.thread_done(thread, around)?,
            Note::TransferDone(id) => self.transfer_done(id, around)?,
        }
        self.wake(around);
        Ok(())
    }

    /// Bytes of a host buffer have come; `None` = they will not.
    pub(crate) fn landed(&mut self, session: SessionId, buffer: Handle, content: Result<u64, Status>, around: &mut Surroundings) {
        match content {
            Ok(token) => {
                self.uploads.insert((session, buffer), token);
                self.inbox.push(ExecEvent::Landed { session, buffer, bytes: 1 });
            }
            Err(status) => self.inbox.push(ExecEvent::UploadFailed { session, buffer, status }),
        }
        self.wake(around);
    }

    pub(crate) fn wake(&mut self, around: &mut Surroundings) {
        if !self.inbox.is_empty() && !self.turn_due {
            self.turn_due = true;
            let delay = around.rng.between(0, 20_000);
            around.notes.push((delay, Note::Turn));
        }
    }

    fn turn(&mut self, around: &mut Surroundings) -> Check {
        self.turn_due = false;
        let mut fx = Vec::new();
        // Effects of a turn may put new events at the end of it.
        let mut events = std::mem::take(&mut self.inbox);
        while !events.is_empty() {
            for event in events.drain(..) {
                self.exec.handle(event, &mut fx);
                for effect in std::mem::take(&mut fx) {
                    self.obey(effect, around)?;
                }
            }
            std::mem::swap(&mut events, &mut self.inbox);
        }
        self.exec.handle(ExecEvent::EndOfTurn, &mut fx);
        for effect in fx {
            self.obey(effect, around)?;
        }
        self.exec.audit().or_else(|text| violation(Invariant::Audit, format!("worker {}: {text}", self.slot)))
    }

    fn obey(&mut self, effect: ExecEffect, around: &mut Surroundings) -> Check {
        match effect {
            ExecEffect::Launch(start) => self.launch(start, around),
            ExecEffect::Copy(start) => {
                let sources = start.items.iter().map(|i| self.source(i.backing, i.shard)).collect::<Check<Vec<_>>>()?;
                let outputs = self.create(start.output, start.items.len())?;
                self.transfer(Transfer::Copy { start, sources, outputs }, around)
            }
            ExecEffect::Write(start) => {
                let session = start.command.sender;
                let mut contents = Vec::new();
                for source in &start.command.sources {
                    match self.uploads.remove(&(session, source.buffer)) {
                        Some(token) => contents.push(token),
                        None => return violation(Invariant::Values, format!("host buffer {} is written but is not here", source.buffer)),
                    }
                }
                let outputs = self.create(start.output, start.command.shards as usize)?;
                self.transfer(Transfer::Write { start, contents, outputs }, around)
            }
            ExecEffect::Read(start) => {
                let sources = start.sources.iter().map(|s| self.source(s.backing, s.first)).collect::<Check<Vec<_>>>()?;
                self.transfer(Transfer::Read { start, sources }, around)
            }
            ExecEffect::Send(start) => {
                let sources = start.sources.iter().map(|s| self.source(s.backing, s.first)).collect::<Check<Vec<_>>>()?;
                self.transfer(Transfer::Send { start, sources }, around)
            }
            ExecEffect::SendFailed { command, status } => {
                send(&command, around, |_| Err(Status::clone(&status)));
                Ok(())
            }
            // What is under way here ends by itself, and nobody waits for it.
            ExecEffect::StopSend { .. } => Ok(()),
            ExecEffect::ReadFailed { session, buffer, status } => {
                around.offers.push(Offer { session, buffer, result: Err((*status).clone()) });
                Ok(())
            }
            ExecEffect::Drop { backing } => match self.store.remove(&backing) {
                Some(_) => Ok(()),
                None => violation(Invariant::A7References, format!("worker {}: {backing:?} is dropped but does not exist", self.slot)),
            },
            ExecEffect::DropUpload { session, buffer } => match self.uploads.remove(&(session, buffer)) {
                Some(_) => Ok(()),
                None => violation(Invariant::A7References, format!("worker {}: upload {buffer} is dropped but is not here", self.slot)),
            },
            ExecEffect::Compile(command) => {
                self.compile(command, around);
                Ok(())
            }
            ExecEffect::Load { executable, gang, .. } => {
                self.load(executable, gang, around);
                Ok(())
            }
            ExecEffect::Neighbours(gang) => {
                self.mail.neighbours(&gang);
                Ok(())
            }
            ExecEffect::Abandon { run, status } => {
                self.abandon(run, &status, around);
                Ok(())
            }
            ExecEffect::Unload { .. } => Ok(()),
            ExecEffect::Describe { query, question, .. } => {
                let answer = match question {
                    Question::Text => Description::Text("HloModule".to_owned()),
                    Question::Cost => Description::Cost(vec![Cost { name: "flops".to_owned(), value: 1.0 }]),
                };
                let event = ExecEvent::Described { query, result: Ok(answer) };
                around.notes.push((around.rng.between(1_000, 5_000_000), Note::Event(event)));
                Ok(())
            }
            ExecEffect::Layout { query, dims, .. } => {
                let event = ExecEvent::Layout { query, result: Ok(format!("{{{}}}", dims.len())) };
                around.notes.push((around.rng.between(1_000, 50_000), Note::Event(event)));
                Ok(())
            }
            ExecEffect::Report(report) => {
                if let Report::Finished { run, result, .. } = &report {
                    around.model.truth(self.slot, *run, result)?;
                }
                around.reports.push(report);
                Ok(())
            }
            ExecEffect::Fatal(text) => violation(Invariant::A4Order, format!("worker {} gave up: {text}", self.slot)),
        }
    }

    fn create(&mut self, backing: BackingKey, shards: usize) -> Check<Vec<usize>> {
        let first = self.slots.len();
        self.slots.extend((0..shards).map(|_| Slot { state: SlotState::Pending, token: 0, readers: 0 }));
        let slots: Vec<usize> = (first..first + shards).collect();
        match self.store.insert(backing, slots.clone()) {
            None => Ok(slots),
            Some(_) => violation(Invariant::A7References, format!("worker {}: {backing:?} is made twice", self.slot)),
        }
    }

    fn slot(&self, backing: BackingKey, shard: u32) -> Check<usize> {
        match self.store.get(&backing).and_then(|s| s.get(shard as usize)) {
            Some(&slot) => Ok(slot),
            None => violation(Invariant::A7References, format!("worker {}: {backing:?} shard {shard} is read after its drop", self.slot)),
        }
    }

    /// A shard that a transfer reads from now on.
    fn source(&mut self, backing: BackingKey, shard: u32) -> Check<usize> {
        let slot = self.slot(backing, shard)?;
        match self.slots[slot].state {
            SlotState::Ready => {
                self.slots[slot].readers += 1;
                Ok(slot)
            }
            ref state => violation(Invariant::A7Donation, format!("worker {}: a transfer starts on a shard that is {state:?}", self.slot)),
        }
    }

    fn launch(&mut self, start: Arc<StartLaunch>, around: &mut Surroundings) -> Check {
        let name = start.program.report.name.trim_start_matches("program");
        let program = Program::number(name.as_bytes()).expect("programs have numbers");
        let mut arguments = Vec::new();
        for index in 0..start.arguments.len() {
            let mut slots = Vec::new();
            for part in start.argument(index) {
                for shard in part.first..part.first + part.count {
                    slots.push(self.slot(part.backing, shard)?);
                }
            }
            arguments.push(slots);
        }
        let (members, total) = (start.program.devices.len(), start.program.total as usize);
        let mut outputs = Vec::new();
        for &output in &start.outputs {
            let slots = self.create(output, total)?;
            outputs.push(start.program.members.iter().map(|&m| slots[m as usize]).collect());
        }
        let (run, threads) = (start.run, start.threads().to_vec());
        let tokens = vec![vec![0; total]; arguments.len()];
        let (to_begin, to_end) = (members, members);
        let missing = BTreeSet::new();
        let job = Job { start, program, arguments, outputs, tokens, to_begin, to_end, missing, device_ns: 0, fails: None };
        self.jobs.insert(run, job);
        for thread in threads {
            self.threads[thread as usize].queue.push_back(run);
            self.pump(thread, around)?;
        }
        Ok(())
    }

    /// Lets a thread take its next launch.
    fn pump(&mut self, thread: u32, around: &mut Surroundings) -> Check {
        while self.threads[thread as usize].running.is_none() {
            let Some(run) = self.threads[thread as usize].queue.pop_front() else { return Ok(()) };
            self.threads[thread as usize].running = Some(run);
            self.begin(run, thread, around)?;
            if self.eager && self.jobs.contains_key(&run) {
                return self.begin_next_too(thread, around);
            }
        }
        Ok(())
    }

    /// Planted bug: the thread hands the next launch to its devices at once.
    fn begin_next_too(&mut self, thread: u32, around: &mut Surroundings) -> Check {
        match self.threads[thread as usize].queue.pop_front() {
            Some(run) => self.begin(run, thread, around),
            None => Ok(()),
        }
    }

    /// Starts the members of a launch that are this thread's. The last ones to begin let all go on; a poisoned input
    /// lets all end.
    fn begin(&mut self, run: RunId, thread: u32, around: &mut Surroundings) -> Check {
        let mut job = self.jobs.remove(&run).expect("what is queued is here");
        let members = job.members(thread);
        let failed_before = job.fails.is_some();
        self.read_arguments(&mut job, &members)?;
        if job.fails.is_none() {
            self.occupy(&job, &members, around)?;
        }
        job.to_begin -= members.len();
        if job.to_begin == 0 && job.fails.is_none() {
            match job.start.program.spans_workers() {
                true => self.exchange(&mut job, around)?,
                false => self.draw(&mut job, around)?,
            }
        }
        let released: Vec<u32> = match (&job.fails, job.to_begin, job.device_ns) {
            // All of them, each after its own time.
            (_, 0, 1..) => job.start.threads().to_vec(),
            (Some(_), ..) if failed_before => vec![thread],
            // Whoever waits for the others, and this one.
            (Some(_), ..) => job.start.threads().iter().copied().filter(|&t| self.threads[t as usize].running == Some(run)).collect(),
            (None, ..) => Vec::new(),
        };
        self.release(&job, &released, around);
        self.jobs.insert(run, job);
        Ok(())
    }

    /// These threads end their members, each after its own time.
    pub(crate) fn release(&self, job: &Job, threads: &[u32], around: &mut Surroundings) {
        for &thread in threads {
            let wait = around.rng.between(job.device_ns / 2, job.device_ns);
            around.notes.push((wait, Note::ThreadDone(thread)));
        }
    }

    fn read_arguments(&self, job: &mut Job, members: &[usize]) -> Check {
        let run = job.start.run;
        for (argument, slots) in job.arguments.iter().enumerate() {
            for &member in members {
                let slot = &self.slots[slots[member]];
                match &slot.state {
                    SlotState::Ready => job.tokens[argument][job.start.program.members[member] as usize] = slot.token,
                    SlotState::Poisoned(status) => job.fails = Some(job.fails.take().unwrap_or_else(|| status.clone())),
                    SlotState::Pending => {
                        return violation(Invariant::A4Order, format!("worker {}: run {run} starts before its input is made", self.slot));
                    }
                    SlotState::Donated(to) => {
                        let text = format!("worker {}: run {run} reads what was donated to run {to}", self.slot);
                        return violation(Invariant::A7Donation, text);
                    }
                }
            }
        }
        Ok(())
    }

    /// The members take their devices, and the storage that they are given.
    fn occupy(&mut self, job: &Job, members: &[usize], around: &mut Surroundings) -> Check {
        let run = job.start.run;
        let index = around.model.node(run)?;
        let seq = around.model.nodes[index].seq;
        for &member in members {
            let device = job.start.program.devices[member];
            let state = &mut self.devices[device as usize];
            if let Some(other) = state.running {
                return violation(Invariant::A4Order, format!("worker {}: runs {other} and {run} at once on device {device}", self.slot));
            }
            if seq <= state.last {
                let text = format!("worker {}: run {run} ({seq}) starts on device {device} after {}", self.slot, state.last);
                return violation(Invariant::A4Order, text);
            }
            *state = Device { running: Some(run), last: seq };
        }
        for (_, slots) in job.start.arguments.iter().zip(&job.arguments).filter(|(a, _)| a.donate) {
            for &member in members {
                let slot = &mut self.slots[slots[member]];
                if slot.readers > 0 {
                    let text = format!("worker {}: run {run} takes storage that {} transfers read", self.slot, slot.readers);
                    return violation(Invariant::A7Donation, text);
                }
                slot.state = SlotState::Donated(run);
            }
        }
        Ok(())
    }

    /// All members are there: how long it takes, and whether the device fails.
    pub(crate) fn draw(&mut self, job: &mut Job, around: &mut Surroundings) -> Check {
        let (fails, time) = (self.programs[job.program].fails_per_mille, self.programs[job.program].time_ns);
        if around.rng.per_mille(fails) {
            self.fails_by_itself(job, around)?;
        }
        job.device_ns = around.rng.between(time / 2, time).max(1);
        self.launches += 1;
        Ok(())
    }

    pub(crate) fn fails_by_itself(&self, job: &mut Job, around: &mut Surroundings) -> Check {
        let status = Status::internal(format!("device failure in run {} on worker {}", job.start.run, self.slot));
        let index = around.model.node(job.start.run)?;
        around.model.nodes[index].own.push(status.clone());
        job.fails = Some(Arc::new(status));
        Ok(())
    }

    fn thread_done(&mut self, thread: u32, around: &mut Surroundings) -> Check {
        let run = self.threads[thread as usize].running.take().expect("a thread ends what it runs");
        let mut job = self.jobs.remove(&run).expect("what runs is here");
        let members = job.members(thread);
        for &member in &members {
            let state = &mut self.devices[job.start.program.devices[member] as usize];
            // A member that met a poisoned input never took its device.
            if state.running == Some(run) {
                state.running = None;
            }
        }
        self.publish(&job, &members);
        job.to_end -= members.len();
        if job.to_end == 0 {
            self.end(job, around);
        } else {
            self.jobs.insert(run, job);
        }
        self.pump(thread, around)
    }

    /// The outputs of these members.
    fn publish(&mut self, job: &Job, members: &[usize]) {
        let program = &self.programs[job.program];
        let tokens: Vec<u64> = job.tokens.iter().flatten().copied().collect();
        for (output, slots) in job.outputs.iter().enumerate() {
            for &member in members {
                let slot = &mut self.slots[slots[member]];
                match &job.fails {
                    Some(status) => slot.state = SlotState::Poisoned(status.clone()),
                    None => {
                        let place = job.start.program.members[member] as usize;
                        slot.token = program.output_token(job.start.launch_id, output, place, &tokens);
                        slot.state = SlotState::Ready;
                    }
                }
            }
        }
    }

    /// All members have ended.
    fn end(&mut self, job: Job, around: &mut Surroundings) {
        let program = &self.programs[job.program];
        let sizes: Vec<u64> = program.outputs.iter().map(|o| o.shard_len(program.devices) as u64 * ITEM_BYTES).collect();
        let result = match job.fails {
            Some(status) => Err(status),
            None => Ok(sizes.into()),
        };
        self.inbox.push(ExecEvent::LaunchDone { run: job.start.run, device_ns: job.device_ns, busy_ns: job.device_ns, result });
        self.wake(around);
    }

    fn transfer(&mut self, transfer: Transfer, around: &mut Surroundings) -> Check {
        self.next_transfer += 1;
        self.transfers.insert(self.next_transfer, transfer);
        let delay = if around.rng.per_mille(100) { around.rng.between(0, 3_000_000) } else { around.rng.between(0, 100_000) };
        around.notes.push((delay, Note::TransferDone(self.next_transfer)));
        Ok(())
    }

    fn transfer_done(&mut self, id: u64, around: &mut Surroundings) -> Check {
        let transfer = self.transfers.remove(&id).expect("a transfer ends once");
        let run = match &transfer {
            Transfer::Copy { start, .. } => start.run,
            Transfer::Write { start, .. } => start.command.order.run,
            Transfer::Read { start, .. } => start.command.order.run,
            Transfer::Send { start, .. } => start.command.order.run,
        };
        let mut failed = None;
        if around.rng.per_mille(6) {
            let status = Status::internal(format!("transfer failure in run {run}"));
            let index = around.model.node(run)?;
            around.model.nodes[index].own.push(status.clone());
            failed = Some(Arc::new(status));
        }
        let event = match transfer {
            Transfer::Copy { start, sources, outputs } => {
                let tokens = self.read(&sources)?;
                let sizes = start.items.iter().map(|_| ITEM_BYTES).collect();
                let tokens: Vec<Option<u64>> = tokens.into_iter().map(Some).collect();
                let result = self.fill(&outputs, &tokens, failed, sizes);
                ExecEvent::CopyDone { run, result }
            }
            Transfer::Write { start, contents, outputs } => {
                let (tokens, sizes) = written(&start.command, &contents);
                let result = self.fill(&outputs, &tokens, failed, sizes);
                ExecEvent::WriteDone { run, result }
            }
            Transfer::Read { start, sources } => {
                let tokens = self.read(&sources)?;
                let starts = start.command.pieces.iter().map(|p| p.region.as_ref().map(|r| r.start[0]));
                let result = match &failed {
                    None => Ok(starts.zip(tokens).collect()),
                    Some(status) => Err(Status::clone(status)),
                };
                let (session, buffer) = (start.command.order.session, start.command.buffer);
                around.offers.push(Offer { session, buffer, result });
                ExecEvent::ReadDone { run, bytes: 1, result: failed.map_or(Ok(()), Err) }
            }
            Transfer::Send { start, sources } => {
                let tokens = self.read(&sources)?;
                send(&start.command, around, |item| match &failed {
                    None => Ok(tokens[item]),
                    Some(status) => Err(Status::clone(status)),
                });
                ExecEvent::SendDone { run, bytes: 1, result: failed.map_or(Ok(()), Err) }
            }
        };
        self.inbox.push(event);
        Ok(())
    }

    /// Ends the reading of these shards.
    fn read(&mut self, sources: &[usize]) -> Check<Vec<u64>> {
        let mut tokens = Vec::new();
        for &slot in sources {
            let slot = &mut self.slots[slot];
            slot.readers -= 1;
            match slot.state {
                SlotState::Ready => tokens.push(slot.token),
                ref state => {
                    return violation(Invariant::A7Donation, format!("worker {}: a shard is {state:?} while it is read", self.slot));
                }
            }
        }
        Ok(tokens)
    }

    fn fill(
        &mut self,
        outputs: &[usize],
        tokens: &[Option<u64>],
        failed: Option<Arc<Status>>,
        sizes: Vec<u64>,
    ) -> Result<Vec<u64>, Arc<Status>> {
        for (&slot, token) in outputs.iter().zip(tokens) {
            let slot = &mut self.slots[slot];
            match (&failed, token) {
                (Some(status), _) => slot.state = SlotState::Poisoned(status.clone()),
                (None, Some(token)) => {
                    slot.token = *token;
                    slot.state = SlotState::Ready;
                }
                (None, None) => {}
            }
        }
        failed.map_or(Ok(sizes), Err)
    }

    fn compile(&mut self, command: CompileCommand, around: &mut Surroundings) {
        let index = Program::number(&command.program).expect("clients send programs of the world");
        let program = &self.programs[index];
        let result = if program.compile_fails { Err(Status::invalid(program.compile_error())) } else { Ok(Arc::new(program.report())) };
        self.compiled.insert(command.executable, (index, command.devices));
        let event = ExecEvent::Compiled { executable: command.executable, result };
        around.notes.push((around.rng.between(50_000, 3_000_000), Note::Event(event)));
    }

    fn load(&mut self, executable: ExecutableId, gang: Option<Arc<GangPart>>, around: &mut Surroundings) {
        let Some((index, devices)) = self.compiled.get(&executable).cloned() else {
            // Compiled by an earlier life, with a cache that this one does not have.
            let event = ExecEvent::Loaded { executable, result: Err(Status::not_found("not in the cache")) };
            around.notes.push((around.rng.between(10_000, 1_000_000), Note::Event(event)));
            return;
        };
        let program = &self.programs[index];
        // Where several load it, it fails for one of them.
        let here = gang.as_ref().is_none_or(|gang| gang.here[0].member == 0);
        let result = if program.load_fails && here {
            Err(Status::internal(program.load_error()))
        } else {
            // Both forms are there, by program.
            let form = if index % 2 == 0 { Form::PerDevice } else { Form::Gang };
            let loaded = LoadedProgram::local(devices, form, Arc::new(program.report()));
            Ok(Arc::new(match &gang {
                None => loaded,
                Some(gang) => {
                    let (members, devices) = gang.here.iter().map(|m| (m.member, m.device)).unzip();
                    LoadedProgram { devices, members, total: gang.members, ..loaded }
                }
            }))
        };
        if let Some(gang) = gang {
            self.mail.parts.insert(executable, gang);
        }
        let event = ExecEvent::Loaded { executable, result };
        around.notes.push((around.rng.between(10_000, 1_000_000), Note::Event(event)));
    }

    /// Nothing may be left once every session has ended.
    pub(crate) fn all_gone(&self) -> Check {
        if let Some(text) = self.exec.leftovers() {
            return violation(Invariant::A7References, format!("worker {} keeps {text}", self.slot));
        }
        let busy = self.threads.iter().filter(|t| t.running.is_some() || !t.queue.is_empty()).count();
        let counts = (self.store.len(), self.uploads.len(), self.transfers.len(), busy, self.mail.left());
        if counts != (0, 0, 0, 0, 0) {
            let text = format!("worker {} keeps (backings, uploads, transfers, busy threads, operands) {counts:?}", self.slot);
            return violation(Invariant::A7References, text);
        }
        Ok(())
    }
}

fn send(command: &SendShards, around: &mut Surroundings, content: impl Fn(usize) -> Result<u64, Status>) {
    let SendShards { address, sender, items, .. } = command;
    let moved = |(index, item): (usize, &SendItem)| {
        let (address, content) = (address.clone(), content(index));
        Moved { address, sender: *sender, buffer: item.buffer, content }
    };
    around.moves.extend(items.iter().enumerate().map(moved));
}

/// Tokens and sizes of the shards of an upload; `None` and 0 for those of other workers.
fn written(command: &HostWrite, contents: &[u64]) -> (Vec<Option<u64>>, Vec<u64>) {
    let mut tokens = vec![None; command.shards as usize];
    let mut sizes = vec![0; command.shards as usize];
    for (source, &content) in command.sources.iter().zip(contents) {
        for target in &source.targets {
            let start = target.region.as_ref().map(|r| r.start[0]);
            let len = target.region.as_ref().map_or(source.dims[0], |r| r.dims[0]);
            tokens[target.shard as usize] = Some(part_token(content, start));
            sizes[target.shard as usize] = len as u64 * ITEM_BYTES;
        }
    }
    (tokens, sizes)
}
