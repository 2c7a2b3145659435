"""Rewrites the pinned requirement files from the .in files: exact versions, with the hash of each wheel.

    python python/lock.py PYTHON3.11 PYTHON3.12 PYTHON3.13 3.14

Each argument is an interpreter whose pip can write a report (pip >= 22.2), or a bare version that the interpreter before it resolves for. Run it to move to newer releases; nothing else calls it.
One file serves every interpreter from 3.12 on: the first of them decides the versions, the others add the hashes of their own wheels.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def resolve(python, source, extra):
    """{name: (version, sha256)} of what pip would install for `source` under `python`."""
    with tempfile.TemporaryDirectory() as tmp:
        report = pathlib.Path(tmp, "report.json")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:",
             "--report", report, "-r", source, *extra],
            check=True,
        )
        found = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): (
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in found
    }


def elsewhere(minor):
    """pip's options that resolve for another CPython on Linux x86-64 than the running one."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]
    abis = ["cp" + minor.replace(".", ""), "abi3", "none"]
    return ["--python-version", minor, "--implementation", "cp", "--target", "unused",
            *(f"--abi={a}" for a in abis), *(f"--platform={p}" for p in platforms)]


def merged(pythons, source, extra=()):
    """Resolves for all interpreters with the versions of the first; returns {name: (version, hashes, minors)}."""
    pins, python = {}, None
    for given in pythons:
        if re.fullmatch(r"3\.\d+", given):
            minor, target = given, elsewhere(given)
        else:
            python, target = given, []
            minor = subprocess.run(
                [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], check=True, capture_output=True, text=True
            ).stdout.strip()
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.writelines(f"{name}=={version}\n" for name, (version, _, _) in pins.items())
            constraints.flush()
            found = resolve(python, source, [*extra, *target, *(["-c", constraints.name] if pins else [])])
        for name, (version, sha256) in found.items():
            _, hashes, minors = pins.setdefault(name, (version, [], []))
            hashes.append(sha256)
            minors.append(minor)
    return pins


def write(target, pins, minors, note):
    lines = [f"# Written by lock.py from {note}; do not edit.\n"]
    for name, (version, hashes, have) in sorted(pins.items()):
        marker = "" if len(have) == minors else " ; " + " or ".join(f'python_version == "{m}"' for m in have)
        shas = "".join(f" \\\n    --hash=sha256:{h}" for h in sorted(set(hashes)))
        lines.append(f"{name}=={version}{marker}{shas}\n")
    HERE.joinpath(target).write_text("".join(lines))
    print(f"{target}: {len(pins)} packages")


def main():
    old, *new = sys.argv[1:]
    source = HERE / "requirements.in"
    write("requirements-py311.txt", merged([old], source), 1, "requirements.in for Python 3.11")
    write("requirements-py312.txt", merged(new, source), len(new), "requirements.in for Python 3.12 and newer")
    write("requirements-plugin.txt", merged([old], HERE / "requirements-plugin.in", ["--no-deps"]), 1, "requirements-plugin.in")


if __name__ == "__main__":
    main()
