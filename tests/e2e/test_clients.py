"""Several clients on one cluster: right results for all, none hurt by the end of another, several JAX versions at once."""

import os
import signal
import sys

import pytest

WORK = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
start = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
mesh = jax.make_mesh((len(jax.devices()),), ("i",))
x = jax.device_put(np.full(8, start, np.float32), NamedSharding(mesh, P("i")))
step = jax.jit(lambda v: v + jnp.sum(v) / v.size + 1)
for _ in range(50):
    x = step(x) / 2
result({"values": np.asarray(x).tolist(), "version": jax.__version__})
"""


def expected(start):
    x = start
    for _ in range(50):
        x = (x + x + 1) / 2
    return x


def test_two_clients_at_once(start_cluster):
    cluster = start_cluster(1, 8)
    clients = [cluster.client(WORK, i * 10, PATHWAYS_NAME=f"client-{i}") for i in range(2)]
    for i, client in enumerate(clients):
        assert client.finish().value["values"] == pytest.approx([expected(i * 10.0)] * 8)
    cluster.wait_status(lambda s: not s["sessions"] and not any(sum(w["bytes_reserved"]) for w in s["workers"]))


HOLD = """
import time, jax, jax.numpy as jnp, numpy as np
kept = [jax.device_put(np.ones(1 << 20, np.float32), d) for d in jax.devices()]
jax.block_until_ready(kept)
print("HOLDING", flush=True)
time.sleep(100)
"""


def test_status_shows_a_client_and_nothing_is_left_when_it_is_killed(start_cluster):
    cluster = start_cluster(1, 4)
    client = cluster.client(HOLD, PATHWAYS_NAME="holder")
    client.wait_for("HOLDING")
    status = cluster.wait_status(lambda s: [x["name"] for x in s["sessions"]] == ["holder"])
    session, (worker,) = status["sessions"][0], status["workers"]
    assert session["held_bytes"] >= 16 << 20 and session["arrays"] >= 4 and session["devices"] == 4
    assert worker["state"] == "alive" and worker["devices"] == 4 and worker["pid"] > 0 and worker["slot"] == 0

    os.killpg(client.pid, signal.SIGKILL)
    cluster.wait_status(lambda s: not s["sessions"] and sum(s["workers"][0]["bytes_in_use"]) == 0)
    assert cluster.client(WORK).finish().value["values"] == pytest.approx([expected(0.0)] * 8)


@pytest.mark.skipif("PATHWAYS_OTHER_PYTHON" not in os.environ, reason="not run: only one JAX version is installed here")
def test_two_jax_versions_at_once(start_cluster):
    cluster = start_cluster(1, 8)
    clients = [cluster.client(WORK, python=p) for p in (sys.executable, os.environ["PATHWAYS_OTHER_PYTHON"])]
    got = [c.finish().value for c in clients]
    assert got[0]["version"] != got[1]["version"]
    for value in got:
        assert value["values"] == pytest.approx([expected(0.0)] * 8)


def test_pathwaysutils_on_a_real_cluster(run_local):
    pytest.importorskip("pathwaysutils")
    got = run_local(1, 2, """
import pathwaysutils
pathwaysutils.initialize()
import jax, jax.numpy as jnp
result([float(jnp.arange(4.0).sum()), len(jax.devices()), jax.devices("cpu")[0].platform])
""").value
    assert got == [6.0, 2, "cpu"]


def test_both_platform_names_and_a_local_cpu_beside(start_cluster):
    cluster = start_cluster(1, 2)
    script = """
import jax, jax.numpy as jnp
import pathways_rs
far, near = jax.devices()[0], jax.devices("cpu")[0]
x = jax.device_put(jnp.float32(1), near) + 1
result([float(x), float(jnp.float32(1) + 1), pathways_rs.is_ours(far.client), pathways_rs.is_ours(near.client), len(jax.devices())])
"""
    for name in ("proxy", "pathways", "proxy,cpu"):
        assert cluster.client(script, JAX_PLATFORMS=name).finish().value == [2.0, 2.0, True, False, 2]
