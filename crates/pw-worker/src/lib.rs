//! The shell around the worker's core: plugin, compile child, device threads, data-plane endpoint.
//!
//! Owns: the process that holds devices. One thread has the control stream, the core ([`pw_exec`]) and the real
//! buffers; one thread per device runs launches (brief ones run on the spot); others compile, load, copy, give memory
//! back and serve the data plane. They talk by messages; the only thing they share is a slot per shard, filled once.
//!
//! Must never: decide what runs when (the core does), or compile in the process that serves devices.

mod boxes;
mod cache;
mod child;
mod compiler;
mod convert;
mod describe;
mod device;
mod error;
mod exec;
mod frames;
mod gang;
mod host_callback;
mod launch;
mod options;
mod peers;
mod per_device;
mod programs;
mod registration;
mod sink;
mod store;
mod stream;
mod targets;
mod team;
mod transfer;
mod wire;
mod worker;

pub use child::{CompileOnlyConfig, compile_only};
pub use error::WorkerError;
pub use pw_linalg::Choice as LapackChoice;
pub use worker::{WorkerConfig, run};
