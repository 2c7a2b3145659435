//! One session stream: requests in, in order and against credit; responses out, each once.
//!
//! Two tasks, no queue between them: the reader decodes and hands to the core; the response body takes what the core's
//! answers left in the outbox, already encoded, all of it at each poll. The reader alone reports the session's end, so it is
//! reported once and behind the last request.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::BuildHasherDefault;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use pw_proto::ifrt::{self, Attribute, Decoded, Incoming, Local, Meta, pb};
use pw_types::{Code, Event, Handle, OpId, Reply, Request, SessionId, SessionView, Status};
use rustc_hash::FxHasher;
use tokio::sync::{oneshot, watch};

use crate::callbacks::Callbacks;
use crate::downloads::Downloads;
use crate::grpc::{self, Messages};
use crate::hub::Hub;
use crate::options;
use crate::uploads::Uploads;

/// Requests of one session that the core has not taken out of its inbox.
pub const INBOX: u32 = 1024;

/// Small responses are written into blocks of this size.
const OUTBOX_BLOCK: usize = 16 << 10;

/// Responses that nobody waits for leave together, when one that is waited for does, or after this time: a write less
/// here and a wake-up less at the client for each.
const PATIENCE: Duration = Duration::from_millis(1);

pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) uploads: Uploads,
    pub(crate) downloads: Downloads,
    pub(crate) callbacks: Callbacks,
    wire: Mutex<Wire>,
    over: watch::Sender<bool>,
    unread_soft: usize,
    unread_hard: usize,
}

struct Wire {
    outbox: BytesMut,
    /// Something in the outbox may be waited for.
    urgent: bool,
    /// A task will flush the outbox.
    flushing: bool,
    /// Bytes that were taken out of the outbox so far.
    taken: u64,
    writer: Option<Waker>,
    reader: Option<Waker>,
    pending: HashMap<u64, Pending, BuildHasherDefault<FxHasher>>,
    /// Sequence number of the next response with a body.
    seq: i64,
    /// User contexts of failed requests: responses without a body cannot carry them.
    released: Vec<u64>,
    credit: u32,
    paused: bool,
    phase: Phase,
    end: Option<Status>,
}

/// A request that is not answered.
struct Pending {
    user_context: u64,
    /// The host buffer that a CopyToHost makes.
    download: Option<Handle>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Fresh,
    Opening(OpId),
    Open,
}

/// What the reader finds.
enum Read {
    Message(Bytes),
    /// The client does not take its responses.
    Unread,
    End,
}

