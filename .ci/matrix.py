"""Tests each Keras on each Python and backend, and prints a Markdown table.

Called by `.ci/run --matrix [PATTERN ...] [-- ARGUMENTS OF PYTEST]`. Without a
pattern all 45 cells are run; `'py3.12-*'` or `'*-keras3.13-jax'` selects some.
The results of a commit are kept in `build/matrix`, so the cells may be run in
several calls: the table has all of them. A cell takes a minute or two on two
idle cores. The exit status is 1 if a test has failed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

KERAS = ("3.12", "3.13", "3.14", "3.15", "nightly")
PYTHON = ("3.11", "3.12", "3.13")
BACKENDS = ("tensorflow", "jax", "torch")
# The tests that are marked `backend` of what Keras, Python or a backend may
# break: the bridge to `fit`, the order and shards of an epoch, workers that
# start and end, what they raise, and resuming.
TESTS = """
    tests/keras_bridge tests/unit/test_notice.py
    tests/datasets/test_array_dataset.py tests/datasets/test_sample_dataset.py
    tests/datasets/test_resume.py
    tests/workers/test_launch.py tests/workers/test_exceptions.py
"""
LIMIT_S = 1800  # for a cell; a hang is a failure
RESULTS = pathlib.Path("build/matrix")


def cells():
    """Yields all cells; the first five have each Keras, Python and backend."""
    for step in range(len(PYTHON) * len(BACKENDS)):
        for row, keras in enumerate(KERAS):
            python = PYTHON[(row + step) % len(PYTHON)]
            yield python, keras, BACKENDS[(row + step // 3 + step) % 3]


def name_of(python, keras, backend):
    return f"py{python}-keras{keras}-{backend}"


def pip(python, *arguments):
    command = [python, "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True)


def interpreters(version):
    """Yields the commands that may be a Python of this version."""
    # What is found first may be a shim of pyenv's that leads nowhere.
    if found := shutil.which(f"python{version}"):
        yield found
    versions = pathlib.Path("~/.pyenv/versions").expanduser()
    yield from versions.glob(f"{version}.*/bin/python")


def environment(version):
    """Returns the Python of an environment, made once, with all backends."""
    folder = pathlib.Path(f".venv-matrix-{version}")
    ready = folder / "ready"
    python = str(folder.absolute() / "bin" / "python")
    if not ready.exists():
        for found in interpreters(version):
            command = [found, "-m", "venv", "--clear", folder]
            if not subprocess.run(
                command, stderr=subprocess.DEVNULL
            ).returncode:
                break
        else:
            sys.exit(f"There is no Python {version} here.")
        pip(python, "-e", ".[test]", *os.environ["OTHERS"].split())
        ready.touch()
    return python


def keras_aside(version):
    """Returns the folder of a Keras alone, and its version."""
    is_nightly = version == "nightly"
    folder = pathlib.Path(f".venv-{'' if is_nightly else 'keras-'}{version}")
    numbered = folder / "keras" / "src" / "version.py"
    if not numbered.exists():
        package = (
            ["--pre", "keras-nightly"]
            if is_nightly
            else [f"keras=={version}.*"]
        )
        pip(sys.executable, "--no-deps", "--target", str(folder), *package)
    (number,) = re.findall(r'^__version__ = "(.+)"', numbered.read_text(), re.M)
    return str(folder.absolute()), number


def run(python, keras, backend, extra):
    """Tests a cell, and notes its result."""
    name = name_of(python, keras, backend)
    interpreter = environment(python)
    folder, number = keras_aside(keras)
    log = RESULTS / f"{name}.log"
    began = time.monotonic()
    with open(log, "w") as file:
        command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-n", "2", "--dist", "worksteal", "-m", "backend"]
        try:
            status = subprocess.run(
                [*command, *TESTS.split(), *extra],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([folder, os.getcwd()]),
                    "KERAS_BACKEND": backend,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    said = log.read_text()
    counts = {
        noun: int((re.findall(rf"(\d+) {noun}", said[-200:]) or [0])[-1])
        for noun in ("passed", "failed", "error")
    }
    result = {
        **counts,
        "commit": commit(),
        "extra": extra,
        "keras": number,
        "status": status,
        "took_s": round(time.monotonic() - began),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result))
    print(f"{time.strftime('%T')} {name}: {words(result)}", flush=True)
    return result


def commit():
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True
    ).stdout.strip()


def words(result):
    took = f"{result['took_s']} s"
    if result["status"] == 0:
        return f"{result['passed']} passed, {took}"
    bad = result["failed"] + result["error"]
    why = f"{bad} failed" if bad else f"status {result['status']}"
    return f"**{why}**, {result['passed']} passed, {took}"


def kept(name, extra):
    """Returns the result of the same tests on this commit, or `None`."""
    path = RESULTS / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else None
    wanted = {"commit": commit(), "extra": extra}
    return result if result and wanted.items() <= result.items() else None


def table(extra):
    lines = [
        f"| Keras | Python | {' | '.join(BACKENDS)} |",
        "|---" * (2 + len(BACKENDS)) + "|",
    ]
    count = 0
    for keras in KERAS:
        for python in PYTHON:
            row = [
                kept(name_of(python, keras, backend), extra)
                for backend in BACKENDS
            ]
            numbers = [result["keras"] for result in row if result]
            if not numbers:
                continue
            count += len(numbers)
            shown = f"{keras} ({numbers[0]})"
            said = [words(result) if result else "not run" for result in row]
            lines.append(f"| {shown} | {python} | {' | '.join(said)} |")
    every = len(KERAS) * len(PYTHON) * len(BACKENDS)
    also = f" with `{' '.join(extra)}`" if extra else ""
    lines.append(
        f"\n{count} of {every} cells were run on {commit()[:9]}{also}."
    )
    return "\n".join(lines)


def main(arguments):
    place = [*arguments, "--"].index("--")
    patterns, extra = arguments[:place], arguments[place + 1 :]
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = [
        cell
        for cell in cells()
        if any(fnmatch.fnmatch(name_of(*cell), p) for p in patterns or ["*"])
    ]
    if not chosen:
        sys.exit(f"No cell is named {' or '.join(patterns)}: see {__file__}.")
    results = []
    for cell in chosen:
        results.append(run(*cell, extra))
        (RESULTS / "table.md").write_text(table(extra) + "\n")
    print(f"\n{table(extra)}\n")
    bad = [result for result in results if result["status"]]
    passed = sum(result["passed"] for result in results)
    failed = sum(max(1, r["failed"] + r["error"]) for r in bad)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
