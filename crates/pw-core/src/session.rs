//! One client stream: its handles, its devices, its queue of nodes that wait for their grant.
//!
//! Handles exist only here. They are resolved in arrival order; everything behind them is a logical thing.

use std::collections::VecDeque;
use std::sync::Arc;

use pw_types::{ExecutableId, FIRST_SERVER_HANDLE, Handle, OpId, Reply, RunId, SessionOptions, Status, Time, VirtualDeviceId};
use rustc_hash::FxHashMap;

use crate::directory::Entry;
use crate::membership::DeviceKey;

/// A loaded executable as a session names it.
#[derive(Clone)]
pub(crate) struct SessionExecutable {
    pub(crate) id: ExecutableId,
    /// Its devices, in execution order.
    pub(crate) devices: Arc<[VirtualDeviceId]>,
}

pub(crate) enum StatusHandle {
    /// The run goes on and nobody has asked.
    Pending,
    /// The run goes on and this request waits for it.
    Asked(OpId, Reply),
    Done(Result<(), Arc<Status>>),
}

pub(crate) struct Session {
    pub(crate) options: SessionOptions,
    /// Device of each virtual id; empty until the session is open.
    pub(crate) devices: Arc<[DeviceKey]>,
    /// Open once it has its devices; until then the time at which the wait ends.
    pub(crate) opening_until: Option<Time>,
    pub(crate) arrays: FxHashMap<Handle, Entry>,
    pub(crate) executables: FxHashMap<Handle, SessionExecutable>,
    pub(crate) statuses: FxHashMap<Handle, StatusHandle>,
    /// Uploads whose bytes have not arrived: host buffer → the node that takes it.
    pub(crate) uploads: FxHashMap<Handle, RunId>,
    next_handle: u64,
    /// Nodes that wait for their grant, in request order.
    pub(crate) queued: VecDeque<RunId>,
    pub(crate) queued_bytes: u64,
    /// Nodes granted and not finished.
    pub(crate) running: u32,
    pub(crate) paused: bool,
    /// Requests taken out of the inbox since the last turn.
    pub(crate) consumed: u32,
    /// Weighted device time, the order of equal shares. Nanoseconds × 1024 / weight.
    pub(crate) virtual_ns: u64,
    /// What of it is estimates of runs that have not ended.
    pub(crate) unsettled_ns: u64,
    /// Device time charged so far.
    pub(crate) device_ns: u64,
}

impl Session {
    pub(crate) fn new(options: SessionOptions, opening_until: Time) -> Session {
        Session {
            options,
            devices: Arc::from([]),
            opening_until: Some(opening_until),
            arrays: FxHashMap::default(),
            executables: FxHashMap::default(),
            statuses: FxHashMap::default(),
            uploads: FxHashMap::default(),
            next_handle: FIRST_SERVER_HANDLE,
            queued: VecDeque::new(),
            queued_bytes: 0,
            running: 0,
            paused: false,
            consumed: 0,
            virtual_ns: 0,
            unsettled_ns: 0,
            device_ns: 0,
        }
    }

    /// Has something to run, or runs it.
    pub(crate) fn is_busy(&self) -> bool {
        !self.queued.is_empty() || self.running > 0
    }

    /// Weighted device time of what has ended. An estimate may be far off, and must not become anybody's past.
    pub(crate) fn settled_ns(&self) -> u64 {
        self.virtual_ns.saturating_sub(self.unsettled_ns)
    }

    pub(crate) fn server_handle(&mut self) -> Handle {
        self.next_handle += 1;
        Handle(self.next_handle)
    }

    /// Physical device of a virtual one.
    pub(crate) fn device(&self, id: VirtualDeviceId) -> Result<DeviceKey, Status> {
        self.devices
            .get(id.0 as usize)
            .copied()
            .ok_or_else(|| Status::invalid(format!("device {id} does not exist; this session has {} devices", self.devices.len())))
    }

    pub(crate) fn device_keys(&self, ids: &[VirtualDeviceId]) -> Result<Arc<[DeviceKey]>, Status> {
        ids.iter().map(|&id| self.device(id)).collect()
    }

    pub(crate) fn weight(&self) -> u64 {
        u64::from(self.options.weight.max(1))
    }
}

/// A request that is answered later.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) session: pw_types::SessionId,
    pub(crate) op: OpId,
}
