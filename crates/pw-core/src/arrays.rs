//! Requests that relabel or move arrays: assemble, disassemble, remap share backings; copies and fetches are nodes.

use std::sync::Arc;

use pw_types::{
    BufferId, CopySemantics, DType, Dims, Handle, HostSlot, MemoryTarget, Partition, RemapPlan, Reply, Sharding, Status, VirtualDeviceId,
};
use smallvec::{SmallVec, smallvec};

use crate::directory::{Array, Backing, BackingKey, BackingState, Entry, Piece, device_bytes, push_piece};
use crate::graph::{CopyPlan, Node, Work};
use crate::membership::DeviceKey;
use crate::session::Pending;
use crate::{Core, Effects};

impl Core {
    /// The array behind a handle, or why there is none.
    pub(crate) fn resolve(&self, at: Pending, handle: Handle) -> Result<&Array, Arc<Status>> {
        match self.sessions[&at.session].arrays.get(&handle) {
            Some(Entry::Array(array)) => Ok(array),
            Some(Entry::Poisoned(fault)) => Err(fault.clone()),
            Some(Entry::Deleted) => Err(Arc::new(Status::invalid(format!("array {handle} has been deleted or donated")))),
            None => Err(Arc::new(Status::not_found(format!("array handle {handle} does not exist")))),
        }
    }

    /// Gives a new handle an array, with its references.
    pub(crate) fn put_array(&mut self, at: Pending, handle: Handle, array: Array, fx: &mut Effects) {
        self.directory.add_handle_refs(&array);
        self.forget_array(at.session, handle, fx);
        self.sessions.get_mut(&at.session).expect("the request's session").arrays.insert(handle, Entry::Array(array));
    }

