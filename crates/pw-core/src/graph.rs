//! Nodes: one per sharded computation, transfer or host copy; edges are logical buffers.

use std::sync::Arc;

use pw_types::{CopyItem, ExecutableId, Handle, HostSlot, HostWriteSource, Incarnation, OpId, Region, RunId, SessionId, Status, Time};
use smallvec::SmallVec;

use crate::directory::{BackingKey, Piece};
use crate::membership::DeviceKey;
use crate::session::Pending;

/// What a node does once it is granted.
pub(crate) enum Work {
    Launch {
        executable: ExecutableId,
        /// Per argument its pieces, and whether the client gave it away.
        arguments: Vec<(SmallVec<[Piece; 1]>, bool)>,
        launch_id: i32,
    },
    HostWrite {
        /// Per host: its share of the sources.
        hosts: Vec<(HostSlot, Vec<HostWriteSource>)>,
        memory_kind: Option<Arc<str>>,
        shards: u32,
        /// Host buffers to route: handle and bytes.
        buffers: Vec<(Handle, u64)>,
    },
    /// Within one host. Shard `i` of the output is `items[i]`.
    Copy { items: Vec<CopyPlan>, memory_kind: Option<Arc<str>> },
    /// From one host to another. Shard `i` of the output is `items[i]`.
    Move {
        from: HostSlot,
        to: HostSlot,
        items: Vec<CopyPlan>,
        memory_kind: Option<Arc<str>>,
        /// Names of the bytes on their way: `first_key + k` for the k-th shard that is sent. Given with the grant, so
        /// that names and grants are in one order.
        first_key: u64,
    },
    HostRead {
        buffer: Handle,
        dtype: pw_types::DType,
        dims: Arc<[i64]>,
        byte_strides: Option<Vec<i64>>,
        pieces: Vec<(Piece, Option<Region>)>,
    },
}

/// One shard of a copy.
#[derive(Clone, Copy)]
pub(crate) struct CopyPlan {
    pub(crate) source: Piece,
    pub(crate) device: u32,
}

/// The shards that a move sends, each once, with the output shards that it becomes: `(source, outputs)`.
pub(crate) fn sent_once(items: &[CopyPlan]) -> Vec<(Piece, SmallVec<[u32; 4]>)> {
    let mut sent: Vec<(Piece, SmallVec<[u32; 4]>)> = Vec::new();
    let mut places: rustc_hash::FxHashMap<(BackingKey, u32), usize> = rustc_hash::FxHashMap::default();
    for (shard, item) in (0..).zip(items) {
        let place = *places.entry((item.source.backing, item.source.first)).or_insert_with(|| {
            sent.push((item.source, SmallVec::new()));
            sent.len() - 1
        });
        sent[place].1.push(shard);
    }
    sent
}

impl CopyPlan {
    pub(crate) fn item(&self, buffer: pw_types::BufferId) -> CopyItem {
        CopyItem { source: pw_types::ShardId { buffer, shard: self.source.first }, device: self.device }
    }
}

pub(crate) struct Node {
    pub(crate) session: SessionId,
    pub(crate) work: Work,
    /// Backings that it consumes, with one queued reference each until it is granted.
    pub(crate) inputs: SmallVec<[BackingKey; 4]>,
    pub(crate) outputs: SmallVec<[BackingKey; 2]>,
    /// Devices whose time or memory it takes.
    pub(crate) devices: Arc<[DeviceKey]>,
    pub(crate) state: NodeState,
    /// Workers that were lost since it was granted to them. What it takes of their devices went with them.
    pub(crate) lost: SmallVec<[HostSlot; 1]>,
    /// Charged device time at the grant.
    pub(crate) cost_ns: u64,
    /// Workers of a gang that have ended their part, and when.
    pub(crate) ended: SmallVec<[(HostSlot, Time); 1]>,
    /// Measured device time: the longest of its hosts.
    pub(crate) device_ns: u64,
    /// Size of its request, for the session's bound.
    pub(crate) bytes: u32,
    /// The request that is answered by its end.
    pub(crate) answers: Option<OpId>,
    /// The status handle that keeps its result.
    pub(crate) status: Option<Handle>,
    /// Requests that wait for one of its outputs.
    pub(crate) waiters: SmallVec<[WaiterKey; 1]>,
    /// Its result, if decided before the workers report.
    pub(crate) fault: Option<Arc<Status>>,
    /// Why the receiver of a move fails, if it does: its sender is lost.
    pub(crate) reason: Option<Arc<Status>>,
}

pub(crate) enum NodeState {
    Queued,
    Granted {
        /// Hosts that have not reported.
        hosts: SmallVec<[(HostSlot, Incarnation); 1]>,
    },
}

impl Node {
    pub(crate) fn new(session: SessionId, work: Work, devices: Arc<[DeviceKey]>, bytes: u32) -> Node {
        Node {
            session,
            work,
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
            devices,
            state: NodeState::Queued,
            lost: SmallVec::new(),
            cost_ns: 0,
            ended: SmallVec::new(),
            device_ns: 0,
            bytes,
            answers: None,
            status: None,
            waiters: SmallVec::new(),
            fault: None,
            reason: None,
        }
    }

    /// Takes device time, so that windows and shares apply.
    pub(crate) fn is_gang(&self) -> bool {
        matches!(self.work, Work::Launch { .. })
    }
}

slotmap::new_key_type! {
    /// A request that waits for several backings.
    pub(crate) struct WaiterKey;
}

pub(crate) struct Waiter {
    pub(crate) request: Pending,
    /// Runs still going.
    pub(crate) remaining: u32,
}

/// Runs in the order of their ids; a lost host ends several.
pub(crate) fn sorted(mut runs: Vec<RunId>) -> Vec<RunId> {
    runs.sort_unstable();
    runs
}
