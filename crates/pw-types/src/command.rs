//! What the controller orders a worker to do. Commands of one worker form one sequence, a subsequence of the
//! grant order (invariant A4); device indices are positions in the worker's own device list.

use bytes::Bytes;

use crate::{BufferId, DType, Dims, ExecutableId, GrantSeq, Handle, HostSlot, Incarnation, Question, RunId, SessionId, ShardId, Status};

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Compile in the child process, store in the cache, report. Does not load.
    Compile(CompileCommand),
    /// Load a compiled program from the cache into the serving process.
    Load {
        executable: ExecutableId,
        fingerprint: Bytes,
        /// For a program over several workers.
        gang: Option<GangPart>,
    },
    /// Forget a loaded program once its last launch is done.
    Unload {
        executable: ExecutableId,
    },
    Launch(Launch),
    Copy(CopyShards),
    HostWrite(HostWrite),
    HostRead(HostRead),
    Send(SendShards),
    /// Drop these backings behind their last use.
    Free {
        buffers: Vec<BufferId>,
    },
    /// Members of these runs that have not started are skipped; they, and whatever would use what they make, fail with
    /// this status.
    Cancel {
        runs: Vec<RunId>,
        status: Status,
    },
    /// Ask for more about a compiled program than its report says.
    Describe {
        query: u64,
        fingerprint: Bytes,
        question: Question,
    },
    /// Ask the plugin for the layout it gives an array of this shape.
    DefaultLayout {
        query: u64,
        dtype: DType,
        dims: Dims,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileCommand {
    pub executable: ExecutableId,
    pub program: Bytes,
    pub options: Bytes,
    /// Execution order: for each replica, for each partition. Empty for a program over several workers, which is
    /// compiled for members, not for devices.
    pub devices: Vec<u32>,
    pub replicas: u32,
    pub partitions: u32,
}

/// One worker's part of a program over several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GangPart {
    /// Members in all.
    pub members: u32,
    /// Those of this worker, in ascending order.
    pub here: Vec<GangMember>,
    /// The other workers.
    pub others: Vec<GangPeer>,
}

/// A member of a program, and the device of this worker that it runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GangMember {
    pub member: u32,
    pub device: u32,
}

/// Another worker of a gang.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GangPeer {
    pub slot: HostSlot,
    pub incarnation: Incarnation,
    /// Where it takes the operands of collectives, `HOST:PORT`.
    pub address: String,
    /// Its members, in ascending order.
    pub members: Vec<u32>,
}

/// Order of a command that is a node of the graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeOrder {
    pub run: RunId,
    pub seq: GrantSeq,
    /// The node before it on this host; the chain is checked.
    pub previous: GrantSeq,
    pub session: SessionId,
}

/// One sharded computation, as far as it runs on this worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launch {
    pub order: NodeOrder,
    pub executable: ExecutableId,
    pub arguments: Vec<Argument>,
    pub launch_id: i32,
}

/// One argument: the shards of this worker's members, in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Argument {
    pub segments: Vec<Segment>,
    /// Nobody else owns the backing: the plugin may reuse it.
    pub donate: bool,
}

/// Shards `first .. first + count` of a backing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Segment {
    pub buffer: BufferId,
    pub first: u32,
    pub count: u32,
}

/// Copies shards between local devices or memory kinds. Shard `i` of output 0 is `items[i]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyShards {
    pub order: NodeOrder,
    pub items: Vec<CopyItem>,
    /// `None` = the device's default memory.
    pub memory_kind: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyItem {
    pub source: ShardId,
    pub device: u32,
}

/// Makes device buffers out of host bytes that come over the data plane. Shard `i` of output 0 is the target
/// with `shard == i`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostWrite {
    pub order: NodeOrder,
    /// Whose host buffers the sources are: the client's session, or the sender's name in a move between workers.
    pub sender: SessionId,
    pub sources: Vec<HostWriteSource>,
    pub memory_kind: Option<String>,
    /// Number of shards of the output.
    pub shards: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostWriteSource {
    /// Key of the bytes on the data plane, together with the sender.
    pub buffer: Handle,
    pub dtype: DType,
    pub dims: Dims,
    pub byte_strides: Option<Vec<i64>>,
    pub targets: Vec<HostWriteTarget>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostWriteTarget {
    pub shard: u32,
    pub device: u32,
    /// The part of the source that this device gets; `None` = all of it.
    pub region: Option<Region>,
}

/// A box inside an array.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    pub start: Dims,
    pub dims: Dims,
}

/// Sends an array's bytes to the edge under (session, `buffer`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostRead {
    pub order: NodeOrder,
    pub buffer: Handle,
    pub dtype: DType,
    /// Dimensions of the whole.
    pub dims: Dims,
    pub byte_strides: Option<Vec<i64>>,
    pub pieces: Vec<HostReadPiece>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostReadPiece {
    pub source: ShardId,
    /// Where it lies in the whole; `None` = it is the whole.
    pub region: Option<Region>,
}

/// Sends shards to another worker, where a [`HostWrite`] of the same run awaits them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendShards {
    pub order: NodeOrder,
    /// The data plane of the other worker, `HOST:PORT`.
    pub address: String,
    /// Which life of it: a later one may have the same address.
    pub receiver: Incarnation,
    /// This worker's name there: see [`HostWrite::sender`].
    pub sender: SessionId,
    pub items: Vec<SendItem>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendItem {
    pub source: ShardId,
    /// Key of the bytes on the data plane, together with the sender.
    pub buffer: Handle,
}

impl Command {
    /// The order of commands that are nodes; `None` for the others.
    pub fn order(&self) -> Option<NodeOrder> {
        match self {
            Command::Launch(c) => Some(c.order),
            Command::Copy(c) => Some(c.order),
            Command::HostWrite(c) => Some(c.order),
            Command::HostRead(c) => Some(c.order),
            Command::Send(c) => Some(c.order),
            _ => None,
        }
    }
}
