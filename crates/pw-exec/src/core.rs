//! The core itself: commands in, queues, and how a node ends.

use std::collections::VecDeque;
use std::sync::Arc;

use pw_types::{BufferId, Code, Command, ExecutableId, GangPart, GrantSeq, NodeOrder, Report, RunId, Status, Traffic};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::event::{BackingKey, ExecEffect, ExecEvent, LoadedProgram};
use crate::node::{Node, NodeKey, Nodes, Work};
use crate::program::{Executable, Executables, Loaded, LostRuns};
use crate::table::Table;
use crate::transfer::Uploads;

/// A change of the ledger below this many bytes, or below 1/64 of what was last reported, is not worth a report.
const MEMORY_REPORT_BYTES_MIN: u64 = 1 << 20;
/// Bytes that may have moved before they are reported.
const TRAFFIC_REPORT_BYTES: u64 = 64 << 20;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecConfig {
    /// By device: the memory kind of a transfer that names none.
    pub default_memory_kinds: Vec<String>,
    /// Launches that one device thread may hold, the running one included.
    pub ahead_max: u32,
}

/// Device `i` as a queue and as a thread.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Unfinished launches with this member, in grant order; keys of cancelled ones are stale.
    pub(crate) queue: VecDeque<NodeKey>,
    /// So many at the front of the queue have been handed to thread `thread`.
    pub(crate) handed: usize,
    pub(crate) thread: u32,
    /// What the thread of this device holds.
    pub(crate) outstanding: u32,
    /// Launches in the queue that are not brief and run on each member's own thread.
    pub(crate) lengthy: u32,
    /// In the list of queues to look at.
    pub(crate) marked: bool,
}

#[derive(Debug)]
pub struct ExecCore {
    pub(crate) config: ExecConfig,
    pub(crate) nodes: Nodes,
    pub(crate) table: Table,
    pub(crate) runs: FxHashMap<RunId, NodeKey>,
    pub(crate) executables: Executables,
    pub(crate) lost: LostRuns,
    pub(crate) devices: Vec<Device>,
    /// Queues whose head may be able to go.
    pub(crate) marked: Vec<u32>,
    pub(crate) uploads: Uploads,
    last: GrantSeq,
    /// Commands behind a launch whose program is still being loaded.
    inbox: VecDeque<Command>,
    stalled: Option<ExecutableId>,
    reported: Vec<u64>,
    traffic: Traffic,
    reported_traffic: Traffic,
    dead: bool,
}

impl ExecCore {
    pub fn new(config: ExecConfig) -> ExecCore {
        assert!(config.ahead_max > 0, "a thread must be able to hold one launch");
        let devices = config.default_memory_kinds.len();
        ExecCore {
            nodes: Nodes::default(),
            table: Table::new(devices),
            runs: FxHashMap::default(),
            executables: Executables::default(),
            lost: LostRuns::default(),
            devices: (0..devices).map(|_| Device::default()).collect(),
            marked: Vec::new(),
            uploads: Uploads::default(),
            last: GrantSeq(0),
            inbox: VecDeque::new(),
            stalled: None,
            reported: vec![0; devices],
            traffic: Traffic::default(),
            reported_traffic: Traffic::default(),
            dead: false,
            config,
        }
    }

