//! The plugin: dlopen, its table of calls, its extensions.
//!
//! Invariants:
//! 1. A loaded plugin is never unloaded; its `Api` lives for the rest of the process.
//! 2. Nothing behind the table's own `struct_size` is read, nor behind an extension's.
//! 3. One path is loaded once per process.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::abi::{self, ApiHead, Args, Call, ExtensionBase, Padded, Ptr, RawFn};
use crate::error::{PjrtError, Result, code};

/// One entry of a plugin's extension list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtensionInfo {
    /// Number of the extension.
    pub kind: i32,
    /// Bytes of its struct.
    pub struct_size: usize,
}

impl ExtensionInfo {
    /// Name of the extension, where known.
    pub fn name(&self) -> &'static str {
        const NAMES: &[(i32, &str)] = &[
            (0, "GpuCustomCall"),
            (1, "Profiler"),
            (2, "CustomPartitioner"),
            (3, "Stream"),
            (4, "Layouts"),
            (5, "Ffi"),
            (6, "MemoryDescriptions"),
            (7, "Triton"),
            (8, "RawBuffer"),
            (9, "PhaseCompile"),
            (12, "CrossHostTransfers"),
            (13, "ExecutableMetadata"),
            (14, "Callback"),
            (15, "HostAllocator"),
            (16, "TpuTopology"),
            (17, "TpuExecutable"),
            (18, "Megascale"),
            (19, "Shardings"),
            (20, "AbiVersion"),
            (21, "Collectives"),
            (22, "MultiSlice"),
            (23, "HostMemoryAllocator"),
            (24, "XlaTransform"),
        ];
        NAMES.iter().find(|(k, _)| *k == self.kind).map_or("unknown", |(_, n)| n)
    }
}

/// The table of a loaded plugin.
pub(crate) struct Api {
    table: *const ApiHead,
    struct_size: usize,
    version: (i32, i32),
    path: PathBuf,
    extensions: Vec<(ExtensionInfo, *const ExtensionBase)>,
}

// SAFETY: the table and the extensions are constants of a library that is never unloaded, and
// the PJRT calls may be made from any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

impl Api {
    /// The function in a slot, where the plugin is new enough to have it.
    fn slot(&self, slot: usize) -> Option<RawFn> {
        let offset = abi::API_SLOTS + slot * size_of::<usize>();
        if offset + size_of::<usize>() > self.struct_size {
            return None;
        }
        // SAFETY: within the table (just checked); a slot holds null or a function of this type.
        unsafe { self.table.byte_add(offset).cast::<Option<RawFn>>().read() }
    }

    /// The function at a byte offset of an extension, where there is one.
    pub(crate) fn extension_fn(&self, kind: c_int, offset: usize) -> Option<RawFn> {
        let (info, base) = self.extensions.iter().find(|(info, _)| info.kind == kind)?;
        if offset + size_of::<usize>() > info.struct_size {
            return None;
        }
        // SAFETY: within the extension's own size (just checked).
        unsafe { base.byte_add(offset).cast::<Option<RawFn>>().read() }
    }

    /// Makes a call of the main table.
    ///
    /// # Safety
    /// Every pointer that `fill` stores is valid for what the call does with it.
    pub(crate) unsafe fn call<T: Call>(&self, fill: impl FnOnce(&mut T)) -> Result<T> {
        let f = self.slot(T::SLOT).ok_or_else(|| {
            let (major, minor) = self.version;
            PjrtError::unimplemented(format!("{} is not in API {major}.{minor}", T::NAME))
        })?;
        // SAFETY: the slot belongs to this struct; the caller answers for the pointers.
        unsafe { self.call_fn(f, fill) }
    }

    /// Makes a call through a function pointer.
    ///
    /// # Safety
    /// `f` takes a `T`, and every pointer that `fill` stores is valid for it.
    pub(crate) unsafe fn call_fn<T: Args>(&self, f: RawFn, fill: impl FnOnce(&mut T)) -> Result<T> {
        let mut padded = Padded::<T>::new();
        fill(&mut padded.args);
        // SAFETY: the caller's promise.
        let error = unsafe { f((&raw mut padded).cast()) };
        if error.is_null() {
            return Ok(padded.args);
        }
        // SAFETY: a non-null result is an error that we own.
        Err(unsafe { self.take_error(error) })
    }

    /// Makes a call that can only fail by a broken plugin, as all destructors are.
    ///
    /// # Safety
    /// As `call`.
    pub(crate) unsafe fn release<T: Call>(&self, fill: impl FnOnce(&mut T)) {
        // SAFETY: the caller's promise.
        let _ = unsafe { self.call(fill) };
    }

