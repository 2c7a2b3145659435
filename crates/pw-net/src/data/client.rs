//! The edge's end of a data-plane connection.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use pw_types::{Handle, SessionId, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::frame::{HEADER, Header, Key, Kind, decode_status, encode_status};
use super::kept::Piece;
use super::outbox::{Flow, Frame, Outbox, Queues, writer_ended};
use super::wire::{Incoming, RESUME};
use super::{DownloadSink, FIRST_BYTES, SLICE_BYTES};
use crate::{NetError, magic};

/// Bytes of one upload that wait to be written.
const PUT_BYTES_MAX: usize = 4 << 20;

/// Bytes of all uploads that wait to be written.
const ALL_PUT_BYTES_MAX: usize = 24 << 20;

/// Uploads under way.
const PUTS_MAX: usize = 16 << 10;

/// Control frames that wait to be written.
const CONTROL_MAX: usize = 4 << 10;

const READ_BUFFER: usize = 16 << 10;

/// Between attempts to have a broken connection again.
const RETRY_FIRST: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(300);

/// Edge side, one per worker incarnation. The connection ends when the last clone is dropped.
#[derive(Clone)]
pub struct DataClient {
    inner: Arc<Inner>,
}

struct Inner {
    peer: String,
    shared: Arc<Shared>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.quiet_close();
    }
}

struct Shared {
    outbox: Outbox<Put>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    attached: BTreeSet<SessionId>,
    /// Bytes that are still to come of every download that was offered.
    downloads: BTreeMap<Key, u64>,
    /// Closed by its owner: nobody need be told.
    quiet: bool,
}

/// An upload.
struct Put {
    total: u64,
    begun: bool,
    accepted: u64,
    sent: u64,
    waiting: VecDeque<Bytes>,
    waiting_bytes: usize,
}

impl Flow for Put {
    fn is_fresh(&self) -> bool {
        !self.begun
    }

    /// The first frame waits for the first bytes, so that a small upload is one frame.
    fn is_ready(&self) -> bool {
        !self.waiting.is_empty() || (!self.begun && self.total == 0)
    }

    fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    fn is_finished(&self) -> bool {
        self.begun && self.sent == self.total
    }

    fn next(&mut self, key: Key, limit: usize) -> Frame {
        let mut data = self.waiting.pop_front().unwrap_or_default();
        if data.len() > limit {
            let rest = data.split_off(limit);
            self.waiting.push_front(rest);
        }
        self.waiting_bytes -= data.len();
        self.sent += data.len() as u64;
        let (kind, value) = if self.begun { (Kind::Chunk, 0) } else { (Kind::PutBegin, self.total) };
        self.begun = true;
        Frame { header: Header::new(kind, key, value, data.len()), body: Piece::Bytes(data) }
    }
}

impl DataClient {
    /// Connects, with a deadline; fails where the worker does not take the token. From then on a TCP connection that breaks
    /// is replaced.
    pub async fn connect(address: &str, token: &str, sink: Arc<dyn DownloadSink>) -> Result<DataClient, NetError> {
        let dialer = Dialer { address: address.to_owned(), token: token.to_owned(), name: new_name() };
        let (tcp, _) = dialer.dial(Kind::Hello, 0).await?;
        let shared = Arc::new(Shared { outbox: Outbox::new(), state: Mutex::default() });
        let wire = Arc::clone(&shared.outbox.wire);
        let opened = wire.open(wire.suspend("it was not there yet"), tcp, 0);
        opened.map_err(|what| NetError::Protocol { peer: address.to_owned(), what })?;
        let writer = Arc::clone(&shared);
        let mut writer = tokio::spawn(async move { writer.outbox.write_to_end().await });
        let reader = Arc::clone(&shared);
        tokio::spawn(async move {
            let why = tokio::select! {
                why = reader.outbox.wait_closed() => why,
                why = reader.read_all(BufReader::with_capacity(READ_BUFFER, Incoming(wire)), &*sink) => why,
                why = reader.keep_up(&dialer) => why,
                ended = &mut writer => writer_ended(ended),
            };
            reader.outbox.close(&why);
            reader.outbox.wire.close();
            reader.finish(&dialer.address, &why, &*sink);
        });
        Ok(DataClient { inner: Arc::new(Inner { peer: address.to_owned(), shared }) })
    }

