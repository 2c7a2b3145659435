//! Clients: one set of devices of a plugin.
//!
//! Invariants:
//! 1. Device lists are in index order, and an index into `devices()` is the name of a device
//!    everywhere in this crate's interface.
//! 2. A client outlives everything made from it: each handle holds one.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

use crate::abi::{self, NamedValue, Padded, Ptr};
use crate::error::{PjrtError, Result, code};
use crate::executable::LoadedExecutable;
use crate::execute::ExecuteContext;
use crate::plugin::{Api, Handle, Plugin, slice, text};
use crate::types::BufferType;

/// What to ask of the plugin when making a client.
#[derive(Debug, Clone, Default)]
pub struct ClientOptions {
    /// Number of devices, where the plugin lets one choose.
    pub device_count: Option<i64>,
    /// Whether executions may be finished by another thread. A wish: an older plugin drops it.
    pub asynchronous: Option<bool>,
    /// Rank of this process, which the device ids carry.
    pub process_id: Option<i64>,
}

/// A memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryInfo {
    /// The plugin's id.
    pub id: i32,
    /// Kind, such as `device` or `pinned_host`.
    pub kind: String,
    /// Number of the kind.
    pub kind_id: i32,
}

/// Value of a device attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum AttributeValue {
    /// Text.
    String(String),
    /// Integer.
    I64(i64),
    /// List of integers.
    I64List(Vec<i64>),
    /// Number.
    F32(f32),
    /// Truth value.
    Bool(bool),
}

/// An addressable device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceInfo {
    /// The plugin's (global) id.
    pub id: i32,
    /// Index on this host, or -1.
    pub local_hardware_id: i32,
    /// Kind, such as `cpu`.
    pub kind: String,
    /// Text for logs.
    pub debug_string: String,
    /// Text for people.
    pub to_string: String,
    /// Its memories.
    pub memories: Vec<MemoryInfo>,
    /// Kind of the memory used unless another is named.
    pub default_memory_kind: String,
    /// What else the plugin tells.
    pub attributes: BTreeMap<String, AttributeValue>,
}

pub(crate) struct Inner {
    pub(crate) api: &'static Api,
    pub(crate) raw: Handle,
    platform_name: String,
    platform_version: String,
    process_index: i32,
    devices: Vec<DeviceInfo>,
    /// By index, as `devices`: the device, and its memories in the order of `memories`.
    raw_devices: Vec<(Handle, Vec<Handle>)>,
    /// Passed to every run that brings no context: a handler that looks for one in a run without
    /// any would crash the process.
    pub(crate) default_context: Option<ExecuteContext>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The client goes first: its threads may still look at the default context.
        // SAFETY: ours, and not used again.
        unsafe { self.api.release::<abi::ClientDestroy>(|a| a.client = self.raw.0) }
    }
}

/// A client of a plugin. Clones are the same client.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("platform", &self.inner.platform_name).field("devices", &self.inner.devices.len()).finish()
    }
}

impl Plugin {
    /// Makes a client and checks that it is what was asked for.
    pub fn create_client(&self, options: &ClientOptions) -> Result<Client> {
        let raw = create(self.api, options)?;
        let client = describe(self.api, raw)?;
        if let Some(want) = options.device_count
            && client.inner.devices.len() as i64 != want
        {
            return Err(PjrtError::new(
                code::FAILED_PRECONDITION,
                format!("plugin {} gives {} devices where {want} were asked for", self.path().display(), client.inner.devices.len()),
            ));
        }
        if let Some(want) = options.process_id
            && i64::from(client.inner.process_index) != want
        {
            return Err(PjrtError::new(
                code::FAILED_PRECONDITION,
                format!(
                    "plugin {} ignores process_id: asked for {want}, the client has {}",
                    self.path().display(),
                    client.inner.process_index
                ),
            ));
        }
        Ok(client)
    }
}

