"""The programs of the demo, on a model that is small enough to be quick."""

import pathlib

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"

SMALL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import jax, numpy as np
import pipeline_gpt, train_gpt
train_gpt.CONTEXT, train_gpt.WIDTH, train_gpt.BATCH = 8, 16, 8
data = np.random.default_rng(1).integers(0, len(train_gpt.ALPHABET), 1000)
STEPS = 12
"""

PIPELINE = SMALL + """
stages = pipeline_gpt.Pipeline(jax.devices(), train_gpt.make_optimizer(STEPS), seed=3)
where = [sorted({d.id for leaf in jax.tree.leaves(part) for d in leaf.devices()}) for part in stages.weights]
result({"losses": pipeline_gpt.train(data, STEPS, 10, 3, train_gpt.Progress(10)), "where": where})
"""

ONE_STAGE = SMALL + """
result(train_gpt.train(data, STEPS, 3, train_gpt.Progress(STEPS))[1])
"""


def test_a_pipeline_over_two_workers_has_the_losses_of_one_device(run_local, run_stock):
    got, wanted = run_local(2, 2, PIPELINE).value, run_stock(1, ONE_STAGE).value
    assert got["where"] == [[0, 1], [2, 3]]
    assert len(got["losses"]) == 10 and wanted[9] < wanted[0]
    for ours, theirs in zip(got["losses"], wanted):
        assert abs(ours - theirs) <= 1e-5 * theirs, (got["losses"], wanted)
