"""Client of `pathways bench dispatch`: the same small programs on whatever JAX is told to use.

The null server computes nothing and learns from a program's name, `pwnull_<devices>x<results>`, what it has.
"""

import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from served import median, serve, timed

CHAIN = 128
BLOCK_EVERY = 20
SAMPLES = 100


def named(function, devices, results):
    function.__name__ = f"pwnull_{devices}x{results}"
    return function


class Programs:
    """The programs on the first `n` devices."""

    def __init__(self, n):
        self.n = n
        self.mesh = Mesh(np.array(jax.devices()[:n]), ("d",))
        self.sharding = NamedSharding(self.mesh, P("d")) if n > 1 else SingleDeviceSharding(jax.devices()[0])
        self.cache = {}

    def zeros(self, sharding=None):
        return jax.device_put(np.zeros(self.n, np.float32), sharding or self.sharding)

    def get(self, name):
        if name not in self.cache:
            self.cache[name] = getattr(self, name)()
        return self.cache[name]

    def _collective(self, length):
        def step(v):
            return jax.lax.pmean(v, "d") + 1.0

        def body(v):
            return step(v) if length == 1 else jax.lax.fori_loop(0, length, lambda _, u: step(u), v)

        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        sharding = NamedSharding(self.mesh, P("d"))
        return jax.jit(named(lambda v: mapped(v), self.n, 1), out_shardings=sharding), self.zeros(sharding)

    def opbyop(self):
        """One scalar all-reduce and one scalar add over every device."""
        return self._collective(1)

    def fused(self):
        """The same, CHAIN times in one call."""
        return self._collective(CHAIN)

    def add(self):
        """x + 1 on one float per device."""
        return jax.jit(named(lambda x: x + 1, self.n, 1), out_shardings=self.sharding), self.zeros()

    def add100(self):
        """x + 1 on a hundred arrays of one float per device, one call."""
        many = jax.jit(named(lambda *xs: tuple(x + 1 for x in xs), self.n, 100), out_shardings=(self.sharding,) * 100)
        return (lambda xs: many(*xs)), tuple(self.zeros() for _ in range(100))

    def one(self):
        """x + 1 on one float of one device, whatever the number of devices."""
        single = SingleDeviceSharding(jax.devices()[0])
        return jax.jit(named(lambda x: x + 1, 1, 1), out_shardings=single), jax.device_put(np.zeros(1, np.float32), single)


PROGRAMS = {}


def programs(n):
    if n not in PROGRAMS:
        PROGRAMS[n] = Programs(n)
    return PROGRAMS[n]


def rate(devices, program, seconds, wait_every=BLOCK_EVERY):
    """Calls per second of a dependent chain, waited for now and then; `wait_every` 0 = only at the end."""
    f, start = programs(devices).get(program)
    value = start
    for _ in range(3):
        value = f(value)
    jax.block_until_ready(value)
    calls, began, thread = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        for _ in range(wait_every or BLOCK_EVERY):
            value = f(value)
        calls += wait_every or BLOCK_EVERY
        if wait_every:
            jax.block_until_ready(value)
    thread = time.thread_time() - thread
    jax.block_until_ready(value)
    elapsed = time.perf_counter() - began
    return {"value": calls / elapsed, "calls": calls + 3, "seconds": elapsed, "thread_us": thread / calls * 1e6}


def repeated(seconds, sample):
    """Median in µs of batches of samples, until the time is over. Only `sample` itself is timed."""
    samples, began = [], time.perf_counter()
    while not samples or time.perf_counter() - began < seconds:
        samples += sample()
    return {"value": median(samples) * 1e6, "calls": len(samples), "seconds": time.perf_counter() - began}


def call_and_wait(devices, program, seconds):
    f, value = programs(devices).get(program)
    jax.block_until_ready(f(value))
    return repeated(seconds, lambda: timed(lambda _: jax.block_until_ready(f(value)), range(SAMPLES // 4)))


def ready_values(devices):
    """Arrays that are ready at the server, which the client has not asked about."""
    f, start = programs(devices).get("one")
    values = [f(start) for _ in range(SAMPLES + 1)]
    jax.block_until_ready(values.pop())
    time.sleep(0.01)
    return values


def fetch(devices, seconds):
    return repeated(seconds, lambda: timed(np.asarray, ready_values(devices)))


def wait_ready(devices, seconds):
    return repeated(seconds, lambda: timed(jax.block_until_ready, ready_values(devices)))


def upload(devices, seconds):
    host, single = np.zeros(1, np.float32), SingleDeviceSharding(jax.devices()[0])
    return repeated(seconds, lambda: timed(lambda _: jax.device_put(host, single).block_until_ready(), range(SAMPLES // 4)))


def check(devices, computes):
    """What the chain computes is right, where anything is computed."""
    f, value = programs(devices).get("opbyop")
    for _ in range(CHAIN):
        value = f(value)
    got = np.asarray(value)
    if computes and not (got == CHAIN).all():
        raise ValueError(f"{CHAIN} calls of mean + 1 give {got}")
    return {"jax": jax.__version__, "devices": len(jax.devices())}


serve({f.__name__: f for f in (check, rate, call_and_wait, fetch, wait_ready, upload)})
