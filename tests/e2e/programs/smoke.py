"""A little of everything, small enough for any JAX release; prints `smoke ok` and the release."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

devices = jax.devices()
assert len(devices) == 4, devices
mesh = jax.sharding.Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, P("i"))

x = jax.device_put(np.arange(8, dtype=np.float32), split)
assert np.asarray(jax.jit(lambda v: v * 2 + v.sum())(x)).tolist() == [28.0 + 2 * i for i in range(8)]
assert float(jax.grad(lambda v: (v**2).sum())(jnp.array([3.0]))[0]) == 6.0
step = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "i") / 4 + 1, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
y = jax.device_put(np.zeros(4, np.float32), split)
for _ in range(16):
    y = step(y)
assert np.asarray(y).tolist() == [16.0] * 4
donated = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
assert x.is_deleted() and float(donated[7]) == 8.0
assert np.asarray(jax.device_put(donated, devices[3])).tolist() == [float(i) for i in range(1, 9)]
assert jax.random.normal(jax.random.key(0), (2, 2)).shape == (2, 2)
try:
    jax.jit(lambda v: jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(v.shape, v.dtype))(v))(y).block_until_ready()
    raise SystemExit("a program with an unknown target ran")
except jax.errors.JaxRuntimeError as error:
    assert "no_such_target" in str(error), error
print("smoke ok, jax", jax.__version__, flush=True)
