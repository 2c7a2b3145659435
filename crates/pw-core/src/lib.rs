//! The controller's core: sessions, compile table, graph, grant order, object directory, order-time ledger, membership.
//!
//! Pure: one `handle(now, event, effects)`, no clock, no socket, no thread, no wire type, no tensor byte (invariants A1–A3).
//! The shell drains its inbox into a turn, ends it with [`Event::EndOfTurn`], and carries the effects out in order.
//! Grants are decided at the end of a turn only, so that one frame per host leaves per turn.

mod arrays;
mod audit;
mod bitcast;
mod compute;
mod describe;
mod directory;
mod effect;
mod executables;
mod finish;
mod graph;
mod members;
mod membership;
mod memory;
mod moves;
mod order;
mod session;
mod status;
mod uploads;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use effect::{Effect, Effects};
use pw_types::{
    DType, Dims, Event, ExecutableId, GrantSeq, Handle, OpId, Reply, Request, RunId, SessionId, SessionOptions, Status, Time, ToEdge,
};
use rustc_hash::FxHashMap;
use slotmap::SlotMap;
use smallvec::SmallVec;

use crate::describe::Questions;
use crate::directory::{BackingKey, Directory, Entry};
use crate::executables::{Executables, Home};
use crate::graph::{Node, Waiter, WaiterKey, Work};
use crate::membership::Membership;
use crate::session::{Pending, Session};

/// The bounds and waits of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreConfig {
    /// Workers that must be there before a session opens.
    pub expect_workers: u32,
    /// How long a session may wait for them, nanoseconds.
    pub session_wait_ns: u64,
    /// Device time granted ahead per device, nanoseconds.
    pub window_ns: u64,
    /// Gangs granted ahead per device whatever their time.
    pub window_gangs_min: u32,
    pub window_gangs_max: u32,
    /// Nodes of one session that may wait for their grant before its reading stops.
    pub queued_max: u32,
    /// Bytes of requests of one session that may wait for their grant before its reading stops.
    pub queued_bytes_max: u64,
    /// Build string that workers must match; empty = any.
    pub build: String,
}

impl Default for CoreConfig {
    fn default() -> Self {
        CoreConfig {
            expect_workers: 1,
            session_wait_ns: 60_000_000_000,
            window_ns: 20_000_000,
            window_gangs_min: 2,
            window_gangs_max: 512,
            queued_max: 16 * 1024,
            queued_bytes_max: 64 << 20,
            build: String::new(),
        }
    }
}

/// Device time that is assumed of a program that never ran, nanoseconds.
const UNKNOWN_ESTIMATE_NS: u64 = 1_000_000;

/// The state of the controller.
pub struct Core {
    config: CoreConfig,
    now: Time,
    members: Membership,
    sessions: BTreeMap<SessionId, Session>,
    directory: Directory,
    nodes: FxHashMap<RunId, Node>,
    waiters: SlotMap<WaiterKey, Waiter>,
    executables: Executables,
    layouts: FxHashMap<(DType, Dims), LayoutAnswer>,
    /// What was asked, and of which worker.
    layout_queries: FxHashMap<u64, ((DType, Dims), pw_types::HostSlot)>,
    next_layout_query: u64,
    questions: Questions,
    next_run: u64,
    next_seq: u64,
    /// The next name of bytes that one worker sends to another.
    next_move_key: u64,
    /// Something may be grantable that was not before.
    dirty: bool,
}

enum LayoutAnswer {
    Asked(SmallVec<[Pending; 1]>),
    Known(String),
}

impl Core {
    pub fn new(config: CoreConfig) -> Core {
        Core {
            config,
            now: Time(0),
            members: Membership::default(),
            sessions: BTreeMap::new(),
            directory: Directory::default(),
            nodes: FxHashMap::default(),
            waiters: SlotMap::with_key(),
            executables: Executables::default(),
            layouts: FxHashMap::default(),
            layout_queries: FxHashMap::default(),
            next_layout_query: 0,
            questions: Questions::default(),
            next_run: 0,
            next_seq: 0,
            next_move_key: 1,
            dirty: false,
        }
    }

    /// When the shell must send a [`Event::Tick`] at the latest; `None` = no wait has a deadline.
    pub fn next_deadline(&self) -> Option<Time> {
        self.sessions.values().filter_map(|s| s.opening_until).min()
    }

