//! Protobuf wire format, field by field: for messages that are passed on as they are and only looked into.

use bytes::Bytes;

/// One field of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Value {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Len(Bytes),
}

/// The fields of a message, in order. Stops with `None` at the end; malformed input ends with an `Err`.
pub(super) struct Fields {
    data: Bytes,
    at: usize,
}

/// The bytes are no protobuf message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Malformed;

impl Fields {
    pub(super) fn of(data: Bytes) -> Fields {
        Fields { data, at: 0 }
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.data.get(self.at).ok_or(Malformed)?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, length: usize) -> Result<Bytes, Malformed> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.data.len()).ok_or(Malformed)?;
        let bytes = self.data.slice(self.at..end);
        self.at = end;
        Ok(bytes)
    }

    fn field(&mut self) -> Result<(u32, Value), Malformed> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|&n| n > 0).ok_or(Malformed)?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                let bytes = self.take(8)?;
                Value::Fixed64(u64::from_le_bytes(bytes[..].try_into().map_err(|_| Malformed)?))
            }
            2 => {
                let length = self.varint()?;
                Value::Len(self.take(usize::try_from(length).map_err(|_| Malformed)?)?)
            }
            5 => {
                let bytes = self.take(4)?;
                Value::Fixed32(u32::from_le_bytes(bytes[..].try_into().map_err(|_| Malformed)?))
            }
            _ => return Err(Malformed),
        };
        Ok((number, value))
    }
}

impl Iterator for Fields {
    type Item = Result<(u32, Value), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.data.len() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.data.len();
        }
        Some(field)
    }
}
