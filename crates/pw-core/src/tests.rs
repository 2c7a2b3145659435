//! Event scripts.
