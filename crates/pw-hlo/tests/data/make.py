"""Makes NAME.vhlo and NAME.opts of this folder, with jax 0.10.2 on 8 virtual CPU devices:

    python make.py

NAME.bin, the optimized module, is then made from them by the plugin: see README.md.
"""

import os
import pathlib

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir import ir

# No path of the machine.
jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")

HERE = pathlib.Path(__file__).parent
VERSION = "1.9.0"


class Captured(Exception):
    pass


def write(name, module, options):
    code = _jax.mlir.serialize_portable_artifact(mlir.module_to_bytecode(module), VERSION, True)
    (HERE / f"{name}.vhlo").write_bytes(code)
    (HERE / f"{name}.opts").write_bytes(options.SerializeAsString())
    print(name, len(code))


def capture(name, fn, *args, **jit_args):
    """Writes the module and the options that JAX would compile."""

    def take(backend, module, executable_devices, options, *rest, **kwargs):
        write(name, module, options)
        raise Captured

    real = compiler.backend_compile_and_load
    compiler.backend_compile_and_load = take
    try:
        jax.jit(fn, **jit_args).lower(*args).compile()
    except Captured:
        pass
    finally:
        compiler.backend_compile_and_load = real


def text(name, source, replicas, partitions):
    """Writes a module given as StableHLO text, for so many replicas and partitions."""
    assignment = np.arange(replicas * partitions).reshape(replicas, partitions)
    options = compiler.get_compile_options(
        num_replicas=replicas,
        num_partitions=partitions,
        device_assignment=assignment,
    )
    with mlir.make_ir_context():
        write(name, ir.Module.parse(source), options)


def spec(shape, sharding, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


mesh8 = Mesh(np.array(jax.devices()), ("x",))
mesh24 = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
x8 = NamedSharding(mesh8, P("x"))
ab = NamedSharding(mesh24, P("a", "b"))
rep24 = NamedSharding(mesh24, P())


def mapped(fn, mesh=mesh8, ins=P("x"), outs=P("x")):
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


capture("psum8", mapped(lambda x: lax.psum(x, "x"), outs=P()), spec((32,), x8))
capture(
    "gather24",
    mapped(lambda x: lax.all_gather(x, "b", axis=1, tiled=True), mesh24, P("a", "b"), P("a", None)),
    spec((6, 12), ab),
)
capture(
    "scatter8",
    mapped(lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)),
    spec((24, 16), x8),
)
capture(
    "alltoall8",
    mapped(lambda x: lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True)),
    spec((16, 24), x8, jnp.int32),
)
capture(
    "permute8",
    mapped(lambda x: lax.ppermute(x, "x", [(0, 3), (3, 5), (5, 0), (6, 7)])),
    spec((8, 5), x8, jnp.uint8),
)


def looped(x):
    return lax.fori_loop(0, 5, lambda _, y: lax.psum(y, "x") * 0.25 + y, x)


capture("loop8", mapped(looped), spec((16,), x8))
capture(
    "variadic24",
    mapped(
        lambda x, y, z: (lax.psum(x, "a"), lax.psum(y, "a"), lax.pmax(z, "b")),
        mesh24,
        (P("a", "b"), P("a"), P("b")),
        (P(None, "b"), P(), P()),
    ),
    spec((6, 8), ab),
    spec((10,), NamedSharding(mesh24, P("a"))),
    spec((8,), NamedSharding(mesh24, P("b")), jnp.int32),
)
capture(
    "index24",
    mapped(
        lambda x: x + lax.axis_index("a") * 10 + lax.axis_index("b"), mesh24, P("a", "b"), P("a", "b")
    ),
    spec((4, 4), ab, jnp.int32),
)


def branch(x):
    total = lax.psum(x, "x")
    return lax.cond(total[0] > 0, lambda: lax.pmin(x, "x") + 1, lambda: lax.psum(x * total, "x"))


capture("cond8", mapped(branch), spec((24,), x8))


