//! The calls against a real LAPACK: `PATHWAYS_LAPACK`, the scipy of the workspace's `.venv`, or the system's. Without any they print why
//! they do nothing.

use std::path::Path;

use super::{Int, Lapack, Result, Routines, Shape, Triangle, Vectors};
use crate::find::{Choice, find};
use crate::scalar::{Complex, Real, Scalar};

fn lapack() -> Option<Lapack> {
    let choice: Choice = std::env::var("PATHWAYS_LAPACK").unwrap_or_default().parse().unwrap();
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = std::fs::read_dir(lib).into_iter().flatten().flatten();
    // A plugin would lie in a folder of its own there.
    let plugins = pythons.map(|p| p.path().join("site-packages/plugin/plugin.so"));
    let found = plugins.chain([Path::new("plugin.so").to_owned()]).find_map(|plugin| find(&choice, &plugin).unwrap());
    if found.is_none() {
        eprintln!("skipped: no LAPACK in PATHWAYS_LAPACK, in .venv or in the system");
    }
    found.map(|f| f.lapack)
}

/// Numbers between -1 and 1, the same in every run.
fn numbers<T: Make>(count: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut x = T::Real::default();
        let mut half = T::Real::ONE / (T::Real::ONE + T::Real::ONE);
        for bit in 44..64 {
            x = if state >> bit & 1 == 1 { x + half } else { x - half };
            half = half / (T::Real::ONE + T::Real::ONE);
        }
        x
    };
    (0..count).map(|_| T::make(next(), next())).collect()
}

trait Make: Scalar {
    fn make(re: Self::Real, im: Self::Real) -> Self;
    fn conjugate(self) -> Self;
}
macro_rules! make {
    ($($real:ident)*) => {$(
        impl Make for $real {
            fn make(re: $real, _: $real) -> $real {
                re
            }
            fn conjugate(self) -> $real {
                self
            }
        }
        impl Make for Complex<$real> {
            fn make(re: $real, im: $real) -> Self {
                Self { re, im }
            }
            fn conjugate(self) -> Self {
                Self { re: self.re, im: -self.im }
            }
        }
    )*};
}
make!(f32 f64);

fn matrices(batch: usize, m: usize, n: usize) -> Shape {
    Shape { batch, m, n }
}

/// `a b` of column-major matrices, `m` by `k` and `k` by `n`.
fn product<T: Make>(m: usize, k: usize, n: usize, a: &[T], b: &[T]) -> Vec<T> {
    let element = |i: usize, j: usize| (0..k).fold(T::default(), |sum, l| sum + a[i + l * m] * b[l + j * k]);
    (0..m * n).map(|at| element(at % m, at / m)).collect()
}

fn adjoint<T: Make>(m: usize, n: usize, a: &[T]) -> Vec<T> {
    (0..m * n).map(|at| a[at / n + at % n * m].conjugate()).collect()
}

fn positive<T: Make>(n: usize, seed: u64) -> Vec<T> {
    let a = numbers::<T>(n * n, seed);
    let mut h = product(n, n, n, &a, &adjoint(n, n, &a));
    (0..n).for_each(|i| h[i * (n + 1)] = h[i * (n + 1)] + T::from_real(T::Real::ONE));
    h
}

fn scaled<T: Make>(m: usize, columns: &[T], by: &[T::Real]) -> Vec<T> {
    columns.iter().enumerate().map(|(at, &x)| x * T::from_real(by[at / m])).collect()
}

fn identity<T: Make>(n: usize) -> Vec<T> {
    (0..n * n).map(|at| if at % (n + 1) == 0 { T::from_real(T::Real::ONE) } else { T::default() }).collect()
}

fn assert_close<T: Make>(what: &str, got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let tolerance = 200.0 * T::Real::EPSILON.to_f64();
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).modulus().to_f64() < tolerance, "{what} of {}: element {i} is {g:?}, not {w:?}", T::LETTER);
    }
}

