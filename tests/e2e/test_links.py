"""The connection between controller and worker breaks: both keep what was on its way, and nothing is lost."""

import json
import os
import socket
import struct
import threading
import time

import pytest
from harness import CACHE
from test_processes import start_controller

# `PATHWAYS_TEST_CUT_SECONDS=5` is the long form.
CUT_SECONDS = float(os.environ.get("PATHWAYS_TEST_CUT_SECONDS", "1"))
CUTS = 3


class Proxy:
    """Passes TCP connections on, until they are cut."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target, self.is_cut, self.open, self.accepted = (host, int(port)), False, set(), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            if self.is_cut:
                reset(client)
                continue
            self.accepted += 1
            server = socket.create_connection(self.target)
            self.open |= {client, server}
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self.pump, args=ends, daemon=True).start()

    def pump(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        reset(source), reset(sink)

    def cut(self, seconds):
        self.is_cut = True
        while self.open:
            reset(self.open.pop())
        time.sleep(seconds)
        self.is_cut = False


def reset(end):
    """Ends a connection at once, with whatever is in its buffers."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()


SCRIPT = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
kept = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jax.device_put(np.zeros(4, np.float32), kept)
f = jax.jit(lambda x: x + 1, out_shardings=kept)
print("READY.", flush=True)
calls = 0
while not STOP.exists():
    for _ in range(50):
        x = f(x)
    calls += 50
    assert np.asarray(x).tolist() == [calls] * 4, (np.asarray(x).tolist(), calls)
    fresh = jax.device_put(np.full(4, calls, np.float32), kept)
    assert np.asarray(f(fresh)).tolist() == [calls + 1] * 4
result(calls)
"""


@pytest.fixture
def cluster(processes):
    ports = start_controller(processes, "--expect", 1)
    proxy = Proxy(ports["workers"])
    flags = ["--controller", proxy.address, "--devices", 4, "--cache-dir", CACHE]
    return ports, proxy, processes.pathways("worker", *flags)


def is_ready(processes, ports):
    got = processes.pathways("status", "--controller", ports["workers"], "--json").finish(20)
    assert got.code == 0, got.err
    return [worker["state"] for worker in json.loads(got.out)["workers"]] == ["alive"]


def test_a_link_that_breaks_loses_nothing(processes, cluster):
    ports, proxy, worker = cluster
    stop = processes.folder / "stop"
    script = f"import pathlib; STOP = pathlib.Path({str(stop)!r})\n" + SCRIPT
    client = processes.python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=f"grpc://{ports['clients']}")
    client.wait_for(r"READY\.")
    for cut in range(CUTS):
        time.sleep(0.3)
        proxy.cut(CUT_SECONDS)
        worker.wait_for(rf"(?s)(is there again.*){{{cut + 1}}}", 20, "err")
    stop.touch()
    assert client.finish(60).value > 0
    assert proxy.accepted == 1 + CUTS
    assert worker.popen.poll() is None, worker.err


def test_a_link_that_stays_broken_is_a_lost_worker(processes, cluster):
    ports, proxy, worker = cluster
    deadline = time.monotonic() + 30
    while not is_ready(processes, ports):
        assert time.monotonic() < deadline, worker.err
        time.sleep(0.1)
    threading.Thread(target=proxy.cut, args=(60,), daemon=True).start()
    got = worker.finish(40)
    assert got.code != 0 and "could not be reached again within 15 s" in got.err, got.err
    assert not is_ready(processes, ports)
