//! Eigenvalues and singular values.

use pw_pjrt::CallFrame;

use crate::frame::{argument, character, exactly, matrices, results, typed};
use crate::lapack::{Int, Lapack, Result, Shape, Vectors, elements_mut, invalid};
use crate::scalar::Scalar;

/// `info` of a matrix with infinities or NaN, which `geev` may not finish: its argument 4 is illegal.
const NOT_FINITE: Int = -4;

/// `a -> vectors, w, info`
pub(crate) fn syevd<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let (mode, uplo) = (character(frame, "mode")?, character(frame, "uplo")?);
    frame.copy_arg_to_result(0, 0)?;
    let [a, w, info] = results(frame)?;
    typed!(a, w, info);
    T::routines(lapack).syevd(mode, uplo, shape, a, w, info)
}

/// `a -> destroyed, s, u, vt, info`
pub(crate) fn gesdd<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    svd::<T>(true, lapack, frame)
}

/// As `gesdd`, by another algorithm.
pub(crate) fn gesvd<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    svd::<T>(false, lapack, frame)
}

fn svd<T: Scalar>(divide: bool, lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let vectors = match character(frame, "mode")? {
        b'A' => Vectors::Full,
        b'S' => Vectors::Thin,
        b'N' => Vectors::None,
        mode => return Err(invalid(format!("linear algebra: singular vectors {:?}", char::from(mode)))),
    };
    frame.copy_arg_to_result(0, 0)?;
    let [a, s, u, vt, info] = results(frame)?;
    typed!(a, s, u, vt, info);
    if vectors == Vectors::Full && (shape.m == 0 || shape.n == 0) {
        identity::<T>(shape.batch, shape.m, u);
        identity::<T>(shape.batch, shape.n, vt);
    }
    T::routines(lapack).svd(divide, vectors, shape, a, s, u, vt, info)
}

/// The full vectors of a matrix without elements.
fn identity<T: Scalar>(batch: usize, order: usize, out: &mut [T]) {
    if out.len() == batch * order * order {
        let one = T::from_real(<T::Real as crate::scalar::Real>::ONE);
        for (i, element) in out.iter_mut().enumerate() {
            let (row, column) = (i % order, i / order % order);
            *element = if row == column { one } else { T::default() };
        }
    }
}

/// Real: `a -> wr, wi, vl, vr, info`; complex: `a -> w, vl, vr, info`. The vectors are complex in both cases.
pub(crate) fn geev<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let (left, right) = (character(frame, "compute_left")?, character(frame, "compute_right")?);
    let views = frame.views()?;
    let a = argument::<T>(&views.args, 0, T::TYPE)?;
    if T::COMPLEX {
        let [w, vl, vr, info] = exactly(views.results)?;
        eigen(lapack, shape, (left, right), a, elements_mut(w)?, &mut [], vl, vr, info)
    } else {
        let [w, wi, vl, vr, info] = exactly(views.results)?;
        eigen(lapack, shape, (left, right), a, elements_mut(w)?, elements_mut(wi)?, vl, vr, info)
    }
}

#[allow(clippy::too_many_arguments)]
fn eigen<T: Scalar>(
    lapack: &Lapack,
    shape: Shape,
    (left, right): (u8, u8),
    a: &[T],
    w: &mut [T],
    wi: &mut [T],
    vl: &mut [u8],
    vr: &mut [u8],
    info: &mut [u8],
) -> Result<()> {
    let (vl, vr) = (elements_mut::<T::Complex>(vl)?, elements_mut::<T::Complex>(vr)?);
    let info: &mut [Int] = elements_mut(info)?;
    let (n, each) = (shape.n, shape.n * shape.n);
    let fits = shape.m == n && [a.len(), vl.len(), vr.len()] == [shape.batch * each; 3] && w.len() == shape.batch * n;
    if !fits || info.len() != shape.batch || (!T::COMPLEX && wi.len() != w.len()) {
        return Err(invalid(format!("linear algebra: results of geev do not fit {shape:?}")));
    }
    // LAPACK's own form of the vectors, and a matrix that it may destroy.
    let mut scratch = vec![T::default(); 3 * each + n];
    let (matrix, rest) = scratch.split_at_mut(each);
    let (left_packed, rest) = rest.split_at_mut(each);
    let (right_packed, no_wi) = rest.split_at_mut(each);
    let mut work = Vec::new();
    for (i, info) in info.iter_mut().enumerate() {
        matrix.copy_from_slice(&a[i * each..][..each]);
        if !matrix.iter().all(|x| x.is_finite()) {
            *info = NOT_FINITE;
            continue;
        }
        let w = &mut w[i * n..][..n];
        let wi = if T::COMPLEX { &mut no_wi[..] } else { &mut wi[i * n..][..n] };
        *info = T::routines(lapack).geev(left, right, n, matrix, w, wi, left_packed, right_packed, &mut work)?;
        if *info == 0 {
            for (wanted, packed, out) in [(left, &*left_packed, &mut *vl), (right, &*right_packed, &mut *vr)] {
                if wanted == b'V' {
                    unpack(n, wi, packed, &mut out[i * each..][..each]);
                }
            }
        }
    }
    Ok(())
}

/// Real routines store the vectors of a conjugate pair as real and imaginary part of the first of them, in two columns.
fn unpack<T: Scalar>(n: usize, wi: &[T], packed: &[T], out: &mut [T::Complex]) {
    let mut column = 0;
    while column < n {
        let (first, second) = (column * n, (column + 1) * n);
        if T::COMPLEX || wi[column] == T::default() || column + 1 == n {
            (0..n).for_each(|row| out[first + row] = T::eigenvector(packed[first + row], T::default()));
            column += 1;
        } else {
            for row in 0..n {
                let (re, im) = (packed[first + row], packed[second + row]);
                out[first + row] = T::eigenvector(re, im);
                out[second + row] = T::eigenvector(re, -im);
            }
            column += 2;
        }
    }
}

/// Real: `a -> t, vectors, wr, wi, selected, info`; complex: `a -> t, vectors, w, selected, info`.
pub(crate) fn gees<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 0, T::TYPE)?;
    let mode = character(frame, "mode")?;
    if character(frame, "sort")? != b'N' {
        return Err(invalid("linear algebra: the eigenvalues of a Schur form cannot be sorted".to_owned()));
    }
    frame.copy_arg_to_result(0, 0)?;
    let routines = T::routines(lapack);
    if T::COMPLEX {
        let [a, vs, w, selected, info] = results(frame)?;
        typed!(a, vs, w, selected, info);
        routines.gees(mode, shape, a, vs, w, &mut [], selected, info)
    } else {
        let [a, vs, w, wi, selected, info] = results(frame)?;
        typed!(a, vs, w, wi, selected, info);
        routines.gees(mode, shape, a, vs, w, wi, selected, info)
    }
}
