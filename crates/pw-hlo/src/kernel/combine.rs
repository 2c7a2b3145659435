//! Two values become one, for every reduction and element type, slice by slice.
//!
//! XLA's collectives within a process start every reduction of floats from a neutral value, and so do these: a sum of
//! negative zeros is zero, and minimum and maximum pass over NaN (of nothing but NaN they give an infinity).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::collective::{Element, Reduce};

/// How a reduction goes on slices of one length, a multiple of the element's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Combine {
    /// Overwrites the first slice with the reduction of the second alone.
    pub(super) start: fn(&mut [u8], &[u8]),
    /// Combines each element of the first slice with that of the second, into the first.
    pub(super) next: fn(&mut [u8], &[u8]),
}

/// The combiner of a reduction; `None` where [`Reduce::takes`] says no.
pub(super) fn combiner(reduce: Reduce, element: Element) -> Option<Combine> {
    match element {
        Element::Pred => Some(truth(reduce)),
        Element::S8 => Some(s8(reduce)),
        Element::S16 => Some(s16(reduce)),
        Element::S32 => Some(s32(reduce)),
        Element::S64 => Some(s64(reduce)),
        Element::U8 => Some(u8(reduce)),
        Element::U16 => Some(u16(reduce)),
        Element::U32 => Some(u32(reduce)),
        Element::U64 => Some(u64(reduce)),
        Element::F16 => half_float(reduce),
        Element::Bf16 => brain_float(reduce),
        Element::F32 => single(reduce),
        Element::F64 => double(reduce),
        Element::C64 => complex64(reduce),
        Element::C128 => complex128(reduce),
        Element::Other(_) => None,
    }
}

/// A combiner of elements of `$bytes` bytes: `$read` and `$write` are from and to them. It starts from a neutral value,
/// or with a copy.
macro_rules! combine {
    ($bytes:literal, $read:expr, $write:expr, |$a:ident, $b:ident| $value:expr) => {{
        Combine { start: <[u8]>::copy_from_slice, next: combine!(@next $bytes, $read, $write, |$a, $b| $value) }
    }};
    ($bytes:literal, $read:expr, $write:expr, $neutral:expr, |$a:ident, $b:ident| $value:expr) => {{
        fn start(target: &mut [u8], source: &[u8]) {
            let (targets, _) = target.as_chunks_mut::<$bytes>();
            let (sources, _) = source.as_chunks::<$bytes>();
            for (target, source) in targets.iter_mut().zip(sources) {
                let ($a, $b) = ($neutral, $read(*source));
                *target = $write($value);
            }
        }
        Combine { start, next: combine!(@next $bytes, $read, $write, |$a, $b| $value) }
    }};
    (@next $bytes:literal, $read:expr, $write:expr, |$a:ident, $b:ident| $value:expr) => {{
        fn next(target: &mut [u8], source: &[u8]) {
            let (targets, _) = target.as_chunks_mut::<$bytes>();
            let (sources, _) = source.as_chunks::<$bytes>();
            for (target, source) in targets.iter_mut().zip(sources) {
                let ($a, $b) = ($read(*target), $read(*source));
                *target = $write($value);
            }
        }
        next
    }};
}

macro_rules! integer {
    ($name:ident, $type:ty, $bytes:literal) => {
        fn $name(reduce: Reduce) -> Combine {
            const READ: fn([u8; $bytes]) -> $type = <$type>::from_ne_bytes;
            const WRITE: fn($type) -> [u8; $bytes] = <$type>::to_ne_bytes;
            match reduce {
                Reduce::Add => combine!($bytes, READ, WRITE, |a, b| a.wrapping_add(b)),
                Reduce::Multiply => combine!($bytes, READ, WRITE, |a, b| a.wrapping_mul(b)),
                Reduce::Min => combine!($bytes, READ, WRITE, |a, b| a.min(b)),
                Reduce::Max => combine!($bytes, READ, WRITE, |a, b| a.max(b)),
                Reduce::And => combine!($bytes, READ, WRITE, |a, b| a & b),
                Reduce::Or => combine!($bytes, READ, WRITE, |a, b| a | b),
                Reduce::Xor => combine!($bytes, READ, WRITE, |a, b| a ^ b),
            }
        }
    };
}

integer!(s8, i8, 1);
integer!(s16, i16, 2);
integer!(s32, i32, 4);
integer!(s64, i64, 8);
integer!(u8, u8, 1);
integer!(u16, u16, 2);
integer!(u32, u32, 4);
integer!(u64, u64, 8);