    /// Turns the plugin's error into ours and frees it.
    ///
    /// # Safety
    /// `error` is a non-null error of this plugin that nobody uses afterwards.
    pub(crate) unsafe fn take_error(&self, error: Ptr) -> PjrtError {
        let mut text = Padded::<abi::ErrorMessage>::new();
        text.args.error = error;
        let mut status = Padded::<abi::ErrorGetCode>::new();
        status.args.error = error;
        status.args.code = code::UNKNOWN;
        let mut destroy = Padded::<abi::ErrorDestroy>::new();
        destroy.args.error = error;
        type VoidFn = unsafe extern "C" fn(Ptr);
        // SAFETY: `error` is alive until the last of the three calls; the first and the last of
        // them return nothing.
        unsafe {
            if let Some(f) = self.slot(abi::ErrorMessage::SLOT) {
                std::mem::transmute::<RawFn, VoidFn>(f)((&raw mut text).cast());
            }
            if let Some(f) = self.slot(abi::ErrorGetCode::SLOT) {
                let nested = f((&raw mut status).cast());
                debug_assert!(nested.is_null(), "the code of an error has no error");
            }
            let message = String::from_utf8_lossy(bytes(text.args.message, text.args.message_size)).into_owned();
            if let Some(f) = self.slot(abi::ErrorDestroy::SLOT) {
                std::mem::transmute::<RawFn, VoidFn>(f)((&raw mut destroy).cast());
            }
            PjrtError { code: status.args.code, message }
        }
    }
}

/// Bytes of a pointer and length that the plugin returned.
///
/// # Safety
/// Null, or valid for `len` bytes for the lifetime that the caller picks.
pub(crate) unsafe fn bytes<'a>(data: *const std::ffi::c_char, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { slice(data.cast(), len) }
}

/// A slice of a pointer and length that the plugin returned.
///
/// # Safety
/// Null, or valid for `len` items for the lifetime that the caller picks.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// A text that the plugin returned, copied.
///
/// # Safety
/// As `bytes`, for the time of the call.
pub(crate) unsafe fn text(data: *const std::ffi::c_char, len: usize) -> String {
    // SAFETY: the caller's promise.
    String::from_utf8_lossy(unsafe { bytes(data, len) }).into_owned()
}

/// A loaded PJRT plugin. Copies are handles of the same library.
#[derive(Clone, Copy)]
pub struct Plugin {
    pub(crate) api: &'static Api,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin").field("path", &self.api.path).field("version", &self.api.version).finish_non_exhaustive()
    }
}

static LOADED: Mutex<BTreeMap<PathBuf, Plugin>> = Mutex::new(BTreeMap::new());

impl Plugin {
    /// Loads the shared library at `path`. Loading the same file again gives the same plugin.
    ///
    /// The plugin reads its environment now: `NPROC`, `XLA_FLAGS` and `TF_CPP_MIN_LOG_LEVEL`
    /// must be set before.
    pub fn load(path: &Path) -> Result<Plugin> {
        let shown = path.display();
        let real = path.canonicalize().map_err(|e| PjrtError::new(code::NOT_FOUND, format!("plugin {shown}: {e}")))?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plugin) = loaded.get(&real) {
            return Ok(*plugin);
        }
        let plugin = Plugin { api: Box::leak(Box::new(open(&real, path)?)) };
        // A plugin may leave this out; where it exists it must come first.
        if plugin.api.slot(abi::PluginInitialize::SLOT).is_some() {
            // SAFETY: no pointers.
            unsafe { plugin.api.call::<abi::PluginInitialize>(|_| {}) }
                .map_err(|e| PjrtError::new(e.code, format!("plugin {shown} does not initialise: {}", e.message)))?;
        }
        loaded.insert(real, plugin);
        Ok(plugin)
    }

    /// Version of the PJRT C API that the plugin was built with.
    pub fn api_version(&self) -> (i32, i32) {
        self.api.version
    }

    /// The plugin's extensions, in its order.
    pub fn extensions(&self) -> Vec<ExtensionInfo> {
        self.api.extensions.iter().map(|(info, _)| *info).collect()
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.api.path
    }
}

/// Opens the library and checks its table.
fn open(real: &Path, named: &Path) -> Result<Api> {
    let shown = named.display();
    let fail = |text: String| PjrtError::new(code::FAILED_PRECONDITION, text);
    // SAFETY: runs the library's constructors. That is what loading a plugin means; the operator
    // names the file.
    let library =
        unsafe { libloading::Library::new(real) }.map_err(|e| fail(format!("plugin {shown} is not a loadable shared library: {e}")))?;
    // SAFETY: the symbol's type is fixed by the PJRT C API.
    let table = unsafe {
        let get = library
            .get::<unsafe extern "C" fn() -> *const ApiHead>(b"GetPjrtApi\0")
            .map_err(|_| fail(format!("plugin {shown} has no symbol GetPjrtApi")))?;
        get()
    };
    // A plugin does not survive dlclose (threads, registries), not even a refused one.
    std::mem::forget(library);
    if table.is_null() {
        return Err(fail(format!("plugin {shown}: GetPjrtApi returned null")));
    }
    // SAFETY: every version of the table starts like this.
    let head = unsafe { &*table };
    if head.struct_size < abi::API_SLOTS || head.major != 0 {
        return Err(fail(format!("plugin {shown} has PJRT API {}.{}; this build speaks major version 0", head.major, head.minor)));
    }
    let mut extensions = Vec::new();
    let mut next = head.extension_start;
    while !next.is_null() {
        // SAFETY: a non-null link is an extension of this library.
        let base = unsafe { &*next };
        extensions.push((ExtensionInfo { kind: base.kind, struct_size: base.struct_size }, next));
        next = base.next;
    }
    Ok(Api { table, struct_size: head.struct_size, version: (head.major, head.minor), path: named.to_path_buf(), extensions })
}

/// A pointer of the plugin that may cross threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: PJRT objects are used from any thread; the plugin does its own locking.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}
