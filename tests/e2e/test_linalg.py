"""Linear algebra on workers: each function against the same program on stock JAX, and against what it means."""

import pathlib

import numpy as np
import pytest

PROGRAM = (pathlib.Path(__file__).parent / "programs" / "linalg.py").read_text()
TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "complex64": 1e-4, "complex128": 1e-9}


def array(told):
    return (np.array(told["re"]) + 1j * np.array(told["im"])).reshape(told["shape"])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_function_gives_the_values_of_stock_jax(run_local, run_stock, dtype):
    program = f"import os\nos.environ['LINALG_DTYPE'] = '{dtype}'\n{PROGRAM}"
    enough = 100 if dtype == "float32" else 30
    stock, got = run_stock(1, program).value, run_local(1, 1, program).value
    assert got["values"].keys() == stock["values"].keys() and len(got["values"]) > enough
    wrong = []
    for name, expected in stock["values"].items():
        outputs = got["values"][name]
        same = [(x["shape"], x["dtype"]) for x in outputs] == [(x["shape"], x["dtype"]) for x in expected]
        pairs = [(array(x), array(y)) for x, y in zip(outputs, expected)]
        if not same or not all(np.allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True) for x, y in pairs):
            wrong.append(f"{name}:\n{pairs}")
    assert not wrong, "\n".join(wrong)
    # Rounding errors of small matrices, not of wrong ones.
    far = {name: value for name, value in got["residuals"].items() if not value < 2000}
    assert not far and len(got["residuals"]) >= 30, far
    not_positive = array(got["values"]["cholesky of what is not positive"][0])
    assert np.isnan(not_positive[0]).any() and np.isfinite(not_positive[1]).all()


SPLIT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("i",))
a = np.random.default_rng(1).standard_normal((8, 5, 5)).astype(np.float32)
h = a @ np.swapaxes(a, -1, -2) + 5 * np.eye(5, dtype=np.float32)
split = jax.device_put(h, NamedSharding(mesh, P("i")))
l = jax.jit(jnp.linalg.cholesky)(split)
far = lambda x, y: float(np.max(np.abs(np.asarray(x) - y)))
u, s, vt = jax.jit(jnp.linalg.svd)(split)
mapped = jax.jit(jax.shard_map(lambda h: jax.lax.psum(jnp.linalg.slogdet(h)[1].sum(), "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
# Several devices inside the library at the same time.
busy = [jax.device_put(np.stack([h] * 40), d) for d in jax.devices()]
solved = [jax.jit(lambda h: jnp.linalg.inv(h) @ h)(x) for x in busy]
result({
    "cholesky": far(l @ jnp.swapaxes(l, -1, -2), h), "svd": far((u * s[..., None, :]) @ vt, h),
    "logdet": float(mapped(split)) - float(np.linalg.slogdet(h)[1].sum()), "inv": max(far(x, np.eye(5)) for x in solved),
})
"""


def test_batches_that_are_split_over_devices(run_local):
    got = run_local(1, 4, SPLIT).value
    assert all(abs(error) < 1e-3 for error in got.values()), got


NEEDS = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
def error(f, *args):
    try:
        jax.block_until_ready(jax.jit(f)(*args))
        return None
    except jax.errors.JaxRuntimeError as e:
        return str(e)
eye = np.eye(3, dtype=np.float32)
diagonal = np.ones(3, np.float32)
result({
    "without": error(jnp.linalg.cholesky, eye), "plain": error(jnp.matmul, eye, eye),
    "own": error(lambda d, b: lax.linalg.tridiagonal_solve(0 * d, d, 0 * d, b, perturb_singular=True), diagonal, eye),
})
"""


def test_a_worker_without_lapack_says_so_also_for_programs_in_the_cache(run_local):
    assert run_local(1, 1, NEEDS).value == {"without": None, "plain": None, "own": None}
    got = run_local(1, 1, NEEDS, "--lapack", "none").value
    assert got["plain"] is None and got["own"] is None
    assert "UNIMPLEMENTED" in got["without"] and "lapack_spotrf_ffi" in got["without"] and "--lapack" in got["without"]


def test_a_library_that_is_no_lapack_is_refused_at_the_start(run_local):
    ended = run_local(1, 1, NEEDS, "--lapack", "libc.so.6")
    assert ended.code != 0 and "cannot use libc.so.6 as LAPACK: it has no dgetrf_" in ended.err
