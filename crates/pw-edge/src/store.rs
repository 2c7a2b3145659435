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
