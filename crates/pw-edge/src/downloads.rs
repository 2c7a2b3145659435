//! Host buffers on their way out: what a worker offers waits there until the client looks it up, then streams through
//! against credit.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::Frame;
use pw_net::NetError;
use pw_net::data::FIRST_BYTES;
use pw_types::{Code, Handle, Status};

use crate::grpc;
use crate::session::Session;
use crate::workers::Connection;

/// Size of the messages of a lookup: the client is slower with smaller ones and no faster with larger.
const MESSAGE: u64 = 1 << 20;

/// Bytes on their way to one lookup, and to all of a session together.
const WINDOW_MAX: u64 = 8 << 20;
const WINDOWS: u64 = 32 << 20;

/// Handles that were promised and not fetched.
const ENTRIES_MAX: usize = 1 << 18;

pub(crate) struct Downloads {
    table: Mutex<Table>,
    /// Bytes that may lie here without a reader.
    limit: usize,
}

#[derive(Default)]
struct Table {
    entries: BTreeMap<Handle, Download>,
    /// Bytes of those that nobody reads.
    parked: usize,
    readers: u64,
    ended: bool,
}

/// One promised host buffer.
#[derive(Default)]
struct Download {
    offer: Option<(u64, Arc<Connection>)>,
    pieces: VecDeque<Bytes>,
    arrived: u64,
    failed: Option<Status>,
    read: bool,
    /// The client was told that it is ready: the worker has it.
    answered: bool,
    waker: Option<Waker>,
}

