//! expected