fn factorisations<T: Make>(r: &Routines<T>) -> Result<()> {
    let (m, n) = (5, 3);
    // Two matrices at once; the second one is looked at, so that steps between them count.
    let a = numbers::<T>(2 * m * n, 3);
    let (mut qr, mut tau) = (a.clone(), vec![T::default(); 2 * n]);
    r.geqrf(matrices(2, m, n), &mut qr, &mut tau)?;
    let upper: Vec<T> = (0..n * n).map(|at| if at % n <= at / n { qr[m * n + at % n + at / n * m] } else { T::default() }).collect();
    let mut q = qr.clone();
    r.orgqr(matrices(2, m, n), n, &mut q, &tau)?;
    assert_close("Q R", &product(m, n, n, &q[m * n..], &upper), &a[m * n..]);
    assert_close("Q* Q", &product(n, m, n, &adjoint(m, n, &q[m * n..]), &q[m * n..]), &identity(n));
    let mut c = a.clone();
    r.ormqr(true, true, matrices(2, m, n), n, &qr, &tau, matrices(2, m, n), &mut c)?;
    let above: Vec<T> = (0..n * n).map(|at| c[m * n + at % n + at / n * m]).collect();
    assert_close("Q* A", &above, &upper);

    let (mut lu, mut ipiv, mut info) = (a.clone(), vec![0; 2 * n], vec![9; 2]);
    r.getrf(matrices(2, m, n), &mut lu, &mut ipiv, &mut info)?;
    assert_eq!(info, [0, 0]);
    let lu = &lu[m * n..];
    let lower: Vec<T> = (0..m * n)
        .map(|at| (at % m, at / m, lu[at]))
        .map(|(i, j, x)| {
            if i == j {
                T::from_real(T::Real::ONE)
            } else if i > j {
                x
            } else {
                T::default()
            }
        })
        .collect();
    let upper: Vec<T> = (0..n * n).map(|at| if at % n <= at / n { lu[at % n + at / n * m] } else { T::default() }).collect();
    let mut rows = a[m * n..].to_vec();
    for (i, &p) in ipiv[n..].iter().enumerate() {
        (0..n).for_each(|j| rows.swap(i + j * m, p as usize - 1 + j * m));
    }
    assert_close("L U", &product(m, n, n, &lower, &upper), &rows);

    let (mut qr, mut jpvt, mut tau) = (a.clone(), vec![0; 2 * n], vec![T::default(); 2 * n]);
    r.geqp3(matrices(2, m, n), &mut qr, &mut jpvt, &mut tau)?;
    let diagonal: Vec<f64> = (0..n).map(|i| qr[m * n + i * (m + 1)].modulus().to_f64()).collect();
    assert!(diagonal.is_sorted_by(|a, b| a >= b), "{diagonal:?}");
    let mut columns = jpvt[n..].to_vec();
    columns.sort();
    assert_eq!(columns, [1, 2, 3]);

    let h = [positive::<T>(n, 5), positive::<T>(n, 6)].concat();
    let (mut l, mut info) = (h.clone(), vec![9; 2]);
    r.potrf(b'L', matrices(2, n, n), &mut l, &mut info)?;
    assert_eq!(info, [0, 0]);
    let l: Vec<T> = l[n * n..].iter().enumerate().map(|(at, &x)| if at % n >= at / n { x } else { T::default() }).collect();
    assert_close("L L*", &product(n, n, n, &l, &adjoint(n, n, &l)), &h[n * n..]);
    let mut not_positive: Vec<T> = identity(n).into_iter().map(|x: T| -x).collect();
    r.potrf(b'L', matrices(1, n, n), &mut not_positive, &mut info[..1])?;
    assert_eq!(info[0], 1);

    let mut x = numbers::<T>(n * 2, 8);
    let b = x.clone();
    r.trsm(Triangle { side: b'L', uplo: b'L', trans: b'C', diag: b'N' }, matrices(1, n, 2), &l, &mut x)?;
    assert_close("L* X", &product(n, n, 2, &adjoint(n, n, &l), &x), &b);
    Ok(())
}

