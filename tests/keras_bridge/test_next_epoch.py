"""The next epoch's first batches wait when an epoch, or validation, ends."""

from __future__ import annotations

import collections
import os
import signal
import threading
import time

import keras
import next_epoch_samples
import numpy as np
import pytest
from keras_facts import fetches_ahead
from next_epoch_samples import (
    TIMEOUT_S,
    Cacheable,
    EditsNotes,
    Hooked,
    KeepsNotes,
    LevelInside,
    LevelOutside,
    LevelsOutside,
    Noted,
    WaitsForGate,
)
from places import KINDS
from samples import Numbered

from keras_fastdata import DatasetPicklingError
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.batch_iterator import iterate

pytestmark = pytest.mark.usefixtures("kept_forkserver")

everywhere = pytest.mark.parametrize("place", ["thread", "process"])
in_processes = pytest.mark.parametrize("place", ["process"])
with_inline = pytest.mark.parametrize("place", KINDS)


class Model(keras.Model):
    """Trains on nothing, but keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def train_step(self, *args):
        batch = args[-1]
        self.given.append(self._row(batch))
        if keras.backend.backend() == "jax":
            return {"loss": np.float32(0)}, args[0]
        return {"loss": keras.ops.zeros(())}

    def test_step(self, *args):
        if keras.backend.backend() == "jax":
            return {"loss": np.float32(0)}, args[0]
        return {"loss": keras.ops.zeros(())}

    def call(self, x):
        return x

    @staticmethod
    def _row(batch):
        return tuple(np.array(keras.ops.convert_to_numpy(batch[1]))[0].tolist())


class Between(keras.callbacks.Callback):
    """Acts between epochs, when the next epoch's first batch is built."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def on_epoch_end(self, epoch, logs=None):
        if epoch < 2:
            self.dataset.wait_for((epoch + 1, 0))
        self.act(epoch)

    def act(self, epoch):
        raise NotImplementedError


def fitted(dataset, epochs=3, callbacks=(), *, shuffle=False, **kwargs):
    """What a model was given, as (epoch, index, level, draw)."""
    model = Model()
    model.compile(run_eagerly=True, loss=None)
    model.fit(
        dataset,
        epochs=epochs,
        shuffle=shuffle,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    )
    return [(row[1], row[0], *row[2:]) for row in model.given]


def every(epochs, length=6):
    return [(e, i) for e in range(epochs) for i in range(length)]