    /// Lets the worker send downloads of this session.
    pub async fn attach(&self, session: SessionId) -> Result<(), NetError> {
        self.inner.shared.state().attached.insert(session);
        self.control(Frame::control(Kind::Attach, (session, Handle(0)), 0, Bytes::new()), |_| ()).await
    }

    /// The worker drops everything of the session, and so does this side, without a word to the sink.
    pub async fn detach(&self, session: SessionId) -> Result<(), NetError> {
        let all = (session, Handle(0))..=(session, Handle(u64::MAX));
        {
            let mut state = self.inner.shared.state();
            state.attached.remove(&session);
            state.downloads.retain(|key, _| !all.contains(key));
        }
        self.inner.shared.outbox.acknowledge();
        let frame = Frame::control(Kind::Detach, (session, Handle(0)), 0, Bytes::new());
        self.control(frame, |queues| drop(queues.remove_session(session))).await
    }

    /// Begins an upload of `total` bytes, which then come by [`DataClient::put_chunk`].
    pub async fn put_begin(&self, session: SessionId, buffer: Handle, total: u64) -> Result<(), NetError> {
        self.when_room(|queues| {
            if queues.get((session, buffer)).is_some() {
                return Some(Err(self.wrong(session, buffer, "is already under way")));
            }
            if queues.flows_len() >= PUTS_MAX {
                return Some(Err(self.wrong(session, buffer, "is one too many under way")));
            }
            let put = Put { total, begun: false, accepted: 0, sent: 0, waiting: VecDeque::new(), waiting_bytes: 0 };
            queues.insert((session, buffer), put);
            Some(Ok(()))
        })
        .await
    }

    /// Hands over the next bytes; waits while too much of this upload, or of all together, waits to be written.
    pub async fn put_chunk(&self, session: SessionId, buffer: Handle, mut data: Bytes) -> Result<(), NetError> {
        while data.len() > SLICE_BYTES {
            self.put_slice(session, buffer, data.split_to(SLICE_BYTES)).await?;
        }
        self.put_slice(session, buffer, data).await
    }

    async fn put_slice(&self, session: SessionId, buffer: Handle, data: Bytes) -> Result<(), NetError> {
        let key = (session, buffer);
        self.when_room(|queues| {
            let Some(put) = queues.get(key) else { return Some(Err(self.wrong(session, buffer, "is not under way"))) };
            if put.accepted + data.len() as u64 > put.total {
                return Some(Err(self.wrong(session, buffer, "gets more bytes than it was begun with")));
            }
            if data.is_empty() {
                return Some(Ok(()));
            }
            let full = |waiting: usize, limit: usize| waiting > 0 && waiting + data.len() > limit;
            if full(put.waiting_bytes, PUT_BYTES_MAX) || full(queues.waiting_bytes(), ALL_PUT_BYTES_MAX) {
                return None;
            }
            queues.update(key, |put| {
                put.accepted += data.len() as u64;
                put.waiting_bytes += data.len();
                put.waiting.push_back(data.clone());
            });
            Some(Ok(()))
        })
        .await
    }

    /// Gives up an upload, or says that one will never come.
    pub async fn put_abort(&self, session: SessionId, buffer: Handle, status: Status) -> Result<(), NetError> {
        let frame = Frame::control(Kind::PutAbort, (session, buffer), 0, encode_status(&status));
        self.control(frame, |queues| drop(queues.remove((session, buffer)))).await
    }

    /// Lets the worker send so many more bytes of a download, beyond the first that come by themselves.
    pub async fn pull(&self, session: SessionId, buffer: Handle, bytes: u64) -> Result<(), NetError> {
        self.control(Frame::control(Kind::Pull, (session, buffer), bytes, Bytes::new()), |_| ()).await
    }

    /// The rest of a download is not wanted. A chunk that is being delivered may still arrive; an offer that comes only
    /// after this has to be dropped again.
    pub async fn drop_download(&self, session: SessionId, buffer: Handle) -> Result<(), NetError> {
        self.inner.shared.state().downloads.remove(&(session, buffer));
        self.inner.shared.outbox.acknowledge();
        self.control(Frame::control(Kind::Drop, (session, buffer), 0, Bytes::new()), |_| ()).await
    }