fn spectra<T: Make>(r: &Routines<T>) -> Result<()> {
    let n = 4;
    let h = positive::<T>(n, 11);
    let (mut v, mut w, mut info) = (h.clone(), vec![T::Real::default(); n], vec![9]);
    r.syevd(b'V', b'U', matrices(1, n, n), &mut v, &mut w, &mut info)?;
    assert_eq!(info, [0]);
    assert!(w.is_sorted());
    assert_close("A V", &product(n, n, n, &h, &v), &scaled(n, &v, &w));
    let (mut copy, mut only) = (h.clone(), vec![T::Real::default(); n]);
    r.syevd(b'N', b'L', matrices(1, n, n), &mut copy, &mut only, &mut info)?;
    assert!(w.iter().zip(&only).all(|(a, b)| (a.to_f64() - b.to_f64()).abs() < 100.0 * T::Real::EPSILON.to_f64()));

    for (m, n, divide) in [(5, 3, true), (3, 5, true), (5, 3, false), (3, 5, false)] {
        let (a, k) = (numbers::<T>(2 * m * n, 12), m.min(n));
        let mut values = vec![T::Real::default(); 2 * k];
        let (mut u, mut vt, mut info) = (vec![T::default(); 2 * m * k], vec![T::default(); 2 * k * n], vec![9; 2]);
        r.svd(divide, Vectors::Thin, matrices(2, m, n), &mut a.clone(), &mut values, &mut u, &mut vt, &mut info)?;
        assert_eq!(info, [0, 0]);
        let us = scaled(m, &u[m * k..], &values[k..]);
        assert_close("U S V*", &product(m, k, n, &us, &vt[k * n..]), &a[m * n..]);
        let (mut u, mut vt, mut again) = (vec![T::default(); 2 * m * m], vec![T::default(); 2 * n * n], values.clone());
        r.svd(divide, Vectors::Full, matrices(2, m, n), &mut a.clone(), &mut again, &mut u, &mut vt, &mut info)?;
        assert_close("U* U", &product(m, m, m, &adjoint(m, m, &u[m * m..]), &u[m * m..]), &identity(m));
        assert_close("V V*", &product(n, n, n, &vt[n * n..], &adjoint(n, n, &vt[n * n..])), &identity(n));
        let mut alone = vec![T::Real::default(); 2 * k];
        r.svd(divide, Vectors::None, matrices(2, m, n), &mut a.clone(), &mut alone, &mut u, &mut vt, &mut info)?;
        let all = |v: Vec<T::Real>| v.into_iter().map(T::from_real).collect::<Vec<T>>();
        assert_close("singular values", &all(alone), &all(values));
    }

    let a = numbers::<T>(2 * n * n, 13);
    let (mut t, mut z, mut w) = (a.clone(), vec![T::default(); 2 * n * n], vec![T::default(); 2 * n]);
    let (mut wi, mut selected, mut info) = (vec![T::default(); if T::COMPLEX { 0 } else { 2 * n }], vec![9; 2], vec![9; 2]);
    r.gees(b'V', matrices(2, n, n), &mut t, &mut z, &mut w, &mut wi, &mut selected, &mut info)?;
    assert_eq!((info, selected), (vec![0, 0], vec![0, 0]));
    let z = &z[n * n..];
    let back = product(n, n, n, &product(n, n, n, z, &t[n * n..]), &adjoint(n, n, z));
    assert_close("Z T Z*", &back, &a[n * n..]);

    let (mut vl, mut vr, mut own, mut imaginary) = (a.clone(), a.clone(), vec![T::default(); n], vec![T::default(); n]);
    let (vl, vr) = (&mut vl[..n * n], &mut vr[..n * n]);
    assert_eq!(r.geev(b'N', b'V', n, &mut a[n * n..].to_vec(), &mut own, &mut imaginary, vl, vr, &mut Vec::new())?, 0);
    let (trace, sum) = (T::default(), T::default());
    let trace = (0..n).fold(trace, |sum, i| sum + a[n * n + i * (n + 1)]);
    assert_close("sum of eigenvalues", &[own.iter().fold(sum, |sum, &x| sum + x)], &[trace]);

    let diagonals = numbers::<T>(2 * 3 * n, 14);
    let (dl, rest) = diagonals.split_at(2 * n);
    let (d, du) = rest.split_at(2 * n);
    let (b, mut info) = (numbers::<T>(2 * n * 2, 15), vec![9; 2]);
    let mut x = b.clone();
    r.gtsv(matrices(2, n, 2), &mut dl.to_vec(), &mut d.to_vec(), &mut du.to_vec(), &mut x, &mut info)?;
    assert_eq!(info, [0, 0]);
    let element = |i: usize, j: usize| match j + 1 {
        k if k == i => dl[n + i],
        k if k == i + 1 => d[n + i],
        k if k == i + 2 => du[n + i],
        _ => T::default(),
    };
    let full: Vec<T> = (0..n * n).map(|at| element(at % n, at / n)).collect();
    assert_close("tridiagonal A X", &product(n, n, 2, &full, &x[2 * n..]), &b[2 * n..]);
    Ok(())
}