impl Session {
    pub(crate) fn new(id: SessionId, hub: &Hub) -> Arc<Session> {
        let config = &hub.config;
        let wire = Wire {
            outbox: BytesMut::new(),
            urgent: false,
            flushing: false,
            taken: 0,
            writer: None,
            reader: None,
            pending: HashMap::default(),
            seq: 0,
            released: Vec::new(),
            credit: INBOX,
            paused: false,
            phase: Phase::Fresh,
            end: None,
        };
        Arc::new(Session {
            id,
            uploads: Uploads::new(config.parked_bytes),
            downloads: Downloads::new(config.unfetched_bytes),
            callbacks: Callbacks::new(hub.callback_address.clone()),
            wire: Mutex::new(wire),
            over: watch::channel(false).0,
            unread_soft: config.unread_soft,
            unread_hard: config.unread_hard,
        })
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Nothing more is sent than what is in the outbox, and nothing is read. The first reason counts.
    pub(crate) fn end(&self, status: Status) {
        let mut wire = self.wire();
        if wire.end.is_none() {
            wire.end = Some(status);
            wire.wake_all();
        }
    }

    /// The session has ended and all that was kept for it is gone.
    pub(crate) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    pub(crate) async fn over(&self) {
        // Closed cannot be: the sender is ours.
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// After a batch of calls below: lets the client's tasks see what they did.
    pub(crate) fn wake(self: &Arc<Session>) {
        let mut wire = self.wire();
        if wire.urgent || wire.end.is_some() || wire.outbox.len() >= OUTBOX_BLOCK / 2 {
            wire.wake_writer();
        } else if !wire.outbox.is_empty() && !wire.flushing {
            wire.flushing = true;
            let session = Arc::clone(self);
            tokio::spawn(async move {
                tokio::time::sleep(PATIENCE).await;
                session.flush();
            });
        }
        if wire.may_read() || wire.end.is_some() {
            wire.wake_reader();
        }
    }

    fn flush(&self) {
        let mut wire = self.wire();
        wire.flushing = false;
        if !wire.outbox.is_empty() {
            wire.wake_writer();
        }
    }

    pub(crate) fn ready(&self, view: &SessionView) {
        let mut wire = self.wire();
        let Phase::Opening(op) = wire.phase else { return };
        wire.phase = Phase::Open;
        if let Some(meta) = wire.answer(op) {
            wire.send(&ifrt::encode_init(op, view, self.callbacks.address(), meta));
            wire.urgent = true;
        }
    }

    pub(crate) fn refuse(&self, status: &Status) {
        let mut wire = self.wire();
        if let Phase::Opening(op) = wire.phase {
            wire.send_error(op, status);
        }
        wire.end.get_or_insert_with(|| status.clone());
    }

    pub(crate) fn reply(&self, op: OpId, result: Result<Reply, Status>) {
        let mut wire = self.wire();
        match result {
            Ok(reply) => {
                if reply == Reply::CopyToHost
                    && let Some(handle) = wire.pending.get(&op.0).and_then(|pending| pending.download)
                {
                    self.downloads.answered(handle);
                }
                if let Some(meta) = wire.answer(op) {
                    wire.send(&ifrt::encode_reply(op, &reply, meta));
                    wire.urgent |= !is_patient(&reply);
                }
            }
            Err(status) => {
                if let Some(handle) = wire.send_error(op, &status) {
                    drop(wire);
                    self.downloads.forget(self, handle);
                    wire = self.wire();
                }
            }
        }
        if wire.outbox.len() > self.unread_hard {
            wire.end.get_or_insert_with(unread);
        }
    }

    pub(crate) fn consumed(&self, count: u32) {
        let mut wire = self.wire();
        wire.credit = wire.credit.saturating_add(count).min(INBOX);
    }

    pub(crate) fn pause(&self, paused: bool) {
        self.wire().paused = paused;
    }

    fn poll_read(&self, messages: &mut Messages, cx: &mut Context<'_>) -> Poll<Read> {
        let mut wire = self.wire();
        if wire.end.is_some() {
            return Poll::Ready(Read::End);
        }
        if wire.outbox.len() > self.unread_soft {
            return Poll::Ready(Read::Unread);
        }
        // For the end of the session too, which comes from elsewhere.
        register(&mut wire.reader, cx);
        if !wire.may_read() {
            return Poll::Pending;
        }
        drop(wire);
        messages.poll_next(cx).map(|message| match message {
            Some(Ok(message)) => Read::Message(message),
            Some(Err(status)) => {
                self.end(status);
                Read::End
            }
            None => {
                self.end(Status::new(Code::Cancelled, "the client closed its session"));
                Read::End
            }
        })
    }

    /// Waits until responses were taken; gives up when none was for `wait`.
    async fn drained(&self, wait: std::time::Duration) {
        loop {
            let before = self.wire().taken;
            let room = std::future::poll_fn(|cx| {
                let mut wire = self.wire();
                if wire.end.is_some() || wire.outbox.len() <= self.unread_soft {
                    return Poll::Ready(());
                }
                register(&mut wire.reader, cx);
                Poll::Pending
            });
            if tokio::time::timeout(wait, room).await.is_ok() {
                return;
            }
            if self.wire().taken == before {
                self.end(unread());
                return;
            }
        }
    }

    /// Notes a request; an error ends the session.
    fn accept(&self, incoming: &Incoming) -> Result<(), Status> {
        let Incoming { op, user_context, ref request } = *incoming;
        let download = match request {
            Decoded::Core(Request::CopyToHost { host_buffer, .. }) => Some(*host_buffer),
            _ => None,
        };
        if let Some(handle) = download {
            self.downloads.expect(handle)?;
        }
        let mut wire = self.wire();
        let fits = match (wire.phase, request) {
            (Phase::Fresh, Decoded::Local(Local::Init)) => {
                wire.phase = Phase::Opening(op);
                true
            }
            (Phase::Open, request) => *request != Decoded::Local(Local::Init),
            _ => false,
        };
        if !fits {
            return Err(Status::new(Code::FailedPrecondition, "a session begins with one Init request, and goes on when it is answered"));
        }
        if wire.pending.insert(op.0, Pending { user_context, download }).is_some() {
            return Err(Status::invalid(format!("two requests have the number {op}")));
        }
        if let Decoded::Core(_) = request {
            wire.credit -= 1;
        }
        Ok(())
    }
}

impl Wire {
    fn may_read(&self) -> bool {
        self.credit > 0 && !self.paused
    }

    fn wake_writer(&mut self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }

    fn wake_reader(&mut self) {
        if let Some(waker) = self.reader.take() {
            waker.wake();
        }
    }

    fn wake_all(&mut self) {
        self.wake_writer();
        self.wake_reader();
    }

    /// What goes beside the body of the one response to `op`; `None` if it was answered before.
    fn answer(&mut self, op: OpId) -> Option<Meta> {
        let pending = self.pending.remove(&op.0)?;
        let mut released = std::mem::take(&mut self.released);
        if pending.user_context != 0 {
            released.push(pending.user_context);
        }
        let seq_num = self.seq;
        self.seq += 1;
        Some(Meta { seq_num, released })
    }

    /// Gives the host buffer that will now not come.
    fn send_error(&mut self, op: OpId, status: &Status) -> Option<Handle> {
        let pending = self.pending.remove(&op.0)?;
        if pending.user_context != 0 {
            self.released.push(pending.user_context);
        }
        self.send(&ifrt::encode_error(op, status));
        self.urgent = true;
        pending.download
    }

    fn send(&mut self, response: &pb::IfrtResponse) {
        if self.outbox.capacity() == self.outbox.len() {
            self.outbox.reserve(OUTBOX_BLOCK);
        }
        grpc::write(response, &mut self.outbox);
    }
}

/// The client has named what it gets, and goes on without the answer (protocol fact: ifrt-proxy, Execute).
fn is_patient(reply: &Reply) -> bool {
    match reply {
        Reply::Execute(execute) => execute.outputs.is_empty(),
        Reply::DestructArrays => true,
        _ => false,
    }
}

fn unread() -> Status {
    Status::new(Code::ResourceExhausted, "the client does not read its responses")
}

fn register(slot: &mut Option<Waker>, cx: &mut Context<'_>) {
    match slot {
        Some(waker) if waker.will_wake(cx.waker()) => {}
        _ => *slot = Some(cx.waker().clone()),
    }
}

/// Reads requests until the session ends, and reports that.
pub(crate) async fn read(hub: Arc<Hub>, session: Arc<Session>, asked: Result<Vec<(String, Attribute)>, Status>, mut messages: Messages) {
    let mut asked = Some(asked);
    let mut opened = false;
    loop {
        let bytes = match std::future::poll_fn(|cx| session.poll_read(&mut messages, cx)).await {
            Read::Message(bytes) => bytes,
            Read::Unread => {
                session.drained(hub.config.unread_wait).await;
                continue;
            }
            Read::End => break,
        };
        let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let incoming = match ifrt::decode_message(bytes) {
            Ok(incoming) => incoming,
            Err(error) => {
                session.end(Status::invalid(error.to_string()));
                break;
            }
        };
        if let Err(status) = session.accept(&incoming) {
            session.end(status);
            break;
        }
        match incoming.request {
            Decoded::Core(request) => hub.emit(Event::Request { session: session.id, op: incoming.op, bytes: size, request }),
            Decoded::Local(Local::Init) => {
                let options = asked.take().unwrap_or_else(|| Ok(Vec::new()));
                match options.and_then(|entries| options::session_options(entries, hub.config.token.as_deref(), session.id)) {
                    Ok(options) => {
                        hub.insert(&session);
                        hub.workers.attach(&session).await;
                        opened = true;
                        hub.emit(Event::SessionOpened { session: session.id, options });
                    }
                    Err(status) => {
                        session.refuse(&status);
                        session.wake();
                    }
                }
            }
        }
        // A stream that always has more must not keep others of this thread waiting.
        tokio::task::consume_budget().await;
    }
    finish(&hub, &session, opened).await;
}

async fn finish(hub: &Hub, session: &Session, opened: bool) {
    hub.remove(session.id);
    session.over.send_replace(true);
    session.uploads.end();
    session.downloads.end();
    session.callbacks.end();
    session.wire().wake_all();
    if opened {
        let end = session.wire().end.clone();
        let reason = end.as_ref().map(|status| status.message.clone()).unwrap_or_default();
        // A client that leaves is nothing new; one that is sent away is.
        match end {
            Some(status) if status.code != Code::Cancelled => tracing::warn!(session = %session.id, reason, "session ended by the edge"),
            _ => tracing::info!(session = %session.id, reason, "session ended"),
        }
        hub.emit(Event::SessionClosed { session: session.id, reason });
        hub.workers.detach(session.id).await;
    }
}

/// The response body of a session.
pub(crate) struct Responses {
    session: Arc<Session>,
    done: bool,
    /// Dropped with the body: when all of it was handed on, or the client is gone.
    _taken: oneshot::Sender<Infallible>,
}

impl Responses {
    pub(crate) fn new(session: Arc<Session>) -> (Responses, oneshot::Receiver<Infallible>) {
        let (_taken, taken) = oneshot::channel();
        (Responses { session, done: false, _taken }, taken)
    }
}

impl http_body::Body for Responses {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if this.done {
            return Poll::Ready(None);
        }
        let mut wire = this.session.wire();
        if !wire.outbox.is_empty() {
            let data = wire.outbox.split().freeze();
            wire.urgent = false;
            wire.taken += data.len() as u64;
            if data.len() > this.session.unread_soft {
                wire.wake_reader();
            }
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(status) = &wire.end {
            let trailers = grpc::trailers(Some(status));
            this.done = true;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        register(&mut wire.writer, cx);
        Poll::Pending
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        self.session.end(Status::new(Code::Cancelled, "the client went away"));
    }
}
