"""Fixtures with real clusters on loopback ports, for JAX clients that know nothing about them."""

import os
import sys

import pytest
from harness import CACHE, PATHWAYS, RUN_SECONDS, Cluster


def pytest_sessionstart(session):
    if not os.path.exists(PATHWAYS):
        pytest.exit(f"{PATHWAYS} is missing: run `cargo xtask setup` first", returncode=1)


def local(workers, devices, *flags, cache=CACHE):
    return ["local", "--workers", workers, "--devices", devices, "--port", 0, "--cache-dir", cache, *flags]


@pytest.fixture
def start_cluster(processes):
    """start_cluster(workers, devices, *flags, cache=…, **environment) -> Cluster; flags as for `pathways local`."""

    def start(workers, devices, *flags, cache=CACHE, **variables):
        process = processes.pathways(*local(workers, devices, *flags, cache=cache), **variables)
        match = process.wait_for(r"JAX_BACKEND_TARGET=(grpc://\S+).*status --controller (\S+)")
        return Cluster(processes, process, match[1], match[2])

    return start


@pytest.fixture
def run_local(processes):
    """run_local(workers, devices, script, *flags, **environment) -> Result: one script under `pathways local`."""

    def run(workers, devices, script, *flags, seconds=RUN_SECONDS, python=sys.executable, **variables):
        argv = [*local(workers, devices, *flags), "--", python, processes.script(script)]
        return processes.pathways(*argv, **variables).finish(seconds)

    return run


@pytest.fixture
def run_stock(processes):
    """run_stock(devices, script) -> Result: the same script on stock JAX with that many CPU devices."""

    def run(devices, script, seconds=RUN_SECONDS):
        flags = f"--xla_force_host_platform_device_count={devices}"
        return processes.python(script, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, NPROC=16).finish(seconds)

    return run
