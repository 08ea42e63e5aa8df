"""`self.rng` and the like, asked for by threads that `__getitem__` starts."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pool_samples import DrawnInPool, Pooled, PooledSamples

from keras_fastdata import FastPyDataset, LoaderError, _dataset_internals
from keras_fastdata.memory.arena import Arena
from keras_fastdata.memory.codec import SlotWriter
from keras_fastdata.workers import thread

pytestmark = pytest.mark.usefixtures("kept_forkserver")

PLACES = {
    "1 thread": {"workers": 1},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
    "auto": {"workers": "auto"},
}


@pytest.mark.parametrize("kind", [Pooled, DrawnInPool, PooledSamples])
@pytest.mark.parametrize("place", PLACES)
def test_a_thread_of_a_build_is_told_of_its_batch(kind, place):
    def epochs(**kwargs):
        with kind(seed=1, **kwargs) as dataset:
            return [[x.tolist() for x in dataset] for _ in range(3)]

    assert epochs(**PLACES[place]) == epochs(workers=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_that_indexes_the_dataset_has_no_part_in_a_build(workers):
    """It may be a thread of the program, which plots a batch meanwhile."""

    class Plotted(FastPyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 1 and plots:
                goes_on.set()
                plots[0].result(60)
            return self.rng.random(3)

    def plot(dataset):
        assert goes_on.wait(60)
        return dataset[2]

    goes_on, plots = threading.Event(), []
    with Plotted(seed=1, workers=0) as dataset:
        alone = [batch.tolist() for batch in dataset]
    with (
        Plotted(seed=1, workers=workers) as dataset,
        ThreadPoolExecutor(1) as pool,
    ):
        plots.append(pool.submit(plot, dataset))
        found = [batch.tolist() for batch in dataset]
    assert found == alone


@pytest.mark.parametrize("cache", [None, "memory"])
def test_an_assignment_by_another_thread_amid_a_build_is_a_change(cache):
    begun, goes_on = threading.Event(), threading.Event()

    class Leveled(FastPyDataset):
        level = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            level = self.level
            if index == 1:
                begun.set()
                assert goes_on.wait(60)
            return np.array([level])

    with Leveled(workers=1, cache=cache) as dataset:
        batches = iter(dataset)
        found = [next(batches)]
        assert begun.wait(60)
        arguments = dataset, "level", 7
        thread = threading.Thread(target=setattr, args=arguments)
        thread.start()
        thread.join()
        goes_on.set()
        found += [*batches, *dataset]
    assert np.concatenate(found).tolist() == [0, 7, 7, 7, 7, 7, 7, 7]


def test_a_build_that_asks_for_the_batch_it_builds_is_told_so():
    """As it may by a `__del__` that the garbage collector runs in it."""

    class AsksForItself(FastPyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 1:
                assert goes_on.wait(60)
                with pytest.raises(LoaderError, match="would wait for itself"):
                    next(batches)
            return np.array([index])

    goes_on = threading.Event()
    with AsksForItself(workers=1) as dataset:
        batches = iter(dataset)
        found = [next(batches)]
        goes_on.set()
        found += batches
    assert np.concatenate(found).tolist() == [0, 1, 2]


def test_what_a_sample_draws_does_not_depend_on_the_batch_it_is_in():
    def drawn(batch_size):
        dataset = PooledSamples(batch_size=batch_size, seed=1, workers=0)
        return np.concatenate(list(dataset)).tolist()

    assert drawn(3) == drawn(4) == drawn(12)


def test_where_several_batches_are_built_at_once_it_is_told_what_to_do():
    with (
        Pooled(seed=1, workers=2) as dataset,
        pytest.raises(LoaderError, match=r"self\.\w+.*hand it to the thread"),
    ):
        list(dataset)


def test_auto_never_builds_such_batches_in_threads():
    with Pooled(seed=1, workers="auto") as dataset:
        for _ in range(4):
            list(dataset)
        assert dataset._fastdata.loader._in_effect.auto._tuner.is_excluded(
            processes=False
        )


def test_who_consumes_is_told_of_the_next_epoch_while_threads_build():
    building, go_on = threading.Event(), threading.Event()

    class Waits(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            if index == 1:
                building.set()
                assert go_on.wait(60)
            return np.full(2, index)

    with Waits(workers=2) as dataset:
        batches = iter(dataset)
        next(batches)
        assert building.wait(60)
        asked = []

        def consume():
            # Another walk, in a thread that is not the main one.
            iterator = iter(dataset)
            next(iterator)
            asked.append((dataset.epoch, dataset.worker_index))

        consumer = threading.Thread(target=consume)
        assert (dataset.epoch, dataset.worker_index) == (1, None)
        consumer.start()
        consumer.join(60)
        assert asked == [(2, None)]
        go_on.set()
        next(batches)


def test_threads_get_arrays_of_a_slot_that_do_not_overlap():
    arena = Arena(warm_slots=1, hold_limit=1)
    writer = SlotWriter(arena.segment, 0, in_place=True)
    made = [[] for _ in range(4)]
    start = threading.Barrier(4)

    def make(arrays):
        start.wait(60)
        for _ in range(2000):
            arrays.append(writer.empty((64, 64), "uint8"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make, args=(a,)) for a in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    places = sorted(
        array.__array_interface__["data"][0]
        for arrays in made
        for array in arrays
    )
    assert len(places) == 8000
    assert min(np.diff(places)) >= 64 * 64
    made.clear()
    arena.close()


def test_a_thread_that_outlives_close_does_not_end_its_successors_resources(
    monkeypatch,
):
    entered, leave, stopped = threading.Event(), threading.Event(), []

    class Slow(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            entered.set()
            assert leave.wait(60)
            return np.zeros(1)

        def on_worker_stop(self):
            stopped.append(threading.current_thread())

    monkeypatch.setattr(thread, "_CLOSE_TIMEOUT_S", 0.0)
    dataset = Slow(workers=1)
    waiting = threading.Thread(target=list, args=(dataset,), daemon=True)
    before = set(threading.enumerate())
    waiting.start()
    assert entered.wait(60)
    (old,) = set(threading.enumerate()) - before - {waiting}
    dataset.close()
    leave.set()
    old.join(60)
    waiting.join(60)
    monkeypatch.undo()
    dataset.close()
    assert old not in stopped
    assert len(stopped) == 1


def test_two_threads_that_begin_with_a_dataset_get_one_loader(monkeypatch):
    made, found = [], []

    class Slow(_dataset_internals.Loader):
        def __init__(self, *args):
            made.append(self)
            if len(made) == 1:
                other.start()
                other.join(0.2)
            super().__init__(*args)

    dataset = Pooled(workers=0)
    other = threading.Thread(
        target=lambda: found.append(_dataset_internals.loader_of(dataset)),
        daemon=True,
    )
    monkeypatch.setattr(_dataset_internals, "Loader", Slow)
    loader = _dataset_internals.loader_of(dataset)
    other.join(60)
    assert found == made == [loader]
