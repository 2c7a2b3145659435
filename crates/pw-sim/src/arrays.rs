//! Requests that make, relabel and move arrays, in the reference model.

use std::collections::BTreeMap;

use pw_types::*;

use crate::model::{Array, Ask, Blame, Model, Output, Read, Resolved, Shard, Then, Work};
use crate::program::{ITEM_BYTES, host_token, part_token};

impl Model {
    pub(crate) fn ask_for_arrays(&mut self, id: SessionId, request: &Request) -> Ask {
        match request {
            Request::MakeArray { array, spec, source } => {
                let result = self.make_array(id, *array, spec, source);
                Ask::of("MakeArray", result).poisons([*array])
            }
            Request::MakeArraysFromShards { arrays } => self.make_from_shards(id, arrays),
            Request::Assemble { array, dims, sharding, inputs, copy, .. } => {
                let result = self.assemble(id, *array, dims[0], sharding, inputs, *copy);
                Ask::of("Assemble", result).poisons([*array])
            }
            Request::Disassemble { array, results, copy } => {
                let result = self.disassemble(id, *array, results, *copy);
                Ask::of("Disassemble", result).poisons(results.iter().copied())
            }
            Request::FullyReplicatedShard { array, result, copy } => {
                let taken = self.resolve(id, *array).map(|a| a.shard(0));
                let made = taken.map(|part| {
                    self.put(id, *result, part);
                    self.delete_if_donated(id, &[*array], *copy);
                });
                Ask::of("FullyReplicatedShard", made).poisons([*result])
            }
            Request::CopyToHost { array, host_buffer, .. } => self.copy_to_host(id, *array, *host_buffer),
            Request::CopyArrays { arrays, results, devices, memory, copy } => self.copy_arrays(id, arrays, results, devices, memory, *copy),
            Request::RemapArrays { arrays, results, plan, copy } => {
                let result = self.remap(id, arrays, results, plan, *copy);
                Ask::of("RemapArrays", result).poisons(results.iter().copied())
            }
            other => unreachable!("{other:?} has its place in the model"),
        }
    }

