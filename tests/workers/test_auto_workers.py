"""`workers="auto"`: the same batches, wherever they turn out to be built."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import threading
import time

import auto_config
import auto_config_late
import keras
import numpy as np
import pytest
from auto_samples import (
    BUILDS,
    KINDS,
    Closes,
    DiesWhenLoaded,
    Draws,
    Notes,
    Opens,
    Raises,
    RefusesToLoad,
    RefusesToStart,
    Scales,
    ScalesByResult,
    ScalesLate,
    StaysHere,
    Waits,
)
from places import quickly
from samples import refused

from keras_fastdata import GeneratorDataset, LoaderHealth
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.tuner import ExcludedError, WorkerConfigChoice

AT_ONCE = {"pause_s": 0.0}  # where only the batches matter
SOON = {"pause_s": 0.001}  # where the test says who builds them

pytestmark = pytest.mark.usefixtures("kept_forkserver")


def batches_of(dataset, epochs=3):
    with dataset:
        return [batch for _ in range(epochs) for batch in dataset]


def places(dataset):
    return [
        decision.place
        for decision in dataset._fastdata.loader.pool_stats().decisions
    ]


def is_excluded(dataset, *, processes):
    tuner = dataset._fastdata.loader._in_effect.auto._tuner
    return tuner.is_excluded(processes=processes)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        np.testing.assert_equal(batch, other)


@pytest.fixture
def goes(monkeypatch):
    """Has every tuner go from place to place, after so many batches each."""

    def go(*tour, after=7):
        def tune(self):
            for place in itertools.cycle(tour):
                if place[0] and self.is_excluded(processes=place[1]):
                    continue
                self._move(
                    WorkerConfigChoice(*place),
                    "The test says so.",
                    settled=False,
                )
                with contextlib.suppress(ExcludedError):
                    for _ in range(after):
                        yield

        monkeypatch.setattr("keras_fastdata.engine.tuner.Tuner._tune", tune)

    return go


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_fixed_number_of_workers(kind):
    expected = batches_of(KINDS[kind](workers=0, seed=4, **AT_ONCE))
    assert_same(batches_of(KINDS[kind](workers="auto", seed=4)), expected)


@pytest.mark.long
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_come_once_and_in_order_however_often_it_moves(goes, shuffle):
    expected = batches_of(Waits(workers=0, seed=4, shuffle=shuffle, **AT_ONCE))
    goes((0, False), (3, False), (2, True), (1, False), (4, True))
    dataset = Waits(workers="auto", seed=4, shuffle=shuffle)
    with dataset:
        found = [batch for _ in range(3) for batch in dataset]
        assert len(places(dataset)) > 20
    assert_same(found, expected)


def test_the_settings_say_where_it_is(goes):
    goes((0, False), (4, False), after=30)
    with Waits(workers="auto") as dataset:
        assert (dataset.workers, dataset.use_multiprocessing) == (0, False)
        for _ in itertools.islice(dataset, 40):
            pass
        assert (dataset.workers, dataset.use_multiprocessing) == (4, False)
        assert places(dataset) == ["inline", "4 threads"]


@pytest.mark.parametrize("kind", ["Draws", "Holds", "Reseeds", "Opens"])
def test_what_threads_would_share_is_never_built_by_threads(kind):
    with KINDS[kind](workers="auto") as dataset:
        for _ in range(3):
            for _ in dataset:
                pass
        assert not any("thread" in place for place in places(dataset))
        assert is_excluded(dataset, processes=False)


def test_a_draw_that_comes_late_ends_threads_and_its_batch_is_built_again(
    goes,
):
    goes((3, False), (0, False), after=1000)
    with Draws(120, workers=0, seed=4, length=200, **AT_ONCE) as dataset:
        expected = list(dataset)
    with Draws(120, workers="auto", seed=4, length=200, **SOON) as dataset:
        batches = iter(dataset)
        found = list(itertools.islice(batches, 110))
        assert dataset.workers > 1
        assert not dataset.use_multiprocessing
        found += batches
        assert dataset.workers == 0
        assert is_excluded(dataset, processes=False)
    assert_same(found, expected)


def test_no_thread_builds_while_the_caller_builds_a_batch_that_drew(goes):
    BUILDS.clear()
    goes((3, False), (0, False), after=1000)
    with Notes(40, workers="auto", seed=4, length=41, **SOON) as dataset:
        batches = iter(dataset)
        list(itertools.islice(batches, 40))
        while BUILDS.count((False, False)) < 41:
            time.sleep(0.001)  # busy threads are waited for in any case
        next(batches)
    assert BUILDS[-2:] == [(True, True), (True, False)]


class _Meets(Draws):
    """While a caller builds a batch again, another thread asks for one."""

    asks = None

    def draw(self, index):
        is_begun = self.asks is not None and self.asks.ident is not None
        if threading.current_thread() is threading.main_thread():
            if index == self.since and not is_begun:
                self.asks.start()
                self.meets = self.builds.wait(timeout=0.5)
        elif is_begun:
            self.builds.set()
        return super().draw(index)


def test_no_thread_asks_workers_for_batches_while_another_builds_one(goes):
    with Draws(20, workers=0, seed=4, length=40, **AT_ONCE) as dataset:
        expected = list(dataset)
    goes((3, False), (0, False), after=1000)
    with _Meets(20, workers="auto", seed=4, length=40, **SOON) as dataset:
        batches, theirs = iter(dataset), iter(dataset)
        found = list(itertools.islice(batches, 15))
        others = [next(theirs)]
        assert dataset.workers == 3
        dataset.builds = threading.Event()
        dataset.asks = threading.Thread(target=others.extend, args=[theirs])
        found += batches
        dataset.asks.join()
        assert not dataset.meets
    assert_same(found, expected)
    assert len(others) == len(expected)


def test_draws_are_noticed_while_somebody_builds_inline(goes):
    with Draws(15, workers=0, seed=4, **AT_ONCE) as dataset:
        expected = list(dataset)
    goes((3, False), (0, False), after=1000)
    with (
        Draws(15, workers="auto", seed=4, **SOON) as dataset,
        Waits(workers=0, **SOON) as other,
    ):
        batches, others = iter(dataset), iter(other)
        found = [next(batches)]
        for _ in range(20):
            next(others)
        found += batches
    assert_same(found, expected)


def test_a_draw_of_somebody_elses_does_not_end_threads(goes):
    expected = batches_of(Waits(workers=0, seed=4, **AT_ONCE))
    goes((3, False), (0, False), after=1000)
    with Waits(workers="auto", seed=4, **SOON) as dataset:
        found = []
        for batch in itertools.chain(dataset, dataset, dataset):
            found.append(batch)
            if len(found) % 30 == 5:
                random.random()
        assert dataset.workers == 3
    assert_same(found, expected)


def test_an_error_after_a_draw_is_the_one_it_is_inline(goes):
    def error_of(**kwargs):
        with (
            Raises(seed=4, **kwargs) as dataset,
            pytest.raises(ValueError, match="drew") as caught,
        ):
            list(dataset)
        return str(caught.value)

    expected = error_of(workers=0)
    goes((3, False), (0, False), after=1000)
    assert error_of(workers="auto") == expected


def test_what_cannot_be_sent_later_is_built_here_from_then_on(goes):
    goes((2, True), (0, False), after=1000)
    with Waits(workers="auto", seed=4) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset.use_multiprocessing
        dataset.lock = (n for n in range(3))
        next(batches)
        assert dataset.workers == 0


def test_what_a_worker_closes_is_closed_in_processes_alone():
    with Closes(workers="auto") as dataset:
        next(iter(dataset))
        assert (dataset.workers, dataset.use_multiprocessing) == (1, True)


def test_an_interrupt_while_it_decides_does_no_harm(monkeypatch):
    def interrupted(samples):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "keras_fastdata.engine.tuner._situation_of", interrupted
    )
    with Waits(workers="auto", seed=4) as dataset:
        with pytest.raises(KeyboardInterrupt):
            list(dataset)
        assert len(list(dataset)) == 60


def test_the_first_batches_may_be_such_that_draw_late(goes):
    # TensorFlow looks at batches 0 and 1 before their turn.
    goes((2, False), (0, False), after=30)
    expected = batches_of(Draws(workers=0, seed=4, length=4, **AT_ONCE))
    dataset = Draws(workers="auto", seed=4, length=4)
    with dataset:
        walk = iterate(loader_of(dataset), dataset, shuffle=False)
        peeked = walk.peek(2)
        assert_same([*peeked.values()], expected[:2])
        assert_same(list(walk), expected[:4])


def test_a_dataset_that_cannot_be_sent_is_built_here():
    with StaysHere(workers="auto", seed=4) as dataset:
        assert len([batch for _ in range(3) for batch in dataset]) == 180
        assert dataset.workers == 0
        reasons = " ".join(
            d.reason for d in dataset._fastdata.loader.pool_stats().decisions
        )
    assert "No processes:" in reasons
    assert "frames" in reasons


@pytest.mark.parametrize("kind", [RefusesToLoad, DiesWhenLoaded])
def test_a_dataset_that_no_process_can_load_is_built_here(goes, kind):
    expected = batches_of(Waits(workers=0, seed=4, **AT_ONCE))
    goes((0, False), (2, True))
    with kind(workers="auto", seed=4, **AT_ONCE) as dataset:
        assert_same([b for _ in range(3) for b in dataset], expected)
        assert "2 processes" in places(dataset)
        assert dataset.workers == 0
        assert is_excluded(dataset, processes=True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_where_no_process_can_be_forked_batches_are_built_here(
    goes, monkeypatch, is_killed
):
    # Not above: a stripped interpreter cannot import the module.
    from keras_fastdata.workers.process import forkserver_connection

    def refuse(server, files):
        if is_killed:
            raise forkserver_connection.ForkserverGoneError
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(
        forkserver_connection.ForkserverConnection, "fork", refuse
    )
    goes((0, False), (2, True))
    with Waits(workers="auto", seed=4, **AT_ONCE) as dataset:
        expected = batches_of(Waits(workers=0, seed=4, **AT_ONCE))
        assert_same([b for _ in range(3) for b in dataset], expected)
        assert "2 processes" in places(dataset)
        assert is_excluded(dataset, processes=True)


def test_an_error_of_on_worker_start_is_still_raised():
    with (
        RefusesToStart(workers="auto") as dataset,
        pytest.raises(ValueError, match="no licence"),
    ):
        next(iter(dataset))


def factors_of(dataset, epochs, change=lambda epoch: None):
    found = []
    for epoch in range(epochs):
        change(epoch)
        found += [(int(index), int(factor)) for index, factor in dataset]
    return found


EVERY = [(index, 3) for index in range(20)]


@pytest.mark.parametrize("kind", [Scales, ScalesLate])
def test_what_processes_cannot_be_told_is_built_here(goes, monkeypatch, kind):
    goes((2, True), (0, False), after=1000)
    for module in (auto_config, auto_config_late):
        monkeypatch.setattr(module, "scale", refused(lambda x: 3 * x))
    with kind(workers="auto") as dataset:
        assert factors_of(dataset, 2) == 2 * EVERY
        assert dataset.workers == 0
        assert is_excluded(dataset, processes=True)


def test_what_processes_cannot_be_told_later_is_built_here(goes, monkeypatch):
    goes((2, True), (0, False), after=1000)

    def change(epoch):
        if epoch == 1:
            monkeypatch.setattr(auto_config, "scale", refused(lambda x: 3 * x))

    with Scales(workers="auto") as dataset:
        before = [(index, 1) for index in range(20)]
        assert factors_of(dataset, 1) == before
        assert dataset.use_multiprocessing
        assert factors_of(dataset, 3, change) == before + 2 * EVERY
        assert is_excluded(dataset, processes=True)


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("factor", [1, 3])
def test_an_object_of_a_cached_function_is_set_where_batches_are_built(
    goes, monkeypatch, factor, first
):
    goes((2, True), (0, False), after=1000)
    monkeypatch.setattr(auto_config.get_scaler(), "factor", factor)
    with ScalesByResult(factor, first, workers="auto") as dataset:
        expected = [(index, factor) for index in range(20)]
        assert factors_of(dataset, 2) == 2 * expected
        assert is_excluded(dataset, processes=True) == (factor != 1)
        assert dataset.use_multiprocessing == (factor == 1)


def test_processes_are_told_of_the_object_of_a_bound_method(
    monkeypatch, caplog
):
    with Scales(workers=1, use_multiprocessing=True) as dataset:
        for factor in (3, 4):
            scaler = auto_config.Scaler(factor)
            monkeypatch.setattr(auto_config, "scale", scaler.apply)
            assert {int(scaled) for _, scaled in dataset} == {factor}
    assert not caplog.messages


def test_what_a_worker_opens_is_opened_in_processes_alone():
    with Opens(workers="auto") as dataset:
        next(iter(dataset))
        assert dataset.workers == 1
        assert dataset.use_multiprocessing
        assert not hasattr(dataset, "opened")


@pytest.mark.backend
@pytest.mark.parametrize("kind", quickly(["Waits", "Draws"], "Draws"))
def test_a_model_sees_the_same_data_and_health_says_what_was_decided(
    kind, capsys
):
    def trained(workers):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        health = LoaderHealth()
        with KINDS[kind](workers=workers, seed=2) as dataset:
            history = model.fit(
                dataset, epochs=3, verbose=0, callbacks=[health]
            )
        return history.history["loss"], health.summary()

    expected, fixed = trained(0)
    losses, found = trained("auto")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert fixed.decisions == ()
    assert found.decisions[-1].place in str(found)
    assert "workers='auto' is at" in capsys.readouterr().out


def test_it_can_be_set_and_unset_later():
    with Waits(workers=2, seed=4) as dataset:
        expected = list(dataset)
        dataset.workers = "auto"
        assert dataset.workers == 0
        found = list(dataset)
        dataset.workers = 1
        assert dataset.workers == 1
        assert dataset._fastdata.loader.pool_stats() is None or not places(
            dataset
        )
        list(dataset)
    assert len(found) == len(expected)


def test_processes_cannot_be_asked_for_beside_it():
    with pytest.raises(ValueError, match="chooses between threads and"):
        Waits(workers="auto", use_multiprocessing=True)
    dataset = Waits(workers="auto")
    with pytest.raises(ValueError, match="chooses between threads and"):
        dataset.use_multiprocessing = True


def test_a_dataset_of_generators_takes_a_number():
    with pytest.raises(ValueError, match=r'no `workers="auto"`'):
        GeneratorDataset(lambda: iter(()), workers="auto")
