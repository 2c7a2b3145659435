//! Test-only shared library with the `pw.sleep_us` FFI target, for stock JAX:
//!
//! ```python
//! lib = ctypes.cdll.LoadLibrary("libpw_sleep.so")
//! jax.ffi.register_ffi_target("pw.sleep_us", jax.ffi.pycapsule(lib.PwSleepUs), platform="cpu")
//! sleep = jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(x.shape, x.dtype))
//! y = sleep(x, us=np.int64(1000))
//! ```

use std::ffi::c_void;

use pw_pjrt::export::{RawCallFrame, trampoline};
use pw_pjrt::sleep::SleepUs;

/// The FFI handler.
///
/// # Safety
/// Only for a typed-FFI host to call, with its call frame.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PwSleepUs(call_frame: *mut RawCallFrame) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { trampoline::<SleepUs>(call_frame) }
}
