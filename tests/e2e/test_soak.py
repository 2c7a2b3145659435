"""Four clients with mixed work on three workers, one of which is killed now and then: no hang, no wrong value, nothing left."""

import os
import pathlib
import random
import signal
import time

import pytest

# `cargo xtask accept soak` plays minutes of it.
SECONDS = 60 * float(os.environ.get("PATHWAYS_TEST_ROUNDS", "0.4"))
SEED = int(os.environ.get("PATHWAYS_TEST_SEED", "1"))
CLIENTS, WORKERS, DEVICES = 4, 3, 2

# Between two kills; a client without progress for so long hangs.
KILL_SECONDS = (6, 14)
HANG_SECONDS = 90

# What the processes may keep of the memory that they had at most, beyond what they had early on.
GROWTH_BYTES = 200 << 20

SCRIPT = """
import pathlib, random, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

me, stop = int(sys.argv[1]), pathlib.Path(sys.argv[2])
rng = random.Random(1000 * int(sys.argv[3]) + me)
devices = jax.devices()
on = [SingleDeviceSharding(d) for d in devices]
pairs = [NamedSharding(Mesh(np.array(devices[2 * w : 2 * w + 2]), ("d",)), P("d")) for w in range(len(devices) // 2)]
places = on + pairs
step = jax.jit(lambda v: v * 3 + 1)
given = jax.jit(lambda v: v * 3 + 1, donate_argnums=0)
total = [jax.jit(jax.shard_map(lambda v: v + jax.lax.psum(v.sum(), "d"), mesh=p.mesh, in_specs=P("d"), out_specs=P("d"))) for p in pairs]
square = jax.jit(lambda m: m @ m)

def ints(count):
    # Small whole numbers: every sum below is exact in float32.
    return np.random.default_rng(rng.randrange(1 << 30)).integers(0, 8, count).astype(np.float32)

def check(array, wanted, what):
    got = np.asarray(array)
    if not np.array_equal(got, wanted):
        raise AssertionError(f"{what}: {got.ravel()[:8]} where {wanted.ravel()[:8]} is due")

def chain():
    host = ints(rng.choice([2, 64, 4096]))
    x = jax.device_put(host, rng.choice(places))
    for _ in range(rng.randrange(1, 5)):
        x, host = rng.choice([step, given])(x), host * 3 + 1
    check(x, host, "chain")

def travel():
    host = ints(rng.choice([2, 1000, 1 << 20]))
    x = jax.device_put(host, rng.choice(places))
    for _ in range(rng.randrange(1, 5)):
        place = rng.choice(places)
        if x.sharding.num_devices != place.num_devices:
            place = rng.choice([p for p in places if p.num_devices == x.sharding.num_devices])
        x = step(jax.device_put(x, place))
        host = host * 3 + 1
    check(x, host, "travel")

def collective():
    w = rng.randrange(len(pairs))
    host = ints(64)
    x = jax.device_put(host, pairs[w])
    for _ in range(rng.randrange(1, 4)):
        x = total[w](x)
        host = host + host.sum()
    check(x, host, "collective")

def whole():
    # Over all workers, in parts, and back.
    mesh = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
    host = ints(len(devices) * rng.choice([1, 1000]))
    x = jax.device_put(host, mesh)
    parts = [s.data for s in x.addressable_shards]
    check(jax.make_array_from_single_device_arrays(x.shape, mesh, parts), host, "whole")

def matrix():
    host = ints(64 * 64).reshape(64, 64)
    check(square(jax.device_put(host, rng.choice(on))), host @ host, "matrix")

def many():
    hosts = [ints(8) for _ in range(50)]
    arrays = jax.device_put(hosts, rng.choice(on))
    for array, host in zip([step(a) for a in arrays], hosts):
        check(array, host * 3 + 1, "many")

work = [chain, travel, collective, whole, matrix, many]
done, lost = 0, 0
print("READY.", flush=True)
said = time.monotonic()
while not stop.exists():
    try:
        rng.choice(work)()
        done += 1
    except jax.errors.JaxRuntimeError as error:
        # A worker was killed; whatever else goes wrong ends this client.
        if "lost" not in str(error) and "cannot be reached" not in str(error):
            raise
        lost += 1
        time.sleep(0.02)
    if time.monotonic() - said > 1:
        said = time.monotonic()
        print(f"DONE {done} {lost}.", flush=True)
result({"done": done, "lost": lost})
"""


def resident(pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


def controller_pid(cluster):
    children = pathlib.Path(f"/proc/{cluster.process.pid}/task/{cluster.process.pid}/children").read_text().split()
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
    return next(int(pid) for pid, words in commands.items() if b"controller" in words)


@pytest.mark.timeout(SECONDS + 3 * HANG_SECONDS)
def test_mixed_work_with_kills(start_cluster):
    rng = random.Random(SEED)
    cluster = start_cluster(WORKERS, DEVICES)
    stop = cluster.processes.folder / "stop"
    clients = [cluster.client(SCRIPT, i, stop, SEED) for i in range(CLIENTS)]
    for client in clients:
        client.wait_for(r"READY\.")
    controller = controller_pid(cluster)
    end, next_kill = time.monotonic() + SECONDS, time.monotonic() + rng.uniform(*KILL_SECONDS)
    last, moved, kills, early, told = [""] * CLIENTS, [time.monotonic()] * CLIENTS, 0, None, time.monotonic()
    while (now := time.monotonic()) < end:
        time.sleep(0.2)
        for i, client in enumerate(clients):
            assert client.popen.poll() is None, f"client {i} has ended\n{client.out}\n{client.err}"
            lines = client.out.rsplit("DONE ", 1)[-1]
            if lines != last[i]:
                last[i], moved[i] = lines, now
            assert now - moved[i] < HANG_SECONDS, f"client {i} makes no progress\n{client.out[-500:]}\n{client.err[-2000:]}"
        if now >= next_kill:
            alive = [w for w in cluster.status()["workers"] if w["state"] == "alive"]
            if len(alive) == WORKERS:
                os.kill(rng.choice(alive)["pid"], signal.SIGKILL)
                kills += 1
            next_kill = now + rng.uniform(*KILL_SECONDS)
        if early is None and now > end - 0.75 * SECONDS:
            early = resident(controller)
        if now - told > 60:
            told = now
            print(f"{(end - now) / 60:.0f} min to go, {kills} kills, done and lost by client: {[l.split('.')[0] for l in last]}, controller {resident(controller) >> 20} MiB", flush=True)
    stop.touch()
    results = [client.finish(HANG_SECONDS).value for client in clients]
    print(f"{kills} kills; {sum(r['done'] for r in results)} pieces of work right, {sum(r['lost'] for r in results)} lost with a worker")
    assert kills > 0 and all(r["done"] > 0 for r in results)

    def is_empty(status):
        alive = [w for w in status["workers"] if w["state"] == "alive"]
        return len(alive) == WORKERS and not status["sessions"] and not any(sum(w["bytes_in_use"]) for w in alive)

    status = cluster.wait_status(is_empty, 30)
    late = resident(controller)
    print(f"controller {early >> 20} MiB early, {late >> 20} MiB at the end; workers {[resident(w['pid']) >> 20 for w in status['workers']]} MiB")
    assert late - early < GROWTH_BYTES
