"""What compiled programs tell about themselves: their text and what they cost. Stock JAX is the measure."""

PROGRAMS = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxlib import _hlo

jax.config.update("jax_traceback_in_locations_limit", 0)
mesh = jax.make_mesh((len(jax.devices()),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("i"))
x = np.ones((8, 8), np.float32)
programs = {
    "matmul": jax.jit(lambda x: jnp.sin(x) @ x),
    "donated": jax.jit(lambda x: x * 2 + 1, donate_argnums=0),
    "loop": jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * 2 + i, x)),
    "sum": jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()), in_shardings=rows),
    "local": jax.jit(lambda x: jnp.sin(x) + 1, in_shardings=rows, out_shardings=rows),
}
COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
"""

ASK = PROGRAMS + """
got = {}
for name, program in programs.items():
    compiled = program.lower(x).compile()
    text = compiled.as_text()
    module = _hlo.hlo_module_from_text(text)
    once = lambda: "".join(sorted(module.to_string().split("\\n\\n")))
    cost = compiled.cost_analysis()
    got[name] = {
        "name": module.name, "collectives": [c for c in COLLECTIVES if c in text], "donates": "input_output_alias" in text,
        "opcodes": sorted(set(re.findall(r" ([a-z-]+)\\(", text))),
        "flops": cost["flops"], "transcendentals": cost.get("transcendentals"), "positive": cost["bytes accessed"] > 0,
    }
result(got)
"""


def test_text_and_cost_are_those_of_stock_jax(run_local, run_stock):
    got, stock = run_local(1, 4, ASK).value, run_stock(4, ASK).value
    assert got == stock
    assert got["sum"]["collectives"] == ["all-reduce"] and got["local"]["collectives"] == [] and got["donated"]["donates"]
    assert got["matmul"]["flops"] == 1024.0 and got["matmul"]["transcendentals"] == 64.0


ANY_WORKER = PROGRAMS + """
here, there = jax.devices()[0], jax.devices()[-1]
jitted = programs["matmul"]
texts = [jitted.lower(jax.device_put(x, d)).compile().as_text() for d in (here, there)]
for d in (here, there):
    assert np.asarray(jitted(jax.device_put(x, d))).shape == (8, 8)
result({"same": texts[0] == texts[1], "start": texts[0][:10]})
"""


def test_each_worker_answers_for_its_programs(run_local):
    assert run_local(2, 1, ANY_WORKER).value == {"same": True, "start": "HloModule "}
