//! The bindings: a LAPACK opened at run time, its routines by element type, and safe calls of them.
//!
//! This file and those under `lapack/` are the only ones of the crate with `unsafe` in them. Invariants:
//! 1. A library is used only if it has every routine, with 32-bit integers; it is never closed.
//! 2. Every call works on whole batches and checks all lengths against the dimensions before the library sees a pointer;
//!    workspaces have the size that the library itself asks for these dimensions, and at least the documented one.
//! 3. No routine is called for matrices without elements, and none with an argument that it would refuse: the reference
//!    implementation ends the process then.
//!
//! Argument lists are those of the LAPACK documentation; every character argument has its length behind the list.

mod calls;
mod spectral;
#[cfg(test)]
mod tests;

use std::path::Path;

use libloading::Library;
use pw_pjrt::{FfiError, code};

pub(crate) use calls::{Shape, Triangle, Vectors};

use crate::scalar::{Complex, Scalar};

/// LAPACK's integer.
pub(crate) type Int = i32;
/// A character argument, and its length at the end of the list.
type Ch<'a> = &'a u8;
type Len = usize;
type In<'a> = &'a Int;
type Out<'a> = &'a mut Int;
type P<T> = *mut T;
pub(crate) type Result<T> = std::result::Result<T, FfiError>;

/// Types that have no padding and no invalid values.
///
/// # Safety
/// That must be true.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: numbers, and pairs of them in C layout.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for Complex<f32> {}
// SAFETY: as above.
unsafe impl Plain for Complex<f64> {}

/// The elements in a buffer.
pub(crate) fn elements<T: Plain>(bytes: &[u8]) -> Result<&[T]> {
    // SAFETY: any bytes are valid elements.
    match unsafe { bytes.align_to() } {
        ([], elements, []) => Ok(elements),
        _ => Err(misaligned()),
    }
}

/// The elements in a buffer, to be written.
pub(crate) fn elements_mut<T: Plain>(bytes: &mut [u8]) -> Result<&mut [T]> {
    // SAFETY: as above, and any elements are valid bytes.
    match unsafe { bytes.align_to_mut() } {
        ([], elements, []) => Ok(elements),
        _ => Err(misaligned()),
    }
}

fn misaligned() -> FfiError {
    FfiError::new(code::INTERNAL, "linear algebra: a buffer is not a whole number of aligned elements")
}

pub(crate) fn invalid(message: String) -> FfiError {
    FfiError::new(code::INVALID_ARGUMENT, message)
}

/// A routine whose argument list differs between real and complex numbers.
enum Kind<R, C> {
    Real(R),
    Complex(C),
}

