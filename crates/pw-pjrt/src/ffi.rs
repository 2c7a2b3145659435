//! FFI targets: functions of this process that a compiled program calls.
//!
//! Invariants:
//! 1. A handler sees only the execute stage; the metadata probe and the other stages are
//!    answered here.
//! 2. A handler never unwinds into the plugin: a panic becomes an INTERNAL error.
//! 3. The registry of targets belongs to the plugin, not to a client, and has no removal.

mod views;

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{self, EXT_FFI, Ptr};
use crate::error::{PjrtError, Result, code};
use crate::execute::UserData;
use crate::ffi_abi as raw;
use crate::plugin::{Plugin, bytes, slice};
use crate::rendezvous::Lane;
use crate::types::{BufferType, element_count};

pub use views::Views;

/// Byte offsets in the FFI extension.
const TYPE_REGISTER: usize = 24;
const REGISTER_HANDLER: usize = 40;

/// An error of a handler: a canonical code and a text.
pub type FfiError = PjrtError;

/// A function that a program calls as a custom-call target.
///
/// It may be called on any thread, by several threads at once. It finds out where it runs by
/// `CallFrame::user_data` or `device_ordinal`, never by its thread.
pub trait Handler: Default + Send + Sync + 'static {
    /// Does the call: reads the arguments, writes the results.
    fn call(&self, frame: &mut CallFrame<'_>) -> std::result::Result<(), FfiError>;
}

/// A registered type of user data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FfiType {
    id: i64,
}

impl FfiType {
    pub(crate) fn id(self) -> i64 {
        self.id
    }
}

impl Plugin {
    /// Registers `H` as the target `name`. Must come before programs that call it are compiled
    /// or loaded. `platform` is `Host` for CPU.
    pub fn register_ffi<H: Handler>(&self, name: &str, platform: &str) -> Result<()> {
        let register =
            self.api.extension_fn(EXT_FFI, REGISTER_HANDLER).ok_or_else(|| PjrtError::unimplemented("the plugin has no FFI extension"))?;
        let handler: unsafe extern "C" fn(*mut raw::CallFrame) -> Ptr = trampoline::<H>;
        // SAFETY: the texts live over the call; the handler is a function of this process.
        unsafe {
            self.api.call_fn::<abi::FfiRegisterHandler>(register, |a| {
                a.name = name.as_ptr().cast();
                a.name_size = name.len();
                a.handler = handler as *mut c_void;
                a.platform = platform.as_ptr().cast();
                a.platform_size = platform.len();
            })?;
        }
        Ok(())
    }

    /// Registers a type of user data under a name of this process's choice.
    pub fn register_ffi_type(&self, name: &str) -> Result<FfiType> {
        static INFO: abi::FfiTypeInfo = abi::FfiTypeInfo { hooks: [0; 16] };
        let register =
            self.api.extension_fn(EXT_FFI, TYPE_REGISTER).ok_or_else(|| PjrtError::unimplemented("the plugin has no FFI types"))?;
        // SAFETY: name and hooks live over the call, the hooks for ever.
        let args = unsafe {
            self.api.call_fn::<abi::FfiTypeRegister>(register, |a| {
                a.name = name.as_ptr().cast();
                a.name_size = name.len();
                a.type_info = &raw const INFO;
            })?
        };
        Ok(FfiType { id: args.type_id })
    }
}

/// What a plugin (or stock JAX) calls for a target.
///
/// # Safety
/// `frame` is null or the call frame of a custom call of the typed FFI.
pub unsafe extern "C" fn trampoline<H: Handler>(frame: *mut raw::CallFrame) -> *mut c_void {
    // SAFETY: the caller's promise.
    let Some(frame) = (unsafe { frame.as_ref() }) else { return std::ptr::null_mut() };
    // SAFETY: as above.
    if unsafe { answer_probe(frame) } || frame.stage != raw::STAGE_EXECUTE {
        return std::ptr::null_mut();
    }
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut call = CallFrame { raw: frame, borrowed: PhantomData };
        H::default().call(&mut call)
    }));
    let error = match result {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(e)) => e,
        Err(panic) => PjrtError::internal(format!("FFI handler panicked: {}", panic_text(&*panic))),
    };
    // SAFETY: the frame is alive for the call.
    unsafe { make_error(frame, &error) }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// Answers the probe for the handler's API version; its arguments are unset, so nothing else may
