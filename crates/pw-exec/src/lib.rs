//! The worker's core: what is launched, copied, written and read on one host, and in which order.
//!
//! Owns: the buffer table with its reference counts, the serial queue of every device, the meeting of uploads with
//! the commands that want them, the executables' life, and the worker's own memory ledger.
//!
//! Rules it keeps:
//! * commands are taken in grant order and the chain of [`NodeOrder::previous`](pw_types::NodeOrder) is checked (A4);
//! * a command names its buffers when it arrives, so a `Free` may overtake nothing and waits for nothing;
//! * a launch stands in the queue of every member device and starts when it is first in all of them and its inputs
//!   are there; transfers start when their sources are there and never hold up a device;
//! * every run ends with exactly one `Finished`; what it should have made is then ready or poisoned (A9).
//!
//! Must never: see a byte of a tensor, a socket, a clock or a thread (A1). The shell around it turns [`ExecEffect`]s
//! into work and answers with [`ExecEvent`]s; the same events give the same effects (A3).

mod audit;
mod check;
mod core;
mod event;
mod launch;
mod node;
mod program;
mod table;
mod transfer;

#[cfg(test)]
mod random;
#[cfg(test)]
mod script;
#[cfg(test)]
mod tests;

pub use crate::core::{ExecConfig, ExecCore};
pub use crate::event::{
    BackingKey, ExecEffect, ExecEvent, Form, LoadedProgram, Part, StartArgument, StartCopy, StartCopyItem, StartLaunch, StartRead,
    StartSend, StartWrite,
};
