//! What a compiled executable tells about itself, gathered once after compilation.
//!
//! Invariants:
//! 1. Every list of outputs has `num_outputs` entries; lists that disagree are an INTERNAL
//!    error, never a guess.
//! 2. Donated inputs are those that an output aliases, and no others.
//! 3. Shardings are what this executable has, never derived from the program.

use crate::abi::{self, EXT_SHARDINGS, Ptr};
use crate::error::{PjrtError, Result, code};
use crate::executable::LoadedExecutable;
use crate::hlo_scan::{Module, OpSharding, module_bytes, scan};
use crate::layouts::executable_layouts;
use crate::plugin::{Api, bytes, slice, text};
use crate::types::BufferType;

/// A parameter or an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayMeta {
    /// Element type.
    pub element_type: BufferType,
    /// Dimensions of one shard.
    pub shard_dims: Vec<i64>,
    /// Dimensions of the whole array: shard dimensions times tiles.
    pub global_dims: Vec<i64>,
    /// Kind of the memory it lives in.
    pub memory_kind: String,
    /// Serialized `xla.OpSharding` (empty bytes: replicated); `None` if the program is not
    /// partitioned.
    pub sharding: Option<Vec<u8>>,
    /// Layout text, such as `{1,0}`; `None` where the plugin does not tell.
    pub layout: Option<String>,
}

/// Bytes of memory that a run takes on one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Arguments.
    pub argument: i64,
    /// Outputs.
    pub output: i64,
    /// Temporaries.
    pub temp: i64,
    /// The part of the outputs that reuses arguments.
    pub alias: i64,
    /// Code.
    pub generated_code: i64,
    /// Peak, where the plugin tells.
    pub peak: i64,
    /// Arguments in host memory.
    pub host_argument: i64,
    /// Outputs in host memory.
    pub host_output: i64,
    /// Temporaries in host memory.
    pub host_temp: i64,
    /// The part of the host outputs that reuses arguments.
    pub host_alias: i64,
    /// Code in host memory.
    pub host_generated_code: i64,
}

/// Everything that the controller and the argument check need to know of an executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecMeta {
    /// Name of the module.
    pub name: String,
    /// Number of replicas.
    pub num_replicas: usize,
    /// Number of partitions.
    pub num_partitions: usize,
    /// Parameters, in order.
    pub params: Vec<ArrayMeta>,
    /// Outputs, in order.
    pub outputs: Vec<ArrayMeta>,
    /// Parameters whose buffer a run takes over, ascending.
    pub donated: Vec<u32>,
    /// Memory of a run, per device.
    pub memory: MemoryStats,
    /// Bytes of code.
    pub code_size: i64,
    /// The plugin's fingerprint; empty where it has none.
    pub fingerprint: Vec<u8>,
    /// Collective opcodes in the program and how often each occurs; empty means that its devices
    /// do not wait for one another.
    pub collectives: Vec<(String, u32)>,
    /// The program asks which partition or replica it is.
    pub uses_partition_id: bool,
    /// Targets of custom calls, sorted.
    pub custom_call_targets: Vec<String>,
}

impl ExecMeta {
    /// True if the devices of a run exchange data.
    pub fn has_collectives(&self) -> bool {
        !self.collectives.is_empty()
    }
}

impl LoadedExecutable {
    /// The optimized module, a serialized `HloModuleProto`.
    pub fn optimized_hlo(&self) -> Result<Vec<u8>> {
        // SAFETY: the executable is alive.
        let (program, format) = unsafe { optimized_program(self.client().inner.api, self.raw_executable())? };
        Ok(module_bytes(&program, &format)?.to_vec())
    }

    /// The same program for one device at a time, to run with `only_device` on any device: one
    /// executable for all, free of the gang that a run on all devices is. Refused for programs
    /// whose devices depend on one another or ask who they are.
    ///
    /// Metadata of whole arrays must come from this executable, not from the result.
    pub fn per_device(&self) -> Result<LoadedExecutable> {
        let hlo = self.optimized_hlo()?;
        let module = scan(&hlo)?;
        if module.uses_partition_id || !module.collectives.is_empty() {
            return Err(PjrtError::new(code::FAILED_PRECONDITION, format!("{} is no program for one device at a time", module.name)));
        }
        self.client().compile_backend(&hlo)
    }