@everywhere
@pytest.mark.backend
def test_the_first_batches_of_an_epoch_are_built_during_validation(
    place, tmp_path
):
    dataset = Noted(tmp_path, max_queue_size=3, **KINDS[place])

    class WhileValidating(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            epoch = len(waited) + 1
            if epoch < 3:
                dataset.wait_for(*[(epoch, index) for index in range(3)])
            waited.append(dataset.builds()[-1])

    waited = []
    with dataset:
        fitted(
            dataset,
            callbacks=[WhileValidating()],
            validation_data=(np.zeros((4, 3)), np.zeros((4, 4))),
        )
    assert [epoch for epoch, _ in waited] == [1, 2, 2]


@with_inline
@pytest.mark.backend
def test_each_batch_of_each_epoch_is_built_once_and_none_beyond(
    place, tmp_path
):
    with Noted(tmp_path, **KINDS[place]) as dataset:
        given = fitted(dataset)
    assert [row[:2] for row in given] == every(3)
    assert sorted(dataset.builds()) == every(3)


@with_inline
def test_what_keras_fetches_ahead_to_build_a_model_is_not_built_again(
    place, tmp_path
):
    # On JAX on an accelerator: two batches, which it gives back.
    with Noted(tmp_path, **KINDS[place]) as dataset:
        opened = iterate(loader_of(dataset), dataset, False)
        opened.remember_first(2)
        opened.fetch()
        opened.fetch()
        opened.rewind()
        given = [opened.fetch()[1][0, 0] for _ in range(6)]
    assert given == [*range(6)]
    assert sorted(dataset.builds()) == every(1)


@with_inline
def test_a_fit_that_stops_early_begins_no_epoch_for_the_next(place, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    with Noted(tmp_path, seed=1, **KINDS[place]) as dataset:
        given = fitted(dataset, epochs=9, callbacks=[Stop()])
        given += fitted(dataset, epochs=1)
    with Noted(tmp_path, seed=1) as inline:
        assert given == fitted(inline)
    assert [row[:2] for row in given] == every(3)


@everywhere
@pytest.mark.backend
def test_a_variable_set_between_epochs_changes_every_batch_of_the_next(
    place, tmp_path, monkeypatch
):
    class Set(Between):
        def act(self, epoch):
            monkeypatch.setattr(next_epoch_samples, "LEVEL", epoch + 1)

    with LevelOutside(tmp_path, **KINDS[place]) as dataset:
        given = fitted(dataset, callbacks=[Set(dataset)])
    assert [row[:3] for row in given] == [(e, i, e) for e, i in every(3)]


@with_inline
@pytest.mark.backend
def test_a_variable_set_amid_an_epoch_of_the_dataset_changes_the_next_batch(
    place, tmp_path, monkeypatch
):
    if fetches_ahead():
        pytest.skip("Keras has the next batch already")

    def change(epoch, _):
        monkeypatch.setattr(next_epoch_samples, "LEVEL", epoch)

    begins = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    with LevelOutside(tmp_path, **KINDS[place]) as dataset:
        given = fitted(dataset, callbacks=[begins], epochs=6, steps_per_epoch=2)
    batches = [(*batch, step // 2) for step, batch in enumerate(every(2))]
    assert [row[:3] for row in given] == batches


@everywhere
@pytest.mark.backend
def test_what_an_attribute_holds_may_be_edited_between_epochs(place, tmp_path):
    """The program sets no attribute of the dataset itself."""

    class Edit(Between):
        def act(self, epoch):
            dataset.stages["first"][0].level += 1

    dataset = LevelInside(tmp_path, **KINDS[place])
    with dataset:
        given = fitted(dataset, callbacks=[Edit(dataset)])
    assert [row[:3] for row in given] == [(e, i, e) for e, i in every(3)]


@everywhere
def test_what_builds_assign_to_the_dataset_drops_no_batch_that_waits(
    place, tmp_path
):
    with KeepsNotes(tmp_path, **KINDS[place]) as dataset:
        fitted(dataset)
    assert sorted(dataset.builds()) == every(3)


@everywhere
def test_an_item_beside_what_builds_edit_changes_the_next_epoch(
    place, tmp_path
):
    class Edit(Between):
        def act(self, epoch):
            dataset.notes["level"] += 1

    dataset = EditsNotes(tmp_path, **KINDS[place])
    with dataset:
        given = fitted(dataset, callbacks=[Edit(dataset)])
    assert [row[:3] for row in given] == [(e, i, e) for e, i in every(3)]


@with_inline
@pytest.mark.backend
def test_a_variable_set_for_the_time_of_a_validation_changes_no_training_batch(
    place, tmp_path, monkeypatch
):
    def level(value):
        monkeypatch.setattr(next_epoch_samples, "LEVEL", value)

    during = keras.callbacks.LambdaCallback()
    during.on_test_begin = lambda logs=None: level(5)
    during.on_test_end = lambda logs=None: level(0)
    (tmp_path / "other").mkdir()
    with (
        LevelOutside(tmp_path, **KINDS[place]) as dataset,
        LevelOutside(tmp_path / "other", **KINDS[place]) as other,
    ):
        given = fitted(dataset, callbacks=[during], validation_data=other)
    assert [row[:3] for row in given] == [(e, i, 0) for e, i in every(3)]


@pytest.mark.backend
@pytest.mark.parametrize("in_dict", [False, True])
def test_a_variable_set_and_put_back_between_epochs_changes_no_training_batch(
    in_dict, tmp_path, monkeypatch
):
    """As a callback does that shows samples without augmentation."""

    def level(value):
        if in_dict:
            monkeypatch.setitem(next_epoch_samples.OPTIONS, "level", value)
        else:
            monkeypatch.setattr(next_epoch_samples, "LEVEL", value)

    class Show(Between):
        def act(self, epoch):
            if epoch < 2:
                level(5)
                dataset.gate.set()
                dataset.wait_for((epoch + 1, 2))  # so batch 1 is built
                level(0)
                dataset.gate.clear()

    dataset = WaitsForGate(tmp_path, workers=1)
    with dataset:
        given = fitted(dataset, callbacks=[Show(dataset)])
    assert [row[:3] for row in given] == [(e, i, 0) for e, i in every(3)]


@pytest.mark.backend
def test_a_variable_put_back_amid_the_datasets_epoch_changes_no_batch(
    tmp_path, monkeypatch
):
    """With `steps_per_epoch`, batches of the same epoch are built meanwhile."""
    if fetches_ahead():
        pytest.skip("Keras waits for batch 3 before the callback")

    class Show(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if not epoch:
                monkeypatch.setattr(next_epoch_samples, "LEVEL", 5)
                dataset.gate.set()
                dataset.wait_for((0, 4))  # so batch 3 is built
                monkeypatch.setattr(next_epoch_samples, "LEVEL", 0)

    dataset = WaitsForGate(tmp_path, workers=1, gated=(0, 3))
    with dataset:
        given = fitted(dataset, callbacks=[Show()], epochs=2, steps_per_epoch=3)
    assert [row[:3] for row in given] == [(0, i, 0) for i in range(6)]


@with_inline
@pytest.mark.backend
@pytest.mark.parametrize("kept", [3, 6])
def test_an_object_edited_between_epochs_makes_a_full_cache_invalid(
    place, kept
):
    """The next epoch's other batches could have been built before."""

    class Edit(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            dataset.stages[0].level += 1

    limit = kept * 4 * (3 + 4) * 4
    kinds = {**KINDS[place], "cache": "memory", "cache_bytes": limit}
    with Cacheable(**kinds) as dataset:
        given = fitted(dataset, epochs=4, callbacks=[Edit()], shuffle=True)
    assert [row[2] for row in given] == [e for e, _ in every(4)]


def _edit_item(level):
    next_epoch_samples.LEVELS["now"] = level


def _edit_slot(level):
    next_epoch_samples.LEVELS["stages"][0].level = level


@everywhere
@pytest.mark.backend
@pytest.mark.parametrize("edit", [_edit_item, _edit_slot])
def test_a_container_edited_between_epochs_changes_every_batch_of_the_next(
    place, edit, tmp_path
):
    class Edit(Between):
        def act(self, epoch):
            edit(epoch + 1)

    try:
        with LevelsOutside(tmp_path, **KINDS[place]) as dataset:
            given = fitted(dataset, callbacks=[Edit(dataset)])
    finally:
        edit(0)
    assert [row[:3] for row in given] == [(e, i, e) for e, i in every(3)]


@with_inline
@pytest.mark.backend
@pytest.mark.parametrize("moment", ["on_train_begin", "on_epoch_begin"])
def test_a_variable_set_as_training_begins_changes_every_batch(
    place, moment, tmp_path, monkeypatch
):
    """Keras may have fetched the first batch before, to build the model."""

    def change(*_):
        monkeypatch.setattr(next_epoch_samples, "LEVEL", 7)

    begins = keras.callbacks.Callback()
    setattr(begins, moment, change)
    with LevelOutside(tmp_path, **KINDS[place]) as dataset:
        given = fitted(dataset, callbacks=[begins], epochs=2)
    assert [row[:3] for row in given] == [(e, i, 7) for e, i in every(2)]


@with_inline
@pytest.mark.backend
@pytest.mark.parametrize("steps", [None, 6])
def test_an_object_edited_as_training_begins_changes_every_batch(
    place, steps, tmp_path
):
    class Begins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            dataset.stages["first"][0].level = 7

    with LevelInside(tmp_path, **KINDS[place]) as dataset:
        callbacks, kinds = [Begins()], {"steps_per_epoch": steps}
        given = fitted(dataset, callbacks=callbacks, epochs=2, **kinds)
    assert [row[:3] for row in given] == [(e, i, 7) for e, i in every(2)]


@in_processes
def test_an_epoch_hook_changes_every_batch_of_the_next_epoch(place, tmp_path):
    with Hooked(tmp_path, max_queue_size=3, **KINDS[place]) as dataset:
        given = fitted(dataset)
    levels = collections.defaultdict(set)
    for epoch, _, level, _ in given:
        levels[epoch].add(level)
    assert levels == {0: {1}, 1: {2}, 2: {3}}


@everywhere
def test_an_attribute_set_between_epochs_reaches_the_first_batch(
    place, tmp_path
):
    dataset = Noted(tmp_path, max_queue_size=3, **KINDS[place])

    class Harder(Between):
        def act(self, epoch):
            dataset.level += 1

    with dataset:
        given = fitted(dataset, callbacks=[Harder(dataset)])
    assert [row[:3] for row in given] == [(e, i, e) for e, i in every(3)]


@everywhere
@pytest.mark.backend
def test_a_dataset_that_validates_too_has_its_epochs_in_their_order(
    place, tmp_path
):
    (tmp_path / "inline").mkdir()
    with Noted(tmp_path, seed=1, **KINDS[place]) as dataset:
        given = fitted(dataset, validation_data=dataset)
    with Noted(tmp_path / "inline", seed=1) as inline:
        assert given == fitted(inline, validation_data=inline)
    assert {row[0] for row in given} == {0, 2, 4}


@in_processes
def test_a_dataset_walked_through_between_epochs_keeps_its_count(
    place, tmp_path
):
    dataset = Noted(tmp_path, seed=1, **KINDS[place])
    walked = []

    class Epoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            walked.append([int(y[0, 1]) for _, y in dataset])

    with dataset:
        given = fitted(dataset, callbacks=[Epoch()])
    assert [row[:2] for row in given] == [
        (2 * epoch, index) for epoch, index in every(3)
    ]
    assert walked == [[1] * 6, [3] * 6, [5] * 6]


@in_processes
def test_no_more_than_max_queue_size_batches_wait_across_epochs(
    place, tmp_path
):
    dataset = Noted(tmp_path, length=4, max_queue_size=3, **KINDS[place])
    most = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            most.append(
                sum(w.ahead for w in [*dataset._fastdata.loader._epochs][:1])
            )

    with dataset:
        fitted(dataset, callbacks=[Count()])
    assert max(most) == 3


@in_processes
def test_an_exception_in_a_batch_built_ahead_comes_in_its_own_epoch(
    place, tmp_path
):
    class Fails(Noted):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            if self.epoch == 1 and index == 0:
                raise OverflowError("not this one")
            return batch

    ended = []

    class Ended(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            dataset.wait_for((1, 0))
            ended.append(epoch)

    with Fails(tmp_path, **KINDS[place]) as dataset:
        with pytest.raises(OverflowError, match="not this one"):
            fitted(dataset, callbacks=[Ended()])
        assert ended == [0]
        dataset.length = 2
        assert len(list(dataset)) == 2


def led_on(dataset, batches):
    """A pass that knows of another, after so many batches; and its batches."""
    first = iterate(loader_of(dataset), dataset, False)
    first.prefetch_next(True)
    return first, [next(first) for _ in range(batches)]


@everywhere
def test_another_length_is_noticed_although_batches_were_built_ahead(
    place, tmp_path
):
    class Shrinks(Noted):
        def __len__(self):
            return lengths[-1]

    lengths = [4]
    with Shrinks(tmp_path, **KINDS[place]) as dataset:
        first, _ = led_on(dataset, 4)
        dataset.wait_for((1, 0))
        lengths.append(2)
        assert len(list(first.iterate_next())) == 2


def test_a_length_is_asked_for_once_an_epoch(tmp_path):
    asked = []

    class Asked(Noted):
        @property
        def num_batches(self):
            asked.append(threading.get_ident())
            self.note = len(asked)  # which says that the dataset has changed
            return 6

    with Asked(tmp_path, workers=2) as dataset:
        first, _ = led_on(dataset, 6)
        dataset.wait_for((1, 0))
        assert len(asked) == 1
        assert len(list(first.iterate_next())) == 6


@everywhere
def test_a_pass_that_nobody_goes_on_with_leaves_nothing_and_others_lead_on(
    place, tmp_path
):
    dataset = Noted(tmp_path, max_queue_size=3, **KINDS[place])
    with dataset:
        first, _ = led_on(dataset, 6)
        dataset.wait_for((1, 2))
        del first
        second, _ = led_on(dataset, 6)
        loader = loader_of(dataset)
        assert [walk.number for walk in loader._epochs] == [1, 2]
        third = second.iterate_next()
        dataset.wait_for((2, 2))
        assert [int(y[0, 1]) for _, y in third] == [2] * 6
        assert loader.epoch == 3


@everywhere
def test_where_passes_take_turns_none_leads_on(place, tmp_path):
    dataset = Noted(tmp_path, max_queue_size=3, **KINDS[place])
    with dataset:
        opened, _ = led_on(dataset, 6)
        assert opened._epoch.next_epoch is not None
        for epoch in range(1, 4):
            assert len(list(dataset)) == 6  # a validation, say
            opened = opened.iterate_next()
            opened.prefetch_next(True)
            found = [int(y[0, 1]) for _, y in opened]
            assert found == [2 * epoch] * 6
            assert opened._epoch.next_epoch is None


def test_a_batch_that_was_lost_ahead_is_built_again_in_its_own_epoch(tmp_path):
    class DiesOnce(Noted):
        def __getitem__(self, index):
            mark = self.directory / f"died-{index}"
            if self.epoch == 1 and index == 0 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    dataset = DiesOnce(
        tmp_path,
        max_queue_size=8,
        max_worker_restarts=0,
        **KINDS["process"],
    )
    with dataset:
        first, _ = led_on(dataset, 5)
        deadline = time.monotonic() + TIMEOUT_S
        next_epoch = first._epoch.next_epoch
        while not any(a.done.is_lost for a in next_epoch.ready.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            loader = loader_of(dataset)
            loader._prefetcher.drain_results(loader._pool.workers)
        next(first)
        found = [int(y[0, 0]) for _, y in first.iterate_next()]
        assert found == list(range(6))


@pytest.mark.backend
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_short_queue_is_long_enough_to_train(most):
    with Numbered(length=20, max_queue_size=most, seed=1) as dataset:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(dataset, shuffle=True, verbose=0)
    assert len(history.history["loss"]) == 1


@pytest.mark.backend
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="JAX's trainer empties a model"
)
def test_a_model_in_a_dataset_is_named_if_it_is_sent_while_it_is_trained():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def change(epoch, logs):
        dataset.level = epoch

    with Numbered(4, (4, 2), **KINDS["process"]) as dataset:
        dataset.model = model
        with pytest.raises(DatasetPicklingError) as caught:
            model.fit(
                dataset,
                epochs=2,
                verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=change)],
            )
    assert caught.value.path == "dataset.model"
    assert "JAX trains this model at the moment" in str(caught.value)
