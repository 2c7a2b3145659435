//! The client protocol: IFRT proxy, as spoken by the jaxlib wheels from 0.8.0 on.
//!
//! Owns: reading requests ([`decode_request`]), writing responses ([`encode_reply`], [`encode_init`]) and the value messages
//! inside them. Must never: panic on what a client sends, keep state between two messages, or put anything but 0 into a
//! `version_number` (those count message formats, not the negotiated versions).

mod attributes;
mod dtype;
mod init;
mod layout;
mod options;
mod reply;
mod request;
mod requests;
mod sharding;
mod tiles;
mod wire;

#[cfg(test)]
mod tests;

/// The generated messages.
pub use crate::generated::xla::ifrt::proxy as pb;

pub use attributes::{Attribute, attribute_map, attributes};
pub use dtype::{dtype_from_number, dtype_number};
pub use init::encode_init;
pub use layout::layout_from_text;
pub use options::{CompileOptions, compile_options};
pub use reply::{Meta, encode_error, encode_reply, status_from_proto, status_to_proto};
pub use request::{DecodeError, Decoded, Incoming, Local, decode_message, decode_request};
pub use sharding::{array_spec, decode_sharding, encode_sharding};

/// Oldest and newest version of the proxy protocol that is served.
pub const PROTOCOL_VERSIONS: std::ops::RangeInclusive<i32> = 15..=25;
