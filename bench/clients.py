"""Client of `pathways bench clients`: one of several that use the same devices. Its programs sleep, so they cost no CPU."""

import collections
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from served import serve

IN_FLIGHT = 16
KEPT = []


def mesh():
    return Mesh(np.array(jax.devices()), ("d",))


def sleeper(us):
    """Sleeps on every device at once, then adds 1."""

    def body(v):
        return jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(v.shape, v.dtype))(v, us=np.int64(us)) + 1.0

    return jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=False))


def zeros():
    return jax.device_put(np.zeros(len(jax.devices()), np.float32), NamedSharding(mesh(), P("d")))


PROGRAMS = {}


def program(us):
    if us not in PROGRAMS:
        PROGRAMS[us] = sleeper(us)
        jax.block_until_ready(PROGRAMS[us](zeros()))
    return PROGRAMS[us]


def prepare(us):
    program(us)
    return {"jax": jax.__version__, "devices": len(jax.devices())}


def work(us, seconds):
    """An endless chain for so long, always with programs in flight. Counts what is done when the time is over."""
    f, value, queue, done, calls = program(us), zeros(), collections.deque(), 0, 0
    end = time.perf_counter() + seconds
    while True:
        while len(queue) < IN_FLIGHT:
            value = f(value)
            calls += 1
            queue.append(value)
        queue.popleft().block_until_ready()
        if time.perf_counter() >= end:
            break
        done += 1
    got = np.asarray(value)
    if not (got == calls).all():
        raise ValueError(f"{calls} calls give {got}")
    return {"done": done}


def steps(us, seconds):
    """Steps one by one: the wall clock at the end of each, and how long it took."""
    f, value = program(us), zeros()
    end, taken = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        began = time.perf_counter()
        value = f(value)
        value.block_until_ready()
        taken.append((time.time(), time.perf_counter() - began))
    got = np.asarray(value)
    if not (got == len(taken)).all():
        raise ValueError(f"{len(taken)} steps give {got}")
    return {"steps": taken}


def burden(mib, us, programs):
    """Holds arrays and leaves programs in the queue."""
    sharding = NamedSharding(mesh(), P("d"))
    piece = 64
    make = jax.jit(lambda i: jax.numpy.full(piece << 18, i, np.float32), out_shardings=sharding)
    KEPT.extend(make(float(i)) for i in range(mib // piece))
    jax.block_until_ready(KEPT)
    f, value = program(us), zeros()
    for _ in range(programs):
        value = f(value)
    KEPT.append(value)
    return {"held": sum(array.nbytes for array in KEPT)}


serve({f.__name__: f for f in (prepare, work, steps, burden)})
