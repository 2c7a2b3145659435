//! Tridiagonal systems: `gtsv`, and the solve that also answers for singular matrices, which LAPACK has no single routine for.

use pw_pjrt::{BufferType, CallFrame};

use crate::frame::{argument, matrices, only, results, typed};
use crate::lapack::{Lapack, Result, invalid};
use crate::scalar::{Complex, Real, Scalar};

/// `dl, d, du, b -> destroyed, destroyed, destroyed, x, info`
pub(crate) fn gtsv<T: Scalar>(lapack: &Lapack, frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 3, T::TYPE)?;
    (0..4).try_for_each(|i| frame.copy_arg_to_result(i, i))?;
    let [dl, d, du, b, info] = results(frame)?;
    typed!(dl, d, du, b, info);
    T::routines(lapack).gtsv(shape, dl, d, du, b, info)
}

/// `dl, d, du, b -> x`, of any of the four types. Needs no LAPACK.
pub(crate) fn perturbed(frame: &mut CallFrame<'_>) -> Result<()> {
    match frame.arg(3)?.element_type {
        BufferType::F32 => perturbed_of::<f32>(frame),
        BufferType::F64 => perturbed_of::<f64>(frame),
        BufferType::C64 => perturbed_of::<Complex<f32>>(frame),
        BufferType::C128 => perturbed_of::<Complex<f64>>(frame),
        other => Err(invalid(format!("linear algebra: a tridiagonal system of {other:?}"))),
    }
}

fn perturbed_of<T: Scalar>(frame: &mut CallFrame<'_>) -> Result<()> {
    let shape = matrices(frame, 3, T::TYPE)?;
    let views = frame.views()?;
    let [dl, d, du, b] = [0, 1, 2, 3].map(|i| argument::<T>(&views.args, i, T::TYPE));
    let (dl, d, du, b, x) = (dl?, d?, du?, b?, only::<T>(views.results)?);
    let (n, each) = (shape.m, shape.m * shape.n);
    if [dl.len(), d.len(), du.len()] != [shape.batch * n; 3] || [b.len(), x.len()] != [shape.batch * each; 2] {
        return Err(invalid(format!("linear algebra: diagonals or solution do not fit right-hand sides of {shape:?}")));
    }
    x.copy_from_slice(b);
    if each > 0 {
        for (i, x) in x.chunks_exact_mut(each).enumerate() {
            let at = i * n..(i + 1) * n;
            solve(&dl[at.clone()], &d[at.clone()], &du[at], x);
        }
    }
    Ok(())
}

/// One row of the triangular factor: its diagonal and the two places right of it.
#[derive(Clone, Copy, Default)]
struct Row<T>([T; 3]);

impl<T: Scalar> Row<T> {
    /// Sum of the moduli, the measure that pivots are compared by.
    fn weight(self) -> T::Real {
        self.0.into_iter().fold(T::Real::default(), |sum, x| sum + x.modulus())
    }

    fn largest(self) -> T::Real {
        self.0.into_iter().fold(T::Real::default(), |most, x| most.larger(x.modulus()))
    }
}

/// Solves for the columns of `x` in place. Rows are exchanged by scaled partial pivoting, as LAPACK's `lagtf` does; pivots that are
/// too small for the right-hand side are moved away from zero, by multiples of the rounding error of the largest element, as `lagts`
/// does. So there is an answer for singular matrices, which inverse iteration wants.
fn solve<T: Scalar>(dl: &[T], d: &[T], du: &[T], x: &mut [T]) {
    let n = d.len();
    let right = |row: usize| if row + 1 < n { du[row] } else { T::default() };
    let mut upper = vec![Row::<T>::default(); n];
    let mut row = Row([d[0], right(0), T::default()]);
    let mut weight = row.weight();
    for next in 1..n {
        let (below, own) = (dl[next], Row([d[next], right(next), T::default()]));
        let next_weight = below.modulus() + own.weight();
        let pivot = if row.0[0] == T::default() { T::Real::default() } else { row.0[0].modulus() / weight };
        if below == T::default() {
            upper[next - 1] = row;
            (row, weight) = (own, next_weight);
        } else if below.modulus() / next_weight <= pivot {
            let factor = below / row.0[0];
            upper[next - 1] = row;
            row = Row([own.0[0] - factor * row.0[1], own.0[1], T::default()]);
            weight = next_weight;
            x.chunks_exact_mut(n).for_each(|column| column[next] = column[next] - factor * column[next - 1]);
        } else {
            let factor = row.0[0] / below;
            upper[next - 1] = Row([below, own.0[0], own.0[1]]);
            row = Row([row.0[1] - factor * own.0[0], -(factor * own.0[1]), T::default()]);
            weight = row.weight();
            for column in x.chunks_exact_mut(n) {
                column.swap(next - 1, next);
                column[next] = column[next] - factor * column[next - 1];
            }
        }
    }
    upper[n - 1] = row;
    let largest = upper.iter().fold(T::Real::default(), |most, row| most.larger(row.largest()));
    substitute(&upper, T::Real::EPSILON * largest, x);
}

