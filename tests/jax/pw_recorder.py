"""A pytest plugin for `cargo xtask accept`: writes what happens to every test to a file, line by line, as it happens.

So a client process that dies in the middle of a test costs that test only. PW_RECORD names the file, PW_DONE a file with
the ids that are not to be run, PW_EVERY a number: only ids whose CRC-32 it divides are looked at. Lines: `all COUNT`, `collected ID`,
`start ID`, `end ID OUTCOME MESSAGE`, separated by tabs.
"""

import os
import zlib

_record = open(os.environ["PW_RECORD"], "a", encoding="utf-8", buffering=1)
_every = int(os.environ.get("PW_EVERY", "1"))
_outcomes = {}


def _write(*fields):
    _record.write("\t".join(f.replace("\t", " ").replace("\n", " ⏎ ") for f in fields) + "\n")


def _name(nodeid):
    return nodeid.split("::", 1)[1]  # the file is known


def pytest_collection_modifyitems(config, items):
    _write("all", str(len(items)))
    sample = [i for i in items if zlib.crc32(_name(i.nodeid).encode()) % _every == 0]
    config.hook.pytest_deselected(items=[i for i in items if i not in sample])
    items[:] = sample
    for item in items:
        _write("collected", _name(item.nodeid))
    with open(os.environ["PW_DONE"], encoding="utf-8") as file:
        done = set(file.read().splitlines())
    config.hook.pytest_deselected(items=[i for i in items if _name(i.nodeid) in done])
    items[:] = [i for i in items if _name(i.nodeid) not in done]


def pytest_collection_finish(session):
    # JAX's tests check that none of them changes its settings, and the first use of a backend may: our package adds `cpu` then.
    import jax

    jax.devices()


def pytest_runtest_logstart(nodeid, location):
    _write("start", _name(nodeid))


def pytest_runtest_logreport(report):
    # A test fails if any of its phases or subtests does; it is skipped if one is and none fails.
    rank = {"passed": 0, "skipped": 1, "failed": 2}
    have = _outcomes.setdefault(report.nodeid, ("passed", ""))
    if rank[report.outcome] > rank[have[0]]:
        _outcomes[report.nodeid] = (report.outcome, _message(report))


def _message(report):
    if report.outcome == "skipped":
        return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr))[:1500]


def pytest_runtest_logfinish(nodeid, location):
    outcome, message = _outcomes.get(nodeid, ("failed", "no report"))
    _write("end", _name(nodeid), outcome, message)


def pytest_unconfigure(config):
    _record.close()
