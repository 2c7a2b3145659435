//! Element types and their two numberings.
//!
//! The PJRT calls count one way, HLO protos and FFI frames another; they agree up to `F64` only.
//! A type code never leaves this crate as a bare number.

use crate::error::{PjrtError, Result};

macro_rules! types {
    ($( $(#[$m:meta])* $name:ident = $pjrt:literal, $xla:literal, $bits:literal; )*) => {
        /// Element type of an array; the discriminant is the PJRT number.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum BufferType { $( $(#[$m])* $name = $pjrt, )* }

        impl BufferType {
            /// From the number that PJRT uses.
            pub fn from_pjrt(code: u32) -> Option<Self> {
                match code { $( $pjrt => Some(Self::$name), )* _ => None }
            }

            /// From the number that HLO protos and FFI frames use (`xla.PrimitiveType`).
            pub fn from_xla(code: u32) -> Option<Self> {
                match code { $( $xla => Some(Self::$name), )* _ => None }
            }

            /// The `xla.PrimitiveType` number.
            pub fn xla(self) -> u32 {
                match self { $( Self::$name => $xla, )* }
            }

            /// Bits of one element on the device; 0 for a token.
            pub fn bits(self) -> usize {
                match self { $( Self::$name => $bits, )* }
            }
        }
    };
}

types! {
    /// Boolean, one byte.
    Pred = 1, 1, 8;
    /// Signed 8 bit.
    S8 = 2, 2, 8;
    /// Signed 16 bit.
    S16 = 3, 3, 16;
    /// Signed 32 bit.
    S32 = 4, 4, 32;
    /// Signed 64 bit.
    S64 = 5, 5, 64;
    /// Unsigned 8 bit.
    U8 = 6, 6, 8;
    /// Unsigned 16 bit.
    U16 = 7, 7, 16;
    /// Unsigned 32 bit.
    U32 = 8, 8, 32;
    /// Unsigned 64 bit.
    U64 = 9, 9, 64;
    /// IEEE half.
    F16 = 10, 10, 16;
    /// IEEE single.
    F32 = 11, 11, 32;
    /// IEEE double.
    F64 = 12, 12, 64;
    /// bfloat16.
    Bf16 = 13, 16, 16;
    /// Complex of two F32.
    C64 = 14, 15, 64;
    /// Complex of two F64.
    C128 = 15, 18, 128;
    /// 8-bit float e5m2.
    F8E5M2 = 16, 19, 8;
    /// 8-bit float e4m3fn.
    F8E4M3Fn = 17, 20, 8;
    /// 8-bit float e4m3b11fnuz.
    F8E4M3B11Fnuz = 18, 23, 8;
    /// 8-bit float e5m2fnuz.
    F8E5M2Fnuz = 19, 24, 8;
    /// 8-bit float e4m3fnuz.
    F8E4M3Fnuz = 20, 25, 8;
    /// Signed 4 bit.
    S4 = 21, 21, 4;
    /// Unsigned 4 bit.
    U4 = 22, 22, 4;
    /// A token: no data.
    Token = 23, 17, 0;
    /// Signed 2 bit.
    S2 = 24, 26, 2;
    /// Unsigned 2 bit.
    U2 = 25, 27, 2;
    /// 8-bit float e4m3.
    F8E4M3 = 26, 28, 8;
    /// 8-bit float e3m4.
    F8E3M4 = 27, 29, 8;
    /// 8-bit float e8m0fnu.
    F8E8M0Fnu = 28, 33, 8;
    /// 4-bit float e2m1fn.
    F4E2M1Fn = 29, 32, 4;
}

impl BufferType {
    /// The number that PJRT uses.
    pub fn pjrt(self) -> u32 {
        self as u32
    }

    /// Bytes of one element on the host: types under eight bits take one byte; a token has none.
    pub fn host_bytes(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// True for types that the device packs several to a byte.
    pub fn is_sub_byte(self) -> bool {
        self.bits() > 0 && self.bits() < 8
    }

    /// Bytes of a dense host array of these dimensions.
    pub fn host_size(self, dims: &[i64]) -> Result<usize> {
        let count = element_count(dims)?;
        count.checked_mul(self.host_bytes()).ok_or_else(|| too_large(dims))
    }

    pub(crate) fn checked(code: u32) -> Result<Self> {
        Self::from_pjrt(code).ok_or_else(|| PjrtError::unimplemented(format!("element type {code} of the plugin")))
    }
}

/// Number of elements, refusing negative dimensions and overflow.
pub(crate) fn element_count(dims: &[i64]) -> Result<usize> {
    let mut count = 1usize;
    let mut empty = false;
    for &d in dims {
        let d = usize::try_from(d).map_err(|_| PjrtError::invalid(format!("negative dimension in {dims:?}")))?;
        empty |= d == 0;
        // Zero must not hide an overflow of the other dimensions.
        count = count.checked_mul(d.max(1)).ok_or_else(|| too_large(dims))?;
    }
    if count > isize::MAX as usize {
        return Err(too_large(dims));
    }
    Ok(if empty { 0 } else { count })
}

fn too_large(dims: &[i64]) -> PjrtError {
    PjrtError::invalid(format!("shape {dims:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_numberings_part_after_f64() {
        for code in 1..=12 {
            assert_eq!(BufferType::from_pjrt(code), BufferType::from_xla(code));
        }
        assert_eq!(BufferType::from_pjrt(13), Some(BufferType::Bf16));
        assert_eq!(BufferType::from_xla(16), Some(BufferType::Bf16));
        assert_eq!(BufferType::from_xla(15), Some(BufferType::C64));
        assert_eq!(BufferType::from_pjrt(0), None);
        for code in 1..=29 {
            let t = BufferType::from_pjrt(code).unwrap();
            assert_eq!(t.pjrt(), code);
            assert_eq!(BufferType::from_xla(t.xla()), Some(t));
        }
    }

    #[test]
    fn host_sizes() {
        assert_eq!(BufferType::S4.host_size(&[3, 5]).unwrap(), 15);
        assert_eq!(BufferType::F32.host_size(&[]).unwrap(), 4);
        assert_eq!(BufferType::F32.host_size(&[0, 7]).unwrap(), 0);
        assert_eq!(BufferType::Token.host_size(&[]).unwrap(), 0);
        assert!(BufferType::F32.host_size(&[-1]).is_err());
        assert!(BufferType::F32.host_size(&[i64::MAX, i64::MAX]).is_err());
        assert!(BufferType::F32.host_size(&[i64::MAX, 0, i64::MAX]).is_err());
    }
}
