"""`close` and `state_dict` from other threads, from builds, and from handlers.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from places import KINDS
from samples import Numbered, numbers

from keras_fastdata import LoaderError
from keras_fastdata.building import build_context
from keras_fastdata.engine import loader as loader_module
from keras_fastdata.workers import in_flight, inline, supervisor, thread
from keras_fastdata.workers.process import channel, pool

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_PATIENCE_S = 120.0
_WHERE = pytest.mark.parametrize("where", KINDS.values(), ids=list(KINDS))


def wait_for(condition):
    """Waits until something is so."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Gated(Numbered):
    """Batch `at` of the second epoch takes until a file is there."""

    def __init__(self, folder, at, **kwargs):
        super().__init__(length=6, **kwargs)
        self.begun, self.gate = folder / "begun", folder / "gate"
        self.at = at

    def __getitem__(self, index):
        if self.epoch == 1 and index == self.at:
            self.begun.touch()
            wait_for(self.gate.exists)
        return super().__getitem__(index)


@_WHERE
@pytest.mark.parametrize("at", [0, 3])
def test_neither_waits_for_a_slow_batch_and_none_is_lost(where, at, tmp_path):
    found = []
    with Gated(tmp_path, at, **where) as dataset:
        assert numbers(dataset) == list(range(6))
        consumer = threading.Thread(
            target=lambda: found.extend(numbers(dataset)), daemon=True
        )
        consumer.start()
        wait_for(dataset.begun.exists)
        wait_for(lambda: len(found) == 0)
        wait_for(lambda: dataset.state_dict()["position"] == at)
        assert dataset.state_dict()["epoch"] == 1
        loader = dataset._fastdata.loader
        workers = loader._pool.workers
        closer = threading.Thread(target=dataset.close, daemon=True)
        closer.start()
        wait_for(lambda: loader._pool.workers is not workers)
        if where != KINDS["process"]:
            # A thread cannot be killed; `close` waits for it for a while.
            dataset.gate.touch()
        closer.join(_PATIENCE_S)
        assert not closer.is_alive()
        dataset.gate.touch()
        consumer.join(_PATIENCE_S)
    assert found == list(range(6))


class ClosesItself(Numbered):
    """Calls `close` in everything that a worker runs."""

    def on_worker_start(self):
        self.close()

    def on_worker_stop(self):
        self.close()

    def __getitem__(self, index):
        self.close()
        return super().__getitem__(index)


@_WHERE
def test_a_worker_that_closes_its_own_dataset_does_nothing(where):
    with ClosesItself(**where) as dataset:
        assert numbers(dataset) == list(range(10))
        assert numbers(dataset) == list(range(10))


class Hooked(Numbered):
    """Its hook does what it is told to."""

    def on_epoch_end(self):
        self.does()


def test_a_hook_may_close_and_is_not_waited_for():
    running, goes_on = threading.Event(), threading.Event()
    with Hooked(workers=2) as dataset:
        batches = iter(dataset)
        next(batches)
        loader = dataset._fastdata.loader
        dataset.does = dataset.close
        dataset.on_epoch_end()
        assert loader._pool.workers is None
        dataset.does = lambda: running.set() or goes_on.wait(_PATIENCE_S)
        next(batches)
        hook = threading.Thread(target=dataset.on_epoch_end)
        hook.start()
        assert running.wait(_PATIENCE_S)
        dataset.close()
        assert loader._pool.workers is None
        goes_on.set()
        hook.join()
        assert len(numbers(batches)) == 8


# -- signal handlers -----------------------------------------------------------


@contextlib.contextmanager
def handling(handler):
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Signals(Numbered):
    """Sends the trainer a signal while it waits for batch 3, once."""

    def __init__(self, mark, **kwargs):
        super().__init__(**kwargs)
        self.mark = mark
        self.trainer = os.getpid()

    def __getitem__(self, index):
        if index == 3 and not os.path.exists(self.mark):
            pathlib.Path(self.mark).touch()
            os.kill(self.trainer, signal.SIGUSR1)
        return super().__getitem__(index)


