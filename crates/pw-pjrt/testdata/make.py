"""Makes the program files of this folder, with jax 0.10.2 on 8 virtual CPU devices:

    python make.py

Each program gives NAME.vhlo (portable artifact) and NAME.opts (JAX's own CompileOptionsProto).
"""

import os
import pathlib

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax

HERE = pathlib.Path(__file__).parent
VERSION = "1.9.0"


class Captured(Exception):
    pass


def capture(name, fn, *args, **jit_args):
    """Writes the module and the options that JAX would compile."""

    def take(backend, module, executable_devices, options, *rest, **kwargs):
        code = _jax.mlir.serialize_portable_artifact(
            mlir.module_to_bytecode(module), VERSION, True
        )
        (HERE / f"{name}.vhlo").write_bytes(code)
        (HERE / f"{name}.opts").write_bytes(options.SerializeAsString())
        raise Captured

    real = compiler.backend_compile_and_load
    compiler.backend_compile_and_load = take
    try:
        jax.jit(fn, **jit_args).lower(*args).compile()
    except Captured:
        print(name, (HERE / f"{name}.vhlo").stat().st_size, (HERE / f"{name}.opts").stat().st_size)
    finally:
        compiler.backend_compile_and_load = real


def spec(shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


mesh8 = Mesh(np.array(jax.devices()), ("x",))
mesh42 = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
x8 = NamedSharding(mesh8, P("x"))
rep8 = NamedSharding(mesh8, P())
host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def sleep(x):
    call = jax.ffi.ffi_call("pw.sleep_us", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, us=np.int64(20000))


def heavy(x):
    return jax.lax.fori_loop(0, 12, lambda _, y: jnp.tanh(y @ y), x)


capture("add1", lambda x: x + 1, spec((4,)))
capture("two1", lambda x, y: (x @ y, (x.sum(), y.astype(jnp.int32))), spec((2, 3)), spec((3, 2)))
capture("add8", lambda x: x + 1, spec((16, 3), sharding=x8))
capture("replicated8", lambda x: (x * 2, x.sum()), spec((16, 3), sharding=x8), out_shardings=(rep8, rep8))
capture(
    "psum8",
    jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh8, in_specs=P("x"), out_specs=P()),
    spec((32,), sharding=x8),
)
capture(
    "partial42",
    lambda x: x.T * 2,
    spec((8, 6), jnp.bfloat16, NamedSharding(mesh42, P("a"))),
    out_shardings=NamedSharding(mesh42, P("b", "a")),
)
capture("donate1", lambda a, b: a + b, spec((64,)), spec((64,)), donate_argnums=0)
capture(
    "leftover8",
    lambda a, b: (a * 2, b.sum()),
    spec((16,), sharding=x8),
    spec((32,), sharding=x8),
    donate_argnums=(0, 1),
)
capture("host1", lambda x: (x * 2, x + 1), spec((4,)), out_shardings=(host, None))
capture("noout1", lambda x: None, spec((4,)), keep_unused=True)
capture("noout8", lambda x: None, spec((16,), sharding=x8), keep_unused=True)
capture("int4", lambda x: x + jnp.int4(1), spec((3, 5), jnp.int4))
capture("mixed", lambda p, h, z: (~p, h * 2, z.sum()), spec((3,), jnp.bool_), spec((), jnp.complex64), spec((0, 4)))
capture("sleep", sleep, spec((4,)))
capture("heavy", heavy, spec((256, 256)))