/// Creates the raw client. An option that the plugin does not know is left out, the wishes
/// first; the caller checks what came of it.
fn create(api: &'static Api, options: &ClientOptions) -> Result<Ptr> {
    let count = options.device_count.map(|n| ("cpu_device_count", abi::NAMED_I64, n as u64));
    let process = options.process_id.map(|n| ("process_id", abi::NAMED_I64, n as u64));
    let asynchronous = options.asynchronous.map(|b| ("asynchronous", abi::NAMED_BOOL, u64::from(b)));
    let attempts = [vec![count, process, asynchronous], vec![count, process], vec![count], vec![]];
    let mut first_error = None;
    let mut last_len = usize::MAX;
    for attempt in attempts {
        let values: Vec<_> = attempt.into_iter().flatten().collect();
        if values.len() == last_len {
            continue;
        }
        last_len = values.len();
        match create_with(api, &values) {
            Ok(raw) => return Ok(raw),
            Err(e) => {
                let unknown_option = e.code == code::INVALID_ARGUMENT;
                let error = first_error.get_or_insert(e);
                if !unknown_option {
                    return Err(error.clone());
                }
            }
        }
    }
    Err(first_error.unwrap_or_else(|| PjrtError::internal("no attempt to create a client")))
}

fn create_with(api: &'static Api, values: &[(&str, c_int, u64)]) -> Result<Ptr> {
    let named: Vec<NamedValue> = values
        .iter()
        .map(|&(name, kind, value)| {
            let mut named = Padded::<NamedValue>::new().args;
            // An array element: its own size, no tail.
            named.struct_size = size_of::<NamedValue>();
            named.name = name.as_ptr().cast();
            named.name_size = name.len();
            named.kind = kind;
            // On a little-endian machine the byte of a bool is the first one of the union.
            named.value = value.to_le();
            named.value_size = 1;
            named
        })
        .collect();
    // SAFETY: the options live over the call, which copies them; no key-value callbacks.
    let args = unsafe {
        api.call::<abi::ClientCreate>(|a| {
            a.create_options = named.as_ptr();
            a.num_options = named.len();
        })?
    };
    if args.client.is_null() {
        return Err(PjrtError::internal("the plugin created a null client"));
    }
    Ok(args.client)
}

/// Reads everything fixed about a new client.
fn describe(api: &'static Api, raw: Ptr) -> Result<Client> {
    let mut inner = Inner {
        api,
        raw: Handle(raw),
        platform_name: String::new(),
        platform_version: String::new(),
        process_index: 0,
        devices: Vec::new(),
        raw_devices: Vec::new(),
        default_context: None,
    };
    // SAFETY: the client is alive; texts and lists belong to it and are copied here.
    unsafe {
        let a = api.call::<abi::ClientPlatformName>(|a| a.client = raw)?;
        inner.platform_name = text(a.text, a.text_size);
        let a = api.call::<abi::ClientPlatformVersion>(|a| a.client = raw)?;
        inner.platform_version = text(a.text, a.text_size);
        inner.process_index = api.call::<abi::ClientProcessIndex>(|a| a.client = raw)?.process_index;
        let a = api.call::<abi::ClientAddressableDevices>(|a| a.client = raw)?;
        let mut found = Vec::with_capacity(a.num_devices);
        for &device in slice(a.devices, a.num_devices) {
            found.push(describe_device(api, device)?);
        }
        found.sort_by_key(|(info, _)| info.id);
        (inner.devices, inner.raw_devices) = found.into_iter().unzip();
    }
    inner.default_context = ExecuteContext::empty(api).ok();
    Ok(Client { inner: Arc::new(inner) })
}

