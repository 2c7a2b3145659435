"""Which bytes go where: an upload straight to its sharding, one copy per worker, moves between workers past everybody else."""

import pathlib
import re

MIB = 1 << 20

UPLOAD = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
split = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
jax.block_until_ready(jax.device_put(np.zeros(8, np.uint8), split))
print("BEGUN.", flush=True)
while not STOP.exists():
    time.sleep(0.01)
host = np.arange(1 << 27, dtype=np.uint64)  # 1 GiB
x = jax.block_until_ready(jax.device_put(host, split))
ends = [(int(part[0]), int(part[-1])) for part in (np.asarray(s.data[::(1 << 24) - 1]) for s in x.addressable_shards)]
print("DONE.", flush=True)
STOP.unlink()
while not STOP.exists():
    time.sleep(0.01)
result(ends)
"""


def memory(pid, which):
    """VmRSS or VmHWM (the peak) of a process, in bytes."""
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(rf"{which}:\s+(\d+) kB", file.read())[1]) * 1024


def children(pid):
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def moved(cluster):
    return [worker["bytes_moved"] for worker in cluster.status()["workers"]]


def difference(after, before):
    return [{key: a[key] - b[key] for key in a if a[key] != b[key]} for a, b in zip(after, before)]


def test_an_upload_goes_straight_to_its_sharding(start_cluster, tmp_path):
    stop = tmp_path / "stop"
    cluster = start_cluster(1, 8, "--device-memory", "256MiB")
    client = cluster.client(f"import pathlib, time\nSTOP = pathlib.Path({str(stop)!r})\n" + UPLOAD, JAX_ENABLE_X64=1)
    client.wait_for("BEGUN")
    before = moved(cluster)
    worker = cluster.status()["workers"][0]["pid"]
    others = [cluster.process.pid, *(p for p in children(cluster.process.pid) if p != worker)]
    rss = {pid: memory(pid, "VmRSS") for pid in [worker, *others]}
    stop.touch()
    client.wait_for("DONE", 120)
    status = cluster.status()["workers"][0]
    # 8 × two ends of 8 bytes were read back.
    assert difference(moved(cluster), before) == [{"from_clients": 1024 * MIB, "to_clients": 8 * 2 * 8}]
    assert all(128 * MIB <= used <= 129 * MIB for used in status["bytes_in_use"]), status["bytes_in_use"]
    assert memory(worker, "VmHWM") - rss[worker] <= 8 * 140 * MIB
    grown = [(memory(pid, "VmHWM") - rss[pid]) // MIB for pid in others]
    assert max(grown) <= 100, f"MiB: {grown}"
    stop.touch()
    part = 1 << 24
    assert client.finish().value == [[i * part, (i + 1) * part - 1] for i in range(8)]


STEPS = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
def over(devices, *spec): return NamedSharding(Mesh(devices, ("d",)), P(*spec))
def step(name):
    print(name + ".", flush=True)
    while not (FOLDER / name).exists():
        time.sleep(0.01)
host = np.arange(8 << 20, dtype=np.float32).reshape(8, -1)  # 32 MiB
step("begin")
copies = jax.block_until_ready(jax.device_put(host, over(devices)))
step("replicated")
halves = jax.block_until_ready(jax.device_put(host, over(devices, "d")))
step("split")
there = jax.block_until_ready(jax.device_put(host, over(devices[:4], "d")))
step("one")
moved = jax.block_until_ready(jax.device_put(there, over(devices[4:], "d")))
step("moved")
shard = np.asarray(moved.addressable_shards[1].data)
step("read")
result(bool((np.asarray(moved) == host).all() and (np.asarray(halves) == host).all() and (shard == host[2:4]).all()))
"""


def test_bytes_go_to_the_workers_that_need_them_and_nowhere_else(start_cluster, tmp_path):
    cluster = start_cluster(2, 4)
    client = cluster.client(f"import pathlib, time\nFOLDER = pathlib.Path({str(tmp_path)!r})\n" + STEPS)
    before, seen = None, {}
    for name in ("begin", "replicated", "split", "one", "moved", "read"):
        client.wait_for(rf"{name}\.")
        after = moved(cluster)
        seen[name] = difference(after, before) if before else None
        before = after
        (tmp_path / name).touch()
    all_bytes = 32 * MIB
    assert seen == {
        "begin": None,
        "replicated": [{"from_clients": all_bytes}] * 2,
        "split": [{"from_clients": all_bytes // 2}] * 2,
        "one": [{"from_clients": all_bytes}, {}],
        "moved": [{"to_workers": all_bytes}, {"from_workers": all_bytes}],
        "read": [{}, {"to_clients": all_bytes // 4}],
    }
    assert client.finish().value is True
