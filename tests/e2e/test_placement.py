"""One program over several workers by placement alone: a pipeline that nobody has compiled before, and reading from all of them."""

import os

import pytest

# `cargo xtask accept pipeline` plays more of them.
ROUNDS = int(os.environ.get("PATHWAYS_TEST_ROUNDS", "3"))
ROUNDS_PER_CLIENT = 10
ROUND_SECONDS = 60

PIPELINE = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
first, rounds, order = int(sys.argv[1]), int(sys.argv[2]), [int(i) for i in sys.argv[3]]
STAGES, MICRO, ROWS, WIDTH = 4, 8, 4, 16
meshes = [Mesh(pair, ("d",)) for pair in np.array(jax.devices()).reshape(STAGES, 2)[order]]
kept, split = [NamedSharding(m, P()) for m in meshes], [NamedSharding(m, P("d")) for m in meshes]

def stage(w, h, scale):
    return jnp.tanh(h @ w * scale)

def loss(weights, x, scale):
    h = x.reshape(-1, WIDTH)
    for w in weights:
        h = stage(w, h, scale)
    return (h ** 2).sum()

# Which micro-batch goes forward or backward next on each stage: one forward, one backward, as soon as the pipeline is full.
def one_forward_one_backward():
    todo = []
    for s in range(STAGES):
        ahead = STAGES - s
        queue = [("f", m) for m in range(ahead)]
        for m in range(MICRO):
            queue += [("b", m)] + [("f", m + ahead)] * (m + ahead < MICRO)
        todo.append(queue)
    done = set()
    while any(todo):
        for s, queue in enumerate(todo):
            if not queue:
                continue
            kind, m = queue[0]
            needs = ("f", m, s - (kind == "f")) if kind == "f" or s == STAGES - 1 else ("b", m, s + 1)
            if needs in done or needs[2] < 0:
                queue.pop(0)
                done.add((kind, m, s))
                yield kind, m, s

# Programs that are this round's own, down to a constant: no cache has any of them.
def cold_round(weights, x, scale):
    forward = [jax.jit(lambda w, h: stage(w, h, scale), out_shardings=split[s]) for s in range(STAGES)]
    def back(total, w, h, g):
        dw, dh = jax.vjp(lambda w, h: stage(w, h, scale), w, h)[1](g)
        return total + dw, dh
    backward = [jax.jit(back, donate_argnums=0, out_shardings=(kept[s], split[s])) for s in range(STAGES)]
    begin = jax.jit(lambda h: 2 * h * (scale / scale), out_shardings=split[-1])
    placed = [jax.device_put(w, kept[s]) for s, w in enumerate(weights)]
    grads = [jax.device_put(np.zeros_like(w), kept[s]) for s, w in enumerate(weights)]
    inputs, outs, down = {}, {}, {}
    for kind, m, s in one_forward_one_backward():
        if kind == "f":
            inputs[m, s] = jax.device_put(x[m] if s == 0 else outs.pop((m, s - 1)), split[s])
            outs[m, s] = forward[s](placed[s], inputs[m, s])
        else:
            g = begin(outs.pop((m, s))) if s == STAGES - 1 else jax.device_put(down.pop((m, s + 1)), split[s])
            grads[s], down[m, s] = backward[s](grads[s], placed[s], inputs.pop((m, s)), g)
    assert not inputs and not outs
    return grads

on_one_device = jax.jit(jax.grad(loss))
rng, worst, times = np.random.default_rng(first), 0.0, []
for turn in range(first, first + rounds):
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(STAGES)]
    x = rng.normal(size=(MICRO, ROWS, WIDTH)).astype(np.float32)
    scale = 1 + turn / 1024
    began = time.monotonic()
    grads = [np.asarray(g) for g in cold_round(weights, x, scale)]
    times.append(time.monotonic() - began)
    wanted = on_one_device(*jax.device_put((weights, x, np.float32(scale)), jax.devices("cpu")[0]))
    for got, right in zip(grads, map(np.asarray, wanted)):
        assert got.shape == right.shape and right.any()
        worst = max(worst, float(np.abs(got - right).max() / np.abs(right).max()))
    print(f"ROUND {turn}.", flush=True)
result({"worst": worst, "seconds": times})
"""


# With two workers, neighbouring stages are on different ones, as they are with four.
@pytest.mark.parametrize("workers, devices, order", [(2, 4, "0213"), (4, 2, "0123")])
@pytest.mark.timeout(120 + 2 * ROUND_SECONDS * ROUNDS)
def test_a_cold_pipeline_of_four_stages_gives_the_gradients_of_one_device(start_cluster, tmp_path, workers, devices, order):
    cluster = start_cluster(workers, devices, cache=tmp_path / "cache")
    seconds = []
    for first in range(0, ROUNDS, ROUNDS_PER_CLIENT):
        count = min(ROUNDS_PER_CLIENT, ROUNDS - first)
        client = cluster.client(PIPELINE, first, count, order)
        for turn in range(first, first + count):
            client.wait_for(rf"ROUND {turn}\.", ROUND_SECONDS)
        got = client.finish().value
        assert got["worst"] < 1e-5
        seconds += got["seconds"]
        print(f"{workers} x {devices}: {len(seconds)} of {ROUNDS} cold starts, the longest took {max(seconds):.1f} s", flush=True)
    assert len(seconds) == ROUNDS


READING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
line, grid = Mesh(devices, ("d",)), Mesh(devices.reshape(WORKERS, -1), ("w", "d"))
add = jax.jit(lambda v: v + 1)
out = {"four bytes": [float(np.asarray(add(jax.device_put(np.float32(i), d)).block_until_ready())) for i, d in enumerate(devices)]}
host = np.arange(4 << 20, dtype=np.float32).reshape(2048, 2048)
for name, sharding in {
    "rows": NamedSharding(line, P("d")), "columns": NamedSharding(line, P(None, "d")),
    "tiles": NamedSharding(grid, P("w", "d")), "turned": NamedSharding(grid, P("d", "w")),
    "part copies": NamedSharding(grid, P("w")), "copies": NamedSharding(line, P()),
}.items():
    out[name] = bool((np.asarray(jax.device_put(host, sharding).block_until_ready()) == host).all())
# Not what was uploaded, but what the devices have made of it, each its part.
rows = jax.device_put(host, NamedSharding(line, P("d")))
made = [add(shard.data) for shard in rows.addressable_shards]
whole = jax.make_array_from_single_device_arrays(host.shape, rows.sharding, made).block_until_ready()
out["made"] = bool((np.asarray(whole) == host + 1).all())
result(out)
"""


@pytest.mark.parametrize("workers, devices", [(2, 4), (4, 2)])
def test_reading_small_and_large_arrays_of_all_workers(run_local, workers, devices):
    large = ("rows", "columns", "tiles", "turned", "part copies", "copies", "made")
    assert run_local(workers, devices, READING.replace("WORKERS", str(workers))).value == {
        "four bytes": [float(i + 1) for i in range(8)], **dict.fromkeys(large, True),
    }
