"""Programs over several workers: one mesh of all their devices, with the answers of one process."""

import os
import pathlib
import signal

import numpy as np
import pytest
from test_collectives import DEVICES_APART

PROGRAMS = pathlib.Path(__file__).parent / "programs"
SHAPES = [(2, 4), (8, 1)]


@pytest.mark.parametrize("workers, devices", SHAPES)
def test_every_collective_over_workers_gives_the_answers_of_stock_jax(run_local, run_stock, workers, devices):
    source = (PROGRAMS / "collectives.py").read_text()
    got, expected = run_local(workers, devices, source).value, run_stock(8, source).value
    assert got.keys() == expected.keys() and len(got) == 59
    for name in expected:
        # Sums of whole numbers are exact in any order.
        tolerance = 1e-6 if name in ("matmul", "training", "mean", "loop") else 0
        np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("workers, devices", [(1, 8), (2, 4), (4, 2)])
def test_collectives_that_do_not_depend_on_one_another_keep_one_order(run_local, run_stock, workers, devices):
    source = f"import sys; sys.argv[1:] = [{os.environ.get('PATHWAYS_TEST_ROUNDS', '5')!r}]\n" + (PROGRAMS / "independent.py").read_text()
    got = run_local(workers, devices, source).value
    assert got == run_stock(8, source).value
    # The sum of the first device's part and that of its neighbour along "a", with the weights of the program.
    x, n = np.arange(8 * 16384) % 977, 16384
    weights = 1 + np.arange(n) % 31
    assert got[0][0][0] == ((x[:n] + x[4 * n : 5 * n]) * weights).sum()


# What a user does with arrays over all devices, and the answers that stock JAX gives on eight.
EVERYDAY = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
mesh = Mesh(devices, ("i",))
rows = NamedSharding(mesh, P("i", None))
arr = jax.device_put(jnp.arange(64).reshape(8, 8), rows)
out = {"sum": int(jnp.sum(arr)), "corner": int(np.asarray(arr)[7, 7]), "any": bool(arr.any()), "row": arr[3].tolist(),
       "repr": repr(arr)[:20]}

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
def step(x): return jax.lax.psum(x, "i") / 8 + 1
x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("i")))
for _ in range(128):
    x = step(x)
out["chain"] = np.asarray(x).tolist()

# Any devices in any order, some of one worker, one of each, with and without an exchange between them.
for name, some in {"middle": devices[2:6], "mixed": devices[[7, 0, 5, 2]], "backwards": devices[::-1], "ends": devices[[0, 7]]}.items():
    line = NamedSharding(Mesh(some, ("d",)), P("d"))
    y = jax.device_put(np.arange(24, dtype=np.float32), line)
    out[name] = [float(jax.jit(jnp.sum)(y)), np.asarray(jax.jit(lambda v: v * 2)(y))[-1].item(), np.asarray(jnp.roll(y, 3))[:4].tolist()]

# Given away, used twice, replicated, by two axes, and back to one device.
grid = Mesh(devices.reshape(2, 4), ("a", "b"))
w = jax.device_put(np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(grid, P("a", "b")))
v = jax.device_put(np.ones(8, np.float32), NamedSharding(grid, P("b")))
given = jax.jit(lambda w: w + 1, donate_argnums=0)(w)
out["deleted"] = w.is_deleted()
out["matvec"] = np.asarray(jax.jit(lambda w, v: w @ v)(given, v)).tolist()
out["whole"] = np.asarray(jax.jit(lambda w: w.T, out_shardings=NamedSharding(grid, P()))(given)).tolist()
out["one"] = np.asarray(jax.device_put(given, devices[5])).sum().item()
compiled = jax.jit(lambda w, v: w @ v).lower(given, v).compile()
out["described"] = [compiled.as_text().startswith("HloModule"), compiled.cost_analysis()["flops"] > 0]
out["grad"] = np.asarray(jax.jit(jax.grad(lambda v, w: jnp.tanh(w @ v / 100).sum()))(v, given)).round(4).tolist()
result(out)
"""


@pytest.mark.parametrize("workers, devices", [(2, 4), (4, 2)])
def test_everyday_work_on_one_mesh_of_several_workers(run_local, run_stock, workers, devices):
    got, expected = run_local(workers, devices, EVERYDAY).value, run_stock(8, EVERYDAY).value
    assert got == expected
    assert (got["sum"], got["corner"], got["chain"], got["described"]) == (2016, 63, [128.0] * 8, [True, True])


LOSS = """
import jax, jax.numpy as jnp, numpy as np, time
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
mesh = Mesh(devices, ("i",))
@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
def step(x): return jax.lax.psum(x, "i") / 6 + 1
def fresh(): return jax.device_put(np.zeros(6, np.float32), NamedSharding(mesh, P("i")))
kept = jax.block_until_ready(jax.device_put(np.float32(5), devices[0]))
x = fresh()
print("READY.", flush=True)
told = None
while told is None:
    try:
        for _ in range(20):
            x = step(x)
        jax.block_until_ready(x)
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
again = None
deadline = time.monotonic() + 60
while again is None and time.monotonic() < deadline:
    try:
        again = np.asarray(step(step(fresh()))).tolist()
    except jax.errors.JaxRuntimeError as error:
        late = str(error)
        time.sleep(0.05)
result({"told": told, "again": again, "kept": float(kept + 1)})
"""


def test_a_worker_that_dies_in_a_gang_is_named_and_comes_back(start_cluster):
    cluster = start_cluster(3, 2)
    client = cluster.client(LOSS)
    client.wait_for("READY")
    victim = cluster.status()["workers"][2]
    os.kill(victim["pid"], signal.SIGKILL)
    got = client.finish().value
    assert "worker 2" in got["told"] and str(victim["pid"]) in got["told"], got["told"]
    assert got["again"] == [2.0] * 6
    assert got["kept"] == 6.0


OPPOSITE = """
import sys, jax, numpy as np
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rounds, turn = int(sys.argv[1]), int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()), ("i",))
wrap = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
total, largest = wrap(lambda x: jax.lax.psum(x, "i") / 8 + 1), wrap(lambda x: jax.lax.pmax(x, "i") + 1)
start = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("i")))
for f in (total, largest):
    f(start).block_until_ready()
first, second = (total, largest) if turn == 0 else (largest, total)
x, y = start, start
for i in range(rounds):
    x, y = first(x), second(y)
    if i % 50 == 49:
        jax.block_until_ready((x, y))
result([np.asarray(x).tolist(), np.asarray(y).tolist()])
"""


def test_two_clients_in_opposite_order_do_not_block_each_other(start_cluster):
    rounds = 200
    cluster = start_cluster(2, 4)
    clients = [cluster.client(OPPOSITE, rounds, turn) for turn in (0, 1)]
    sums, maxima = [3.5 + rounds] * 8, [7.0 + rounds] * 8
    assert clients[0].finish().value == [sums, maxima]
    assert clients[1].finish().value == [maxima, sums]


APART = DEVICES_APART + """
try:
    told = str(np.asarray(good(some(x))))
except jax.errors.JaxRuntimeError as error:
    told = str(error)
result({"told": told, "after": np.asarray(good(x)).tolist(), "same program": np.asarray(some(x + 10)).tolist()})
"""


def test_a_worker_that_does_not_come_to_a_collective_is_an_error(run_local):
    got = run_local(2, 2, APART).value
    assert "do not meet in a collective" in got["told"] and "worker 0" in got["told"], got["told"]
    assert got["after"] == [6.0] * 4
    assert got["same program"] == [46.0] * 4
