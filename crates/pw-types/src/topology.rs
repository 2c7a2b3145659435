//! Workers, their devices, and what a session is shown of them.

use crate::{HostSlot, Incarnation, PhysicalDeviceId, SessionId, Traffic, VirtualDeviceId};

/// What a worker says of itself when it registers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerInfo {
    /// Host name.
    pub host: String,
    pub pid: u32,
    /// Version and commit of the build; controller and workers must be equal.
    pub build: String,
    /// PJRT platform, e.g. `cpu`.
    pub platform_name: String,
    pub platform_version: String,
    /// Where the data plane listens, `HOST:PORT`.
    pub data_address: String,
    /// Where it takes the operands of collectives from other workers, `HOST:PORT`.
    pub gang_address: String,
    /// Devices joined by a fast interconnect share an island.
    pub island: u32,
    /// In index order.
    pub devices: Vec<WorkerDevice>,
    /// `pw.*` custom-call targets that client programs may name.
    pub test_targets: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerDevice {
    pub kind: String,
    pub debug_string: String,
    /// Memory kinds, e.g. `device`, `pinned_host`; the first is not necessarily the default.
    pub memory_kinds: Vec<String>,
    pub default_memory_kind: String,
    /// Bytes that the ledger may hand out; `None` = not limited.
    pub memory_bytes: Option<u64>,
}

/// What a client asked for when it connected (the allow-list of DESIGN section 15).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SessionOptions {
    /// Shown in `pathways status` and in errors; the edge fills in a default.
    pub name: String,
    /// Share of device time; 1 where not asked.
    pub weight: u32,
    /// Number of devices; `None` = all that are registered.
    pub devices: Option<u32>,
}

/// The devices of one session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionView {
    pub session: SessionId,
    pub platform_name: String,
    pub platform_version: String,
    pub devices: Vec<SessionDevice>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionDevice {
    pub id: VirtualDeviceId,
    pub physical: PhysicalDeviceId,
    pub island: u32,
    pub platform_name: String,
    pub device: WorkerDevice,
}

/// A snapshot for `pathways status`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StatusReport {
    pub workers: Vec<WorkerStatus>,
    pub sessions: Vec<SessionStatus>,
    pub executables: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerStatus {
    pub slot: HostSlot,
    pub incarnation: Incarnation,
    pub info: WorkerInfo,
    pub alive: bool,
    /// Order-time ledger, bytes per device.
    pub bytes_reserved: Vec<u64>,
    /// The worker's own ledger, bytes per device, from its last report.
    pub bytes_in_use: Vec<u64>,
    /// Nodes granted and not finished.
    pub granted: u32,
    /// From its last report.
    pub traffic: Traffic,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionStatus {
    pub session: SessionId,
    pub name: String,
    pub weight: u32,
    pub devices: u32,
    /// Nodes that wait for their grant.
    pub queued: u32,
    /// Nodes granted and not finished.
    pub running: u32,
    /// Bytes of device memory labelled with this session, over all devices.
    pub held_bytes: u64,
    pub arrays: u32,
    /// Device time charged so far, nanoseconds.
    pub device_ns: u64,
}
