"""`cargo xtask accept fetch`: what reading a ready array costs. Times are printed, not judged by exit code."""

import argparse
from contextlib import ExitStack

from lab import Cluster, NullServer, in_turns, quantile, say, stock

SCRIPT, BYTES = "fetch_client.py", 16 << 20
SHAPES = [(1, 8), (2, 4), (4, 2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 5 if parser.parse_args().quick else 21
    with ExitStack() as stack:
        sides = {"stock": stack.enter_context(stock(SCRIPT, 8))}
        for workers, devices in SHAPES:
            cluster = stack.enter_context(Cluster(workers, devices))
            sides[f"{workers} x {devices}"] = stack.enter_context(cluster.client(SCRIPT))
        for what, times in (("small", 10), ("large", 2)):
            for name, side in sides.items():
                assert side.ask(what, times=times)["right"], f"{name}: other values than were sent"
        # What the client itself costs; values are zeros there.
        null = stack.enter_context(NullServer())
        sides["null"] = stack.enter_context(null.client(SCRIPT))
        in_turns({"null": sides["null"]}, 1, "large", times=2)
        seen = {what: in_turns(sides, rounds, what, times=times) for what, times in (("wait", 50), ("small", 50), ("large", 3))}
    flat = {what: {name: sum(turns, []) for name, turns in by_name.items()} for what, by_name in seen.items()}
    say("np.asarray of a ready array; beside it one call that is waited for, which is a round trip of the client")
    say("null = a server that answers the same client at once and computes nothing")
    for name in sides:
        wait, small, large = (flat[what][name] for what in ("wait", "small", "large"))
        middle = quantile(large, 0.5)
        ratio = middle / quantile(flat["large"]["stock"], 0.5)
        say(f"  {name:6} 4 bytes: p50 {quantile(small, 0.5) * 1e6:6.0f} µs, p99 {quantile(small, 0.99) * 1e6:6.0f} µs"
            f" (call: p50 {quantile(wait, 0.5) * 1e6:6.0f} µs)"
            f"   16 MiB: {middle * 1e3:5.1f} ms = {BYTES / middle / 1e9:5.2f} GB/s, {ratio:.1f} x stock")


if __name__ == "__main__":
    main()
