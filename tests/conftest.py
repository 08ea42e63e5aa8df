"""Fixtures of every test: nothing may be left behind.

Each test runs under a check that it leaves no child process, thread, file
descriptor, held lock, or entry in /dev/shm. What the backend itself starts on
first use (thread pools, compilers) is started once, before the first test.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import mmap
import multiprocessing.resource_tracker
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings

import hypothesis
import numpy as np
import psutil
import pytest
import trainers
from places import FULL

from keras_fastdata._extras import import_faster
from keras_fastdata.building.seeding import loaded_torch
from keras_fastdata.workers.process import (
    children,
    forkservers,
    launchers,
)

_SETTLE_S = 60.0  # for what was asked to end to be gone
_MOST_HOLDERS = 60  # that are told of
_LARGE = 1 << 32  # bytes; only our arenas map as many
_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """Has SIGINT interrupt again, and Hypothesis wait for a busy machine.

    A shell starts what it puts in the background with SIGINT ignored, and
    Python leaves it so, here and in the scripts that tests start.
    """
    _share_compiled_steps(config)
    _start_resource_tracker()
    hypothesis.settings.register_profile(
        "busy",
        deadline=None,
        max_examples=100 if FULL else 25,
        derandomize=not FULL,  # the full run finds what is new
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("busy")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_resource_tracker():
    """Starts the process that `multiprocessing` starts once it needs one.

    It is the child of a process that has ended: tests count the children of
    this process.
    """
    tracker = multiprocessing.resource_tracker._resource_tracker
    ours, theirs = socket.socketpair()
    with ours, theirs, warnings.catch_warnings():
        # The child does nothing with what other threads may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                socket.send_fds(theirs, [b"-"], [tracker.getfd()])
            os._exit(0)
        os.waitpid(pid, 0)
        _, (tracker._fd,), *_ = socket.recv_fds(ours, 1, 1)


def _share_compiled_steps(config):
    """Has all processes of a test run compile each model for JAX once."""
    if _CACHE not in os.environ:
        os.environ |= {
            _CACHE: tempfile.mkdtemp(prefix="keras-fastdata-tests-"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        config.add_cleanup(
            lambda: shutil.rmtree(os.environ.pop(_CACHE), ignore_errors=True)
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Imports the modules of tests, and Keras, in a quarter less time.

    They make a million objects, and hardly any garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Leaves the long tests to the full run."""
    if FULL:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)


@pytest.fixture(scope="session")
def _locks():
    """A turnstile and a room, for all processes of one test run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    names = [
        os.path.join(
            tempfile.gettempdir(), f"keras-fastdata-tests-{run}-{name}"
        )
        for name in ("turnstile", "room")
    ]
    fds = [os.open(name, os.O_CREAT | os.O_RDWR) for name in names]
    yield fds
    for name, fd in zip(names, fds, strict=True):
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


@pytest.fixture(autouse=True)
def _alone_if_it_must(request, _locks):
    """Has a test that is marked `alone` run while no other does.

    Others share the room. Whoever wants it alone holds the turnstile until
    it is empty, or else it would never be.
    """
    alone = request.node.get_closest_marker("alone") is not None
    turnstile, room = _locks
    fcntl.flock(turnstile, fcntl.LOCK_EX)
    if not alone:
        fcntl.flock(turnstile, fcntl.LOCK_UN)
    fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    fcntl.flock(turnstile, fcntl.LOCK_UN)
    yield
    fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture(scope="session", autouse=True)
def _backend_is_warm():
    """Has the backend start what it keeps: a training step and a predict."""
    import keras  # here: the process that hands out tests needs none

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((4, 2), "float32")
    model.fit(x, x[:, :1], epochs=1, verbose=0)
    model.evaluate(x, x[:, :1], verbose=0)
    model.predict(x, verbose=0)


@pytest.fixture(scope="module", autouse=True)
def _collections_are_quick(_backend_is_warm):
    """Keeps out of collections what was there before the module's tests.

    The check below has garbage collected again and again. The backend, and what
    it keeps of models, need not be looked at each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote():
    """The process that training scripts are forked from; it has Keras."""
    with trainers.Zygote() as started:
        yield started


@pytest.fixture(scope="session")
def _held_forkservers():
    held = []
    yield held
    while held:
        held.pop().close()


@pytest.fixture
def kept_forkserver(_held_forkservers):
    """Has tests in a row share a fork server, until one of them kills it.

    It has imported pytest. So a worker that imports a module of tests, where
    the class of its dataset is, takes a third of the time.
    """
    held = _held_forkservers
    if held and held[-1]._forkserver.has_ended:
        held.pop().close()
    if not held:
        with pytest.MonkeyPatch.context() as patch:
            text = children._BOOTSTRAP
            assert "; {function}(" in text
            patch.setattr(
                children,
                "_BOOTSTRAP",
                text.replace("; {function}(", "; import pytest; {function}("),
            )
            held.append(launchers.ForkserverLauncher(None))