    /// Takes one event. Bad requests become replies; only a broken internal invariant panics.
    pub fn handle(&mut self, now: Time, event: Event, fx: &mut Effects) {
        self.now = now.max(self.now);
        match event {
            Event::WorkerHello { connection, incarnation, wanted_slot, info } => {
                self.worker_hello(connection, incarnation, wanted_slot, info, fx)
            }
            Event::WorkerLost { slot, incarnation, reason } => self.worker_lost(slot, incarnation, &reason, fx),
            Event::Report { slot, incarnation, report } => self.report(slot, incarnation, report, fx),
            Event::SessionOpened { session, options } => self.session_opened(session, options),
            Event::SessionClosed { session, reason: _ } => self.session_closed(session, fx),
            Event::Request { session, op, bytes, request } => self.request(session, op, bytes, request, fx),
            Event::HostBufferFailed { session, buffer, status } => self.host_buffer_failed(session, buffer, status, fx),
            Event::StatusQuery { query } => {
                let report = self.status_report();
                fx.list.push(Effect::Status { query, report });
            }
            Event::Tick => {}
            Event::EndOfTurn => self.end_of_turn(fx),
        }
    }

    fn session_opened(&mut self, session: SessionId, options: SessionOptions) {
        let until = Time(self.now.0.saturating_add(self.config.session_wait_ns));
        let replaced = self.sessions.insert(session, Session::new(options, until));
        assert!(replaced.is_none(), "the edge opened session {session} twice");
    }

    fn end_of_turn(&mut self, fx: &mut Effects) {
        self.open_sessions(fx);
        if std::mem::take(&mut self.dirty) {
            self.grant_all(fx);
        }
        for (&session, state) in &mut self.sessions {
            if state.consumed > 0 {
                let count = std::mem::take(&mut state.consumed);
                fx.list.push(Effect::Edge(ToEdge::Consumed { session, count }));
            }
            let full = state.queued.len() >= self.config.queued_max as usize || state.queued_bytes >= self.config.queued_bytes_max;
            let low = state.queued.len() <= self.config.queued_max as usize / 2 && state.queued_bytes <= self.config.queued_bytes_max / 2;
            if (!state.paused && full) || (state.paused && low) {
                state.paused = !state.paused;
                fx.list.push(Effect::Edge(ToEdge::Pause { session, paused: state.paused }));
            }
        }
    }

    fn request(&mut self, session: SessionId, op: OpId, bytes: u32, request: Request, fx: &mut Effects) {
        // A request may cross the end of its session on the way; nobody waits for the answer then.
        let Some(state) = self.sessions.get_mut(&session) else { return };
        state.consumed += 1;
        let at = Pending { session, op };
        if state.opening_until.is_some() {
            let early = Status::new(pw_types::Code::FailedPrecondition, "the session is not open yet");
            return self.answer(at, Err(early), fx);
        }
        match request {
            // Futures of deletions are ready at once; below protocol 21 the status of a run is asked for here.
            Request::CheckFuture { future } if self.sessions[&session].statuses.contains_key(&future) => {
                self.await_status(at, future, Reply::CheckFuture, fx)
            }
            Request::CheckFuture { .. } => self.answer(at, Ok(Reply::CheckFuture), fx),
            Request::CheckValueReady { values } => self.check_value_ready(at, &values, fx),
            Request::MakeArray { array, spec, source } => self.make_array(at, bytes, array, spec, source, fx),
            Request::MakeArraysFromShards { arrays } => self.make_arrays_from_shards(at, bytes, arrays, fx),
            Request::Assemble { array, dtype, dims, sharding, inputs, copy } => {
                self.assemble(at, array, dtype, dims, sharding, &inputs, copy, fx)
            }
            Request::Disassemble { array, results, copy } => self.disassemble(at, array, results, copy, fx),
            Request::FullyReplicatedShard { array, result, copy } => self.fully_replicated_shard(at, array, result, copy, fx),
            Request::CopyToHost { array, host_buffer, byte_strides } => self.copy_to_host(at, bytes, array, host_buffer, byte_strides, fx),
            Request::CopyArrays { arrays, results, devices, memory, copy } => {
                self.copy_arrays(at, bytes, &arrays, results, &devices, &memory, copy, fx)
            }
            Request::RemapArrays { arrays, results, plan, copy } => self.remap_arrays(at, &arrays, results, &plan, copy, fx),
            Request::MakeErrorArrays { arrays, status } => {
                self.poison_results(session, &arrays, &Arc::new(status), fx);
                self.answer(at, Ok(Reply::MakeErrorArrays(arrays)), fx)
            }
            Request::BitcastArrays { arrays, results, specs, copy } => self.bitcast_arrays(at, &arrays, results, &specs, copy, fx),
            Request::DeleteArrays { arrays } => self.delete_arrays(at, &arrays, fx),
            Request::IsArrayDeleted { array } => {
                let deleted = match self.sessions[&session].arrays.get(&array) {
                    None => Err(Status::not_found(format!("array handle {array} does not exist"))),
                    Some(entry) => Ok(Reply::IsArrayDeleted(matches!(entry, Entry::Deleted))),
                };
                self.answer(at, deleted, fx)
            }
            Request::DestructArrays { arrays } => {
                for handle in arrays {
                    self.forget_array(session, handle, fx);
                }
                self.answer(at, Ok(Reply::DestructArrays), fx)
            }
            Request::Compile(request) => self.compile(at, request, fx),
            Request::ExecutableMetadata { executable } => self.executable_metadata(at, executable, fx),
            Request::Execute(request) => self.execute(at, bytes, request, fx),
            Request::FetchExecuteResult { status } => self.await_status(at, status, Reply::FetchExecuteResult, fx),
            Request::Describe { executable, question } => self.describe(at, executable, question, fx),
            Request::DestructExecutable { executable } => self.destruct_executable(at, executable, fx),
            Request::DefaultLayout { dtype, dims, device, memory_kind: _ } => self.default_layout(at, dtype, dims, device, fx),
            Request::DefaultDeviceAssignment { replicas, partitions } => self.default_device_assignment(at, replicas, partitions, fx),
            Request::Refused { status, results, consumes } => {
                self.poison_results(session, &results, &Arc::new(status.clone()), fx);
                for buffer in consumes {
                    fx.edge(ToEdge::Discard { session, buffer });
                }
                self.answer(at, Err(status), fx)
            }
        }
    }