    pub fn handle(&mut self, event: ExecEvent, fx: &mut Vec<ExecEffect>) {
        if self.dead {
            return;
        }
        match event {
            ExecEvent::Command(command) => self.on_command(command, fx),
            ExecEvent::LaunchDone { run, device_ns, busy_ns, result } => self.on_launch_done(run, (device_ns, busy_ns), result, fx),
            ExecEvent::CopyDone { run, result } | ExecEvent::WriteDone { run, result } => self.on_filled(run, result, fx),
            ExecEvent::ReadDone { run, bytes, result } => {
                self.traffic.to_clients += bytes;
                self.on_sent(run, result, fx);
            }
            ExecEvent::SendDone { run, bytes, result } => {
                self.traffic.to_workers += bytes;
                self.on_sent(run, result, fx);
            }
            ExecEvent::Landed { session, buffer, bytes } => {
                let from = if session.is_worker() { &mut self.traffic.from_workers } else { &mut self.traffic.from_clients };
                *from += bytes;
                self.on_landed(session, buffer, fx);
            }
            ExecEvent::UploadFailed { session, buffer, status } => self.on_upload_failed(session, buffer, status, fx),
            ExecEvent::SessionAttached { session } => self.uploads.attach(session),
            ExecEvent::SessionDetached { session } => self.on_detached(session, fx),
            ExecEvent::Compiled { executable, result } => fx.push(ExecEffect::Report(Report::Compiled { executable, result })),
            ExecEvent::Loaded { executable, result } => self.on_loaded(executable, result, fx),
            ExecEvent::Layout { query, result } => fx.push(ExecEffect::Report(Report::DefaultLayout { query, result })),
            ExecEvent::Described { query, result } => fx.push(ExecEffect::Report(Report::Described { query, result })),
            ExecEvent::Late { run, on } => fx.push(ExecEffect::Report(Report::Late { run, on })),
            ExecEvent::EndOfTurn => {
                self.report_memory(fx);
                self.report_traffic(fx);
            }
        }
        self.settle(fx);
    }

    /// Bytes in use by device: what has been made and not dropped.
    pub fn bytes_in_use(&self) -> &[u64] {
        self.table.bytes()
    }

    /// Backings that exist, and commands that are not finished.
    pub fn counts(&self) -> (usize, usize) {
        (self.table.len(), self.nodes.len() + self.inbox.len())
    }

    /// Counts everything again; for the simulator and tests.
    pub fn audit(&self) -> Result<(), String> {
        if self.table.recount() != self.table.bytes() {
            return Err(format!("ledger {:?}, recounted {:?}", self.table.bytes(), self.table.recount()));
        }
        let wanted: u64 = self.nodes.iter().map(|n| (n.inputs().count() + n.outputs.len()) as u64).sum();
        let (all, listed) = self.table.holds();
        if all != wanted + listed {
            return Err(format!("{all} holds, {wanted} by commands and {listed} by the index"));
        }
        for (index, device) in self.devices.iter().enumerate() {
            let launches = device.queue.iter().filter_map(|&key| self.nodes.get(key)?.launch());
            let lengthy = launches.filter(|start| start.is_lengthy()).count();
            if lengthy != device.lengthy as usize {
                return Err(format!("device {index}: {} long launches, recounted {lengthy}", device.lengthy));
            }
            for (place, &key) in device.queue.iter().enumerate() {
                let started = self.nodes.get(key).map(|n| n.started);
                if (place < device.handed) != (started == Some(true)) {
                    return Err(format!("device {index}: place {place} of {} handed is {started:?}", device.handed));
                }
            }
        }
        Ok(())
    }

    fn on_command(&mut self, command: Command, fx: &mut Vec<ExecEffect>) {
        if self.stalled.is_some() {
            self.inbox.push_back(command);
        } else {
            self.obey(command, fx);
        }
    }

    fn obey(&mut self, command: Command, fx: &mut Vec<ExecEffect>) {
        if let Command::Launch(launch) = &command
            && let Some(Executable::Loading { .. }) = self.executables.entries.get(&launch.executable)
        {
            self.stalled = Some(launch.executable);
            self.inbox.push_front(command);
            return;
        }
        if let Some(order) = command.order()
            && !self.check_chain(order, fx)
        {
            return;
        }
        match command {
            Command::Compile(command) => fx.push(ExecEffect::Compile(command)),
            Command::Load { executable, fingerprint, gang } => self.load(executable, fingerprint, gang.map(Arc::new), fx),
            Command::Unload { executable } => self.unload(executable, fx),
            Command::Launch(launch) => self.arrive_launch(launch, fx),
            Command::Copy(copy) => self.arrive_copy(copy, fx),
            Command::HostWrite(write) => self.arrive_write(write, fx),
            Command::HostRead(read) => self.arrive_read(read, fx),
            Command::Send(send) => self.arrive_send(send, fx),
            Command::Free { buffers } => buffers.into_iter().for_each(|id| self.table.unlist(id, fx)),
            Command::Cancel { runs, status } => {
                let status = Arc::new(status);
                runs.into_iter().for_each(|run| self.cancel(run, &status, fx));
            }
            Command::Describe { query, fingerprint, question } => fx.push(ExecEffect::Describe { query, fingerprint, question }),
            Command::DefaultLayout { query, dtype, dims } => fx.push(ExecEffect::Layout { query, dtype, dims }),
        }
    }

