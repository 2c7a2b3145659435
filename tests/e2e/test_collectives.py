"""Collectives: the values of stock JAX, and what happens when a device does not come."""

import pathlib

import numpy as np

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def test_every_collective_gives_the_answers_of_stock_jax(run_local, run_stock):
    source = (PROGRAMS / "collectives.py").read_text()
    got, expected = run_local(1, 8, source).value, run_stock(8, source).value
    assert got.keys() == expected.keys() and len(got) == 59
    for name in expected:
        # Sums of whole numbers are exact in any order.
        tolerance = 1e-6 if name in ("matmul", "training", "mean", "loop") else 0
        np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


DEVICES_APART = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("i",))
x = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh, P("i")))
wrap = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
some = wrap(lambda v: lax.cond(v.sum() > 1, lambda w: lax.psum(w, "i"), lambda w: w, v))
good = wrap(lambda v: lax.psum(v, "i"))
"""

APART = DEVICES_APART + """
told = []
for _ in range(3):
    try:
        np.asarray(some(x))
        told.append("nothing")
    except jax.errors.JaxRuntimeError as error:
        told.append(str(error))
    try:
        np.asarray(good(some(x)))
        told.append("nothing")
    except jax.errors.JaxRuntimeError as error:
        told.append(str(error))
result({"told": told, "after": np.asarray(good(x)).tolist(), "same program": np.asarray(some(x + 10)).tolist()})
"""


def test_devices_that_do_not_meet_are_an_error_at_once(run_local):
    got = run_local(1, 4, APART).value
    assert all("collective" in text for text in got["told"]), got["told"]
    assert got["after"] == [6.0] * 4
    assert got["same program"] == [46.0] * 4
