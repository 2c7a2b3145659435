//! Safe calls of the routines for singular values and eigenvalues, as in `calls.rs`.

use super::calls::{Shape, Vectors, check, int, len, one_of, part, square, workspace};
use super::{Int, Kind, Result, Routines};
use crate::scalar::Scalar;

impl<T: Scalar> Routines<T> {
    /// Singular values and vectors, by divide and conquer or else by QR; destroys `a`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn svd(
        &self,
        divide: bool,
        vectors: Vectors,
        s: Shape,
        a: &mut [T],
        values: &mut [T::Real],
        u: &mut [T],
        vt: &mut [T],
        info: &mut [Int],
    ) -> Result<()> {
        let k = s.m.min(s.n);
        check("a", a.len(), s.batch, s.m * s.n)?;
        check("s", values.len(), s.batch, k)?;
        check("info", info.len(), s.batch, 1)?;
        info.fill(0);
        // Without vectors the routines look at neither, but JAX keeps the results.
        let (each_u, each_vt, ldvt) = match vectors {
            Vectors::None => (u.len() / s.batch.max(1), vt.len() / s.batch.max(1), k.max(s.n)),
            Vectors::Thin => (s.m * k, k * s.n, k),
            Vectors::Full => (s.m * s.m, s.n * s.n, s.n),
        };
        check("u", u.len(), s.batch, each_u)?;
        check("vt", vt.len(), s.batch, each_vt)?;
        if s.is_empty() {
            return Ok(());
        }
        let job = match vectors {
            Vectors::None => b'N',
            Vectors::Thin => b'S',
            Vectors::Full => b'A',
        };
        let (m, n, ldvt) = (int(s.m)?, int(s.n)?, int(ldvt)?);
        let long = s.m.max(s.n);
        let mut rwork = Vec::new();
        if T::COMPLEX {
            let with_vectors = (5 * k * k + 5 * k).max(2 * long * k + 2 * k * k + k);
            rwork.resize(if divide && vectors != Vectors::None { with_vectors } else { 7 * k }, T::Real::default());
        }
        let mut iwork = vec![0; 8 * k];
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, values, u, vt) = (part(a, i, s.m * s.n), part(values, i, k), part(u, i, each_u), part(vt, i, each_vt));
            // SAFETY: whole matrices with leading dimensions `m`, `m` and `ldvt` (nothing is stored in `u` and `vt` for
            // 'N'), `k` values, and workspaces of the documented sizes.
            unsafe {
                let (rwork, iwork) = (rwork.as_mut_ptr(), iwork.as_mut_ptr());
                match (divide, &self.gesdd, &self.gesvd) {
                    (true, Kind::Real(f), _) => {
                        f(&job, &m, &n, a, &m, values.cast(), u, &m, vt, &ldvt, work, lwork, iwork, &mut info, 1);
                    }
                    (true, Kind::Complex(f), _) => {
                        f(&job, &m, &n, a, &m, values, u, &m, vt, &ldvt, work, lwork, rwork, iwork, &mut info, 1);
                    }
                    (false, _, Kind::Real(f)) => {
                        f(&job, &job, &m, &n, a, &m, values.cast(), u, &m, vt, &ldvt, work, lwork, &mut info, 1, 1);
                    }
                    (false, _, Kind::Complex(f)) => {
                        f(&job, &job, &m, &n, a, &m, values, u, &m, vt, &ldvt, work, lwork, rwork, &mut info, 1, 1);
                    }
                }
            }
            info
        };
        let least = if divide && vectors != Vectors::None { 4 * k * k + 7 * k + long } else { 3 * k + long.max(7 * k) };
        let mut work = workspace(least, |work, lwork| call(0, work, lwork))?;
        for (i, info) in info.iter_mut().enumerate() {
            *info = call(i, work.as_mut_ptr(), &len(&work));
        }
        Ok(())
    }

    /// Eigenvalues, and with `job` 'V' eigenvectors, of a symmetric or Hermitian matrix, in place.
    pub(crate) fn syevd(&self, job: u8, uplo: u8, s: Shape, a: &mut [T], values: &mut [T::Real], info: &mut [Int]) -> Result<()> {
        one_of("mode", job, b"NV")?;
        one_of("uplo", uplo, b"LU")?;
        let n = square(s, a, info)?;
        check("w", values.len(), s.batch, s.n)?;
        if s.is_empty() {
            return Ok(());
        }
        let square = s.n * s.n;
        // The sizes of the documentation; blocked code wants more of the first only.
        let (least, real, whole) = match (job, T::COMPLEX) {
            (b'V', false) => (1 + 6 * s.n + 2 * square, 0, 3 + 5 * s.n),
            (_, false) => (2 * s.n + 1, 0, 1),
            (b'V', true) => (2 * s.n + square, 1 + 5 * s.n + 2 * square, 3 + 5 * s.n),
            (_, true) => (s.n + 1, s.n, 1),
        };
        let (mut rwork, mut iwork) = (vec![T::Real::default(); real.max(1)], vec![0; whole]);
        let (lrwork, liwork) = (int(rwork.len())?, int(iwork.len())?);
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, values) = (part(a, i, square), part(values, i, s.n));
            let (rwork, iwork) = (rwork.as_mut_ptr(), iwork.as_mut_ptr());
            // SAFETY: a whole square matrix, `n` values, workspaces of the documented sizes.
            unsafe {
                match self.syevd {
                    Kind::Real(f) => f(&job, &uplo, &n, a, &n, values.cast(), work, lwork, iwork, &liwork, &mut info, 1, 1),
                    Kind::Complex(f) => f(&job, &uplo, &n, a, &n, values, work, lwork, rwork, &lrwork, iwork, &liwork, &mut info, 1, 1),
                }
            }
            info
        };
        let mut work = workspace(least, |work, lwork| call(0, work, lwork))?;
        for (i, info) in info.iter_mut().enumerate() {
            *info = call(i, work.as_mut_ptr(), &len(&work));
        }
        Ok(())
    }

    /// Eigenvalues and, where `left` and `right` are 'V', eigenvectors of one general matrix, which is destroyed. Real types
    /// return the imaginary parts in `wi` and pack pairs of eigenvectors as LAPACK documents; all slices have their full length.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn geev(
        &self,
        left: u8,
        right: u8,
        order: usize,
        a: &mut [T],
        w: &mut [T],
        wi: &mut [T],
        vl: &mut [T],
        vr: &mut [T],
        work: &mut Vec<T>,
    ) -> Result<Int> {
        one_of("compute_left", left, b"NV")?;
        one_of("compute_right", right, b"NV")?;
        for (what, len, each) in [("a", a.len(), order * order), ("vl", vl.len(), order * order), ("vr", vr.len(), order * order)] {
            check(what, len, 1, each)?;
        }
        check("w", w.len(), 1, order)?;
        check("wi", wi.len(), 1, order)?;
        if order == 0 {
            return Ok(0);
        }
        let n = int(order)?;
        let mut rwork = vec![T::Real::default(); 2 * order];
        let mut call = |work: *mut T, lwork: &Int| {
            let mut info = 0;
            let (a, w, wi, vl, vr) = (a.as_mut_ptr(), w.as_mut_ptr(), wi.as_mut_ptr(), vl.as_mut_ptr(), vr.as_mut_ptr());
            // SAFETY: whole square matrices, `n` values, `rwork` of 2 n.
            unsafe {
                match self.geev {
                    Kind::Real(f) => f(&left, &right, &n, a, &n, w, wi, vl, &n, vr, &n, work, lwork, &mut info, 1, 1),
                    Kind::Complex(f) => f(&left, &right, &n, a, &n, w, vl, &n, vr, &n, work, lwork, rwork.as_mut_ptr(), &mut info, 1, 1),
                }
            }
            info
        };
        if work.len() < 4 * order {
            *work = workspace(4 * order, &mut call)?;
        }
        Ok(call(work.as_mut_ptr(), &len(work)))
    }

    /// The Schur form, in place, with vectors where `job` is 'V'. Complex types have no `wi`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn gees(
        &self,
        job: u8,
        s: Shape,
        a: &mut [T],
        vs: &mut [T],
        w: &mut [T],
        wi: &mut [T],
        sdim: &mut [Int],
        info: &mut [Int],
    ) -> Result<()> {
        one_of("mode", job, b"NV")?;
        let n = square(s, a, info)?;
        let each_wi = if T::COMPLEX { 0 } else { s.n };
        check("vs", vs.len(), s.batch, s.n * s.n)?;
        check("w", w.len(), s.batch, s.n)?;
        check("wi", wi.len(), s.batch, each_wi)?;
        check("sdim", sdim.len(), s.batch, 1)?;
        sdim.fill(0);
        if s.is_empty() {
            return Ok(());
        }
        let (mut rwork, mut bwork) = (vec![T::Real::default(); s.n], vec![0; s.n]);
        let mut call = |i: usize, work: *mut T, lwork: &Int| {
            let (mut info, sdim) = (0, &mut sdim[i]);
            let (a, vs, w, wi) = (part(a, i, s.n * s.n), part(vs, i, s.n * s.n), part(w, i, s.n), part(wi, i, each_wi));
            let (rwork, bwork) = (rwork.as_mut_ptr(), bwork.as_mut_ptr());
            // SAFETY: whole square matrices, `n` values, workspaces of the documented sizes; for 'N' nothing is selected.
            unsafe {
                match self.gees {
                    Kind::Real(f) => f(&job, &b'N', None, &n, a, &n, sdim, w, wi, vs, &n, work, lwork, bwork, &mut info, 1, 1),
                    Kind::Complex(f) => f(&job, &b'N', None, &n, a, &n, sdim, w, vs, &n, work, lwork, rwork, bwork, &mut info, 1, 1),
                }
            }
            info
        };
        let mut work = workspace(3 * s.n, |work, lwork| call(0, work, lwork))?;
        for (i, info) in info.iter_mut().enumerate() {
            *info = call(i, work.as_mut_ptr(), &len(&work));
        }
        Ok(())
    }
}