impl Download {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Downloads {
    pub(crate) fn new(limit: usize) -> Downloads {
        Downloads { table: Mutex::default(), limit }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The session asked for this host buffer.
    pub(crate) fn expect(&self, handle: Handle) -> Result<(), Status> {
        let mut table = self.table();
        if table.entries.len() >= ENTRIES_MAX {
            return Err(Status::new(Code::ResourceExhausted, format!("{ENTRIES_MAX} host buffers were asked for and not fetched")));
        }
        table.entries.entry(handle).or_default();
        Ok(())
    }

    /// A worker has it. `false` = nobody wants it.
    pub(crate) fn offered(&self, handle: Handle, total: u64, connection: &Arc<Connection>) -> bool {
        let mut table = self.table();
        match table.entries.get_mut(&handle) {
            Some(download) if download.offer.is_none() => {
                download.offer = Some((total, Arc::clone(connection)));
                download.wake();
                true
            }
            _ => false,
        }
    }

    /// An error ends the session.
    pub(crate) fn chunk(&self, handle: Handle, data: Bytes) -> Result<(), Status> {
        let mut table = self.table();
        let table = &mut *table;
        let Some(download) = table.entries.get_mut(&handle) else { return Ok(()) };
        let total = download.offer.as_ref().map_or(0, |(total, _)| *total);
        if download.arrived + data.len() as u64 > total {
            download.failed = Some(Status::internal("a worker sent more bytes than it offered"));
        } else {
            download.arrived += data.len() as u64;
            if !download.read {
                table.parked += data.len();
            }
            download.pieces.push_back(data);
        }
        download.wake();
        if table.parked > self.limit {
            return Err(Status::new(Code::ResourceExhausted, "more host buffers were asked for than fetched"));
        }
        Ok(())
    }

    pub(crate) fn failed(&self, handle: Handle, status: Status) {
        if let Some(download) = self.table().entries.get_mut(&handle) {
            download.failed.get_or_insert(status);
            download.wake();
        }
    }

    /// A connection broke: what is not here yet does not come.
    pub(crate) fn lost(&self, connection: &Arc<Connection>, status: &Status) {
        for download in self.table().entries.values_mut() {
            let Some((total, from)) = &download.offer else { continue };
            if Arc::ptr_eq(from, connection) && download.arrived < *total {
                download.failed.get_or_insert_with(|| status.clone());
                download.wake();
            }
        }
    }

    pub(crate) fn answered(&self, handle: Handle) {
        if let Some(download) = self.table().entries.get_mut(&handle) {
            download.answered = true;
        }
    }

    /// What was finished by a worker whose offer has not come. If a worker was lost, it may never come.
    pub(crate) fn missing(&self) -> Vec<Handle> {
        let table = self.table();
        let missing = table.entries.iter().filter(|(_, download)| download.answered && download.offer.is_none());
        missing.map(|(handle, _)| *handle).collect()
    }

    pub(crate) fn give_up(&self, handles: &[Handle], status: &Status) {
        let mut table = self.table();
        for handle in handles {
            if let Some(download) = table.entries.get_mut(handle).filter(|download| download.offer.is_none()) {
                download.failed.get_or_insert_with(|| status.clone());
                download.wake();
            }
        }
    }

    pub(crate) fn end(&self) {
        let mut table = self.table();
        table.ended = true;
        for mut download in std::mem::take(&mut table.entries).into_values() {
            download.wake();
        }
        table.parked = 0;
    }

    /// Forgets a host buffer; the worker is told if it still has bytes of it.
    pub(crate) fn forget(&self, session: &Session, handle: Handle) {
        let removed = {
            let mut table = self.table();
            let removed = table.entries.remove(&handle);
            if let Some(download) = removed.as_ref().filter(|download| !download.read) {
                table.parked = table.parked.saturating_sub(download.pieces.iter().map(Bytes::len).sum());
            }
            removed
        };
        let Some(mut download) = removed else { return };
        download.wake();
        if let Some((total, connection)) = download.offer.filter(|(total, _)| download.arrived < *total) {
            let id = session.id;
            tracing::debug!(session = %id, %handle, total, "a download was dropped");
            tokio::spawn(async move { connection.client.drop_download(id, handle).await });
        }
    }

    fn begin(&self, handle: Handle) -> Result<(), Status> {
        let mut table = self.table();
        let table = &mut *table;
        match table.entries.get_mut(&handle) {
            None => Err(Status::not_found(format!("there is no host buffer {handle}"))),
            Some(download) if download.read => {
                Err(Status::new(Code::FailedPrecondition, format!("host buffer {handle} is being fetched already")))
            }
            Some(download) => {
                download.read = true;
                table.parked = table.parked.saturating_sub(download.pieces.iter().map(Bytes::len).sum());
                table.readers += 1;
                Ok(())
            }
        }
    }
}

type Pull = Pin<Box<dyn Future<Output = Result<(), NetError>> + Send>>;
type Polled = Poll<Option<Result<Frame<Bytes>, Infallible>>>;

/// The response body of a HostBufferLookup call.
pub(crate) struct Lookup {
    session: Arc<Session>,
    handle: Handle,
    /// Bytes handed on, and bytes of the current message that are still to come.
    sent: u64,
    message: u64,
    /// Bytes that the worker may have sent.
    granted: u64,
    pull: Option<Pull>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Bytes,
    Trailers,
    Done,
}

/// What there is to send.
enum Next {
    Frame(Bytes),
    Wait,
    Fail(Status),
}

impl Lookup {
    pub(crate) fn new(session: Arc<Session>, handle: Handle) -> Result<Lookup, Status> {
        session.downloads.begin(handle)?;
        Ok(Lookup { session, handle, sent: 0, message: 0, granted: FIRST_BYTES as u64, pull: None, state: State::Bytes })
    }

    fn finish(&mut self, status: Option<&Status>) -> Polled {
        self.state = State::Done;
        self.session.downloads.forget(&self.session, self.handle);
        Poll::Ready(Some(Ok(Frame::trailers(grpc::trailers(status)))))
    }

