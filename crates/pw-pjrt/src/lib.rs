//! Safe handles over the PJRT C API: load a plugin, make a client, compile, execute, move data,
//! read metadata, register FFI targets.
//!
//! This crate owns the C structs, every pointer, and the lifetimes behind them. Its handles are
//! `Send + Sync`, are cheap to clone, and free what they own on drop, in the right order.
//!
//! Invariants:
//! 1. Every argument struct carries a tail of zeros and says so in its size; nothing is read
//!    behind a size that the plugin states.
//! 2. No callback unwinds into the plugin.
//! 3. A plugin is loaded once and never unloaded.
//!
//! It deliberately does not know gangs, networks or the proxy protocol, does not decide what
//! runs when, and does not hide that `execute` may block.

pub use crate::buffer::{Buffer, HostView};
pub use crate::client::{AttributeValue, Client, ClientOptions, DeviceInfo, MemoryInfo};
pub use crate::error::{PjrtError, Result, code};
pub use crate::event::{Event, ReadyCallback};
pub use crate::executable::LoadedExecutable;
pub use crate::execute::{ExecuteContext, ExecuteOptions, Execution, UserData};
pub use crate::ffi::{ArgView, Attribute, CallFrame, FfiError, FfiType, Handler, Views};
pub use crate::host::{ALIGNMENT, AlignedBlock, HostBytes};
pub use crate::meta::{ArrayMeta, ExecMeta, MemoryStats};
pub use crate::plugin::{ExtensionInfo, Plugin};
pub use crate::pool::trim_blocks;
pub use crate::rendezvous::{Lane, Rendezvous};
pub use crate::types::BufferType;

/// For shared libraries that export an FFI target to another host, such as stock JAX.
pub mod export {
    pub use crate::ffi::trampoline;
    pub use crate::ffi_abi::CallFrame as RawCallFrame;
}

pub mod sleep;

mod abi;
mod buffer;
mod client;
mod cost;
mod error;
mod event;
mod executable;
mod execute;
mod ffi;
mod ffi_abi;
mod hlo_scan;
mod host;
mod layouts;
mod meta;
mod plugin;
mod pool;
mod rendezvous;
mod types;
mod wire;

#[cfg(test)]
mod tests {
    fn crosses_threads<T: Send + Sync>() {}

    #[test]
    fn handles_are_send_and_sync() {
        crosses_threads::<(crate::Plugin, crate::Client, crate::LoadedExecutable)>();
        crosses_threads::<(crate::Buffer, crate::HostView, crate::Event, crate::Execution)>();
        crosses_threads::<(crate::ExecuteContext, crate::HostBytes, crate::ExecMeta)>();
    }
}