@pytest.fixture(autouse=True)
def _nothing_is_seeded(_backend_is_warm):
    """Has each test begin as a program that has seeded no generator."""
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("global_random_seed", None)
    # In place: worker threads of a dataset that tests share may be drawing.
    bits = np.random.get_bit_generator()
    fresh = type(bits)()
    with bits.lock:
        np.random.BitGenerator.__setstate__(bits, (fresh.state, fresh.seed_seq))
    random.seed()
    if torch := loaded_torch():
        torch.seed()


@pytest.fixture
def pillow_alone(monkeypatch):
    """Pillow alone reads images: the modules that are faster are missing."""
    import_faster.cache_clear()
    for module in ("simplejpeg", "cykooz_resizer"):
        monkeypatch.setitem(sys.modules, module, None)
    yield
    import_faster.cache_clear()


def _children() -> set[int]:
    """The processes that this one and its children have started."""
    if not os.path.exists("/proc/thread-self/children"):
        return {each.pid for each in psutil.Process().children(recursive=True)}
    # To look through all processes takes ten times as long.
    found: set[int] = set()
    todo = {os.getpid()}
    while todo:
        tasks = f"/proc/{todo.pop()}/task"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(tasks):
                with open(f"{tasks}/{task}/children") as file:
                    new = {*map(int, file.read().split())} - found
                found |= new
                todo |= new
    return found


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if "keras_fastdata" in t.name}


def _kept() -> set[object]:
    """Process ids and descriptors of the fork server that waits for a user."""
    found = set()
    for server in forkservers._with_bases(forkservers._kept):
        found.add(server.pid)
        found |= {str(server._socket.fileno()), str(server._child.pidfd)}
    return found


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {
        fd: target
        for fd, target in found.items()
        if target.startswith(
            ("socket:", "/memfd:keras_fastdata", "anon_inode:[pidfd]")
        )
    }


def _stacks() -> str:
    """Where the threads are."""
    return "".join(
        f"\n\nthread {ident}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _holders_of_mappings() -> str:
    """What refers to mapped memory, what to that, and so on: a line each."""
    gc.unfreeze()
    lines = []
    found = [
        each
        for each in gc.get_objects()
        if type(each) is mmap.mmap and len(each) > _LARGE
    ]
    seen = {id(found), id(lines)}
    todo = [(0, each) for each in found]
    while todo and len(lines) < _MOST_HOLDERS:
        depth, held = todo.pop()
        lines.append(f"\n{'  ' * depth}{held!r:.200}")
        if id(held) not in seen:
            seen.add(id(held))
            holders = gc.get_referrers(held)
            seen.add(id(holders))
            todo += [
                (depth + 1, each)
                for each in holders
                if id(each) not in seen and each is not todo
            ]
    return "".join(lines)


def _present() -> dict[str, dict[object, object]]:
    """What a test may not leave more of, by what it is called."""
    return {
        "children": dict.fromkeys(_children()),
        "threads": dict.fromkeys(_threads()),
        "descriptors": dict(_descriptors()),
        "segments": dict.fromkeys(os.listdir("/dev/shm")),
        "held locks": dict.fromkeys(_held_locks()),
    }


def _held_locks() -> list[str]:
    """Locks of the process's generators that another thread holds.

    A thread that ended while it held one makes every later build wait.
    """
    module = sys.modules.get("keras_fastdata.building.global_rng")
    held = []
    for level, turn in enumerate(list(module._turns) if module else ()):
        if turn.lock.acquire(blocking=False):
            turn.lock.release()
        else:
            held.append(f"global_rng._turns[{level}]")
    return held


def _new_since(before: dict[str, dict[object, object]]) -> dict[str, object]:
    kept = _kept()
    return {
        kind: new
        for kind, found in _present().items()
        if (
            new := {
                key: value
                for key, value in found.items()
                if key not in before[kind] and key not in kept
            }
        )
    }


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request, _held_forkservers):
    """Fails the test that leaves something behind, as `_present` lists."""
    is_kept = "kept_forkserver" in request.fixturenames
    if is_kept:
        request.getfixturevalue("kept_forkserver")
    else:
        while _held_forkservers:
            _held_forkservers.pop().close()
        forkservers.close_kept()
    before = _present()
    yield
    if not is_kept:
        forkservers.close_kept()
    deadline = time.monotonic() + _SETTLE_S
    for attempt in itertools.count():
        if not (left := _new_since(before)):
            return
        if time.monotonic() > deadline:
            pytest.fail(
                f"left behind: {left}{_holders_of_mappings()}{_stacks()}"
            )
        if attempt > 1:
            time.sleep(0.05)
        # What a test has left in a cycle is young as a rule; to look at all
        # there is takes as long as many tests.
        gc.collect(2 if attempt else 1)
