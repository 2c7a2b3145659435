//! Safe calls of the routines, a batch of matrices each.
//!
//! Every call checks the lengths of all its buffers first, asks for the size of the workspace once, and takes the memory of each
//! matrix out of its slice with the bounds checked, so that no pointer leads outside. What a routine says in `info` is
//! returned per matrix; arguments that it could refuse have been refused before.

use pw_pjrt::{FfiError, code};

use super::{Int, Kind, Result, Routines, invalid};
use crate::scalar::{Real, Scalar};

/// A batch of equal matrices: how many, rows, columns; each a whole block of column-major elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) m: usize,
    pub(crate) n: usize,
}

impl Shape {
    pub(super) fn is_empty(self) -> bool {
        self.batch == 0 || self.m == 0 || self.n == 0
    }
}

/// Which singular vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Vectors {
    None,
    Thin,
    Full,
}

/// The operation of a triangular solve, as LAPACK's characters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Triangle {
    pub(crate) side: u8,
    pub(crate) uplo: u8,
    pub(crate) trans: u8,
    pub(crate) diag: u8,
}

pub(super) fn int(value: usize) -> Result<Int> {
    Int::try_from(value).map_err(|_| invalid(format!("linear algebra: {value} is too large for LAPACK's 32-bit integers")))
}

/// Refuses a buffer that does not have `batch` times `each` elements.
pub(super) fn check(what: &str, len: usize, batch: usize, each: usize) -> Result<()> {
    match batch.checked_mul(each) {
        Some(wanted) if wanted == len => Ok(()),
        _ => Err(invalid(format!("linear algebra: {what} has {len} elements, not {batch} times {each}"))),
    }
}

/// Where the part of batch element `b` begins; the part is within the slice.
pub(super) fn part<T>(all: &mut [T], b: usize, each: usize) -> *mut T {
    all[b * each..(b + 1) * each].as_mut_ptr()
}

fn part_const<T>(all: &[T], b: usize, each: usize) -> *const T {
    all[b * each..(b + 1) * each].as_ptr()
}

/// A character argument.
pub(super) fn one_of(what: &str, value: u8, allowed: &[u8]) -> Result<()> {
    match allowed.contains(&value) {
        true => Ok(()),
        false => Err(invalid(format!("linear algebra: {what} is {:?}", char::from(value)))),
    }
}

/// A workspace as large as the library wants, by a query call with the workspace, its length and an `info` to return.
pub(super) fn workspace<T: Scalar>(least: usize, query: impl FnOnce(*mut T, &Int) -> Int) -> Result<Vec<T>> {
    let mut answer = [T::default()];
    let info = query(answer.as_mut_ptr(), &-1);
    let wanted = answer[0].re().to_f64();
    // A size may have been rounded to a single on its way.
    let wanted = (wanted * (1.0 + f64::from(f32::EPSILON))).ceil();
    if info != 0 || wanted.is_nan() || wanted > f64::from(Int::MAX) || least > Int::MAX as usize {
        return Err(invalid(format!("linear algebra: LAPACK gives no workspace for this size (info {info}, size {wanted})")));
    }
    Ok(vec![T::default(); least.max(wanted as usize).max(1)])
}

pub(super) fn len<T>(work: &[T]) -> Int {
    // `workspace` makes none that is longer.
    work.len().min(Int::MAX as usize) as Int
}

/// Calls a routine that cannot fail for every matrix of a batch.
fn each(batch: usize, routine: &str, mut call: impl FnMut(usize) -> Int) -> Result<()> {
    match (0..batch).map(&mut call).find(|&info| info != 0) {
        None => Ok(()),
        Some(info) => Err(FfiError::new(code::INTERNAL, format!("linear algebra: {routine} refuses argument {}", -info))),
    }
}

/// The order of a batch of square matrices. Every `info` becomes zero.
pub(super) fn square<T>(s: Shape, a: &[T], info: &mut [Int]) -> Result<Int> {
    if s.m != s.n {
        return Err(invalid(format!("linear algebra: a matrix of {} by {} is not square", s.m, s.n)));
    }
    check("a", a.len(), s.batch, s.n * s.n)?;
    check("info", info.len(), s.batch, 1)?;
    info.fill(0);
    int(s.n)
}