    /// Marks an array as deleted; the handle stays.
    pub(crate) fn mark_deleted(&mut self, at: Pending, handle: Handle, fx: &mut Effects) {
        let session = self.sessions.get_mut(&at.session).expect("the request's session");
        if let Some(entry) = session.arrays.get_mut(&handle)
            && let Entry::Array(array) = std::mem::replace(entry, Entry::Deleted)
        {
            for piece in array.pieces {
                self.drop_handle_ref(piece.backing, fx);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn assemble(
        &mut self,
        at: Pending,
        result: Handle,
        dtype: Option<DType>,
        dims: Dims,
        sharding: Sharding,
        inputs: &[Handle],
        copy: CopySemantics,
        fx: &mut Effects,
    ) {
        let built = self.assemble_pieces(at, &sharding, inputs).map(|(first, devices, pieces)| Array {
            dtype: dtype.unwrap_or(first),
            dims: Arc::from(dims),
            partition: Arc::new(sharding.partition),
            memory_kind: sharding.memory_kind.map(Arc::from),
            devices,
            pieces,
        });
        match built {
            Err(status) => self.fail(at, &[result], status, fx),
            Ok(array) => {
                self.put_array(at, result, array, fx);
                if copy == CopySemantics::DonateInput {
                    inputs.iter().for_each(|&h| self.mark_deleted(at, h, fx));
                }
                self.answer(at, Ok(Reply::Assemble(result)), fx)
            }
        }
    }

    #[allow(clippy::type_complexity)]
    fn assemble_pieces(
        &self,
        at: Pending,
        sharding: &Sharding,
        inputs: &[Handle],
    ) -> Result<(DType, Arc<[VirtualDeviceId]>, SmallVec<[Piece; 1]>), Arc<Status>> {
        let mut pieces = SmallVec::new();
        let mut devices = Vec::with_capacity(inputs.len());
        let mut dtype = DType::Opaque;
        for &input in inputs {
            let array = self.resolve(at, input)?;
            dtype = array.dtype;
            devices.extend_from_slice(&array.devices);
            array.pieces.iter().for_each(|&p| push_piece(&mut pieces, p));
        }
        if inputs.is_empty() {
            return Err(Arc::new(Status::invalid("cannot assemble an array of no shards")));
        }
        if devices != sharding.devices {
            let text = format!("the shards lie on devices {}, the sharding names {}", ids(&devices), ids(&sharding.devices));
            return Err(Arc::new(Status::invalid(text)));
        }
        Ok((dtype, Arc::from(devices), pieces))
    }

    pub(crate) fn disassemble(&mut self, at: Pending, array: Handle, results: Vec<Handle>, copy: CopySemantics, fx: &mut Effects) {
        let parts = match self.resolve(at, array) {
            Err(status) => return self.fail(at, &results, status, fx),
            Ok(a) if a.shards() != results.len() => {
                let text = format!("array {array} has {} shards, {} handles were given", a.shards(), results.len());
                return self.fail(at, &results, Arc::new(Status::invalid(text)), fx);
            }
            Ok(a) => (0..a.shards()).map(|i| self.shard_array(a, i)).collect::<Vec<_>>(),
        };
        for (&handle, part) in results.iter().zip(parts) {
            self.put_array(at, handle, part, fx);
        }
        if copy == CopySemantics::DonateInput {
            self.mark_deleted(at, array, fx);
        }
        self.answer(at, Ok(Reply::Disassemble(results)), fx)
    }

    pub(crate) fn fully_replicated_shard(&mut self, at: Pending, array: Handle, result: Handle, copy: CopySemantics, fx: &mut Effects) {
        let part = match self.resolve(at, array) {
            Err(status) => return self.fail(at, &[result], status, fx),
            Ok(a) => self.shard_array(a, 0),
        };
        self.put_array(at, result, part, fx);
        if copy == CopySemantics::DonateInput {
            self.mark_deleted(at, array, fx);
        }
        self.answer(at, Ok(Reply::FullyReplicatedShard(result)), fx)
    }

    /// Shard `index` as an array of its own; the backing is shared.
    fn shard_array(&self, array: &Array, index: usize) -> Array {
        let piece = array.shard(index).expect("an array has as many shards as devices");
        let backing = self.directory.get(piece.backing);
        Array {
            dtype: array.dtype,
            dims: backing.shard_dims.clone(),
            partition: Arc::new(Partition::Replicated),
            memory_kind: array.memory_kind.clone(),
            devices: Arc::from([array.devices[index]]),
            pieces: smallvec![piece],
        }
    }

    pub(crate) fn remap_arrays(
        &mut self,
        at: Pending,
        inputs: &[Handle],
        results: Vec<Handle>,
        plan: &RemapPlan,
        copy: CopySemantics,
        fx: &mut Effects,
    ) {
        let made = self.remapped(at, inputs, &results, plan);
        self.put_derived(at, inputs, made, results, copy, Reply::RemapArrays, fx);
    }

    /// Answers a request for arrays that share the storage of its inputs.
    #[expect(clippy::too_many_arguments, reason = "all that such a request says")]
    pub(crate) fn put_derived(
        &mut self,
        at: Pending,
        inputs: &[Handle],
        made: Result<Vec<Array>, Arc<Status>>,
        results: Vec<Handle>,
        copy: CopySemantics,
        reply: fn(Vec<Handle>) -> Reply,
        fx: &mut Effects,
    ) {
        match made {
            Err(status) => self.fail(at, &results, status, fx),
            Ok(arrays) => {
                for (&handle, array) in results.iter().zip(arrays) {
                    self.put_array(at, handle, array, fx);
                }
                if copy == CopySemantics::DonateInput {
                    inputs.iter().for_each(|&h| self.mark_deleted(at, h, fx));
                }
                self.answer(at, Ok(reply(results)), fx)
            }
        }
    }

    fn remapped(&self, at: Pending, inputs: &[Handle], results: &[Handle], plan: &RemapPlan) -> Result<Vec<Array>, Arc<Status>> {
        let invalid = |text: String| Arc::new(Status::invalid(format!("remap plan: {text}")));
        if results.len() != plan.outputs.len() {
            return Err(invalid(format!("{} outputs for {} handles", plan.outputs.len(), results.len())));
        }
        let arrays: Vec<&Array> = inputs.iter().map(|&h| self.resolve(at, h)).collect::<Result<_, _>>()?;
        let mut places: Vec<Vec<Option<(Piece, VirtualDeviceId)>>> =
            plan.outputs.iter().map(|o| vec![None; o.sharding.devices.len()]).collect();
        for mapping in &plan.mappings {
            let input = arrays.get(mapping.input as usize).ok_or_else(|| invalid(format!("input {} does not exist", mapping.input)))?;
            let output =
                places.get_mut(mapping.output as usize).ok_or_else(|| invalid(format!("output {} does not exist", mapping.output)))?;
            if mapping.from.len() != mapping.to.len() {
                return Err(invalid(format!("{} from and {} to intervals", mapping.from.len(), mapping.to.len())));
            }
            for (from, to) in mapping.from.iter().zip(&mapping.to) {
                let from = positions(from, input.shards()).map_err(&invalid)?;
                let to = positions(to, output.len()).map_err(&invalid)?;
                if from.len() != to.len() {
                    return Err(invalid(format!("{} shards map to {} places", from.len(), to.len())));
                }
                for (f, t) in from.into_iter().zip(to) {
                    let piece = input.shard(f).expect("position checked");
                    if output[t].replace((piece, input.devices[f])).is_some() {
                        return Err(invalid(format!("shard {t} of output {} is filled twice", mapping.output)));
                    }
                }
            }
        }
        let mut made = Vec::with_capacity(places.len());
        for (output, (spec, places)) in plan.outputs.iter().zip(places).enumerate() {
            let mut pieces = SmallVec::new();
            let mut devices = Vec::with_capacity(places.len());
            for (shard, place) in places.into_iter().enumerate() {
                let (piece, device) = place.ok_or_else(|| invalid(format!("shard {shard} of output {output} is not filled")))?;
                push_piece(&mut pieces, piece);
                devices.push(device);
            }
            if devices != spec.sharding.devices {
                let text = format!("output {output}: shards lie on {}, the sharding names {}", ids(&devices), ids(&spec.sharding.devices));
                return Err(invalid(text));
            }
            made.push(Array {
                dtype: spec.dtype,
                dims: Arc::from(spec.dims.as_slice()),
                partition: Arc::new(spec.sharding.partition.clone()),
                memory_kind: spec.sharding.memory_kind.as_deref().map(Arc::from),
                devices: Arc::from(devices),
                pieces,
            });
        }
        Ok(made)
    }

    pub(crate) fn delete_arrays(&mut self, at: Pending, arrays: &[Handle], fx: &mut Effects) {
        let missing = arrays.iter().find(|h| !self.sessions[&at.session].arrays.contains_key(h)).copied();
        for &handle in arrays {
            self.mark_deleted(at, handle, fx);
        }
        let result = match missing {
            Some(handle) => Err(Status::not_found(format!("array handle {handle} does not exist"))),
            None => Ok(Reply::DeleteArrays(self.sessions.get_mut(&at.session).expect("the request's session").server_handle())),
        };
        self.answer(at, result, fx)
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn copy_arrays(
        &mut self,
        at: Pending,
        bytes: u32,
        arrays: &[Handle],
        results: Vec<Handle>,
        devices: &[VirtualDeviceId],
        memory: &MemoryTarget,
        copy: CopySemantics,
        fx: &mut Effects,
    ) {
        let mut failed = None;
        if arrays.len() != results.len() {
            failed = Some(Arc::new(Status::invalid(format!("{} arrays for {} result handles", arrays.len(), results.len()))));
        }
        let share = bytes / (arrays.len().max(1) as u32);
        for (&array, &result) in arrays.iter().zip(&results) {
            let copied = match &failed {
                Some(status) => Err(Arc::clone(status)),
                None => self.copied(at, share, array, devices, memory, copy, fx),
            };
            match copied {
                Ok(made) => self.put_array(at, result, made, fx),
                Err(status) => {
                    self.poison_results(at.session, &[result], &status, fx);
                    failed = Some(status);
                }
            }
            if copy == CopySemantics::DonateInput {
                self.mark_deleted(at, array, fx);
            }
        }
        let result = match failed {
            None => Ok(Reply::CopyArrays(results)),
            Some(status) => Err((*status).clone()),
        };
        self.answer(at, result, fx)
    }

    #[allow(clippy::too_many_arguments)]
    fn copied(
        &mut self,
        at: Pending,
        bytes: u32,
        handle: Handle,
        devices: &[VirtualDeviceId],
        memory: &MemoryTarget,
        copy: CopySemantics,
        fx: &mut Effects,
    ) -> Result<Array, Arc<Status>> {
        let array = self.resolve(at, handle)?.clone();
        let target: Arc<[VirtualDeviceId]> = if devices.is_empty() { array.devices.clone() } else { Arc::from(devices) };
        if target.len() != array.shards() {
            let text = format!("array {handle} has {} shards, {} target devices were given", array.shards(), target.len());
            return Err(Arc::new(Status::invalid(text)));
        }
        let default: Option<Arc<str>> = None;
        let kind = match memory {
            MemoryTarget::Keep => array.memory_kind.clone(),
            MemoryTarget::Default => default,
            MemoryTarget::Kind(kind) => Some(Arc::from(kind.as_str())),
        };
        self.copy_to(at, bytes, &array, target, kind, copy, fx)
    }

    /// An array like `array` on other devices or in other memory. Shares the backing where nothing has to move.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn copy_to(
        &mut self,
        at: Pending,
        bytes: u32,
        array: &Array,
        target: Arc<[VirtualDeviceId]>,
        kind: Option<Arc<str>>,
        copy: CopySemantics,
        fx: &mut Effects,
    ) -> Result<Array, Arc<Status>> {
        let _ = fx;
        let session = &self.sessions[&at.session];
        let keys = session.device_keys(&target).map_err(Arc::new)?;
        let first = *keys.first().ok_or_else(|| Arc::new(Status::invalid("a copy of no shards")))?;
        let source = session.device(array.devices[0]).map_err(Arc::new)?;
        let same_memory = array.memory_kind == kind
            || (self.is_device_memory(array.memory_kind.as_deref(), source) && self.is_device_memory(kind.as_deref(), first));
        let mut made = Array { devices: target.clone(), memory_kind: kind.clone(), ..array.clone() };
        if same_memory && target == array.devices && copy != CopySemantics::AlwaysCopy {
            return Ok(made);
        }
        made.pieces = self.relocate(at, bytes, array, &keys, kind).map_err(Arc::new)?;
        Ok(made)
    }

    /// Nodes that put a copy of each shard on its device: one per pair of workers. The pieces of the result.
    fn relocate(
        &mut self,
        at: Pending,
        bytes: u32,
        array: &Array,
        keys: &[DeviceKey],
        kind: Option<Arc<str>>,
    ) -> Result<SmallVec<[Piece; 1]>, Status> {
        /// From and to; what is copied; which shards of the result it becomes.
        type Leg = ((HostSlot, HostSlot), Vec<CopyPlan>, Vec<usize>);
        let mut legs: Vec<Leg> = Vec::new();
        for (index, &key) in keys.iter().enumerate() {
            let source = array.shard(index).expect("as many shards as devices");
            let from = self.members.slot_of(self.directory.get(source.backing).devices[source.first as usize]);
            let to = self.members.slot_of(key);
            let plan = CopyPlan { source, device: self.members.index_of(key) };
            match legs.iter_mut().find(|(leg, ..)| *leg == (from, to)) {
                Some((_, plans, places)) => {
                    plans.push(plan);
                    places.push(index);
                }
                None => {
                    self.alive_worker(from)?;
                    self.alive_worker(to)?;
                    legs.push(((from, to), vec![plan], vec![index]));
                }
            }
        }
        let mut placed: Vec<Option<Piece>> = vec![None; keys.len()];
        let share = bytes / legs.len().max(1) as u32;
        for ((from, to), items, places) in legs {
            let devices: Arc<[DeviceKey]> = places.iter().map(|&p| keys[p]).collect::<Vec<_>>().into();
            let backing = self.relocate_leg(at, share, array.dtype, (from, to), items, devices, kind.clone());
            for (shard, place) in (0..).zip(places) {
                placed[place] = Some(Piece { backing, first: shard, count: 1 });
            }
        }
        let mut pieces = SmallVec::new();
        placed.into_iter().flatten().for_each(|piece| push_piece(&mut pieces, piece));
        Ok(pieces)
    }

    #[allow(clippy::too_many_arguments)]
    fn relocate_leg(
        &mut self,
        at: Pending,
        bytes: u32,
        dtype: DType,
        (from, to): (HostSlot, HostSlot),
        items: Vec<CopyPlan>,
        devices: Arc<[DeviceKey]>,
        memory_kind: Option<Arc<str>>,
    ) -> BackingKey {
        let run = self.peek_run();
        let shard_dims = self.directory.get(items[0].source.backing).shard_dims.clone();
        let on_device = self.is_device_memory(memory_kind.as_deref(), devices[0]);
        let backing = self.directory.backings.insert(Backing {
            id: BufferId { run, output: 0 },
            state: BackingState::Promised,
            granted: false,
            handle_refs: 0,
            queued_refs: 0,
            owner: at.session,
            label: Arc::from("copy"),
            dtype,
            ledger_bytes: if on_device { device_bytes(dtype, &shard_dims).unwrap_or(0) } else { 0 },
            shard_dims,
            devices: devices.clone(),
            hosts: SmallVec::new(),
            failed: SmallVec::new(),
            counted: false,
        });
        let mut sources: Vec<BackingKey> = items.iter().map(|i| i.source.backing).collect();
        sources.dedup();
        let mut taking_part = devices.to_vec();
        let work = if from == to {
            Work::Copy { items, memory_kind }
        } else {
            let source = |i: &CopyPlan| self.directory.get(i.source.backing).devices[i.source.first as usize];
            taking_part.extend(items.iter().map(source));
            taking_part.dedup();
            Work::Move { from, to, items, memory_kind, first_key: 0 }
        };
        let mut node = Node::new(at.session, work, taking_part.into(), bytes);
        node.outputs = smallvec![backing];
        node.inputs = self.retain_inputs(sources.into_iter());
        self.enqueue(node);
        backing
    }

    /// Takes a queued reference on each backing.
    pub(crate) fn retain_inputs(
        &mut self,
        backings: impl Iterator<Item = crate::directory::BackingKey>,
    ) -> SmallVec<[crate::directory::BackingKey; 4]> {
        let inputs: SmallVec<_> = backings.collect();
        for &key in &inputs {
            self.directory.backings[key].queued_refs += 1;
        }
        inputs
    }

    pub(crate) fn copy_to_host(
        &mut self,
        at: Pending,
        bytes: u32,
        handle: Handle,
        buffer: Handle,
        byte_strides: Option<Vec<i64>>,
        fx: &mut Effects,
    ) {
        match self.read_node(at, bytes, handle, buffer, byte_strides) {
            Err(status) => self.answer(at, Err((*status).clone()), fx),
            Ok(mut node) => {
                node.answers = Some(at.op);
                self.enqueue(node);
            }
        }
    }

    fn read_node(
        &mut self,
        at: Pending,
        bytes: u32,
        handle: Handle,
        buffer: Handle,
        strides: Option<Vec<i64>>,
    ) -> Result<Node, Arc<Status>> {
        let array = self.resolve(at, handle)?.clone();
        if let Some(fault) = self.directory.fault(&array) {
            return Err(fault);
        }
        if array.dtype == DType::String || array.dtype == DType::Opaque {
            return Err(Arc::new(Status::unimplemented(format!("fetching an array of {:?}", array.dtype))));
        }
        // Replicas are read once: the first shard that starts at a place stands for all.
        let mut pieces: Vec<(Piece, Option<pw_types::Region>)> = Vec::new();
        let spec = array.spec();
        for index in 0..array.shards() {
            let region = if array.shards() == 1 {
                None
            } else {
                pw_plan::shard_region(&spec, index)
                    .map_err(|e| Arc::new(Status::unimplemented(format!("fetching array {handle} of {} shards: {e}", array.shards()))))?
            };
            if !pieces.iter().any(|(_, r)| *r == region) {
                pieces.push((array.shard(index).expect("as many shards as devices"), region));
            }
        }
        let keys = self.gather_pieces(at, &array, &mut pieces).map_err(Arc::new)?;
        let inputs = self.retain_inputs(pieces.iter().map(|(p, _)| p.backing));
        let work = Work::HostRead { buffer, dtype: array.dtype, dims: array.dims.clone(), byte_strides: strides, pieces };
        let mut node = Node::new(at.session, work, keys, bytes);
        node.inputs = inputs;
        Ok(node)
    }
}

impl Core {
    /// Moves pieces of other workers into host memory of the one that has the first, which the edge fetches from.
    fn gather_pieces(
        &mut self,
        at: Pending,
        array: &Array,
        pieces: &mut [(Piece, Option<pw_types::Region>)],
    ) -> Result<Arc<[DeviceKey]>, Status> {
        let device = |core: &Core, piece: &Piece| core.directory.get(piece.backing).devices[piece.first as usize];
        let first = device(self, &pieces[0].0);
        let to = self.members.slot_of(first);
        self.alive_worker(to)?;
        let far: Vec<usize> = (0..pieces.len()).filter(|&i| self.members.slot_of(device(self, &pieces[i].0)) != to).collect();
        if !far.is_empty() {
            let mut moved = SmallVec::new();
            far.iter().for_each(|&i| push_piece(&mut moved, pieces[i].0));
            let there = Array { pieces: moved, devices: far.iter().map(|_| array.devices[0]).collect::<Vec<_>>().into(), ..array.clone() };
            let kind = self.host_memory_kind(first);
            let landed = self.relocate(at, 0, &there, &vec![first; far.len()], kind)?;
            let landed = Array { pieces: landed, ..there };
            for (place, &i) in far.iter().enumerate() {
                pieces[i].0 = landed.shard(place).expect("as many as were moved");
            }
        }
        Ok(pieces.iter().map(|(p, _)| device(self, p)).collect::<Vec<_>>().into())
    }

    /// A memory of the device that the ledger does not count; `None` = it has none.
    fn host_memory_kind(&self, device: DeviceKey) -> Option<Arc<str>> {
        let physical = self.members.devices[device as usize].physical;
        let info = &self.members.workers[physical.slot.0 as usize].info.devices[physical.index as usize];
        info.memory_kinds.iter().find(|kind| **kind != info.default_memory_kind).map(|kind| Arc::from(kind.as_str()))
    }
}

/// The positions of an interval, checked against `shards`.
fn positions(interval: &pw_types::Interval, shards: usize) -> Result<Vec<usize>, String> {
    let pw_types::Interval { start, end, step } = *interval;
    if step <= 0 || start < 0 || end < start || (end - start) / step > shards as i64 {
        return Err(format!("interval [{start}:{end}:{step}] over {shards} shards"));
    }
    let list: Vec<usize> = (0..).map(|k| start + k * step).take_while(|&p| p < end).map(|p| p as usize).collect();
    match list.last() {
        Some(&last) if last >= shards => Err(format!("interval [{start}:{end}:{step}] over {shards} shards")),
        _ => Ok(list),
    }
}

/// `[0, 1, 2]`.
fn ids(devices: &[VirtualDeviceId]) -> String {
    format!("{:?}", devices.iter().map(|d| d.0).collect::<Vec<_>>())
}
