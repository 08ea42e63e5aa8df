"""What goes on for long stays as small as it was.

Figures are taken after a warm-up and at the end: descriptors, threads and
mappings must be the same, and memory within a few megabytes, in the training
process and in the fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import select
import signal
import warnings

import numpy as np
import psutil
import pytest
from places import FULL, KINDS, quickly
from samples import Numbered, numbers

from keras_fastdata import FastPyDataset

# The long way round, in the full run.
RESTARTS = 500 if FULL else 40
PROCESSES = {"workers": 2, "use_multiprocessing": True}
everywhere = pytest.mark.parametrize("place", quickly(KINDS, "process"))
in_parallel = pytest.mark.parametrize("place", ["thread", "process"])

MEGABYTES = 8  # that the training process may have grown by
NURSERY_MEGABYTES = 1
# CPython and glibc map and unmap an arena now and then.
MAPPINGS = 8
# A fork server may be at a message, or a death, whose descriptors it then
# closes. All here is done more often than this.
DESCRIPTORS = 4


@dataclasses.dataclass
class Figures:
    """What one process has."""

    descriptors: int
    threads: int
    mappings: int
    megabytes: float

    @staticmethod
    def of(pid, field):
        """Of a process; `field` of its smaps_rollup is its memory.

        "Anonymous:", where other processes come and go that map the same
        files.
        """
        proc = f"/proc/{pid}"
        with open(f"{proc}/maps") as maps:
            mappings = len(maps.readlines())
        with open(f"{proc}/smaps_rollup") as rollup:
            kilobytes = next(
                int(line.split()[1]) for line in rollup if field in line
            )
        return Figures(
            len(os.listdir(f"{proc}/fd")),
            len(os.listdir(f"{proc}/task")),
            mappings,
            kilobytes / 1024,
        )


class Flat:
    """Compares the figures of now with those when it was made."""

    def __init__(self):
        self.before = self.take()

    @staticmethod
    def take():
        gc.collect()
        with contextlib.suppress(AttributeError):  # it is glibc's
            ctypes.CDLL(None).malloc_trim(0)
        found = {"trainer": Figures.of(os.getpid(), "Rss:")}
        for child in psutil.Process().children():
            found[f"fork server {child.pid}"] = Figures.of(
                child.pid, "Anonymous:"
            )
        return found

    def check(self):
        """Fails where a figure has grown."""
        now = self.take()
        assert now.keys() == self.before.keys()
        for name, has in now.items():
            was = self.before[name]
            told = f"{name}: {was} -> {has}"
            assert has.descriptors <= was.descriptors + DESCRIPTORS, told
            assert has.threads == was.threads, told
            assert has.mappings <= was.mappings + MAPPINGS, told
            more = NURSERY_MEGABYTES if "forkserver" in name else MEGABYTES
            assert has.megabytes <= was.megabytes + more, told


class Raises(Numbered):
    """Raises for every odd batch, with something large in the frame."""

    def __getitem__(self, index):
        ballast = np.ones(300_000, np.uint8)
        if index % 2:
            raise ValueError(f"{index} of {ballast.sum()}")
        return super().__getitem__(index)


class Tabled(Numbered):
    """Has a table of a megabyte, whose first value is in every batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = np.zeros(1 << 20, np.uint8)

    def __getitem__(self, index):
        return np.array([self.table[0]]), np.array([index])


@everywhere
def test_200_epochs_leave_every_figure_as_it_was(place):
    with Numbered(length=10, shape=(64, 256), **KINDS[place]) as dataset:
        for _ in range(20):
            list(dataset)
        flat = Flat()
        for _ in range(200):
            assert numbers(dataset) == list(range(10))
        flat.check()


@pytest.mark.long
def test_two_datasets_in_turn_leave_every_figure_as_it_was():
    with (
        Numbered(length=5, **PROCESSES) as one,
        Numbered(length=5, shape=(64, 256), **PROCESSES) as other,
    ):
        for _ in range(10):
            list(zip(one, other, strict=True))
        flat = Flat()
        for _ in range(100):
            list(zip(one, other, strict=True))
        flat.check()