type Trsm<T> = unsafe extern "C" fn(Ch, Ch, Ch, Ch, In, In, &T, *const T, In, P<T>, In, Len, Len, Len, Len);
type Getrf<T> = unsafe extern "C" fn(In, In, P<T>, In, P<Int>, Out);
type Geqrf<T> = unsafe extern "C" fn(In, In, P<T>, In, P<T>, P<T>, In, Out);
type Geqp3R<T> = unsafe extern "C" fn(In, In, P<T>, In, P<Int>, P<T>, P<T>, In, Out);
type Geqp3C<T, R> = unsafe extern "C" fn(In, In, P<T>, In, P<Int>, P<T>, P<T>, In, P<R>, Out);
type Orgqr<T> = unsafe extern "C" fn(In, In, In, P<T>, In, *const T, P<T>, In, Out);
type Ormqr<T> = unsafe extern "C" fn(Ch, Ch, In, In, In, *const T, In, *const T, P<T>, In, P<T>, In, Out, Len, Len);
type Potrf<T> = unsafe extern "C" fn(Ch, In, P<T>, In, Out, Len);
type GesddR<T> = unsafe extern "C" fn(Ch, In, In, P<T>, In, P<T>, P<T>, In, P<T>, In, P<T>, In, P<Int>, Out, Len);
type GesddC<T, R> = unsafe extern "C" fn(Ch, In, In, P<T>, In, P<R>, P<T>, In, P<T>, In, P<T>, In, P<R>, P<Int>, Out, Len);
type GesvdR<T> = unsafe extern "C" fn(Ch, Ch, In, In, P<T>, In, P<T>, P<T>, In, P<T>, In, P<T>, In, Out, Len, Len);
type GesvdC<T, R> = unsafe extern "C" fn(Ch, Ch, In, In, P<T>, In, P<R>, P<T>, In, P<T>, In, P<T>, In, P<R>, Out, Len, Len);
type Syevd<T> = unsafe extern "C" fn(Ch, Ch, In, P<T>, In, P<T>, P<T>, In, P<Int>, In, Out, Len, Len);
type Heevd<T, R> = unsafe extern "C" fn(Ch, Ch, In, P<T>, In, P<R>, P<T>, In, P<R>, In, P<Int>, In, Out, Len, Len);
type GeevR<T> = unsafe extern "C" fn(Ch, Ch, In, P<T>, In, P<T>, P<T>, P<T>, In, P<T>, In, P<T>, In, Out, Len, Len);
type GeevC<T, R> = unsafe extern "C" fn(Ch, Ch, In, P<T>, In, P<T>, P<T>, In, P<T>, In, P<T>, In, P<R>, Out, Len, Len);
type Sytrd<T, R> = unsafe extern "C" fn(Ch, In, P<T>, In, P<R>, P<R>, P<T>, P<T>, In, Out, Len);
/// The function that selects eigenvalues: none, since nothing is sorted.
type Sel = Option<unsafe extern "C" fn()>;
type GeesR<T> = unsafe extern "C" fn(Ch, Ch, Sel, In, P<T>, In, Out, P<T>, P<T>, P<T>, In, P<T>, In, P<Int>, Out, Len, Len);
type GeesC<T, R> = unsafe extern "C" fn(Ch, Ch, Sel, In, P<T>, In, Out, P<T>, P<T>, In, P<T>, In, P<R>, P<Int>, Out, Len, Len);
type Gehrd<T> = unsafe extern "C" fn(In, In, In, P<T>, In, P<T>, P<T>, In, Out);
type Gtsv<T> = unsafe extern "C" fn(In, In, P<T>, P<T>, P<T>, P<T>, In, Out);

/// The routines for one element type.
pub(crate) struct Routines<T: Scalar> {
    trsm: Trsm<T>,
    getrf: Getrf<T>,
    geqrf: Geqrf<T>,
    geqp3: Kind<Geqp3R<T>, Geqp3C<T, T::Real>>,
    orgqr: Orgqr<T>,
    ormqr: Ormqr<T>,
    potrf: Potrf<T>,
    gesdd: Kind<GesddR<T>, GesddC<T, T::Real>>,
    gesvd: Kind<GesvdR<T>, GesvdC<T, T::Real>>,
    syevd: Kind<Syevd<T>, Heevd<T, T::Real>>,
    geev: Kind<GeevR<T>, GeevC<T, T::Real>>,
    sytrd: Sytrd<T, T::Real>,
    gees: Kind<GeesR<T>, GeesC<T, T::Real>>,
    gehrd: Gehrd<T>,
    gtsv: Gtsv<T>,
}

/// A LAPACK that can be called.
pub struct Lapack {
    pub(crate) s: Routines<f32>,
    pub(crate) d: Routines<f64>,
    pub(crate) c: Routines<Complex<f32>>,
    pub(crate) z: Routines<Complex<f64>>,
}

