//! A reader of protobuf wire format, for the few fields that are looked at.
//!
//! Unknown fields are skipped, never an error; a truncated message is.

use crate::error::{PjrtError, Result};

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Fixed 32 or 64 bits, which no field of interest has.
    Fixed,
}

impl<'a> Value<'a> {
    pub(crate) fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Value::Bytes(b) => Some(b),
            _ => None,
        }
    }
}

fn truncated() -> PjrtError {
    PjrtError::internal("truncated protobuf message")
}

fn varint(input: &mut &[u8]) -> Result<u64> {
    let mut value = 0u64;
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
    Err(truncated())
}

fn take<'a>(input: &mut &'a [u8], len: u64) -> Result<&'a [u8]> {
    let len = usize::try_from(len).map_err(|_| truncated())?;
    let (head, rest) = input.split_at_checked(len).ok_or_else(truncated)?;
    *input = rest;
    Ok(head)
}

/// Calls `visit` for each field of a message, in order.
pub(crate) fn fields<'a>(mut input: &'a [u8], mut visit: impl FnMut(u32, Value<'a>) -> Result<()>) -> Result<()> {
    while !input.is_empty() {
        let tag = varint(&mut input)?;
        let number = u32::try_from(tag >> 3).map_err(|_| truncated())?;
        let value = match tag & 7 {
            0 => Value::Varint(varint(&mut input)?),
            1 => {
                take(&mut input, 8)?;
                Value::Fixed
            }
            2 => {
                let len = varint(&mut input)?;
                Value::Bytes(take(&mut input, len)?)
            }
            5 => {
                take(&mut input, 4)?;
                Value::Fixed
            }
            _ => return Err(truncated()),
        };
        visit(number, value)?;
    }
    Ok(())
}

/// Appends a repeated integer field, packed or not.
pub(crate) fn push_ints(out: &mut Vec<i64>, value: Value<'_>) -> Result<()> {
    match value {
        Value::Varint(v) => out.push(v as i64),
        Value::Bytes(mut packed) => {
            while !packed.is_empty() {
                out.push(varint(&mut packed)? as i64);
            }
        }
        Value::Fixed => return Err(truncated()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_wire_types() {
        // 1: varint 300; 2: bytes "ab"; 3: fixed32; 4: fixed64; 5: packed 1, -1.
        let mut message = vec![0x08, 0xac, 0x02, 0x12, 2, b'a', b'b', 0x1d, 0, 0, 0, 0, 0x21];
        message.extend([0; 8]);
        message.extend([0x2a, 11, 1]);
        message.extend([0xff; 9]);
        message.push(1);
        let mut seen = Vec::new();
        let mut ints = Vec::new();
        fields(&message, |n, v| {
            seen.push(n);
            match n {
                1 => assert_eq!(v, Value::Varint(300)),
                2 => assert_eq!(v.bytes(), Some(&b"ab"[..])),
                5 => push_ints(&mut ints, v)?,
                _ => assert_eq!(v, Value::Fixed),
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [1, 2, 3, 4, 5]);
        assert_eq!(ints, [1, -1]);
        for cut in [1, 2, 4, 6, 9, 15, 22, 30] {
            assert!(fields(&message[..cut], |_, _| Ok(())).is_err(), "cut at {cut}");
        }
    }
}