    /// Gathers the metadata. Serialises the optimized module, which takes milliseconds for a
    /// large program: call it once, after compilation.
    pub fn meta(&self) -> Result<ExecMeta> {
        let api = self.client().inner.api;
        let raw = self.raw_executable();
        // SAFETY: the executable is alive over all calls, which only read it; what they return
        // belongs to it and is copied.
        unsafe {
            let (program, format) = optimized_program(api, raw)?;
            let module = scan(module_bytes(&program, &format)?)?;
            let memory = memory_stats(api, raw)?;
            let code_size = api.call::<abi::ExecutableSizeOfGeneratedCode>(|a| a.executable = raw).map_or(0, |a| a.value);
            Ok(ExecMeta {
                num_replicas: api.call::<abi::ExecutableNumReplicas>(|a| a.executable = raw)?.value,
                num_partitions: api.call::<abi::ExecutableNumPartitions>(|a| a.executable = raw)?.value,
                params: params(api, raw, &module)?,
                outputs: outputs(api, raw, &module, self.num_outputs())?,
                donated: module.donated.iter().copied().collect(),
                memory,
                code_size,
                fingerprint: self.fingerprint().unwrap_or_default(),
                collectives: module.collectives.into_iter().collect(),
                uses_partition_id: module.uses_partition_id,
                custom_call_targets: module.custom_call_targets.into_iter().collect(),
                name: module.name,
            })
        }
    }
}

/// The optimized program and its format.
///
/// # Safety
/// `raw` is alive, here and in the functions below.
pub(crate) unsafe fn optimized_program(api: &Api, raw: Ptr) -> Result<(Vec<u8>, String)> {
    let mut program = abi::Padded::<abi::Program>::new();
    // SAFETY: the first call gives the size, the second fills a block of that size.
    unsafe {
        api.call::<abi::ExecutableOptimizedProgram>(|a| {
            a.executable = raw;
            a.program = &raw mut program.args;
        })?;
        let mut code = vec![0u8; program.args.code_size];
        program.args.code = code.as_mut_ptr().cast();
        api.call::<abi::ExecutableOptimizedProgram>(|a| {
            a.executable = raw;
            a.program = &raw mut program.args;
        })?;
        code.truncate(program.args.code_size);
        Ok((code, text(program.args.format, program.args.format_size)))
    }
}

unsafe fn memory_stats(api: &Api, raw: Ptr) -> Result<MemoryStats> {
    // SAFETY: the caller's promise.
    let got = unsafe { api.call::<abi::ExecutableGetCompiledMemoryStats>(|a| a.executable = raw) };
    match got {
        Ok(a) => Ok(MemoryStats {
            argument: a.argument,
            output: a.output,
            temp: a.temp,
            alias: a.alias,
            generated_code: a.generated_code,
            peak: a.peak,
            host_argument: a.host_argument,
            host_output: a.host_output,
            host_temp: a.host_temp,
            host_alias: a.host_alias,
            host_generated_code: a.host_generated_code,
        }),
        Err(e) if e.code == code::UNIMPLEMENTED => Ok(MemoryStats::default()),
        Err(e) => Err(e),
    }
}

unsafe fn params(api: &Api, raw: Ptr, module: &Module) -> Result<Vec<ArrayMeta>> {
    let count = module.params.len();
    // SAFETY: the caller's promise.
    let (shardings, layouts, kinds) =
        unsafe { (shardings(api, raw, true, module, count)?, layouts(api, raw, true, count)?, memory_kinds(api, raw, true, count)?) };
    (0..count)
        .map(|i| {
            let shape = &module.params[i];
            array(
                shape.element_type,
                shape.dims.clone(),
                kinds.as_ref().map_or(shape.memory_kind(), |k| &k[i]),
                shardings.as_ref().map(|s| s[i].clone()),
                layouts.as_ref().map(|l| l[i].clone()),
            )
        })
        .collect()
}

unsafe fn outputs(api: &Api, raw: Ptr, module: &Module, count: usize) -> Result<Vec<ArrayMeta>> {
    // SAFETY: the caller's promise; lists belong to the executable.
    let (types, dims, shardings, layouts, kinds) = unsafe {
        let a = api.call::<abi::ExecutableOutputElementTypes>(|a| a.executable = raw)?;
        let types = slice(a.types, a.num).iter().map(|&t| BufferType::checked(t)).collect::<Result<Vec<_>>>()?;
        (
            types,
            output_dims(api, raw)?,
            shardings(api, raw, false, module, count)?,
            layouts(api, raw, false, count)?,
            memory_kinds(api, raw, false, count)?,
        )
    };
    agree("output types", types.len(), count)?;
    agree("output dimensions", dims.len(), count)?;
    agree("results of the module", module.results.len(), count)?;
    types
        .into_iter()
        .zip(dims)
        .enumerate()
        .map(|(i, (element_type, dims))| {
            array(
                element_type,
                dims,
                kinds.as_ref().map_or(module.results[i].memory_kind(), |k| &k[i]),
                shardings.as_ref().map(|s| s[i].clone()),
                layouts.as_ref().map(|l| l[i].clone()),
            )
        })
        .collect()
}

fn array(
    element_type: BufferType,
    shard_dims: Vec<i64>,
    memory_kind: &str,
    sharding: Option<Vec<u8>>,
    layout: Option<String>,
) -> Result<ArrayMeta> {
    let global_dims = match &sharding {
        None => shard_dims.clone(),
        Some(bytes) => OpSharding::parse(bytes)?.global_dims(&shard_dims)?,
    };
    let memory_kind = memory_kind.to_owned();
    Ok(ArrayMeta { element_type, shard_dims, global_dims, memory_kind, sharding, layout })
}

