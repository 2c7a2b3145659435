"""Client of `pathways bench copy`: large and parked uploads, large fetches, of one device."""

import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from served import serve

STATE = {}


def device():
    return SingleDeviceSharding(jax.devices()[0])


def prepare(mib):
    """The bytes to send, and a first transfer each way that warms up."""
    STATE["host"] = np.ones(mib << 20, np.uint8)
    upload()
    fetch()
    return {"jax": jax.__version__}


def upload():
    STATE.pop("array", None)
    began = time.perf_counter()
    STATE["array"] = jax.device_put(STATE["host"], device())
    STATE["array"].block_until_ready()
    return {"seconds": time.perf_counter() - began}


def fetch(check=False):
    # An array keeps what was fetched of it; its replica is a new array without that.
    array = STATE["array"].addressable_data(0)
    began = time.perf_counter()
    host = np.asarray(array)
    seconds = time.perf_counter() - began
    if host.nbytes != STATE["host"].nbytes or check and not (host == STATE["host"]).all():
        raise ValueError("other bytes came back than were sent")
    return {"seconds": seconds}


def parked(uploads, mib, programs, sleep_ms):
    """Uploads that nobody asks for yet: they come behind slept programs of the same session, which are not all ordered at once."""

    def slept(x):
        return jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, us=np.int64(sleep_ms * 1000))

    slept = jax.jit(slept)
    value = slept(jax.device_put(np.zeros(1, np.float32), device()))
    value.block_until_ready()
    hosts = [np.full(mib << 20, i % 251, np.uint8) for i in range(uploads)]
    began = time.perf_counter()
    for _ in range(programs):
        value = slept(value)
    arrays = [jax.device_put(host, device()) for host in hosts]
    asked = time.perf_counter() - began
    arrays[0].block_until_ready()
    first = time.perf_counter() - began
    jax.block_until_ready(arrays)
    ready = time.perf_counter() - began
    value.block_until_ready()
    wrong = [i for i, array in enumerate(arrays) if not (np.asarray(array) == i % 251).all()]
    if wrong:
        raise ValueError(f"uploads {wrong} have other bytes than were sent")
    return {"asked": asked, "first": first, "ready": ready}


serve({f.__name__: f for f in (prepare, upload, fetch, parked)})
