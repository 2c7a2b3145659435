//! The C side: argument structs of the PJRT calls this crate makes, and where each call sits in
//! the plugin's table.
//!
//! Invariants:
//! 1. Every struct is plain old data for which all-zero bytes are a valid value.
//! 2. Every struct starts with its own size, which the caller fills in.
//! 3. A slot number never changes: the table only grows at its end.
//!
//! This module does not call anything; `plugin` does.

use std::ffi::{c_char, c_int, c_void};

/// An opaque object of the plugin.
pub(crate) type Ptr = *mut c_void;

/// Any entry of the table: it takes one argument struct and gives null or an error.
pub(crate) type RawFn = unsafe extern "C" fn(Ptr) -> Ptr;

/// Byte offset of slot 0 in the table.
pub(crate) const API_SLOTS: usize = 40;

/// Head of the table, as far as every version has it.
#[repr(C)]
pub(crate) struct ApiHead {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *const ExtensionBase,
    pub(crate) version_struct_size: usize,
    pub(crate) version_extension_start: Ptr,
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
}

/// Head of every extension.
#[repr(C)]
pub(crate) struct ExtensionBase {
    pub(crate) struct_size: usize,
    pub(crate) kind: c_int,
    pub(crate) next: *const ExtensionBase,
}

/// An argument struct.
///
/// # Safety
/// The type is `repr(C)`, all-zero bytes are a valid value, and its first field is the `usize`
/// that carries its size.
pub(crate) unsafe trait Args: Copy {}

/// An argument struct of a call in the main table.
///
/// # Safety
/// `SLOT` is the place of the call that takes this struct.
pub(crate) unsafe trait Call: Args {
    /// Place in the table, counted from `API_SLOTS`.
    const SLOT: usize;
    /// Name for messages.
    const NAME: &'static str;
}

macro_rules! args {
    ($( $name:ident { $($f:ident : $t:ty),* $(,)? } )*) => { $(
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            pub(crate) struct_size: usize,
            pub(crate) extension_start: Ptr,
            $(pub(crate) $f: $t,)*
        }
        // SAFETY: repr(C), integers, pointers and optional function pointers only, size first.
        unsafe impl Args for $name {}
    )* };
}

macro_rules! calls {
    ($( $name:ident = $slot:literal { $($f:ident : $t:ty),* $(,)? } )*) => {
        args! { $( $name { $($f : $t),* } )* }
        $(
            // SAFETY: the slot was counted in the published table; a test repeats the count.
            unsafe impl Call for $name {
                const SLOT: usize = $slot;
                const NAME: &'static str = concat!("PJRT_", stringify!($name));
            }
        )*
        /// Name, slot and size of every call, for the tests.
        #[cfg(test)]
        pub(crate) const CALLS: &[(&str, usize, usize)] =
            &[ $( (stringify!($name), $slot, size_of::<$name>()) ),* ];
    };
}

