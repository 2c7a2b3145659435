//! Launches: checked on arrival, queued at every member, handed to the threads that run them when they may go.
//!
//! A launch may be handed ahead of time when everything before it in each member's queue is in the hands of the thread
//! that will run it there, and every input is there or is made by such an earlier launch: a thread serves its queue in
//! order.

use std::sync::Arc;

use pw_types::{BufferId, ExecutableId, Launch, NodeOrder, RunId, Status};
use smallvec::SmallVec;

use crate::check::check_arguments;
use crate::core::{ExecCore, abandon, finished};
use crate::event::{BackingKey, ExecEffect, Form, LoadedProgram, Part, StartArgument, StartLaunch};
use crate::node::{NodeKey, Work};
use crate::program::{Executable, Loaded};
use crate::table::{Inspected, Specs};

/// What became of the first launch of a queue.
enum Attempt {
    Handed,
    Blocked,
    /// It ended with an error and left the queue.
    Failed,
}

impl ExecCore {
    pub(crate) fn arrive_launch(&mut self, launch: Launch, fx: &mut Vec<ExecEffect>) {
        let Launch { order, executable, arguments, launch_id } = launch;
        if let Err(status) = self.usable(executable) {
            self.lost.add(order.run, status.clone());
            // Its program is not known: it may be one over several workers.
            fx.push(ExecEffect::Abandon { run: order.run, status: status.clone() });
            return finished(order.run, 0, Err(&status), fx);
        }
        let (program, outputs) = self.promise(order, executable);
        let mut parts = Vec::with_capacity(arguments.len());
        let mut ends = Vec::with_capacity(arguments.len());
        for argument in &arguments {
            for segment in &argument.segments {
                match self.resolve(segment.buffer, segment.first, segment.count) {
                    Ok(part) => parts.push(part),
                    Err(status) => return self.refuse_launch(order, &program, &outputs, status, fx),
                }
            }
            ends.push(u32::try_from(parts.len()).expect("fewer than 2^32 parts"));
        }
        for &part in &parts {
            if let Err(status) = self.table.inspect(part) {
                return self.refuse_launch(order, &program, &outputs, status, fx);
            }
        }
        let loaded = loaded(&self.executables.entries, executable);
        if let Err(status) = check_arguments(&self.table, loaded, &parts, &ends) {
            return self.refuse_launch(order, &program, &outputs, Arc::new(status), fx);
        }
        let brief = loaded.is_brief();
        let mut donate: SmallVec<[bool; 16]> = arguments.iter().zip(&loaded.donates).map(|(a, &can)| a.donate && can).collect();
        self.settle_donations(order.run, &parts, &ends, &mut donate);
        let arguments = ends.iter().zip(&donate).map(|(&end, &donate)| StartArgument { end, donate }).collect();
        let thread = program.devices.iter().copied().min().expect("a program has devices");
        // Behind long launches it follows them to their threads, which are awake and would have to be waited for.
        let follows = program.devices.iter().any(|&device| self.devices[device as usize].lengthy > 0);
        let start = StartLaunch {
            run: order.run,
            session: order.session,
            executable,
            thread,
            one_thread: program.form == Form::Gang || (brief && !follows),
            brief,
            launch_id,
            program,
            arguments,
            parts,
            outputs: outputs.to_vec(),
        };
        self.enqueue(order, Arc::new(start), outputs);
    }

    fn refuse_launch(
        &mut self,
        order: NodeOrder,
        program: &LoadedProgram,
        outputs: &[BackingKey],
        status: Arc<Status>,
        fx: &mut Vec<ExecEffect>,
    ) {
        abandon(order.run, program, &status, fx);
        self.refuse(order, outputs, status, fx);
    }

    /// The executable is loaded and stays so.
    fn usable(&self, executable: ExecutableId) -> Result<(), Arc<Status>> {
        match self.executables.entries.get(&executable) {
            Some(Executable::Loaded(loaded)) if !loaded.unload => Ok(()),
            Some(Executable::Failed(status)) => Err(status.clone()),
            _ => Err(Arc::new(Status::not_found(format!("executable {executable} is not loaded on this worker")))),
        }
    }

    /// Creates the outputs, so that later commands can name them whatever happens to this one.
    fn promise(&mut self, order: NodeOrder, executable: ExecutableId) -> (Arc<LoadedProgram>, SmallVec<[BackingKey; 2]>) {
        let loaded = loaded(&self.executables.entries, executable);
        let program = loaded.program.clone();
        let mut outputs = SmallVec::with_capacity(loaded.outputs.len());
        for (output, spec) in (0..).zip(&loaded.outputs) {
            let id = BufferId { run: order.run, output };
            outputs.push(self.table.create(id, Specs::Same(spec.clone()), loaded.shards.iter().copied()));
        }
        (program, outputs)
    }