    /// Answers a request, now or later.
    pub(crate) fn answer(&self, at: Pending, result: Result<Reply, Status>, fx: &mut Effects) {
        if self.sessions.contains_key(&at.session) {
            fx.edge(ToEdge::Reply { session: at.session, op: at.op, result });
        }
    }

    /// Results of a failed request: the handles exist and carry the fault.
    pub(crate) fn poison_results(&mut self, session: SessionId, results: &[Handle], status: &Arc<Status>, fx: &mut Effects) {
        for &handle in results {
            self.forget_array(session, handle, fx);
            if let Some(state) = self.sessions.get_mut(&session) {
                state.arrays.insert(handle, Entry::Poisoned(status.clone()));
            }
        }
    }

    /// Fails a request: poisons its results and answers with the status.
    pub(crate) fn fail(&mut self, at: Pending, results: &[Handle], status: Arc<Status>, fx: &mut Effects) {
        self.poison_results(at.session, results, &status, fx);
        self.answer(at, Err((*status).clone()), fx);
    }

    /// Drops an array handle and what it refers to.
    pub(crate) fn forget_array(&mut self, session: SessionId, handle: Handle, fx: &mut Effects) {
        let Some(state) = self.sessions.get_mut(&session) else { return };
        if let Some(Entry::Array(array)) = state.arrays.remove(&handle) {
            for piece in array.pieces {
                self.drop_handle_ref(piece.backing, fx);
            }
        }
    }

    pub(crate) fn drop_handle_ref(&mut self, key: BackingKey, fx: &mut Effects) {
        self.directory.backings[key].handle_refs -= 1;
        self.free_if_unused(key, fx);
    }

    pub(crate) fn drop_queued_ref(&mut self, key: BackingKey, fx: &mut Effects) {
        self.directory.backings[key].queued_refs -= 1;
        self.free_if_unused(key, fx);
    }

    /// Frees a backing behind its last use, once the node that makes it has its place in the order.
    pub(crate) fn free_if_unused(&mut self, key: BackingKey, fx: &mut Effects) {
        let backing = &self.directory.backings[key];
        if backing.handle_refs > 0 || backing.queued_refs > 0 || !backing.granted {
            return;
        }
        self.unreserve(key);
        let backing = self.directory.backings.remove(key).expect("just looked up");
        for &(slot, incarnation) in &backing.hosts {
            if self.members.worker(slot).is_some_and(|w| w.alive && w.incarnation == incarnation) {
                let command = pw_types::Command::Free { buffers: vec![backing.id] };
                fx.list.push(Effect::Send { slot, incarnation, command });
            }
        }
    }

    /// Puts a node into its session's queue.
    pub(crate) fn enqueue(&mut self, node: Node) -> RunId {
        self.next_run += 1;
        let run = RunId(self.next_run);
        // Who was idle starts level with those who work: an idle past gives no credit, and having been alone no debt,
        // beyond what may be under way at a time.
        if self.sessions.len() > 1 && !self.sessions[&node.session].is_busy() {
            let floor = self.sessions.values().filter(|s| s.is_busy()).map(|s| s.settled_ns()).min();
            let window_ns = self.config.window_ns;
            let session = self.sessions.get_mut(&node.session).expect("a node is made by a live session");
            let most = |floor: u64| floor + window_ns * 1024 / session.weight();
            session.virtual_ns = floor.map_or(0, |floor| session.virtual_ns.clamp(floor, most(floor)));
        }
        let session = self.sessions.get_mut(&node.session).expect("a node is made by a live session");
        session.queued.push_back(run);
        session.queued_bytes += u64::from(node.bytes);
        self.nodes.insert(run, node);
        self.dirty = true;
        run
    }