/// Back substitution, all columns of a row at a time since a pivot is the same for them.
fn substitute<T: Scalar>(upper: &[Row<T>], nudge: T::Real, x: &mut [T]) {
    let n = upper.len();
    let mut rhs = vec![T::default(); x.len() / n];
    for (row, &Row([pivot, first, second])) in upper.iter().enumerate().rev() {
        for (out, column) in rhs.iter_mut().zip(x.chunks_exact(n)) {
            *out = column[row];
            if row + 1 < n {
                *out = *out - first * column[row + 1];
            }
            if row + 2 < n {
                *out = *out - second * column[row + 2];
            }
        }
        let pivot = safe_pivot(pivot, nudge, &mut rhs);
        x.chunks_exact_mut(n).zip(&rhs).for_each(|(column, &value)| column[row] = value / pivot);
    }
}

/// A pivot that `rhs` can be divided by without overflow; `rhs` is scaled with it where that is enough.
fn safe_pivot<T: Scalar>(mut pivot: T, nudge: T::Real, rhs: &mut [T]) -> T {
    let (tiny, huge) = (T::Real::TINY, T::Real::ONE / T::Real::TINY);
    let mut step = nudge.larger(tiny).with_sign_of(pivot.re());
    let most = rhs.iter().fold(T::Real::default(), |most, x| most.larger(x.modulus()));
    while pivot.modulus() < T::Real::ONE {
        let size = pivot.modulus();
        let too_small = if size < tiny { size == T::Real::default() || most * tiny > size } else { most > size * huge };
        if too_small {
            pivot = pivot + T::from_real(step);
            step = step + step;
        } else if size < tiny {
            rhs.iter_mut().for_each(|x| *x = *x * T::from_real(huge));
            return pivot * T::from_real(huge);
        } else {
            return pivot;
        }
    }
    pivot
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `b` from `x`.
    fn product<T: Scalar>(dl: &[T], d: &[T], du: &[T], x: &[T]) -> Vec<T> {
        let n = d.len();
        let row = |i: usize| {
            let below = if i > 0 { dl[i] * x[i - 1] } else { T::default() };
            let above = if i + 1 < n { du[i] * x[i + 1] } else { T::default() };
            below + d[i] * x[i] + above
        };
        (0..n).map(row).collect()
    }

    #[test]
    fn regular_systems_are_solved_with_and_without_exchanges() {
        let (dl, d, du) = ([9.0, 4.0, 0.0, 5.0, 1e-3], [1.0, -2.0, 3.0, 0.0, 2.0], [2.0, 1.0, 7.0, 1.0, 9.0]);
        let want = [1.0, -1.0, 2.0, 0.5, -3.0_f64];
        let mut x = product(&dl, &d, &du, &want);
        x.extend(product(&dl, &d, &du, &want.map(|v| 2.0 * v)));
        solve(&dl, &d, &du, &mut x);
        for (i, got) in x.iter().enumerate() {
            let want = want[i % 5] * if i < 5 { 1.0 } else { 2.0 };
            assert!((got - want).abs() < 1e-12, "{i}: {got} for {want}");
        }
    }

    #[test]
    fn complex_systems_are_solved() {
        let c = |re: f64, im: f64| Complex { re, im };
        let (dl, d, du) = ([c(0.0, 0.0), c(3.0, 1.0), c(0.0, 2.0)], [c(0.1, 0.0), c(1.0, -1.0), c(0.0, 1.0)], [c(1.0, 1.0); 3]);
        let want = [c(1.0, 2.0), c(-1.0, 0.0), c(0.5, 0.5)];
        let mut x = product(&dl, &d, &du, &want);
        solve(&dl, &d, &du, &mut x);
        assert!(x.iter().zip(want).all(|(&got, want)| (got - want).modulus() < 1e-12), "{x:?}");
    }

    #[test]
    fn singular_systems_have_a_finite_answer_along_the_kernel() {
        // Rows add up to zero: (1, 1, 1) is mapped to zero.
        let (dl, d, du) = ([0.0, -1.0, -1.0], [1.0, 2.0, 1.0], [-1.0, -1.0, 0.0]);
        let mut x = [1.0, 2.0, -1.0_f64];
        solve(&dl, &d, &du, &mut x);
        assert!(x.iter().all(|v| v.is_finite() && v.abs() > 1e6), "{x:?}");
        assert!(x.iter().all(|v| (v / x[0] - 1.0).abs() < 1e-6), "{x:?}");
        let mut zero = [3.0_f32];
        solve(&[0.0], &[0.0], &[0.0], &mut zero);
        assert!(zero[0].is_finite() && zero[0] > 0.0, "{zero:?}");
    }
}