/// # Safety
/// `device` belongs to a live client.
unsafe fn describe_device(api: &'static Api, device: Ptr) -> Result<(DeviceInfo, (Handle, Vec<Handle>))> {
    // SAFETY: as above, and the description and the memories belong to the device.
    unsafe {
        let d = api.call::<abi::DeviceGetDescription>(|a| a.device = device)?.description;
        let id = api.call::<abi::DeviceDescriptionId>(|a| a.description = d)?.id;
        let local_hardware_id = api.call::<abi::DeviceLocalHardwareId>(|a| a.device = device).map_or(-1, |a| a.local_hardware_id);
        let kind = api.call::<abi::DeviceDescriptionKind>(|a| a.description = d)?;
        let debug = api.call::<abi::DeviceDescriptionDebugString>(|a| a.description = d)?;
        let shown = api.call::<abi::DeviceDescriptionToString>(|a| a.description = d)?;
        let list = api.call::<abi::DeviceAddressableMemories>(|a| a.device = device)?;
        let raw_memories: Vec<Handle> = slice(list.memories, list.num_memories).iter().map(|&m| Handle(m)).collect();
        let memories = raw_memories.iter().map(|m| describe_memory(api, m.0)).collect::<Result<Vec<_>>>()?;
        let default = api.call::<abi::DeviceDefaultMemory>(|a| a.device = device)?.memory;
        let default_memory_kind = raw_memories.iter().position(|m| m.0 == default).map(|i| memories[i].kind.clone()).unwrap_or_default();
        let attributes = api
            .call::<abi::DeviceDescriptionAttributes>(|a| a.description = d)
            .map(|a| {
                slice(a.attributes, a.num_attributes).iter().filter_map(|v| Some((text(v.name, v.name_size), attribute(v)?))).collect()
            })
            .unwrap_or_default();
        let info = DeviceInfo {
            id,
            local_hardware_id,
            kind: text(kind.text, kind.text_size),
            debug_string: text(debug.text, debug.text_size),
            to_string: text(shown.text, shown.text_size),
            memories,
            default_memory_kind,
            attributes,
        };
        Ok((info, (Handle(device), raw_memories)))
    }
}

/// # Safety
/// `memory` belongs to a live client.
unsafe fn describe_memory(api: &'static Api, memory: Ptr) -> Result<MemoryInfo> {
    // SAFETY: the caller's promise; the text is copied.
    unsafe {
        let id = api.call::<abi::MemoryId>(|a| a.memory = memory)?.id;
        let kind = api.call::<abi::MemoryKind>(|a| a.memory = memory)?;
        let kind_id = api.call::<abi::MemoryKindId>(|a| a.memory = memory).map_or(0, |a| a.kind_id);
        Ok(MemoryInfo { id, kind: text(kind.text, kind.text_size), kind_id })
    }
}

/// # Safety
/// `value` is a live named value of the plugin.
pub(crate) unsafe fn attribute(value: &NamedValue) -> Option<AttributeValue> {
    let size = value.value_size;
    // SAFETY: the kind says which arm of the union is set; pointers are valid for `value_size`.
    unsafe {
        Some(match value.kind {
            abi::NAMED_STRING => AttributeValue::String(text(value.value as *const _, size)),
            abi::NAMED_I64 => AttributeValue::I64(value.value as i64),
            abi::NAMED_I64_LIST => AttributeValue::I64List(slice(value.value as *const i64, size).to_vec()),
            abi::NAMED_F32 => AttributeValue::F32(f32::from_bits(value.value as u32)),
            abi::NAMED_BOOL => AttributeValue::Bool(value.value as u8 != 0),
            _ => return None,
        })
    }
}

impl Client {
    /// Name of the platform, such as `cpu`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// Version text of the platform.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// Rank of this process.
    pub fn process_index(&self) -> i32 {
        self.inner.process_index
    }

