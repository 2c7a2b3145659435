//! The messages of our own protocol, `proto/control.proto`.
