//! Arrays made of host bytes: the core sees shapes and handles, the edge and the workers move the bytes.

use std::sync::Arc;

use pw_types::{
    ArraySpec, BufferId, Handle, HostSlot, HostSource, HostWriteSource, HostWriteTarget, Reply, ShardedUpload, Status, ToEdge, UploadShard,
};
use smallvec::{SmallVec, smallvec};

use crate::directory::{Array, Backing, BackingState, Entry, Piece, device_bytes};
use crate::graph::{Node, Work};
use crate::session::Pending;
use crate::{Core, Effects};

impl Core {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn make_array(&mut self, at: Pending, bytes: u32, array: Handle, spec: ArraySpec, source: HostSource, fx: &mut Effects) {
        let buffer = source.buffer;
        if source.dims != spec.dims || source.dtype != spec.dtype {
            let text = format!(
                "a host buffer of {} cannot fill an array of {}",
                pw_types::dtype::describe(source.dtype, &source.dims),
                pw_types::dtype::describe(spec.dtype, &spec.dims)
            );
            fx.edge(ToEdge::Discard { session: at.session, buffer });
            return self.fail(at, &[array], Arc::new(Status::invalid(text)), fx);
        }
        let regions: Result<Vec<_>, _> = (0..spec.sharding.devices.len()).map(|p| pw_plan::shard_region(&spec, p)).collect();
        let made = regions.map_err(|e| Status::invalid(e.to_string())).and_then(|regions| {
            let targets = regions.into_iter().enumerate().map(|(p, region)| (p as u32, region)).collect();
            self.upload(at, bytes, array, &spec, vec![(source, targets)])
        });
        match made {
            Ok(()) => self.answer(at, Ok(Reply::MakeArray(array)), fx),
            Err(status) => {
                fx.edge(ToEdge::Discard { session: at.session, buffer });
                self.fail(at, &[array], Arc::new(status), fx)
            }
        }
    }

    pub(crate) fn make_arrays_from_shards(&mut self, at: Pending, bytes: u32, arrays: Vec<ShardedUpload>, fx: &mut Effects) {
        let handles: Vec<Handle> = arrays.iter().map(|a| a.array).collect();
        let mut failed: Option<Arc<Status>> = None;
        let share = bytes / (arrays.len().max(1) as u32);
        for upload in arrays {
            let buffers: Vec<Handle> = upload.shards.iter().map(|s| s.source.buffer).collect();
            let array = upload.array;
            let made = match &failed {
                Some(status) => Err(status.clone()),
                None => self.make_from_shards(at, share, upload).map_err(Arc::new),
            };
            if let Err(status) = made {
                for buffer in buffers {
                    fx.edge(ToEdge::Discard { session: at.session, buffer });
                }
                self.poison_results(at.session, &[array], &status, fx);
                failed = Some(status);
            }
        }
        let result = match failed {
            None => Ok(Reply::MakeArraysFromShards(handles)),
            Some(status) => Err((*status).clone()),
        };
        self.answer(at, result, fx)
    }

    fn make_from_shards(&mut self, at: Pending, bytes: u32, upload: ShardedUpload) -> Result<(), Status> {
        let spec = &upload.spec;
        let count = spec.sharding.devices.len();
        let mut filled = vec![false; count];
        let mut sources = Vec::with_capacity(upload.shards.len());
        for UploadShard { source, positions } in upload.shards {
            if source.dtype != spec.dtype {
                return Err(Status::invalid(format!("a shard of {:?} in an array of {:?}", source.dtype, spec.dtype)));
            }
            let mut targets = Vec::with_capacity(positions.len());
            for position in positions {
                match filled.get_mut(position as usize) {
                    Some(seen @ false) => *seen = true,
                    Some(true) => return Err(Status::invalid(format!("shard {position} is given twice"))),
                    None => return Err(Status::invalid(format!("shard {position} of an array of {count} shards"))),
                }
                targets.push((position, None));
            }
            sources.push((source, targets));
        }
        if let Some(missing) = filled.iter().position(|f| !f) {
            return Err(Status::invalid(format!("no host buffer for shard {missing} of {count}")));
        }
        self.upload(at, bytes, upload.array, &upload.spec.clone(), sources)
    }

