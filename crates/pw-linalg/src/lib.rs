//! JAX's linear algebra on CPU workers: the custom-call targets that `jnp.linalg` and `jax.scipy.linalg` are lowered to, over a
//! LAPACK that is opened at run time.
//!
//! JAX brings these targets along with its own CPU client; a plugin knows none of them. Here are the same targets with the same
//! operands, results and attributes as jaxlib's, so that stock JAX needs no change.
//!
//! Invariants:
//! 1. A call of a target computes what jaxlib's handler would: matrices are column-major, batch dimensions lead, what LAPACK says of a
//!    matrix goes into `info`, and a handler fails only for calls that no JAX makes.
//! 2. `unsafe` stands in `lapack.rs` and `lapack/` only.
//!
//! It deliberately does not choose algorithms, does not fill in NaN for failures (JAX does), and starts no threads.

use std::marker::PhantomData;
use std::sync::OnceLock;

use pw_pjrt::{CallFrame, FfiError, Handler, PjrtError, Plugin, code};

pub use crate::find::{Choice, Found, find};
pub use crate::lapack::Lapack;
use crate::scalar::{Complex, Scalar};

mod eigen;
mod factor;
mod find;
mod frame;
mod lapack;
mod scalar;
mod solve;
mod tridiagonal;

/// The platform that host code is registered for.
const HOST: &str = "Host";

/// The target that is computed here, without LAPACK.
const PERTURBED: &str = "tridiagonal_solve_perturbed_ffi";

/// What the handlers call. A handler is made anew for every call, and the plugin keeps it for ever: so the library is the process's.
static LAPACK: OnceLock<Lapack> = OnceLock::new();

/// Registers all targets of this crate with a plugin; without a LAPACK only those that need none. Must come before programs are
/// compiled or loaded. The first LAPACK of a process is the one it keeps.
pub fn register(plugin: Plugin, lapack: Option<Lapack>) -> Result<(), PjrtError> {
    plugin.register_ffi::<Perturbed>(PERTURBED, HOST)?;
    if let Some(lapack) = lapack {
        let _ = LAPACK.set(lapack);
        register_type::<f32>(plugin)?;
        register_type::<f64>(plugin)?;
        register_type::<Complex<f32>>(plugin)?;
        register_type::<Complex<f64>>(plugin)?;
    }
    Ok(())
}

/// Whether a LAPACK would provide this target.
pub fn needs_lapack(target: &str) -> bool {
    let family = target.strip_prefix("lapack_").and_then(|t| t.strip_suffix("_ffi"));
    family.is_some_and(|family| {
        let real = |letter| FAMILIES.iter().any(|(real, _)| family.strip_prefix(letter) == Some(*real));
        let complex = |letter| FAMILIES.iter().any(|(_, complex)| family.strip_prefix(letter) == Some(*complex));
        real('s') || real('d') || complex('c') || complex('z')
    })
}

#[derive(Default)]
struct Perturbed;

impl Handler for Perturbed {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        tridiagonal::perturbed(frame)
    }
}

/// Handlers, their names for real and complex types, and what they do.
macro_rules! targets {
    ($($handler:ident $real:literal $complex:literal $function:path;)*) => {
        /// Names of the families, for real and for complex types.
        const FAMILIES: &[(&str, &str)] = &[$(($real, $complex)),*];

        $(
            struct $handler<T>(PhantomData<fn() -> T>);

            impl<T> Default for $handler<T> {
                fn default() -> Self {
                    Self(PhantomData)
                }
            }

            impl<T: Scalar> Handler for $handler<T> {
                fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
                    let lapack = LAPACK.get().ok_or_else(|| FfiError::new(code::INTERNAL, "this process has no LAPACK"))?;
                    $function(lapack, frame)
                }
            }
        )*

        fn register_type<T: Scalar>(plugin: Plugin) -> Result<(), PjrtError> {
            $({
                let family = if T::COMPLEX { $complex } else { $real };
                plugin.register_ffi::<$handler<T>>(&format!("lapack_{}{family}_ffi", T::LETTER), HOST)?;
            })*
            Ok(())
        }
    };
}

targets! {
    Trsm "trsm" "trsm" solve::trsm::<T>;
    Getrf "getrf" "getrf" factor::getrf::<T>;
    Geqrf "geqrf" "geqrf" factor::geqrf::<T>;
    Geqp3 "geqp3" "geqp3" factor::geqp3::<T>;
    Orgqr "orgqr" "ungqr" factor::orgqr::<T>;
    Ormqr "ormqr" "unmqr" factor::ormqr::<T>;
    Potrf "potrf" "potrf" factor::potrf::<T>;
    Gesdd "gesdd" "gesdd" eigen::gesdd::<T>;
    Gesvd "gesvd" "gesvd" eigen::gesvd::<T>;
    Syevd "syevd" "heevd" eigen::syevd::<T>;
    Geev "geev" "geev" eigen::geev::<T>;
    Sytrd "sytrd" "hetrd" factor::sytrd::<T>;
    Gees "gees" "gees" eigen::gees::<T>;
    Gehrd "gehrd" "gehrd" factor::gehrd::<T>;
    Gtsv "gtsv" "gtsv" tridiagonal::gtsv::<T>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_known_by_name() {
        for name in ["lapack_sgesdd_ffi", "lapack_zungqr_ffi", "lapack_cheevd_ffi", "lapack_dsytrd_ffi"] {
            assert!(needs_lapack(name), "{name}");
        }
        for name in ["lapack_sgesdd", "lapack_zorgqr_ffi", "lapack_dheevd_ffi", "lapack_xgetrf_ffi", PERTURBED, "pw.sleep_us"] {
            assert!(!needs_lapack(name), "{name}");
        }
        assert_eq!(4 * FAMILIES.len() + 1, 61);
    }
}
