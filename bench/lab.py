"""What the drivers of `cargo xtask accept` measure with: a cluster, and client processes that stay and take turns.

A client runs a script of this folder that ends in `served.serve`; what it prints besides its answers goes to the driver's standard
error.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

PATHWAYS = os.environ["PATHWAYS_BIN"]
HERE = pathlib.Path(__file__).resolve().parent
STOCK_THREADS = 16  # with fewer than devices, stock JAX starves itself


def clean_environment(**variables):
    steering = ("JAX_", "XLA_", "PATHWAYS_", "IFRT_PROXY_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    return env | {"PYTHONPATH": str(HERE.parent / "python"), "TF_CPP_MIN_LOG_LEVEL": "2"} | variables


class Started:
    """A process that ends with the `with` block."""

    def __init__(self, argv, env, **options):
        argv = [str(a) for a in argv]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, **options)

    def line(self):
        text = self.process.stdout.readline()
        if not text:
            sys.exit(f"{' '.join(self.process.args)} ended with {self.process.wait()}; its message is above")
        return text

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Cluster(Started):
    """`pathways local` without a command."""

    def __init__(self, workers, devices, *flags):
        cache = os.environ.get("PATHWAYS_CACHE_DIR", str(HERE.parent / "target/cache"))
        argv = [PATHWAYS, "local", "--workers", workers, "--devices", devices, "--port", 0, "--cache-dir", cache, *flags]
        super().__init__(argv, clean_environment(), stdin=subprocess.DEVNULL)
        text = ""
        while not (match := re.search(r"JAX_BACKEND_TARGET=(grpc://\S+).*status --controller (\S+)", text, re.S)):
            text += self.line()
        self.target, self.controller = match[1], match[2]

    def status(self):
        argv = [PATHWAYS, "status", "--json", "--controller", self.controller]
        return json.loads(subprocess.run(argv, env=clean_environment(), check=True, capture_output=True, text=True).stdout)

    def client(self, script):
        return Client(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=self.target)


class NullServer(Started):
    """Answers the same client at once and computes nothing: what the client itself allows."""

    def __init__(self):
        program = pathlib.Path(PATHWAYS).with_name("pathways-null")
        super().__init__([program, "--with-stdin"], clean_environment(), stdin=subprocess.PIPE)
        self.target = f"grpc://127.0.0.1:{int(self.line())}"

    def client(self, script):
        return Client(script, JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=self.target)


class Client(Started):
    """A Python process that does what it is told."""

    def __init__(self, script, **variables):
        super().__init__([sys.executable, HERE / script], clean_environment(**variables), stdin=subprocess.PIPE)

    def ask(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.line())
        if "error" in answer:
            sys.exit(f"{do} failed: {answer['error']}")
        return answer


def stock(script, devices):
    """The same on JAX in one process."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return Client(script, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, NPROC=str(STOCK_THREADS))


def in_turns(sides, rounds, do, **arguments):
    """The seconds that each of the clients measures, by name: a list of lists, one for each of its turns."""
    seen = {name: [] for name in sides}
    for turn in range(rounds):
        order = list(sides) if turn % 2 else list(sides)[::-1]
        for name in order:
            seen[name].append(sides[name].ask(do, **arguments)["seconds"])
    return seen


def quantile(samples, q):
    samples = sorted(samples)
    return samples[min(int(q * len(samples)), len(samples) - 1)]


def resident_mib(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def say(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def goal(text, met):
    return f"goal {text}: {'met' if met else 'MISSED'}"
