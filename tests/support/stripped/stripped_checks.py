"""What tests in an interpreter that `sitecustomize` has stripped need.

This plugin takes the place of `conftest.py`, which needs what was removed. It
leaves tests out, and its summary says how many and why.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import sys
import threading
import time

import hypothesis
import pytest
import sitecustomize

_SETTLE_S = 60.0  # for what was asked to end to be gone
# "spawn" stands for portable workers, where these are the only ones.
_PROCESSES = {
    *("process", "1 process", "2 processes", "4 processes"),
    *("portable", "spawn"),
}
_OTHER_KINDS = {
    *("inline", "thread", "1 thread", "4 threads", "fork", "forkserver"),
}
# In these files, tests without such a parameter are of processes, too.
_OF_PROCESSES = (
    *("test_skip", "test_state", "test_auto_workers", "test_exceptions_at_st"),
    *("test_log_forw", "test_outside_state", "test_portable_deaths"),
    *("test_shared_state", "test_what_travels"),
)
_LEFT_OUT = {  # by a part of the test's id
    "fork": "it forks",
    "three_ways_out": "one of the ways is a fork",
    "a_refused_dataset_leaves_no_process": "it needs psutil, for Linux",
    "memory_map_travels_by_path": "it travels by value without `/proc`",
    "does_not_move_the_table": "it reads `/proc`",
    "h5py_files_groups_and_datasets": "it reads `/proc`",
}
_reasons: collections.Counter[str] = collections.Counter()


def pytest_configure(config):
    """Checks that the interpreter is stripped."""
    assert not hasattr(os, "fork")
    assert sys.modules["fcntl"] is None
    hypothesis.settings.register_profile(
        "busy",
        deadline=None,
        max_examples=25,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("busy")


def pytest_collection_modifyitems(config, items):
    """Leaves out tests of something else, and tests that need the rest."""
    left_out = {item: reason for item in items if (reason := _reason(item))}
    _reasons.update(left_out.values())
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def pytest_terminal_summary(terminalreporter):
    """Prints how many tests were left out, by reason."""
    for reason, count in _reasons.items():
        terminalreporter.line(f"{count} left out: {reason}")


def _reason(item):
    """Returns why a test is left out, or ""."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = {_kind_of(value) for value in params.values()}
    is_of_processes = item.path.name.startswith(_OF_PROCESSES)
    if kinds & _OTHER_KINDS or not (kinds & _PROCESSES or is_of_processes):
        return "it is not of processes, or asks for a way to start them"
    is_of_deaths = "portable_deaths" in item.nodeid
    if item.get_closest_marker("long") and not is_of_deaths:
        return "it is long"
    known = {*item._fixtureinfo.name2fixturedefs, "request"}
    if not known.issuperset(item.fixturenames):
        return "a fixture forks processes"
    found = [why for part, why in _LEFT_OUT.items() if part in item.nodeid]
    return found[0] if found else ""


def _kind_of(parameter):
    """Returns the kind of workers that a parameter of a test may name."""
    if isinstance(parameter, dict):
        default = "process" if parameter.get("use_multiprocessing") else ""
        return parameter.get("start_method", default)
    return parameter if isinstance(parameter, str) else ""


@pytest.fixture
def kept_forkserver():
    """Does nothing: no worker is forked here."""


def _children():
    """Returns the ids of the processes that this one has started."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        children = f"/proc/self/task/{task}/children"
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found.update(sitecustomize.real_open(children).read().split())
    return found


def _present():
    threads = [t for t in threading.enumerate() if "keras_fastdata" in t.name]
    names = [n for n in os.listdir("/dev/shm") if n.startswith("kfd_")]
    return _children() | {*names, *threads}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Fails the test that leaves a process, a thread or shared memory."""
    before = _present()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while left := _present() - before:
        assert time.monotonic() < deadline, left
        gc.collect()
        time.sleep(0.02)
