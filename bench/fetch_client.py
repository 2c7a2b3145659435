"""Client of `bench/fetch.py`: reads arrays that are ready, each for the first time.

The null server computes nothing and learns from a program's name, `pwnull_<devices>x<results>`, what it has.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from served import serve, timed

DEVICES = jax.devices()
SPLIT = NamedSharding(Mesh(np.array(DEVICES), ("d",)), P("d"))
HOST = np.arange(4 << 20, dtype=np.float32)


@jax.jit
def pwnull_1x1(v):
    return v + 1.0


def read(arrays, wanted):
    jax.block_until_ready(arrays)
    got = []
    seconds = timed(lambda array: got.append(np.asarray(array)), arrays)
    return {"seconds": seconds, "right": all((values == wanted).all() for values in got)}


def small(times):
    """Four bytes, made on the last device."""
    one = jax.device_put(np.float32(1), DEVICES[-1])
    return read([pwnull_1x1(one) for _ in range(times)], 2.0)


def large(times):
    """16 MiB over all devices."""
    return read([jax.device_put(HOST, SPLIT) for _ in range(times)], HOST)


def wait(times):
    """What one round trip costs: a call that nothing is fetched from, until it is done."""
    one = jax.device_put(np.float32(1), DEVICES[-1])
    jax.block_until_ready(pwnull_1x1(one))
    return {"seconds": timed(lambda _: pwnull_1x1(one).block_until_ready(), range(times))}


serve({f.__name__: f for f in (small, large, wait)})
