//! Identifiers. Three device ids are three types, so that they cannot be mixed up (DESIGN section 3).

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($inner:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $inner);
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { self.0.fmt(f) }
        }
    )*};
}

ids! {
    /// One client stream and its handles: a random number made by the edge. Workers have such names where they send to
    /// other workers.
    SessionId(u64);
    /// A client's name of an array, executable, future or host buffer. 0 is "none".
    Handle(u64);
    /// The client's number of a request inside its session.
    OpId(u64);
    /// A device as one session sees it: dense from 0 per session.
    VirtualDeviceId(u32);
    /// The place of a worker in the cluster; stable over restarts of the worker.
    HostSlot(u32);
    /// One life of a worker: a new number at every start.
    Incarnation(u64);
    /// One invocation of a sharded computation, transfer or host copy: one node of the graph.
    RunId(u64);
    /// An entry of the compile table: one program compiled for one list of physical devices.
    ExecutableId(u64);
    /// The place of a node in the one total order of grants (invariant A4). 0 is "before the first".
    GrantSeq(u64);
    /// A device number as the plugin of one worker knows it.
    PjrtDeviceId(i32);
}

/// A device of the cluster: which worker, and the position in that worker's device list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PhysicalDeviceId {
    pub slot: HostSlot,
    pub index: u32,
}

impl std::fmt::Display for PhysicalDeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "worker {} device {}", self.slot, self.index)
    }
}

/// A backing in the workers' object stores. It follows from the run by rule, so that one message can name
/// the outputs of work that has not started.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferId {
    pub run: RunId,
    pub output: u32,
}

impl std::fmt::Display for BufferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.run, self.output)
    }
}

/// One device's part of a backing. Shard `i` lives on the `i`-th device of the node that made it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ShardId {
    pub buffer: BufferId,
    pub shard: u32,
}

/// Handles at or above this number are made by the server, below it by the client (protocol fact).
pub const FIRST_SERVER_HANDLE: u64 = 1 << 48;

/// On the data plane, names at or above this number are calls of host callbacks, below it host buffers.
pub const FIRST_CALL_HANDLE: u64 = 1 << 63;

/// Set in the names that workers have on the data planes of others, clear in the ids of client sessions.
const WORKER_BIT: u64 = 1 << 63;

impl SessionId {
    /// What a life of a worker is called where it sends to other workers.
    pub fn of_worker(incarnation: Incarnation) -> SessionId {
        SessionId(incarnation.0 | WORKER_BIT)
    }

    /// The id of a client session, out of a random number.
    pub fn of_client(random: u64) -> SessionId {
        SessionId(random & !WORKER_BIT)
    }

    pub fn is_worker(self) -> bool {
        self.0 & WORKER_BIT != 0
    }
}
