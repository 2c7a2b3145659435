//! The way into the cluster: dialing the controller, saying who this is, and coming back after a broken connection.

use std::time::{Duration, Instant};

use pw_net::NetError;
use pw_net::control::{Answer, ControlReader, ControlWriter, Hello, dial};
use pw_types::{HostSlot, Incarnation, Status, WorkerInfo};

use crate::error::WorkerError;
use crate::worker::WorkerConfig;

/// How long the controller may take to appear.
const CONNECT: Duration = Duration::from_secs(10);
const CONNECT_RETRY: Duration = Duration::from_millis(200);

/// How long it may take to answer. It may hold an answer while it sorts out an earlier life of the same slot.
const ANSWER: Duration = Duration::from_secs(30);

/// How long to try to come back. The controller gives a worker up sooner.
const RETURN: Duration = Duration::from_secs(15);

/// How long to try where nobody listens: that controller has ended, and another one would not know this worker.
const RETURN_REFUSED: Duration = Duration::from_secs(3);

/// Who this is.
#[derive(Clone)]
pub(crate) struct Registration {
    pub(crate) controller: String,
    token: String,
    build: String,
    wanted_slot: Option<HostSlot>,
    info: WorkerInfo,
    pub(crate) incarnation: Incarnation,
}

/// A connection to the controller.
pub(crate) struct Registered {
    pub(crate) reader: ControlReader,
    pub(crate) writer: ControlWriter,
    slot: HostSlot,
    /// Frames that the controller has taken.
    pub(crate) received: u64,
}

enum Refusal {
    Refused(Status),
    NoAnswer(String),
}

impl Registration {
    pub(crate) fn new(config: &WorkerConfig, info: WorkerInfo, incarnation: Incarnation) -> Registration {
        Registration {
            controller: config.controller.clone(),
            token: config.token.clone(),
            build: config.build.clone(),
            wanted_slot: config.slot.map(HostSlot),
            info,
            incarnation,
        }
    }

    /// The first time.
    pub(crate) async fn register(&self) -> Result<Registered, WorkerError> {
        let address = || self.controller.clone();
        let halves = connect(&self.controller).await?;
        match self.greet(halves, None).await {
            Ok(registered) => {
                tracing::info!(slot = %registered.slot, controller = %self.controller, "registered");
                Ok(registered)
            }
            Err(Refusal::Refused(status)) => Err(WorkerError::Refused { address: address(), status }),
            Err(Refusal::NoAnswer(reason)) => Err(WorkerError::NoAnswer { address: address(), reason }),
        }
    }

    /// After the connection broke. The error says why it is in vain.
    pub(crate) async fn come_back(&self, received: u64) -> Result<Registered, String> {
        let begun = Instant::now();
        loop {
            let reason = match dial(&self.controller).await {
                Err(NetError::Connect { source, .. })
                    if source.kind() == std::io::ErrorKind::ConnectionRefused && begun.elapsed() >= RETURN_REFUSED =>
                {
                    return Err("nobody listens there any more".to_owned());
                }
                Err(error) => error.chain(),
                Ok(halves) => match self.greet(halves, Some(received)).await {
                    Ok(registered) => return Ok(registered),
                    Err(Refusal::Refused(status)) => return Err(status.message),
                    Err(Refusal::NoAnswer(reason)) => reason,
                },
            };
            if begun.elapsed() >= RETURN {
                return Err(format!("it could not be reached again within {} s: {reason}", RETURN.as_secs()));
            }
            tokio::time::sleep(CONNECT_RETRY).await;
        }
    }

    async fn greet(&self, halves: (ControlReader, ControlWriter), resumes: Option<u64>) -> Result<Registered, Refusal> {
        let (mut reader, mut writer) = halves;
        let hello = Hello::Worker {
            build: self.build.clone(),
            token: self.token.clone(),
            incarnation: self.incarnation,
            wanted_slot: self.wanted_slot,
            info: self.info.clone(),
            resumes,
        };
        writer.send(&hello).await.map_err(|e| Refusal::NoAnswer(e.chain()))?;
        let answer = tokio::time::timeout(ANSWER, reader.next::<Answer>()).await;
        let answer = answer.map_err(|_| Refusal::NoAnswer(format!("none within {} s", ANSWER.as_secs())))?;
        match answer.map_err(|e| Refusal::NoAnswer(e.chain()))? {
            Some(Answer::Welcome { slot, incarnation, received }) if incarnation == self.incarnation => {
                Ok(Registered { reader, writer, slot, received })
            }
            Some(Answer::Refused { status }) => Err(Refusal::Refused(status)),
            Some(_) => Err(Refusal::NoAnswer("it answered something else".to_owned())),
            None => Err(Refusal::NoAnswer("it ended the connection".to_owned())),
        }
    }
}

async fn connect(address: &str) -> Result<(ControlReader, ControlWriter), WorkerError> {
    let deadline = Instant::now() + CONNECT;
    loop {
        let error = match dial(address).await {
            Ok(halves) => return Ok(halves),
            Err(error) => error,
        };
        // It may be starting; but what answers and is no controller will not become one.
        let hopeless = matches!(error, NetError::NotOurs { .. } | NetError::Version { .. });
        if hopeless || Instant::now() + CONNECT_RETRY >= deadline {
            return Err(WorkerError::Unreachable { address: address.to_owned(), source: error });
        }
        tokio::time::sleep(CONNECT_RETRY).await;
    }
}