    fn make_array(&mut self, id: SessionId, array: Handle, spec: &ArraySpec, source: &HostSource) -> Resolved<()> {
        if source.dims != spec.dims || source.dtype != spec.dtype {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        let whole = host_token(id, source.buffer);
        let count = spec.sharding.devices.len();
        let parts = (0..count).map(|position| {
            let start = tile_start(&spec.sharding.partition, spec.dims[0], count, position);
            part_token(whole, start)
        });
        let tokens: Vec<u64> = parts.collect();
        let len = if matches!(spec.sharding.partition, Partition::Tiled(_)) { spec.dims[0] / count as i64 } else { spec.dims[0] };
        self.upload(id, array, spec, &[source.buffer], len, &tokens)
    }

    fn make_from_shards(&mut self, id: SessionId, uploads: &[ShardedUpload]) -> Ask {
        let mut failed = None;
        let mut poisons = Vec::new();
        for upload in uploads {
            let made = match &failed {
                Some(blame) => Err(Blame::clone(blame)),
                None => self.shards_uploaded(id, upload),
            };
            if let Err(blame) = made {
                poisons.push(upload.array);
                failed = Some(blame);
            }
        }
        Ask::of("MakeArraysFromShards", failed.map_or(Ok(()), Err)).poisons(poisons)
    }

    fn shards_uploaded(&mut self, id: SessionId, upload: &ShardedUpload) -> Resolved<()> {
        let mut tokens = vec![0; upload.spec.sharding.devices.len()];
        for shard in &upload.shards {
            shard.positions.iter().for_each(|&p| tokens[p as usize] = host_token(id, shard.source.buffer));
        }
        let buffers: Vec<Handle> = upload.shards.iter().map(|s| s.source.buffer).collect();
        let len = upload.shards[0].source.dims[0];
        self.upload(id, upload.array, &upload.spec, &buffers, len, &tokens)
    }

    fn upload(&mut self, id: SessionId, array: Handle, spec: &ArraySpec, buffers: &[Handle], len: i64, tokens: &[u64]) -> Resolved<()> {
        let devices = self.devices_of(id, &spec.sharding.devices)?;
        if self.sessions[&id].arrays.contains_key(&array) || buffers.iter().any(|b| self.sessions[&id].uploads.contains(b)) {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        devices.iter().try_for_each(|&d| self.alive(self.order.slot_of(d)))?;
        let kind = spec.sharding.memory_kind.clone();
        let output = self.new_output(kind.as_deref(), len, &devices);
        let work = Work::Upload { buffers: buffers.to_vec() };
        let node = self.add_node(id, work, Vec::new(), devices.clone(), vec![output]);
        let physical = kind.clone().unwrap_or_else(|| "device".to_owned());
        let shards =
            devices.iter().zip(tokens).map(|(&device, &token)| Shard { node, output: 0, token, len, kind: physical.clone(), device });
        let made = Array {
            n: spec.dims[0],
            partition: spec.sharding.partition.clone(),
            kind,
            devices: spec.sharding.devices.clone(),
            shards: shards.collect(),
        };
        self.put(id, array, made);
        self.sessions.get_mut(&id).expect("a live session").uploads.extend(buffers);
        Ok(())
    }

    fn new_output(&self, kind: Option<&str>, len: i64, devices: &[usize]) -> Output {
        let bytes = if on_device(kind) { len as u64 * ITEM_BYTES } else { 0 };
        Output { bytes, devices: devices.to_vec(), handles: 0, queued: 0 }
    }

    fn assemble(
        &mut self,
        id: SessionId,
        result: Handle,
        n: i64,
        sharding: &Sharding,
        inputs: &[Handle],
        copy: CopySemantics,
    ) -> Resolved<()> {
        let (mut devices, mut shards) = (Vec::new(), Vec::new());
        for &input in inputs {
            let array = self.resolve(id, input)?;
            devices.extend_from_slice(&array.devices);
            shards.extend_from_slice(&array.shards);
        }
        if devices != sharding.devices {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        let made = Array { n, partition: sharding.partition.clone(), kind: sharding.memory_kind.clone(), devices, shards };
        self.put(id, result, made);
        self.delete_if_donated(id, inputs, copy);
        Ok(())
    }

    fn disassemble(&mut self, id: SessionId, array: Handle, results: &[Handle], copy: CopySemantics) -> Resolved<()> {
        let whole = self.resolve(id, array)?;
        if whole.shards.len() != results.len() {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        let parts: Vec<Array> = (0..results.len()).map(|i| whole.shard(i)).collect();
        for (&handle, part) in results.iter().zip(parts) {
            self.put(id, handle, part);
        }
        self.delete_if_donated(id, &[array], copy);
        Ok(())
    }

    fn remap(&mut self, id: SessionId, inputs: &[Handle], results: &[Handle], plan: &RemapPlan, copy: CopySemantics) -> Resolved<()> {
        let arrays: Vec<Array> = inputs.iter().map(|&h| self.resolve(id, h).cloned()).collect::<Result<_, _>>()?;
        let mut made = Vec::new();
        for (output, spec) in (0..).zip(&plan.outputs) {
            let mut places: BTreeMap<i64, (Shard, VirtualDeviceId)> = BTreeMap::new();
            for mapping in plan.mappings.iter().filter(|m| m.output == output) {
                let input = &arrays[mapping.input as usize];
                for (from, to) in mapping.from.iter().zip(&mapping.to) {
                    let shard = from.start as usize;
                    let Some(part) = input.shards.get(shard) else { return Err(Blame::Code(Code::InvalidArgument)) };
                    places.insert(to.start, (part.clone(), input.devices[shard]));
                }
            }
            let (shards, devices): (Vec<Shard>, Vec<VirtualDeviceId>) = places.into_values().unzip();
            if devices != spec.sharding.devices {
                return Err(Blame::Code(Code::InvalidArgument));
            }
            let (partition, kind) = (spec.sharding.partition.clone(), spec.sharding.memory_kind.clone());
            made.push(Array { n: spec.dims[0], partition, kind, devices, shards });
        }
        for (&handle, array) in results.iter().zip(made) {
            self.put(id, handle, array);
        }
        self.delete_if_donated(id, inputs, copy);
        Ok(())
    }

    fn copy_arrays(
        &mut self,
        id: SessionId,
        arrays: &[Handle],
        results: &[Handle],
        devices: &[VirtualDeviceId],
        memory: &MemoryTarget,
        copy: CopySemantics,
    ) -> Ask {
        let mut failed: Option<Blame> = None;
        let mut poisons = Vec::new();
        for (&handle, &result) in arrays.iter().zip(results) {
            let made = match &failed {
                Some(blame) => Err(blame.clone()),
                None => self.copied(id, handle, devices, memory, copy),
            };
            match made {
                Ok(array) => self.put(id, result, array),
                Err(blame) => {
                    poisons.push(result);
                    failed = Some(blame);
                }
            }
            self.delete_if_donated(id, &[handle], copy);
        }
        Ask::of("CopyArrays", failed.map_or(Ok(()), Err)).poisons(poisons)
    }

    fn copied(
        &mut self,
        id: SessionId,
        handle: Handle,
        devices: &[VirtualDeviceId],
        memory: &MemoryTarget,
        copy: CopySemantics,
    ) -> Resolved<Array> {
        let array = self.resolve(id, handle)?.clone();
        let target = if devices.is_empty() { array.devices.clone() } else { devices.to_vec() };
        if target.len() != array.shards.len() {
            return Err(Blame::Code(Code::InvalidArgument));
        }
        let kind = match memory {
            MemoryTarget::Keep => array.kind.clone(),
            MemoryTarget::Default => None,
            MemoryTarget::Kind(kind) => Some(kind.clone()),
        };
        self.copy_to(id, &array, &target, kind, copy == CopySemantics::AlwaysCopy)
    }

    /// An array like `array` elsewhere; a node, unless nothing has to move.
    pub(crate) fn copy_to(
        &mut self,
        id: SessionId,
        array: &Array,
        target: &[VirtualDeviceId],
        kind: Option<String>,
        always: bool,
    ) -> Resolved<Array> {
        let devices = self.devices_of(id, target)?;
        let same_memory = array.kind == kind || (on_device(array.kind.as_deref()) && on_device(kind.as_deref()));
        let mut made = Array { devices: target.to_vec(), kind: kind.clone(), ..array.clone() };
        if same_memory && target == array.devices && !always {
            return Ok(made);
        }
        let wanted: Vec<(Shard, usize)> = array.shards.iter().cloned().zip(devices).collect();
        made.shards = self.relocate(id, &wanted, kind)?;
        Ok(made)
    }

    /// A copy of each shard on a device: one node per pair of workers.
    fn relocate(&mut self, id: SessionId, wanted: &[(Shard, usize)], kind: Option<String>) -> Resolved<Vec<Shard>> {
        let leg_of = |model: &Model, shard: &Shard, device: usize| (model.order.slot_of(shard.device), model.order.slot_of(device));
        let mut legs: Vec<(HostSlot, HostSlot)> = Vec::new();
        for (shard, device) in wanted {
            let leg = leg_of(self, shard, *device);
            if !legs.contains(&leg) {
                self.alive(leg.0)?;
                self.alive(leg.1)?;
                legs.push(leg);
            }
        }
        let physical = kind.clone().unwrap_or_else(|| "device".to_owned());
        let mut placed: Vec<Option<Shard>> = vec![None; wanted.len()];
        for leg in legs {
            let places: Vec<usize> = (0..wanted.len()).filter(|&p| leg_of(self, &wanted[p].0, wanted[p].1) == leg).collect();
            let devices: Vec<usize> = places.iter().map(|&p| wanted[p].1).collect();
            let output = self.new_output(kind.as_deref(), wanted[places[0]].0.len, &devices);
            let mut inputs: Vec<(usize, u32)> = places.iter().map(|&p| (wanted[p].0.node, wanted[p].0.output)).collect();
            inputs.dedup();
            let mut taking_part = devices.clone();
            let work = if leg.0 == leg.1 {
                Work::Copy
            } else {
                taking_part.extend(places.iter().map(|&p| wanted[p].0.device));
                Work::Move { from: leg.0 }
            };
            let node = self.add_node(id, work, inputs, taking_part, vec![output]);
            for (&place, device) in places.iter().zip(devices) {
                let Shard { token, len, .. } = wanted[place].0;
                placed[place] = Some(Shard { node, output: 0, token, len, kind: physical.clone(), device });
            }
        }
        Ok(placed.into_iter().flatten().collect())
    }

    /// Pieces of other workers come into host memory where the first piece is.
    pub(crate) fn gather(&mut self, id: SessionId, plan: &mut Read) {
        let first = plan.devices[0];
        let to = self.order.slot_of(first);
        let far: Vec<usize> = (0..plan.devices.len()).filter(|&p| self.order.slot_of(plan.devices[p]) != to).collect();
        let shard = |p: usize| {
            let ((node, output), token, len) = (plan.shards[p], plan.pieces[p].1, plan.lens[p]);
            (Shard { node, output, token, len, kind: String::new(), device: plan.devices[p] }, first)
        };
        let wanted: Vec<(Shard, usize)> = far.iter().map(|&p| shard(p)).collect();
        let moved = self.relocate(id, &wanted, Some("pinned_host".to_owned())).unwrap_or_default();
        for (&place, shard) in far.iter().zip(&moved) {
            plan.shards[place] = (shard.node, shard.output);
            plan.devices[place] = shard.device;
        }
    }

    fn copy_to_host(&mut self, id: SessionId, handle: Handle, buffer: Handle) -> Ask {
        let array = match self.resolve(id, handle) {
            Ok(array) => array,
            Err(blame) => return Ask::of("CopyToHost", Err(blame)),
        };
        let mut blames: Vec<Blame> = array.shards.iter().map(|s| Blame::Node(s.node)).collect();
        let planned = self.plan_read(array);
        let (may_succeed, then) = match planned {
            Ok(plan) => (true, Then::Fetch { buffer, plan }),
            Err(blame) => {
                blames.push(blame);
                (false, Then::Nothing)
            }
        };
        Ask { at_once: !may_succeed, may_succeed, blames, then, ..Ask::ok("CopyToHost") }
    }

    fn plan_read(&self, array: &Array) -> Resolved<Read> {
        let count = array.shards.len();
        let mut plan = Read::default();
        for (position, shard) in array.shards.iter().enumerate() {
            let start = match (&array.partition, count) {
                (_, 1) | (Partition::Replicated, _) => None,
                (Partition::Tiled(_), _) => tile_start(&array.partition, array.n, count, position),
                _ => return Err(Blame::Code(Code::Unimplemented)),
            };
            if plan.pieces.iter().all(|(s, _)| *s != start) {
                let tiles = if start.is_some() { count as i64 } else { 1 };
                plan.bad |= shard.len * tiles != array.n;
                plan.pieces.push((start, shard.token));
                plan.shards.push((shard.node, shard.output));
                plan.devices.push(shard.device);
                plan.lens.push(shard.len);
            }
        }
        plan.devices.iter().try_for_each(|&d| self.alive(self.order.slot_of(d)))?;
        Ok(plan)
    }
}

impl Array {
    /// Shard `index` as an array of its own.
    pub(crate) fn shard(&self, index: usize) -> Array {
        let shard = self.shards[index].clone();
        Array {
            n: shard.len,
            partition: Partition::Replicated,
            kind: self.kind.clone(),
            devices: vec![self.devices[index]],
            shards: vec![shard],
        }
    }
}

/// The backings of an array, a run of neighbours of one backing once, as the core counts them.
pub(crate) fn backings(array: &Array) -> Vec<(usize, u32)> {
    let mut list: Vec<(usize, u32)> = Vec::new();
    for shard in &array.shards {
        list.push((shard.node, shard.output));
    }
    list.dedup();
    list
}

pub(crate) fn on_device(kind: Option<&str>) -> bool {
    kind.is_none_or(|k| k.is_empty() || k == "device")
}

/// Where the tile of a shard starts; `None` = it is the whole.
fn tile_start(partition: &Partition, n: i64, count: usize, position: usize) -> Option<i64> {
    let Partition::Tiled(tiling) = partition else { return None };
    if count == 1 {
        return None;
    }
    let place = tiling.assignment.iter().position(|&p| p as usize == position).expect("a tiling places every shard");
    Some(place as i64 * (n / count as i64))
}
