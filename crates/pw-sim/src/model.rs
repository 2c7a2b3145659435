//! The reference model: what each session's requests mean when they are carried out one after the other.
//!
//! It takes every request at the moment at which the core takes it, keeps its own handle tables, knows for every
//! shard which node makes it and what token it must have, and says beforehand how the request must be answered.
//! Requests that make or move arrays are in [`crate::arrays`], Execute is in [`crate::execute`].
//! The checkers in [`crate::order`] and [`crate::faults`] work on its nodes.

use std::collections::{BTreeMap, BTreeSet};

use pw_types::*;

use crate::failure::{Check, Invariant, violation};
use crate::program::Programs;

/// One node of the graph; its index is the run id less one.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) run: RunId,
    pub(crate) session: SessionId,
    pub(crate) work: Work,
    /// (node, output) of every backing that it consumes.
    pub(crate) inputs: Vec<(usize, u32)>,
    pub(crate) outputs: Vec<Output>,
    /// Devices whose time or memory it takes; indices of [`Model::devices`].
    pub(crate) devices: Vec<usize>,
    pub(crate) state: State,
    pub(crate) seq: GrantSeq,
    /// Where it was sent.
    pub(crate) hosts: Vec<(HostSlot, Incarnation)>,
    /// What the workers really did, before anything can be lost on the way.
    pub(crate) truth: BTreeMap<HostSlot, Result<(), Status>>,
    /// Hosts whose report reached the core.
    pub(crate) reported: Vec<HostSlot>,
    /// The longest device time among their reports.
    pub(crate) device_ns: u64,
    /// Of a launch: which arguments are given to the plugin. The same on every host.
    pub(crate) donates: Vec<bool>,
    /// The core has told a host to give it up.
    pub(crate) cancelled: bool,
    /// Errors that began here.
    pub(crate) own: Vec<Status>,
    /// It found no room.
    pub(crate) own_exhausted: bool,
    /// Charged window time.
    pub(crate) cost_ns: u64,
}

#[derive(Debug)]
pub(crate) enum Work {
    Launch {
        executable: ExecutableId,
        program: usize,
        bad_arguments: bool,
    },
    Upload {
        buffers: Vec<Handle>,
    },
    Copy,
    /// From one worker to another.
    Move {
        from: HostSlot,
    },
    Read {
        /// A shard is not what the array's labels say.
        bad: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Queued,
    Granted,
    /// Every host has reported, or is lost.
    Finished,
    Dropped,
}

#[derive(Debug)]
pub(crate) struct Output {
    /// Ledger bytes of one shard.
    pub(crate) bytes: u64,
    /// Device of each shard.
    pub(crate) devices: Vec<usize>,
    /// Shards of live arrays.
    pub(crate) handles: u32,
    /// Nodes that are not granted and consume it.
    pub(crate) queued: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) node: usize,
    pub(crate) output: u32,
    pub(crate) token: u64,
    pub(crate) len: i64,
    /// Memory kind as the worker sees it.
    pub(crate) kind: String,
    pub(crate) device: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) n: i64,
    pub(crate) partition: Partition,
    /// As the core labels it.
    pub(crate) kind: Option<String>,
    pub(crate) devices: Vec<VirtualDeviceId>,
    pub(crate) shards: Vec<Shard>,
}

#[derive(Debug)]
pub(crate) enum Entry {
    Array(Array),
    Poisoned(Status),
    Deleted,
}

/// A compiled program as a session names it.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) id: ExecutableId,
    pub(crate) devices: Vec<VirtualDeviceId>,
}

/// A compiled program as the core knows it.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) program: usize,
    pub(crate) devices: Vec<usize>,
    /// One of its workers is lost, or it does not load: what runs of it are told.
    pub(crate) failed: Option<Code>,
    /// Workers that have loaded it since they were last told to.
    pub(crate) loaded: BTreeSet<HostSlot>,
    pub(crate) estimate_ns: u64,
    pub(crate) measured: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Device of each virtual id.
    pub(crate) devices: Vec<usize>,
    pub(crate) arrays: BTreeMap<Handle, Entry>,
    pub(crate) executables: BTreeMap<Handle, Named>,
    pub(crate) statuses: BTreeMap<Handle, usize>,
    pub(crate) uploads: BTreeSet<Handle>,
    pub(crate) taken: u64,
    pub(crate) consumed: u64,
}