    /// The next bytes, with the header of a message where one begins.
    fn next(&mut self, download: &mut Download, total: u64) -> Option<Bytes> {
        // A message begins when its first bytes are there, so that a small one is one frame.
        let mut piece = match download.pieces.pop_front() {
            None if total > 0 => return None,
            piece => piece.unwrap_or_default(),
        };
        let mut header = BytesMut::new();
        if self.message == 0 {
            self.message = (total - self.sent).min(MESSAGE);
            write_header(self.message, &mut header);
            if piece.len() > FIRST_BYTES {
                download.pieces.push_front(piece);
                return Some(header.freeze());
            }
        }
        if piece.len() as u64 > self.message {
            download.pieces.push_front(piece.split_off(self.message as usize));
        }
        self.sent += piece.len() as u64;
        self.message -= piece.len() as u64;
        if self.sent == total {
            self.state = State::Trailers;
        }
        if header.is_empty() {
            return Some(piece);
        }
        header.extend_from_slice(&piece);
        Some(header.freeze())
    }

    /// Lets the worker send more; an error says that it is gone.
    fn grant(&mut self, total: u64, connection: &Arc<Connection>, readers: u64, cx: &mut Context<'_>) -> Result<(), Status> {
        loop {
            if let Some(pull) = &mut self.pull {
                let Poll::Ready(result) = pull.as_mut().poll(cx) else { return Ok(()) };
                self.pull = None;
                result.map_err(|error| Status::new(Code::Unavailable, format!("a result cannot be fetched: {error}")))?;
            }
            let window = (WINDOWS / readers.max(1)).clamp(MESSAGE, WINDOW_MAX);
            let ahead = self.granted.saturating_sub(self.sent);
            if self.granted >= total || ahead > window / 2 {
                return Ok(());
            }
            let more = (window - ahead).min(total - self.granted);
            self.granted += more;
            let (connection, session, handle) = (Arc::clone(connection), self.session.id, self.handle);
            self.pull = Some(Box::pin(async move { connection.client.pull(session, handle, more).await }));
        }
    }

    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Next {
        let session = Arc::clone(&self.session);
        let mut table = session.downloads.table();
        let readers = table.readers;
        let Some(download) = table.entries.get_mut(&self.handle) else {
            return Next::Fail(Status::new(Code::Cancelled, "the host buffer was deleted, or the session has ended"));
        };
        if let Some(status) = &download.failed {
            return Next::Fail(status.clone());
        }
        let next = match &download.offer {
            Some((total, connection)) => {
                let (total, connection) = (*total, Arc::clone(connection));
                let next = self.next(download, total);
                if next.is_none() {
                    download.waker = Some(cx.waker().clone());
                }
                drop(table);
                if let Err(status) = self.grant(total, &connection, readers, cx) {
                    return Next::Fail(status);
                }
                next
            }
            None => {
                download.waker = Some(cx.waker().clone());
                None
            }
        };
        next.map_or(Next::Wait, Next::Frame)
    }
}

impl http_body::Body for Lookup {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        match self.state {
            State::Done => Poll::Ready(None),
            State::Trailers => self.finish(None),
            State::Bytes => match self.poll_bytes(cx) {
                Next::Frame(frame) => Poll::Ready(Some(Ok(Frame::data(frame)))),
                Next::Wait => Poll::Pending,
                Next::Fail(status) => self.finish(Some(&status)),
            },
        }
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        self.session.downloads.table().readers -= 1;
        if self.state != State::Done {
            self.session.downloads.forget(&self.session, self.handle);
        }
    }
}

/// Header of a gRPC message with one `bytes` field of this length.
fn write_header(length: u64, to: &mut BytesMut) {
    let mut field = BytesMut::with_capacity(16);
    if length > 0 {
        field.put_u8(0x0a);
        prost::encoding::encode_varint(length, &mut field);
    }
    to.reserve(grpc::HEADER + field.len() + FIRST_BYTES.min(length as usize));
    to.put_u8(0);
    to.put_u32((field.len() as u64 + length) as u32);
    to.extend_from_slice(&field);
}