    /// Ends the connection, a broken one too, at once and without a word to the sink.
    pub fn close(&self) {
        self.inner.shared.quiet_close();
    }

    async fn control(&self, frame: Frame, also: impl FnOnce(&mut Queues<Put>)) -> Result<(), NetError> {
        let mut once = Some((frame, also));
        self.when_room(|queues| {
            if queues.control_len() >= CONTROL_MAX {
                return None;
            }
            let (frame, also) = once.take()?;
            also(queues);
            queues.push(frame);
            Some(Ok(()))
        })
        .await?;
        // Whoever waited for room for an upload that is gone now has to know.
        self.inner.shared.outbox.emptied.notify_waiters();
        Ok(())
    }

    /// Tries until `attempt` gives a result, each time after something was written.
    async fn when_room(&self, mut attempt: impl FnMut(&mut Queues<Put>) -> Option<Result<(), NetError>>) -> Result<(), NetError> {
        let outbox = &self.inner.shared.outbox;
        loop {
            let emptied = outbox.emptied.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            if let Some(reason) = outbox.closed() {
                return Err(NetError::Closed { peer: self.inner.peer.clone(), reason });
            }
            let result = attempt(&mut outbox.lock());
            if let Some(result) = result {
                outbox.wake();
                return result;
            }
            emptied.await;
        }
    }

    fn wrong(&self, session: SessionId, buffer: Handle, what: &'static str) -> NetError {
        NetError::Upload { peer: self.inner.peer.clone(), session, buffer, what }
    }
}

/// Opens the TCP connections of one connection.
struct Dialer {
    address: String,
    token: String,
    /// Of the connection, at the worker.
    name: SessionId,
}

impl Dialer {
    /// Shows the token and waits for the answer, which says how many bytes the worker has of an earlier TCP connection.
    async fn dial(&self, kind: Kind, received: u64) -> Result<(TcpStream, u64), NetError> {
        let mut tcp = magic::DATA.dial(&self.address).await?;
        let count = magic::within(&self.address, "let us in", self.present(&mut tcp, kind, received)).await??;
        Ok((tcp, count))
    }

    async fn present(&self, tcp: &mut TcpStream, kind: Kind, received: u64) -> Result<u64, NetError> {
        let (peer, token) = (&self.address, &self.token);
        let failed = |what| move |source| NetError::Io { peer: peer.clone(), what, source };
        let protocol = |what| NetError::Protocol { peer: peer.clone(), what };
        let mut hello = Header::new(kind, (self.name, Handle(0)), received, token.len()).encode().to_vec();
        hello.extend_from_slice(token.as_bytes());
        tcp.write_all(&hello).await.map_err(failed("greet"))?;
        let (header, body) = read_frame(tcp).await.map_err(failed("read the answer of"))?.map_err(protocol)?;
        match header.kind {
            Kind::Welcome => Ok(header.value),
            Kind::Refused => Err(NetError::Refused { peer: peer.clone(), reason: decode_status(body).message }),
            other => Err(protocol(format!("{other:?} in place of an answer"))),
        }
    }
}

/// A name that no other connection has.
fn new_name() -> SessionId {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    SessionId(hasher.finish().max(1))
}

/// Another attempt may give another result.
fn may_pass(error: &NetError) -> bool {
    matches!(error, NetError::Connect { .. } | NetError::Timeout { .. } | NetError::Io { .. } | NetError::Closed { .. })
}

