//! What all connections of an edge have in common: who is there, and the way to and from the core.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use pw_types::{Event, SessionId, Status, ToEdge};

use crate::session::Session;
use crate::uploads::{self, Decision};
use crate::workers::{Connection, Workers};
use crate::{EdgeConfig, Events};

pub(crate) struct Hub {
    pub(crate) config: EdgeConfig,
    pub(crate) workers: Workers,
    /// Where clients open the channel for host callbacks.
    pub(crate) callback_address: Option<Arc<str>>,
    events: Events,
    sessions: Mutex<BTreeMap<SessionId, Arc<Session>>>,
}

impl Hub {
    pub(crate) fn new(config: EdgeConfig, events: Events, callback_address: Option<Arc<str>>) -> Arc<Hub> {
        Arc::new(Hub { config, workers: Workers::default(), callback_address, events, sessions: Mutex::default() })
    }

    pub(crate) fn emit(&self, event: Event) {
        (self.events)(event);
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<SessionId, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn insert(&self, session: &Arc<Session>) {
        self.table().insert(session.id, Arc::clone(session));
    }

    pub(crate) fn remove(&self, session: SessionId) {
        self.table().remove(&session);
    }

    pub(crate) fn session(&self, session: SessionId) -> Option<Arc<Session>> {
        self.table().get(&session).cloned()
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<Session>> {
        self.table().values().cloned().collect()
    }

    /// A worker, or the way to it, is lost: what it offered fails, and so does what it may have been about to offer.
    pub(crate) fn fail_downloads(&self, connection: Option<&Arc<Connection>>, status: &Status) {
        for session in self.sessions() {
            if let Some(connection) = connection {
                session.downloads.lost(connection, status);
                session.callbacks.withdrawn(None, connection);
            }
            let missing = session.downloads.missing();
            if !missing.is_empty() {
                let (wait, status) = (self.config.offer_wait, status.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(wait).await;
                    session.downloads.give_up(&missing, &status);
                });
            }
        }
    }

    pub(crate) fn shut_down(&self, status: &Status) {
        for session in self.sessions() {
            session.end(status.clone());
        }
        self.workers.shut_down();
    }

    /// What the core said in one or more turns. All responses that are ready together leave together.
    pub(crate) fn dispatch(self: &Arc<Hub>, messages: impl Iterator<Item = ToEdge>) {
        let mut last: Option<Arc<Session>> = None;
        let mut touched: Vec<Arc<Session>> = Vec::new();
        for message in messages {
            let id = match &message {
                ToEdge::SessionReady(view) => view.session,
                ToEdge::SessionRefused { session, .. }
                | ToEdge::Reply { session, .. }
                | ToEdge::Consumed { session, .. }
                | ToEdge::Pause { session, .. }
                | ToEdge::Route { session, .. }
                | ToEdge::Discard { session, .. }
                | ToEdge::CloseSession { session, .. } => *session,
                ToEdge::WorkerUp { .. } | ToEdge::WorkerDown { .. } => {
                    self.worker(message);
                    continue;
                }
            };
            if last.as_ref().is_none_or(|session| session.id != id) {
                last = self.session(id);
                match &last {
                    Some(session) => touched.push(Arc::clone(session)),
                    None => {
                        self.tell_workers(id, &message);
                        continue;
                    }
                }
            }
            match &last {
                Some(session) => self.tell(session, message),
                None => self.tell_workers(id, &message),
            }
        }
        for session in touched {
            session.wake();
        }
    }

    /// A session that is gone here, but whose upload was granted before the core heard of its end: the workers must not wait
    /// for the bytes.
    fn tell_workers(self: &Arc<Hub>, session: SessionId, message: &ToEdge) {
        if matches!(message, ToEdge::Route { .. }) {
            let hub = Arc::clone(self);
            tokio::spawn(async move { hub.workers.detach(session).await });
        }
    }

    fn worker(self: &Arc<Hub>, message: ToEdge) {
        match message {
            ToEdge::WorkerUp { slot, incarnation, data_address } => self.workers.up(self, slot, incarnation, data_address),
            ToEdge::WorkerDown { slot, incarnation } => self.workers.down(self, slot, incarnation),
            _ => {}
        }
    }

    fn tell(self: &Arc<Hub>, session: &Arc<Session>, message: ToEdge) {
        let decided = match message {
            ToEdge::Reply { op, result, .. } => {
                session.reply(op, result);
                return;
            }
            ToEdge::Consumed { count, .. } => {
                session.consumed(count);
                return;
            }
            ToEdge::SessionReady(view) => {
                session.ready(&view);
                return;
            }
            ToEdge::SessionRefused { status, .. } => {
                session.refuse(&status);
                return;
            }
            ToEdge::Pause { paused, .. } => {
                session.pause(paused);
                return;
            }
            ToEdge::CloseSession { status, .. } => {
                session.end(status);
                return;
            }
            ToEdge::Route { buffer, bytes, hosts, .. } => uploads::decide(self, session, buffer, Decision::Route { bytes, hosts }),
            ToEdge::Discard { buffer, .. } => uploads::decide(self, session, buffer, Decision::Discard),
            ToEdge::WorkerUp { .. } | ToEdge::WorkerDown { .. } => return,
        };
        if let Err(status) = decided {
            session.end(status);
        }
    }
}