fn agree(what: &str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(PjrtError::internal(format!("the executable has {got} {what} where {want} are expected")))
}

unsafe fn output_dims(api: &Api, raw: Ptr) -> Result<Vec<Vec<i64>>> {
    // SAFETY: the caller's promise; `dims` holds the dimensions of all outputs end to end.
    unsafe {
        let a = api.call::<abi::ExecutableOutputDimensions>(|a| a.executable = raw)?;
        let ranks = slice(a.dim_sizes, a.num);
        let mut rest = slice(a.dims, ranks.iter().sum());
        Ok(ranks
            .iter()
            .map(|&rank| {
                let (head, tail) = rest.split_at(rank);
                rest = tail;
                head.to_vec()
            })
            .collect())
    }
}

/// Memory kinds, or `None` where the plugin does not tell.
unsafe fn memory_kinds(api: &Api, raw: Ptr, parameters: bool, count: usize) -> Result<Option<Vec<String>>> {
    // SAFETY: the caller's promise; both calls take structs of the same form.
    let got = unsafe {
        if parameters {
            api.call::<abi::ExecutableParameterMemoryKinds>(|a| a.executable = raw).map(|a| (a.num, a.kinds, a.kind_sizes))
        } else {
            api.call::<abi::ExecutableOutputMemoryKinds>(|a| a.executable = raw).map(|a| (a.num, a.kinds, a.kind_sizes))
        }
    };
    let (num, kinds, sizes) = match got {
        Ok(got) => got,
        Err(e) if e.code == code::UNIMPLEMENTED => return Ok(None),
        Err(e) => return Err(e),
    };
    agree("memory kinds", num, count)?;
    // SAFETY: two lists of `num` entries that belong to the executable.
    unsafe {
        let sizes = slice(sizes, num);
        Ok(Some(slice(kinds, num).iter().zip(sizes).map(|(&k, &n)| text(k, n)).collect()))
    }
}

/// Layout texts, or `None` where the plugin does not tell, as it may for tokens.
unsafe fn layouts(api: &Api, raw: Ptr, parameters: bool, count: usize) -> Result<Option<Vec<String>>> {
    // SAFETY: the caller's promise.
    match unsafe { executable_layouts(api, raw, parameters) } {
        Ok(layouts) => {
            agree("layouts", layouts.len(), count)?;
            Ok(Some(layouts))
        }
        Err(e) if e.code == code::UNIMPLEMENTED => Ok(None),
        Err(e) => Err(e),
    }
}

/// Byte offsets in the Shardings extension.
const PARAMETER_SHARDINGS: usize = 24;
const OUTPUT_SHARDINGS: usize = 32;

/// `OpSharding` bytes per array; `None` if the program is not partitioned.
unsafe fn shardings(api: &Api, raw: Ptr, parameters: bool, module: &Module, count: usize) -> Result<Option<Vec<Vec<u8>>>> {
    let offset = if parameters { PARAMETER_SHARDINGS } else { OUTPUT_SHARDINGS };
    let Some(f) = api.extension_fn(EXT_SHARDINGS, offset) else {
        return module_shardings(module, parameters, count);
    };
    // SAFETY: the caller's promise; the bytes belong to the executable.
    let found: Vec<Vec<u8>> = unsafe {
        let a = api.call_fn::<abi::ExecutableGetShardings>(f, |a| a.executable = raw)?;
        if a.shardings.is_null() || a.sizes.is_null() {
            return Ok(None);
        }
        let sizes = slice(a.sizes, a.num);
        slice(a.shardings, a.num).iter().zip(sizes).map(|(&s, &n)| bytes(s, n).to_vec()).collect()
    };
    // An empty result tuple has a sharding of its own.
    if count == 0 && found.len() <= 1 {
        return Ok(Some(Vec::new()));
    }
    agree("shardings", found.len(), count)?;
    Ok(Some(found))
}

/// The same from the module, for plugins without the extension.
fn module_shardings(module: &Module, parameters: bool, count: usize) -> Result<Option<Vec<Vec<u8>>>> {
    let found = if parameters {
        if module.param_shardings.is_empty() {
            return Ok(None);
        }
        module.param_shardings.clone()
    } else {
        let Some(root) = &module.output_sharding else { return Ok(None) };
        let parsed = OpSharding::parse(root)?;
        // Only a program with several results has a tuple here.
        if parsed.is_tuple { parsed.tuple } else { vec![root.clone()] }
    };
    if count == 0 {
        return Ok(Some(Vec::new()));
    }
    agree("shardings of the module", found.len(), count)?;
    found.into_iter().map(OpSharding::classic).collect::<Result<Vec<_>>>().map(Some)
}
