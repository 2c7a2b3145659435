"""Every function of linear algebra for one element type: its values, and how far they are from what they mean.

`values` are to be compared with the same program elsewhere; `residuals` are computed here, with numpy, in units of the rounding error.
Every target is called for every type; gradients, empty matrices and the like for one type only.
"""

import os

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

jax.config.update("jax_enable_x64", True)
DTYPE = np.dtype(os.environ["LINALG_DTYPE"])
COMPLEX = DTYPE.kind == "c"
ALL = DTYPE == np.float32
# Many tiny programs: compiling them well would take most of the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
EPS = float(np.finfo(DTYPE).eps)
random = np.random.default_rng(7)


def draw(*shape):
    x = random.standard_normal(shape) + (1j * random.standard_normal(shape) if COMPLEX else 0)
    return x.astype(DTYPE)


def adjoint(x):
    return np.conj(np.swapaxes(x, -1, -2))


N = 6
A = draw(N, N)
B = draw(N, 2)
TALL, WIDE = draw(7, 4), draw(4, 7)
BATCH = draw(2, 3, 5, 5)
H = (A @ adjoint(A) + N * np.eye(N)).astype(DTYPE)
HB = (BATCH @ adjoint(BATCH) + 5 * np.eye(5)).astype(DTYPE)
LOWER = np.tril(A + 4 * np.eye(N)).astype(DTYPE)
DIAGONALS = [draw(2, N) for _ in range(3)]
SINGULAR = [np.array(d, DTYPE) for d in ([0, -1, -1], [1, 2, 1], [-1, -1, 0])]
INFINITE = np.array([[1, np.inf], [0, 1]], DTYPE)
# An eigenvalue pair and a third one, so that real types pack vectors in both ways.
TURN = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 2]], DTYPE)

values, residuals = {}, {}


def tell(x):
    x = np.asarray(x)
    return {"shape": list(x.shape), "dtype": str(x.dtype), "re": x.real.ravel().tolist(), "im": x.imag.ravel().tolist()}


def case(name, function, *args):
    """Runs `function`, compiled as one program; its outputs as numpy arrays."""
    outputs = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function, compiler_options=QUICK)(*args))]
    values[name] = [tell(x) for x in outputs]
    return outputs


def extra(name, function, *args):
    """A case that is about JAX's own rules as much as about a target."""
    return case(name, function, *args) if ALL else None


def some(inputs):
    """All of them, or the last one."""
    return list(inputs.items())[0 if ALL else -1 :]


def close(name, got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, (name, got.shape, want.shape)
    residuals[name] = float(np.max(np.abs(got - want), initial=0) / EPS)


# Cholesky
for name, h in some({"cholesky": H, "cholesky batched": HB}):
    (l,) = case(name, jnp.linalg.cholesky, h)
    close(name, l @ adjoint(l), h)
case("cholesky of what is not positive", jnp.linalg.cholesky, np.stack([-H, H]))
extra("cholesky upper", lambda a: jsl.cholesky(a, lower=False), H)
(x,) = case("cho_solve", lambda a, b: jsl.cho_solve(jsl.cho_factor(a), b), H, B)
close("cho_solve", H @ x, B)
extra("cholesky gradient", jax.grad(lambda a: jnp.linalg.cholesky(a @ jnp.conj(a.T) + N * jnp.eye(N, dtype=a.dtype)).real.sum()), A)

# QR
for name, a in some({"qr tall": TALL, "qr wide": WIDE, "qr batched": BATCH}):
    for mode in ("reduced", "complete") if a is TALL else ("reduced",):
        q, r = case(f"{name} {mode}", lambda a: jnp.linalg.qr(a, mode=mode), a)
        close(f"{name} {mode}", q @ r, a)
        close(f"{name} {mode} Q", adjoint(q) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*q.shape[:-2], q.shape[-1], q.shape[-1])))
extra("qr r", lambda a: jnp.linalg.qr(a, mode="r"), TALL)
extra("qr raw", lambda a: jnp.linalg.qr(a, mode="raw"), TALL)
extra("qr gradient", jax.grad(lambda a: sum(x.real.sum() for x in jnp.linalg.qr(a))), TALL)
if "pivoting" in jsl.qr.__doc__:
    for name, a in some({"qr pivoting tall": TALL, "qr pivoting wide": WIDE}):
        q, r, p = case(name, lambda a: jsl.qr(a, mode="economic", pivoting=True), a)
        close(name, q @ r, a[:, p])