def _workers_of(dataset):
    workers = dataset._fastdata.loader._pool.workers._workers
    return {w.process.pid: w.process.pidfd for w in workers.values()}


def _kill_workers(dataset):
    """Kills every worker; returns how many when they have ended."""
    workers = _workers_of(dataset)
    for pid, pidfd in workers.items():
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(10_000), pid
    return len(workers)


def test_restarts_leave_every_figure_as_it_was():
    with Numbered(
        length=6, shape=(64, 256), max_worker_restarts=10**6, **PROCESSES
    ) as dataset:

        def restart(times):
            while times > 0:
                pids = _workers_of(dataset).keys()
                times -= _kill_workers(dataset)
                assert numbers(dataset) == list(range(6))
                assert not pids & _workers_of(dataset).keys()

        list(dataset)
        restart(20)
        flat = Flat()
        restart(RESTARTS)
        flat.check()


@pytest.mark.long
def test_deaths_amid_an_epoch_leave_every_figure_as_it_was():
    with Numbered(
        length=12, shape=(64, 256), max_worker_restarts=10**6, **PROCESSES
    ) as dataset:

        def epochs(count):
            for _ in range(count):
                batches = iter(dataset)
                seen = [next(batches) for _ in range(3)]
                _kill_workers(dataset)
                seen += batches
                assert numbers(seen) == list(range(12))

        epochs(10)
        flat = Flat()
        epochs(25)
        flat.check()


@pytest.mark.long
@everywhere
def test_100_new_states_leave_every_figure_as_it_was(place):
    with Tabled(length=4, **KINDS[place]) as dataset:

        def change(count):
            for number in range(count):
                if number % 2:
                    dataset.table = np.full(1 << 20, number, np.uint8)
                else:
                    dataset.table[:] = number
                    dataset.mark_changed()
                tables = [int(table[0]) for table, _ in dataset]
                assert tables == [number] * 4

        change(20)
        flat = Flat()
        change(100)
        flat.check()


@pytest.mark.long
def test_new_states_leave_the_workers_as_large_as_they_were():
    with Tabled(length=4, **PROCESSES) as dataset:

        def change(count):
            for number in range(count):
                dataset.table = np.full(1 << 20, number, np.uint8)
                list(dataset)

        def figures():
            pids = sorted(_workers_of(dataset))
            return [Figures.of(pid, "Anonymous:") for pid in pids]

        change(20)
        before = figures()
        change(100)
        for was, has in zip(before, figures(), strict=True):
            # A worker may have been about to load a state either time.
            assert has.descriptors <= was.descriptors + 1
            assert has.mappings <= was.mappings + MAPPINGS
            assert has.megabytes <= was.megabytes + MEGABYTES


@pytest.mark.long
@in_parallel
def test_new_states_amid_an_epoch_leave_every_figure_as_it_was(place):
    with Tabled(length=12, **KINDS[place]) as dataset:

        def change(count):
            for number in range(count):
                batches = iter(dataset)
                next(batches)
                dataset.table = np.full(1 << 20, number, np.uint8)
                assert {int(table[0]) for table, _ in batches} == {number}

        change(10)
        flat = Flat()
        change(50)
        flat.check()


@pytest.mark.long
@in_parallel
def test_100_datasets_in_turn_leave_every_figure_as_it_was(place):
    def use(count):
        for _ in range(count):
            dataset = Numbered(length=3, **KINDS[place])
            assert numbers(dataset) == [0, 1, 2]
            del dataset

    # A fork server of their own, or each would start one.
    with Numbered(length=3, **KINDS[place]) as keeper:
        list(keeper)
        use(10)
        flat = Flat()
        use(100)
        flat.check()


@pytest.mark.long
@in_parallel
def test_100_reopenings_leave_every_figure_as_it_was(place):
    with Numbered(length=3, **KINDS[place]) as keeper:
        list(keeper)
        dataset = Numbered(length=3, shape=(64, 256), **KINDS[place])

        def reopen(count):
            for _ in range(count):
                assert numbers(dataset) == [0, 1, 2]
                dataset.close()

        reopen(10)
        flat = Flat()
        reopen(100)
        flat.check()