def kinds(f, b, i, p):
    return (
        lax.pmax(f, "x"),
        lax.psum(b, "x"),
        lax.pmin(i, "x"),
        lax.all_gather(p, "x", tiled=True),
        lax.psum(f.astype(jnp.complex64) * (1 + 2j), "x"),
    )


capture(
    "kinds8",
    mapped(kinds, ins=(P("x"),) * 4, outs=(P(),) * 5),
    spec((24,), x8),
    spec((24,), x8, jnp.bfloat16),
    spec((24,), x8, jnp.int32),
    spec((24,), x8, jnp.bool_),
)
# Made by the partitioner, which names its groups by mesh axes.
capture(
    "layers24",
    lambda x, w, v: jnp.tanh(x @ w) @ v,
    spec((8, 12), NamedSharding(mesh24, P("a"))),
    spec((12, 16), NamedSharding(mesh24, P(None, "b"))),
    spec((16, 4), NamedSharding(mesh24, P("b"))),
    out_shardings=NamedSharding(mesh24, P("a")),
)
capture(
    "any24",
    lambda x, y: (x.any(axis=1), x.all(), y.prod(axis=0)),
    spec((8, 12), ab, jnp.bool_),
    spec((8, 12), ab),
    out_shardings=(rep24, rep24, NamedSharding(mesh24, P("b"))),
)
capture("reshard24", lambda x: x.T + 1, spec((8, 16), ab), out_shardings=ab)

REPLICAS = """
module @replicas attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 2 : i32} {
  func.func public @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<ui32>, tensor<4xf32>) {
    %a = "stablehlo.all_reduce"(%x) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    %b = "stablehlo.all_reduce"(%x) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 3], [1, 2]]> : tensor<2x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>} : (tensor<4xf32>) -> tensor<4xf32>
    %c = "stablehlo.all_reduce"(%x) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.multiply %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }) {replica_groups = dense<[[0, 3, 5, 6], [1, 2, 4, 7]]> : tensor<2x4xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
        use_global_device_ids} : (tensor<4xf32>) -> tensor<4xf32>
    %d = stablehlo.replica_id : tensor<ui32>
    %e = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    return %a, %b, %c, %d, %e : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<ui32>, tensor<4xf32>
  }
}
"""
text("replicas42", REPLICAS, 4, 2)


def reductions(kinds):
    """A program that reduces its parameters, one after the other, over eight replicas; each has five elements."""
    params, body, results, types = [], [], [], []
    for i, (op, element) in enumerate(kinds):
        params.append(f"%x{i}: tensor<5x{element}>")
        body.append(
            f"""%y{i} = "stablehlo.all_reduce"(%x{i}) ({{
              ^bb0(%l: tensor<{element}>, %r: tensor<{element}>):
                %s = stablehlo.{op} %l, %r : tensor<{element}>
                stablehlo.return %s : tensor<{element}>
            }}) {{replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>}}
              : (tensor<5x{element}>) -> tensor<5x{element}>"""
        )
        results.append(f"%y{i}")
        types.append(f"tensor<5x{element}>")
    return f"""module @reductions attributes {{mhlo.num_replicas = 8 : i32, mhlo.num_partitions = 1 : i32}} {{
      func.func public @main({", ".join(params)}) -> ({", ".join(types)}) {{
        {" ".join(body)}
        return {", ".join(results)} : {", ".join(types)}
      }}
    }}"""


ARITHMETIC = ["add", "multiply", "minimum", "maximum"]
FLOATS = [(op, e) for e in ["f32", "f64", "f16", "bf16"] for op in ARITHMETIC]
INTEGERS = [(op, e) for e in ["i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64"] for op in ARITHMETIC]
OTHERS = [(op, e) for e in ["complex<f32>", "complex<f64>"] for op in ["add", "multiply"]]
OTHERS += [(op, "i1") for op in ["add", "multiply", "minimum", "maximum", "and", "or"]]
text("floats8", reductions(FLOATS), 8, 1)
text("integers8", reductions(INTEGERS), 8, 1)
text("others8", reductions(OTHERS), 8, 1)
