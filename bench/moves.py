"""Client of `pathways bench transfer`: moves from the devices of one worker to those of another."""

import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from served import serve

STATE = {}

# Of the small arrays: each is a fetch of its own.
CHECK_EVERY = 50


def sharding(host, devices):
    """Over all devices of a worker."""
    return NamedSharding(Mesh(np.array(jax.devices()[host * devices : (host + 1) * devices]), ("d",)), P("d"))


def prepare(devices, mib, arrays, bytes_each):
    """Arrays on worker 0, and a first move of each that warms up."""
    STATE["from"], STATE["to"] = sharding(0, devices), sharding(1, devices)
    large = np.arange(mib << 18, dtype=np.uint32)
    many = [np.full(bytes_each, i % 251, np.uint8) for i in range(arrays)]
    equal = np.concatenate(many)
    for name, host in (("large", large), ("many", many), ("equal", equal)):
        STATE[name] = jax.block_until_ready(jax.device_put(host, STATE["from"]))
        move(name)
        pairs = [(STATE["moved"], host)] if name != "many" else list(zip(STATE["moved"], host))[::CHECK_EVERY]
        if not all(np.array_equal(np.asarray(moved), sent) for moved, sent in pairs):
            raise ValueError(f"{name}: other bytes came than were sent")
    return {"jax": jax.__version__}


def move(what):
    STATE.pop("moved", None)
    began = time.perf_counter()
    STATE["moved"] = jax.device_put(STATE[what], STATE["to"])
    jax.block_until_ready(STATE["moved"])
    return {"seconds": time.perf_counter() - began}


serve({f.__name__: f for f in (prepare, move)})