impl<T: Scalar> Routines<T> {
    /// Solves `op(A) X = B` or `X op(A) = B` for a triangular `A`; `b` becomes `X`.
    pub(crate) fn trsm(&self, op: Triangle, s: Shape, a: &[T], b: &mut [T]) -> Result<()> {
        let order = if op.side == b'L' { s.m } else { s.n };
        one_of("side", op.side, b"LR")?;
        one_of("uplo", op.uplo, b"LU")?;
        one_of("trans_x", op.trans, b"NTC")?;
        one_of("diag", op.diag, b"NU")?;
        check("a", a.len(), s.batch, order * order)?;
        check("b", b.len(), s.batch, s.m * s.n)?;
        if s.is_empty() {
            return Ok(());
        }
        let (m, n, lda, one) = (int(s.m)?, int(s.n)?, int(order)?, T::from_real(T::Real::ONE));
        for i in 0..s.batch {
            let (a, b) = (part_const(a, i, order * order), part(b, i, s.m * s.n));
            // SAFETY: two whole matrices with leading dimensions `order` and `m`.
            unsafe { (self.trsm)(&op.side, &op.uplo, &op.trans, &op.diag, &m, &n, &one, a, &lda, b, &m, 1, 1, 1, 1) };
        }
        Ok(())
    }

    /// LU with row exchanges, in place.
    pub(crate) fn getrf(&self, s: Shape, a: &mut [T], ipiv: &mut [Int], info: &mut [Int]) -> Result<()> {
        let k = s.m.min(s.n);
        check("a", a.len(), s.batch, s.m * s.n)?;
        check("ipiv", ipiv.len(), s.batch, k)?;
        check("info", info.len(), s.batch, 1)?;
        info.fill(0);
        if s.is_empty() {
            return Ok(());
        }
        let (m, n) = (int(s.m)?, int(s.n)?);
        for (i, info) in info.iter_mut().enumerate() {
            // SAFETY: a whole matrix, a whole list of pivots.
            unsafe { (self.getrf)(&m, &n, part(a, i, s.m * s.n), &m, part(ipiv, i, k), info) };
        }
        Ok(())
    }

