"""What every Python test shares: running a piece of Python in a process of its own, with a clean environment and a deadline."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def clean_environment(**variables):
    """This process's environment without what steers JAX or us, plus `variables` (None removes one)."""
    ours = ("JAX_", "XLA_", "PATHWAYS_", "IFRT_PROXY_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env["PYTHONPATH"] = str(ROOT / "python")  # the package is found where it is not installed, too
    env.update({k: v for k, v in variables.items() if v is not None})
    return env


class Result:
    """How a script ended: exit code, its output, and the value of its last `RESULT` line."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def value(self):
        lines = [line for line in self.out.splitlines() if line.startswith("RESULT ")]
        assert self.code == 0 and lines, f"exit code {self.code}\n{self.out}\n{self.err}"
        return json.loads(lines[-1].removeprefix("RESULT "))


PRELUDE = """
import json
def result(value): print("RESULT " + json.dumps(value), flush=True)
"""


def write_script(folder, text, name="script.py"):
    path = folder / name
    path.write_text(PRELUDE + textwrap.dedent(text))
    return path


def finish(process, seconds):
    """Waits; at the deadline the whole process group ends and the test fails with what was printed."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_group(process)
        out, err = process.communicate()
        pytest.fail(f"not finished after {seconds} s\n{out}\n{err}")
    return Result(process.returncode, out, err)


def end_group(process):
    """Ends a process started with `start_new_session=True` and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue


@pytest.fixture
def run_python(tmp_path):
    """run_python(text, seconds=60, python=…, **environment) -> Result."""

    def run(text, seconds=60, python=sys.executable, **variables):
        process = subprocess.Popen(
            [python, write_script(tmp_path, text)],
            env=clean_environment(**variables), cwd=tmp_path, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        return finish(process, seconds)

    return run
