"""Models sharded over a mesh of the devices of several workers: the partitioner's own collectives, and the numbers of one process."""

import pathlib

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"

# The model of the demo, small: heads and hidden units are split over one axis, as in Megatron, the batch over the other.
TENSOR_PARALLEL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import jax, numpy as np
import train_gpt as gpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
gpt.CONTEXT, gpt.WIDTH, gpt.BATCH = 16, 32, 8
gpt.load_text = lambda: "def f(x): return x * 2; " * 50
STEPS, SEED = 8, 3
mesh = Mesh(np.array(jax.devices()).reshape(ROWS, -1), ("batch", "tensor"))
PLACES = {{"qkv": P(None, "tensor"), "out": P("tensor", None), "up": P(None, "tensor"), "down": P("tensor", None), "head": P(None, None)}}
def place(path, leaf):
    name = [key.key for key in path if hasattr(key, "key")][-1]
    return NamedSharding(mesh, PLACES.get(name, P()) if leaf.ndim == 2 else P())
optimizer = gpt.make_optimizer(STEPS)
weights = jax.jit(gpt.init_weights)(jax.random.key(SEED))
weights = jax.tree_util.tree_map_with_path(lambda path, leaf: jax.device_put(leaf, place(path, leaf)), weights)
state, step, losses = jax.jit(optimizer.init)(weights), gpt.make_step(optimizer), []
for batch in gpt.batches(gpt.encode(gpt.load_text()), STEPS, SEED):
    inputs, targets = jax.device_put(batch, NamedSharding(mesh, P("batch")))
    weights, state, loss = step(weights, state, inputs, targets)
    losses.append(loss)
up = weights["blocks"][0]["up"]
shard = up.addressable_shards[0].data.shape
result({{"losses": [float(x) for x in losses], "up": np.asarray(up).tolist(), "shard": shard, "devices": len(up.devices())}})
"""


@pytest.mark.parametrize("rows", [1, 2])
def test_a_transformer_split_by_tensors_trains_as_on_one_process(run_local, run_stock, rows):
    source = TENSOR_PARALLEL.replace("ROWS", str(rows))
    got, wanted = run_local(2, 4, source).value, run_stock(8, source).value
    assert got["devices"] == 8 and got["shard"] == wanted["shard"] == [32, 128 * rows // 8]
    assert wanted["losses"][-1] < wanted["losses"][0]
    np.testing.assert_allclose(got["losses"], wanted["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["up"], wanted["up"], rtol=1e-3, atol=1e-5)

