//! What a client asks: one variant per request that has a meaning for the core.

use bytes::Bytes;

use crate::{ArraySpec, CopySemantics, DType, Dims, Handle, Sharding, VirtualDeviceId};

/// One request of a session, decoded. Result handles are chosen by the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    CheckFuture {
        future: Handle,
    },
    CheckValueReady {
        values: Vec<Handle>,
    },
    MakeArray {
        array: Handle,
        spec: ArraySpec,
        source: HostSource,
    },
    MakeArraysFromShards {
        arrays: Vec<ShardedUpload>,
    },
    Assemble {
        array: Handle,
        dtype: Option<DType>,
        dims: Dims,
        sharding: Sharding,
        inputs: Vec<Handle>,
        copy: CopySemantics,
    },
    Disassemble {
        array: Handle,
        results: Vec<Handle>,
        copy: CopySemantics,
    },
    FullyReplicatedShard {
        array: Handle,
        result: Handle,
        copy: CopySemantics,
    },
    /// Put the bytes of the global array under `host_buffer`.
    CopyToHost {
        array: Handle,
        host_buffer: Handle,
        byte_strides: Option<Vec<i64>>,
    },
    /// Shard `i` of each array moves to `devices[i]`; no devices = stay.
    CopyArrays {
        arrays: Vec<Handle>,
        results: Vec<Handle>,
        devices: Vec<VirtualDeviceId>,
        memory: MemoryTarget,
        copy: CopySemantics,
    },
    RemapArrays {
        arrays: Vec<Handle>,
        results: Vec<Handle>,
        plan: RemapPlan,
        copy: CopySemantics,
    },
    /// Arrays that carry `status`.
    MakeErrorArrays {
        arrays: Vec<Handle>,
        status: crate::Status,
    },
    /// The same bytes seen as arrays of other specs.
    BitcastArrays {
        arrays: Vec<Handle>,
        results: Vec<Handle>,
        specs: Vec<ArraySpec>,
        copy: CopySemantics,
    },
    DeleteArrays {
        arrays: Vec<Handle>,
    },
    IsArrayDeleted {
        array: Handle,
    },
    DestructArrays {
        arrays: Vec<Handle>,
    },
    Compile(CompileRequest),
    ExecutableMetadata {
        executable: Handle,
    },
    Execute(ExecuteRequest),
    FetchExecuteResult {
        status: Handle,
    },
    /// Answered by a worker that has the program.
    Describe {
        executable: Handle,
        question: crate::Question,
    },
    DestructExecutable {
        executable: Handle,
    },
    DefaultLayout {
        dtype: DType,
        dims: Dims,
        device: VirtualDeviceId,
        memory_kind: String,
    },
    DefaultDeviceAssignment {
        replicas: u32,
        partitions: u32,
    },
    /// A request that this build does not serve, or that could not be decoded: answers with `status`, and
    /// `results` become arrays poisoned with it. `consumes` are host buffers to throw away.
    Refused {
        status: crate::Status,
        results: Vec<Handle>,
        consumes: Vec<Handle>,
    },
}

/// Bytes that the client sends by a host-buffer stream under `buffer`, as they lie there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostSource {
    pub buffer: Handle,
    pub dtype: DType,
    pub dims: Dims,
    /// `None` = dense row-major. Strides of dimensions of size 1 mean nothing.
    pub byte_strides: Option<Vec<i64>>,
}

/// One array made of several host buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardedUpload {
    pub array: Handle,
    pub spec: ArraySpec,
    pub shards: Vec<UploadShard>,
}

/// One host buffer and the positions in the device list that receive it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UploadShard {
    pub source: HostSource,
    pub positions: Vec<u32>,
}

/// The memory a copy goes to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MemoryTarget {
    Keep,
    Default,
    Kind(String),
}

/// Shard relabelling without data motion.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemapPlan {
    pub outputs: Vec<ArraySpec>,
    pub mappings: Vec<RemapMapping>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemapMapping {
    pub input: u32,
    pub output: u32,
    /// Interval `k` maps shards `from[k]` of the input to shards `to[k]` of the output.
    pub from: Vec<Interval>,
    pub to: Vec<Interval>,
}

/// `start, start + step, …` below `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    pub start: i64,
    pub end: i64,
    pub step: i64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileRequest {
    /// StableHLO portable artifact, opaque to the core.
    pub program: Bytes,
    /// `xla.CompileOptionsProto` as the client sent it, opaque to the core; the worker rewrites and cleans it.
    pub options: Bytes,
    /// Device assignment in execution order: for each replica, for each partition.
    pub devices: Vec<VirtualDeviceId>,
    pub replicas: u32,
    pub partitions: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecuteRequest {
    pub executable: Handle,
    pub arguments: Vec<Handle>,
    /// Empty at the first run of an executable: the answer then carries handles made by the server.
    pub results: Vec<Handle>,
    /// Asked for when `fill_status`; 0 = the server makes one.
    pub status: Handle,
    pub fill_status: bool,
    pub launch_id: i32,
    pub non_donatable: Vec<u32>,
}
