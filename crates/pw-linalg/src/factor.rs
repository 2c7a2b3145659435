//! Factorisations: Cholesky, LU, QR with and without column exchanges, reflectors, Hessenberg and tridiagonal form.

use pw_pjrt::{BufferType, CallFrame};

use crate::frame::{argument, character, flag, last, matrices, only, results, typed};
use crate::lapack::{Lapack, Result, invalid};
use crate::scalar::Scalar;

/// `a -> l, info`
pub(crate) fn potrf<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let (shape, uplo) = (matrices(frame, 0, T::TYPE)?, character(frame, "uplo")?);
    frame.copy_arg_to_result(0, 0)?;
    let [a, info] = results(frame)?;
    typed!(a, info);
    T::routines(lapack).potrf(uplo, shape, a, info)
}

/// `a -> lu, ipiv, info`
pub(crate) fn getrf<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    frame.copy_arg_to_result(0, 0)?;
    let [a, ipiv, info] = results(frame)?;
    typed!(a, ipiv, info);
    T::routines(lapack).getrf(shape, a, ipiv, info)
}

/// `a -> qr, tau`
pub(crate) fn geqrf<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    frame.copy_arg_to_result(0, 0)?;
    let [a, tau] = results(frame)?;
    typed!(a, tau);
    T::routines(lapack).geqrf(shape, a, tau)
}

/// `a, jpvt -> qr, jpvt, tau`
pub(crate) fn geqp3<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let pivots = frame.arg(1)?.element_type;
    if pivots != BufferType::S32 {
        return Err(invalid(format!("linear algebra: column exchanges are {pivots:?}, not S32")));
    }
    frame.copy_arg_to_result(0, 0)?;
    frame.copy_arg_to_result(1, 1)?;
    let [a, jpvt, tau] = results(frame)?;
    typed!(a, jpvt, tau);
    T::routines(lapack).geqp3(shape, a, jpvt, tau)
}

/// `a, tau -> q`
pub(crate) fn orgqr<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let (shape, reflectors) = (matrices(frame, 0, T::TYPE)?, last(frame, 1)?);
    frame.copy_arg_to_result(0, 0)?;
    let views = frame.views()?;
    let tau = argument(&views.args, 1, T::TYPE)?;
    T::routines(lapack).orgqr(shape, reflectors, only(views.results)?, tau)
}

/// `a, tau, c -> product`
pub(crate) fn ormqr<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let (of, reflectors, shape) = (matrices(frame, 0, T::TYPE)?, last(frame, 1)?, matrices(frame, 2, T::TYPE)?);
    let (left, transpose) = (flag(frame, "left")?, flag(frame, "transpose")?);
    frame.copy_arg_to_result(2, 0)?;
    let views = frame.views()?;
    let (a, tau) = (argument(&views.args, 0, T::TYPE)?, argument(&views.args, 1, T::TYPE)?);
    T::routines(lapack).ormqr(left, transpose, of, reflectors, a, tau, shape, only(views.results)?)
}

/// `a -> h, tau, info`
pub(crate) fn gehrd<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let (low, high) = (frame.attribute_i64("low")?, frame.attribute_i64("high")?);
    frame.copy_arg_to_result(0, 0)?;
    let [a, tau, info] = results(frame)?;
    typed!(a, tau, info);
    T::routines(lapack).gehrd(low, high, shape, a, tau, info)
}

/// `a -> reflectors, d, e, tau, info`
pub(crate) fn sytrd<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let (shape, uplo) = (matrices(frame, 0, T::TYPE)?, character(frame, "uplo")?);
    frame.copy_arg_to_result(0, 0)?;
    let [a, d, e, tau, info] = results(frame)?;
    typed!(a, d, e, tau, info);
    T::routines(lapack).sytrd(uplo, shape, a, d, e, tau, info)
}
