//! The body of a HostBufferStore call: the bytes of a host buffer inside small messages, taken out without copying and
//! before the message is complete.

use bytes::{Buf, Bytes};
use pw_types::Status;

use crate::grpc;

/// Takes the payload out of the frames of a store call, however they are cut.
#[derive(Default)]
pub(crate) struct StoreDecoder {
    state: State,
    /// Bytes of the current message that are still to come.
    message: usize,
}

enum State {
    /// Between messages: what is there of the next header.
    Header([u8; grpc::HEADER], usize),
    /// At a field of the message: its tag so far, and how many bits of it.
    Tag(u64, u32),
    /// The length of a field of this kind so far.
    Length(Field, u64, u32),
    /// Inside a field.
    Bytes(Field, usize),
    /// A number, to be skipped.
    Varint,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Data,
    Other,
}

impl Default for State {
    fn default() -> State {
        State::Header([0; grpc::HEADER], 0)
    }
}

fn malformed() -> Status {
    Status::invalid("a host buffer's stream is malformed")
}

impl StoreDecoder {
    /// The payload in `frame`, in pieces; call it until it gives `None`.
    pub(crate) fn next(&mut self, frame: &mut Bytes) -> Result<Option<Bytes>, Status> {
        while !frame.is_empty() {
            match &mut self.state {
                State::Header(header, filled) => {
                    header[*filled] = frame.get_u8();
                    *filled += 1;
                    if *filled == grpc::HEADER {
                        self.message = grpc::message_length(header)?;
                        self.state = State::Tag(0, 0);
                        self.end_of_message();
                    }
                }
                State::Bytes(field, left) => {
                    let piece = frame.split_to(frame.len().min(*left));
                    *left -= piece.len();
                    self.message -= piece.len();
                    let field = *field;
                    if *left == 0 {
                        self.state = State::Tag(0, 0);
                        self.end_of_message();
                    }
                    if field == Field::Data && !piece.is_empty() {
                        return Ok(Some(piece));
                    }
                }
                _ => self.byte(frame.get_u8())?,
            }
        }
        Ok(None)
    }

    /// The body is over: was it between two messages?
    pub(crate) fn finish(&self) -> Result<(), Status> {
        if matches!(self.state, State::Header(_, 0)) { Ok(()) } else { Err(malformed()) }
    }

    fn end_of_message(&mut self) {
        if self.message == 0 {
            self.state = State::default();
        }
    }

    fn byte(&mut self, byte: u8) -> Result<(), Status> {
        self.message = self.message.checked_sub(1).ok_or_else(malformed)?;
        let more = byte & 0x80 != 0;
        match &mut self.state {
            State::Tag(value, bits) => {
                varint(value, bits, byte)?;
                if !more {
                    self.state = match (*value >> 3, *value & 7) {
                        (1, 2) => State::Length(Field::Data, 0, 0),
                        (0, _) => return Err(malformed()),
                        (_, 2) => State::Length(Field::Other, 0, 0),
                        (_, 0) => State::Varint,
                        (_, 1) => self.field(Field::Other, 8)?,
                        (_, 5) => self.field(Field::Other, 4)?,
                        _ => return Err(malformed()),
                    };
                    // No field ends with its tag, except one that was skipped as a whole.
                    if self.message == 0 {
                        return Err(malformed());
                    }
                }
            }
            State::Length(field, value, bits) => {
                varint(value, bits, byte)?;
                if !more {
                    let (field, length) = (*field, usize::try_from(*value).map_err(|_| malformed())?);
                    self.state = self.field(field, length)?;
                }
            }
            State::Varint if more => {}
            _ => self.state = State::Tag(0, 0),
        }
        if self.message == 0 {
            if !matches!(self.state, State::Tag(0, 0)) {
                return Err(malformed());
            }
            self.end_of_message();
        }
        Ok(())
    }

    fn field(&self, field: Field, length: usize) -> Result<State, Status> {
        match length {
            0 => Ok(State::Tag(0, 0)),
            length if length <= self.message => Ok(State::Bytes(field, length)),
            _ => Err(malformed()),
        }
    }
}

fn varint(value: &mut u64, bits: &mut u32, byte: u8) -> Result<(), Status> {
    if *bits > 63 {
        return Err(malformed());
    }
    *value |= u64::from(byte & 0x7f) << *bits;
    *bits += 7;
    Ok(())
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use pw_proto::ifrt::pb::GrpcHostBufferStoreRequest;

    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) % n as u64) as usize
        }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let mut data = vec![0];
        data.extend((message.len() as u32).to_be_bytes());
        data.extend_from_slice(message);
        data
    }

    /// Feeds `data` in pieces of random lengths.
    fn decode(data: &[u8], random: &mut Random) -> Result<Vec<u8>, Status> {
        let (mut decoder, mut out, mut rest) = (StoreDecoder::default(), Vec::new(), data);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(1 + random.below(rest.len()));
            let mut frame = Bytes::copy_from_slice(now);
            while let Some(piece) = decoder.next(&mut frame)? {
                out.extend_from_slice(&piece);
            }
            rest = later;
        }
        decoder.finish()?;
        Ok(out)
    }

    #[test]
    fn the_payload_comes_out_however_it_is_cut() {
        let mut random = Random(1);
        for _ in 0..300 {
            let (mut stream, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..random.below(5) {
                let data: Vec<u8> = (0..random.below(400)).map(|_| random.below(256) as u8).collect();
                let mut message = GrpcHostBufferStoreRequest { data: data.clone().into() }.encode_to_vec();
                // Fields of a newer client are skipped: a number, a fixed one, bytes.
                for extra in [&[0x10, 0x81, 0x01][..], &[0x1d, 1, 2, 3, 4], &[0x22, 2, 9, 9], &[0x2a, 0]] {
                    if random.below(2) == 0 {
                        message.extend_from_slice(extra);
                    }
                }
                stream.extend(framed(&message));
                expected.extend(data);
            }
            assert_eq!(decode(&stream, &mut random), Ok(expected));
        }
    }

    #[test]
    fn malformed_streams_are_errors() {
        let mut random = Random(2);
        for bad in [&b"\x0a\x05ab"[..], b"\x0a", b"\x0a\x80", b"\x10", b"\x0b", b"\x00\x01", b"\x10\xff"] {
            assert!(decode(&framed(bad), &mut random).is_err(), "{bad:?}");
        }
        assert!(decode(&framed(b"\x0a\x01a")[..7], &mut random).is_err());
        assert!(decode(b"\x01\0\0\0\0", &mut random).is_err());
        assert!(decode(b"\0\xff\xff\xff\xff", &mut random).is_err());
        for _ in 0..20_000 {
            let data: Vec<u8> = (0..random.below(60)).map(|_| random.below(256) as u8).collect();
            let _ = decode(&data, &mut random);
            let _ = decode(&framed(&data), &mut random);
        }
    }
}