/// One frame; its body is a block of its own, read in place.
async fn read_frame(read: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Result<(Header, Bytes), String>> {
    let mut header = [0; HEADER];
    read.read_exact(&mut header).await?;
    let header = match Header::decode(&header) {
        Ok(header) => header,
        Err(what) => return Ok(Err(what)),
    };
    let length = header.body as usize;
    let mut body = BytesMut::with_capacity(length);
    while body.len() < length {
        let missing = length - body.len();
        if read.read_buf(&mut (&mut body).limit(missing)).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Ok((header, body.freeze())))
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    fn quiet_close(&self) {
        self.state().quiet = true;
        self.outbox.close("closed by this side");
    }

    /// Dials again when TCP breaks; says why that was in vain.
    async fn keep_up(&self, dialer: &Dialer) -> String {
        let wire = &self.outbox.wire;
        let peer = &dialer.address;
        loop {
            let why = wire.broken().await;
            tracing::debug!(peer, why, "the connection to a worker for array bytes broke");
            let deadline = Instant::now() + RESUME;
            let mut retry = RETRY_FIRST;
            loop {
                let attempt = wire.suspend(&why);
                let reason = match timeout_at(deadline, dialer.dial(Kind::Resume, attempt.received)).await {
                    Ok(Ok((tcp, count))) => match wire.open(attempt, tcp, count) {
                        Ok(()) => break,
                        Err(what) => return format!("{why}; it broke the protocol: {what}"),
                    },
                    Ok(Err(error)) if !may_pass(&error) => return format!("{why}; {}", error.chain()),
                    Ok(Err(error)) => error.chain(),
                    Err(_) => "it does not answer".to_owned(),
                };
                if Instant::now() + retry >= deadline {
                    return format!("{why}; it could not be reached again within {} s: {reason}", RESUME.as_secs());
                }
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(RETRY_MAX);
            }
            tracing::info!(peer, why, "the connection to a worker for array bytes broke and is there again; nothing is lost");
        }
    }

    /// Reads frames until the connection ends, and says why it did.
    async fn read_all(&self, mut read: BufReader<Incoming>, sink: &dyn DownloadSink) -> String {
        loop {
            match read_frame(&mut read).await {
                Ok(Ok((Header { kind: Kind::End, .. }, _))) => return "it ended".to_owned(),
                Ok(Ok((header, body))) => match self.handle(header, body, sink) {
                    Ok(ended) => self.outbox.took(&header, ended),
                    Err(what) => return format!("it broke the protocol: {what}"),
                },
                Ok(Err(what)) => return format!("it broke the protocol: {what}"),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return "it ended".to_owned(),
                Err(error) => return format!("reading failed: {error}"),
            }
        }
    }

    /// True where nothing of this transfer is awaited any more.
    fn handle(&self, header: Header, body: Bytes, sink: &dyn DownloadSink) -> Result<bool, String> {
        let (key, (session, buffer)) = (header.key(), header.key());
        let mut ended = false;
        match header.kind {
            Kind::Ack => self.outbox.acknowledged(header.value)?,
            Kind::Offer => {
                let rest = header.value - body.len() as u64;
                if body.len() < FIRST_BYTES && rest > 0 {
                    return Err(format!("an offer of {} with only {} bytes", header.value, body.len()));
                }
                {
                    let mut state = self.state();
                    // Left a moment ago.
                    if !state.attached.contains(&session) {
                        return Ok(true);
                    }
                    ended = rest == 0;
                    if rest > 0 {
                        state.downloads.insert(key, rest);
                    } else {
                        state.downloads.remove(&key);
                    }
                }
                sink.offered(session, buffer, header.value);
                if !body.is_empty() {
                    sink.chunk(session, buffer, body);
                }
            }
            Kind::Chunk => {
                {
                    let mut state = self.state();
                    // Dropped a moment ago.
                    let Some(rest) = state.downloads.get_mut(&key) else { return Ok(true) };
                    *rest = rest.checked_sub(body.len() as u64).ok_or("more bytes of a download than were offered")?;
                    if *rest == 0 {
                        state.downloads.remove(&key);
                        ended = true;
                    }
                }
                sink.chunk(session, buffer, body);
            }
            Kind::Failed => {
                {
                    let mut state = self.state();
                    state.downloads.remove(&key);
                    // Left a moment ago.
                    if !state.attached.contains(&session) {
                        return Ok(true);
                    }
                }
                ended = true;
                sink.failed(session, buffer, decode_status(body));
            }
            kind => return Err(format!("a worker does not send {kind:?}")),
        }
        Ok(ended)
    }

    fn finish(&self, peer: &str, why: &str, sink: &dyn DownloadSink) {
        if self.state().quiet {
            tracing::debug!(peer, "left the data plane");
            return;
        }
        tracing::debug!(peer, why, "lost the data plane");
        sink.disconnected(why);
    }
}