    /// A range of shards of a backing that is here.
    pub(crate) fn resolve(&self, id: BufferId, first: u32, count: u32) -> Result<Part, Arc<Status>> {
        let backing = self.lookup(id)?;
        let shards = self.table.get(backing).shards.len();
        match first.checked_add(count) {
            Some(end) if end as usize <= shards => Ok(Part { backing, first, count }),
            _ => Err(Arc::new(Status::internal(format!("buffer {id} has {shards} shards, wanted {count} from {first}")))),
        }
    }

    /// Storage that the launch reads twice cannot become an output.
    fn settle_donations(&mut self, run: RunId, parts: &[Part], ends: &[u32], donate: &mut [bool]) {
        if !donate.contains(&true) {
            return;
        }
        self.table.new_stamp();
        let twice: SmallVec<[BackingKey; 4]> = parts.iter().map(|p| p.backing).filter(|&b| self.table.seen(b)).collect();
        let mut start = 0;
        for (donate, &end) in donate.iter_mut().zip(ends) {
            let parts = &parts[start..end as usize];
            start = end as usize;
            *donate &= parts.iter().all(|p| !twice.contains(&p.backing));
            if *donate {
                parts.iter().for_each(|p| self.table.get_mut(p.backing).donated_to = Some(run));
            }
        }
    }

    fn enqueue(&mut self, order: NodeOrder, start: Arc<StartLaunch>, outputs: SmallVec<[BackingKey; 2]>) {
        if let Some(Executable::Loaded(loaded)) = self.executables.entries.get_mut(&start.executable) {
            loaded.launches += 1;
        }
        let key = self.admit(order, outputs, Work::Launch(start.clone()));
        for &device in &start.program.devices {
            let device = &mut self.devices[device as usize];
            device.queue.push_back(key);
            device.lengthy += u32::from(start.is_lengthy());
        }
        self.mark(start.thread);
    }

    pub(crate) fn mark(&mut self, device: u32) {
        let entry = &mut self.devices[device as usize];
        if !entry.marked {
            entry.marked = true;
            self.marked.push(device);
        }
    }

    /// Hands over from this queue as many launches as may go.
    pub(crate) fn advance(&mut self, device: u32, fx: &mut Vec<ExecEffect>) {
        while let Some(key) = self.first_waiting(device) {
            match self.try_hand(key, fx) {
                Attempt::Handed | Attempt::Failed => {}
                Attempt::Blocked => return,
            }
        }
    }

    /// The first launch of the queue that has not been handed over.
    fn first_waiting(&mut self, device: u32) -> Option<NodeKey> {
        let device = &mut self.devices[device as usize];
        while let Some(&key) = device.queue.get(device.handed) {
            if self.nodes.get(key).is_some() {
                return Some(key);
            }
            device.queue.remove(device.handed);
        }
        None
    }

    fn try_hand(&mut self, key: NodeKey, fx: &mut Vec<ExecEffect>) -> Attempt {
        let node = self.nodes.get(key).expect("a live node");
        if node.waits {
            return Attempt::Blocked;
        }
        let start = node.launch().expect("device queues hold launches").clone();
        if start.threads().iter().any(|&thread| self.devices[thread as usize].outstanding >= self.config.ahead_max) {
            return Attempt::Blocked;
        }
        for &member in &start.program.devices {
            let device = &self.devices[member as usize];
            if (device.handed > 0 && device.thread != start.thread_of(member)) || self.first_waiting(member) != Some(key) {
                return Attempt::Blocked;
            }
        }
        match self.inputs_usable(key, &start) {
            Ok(true) => {}
            Ok(false) => return Attempt::Blocked,
            Err(status) => {
                self.fail(key, status, 0, fx);
                return Attempt::Failed;
            }
        }
        self.hand(key, start, fx);
        Attempt::Handed
    }

