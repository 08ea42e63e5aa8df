"""Memory of a worker is used again once nobody refers to it."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings

import numpy as np
import pytest

from keras_fastdata.memory import codec, named_memory
from keras_fastdata.memory.block_arena import BlockArena
from keras_fastdata.memory.block_writer import Blocks, BlockWriter

LARGE = 50_000


@pytest.fixture
def arena():
    with contextlib.closing(BlockArena(warm_slots=3, hold_limit=4)) as made:
        yield made


class Worker:
    """What a worker does with its tasks, in this process."""

    def __init__(self, arena):
        self.arena = arena
        self.owner = arena.add_owner()
        self.blocks = Blocks(arena.prefix)
        self.task_id = 0

    def build(self, batch, in_place=True):
        """Writes a batch; returns its slot and its description."""
        self.task_id += 1
        slot = self.arena.take()
        number = self.arena.bind(slot, self.owner)
        for dropped in self.arena.take_dropped(self.owner):
            self.blocks.drop(dropped)
        writer = BlockWriter(self.blocks, number, self.task_id, in_place)
        batch = batch(writer) if callable(batch) else batch
        encoded = codec.encode([batch], writer)
        if writer.made_nbytes:
            self.arena.attach(slot, self.task_id, writer.made_nbytes)
        return slot, encoded

    def deliver(self, batch, **kwargs):
        slot, encoded = self.build(batch, **kwargs)
        return codec.decode(encoded, self.arena, slot)


def _full(value, size=LARGE):
    return np.full(size, value, "float32")


def _address(array):
    return array.__array_interface__["data"][0]


def test_a_batch_is_what_was_written(arena):
    worker = Worker(arena)
    for size in (1, 10, 9000, LARGE, 10 * LARGE, 7):
        batch = (_full(size, size), {"a": _full(2)})
        x, rest = worker.deliver(batch)
        assert (x == size).all()
        assert len(x) == size
        assert (rest["a"] == 2).all()


def test_memory_is_used_again_after_the_last_array_died(arena):
    worker = Worker(arena)
    first = worker.deliver(_full(1))
    place = _address(first)
    second = worker.deliver(_full(2))
    assert _address(second) != place
    part = first[5:7]
    del first
    third = worker.deliver(_full(3))
    assert _address(third) != place
    assert (part == 1).all()
    del part
    assert _address(worker.deliver(_full(4))) == place
    assert (second == 2).all()
    assert (third == 3).all()


def test_no_worker_gets_the_memory_of_another(arena):
    one, other = Worker(arena), Worker(arena)
    other.task_id = 1000
    place = _address(one.deliver(_full(1)))
    assert _address(other.deliver(_full(2))) != place
    assert _address(one.deliver(_full(3))) == place


def test_memory_of_a_worker_that_has_ended_lasts_as_long_as_its_arrays(arena):
    worker = Worker(arena)
    held = worker.deliver(_full(1))
    arena.remove_owner(worker.owner)
    worker.blocks = None
    gc.collect()
    assert (held == 1).all()
    assert arena.nbytes >= held.nbytes
    del held
    assert not arena.crowded
    assert arena.nbytes == 0


def test_free_memory_beyond_the_limit_is_given_back(arena):
    worker = Worker(arena)
    held = [worker.deliver(_full(n)) for n in range(4)]
    assert arena.crowded
    copied = worker.deliver(_full(9))
    assert (copied == 9).all()
    before = arena.nbytes
    held.clear()
    assert not arena.crowded
    assert arena.nbytes < before
    arena.keep_warm(0)
    assert arena.nbytes == 0
    assert len(arena.take_dropped(worker.owner)) >= 4


def test_arrays_from_empty_stay_where_they_are_if_they_fit(arena):
    worker = Worker(arena)
    worker.deliver(_full(0, 4 * LARGE))

    def build(writer):
        first, second = writer.empty(LARGE), writer.empty(LARGE)
        assert np.shares_memory(first, writer._segment.root(0, 0, first.nbytes))
        first.fill(1)
        second.fill(2)
        return first, second[10:]

    first, second = worker.deliver(build)
    assert (first == 1).all()
    assert (second == 2).all()
    assert len(second) == LARGE - 10


def test_arrays_from_empty_that_do_not_fit_are_copied(arena):
    def build(writer):
        arrays = [writer.empty(LARGE * n) for n in (1, 2, 30)]
        for n, array in enumerate(arrays):
            array.fill(n)
        return (*arrays, _full(7, 50 * LARGE)[::2])

    worker = Worker(arena)
    for _ in range(3):
        *arrays, last = worker.deliver(build)
        for n, array in enumerate(arrays):
            assert (array == n).all()
        assert (last == 7).all()


def test_an_array_that_the_dataset_keeps_is_copied(arena):
    kept = []

    def build(writer):
        kept.append(writer.empty(LARGE))
        kept[0].fill(5)
        return kept[0]

    slot, encoded = Worker(arena).build(build)
    assert encoded.retained
    batch = codec.decode(encoded, arena, slot)
    kept[0].fill(6)
    assert (batch == 5).all()


def test_no_name_is_left_when_the_memory_is_open_or_given_up(arena):
    def names():
        listed = os.listdir("/dev/shm")
        return [name for name in listed if name.startswith(arena.prefix)]

    worker = Worker(arena)
    held = worker.deliver(_full(1))
    assert not names()
    slot, _ = worker.build(_full(1, 100 * LARGE))
    assert not names()
    worker.blocks.make(99, 77, 1000)  # and it dies before it tells
    assert len(names()) == 1
    arena.forget([77, 78])
    assert not names()
    worker.blocks.make(99, 79, 1000)  # or the trainer does
    worker.blocks.remove_names()
    assert not names()
    arena.free(slot)
    assert (held == 1).all()


def test_memory_that_has_gone_cannot_be_opened():
    with pytest.raises(FileNotFoundError):
        named_memory.attach(named_memory.new_prefix(), 1000)


def test_a_fork_keeps_its_batch_when_the_parent_drops_it(arena):
    worker = Worker(arena)
    held = worker.deliver(_full(1))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork
        pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0 if (held == 1).all() else 1)
    del held
    for _ in range(3):
        worker.deliver(_full(2))
    os.close(writer)
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