/// be read. True if this was one.
///
/// # Safety
/// `frame` is a live call frame.
unsafe fn answer_probe(frame: &raw::CallFrame) -> bool {
    let mut extension = frame.extension_start;
    // SAFETY: the list of extensions is alive for the call, and each starts with its base.
    unsafe {
        while let Some(base) = extension.as_ref() {
            if base.kind == raw::EXT_METADATA {
                let metadata = extension.cast::<raw::MetadataExtension>().read().metadata;
                if !metadata.is_null() {
                    (*metadata).major = raw::VERSION.0;
                    (*metadata).minor = host_minor(frame);
                    (*metadata).traits = 0;
                }
                return true;
            }
            extension = base.next;
        }
    }
    false
}

/// The version to report: ours, unless the host is older; the fields used here are in all.
///
/// # Safety
/// `frame.api` is null or alive.
unsafe fn host_minor(frame: &raw::CallFrame) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { frame.api.as_ref() }.map_or(raw::VERSION.1, |api| api.minor.min(raw::VERSION.1))
}

/// # Safety
/// `frame` is a live call frame.
unsafe fn make_error(frame: &raw::CallFrame, error: &PjrtError) -> *mut c_void {
    let message: Vec<u8> = error.message.bytes().filter(|&b| b != 0).collect();
    let message = CString::new(message).unwrap_or_default();
    let mut args = raw::ErrorCreate::new();
    args.message = message.as_ptr();
    args.code = if error.code == 0 { code::INTERNAL } else { error.code };
    // SAFETY: the host's function for this struct; it copies the text.
    unsafe {
        match raw::api_fn(frame, raw::ERROR_CREATE) {
            Some(create) => create((&raw mut args).cast()),
            // A host without the function is no FFI host at all.
            None => std::process::abort(),
        }
    }
}

/// An argument of a call.
#[derive(Debug, Clone, Copy)]
pub struct ArgView<'a> {
    /// Element type.
    pub element_type: BufferType,
    /// Dimensions.
    pub dims: &'a [i64],
    /// Contents, in the layout that the program fixed.
    pub bytes: &'a [u8],
}

/// An attribute of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// Integer, of any width.
    I64(i64),
    /// Unsigned 64-bit integer.
    U64(u64),
    /// Single.
    F32(f32),
    /// Double.
    F64(f64),
    /// Truth value.
    Bool(bool),
    /// Text, or other bytes.
    String(Vec<u8>),
    /// List of integers.
    I64List(Vec<i64>),
    /// Named attributes.
    Dictionary(BTreeMap<String, Attribute>),
    /// A kind that is not read here.
    Other,
}

