//! Connections of workers and status clients: who they are, and who serves them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pw_net::control::{self, Answer, Hello};
use pw_net::{NetError, same_secret};
use pw_types::{Code, Event, Status};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::ControllerConfig;
use crate::link::{Link, Links, Return};
use crate::turn::{Inbox, WorkerLink, unasked_token, wrong_token};

const HELLO_WAIT: Duration = Duration::from_secs(10);

/// Accepts connections for ever.
pub(crate) async fn serve(listener: TcpListener, config: ControllerConfig, inbox: UnboundedSender<Inbox>) {
    let config = Arc::new(config);
    let connections = Arc::new(AtomicU64::new(0));
    let links = Arc::new(Links::default());
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
        let (config, inbox, links) = (config.clone(), inbox.clone(), links.clone());
        tokio::spawn(async move {
            match greet(tcp, connection, &config, &inbox, &links).await {
                Ok(()) => {}
                Err(error) => tracing::warn!(%peer, %error, "a connection to the worker port was closed"),
            }
        });
    }
}

async fn greet(
    tcp: TcpStream,
    connection: u64,
    config: &ControllerConfig,
    inbox: &UnboundedSender<Inbox>,
    links: &Links,
) -> Result<(), NetError> {
    let is_local = tcp.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
    let (mut reader, mut writer) = control::accept(tcp).await?;
    let Ok(hello) = timeout(HELLO_WAIT, reader.next::<Hello>()).await else { return Ok(()) };
    let Some(hello) = hello? else { return Ok(()) };
    let (token, theirs) = match &hello {
        Hello::Worker { token, build, .. } | Hello::Status { token, build } => (token, build),
    };
    // Worker and controller each prove it to the other, so one that has a token would refuse one that has none later.
    let must_match = !config.token.is_empty() || matches!(hello, Hello::Worker { .. });
    if must_match && !same_secret(config.token.as_bytes(), token.as_bytes()) {
        let status = if config.token.is_empty() { unasked_token() } else { wrong_token() };
        return writer.send(&Answer::Refused { status }).await;
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
        Hello::Worker { incarnation, resumes: Some(received), .. } => {
            links.give_back(incarnation, Return { reader, writer, received }).await
        }
        Hello::Worker { incarnation, wanted_slot, info, resumes: None, .. } => {
            if let Some(slot) = wanted_slot {
                links.supersede(slot).await;
            }
            let (answer, answered) = oneshot::channel();
            let (commands, from_core) = unbounded_channel();
            let name = format!("{}:{}", info.host, info.pid);
            let local_pid = is_local.then_some(info.pid);
            let hello = Event::WorkerHello { connection, incarnation, wanted_slot, info };
            let _ = inbox.send(Inbox::Worker { connection, hello, link: WorkerLink { answer, commands } });
            let Ok(answer) = answered.await else { return Ok(()) };
            writer.send(&answer).await?;
            let Answer::Welcome { slot, incarnation, .. } = answer else { return Ok(()) };
            tracing::info!(%slot, worker = name, "worker registered");
            Link::new((slot, incarnation), name, local_pid, from_core, inbox.clone()).run(links, reader, writer).await;
            Ok(())
        }
    }
}