    /// Whether its threads can take it now; if not, it waits at the backing that is in its way.
    fn inputs_usable(&mut self, key: NodeKey, start: &StartLaunch) -> Result<bool, Arc<Status>> {
        let cursor = self.nodes.get(key).expect("a live node").cursor;
        for (place, &part) in (cursor..).zip(&start.parts[cursor as usize..]) {
            if self.table.inspect(part)? == Inspected::Pending && !self.made_before(part.backing) {
                self.wait(key, place, part.backing);
                return Ok(false);
            }
        }
        let end = u32::try_from(start.parts.len()).expect("fewer than 2^32 parts");
        // A transfer that was granted earlier still reads what this launch would take the storage of.
        for index in (0..start.arguments.len()).filter(|&i| start.arguments[i].donate) {
            if let Some(part) = start.argument(index).iter().find(|p| self.table.get(p.backing).readers > 0) {
                self.wait(key, end, part.backing);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The node goes on from input `cursor` when `backing` has changed.
    pub(crate) fn wait(&mut self, key: NodeKey, cursor: u32, backing: BackingKey) {
        let node = self.nodes.get_mut(key).expect("a live node");
        node.cursor = cursor;
        node.waits = true;
        self.table.wait(backing, key);
    }

    /// It is pending, but an earlier launch that has been handed over makes it. That one is in the queues of the devices
    /// that the backing lies on, so it is with the threads that will run the reader.
    fn made_before(&self, backing: BackingKey) -> bool {
        let producer = self.table.get(backing).producer.and_then(|key| self.nodes.get(key));
        producer.is_some_and(|node| node.started && node.launch().is_some())
    }

    fn hand(&mut self, key: NodeKey, start: Arc<StartLaunch>, fx: &mut Vec<ExecEffect>) {
        self.nodes.get_mut(key).expect("a live node").started = true;
        for &member in &start.program.devices {
            let device = &mut self.devices[member as usize];
            device.handed += 1;
            device.thread = start.thread_of(member);
            self.mark(member);
        }
        start.threads().iter().for_each(|&thread| self.devices[thread as usize].outstanding += 1);
        start.outputs.iter().for_each(|&o| self.table.export(o));
        fx.push(ExecEffect::Launch(start));
    }

    /// A launch has ended: its place in the queues is free.
    pub(crate) fn leave_queues(&mut self, key: NodeKey, started: bool, start: &StartLaunch, fx: &mut Vec<ExecEffect>) {
        for &member in &start.program.devices {
            let device = &mut self.devices[member as usize];
            if started {
                // First, as a thread serves its queue in order; unless an earlier one still runs on another member.
                let Some(place) = device.queue.iter().take(device.handed).position(|&k| k == key) else {
                    return self.die(format!("run {} ended but was not handed to device {member}", start.run), fx);
                };
                device.queue.remove(place);
                device.handed -= 1;
            }
            device.lengthy -= u32::from(start.is_lengthy());
            self.mark(member);
        }
        if started {
            start.threads().iter().for_each(|&thread| self.devices[thread as usize].outstanding -= 1);
        }
        if let Some(Executable::Loaded(loaded)) = self.executables.entries.get_mut(&start.executable) {
            loaded.launches -= 1;
        }
        self.unload_if_idle(start.executable, fx);
    }

    pub(crate) fn on_launch_done(
        &mut self,
        run: RunId,
        (device_ns, busy_ns): (u64, u64),
        result: Result<Arc<[u64]>, Arc<Status>>,
        fx: &mut Vec<ExecEffect>,
    ) {
        let key = self.runs.get(&run).copied();
        let started = key.and_then(|key| self.nodes.get(key)).filter(|n| n.started).and_then(|n| n.launch()).cloned();
        let (Some(key), Some(start)) = (key, started) else {
            return self.die(format!("run {run} is done but was not launched"), fx);
        };
        let sizes = match result {
            Ok(sizes) => sizes,
            Err(status) => return self.fail(key, status, device_ns, fx),
        };
        if sizes.len() != start.outputs.len() {
            return self.die(format!("run {run} has {} outputs, {} sizes given", start.outputs.len(), sizes.len()), fx);
        }
        if let Some(Executable::Loaded(loaded)) = self.executables.entries.get_mut(&start.executable) {
            loaded.times.note(busy_ns);
        }
        // Given away before received: the ledger never shows storage twice.
        for index in (0..start.arguments.len()).filter(|&i| start.arguments[i].donate) {
            start.argument(index).iter().for_each(|&part| self.table.gone(part));
        }
        for (&output, &bytes) in start.outputs.iter().zip(sizes.iter()) {
            for &shard in &start.program.members {
                self.table.fill(output, shard, bytes);
            }
        }
        self.retire(key, fx);
        finished(run, device_ns, Ok(()), fx);
    }
}

fn loaded(entries: &rustc_hash::FxHashMap<ExecutableId, Executable>, executable: ExecutableId) -> &Loaded {
    match entries.get(&executable) {
        Some(Executable::Loaded(loaded)) => loaded,
        other => unreachable!("executable {executable} was just seen loaded, is {other:?}"),
    }
}
