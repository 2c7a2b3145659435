"""The binary as a user meets it: exit codes, signals, ports, and what it says when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from harness import CACHE


@pytest.fixture
def local(processes):
    """local(*arguments) -> Result: `pathways local …` to its end."""

    def run(*arguments, port=0):
        return processes.pathways("local", "--port", port, "--cache-dir", CACHE, *arguments).finish(60)

    return run


def test_output_and_exit_code_pass_through(local):
    got = local("--", sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (got.code, got.out) == (7, "out\n")
    assert "err\n" in got.err


def test_a_command_that_dies_by_a_signal(local):
    got = local("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert got.code == 128 + 9


def test_a_command_that_does_not_exist(local):
    got = local("--", "no-such-command")
    assert got.code == 127 and "no-such-command" in got.err


def children_of(pid):
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in out] + [g for p in out for g in children_of(p)]


def alive(pids):
    def running(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return [p for p in pids if running(p)]


def wait_gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"still there: {alive(pids)}"
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(start_cluster, how):
    cluster = start_cluster(2, 1)
    children = children_of(cluster.process.pid)
    assert len(children) >= 3  # a controller and two workers
    os.kill(cluster.process.pid, how)
    cluster.process.popen.wait(timeout=20)
    wait_gone(children)


def test_a_signal_ends_the_command_too(processes):
    script = processes.script("import time; print('READY', flush=True); time.sleep(100)")
    process = processes.pathways("local", "--port", 0, "--cache-dir", CACHE, "--", sys.executable, script)
    process.wait_for("READY")
    children = children_of(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    assert process.finish(20).code == 128 + signal.SIGTERM
    wait_gone(children)


def test_a_used_port(start_cluster, local):
    port = start_cluster(1, 1).target.rsplit(":", 1)[1]
    got = local("--", "true", port=port)
    assert got.code != 0
    assert f"port {port} " in got.err and "in use" in got.err


def test_a_plugin_that_is_none(local, tmp_path):
    no_plugin = tmp_path / "plugin.so"
    no_plugin.write_text("not a shared library")
    got = local("--plugin", no_plugin, "--", "true")
    assert got.code != 0 and str(no_plugin) in got.err
    got = local("--plugin", tmp_path / "missing.so", "--", "true")
    assert got.code != 0 and "missing.so" in got.err


def test_a_worker_without_a_controller(processes):
    got = processes.pathways("status", "--controller", "127.0.0.1:1").finish(60)
    assert got.code != 0 and "127.0.0.1:1" in got.err
    worker = processes.pathways("worker", "--controller", "127.0.0.1:1", "--devices", 1, "--cache-dir", CACHE)
    worker.wait_for("127.0.0.1:1", 30, where="err")


def test_beyond_loopback_a_token_is_asked_for(processes):
    got = processes.pathways("controller", "--listen", "0.0.0.0", "--port", 0, "--worker-port", 0).finish(60)
    assert got.code != 0 and "--token" in got.err and "--insecure" in got.err


def start_controller(processes, *flags):
    """Its two addresses: {"clients": …, "workers": …}."""
    process = processes.pathways("controller", "--port", 0, "--worker-port", 0, "--announce", *flags)
    return json.loads(process.wait_for(r"(\{.*?\})\n")[1])


def start_worker(processes, ports, *flags):
    return processes.pathways("worker", "--controller", ports["workers"], "--devices", 1, "--cache-dir", CACHE, *flags)


ANSWER = "import jax, jax.numpy as jnp\nresult(float(jnp.float32(1) + 1))\n"


def start_client(processes, ports, **variables):
    return processes.python(ANSWER, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=f"grpc://{ports['clients']}", **variables)


def test_a_session_waits_for_its_workers(processes):
    ports = start_controller(processes, "--expect", 1)
    client = start_client(processes, ports)
    time.sleep(12)  # longer than a client waits for a controller that is not there
    assert client.popen.poll() is None
    start_worker(processes, ports)
    assert client.finish(60).value == 2.0


def test_a_session_says_which_workers_are_missing(processes):
    ports = start_controller(processes, "--expect", 2, "--session-wait", 2)
    got = start_client(processes, ports).finish(60)
    assert got.code != 0 and "0 of 2" in got.err


def test_a_token_opens_the_door(processes):
    ports = start_controller(processes, "--token", "open-sesame")
    start_worker(processes, ports, "--token", "open-sesame")
    assert start_client(processes, ports, PATHWAYS_TOKEN="open-sesame").finish(60).value == 2.0
    for token in (None, "wrong"):
        got = start_client(processes, ports, PATHWAYS_TOKEN=token).finish(60)
        assert got.code != 0 and "token" in got.err and "open-sesame" not in got.err
    # Either both have one, or none: a worker proves its token to the controller, and asks for it again for array bytes.
    for ours, flags in [(ports, []), (ports, ["--token", "wrong"]), (start_controller(processes), ["--token", "open-sesame"])]:
        got = start_worker(processes, ours, *flags).finish(60)
        assert got.code != 0 and "token" in got.err and "open-sesame" not in got.err


LONG = """
import jax, jax.numpy as jnp
x = jnp.arange(1000.0)
step = jax.jit(lambda v: v * 0.5 + 1)
jax.block_until_ready(step(x))
print("RUNNING", flush=True)
try:
    for _ in range(100_000):
        x = jax.block_until_ready(step(x))
    result("never failed")
except jax.errors.JaxRuntimeError as error:
    result(str(error))
"""


def test_a_worker_killed_in_the_middle(start_cluster):
    cluster = start_cluster(1, 2)
    client = cluster.client(LONG)
    client.wait_for("RUNNING")
    os.kill(cluster.status()["workers"][0]["pid"], signal.SIGKILL)
    assert "worker" in client.finish(60).value
