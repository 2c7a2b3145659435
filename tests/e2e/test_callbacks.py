"""Programs that call functions of their client's process, and what becomes of the calls when something goes wrong."""

import os
import pathlib
import signal

import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "callbacks.py"

BEGIN = """
import sys, time, threading, jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
like = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
"""

ADD = BEGIN + "result([float(jax.jit(lambda v: v + 1)(jax.device_put(np.float32(i), d))) for i, d in enumerate(jax.devices())])"


@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (1, 8), (2, 2)])
def test_every_way_to_call(run_local, workers, devices):
    got = run_local(workers, devices, PROGRAM)
    assert got.code == 0 and f" {devices} devices" in got.out, f"{got.out}\n{got.err}"


@pytest.mark.skipif("PATHWAYS_OTHER_PYTHON" not in os.environ, reason="not run: only one JAX version is installed here")
def test_every_way_to_call_with_the_other_jax(start_cluster):
    cluster = start_cluster(1, 4)
    client = cluster.processes.python(
        PROGRAM, python=os.environ["PATHWAYS_OTHER_PYTHON"], JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=cluster.target
    )
    got = client.finish()
    assert got.code == 0 and "callbacks ok" in got.out, f"{got.out}\n{got.err}"


def test_switched_off_it_is_stock_jax(run_local):
    got = run_local(1, 1, BEGIN + """
try:
    jax.jit(lambda x: jax.pure_callback(np.sin, like(x), x))(1.0).block_until_ready()
except Exception as error:
    result(str(error))
else:
    result("a value")
""", PATHWAYS_RS_CALLBACKS="0")
    assert "callback" in got.value.lower() and "pw.host_callback" not in got.value


def test_what_a_callback_gives_is_checked(run_local):
    text = BEGIN + """
def attempt(function):
    try:
        jax.jit(lambda x: jax.pure_callback(function, like(x), x))(jnp.zeros(3)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "a value"

def leave(a):
    sys.exit("enough")

good = jax.jit(lambda x: jax.pure_callback(lambda a: a + 1, like(x), x))(jnp.zeros(3))
result([attempt(f) for f in (lambda a: np.zeros(4, np.float32), lambda a: np.zeros(3, np.int32), leave)] + [good.tolist()])
"""
    shape, dtype, left, good = run_local(1, 1, text).value
    assert "float32[4] instead of float32[3]" in shape
    assert "int32[3] instead of float32[3]" in dtype
    assert "SystemExit: enough" in left
    assert good == [1, 1, 1]


def test_a_thousand_calls_in_a_scan(run_local):
    text = BEGIN + """
seen = []
def add(a, i):
    seen.append(int(i))
    return np.float32(a + 1)

def body(carry, i):
    return io_callback(add, like(carry), carry, i, ordered=True), None

last, _ = jax.jit(lambda: jax.lax.scan(body, jnp.float32(0), jnp.arange(1000)))()
result([float(last), seen == list(range(1000))])
"""
    assert run_local(1, 1, text).value == [1000, True]


def test_large_operands_and_results(run_local):
    text = BEGIN + """
x = jnp.arange(16 << 20, dtype=jnp.float32)
got = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a)[::-1], like(x), x))(x)
result([x.nbytes, bool((got == x[::-1]).all()), float(got[0])])
"""
    assert run_local(1, 1, text).value == [64 << 20, True, (16 << 20) - 1]


def test_a_callback_may_wait_for_another_device(run_local):
    text = BEGIN + """
first, second = jax.devices()
inner = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 10, like(x), x))

def outer(a):
    return np.asarray(inner(jax.device_put(np.asarray(a), second)))

x = jax.device_put(np.float32(4), first)
result(float(jax.jit(lambda x: jax.pure_callback(outer, like(x), x) + 1)(x)))
"""
    assert run_local(1, 2, text).value == 41


