//! The closed set of what can wake the controller's core (invariant A2). The log of these decides everything (A3).

use crate::{Handle, HostSlot, Incarnation, OpId, Report, Request, SessionId, SessionOptions, Status, WorkerInfo};

/// Time on the controller's monotonic clock, nanoseconds since its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    pub const fn from_millis(ms: u64) -> Time {
        Time(ms * 1_000_000)
    }

    pub fn saturating_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A worker wants in; `connection` names it until it has a slot.
    WorkerHello {
        connection: u64,
        incarnation: Incarnation,
        wanted_slot: Option<HostSlot>,
        info: WorkerInfo,
    },
    WorkerLost {
        slot: HostSlot,
        incarnation: Incarnation,
        reason: String,
    },
    Report {
        slot: HostSlot,
        incarnation: Incarnation,
        report: Report,
    },
    SessionOpened {
        session: SessionId,
        options: SessionOptions,
    },
    SessionClosed {
        session: SessionId,
        reason: String,
    },
    Request {
        session: SessionId,
        op: OpId,
        /// Size of the request on the wire, for the session's bound.
        bytes: u32,
        request: Request,
    },
    /// The stream of a host buffer broke off or had the wrong size.
    HostBufferFailed {
        session: SessionId,
        buffer: Handle,
        status: Status,
    },
    StatusQuery {
        query: u64,
    },
    /// Time has passed.
    Tick,
    /// The batch is over: decide.
    EndOfTurn,
}
