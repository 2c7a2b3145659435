//! Settings and errors of the edge.

use std::time::Duration;

/// How an edge behaves. The bounds are for one session each.
#[derive(Clone, Debug)]
pub struct EdgeConfig {
    /// What clients must send as `pathways.token`; `None` = nothing.
    pub token: Option<String>,
    /// Shown to workers when the data plane connects.
    pub data_token: String,
    /// Upload bytes that are held before the core asks for them.
    pub parked_bytes: usize,
    /// Encoded responses that the client has not taken; beyond it no request is read.
    pub unread_soft: usize,
    /// Beyond it the session ends at once.
    pub unread_hard: usize,
    /// How long a client may leave responses unread while it is waited for. Then its connection is ended.
    pub unread_wait: Duration,
    /// Download bytes that lie here without a reader.
    pub unfetched_bytes: usize,
    /// After so long uploads to a worker that cannot be reached fail.
    pub connect_wait: Duration,
    /// How long a result may be missing after a worker was lost that may have had it.
    pub offer_wait: Duration,
    /// Between pings, and for their answer.
    pub keepalive: Duration,
}

impl Default for EdgeConfig {
    fn default() -> EdgeConfig {
        EdgeConfig {
            token: None,
            data_token: String::new(),
            parked_bytes: 64 << 20,
            unread_soft: 4 << 20,
            unread_hard: 64 << 20,
            unread_wait: Duration::from_secs(60),
            unfetched_bytes: 256 << 20,
            connect_wait: Duration::from_secs(20),
            offer_wait: Duration::from_secs(2),
            keepalive: Duration::from_secs(20),
        }
    }
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    #[error("the client port cannot be served")]
    Serve(#[source] tonic::transport::Error),
}
