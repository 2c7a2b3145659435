//! A message whose fields are asked for by number.

use crate::error::{HloError, Result};
use crate::wire::{Field, Value, fields};

/// The fields of a message, read once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Message<'a> {
    fields: Vec<Field<'a>>,
}

impl<'a> Message<'a> {
    pub(crate) fn read(raw: &'a [u8]) -> Result<Message<'a>> {
        Ok(Message { fields: fields(raw).collect::<Result<_>>()? })
    }

    fn all(&self, number: u32) -> impl Iterator<Item = &Field<'a>> {
        self.fields.iter().filter(move |f| f.number == number)
    }

    /// The last of a number counts.
    fn last(&self, number: u32) -> Option<&Field<'a>> {
        self.fields.iter().rev().find(|f| f.number == number)
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        self.last(number).is_some()
    }

    /// 0 where it is missing.
    pub(crate) fn int(&self, number: u32) -> Result<i64> {
        self.last(number).map_or(Ok(0), Field::int)
    }

    pub(crate) fn flag(&self, number: u32) -> Result<bool> {
        Ok(self.int(number)? != 0)
    }

    pub(crate) fn ints(&self, number: u32) -> Result<Vec<i64>> {
        let mut ints = Vec::new();
        self.all(number).try_for_each(|f| f.push_ints(&mut ints))?;
        Ok(ints)
    }

    /// Empty where it is missing.
    pub(crate) fn text(&self, number: u32) -> Result<&'a str> {
        self.last(number).map_or(Ok(""), Field::text)
    }

    pub(crate) fn texts(&self, number: u32) -> Result<Vec<&'a str>> {
        self.all(number).map(Field::text).collect()
    }

    pub(crate) fn bytes(&self, number: u32) -> Result<&'a [u8]> {
        self.last(number).map_or(Ok(&[][..]), Field::bytes)
    }

    pub(crate) fn message(&self, number: u32) -> Result<Option<Message<'a>>> {
        self.last(number).map(|f| Message::read(f.bytes()?)).transpose()
    }

    pub(crate) fn messages(&self, number: u32) -> Result<Vec<Message<'a>>> {
        self.all(number).map(|f| Message::read(f.bytes()?)).collect()
    }

    /// The bytes of a repeated field of fixed size, packed.
    pub(crate) fn packed(&self, number: u32, size: usize) -> Result<Vec<&'a [u8]>> {
        let mut parts = Vec::new();
        for f in self.all(number) {
            match f.value {
                Value::Bytes(bytes) if bytes.len() % size == 0 => parts.extend(bytes.chunks_exact(size)),
                _ => return Err(HloError::malformed(format!("field {number} is no list of values of {size} bytes"))),
            }
        }
        Ok(parts)
    }
}
