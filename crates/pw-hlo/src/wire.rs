//! Protobuf wire format, read field by field with the bytes of each, so that unknown ones can be kept.

use crate::error::{HloError, Result};

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Fixed 32 or 64 bits, which no field of interest has.
    Fixed,
}

/// A field of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a> {
    pub(crate) number: u32,
    pub(crate) value: Value<'a>,
    /// The whole field, its tag included.
    pub(crate) raw: &'a [u8],
}

impl<'a> Field<'a> {
    /// The bytes of a message, text or bytes field.
    pub(crate) fn bytes(&self) -> Result<&'a [u8]> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(self.of_another_type()),
        }
    }

    /// An integer or truth value.
    pub(crate) fn int(&self) -> Result<i64> {
        match self.value {
            Value::Varint(value) => Ok(value as i64),
            _ => Err(self.of_another_type()),
        }
    }

    /// A text.
    pub(crate) fn text(&self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| HloError::malformed(format!("field {} is no UTF-8", self.number)))
    }

    /// Appends a repeated integer field, packed or not.
    pub(crate) fn push_ints(&self, out: &mut Vec<i64>) -> Result<()> {
        match self.value {
            Value::Varint(value) => out.push(value as i64),
            Value::Bytes(mut packed) => {
                while !packed.is_empty() {
                    out.push(varint(&mut packed)? as i64);
                }
            }
            Value::Fixed => return Err(self.of_another_type()),
        }
        Ok(())
    }

    fn of_another_type(&self) -> HloError {
        HloError::malformed(format!("field {} has another wire type", self.number))
    }
}

fn truncated() -> HloError {
    HloError::malformed("truncated message")
}

fn varint(input: &mut &[u8]) -> Result<u64> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = input.split_first().ok_or_else(truncated)?;
        *input = rest;
        if shift < 64 {
            value |= u64::from(byte & 0x7f) << shift;
        }
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(HloError::malformed("a varint of more than ten bytes"))
}

fn take<'a>(input: &mut &'a [u8], length: u64) -> Result<&'a [u8]> {
    let length = usize::try_from(length).map_err(|_| truncated())?;
    let (head, rest) = input.split_at_checked(length).ok_or_else(truncated)?;
    *input = rest;
    Ok(head)
}

/// The fields of a message, in order. Ends after the first error.
pub(crate) fn fields(message: &[u8]) -> Fields<'_> {
    Fields { rest: message }
}

pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<Field<'a>> {
        let start = self.rest;
        let tag = varint(&mut self.rest)?;
        let number = u32::try_from(tag >> 3).map_err(|_| HloError::malformed("a field number of more than 29 bits"))?;
        let value = match tag & 7 {
            0 => Value::Varint(varint(&mut self.rest)?),
            1 => take(&mut self.rest, 8).map(|_| Value::Fixed)?,
            2 => {
                let length = varint(&mut self.rest)?;
                Value::Bytes(take(&mut self.rest, length)?)
            }
            5 => take(&mut self.rest, 4).map(|_| Value::Fixed)?,
            other => return Err(HloError::malformed(format!("wire type {other}"))),
        };
        Ok(Field { number, value, raw: &start[..start.len() - self.rest.len()] })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.read();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends an integer field.
pub(crate) fn put_int(out: &mut Vec<u8>, number: u32, value: i64) {
    put_varint(out, u64::from(number) << 3);
    put_varint(out, value as u64);
}

/// Appends a message, text or bytes field.
pub(crate) fn put_bytes(out: &mut Vec<u8>, number: u32, value: &[u8]) {
    put_varint(out, u64::from(number) << 3 | 2);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wire_type_is_read_and_keeps_its_bytes() {
        let mut message = Vec::new();
        put_int(&mut message, 1, 300);
        put_bytes(&mut message, 2, b"ab");
        message.extend([0x1d, 1, 2, 3, 4, 0x21, 1, 2, 3, 4, 5, 6, 7, 8]);
        put_int(&mut message, 900, -1);
        put_bytes(&mut message, 5, &[1, 0xac, 2]);
        let read: Vec<Field<'_>> = fields(&message).collect::<Result<_>>().unwrap();
        assert_eq!(read.iter().map(|f| f.number).collect::<Vec<_>>(), [1, 2, 3, 4, 900, 5]);
        assert_eq!(read[0].int(), Ok(300));
        assert_eq!(read[1].text(), Ok("ab"));
        assert_eq!((read[2].value, read[3].value), (Value::Fixed, Value::Fixed));
        assert_eq!(read[4].int(), Ok(-1));
        let mut ints = vec![];
        read[4].push_ints(&mut ints).unwrap();
        read[5].push_ints(&mut ints).unwrap();
        assert_eq!(ints, [-1, 1, 300]);
        assert!(read[2].int().is_err() && read[0].bytes().is_err() && read[3].push_ints(&mut ints).is_err());
        assert_eq!(read.iter().flat_map(|f| f.raw).copied().collect::<Vec<u8>>(), message);
    }

    #[test]
    fn what_is_cut_or_nonsense_is_an_error() {
        let mut message = Vec::new();
        put_int(&mut message, 1, 300);
        put_bytes(&mut message, 2, b"ab");
        message.extend([0x1d, 1, 2, 3, 4, 0x21, 1, 2, 3, 4, 5, 6, 7, 8]);
        for cut in [1, 2, 4, 6, 9, 11, 13, 20] {
            assert!(fields(&message[..cut]).any(|f| f.is_err()), "cut at {cut}");
        }
        for nonsense in [&[0x0b_u8][..], &[0x0c], &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]] {
            assert_eq!(fields(nonsense).filter(|f| f.is_err()).count(), 1);
        }
    }
}
