//! Our own messages (`proto/control.proto`): what crosses a socket between our processes, or goes into the event log.
//!
//! Use [`Wire`]: `value.to_bytes()` cannot fail, `T::from_bytes(bytes)` never panics whatever the bytes are.
//! All processes of a cluster are the same build, so decoding is strict: a missing or unknown alternative is an error.

mod convert;
mod frames;
mod messages;
mod values;

#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;

use bytes::{Bytes, BytesMut};
use prost::Message;

pub use frames::*;
use pw_types::{
    Command, CompileReport, Event, Reply, Report, Request, SessionOptions, SessionView, Status, StatusReport, ToEdge, WorkerInfo,
};

use crate::generated::pathways::control as pb;
use convert::Convert;

/// Bytes that are not the message they should be.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct DecodeError {
    /// Names of the fields on the way, outermost first, e.g. `LogRecord.event.Request.op`.
    pub path: String,
    pub reason: Reason,
}

#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Reason {
    #[error("not protobuf of this schema: {0}")]
    Malformed(prost::DecodeError),
    #[error("missing")]
    Missing,
    #[error("unknown value {0}")]
    Unknown(i64),
}

impl DecodeError {
    pub(crate) fn new(reason: Reason) -> DecodeError {
        DecodeError { path: String::new(), reason }
    }

    /// Adds the name of what the error is inside of.
    pub(crate) fn inside(mut self, name: &str) -> DecodeError {
        self.path = if self.path.is_empty() { name.to_owned() } else { format!("{name}.{}", self.path) };
        self
    }
}

/// A value that has an encoding of its own.
pub trait Wire: Sized {
    /// For messages about it.
    const NAME: &'static str;

    /// Puts the encoding at the end of `out`.
    fn append_to(&self, out: &mut BytesMut);

    /// Byte strings inside the value are slices of `bytes`, not copies.
    fn from_bytes(bytes: Bytes) -> Result<Self, DecodeError>;

    fn to_bytes(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.append_to(&mut out);
        out.freeze()
    }
}

macro_rules! wire {
    ($($name:ident),* $(,)?) => {$(
        impl Wire for $name {
            const NAME: &'static str = stringify!($name);

            fn append_to(&self, out: &mut BytesMut) {
                let message: pb::$name = self.encode();
                out.reserve(message.encoded_len());
                message.encode(out).expect("a growing buffer has room");
            }

            fn from_bytes(bytes: Bytes) -> Result<$name, DecodeError> {
                let message = <pb::$name>::decode(bytes).map_err(|e| DecodeError::new(Reason::Malformed(e)));
                message.and_then($name::decode).map_err(|e| e.inside(Self::NAME))
            }
        }
    )*};
}

wire! {
    Answer, Command, CompileChildRequest, CompileChildResponse, CompileReport, ControllerFrame, Event, Hello, LogRecord, Reply, Report,
    Request, SessionOptions, SessionView, Status, StatusReport, ToEdge, WorkerFrame, WorkerInfo,
}
