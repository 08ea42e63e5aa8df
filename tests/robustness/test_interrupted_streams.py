"""A stream that an interrupt, an error or `close` has ended goes on after it.

That holds for epochs that follow each other (`restart=False`), and for the
user's own iterator. With `restart=True` each epoch begins anew.
"""

import contextlib
import itertools
import os
import sys

import keras
import numpy as np
import pytest
from places import FULL, PLACES

from keras_fastdata import FastPyDataset, GeneratorDataset, LoaderError
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.workers import inline

HERE = ["inline", "1 thread"]
ITEMS = 24  # of one pass over the data


class Interrupting:
    """Yields numbers, and raises `error` once, in place of number `at`."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.errors = iter([] if at is None else [error()])
        self.at = at

    def __call__(self, shard_index, num_shards, rng):
        for number in range(shard_index, ITEMS, num_shards):
            self.check(number)
            yield np.array([number, rng.integers(1000)])

    def check(self, number):
        if number == self.at and (error := next(self.errors, None)):
            raise error


class OwnIterator(Interrupting):
    """An iterator, which goes on after it has raised an error."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        super().__init__(at, error)
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.check(self.number)
        if self.number == ITEMS:
            raise StopIteration
        self.number += 1
        return np.array([self.number - 1, 0])


def stream(source, num_shards=1, **place):
    """Epochs of three batches, which follow each other."""
    restart = None if isinstance(source, OwnIterator) else False
    return GeneratorDataset(
        source,
        2,
        num_batches=3,
        num_shards=num_shards,
        restart=restart,
        seed=3,
        **place,
    )


def taken(dataset, epochs):
    """The batches of the epochs; calls `next` again after an interrupt."""
    found = []
    for _ in range(epochs):
        batches = iter(dataset)
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                break
            except KeyboardInterrupt:
                pass
    return found


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("at", [3, 6, 14, 20])
def test_generators_go_on_after_an_interrupt_in_any_epoch(
    place, num_shards, at
):
    with stream(Interrupting(), num_shards, **PLACES[place]) as dataset:
        expected = taken(dataset, 5)
    with stream(Interrupting(at), num_shards, **PLACES[place]) as dataset:
        assert taken(dataset, 5) == expected


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("at", [6, 14])
def test_a_new_epoch_begins_where_an_interrupt_has_ended_the_one_before(
    place, num_shards, at
):
    with stream(Interrupting(), num_shards, **PLACES[place]) as dataset:
        expected = taken(dataset, 5)
    found = []
    with stream(Interrupting(at), num_shards, **PLACES[place]) as dataset:
        for _ in range(5):
            with contextlib.suppress(KeyboardInterrupt):
                for batch in dataset:
                    found.append(batch.tolist())
    assert found == expected[: len(found)]
    assert 12 <= len(found) < 15  # one epoch was cut short


@pytest.mark.parametrize("source", [Interrupting, OwnIterator])
@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("builds", [1, 2, 3, 6])
def test_a_batch_whose_delivery_was_interrupted_comes_in_the_next_epoch(
    place, source, builds, monkeypatch
):
    """The interrupt comes after the build of the batch, and before `next`."""
    with stream(source(), **PLACES[place]) as dataset:
        expected = taken(dataset, 3)
    build_here, left, found = inline.build_here, [builds], []

    def interrupted(*args):
        built = build_here(*args)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return built

    monkeypatch.setattr(inline, "build_here", interrupted)
    with stream(source(), **PLACES[place]) as dataset:
        for _ in range(4):
            with contextlib.suppress(KeyboardInterrupt):
                for batch in dataset:
                    found.append(batch.tolist())
    assert left[0] <= 0
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("place", [*HERE, "4 threads", "2 processes"])
@pytest.mark.parametrize("before", [2, 5])
def test_generators_go_on_after_close(place, before):
    with stream(Interrupting(), 2, **PLACES[place]) as dataset:
        expected = taken(dataset, 4)
    found = []
    with stream(Interrupting(), 2, **PLACES[place]) as dataset:
        for _ in range(4):
            for batch in dataset:
                found.append(batch.tolist())
                if len(found) == before:
                    dataset.close()
    assert found == expected


def test_an_epoch_after_the_error_of_a_generator_has_new_generators():
    with stream(Interrupting(14, ValueError), workers=0) as dataset:
        found = taken(dataset, 2)
        with pytest.raises(ValueError, match=r"In batch 7 of shard 0"):
            taken(dataset, 1)
        assert taken(dataset, 2)[:3] != found[:3]  # another seed
        assert [b[0][0] for b in taken(dataset, 1)] == [12, 14, 16]


