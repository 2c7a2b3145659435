//! Errors that travel: a canonical code, a text for the user, and a closed cause.

use crate::ids::{HostSlot, Incarnation};

/// The canonical status codes; numbers are those of the client protocol and of PJRT.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    /// The code with this number; anything unknown is [`Code::Unknown`].
    pub fn from_number(number: i32) -> Code {
        use Code::*;
        const ALL: [Code; 17] = [
            Ok,
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
            Unauthenticated,
        ];
        usize::try_from(number).ok().and_then(|n| ALL.get(n).copied()).unwrap_or(Unknown)
    }
}

/// Why something failed, for code that decides by it. The text is for people.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Cause {
    /// The plugin, the compiler or a check said so.
    #[default]
    Unspecified,
    /// The worker that held the value is gone.
    HostLost { slot: HostSlot, incarnation: Incarnation },
    /// A device's memory, or what is left of it, is too small.
    OutOfMemory,
    /// The owner went away or asked for it.
    Cancelled,
    /// A bound of this system (invariant A8).
    Limit,
}

/// An error with its text. A value that failed is poisoned with one (invariant A9).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    pub code: Code,
    pub message: String,
    pub cause: Cause,
}

impl Status {
    pub fn new(code: Code, message: impl Into<String>) -> Status {
        Status { code, message: message.into(), cause: Cause::Unspecified }
    }

    pub fn with_cause(mut self, cause: Cause) -> Status {
        self.cause = cause;
        self
    }

    pub fn invalid(message: impl Into<String>) -> Status {
        Status::new(Code::InvalidArgument, message)
    }

    pub fn not_found(message: impl Into<String>) -> Status {
        Status::new(Code::NotFound, message)
    }

    pub fn unimplemented(message: impl Into<String>) -> Status {
        Status::new(Code::Unimplemented, message)
    }

    pub fn internal(message: impl Into<String>) -> Status {
        Status::new(Code::Internal, message)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.code, self.message)
    }
}

impl std::error::Error for Status {}
