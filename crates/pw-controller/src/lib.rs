//! The shell around the controller's core: the core thread, the worker registry, status answers, the event log.
//!
//! Owns: when a turn begins and ends, the clock, the connections of workers. Must never: decide anything about the graph,
//! or touch the bytes of a tensor. All state that matters lives in [`pw_core::Core`]; a lock around it does not exist.

mod link;
pub mod log;
mod registry;
mod turn;

use std::path::PathBuf;
use std::sync::Arc;

use pw_core::CoreConfig;
use pw_types::{Event, ToEdge};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub use log::{LogError, ReplaySummary, replay};
use turn::Inbox;

/// How a controller runs.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    pub core: CoreConfig,
    /// Workers and status clients must show it; empty = none needed.
    pub token: String,
    /// Where the event log goes, if anywhere.
    pub record: Option<PathBuf>,
    /// A thread of its own for the core. Without it the core's loop is a task of the caller's runtime, which must then have
    /// one thread: on a small machine that saves a wake-up each way per turn.
    pub core_thread: bool,
}

/// The two ends that the edge holds.
pub struct Started {
    pub events: Arc<dyn Fn(Event) + Send + Sync>,
    /// One message per turn.
    pub from_core: UnboundedReceiver<Vec<ToEdge>>,
}

/// Seconds without a frame after which a worker is lost.
pub const LEASE_SECONDS: u64 = 10;

/// Starts the core's loop and serves workers on `listener`. Must be called inside a tokio runtime.
///
/// Returns what the edge needs: where its events go, and the messages of each turn.
pub fn start(config: ControllerConfig, listener: TcpListener) -> Result<Started, LogError> {
    let log = config.record.as_deref().map(|path| log::LogWriter::create(path, &config.core)).transpose()?;
    let (inbox, events) = unbounded_channel();
    let (to_edge, from_core) = unbounded_channel();
    let core = pw_core::Core::new(config.core.clone());
    if config.core_thread {
        spawn_core(core, events, to_edge, log);
    } else {
        tokio::spawn(turn::run(core, events, to_edge, log));
    }
    tokio::spawn(registry::serve(listener, config, inbox.clone()));
    let events = Arc::new(move |event| {
        // The core thread ends only with the process.
        let _ = inbox.send(Inbox::Event(event));
    });
    Ok(Started { events, from_core })
}

/// The core's own thread and runtime, so that nothing else is ever scheduled on it.
fn spawn_core(core: pw_core::Core, events: UnboundedReceiver<Inbox>, to_edge: UnboundedSender<Vec<ToEdge>>, log: Option<log::LogWriter>) {
    let body = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a timer");
        runtime.block_on(turn::run(core, events, to_edge, log));
    };
    std::thread::Builder::new().name("core".into()).spawn(body).expect("the operating system gives a thread");
}
