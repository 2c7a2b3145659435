//! What a compile must report (facts: one plain struct, made once, answers everything later).

use bytes::Bytes;

use crate::{DType, Dims, Status};

/// Everything the controller needs to know of a compiled program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileReport {
    /// Module name, e.g. `jit_f`.
    pub name: String,
    /// Content hash of the compiled program; also its key in the workers' caches.
    pub fingerprint: Bytes,
    pub replicas: u32,
    pub partitions: u32,
    pub parameters: Vec<ValueSpec>,
    pub outputs: Vec<ValueSpec>,
    /// Parameters whose buffers become outputs (from `input_output_alias` only).
    pub donated: Vec<u32>,
    pub memory: CompiledMemory,
    /// Set where the plugin cannot tell layouts (programs with token parameters).
    pub layouts_error: Option<Status>,
    /// Cross-device operations in the optimised program; 0 = the devices do not depend on each other.
    pub collectives: u32,
    /// It calls functions in its client's process, and waits for them.
    pub host_callbacks: bool,
}

/// One parameter or result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ValueSpec {
    pub dtype: DType,
    /// Dimensions on one device.
    pub shard_dims: Dims,
    /// Dimensions of the whole array.
    pub dims: Dims,
    /// XLA layout text such as `{1,0}`; empty when unknown.
    pub layout: String,
    pub memory_kind: String,
    /// Serialized `xla.OpSharding`; zero-length = replicated; `None` = the program is not partitioned.
    pub op_sharding: Option<Bytes>,
}

/// Bytes per device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CompiledMemory {
    pub arguments: u64,
    pub outputs: u64,
    pub aliased: u64,
    pub temporaries: u64,
    pub generated_code: u64,
}
