//! Generated messages and the conversions between wire types and ours.
//!
//! Owns: the encoding of everything that crosses a socket or goes into the event log ([`control`]), and the client
//! protocol ([`ifrt`]). Decoding never panics, whatever the bytes are.

pub mod control;
pub mod ifrt;

/// What the build script made of `proto/`: one module per protobuf package.
#[allow(clippy::all, unreachable_pub, missing_docs, rustdoc::all)]
pub mod generated {
    include!(concat!(env!("OUT_DIR"), "/generated.rs"));
}
