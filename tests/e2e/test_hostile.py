"""What must not hurt anybody: broken compiles, garbage on the ports, clients that stop reading or that flood; and the event log."""

import os
import re
import signal
import socket
import time

from test_processes import children_of

SMALL = """
import jax, jax.numpy as jnp, numpy as np
result(np.asarray(jax.jit(lambda v: v * 3)(jnp.arange(4.0))).tolist())
"""
SMALL_VALUE = [0.0, 3.0, 6.0, 9.0]


def compile_children(cluster):
    """The compile processes of a cluster's workers."""

    def is_child(pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return b"--compile-only" in file.read().split(b"\0")
        except FileNotFoundError:
            return False

    return [pid for pid in children_of(cluster.process.pid) if is_child(pid)]


# Many different sorts: each is its own code for the compiler, which has no cached answer for this number.
LONG_COMPILE = """
import sys, jax, jax.numpy as jnp, numpy as np
def long(x):
    for i in range(300):
        x = jnp.sort(jnp.sin(x * (i + 1.5 + float(sys.argv[1]))).reshape(4 + i % 7, -1), axis=i % 2).reshape(-1)
    return x
x = jnp.zeros(27720)
y = jax.block_until_ready(jax.jit(lambda v: v + 1)(x))
print("COMPILING", flush=True)
try:
    jax.block_until_ready(jax.jit(long)(x))
    said = "nothing"
except jax.errors.JaxRuntimeError as error:
    said = str(error)
result({"said": said, "kept": float(y[5]), "after": np.asarray(jax.jit(lambda v: v[:2] + 7)(x)).tolist()})
"""


def test_a_compile_process_that_is_killed_costs_one_compile(start_cluster):
    cluster = start_cluster(1, 2)
    client = cluster.client(LONG_COMPILE, time.time() % 1000)
    client.wait_for("COMPILING")
    time.sleep(1.5)  # into the long compile, which takes many times that
    (child,) = compile_children(cluster)
    os.kill(child, signal.SIGKILL)
    got = client.finish().value
    assert re.search(r"compile process.*(killed|signal|SIGKILL|died)", got["said"], re.S), got["said"]
    assert got["kept"] == 1.0 and got["after"] == [7.0, 7.0]
    assert cluster.client(SMALL).finish().value == SMALL_VALUE


def test_more_devices_than_there_are(start_cluster):
    cluster = start_cluster(1, 2)
    got = cluster.client(SMALL, PATHWAYS_SLICE=5, PATHWAYS_NAME="greedy", PATHWAYS_RS_CONNECT_TIMEOUT=3).finish(60)
    assert got.code != 0
    assert "asks for 5 devices" in got.err and "2 devices" in got.err, got.err
    two = cluster.client("import jax; result(len(jax.devices()))", PATHWAYS_SLICE=1).finish().value
    assert two == 1


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
    b"\xff" * 4096,
    bytes(4096),
    b"",
]


def test_garbage_on_every_port_hurts_nobody(start_cluster):
    cluster = start_cluster(1, 2)
    addresses = [cluster.target.removeprefix("grpc://"), cluster.controller]
    addresses += [w["data_address"] for w in cluster.status()["workers"]]
    busy = cluster.client("""
import jax, jax.numpy as jnp
f, x = jax.jit(lambda v: v + 1), jnp.zeros(4)
print("BUSY", flush=True)
for _ in range(2000): x = f(x)
result(float(x[0]))
""")
    busy.wait_for("BUSY")
    open_ones = []
    for address in addresses:
        host, port = address.rsplit(":", 1)
        for garbage in GARBAGE:
            peer = socket.create_connection((host, int(port)), timeout=10)
            try:
                peer.sendall(garbage)
            except OSError:
                pass  # closed at once: right, too
            open_ones.append(peer)
    assert busy.finish().value == 2000.0
    assert cluster.client(SMALL).finish().value == SMALL_VALUE
    for peer in open_ones:
        peer.close()
    status = cluster.status()
    assert [w["state"] for w in status["workers"]] == ["alive"] and status["sessions"] == []


def test_a_client_that_stops_reading_is_alone_with_it(start_cluster):
    cluster = start_cluster(1, 2)
    stopped = cluster.client("""
import threading, jax, jax.numpy as jnp, numpy as np
big = [jax.device_put(np.ones(16 << 20, np.uint8)) for _ in range(8)]
jax.block_until_ready(big)
f, x = jax.jit(lambda v: v + 1), jnp.zeros(4)
x = f(x)
print("READING", flush=True)
for b in big: threading.Thread(target=np.asarray, args=(b,), daemon=True).start()
while True: x = f(x)
""", PATHWAYS_NAME="stopped")
    stopped.wait_for("READING")
    os.killpg(stopped.pid, signal.SIGSTOP)
    for _ in range(3):
        assert cluster.client(SMALL).finish().value == SMALL_VALUE
    os.killpg(stopped.pid, signal.SIGKILL)
    cluster.wait_status(lambda s: not s["sessions"] and sum(s["workers"][0]["bytes_in_use"]) == 0)


FLOOD = """
import sys, jax, jax.numpy as jnp, numpy as np
def slept(x): return jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, us=np.int64(2000)) + 1
f, x = jax.jit(slept), jnp.zeros(2)
x = jax.block_until_ready(f(x))
print("FLOODING", flush=True)
for _ in range(100_000): x = f(x)
"""


def test_a_client_that_floods_is_held_back_and_the_others_get_their_share(start_cluster):
    cluster = start_cluster(1, 1, "--test-targets")
    flood = cluster.client(FLOOD, PATHWAYS_NAME="flood")
    flood.wait_for("FLOODING")
    cluster.wait_status(lambda s: any(x["queued"] >= 16 * 1024 for x in s["sessions"]), 60)
    assert cluster.client(SMALL).finish().value == SMALL_VALUE
    queued = [x["queued"] for x in cluster.status()["sessions"] if x["name"] == "flood"]
    assert len(queued) == 1 and queued[0] <= 16 * 1024 + 1024  # the bound, and what was on its way
    os.killpg(flood.pid, signal.SIGKILL)
    cluster.wait_status(lambda s: not s["sessions"] and all(w["granted"] == 0 for w in s["workers"]))
    assert cluster.client(SMALL).finish().value == SMALL_VALUE


def test_test_targets_are_refused_where_they_are_not_declared(start_cluster):
    got = start_cluster(1, 1).client(FLOOD).finish()
    assert got.code != 0 and "pw.sleep_us" in got.err


def test_a_recorded_run_replays_and_a_changed_log_does_not(processes, start_cluster, tmp_path):
    log = tmp_path / "events"
    cluster = start_cluster(1, 2, "--record", log)
    assert cluster.client(SMALL).finish().value == SMALL_VALUE
    cluster.process.end()
    got = processes.pathways("replay", log).finish(60)
    assert got.code == 0 and re.search(r"\d+ events in \d+ turns gave the same \d+ effects", got.out), got.out + got.err
    # One device less in the worker's hello: another history.
    changed = log.read_bytes()
    at = changed.rindex(b"pinned_host")
    log.write_bytes(changed[:at] + b"pinned_hosT" + changed[at + 11 :])
    got = processes.pathways("replay", log).finish(60)
    assert got.code != 0 and "effects" in got.err, got.err
    (tmp_path / "text").write_text("no log")
    got = processes.pathways("replay", tmp_path / "text").finish(60)
    assert got.code != 0 and "not an event log" in got.err
