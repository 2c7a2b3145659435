"""A worker is killed: what lived there is lost, and nothing else; it comes back and works again."""

import os
import signal

# `cargo xtask accept recovery` plays more of them.
ROUNDS = int(os.environ.get("PATHWAYS_TEST_ROUNDS", "3"))

SCRIPT = """
import time
import jax, jax.numpy as jnp, numpy as np
devices = jax.devices()
step = [jax.jit(lambda v: v + 1, out_shardings=jax.sharding.SingleDeviceSharding(d)) for d in devices]
put = lambda value, i: jax.device_put(np.full(8, value, np.float32), devices[i])
kept = [put(i, i) for i in range(3)]
[jax.block_until_ready(step[i](kept[i])) for i in range(3)]
out = []
for turn in range(ROUNDS):
    victim = turn % 3
    print(f"KILL {turn}.", flush=True)
    began = time.monotonic()
    lost, restored, others = None, None, 0
    while restored is None and time.monotonic() - began < 60:
        for i in range(3):
            if i != victim:
                kept[i] = step[i](kept[i])
                others += 1
        assert [float(np.asarray(kept[i])[0]) for i in range(3) if i != victim]
        try:
            np.asarray(step[victim](kept[victim]))
        except jax.errors.JaxRuntimeError as error:
            lost = lost or str(error)
            try:
                kept[victim].block_until_ready()  # reading it could give what this process read before
                lost = "its array is still there"
            except jax.errors.JaxRuntimeError as error:
                lost = lost if "DATA_LOSS" in lost else str(error)
            try:
                fresh = put(100 + turn, victim)
                restored = np.asarray(step[victim](fresh)).tolist()
                kept[victim] = fresh
            except jax.errors.JaxRuntimeError as error:
                assert "lost" in str(error), error
                time.sleep(0.05)
    out.append({"lost": lost, "restored": restored, "others": others > 0, "seconds": time.monotonic() - began})
result(out)
"""


def test_a_killed_worker_comes_back_and_the_others_do_not_notice(start_cluster):
    cluster = start_cluster(3, 1)
    client = cluster.client(SCRIPT.replace("ROUNDS", str(ROUNDS)))
    for turn in range(ROUNDS):
        client.wait_for(rf"KILL {turn}\.")
        workers = {w["slot"]: w for w in cluster.status()["workers"]}
        os.kill(workers[turn % 3]["pid"], signal.SIGKILL)
    rounds = client.finish(60 + 10 * ROUNDS).value
    print("seconds until ready again:", sorted(round(r["seconds"], 2) for r in rounds))
    assert len(rounds) == ROUNDS
    for turn, got in enumerate(rounds):
        assert "DATA_LOSS" in got["lost"] and f"worker {turn % 3} " in got["lost"], got
        assert got["restored"] == [101.0 + turn] * 8 and got["others"]
