"""What every Python test shares: processes of their own with a clean environment and a deadline, and clusters made of them.

A process writes to files, so nothing blocks on a full pipe and everything can be shown when a test fails. It leads a process group,
which is ended with the test.
"""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHWAYS = os.environ.get("PATHWAYS_BIN", str(ROOT / "target/release/pathways"))
CACHE = os.environ.get("PATHWAYS_CACHE_DIR", str(ROOT / "target/cache"))

START_SECONDS = 60
RUN_SECONDS = 120
POLL_SECONDS = 0.05

# Threads of a client print too (callbacks), and `print` writes a line and its end apart: other lines came between.
PRELUDE = """
import builtins, io, json, sys
def print(*values, file=None, flush=False, **how):
    line = io.StringIO()
    whole_lines(*values, file=line, **how)
    file = sys.stdout if file is None else file
    file.write(line.getvalue())
    if flush:
        file.flush()
builtins.print, whole_lines = print, builtins.print
def result(value): print("RESULT " + json.dumps(value), flush=True)
"""


def clean_environment(**variables):
    """This process's environment without what steers JAX or us, plus `variables` (None removes one)."""
    steering = ("JAX_", "XLA_", "PATHWAYS_", "IFRT_PROXY_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    env["PYTHONPATH"] = str(ROOT / "python")  # the package is found where it is not installed, too
    env.update({k: str(v) for k, v in variables.items() if v is not None})
    return env


class Result:
    """How a process ended: exit code, its output, and the value that its script gave to `result()`."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def value(self):
        lines = [line for line in self.out.splitlines() if line.startswith("RESULT ")]
        assert self.code == 0 and lines, f"exit code {self.code}\n{self.out}\n{self.err}"
        return json.loads(lines[-1].removeprefix("RESULT "))


class Process:
    """A started program."""

    def __init__(self, argv, env, folder, name):
        self.argv = [str(a) for a in argv]
        self.paths = [folder / f"{name}.out", folder / f"{name}.err"]
        with open(self.paths[0], "w") as out, open(self.paths[1], "w") as err:
            self.popen = subprocess.Popen(
                self.argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )
        self.pid = self.popen.pid

    @property
    def out(self):
        return self.paths[0].read_text(errors="replace")

    @property
    def err(self):
        return self.paths[1].read_text(errors="replace")

    def fail(self, why):
        pytest.fail(f"{' '.join(self.argv)}: {why}\n{self.out}\n{self.err}")

    def wait_for(self, pattern, seconds=START_SECONDS, where="out"):
        """The match of `pattern` in what the process prints."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.popen.poll() is not None
            if match := re.search(pattern, getattr(self, where), re.S):
                return match
            if ended:
                self.fail(f"ended with {self.popen.returncode} before it printed {pattern!r}")
            if time.monotonic() > deadline:
                self.fail(f"did not print {pattern!r} within {seconds} s")
            time.sleep(POLL_SECONDS)

    def finish(self, seconds=RUN_SECONDS):
        """Its Result, once it has ended by itself."""
        try:
            code = self.popen.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            self.fail(f"not finished after {seconds} s")
        return Result(code, self.out, self.err)

    def end(self):
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, how)
            except ProcessLookupError:
                break
            try:
                self.popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
        self.popen.wait(timeout=5)


class Processes:
    """Starts programs in one folder and ends all of them."""

    def __init__(self, folder):
        self.folder, self.all, self.numbers = folder, [], itertools.count()

    def start(self, argv, **variables):
        process = Process(argv, clean_environment(**variables), self.folder, f"process{next(self.numbers)}")
        self.all.append(process)
        return process

    def script(self, text):
        """A file with `text`, which may call `result(value)`."""
        if isinstance(text, pathlib.Path):
            return text
        path = self.folder / f"script{next(self.numbers)}.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return path

    def python(self, text, *arguments, python=sys.executable, **variables):
        return self.start([python, self.script(text), *arguments], **variables)

    def pathways(self, *arguments, **variables):
        return self.start([PATHWAYS, *arguments], **variables)

    def end(self):
        for process in reversed(self.all):
            process.end()

    def crashes(self):
        """What `pathways local` says of processes of its own that crashed: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""
        return [line for p in self.all for line in p.err.splitlines() if re.search(r" ended \(signal: (4|6|7|8|11) ", line)]


class Cluster:
    """A running `pathways local` without a command."""

    def __init__(self, processes, process, target, controller):
        self.processes, self.process, self.target, self.controller = processes, process, target, controller

    def client(self, text, *arguments, **variables):
        """Starts a client process."""
        settings = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": self.target, **variables}
        return self.processes.python(text, *arguments, **settings)

    def status(self):
        """What `pathways status --json` says."""
        got = self.processes.pathways("status", "--json", "--controller", self.controller).finish(20)
        assert got.code == 0, got.err
        return json.loads(got.out)

    def wait_status(self, condition, seconds=20):
        """Polls until `condition(status)` holds."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                pytest.fail(f"not so within {seconds} s: {json.dumps(status, indent=1)}")
            time.sleep(POLL_SECONDS)
        return status