@pytest.mark.long
def test_fork_servers_in_turn_leave_every_figure_as_it_was():
    dataset = Numbered(length=3, **PROCESSES)

    def reopen(count):
        for _ in range(count):
            assert numbers(dataset) == [0, 1, 2]
            dataset.close()

    reopen(3)
    flat = Flat()
    reopen(15)
    flat.check()


@pytest.mark.long
@everywhere
def test_100_abandoned_epochs_leave_every_figure_as_it_was(place):
    with Numbered(length=50, shape=(64, 256), **KINDS[place]) as dataset:

        def abandon(count):
            for _ in range(count):
                batches = iter(dataset)
                assert numbers(next(batches) for _ in range(5)) == [*range(5)]
                del batches

        abandon(20)
        flat = Flat()
        abandon(100)
        flat.check()
        assert numbers(dataset) == list(range(50))


@everywhere
def test_200_exceptions_leave_every_figure_as_it_was(place):
    with Raises(length=4, **KINDS[place]) as dataset:

        def fail(count):
            for _ in range(count):
                batches = iter(dataset)
                assert numbers([next(batches)]) == [0]
                with pytest.raises(ValueError, match="1 of 300000"):
                    next(batches)

        fail(40)
        flat = Flat()
        fail(200)
        flat.check()


@pytest.mark.long
@pytest.mark.parametrize("held", [3, 40, 200])
def test_batches_held_and_dropped_leave_every_figure_as_it_was(held):
    with Numbered(length=held, shape=(64, 256), **PROCESSES) as dataset:

        def hold(count):
            for _ in range(count):
                kept = list(dataset)
                assert all((x == i).all() for i, (x, _) in enumerate(kept))
                del kept

        hold(5)
        flat = Flat()
        hold(20)
        flat.check()


@pytest.mark.long
def test_a_window_of_held_batches_leaves_every_figure_as_it_was():
    with Numbered(length=200, shape=(64, 256), **PROCESSES) as dataset:

        def slide(epochs):
            window = []
            for _ in range(epochs):
                for batch in dataset:
                    window = [*window[-19:], batch]

        slide(2)
        flat = Flat()
        slide(5)
        flat.check()


def test_slots_are_all_free_after_many_ends_of_epochs():
    with Raises(length=20, shape=(64, 256), **PROCESSES) as dataset:
        for number in range(30 if FULL else 10):
            batches = iter(dataset)
            next(batches)
            if number % 3 == 0:
                with contextlib.suppress(ValueError):
                    list(batches)
            elif number % 3 == 1:
                dataset.length = 20 + number % 2
            else:
                _kill_workers(dataset)
        del batches
        dataset.length = 1
        list(dataset)
        gc.collect()
        workers = dataset._fastdata.loader._pool.workers
        while workers.busy:  # with batches that nobody wants any more
            workers.wait(1.0)
            assert not list(workers.collect())
        arena = workers._arena
        arena.free(arena.take())  # takes back what was dropped, too
        size = os.fstat(arena.segment.fd).st_size
        free = {*arena._warm, *arena._cold}
        assert free == set(range(size // arena.segment.stride))


class Chatty(FastPyDataset):
    """Logs and warns with every batch."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        logging.getLogger("chatty").warning("batch %d", index)
        warnings.warn(f"batch {index}", UserWarning, stacklevel=1)
        return np.array([index])


@pytest.mark.long
@in_parallel
def test_records_and_warnings_leave_every_figure_as_it_was(place, caplog):
    with (
        warnings.catch_warnings(record=True) as told,
        Chatty(**KINDS[place]) as dataset,
    ):
        warnings.simplefilter("always")

        def epochs(count):
            for _ in range(count):
                assert [int(x[0]) for x in dataset] == [0, 1, 2, 3]
                assert told
                assert caplog.records
                told.clear()
                caplog.clear()

        epochs(20)
        flat = Flat()
        epochs(100)
        flat.check()