    /// The addressable devices, in order of their ids.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.inner.devices
    }

    /// Index of the device with this id.
    pub fn device_index(&self, id: i32) -> Option<usize> {
        self.inner.devices.iter().position(|d| d.id == id)
    }

    /// The plugin that this client belongs to.
    pub fn plugin(&self) -> Plugin {
        Plugin { api: self.inner.api }
    }

    /// Text of the layout that a device array of this type and (shard) shape gets by default.
    pub fn default_layout(&self, element_type: BufferType, dims: &[i64]) -> Result<String> {
        crate::layouts::default_layout(self, element_type, dims)
    }

    /// Compiles a program: `format` is `mlir` (StableHLO text, bytecode or portable artifact),
    /// `hlo` or `hlo_with_config`; `options` is a serialized `CompileOptionsProto`, as JAX makes
    /// it.
    pub fn compile(&self, program: &[u8], format: &str, options: &[u8]) -> Result<LoadedExecutable> {
        // MLIR's reader of text looks for a zero behind the last byte.
        let mut code = Vec::with_capacity(program.len() + 1);
        code.extend_from_slice(program);
        code.push(0);
        let mut raw_program = Padded::<abi::Program>::new();
        raw_program.args.code = code.as_mut_ptr().cast();
        raw_program.args.code_size = program.len();
        raw_program.args.format = format.as_ptr().cast();
        raw_program.args.format_size = format.len();
        // SAFETY: program and options live over the call, which only reads them.
        let args = unsafe {
            self.inner.api.call::<abi::ClientCompile>(|a| {
                a.client = self.inner.raw.0;
                a.program = &raw const raw_program.args;
                a.compile_options = options.as_ptr().cast();
                a.compile_options_size = options.len();
            })?
        };
        LoadedExecutable::from_raw(self, args.executable)
    }

    /// Compiles an optimized `HloModuleProto` for one device at a time: no HLO passes, one
    /// partition, any device (`ExecuteOptions::only_device`).
    pub fn compile_backend(&self, hlo: &[u8]) -> Result<LoadedExecutable> {
        // CompileOptionsProto { executable_build_options(3) { device_ordinal(1) = -1,
        // num_replicas(4) = 1, num_partitions(5) = 1, run_backend_only(11) = true },
        // compile_portable_executable(4) = true }, with all else absent.
        let mut build = vec![0x08];
        build.extend([0xff; 9]);
        build.extend([0x01, 0x20, 1, 0x28, 1, 0x58, 1]);
        let mut options = vec![0x1a, build.len() as u8];
        options.extend(build);
        options.extend([0x20, 1]);
        self.compile(hlo, "hlo", &options)
    }

    /// Loads what `LoadedExecutable::serialize` gave, by the same plugin on the same kind of
    /// machine. Targets that the program calls must be registered before.
    pub fn deserialize_and_load(&self, bytes: &[u8]) -> Result<LoadedExecutable> {
        // SAFETY: the bytes live over the call.
        let args = unsafe {
            self.inner.api.call::<abi::ExecutableDeserializeAndLoad>(|a| {
                a.client = self.inner.raw.0;
                a.bytes = bytes.as_ptr().cast();
                a.bytes_size = bytes.len();
            })?
        };
        LoadedExecutable::from_raw(self, args.loaded_executable)
    }

    pub(crate) fn raw_device(&self, index: usize) -> Result<Ptr> {
        self.inner
            .raw_devices
            .get(index)
            .map(|(d, _)| d.0)
            .ok_or_else(|| PjrtError::invalid(format!("device index {index}, but the client has {} devices", self.inner.devices.len())))
    }

    /// The memory of a kind on a device; `None` is the default one.
    pub(crate) fn raw_memory(&self, index: usize, kind: Option<&str>) -> Result<Ptr> {
        self.raw_device(index)?;
        let info = &self.inner.devices[index];
        let kind = kind.unwrap_or(&info.default_memory_kind);
        info.memories
            .iter()
            .position(|m| m.kind == kind)
            .map(|m| self.inner.raw_devices[index].1[m].0)
            .ok_or_else(|| PjrtError::invalid(format!("device {} has no memory kind {kind:?}", info.id)))
    }

    /// Index of a device that the plugin named.
    pub(crate) fn index_of(&self, device: Ptr) -> Option<usize> {
        self.inner.raw_devices.iter().position(|(d, _)| d.0 == device)
    }

    /// Kind of a memory that the plugin named.
    pub(crate) fn memory_kind_of(&self, memory: Ptr) -> Option<&str> {
        let of = |(device, m): (usize, usize)| self.inner.devices[device].memories[m].kind.as_str();
        self.inner
            .raw_devices
            .iter()
            .enumerate()
            .find_map(|(device, (_, memories))| memories.iter().position(|m| m.0 == memory).map(|m| of((device, m))))
    }
}
