//! Shared vocabulary of every crate: ids, topology, dtypes and shardings, client requests and replies,
//! worker commands and reports, faults.
//!
//! Owns: the closed enums that cross a seam ([`Request`], [`Reply`], [`Command`], [`Report`], [`Event`], [`ToEdge`]).
//! Must never: know a wire format, a socket, a clock or the bytes of a tensor (invariant A1).

pub mod command;
pub mod compile;
pub mod describe;
pub mod dtype;
pub mod event;
pub mod ids;
pub mod reply;
pub mod report;
pub mod request;
pub mod sharding;
pub mod status;
pub mod topology;

pub use command::*;
pub use compile::*;
pub use describe::*;
pub use dtype::DType;
pub use event::*;
pub use ids::*;
pub use reply::*;
pub use report::*;
pub use request::*;
pub use sharding::*;
pub use status::{Cause, Code, Status};
pub use topology::*;
