//! The compile table: one entry per (program, options, physical devices), shared by all sessions.

use std::sync::Arc;

use bytes::Bytes;
use pw_types::{CompileReport, DType, ExecutableId, HostSlot, Incarnation, Partition, Status};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::directory::device_bytes;
use crate::membership::DeviceKey;
use crate::session::Pending;

/// Unused executables that stay loaded, so that a client that comes back finds them.
const IDLE_MAX: usize = 128;

#[derive(PartialEq, Eq, Hash, Clone)]
pub(crate) struct CompileKey {
    pub(crate) program: Bytes,
    pub(crate) options: Bytes,
    pub(crate) devices: Arc<[DeviceKey]>,
}

pub(crate) enum ExecutableState {
    /// Requests to answer when the report comes, with the client's device list.
    Compiling(SmallVec<[(Pending, Arc<[pw_types::VirtualDeviceId]>); 1]>),
    Loading,
    Loaded,
    Failed(Arc<Status>),
    /// Its worker is lost. It is loaded again when the worker comes back.
    Lost(Arc<Status>),
}

/// What an Execute needs of one output, worked out once.
pub(crate) struct OutputPlan {
    pub(crate) dtype: DType,
    pub(crate) dims: Arc<[i64]>,
    pub(crate) shard_dims: Arc<[i64]>,
    pub(crate) partition: Arc<Partition>,
    pub(crate) memory_kind: Option<Arc<str>>,
    pub(crate) ledger_bytes: u64,
}

/// A worker that has members of an executable.
#[derive(Clone, Copy)]
pub(crate) struct Home {
    pub(crate) slot: HostSlot,
    pub(crate) incarnation: Incarnation,
    /// It has compiled or loaded it, whichever goes on.
    pub(crate) done: bool,
}

pub(crate) struct Executable {
    pub(crate) key: CompileKey,
    /// In the order in which the devices name them.
    pub(crate) homes: SmallVec<[Home; 1]>,
    pub(crate) state: ExecutableState,
    pub(crate) report: Option<Arc<CompileReport>>,
    pub(crate) outputs: Arc<[OutputPlan]>,
    pub(crate) label: Arc<str>,
    /// Handles of sessions and nodes that are not granted.
    pub(crate) refs: u32,
    /// Expected device time of one run.
    pub(crate) estimate_ns: u64,
    /// A run has been measured.
    pub(crate) measured: bool,
    /// It is being loaded by a new life of its worker, which may not have it in its cache.
    pub(crate) again: bool,
}

impl Executable {
    /// A worker has done its part of what goes on; whether all have.
    pub(crate) fn done(&mut self, slot: HostSlot) -> bool {
        self.homes.iter_mut().filter(|h| h.slot == slot).for_each(|h| h.done = true);
        self.homes.iter().all(|h| h.done)
    }

    /// Something begins that all homes take part in.
    pub(crate) fn begin(&mut self, state: ExecutableState) {
        self.homes.iter_mut().for_each(|h| h.done = false);
        self.state = state;
    }

    /// Folds a measured run into the estimate.
    pub(crate) fn measure(&mut self, device_ns: u64) {
        self.estimate_ns = if self.measured { (self.estimate_ns * 3 + device_ns) / 4 } else { device_ns };
        self.measured = true;
    }
}

#[derive(Default)]
pub(crate) struct Executables {
    by_key: FxHashMap<CompileKey, ExecutableId>,
    entries: FxHashMap<ExecutableId, Executable>,
    /// Without references, longest unused first.
    idle: Vec<ExecutableId>,
    next: u64,
}

impl Executables {
    pub(crate) fn find(&self, key: &CompileKey) -> Option<ExecutableId> {
        self.by_key.get(key).copied()
    }

    pub(crate) fn get(&self, id: ExecutableId) -> Option<&Executable> {
        self.entries.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: ExecutableId) -> Option<&mut Executable> {
        self.entries.get_mut(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn insert(&mut self, key: CompileKey, homes: SmallVec<[Home; 1]>, unknown_estimate_ns: u64) -> ExecutableId {
        self.next += 1;
        let id = ExecutableId(self.next);
        self.by_key.insert(key.clone(), id);
        let entry = Executable {
            key,
            homes,
            state: ExecutableState::Compiling(SmallVec::new()),
            report: None,
            outputs: Arc::from([]),
            label: Arc::from("program"),
            refs: 0,
            estimate_ns: unknown_estimate_ns,
            measured: false,
            again: false,
        };
        self.entries.insert(id, entry);
        id
    }

    /// Takes the report of a compile and works out what an Execute will need.
    pub(crate) fn compiled(&mut self, id: ExecutableId, report: Arc<CompileReport>, default_memory_kind: &str) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.label = Arc::from(report.name.as_str());
        entry.outputs = report
            .outputs
            .iter()
            .map(|o| {
                let on_device = o.memory_kind.is_empty() || o.memory_kind == default_memory_kind;
                let partition = match &o.op_sharding {
                    _ if o.shard_dims == o.dims => Partition::Replicated,
                    _ => Partition::Even { shard_dims: o.shard_dims.clone() },
                };
                OutputPlan {
                    dtype: o.dtype,
                    dims: Arc::from(o.dims.as_slice()),
                    shard_dims: Arc::from(o.shard_dims.as_slice()),
                    partition: Arc::new(partition),
                    memory_kind: (!o.memory_kind.is_empty()).then(|| Arc::from(o.memory_kind.as_str())),
                    ledger_bytes: if on_device { device_bytes(o.dtype, &o.shard_dims).unwrap_or(0) } else { 0 },
                }
            })
            .collect();
        entry.report = Some(report);
        entry.begin(ExecutableState::Loading);
    }

    pub(crate) fn retain(&mut self, id: ExecutableId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            if entry.refs == 0 {
                self.idle.retain(|&i| i != id);
            }
            entry.refs += 1;
        }
    }

    /// Drops a reference. Returns an executable to unload when too many are idle, and forgets it.
    pub(crate) fn release(&mut self, id: ExecutableId) -> Option<(ExecutableId, SmallVec<[Home; 1]>)> {
        let entry = self.entries.get_mut(&id)?;
        entry.refs -= 1;
        if entry.refs > 0 {
            return None;
        }
        if matches!(entry.state, ExecutableState::Failed(_) | ExecutableState::Lost(_)) {
            // Other homes may have it.
            let homes = entry.homes.clone();
            self.forget(id);
            return (homes.len() > 1).then_some((id, homes));
        }
        self.idle.push(id);
        if self.idle.len() <= IDLE_MAX {
            return None;
        }
        let oldest = self.idle.remove(0);
        let homes = self.entries.get(&oldest).map(|e| e.homes.clone())?;
        self.forget(oldest);
        Some((oldest, homes))
    }

    /// A failed compile is tried again by the next request for it.
    pub(crate) fn forget_key(&mut self, id: ExecutableId) {
        if let Some(entry) = self.entries.get(&id)
            && self.by_key.get(&entry.key) == Some(&id)
        {
            self.by_key.remove(&entry.key);
        }
    }

    pub(crate) fn forget(&mut self, id: ExecutableId) {
        self.forget_key(id);
        self.entries.remove(&id);
        self.idle.retain(|&i| i != id);
    }

    /// Executables on a host, in order of their ids.
    pub(crate) fn on_host(&self, slot: HostSlot) -> Vec<ExecutableId> {
        let mut ids: Vec<ExecutableId> =
            self.entries.iter().filter(|(_, e)| e.homes.iter().any(|h| h.slot == slot)).map(|(&id, _)| id).collect();
        ids.sort_unstable();
        ids
    }
}
