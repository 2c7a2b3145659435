//! Checks the stream of commands: the order of grants (A4), donation and frees (A7), memory in order time, the window.

use std::collections::{BTreeMap, BTreeSet};

use pw_core::Core;
use pw_types::*;

use crate::failure::{Check, Invariant, violation};
use crate::model::{Compiled, Model, State, Work};

/// What the core may grant ahead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowRule {
    pub(crate) ns: u64,
    pub(crate) gangs_min: u32,
    pub(crate) gangs_max: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) alive: bool,
    pub(crate) incarnation: Incarnation,
    last: GrantSeq,
    /// Backings that were granted here and not freed.
    pub(crate) live: BTreeMap<BufferId, Held>,
}

#[derive(Debug)]
pub(crate) struct Held {
    bytes: Vec<(usize, u64)>,
    donated: bool,
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Device {
    /// Order-time ledger, made from the commands alone.
    reserved: u64,
    /// The most that was reserved while the last event was handled.
    peak: u64,
    gangs: u32,
    gang_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Order {
    devices_per_worker: usize,
    hosts: Vec<Host>,
    devices: Vec<Device>,
    last_seq: GrantSeq,
    /// Nodes that wait for their grant.
    pub(crate) queued: BTreeSet<usize>,
    rule: WindowRule,
    limit: Option<u64>,
    /// Lives of workers that the core knows to be over.
    pub(crate) lost: BTreeSet<(HostSlot, Incarnation)>,
    pub(crate) grants: u64,
}

impl Order {
    pub(crate) fn new(workers: usize, devices_per_worker: usize, rule: WindowRule, limit: Option<u64>) -> Order {
        Order {
            devices_per_worker,
            hosts: (0..workers).map(|_| Host::default()).collect(),
            devices: vec![Device::default(); workers * devices_per_worker],
            last_seq: GrantSeq(0),
            queued: BTreeSet::new(),
            rule,
            limit,
            lost: BTreeSet::new(),
            grants: 0,
        }
    }

    pub(crate) fn slot_of(&self, device: usize) -> HostSlot {
        HostSlot((device / self.devices_per_worker) as u32)
    }

    /// The workers of these devices, in order.
    pub(crate) fn slots_of(&self, devices: &[usize]) -> Vec<HostSlot> {
        let slots: BTreeSet<HostSlot> = devices.iter().map(|&d| self.slot_of(d)).collect();
        slots.into_iter().collect()
    }

    pub(crate) fn device(&self, slot: HostSlot, index: u32) -> usize {
        slot.0 as usize * self.devices_per_worker + index as usize
    }

    pub(crate) fn host(&self, slot: HostSlot) -> &Host {
        &self.hosts[slot.0 as usize]
    }

    pub(crate) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub(crate) fn joined(&mut self, slot: HostSlot, incarnation: Incarnation) {
        self.hosts[slot.0 as usize] = Host { alive: true, incarnation, ..Host::default() };
    }

    pub(crate) fn is_life(&self, slot: HostSlot, incarnation: Incarnation) -> bool {
        let host = self.host(slot);
        host.alive && host.incarnation == incarnation
    }

    pub(crate) fn ever_lost(&self, slot: HostSlot) -> bool {
        self.lost.iter().any(|(s, _)| *s == slot)
    }

    fn release(&mut self, bytes: &[(usize, u64)]) {
        bytes.iter().for_each(|&(d, bytes)| self.devices[d].reserved -= bytes);
    }

    pub(crate) fn begin_event(&mut self) {
        self.devices.iter_mut().for_each(|d| d.peak = d.reserved);
    }

    pub(crate) fn end_event(&self) -> Check {
        let Some(limit) = self.limit else { return Ok(()) };
        match self.devices.iter().position(|d| d.reserved > limit) {
            None => Ok(()),
            Some(d) => {
                violation(Invariant::Memory, format!("device {d} holds {} of {limit} bytes in order time", self.devices[d].reserved))
            }
        }
    }
}

/// Backings that a command reads.
pub(crate) fn consumed(command: &Command) -> Vec<BufferId> {
    match command {
        Command::Launch(launch) => launch.arguments.iter().flat_map(|a| a.segments.iter().map(|s| s.buffer)).collect(),
        Command::Copy(copy) => copy.items.iter().map(|i| i.source.buffer).collect(),
        Command::HostRead(read) => read.pieces.iter().map(|p| p.source.buffer).collect(),
        Command::Send(send) => send.items.iter().map(|i| i.source.buffer).collect(),
        _ => Vec::new(),
    }
}

impl Model {
    /// A worker is there, maybe again: what was lost with it is loaded, once all its workers are there.
    pub(crate) fn joined(&mut self, slot: HostSlot, incarnation: Incarnation) {
        self.order.joined(slot, incarnation);
        let order = &self.order;
        let lost = self.compiled.values_mut().filter(|c| c.failed == Some(Code::Unavailable));
        let back = lost.filter(|c| order.slots_of(&c.devices).iter().all(|&s| order.host(s).alive));
        back.for_each(|c| c.failed = None);
    }

    /// The core sent a command.
    pub(crate) fn sent(&mut self, slot: HostSlot, incarnation: Incarnation, command: &Command) -> Check {
        let host = self.order.host(slot);
        if !host.alive || host.incarnation != incarnation {
            return violation(Invariant::A4Order, format!("a command for worker {slot} in a life that is over: {command:?}"));
        }
        if let Some(order) = command.order() {
            return self.granted(slot, incarnation, order, command);
        }
        match command {
            Command::Free { buffers } => buffers.iter().try_for_each(|&id| self.freed(slot, id)),
            Command::Cancel { runs, .. } => runs.iter().try_for_each(|&run| self.cancelled(run)),
            Command::Compile(compile) => self.compile_sent(slot, compile),
            Command::Load { executable, gang, .. } => self.load_sent(slot, *executable, gang.as_ref()),
            _ => Ok(()),
        }
    }

    fn granted(&mut self, slot: HostSlot, incarnation: Incarnation, order: NodeOrder, command: &Command) -> Check {
        let index = self.node(order.run)?;
        let host = &mut self.order.hosts[slot.0 as usize];
        let NodeOrder { run, seq, previous, session } = order;
        if previous != host.last || seq <= host.last {
            let last = host.last;
            return violation(Invariant::A4Order, format!("worker {slot}: run {run} is {seq} after {previous}, the last one was {last}"));
        }
        host.last = seq;
        let node = &self.nodes[index];
        if node.session != session {
            return violation(Invariant::A4Order, format!("run {run} of session {} is granted to session {session}", node.session));
        }
        match node.state {
            State::Queued => self.take_place(index, seq, command)?,
            State::Granted if node.seq == seq && !node.hosts.contains(&(slot, incarnation)) => {}
            state => {
                return violation(Invariant::A4Order, format!("run {run} is granted as {seq} although it is {state:?} as {}", node.seq));
            }
        }
        self.nodes[index].hosts.push((slot, incarnation));
        if let Command::Launch(launch) = command {
            self.check_share(index, slot, launch)?;
        }
        self.consume(slot, run, command)?;
        self.reserve(index, slot, command)
    }

    /// The node gets its place in the one order of all hosts.
    fn take_place(&mut self, index: usize, seq: GrantSeq, command: &Command) -> Check {
        let run = self.nodes[index].run;
        if seq.0 != self.order.last_seq.0 + 1 {
            return violation(Invariant::A4Order, format!("run {run} is granted as {seq} after {}", self.order.last_seq));
        }
        self.order.last_seq = seq;
        self.order.grants += 1;
        if let Some(&(input, _)) = self.nodes[index].inputs.iter().find(|(n, _)| self.nodes[*n].state == State::Queued) {
            return violation(Invariant::A4Order, format!("run {run} is granted before run {}, which it consumes", self.nodes[input].run));
        }
        if let Command::Launch(launch) = command {
            self.check_loaded(index, launch)?;
            self.check_donations(index, launch)?;
            self.enter_window(index, launch.executable)?;
            self.nodes[index].donates = launch.arguments.iter().map(|a| a.donate).collect();
        }
        self.leave_queue(index, State::Granted);
        self.nodes[index].seq = seq;
        Ok(())
    }

    fn leave_queue(&mut self, index: usize, state: State) {
        self.order.queued.remove(&index);
        self.nodes[index].state = state;
        for (node, output) in self.nodes[index].inputs.clone() {
            self.nodes[node].outputs[output as usize].queued -= 1;
        }
    }

    /// A program runs once all its workers have it.
    fn check_loaded(&self, index: usize, launch: &Launch) -> Check {
        let Some(compiled) = self.compiled.get(&launch.executable) else {
            return violation(Invariant::A4Order, format!("run {} is of a program that nobody compiled", launch.order.run));
        };
        match self.order.slots_of(&self.nodes[index].devices).into_iter().find(|slot| !compiled.loaded.contains(slot)) {
            None => Ok(()),
            Some(slot) => {
                let text = format!("run {} is granted, but worker {slot} has not loaded its program", launch.order.run);
                violation(Invariant::A4Order, text)
            }
        }
    }

    /// A host gets the shards of its own members, and is given the same arguments as the others.
    fn check_share(&self, index: usize, slot: HostSlot, launch: &Launch) -> Check {
        let node = &self.nodes[index];
        let members = node.devices.iter().filter(|&&d| self.order.slot_of(d) == slot).count();
        let shards = |a: &Argument| a.segments.iter().map(|s| s.count as usize).sum::<usize>();
        if members == 0 || launch.arguments.iter().any(|a| shards(a) != members) {
            let text = format!("worker {slot} has {members} members in run {} and is sent {:?}", node.run, launch.arguments);
            return violation(Invariant::A4Order, text);
        }
        if launch.arguments.iter().map(|a| a.donate).ne(node.donates.iter().copied()) {
            return violation(Invariant::A7Donation, format!("run {} is given other arguments on worker {slot}", node.run));
        }
        Ok(())
    }

    /// A backing is given to the plugin only by its one owner (A7).
    fn check_donations(&self, index: usize, launch: &Launch) -> Check {
        for argument in launch.arguments.iter().filter(|a| a.donate) {
            for segment in &argument.segments {
                let made = self.node(segment.buffer.run)?;
                let output = &self.nodes[made].outputs[segment.buffer.output as usize];
                let mine = self.nodes[index].inputs.iter().filter(|i| **i == (made, segment.buffer.output)).count();
                if output.handles > 0 || output.queued > 1 || mine > 1 {
                    let text = format!(
                        "run {} is given buffer {} to reuse, which has {} handles and {} queued uses",
                        launch.order.run, segment.buffer, output.handles, output.queued
                    );
                    return violation(Invariant::A7Donation, text);
                }
            }
        }
        Ok(())
    }

    fn enter_window(&mut self, index: usize, executable: ExecutableId) -> Check {
        let cost = self.compiled.get(&executable).map_or(0, |c| c.estimate_ns);
        let WindowRule { ns, gangs_min, gangs_max } = self.order.rule;
        for &device in &self.nodes[index].devices {
            let state = &mut self.order.devices[device];
            if state.gangs >= gangs_min && (state.gang_ns + cost > ns || state.gangs >= gangs_max) {
                let text = format!("device {device}: a gang of {cost} ns on top of {} gangs of {} ns", state.gangs, state.gang_ns);
                return violation(Invariant::Window, text);
            }
            state.gangs += 1;
            state.gang_ns += cost;
        }
        self.nodes[index].cost_ns = cost;
        Ok(())
    }

    fn consume(&mut self, slot: HostSlot, run: RunId, command: &Command) -> Check {
        let host = &mut self.order.hosts[slot.0 as usize];
        for id in consumed(command) {
            match host.live.get(&id) {
                None => {
                    return violation(Invariant::A4Order, format!("run {run} reads buffer {id}, which worker {slot} does not have then"));
                }
                Some(held) if held.donated => {
                    return violation(Invariant::A7Donation, format!("run {run} reads buffer {id}, which was donated before"));
                }
                Some(_) => {}
            }
        }
        if let Command::Launch(launch) = command {
            for segment in launch.arguments.iter().filter(|a| a.donate).flat_map(|a| &a.segments) {
                host.live.get_mut(&segment.buffer).expect("just seen").donated = true;
            }
        }
        Ok(())
    }

    /// What the node makes on this host is counted from here on.
    fn reserve(&mut self, index: usize, slot: HostSlot, command: &Command) -> Check {
        let node = &self.nodes[index];
        if matches!(node.work, Work::Move { from } if from == slot) {
            return Ok(());
        }
        let (mut temporaries, mut reused) = (0, 0);
        if let Command::Launch(launch) = command {
            temporaries = self.compiled.get(&launch.executable).map_or(0, |c| self.programs[c.program].temporaries);
            // All segments of such an argument are of one backing.
            for segment in launch.arguments.iter().filter(|a| a.donate).filter_map(|a| a.segments.first()) {
                let made = self.node(segment.buffer.run)?;
                reused += self.nodes[made].outputs[segment.buffer.output as usize].bytes;
            }
        }
        let mut wanted: BTreeMap<usize, u64> = BTreeMap::new();
        for (output, made) in (0..).zip(&node.outputs) {
            let here = made.devices.iter().filter(|&&d| self.order.slot_of(d) == slot);
            let bytes: Vec<(usize, u64)> = here.map(|&d| (d, made.bytes)).collect();
            bytes.iter().for_each(|&(d, bytes)| *wanted.entry(d).or_default() += bytes);
            let id = BufferId { run: node.run, output };
            let held = Held { bytes, donated: false };
            if self.order.hosts[slot.0 as usize].live.insert(id, held).is_some() {
                return violation(Invariant::A7References, format!("buffer {id} is made twice on worker {slot}"));
            }
        }
        for (device, bytes) in wanted {
            let state = &mut self.order.devices[device];
            if let Some(limit) = self.order.limit
                && (state.reserved + bytes + temporaries).saturating_sub(reused) > limit
            {
                let text = format!(
                    "run {} takes {bytes} + {temporaries} - {reused} bytes of device {device} on top of {} of {limit}",
                    node.run, state.reserved
                );
                return violation(Invariant::Memory, text);
            }
            state.reserved += bytes;
            state.peak = state.peak.max(state.reserved);
        }
        Ok(())
    }

    fn freed(&mut self, slot: HostSlot, id: BufferId) -> Check {
        let Some(held) = self.order.hosts[slot.0 as usize].live.remove(&id) else {
            return violation(Invariant::A7References, format!("buffer {id} is freed on worker {slot}, which does not have it"));
        };
        self.order.release(&held.bytes);
        let made = self.node(id.run)?;
        let output = &self.nodes[made].outputs[id.output as usize];
        if output.handles > 0 || output.queued > 0 {
            let text = format!("buffer {id} is freed while {} handles and {} queued nodes need it", output.handles, output.queued);
            return violation(Invariant::A7References, text);
        }
        Ok(())
    }

    fn cancelled(&mut self, run: RunId) -> Check {
        let index = self.node(run)?;
        self.nodes[index].cancelled = true;
        let node = &self.nodes[index];
        let broken = match &node.work {
            Work::Upload { buffers } => buffers.iter().any(|&b| self.broken.contains_key(&(node.session, b))),
            Work::Move { .. } | Work::Launch { .. } => {
                node.truth.values().any(|r| r.is_err()) || node.hosts.iter().any(|h| self.order.lost.contains(h))
            }
            _ => false,
        };
        if broken || self.closed.contains(&node.session) {
            return Ok(());
        }
        violation(Invariant::A9Faults, format!("run {run} is cancelled although its session is there"))
    }

    /// A worker's report reached the core.
    pub(crate) fn reported(&mut self, slot: HostSlot, incarnation: Incarnation, report: &Report) -> Check {
        match report {
            Report::Finished { run, device_ns, result } => self.finished(slot, incarnation, *run, *device_ns, result),
            // The new life of a worker compiles what it does not find.
            Report::Loaded { result: Err(Status { code: Code::NotFound, .. }), .. } => Ok(()),
            Report::Loaded { executable, result: Ok(()) } => {
                if let Some(compiled) = self.compiled.get_mut(executable).filter(|_| self.order.is_life(slot, incarnation)) {
                    compiled.loaded.insert(slot);
                }
                Ok(())
            }
            Report::Loaded { executable, result: Err(status) } => {
                // What it says of a load before a loss is old.
                if let Some(compiled) = self.compiled.get_mut(executable).filter(|_| self.order.is_life(slot, incarnation)) {
                    compiled.failed = compiled.failed.or(Some(status.code));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn finished(&mut self, slot: HostSlot, incarnation: Incarnation, run: RunId, device_ns: u64, result: &Result<(), Status>) -> Check {
        if !self.order.is_life(slot, incarnation) {
            return Ok(());
        }
        let index = self.node(run)?;
        let node = &mut self.nodes[index];
        if !node.hosts.contains(&(slot, incarnation)) || node.reported.contains(&slot) {
            return violation(Invariant::A9Finished, format!("run {run} finished on worker {slot} twice, or was never granted there"));
        }
        node.reported.push(slot);
        node.device_ns = node.device_ns.max(device_ns);
        let good = result.is_ok();
        if !good {
            for output in 0..node.outputs.len() as u32 {
                if let Some(held) = self.order.hosts[slot.0 as usize].live.get_mut(&BufferId { run, output }) {
                    let bytes = std::mem::take(&mut held.bytes);
                    self.order.release(&bytes);
                }
            }
        }
        self.finish_if_last(index);
        Ok(())
    }

    fn finish_if_last(&mut self, index: usize) {
        let Model { nodes, order, compiled, .. } = self;
        let node = &mut nodes[index];
        let lost = |h: &(HostSlot, Incarnation)| order.lost.contains(h);
        if node.hosts.iter().any(|h| !node.reported.contains(&h.0) && !lost(h)) {
            return;
        }
        node.state = State::Finished;
        let Work::Launch { executable, .. } = node.work else { return };
        // The window of a lost worker went with it.
        let (gone, there): (Vec<_>, Vec<_>) = node.hosts.iter().partition(|h| lost(h));
        for device in node.devices.iter().copied().filter(|&d| there.iter().any(|(slot, _)| *slot == order.slot_of(d))).collect::<Vec<_>>()
        {
            let state = &mut order.devices[device];
            state.gangs = state.gangs.saturating_sub(1);
            state.gang_ns = state.gang_ns.saturating_sub(node.cost_ns);
        }
        if gone.is_empty()
            && node.truth.values().all(Result::is_ok)
            && let Some(compiled) = compiled.get_mut(&executable)
        {
            compiled.measure(node.device_ns);
        }
    }

    /// The core knows that a worker is gone.
    pub(crate) fn worker_lost(&mut self, slot: HostSlot, incarnation: Incarnation) {
        let host = &mut self.order.hosts[slot.0 as usize];
        if !host.alive || host.incarnation != incarnation {
            return;
        }
        host.alive = false;
        host.live.clear();
        self.order.lost.insert((slot, incarnation));
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            if node.state == State::Granted && node.hosts.contains(&(slot, incarnation)) {
                self.finish_if_last(index);
            }
        }
        let first = slot.0 as usize * self.order.devices_per_worker;
        for device in first..first + self.order.devices_per_worker {
            self.order.devices[device] = Device::default();
        }
        let order = &self.order;
        for compiled in self.compiled.values_mut().filter(|c| order.slots_of(&c.devices).contains(&slot)) {
            compiled.loaded.remove(&slot);
            compiled.failed = compiled.failed.or(Some(Code::Unavailable));
        }
    }

    /// Nodes that the core forgot without a grant. `sent` = runs that it granted while it handled the event.
    pub(crate) fn take_dropped(&mut self, core: &Core, sent: &BTreeSet<RunId>) -> Vec<usize> {
        let gone = |&&index: &&usize| !core.knows_run(self.nodes[index].run) && !sent.contains(&self.nodes[index].run);
        let dropped: Vec<usize> = self.order.queued.iter().filter(gone).copied().collect();
        dropped.iter().for_each(|&index| self.leave_queue(index, State::Dropped));
        dropped
    }

    /// A node is dropped only for a reason (A9, A8).
    pub(crate) fn judge_dropped(&mut self, index: usize) -> Check {
        let node = &self.nodes[index];
        let lost_device = node.devices.iter().any(|&d| !self.order.host(self.order.slot_of(d)).alive);
        let bad_program = match node.work {
            Work::Launch { executable, .. } => self.compiled.get(&executable).is_none_or(|c| c.failed.is_some()),
            _ => false,
        };
        let broken = match &node.work {
            Work::Upload { buffers } => buffers.iter().any(|&b| self.broken.contains_key(&(node.session, b))),
            _ => false,
        };
        let bad_input = node.inputs.iter().any(|&(input, _)| self.is_bad(input));
        let caused = self.closed.contains(&node.session) || lost_device || bad_program || broken || bad_input;
        if self.may_lack_memory(index) {
            self.nodes[index].own_exhausted = true;
            return Ok(());
        }
        if caused {
            return Ok(());
        }
        violation(Invariant::A9Faults, format!("run {} was dropped and nothing it needs has failed", self.nodes[index].run))
    }

    /// What it made cannot be read.
    fn is_bad(&self, index: usize) -> bool {
        let node = &self.nodes[index];
        node.state == State::Dropped || node.truth.values().any(|r| r.is_err()) || node.hosts.iter().any(|h| self.order.lost.contains(h))
    }

    fn may_lack_memory(&self, index: usize) -> bool {
        let Some(limit) = self.order.limit else { return false };
        let node = &self.nodes[index];
        let temporaries = match node.work {
            Work::Launch { program, .. } => self.programs[program].temporaries,
            _ => 0,
        };
        node.devices.iter().any(|&device| {
            let outputs = node.outputs.iter().filter(|o| o.devices.contains(&device)).map(|o| o.bytes).sum::<u64>();
            outputs + temporaries + self.order.devices[device].peak > limit
        })
    }
}

impl Compiled {
    /// Folds a run into the estimate, as the core does.
    fn measure(&mut self, ns: u64) {
        self.estimate_ns = if self.measured { (self.estimate_ns * 3 + ns) / 4 } else { ns };
        self.measured = true;
    }
}
