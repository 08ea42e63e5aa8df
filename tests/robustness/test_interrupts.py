"""Signals that come while workers are started or ended, or build."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pty
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from places import EVERY_KIND, KINDS, quickly
from samples import Deadly, Numbered, numbers
from trainers import Trainer

from keras_fastdata import FastPyDataset
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.acknowledgements import Acknowledgements
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.pool_factory import PoolFactory
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.position import Position
from keras_fastdata.engine.results import Results
from keras_fastdata.workers.process import channel
from keras_fastdata.workers.signals import DeferredSignals, Interruptible


class Late(Exception):
    pass


def _raise(number, frame):
    raise Late(number)


@pytest.fixture
def handlers():
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, _raise) for number in numbers]
    yield numbers
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("inner", [contextlib.nullcontext, DeferredSignals])
def test_a_handler_that_raises_does_so_at_the_end_of_the_outer_block(
    handlers, inner
):
    steps = []

    def run():
        with DeferredSignals():
            with inner():
                signal.raise_signal(signal.SIGUSR1)
            steps.append("went on")

    with pytest.raises(Late):
        run()
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGUSR1) is _raise


def test_none_of_several_signals_is_lost(handlers):
    met = []
    for number in handlers:
        signal.signal(number, lambda number, _: met.append(number))
    with DeferredSignals():
        for number in handlers:
            signal.raise_signal(number)
        assert met == []
    assert sorted(met) == sorted(handlers)


def test_stack_dumps_stay_beside_a_handler_and_are_not_delayed(
    handlers, tmp_path
):
    number, met = handlers[0], []
    signal.signal(number, lambda number, _: met.append(number))
    path = tmp_path / "stacks"

    def dumps():
        return path.read_text().count("most recent call first")

    with open(path, "w") as file:
        faulthandler.register(number, file, all_threads=False, chain=True)
        try:
            with DeferredSignals():
                signal.raise_signal(number)
                assert (dumps(), met) == (1, [])
            assert (dumps(), met) == (1, [number])
            signal.raise_signal(number)
            assert (dumps(), met) == (2, [number] * 2)
        finally:
            faulthandler.unregister(number)


def test_a_delayed_signal_wakes_an_event_loop_once(handlers):
    signal.signal(handlers[0], lambda *_: None)
    reads, writes = socket.socketpair()
    with reads, writes:
        writes.setblocking(False)
        before = signal.set_wakeup_fd(writes.fileno())
        try:
            with DeferredSignals():
                signal.raise_signal(handlers[0])
        finally:
            signal.set_wakeup_fd(before)
        assert reads.recv(9) == bytes([handlers[0]])


def test_without_a_handler_nothing_is_changed():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with DeferredSignals():
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, before)


def test_a_batch_that_was_broken_off_inline_is_no_other_iterators():
    class Stops(Numbered):
        def __getitem__(self, index):
            if index == 2:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    found = []
    with Stops(length=4, workers=0) as dataset:
        iterators = [iter(dataset), iter(dataset)]  # both stay alive
        for iterator in iterators:
            found += [int(next(iterator)[0][0, 0]) for _ in range(2)]
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
    assert found == [0, 1, 0, 1]


def test_every_handler_is_put_back_whenever_one_raises(handlers, monkeypatch):
    before = {n: signal.getsignal(n) for n in signal.valid_signals()}
    set_handler, calls = signal.signal, []

    def interrupted(number, handler):
        result = set_handler(number, handler)
        calls.append(number)
        if len(calls) == moment:
            raise Late(number)
        return result

    monkeypatch.setattr(signal, "signal", interrupted)
    for moment in range(1, 100):
        calls.clear()
        raises = contextlib.suppress(Late)
        with raises, DeferredSignals():
            pass
        found = {n: signal.getsignal(n) for n in before}
        assert found == before, moment
        if len(calls) < moment:
            break
    assert moment > 4


def test_a_second_signal_is_met_though_the_first_handler_raises(handlers):
    met = []

    def handler(number, frame):
        met.append(number)
        raise Late(number)

    for number in handlers:
        signal.signal(number, handler)

    def run():
        with DeferredSignals():
            for number in handlers:
                signal.raise_signal(number)

    with pytest.raises(Late):
        run()
    assert sorted(met) == sorted(handlers)


def test_a_signal_amid_the_handling_of_a_death_leaves_a_usable_dataset(
    handlers, monkeypatch, tmp_path
):
    forget = channel.Channel._forget

    def interrupted(self, worker):
        forget(self, worker)
        signal.raise_signal(handlers[0])

    kind = {"workers": 2, "use_multiprocessing": True}
    with Deadly(tmp_path / "deaths", length=6, **kind) as dataset:
        monkeypatch.setattr(channel.Channel, "_forget", interrupted)
        with pytest.raises(Late):
            list(dataset)
        monkeypatch.undo()
        assert numbers(dataset) == list(range(6))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_that_a_signal_finds_starting_are_kept(
    handlers, monkeypatch, kind
):
    create = PoolFactory.create

    def interrupted(self):
        pools.append(create(self))
        signal.raise_signal(handlers[0])
        return pools[-1]

    pools = []
    monkeypatch.setattr(PoolFactory, "create", interrupted)
    with Numbered(6, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        with pytest.raises(Late):
            next(batches)
        assert numbers(batches) == list(range(6))
    assert len(pools) == 1


class Waits(Numbered):
    """Gets a signal when it is pickled for the first time."""

    number = None
    went_on = False

    def __getstate__(self):
        number, self.number = self.number, None
        if number is not None:
            signal.raise_signal(number)
            self.went_on = True
        return super().__getstate__()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "portable"])
def test_a_signal_ends_the_pickling_of_a_dataset_at_once(handlers, method):
    """The code of the user's may wait for ever."""
    kind = {"workers": 1, "use_multiprocessing": True, "start_method": method}
    with Waits(3, **kind) as dataset:
        dataset.number = handlers[0]
        with pytest.raises(Late):
            list(dataset)
        assert not dataset.went_on
        assert signal.getsignal(handlers[0]) is _raise
        assert numbers(dataset) == list(range(3))