impl Lapack {
    /// Opens a library: a path, or a name that the system's loader finds. The error says why it cannot be used.
    pub fn open(library: &Path) -> std::result::Result<Self, String> {
        // SAFETY: the initialisers of a LAPACK do nothing that a Rust program would notice.
        let library = unsafe { Library::new(library) }.map_err(|error| chain(&error))?;
        // Closing it would take the routines, and the threads of some libraries, away under their users.
        let library: &'static Library = Box::leak(Box::new(library));
        let symbols = Symbols::of(library)?;
        symbols.check_integers()?;
        symbols.one_thread();
        Ok(Self { s: symbols.routines()?, d: symbols.routines()?, c: symbols.routines()?, z: symbols.routines()? })
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", chain(source)))
}

struct Symbols {
    library: &'static Library,
    /// In front of every routine's name, such as `scipy_`.
    prefix: &'static str,
}

impl Symbols {
    fn of(library: &'static Library) -> std::result::Result<Self, String> {
        let has = |name: &str| {
            // SAFETY: only looked at, not called.
            unsafe { library.get::<unsafe extern "C" fn()>(name) }.is_ok()
        };
        if let Some(prefix) = ["", "scipy_"].into_iter().find(|prefix| has(&format!("{prefix}dgetrf_"))) {
            return Ok(Self { library, prefix });
        }
        let wide = ["dgetrf_64_", "scipy_dgetrf_64_", "dgetrf64_"].into_iter().find(|name| has(name));
        Err(wide.map_or_else(
            || "it has no dgetrf_: no LAPACK with Fortran names".to_owned(),
            |name| format!("its integers have 64 bits (it has {name}); one with 32-bit integers (LP64) is needed"),
        ))
    }

    /// # Safety
    /// `F` is the type of this routine.
    unsafe fn get<F: Copy>(&self, routine: &str) -> std::result::Result<F, String> {
        // SAFETY: the caller's promise.
        let symbol = unsafe { self.library.get::<F>(format!("{}{routine}_", self.prefix)) };
        symbol.map(|symbol| *symbol).map_err(|_| format!("it has no routine {}{routine}_", self.prefix))
    }

    /// Some libraries keep the plain names for 64-bit integers: then more is written than 32 bits.
    fn check_integers(&self) -> std::result::Result<(), String> {
        type Ilaver = unsafe extern "C" fn(*mut [Int; 2], *mut [Int; 2], *mut [Int; 2]);
        let mut version = [[-1, -1]; 3];
        let [major, minor, patch] = &mut version;
        // SAFETY: the routine writes three integers; there is room for either size.
        unsafe { self.get::<Ilaver>("ilaver")?(major, minor, patch) };
        match version.iter().all(|part| part[1] == -1) {
            true => Ok(()),
            false => Err("its integers have 64 bits; one with 32-bit integers (LP64) is needed".to_owned()),
        }
    }

    /// Every device runs its programs at the same time as the others, so the cores are busy already: more threads per
    /// call would only stand in each other's way.
    fn one_thread(&self) {
        for name in ["openblas_set_num_threads", "scipy_openblas_set_num_threads"] {
            // SAFETY: OpenBLAS's own function of this name and type.
            if let Ok(set) = unsafe { self.library.get::<unsafe extern "C" fn(std::ffi::c_int)>(name) } {
                // SAFETY: as above.
                unsafe { set(1) };
            }
        }
    }

    fn routines<T: Scalar>(&self) -> std::result::Result<Routines<T>, String> {
        let named = |family: &str| format!("{}{family}", T::LETTER);
        let (or, sy) = if T::COMPLEX { ("un", "he") } else { ("or", "sy") };
        // SAFETY: the types above are those of the documentation, for this letter.
        unsafe {
            macro_rules! kind {
                ($name:expr) => {
                    if T::COMPLEX { Kind::Complex(self.get(&named($name))?) } else { Kind::Real(self.get(&named($name))?) }
                };
            }
            Ok(Routines {
                trsm: self.get(&named("trsm"))?,
                getrf: self.get(&named("getrf"))?,
                geqrf: self.get(&named("geqrf"))?,
                geqp3: kind!("geqp3"),
                orgqr: self.get(&named(&format!("{or}gqr")))?,
                ormqr: self.get(&named(&format!("{or}mqr")))?,
                potrf: self.get(&named("potrf"))?,
                gesdd: kind!("gesdd"),
                gesvd: kind!("gesvd"),
                syevd: kind!(&format!("{sy}evd")),
                geev: kind!("geev"),
                sytrd: self.get(&named(&format!("{sy}trd")))?,
                gees: kind!("gees"),
                gehrd: self.get(&named("gehrd"))?,
                gtsv: self.get(&named("gtsv"))?,
            })
        }
    }
}