/// An error that a request may be answered with.
#[derive(Clone, Debug)]
pub(crate) enum Blame {
    Exact(Status),
    Code(Code),
    /// Whatever this node, or what it depends on, failed with.
    Node(usize),
}

/// How a request must be answered.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) name: &'static str,
    /// In the turn that takes it.
    pub(crate) at_once: bool,
    pub(crate) may_succeed: bool,
    pub(crate) blames: Vec<Blame>,
    /// Handles that exist and carry the error if it fails.
    pub(crate) poisons: Vec<Handle>,
    pub(crate) then: Then,
}

#[derive(Debug)]
pub(crate) enum Then {
    Nothing,
    /// These nodes have done what they should.
    Ready(Vec<usize>),
    Fetch {
        buffer: Handle,
        plan: Read,
    },
    Compile {
        program: usize,
        devices: Vec<VirtualDeviceId>,
    },
    Execute {
        outputs: Vec<Array>,
        status_of: Option<(usize, Handle)>,
        named: bool,
    },
    Status {
        node: usize,
    },
    Deleted(bool),
}

/// What a fetch reads: where each piece starts and its token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Read {
    pub(crate) pieces: Vec<(Option<i64>, u64)>,
    pub(crate) shards: Vec<(usize, u32)>,
    pub(crate) devices: Vec<usize>,
    /// Elements of each piece.
    pub(crate) lens: Vec<i64>,
    pub(crate) node: Option<usize>,
    pub(crate) bad: bool,
}

pub(crate) struct Model {
    pub(crate) programs: Programs,
    pub(crate) nodes: Vec<Node>,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    /// Ended as the core knows it.
    pub(crate) closed: BTreeSet<SessionId>,
    /// Ended as the edge knows it.
    pub(crate) closing: BTreeSet<SessionId>,
    pub(crate) asks: BTreeMap<(SessionId, OpId), Ask>,
    pub(crate) compiled: BTreeMap<ExecutableId, Compiled>,
    by_key: BTreeMap<(usize, Vec<usize>), ExecutableId>,
    /// Devices of the last compile that was asked for.
    compiling: Vec<usize>,
    /// Host buffers whose stream broke off.
    pub(crate) broken: BTreeMap<(SessionId, Handle), Status>,
    pub(crate) order: crate::order::Order,
    /// Lives of workers that really are over.
    pub(crate) killed: BTreeSet<(HostSlot, Incarnation)>,
    /// Fetches that were answered and whose bytes are awaited.
    pub(crate) fetches: BTreeMap<(SessionId, Handle), Read>,
}

pub(crate) type Resolved<T> = Result<T, Blame>;

impl Model {
    pub(crate) fn new(programs: Programs, order: crate::order::Order) -> Model {
        Model {
            programs,
            nodes: Vec::new(),
            sessions: BTreeMap::new(),
            closed: BTreeSet::new(),
            closing: BTreeSet::new(),
            asks: BTreeMap::new(),
            compiled: BTreeMap::new(),
            by_key: BTreeMap::new(),
            compiling: Vec::new(),
            broken: BTreeMap::new(),
            order,
            killed: BTreeSet::new(),
            fetches: BTreeMap::new(),
        }
    }

    pub(crate) fn node(&self, run: RunId) -> Check<usize> {
        match (run.0 as usize).checked_sub(1) {
            Some(index) if index < self.nodes.len() => Ok(index),
            _ => violation(Invariant::A4Order, format!("run {run} is not a node that any request made")),
        }
    }

