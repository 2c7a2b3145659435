//! The bulk data plane: host buffers between an edge and the workers.
//!
//! The edge dials each worker ([`DataClient`]); the worker listens ([`DataServer`]). A transfer is named by session and
//! host buffer. Uploads go edge → worker, downloads worker → edge; many are under way on one connection, in slices of
//! at most [`SLICE_BYTES`] that take turns.
//!
//! Invariants:
//! 1. A connection is always read: upload bytes go straight into their target, and a download is sent only against
//!    credit (its first [`FIRST_BYTES`] excepted), so no transfer waits for the reader of another one.
//! 2. Every upload that was begun ends in exactly one `landed` or `failed`; `done` of every offer is called exactly once.
//! 3. Nobody's callback is called with a lock held.
//! 4. A TCP connection that breaks is replaced by another, and what was on its way is sent again, to the byte; only what
//!    cannot be had back within 10 s ends the connection (`wire.rs`).

mod client;
mod frame;
mod kept;
mod outbox;
mod server;
mod wire;

use bytes::Bytes;
use pw_types::{Handle, SessionId, Status};

pub use client::DataClient;
pub use server::{DataServer, Presence};

/// Most bytes of one transfer in one frame.
pub const SLICE_BYTES: usize = 1 << 20;

/// What of an upload rides in its first frame, and what of a download is sent without credit.
pub const FIRST_BYTES: usize = 64 << 10;

/// What an edge does with downloads. Called from the connection's reader: must return soon, whatever was asked for has
/// to be taken.
pub trait DownloadSink: Send + Sync + 'static {
    fn offered(&self, session: SessionId, buffer: Handle, total: u64);
    /// The next bytes, in order; never empty. The last one makes up the total.
    fn chunk(&self, session: SessionId, buffer: Handle, data: Bytes);
    /// No (more) bytes will come. May be the first that is heard of this download.
    fn failed(&self, session: SessionId, buffer: Handle, status: Status);
    /// The connection is gone for good, once, and everything on it. Not called when the client was dropped or closed.
    fn disconnected(&self, reason: &str);
}

/// What a worker does with uploads. Called from the connection's reader: must return soon.
pub trait UploadSink: Send + Sync + 'static {
    /// Memory for `total` bytes; Err refuses the upload, whose bytes are then thrown away. A refused upload is not
    /// heard of again.
    fn begin(&self, session: SessionId, buffer: Handle, total: u64) -> Result<Box<dyn UploadTarget>, Status>;
    /// All bytes are there.
    fn landed(&self, session: SessionId, buffer: Handle, target: Box<dyn UploadTarget>);
    /// Given up by the edge, or its connection is gone. May be the first that is heard of this upload.
    fn failed(&self, session: SessionId, buffer: Handle, status: Status);
    /// The edge, or another worker, has come with this session.
    fn attached(&self, _session: SessionId) {}
    /// The edge has left this session; what was under way has failed before.
    fn detached(&self, session: SessionId);
}

/// Where the bytes of an upload go.
pub trait UploadTarget: Send {
    /// As long as the `total` it was made for.
    fn bytes(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send>;
}

/// Where the bytes of a download come from. Must always give the same bytes.
pub trait DownloadSource: Send + Sync {
    fn bytes(&self) -> &[u8];
}

/// A plain buffer, for tests and small things.
impl UploadTarget for Vec<u8> {
    fn bytes(&mut self) -> &mut [u8] {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send> {
        self
    }
}

impl DownloadSource for Bytes {
    fn bytes(&self) -> &[u8] {
        self
    }
}
