//! The channel by which a client's process takes calls and sends answers: TCP, a port of its own, little-endian.
//!
//! Greeting: the client sends eight letters, its session (8 bytes), the length of its token (4) and the token. It is
//! answered with the same letters, a number (4; 0 = welcome), the length of a text (4) and the text.
//!
//! Then frames both ways: a kind (1 byte), three zeros, the length of the body (4), the number of the call (8), the body.
//! A call or answer begins with the count of all its bytes (8) in front of the first of them; more follow in `Data`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use pw_net::data::SLICE_BYTES;
use pw_types::{Code, SessionId, Status};
use std::collections::BTreeMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::Place;
use crate::hub::Hub;
use crate::options;
use crate::session::Session;

const GREETING: &[u8; 8] = b"PWCALLS1";
const GREETING_WAIT: Duration = Duration::from_secs(10);
const TOKEN_MAX: usize = 4 << 10;

/// Channels at a time, greeted or not.
const CHANNELS_MAX: usize = 4 << 10;

const HEADER: usize = 16;

/// Frames that wait to be written.
const FRAMES_MAX: usize = 16;

/// Largest body that is read: a slice and what is in front of it.
const BODY_MAX: usize = SLICE_BYTES + 8;

/// Texts of errors are cut to fit.
const TEXT_MAX: usize = 16 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// To the client.
    Call = 1,
    Data = 2,
    /// To the client: the rest of a call does not come.
    Cancel = 3,
    /// From the client.
    Answer = 4,
    /// From the client: the body is a text.
    Error = 5,
}

pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) call: u64,
    /// In front of the data.
    pub(super) value: Option<u64>,
    pub(super) data: Bytes,
}

impl Frame {
    pub(super) fn begin(kind: Kind, call: u64, total: u64, data: Bytes) -> Frame {
        Frame { kind, call, value: Some(total), data }
    }

    fn head(&self) -> BytesMut {
        let mut head = BytesMut::with_capacity(HEADER + 8);
        head.put_u32_le(self.kind as u32);
        head.put_u32_le((self.data.len() + if self.value.is_some() { 8 } else { 0 }) as u32);
        head.put_u64_le(self.call);
        if let Some(value) = self.value {
            head.put_u64_le(value);
        }
        head
    }
}

