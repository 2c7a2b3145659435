//! Frames of the data plane: a header of 32 bytes and a body. Pure.

use pw_proto::control::Wire;
use pw_types::{Handle, SessionId, Status};

/// Name of a transfer.
pub(super) type Key = (SessionId, Handle);

pub(super) const HEADER: usize = 32;

/// Largest body that a receiver accepts.
const BODY_BYTES_MAX: u32 = super::SLICE_BYTES as u32;

/// Statuses are cut to fit.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

const MARK: u8 = b'P';

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Kind { $($(#[$doc])* $name = $number),* }

        impl Kind {
            fn from_number(number: u8) -> Option<Kind> {
                match number { $($number => Some(Kind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// Edge → worker, first: session = the name of the connection, body = token.
    Hello = 1,
    /// Worker → edge: come in; value = bytes received before.
    Welcome = 2,
    /// Worker → edge: body = status; the end.
    Refused = 3,
    Attach = 4,
    Detach = 5,
    /// Value = total bytes; body = the first of them.
    PutBegin = 6,
    /// The next bytes of an upload or a download.
    Chunk = 7,
    /// Body = status.
    PutAbort = 8,
    /// Value = total bytes; body = the first of them.
    Offer = 9,
    /// Body = status.
    Failed = 10,
    /// Value = bytes of credit.
    Pull = 11,
    Drop = 12,
    /// Edge → worker, first: session = the name of a connection that broke, value = bytes received, body = token.
    Resume = 13,
    /// Value = bytes received.
    Ack = 14,
    /// The last: the connection is not to be had back.
    End = 15,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// Bytes of the body.
    pub(super) body: u32,
    pub(super) session: SessionId,
    pub(super) buffer: Handle,
    pub(super) value: u64,
}

impl Header {
    pub(super) fn new(kind: Kind, (session, buffer): Key, value: u64, body: usize) -> Header {
        debug_assert!(body <= BODY_BYTES_MAX as usize);
        Header { kind, body: body as u32, session, buffer, value }
    }

    pub(super) fn key(&self) -> Key {
        (self.session, self.buffer)
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = MARK;
        bytes[1] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.body.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.buffer.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    /// The text says what is wrong.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Result<Header, String> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[0] != MARK || bytes[2..4] != [0; 2] {
            return Err(format!("no frame begins with \"{}\"", bytes[..8].escape_ascii()));
        }
        let kind = Kind::from_number(bytes[1]).ok_or_else(|| format!("no frame is of kind {}", bytes[1]))?;
        let body = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i]));
        if body > BODY_BYTES_MAX {
            return Err(format!("{kind:?} with a body of {body} bytes, more than {BODY_BYTES_MAX}"));
        }
        let header = Header { kind, body, session: SessionId(u64_at(8)), buffer: Handle(u64_at(16)), value: u64_at(24) };
        header.check()?;
        Ok(header)
    }

    /// Whether somebody's memory may be given back for it when it is acknowledged. A first frame with the whole of a small
    /// transfer is a copy; chunks are parts of larger ones, whose memory is one block.
    pub(super) fn is_last(&self, ended: bool) -> bool {
        match self.kind {
            Kind::PutBegin | Kind::Offer => ended && self.body as usize >= super::FIRST_BYTES,
            Kind::Chunk | Kind::PutAbort | Kind::Failed | Kind::Detach => ended,
            _ => false,
        }
    }

    fn check(&self) -> Result<(), String> {
        let Header { kind, body, value, .. } = *self;
        let fits = match kind {
            Kind::Hello | Kind::Resume | Kind::Refused | Kind::PutAbort | Kind::Failed => body as usize <= 2 * MESSAGE_BYTES_MAX,
            Kind::Welcome | Kind::Attach | Kind::Detach | Kind::Pull | Kind::Drop | Kind::Ack | Kind::End => body == 0,
            Kind::PutBegin | Kind::Offer => u64::from(body) <= value && body as usize <= super::FIRST_BYTES,
            Kind::Chunk => body > 0,
        };
        if fits { Ok(()) } else { Err(format!("{kind:?} of {value} with a body of {body} bytes")) }
    }
}

pub(super) fn encode_status(status: &Status) -> bytes::Bytes {
    let mut cut = status.message.len().min(MESSAGE_BYTES_MAX);
    while !status.message.is_char_boundary(cut) {
        cut -= 1;
    }
    let status = Status { message: status.message[..cut].to_owned(), ..*status };
    status.to_bytes()
}

/// What is not a status is told as it is.
pub(super) fn decode_status(bytes: bytes::Bytes) -> Status {
    Status::from_bytes(bytes).unwrap_or_else(|error| Status::internal(format!("a status that cannot be read: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pw_types::{Cause, Code};

    const KEY: Key = (SessionId(0x0123_4567_89ab_cdef), Handle(42));

    #[test]
    fn headers_round_trip() {
        let body = |kind| match kind {
            Kind::Chunk => 1 << 20,
            Kind::PutBegin | Kind::Offer => 100,
            Kind::Hello | Kind::PutAbort => 5,
            _ => 0,
        };
        for number in 0..=255 {
            let Some(kind) = Kind::from_number(number) else { continue };
            let header = Header::new(kind, KEY, u64::MAX, body(kind));
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn garbage_is_named() {
        let decode = |text: &[u8; HEADER]| Header::decode(text).unwrap_err();
        assert_eq!(decode(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"), "no frame begins with \"GET / HT\"");
        let mut bytes = Header::new(Kind::Drop, KEY, 0, 0).encode();
        bytes[1] = 99;
        assert_eq!(decode(&bytes), "no frame is of kind 99");
        let mut bytes = Header::new(Kind::Chunk, KEY, 0, 1).encode();
        bytes[7] = 1;
        assert_eq!(decode(&bytes), "Chunk with a body of 16777217 bytes, more than 1048576");
        let header = Header { body: 5, ..Header::new(Kind::Offer, KEY, 4, 0) };
        assert_eq!(decode(&header.encode()), "Offer of 4 with a body of 5 bytes");
    }

    #[test]
    fn statuses_round_trip_and_are_cut() {
        let status = Status::new(Code::Aborted, "gone").with_cause(Cause::Cancelled);
        assert_eq!(decode_status(encode_status(&status)), status);
        let long = Status::internal("ä".repeat(MESSAGE_BYTES_MAX));
        assert_eq!(decode_status(encode_status(&long)).message, "ä".repeat(MESSAGE_BYTES_MAX / 2));
        assert_eq!(decode_status(bytes::Bytes::from_static(&[0xff; 9])).code, Code::Internal);
    }
}