    /// A node that went missing on the way would leave every later one with wrong inputs.
    fn check_chain(&mut self, order: NodeOrder, fx: &mut Vec<ExecEffect>) -> bool {
        if order.previous == self.last && order.seq > self.last && !self.runs.contains_key(&order.run) {
            self.last = order.seq;
            return true;
        }
        let NodeOrder { run, seq, previous, .. } = order;
        self.die(format!("broken command chain: run {run} has grant {seq} after {previous}, but the last one here was {}", self.last), fx);
        false
    }

    pub(crate) fn die(&mut self, text: String, fx: &mut Vec<ExecEffect>) {
        self.dead = true;
        fx.push(ExecEffect::Fatal(text));
    }

    fn load(&mut self, executable: ExecutableId, fingerprint: bytes::Bytes, gang: Option<Arc<GangPart>>, fx: &mut Vec<ExecEffect>) {
        if let Some(gang) = &gang {
            fx.push(ExecEffect::Neighbours(gang.clone()));
        }
        match self.executables.entries.get_mut(&executable) {
            Some(Executable::Loaded(loaded)) => {
                loaded.unload = false;
                fx.push(ExecEffect::Report(Report::Loaded { executable, result: Ok(()) }));
            }
            Some(Executable::Loading { unload }) => *unload = false,
            Some(Executable::Failed(_)) | None => {
                self.executables.entries.insert(executable, Executable::Loading { unload: false });
                fx.push(ExecEffect::Load { executable, fingerprint, gang });
            }
        }
    }

    fn unload(&mut self, executable: ExecutableId, fx: &mut Vec<ExecEffect>) {
        match self.executables.entries.get_mut(&executable) {
            Some(Executable::Loaded(loaded)) => loaded.unload = true,
            Some(Executable::Loading { unload }) => *unload = true,
            Some(Executable::Failed(_)) => drop(self.executables.entries.remove(&executable)),
            None => {}
        }
        self.unload_if_idle(executable, fx);
    }

    pub(crate) fn unload_if_idle(&mut self, executable: ExecutableId, fx: &mut Vec<ExecEffect>) {
        if let Some(Executable::Loaded(Loaded { launches: 0, unload: true, .. })) = self.executables.entries.get(&executable) {
            self.executables.entries.remove(&executable);
            fx.push(ExecEffect::Unload { executable });
        }
    }

    fn on_loaded(&mut self, executable: ExecutableId, result: Result<Arc<LoadedProgram>, Status>, fx: &mut Vec<ExecEffect>) {
        let Some(Executable::Loading { unload }) = self.executables.entries.get(&executable) else {
            return self.die(format!("executable {executable} was loaded unasked"), fx);
        };
        let unload = *unload;
        let result = result.and_then(|program| self.check_devices(program));
        let entry = match &result {
            Ok(program) => Executable::Loaded(Loaded { unload, ..Loaded::new(program.clone()) }),
            Err(status) => Executable::Failed(Arc::new(status.clone())),
        };
        self.executables.entries.insert(executable, entry);
        fx.push(ExecEffect::Report(Report::Loaded { executable, result: result.map(drop) }));
        if self.stalled == Some(executable) {
            self.stalled = None;
            while self.stalled.is_none()
                && !self.dead
                && let Some(command) = self.inbox.pop_front()
            {
                self.obey(command, fx);
            }
        }
        self.unload_if_idle(executable, fx);
    }

