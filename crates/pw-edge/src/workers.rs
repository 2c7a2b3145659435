//! Data-plane connections: one to every worker that the core says is up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use pw_net::data::{DataClient, DownloadSink};
use pw_types::{Code, FIRST_CALL_HANDLE, Handle, HostSlot, Incarnation, SessionId, Status};
use tokio::sync::{Notify, OnceCell, watch};
use tokio::time::Instant;

use crate::hub::Hub;
use crate::session::Session;

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct Workers {
    table: Mutex<BTreeMap<HostSlot, Worker>>,
}

struct Worker {
    incarnation: Incarnation,
    link: watch::Sender<Link>,
    dialer: tokio::task::AbortHandle,
}

impl Worker {
    /// Its connection ends at once, though it may be broken and hoped for.
    fn end(self) {
        if let Link::Up(connection) = &*self.link.borrow() {
            connection.client.close();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.dialer.abort();
        self.link.send_replace(Link::Gone);
    }
}

#[derive(Clone)]
enum Link {
    Connecting,
    Up(Arc<Connection>),
    /// Tried for long; still being tried.
    Unreachable(String),
    Gone,
}

pub(crate) struct Connection {
    pub(crate) client: DataClient,
    attached: Mutex<HashMap<SessionId, Arc<OnceCell<()>>>>,
}

impl Connection {
    fn attached(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<OnceCell<()>>>> {
        self.attached.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes the session known to the worker, once. A connection that fails here fails at its next use too.
    async fn attach(&self, session: &Session) {
        let cell = Arc::clone(self.attached().entry(session.id).or_default());
        let attach = || async { self.client.attach(session.id).await };
        if let Err(error) = cell.get_or_try_init(attach).await {
            tracing::debug!(session = %session.id, %error, "a session could not be attached");
        }
        if session.is_over() {
            self.detach(session.id).await;
        }
    }

    async fn detach(&self, session: SessionId) {
        if self.attached().remove(&session).is_some()
            && let Err(error) = self.client.detach(session).await
        {
            tracing::debug!(%session, %error, "a session could not be detached");
        }
    }
}

impl Workers {
    fn table(&self) -> MutexGuard<'_, BTreeMap<HostSlot, Worker>> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Starts to connect, and goes on until the worker is down.
    pub(crate) fn up(&self, hub: &Arc<Hub>, slot: HostSlot, incarnation: Incarnation, address: String) {
        let (link, _) = watch::channel(Link::Connecting);
        let dialer = tokio::spawn(dial(Arc::downgrade(hub), slot, address, link.clone())).abort_handle();
        let old = self.table().insert(slot, Worker { incarnation, link, dialer });
        if let Some(old) = old {
            old.end();
        }
    }

    pub(crate) fn down(&self, hub: &Hub, slot: HostSlot, incarnation: Incarnation) {
        let worker = {
            let mut table = self.table();
            match table.get(&slot) {
                Some(worker) if worker.incarnation == incarnation => table.remove(&slot),
                _ => None,
            }
        };
        let Some(worker) = worker else { return };
        let link = worker.link.borrow().clone();
        let connection = if let Link::Up(connection) = &link { Some(connection) } else { None };
        hub.fail_downloads(connection, &lost(slot, "it is down"));
        worker.end();
    }

    pub(crate) fn shut_down(&self) {
        let workers = std::mem::take(&mut *self.table());
        for worker in workers.into_values() {
            worker.end();
        }
    }

    /// The connection to a worker, with the session attached; waits while it is being made.
    pub(crate) async fn connection(&self, slot: HostSlot, session: &Session) -> Result<Arc<Connection>, Status> {
        let mut link = match self.table().get(&slot) {
            Some(worker) => worker.link.subscribe(),
            None => return Err(lost(slot, "it is down")),
        };
        let ready = async { link.wait_for(|link| !matches!(link, Link::Connecting)).await.map(|link| link.clone()) };
        let link = tokio::select! {
            link = ready => link.unwrap_or(Link::Gone),
            _ = session.over() => return Err(Status::new(Code::Cancelled, "the session has ended")),
        };
        match link {
            Link::Up(connection) => {
                connection.attach(session).await;
                Ok(connection)
            }
            Link::Unreachable(reason) => Err(lost(slot, &reason)),
            Link::Connecting | Link::Gone => Err(lost(slot, "it is down")),
        }
    }

    fn connections(&self) -> Vec<Arc<Connection>> {
        let up = |worker: &Worker| match &*worker.link.borrow() {
            Link::Up(connection) => Some(Arc::clone(connection)),
            _ => None,
        };
        self.table().values().filter_map(up).collect()
    }

    pub(crate) async fn attach(&self, session: &Session) {
        for connection in self.connections() {
            connection.attach(session).await;
        }
    }

    pub(crate) async fn detach(&self, session: SessionId) {
        for connection in self.connections() {
            connection.detach(session).await;
        }
    }
}

fn lost(slot: HostSlot, why: &str) -> Status {
    Status::new(Code::Unavailable, format!("worker {slot} cannot be reached with data: {why}"))
}

/// Connects, attaches every session, waits for the end of the connection, and begins again.
async fn dial(hub: Weak<Hub>, slot: HostSlot, address: String, link: watch::Sender<Link>) {
    let mut retry = RETRY_FIRST;
    let mut since = Instant::now();
    loop {
        let Some((token, patience)) = hub.upgrade().map(|hub| (hub.config.data_token.clone(), hub.config.connect_wait)) else { return };
        let sink = Arc::new(Sink { hub: hub.clone(), slot, connection: OnceLock::new(), gone: Notify::new() });
        match DataClient::connect(&address, &token, Arc::clone(&sink) as Arc<dyn DownloadSink>).await {
            Ok(client) => {
                let connection = Arc::new(Connection { client, attached: Mutex::default() });
                // Nothing can be offered before a session is attached.
                let _ = sink.connection.set(Arc::downgrade(&connection));
                for session in sessions(&hub) {
                    connection.attach(&session).await;
                }
                link.send_replace(Link::Up(Arc::clone(&connection)));
                // Those that opened in between.
                for session in sessions(&hub) {
                    connection.attach(&session).await;
                }
                drop(connection);
                sink.gone.notified().await;
                link.send_replace(Link::Connecting);
                (retry, since) = (RETRY_FIRST, Instant::now());
            }
            Err(error) => {
                tracing::debug!(%slot, %address, %error, "the data plane of a worker does not answer");
                if since.elapsed() >= patience {
                    link.send_replace(Link::Unreachable(format!("{address}: {error}")));
                }
                retry = (retry * 2).min(RETRY_MAX);
            }
        }
        tokio::time::sleep(retry).await;
    }
}

fn sessions(hub: &Weak<Hub>) -> Vec<Arc<Session>> {
    hub.upgrade().map(|hub| hub.sessions()).unwrap_or_default()
}

/// Hands what comes from one worker to the sessions.
struct Sink {
    hub: Weak<Hub>,
    slot: HostSlot,
    connection: OnceLock<Weak<Connection>>,
    gone: Notify,
}

impl Sink {
    fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.get()?.upgrade()
    }

    fn session(&self, session: SessionId) -> Option<Arc<Session>> {
        self.hub.upgrade()?.session(session)
    }
}

impl DownloadSink for Sink {
    fn offered(&self, session: SessionId, buffer: Handle, total: u64) {
        let Some(connection) = self.connection() else { return };
        if buffer.0 >= FIRST_CALL_HANDLE {
            if let Some(session) = self.session(session) {
                session.callbacks.offered(&session, buffer, total, &connection);
            }
            return;
        }
        let wanted = self.session(session).is_some_and(|session| session.downloads.offered(buffer, total, &connection));
        if !wanted {
            tokio::spawn(async move { connection.client.drop_download(session, buffer).await });
        }
    }

    fn chunk(&self, session: SessionId, buffer: Handle, data: Bytes) {
        let Some(session) = self.session(session) else { return };
        if buffer.0 >= FIRST_CALL_HANDLE {
            if let Some(connection) = self.connection() {
                session.callbacks.chunk(buffer, data, &connection);
            }
            return;
        }
        if let Err(status) = session.downloads.chunk(buffer, data) {
            session.end(status);
        }
    }

    fn failed(&self, session: SessionId, buffer: Handle, status: Status) {
        let Some(session) = self.session(session) else { return };
        match self.connection() {
            Some(connection) if buffer.0 >= FIRST_CALL_HANDLE => session.callbacks.withdrawn(Some(buffer), &connection),
            _ => session.downloads.failed(buffer, status),
        }
    }

    fn disconnected(&self, reason: &str) {
        tracing::warn!(slot = %self.slot, reason, "the data plane of a worker broke off");
        if let Some(hub) = self.hub.upgrade() {
            hub.fail_downloads(self.connection().as_ref(), &lost(self.slot, reason));
        }
        self.gone.notify_one();
    }
}