    /// The id that the next node gets; its outputs are named after it.
    pub(crate) fn peek_run(&self) -> RunId {
        RunId(self.next_run + 1)
    }

    pub(crate) fn release_executable(&mut self, id: ExecutableId, fx: &mut Effects) {
        if let Some((executable, homes)) = self.executables.release(id) {
            self.unload(executable, &homes, fx);
        }
    }

    /// Tells the homes that live to forget an executable.
    pub(crate) fn unload(&self, executable: ExecutableId, homes: &[Home], fx: &mut Effects) {
        for &Home { slot, incarnation, .. } in homes {
            if self.members.worker(slot).is_some_and(|w| w.alive && w.incarnation == incarnation) {
                fx.list.push(Effect::Send { slot, incarnation, command: pw_types::Command::Unload { executable } });
            }
        }
    }

    pub(crate) fn take_seq(&mut self) -> GrantSeq {
        self.next_seq += 1;
        GrantSeq(self.next_seq)
    }

    /// A client is gone: its queue vanishes, what carries its label is freed, others do not notice.
    fn session_closed(&mut self, id: SessionId, fx: &mut Effects) {
        let Some(mut session) = self.sessions.remove(&id) else { return };
        for &device in session.devices.iter() {
            self.members.devices[device as usize].sessions -= 1;
        }
        let gone = Arc::new(Status::new(pw_types::Code::Cancelled, "the session has ended").with_cause(pw_types::Cause::Cancelled));
        for run in std::mem::take(&mut session.queued) {
            self.drop_queued_node(run, &gone, fx);
        }
        self.cancel_running(id, &gone, fx);
        let mut handles: Vec<Handle> = session.arrays.keys().copied().collect();
        handles.sort_unstable();
        for handle in handles {
            if let Some(Entry::Array(array)) = session.arrays.remove(&handle) {
                for piece in array.pieces {
                    self.drop_handle_ref(piece.backing, fx);
                }
            }
        }
        let mut executables: Vec<(Handle, ExecutableId)> = session.executables.iter().map(|(&h, e)| (h, e.id)).collect();
        executables.sort_unstable();
        for (_, executable) in executables {
            self.release_executable(executable, fx);
        }
        self.waiters.retain(|_, w| w.request.session != id);
        self.dirty = true;
    }

    /// Tells the workers to skip what the session has granted and not finished.
    fn cancel_running(&mut self, id: SessionId, why: &Status, fx: &mut Effects) {
        let runs: Vec<RunId> = self.nodes.iter().filter(|(_, n)| n.session == id).map(|(&r, _)| r).collect();
        let mut by_host: BTreeMap<_, Vec<RunId>> = BTreeMap::new();
        for run in graph::sorted(runs) {
            if let graph::NodeState::Granted { hosts } = &self.nodes[&run].state {
                for &host in hosts {
                    by_host.entry(host).or_default().push(run);
                }
            }
        }
        for ((slot, incarnation), runs) in by_host {
            fx.list.push(Effect::Send { slot, incarnation, command: pw_types::Command::Cancel { runs, status: why.clone() } });
        }
    }

    /// Forgets a node that was never granted: its inputs lose a reference, its outputs are poisoned.
    pub(crate) fn drop_queued_node(&mut self, run: RunId, status: &Arc<Status>, fx: &mut Effects) {
        let mut node = self.nodes.remove(&run).expect("queued nodes are in the graph");
        if let Some(session) = self.sessions.get_mut(&node.session) {
            session.queued_bytes -= u64::from(node.bytes);
        }
        if let Work::Launch { executable, .. } = node.work {
            self.release_executable(executable, fx);
        }
        if let Work::HostWrite { buffers, .. } = &node.work {
            for &(buffer, _) in buffers {
                if let Some(session) = self.sessions.get_mut(&node.session) {
                    session.uploads.remove(&buffer);
                    fx.edge(ToEdge::Discard { session: node.session, buffer });
                }
            }
        }
        for input in std::mem::take(&mut node.inputs) {
            self.drop_queued_ref(input, fx);
        }
        self.settle(&mut node, Err(status.clone()), fx);
    }
}

#[cfg(test)]
mod tests;
