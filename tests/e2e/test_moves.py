"""Several workers as one machine: computations on different workers, joined by device_put."""

FIGURE_2 = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
where = [NamedSharding(Mesh(np.array(jax.devices()[2 * i:2 * i + 2]), ("x",)), P("x")) for i in range(3)]
def on(i, f):
    f = jax.jit(f, out_shardings=where[i])
    return lambda v: f(jax.device_put(v, where[i]))
a, b, c = on(0, lambda x: x * 2), on(1, lambda x: x + 1), on(2, lambda x: x / 2)
v = np.array([1.0, 2.0], np.float32)
first = a(v)
result([np.asarray(b(first)).tolist(), np.asarray(a(c(first))).tolist()])
"""


def test_three_functions_on_three_workers(run_local):
    assert run_local(3, 2, FIGURE_2).value == [[3.0, 5.0], [2.0, 4.0]]


TWO_STAGES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
first, second = (NamedSharding(Mesh(d, ("x",)), P("x")) for d in (devices[:4], devices[4:]))
x = jax.device_put(np.arange(16, dtype=np.float32), first)
z = jax.jit(lambda v: v + 1)(jax.device_put(jax.jit(lambda v: 2 * v)(x), second))
result({"z": np.asarray(z).tolist(), "where": sorted(d.id for d in z.devices()), "x": np.asarray(x).tolist()})
"""


def test_two_stages_by_placement(run_local):
    assert run_local(2, 4, TWO_STAGES).value == {
        "z": list(range(1, 32, 2)), "where": [4, 5, 6, 7], "x": list(range(16)),
    }


ACROSS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
rows = jax.device_put(np.arange(64).reshape(8, 8), NamedSharding(mesh, P("i", None)))
columns = jax.device_put(np.arange(64).reshape(8, 8), NamedSharding(mesh, P(None, "i")))
grid = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
tiles = jax.device_put(np.arange(64).reshape(8, 8), NamedSharding(grid, P("b", "a")))
copies = jax.device_put(np.float32(7), NamedSharding(mesh, P()))
out = {
    "rows": np.asarray(rows).tolist(), "columns": np.asarray(columns).tolist(), "tiles": np.asarray(tiles).tolist(),
    "copies": [float(s.data) for s in copies.addressable_shards], "text": repr(rows)[:14],
}
# Every device to every other one, several types, empty arrays, and back.
for dtype in ("float32", "bfloat16", "int4", "bool", "complex64", "float8_e4m3fn"):
    x = jax.device_put(jnp.array([[1, 0, 1], [0, 1, 1]], dtype), devices[0])
    for i in (7, 1, 6, 3, 4, 0):
        x = jax.device_put(x, devices[i])
    out[dtype] = np.asarray(x).astype(complex).real.tolist()
out["empty"] = np.asarray(jax.device_put(jnp.zeros((0, 3)), devices[5])).shape
kept = jax.device_put(jnp.arange(3.0), devices[0])
moved = jax.device_put(kept, devices[6], donate=True)
out["moved"] = np.asarray(moved).tolist()
big = jax.device_put(np.arange(5_000_000, dtype=np.float32), devices[1])
out["big"] = float(jax.jit(lambda v: v[::1_000_000].sum())(jax.device_put(big, devices[5])))
# The shards of one array from both workers, taken apart and put together in another order.
shards = [s.data for s in rows.addressable_shards]
turned = [jax.device_put(s, devices[7 - i]) for i, s in enumerate(shards)]
whole = jax.make_array_from_single_device_arrays((8, 8), NamedSharding(mesh, P("i")), turned[::-1])
out["turned"] = np.asarray(whole)[:, 0].tolist()
result(out)
"""


def test_arrays_over_two_workers(run_local):
    matrix = [list(range(8 * r, 8 * r + 8)) for r in range(8)]
    small = [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert run_local(2, 4, ACROSS).value == {
        "rows": matrix, "columns": matrix, "tiles": matrix, "copies": [7.0] * 8, "text": "Array([[ 0,  1",
        "float32": small, "bfloat16": small, "int4": small, "bool": small, "complex64": small, "float8_e4m3fn": small,
        "empty": [0, 3], "moved": [0.0, 1.0, 2.0], "big": 10_000_000.0, "turned": list(range(56, -8, -8)),
    }