/// Truth values are the bytes 0 and 1.
fn truth(reduce: Reduce) -> Combine {
    match reduce {
        Reduce::Add | Reduce::Max | Reduce::Or => u8(Reduce::Or),
        Reduce::Multiply | Reduce::Min | Reduce::And => u8(Reduce::And),
        Reduce::Xor => u8(Reduce::Xor),
    }
}

macro_rules! float {
    ($name:ident, $type:ty, $bytes:literal, $read:expr, $write:expr) => {
        fn $name(reduce: Reduce) -> Option<Combine> {
            Some(match reduce {
                Reduce::Add => combine!($bytes, $read, $write, 0., |a, b| a + b),
                Reduce::Multiply => combine!($bytes, $read, $write, 1., |a, b| a * b),
                Reduce::Min => combine!($bytes, $read, $write, <$type>::INFINITY, |a, b| if b < a { b } else { a }),
                Reduce::Max => combine!($bytes, $read, $write, <$type>::NEG_INFINITY, |a, b| if a < b { b } else { a }),
                Reduce::And | Reduce::Or | Reduce::Xor => return None,
            })
        }
    };
}

float!(single, f32, 4, f32::from_ne_bytes, f32::to_ne_bytes);
float!(double, f64, 8, f64::from_ne_bytes, f64::to_ne_bytes);
float!(brain_float, f32, 2, |b| bf16::from_ne_bytes(b).to_f32(), |v| bf16::from_f32(v).to_ne_bytes());

/// Elements that are converted at once, which a machine may have instructions for.
const HALVES: usize = 64;

/// `target = f(target or neutral, source)` in single precision, rounded.
fn halves(target: &mut [u8], source: &[u8], neutral: Option<f32>, f: impl Fn(f32, f32) -> f32) {
    for (target, source) in target.chunks_mut(2 * HALVES).zip(source.chunks(2 * HALVES)) {
        let (targets, _) = target.as_chunks_mut::<2>();
        let (sources, _) = source.as_chunks::<2>();
        let count = targets.len();
        let mut values = [f16::ZERO; HALVES];
        let mut a = [neutral.unwrap_or(0.); HALVES];
        let mut b = [0.; HALVES];
        if neutral.is_none() {
            values.iter_mut().zip(targets.iter()).for_each(|(v, t)| *v = f16::from_ne_bytes(*t));
            values[..count].convert_to_f32_slice(&mut a[..count]);
        }
        values.iter_mut().zip(sources).for_each(|(v, s)| *v = f16::from_ne_bytes(*s));
        values[..count].convert_to_f32_slice(&mut b[..count]);
        a.iter_mut().zip(&b).for_each(|(a, b)| *a = f(*a, *b));
        values[..count].convert_from_f32_slice(&a[..count]);
        targets.iter_mut().zip(&values).for_each(|(t, v)| *t = v.to_ne_bytes());
    }
}

macro_rules! half_combine {
    ($neutral:expr, $value:expr) => {
        Combine { start: |t, s| halves(t, s, Some($neutral), $value), next: |t, s| halves(t, s, None, $value) }
    };
}

fn half_float(reduce: Reduce) -> Option<Combine> {
    Some(match reduce {
        Reduce::Add => half_combine!(0., |a, b| a + b),
        Reduce::Multiply => half_combine!(1., |a, b| a * b),
        Reduce::Min => half_combine!(f32::INFINITY, |a, b| if b < a { b } else { a }),
        Reduce::Max => half_combine!(f32::NEG_INFINITY, |a, b| if a < b { b } else { a }),
        Reduce::And | Reduce::Or | Reduce::Xor => return None,
    })
}

macro_rules! complex {
    ($name:ident, $type:ty, $bytes:literal, $half:literal) => {
        fn $name(reduce: Reduce) -> Option<Combine> {
            fn read(bytes: [u8; $bytes]) -> [$type; 2] {
                let (parts, _) = bytes.as_chunks::<$half>();
                [<$type>::from_ne_bytes(parts[0]), <$type>::from_ne_bytes(parts[1])]
            }
            fn write(value: [$type; 2]) -> [u8; $bytes] {
                let mut bytes = [0; $bytes];
                bytes[..$half].copy_from_slice(&value[0].to_ne_bytes());
                bytes[$half..].copy_from_slice(&value[1].to_ne_bytes());
                bytes
            }
            match reduce {
                Reduce::Add => Some(combine!($bytes, read, write, [0.; 2], |a, b| [a[0] + b[0], a[1] + b[1]])),
                Reduce::Multiply => {
                    Some(combine!($bytes, read, write, [1., 0.], |a, b| { [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]] }))
                }
                _ => None,
            }
        }
    };
}

complex!(complex64, f32, 8, 4);
complex!(complex128, f64, 16, 8);
