"""`cargo xtask accept many`: many small programs, many live arrays, many that come and go. Times are printed, not judged by exit code."""

import argparse
import threading
import time

from lab import Cluster, goal, in_turns, quantile, resident_mib, say, stock

SCRIPT, DEVICES = "many_client.py", 8
JOBS, SLEPT_US = 48, 1000
UPLOAD_EVERY = 10


def bare_threads():
    """Seconds that threads need which do nothing but sleep as long: what this machine makes of the ideal just now."""
    threads = [threading.Thread(target=lambda: [time.sleep(SLEPT_US / 1e6) for _ in range(JOBS)]) for _ in range(DEVICES)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def many_programs(sides, rounds):
    seconds, bare = [], []
    for _ in range(rounds):
        seconds += sides["pathways"].ask("jobs", count=JOBS, us=SLEPT_US, times=5)["seconds"]
        bare += [bare_threads() for _ in range(5)]
    ideal = JOBS * SLEPT_US / 1e6
    wall = quantile(seconds, 0.5)
    say(f"{JOBS} programs of {SLEPT_US / 1000:g} ms slept on {DEVICES} devices each: {wall * 1e3:.1f} ms, ideal {ideal * 1e3:.1f} ms,"
        f" ratio {wall / ideal:.2f} (best {min(seconds) / ideal:.2f}); {goal('<= 1.2', wall <= 1.2 * ideal)}")
    say(f"  {DEVICES} threads that only sleep need {quantile(bare, 0.5) * 1e3:.1f} ms, ratio {quantile(bare, 0.5) / ideal:.2f}")
    seen = in_turns(sides, 2 * rounds, "jobs", count=JOBS, us=0, times=10)
    tiny = {name: [quantile(turn, 0.5) for turn in turns] for name, turns in seen.items()}
    ratio = quantile([a / b for a, b in zip(tiny["pathways"], tiny["stock"])], 0.5)
    say(f"the same with x + i instead of sleep: {quantile(tiny['pathways'], 0.5) * 1e3:.1f} ms, stock JAX"
        f" {quantile(tiny['stock'], 0.5) * 1e3:.1f} ms, ratio {ratio:.2f}")


def live_arrays(cluster, sides, count, rounds):
    def steps(what):
        for name, turns in in_turns(sides, rounds, "step", count=1000).items():
            all_of_them = [s for turn in turns for s in turn]
            p50, p99 = quantile(all_of_them, 0.5), quantile(all_of_them, 0.99)
            met = f"; {goal('p99 <= 2 x p50', p99 <= 2 * p50)}" if name == "pathways" else ""
            say(f"  {name}, {what}: step p50 {p50 * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs, ratio {p99 / p50:.2f}{met}")

    say(f"one step after the other, each waited for, before and with {count:,} live arrays on {DEVICES} devices each")
    steps("none live")
    for name, side in sides.items():
        began = time.monotonic()
        assert side.ask("hold", count=count)["live"] == count
        say(f"  {name}: made in {time.monotonic() - began:.1f} s")
    (session,) = cluster.status()["sessions"]
    assert session["arrays"] >= count, session
    steps(f"{count:,} live")
    for side in sides.values():
        side.ask("hold", count=0)


def come_and_go(cluster, client, count):
    """Samples at the begin, in the middle and at the end. A tenth goes before: it brings what stays, programs and pools.

    The client process grows by about 0.4 KiB with every call; so it does against a server that computes nothing.
    """
    say(f"{count:,} times: make an array over {DEVICES} devices and drop it; every {UPLOAD_EVERY}th also comes from the host")
    parts = 10
    client.ask("churn", count=count // parts, upload_every=UPLOAD_EVERY)
    samples, began = [], time.monotonic()
    for part in range(parts + 1):
        if part in (0, parts // 2, parts):
            time.sleep(0.5)
            status = cluster.status()
            (session,) = status["sessions"]
            resident = sum(resident_mib(w["pid"]) for w in status["workers"])
            samples.append((session["arrays"], session["held_bytes"], resident))
            say(f"  after {part * count // parts:7,}: {session['arrays']} arrays and {session['held_bytes']:,} bytes held,"
                f" worker {resident:.1f} MiB resident, client {resident_mib(client.process.pid):.1f} MiB")
        if part < parts:
            client.ask("churn", count=count // parts, upload_every=UPLOAD_EVERY)
    (arrays, held, first), (*last, end) = samples[0], samples[-1]
    say(f"  {count / (time.monotonic() - began):.0f} times a second; {goal('as many arrays and bytes as at the begin', last == [arrays, held])};"
        f" worker {end - first:+.1f} MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with Cluster(1, DEVICES, "--test-targets") as cluster:
        with cluster.client(SCRIPT) as ours, stock(SCRIPT, DEVICES) as theirs:
            sides = {"pathways": ours, "stock": theirs}
            many_programs(sides, 1 if quick else 5)
            live_arrays(cluster, sides, 10_000 if quick else 100_000, 1 if quick else 3)
        with cluster.client(SCRIPT) as ours:
            come_and_go(cluster, ours, 10_000 if quick else 100_000)


if __name__ == "__main__":
    main()