    /// QR, in place.
    pub(crate) fn geqrf(&self, s: Shape, a: &mut [T], tau: &mut [T]) -> Result<()> {
        let k = s.m.min(s.n);
        check("a", a.len(), s.batch, s.m * s.n)?;
        check("tau", tau.len(), s.batch, k)?;
        if s.is_empty() {
            return Ok(());
        }
        let (m, n) = (int(s.m)?, int(s.n)?);
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            // SAFETY: a whole matrix, a whole list of factors, a workspace of `lwork`.
            unsafe { (self.geqrf)(&m, &n, part(a, i, s.m * s.n), &m, part(tau, i, k), work, lwork, &mut info) };
            info
        };
        let mut work = workspace(s.n, |work, lwork| call(0, work, lwork))?;
        each(s.batch, "geqrf", |i| call(i, work.as_mut_ptr(), &len(&work)))
    }

    /// QR with column exchanges, in place; columns with a non-zero `jpvt` come first.
    pub(crate) fn geqp3(&self, s: Shape, a: &mut [T], jpvt: &mut [Int], tau: &mut [T]) -> Result<()> {
        let k = s.m.min(s.n);
        check("a", a.len(), s.batch, s.m * s.n)?;
        check("jpvt", jpvt.len(), s.batch, s.n)?;
        check("tau", tau.len(), s.batch, k)?;
        if s.is_empty() {
            // As the routine has it for matrices without rows.
            (0..s.batch).for_each(|i| jpvt[i * s.n..(i + 1) * s.n].iter_mut().zip(1..).for_each(|(p, column)| *p = column));
            return Ok(());
        }
        let (m, n) = (int(s.m)?, int(s.n)?);
        let mut rwork = vec![T::Real::default(); 2 * s.n];
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, jpvt, tau) = (part(a, i, s.m * s.n), part(jpvt, i, s.n), part(tau, i, k));
            // SAFETY: as for `geqrf`; `rwork` has 2 n elements.
            unsafe {
                match self.geqp3 {
                    Kind::Real(f) => f(&m, &n, a, &m, jpvt, tau, work, lwork, &mut info),
                    Kind::Complex(f) => f(&m, &n, a, &m, jpvt, tau, work, lwork, rwork.as_mut_ptr(), &mut info),
                }
            }
            info
        };
        let mut work = workspace(3 * s.n + 1, |work, lwork| call(0, work, lwork))?;
        each(s.batch, "geqp3", |i| call(i, work.as_mut_ptr(), &len(&work)))
    }

    /// The product of reflectors as `geqrf` leaves them, in place; `k` of them per matrix.
    pub(crate) fn orgqr(&self, s: Shape, k: usize, a: &mut [T], tau: &[T]) -> Result<()> {
        check("a", a.len(), s.batch, s.m * s.n)?;
        check("tau", tau.len(), s.batch, k)?;
        if s.n > s.m || k > s.n {
            return Err(invalid(format!("linear algebra: {k} reflectors give no {} by {} matrix", s.m, s.n)));
        }
        if s.is_empty() {
            return Ok(());
        }
        let (m, n, reflectors) = (int(s.m)?, int(s.n)?, int(k)?);
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, tau) = (part(a, i, s.m * s.n), part_const(tau, i, k));
            // SAFETY: as for `geqrf`.
            unsafe { (self.orgqr)(&m, &n, &reflectors, a, &m, tau, work, lwork, &mut info) };
            info
        };
        let mut work = workspace(s.n, |work, lwork| call(0, work, lwork))?;
        each(s.batch, "orgqr", |i| call(i, work.as_mut_ptr(), &len(&work)))
    }

    /// Multiplies `c` by the product of the reflectors in `a` (of shape `of`), from the left or right, in place.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn ormqr(&self, left: bool, adjoint: bool, of: Shape, k: usize, a: &[T], tau: &[T], s: Shape, c: &mut [T]) -> Result<()> {
        let order = if left { s.m } else { s.n };
        if of.batch != s.batch || of.m != order || of.n < k || k > order {
            return Err(invalid(format!("linear algebra: reflectors in {of:?} do not fit a product of {s:?}")));
        }
        check("a", a.len(), of.batch, of.m * of.n)?;
        check("tau", tau.len(), of.batch, k)?;
        check("c", c.len(), s.batch, s.m * s.n)?;
        if s.is_empty() || k == 0 {
            return Ok(());
        }
        let (m, n, reflectors, lda) = (int(s.m)?, int(s.n)?, int(k)?, int(of.m)?);
        let side = if left { b'L' } else { b'R' };
        let adjoined = if T::COMPLEX { b'C' } else { b'T' };
        let trans = if adjoint { adjoined } else { b'N' };
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, tau, c) = (part_const(a, i, of.m * of.n), part_const(tau, i, k), part(c, i, s.m * s.n));
            // SAFETY: whole matrices with leading dimensions `of.m` and `m`, a whole list of factors.
            unsafe { (self.ormqr)(&side, &trans, &m, &n, &reflectors, a, &lda, tau, c, &m, work, lwork, &mut info, 1, 1) };
            info
        };
        let mut work = workspace(s.m.max(s.n), |work, lwork| call(0, work, lwork))?;
        each(s.batch, "ormqr", |i| call(i, work.as_mut_ptr(), &len(&work)))
    }

    /// Cholesky, in place, in the triangle that `uplo` names.
    pub(crate) fn potrf(&self, uplo: u8, s: Shape, a: &mut [T], info: &mut [Int]) -> Result<()> {
        one_of("uplo", uplo, b"LU")?;
        let n = square(s, a, info)?;
        for (i, info) in info.iter_mut().enumerate().take(if n == 0 { 0 } else { s.batch }) {
            // SAFETY: a whole square matrix.
            unsafe { (self.potrf)(&uplo, &n, part(a, i, s.n * s.n), &n, info, 1) };
        }
        Ok(())
    }

    /// The tridiagonal form of a symmetric or Hermitian matrix, in place: diagonal, other diagonal, factors of the reflectors.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn sytrd(
        &self,
        uplo: u8,
        s: Shape,
        a: &mut [T],
        d: &mut [T::Real],
        e: &mut [T::Real],
        tau: &mut [T],
        info: &mut [Int],
    ) -> Result<()> {
        one_of("uplo", uplo, b"LU")?;
        let n = square(s, a, info)?;
        let below = s.n.saturating_sub(1);
        check("d", d.len(), s.batch, s.n)?;
        check("e", e.len(), s.batch, below)?;
        check("tau", tau.len(), s.batch, below)?;
        if s.is_empty() {
            return Ok(());
        }
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, d, e, tau) = (part(a, i, s.n * s.n), part(d, i, s.n), part(e, i, below), part(tau, i, below));
            // SAFETY: a whole square matrix, `n` and `n - 1` numbers, a workspace of `lwork`.
            unsafe { (self.sytrd)(&uplo, &n, a, &n, d, e, tau, work, lwork, &mut info, 1) };
            info
        };
        let mut work = workspace(1, |work, lwork| call(0, work, lwork))?;
        for (i, info) in info.iter_mut().enumerate() {
            *info = call(i, work.as_mut_ptr(), &len(&work));
        }
        Ok(())
    }

    /// The Hessenberg form of rows and columns `low..=high` (from 1), in place.
    pub(crate) fn gehrd(&self, low: i64, high: i64, s: Shape, a: &mut [T], tau: &mut [T], info: &mut [Int]) -> Result<()> {
        let n = square(s, a, info)?;
        let below = s.n.saturating_sub(1);
        check("tau", tau.len(), s.batch, below)?;
        if s.is_empty() {
            return Ok(());
        }
        if low < 1 || low > high || high > i64::from(n) {
            return Err(invalid(format!("linear algebra: rows {low} to {high} of {n}")));
        }
        let (low, high) = (low as Int, high as Int);
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, tau) = (part(a, i, s.n * s.n), part(tau, i, below));
            // SAFETY: a whole square matrix, `n - 1` factors, a workspace of `lwork`.
            unsafe { (self.gehrd)(&n, &low, &high, a, &n, tau, work, lwork, &mut info) };
            info
        };
        let mut work = workspace(s.n, |work, lwork| call(0, work, lwork))?;
        for (i, info) in info.iter_mut().enumerate() {
            *info = call(i, work.as_mut_ptr(), &len(&work));
        }
        Ok(())
    }

    /// Solves a tridiagonal system of `s.m` equations for `s.n` right-hand sides; `b` becomes the solution, the diagonals are
    /// overwritten. All three have `s.m` elements; the first of the lower and the last of the upper one are not used.
    pub(crate) fn gtsv(&self, s: Shape, dl: &mut [T], d: &mut [T], du: &mut [T], b: &mut [T], info: &mut [Int]) -> Result<()> {
        for (what, len) in [("dl", dl.len()), ("d", d.len()), ("du", du.len())] {
            check(what, len, s.batch, s.m)?;
        }
        check("b", b.len(), s.batch, s.m * s.n)?;
        check("info", info.len(), s.batch, 1)?;
        info.fill(0);
        if s.is_empty() {
            return Ok(());
        }
        let (n, columns) = (int(s.m)?, int(s.n)?);
        for (i, info) in info.iter_mut().enumerate() {
            let below = dl[i * s.m + 1..(i + 1) * s.m].as_mut_ptr();
            let (d, du, b) = (part(d, i, s.m), part(du, i, s.m), part(b, i, s.m * s.n));
            // SAFETY: `n - 1`, `n` and at least `n - 1` numbers, a whole matrix.
            unsafe { (self.gtsv)(&n, &columns, below, d, du, b, &n, info) };
        }
        Ok(())
    }
}