fn all<T: Make>(lapack: &Lapack) {
    let routines = T::routines(lapack);
    factorisations(routines).unwrap();
    spectra(routines).unwrap();
    edges(routines).unwrap();
}

/// Nothing to do, and what does not fit together.
fn edges<T: Make>(r: &Routines<T>) -> Result<()> {
    let none: &mut [T] = &mut [];
    for shape in [matrices(0, 3, 3), matrices(2, 0, 0)] {
        let mut info = vec![7; shape.batch];
        let mut pivots = vec![0; shape.batch * shape.m.min(shape.n)];
        r.potrf(b'L', shape, none, &mut info)?;
        r.getrf(shape, none, &mut pivots, &mut info)?;
        r.geqrf(shape, none, &mut [])?;
        r.orgqr(shape, 0, none, &[])?;
        r.syevd(b'V', b'L', shape, none, &mut [], &mut info)?;
        r.gtsv(shape, &mut [], &mut [], &mut [], none, &mut info)?;
        assert!(info.iter().all(|&i| i == 0));
    }
    // Rows without columns, and a single element without anything beside its diagonal.
    r.getrf(matrices(1, 3, 0), none, &mut [], &mut [0])?;
    let (mut one, mut info) = (numbers::<T>(1, 1), [9]);
    r.sytrd(b'L', matrices(1, 1, 1), &mut one, &mut [T::Real::default()], &mut [], &mut [], &mut info)?;
    r.gehrd(1, 1, matrices(1, 1, 1), &mut one, &mut [], &mut info)?;
    assert_eq!(info, [0]);

    let (mut four, mut one): (Vec<T>, [Int; 1]) = (numbers(4, 2), [0]);
    assert!(r.potrf(b'L', matrices(1, 3, 3), &mut four, &mut one).is_err(), "too short");
    assert!(r.potrf(b'X', matrices(1, 2, 2), &mut four, &mut one).is_err(), "no triangle");
    assert!(r.potrf(b'L', matrices(1, 4, 1), &mut four, &mut one).is_err(), "not square");
    assert!(r.potrf(b'L', matrices(2, 2, 1), &mut four, &mut one).is_err(), "one info for two");
    assert!(r.getrf(matrices(1, 2, 2), &mut four, &mut one, &mut [0]).is_err(), "too few pivots");
    assert!(r.gehrd(0, 2, matrices(1, 2, 2), &mut four, &mut [T::default()], &mut one).is_err(), "no row 0");
    assert!(r.orgqr(matrices(1, 1, 4), 1, &mut four, &[T::default()]).is_err(), "more columns than rows");
    let big = (Int::MAX as usize) + 1;
    assert!(r.getrf(matrices(0, big, big), none, &mut [], &mut []).is_ok(), "nothing to do");
    Ok(())
}

#[test]
fn every_family_computes_what_it_should_for_every_type() {
    if let Some(lapack) = lapack() {
        all::<f32>(&lapack);
        all::<f64>(&lapack);
        all::<Complex<f32>>(&lapack);
        all::<Complex<f64>>(&lapack);
    }
}
