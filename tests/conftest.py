"""Fixtures for all tests; the classes behind them are in harness.py."""

import sys

import pytest
from harness import Processes


@pytest.fixture
def processes(tmp_path):
    started = Processes(tmp_path)
    yield started
    started.end()
    assert not started.crashes()


@pytest.fixture
def run_python(processes):
    """run_python(text, seconds=60, python=…, **environment) -> Result: a script in a process of its own."""

    def run(text, seconds=60, python=sys.executable, **variables):
        return processes.python(text, python=python, **variables).finish(seconds)

    return run