h, taus = jax.jit(jax.lax.linalg.geqrf if hasattr(lax.linalg, "geqrf") else lambda a: jnp.linalg.qr(a, mode="raw"))(TALL)
h = np.asarray(h) if hasattr(lax.linalg, "geqrf") else np.asarray(h).T
(q,) = case("householder_product", lax.linalg.householder_product, h, taus)
close("householder_product", q @ np.triu(h[:4]), TALL)
if hasattr(lax.linalg, "ormqr"):
    for left, c in some({True: draw(7, 3), False: draw(3, 7)}):
        for transpose in (False, True) if ALL else (True,):
            name = f"ormqr left={left} transpose={transpose}"
            multiply = lambda h, taus, c: lax.linalg.ormqr(h, taus, c, left=left, transpose=transpose)
            (x,) = case(name, multiply, h, taus, c)
            (y,) = case(f"{name} back", lambda h, taus, c: lax.linalg.ormqr(h, taus, c, left=left, transpose=not transpose), h, taus, x)
            close(name, y, c)

# Singular values
ALGORITHMS = {"default": None, "qr": lax.linalg.SvdAlgorithm.QR}
for name, a in some({"svd tall": TALL, "svd wide": WIDE, "svd batched": BATCH}):
    for full in (False, True):
        for algorithm, choice in ALGORITHMS.items() if ALL or full else []:
            key = f"{name} full={full} {algorithm}"
            u, s, vt = case(key, lambda a: lax.linalg.svd(a, full_matrices=full, algorithm=choice), a)
            k = s.shape[-1]
            close(key, (u[..., :k] * s[..., None, :]) @ vt[..., :k, :], a)
    for algorithm, choice in ALGORITHMS.items() if a is TALL else []:
        case(f"{name} values {algorithm}", lambda a: lax.linalg.svd(a, compute_uv=False, algorithm=choice), a)
extra("svd of NaN", lambda a: jnp.linalg.svd(a), np.full((3, 3), np.nan, DTYPE))
extra("svd gradient", jax.grad(lambda a: jnp.linalg.svd(a, compute_uv=False).sum()), TALL)
extra("pinv", jnp.linalg.pinv, TALL)
extra("lstsq", lambda a, b: jnp.linalg.lstsq(a, b)[0], TALL, draw(7, 2))
extra("matrix_rank", jnp.linalg.matrix_rank, TALL)
extra("polar", lambda a: jsl.polar(a, method="svd"), A)

# Eigenvalues
for name, h in some({"eigh": H, "eigh batched": HB}):
    w, v = case(name, lambda a: jnp.linalg.eigh(a), h)
    close(name, h @ v, v * w[..., None, :])
extra("eigh of the upper triangle", lambda a: jnp.linalg.eigh(a, UPLO="U"), np.triu(H))
extra("eigvalsh", jnp.linalg.eigvalsh, H)
extra("eigh gradient", jax.grad(lambda a: jnp.linalg.eigh(a)[0].sum()), H)
for name, a in some({"eig": A, "eig of a turn": TURN, "eig batched": BATCH}):
    w, v = case(name, jnp.linalg.eig, a)
    close(name, a @ v, v * w[..., None, :])
    w, vl = case(f"{name}, left", lambda a: lax.linalg.eig(a, compute_left_eigenvectors=True, compute_right_eigenvectors=False), a)
    close(f"{name}, left", adjoint(vl) @ a, w[..., :, None] * adjoint(vl))
    extra(f"{name}, both", lambda a: lax.linalg.eig(a), a)
extra("eigvals of infinities", jnp.linalg.eigvals, np.stack([INFINITE, np.eye(2, dtype=DTYPE)]))

# LU and systems
for name, a in some({"lu": A, "lu tall": TALL, "lu wide": WIDE}):
    p, l, u = case(name, lambda a: jsl.lu(a), a)
    close(name, p @ l @ u, a)
lu, _, permutation = case("lu batched", lax.linalg.lu, BATCH)
rows = np.take_along_axis(BATCH, permutation[..., None], -2)
close("lu batched", (np.tril(lu, -1) + np.eye(5)) @ np.triu(lu), rows)
extra("lu_factor", jsl.lu_factor, A)
extra("lu of zeros", lax.linalg.lu, np.zeros((2, 3, 3), DTYPE))
for trans in (0, 1, 2) if ALL else (2,):
    (x,) = case(f"lu_solve trans={trans}", lambda a, b: jsl.lu_solve(jsl.lu_factor(a), b, trans=trans), A, B)
    close(f"lu_solve trans={trans}", {0: A, 1: A.T, 2: adjoint(A)}[trans] @ x, B)
