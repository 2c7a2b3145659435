//! Test-only shared library with the pw.sleep_us FFI target.
