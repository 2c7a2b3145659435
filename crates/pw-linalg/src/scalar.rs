//! The four element types of LAPACK, and what is computed with them here.

use std::ops::{Add, Div, Mul, Neg, Sub};

use pw_pjrt::BufferType;

use crate::lapack::{Lapack, Plain, Routines};

/// A complex number as Fortran and XLA lay it out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Complex<R> {
    /// Real part.
    pub(crate) re: R,
    /// Imaginary part.
    pub(crate) im: R,
}

impl<R: Real> Neg for Complex<R> {
    type Output = Self;
    fn neg(self) -> Self {
        Self { re: -self.re, im: -self.im }
    }
}

impl<R: Real> Add for Complex<R> {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { re: self.re + other.re, im: self.im + other.im }
    }
}

impl<R: Real> Sub for Complex<R> {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self { re: self.re - other.re, im: self.im - other.im }
    }
}

impl<R: Real> Mul for Complex<R> {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        Self { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }
}

impl<R: Real> Div for Complex<R> {
    type Output = Self;
    /// Divides by the larger part of `other` first, so that nothing overflows on the way.
    fn div(self, other: Self) -> Self {
        if other.re.abs() >= other.im.abs() {
            let ratio = other.im / other.re;
            let scale = other.re + other.im * ratio;
            Self { re: (self.re + self.im * ratio) / scale, im: (self.im - self.re * ratio) / scale }
        } else {
            let ratio = other.re / other.im;
            let scale = other.im + other.re * ratio;
            Self { re: (self.re * ratio + self.im) / scale, im: (self.im * ratio - self.re) / scale }
        }
    }
}

/// An element type: its names, its tables, its arithmetic.
pub(crate) trait Scalar:
    Plain
    + Default
    + PartialEq
    + Send
    + Sync
    + std::fmt::Debug
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + 'static
{
    /// The type of a modulus.
    type Real: Real;
    /// The type of an eigenvector.
    type Complex: Scalar<Real = Self::Real>;
    /// As PJRT says it.
    const TYPE: BufferType;
    /// First letter of the routines' names.
    const LETTER: char;
    /// Whether there is an imaginary part.
    const COMPLEX: bool;

    /// This type's routines.
    fn routines(lapack: &Lapack) -> &Routines<Self>;
    /// A real number.
    fn from_real(re: Self::Real) -> Self;
    /// Real part.
    fn re(self) -> Self::Real;
    /// Modulus.
    fn modulus(self) -> Self::Real;
    /// Neither infinite nor NaN, in both parts.
    fn is_finite(self) -> bool;
    /// `re + i im`, as an eigenvector has it.
    fn eigenvector(re: Self, im: Self) -> Self::Complex;
}

/// A real element type.
pub(crate) trait Real: Scalar<Real = Self> + PartialOrd {
    /// Distance of 1 to the next number.
    const EPSILON: Self;
    /// One.
    const ONE: Self;
    /// Smallest normal number.
    const TINY: Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// The larger one.
    fn larger(self, other: Self) -> Self;
    /// With the sign of another number.
    fn with_sign_of(self, other: Self) -> Self;
    /// As a double.
    fn to_f64(self) -> f64;
}

macro_rules! scalars {
    ($($real:ident $letter:literal $field:ident $type:ident, $complex_letter:literal $complex_field:ident $complex_type:ident;)*) => {$(
        impl Scalar for $real {
            type Real = Self;
            type Complex = Complex<Self>;
            const TYPE: BufferType = BufferType::$type;
            const LETTER: char = $letter;
            const COMPLEX: bool = false;
            fn routines(lapack: &Lapack) -> &Routines<Self> {
                &lapack.$field
            }
            fn from_real(re: Self) -> Self {
                re
            }
            fn re(self) -> Self {
                self
            }
            fn modulus(self) -> Self {
                self.abs()
            }
            fn is_finite(self) -> bool {
                self.is_finite()
            }
            fn eigenvector(re: Self, im: Self) -> Complex<Self> {
                Complex { re, im }
            }
        }

        impl Real for $real {
            const EPSILON: Self = $real::EPSILON;
            const ONE: Self = 1.0;
            const TINY: Self = $real::MIN_POSITIVE;
            fn abs(self) -> Self {
                self.abs()
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn with_sign_of(self, other: Self) -> Self {
                self.copysign(other)
            }
            fn to_f64(self) -> f64 {
                self.into()
            }
        }

        impl Scalar for Complex<$real> {
            type Real = $real;
            type Complex = Self;
            const TYPE: BufferType = BufferType::$complex_type;
            const LETTER: char = $complex_letter;
            const COMPLEX: bool = true;
            fn routines(lapack: &Lapack) -> &Routines<Self> {
                &lapack.$complex_field
            }
            fn from_real(re: $real) -> Self {
                Self { re, im: 0.0 }
            }
            fn re(self) -> $real {
                self.re
            }
            fn modulus(self) -> $real {
                self.re.hypot(self.im)
            }
            fn is_finite(self) -> bool {
                self.re.is_finite() && self.im.is_finite()
            }
            /// Complex routines return their eigenvectors as they are.
            fn eigenvector(re: Self, _: Self) -> Self {
                re
            }
        }
    )*};
}

scalars! {
    f32 's' s F32, 'c' c C64;
    f64 'd' d F64, 'z' z C128;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_right_and_do_not_overflow() {
        let (a, b) = (Complex { re: 3.0, im: -4.0 }, Complex { re: -1.0, im: 2.0 });
        assert_eq!(a / b * b, a);
        let big = Complex { re: 1e300, im: 1e300 };
        assert_eq!(big / big, Complex { re: 1.0, im: 0.0 });
        assert_eq!(Complex { re: 3.0, im: 4.0 }.modulus(), 5.0_f64);
    }
}
