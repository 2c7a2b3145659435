//! The collectives of an optimized HLO module: found and replaced by calls, described, and performed.
//!
//! `rewrite` takes a partitioned, optimized `HloModuleProto` and gives a program for one device at a
//! time, in which every collective is a typed-FFI custom call. Whoever registers the targets performs them.
//!
//! `print` writes the text of a module as XLA does, and `cost` counts what a run takes.
//!
//! Invariants:
//! 1. What is not understood is refused with the name and opcode of the instruction, never guessed.
//! 2. A field that is not replaced is kept byte for byte, known or not.
//! 3. In every computation the collectives, and the instructions that run some, form one chain: each takes what the
//!    one before it yields as one more operand (control edges alone do not bind the thunk executor of XLA's CPU
//!    backend). So a device meets them in one order, one at a time.
//!
//! It deliberately does not know a plugin, a device, a thread or a socket.

pub use crate::collective::{Array, Collective, Element, Op, Reduce};
pub use crate::cost::{Cost, cost};
pub use crate::error::HloError;
pub use crate::kernel::{Part, needs, parts, perform};
pub use crate::print::print;
pub use crate::rewrite::{Rewritten, rewrite};

/// Target of the call that stands for a collective. Its attributes: `cfg`, the text of the [`Collective`],
/// and `key`, its index among those of the program. Arguments behind the arrays of the collective carry nothing: they
/// say what must be done before.
pub const COLLECTIVE: &str = "pw.collective";
/// Target of the call that yields the partition number of the device that runs, as one `u32`.
pub const PARTITION_ID: &str = "pw.partition_id";
/// Target of the call that yields the replica number of the device that runs, as one `u32`.
pub const REPLICA_ID: &str = "pw.replica_id";
/// Target of the call whose result is its first argument, and which thereby makes whoever takes the result wait for
/// the other arguments.
pub const AFTER: &str = "pw.after";

mod chain;
mod collective;
mod cost;
mod delay;
mod error;
mod groups;
mod kernel;
mod lower;
mod message;
mod module;
mod print;
mod rewrite;
mod shape;
mod text;
mod wire;

#[cfg(test)]
mod tests;
