//! Triangular systems.

use pw_pjrt::CallFrame;

use crate::frame::{argument, character, matrices, only};
use crate::lapack::{Lapack, Result, Triangle};
use crate::scalar::Scalar;

/// `a, b -> x`
pub(crate) fn trsm<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 1, T::TYPE)?;
    let (side, uplo) = (character(frame, "side")?, character(frame, "uplo")?);
    let (trans, diag) = (character(frame, "trans_x")?, character(frame, "diag")?);
    frame.copy_arg_to_result(1, 0)?;
    let views = frame.views()?;
    let a = argument(&views.args, 0, T::TYPE)?;
    T::routines(lapack).trsm(Triangle { side, uplo, trans, diag }, shape, a, only(views.results)?)
}