    /// Takes a request at the same moment as the core.
    pub(crate) fn request(&mut self, id: SessionId, op: OpId, request: &Request) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.taken += 1;
        let ask = self.ask(id, request);
        self.asks.insert((id, op), ask);
    }

    fn ask(&mut self, id: SessionId, request: &Request) -> Ask {
        match request {
            Request::CheckFuture { future } if self.sessions[&id].statuses.contains_key(future) => self.status("CheckFuture", id, *future),
            Request::CheckFuture { .. } => Ask::ok("CheckFuture"),
            Request::FetchExecuteResult { status } => self.status("FetchExecuteResult", id, *status),
            Request::CheckValueReady { values } => self.check_ready(id, values),
            Request::DeleteArrays { arrays } => {
                let missing = arrays.iter().any(|h| !self.sessions[&id].arrays.contains_key(h));
                arrays.iter().for_each(|&h| self.delete(id, h));
                Ask::of("DeleteArrays", if missing { Err(Blame::Code(Code::NotFound)) } else { Ok(()) })
            }
            Request::IsArrayDeleted { array } => match self.sessions[&id].arrays.get(array) {
                None => Ask::of("IsArrayDeleted", Err(Blame::Code(Code::NotFound))),
                Some(entry) => Ask { then: Then::Deleted(matches!(entry, Entry::Deleted)), ..Ask::ok("IsArrayDeleted") },
            },
            Request::DestructArrays { arrays } => {
                arrays.iter().for_each(|&h| self.forget(id, h));
                Ask::ok("DestructArrays")
            }
            Request::Compile(request) => self.compile(id, request),
            Request::ExecutableMetadata { executable } => {
                let known = self.sessions[&id].executables.contains_key(executable);
                Ask::of("ExecutableMetadata", if known { Ok(()) } else { Err(Blame::Code(Code::NotFound)) })
            }
            // Whatever goes wrong stands in the body of the answer.
            Request::Describe { .. } => Ask { at_once: false, ..Ask::ok("Describe") },
            Request::Execute(request) => crate::execute::ask(self, id, request),
            Request::DestructExecutable { executable } => {
                let known = self.sessions.get_mut(&id).and_then(|s| s.executables.remove(executable)).is_some();
                Ask::of("DestructExecutable", if known { Ok(()) } else { Err(Blame::Code(Code::NotFound)) })
            }
            Request::DefaultLayout { .. } => {
                let lost = vec![Blame::Code(Code::Unavailable)];
                Ask { at_once: false, blames: lost, ..Ask::ok("DefaultLayout") }
            }
            Request::DefaultDeviceAssignment { replicas, partitions } => {
                let wanted = u64::from(*replicas) * u64::from(*partitions);
                let fits = wanted > 0 && wanted <= self.sessions[&id].devices.len() as u64;
                Ask::of("DefaultDeviceAssignment", if fits { Ok(()) } else { Err(Blame::Code(Code::InvalidArgument)) })
            }
            Request::Refused { status, results, .. } => {
                Ask::of("Refused", Err(Blame::Exact(status.clone()))).poisons(results.iter().copied())
            }
            Request::MakeErrorArrays { arrays, status } => {
                self.poison(id, arrays, status);
                Ask::ok("MakeErrorArrays")
            }
            other => self.ask_for_arrays(id, other),
        }
    }

    fn status(&mut self, name: &'static str, id: SessionId, handle: Handle) -> Ask {
        let Some(&node) = self.sessions[&id].statuses.get(&handle) else {
            return Ask::of(name, Err(Blame::Code(Code::NotFound)));
        };
        // Asked for a second time while the first waits, it is refused; once answered, it is gone.
        let waits = self.asks.iter().any(|((s, _), a)| *s == id && matches!(a.then, Then::Status { node: n } if n == node));
        if waits {
            return Ask::of(name, Err(Blame::Code(Code::InvalidArgument)));
        }
        Ask { at_once: false, blames: vec![Blame::Node(node)], then: Then::Status { node }, ..Ask::ok(name) }
    }

    fn check_ready(&mut self, id: SessionId, values: &[Handle]) -> Ask {
        let (mut blames, mut nodes, mut may_succeed) = (Vec::new(), Vec::new(), true);
        for &value in values {
            match self.resolve(id, value) {
                Ok(array) => nodes.extend(array.shards.iter().map(|s| s.node)),
                Err(blame) => {
                    blames.push(blame);
                    may_succeed = false;
                }
            }
        }
        nodes.sort_unstable();
        nodes.dedup();
        blames.extend(nodes.iter().map(|&n| Blame::Node(n)));
        Ask { at_once: !may_succeed && nodes.is_empty(), may_succeed, blames, then: Then::Ready(nodes), ..Ask::ok("CheckValueReady") }
    }

    /// The array behind a handle.
    pub(crate) fn resolve(&self, id: SessionId, handle: Handle) -> Resolved<&Array> {
        match self.sessions[&id].arrays.get(&handle) {
            Some(Entry::Array(array)) => Ok(array),
            Some(Entry::Poisoned(status)) => Err(Blame::Exact(status.clone())),
            Some(Entry::Deleted) => Err(Blame::Code(Code::InvalidArgument)),
            None => Err(Blame::Code(Code::NotFound)),
        }
    }

    pub(crate) fn put(&mut self, id: SessionId, handle: Handle, array: Array) {
        self.count_handles(&array, 1);
        self.forget(id, handle);
        self.sessions.get_mut(&id).expect("a live session").arrays.insert(handle, Entry::Array(array));
    }

    fn count_handles(&mut self, array: &Array, by: i32) {
        for shard in &array.shards {
            let handles = &mut self.nodes[shard.node].outputs[shard.output as usize].handles;
            *handles = handles.checked_add_signed(by).expect("every handle is counted once");
        }
    }

    pub(crate) fn forget(&mut self, id: SessionId, handle: Handle) {
        if let Some(Entry::Array(array)) = self.sessions.get_mut(&id).and_then(|s| s.arrays.remove(&handle)) {
            self.count_handles(&array, -1);
        }
    }

    /// The handle stays, what it stood for is gone.
    pub(crate) fn delete(&mut self, id: SessionId, handle: Handle) {
        let Some(entry) = self.sessions.get_mut(&id).and_then(|s| s.arrays.get_mut(&handle)) else { return };
        if let Entry::Array(array) = std::mem::replace(entry, Entry::Deleted) {
            self.count_handles(&array, -1);
        }
    }

    pub(crate) fn delete_if_donated(&mut self, id: SessionId, handles: &[Handle], copy: CopySemantics) {
        if copy == CopySemantics::DonateInput {
            handles.iter().for_each(|&h| self.delete(id, h));
        }
    }

    pub(crate) fn poison(&mut self, id: SessionId, handles: &[Handle], status: &Status) {
        for &handle in handles {
            self.forget(id, handle);
            if let Some(session) = self.sessions.get_mut(&id) {
                session.arrays.insert(handle, Entry::Poisoned(status.clone()));
            }
        }
    }

    /// A session is over: its queue vanishes and its handles go.
    pub(crate) fn close(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.closed.insert(id);
        for entry in session.arrays.values() {
            if let Entry::Array(array) = entry {
                self.count_handles(array, -1);
            }
        }
        self.asks.retain(|(s, _), _| *s != id);
        self.fetches.retain(|(s, _), _| *s != id);
    }

    pub(crate) fn devices_of(&self, id: SessionId, devices: &[VirtualDeviceId]) -> Resolved<Vec<usize>> {
        let all = &self.sessions[&id].devices;
        devices.iter().map(|d| all.get(d.0 as usize).copied().ok_or(Blame::Code(Code::InvalidArgument))).collect()
    }

    pub(crate) fn alive(&self, slot: HostSlot) -> Resolved<()> {
        if self.order.host(slot).alive { Ok(()) } else { Err(Blame::Code(Code::Unavailable)) }
    }

    pub(crate) fn add_node(
        &mut self,
        session: SessionId,
        work: Work,
        inputs: Vec<(usize, u32)>,
        devices: Vec<usize>,
        outputs: Vec<Output>,
    ) -> usize {
        for &(node, output) in &inputs {
            self.nodes[node].outputs[output as usize].queued += 1;
        }
        let index = self.nodes.len();
        self.nodes.push(Node {
            run: RunId(index as u64 + 1),
            session,
            work,
            inputs,
            outputs,
            devices,
            state: State::Queued,
            seq: GrantSeq(0),
            hosts: Vec::new(),
            truth: BTreeMap::new(),
            reported: Vec::new(),
            device_ns: 0,
            donates: Vec::new(),
            cancelled: false,
            own: Vec::new(),
            own_exhausted: false,
            cost_ns: 0,
        });
        self.order.queued.insert(index);
        index
    }

    fn compile(&mut self, id: SessionId, request: &CompileRequest) -> Ask {
        let placed = self.devices_of(id, &request.devices).and_then(|devices| {
            let expected = u64::from(request.replicas) * u64::from(request.partitions);
            if devices.len() as u64 != expected {
                return Err(Blame::Code(Code::InvalidArgument));
            }
            devices.iter().try_for_each(|&d| self.alive(self.order.slot_of(d)))?;
            Ok(devices)
        });
        self.compiling = match placed {
            Ok(devices) => devices,
            Err(blame) => return Ask::of("Compile", Err(blame)),
        };
        let program = crate::program::Program::number(&request.program).expect("clients send programs of the world");
        let fails = self.programs[program].compile_fails;
        let mut blames = vec![Blame::Code(Code::Unavailable)];
        if fails {
            blames.push(Blame::Exact(Status::invalid(self.programs[program].compile_error())));
        }
        let then = Then::Compile { program, devices: request.devices.clone() };
        Ask { at_once: false, may_succeed: !fails, blames, then, ..Ask::ok("Compile") }
    }

    /// The core asks a worker to compile: from now on this is the executable under its key.
    pub(crate) fn compile_sent(&mut self, slot: HostSlot, command: &CompileCommand) -> Check {
        let program = crate::program::Program::number(&command.program).expect("clients send programs of the world");
        // Compiled again for a new life of its worker, it is still as fast as before.
        let before = self.compiled.get(&command.executable);
        let devices = before.map_or_else(|| self.compiling.clone(), |c| c.devices.clone());
        let (estimate_ns, measured) = before.map_or((1_000_000, false), |c| (c.estimate_ns, c.measured));
        let own: Vec<usize> = command.devices.iter().map(|&d| self.order.device(slot, d)).collect();
        let several = self.order.slots_of(&devices).len() > 1;
        if own != if several { Vec::new() } else { devices.clone() } || !self.order.slots_of(&devices).contains(&slot) {
            return violation(Invariant::Wire, format!("worker {slot} is to compile for {own:?}, not for its share of {devices:?}"));
        }
        self.by_key.insert((program, devices.clone()), command.executable);
        let compiled = Compiled { program, devices, failed: None, loaded: BTreeSet::new(), estimate_ns, measured };
        self.compiled.insert(command.executable, compiled);
        Ok(())
    }

    /// The core asks a worker to load: it is told which members it has, and who has the others.
    pub(crate) fn load_sent(&mut self, slot: HostSlot, executable: ExecutableId, gang: Option<&GangPart>) -> Check {
        let Some(compiled) = self.compiled.get_mut(&executable) else {
            return violation(Invariant::Wire, format!("executable {executable} is loaded but was never compiled"));
        };
        compiled.loaded.remove(&slot);
        let (devices, order) = (&compiled.devices, &self.order);
        let of = |at: HostSlot| (0..).zip(devices).filter(move |&(_, &d)| order.slot_of(d) == at);
        let Some(gang) = gang else {
            return match of(slot).count() == devices.len() {
                true => Ok(()),
                false => violation(Invariant::Wire, format!("worker {slot} is not told who has the other members of {executable}")),
            };
        };
        let here: Vec<(u32, usize)> = gang.here.iter().map(|m| (m.member, order.device(slot, m.device))).collect();
        let mut right = gang.members as usize == devices.len() && here == of(slot).map(|(m, &d)| (m, d)).collect::<Vec<_>>();
        let mut others: Vec<HostSlot> = gang.others.iter().map(|peer| peer.slot).collect();
        right &= gang.others.iter().all(|peer| peer.members == of(peer.slot).map(|(m, _)| m).collect::<Vec<_>>());
        others.push(slot);
        others.sort_unstable();
        if right && others == order.slots_of(devices) {
            return Ok(());
        }
        violation(Invariant::Wire, format!("worker {slot} is told {gang:?} of a program on devices {devices:?}"))
    }

    /// A compile was answered: the session's name of it.
    pub(crate) fn named(&mut self, id: SessionId, handle: Handle, program: usize, devices: Vec<VirtualDeviceId>) -> Check {
        let keys = self.devices_of(id, &devices).unwrap_or_default();
        let Some(&executable) = self.by_key.get(&(program, keys)) else {
            return violation(Invariant::A9Answers, format!("program {program} is said to be compiled, but no worker was asked"));
        };
        self.sessions.get_mut(&id).expect("a live session").executables.insert(handle, Named { id: executable, devices });
        Ok(())
    }
}

impl Ask {
    pub(crate) fn ok(name: &'static str) -> Ask {
        Ask { name, at_once: true, may_succeed: true, blames: Vec::new(), poisons: Vec::new(), then: Then::Nothing }
    }

    pub(crate) fn of(name: &'static str, result: Resolved<()>) -> Ask {
        match result {
            Ok(()) => Ask::ok(name),
            Err(blame) => Ask { may_succeed: false, blames: vec![blame], ..Ask::ok(name) },
        }
    }

    pub(crate) fn poisons(mut self, handles: impl IntoIterator<Item = Handle>) -> Ask {
        if !self.may_succeed {
            self.poisons = handles.into_iter().collect();
        }
        self
    }
}
