"""Every collective that JAX can ask for, in groups, loops and branches: sums of results, to be compared between backends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

flat = jax.make_mesh((8,), ("i",))
grid = jax.make_mesh((2, 4), ("a", "b"))
answers = {}


def run(name, f, mesh, spec, x, out=None):
    """Keeps the result of `f` mapped over the shards of `x`."""
    out = spec if out is None else out
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))
    got = f(jax.device_put(x, NamedSharding(mesh, spec)))
    answers[name] = np.asarray(got).astype(np.complex128 if np.iscomplexobj(got) else np.float64).tolist()


rows = np.arange(64, dtype=np.float32).reshape(8, 8)
for dtype in (np.float32, np.float16, jnp.bfloat16, np.int32, np.int8, np.uint8, np.uint32, np.complex64, np.bool_):
    x = (rows % 7).astype(dtype)
    name = np.dtype(dtype).name
    run(f"psum {name}", lambda v: lax.psum(v, "i"), flat, P("i"), x)
    run(f"all_gather {name}", lambda v: lax.all_gather(v, "i"), flat, P("i"), x, P(None, "i"))
    if name not in ("complex64", "bool"):
        run(f"pmax {name}", lambda v: lax.pmax(v, "i"), flat, P("i"), x)
        run(f"pmin {name}", lambda v: lax.pmin(v, "i"), flat, P("i"), x)
nan = rows.copy()
nan[3, 2] = np.nan
run("pmax nan", lambda v: jnp.isnan(lax.pmax(v, "i")), flat, P("i"), nan)

run("mean", lambda v: lax.pmean(v, "i"), flat, P("i"), rows)
run("sum of a tree", lambda v: sum(lax.psum((v, 2 * v, v[:, :2].sum() + v), "i")), flat, P("i"), rows)
run("permute", lambda v: lax.ppermute(v, "i", [(k, (k + 3) % 8) for k in range(8)]), flat, P("i"), rows)
run("permute some", lambda v: lax.ppermute(v, "i", [(0, 5), (5, 0), (2, 7)]), flat, P("i"), rows)
run("all_to_all", lambda v: lax.all_to_all(v, "i", 1, 1, tiled=True), flat, P("i"), rows)
run("all_to_all axes", lambda v: lax.all_to_all(v, "i", 1, 0, tiled=True), flat, P("i"), rows)
run("psum_scatter", lambda v: lax.psum_scatter(v, "i", scatter_dimension=1, tiled=True), flat, P("i"), rows)
run("gather minor", lambda v: lax.all_gather(v, "i", axis=1, tiled=True), flat, P(None, "i"), rows, P(None, "i"))
run("index", lambda v: v * 0 + lax.axis_index("i"), flat, P("i"), rows)
run("index grid", lambda v: v * 0 + 10 * lax.axis_index("a") + lax.axis_index("b"), grid, P("a", "b"), rows)
run("rows", lambda v: lax.psum(v, "b"), grid, P("a", "b"), rows)
run("columns", lambda v: lax.psum(v, "a"), grid, P("a", "b"), rows)
run("both", lambda v: lax.psum(lax.psum(v, "a"), "b"), grid, P("a", "b"), rows)
run("gather columns", lambda v: lax.all_gather(v, "a", axis=1, tiled=True), grid, P("a", "b"), rows)
run("pairs", lambda v: lax.psum(v, "i", axis_index_groups=[[0, 7], [1, 6], [2, 5], [3, 4]]), flat, P("i"), rows)

run("loop", lambda v: lax.fori_loop(0, 10, lambda _, w: lax.pmean(w, "i") + 1, v), flat, P("i"), rows)
run("scan", lambda v: lax.scan(lambda c, _: (lax.ppermute(c, "i", [(k, (k + 1) % 8) for k in range(8)]), lax.psum(c, "i").sum()), v, None, length=5)[0],
    flat, P("i"), rows)
run("branch", lambda v: lax.cond(lax.psum(v, "i").sum() > 3, lambda w: lax.psum(w, "i"), lambda w: lax.pmax(w, "i"), v), flat, P("i"), rows)
run("while", lambda v: lax.while_loop(lambda w: lax.psum(w, "i").max() < 1e4, lambda w: 2 * w + 1, v), flat, P("i"), rows)

big = np.random.default_rng(0).integers(-4, 5, (8, 300_001)).astype(np.float32)
big = jax.device_put(big, NamedSharding(flat, P("i")))
f = jax.jit(jax.shard_map(lambda v: lax.psum(v, "i"), mesh=flat, in_specs=P("i"), out_specs=P("i")))
answers["big"] = np.asarray(f(big)).astype(np.float64).sum(1).tolist() + np.asarray(f(big))[:, 300_000].tolist()

# What the partitioner adds by itself.
auto = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(auto, P(*spec)))
a, b = put(rows, "a", "b"), put(rows.T.copy(), "b", "a")
for name, f in {
    "matmul": lambda a, b: a @ b,
    "sort": lambda a, b: jnp.sort(-a, axis=0),
    "roll": lambda a, b: jnp.roll(a, 3, axis=1),
    "cumsum": lambda a, b: jnp.cumsum(a, axis=1),
    "transposed": lambda a, b: jax.lax.with_sharding_constraint(a + 1, NamedSharding(auto, P("b", "a"))),
}.items():
    answers[name] = np.asarray(jax.jit(f)(a, b)).astype(np.float64).tolist()


@functools.partial(jax.jit, donate_argnums=0)
def step(w, x):
    return w - 0.01 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


w = put(np.ones((8, 8), np.float32), None, "b")
for _ in range(5):
    w = step(w, put(rows / 64, "a", None))
answers["training"] = np.asarray(w).astype(np.float64).tolist()

result({k: [[c.real, c.imag] for c in np.ravel(v)] if np.iscomplexobj(v) else v for k, v in answers.items()})
