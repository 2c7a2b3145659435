//! Protobuf messages as lists of raw fields, to change some and keep every other byte, known or not.

use pw_types::Status;

/// One field of a message as it lies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Field<'a> {
    pub(crate) number: u32,
    /// Tag, length and contents.
    pub(crate) raw: &'a [u8],
    pub(crate) value: Value<'a>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

impl<'a> Field<'a> {
    pub(crate) fn varint(&self) -> Option<u64> {
        if let Value::Varint(value) = self.value { Some(value) } else { None }
    }

    pub(crate) fn bytes(&self) -> Option<&'a [u8]> {
        if let Value::Bytes(value) = self.value { Some(value) } else { None }
    }
}

fn malformed() -> Status {
    Status::invalid("malformed protobuf message")
}

fn take_varint(input: &mut &[u8]) -> Result<u64, Status> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first().ok_or_else(malformed)?;
        *input = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(malformed())
}

fn take<'a>(input: &mut &'a [u8], count: u64) -> Result<&'a [u8], Status> {
    let count = usize::try_from(count).map_err(|_| malformed())?;
    let (head, rest) = input.split_at_checked(count).ok_or_else(malformed)?;
    *input = rest;
    Ok(head)
}

/// The fields of a message in their order.
pub(crate) fn fields(message: &[u8]) -> Result<Vec<Field<'_>>, Status> {
    let mut rest = message;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let start = rest;
        let tag = take_varint(&mut rest)?;
        let number = u32::try_from(tag >> 3).map_err(|_| malformed())?;
        let value = match tag & 7 {
            0 => Value::Varint(take_varint(&mut rest)?),
            1 => take(&mut rest, 8).map(|_| Value::Fixed)?,
            2 => {
                let length = take_varint(&mut rest)?;
                Value::Bytes(take(&mut rest, length)?)
            }
            5 => take(&mut rest, 4).map(|_| Value::Fixed)?,
            _ => return Err(malformed()),
        };
        found.push(Field { number, raw: &start[..start.len() - rest.len()], value });
    }
    Ok(found)
}

pub(crate) fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub(crate) fn push_int(out: &mut Vec<u8>, number: u32, value: i64) {
    push_varint(out, u64::from(number) << 3);
    push_varint(out, value as u64);
}

pub(crate) fn push_bytes(out: &mut Vec<u8>, number: u32, bytes: &[u8]) {
    push_varint(out, u64::from(number) << 3 | 2);
    push_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}
