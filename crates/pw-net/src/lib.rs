//! Control streams and bulk data plane over TCP: framing, sequence numbers.
//!
//! Owns: how bytes lie on the connections between our own processes, and what happens when a peer breaks the rules.
//! Invariants: every queue here has a bound (A8); one transfer never waits for another one's reader; bytes that do not
//! follow the protocol end their own connection and nothing else.
//! Must never: know what a command or a tensor means.

pub mod control;
pub mod data;
mod error;
pub mod gang;
mod magic;
mod sequence;

pub use error::NetError;
pub use magic::same_secret;