    fn check_devices(&self, program: Arc<LoadedProgram>) -> Result<Arc<LoadedProgram>, Status> {
        let devices = &program.devices;
        let distinct = devices.iter().enumerate().all(|(i, d)| (*d as usize) < self.devices.len() && !devices[..i].contains(d));
        let ascend = program.members.windows(2).all(|m| m[0] < m[1]) && program.members.last().is_some_and(|&m| m < program.total);
        if devices.is_empty() || !distinct || program.members.len() != devices.len() || !ascend {
            let text = format!("program {} wants devices {devices:?} of {}", program.report.name, self.devices.len());
            return Err(Status::internal(text));
        }
        Ok(program)
    }

    /// What is not in the shell's hands ends here; what is, ends by itself. A send waits for another worker, so the
    /// shell is told.
    fn cancel(&mut self, run: RunId, status: &Arc<Status>, fx: &mut Vec<ExecEffect>) {
        let Some(&key) = self.runs.get(&run) else { return };
        let Some(node) = self.nodes.get(key) else { return };
        if let (true, Work::Send(_)) = (node.started, &node.work) {
            fx.push(ExecEffect::StopSend { run });
        }
        // What it has sent or was sent is of no use.
        if let (true, Some(start)) = (node.started, node.launch()) {
            abandon(run, &start.program, status, fx);
        }
        if !node.started {
            self.fail(key, status.clone(), 0, fx);
        }
    }

    /// A listed backing that may be read by a command that arrives now.
    pub(crate) fn lookup(&self, id: BufferId) -> Result<BackingKey, Arc<Status>> {
        let Some(key) = self.table.find(id) else {
            let lost = self.lost.get(id.run).cloned();
            return Err(lost.unwrap_or_else(|| Arc::new(Status::not_found(format!("buffer {id} is not on this worker")))));
        };
        match self.table.get(key).donated_to {
            None => Ok(key),
            Some(run) => Err(Arc::new(Status::new(Code::FailedPrecondition, format!("buffer {id} has been donated to run {run}")))),
        }
    }

    /// A command has been understood: it holds what it reads and makes.
    pub(crate) fn admit(&mut self, order: NodeOrder, outputs: SmallVec<[BackingKey; 2]>, work: Work) -> NodeKey {
        let node = Node { run: order.run, seq: order.seq, session: order.session, started: false, waits: false, cursor: 0, outputs, work };
        let transfer = node.launch().is_none();
        for part in node.inputs() {
            self.table.hold(part.backing);
            if transfer {
                self.table.get_mut(part.backing).readers += 1;
            }
        }
        let outputs = node.outputs.clone();
        let key = self.nodes.insert(node);
        for output in outputs {
            self.table.get_mut(output).producer = Some(key);
        }
        self.runs.insert(order.run, key);
        key
    }

    /// A command that cannot be carried out: its outputs, if known, are poisoned.
    pub(crate) fn refuse(&mut self, order: NodeOrder, outputs: &[BackingKey], status: Arc<Status>, fx: &mut Vec<ExecEffect>) {
        for &output in outputs {
            self.table.poison(output, &status);
            self.table.release(output, fx);
        }
        finished(order.run, 0, Err(&status), fx);
    }