def test_what_is_interruptible_gets_the_signals_that_came_before(handlers):
    steps = []

    def run():
        with DeferredSignals(), DeferredSignals():
            signal.raise_signal(handlers[0])
            steps.append("delayed")
            with Interruptible():
                steps.append("went on")

    with pytest.raises(Late):
        run()
    assert steps == ["delayed"]
    assert signal.getsignal(handlers[0]) is _raise


def test_signals_are_delayed_again_after_what_is_interruptible(handlers):
    steps = []

    def run():
        with DeferredSignals(), DeferredSignals():
            with Interruptible():
                pass
            signal.raise_signal(handlers[0])
            steps.append("delayed")

    with pytest.raises(Late):
        run()
    assert steps == ["delayed"]
    assert signal.getsignal(handlers[0]) is _raise


def test_a_handler_in_what_is_interruptible_may_delay_signals_too(handlers):
    """As one does that iterates over another dataset."""
    with DeferredSignals(), Interruptible():
        with DeferredSignals(), Interruptible():
            assert signal.getsignal(handlers[0]) is _raise
        assert signal.getsignal(handlers[0]) is _raise
    assert signal.getsignal(handlers[0]) is _raise


class TimeIsUp(TimeoutError):
    """An error of an alarm. Python counts it among the errors of the system."""


@pytest.mark.parametrize("error", [Late, TimeIsUp])
def test_a_worker_that_a_signal_finds_starting_is_kept(
    handlers, monkeypatch, error
):
    """Else nothing would ever start between frequent alarms."""
    start = channel.Channel.start

    def handle(number, frame):
        raise error(number)

    def interrupted(self, index):
        started.append(worker := start(self, index))
        signal.raise_signal(handlers[0])
        return worker

    started = []
    signal.signal(handlers[0], handle)
    monkeypatch.setattr(channel.Channel, "start", interrupted)
    with Numbered(6, **KINDS["process"]) as dataset:
        batches, errors, got = iter(dataset), 0, []
        while errors < 10 and len(got) < 6:
            try:
                got += numbers([next(batches)])
            except error:
                errors += 1
        assert got == list(range(6))
        # Else `workers="auto"` would choose others.
        assert not loader_of(dataset)._pool.workers.has_failed_to_start
    assert [worker.index for worker in started] == [0, 1]


@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
def test_a_signal_while_workers_end_for_a_change_leaves_a_usable_dataset(
    handlers, monkeypatch
):
    ask_to_end = channel.Channel.ask_to_end

    def interrupted(self):
        ask_to_end(self)
        signal.raise_signal(handlers[0])

    kind = {"workers": 2, "use_multiprocessing": True, "start_method": "fork"}
    with Numbered(6, **kind) as dataset:
        assert numbers(dataset) == list(range(6))
        dataset.changed = True
        monkeypatch.setattr(channel.Channel, "ask_to_end", interrupted)
        with pytest.raises(Late):
            list(dataset)
        monkeypatch.undo()
        assert numbers(dataset) == list(range(6))