(x,) = case("solve", jnp.linalg.solve, A, B)
close("solve", A @ x, B)
(x,) = case("solve batched", jnp.linalg.solve, BATCH, BATCH[..., :2])
close("solve batched", BATCH @ x, BATCH[..., :2])
extra("solve by vmap", jax.vmap(jax.vmap(jnp.linalg.solve)), BATCH, BATCH[..., 0])
extra("solve gradient", jax.grad(lambda a, b: jnp.linalg.solve(a, b).real.sum(), argnums=(0, 1)), A, B)
(x,) = case("solve positive", lambda a, b: jsl.solve(a, b, assume_a="pos"), H, B)
close("solve positive", H @ x, B)
(x,) = case("inv", jnp.linalg.inv, A)
close("inv", x @ A, np.eye(N))
extra("det", jnp.linalg.det, BATCH)
extra("slogdet", lambda a: tuple(jnp.linalg.slogdet(a)), BATCH)
extra("det gradient", jax.grad(lambda a: jnp.linalg.det(a).real), A)
for left in (True, False):
    for lower in (True, False):
        for transpose, conjugate in ((False, False), (True, False), (True, True), (False, True)) if ALL else ((left, lower),):
            for unit in (False, True) if ALL and transpose and not conjugate else (left == lower,):
                t = LOWER if lower else LOWER.T.copy()
                b = B if left else B.T.copy()
                options = dict(left_side=left, lower=lower, transpose_a=transpose, conjugate_a=conjugate, unit_diagonal=unit)
                name = "triangular_solve " + " ".join(k for k, v in options.items() if v)
                (x,) = case(name, lambda t, b: lax.linalg.triangular_solve(t, b, **options), t, b)
                op = t - np.diag(np.diag(t)) + np.eye(N) if unit else t
                op = op.T if transpose else op
                op = op.conj() if conjugate else op
                close(name, op @ x if left else x @ op, b)
(x,) = case("triangular_solve batched", lambda t, b: lax.linalg.triangular_solve(t, b, left_side=True, lower=True), HB, BATCH)
close("triangular_solve batched", np.tril(HB) @ x, BATCH)
extra("expm", jsl.expm, A / 4)
extra("sqrtm", jsl.sqrtm, H)

# Reduced forms
for output in ("real", "complex") if ALL else []:
    t, z = case(f"schur {output}", lambda a: jsl.schur(a, output=output), A)
    close(f"schur {output}", z @ t @ adjoint(z), A)
extra("schur without vectors", lambda a: lax.linalg.schur(a, compute_schur_vectors=False), A)
t, z = case("schur batched", lambda a: lax.linalg.schur(a), BATCH)
close("schur batched", z @ t @ adjoint(z), BATCH)
h, q = case("hessenberg", lambda a: jsl.hessenberg(a, calc_q=True), A)
close("hessenberg", q @ h @ adjoint(q), A)
extra("hessenberg batched", lax.linalg.hessenberg, BATCH)
for lower in (True, False):
    a, d, e, taus = case(f"tridiagonal lower={lower}", lambda a: lax.linalg.tridiagonal(a, lower=lower), HB)
    form = np.zeros(HB.shape, DTYPE)
    i = np.arange(5)
    form[..., i, i], form[..., i[1:], i[:-1]], form[..., i[:-1], i[1:]] = d, e, e
    close(f"tridiagonal lower={lower}", np.linalg.eigvalsh(form), np.linalg.eigvalsh(HB))
full = np.zeros((2, N, N), DTYPE)
i = np.arange(N)
full[:, i, i], full[:, i[1:], i[:-1]], full[:, i[:-1], i[1:]] = DIAGONALS[1], DIAGONALS[0][:, 1:], DIAGONALS[2][:, :-1]
for perturb in (False, True):
    name = f"tridiagonal_solve perturb_singular={perturb}"
    solve = lambda dl, d, du, b: lax.linalg.tridiagonal_solve(dl, d, du, b, perturb_singular=perturb)
    rhs = np.stack([B, B[::-1]])
    (x,) = case(name, solve, *DIAGONALS, rhs)
    close(name, full @ x, rhs)
    case(f"{name} of a singular one", solve, *SINGULAR, np.ones((3, 1), DTYPE))

# Nothing to do
EMPTY = [np.zeros(s, DTYPE) for s in ((0, 0), (0, 4, 4), (2, 0, 0))]
for i, a in enumerate(EMPTY if ALL else []):
    for name in ("cholesky", "qr", "svd", "eigh", "eig", "slogdet"):
        case(f"{name} of nothing {i}", lambda a: tuple(jax.tree.leaves(getattr(jnp.linalg, name)(a))), a)
    case(f"lu of nothing {i}", lax.linalg.lu, a)
    case(f"solve of nothing {i}", jnp.linalg.solve, a, a)
    case(f"schur of nothing {i}", lambda a: lax.linalg.schur(a), a)
for i, a in enumerate([np.zeros((0, 3), DTYPE), np.zeros((3, 0), DTYPE)] if ALL else []):
    for name in ("qr", "svd", "pinv"):
        case(f"{name} of rows or columns only {i}", lambda a: tuple(jax.tree.leaves(getattr(jnp.linalg, name)(a))), a)
    case(f"lu of rows or columns only {i}", lax.linalg.lu, a)

result({"values": values, "residuals": residuals})
