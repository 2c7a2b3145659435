//! The client edge: the IFRT proxy gRPC service and the host-buffer store.
//!
//! Owns: the client's connections, the framing and order of the session stream, and host buffers on their way between a
//! client and the workers. A shell of its own: it speaks [`Event`] to the core, hears [`ToEdge`] from it, moves tensor bytes
//! over the data plane, and shares no state with either (DESIGN section 2).
//!
//! Invariants:
//! 1. Requests of a session reach the core in the order in which the client sent them, at most [`INBOX`] of them at a time.
//! 2. Every request is answered once; sequence numbers count the answers with a body; a user context goes back once.
//! 3. Every session that was opened is closed once, behind its last request.
//! 4. What one client does, or fails to do, bounds its own memory and stops its own streams only (A8): unread responses
//!    stop its reader and then end the session; uploads that nobody asked for are parked; downloads wait at the worker.
//!
//! Must never: wait for the core or a worker on the path of another session, or hold a lock across an `await`.

mod callbacks;
mod config;
mod connection;
mod downloads;
mod grpc;
mod hub;
mod options;
mod service;
mod session;
mod store;
mod uploads;
mod workers;

use std::sync::Arc;

use pw_types::{Code, Event, Status, ToEdge};
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_stream::StreamExt;
use tonic::transport::server::TcpIncoming;

pub use config::{EdgeConfig, EdgeError};
pub use session::INBOX;

/// Cheap to call and never waits: the credit of each session bounds how much it is called.
pub type Events = Arc<dyn Fn(Event) + Send + Sync>;

/// Bytes of one stream that the client may send before they are read. With [`CONNECTION_WINDOW`] it decides how many
/// uploads can lie parked: a parked stream holds at most this much of its connection's window.
const STREAM_WINDOW: u32 = 2 << 20;

/// The most that HTTP/2 allows.
const CONNECTION_WINDOW: u32 = i32::MAX as u32;

/// So many streams fit the connection's window even if all of them are parked: no upload can starve another one. They bound
/// what one connection can make us hold in HTTP/2, [`STREAMS`] × [`STREAM_WINDOW`]; a client begins its uploads in the order
/// of its requests, so those that wait for a stream are those that are needed last.
const STREAMS: u32 = 128;

const _: () = assert!(STREAMS <= CONNECTION_WINDOW / STREAM_WINDOW);

const FRAME: u32 = 1 << 20;

/// Where clients come.
pub struct Listeners {
    pub clients: TcpListener,
    /// For the channels of host callbacks; `None` = such calls fail.
    pub callbacks: Option<TcpListener>,
}

impl Listeners {
    /// What clients are told. The address of all interfaces means nothing to them: they know one that leads here.
    fn callback_address(&self) -> Option<Arc<str>> {
        let bound = self.callbacks.as_ref()?.local_addr().ok()?;
        Some(if bound.ip().is_unspecified() { format!(":{}", bound.port()).into() } else { bound.to_string().into() })
    }
}

/// Serves clients until the core hangs up (`from_core` is closed: `Ok`) or the listener fails.
pub async fn serve(
    listeners: Listeners,
    config: EdgeConfig,
    events: Events,
    mut from_core: UnboundedReceiver<Vec<ToEdge>>,
) -> Result<(), EdgeError> {
    let keepalive = config.keepalive;
    let hub = hub::Hub::new(config, events, listeners.callback_address());
    let Listeners { clients, callbacks } = listeners;
    let _end = EndSessions(Arc::clone(&hub));
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS)
        .max_frame_size(FRAME)
        .http2_keepalive_interval(Some(keepalive))
        .http2_keepalive_timeout(Some(keepalive));
    let incoming = TcpIncoming::from(clients).with_nodelay(Some(true)).map(|tcp| tcp.map(connection::Connection::new));
    let mut tasks = tokio::task::JoinSet::new();
    let mut channels = tokio::task::JoinSet::new();
    if let Some(listener) = callbacks {
        channels.spawn(callbacks::serve(listener, Arc::clone(&hub)));
    }
    let service = service::Service::new(Arc::clone(&hub));
    tasks.spawn(async move {
        let mut turns = Vec::new();
        while from_core.recv_many(&mut turns, 64).await > 0 {
            hub.dispatch(turns.drain(..).flatten());
        }
    });
    tokio::select! {
        served = server.serve_with_incoming(service, incoming) => served.map_err(EdgeError::Serve),
        _ = tasks.join_next() => Ok(()),
    }
}

/// However serving ends, no session outlives it.
struct EndSessions(Arc<hub::Hub>);

impl Drop for EndSessions {
    fn drop(&mut self) {
        self.0.shut_down(&Status::new(Code::Unavailable, "the pathways controller is shutting down"));
    }
}