    /// Makes the node and the array. `sources` = host buffers with, per shard that takes it, the part it takes.
    #[allow(clippy::type_complexity)]
    fn upload(
        &mut self,
        at: Pending,
        bytes: u32,
        array: Handle,
        spec: &ArraySpec,
        sources: Vec<(HostSource, Vec<(u32, Option<pw_types::Region>)>)>,
    ) -> Result<(), Status> {
        let session = &self.sessions[&at.session];
        let devices = session.device_keys(&spec.sharding.devices)?;
        if devices.is_empty() {
            return Err(Status::invalid("an array must have at least one device"));
        }
        if array.0 == 0 || session.arrays.contains_key(&array) {
            return Err(Status::invalid(format!("array handle {array} is not free")));
        }
        // Token-like uploads come with shapes that their sharding does not fit: the host buffer says what a shard is.
        let shard_dims = match sources.first() {
            Some((source, targets)) => match targets.first() {
                Some((_, Some(region))) => region.dims.clone(),
                _ => source.dims.clone(),
            },
            None => return Err(Status::invalid("an array without host buffers")),
        };
        let shard_bytes =
            device_bytes(spec.dtype, &shard_dims).ok_or_else(|| Status::invalid(format!("impossible shape {shard_dims:?}")))?;
        let mut hosts: Vec<(HostSlot, Vec<HostWriteSource>)> = Vec::new();
        let mut buffers = Vec::with_capacity(sources.len());
        for (source, targets) in sources {
            if session.uploads.contains_key(&source.buffer) {
                return Err(Status::invalid(format!("host buffer {} is already used by another array", source.buffer)));
            }
            let size = minimal_bytes(&source)?;
            buffers.push((source.buffer, size));
            for (shard, region) in targets {
                let device = devices[shard as usize];
                let slot = self.members.slot_of(device);
                self.alive_worker(slot)?;
                let at = match hosts.iter().position(|(s, _)| *s == slot) {
                    Some(at) => at,
                    None => {
                        hosts.push((slot, Vec::new()));
                        hosts.len() - 1
                    }
                };
                let list = &mut hosts[at].1;
                if list.last().is_none_or(|s| s.buffer != source.buffer) {
                    list.push(HostWriteSource {
                        buffer: source.buffer,
                        dtype: source.dtype,
                        dims: source.dims.clone(),
                        byte_strides: source.byte_strides.clone(),
                        targets: Vec::new(),
                    });
                }
                let target = HostWriteTarget { shard, device: self.members.index_of(device), region };
                list.last_mut().expect("just pushed").targets.push(target);
            }
        }
        let memory_kind: Option<Arc<str>> = spec.sharding.memory_kind.as_deref().map(Arc::from);
        let on_device = self.is_device_memory(memory_kind.as_deref(), devices[0]);
        let run = self.peek_run();
        let backing = self.directory.backings.insert(Backing {
            id: BufferId { run, output: 0 },
            state: BackingState::Promised,
            granted: false,
            handle_refs: 1,
            queued_refs: 0,
            owner: at.session,
            label: Arc::from("upload"),
            dtype: spec.dtype,
            shard_dims: Arc::from(shard_dims),
            devices: devices.clone(),
            hosts: SmallVec::new(),
            failed: SmallVec::new(),
            ledger_bytes: if on_device { shard_bytes } else { 0 },
            counted: false,
        });
        let shards = devices.len() as u32;
        let work = Work::HostWrite { hosts, memory_kind: memory_kind.clone(), shards, buffers: buffers.clone() };
        let mut node = Node::new(at.session, work, devices, bytes);
        node.outputs = smallvec![backing];
        self.enqueue(node);
        let session = self.sessions.get_mut(&at.session).expect("the request's session");
        for (buffer, _) in buffers {
            session.uploads.insert(buffer, run);
        }
        let made = Array {
            dtype: spec.dtype,
            dims: Arc::from(spec.dims.as_slice()),
            partition: Arc::new(spec.sharding.partition.clone()),
            memory_kind,
            devices: Arc::from(spec.sharding.devices.as_slice()),
            pieces: smallvec![Piece { backing, first: 0, count: shards }],
        };
        session.arrays.insert(array, Entry::Array(made));
        Ok(())
    }

    /// Whether the ledger counts this memory kind on this device.
    pub(crate) fn is_device_memory(&self, kind: Option<&str>, device: u32) -> bool {
        let physical = self.members.devices[device as usize].physical;
        let info = &self.members.workers[physical.slot.0 as usize].info.devices[physical.index as usize];
        kind.is_none_or(|k| k.is_empty() || k == info.default_memory_kind)
    }
}

/// Bytes that the client sends for a source: from the first element to the end of the last one.
fn minimal_bytes(source: &HostSource) -> Result<u64, Status> {
    let item = source.dtype.host_bytes();
    let bad = || Status::invalid(format!("host buffer {} has an impossible shape {:?}", source.buffer, source.dims));
    let dense = pw_types::dtype::host_bytes(source.dtype, &source.dims).ok_or_else(bad)?;
    let Some(strides) = &source.byte_strides else { return Ok(dense) };
    if strides.len() != source.dims.len() {
        return Err(Status::invalid(format!("{} strides for {} dimensions", strides.len(), source.dims.len())));
    }
    if dense == 0 {
        return Ok(0);
    }
    let mut last = 0u64;
    for (&dim, &stride) in source.dims.iter().zip(strides) {
        if dim > 1 {
            let stride = u64::try_from(stride).map_err(|_| Status::invalid("negative byte strides are not supported"))?;
            last = (dim as u64 - 1).checked_mul(stride).and_then(|n| last.checked_add(n)).ok_or_else(bad)?;
        }
    }
    last.checked_add(item).ok_or_else(bad)
}