calls! {
    ErrorDestroy = 0 { error: Ptr }
    ErrorMessage = 1 { error: Ptr, message: *const c_char, message_size: usize }
    ErrorGetCode = 2 { error: Ptr, code: c_int }
    PluginInitialize = 3 {}
    EventDestroy = 5 { event: Ptr }
    EventIsReady = 6 { event: Ptr, is_ready: u8 }
    EventAwait = 8 { event: Ptr }
    EventOnReady = 9 {
        event: Ptr,
        callback: Option<unsafe extern "C" fn(Ptr, Ptr)>,
        user_arg: Ptr,
    }
    ClientCreate = 10 {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: Ptr,
        kv_get_user_arg: Ptr,
        kv_put_callback: Ptr,
        kv_put_user_arg: Ptr,
        client: Ptr,
        kv_try_get_callback: Ptr,
        kv_try_get_user_arg: Ptr,
    }
    ClientDestroy = 11 { client: Ptr }
    ClientPlatformName = 12 { client: Ptr, text: *const c_char, text_size: usize }
    ClientProcessIndex = 13 { client: Ptr, process_index: c_int }
    ClientPlatformVersion = 14 { client: Ptr, text: *const c_char, text_size: usize }
    ClientAddressableDevices = 16 { client: Ptr, devices: *const Ptr, num_devices: usize }
    ClientCompile = 20 {
        client: Ptr,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: Ptr,
    }
    ClientBufferFromHostBuffer = 22 {
        client: Ptr,
        data: *const c_void,
        element_type: u32,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        semantics: c_int,
        device: Ptr,
        memory: Ptr,
        device_layout: *const MemoryLayout,
        done_with_host_buffer: Ptr,
        buffer: Ptr,
    }
    DeviceDescriptionId = 23 { description: Ptr, id: c_int }
    DeviceDescriptionAttributes = 25 {
        description: Ptr,
        num_attributes: usize,
        attributes: *const NamedValue,
    }
    DeviceDescriptionKind = 26 { description: Ptr, text: *const c_char, text_size: usize }
    DeviceDescriptionDebugString = 27 { description: Ptr, text: *const c_char, text_size: usize }
    DeviceDescriptionToString = 28 { description: Ptr, text: *const c_char, text_size: usize }
    DeviceGetDescription = 29 { device: Ptr, description: Ptr }
    DeviceLocalHardwareId = 31 { device: Ptr, local_hardware_id: c_int }
    DeviceAddressableMemories = 32 { device: Ptr, memories: *const Ptr, num_memories: usize }
    DeviceDefaultMemory = 33 { device: Ptr, memory: Ptr }
    MemoryId = 35 { memory: Ptr, id: c_int }
    MemoryKind = 36 { memory: Ptr, text: *const c_char, text_size: usize }
    ExecutableDestroy = 40 { executable: Ptr }
    ExecutableNumReplicas = 42 { executable: Ptr, value: usize }
    ExecutableNumPartitions = 43 { executable: Ptr, value: usize }
    ExecutableNumOutputs = 44 { executable: Ptr, value: usize }
    ExecutableSizeOfGeneratedCode = 45 { executable: Ptr, value: i64 }
    ExecutableGetCostAnalysis = 46 { executable: Ptr, num_properties: usize, properties: *const NamedValue }
    ExecutableOutputMemoryKinds = 47 {
        executable: Ptr,
        num: usize,
        kinds: *const *const c_char,
        kind_sizes: *const usize,
    }
    ExecutableOptimizedProgram = 48 { executable: Ptr, program: *mut Program }
    ExecutableSerialize = 49 {
        executable: Ptr,
        bytes: *const c_char,
        bytes_size: usize,
        serialized: Ptr,
        deleter: Option<unsafe extern "C" fn(Ptr)>,
    }
    LoadedExecutableDestroy = 50 { executable: Ptr }
    LoadedExecutableGetExecutable = 51 { loaded_executable: Ptr, executable: Ptr }
    LoadedExecutableAddressableDevices = 52 {
        executable: Ptr,
        devices: *const Ptr,
        num_devices: usize,
    }
    LoadedExecutableExecute = 55 {
        executable: Ptr,
        options: *const RawExecuteOptions,
        argument_lists: *const *const Ptr,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut Ptr,
        device_complete_events: *mut Ptr,
        execute_device: Ptr,
    }
    ExecutableDeserializeAndLoad = 56 {
        client: Ptr,
        bytes: *const c_char,
        bytes_size: usize,
        loaded_executable: Ptr,
        overridden_options: *const c_char,
        overridden_options_size: usize,
    }
    LoadedExecutableFingerprint = 57 { executable: Ptr, text: *const c_char, text_size: usize }
    BufferDestroy = 58 { buffer: Ptr }
    BufferElementType = 59 { buffer: Ptr, element_type: u32 }
    BufferDimensions = 60 { buffer: Ptr, dims: *const i64, num_dims: usize }
    BufferGetMemoryLayout = 63 { buffer: Ptr, layout: MemoryLayout }
    BufferOnDeviceSize = 64 { buffer: Ptr, size: usize }
    BufferDevice = 65 { buffer: Ptr, device: Ptr }
    BufferMemory = 66 { buffer: Ptr, memory: Ptr }
    BufferDelete = 67 { buffer: Ptr }
    BufferIsDeleted = 68 { buffer: Ptr, is_deleted: u8 }
    BufferToHostBuffer = 70 {
        src: Ptr,
        host_layout: *const MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: Ptr,
    }
    BufferIsOnCpu = 71 { buffer: Ptr, is_on_cpu: u8 }
    BufferReadyEvent = 72 { buffer: Ptr, event: Ptr }
    BufferUnsafePointer = 73 { buffer: Ptr, pointer: usize }
    BufferIncreaseExternalReferenceCount = 74 { buffer: Ptr }
    BufferDecreaseExternalReferenceCount = 75 { buffer: Ptr }
    ExecutableOutputElementTypes = 90 { executable: Ptr, types: *const u32, num: usize }
    ExecutableOutputDimensions = 91 {
        executable: Ptr,
        num: usize,
        dims: *const i64,
        dim_sizes: *const usize,
    }
    BufferCopyToMemory = 92 { buffer: Ptr, memory: Ptr, out: Ptr }
    ExecutableFingerprint = 94 { executable: Ptr, text: *const c_char, text_size: usize }
    ExecutableGetCompiledMemoryStats = 96 {
        executable: Ptr,
        generated_code: i64,
        argument: i64,
        output: i64,
        alias: i64,
        temp: i64,
        host_generated_code: i64,
        host_argument: i64,
        host_output: i64,
        host_alias: i64,
        host_temp: i64,
        peak: i64,
    }
    MemoryKindId = 97 { memory: Ptr, kind_id: c_int }
    ExecuteContextCreate = 98 { context: Ptr }
    ExecuteContextDestroy = 99 { context: Ptr }
    ClientCreateErrorBuffer = 118 {
        client: Ptr,
        code: c_int,
        message: *const c_char,
        message_size: usize,
        dims: *const i64,
        num_dims: usize,
        element_type: u32,
        layout: *const MemoryLayout,
        memory: Ptr,
        buffer: Ptr,
    }
    ExecutableParameterMemoryKinds = 134 {
        executable: Ptr,
        num: usize,
        kinds: *const *const c_char,
        kind_sizes: *const usize,
    }
}

