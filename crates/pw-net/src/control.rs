//! The control stream: messages of `proto/control.proto`, each behind its length (u32, little endian).
//!
//! The dialer sends [`Hello`] and gets an [`Answer`]; after `Welcome` it is [`ControllerFrame`]s one way and
//! [`WorkerFrame`]s the other, numbered by a [`Sequence`].

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

pub use pw_proto::control::{Answer, ControllerFrame, Hello, Wire, WorkerFrame};

pub use crate::sequence::{Incoming, Sequence, SequenceError, Stamp};
use crate::{NetError, magic};

/// Largest message, unless [`ControlReader::set_limit`] says otherwise.
pub const MESSAGE_BYTES_MAX: u64 = 1 << 30;

/// The first message of a peer may not be larger: nobody has looked at its token yet.
const FIRST_MESSAGE_BYTES_MAX: u64 = 16 << 20;

const LENGTH: usize = 4;
const READ_AHEAD: usize = 64 << 10;

/// Connects to a controller, with a deadline.
pub async fn dial(address: &str) -> Result<(ControlReader, ControlWriter), NetError> {
    let tcp = magic::CONTROL.dial(address).await?;
    Ok(halves(tcp, address))
}

/// Greets whoever has connected, with a deadline.
pub async fn accept(mut tcp: TcpStream) -> Result<(ControlReader, ControlWriter), NetError> {
    let peer = tcp.peer_addr().map_or_else(|_| "a peer".to_owned(), |address| address.to_string());
    magic::CONTROL.accept(&mut tcp, &peer).await?;
    Ok(halves(tcp, &peer))
}

fn halves(tcp: TcpStream, peer: &str) -> (ControlReader, ControlWriter) {
    let (read, write) = tcp.into_split();
    let reader = ControlReader { read, peer: peer.to_owned(), buffer: BytesMut::new(), limit: MESSAGE_BYTES_MAX, first: true };
    (reader, ControlWriter { write, peer: peer.to_owned() })
}

pub struct ControlReader {
    read: OwnedReadHalf,
    peer: String,
    buffer: BytesMut,
    limit: u64,
    first: bool,
}

impl ControlReader {
    pub fn peer(&self) -> &str {
        &self.peer
    }

    pub fn set_limit(&mut self, bytes: u64) {
        self.limit = bytes;
    }

    /// The next message; `None` when the peer has ended the stream between two messages. May be dropped at any await
    /// without losing bytes.
    pub async fn next<T: Wire>(&mut self) -> Result<Option<T>, NetError> {
        let Some(bytes) = self.next_bytes().await? else { return Ok(None) };
        let length = bytes.len();
        let wrong = |source| NetError::Undecodable { peer: self.peer.clone(), bytes: length, message: T::NAME, source };
        T::from_bytes(bytes).map(Some).map_err(wrong)
    }

    async fn next_bytes(&mut self) -> Result<Option<Bytes>, NetError> {
        loop {
            let wanted = self.wanted()?;
            if wanted > LENGTH && self.buffer.len() >= wanted {
                self.buffer.advance(LENGTH);
                self.first = false;
                return Ok(Some(self.buffer.split_to(wanted - LENGTH).freeze()));
            }
            // Memory grows with what has come, not with what was announced.
            let missing = wanted - self.buffer.len();
            self.buffer.reserve(missing.min(self.buffer.len()).max(READ_AHEAD));
            let count = self.read.read_buf(&mut self.buffer).await;
            let count = count.map_err(|source| NetError::Io { peer: self.peer.clone(), what: "read from", source })?;
            if count == 0 && self.buffer.is_empty() {
                return Ok(None);
            }
            if count == 0 {
                let reason = format!("it ended {} bytes into a message", self.buffer.len());
                return Err(NetError::Closed { peer: self.peer.clone(), reason });
            }
        }
    }

    /// Bytes of the message at the front of the buffer with its length; just the length's where that has not come.
    fn wanted(&self) -> Result<usize, NetError> {
        let Some(length) = self.buffer.first_chunk::<LENGTH>() else { return Ok(LENGTH) };
        let length = u32::from_le_bytes(*length);
        let limit = if self.first { self.limit.min(FIRST_MESSAGE_BYTES_MAX) } else { self.limit };
        if u64::from(length) > limit {
            return Err(NetError::TooLarge { peer: self.peer.clone(), bytes: length.into(), limit });
        }
        if length == 0 {
            return Err(NetError::Protocol { peer: self.peer.clone(), what: "an empty message".to_owned() });
        }
        Ok(LENGTH + length as usize)
    }
}

/// A message as it goes over the wire.
#[derive(Clone, Debug)]
pub struct Encoded {
    bytes: Bytes,
    name: &'static str,
}

pub fn encode<T: Wire>(message: &T) -> Encoded {
    let mut bytes = BytesMut::with_capacity(256);
    bytes.extend_from_slice(&[0; LENGTH]);
    message.append_to(&mut bytes);
    // One that is too long is refused when it is sent.
    let length = (bytes.len() - LENGTH) as u32;
    bytes[..LENGTH].copy_from_slice(&length.to_le_bytes());
    Encoded { bytes: bytes.freeze(), name: T::NAME }
}

pub struct ControlWriter {
    write: OwnedWriteHalf,
    peer: String,
}

impl ControlWriter {
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Writes one message. Must be awaited to its end: half a message cannot be taken back.
    pub async fn send<T: Wire>(&mut self, message: &T) -> Result<(), NetError> {
        self.send_encoded(&encode(message)).await
    }

    /// As [`ControlWriter::send`], of a message that was encoded before.
    pub async fn send_encoded(&mut self, message: &Encoded) -> Result<(), NetError> {
        let Encoded { bytes, name } = message;
        let length = bytes.len() - LENGTH;
        if length as u64 > MESSAGE_BYTES_MAX {
            let what = format!("a {name} for it has {length} bytes, more than {MESSAGE_BYTES_MAX}");
            return Err(NetError::Protocol { peer: self.peer.clone(), what });
        }
        let result = self.write.write_all(bytes).await;
        result.map_err(|source| NetError::Io { peer: self.peer.clone(), what: "write to", source })
    }
}