/// Accepts channels for as long as it is polled.
pub(crate) async fn serve(listener: TcpListener, hub: Arc<Hub>) {
    let open = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        match accepted {
            Ok((tcp, peer)) if open.fetch_add(1, Ordering::Relaxed) < CHANNELS_MAX => {
                let (hub, open) = (Arc::clone(&hub), Arc::clone(&open));
                tasks.spawn(async move {
                    if let Err(error) = admit(tcp, &hub).await {
                        tracing::debug!(%peer, %error, "a callback channel ended");
                    }
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
            Ok((_, peer)) => {
                open.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!(%peer, "too many callback channels");
            }
            Err(error) => {
                // Out of descriptors, or the peer is gone already.
                tracing::warn!(%error, "cannot accept a callback channel");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn admit(mut tcp: TcpStream, hub: &Hub) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    let asked = tokio::time::timeout(GREETING_WAIT, greeted(&mut tcp)).await??;
    let found = find(hub, asked);
    let (code, text) = found.as_ref().map_or_else(|status| (status.code as u32, &status.message[..]), |_| (0, ""));
    let mut answer = GREETING.to_vec();
    answer.put_u32_le(code);
    answer.put_u32_le(text.len() as u32);
    answer.extend_from_slice(text.as_bytes());
    tcp.write_all(&answer).await?;
    match found {
        Ok(session) => run(tcp, &session).await,
        Err(status) => Err(io::Error::other(status.message)),
    }
}

async fn greeted(tcp: &mut TcpStream) -> io::Result<(SessionId, Vec<u8>)> {
    let mut greeting = [0; 8];
    tcp.read_exact(&mut greeting).await?;
    if greeting != *GREETING {
        return Err(io::Error::other(format!("it began with \"{}\"", greeting.escape_ascii())));
    }
    let session = SessionId(tcp.read_u64_le().await?);
    let length = tcp.read_u32_le().await? as usize;
    if length > TOKEN_MAX {
        return Err(io::Error::other(format!("a token of {length} bytes")));
    }
    let mut token = vec![0; length];
    tcp.read_exact(&mut token).await?;
    Ok((session, token))
}

/// The number of a session is not to be guessed; whoever has it has its token too, if it needs one.
fn find(hub: &Hub, (session, token): (SessionId, Vec<u8>)) -> Result<Arc<Session>, Status> {
    if hub.config.token.as_ref().is_some_and(|ours| !options::equal(ours.as_bytes(), &token)) {
        return Err(Status::new(Code::Unauthenticated, "PATHWAYS_TOKEN is not the token of this server"));
    }
    hub.session(session).ok_or_else(|| Status::not_found("there is no such session"))
}

async fn run(tcp: TcpStream, session: &Arc<Session>) -> io::Result<()> {
    let (read, write) = tcp.into_split();
    let (frames, queue) = mpsc::channel(FRAMES_MAX);
    let number = session.callbacks.open(frames);
    let mut answers = Answers { session, open: BTreeMap::new() };
    let ended = tokio::select! {
        ended = write_all(write, queue) => ended,
        ended = answers.read_all(BufReader::with_capacity(HEADER + BODY_MAX, read)) => ended,
        _ = session.over() => Ok(()),
    };
    let why = ended.as_ref().err().map_or_else(|| "the session has ended".to_owned(), io::Error::to_string);
    let open = std::mem::take(&mut answers.open).into_values().map(|answer| answer.place);
    let places: Vec<Place> = open.chain(session.callbacks.close(number)).collect();
    for place in places {
        let text = format!("the client's process no longer answers host callbacks: {why}");
        place.fail(session.id, Status::new(Code::Unavailable, text)).await;
    }
    ended
}

/// Writes until there is nobody left who sends.
async fn write_all(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Frame>) -> io::Result<()> {
    while let Some(frame) = queue.recv().await {
        let mut head = frame.head();
        if frame.data.len() <= SMALL {
            head.extend_from_slice(&frame.data);
            write.write_all(&head).await?;
        } else {
            write.write_all(&head).await?;
            write.write_all(&frame.data).await?;
        }
    }
    Err(io::Error::other("another channel was opened"))
}

/// So many bytes are sooner copied than written apart.
const SMALL: usize = 16 << 10;

/// The reading half.
struct Answers<'a> {
    session: &'a Session,
    open: BTreeMap<u64, Answer>,
}

/// An answer on its way to the worker.
struct Answer {
    place: Place,
    left: u64,
}

impl Answers<'_> {
    async fn read_all(&mut self, mut read: BufReader<OwnedReadHalf>) -> io::Result<()> {
        loop {
            let mut header = [0; HEADER];
            read.read_exact(&mut header).await?;
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
            let (kind, length) = (word(0), word(4) as usize);
            let call = u64::from(word(8)) | u64::from(word(12)) << 32;
            let least = if kind == Kind::Answer as u32 { 8 } else { 0 };
            if !(least..=BODY_MAX).contains(&length) {
                return Err(io::Error::other(format!("a frame of kind {kind} with {length} bytes")));
            }
            let mut body = BytesMut::zeroed(length);
            read.read_exact(&mut body).await?;
            self.take(kind, call, body.freeze()).await?;
        }
    }

    async fn take(&mut self, kind: u32, call: u64, mut body: Bytes) -> io::Result<()> {
        let session = self.session.id;
        if kind == Kind::Answer as u32 {
            let total = u64::from_le_bytes(std::array::from_fn(|i| body[i]));
            // Withdrawn meanwhile: what comes of it is thrown away.
            let Some(place) = self.session.callbacks.answered(call) else { return Ok(()) };
            if place.connection.client.put_begin(session, place.name, total).await.is_ok() {
                self.open.insert(call, Answer { place, left: total });
            }
            self.data(call, body.split_off(8)).await
        } else if kind == Kind::Data as u32 {
            self.data(call, body).await
        } else if kind == Kind::Error as u32 {
            let place = self.open.remove(&call).map(|answer| answer.place).or_else(|| self.session.callbacks.answered(call));
            if let Some(place) = place {
                let text = String::from_utf8_lossy(&body[..body.len().min(TEXT_MAX)]).into_owned();
                place.fail(session, Status::internal(text)).await;
            }
            Ok(())
        } else {
            Err(io::Error::other(format!("a client does not send frames of kind {kind}")))
        }
    }

    async fn data(&mut self, call: u64, data: Bytes) -> io::Result<()> {
        let Some(answer) = self.open.get_mut(&call) else { return Ok(()) };
        let length = data.len() as u64;
        if length > answer.left {
            return Err(io::Error::other("an answer has more bytes than it was begun with"));
        }
        let sent = answer.place.connection.client.put_chunk(self.session.id, answer.place.name, data).await;
        answer.left -= length;
        if answer.left == 0 || sent.is_err() {
            self.open.remove(&call);
        }
        Ok(())
    }
}
