//! The C side of FFI calls: what a host hands to a handler.
//!
//! Only the parts that every 0.x version of the FFI has in the same place are declared.

use std::ffi::{c_char, c_int, c_void};

/// Version that handlers of this crate report.
pub(crate) const VERSION: (c_int, c_int) = (0, 3);

/// Extension with which a host asks for a handler's version.
pub(crate) const EXT_METADATA: c_int = 1;
/// The stage in which a handler works.
pub(crate) const STAGE_EXECUTE: c_int = 3;
/// Kind of an argument or result that is a buffer.
pub(crate) const KIND_BUFFER: c_int = 1;
/// Kinds of attributes.
pub(crate) const ATTR_ARRAY: c_int = 1;
pub(crate) const ATTR_DICTIONARY: c_int = 2;
pub(crate) const ATTR_SCALAR: c_int = 3;
pub(crate) const ATTR_STRING: c_int = 4;

/// Byte offsets of functions in the host's table.
pub(crate) const ERROR_CREATE: usize = 48;
const ERROR_DESTROY: usize = 64;
pub(crate) const CONTEXT_GET: usize = 96;
pub(crate) const DEVICE_ORDINAL_GET: usize = 184;

/// Head of an extension.
#[repr(C)]
pub(crate) struct ExtensionBase {
    pub(crate) struct_size: usize,
    pub(crate) kind: c_int,
    pub(crate) next: *const ExtensionBase,
}

/// The probe for a handler's version.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MetadataExtension {
    pub(crate) base: [usize; 3],
    pub(crate) metadata: *mut Metadata,
}

#[repr(C)]
pub(crate) struct Metadata {
    pub(crate) struct_size: usize,
    pub(crate) version_struct_size: usize,
    pub(crate) version_extension_start: *mut c_void,
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
    pub(crate) traits: u32,
}

/// Head of the host's table.
#[repr(C)]
pub(crate) struct Api {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut c_void,
    pub(crate) version_struct_size: usize,
    pub(crate) version_extension_start: *mut c_void,
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
    pub(crate) internal_api: *const c_void,
}

#[repr(C)]
pub(crate) struct List {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut c_void,
    pub(crate) size: i64,
    pub(crate) types: *const c_int,
    pub(crate) values: *const *const c_void,
}

#[repr(C)]
pub(crate) struct Attrs {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut c_void,
    pub(crate) size: i64,
    pub(crate) types: *const c_int,
    pub(crate) names: *const *const ByteSpan,
    pub(crate) values: *const *const c_void,
}

/// A call, as the host describes it.
#[repr(C)]
pub struct CallFrame {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *const ExtensionBase,
    pub(crate) api: *const Api,
    pub(crate) ctx: *mut c_void,
    pub(crate) stage: c_int,
    pub(crate) args: List,
    pub(crate) rets: List,
    pub(crate) attrs: Attrs,
}

#[repr(C)]
pub(crate) struct Buffer {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut c_void,
    pub(crate) element_type: u32,
    pub(crate) data: *mut c_void,
    pub(crate) rank: i64,
    pub(crate) dims: *const i64,
}

#[repr(C)]
pub(crate) struct ByteSpan {
    pub(crate) data: *const c_char,
    pub(crate) len: usize,
}

#[repr(C)]
pub(crate) struct Scalar {
    pub(crate) element_type: u32,
    pub(crate) value: *const c_void,
}

#[repr(C)]
pub(crate) struct Array {
    pub(crate) element_type: u32,
    pub(crate) size: usize,
    pub(crate) data: *const c_void,
}

macro_rules! host_args {
    ($( $name:ident { $($f:ident : $t:ty = $zero:expr),* $(,)? } )*) => { $(
        #[repr(C)]
        pub(crate) struct $name {
            pub(crate) struct_size: usize,
            pub(crate) extension_start: *mut c_void,
            $(pub(crate) $f: $t,)*
            // Room for fields of newer versions, unset.
            tail: [usize; 8],
        }
        impl $name {
            pub(crate) fn new() -> Self {
                Self {
                    struct_size: size_of::<Self>(),
                    extension_start: std::ptr::null_mut(),
                    $($f: $zero,)*
                    tail: [0; 8],
                }
            }
        }
    )* };
}

host_args! {
    ErrorCreate { message: *const c_char = std::ptr::null(), code: c_int = 0 }
    ErrorDestroy { error: *mut c_void = std::ptr::null_mut() }
    ContextGet {
        ctx: *mut c_void = std::ptr::null_mut(),
        type_id: *mut i64 = std::ptr::null_mut(),
        data: *mut c_void = std::ptr::null_mut(),
    }
    DeviceOrdinalGet { ctx: *mut c_void = std::ptr::null_mut(), device_ordinal: i32 = 0 }
}

type HostFn = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// A function of the host, where it is new enough to have it.
///
/// # Safety
/// `frame` is a live call frame.
pub(crate) unsafe fn api_fn(frame: &CallFrame, offset: usize) -> Option<HostFn> {
    // SAFETY: the caller's promise; the table says how long it is.
    unsafe {
        let api = frame.api.as_ref()?;
        if offset + size_of::<usize>() > api.struct_size {
            return None;
        }
        frame.api.byte_add(offset).cast::<Option<HostFn>>().read()
    }
}

/// # Safety
/// `frame` is a live call frame, and `error` an error of its host that nobody uses afterwards.
pub(crate) unsafe fn destroy_error(frame: &CallFrame, error: *mut c_void) {
    type VoidFn = unsafe extern "C" fn(*mut c_void);
    let mut args = ErrorDestroy::new();
    args.error = error;
    // SAFETY: the caller's promise; this function of the host returns nothing.
    unsafe {
        if let Some(destroy) = api_fn(frame, ERROR_DESTROY) {
            std::mem::transmute::<HostFn, VoidFn>(destroy)((&raw mut args).cast());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn offsets_match_the_published_structs() {
        assert_eq!(offset_of!(CallFrame, stage), 32);
        assert_eq!(offset_of!(CallFrame, args), 40);
        assert_eq!(offset_of!(CallFrame, rets), 80);
        assert_eq!(offset_of!(CallFrame, attrs), 120);
        assert_eq!(size_of::<CallFrame>(), 168);
        assert_eq!(offset_of!(Metadata, major), 24);
        assert_eq!(offset_of!(Metadata, traits), 32);
        assert_eq!(offset_of!(MetadataExtension, metadata), 24);
        assert_eq!(offset_of!(Buffer, data), 24);
        assert_eq!(offset_of!(Buffer, dims), 40);
        assert_eq!(size_of::<Api>(), ERROR_CREATE);
        assert_eq!(offset_of!(Scalar, value), 8);
        assert_eq!(offset_of!(Array, data), 16);
    }
}