args! {
    Program {
        code: *mut c_char,
        code_size: usize,
        format: *const c_char,
        format_size: usize,
    }
    RawExecuteOptions {
        send_callbacks: Ptr,
        recv_callbacks: Ptr,
        num_send_ops: usize,
        num_recv_ops: usize,
        launch_id: c_int,
        non_donatable: *const i64,
        num_non_donatable: usize,
        context: Ptr,
        call_location: *const c_char,
        num_tasks: usize,
        task_ids: Ptr,
        incarnation_ids: Ptr,
        multi_slice_config: Ptr,
    }
    NamedValue {
        name: *const c_char,
        name_size: usize,
        kind: c_int,
        value: u64,
        value_size: usize,
    }
    // The tiled arm of the union; the strided arm is shorter and never built here.
    MemoryLayout {
        tiled_struct_size: usize,
        tiled_extension_start: Ptr,
        minor_to_major: *const i64,
        minor_to_major_size: usize,
        tile_dims: *const i64,
        tile_dim_sizes: *const usize,
        num_tiles: usize,
        kind: c_int,
    }
    // Layouts extension.
    LayoutDestroy { layout: Ptr }
    LayoutSerialize {
        layout: Ptr,
        bytes: *const c_char,
        bytes_size: usize,
        serialized: Ptr,
        deleter: Option<unsafe extern "C" fn(Ptr)>,
    }
    ClientGetDefaultLayout {
        client: Ptr,
        element_type: u32,
        dims: *const i64,
        num_dims: usize,
        layout: Ptr,
    }
    ExecutableGetLayouts { executable: Ptr, num: usize, layouts: *const Ptr }
    // Shardings extension.
    ExecutableGetShardings {
        executable: Ptr,
        num: usize,
        shardings: *const *const c_char,
        sizes: *const usize,
    }
    // FFI extension.
    FfiTypeRegister {
        name: *const c_char,
        name_size: usize,
        type_id: i64,
        type_info: *const FfiTypeInfo,
    }
    FfiUserDataAdd { context: Ptr, type_id: i64, data: Ptr }
}

