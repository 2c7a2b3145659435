//! Errors: a canonical code and a text, as the plugin gives them.

use std::fmt;

/// Canonical status codes, as far as this crate makes them itself.
pub mod code {
    /// The operation was cancelled.
    pub const CANCELLED: i32 = 1;
    /// An error without a better code.
    pub const UNKNOWN: i32 = 2;
    /// The caller passed something wrong.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// Something named does not exist.
    pub const NOT_FOUND: i32 = 5;
    /// Memory or another resource ran out.
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    /// The system is not in the state that the call needs.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// A range was left.
    pub const OUT_OF_RANGE: i32 = 11;
    /// Not supported here.
    pub const UNIMPLEMENTED: i32 = 12;
    /// An invariant does not hold.
    pub const INTERNAL: i32 = 13;
}

/// Result of a call to the plugin.
pub type Result<T> = std::result::Result<T, PjrtError>;

/// An error of a plugin or of a check before the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct PjrtError {
    /// Canonical (absl) status code.
    pub code: i32,
    /// Text for a person.
    pub message: String,
}

impl fmt::Display for PjrtError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code_name(), self.message)
    }
}

impl PjrtError {
    /// An error of the given code.
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Name of the code, as in `INVALID_ARGUMENT`.
    pub fn code_name(&self) -> &'static str {
        const NAMES: [&str; 17] = [
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        ];
        usize::try_from(self.code).ok().and_then(|i| NAMES.get(i).copied()).unwrap_or("UNKNOWN")
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(code::INVALID_ARGUMENT, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(code::INTERNAL, message)
    }

    pub fn unimplemented(message: impl Into<String>) -> Self {
        Self::new(code::UNIMPLEMENTED, message)
    }
}
