"""Client of `bench/many.py`: many programs, many arrays, many of both that come and go, on all devices of whatever JAX is told to use."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from served import serve, timed

MESH = Mesh(np.array(jax.devices()), ("d",))
SPLIT = NamedSharding(MESH, P("d"))
LIVE, JOBS = [], {}
AT_ONCE = 500


def zeros():
    return jax.device_put(np.zeros(len(jax.devices()), np.float32), SPLIT)


def job(number, us):
    """A program of its own: sleeps on every device if `us` says so, and adds its number."""

    def body(v):
        if us:
            v = jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(v.shape, v.dtype))(v, us=np.int64(us))
        return v + number

    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=False))


def jobs(count, us, times):
    """Seconds for `count` programs, each on an array of its own, from the first call until all results are there."""
    if (count, us) not in JOBS:
        JOBS[count, us] = [(job(float(i), us), zeros()) for i in range(count)]
        jax.block_until_ready([f(x) for f, x in JOBS[count, us]])
    work = JOBS[count, us]

    def all_of_them(_):
        nonlocal results
        results = jax.block_until_ready([f(x) for f, x in work])

    results = []
    seconds = timed(all_of_them, range(times))
    for i, result in enumerate(results):
        assert (np.asarray(result) == i).all(), (i, result)
    return {"seconds": seconds}


@jax.jit
def add(v):
    return v + 1.0


def step(count):
    """Seconds of single steps, each waited for."""
    value = jax.block_until_ready(add(zeros()))

    def one(_):
        nonlocal value
        value = add(value).block_until_ready()

    seconds = timed(one, range(count))
    assert (np.asarray(value) == count + 1).all(), value
    return {"seconds": seconds}


def hold(count):
    """`count` arrays that stay, each over all devices and with its own value; none lets go of them."""
    LIVE.clear()
    make = jax.jit(lambda v: [v + i for i in range(AT_ONCE)], out_shardings=SPLIT)
    for first in range(0, count, AT_ONCE):
        LIVE.extend(make(jax.device_put(np.full(len(jax.devices()), first, np.float32), SPLIT)))
        LIVE[-1].block_until_ready()
    for i in range(0, len(LIVE), max(len(LIVE) // 10, 1)):
        assert (np.asarray(LIVE[i]) == i).all(), (i, LIVE[i])
    gc.freeze()  # a collection that looks at all of them is no property of the devices
    return {"live": len(LIVE)}


def churn(count, upload_every):
    """Arrays that are made and dropped, one after the other; some come from the host, and a few of them are read."""
    host = np.zeros(len(jax.devices()), np.float32)
    for i in range(count):
        if i % upload_every == 0:
            source, number = jax.device_put(host + i, SPLIT), i
        result = add(source)
        if i % (100 * upload_every) == 0:
            assert (np.asarray(result) == number + 1).all(), (number, result)
    result.block_until_ready()
    del source, result
    gc.collect()
    # Deletions leave with later requests.
    jax.block_until_ready(add(zeros()))
    return {}


if __name__ == "__main__":
    serve({"jobs": jobs, "step": step, "hold": hold, "churn": churn})