/// Registration of a handler; this one struct has no extension pointer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct FfiRegisterHandler {
    pub(crate) struct_size: usize,
    pub(crate) name: *const c_char,
    pub(crate) name_size: usize,
    pub(crate) handler: Ptr,
    pub(crate) platform: *const c_char,
    pub(crate) platform_size: usize,
    pub(crate) traits: u32,
}
// SAFETY: repr(C), integers and pointers only, size first.
unsafe impl Args for FfiRegisterHandler {}

/// Hooks of a registered type; all null here: the owner of the context frees the data.
/// Longer than any version's own struct, since it carries no size.
#[repr(C)]
pub(crate) struct FfiTypeInfo {
    pub(crate) hooks: [usize; 16],
}

/// Kinds of `NamedValue`.
pub(crate) const NAMED_STRING: c_int = 0;
pub(crate) const NAMED_I64: c_int = 1;
pub(crate) const NAMED_I64_LIST: c_int = 2;
pub(crate) const NAMED_F32: c_int = 3;
pub(crate) const NAMED_BOOL: c_int = 4;

/// Host buffer semantics: the plugin copies before the call returns.
pub(crate) const HOST_ONLY_DURING_CALL: c_int = 0;
/// Host buffer semantics: the plugin reads the block in place and never writes it.
pub(crate) const HOST_IMMUTABLE_ZERO_COPY: c_int = 2;
/// Host buffer semantics: the block becomes the device buffer.
pub(crate) const HOST_MUTABLE_ZERO_COPY: c_int = 3;

/// Extension numbers.
pub(crate) const EXT_LAYOUTS: c_int = 4;
pub(crate) const EXT_FFI: c_int = 5;
pub(crate) const EXT_SHARDINGS: c_int = 19;

/// Size of the tail of zeros behind every argument struct.
pub(crate) const TAIL: usize = 128;

/// An argument struct with a tail of zeros, so that a newer plugin finds its own newer fields
/// unset instead of refusing the call.
#[repr(C)]
pub(crate) struct Padded<T: Args> {
    pub(crate) args: T,
    tail: [u8; TAIL],
}

impl<T: Args> Padded<T> {
    /// All zero but the size, which counts the tail.
    pub(crate) fn new() -> Self {
        // SAFETY: `Args` promises that zero bytes are a value and that the size comes first.
        unsafe {
            let mut padded: Self = std::mem::zeroed();
            (&raw mut padded).cast::<usize>().write(size_of::<Self>());
            padded
        }
    }
}

/// A dense row-major device layout. `minor_to_major` must outlive the result.
pub(crate) fn dense_layout(minor_to_major: &[i64]) -> Padded<MemoryLayout> {
    let mut layout = Padded::<MemoryLayout>::new();
    layout.args.tiled_struct_size = size_of::<usize>() * 7;
    layout.args.minor_to_major = minor_to_major.as_ptr();
    layout.args.minor_to_major_size = minor_to_major.len();
    layout
}

