//! PJRT C API: structs, dlopen, safe handles, extensions.
