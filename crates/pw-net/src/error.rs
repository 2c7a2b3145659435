//! What can go wrong on a connection; each text names the peer.

use std::io;
use std::sync::Arc;

use pw_proto::control::DecodeError;
use pw_types::{Handle, SessionId, Status};

#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("cannot connect to {peer}")]
    Connect { peer: String, source: io::Error },
    #[error("{peer} did not {what} within {seconds} s")]
    Timeout { peer: String, what: &'static str, seconds: u64 },
    #[error("cannot {what} {peer}")]
    Io { peer: String, what: &'static str, source: io::Error },
    #[error("{peer} does not speak this protocol: it began with {began}")]
    NotOurs { peer: String, began: String },
    #[error("{peer} speaks version {theirs} of the {stream}, this build version {ours}")]
    Version { peer: String, stream: &'static str, theirs: u16, ours: u16 },
    #[error("{peer} sent a message of {bytes} bytes, more than the {limit} that are allowed")]
    TooLarge { peer: String, bytes: u64, limit: u64 },
    #[error("{peer} sent {bytes} bytes that are no {message}")]
    Undecodable { peer: String, bytes: usize, message: &'static str, source: DecodeError },
    #[error("{peer} broke the protocol: {what}")]
    Protocol { peer: String, what: String },
    #[error("{peer} refused the connection: {reason}")]
    Refused { peer: String, reason: String },
    #[error("upload of host buffer {buffer} of session {session} to {peer} {what}")]
    Upload { peer: String, session: SessionId, buffer: Handle, what: &'static str },
    #[error("{0}")]
    GivenUp(Arc<Status>),
    #[error("the connection to {peer} is closed: {reason}")]
    Closed { peer: String, reason: String },
}

impl NetError {
    /// The text with its causes, for logs and statuses.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }
}