def test_equal_programs_of_two_clients_call_their_own_functions(start_cluster):
    cluster = start_cluster(1, 1)
    text = BEGIN + """
name = float(sys.argv[1])
f = jax.jit(lambda x: jax.pure_callback(lambda a: np.float32(a + name), like(x), x))
print("READY", flush=True)
result([float(f(jnp.float32(i))) for i in range(100)])
"""
    clients = [cluster.client(text, number) for number in (1000, 2000)]
    for client, number in zip(clients, (1000, 2000)):
        assert client.finish().value == [number + i for i in range(100)]


def test_a_channel_shows_the_token_that_the_server_asks_for(start_cluster):
    cluster = start_cluster(1, 1, PATHWAYS_TOKEN="secret")
    text = BEGIN + "result(float(jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, like(x), x))(jnp.float32(1))))"
    assert cluster.client(text, PATHWAYS_TOKEN="secret").finish().value == 2


STUCK = BEGIN + """
inside = threading.Event()

def stay(a):
    print("STAYING", flush=True)
    inside.set()
    time.sleep(1000)

f = jax.jit(lambda x: jax.pure_callback(stay, like(x), x) + x)
waiting = [f(jax.device_put(np.float32(1), d)) for d in jax.devices()]
"""


def test_a_client_that_is_killed_in_a_callback_leaves_its_devices_free(start_cluster):
    cluster = start_cluster(1, 2)
    client = cluster.client(STUCK + "time.sleep(1000)")
    client.wait_for("STAYING.*STAYING")
    other = cluster.client(ADD)
    os.killpg(client.pid, signal.SIGKILL)
    assert other.finish().value == [1, 2]
    cluster.wait_status(lambda s: not s["sessions"] and not any(sum(w["bytes_reserved"]) for w in s["workers"]))


def test_a_mesh_is_free_again_when_one_of_its_devices_was_in_a_callback(start_cluster):
    cluster = start_cluster(1, 4)
    mesh = """
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("i",))
x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("i")))
"""
    stuck = BEGIN + mesh + """
def stay(a):
    print("STAYING", flush=True)
    time.sleep(1000)
    return a

jax.jit(lambda v: jax.pure_callback(stay, like(v), v) * v.sum())(x).block_until_ready()
"""
    client = cluster.client(stuck)
    client.wait_for("STAYING")
    other = cluster.client(BEGIN + mesh + "result(jax.jit(lambda v: v * v.sum())(x).tolist())")
    os.killpg(client.pid, signal.SIGKILL)
    assert other.finish().value == [4] * 4


def test_a_client_may_end_while_a_callback_runs(start_cluster):
    cluster = start_cluster(1, 2)
    client = cluster.client(STUCK + "inside.wait(); result('end')")
    assert client.finish().value == "end"
    assert cluster.client(ADD).finish().value == [1, 2]


def test_effects_that_are_under_way_at_the_end_still_happen(run_local):
    text = BEGIN + """
def late(a):
    time.sleep(0.2)
    print("LATE", float(a), flush=True)

f = jax.jit(lambda x: io_callback(late, None, x, ordered=True))
for i in range(3):
    f(jnp.float32(i))
result("end")
"""
    got = run_local(1, 1, text)
    assert got.value == "end"
    assert [line for line in got.out.splitlines() if line.startswith("LATE")] == ["LATE 0.0", "LATE 1.0", "LATE 2.0"]


def test_a_worker_that_dies_in_a_callback_fails_it(start_cluster):
    cluster = start_cluster(1, 1)
    text = BEGIN + """
def stay(a):
    print("STAYING", flush=True)
    time.sleep(3)
    return a

try:
    jax.jit(lambda x: jax.pure_callback(stay, like(x), x) + x)(jnp.float32(1)).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    result(str(error))
"""
    client = cluster.client(text)
    client.wait_for("STAYING")
    os.kill(cluster.status()["workers"][0]["pid"], signal.SIGKILL)
    assert "worker 0" in client.finish().value
