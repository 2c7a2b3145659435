"""Connections between controller and worker, or for array bytes, break: both sides keep what was on its way, and nothing is lost."""

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
            try:
                server = socket.create_connection(self.target)
            except OSError:
                reset(client)
                continue
            self.accepted += 1
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
        self.begin_cut()
        time.sleep(seconds)
        self.is_cut = False

    def begin_cut(self):
        self.is_cut = True
        while self.open:
            reset(self.open.pop())


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


MOVING = """
import jax, numpy as np
devices = jax.devices()
def check(got, sent):
    assert np.array_equal(np.asarray(got), sent), (np.asarray(got).ravel()[:4], sent.ravel()[:4])
print("READY.", flush=True)
turns = 0
while not STOP.exists():
    turns += 1
    small = [np.full(16, 4 * turns + i, np.float32) for i in range(len(devices))]
    large = np.arange(turns, turns + (2 << 20), dtype=np.float32)
    up = [jax.device_put(value, device) for value, device in zip(small, devices)]
    up_large = [jax.device_put(large, device) for device in devices]
    turned = [jax.device_put(value, devices[(i + 1) % len(devices)]) for i, value in enumerate(up + up_large)]
    [check(got, sent) for got, sent in zip(up + turned, small + small)]
    [check(got, large) for got in turned[len(devices):] + up_large]
result(turns)
"""


def test_connections_for_array_bytes_that_break_lose_nothing(processes):
    ports = start_controller(processes, "--expect", 2)
    proxies, workers = [], []
    for _ in range(2):
        port = free_port()
        proxies.append(Proxy(f"127.0.0.1:{port}"))
        flags = ["--data-port", port, "--advertise", proxies[-1].address]
        workers.append(processes.pathways("worker", "--controller", ports["workers"], "--devices", 2, "--cache-dir", CACHE, *flags))
    stop = processes.folder / "stop"
    script = f"import pathlib; STOP = pathlib.Path({str(stop)!r})\n" + MOVING
    client = processes.python(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=f"grpc://{ports['clients']}")
    client.wait_for(r"READY\.")
    for _ in range(CUTS):
        time.sleep(0.7)
        before = [proxy.accepted for proxy in proxies]
        for proxy in proxies:
            proxy.begin_cut()
        time.sleep(CUT_SECONDS)
        for proxy in proxies:
            proxy.is_cut = False
        deadline = time.monotonic() + 20
        while not all(proxy.accepted > count for proxy, count in zip(proxies, before)):
            assert client.popen.poll() is None and time.monotonic() < deadline, client.err
            time.sleep(0.05)
    time.sleep(0.5)
    stop.touch()
    assert client.finish(60).value > 1
    assert all(worker.popen.poll() is None for worker in workers)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
