//! What a client is answered. One variant per kind of response, so that the edge needs no memory of the request.

use std::sync::Arc;

use bytes::Bytes;

use crate::{CompileReport, DType, Dims, Handle, OpId, SessionId, Status, VirtualDeviceId};

/// The body of a response. An error has no body (protocol fact).
#[derive(Clone, PartialEq, Debug)]
pub enum Reply {
    CheckFuture,
    CheckValueReady,
    MakeArray(Handle),
    MakeArraysFromShards(Vec<Handle>),
    Assemble(Handle),
    Disassemble(Vec<Handle>),
    FullyReplicatedShard(Handle),
    CopyToHost,
    CopyArrays(Vec<Handle>),
    RemapArrays(Vec<Handle>),
    MakeErrorArrays(Vec<Handle>),
    BitcastArrays(Vec<Handle>),
    /// The future of the deletion.
    DeleteArrays(Handle),
    IsArrayDeleted(bool),
    DestructArrays,
    Compile(CompileReply),
    ExecutableMetadata(Arc<CompileReport>),
    Execute(ExecuteReply),
    FetchExecuteResult,
    DestructExecutable,
    /// The failure stands inside the body: a client whose cost analysis fails without one raises an error about its own internals
    /// (protocol fact).
    Described {
        question: crate::Question,
        result: Result<crate::Description, Status>,
    },
    /// XLA layout text such as `{1,0}`.
    DefaultLayout(String),
    /// `replicas × partitions` device ids, for each replica, for each partition.
    DefaultDeviceAssignment {
        replicas: u32,
        partitions: u32,
        devices: Vec<VirtualDeviceId>,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileReply {
    pub executable: Handle,
    pub name: String,
    pub devices: Vec<VirtualDeviceId>,
    pub fingerprint: Bytes,
}

/// Answer to an Execute. `outputs` is empty unless the client named no result handles.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecuteReply {
    /// 0 unless the request asked for a status (protocol fact: anything else aborts the client).
    pub status: Handle,
    pub outputs: Vec<ExecuteOutput>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecuteOutput {
    pub array: Handle,
    pub dtype: DType,
    /// Global dimensions.
    pub dims: Dims,
    /// Serialized `xla.OpSharding`; `None` = one device.
    pub op_sharding: Option<Bytes>,
    pub devices: Arc<[VirtualDeviceId]>,
    pub memory_kind: String,
}

/// What the core tells the edge. Encodable: the edge may run in another process.
#[derive(Clone, PartialEq, Debug)]
pub enum ToEdge {
    SessionReady(crate::SessionView),
    SessionRefused {
        session: SessionId,
        status: Status,
    },
    Reply {
        session: SessionId,
        op: OpId,
        result: Result<Reply, Status>,
    },
    /// So many requests of this session have been taken out of the inbox.
    Consumed {
        session: SessionId,
        count: u32,
    },
    /// Stop, or go on, reading requests of this session: its bound is reached (invariant A8).
    Pause {
        session: SessionId,
        paused: bool,
    },
    /// Send this host buffer to these workers and forget it.
    Route {
        session: SessionId,
        buffer: Handle,
        bytes: u64,
        hosts: Vec<crate::HostSlot>,
    },
    /// Nobody will ask for this host buffer.
    Discard {
        session: SessionId,
        buffer: Handle,
    },
    /// End the session; outstanding requests have been answered.
    CloseSession {
        session: SessionId,
        status: Status,
    },
    WorkerUp {
        slot: crate::HostSlot,
        incarnation: crate::Incarnation,
        data_address: String,
    },
    WorkerDown {
        slot: crate::HostSlot,
        incarnation: crate::Incarnation,
    },
}
