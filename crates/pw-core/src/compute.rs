//! Compile, metadata and Execute: from a request to a node whose outputs are promised.

use std::sync::Arc;

use pw_types::{
    BufferId, Code, Command, CompileCommand, CompileReply, CompileReport, CompileRequest, DType, Dims, ExecutableId, ExecuteOutput,
    ExecuteReply, ExecuteRequest, GangMember, GangPart, GangPeer, Handle, HostSlot, Incarnation, Reply, Status, VirtualDeviceId,
};
use smallvec::{SmallVec, smallvec};

use crate::directory::{Array, Backing, BackingKey, BackingState, Piece};
use crate::executables::{CompileKey, Executable, ExecutableState, Home};
use crate::graph::{Node, Work};
use crate::membership::DeviceKey;
use crate::session::{Pending, SessionExecutable, StatusHandle};
use crate::{Core, Effect, Effects, LayoutAnswer, UNKNOWN_ESTIMATE_NS};

impl Core {
    pub(crate) fn compile(&mut self, at: Pending, request: CompileRequest, fx: &mut Effects) {
        let mut seen = request.devices.clone();
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|w| w[0] == w[1]) {
            return self.answer(at, Err(Status::invalid(format!("the device assignment names device {} twice", twice[0]))), fx);
        }
        let session = &self.sessions[&at.session];
        let expected = u64::from(request.replicas) * u64::from(request.partitions);
        if request.devices.len() as u64 != expected {
            let text = format!("the device assignment names {} devices for {expected}", request.devices.len());
            return self.answer(at, Err(Status::invalid(text)), fx);
        }
        let placed = session.device_keys(&request.devices).and_then(|keys| {
            let homes = self.homes_of(&keys)?;
            Ok((keys, homes))
        });
        let (keys, homes) = match placed {
            Ok(placed) => placed,
            Err(status) => return self.answer(at, Err(status), fx),
        };
        let devices: Arc<[VirtualDeviceId]> = Arc::from(request.devices.as_slice());
        let key = CompileKey { program: request.program, options: request.options, devices: keys.clone() };
        let id = match self.executables.find(&key) {
            Some(id) => id,
            None => {
                let first = homes[0].slot;
                let id = self.executables.insert(key, homes, UNKNOWN_ESTIMATE_NS);
                self.order_compile(id, first, request.replicas, request.partitions, fx);
                id
            }
        };
        let entry = self.executables.get_mut(id).expect("just found or made");
        match &mut entry.state {
            ExecutableState::Compiling(waiting) => waiting.push((at, devices)),
            ExecutableState::Failed(status) | ExecutableState::Lost(status) => {
                let status = (**status).clone();
                self.answer(at, Err(status), fx)
            }
            ExecutableState::Loading | ExecutableState::Loaded => self.name_executable(at, id, devices, fx),
        }
    }

    /// The workers of these devices, all of which live.
    fn homes_of(&self, keys: &[DeviceKey]) -> Result<SmallVec<[Home; 1]>, Status> {
        let mut homes: SmallVec<[Home; 1]> = SmallVec::new();
        for &key in keys {
            let slot = self.members.slot_of(key);
            if !homes.iter().any(|h| h.slot == slot) {
                homes.push(Home { slot, incarnation: self.alive_worker(slot)?, done: false });
            }
        }
        if homes.is_empty() { Err(Status::invalid("a program without devices")) } else { Ok(homes) }
    }

    /// A program over several workers is compiled by one of them first: the others may find it in a cache that they
    /// share.
    fn order_compile(&self, id: ExecutableId, slot: HostSlot, replicas: u32, partitions: u32, fx: &mut Effects) {
        let Some(entry) = self.executables.get(id) else { return };
        let Some(home) = entry.homes.iter().find(|h| h.slot == slot) else { return };
        let alone = entry.homes.len() == 1;
        let command = Command::Compile(CompileCommand {
            executable: id,
            program: entry.key.program.clone(),
            options: entry.key.options.clone(),
            devices: if alone { entry.key.devices.iter().map(|&k| self.members.index_of(k)).collect() } else { Vec::new() },
            replicas,
            partitions,
        });
        fx.list.push(Effect::Send { slot, incarnation: home.incarnation, command });
    }

    /// Has all homes load a compiled program.
    fn order_load(&self, id: ExecutableId, fx: &mut Effects) {
        let Some(entry) = self.executables.get(id) else { return };
        let Some(report) = &entry.report else { return };
        for &Home { slot, incarnation, .. } in &entry.homes {
            let gang = (entry.homes.len() > 1).then(|| self.gang(entry, slot));
            let command = Command::Load { executable: id, fingerprint: report.fingerprint.clone(), gang };
            fx.list.push(Effect::Send { slot, incarnation, command });
        }
    }

    /// What the worker in `slot` has to know of a program over several.
    fn gang(&self, entry: &Executable, slot: HostSlot) -> GangPart {
        let members = |of: HostSlot| {
            let all = (0..).zip(entry.key.devices.iter());
            all.filter(move |&(_, &key)| self.members.slot_of(key) == of)
        };
        let others = entry.homes.iter().filter(|h| h.slot != slot).map(|h| GangPeer {
            slot: h.slot,
            incarnation: h.incarnation,
            address: self.members.worker(h.slot).map(|w| w.info.gang_address.clone()).unwrap_or_default(),
            members: members(h.slot).map(|(member, _)| member).collect(),
        });
        GangPart {
            members: entry.key.devices.len() as u32,
            here: members(slot).map(|(member, &key)| GangMember { member, device: self.members.index_of(key) }).collect(),
            others: others.collect(),
        }
    }

    /// A worker is there again: it loads what its last life had loaded and sessions still name.
    pub(crate) fn load_again(&mut self, slot: HostSlot, incarnation: Incarnation, fx: &mut Effects) {
        for id in self.executables.on_host(slot) {
            let entry = self.executables.get_mut(id).expect("just listed");
            let (ExecutableState::Lost(_), Some(_)) = (&entry.state, &entry.report) else { continue };
            entry.homes.iter_mut().filter(|h| h.slot == slot).for_each(|h| h.incarnation = incarnation);
            let members = &self.members;
            if !entry.homes.iter().all(|h| members.worker(h.slot).is_some_and(|w| w.alive && w.incarnation == h.incarnation)) {
                continue;
            }
            entry.begin(ExecutableState::Loading);
            entry.again = true;
            self.order_load(id, fx);
        }
    }

    /// A worker has loaded a program, or has not.
    pub(crate) fn loaded(&mut self, slot: HostSlot, id: ExecutableId, result: Result<(), Status>, fx: &mut Effects) {
        let Some(entry) = self.executables.get_mut(id) else { return };
        if !matches!(entry.state, ExecutableState::Loading) {
            return;
        }
        let again = entry.again;
        self.dirty = true;
        match result {
            Ok(()) => {
                if entry.done(slot) {
                    entry.state = ExecutableState::Loaded;
                    entry.again = false;
                }
            }
            // Another machine has taken the slot, or the cache was emptied.
            Err(status) if again && status.code == Code::NotFound => {
                let (replicas, partitions) = entry.report.as_ref().map_or((1, 1), |r| (r.replicas, r.partitions));
                entry.again = false;
                entry.begin(ExecutableState::Compiling(SmallVec::new()));
                let first = entry.homes[0].slot;
                self.order_compile(id, first, replicas, partitions, fx);
            }
            Err(status) => {
                entry.again = false;
                entry.state = ExecutableState::Failed(Arc::new(status));
                let others: SmallVec<[Home; 1]> = entry.homes.iter().filter(|h| h.slot != slot).copied().collect();
                self.executables.forget_key(id);
                self.unload(id, &others, fx);
            }
        }
    }

    /// Gives a session its handle of a compiled program.
    fn name_executable(&mut self, at: Pending, id: ExecutableId, devices: Arc<[VirtualDeviceId]>, fx: &mut Effects) {
        let report = self.executables.get(id).and_then(|e| e.report.clone()).expect("a compiled program has a report");
        let Some(session) = self.sessions.get_mut(&at.session) else { return };
        let executable = session.server_handle();
        session.executables.insert(executable, SessionExecutable { id, devices: devices.clone() });
        self.executables.retain(id);
        let reply =
            CompileReply { executable, name: report.name.clone(), devices: devices.to_vec(), fingerprint: report.fingerprint.clone() };
        self.answer(at, Ok(Reply::Compile(reply)), fx)
    }

    pub(crate) fn compiled(&mut self, slot: HostSlot, id: ExecutableId, result: Result<Arc<CompileReport>, Status>, fx: &mut Effects) {
        let Some(entry) = self.executables.get_mut(id) else { return };
        if !matches!(entry.state, ExecutableState::Compiling(_)) {
            return;
        }
        let first = !entry.homes.iter().any(|h| h.done);
        let result = match (result, &entry.report) {
            (Ok(new), Some(known)) if !first && new.fingerprint != known.fingerprint => {
                let text = format!("worker {slot} has compiled {} to something else than the others", known.name);
                Err(Status::internal(text))
            }
            (result, _) => result,
        };
        let all = entry.done(slot);
        let ExecutableState::Compiling(waiting) = &mut entry.state else { return };
        if let (Ok(report), false) = (&result, all) {
            // The others take their turn now, all at once.
            entry.report = Some(report.clone());
            let (replicas, partitions) = (report.replicas, report.partitions);
            let others: SmallVec<[HostSlot; 4]> = entry.homes.iter().filter(|h| first && !h.done).map(|h| h.slot).collect();
            others.into_iter().for_each(|slot| self.order_compile(id, slot, replicas, partitions, fx));
            return;
        }
        let waiting = std::mem::take(waiting);
        match result {
            Err(status) => {
                if entry.refs > 0 {
                    // It was compiled before, and sessions name it.
                    entry.state = ExecutableState::Failed(Arc::new(status.clone()));
                    self.executables.forget_key(id);
                    self.dirty = true;
                } else {
                    self.executables.forget(id);
                }
                for (at, _) in waiting {
                    self.answer(at, Err(status.clone()), fx);
                }
            }
            Ok(report) => {
                let kind = self.members.worker(slot).map(|w| w.info.devices[0].default_memory_kind.clone()).unwrap_or_default();
                self.executables.compiled(id, report, &kind);
                self.order_load(id, fx);
                self.executables.retain(id);
                for (at, devices) in waiting {
                    if self.sessions.contains_key(&at.session) {
                        self.name_executable(at, id, devices, fx);
                    }
                }
                self.release_executable(id, fx);
            }
        }
    }

    pub(crate) fn executable_metadata(&self, at: Pending, handle: Handle, fx: &mut Effects) {
        let result = match self.sessions[&at.session].executables.get(&handle) {
            None => Err(Status::not_found(format!("executable handle {handle} does not exist"))),
            Some(named) => match self.executables.get(named.id) {
                Some(entry) => Ok(Reply::ExecutableMetadata(entry.report.clone().expect("a named program is compiled"))),
                None => Err(Status::new(Code::Unavailable, "the program is no longer loaded")),
            },
        };
        self.answer(at, result, fx)
    }

    pub(crate) fn destruct_executable(&mut self, at: Pending, handle: Handle, fx: &mut Effects) {
        let session = self.sessions.get_mut(&at.session).expect("the request's session");
        let result = match session.executables.remove(&handle) {
            Some(named) => {
                self.release_executable(named.id, fx);
                Ok(Reply::DestructExecutable)
            }
            None => Err(Status::not_found(format!("executable handle {handle} does not exist"))),
        };
        self.answer(at, result, fx)
    }

    pub(crate) fn execute(&mut self, at: Pending, bytes: u32, request: ExecuteRequest, fx: &mut Effects) {
        let results = request.results.clone();
        let donated = self.donated_handles(at, &request);
        if let Err(status) = self.try_execute(at, bytes, request, fx) {
            // Arguments given to a failed run count as deleted at the client.
            if !results.is_empty() {
                donated.iter().for_each(|&h| self.mark_deleted(at, h, fx));
            }
            self.fail(at, &results, status, fx);
        }
    }

    /// The argument handles that the client gives away with this run.
    fn donated_handles(&self, at: Pending, request: &ExecuteRequest) -> SmallVec<[Handle; 4]> {
        let report = self.sessions[&at.session]
            .executables
            .get(&request.executable)
            .and_then(|n| self.executables.get(n.id))
            .and_then(|e| e.report.as_ref());
        let Some(report) = report else { return SmallVec::new() };
        let given = report.donated.iter().filter(|i| !request.non_donatable.contains(i));
        given.filter_map(|&i| request.arguments.get(i as usize).copied()).collect()
    }

    fn try_execute(&mut self, at: Pending, bytes: u32, request: ExecuteRequest, fx: &mut Effects) -> Result<(), Arc<Status>> {
        let named = self.sessions[&at.session].executables.get(&request.executable).cloned();
        let named = named.ok_or_else(|| Arc::new(Status::not_found(format!("executable handle {} does not exist", request.executable))))?;
        let entry = self.executables.get(named.id).ok_or_else(|| Arc::new(Status::internal("the program is not in the compile table")))?;
        if let ExecutableState::Failed(status) | ExecutableState::Lost(status) = &entry.state {
            return Err(status.clone());
        }
        let report = entry.report.clone().expect("a named program is compiled");
        let label = entry.label.clone();
        let plans = entry.outputs.clone();
        let keys = entry.key.devices.clone();
        if request.arguments.len() != report.parameters.len() {
            let text = format!("{label} takes {} arguments, {} were given", report.parameters.len(), request.arguments.len());
            return Err(Arc::new(Status::invalid(text)));
        }
        let first = request.results.is_empty() && !plans.is_empty();
        if !first && request.results.len() != plans.len() {
            let text = format!("{label} has {} results, {} handles were given", plans.len(), request.results.len());
            return Err(Arc::new(Status::invalid(text)));
        }
        let donated: SmallVec<[u32; 4]> = report.donated.iter().copied().filter(|i| !request.non_donatable.contains(i)).collect();

        let mut arguments: Vec<(SmallVec<[Piece; 1]>, bool)> = Vec::with_capacity(request.arguments.len());
        let mut inputs: SmallVec<[BackingKey; 4]> = SmallVec::new();
        for (index, (&handle, parameter)) in request.arguments.iter().zip(&report.parameters).enumerate() {
            let array = match self.resolve(at, handle) {
                Ok(array) => array,
                Err(status) => {
                    self.release_inputs(&inputs, fx);
                    return Err(status);
                }
            };
            if let Some(text) = mismatch(array, parameter) {
                self.release_inputs(&inputs, fx);
                return Err(Arc::new(Status::invalid(format!("argument {index} of {label}: {text}"))));
            }
            let pieces = if Arc::ptr_eq(&array.devices, &named.devices) || array.devices == named.devices {
                array.pieces.clone()
            } else {
                // JAX may send arguments that still lie on another mesh; they are moved, a plugin never sees them.
                match self.moved_argument(at, handle, &named.devices, fx) {
                    Ok(pieces) => pieces,
                    Err(status) => {
                        self.release_inputs(&inputs, fx);
                        let text = format!("argument {index} of {label} lies on other devices: {}", status.message);
                        return Err(Arc::new(Status { message: text, ..(*status).clone() }));
                    }
                }
            };
            for piece in &pieces {
                self.directory.backings[piece.backing].queued_refs += 1;
                inputs.push(piece.backing);
            }
            arguments.push((pieces, donated.contains(&(index as u32))));
        }

        let run = self.peek_run();
        let mut outputs: SmallVec<[BackingKey; 2]> = SmallVec::new();
        let mut specs = Vec::with_capacity(if first { plans.len() } else { 0 });
        for (index, plan) in plans.iter().enumerate() {
            let key = self.directory.backings.insert(Backing {
                id: BufferId { run, output: index as u32 },
                state: BackingState::Promised,
                granted: false,
                handle_refs: 0,
                queued_refs: 0,
                owner: at.session,
                label: label.clone(),
                dtype: plan.dtype,
                shard_dims: plan.shard_dims.clone(),
                devices: keys.clone(),
                hosts: SmallVec::new(),
                failed: SmallVec::new(),
                ledger_bytes: plan.ledger_bytes,
                counted: false,
            });
            outputs.push(key);
        }
        for handle in request.arguments.iter().enumerate().filter(|(i, _)| donated.contains(&(*i as u32))).map(|(_, &h)| h) {
            self.mark_deleted(at, handle, fx);
        }
        for (index, plan) in plans.iter().enumerate() {
            let handle = if first {
                self.sessions.get_mut(&at.session).expect("the request's session").server_handle()
            } else {
                request.results[index]
            };
            let array = Array {
                dtype: plan.dtype,
                dims: plan.dims.clone(),
                partition: plan.partition.clone(),
                memory_kind: plan.memory_kind.clone(),
                devices: named.devices.clone(),
                pieces: smallvec![Piece { backing: outputs[index], first: 0, count: keys.len() as u32 }],
            };
            self.put_array(at, handle, array, fx);
            if first {
                let value = &report.outputs[index];
                specs.push(ExecuteOutput {
                    array: handle,
                    dtype: value.dtype,
                    dims: value.dims.clone(),
                    op_sharding: value.op_sharding.clone(),
                    devices: named.devices.clone(),
                    memory_kind: value.memory_kind.clone(),
                });
            }
        }
        let mut node = Node::new(at.session, Work::Launch { executable: named.id, arguments, launch_id: request.launch_id }, keys, bytes);
        node.inputs = inputs;
        node.outputs = outputs;
        let mut status = Handle(0);
        if request.fill_status {
            let session = self.sessions.get_mut(&at.session).expect("the request's session");
            status = if request.status.0 != 0 { request.status } else { session.server_handle() };
            session.statuses.insert(status, StatusHandle::Pending);
            node.status = Some(status);
        }
        self.executables.retain(named.id);
        self.enqueue(node);
        self.answer(at, Ok(Reply::Execute(ExecuteReply { status, outputs: specs })), fx);
        Ok(())
    }

    fn release_inputs(&mut self, inputs: &[BackingKey], fx: &mut Effects) {
        for &key in inputs {
            self.drop_queued_ref(key, fx);
        }
    }

    /// Copies an argument to the executable's devices; the copy lives as long as this run needs it.
    fn moved_argument(
        &mut self,
        at: Pending,
        handle: Handle,
        devices: &Arc<[VirtualDeviceId]>,
        fx: &mut Effects,
    ) -> Result<SmallVec<[Piece; 1]>, Arc<Status>> {
        let array = self.resolve(at, handle)?.clone();
        if array.shards() != devices.len() {
            let text = format!("it has {} shards, the program runs on {} devices", array.shards(), devices.len());
            return Err(Arc::new(Status::invalid(text)));
        }
        let kind = array.memory_kind.clone();
        let moved = self.copy_to(at, 0, &array, devices.clone(), kind, pw_types::CopySemantics::ReuseInput, fx)?;
        Ok(moved.pieces)
    }

    pub(crate) fn default_layout(&mut self, at: Pending, dtype: DType, dims: Dims, device: VirtualDeviceId, fx: &mut Effects) {
        let home = match self.sessions[&at.session].device(device) {
            Ok(key) => self.members.slot_of(key),
            Err(status) => return self.answer(at, Err(status), fx),
        };
        match self.layouts.get_mut(&(dtype, dims.clone())) {
            Some(LayoutAnswer::Known(layout)) => {
                let layout = layout.clone();
                self.answer(at, Ok(Reply::DefaultLayout(layout)), fx)
            }
            Some(LayoutAnswer::Asked(waiting)) => waiting.push(at),
            None => {
                self.layouts.insert((dtype, dims.clone()), LayoutAnswer::Asked(smallvec![at]));
                self.ask_layout((dtype, dims), home, fx);
            }
        }
    }

    /// Asks the worker that is at home where the question is; if it is lost, any other, since all give the same answer,
    /// and a client to whom this question is refused aborts (protocol fact). Without any worker it is refused.
    pub(crate) fn ask_layout(&mut self, key: (DType, Dims), home: HostSlot, fx: &mut Effects) {
        let others = (0..).take(self.members.workers.len()).map(HostSlot);
        let asked = std::iter::once(home).chain(others).find_map(|slot| Some((slot, self.alive_worker(slot).ok()?)));
        let Some((slot, incarnation)) = asked else {
            let status = self.alive_worker(home).err().unwrap_or_else(|| Status::internal("a worker is there and is not"));
            if let Some(LayoutAnswer::Asked(waiting)) = self.layouts.remove(&key) {
                waiting.into_iter().for_each(|at| self.answer(at, Err(status.clone()), fx));
            }
            return;
        };
        self.next_layout_query += 1;
        let query = self.next_layout_query;
        let command = Command::DefaultLayout { query, dtype: key.0, dims: key.1.clone() };
        self.layout_queries.insert(query, (key, slot));
        fx.list.push(Effect::Send { slot, incarnation, command });
    }
}

/// Why an array cannot be this argument; `None` = it can. The worker checks the shards again.
fn mismatch(array: &Array, parameter: &pw_types::ValueSpec) -> Option<String> {
    if parameter.dtype == DType::Token {
        return (!matches!(array.dtype, DType::Token | DType::Pred)).then(|| format!("a token is wanted, {:?} was given", array.dtype));
    }
    if array.dtype != parameter.dtype || array.dims[..] != parameter.dims[..] {
        return Some(format!(
            "{} is wanted, {} was given",
            pw_types::dtype::describe(parameter.dtype, &parameter.dims),
            pw_types::dtype::describe(array.dtype, &array.dims)
        ));
    }
    None
}