@pytest.mark.usefixtures("kept_forkserver")
def test_the_slots_of_an_interrupted_peek_are_free_again(monkeypatch):
    def free():
        arena = workers._arena
        arena._reclaim()
        return len(arena._warm) + len(arena._cold)

    def interrupt(workers, **_):
        raise KeyboardInterrupt

    with Numbered(workers=1, use_multiprocessing=True, seed=1) as dataset:
        assert len([0 for _ in dataset]) == 10
        loader = loader_of(dataset)
        workers = loader._pool.workers
        before = free()
        for _ in range(2):
            iterator = iterate(loader, dataset, shuffle=False)
            with monkeypatch.context() as patch:
                patch.setattr(loader._pool, "wait", interrupt)
                # The worker may be faster than this thread.
                patch.setattr(loader._prefetcher, "drain_results", id)
                with pytest.raises(KeyboardInterrupt) as held:
                    iterator.peek(2)
            del iterator
            assert len([0 for _ in dataset]) == 10
            assert loader._pool.workers is workers
            assert free() == before
            assert held.value is not None  # nor does its traceback keep them


class Gated(Numbered):
    """Batch 0 takes until the gate is open."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate, self.has_built = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if index == 0:
            self.gate.wait()
        if index == 1:
            self.has_built.set()
        return super().__getitem__(index)


def test_an_interrupted_peek_caches_each_batch_as_itself(monkeypatch):
    with Gated(workers=2, cache="memory", seed=1) as dataset:
        loader = loader_of(dataset)
        iterator = iterate(loader, dataset, shuffle=True)
        ahead = iterator._epoch.peeking()

        def interrupt(workers, **_):
            dataset.has_built.wait()
            if ahead.ready:  # batch 1 is
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(iterator._epoch, "peeking", lambda: ahead)
            patch.setattr(loader._pool, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                iterator.peek(2)
        del iterator
        dataset.gate.set()
        for _ in range(2):
            assert numbers(dataset) == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 2])
def test_an_error_while_a_batch_is_opened_ends_the_epoch_the_second_time(
    kind, times, monkeypatch
):
    """A signal handler may have raised it, so the batch is built once more."""
    open_batch, left = Results.open, [times]

    def interrupted(results, epoch, completed, index):
        if index == 2 and left[0]:
            left[0] -= 1
            raise TimeoutError
        return open_batch(results, epoch, completed, index)

    monkeypatch.setattr(Results, "open", interrupted)
    found = []
    with Numbered(4, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        while True:
            try:
                found += numbers([next(batches)])
            except TimeoutError:
                found.append("error")
            except StopIteration:
                break
    ends = ["error", 2, 3] if times == 1 else ["error", "error"]
    assert found == [0, 1, *ends]


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize("after", quickly(range(0, 60, 3), 0, 12, 30, 45))
def test_a_batch_is_not_lost_when_a_handler_raises_after_its_count(kind, after):
    """Line `after` of those that follow the count raises an error."""
    left = None

    def trace(frame, event, _):
        nonlocal left
        if event == "line" and "keras_fastdata" in frame.f_code.co_filename:
            if left is None and frame.f_code is Epoch.note_delivery.__code__:
                left = after
            elif left is not None:
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise Late
        return trace

    with Numbered(8, **EVERY_KIND[kind]) as dataset:
        batches = iter(dataset)
        found = [next(batches)]
        with contextlib.suppress(Late):
            sys.settrace(trace)
            try:
                found.append(next(batches))
            finally:
                sys.settrace(None)
        found += batches
        assert numbers(found) == numbers(list(Numbered(8, workers=0)))


def _all_of(batches):
    """Calls `next` until the epoch's end, again after each `Late`."""
    found = []
    while True:
        try:
            found += numbers([next(batches)])
        except Late:
            continue
        except StopIteration:
            return found


