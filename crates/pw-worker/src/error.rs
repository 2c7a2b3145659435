//! Why a worker ends.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use pw_net::NetError;
use pw_types::Status;

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot use the PJRT plugin {}: {status}", path.display())]
    Plugin { path: PathBuf, status: Status },
    #[error("{reason}")]
    Lapack { reason: String },
    #[error("cannot use the cache folder {}", path.display())]
    Cache { path: PathBuf, source: io::Error },
    #[error("cannot listen for the data plane on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot listen for other workers on {address}")]
    ListenGang { address: SocketAddr, source: NetError },
    #[error("worker cannot reach controller at {address}")]
    Unreachable { address: String, source: NetError },
    #[error("the controller at {address} refused this worker: {}", status.message)]
    Refused { address: String, status: Status },
    #[error("the controller at {address} gave no proper answer: {reason}")]
    NoAnswer { address: String, reason: String },
    #[error("the connection to the controller at {address} is lost: {reason}")]
    Lost { address: String, reason: String },
    #[error("the process that started this worker is gone")]
    ParentGone,
    #[error("cannot start a thread")]
    Thread { source: io::Error },
    #[error("the worker cannot go on: {0}")]
    Fatal(String),
    #[error("cannot talk to the worker")]
    Pipe { source: io::Error },
}
