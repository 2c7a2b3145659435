//! What our processes say to each other around the commands and reports, in plain Rust.

use bytes::Bytes;
use pw_types::{Command, CompileReport, Event, HostSlot, Incarnation, Report, Status, StatusReport, Time, WorkerInfo};

/// First message of whoever dials the controller.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one per connection")]
pub enum Hello {
    /// A worker wants in.
    Worker {
        build: String,
        token: String,
        incarnation: Incarnation,
        wanted_slot: Option<HostSlot>,
        info: WorkerInfo,
        /// It was here before, its connection broke, and it has taken so many frames: the stream goes on behind them.
        resumes: Option<u64>,
    },
    /// Somebody wants one snapshot.
    Status { build: String, token: String },
}

/// What the controller answers to a [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// `received`: frames taken from this worker so far.
    Welcome {
        slot: HostSlot,
        incarnation: Incarnation,
        received: u64,
    },
    Refused {
        status: Status,
    },
    Status {
        report: StatusReport,
    },
}

/// Commands of one turn. An empty one with the last `seq` is a heartbeat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControllerFrame {
    pub seq: u64,
    /// The last frame taken from the worker.
    pub ack: u64,
    pub incarnation: Incarnation,
    pub commands: Vec<Command>,
}

/// Reports of one turn. An empty one with the last `seq` is a heartbeat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerFrame {
    pub seq: u64,
    /// The last frame taken from the controller.
    pub ack: u64,
    pub incarnation: Incarnation,
    pub reports: Vec<Report>,
}

/// One entry of the event log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogRecord {
    pub time: Time,
    pub event: Event,
    /// At the end of a turn: digest of the effects of that turn.
    pub effects_digest: Option<u64>,
}

/// A worker asks its compile child.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileChildRequest {
    pub id: u64,
    pub program: Bytes,
    pub options: Bytes,
    /// Local devices in execution order: for each replica, for each partition.
    pub devices: Vec<u32>,
    pub replicas: u32,
    pub partitions: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileChildResponse {
    pub id: u64,
    pub result: Result<CompiledProgram, Status>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompiledProgram {
    pub report: CompileReport,
    /// Path of the serialized executable, or its key in the cache.
    pub blob: String,
}