def _raise_after_count(monkeypatch, then=lambda: None):
    """Has the delivery of batch 2 raise an error, when it is counted."""
    note, left = Position.note_delivery, [1]

    def interrupted(position, epoch):
        note(position, epoch)
        if epoch.delivered == 3 and left:
            left.clear()
            then()
            raise Late

    monkeypatch.setattr(Position, "note_delivery", interrupted)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_batch_is_not_lost_when_a_second_handler_raises(kind, monkeypatch):
    become_usable, left = PoolHandle._become_usable, []

    def interrupted(pool):
        if left:
            left.pop()
            raise Late
        become_usable(pool)

    with Numbered(8, **EVERY_KIND[kind]) as dataset:
        monkeypatch.setattr(PoolHandle, "_become_usable", interrupted)
        _raise_after_count(monkeypatch, lambda: left.append(1))
        assert _all_of(iter(dataset)) == list(range(8))
    assert not left


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_batch_is_not_lost_when_another_thread_goes_on(
    kind, last, monkeypatch
):
    """That thread takes the next batch, or all batches that are left."""
    requeue, found = Acknowledgements.requeue, []

    def interrupted(acknowledgements, delivery):
        def take():
            found.extend(_all_of(batches) if last else numbers([next(batches)]))

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(60)
        requeue(acknowledgements, delivery)

    with Numbered(8, **EVERY_KIND[kind]) as dataset:
        monkeypatch.setattr(Acknowledgements, "requeue", interrupted)
        _raise_after_count(monkeypatch)
        batches = iter(dataset)
        found += _all_of(batches)
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_state_between_an_error_and_the_next_call_does_not_count_the_batch(
    kind, monkeypatch
):
    with Numbered(8, **EVERY_KIND[kind]) as dataset:
        _raise_after_count(monkeypatch)
        batches = iter(dataset)
        found = numbers([next(batches), next(batches)])
        with pytest.raises(Late):
            next(batches)
        state = dataset.state_dict()
        assert numbers(batches) == list(range(2, 8))
    assert found == [0, 1]
    with Numbered(8, **EVERY_KIND[kind]) as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed) == list(range(2, 8))


# -- a terminal ----------------------------------------------------------------

_ASKS = """
terminal = os.open({terminal!r}, os.O_RDWR)  # the session's from now on

class Asks(Data):
    def __getitem__(self, index):
        with open("/dev/tty") as typed:
            return typed.readline()

data = Asks(1, start_method={start_method!r})
try:
    list(data)
except OSError as error:
    say(error.strerror)
"""


@pytest.mark.parametrize(
    "start_method",
    quickly(["forkserver", "spawn", "fork", "portable"], "forkserver"),
)
def test_to_read_from_the_terminal_fails_in_a_worker(start_method, zygote):
    """The kernel stops whatever reads from it in the background."""
    ours, theirs = pty.openpty()
    try:
        script = _ASKS.format(
            terminal=os.ttyname(theirs), start_method=start_method
        )
        with Trainer(zygote, script) as trainer:
            assert trainer.line() == "Input/output error"
            assert trainer.end() == 0
            trainer.leaves_nothing()
    finally:
        os.close(ours)
        os.close(theirs)


class Signalled(FastPyDataset):
    """The first build of batch 3 sends a signal to the thread `main`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.main = threading.get_ident()
        self.handled = threading.Event()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if (self.epoch, index) == (0, 3) and not self.handled.is_set():
            signal.pthread_kill(self.main, signal.SIGUSR1)
            self.handled.wait()
        return np.full(1, index)


def test_a_signal_handler_may_use_the_dataset_that_is_waited_for(request):
    read = []

    def handler(*_):
        dataset.handled.set()  # batch 3 arrives while the handler reads
        read.extend(int(batch[0]) for batch in dataset)
        time.sleep(0.3)  # longer than the interrupted wait

    before = signal.signal(signal.SIGUSR1, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    with Signalled(workers=2) as dataset:
        assert [int(batch[0]) for batch in dataset] == [*range(6)]
    assert read == [*range(6)]


class Draws(FastPyDataset):
    """Draws in all ways; batch 2 sends a signal in the middle, once."""

    def __init__(self, sends=(), **kwargs):
        super().__init__(workers=0, seed=5, **kwargs)
        self.generator = np.random.default_rng(3)
        self.sends = sends  # the place where nothing notices a change

    def __len__(self):
        return 4

    def __getitem__(self, index):
        first = self._draw()
        if index == 2 and next(self.sends, False):
            signal.raise_signal(signal.SIGUSR1)
        return np.array([index, *first, *self._draw()])

    def _draw(self):
        return self.rng.random(), np.random.rand(), self.generator.random()


@pytest.mark.parametrize("reads", ["same", "other"])
def test_a_signal_handler_that_reads_amid_a_build_changes_no_batch(
    request, reads
):
    read = []

    def handler(*_):
        read.append(list(dataset if reads == "same" else Draws(iter(()))))

    before = signal.signal(signal.SIGUSR1, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    expected = Draws(iter(()))
    epochs = [list(expected), list(expected)]
    dataset = Draws(iter([True]))
    assert np.array_equal(list(dataset), epochs[0])
    (found,) = read
    assert np.array_equal(found, epochs[reads == "same"])
