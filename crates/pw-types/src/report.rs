//! What a worker tells the controller.

use std::sync::Arc;

use crate::{CompileReport, Description, ExecutableId, HostSlot, RunId, Status};

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Report {
    Compiled {
        executable: ExecutableId,
        result: Result<Arc<CompileReport>, Status>,
    },
    Loaded {
        executable: ExecutableId,
        result: Result<(), Status>,
    },
    /// All local members of a run are done, or it failed; its outputs are then ready or poisoned here.
    Finished {
        run: RunId,
        /// Longest over the local devices of (ready − max(previous ready, launch)); 0 for transfers.
        device_ns: u64,
        result: Result<(), Status>,
    },
    Described {
        query: u64,
        result: Result<Description, Status>,
    },
    DefaultLayout {
        query: u64,
        result: Result<String, Status>,
    },
    /// The worker's own ledger, bytes per device.
    Memory {
        bytes_in_use: Vec<u64>,
    },
    Traffic(Traffic),
    /// A member waits long in a collective of this run for operands of the worker in slot `on`.
    Late {
        run: RunId,
        on: HostSlot,
    },
}

/// Bytes of arrays that a worker has taken and given since it started, by the other end. Host callbacks do not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    pub from_clients: u64,
    /// What was put on offer for them.
    pub to_clients: u64,
    pub from_workers: u64,
    pub to_workers: u64,
}

impl Traffic {
    pub fn sum(&self) -> u64 {
        self.from_clients + self.to_clients + self.from_workers + self.to_workers
    }
}