/// One call of a target.
pub struct CallFrame<'a> {
    raw: &'a raw::CallFrame,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> CallFrame<'a> {
    /// Number of arguments.
    pub fn num_args(&self) -> usize {
        self.raw.args.size.max(0) as usize
    }

    /// Number of results.
    pub fn num_results(&self) -> usize {
        self.raw.rets.size.max(0) as usize
    }

    /// An argument.
    pub fn arg(&self, index: usize) -> Result<ArgView<'_>> {
        let (element_type, dims, data, len) = self.buffer(&self.raw.args, index, "argument")?;
        // SAFETY: the host keeps argument `index` valid for the call; a result that shares the
        // memory can only be written under an exclusive borrow of the frame.
        let bytes = if len == 0 { &[][..] } else { unsafe { slice(data.cast_const(), len) } };
        Ok(ArgView { element_type, dims, bytes })
    }

    /// Type and dimensions of a result.
    pub fn result_shape(&self, index: usize) -> Result<(BufferType, &[i64])> {
        let (element_type, dims, _, _) = self.buffer(&self.raw.rets, index, "result")?;
        Ok((element_type, dims))
    }

    /// A result's bytes, to be written. It may be the memory of an argument, so the frame is
    /// borrowed for writing and no argument is visible meanwhile.
    pub fn result_bytes(&mut self, index: usize) -> Result<&mut [u8]> {
        let (_, _, data, len) = self.buffer(&self.raw.rets, index, "result")?;
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: memory of the host, ours to write during the call; the exclusive borrow of the
        // frame keeps every other view of this crate away.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
    }

    /// Makes a result equal to an argument of the same type and dimensions. Nothing is copied
    /// where they share their memory.
    pub fn copy_arg_to_result(&mut self, arg: usize, result: usize) -> Result<()> {
        let (from_type, from_dims, from, len) = self.buffer(&self.raw.args, arg, "argument")?;
        let (to_type, to_dims, to, _) = self.buffer(&self.raw.rets, result, "result")?;
        if (from_type, from_dims) != (to_type, to_dims) {
            return Err(PjrtError::invalid(format!(
                "argument {arg} is {from_type:?}{from_dims:?}, result {result} \
                 {to_type:?}{to_dims:?}"
            )));
        }
        if len > 0 && from != to {
            // SAFETY: both are valid for `len` bytes during the call; `copy` allows overlap.
            unsafe { std::ptr::copy(from, to, len) }
        }
        Ok(())
    }

    /// All the memory of the call at once. Refused where a result shares memory with an argument or another result.
    pub fn lane(&mut self) -> Result<Lane<'_>> {
        let mut lane = Lane::default();
        let mut written: Vec<Range<usize>> = Vec::with_capacity(self.num_results());
        for index in 0..self.num_results() {
            let (_, _, data, len) = self.buffer(&self.raw.rets, index, "result")?;
            let range = data as usize..data as usize + len;
            if written.iter().any(|other| overlap(other, &range)) {
                return Err(PjrtError::internal("two results of an FFI call share memory"));
            }
            written.push(range);
            // SAFETY: memory of the host, ours to write during the call, apart from the other results; the exclusive
            // borrow of the frame keeps every other view of this crate away.
            lane.results.push(if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(data, len) } });
        }
        for index in 0..self.num_args() {
            let (_, _, data, len) = self.buffer(&self.raw.args, index, "argument")?;
            let range = data as usize..data as usize + len;
            if written.iter().any(|other| overlap(other, &range)) {
                return Err(PjrtError::internal("an argument and a result of an FFI call share memory"));
            }
            // SAFETY: valid for the call, and apart from every result.
            lane.args.push(if len == 0 { &[] } else { unsafe { slice(data.cast_const(), len) } });
        }
        Ok(lane)
    }

    fn buffer(&self, list: &'a raw::List, index: usize, what: &str) -> Result<(BufferType, &'a [i64], *mut u8, usize)> {
        let count = list.size.max(0) as usize;
        if index >= count {
            return Err(PjrtError::invalid(format!("no {what} {index}: the call has {count}")));
        }
        // SAFETY: lists of `size` entries, alive for the call; kind 1 is a buffer.
        unsafe {
            if slice(list.types, count)[index] != raw::KIND_BUFFER {
                return Err(PjrtError::invalid(format!("{what} {index} is no buffer")));
            }
            let buffer = &*slice(list.values, count)[index].cast::<raw::Buffer>();
            let element_type = BufferType::from_xla(buffer.element_type)
                .ok_or_else(|| PjrtError::unimplemented(format!("FFI element type {}", buffer.element_type)))?;
            let dims = slice(buffer.dims, buffer.rank.max(0) as usize);
            let bits = element_count(dims)?.checked_mul(element_type.bits()).ok_or_else(|| PjrtError::invalid("an array is too large"))?;
            let len = if buffer.data.is_null() { 0 } else { bits.div_ceil(8) };
            Ok((element_type, dims, buffer.data.cast(), len))
        }
    }

    /// All attributes, by name.
    pub fn attributes(&self) -> BTreeMap<String, Attribute> {
        // SAFETY: the attributes are alive for the call.
        unsafe { attributes(&self.raw.attrs) }
    }

    /// An attribute.
    pub fn attribute(&self, name: &str) -> Option<Attribute> {
        let list = &self.raw.attrs;
        let count = list.size.max(0) as usize;
        // SAFETY: the attributes are alive for the call, with `count` entries in each of their lists.
        unsafe {
            let wanted = |&i: &usize| {
                let span = &*slice(list.names, count)[i];
                bytes(span.data, span.len) == name.as_bytes()
            };
            let index = (0..count).find(wanted)?;
            Some(attribute(slice(list.types, count)[index], slice(list.values, count)[index]))
        }
    }

    /// An integer attribute.
    pub fn attribute_i64(&self, name: &str) -> Result<i64> {
        match self.attribute(name) {
            Some(Attribute::I64(value)) => Ok(value),
            Some(other) => Err(PjrtError::invalid(format!("attribute {name:?} must be a signed integer, got {other:?}"))),
            None => Err(PjrtError::invalid(format!("attribute {name:?} is missing"))),
        }
    }

    /// The value that the run's `ExecuteContext` carries for a type.
    ///
    /// Only for runs started by this crate, which always have a context: in a run without one
    /// the host crashes here.
    pub fn user_data(&self, ffi_type: FfiType) -> Result<Option<UserData>> {
        let mut id = ffi_type.id();
        let mut args = raw::ContextGet::new();
        args.ctx = self.raw.ctx;
        args.type_id = &raw mut id;
        // SAFETY: a live context; what a context of this crate holds under a type registered by
        // this crate is the address of a `UserData`, alive until the run is done.
        unsafe {
            let get = raw::api_fn(self.raw, raw::CONTEXT_GET).ok_or_else(|| PjrtError::unimplemented("the FFI host has no contexts"))?;
            let error = get((&raw mut args).cast());
            if !error.is_null() {
                // "Not found" is all that it can say.
                raw::destroy_error(self.raw, error);
                return Ok(None);
            }
            Ok(args.data.cast::<UserData>().as_ref().map(Arc::clone))
        }
    }

    /// The device: on CPU its global id.
    pub fn device_ordinal(&self) -> Result<i32> {
        let mut args = raw::DeviceOrdinalGet::new();
        args.ctx = self.raw.ctx;
        // SAFETY: the host's function for this struct.
        unsafe {
            let get = raw::api_fn(self.raw, raw::DEVICE_ORDINAL_GET)
                .ok_or_else(|| PjrtError::unimplemented("the FFI host has no device ordinal"))?;
            let error = get((&raw mut args).cast());
            if !error.is_null() {
                raw::destroy_error(self.raw, error);
                return Err(PjrtError::internal("the FFI host does not tell the device"));
            }
        }
        Ok(args.device_ordinal)
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// # Safety
/// `list` is alive, with `size` entries in each of its lists.
unsafe fn attributes(list: &raw::Attrs) -> BTreeMap<String, Attribute> {
    let count = list.size.max(0) as usize;
    // SAFETY: the caller's promise.
    unsafe {
        let types = slice(list.types, count);
        let names = slice(list.names, count);
        let values = slice(list.values, count);
        (0..count)
            .map(|i| {
                let name = &*names[i];
                let name = String::from_utf8_lossy(bytes(name.data, name.len)).into_owned();
                (name, attribute(types[i], values[i]))
            })
            .collect()
    }
}

/// # Safety
/// `value` points to what `kind` says.
unsafe fn attribute(kind: c_int, value: *const c_void) -> Attribute {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            raw::ATTR_STRING => {
                let span = &*value.cast::<raw::ByteSpan>();
                Attribute::String(bytes(span.data, span.len).to_vec())
            }
            raw::ATTR_DICTIONARY => Attribute::Dictionary(attributes(&*value.cast::<raw::Attrs>())),
            raw::ATTR_SCALAR => {
                let scalar = &*value.cast::<raw::Scalar>();
                scalar_value(scalar.element_type, scalar.value)
            }
            raw::ATTR_ARRAY => {
                let array = &*value.cast::<raw::Array>();
                integers(array).map_or(Attribute::Other, Attribute::I64List)
            }
            _ => Attribute::Other,
        }
    }
}

