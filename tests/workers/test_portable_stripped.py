"""The package in an interpreter without what only Linux, or only POSIX, has.

`stripped/sitecustomize.py` removes it. This is no run on macOS or Windows.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_STRIPPED = _ROOT / "tests" / "support" / "stripped"
# These are not imported where the system lacks what they need.
_LEFT_OUT = {
    "keras_fastdata.workers.process.channel",
    "keras_fastdata.workers.process.children",
    "keras_fastdata.workers.process.forkserver_connection",
    "keras_fastdata.workers.process.forkservers",
    "keras_fastdata.workers.process.launchers",
}
_IMPORTS = """
import importlib, pkgutil, os
import keras_fastdata
assert not hasattr(os, "fork")
for module in pkgutil.walk_packages(keras_fastdata.__path__, "keras_fastdata."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError:
        print(module.name)
"""
# Tests of what a dataset promises, by folder. `stripped_checks` has the plugin
# that leaves out tests of other kinds of workers, and long tests.
_CONTRACT = {
    "datasets": """
        array_dataset cache generator_dataset image_dataset resume
        sample_dataset seeding skip state
    """,
    "keras_bridge": "batch_kinds next_epoch settings shards",
    "workers": """
        auto_workers exceptions exceptions_at_start log_forwarding outside_state
        portable_deaths shared_state threads_in_a_build what_travels
    """,
}


def _run(*arguments):
    path = [_STRIPPED, _ROOT / "tests" / "support", _ROOT, *sys.path]
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(each) for each in path if each),
            "HYPOTHESIS_NO_PLUGINS": "1",  # of packages that need POSIX
        },
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )


def test_every_module_can_be_imported():
    done = _run("-c", _IMPORTS)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == _LEFT_OUT


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("folder", _CONTRACT)
def test_the_contract_holds(folder):
    names = _CONTRACT[folder].split()
    done = _run(
        *("-m", "pytest", "-q", "--noconftest", "-p", "stripped_checks"),
        *("-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:anyio"),
        *(f"tests/{folder}/test_{name}.py" for name in names),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 30