@_WHERE
def test_a_handler_may_close_while_a_batch_is_awaited(where, tmp_path):
    states = []

    def close():
        dataset.close()
        states.append(dataset.state_dict()["position"])

    with Signals(tmp_path / "mark", **where) as dataset, handling(close):
        assert numbers(dataset) == list(range(10))
    assert len(states) == 1


_OURS = {loader_module.__file__, pool.__file__, channel.__file__}
_OURS |= {in_flight.__file__, supervisor.__file__}
_OURS |= {thread.__file__, inline.__file__}


def _epoch_interrupted_at(moment, dataset, errors=()):
    """Iterates over an epoch; at that line of ours a signal arrives.

    Args:
        moment: The number of the line, from 1; 0 for no signal.
        dataset: Three batches.
        errors: What the handler of the signal raises.

    Returns:
        How many lines there were.
    """
    lines, found = 0, None

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in _OURS:
            return None
        if event == "line":
            lines += 1
            if lines == moment:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(*errors):
            found = numbers(dataset)
    finally:
        sys.settrace(before)
    is_raised = errors and 0 < moment <= lines
    assert found == (None if is_raised else list(range(3))), moment
    return lines


_AT_ANY_MOMENT = pytest.mark.parametrize(
    ("where", "moments"),
    [
        (KINDS["inline"], 40),
        (KINDS["thread"], 40),
        ({**KINDS["process"], "workers": 1}, 12),
        pytest.param(KINDS["thread"], 500, marks=pytest.mark.long),
        pytest.param(KINDS["process"], 300, marks=pytest.mark.long),
    ],
)


@_AT_ANY_MOMENT
def test_a_handler_may_close_at_any_moment(where, moments):
    states = []

    def close():
        dataset.close()
        states.append(dataset.state_dict())

    with (
        # What forks workers is not to be started anew each time.
        Numbered(**where) as another,
        Numbered(length=3, **where) as dataset,
        handling(close),
    ):
        next(iter(another))
        lines = _epoch_interrupted_at(0, dataset)
        for moment in range(1, lines, max(1, lines // moments)):
            dataset.close()
            states.clear()
            if _epoch_interrupted_at(moment, dataset) >= moment:
                assert states, moment
        loader = dataset._fastdata.loader
        assert not loader._pool._dropped


class Interrupt(Exception):
    pass


@_AT_ANY_MOMENT
def test_a_handler_may_raise_at_any_moment(where, moments):
    def interrupt():
        raise Interrupt

    with (
        Numbered(**where) as another,
        Numbered(length=3, **where) as dataset,
        handling(interrupt),
    ):
        next(iter(another))
        lines = _epoch_interrupted_at(0, dataset)
        for moment in range(1, lines, max(1, lines // moments)):
            _epoch_interrupted_at(moment, dataset, (Interrupt,))
            if moment % 2:
                dataset.close()
            assert numbers(dataset) == [0, 1, 2], moment


def test_an_error_of_a_handler_as_a_build_ends_leaves_no_context(monkeypatch):
    class TimedOutError(Exception):
        pass

    def leave(*_):
        raise TimedOutError

    with Numbered(3, workers=0) as dataset:
        batches = iter(dataset)
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(build_context.Building, "__exit__", leave)
            with pytest.raises(TimedOutError):
                next(batches)
        assert build_context.current_context() is None
        assert numbers(dataset) == [0, 1, 2]


def test_workers_that_a_handler_closed_amid_a_call_are_gone_after_it():
    with Numbered(workers=2, use_multiprocessing=True) as dataset:
        batches = iter(dataset)
        next(batches)
        loader = dataset._fastdata.loader
        with loader._pool.lock:  # as it is where a call is under way
            dataset.close()
            assert loader._pool.workers is not None
            with pytest.raises(LoaderError, match="about to hand one out"):
                next(batches)
        assert dataset.state_dict()["position"] == 1
        assert loader._pool.workers is None
        assert numbers(batches) == list(range(1, 10))