/// Dimension numbers from the last to the first.
pub(crate) fn row_major(rank: usize) -> Vec<i64> {
    (0..rank as i64).rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Sizes of the published structs (C `sizeof`, API 0.81; the calls above 117 from later
    /// tables), by slot.
    const SIZES: &[(usize, usize)] = &[
        (0, 24),
        (1, 40),
        (2, 32),
        (3, 16),
        (5, 24),
        (6, 32),
        (8, 24),
        (9, 40),
        (10, 88),
        (11, 24),
        (12, 40),
        (13, 32),
        (14, 40),
        (16, 40),
        (20, 56),
        (22, 120),
        (23, 32),
        (25, 40),
        (26, 40),
        (27, 40),
        (28, 40),
        (29, 32),
        (31, 32),
        (32, 40),
        (33, 32),
        (35, 32),
        (36, 40),
        (40, 24),
        (42, 32),
        (43, 32),
        (44, 32),
        (45, 32),
        (46, 40),
        (47, 48),
        (48, 32),
        (49, 56),
        (50, 24),
        (51, 32),
        (52, 40),
        (55, 80),
        (56, 64),
        (57, 40),
        (58, 24),
        (59, 32),
        (60, 40),
        (63, 104),
        (64, 32),
        (65, 32),
        (66, 32),
        (67, 24),
        (68, 32),
        (70, 56),
        (71, 32),
        (72, 32),
        (73, 32),
        (74, 24),
        (75, 24),
        (90, 40),
        (91, 48),
        (92, 40),
        (94, 40),
        (96, 112),
        (97, 32),
        (98, 24),
        (99, 24),
        (118, 96),
        (134, 48),
    ];

    #[test]
    fn sizes_match_the_published_structs() {
        let ours: Vec<(usize, usize)> = CALLS.iter().map(|&(_, slot, size)| (slot, size)).collect();
        assert_eq!(ours, SIZES);
        assert_eq!(size_of::<ExtensionBase>(), 24);
        assert_eq!(size_of::<ApiHead>(), API_SLOTS);
        assert_eq!(size_of::<Program>(), 48);
        assert_eq!(size_of::<NamedValue>(), 56);
        assert_eq!(size_of::<MemoryLayout>(), 80);
        assert_eq!(size_of::<RawExecuteOptions>(), 120);
        assert_eq!(size_of::<ExecutableGetShardings>(), 48);
        assert_eq!(size_of::<ClientGetDefaultLayout>(), 56);
        assert_eq!(size_of::<FfiRegisterHandler>(), 56);
    }

    #[test]
    fn offsets_match_the_published_structs() {
        assert_eq!(offset_of!(ApiHead, major), 32);
        assert_eq!(offset_of!(ExtensionBase, next), 16);
        assert_eq!(offset_of!(NamedValue, kind), 32);
        assert_eq!(offset_of!(NamedValue, value), 40);
        assert_eq!(offset_of!(MemoryLayout, minor_to_major), 32);
        assert_eq!(offset_of!(MemoryLayout, kind), 72);
        assert_eq!(offset_of!(RawExecuteOptions, non_donatable), 56);
        assert_eq!(offset_of!(RawExecuteOptions, context), 72);
        assert_eq!(offset_of!(ClientBufferFromHostBuffer, semantics), 72);
        assert_eq!(offset_of!(ClientBufferFromHostBuffer, buffer), 112);
        assert_eq!(offset_of!(ClientCreate, client), 64);
        assert_eq!(offset_of!(LoadedExecutableExecute, execute_device), 72);
        assert_eq!(offset_of!(BufferToHostBuffer, event), 48);
        assert_eq!(offset_of!(BufferGetMemoryLayout, layout), 24);
        assert_eq!(offset_of!(ClientCreateErrorBuffer, buffer), 88);
        assert_eq!(offset_of!(FfiTypeRegister, type_info), 40);
        assert_eq!(offset_of!(ExecutableGetCompiledMemoryStats, peak), 104);
    }

    #[test]
    fn a_padded_struct_states_its_whole_size() {
        let padded = Padded::<BufferDestroy>::new();
        assert_eq!(padded.args.struct_size, 24 + TAIL);
        assert!(padded.args.buffer.is_null());
    }
}