    /// Ends a node with an error.
    pub(crate) fn fail(&mut self, key: NodeKey, status: Arc<Status>, device_ns: u64, fx: &mut Vec<ExecEffect>) {
        let node = self.nodes.get(key).expect("a live node");
        for &output in &node.outputs {
            self.table.poison(output, &status);
        }
        let node = self.retire(key, fx);
        if let Some(start) = node.launch() {
            abandon(node.run, &start.program, &status, fx);
        }
        if !node.started {
            match &node.work {
                Work::Write { start, .. } => self.uploads.abandon(&start.command, Some(key), fx),
                Work::Read { command, .. } => {
                    fx.push(ExecEffect::ReadFailed { session: node.session, buffer: command.buffer, status: status.clone() });
                }
                Work::Send(start) => fx.push(ExecEffect::SendFailed { command: start.command.clone(), status: status.clone() }),
                Work::Launch(_) | Work::Copy(_) => {}
            }
        }
        finished(node.run, device_ns, Err(&status), fx);
    }

    /// Takes a node out of everything. Its outputs have their final state; who waits for them is woken.
    pub(crate) fn retire(&mut self, key: NodeKey, fx: &mut Vec<ExecEffect>) -> Node {
        let node = self.nodes.remove(key).expect("a live node");
        self.runs.remove(&node.run);
        let transfer = node.launch().is_none();
        for part in node.inputs() {
            if transfer {
                let backing = self.table.get_mut(part.backing);
                backing.readers -= 1;
                if backing.readers == 0 && backing.donated_to.is_some() {
                    self.table.wake(part.backing);
                }
            }
            self.table.release(part.backing, fx);
        }
        for &output in &node.outputs {
            self.table.wake(output);
            self.table.release(output, fx);
        }
        if let Some(launch) = node.launch().cloned() {
            self.leave_queues(key, node.started, &launch, fx);
        }
        node
    }

    /// Looks at everything that a change may have let go, until nothing moves.
    fn settle(&mut self, fx: &mut Vec<ExecEffect>) {
        loop {
            let mut woken = self.table.take_woken();
            // Stale keys are of nodes that ended while they waited.
            woken.retain(|&key| self.nodes.get(key).is_some());
            woken.sort_by_key(|&key| self.nodes.get(key).map(|n| n.seq));
            for &key in &woken {
                let Some(node) = self.nodes.get_mut(key) else { continue };
                node.waits = false;
                match node.launch().map(|l| l.thread) {
                    Some(thread) => self.mark(thread),
                    None => self.try_transfer(key, fx),
                }
            }
            if woken.is_empty() && self.marked.is_empty() {
                return;
            }
            while let Some(device) = self.marked.pop() {
                self.devices[device as usize].marked = false;
                self.advance(device, fx);
            }
        }
    }

    fn report_memory(&mut self, fx: &mut Vec<ExecEffect>) {
        let now = self.table.bytes();
        let material =
            |(&now, &then): (&u64, &u64)| (now == 0 && then != 0) || now.abs_diff(then) >= MEMORY_REPORT_BYTES_MIN.max(then / 64);
        if now.iter().zip(&self.reported).any(material) {
            self.reported = now.to_vec();
            fx.push(ExecEffect::Report(Report::Memory { bytes_in_use: self.reported.clone() }));
        }
    }

    /// Whenever everything is done, so that the figures are exact then, and after every so many bytes.
    fn report_traffic(&mut self, fx: &mut Vec<ExecEffect>) {
        let unreported = self.traffic.sum() - self.reported_traffic.sum();
        if unreported >= TRAFFIC_REPORT_BYTES || (unreported > 0 && self.nodes.len() == 0) {
            self.reported_traffic = self.traffic;
            fx.push(ExecEffect::Report(Report::Traffic(self.traffic)));
        }
    }
}

/// A run of this program has failed.
pub(crate) fn abandon(run: RunId, program: &LoadedProgram, status: &Arc<Status>, fx: &mut Vec<ExecEffect>) {
    if program.spans_workers() {
        fx.push(ExecEffect::Abandon { run, status: status.clone() });
    }
}

/// The one end of a run.
pub(crate) fn finished(run: RunId, device_ns: u64, result: Result<(), &Arc<Status>>, fx: &mut Vec<ExecEffect>) {
    let result = result.map_err(|status| Status::clone(status));
    fx.push(ExecEffect::Report(Report::Finished { run, device_ns, result }));
}
