//! Messages between a worker and its compile child: each behind its length (u32, little endian), over pipes.

use std::io::{self, ErrorKind, Read, Write};

use bytes::{Bytes, BytesMut};
use pw_proto::control::Wire;

const MESSAGE_BYTES_MAX: u32 = 1 << 30;

pub(crate) fn write<T: Wire>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let mut bytes = BytesMut::from(&[0; 4][..]);
    message.append_to(&mut bytes);
    let length = u32::try_from(bytes.len() - 4).map_err(|_| io::Error::new(ErrorKind::InvalidInput, "the message is too large"))?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    to.write_all(&bytes)?;
    to.flush()
}

/// The next message; `None` at the end.
pub(crate) fn read<T: Wire>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    T::from_bytes(Bytes::from(bytes)).map(Some).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))
}
