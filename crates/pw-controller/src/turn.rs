//! The core's loop: drain the inbox, hand every event to the core, end the turn, carry the effects out.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pw_core::{Core, Effect, Effects};
use pw_net::control::Answer;
use pw_types::{Command, Event, HostSlot, Incarnation, Status, Time, ToEdge};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use crate::log::LogWriter;

/// Events of one turn at most; what is left makes the next turn.
const TURN_EVENTS_MAX: usize = 512;

/// What wakes the core thread.
pub(crate) enum Inbox {
    Event(Event),
    /// A worker's hello, with the way back to it.
    Worker {
        connection: u64,
        hello: Event,
        link: WorkerLink,
    },
    /// A status question, with the way back.
    Status {
        answer: oneshot::Sender<Answer>,
    },
}

/// The way to one worker connection.
pub(crate) struct WorkerLink {
    pub(crate) answer: oneshot::Sender<Answer>,
    pub(crate) commands: UnboundedSender<Vec<Command>>,
}

struct Shell {
    core: Core,
    started: Instant,
    to_edge: UnboundedSender<Vec<ToEdge>>,
    log: Option<LogWriter>,
    /// Connections whose hello has not been answered.
    arriving: HashMap<u64, WorkerLink>,
    hosts: HashMap<HostSlot, (Incarnation, UnboundedSender<Vec<Command>>)>,
    status: HashMap<u64, oneshot::Sender<Answer>>,
    next_query: u64,
    fx: Effects,
}

/// Runs turns until every sender of the inbox is gone.
pub(crate) async fn run(core: Core, mut inbox: UnboundedReceiver<Inbox>, to_edge: UnboundedSender<Vec<ToEdge>>, log: Option<LogWriter>) {
    let mut shell = Shell {
        core,
        started: Instant::now(),
        to_edge,
        log,
        arriving: HashMap::new(),
        hosts: HashMap::new(),
        status: HashMap::new(),
        next_query: 0,
        fx: Effects::default(),
    };
    let mut batch = Vec::with_capacity(TURN_EVENTS_MAX);
    loop {
        let received = match shell.core.next_deadline() {
            None => inbox.recv_many(&mut batch, TURN_EVENTS_MAX).await,
            Some(deadline) => {
                let wait = Duration::from_nanos(deadline.saturating_since(shell.now()));
                match tokio::time::timeout(wait, inbox.recv_many(&mut batch, TURN_EVENTS_MAX)).await {
                    Ok(received) => received,
                    Err(_) => {
                        shell.turn(std::iter::once(Inbox::Event(Event::Tick)));
                        continue;
                    }
                }
            }
        };
        if received == 0 {
            return;
        }
        shell.turn(batch.drain(..));
    }
}

impl Shell {
    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn turn(&mut self, batch: impl Iterator<Item = Inbox>) {
        let now = self.now();
        for item in batch {
            let event = match item {
                Inbox::Event(event) => event,
                Inbox::Worker { connection, hello, link } => {
                    self.arriving.insert(connection, link);
                    hello
                }
                Inbox::Status { answer } => {
                    self.next_query += 1;
                    self.status.insert(self.next_query, answer);
                    Event::StatusQuery { query: self.next_query }
                }
            };
            self.feed(now, event);
        }
        self.feed(now, Event::EndOfTurn);
        self.carry_out();
    }

    fn feed(&mut self, now: Time, event: Event) {
        let Some(log) = &mut self.log else { return self.core.handle(now, event, &mut self.fx) };
        let end = matches!(event, Event::EndOfTurn);
        self.core.handle(now, event.clone(), &mut self.fx);
        let digest = end.then(|| self.fx.digest());
        if let Err(error) = log.write(now, event, digest) {
            tracing::error!(%error, "the event log cannot be written; recording stops");
            self.log = None;
        }
    }

    fn carry_out(&mut self) {
        let mut edge = Vec::new();
        let mut commands: Vec<(HostSlot, Incarnation, Vec<Command>)> = Vec::new();
        for effect in self.fx.list.drain(..) {
            match effect {
                Effect::Edge(message) => edge.push(message),
                Effect::Send { slot, incarnation, command } => match commands.iter_mut().find(|c| c.0 == slot && c.1 == incarnation) {
                    Some((_, _, list)) => list.push(command),
                    None => commands.push((slot, incarnation, vec![command])),
                },
                Effect::Welcome { connection, slot, incarnation } => {
                    if let Some(link) = self.arriving.remove(&connection) {
                        self.hosts.insert(slot, (incarnation, link.commands));
                        let _ = link.answer.send(Answer::Welcome { slot, incarnation, received: 0 });
                    }
                }
                Effect::Refuse { connection, status } => {
                    if let Some(link) = self.arriving.remove(&connection) {
                        let _ = link.answer.send(Answer::Refused { status });
                    }
                }
                Effect::Status { query, report } => {
                    if let Some(answer) = self.status.remove(&query) {
                        let _ = answer.send(Answer::Status { report });
                    }
                }
            }
        }
        // A host that is gone is reported by its connection; its commands are of no use to anybody.
        for (slot, incarnation, list) in commands {
            if let Some((life, sender)) = self.hosts.get(&slot)
                && *life == incarnation
            {
                let _ = sender.send(list);
            }
        }
        if !edge.is_empty() {
            let _ = self.to_edge.send(edge);
        }
    }
}

/// What a peer with a wrong token is told.
pub(crate) fn wrong_token() -> Status {
    Status::new(pw_types::Code::Unauthenticated, "the token is missing or wrong; give the controller's with --token or PATHWAYS_TOKEN")
}

/// What a worker with a token is told by a controller that has none.
pub(crate) fn unasked_token() -> Status {
    let text = "the worker has a token and the controller has none; give both the same with --token or PATHWAYS_TOKEN, or none to both";
    Status::new(pw_types::Code::Unauthenticated, text)
}
