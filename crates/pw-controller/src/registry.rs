//! Connections of workers and status clients: hello, frames, heartbeats, loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pw_net::NetError;
use pw_net::control::{self, Answer, ControlReader, ControlWriter, ControllerFrame, Hello, Sequence, Stamp, WorkerFrame};
use pw_types::{Code, Command, Event, HostSlot, Incarnation, Status};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};

use crate::turn::{Inbox, WorkerLink, wrong_token};
use crate::{ControllerConfig, LEASE_SECONDS};

/// Frames that may wait for their acknowledgement.
const UNACKNOWLEDGED_MAX: usize = 1 << 16;
const HEARTBEAT: Duration = Duration::from_secs(1);
const HELLO_WAIT: Duration = Duration::from_secs(10);

/// Accepts connections for ever.
pub(crate) async fn serve(listener: TcpListener, config: ControllerConfig, inbox: UnboundedSender<Inbox>) {
    let config = Arc::new(config);
    let connections = Arc::new(AtomicU64::new(0));
    loop {
        let (tcp, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let connection = connections.fetch_add(1, Ordering::Relaxed) + 1;
        let (config, inbox) = (config.clone(), inbox.clone());
        tokio::spawn(async move {
            match greet(tcp, connection, &config, &inbox).await {
                Ok(()) => {}
                Err(error) => tracing::warn!(%peer, %error, "a connection to the worker port was closed"),
            }
        });
    }
}

async fn greet(tcp: TcpStream, connection: u64, config: &ControllerConfig, inbox: &UnboundedSender<Inbox>) -> Result<(), NetError> {
    let (mut reader, mut writer) = control::accept(tcp).await?;
    let Ok(hello) = timeout(HELLO_WAIT, reader.next::<Hello>()).await else { return Ok(()) };
    let Some(hello) = hello? else { return Ok(()) };
    let (token, theirs) = match &hello {
        Hello::Worker { token, build, .. } | Hello::Status { token, build } => (token, build),
    };
    if !config.token.is_empty() && *token != config.token {
        return writer.send(&Answer::Refused { status: wrong_token() }).await;
    }
    if *theirs != config.core.build && !config.core.build.is_empty() {
        let text = format!("this peer is build {theirs}, the controller {}; both must be the same build", config.core.build);
        return writer.send(&Answer::Refused { status: Status::new(Code::FailedPrecondition, text) }).await;
    }
    match hello {
        Hello::Status { .. } => {
            let (answer, answered) = oneshot::channel();
            let _ = inbox.send(Inbox::Status { answer });
            match answered.await {
                Ok(answer) => writer.send(&answer).await,
                Err(_) => Ok(()),
            }
        }
        Hello::Worker { incarnation, wanted_slot, info, .. } => {
            let (answer, answered) = oneshot::channel();
            let (commands, from_core) = unbounded_channel();
            let name = format!("{}:{}", info.host, info.pid);
            let hello = Event::WorkerHello { connection, incarnation, wanted_slot, info };
            let _ = inbox.send(Inbox::Worker { connection, hello, link: WorkerLink { answer, commands } });
            let Ok(answer) = answered.await else { return Ok(()) };
            writer.send(&answer).await?;
            let Answer::Welcome { slot, incarnation } = answer else { return Ok(()) };
            tracing::info!(%slot, worker = name, "worker registered");
            let reason = match serve_worker(slot, incarnation, reader, writer, from_core, inbox).await {
                Ok(()) => "it closed its connection".to_owned(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(%slot, worker = name, reason, "worker lost");
            let _ = inbox.send(Inbox::Event(Event::WorkerLost { slot, incarnation, reason }));
            Ok(())
        }
    }
}

/// Carries frames both ways until the worker is gone. This task owns the numbering; a second one does the writing,
/// so that a full socket never stops the reading.
async fn serve_worker(
    slot: HostSlot,
    incarnation: Incarnation,
    mut reader: ControlReader,
    mut writer: ControlWriter,
    mut commands: UnboundedReceiver<Vec<Command>>,
    inbox: &UnboundedSender<Inbox>,
) -> Result<(), NetError> {
    let peer = reader.peer().to_owned();
    let broken = |error: pw_net::control::SequenceError| NetError::Protocol { peer: peer.clone(), what: error.to_string() };
    let (outgoing, mut frames) = channel::<ControllerFrame>(256);
    let writing = tokio::spawn(async move {
        while let Some(frame) = frames.recv().await {
            writer.send(&frame).await?;
        }
        Ok::<(), NetError>(())
    });
    let guard = AbortOnDrop(writing.abort_handle());
    let mut sequence: Sequence<()> = Sequence::new(incarnation, UNACKNOWLEDGED_MAX);
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut lease = Instant::now() + Duration::from_secs(LEASE_SECONDS);
    let frame = |stamp: Stamp, commands| ControllerFrame { seq: stamp.seq, ack: stamp.ack, incarnation: stamp.incarnation, commands };
    let result = loop {
        tokio::select! {
            biased;
            next = timeout_at(lease, reader.next::<WorkerFrame>()) => {
                let received = match next {
                    Err(_) => break Err(NetError::Closed { peer: peer.clone(), reason: format!("nothing heard for {LEASE_SECONDS} s") }),
                    Ok(Err(error)) => break Err(error),
                    Ok(Ok(None)) => break Ok(()),
                    Ok(Ok(Some(received))) => received,
                };
                lease = Instant::now() + Duration::from_secs(LEASE_SECONDS);
                let stamp = Stamp { seq: received.seq, ack: received.ack, incarnation: received.incarnation };
                if let Err(error) = sequence.receive(stamp, received.reports.is_empty()) {
                    break Err(broken(error));
                }
                for report in received.reports {
                    let _ = inbox.send(Inbox::Event(Event::Report { slot, incarnation, report }));
                }
                if sequence.acks_owed() >= 256
                    && outgoing.send(frame(sequence.heartbeat(), Vec::new())).await.is_err()
                {
                    break Ok(());
                }
            }
            batch = commands.recv(), if sequence.has_room() => {
                let Some(batch) = batch else { break Ok(()) };
                let stamp = sequence.send(()).map_err(&broken)?;
                if outgoing.send(frame(stamp, batch)).await.is_err() {
                    break Ok(());
                }
            }
            _ = heartbeat.tick() => {
                if outgoing.send(frame(sequence.heartbeat(), Vec::new())).await.is_err() {
                    break Ok(());
                }
            }
        }
    };
    drop(outgoing);
    if result.is_ok() && writing.is_finished() {
        return writing.await.unwrap_or(Ok(()));
    }
    drop(guard);
    result
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
