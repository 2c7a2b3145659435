"""The programs of the demo, on a model that is small enough to be quick."""

import pathlib

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"

SMALL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import jax, numpy as np
import pipeline_gpt, train_gpt
train_gpt.CONTEXT, train_gpt.WIDTH, train_gpt.BATCH = 8, 16, 8
train_gpt.load_text = lambda: "def f(x): return x * 2; " * 50
STEPS, SEED = 12, 3
"""

PIPELINE = SMALL + """
import pathlib
pathlib.Path("beside.json").write_text(json.dumps({"losses": [4.0, 3.0]}))
sys.argv[1:] = ["--steps", str(STEPS), "--stop", "10", "--seed", str(SEED), "--json", "losses.json", "--beside", "beside.json"]
class Pipeline(pipeline_gpt.Pipeline):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        Pipeline.seen = self
pipeline_gpt.Pipeline = Pipeline
pipeline_gpt.main()
where = [sorted({d.id for leaf in jax.tree.leaves(part) for d in leaf.devices()}) for part in Pipeline.seen.weights]
result({**json.loads(pathlib.Path("losses.json").read_text()), "where": where, "plot": pathlib.Path("out/loss.png").stat().st_size})
"""

ONE_STAGE = SMALL + """
result(train_gpt.train(train_gpt.encode(train_gpt.load_text()), STEPS, SEED, train_gpt.Progress(STEPS))[1])
"""


def test_a_pipeline_over_two_workers_has_the_losses_of_one_device(run_local, run_stock):
    got, wanted = run_local(2, 2, PIPELINE).value, run_stock(1, ONE_STAGE).value
    assert got["devices"] == 4 and got["where"] == [[0, 1], [2, 3]] and got["plot"] > 0
    assert len(got["losses"]) == 10 and wanted[9] < wanted[0]
    for ours, theirs in zip(got["losses"], wanted):
        assert abs(ours - theirs) <= 1e-5 * theirs, (got["losses"], wanted)