/// # Safety
/// `at` points to a scalar of the type.
unsafe fn scalar_value(element_type: u32, at: *const c_void) -> Attribute {
    // SAFETY: the caller's promise; reads need no alignment.
    unsafe {
        match BufferType::from_xla(element_type) {
            Some(BufferType::Pred) => Attribute::Bool(at.cast::<u8>().read() != 0),
            Some(BufferType::S8) => Attribute::I64(at.cast::<i8>().read().into()),
            Some(BufferType::S16) => Attribute::I64(at.cast::<i16>().read_unaligned().into()),
            Some(BufferType::S32) => Attribute::I64(at.cast::<i32>().read_unaligned().into()),
            Some(BufferType::S64) => Attribute::I64(at.cast::<i64>().read_unaligned()),
            Some(BufferType::U8) => Attribute::I64(at.cast::<u8>().read().into()),
            Some(BufferType::U16) => Attribute::I64(at.cast::<u16>().read_unaligned().into()),
            Some(BufferType::U32) => Attribute::I64(at.cast::<u32>().read_unaligned().into()),
            Some(BufferType::U64) => Attribute::U64(at.cast::<u64>().read_unaligned()),
            Some(BufferType::F32) => Attribute::F32(at.cast::<f32>().read_unaligned()),
            Some(BufferType::F64) => Attribute::F64(at.cast::<f64>().read_unaligned()),
            _ => Attribute::Other,
        }
    }
}

/// # Safety
/// `array` describes live memory.
unsafe fn integers(array: &raw::Array) -> Option<Vec<i64>> {
    let step = match BufferType::from_xla(array.element_type)? {
        BufferType::S8 | BufferType::U8 => 1,
        BufferType::S16 | BufferType::U16 => 2,
        BufferType::S32 | BufferType::U32 => 4,
        BufferType::S64 => 8,
        _ => return None,
    };
    (0..array.size)
        .map(|i| {
            // SAFETY: element `i` of the array.
            match unsafe { scalar_value(array.element_type, array.data.cast::<c_char>().add(i * step).cast()) } {
                Attribute::I64(value) => Some(value),
                _ => None,
            }
        })
        .collect()
}