@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("at", [3, 6, 14, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_iterator_loses_nothing_by_its_own_error(place, at, error):
    found = []
    with stream(OwnIterator(at, error), **PLACES[place]) as dataset:
        while len(found) < ITEMS:
            try:
                for batch in dataset:
                    found += [number for number, _ in batch.tolist()]
            except (error, LoaderError) as caught:
                is_end = isinstance(caught, LoaderError)
                assert not is_end or len(found) == ITEMS
    assert found == list(range(ITEMS))


@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("batch_size", [2, None])
def test_an_iterator_loses_nothing_by_close(place, batch_size):
    """Nor what a thread has read ahead."""
    numbers = iter([np.full(2, number) for number in range(ITEMS)])
    found = []
    with GeneratorDataset(numbers, batch_size, **PLACES[place]) as dataset:
        for _ in range(2):
            for batch in dataset:
                found += set(batch.ravel().tolist())
                if len(found) in (4, 10):
                    dataset.close()
    assert found == list(range(ITEMS))


def test_an_iterator_loses_nothing_by_an_interrupt_that_ends_its_thread(
    monkeypatch,
):
    """An interrupt amid a step of the loader makes new threads."""
    found, ends = [], [4, 10]
    with GeneratorDataset(iter(range(ITEMS)), 2, workers=1) as dataset:
        planner = loader_of(dataset._fastdata_plan.shards[0])._planner
        ensure_order = planner.ensure_order

        def interrupted(*args):
            ensure_order(*args)
            if len(found) in ends:
                ends.remove(len(found))
                raise KeyboardInterrupt

        monkeypatch.setattr(planner, "ensure_order", interrupted)
        batches = iter(dataset)
        while len(found) < ITEMS:
            with contextlib.suppress(KeyboardInterrupt):
                found += next(batches).tolist()
    assert found == list(range(ITEMS))
    assert not ends


class Stopping(keras.callbacks.Callback):
    """Ends `fit` after the third batch, with or without an error."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and self.how == "stop":
            self.model.stop_training = True
        elif batch == 2:
            raise KeyError("mine")


def endless():
    for number in itertools.count():
        yield np.full(1, number, "float32"), np.zeros(1, "float32")


@pytest.mark.backend
@pytest.mark.parametrize("how", ["stop", "raise"])
@pytest.mark.parametrize("place", HERE)
def test_a_stream_goes_on_after_a_fit_that_ended_amid_an_epoch(place, how):
    dataset = GeneratorDataset(
        endless, 1, num_batches=6, restart=False, **PLACES[place]
    )
    held = []  # as notebooks and tracebacks hold them
    with dataset:
        for _ in range(2):
            model = keras.Sequential([keras.layers.Dense(1)])
            model.build((None, 1))
            model.compile("sgd", "mse")
            with contextlib.suppress(KeyError):
                model.fit(dataset, verbose=0, callbacks=[Stopping(how)])
            held.append(model)
        assert next(iter(dataset))[0].tolist() == [[6]]


def test_an_epoch_that_was_given_up_builds_no_further_batch_inline(tmp_path):
    class Told(FastPyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            with (tmp_path / "told").open("a") as told:
                told.write(f"{self.epoch}.{index} ")
            return np.full(1, index)

    dataset = Told(workers=0)
    held = iter(dataset)
    next(held)
    assert len(list(dataset)) == 5
    told = (tmp_path / "told").read_text().split()
    assert told == ["0.0", *(f"1.{index}" for index in range(5))]
    assert int(next(held)[0]) == 1


class Lines:
    """Raises `KeyboardInterrupt` at line `at` of those that build streams."""

    def __init__(self, at):
        self.count, self.at = 0, at

    def __enter__(self):
        sys.settrace(self._call)

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, *_):
        name = os.path.basename(frame.f_code.co_filename)
        return self._line if name.startswith("generator") else None

    def _line(self, _, event, __):
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            raise KeyboardInterrupt
        return self._line


def traced(source, num_shards, place, at=None):
    """The batches of two epochs, and the lines that have run."""
    lines, found = Lines(at), []
    with stream(source(), num_shards, **PLACES[place]) as dataset:
        for _ in range(2):
            batches = None
            while True:
                try:
                    with lines:
                        batches = batches or iter(dataset)
                        found.append(next(batches).tolist())
                except KeyboardInterrupt:
                    continue
                except StopIteration:
                    break
    return found, lines.count


@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize(
    ("source", "num_shards"),
    [(Interrupting, 1), (Interrupting, 2), (OwnIterator, 1)],
)
def test_an_interrupt_at_any_line_loses_and_repeats_no_item(
    source, num_shards, place
):
    expected, count = traced(source, num_shards, place)
    for at in range(1, count, 1 if FULL else 29):
        found, _ = traced(source, num_shards, place, at)
        assert found == expected, at
