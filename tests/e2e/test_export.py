"""Programs that jax.export writes with stock JAX run here, and the other way round, with the same values."""

FUNCTIONS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P
x = np.arange(16, dtype=np.float32).reshape(4, 4)
rows = NamedSharding(jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)), P("i"))
"""

WRITE = FUNCTIONS + """
shape = jax.ShapeDtypeStruct((4, 4), np.float32)
(rank,) = export.symbolic_shape("b")
files = {
    "plain": export.export(jax.jit(lambda v: jnp.sin(v) @ v + v.sum()))(shape).serialize(vjp_order=1),
    "sharded": export.export(jax.jit(lambda v: v.T.sum(0) * 2, in_shardings=rows))(shape).serialize(),
    "open": export.export(jax.jit(lambda v: v.sum(1) + v.shape[0]))(jax.ShapeDtypeStruct((rank, 4), np.float32)).serialize(),
}
for name, data in files.items():
    open(f"{sys.argv[1]}.{name}", "wb").write(data)
result(sorted(files))
"""

CALL = FUNCTIONS + """
plain, sharded, open_ = (export.deserialize(bytearray(open(f"{sys.argv[1]}.{name}", "rb").read())) for name in ("plain", "sharded", "open"))
hexed = lambda a: np.asarray(a).tobytes().hex()
result({
    "platforms": list(plain.platforms), "call": hexed(plain.call(x)), "jit": hexed(jax.jit(lambda v: plain.call(v) + 1)(x)),
    "grad": hexed(jax.grad(lambda v: plain.call(v).sum())(x)), "sharded": hexed(sharded.call(jax.device_put(x, rows))),
    "devices": sharded.nr_devices, "open": [hexed(open_.call(x)), hexed(open_.call(x[:3]))],
})
"""


def test_exported_programs_cross_over(start_cluster, processes):
    ours = start_cluster(1, 2).client
    stock = lambda *arguments: processes.python(*arguments, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2", NPROC=16)
    for name, run in (("ours", ours), ("stock", stock)):
        assert run(WRITE, name).finish().value == ["open", "plain", "sharded"]
    got = {(by, at): run(CALL, by).finish().value for by in ("ours", "stock") for at, run in (("ours", ours), ("stock", stock))}
    assert got["stock", "stock"]["platforms"] == ["cpu"] and got["stock", "stock"]["devices"] == 2
    assert all(value == got["stock", "stock"] for value in got.values()), got
