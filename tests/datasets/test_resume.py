"""Going on where an earlier run has stood, to the byte."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pathlib
import random
import signal
import tempfile

import keras
import numpy as np
import pytest
import resume_samples
from hypothesis import given
from hypothesis import strategies as st
from keras_facts import with_steps_per_execution
from places import LONG_BUT_ON_JAX, PLACES, everywhere, quickly
from resume_samples import PLACES as KILLED_PLACES
from resume_samples import (
    Begun,
    Drawn,
    Ends,
    FailsOnce,
    Keeping,
    Repairing,
    Reshuffled,
    Shrinks,
    Spoiled,
)
from samples import Numbered

from keras_fastdata import (
    DatasetCheckpoint,
    EndOfData,
    GeneratorDataset,
    LoaderError,
    SampleDataset,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.callbacks.saved_states import SavedStates
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.state_dict import State

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_SCRIPT = pathlib.Path(resume_samples.__file__)
_EPOCHS = 4
_LENGTH = 7


_LONG = pytest.mark.long


def long(*values):
    return pytest.param(*values, marks=_LONG)


def through_json(state):
    return json.loads(json.dumps(state))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        np.testing.assert_equal(batch, other)


# -- without Keras ------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_goes_on_with_the_next_batch(place, shuffle):
    with Drawn(seed=3, shuffle=shuffle) as dataset:
        expected = [batch for _ in range(3) for batch in dataset]
    for seen in (0, 1, 4, 6, 7, 9, 14, 20):
        with Drawn(seed=3, shuffle=shuffle, **PLACES[place]) as dataset:
            batches = itertools.chain.from_iterable(
                iter(dataset) for _ in range(3)
            )
            for _ in range(seen):
                next(batches)
            state = through_json(dataset.state_dict())
        with Drawn(shuffle=shuffle) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            found = []
            while len(found) < len(expected) - seen:
                found += other
        assert_same(found, expected[seen:])


@everywhere
@pytest.mark.parametrize(
    "where", quickly([(0, 0), (0, 3), (1, 0), (1, 6)], (0, 0), (1, 6))
)
def test_a_batch_that_has_raised_is_the_next_of_the_state(place, where):
    with Drawn(seed=3) as dataset:
        expected = [batch for _ in range(2) for batch in dataset]
    with FailsOnce(seed=3, **PLACES[place]) as dataset:
        dataset.where = where
        walk = itertools.chain.from_iterable([dataset, dataset])
        num_seen = 7 * where[0] + where[1]  # by index
        assert_same([*itertools.islice(walk, num_seen)], expected[:num_seen])
        with pytest.raises(ValueError, match="on purpose"):
            next(walk)
        state = through_json(dataset.state_dict())
    with Drawn() as other:
        other.load_state_dict(state)
        found = [*other]
    num_left = 7 - num_seen % 7
    assert_same(found, expected[num_seen : num_seen + num_left])


@pytest.mark.backend
@pytest.mark.parametrize(
    "where", quickly([(0, 0), (0, 3), (1, 0), (1, 6)], (0, 0), (1, 6))
)
def test_a_batch_that_has_raised_in_fit_is_the_next_of_the_state(where):
    with FailsOnce(seed=3, shuffle=False) as dataset:
        dataset.where = where
        with pytest.raises(ValueError, match="on purpose"):
            fit(dataset, epochs=2)
        state = dataset.state_dict()
    assert (state["epoch"], state["position"]) == where


def test_a_state_is_small_and_says_its_version():
    with SampleDataset(np.zeros((10**6, 2)), 2, seed=1) as dataset:
        for _ in itertools.islice(dataset, 3):
            pass
        state = dataset.state_dict()
    assert state["version"] == 1
    assert (state["epoch"], state["position"]) == (0, 3)
    assert len(json.dumps(state)) < 1000


def test_what_is_only_built_ahead_does_not_count():
    with Drawn(workers=4, max_queue_size=6) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset.state_dict()["position"] == 1


class _Holed(Drawn):
    """Some of its batches cannot be built."""

    def __getitem__(self, index):
        if index % 11 == 3:
            raise ValueError("on purpose")
        return super().__getitem__(index)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", [Drawn, _Holed])
def test_what_training_has_not_come_to_does_not_count_however_many_they_are(
    kind, shuffle
):
    with kind(length=600, seed=3, workers=0, on_error="skip") as dataset:
        opened = iterate(loader_of(dataset), dataset, shuffle)
        expected = []
        for _ in range(500):
            expected.append(opened.state(0).position)
            x, _ = opened.fetch()
            assert opened.index == x[0, 0]
        found = [opened.state(behind).position for behind in range(1, 501)]
    assert found[::-1] == expected


def test_a_seed_that_was_drawn_is_taken_over():
    with Drawn() as dataset:
        batches = iter(dataset)
        next(batches)
        state = dataset.state_dict()
        expected = list(batches)
    with Drawn() as other:
        other.load_state_dict(state)
        assert_same(list(other), expected)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"seed": 4}, r"seed=3, and this Drawn has seed=4"),
        ({"seed": 3, "length": 8}, "of 7 batches.*this Drawn has 8"),
    ],
    ids=["seed", "length"],
)
def test_the_state_of_another_dataset_is_refused_with_the_difference(
    made, message
):
    state = Drawn(seed=3).state_dict()
    with pytest.raises(ValueError, match=message):
        Drawn(**made).load_state_dict(state)


def test_what_is_no_state_is_refused():
    state = Drawn(seed=3).state_dict()
    for wrong, message in (
        ({}, "no state"),
        ([], "no state"),
        ({**state, "version": 9}, "version 9"),
        ({k: v for k, v in state.items() if k != "epoch"}, "lacks: epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            Drawn(seed=3).load_state_dict(wrong)


_WRONG = {
    "version": ["1", 1.0, True, None, 0],
    "seed": ["3", -1, True, None, 3.0],
    "epoch": ["drop table", -1, True, None, 2.0, 1 << 63],
    "position": ["0", -1, False, None, [], 1 << 63, 8],
    "num_batches": ["7", -7, True, 7.0],
    "shuffle": ["yes", 0, 1, []],
    "within": ["no", 0, None],
    "hooks": [
        None,
        "on_epoch_end",
        {},
        [["close", 0]],
        [["on_epoch_end", -1]],
        [["on_epoch_end", True]],
        [["on_epoch_end"]],
        ["ab"],
        [[["on_epoch_end"], 0]],
    ],
    "digest": [None, 0, "0", "g" * 32, "0" * 33, b""],
    "mine": [None],
}


@pytest.mark.parametrize("field", _WRONG)
def test_a_damaged_field_of_a_state_is_refused_by_name(field):
    dataset = Drawn(seed=3)
    state = dataset.state_dict()
    for wrong in _WRONG[field]:
        with pytest.raises(ValueError, match=field) as caught:
            dataset.load_state_dict({**state, field: wrong})
        assert field == "mine" or repr(wrong) in str(caught.value)
        assert dataset.state_dict() == state


def test_a_damaged_number_of_shards_is_refused_by_name():
    dataset = GeneratorDataset(lambda: iter(range(3)))
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    for wrong in (0, True, "1", None):
        with pytest.raises(ValueError, match="`num_shards` of the state must"):
            dataset.load_state_dict({**state, "num_shards": wrong})
    del state["num_shards"]
    with pytest.raises(ValueError, match="lacks: num_shards"):
        dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="no state"):
        dataset.load_state_dict([])


def test_numbers_of_numpys_in_a_state_are_numbers():
    state = Drawn(seed=3).state_dict()
    one = np.int64(1)
    found = {**state, "epoch": one, "position": one, "shuffle": np.True_}
    other = Drawn(seed=3)
    other.load_state_dict(found)
    assert through_json(other.state_dict()) == {
        **state,
        "epoch": 1,
        "position": 1,
        "shuffle": True,
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["version", *State.__annotations__]), _JSON)
)
def test_a_state_is_taken_as_it_is_or_not_at_all(changes):
    state = {**Drawn(seed=3).state_dict(), **changes}
    try:
        found = State.from_dict(state, "Drawn")
    except ValueError:
        return
    assert through_json(found.as_dict()) == state


@given(data=st.data())
def test_a_file_of_states_with_any_bytes_changed_is_states_or_damaged(data):
    saved = {"epoch": 1, "saved_at": [1, 0, 7], "dataset": {"epoch": 1}}
    content = bytearray(json.dumps({"states": [saved, saved]}).encode())
    places = st.integers(0, len(content) - 1)
    for place in data.draw(st.lists(places, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "data.json")
        path.write_bytes(content)
        try:
            states = SavedStates(str(path))._states
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            return
    for found in states:
        assert found.keys() == saved.keys()
        assert type(found["epoch"]) is int
        assert isinstance(found["dataset"], dict)


def test_another_order_is_refused():
    with Drawn(seed=3, shuffle=True) as dataset:
        next(iter(dataset))
        state = dataset.state_dict()
    with Drawn(seed=3, shuffle=False) as other:
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=r"shuffle=True.*shuffle=False"):
            next(iter(other))


def test_an_epoch_can_be_chosen():
    with Drawn(seed=3, shuffle=True) as dataset:
        expected = [list(dataset) for _ in range(4)]
    with Drawn(seed=3, shuffle=True, workers=2) as dataset:
        dataset.set_epoch(3)
        assert_same(list(dataset), expected[3])
        dataset.set_epoch(1)
        assert_same(list(dataset), expected[1])
        assert_same(list(dataset), expected[2])
    with pytest.raises(ValueError, match="`epoch`"):
        Drawn().set_epoch(-1)


def test_generators_that_begin_anew_are_resumed_and_others_say_they_cannot():
    def items(shard_index, num_shards):
        yield from range(shard_index, 40, num_shards)

    def made(**kwargs):
        return GeneratorDataset(items, 4, num_shards=2, seed=1, **kwargs)

    with made() as dataset:
        expected = [batch for _ in range(2) for batch in dataset]
    with made(workers=2) as dataset:
        list(dataset)
        for _ in itertools.islice(dataset, 3):
            pass
        state = through_json(dataset.state_dict())
    with made() as other:
        other.load_state_dict(state)
        assert_same(list(other), expected[13:])
    with pytest.raises(ValueError, match="num_shards=2"):
        GeneratorDataset(items, 4, num_shards=3).load_state_dict(state)
    with (
        made(restart=False, num_batches=3) as dataset,
        pytest.raises(LoaderError, match="goes on from epoch to epoch"),
    ):
        dataset.state_dict()


@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_generators_that_were_looked_at_take_over_a_drawn_seed(done, workers):
    def items(rng):
        yield from rng.random(12)

    def made():
        return GeneratorDataset(items, 2, workers=workers)

    with made() as dataset, made() as other:
        batches = iter(dataset)
        for batch in (batches, iter(other)):
            [*itertools.islice(batch, done)]
        other.load_state_dict(through_json(dataset.state_dict()))
        assert_same(list(other), list(batches))


def test_a_cache_does_not_mind():
    def made(**kwargs):
        return SampleDataset(list(range(20)), 4, cache="memory", **kwargs)

    with made(seed=1) as dataset:
        batches = list(dataset)
        for _ in itertools.islice(dataset, 2):
            pass
        state = dataset.state_dict()
    with made(seed=1) as other:
        other.load_state_dict(state)
        assert_same(list(other), batches[2:])
        assert_same(list(other), batches)


# -- epoch hooks --------------------------------------------------------------


def model_of():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


class Seen(keras.callbacks.Callback):
    """The batches trained on, by digest; and the states between them."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(through_json(self.dataset.state_dict()))


@pytest.mark.backend
@pytest.mark.parametrize("kind", [Reshuffled, Begun])
def test_a_state_can_be_loaded_before_fit_and_hooks_do_what_they_did(kind):
    def losses(dataset, **kwargs):
        history = model_of().fit(dataset, verbose=0, shuffle=False, **kwargs)
        return history.history["loss"]

    with kind(seed=5) as dataset:
        seen = Seen(dataset)
        losses(dataset, epochs=3, callbacks=[seen])
        order = dataset.order.copy()
    with kind(seed=5) as other:
        other.load_state_dict(seen.states[9])
        # The rest of the second epoch, then the third.
        losses(other, epochs=2)
        np.testing.assert_array_equal(other.order, order)
        assert other.state_dict()["epoch"] == 3


@pytest.mark.backend
def test_a_model_that_was_not_built_may_go_on_with_a_new_dataset(tmp_path):
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(model, *others, **kwargs):
        saves = DatasetCheckpoint(tmp_path / "data.json")
        with Reshuffled(seed=5) as dataset:
            callbacks = [saves, *others]
            kwargs = {"epochs": 4, "verbose": 0, **kwargs}
            model.fit(dataset, callbacks=callbacks, **kwargs)
            return dataset.order.tolist()

    def unbuilt():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    expected = fit(unbuilt())
    model = unbuilt()
    with pytest.raises(KeyboardInterrupt):
        fit(model, Stops())
    assert fit(model, initial_epoch=2) == expected


def test_hooks_that_do_something_else_are_found_out():
    with Reshuffled(seed=5) as dataset:
        seen = Seen(dataset)
        model_of().fit(
            dataset, epochs=2, verbose=0, shuffle=False, callbacks=[seen]
        )
    other = Reshuffled(seed=5)
    other.order = other.order[::-1].copy()
    with pytest.raises(LoaderError, match="Reshuffled is not what it was"):
        other.load_state_dict(seen.states[9])


@pytest.mark.parametrize(
    "place", [PLACES["inline"], {"workers": 1}, PLACES["2 processes"]], ids=str
)
def test_what_builds_change_does_not_keep_a_dataset_from_being_resumed(
    place, caplog
):
    with Keeping(seed=5, **place) as dataset:
        for _ in loop(dataset):
            pass
        batches = iter(dataset)
        next(batches)
        state = through_json(dataset.state_dict())
        rest = [np.array(batch) for batch in batches]
    with Keeping(seed=5, **place) as other:
        other.load_state_dict(state)
        assert np.array_equal([np.array(batch) for batch in other], rest)
    warned = "`self.buffer`, `self.cache`, `self.count`, `self.counted`"
    is_here = not place.get("use_multiprocessing")
    assert sum(warned in text for text in caplog.messages) == is_here


def test_what_hooks_and_builds_change_is_compared():
    with Repairing(seed=5, workers=0) as dataset:
        for _ in loop(dataset):
            pass
        state = dataset.state_dict()
    with pytest.raises(LoaderError, match="Repairing is not what it was"):
        Repairing(seed=5).load_state_dict(state)


def loop(dataset):
    dataset.on_epoch_begin()
    yield from dataset
    dataset.on_epoch_end()


def test_what_is_assigned_after_a_state_is_in_the_next_state():
    with Reshuffled(seed=5) as dataset:
        seen = Seen(dataset)
        model_of().fit(
            dataset, epochs=2, verbose=0, shuffle=False, callbacks=[seen]
        )
        dataset.state_dict()
        dataset.order = dataset.order[::-1].copy()
        state = dataset.state_dict()
    with pytest.raises(LoaderError, match="Reshuffled is not what it was"):
        Reshuffled(seed=5).load_state_dict(state)


# -- in fit -------------------------------------------------------------------


@pytest.mark.backend
@pytest.mark.parametrize("kind", [Drawn, Reshuffled])
def test_a_second_fit_has_all_epochs_after_the_first_was_resumed(
    kind, tmp_path
):
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(model, name, epochs, *others):
        callbacks = [
            keras.callbacks.BackupAndRestore(tmp_path / f"{name}_weights"),
            DatasetCheckpoint(tmp_path / f"{name}.json"),
            *others,
        ]
        with kind(seed=5) as dataset:
            done = model.fit(
                dataset, epochs=epochs, verbose=0, callbacks=callbacks
            )
        return done.epoch

    with pytest.raises(KeyboardInterrupt):
        fit(model_of(), "first", 4, Stops())
    model = model_of()
    assert fit(model, "first", 4) == [2, 3]
    assert fit(model, "second", 3) == [0, 1, 2]


@pytest.fixture(scope="session")
def run(zygote):
    """Runs the training script with a folder and further arguments."""
    return functools.partial(zygote.run, _SCRIPT)


def notes_of(directory):
    return (directory / "batches").read_text().split()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, run):
    """What a training that nobody kills has seen, and its weights."""
    known = {}

    def get(kind, **environment):
        if kind not in known:
            directory = tmp_path_factory.mktemp(kind)
            arguments = kind, "inline", 0, "epoch", _EPOCHS
            done = run(directory, *arguments, **environment)
            assert done.returncode == 0, done.stderr
            assert not (directory / "data.json").exists()
            weights = json.loads((directory / "weights.json").read_text())
            known[kind] = notes_of(directory), weights
        return known[kind]

    return get


def kill_and_resume(run, tmp_path, undisturbed, kind, deaths, freq, places):
    """Kills a training again and again, and lets the last one end."""
    batches, weights = undisturbed(kind)
    saved = 0
    every = _LENGTH if freq == "epoch" else freq
    for death, place in zip([*deaths, 0], places, strict=True):
        done = run(tmp_path, kind, place, death, freq, _EPOCHS)
        seen = notes_of(tmp_path)
        if not death:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert seen[:death] == batches[saved : saved + death]
        # The last batch of an epoch is not yet its end.
        saved += (death - (freq == "epoch")) // every * every
    assert done.returncode == 0, done.stderr
    assert seen == batches[saved:]
    found = json.loads((tmp_path / "weights.json").read_text())
    for mine, theirs in zip(found, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not (tmp_path / "data.json").exists()


@pytest.mark.backend
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "deaths", "freq", "places"),
    [
        long("Drawn", [10], 3, ["2 threads", "2 processes"]),
        long("Drawn", [9], "epoch", ["2 processes", "inline"]),
        # Saved behind the last batch of an epoch, and in one that is resumed.
        long("Reshuffled", [14, 3], 7, ["inline", "2 processes", "2 threads"]),
        long("Reshuffled", [15, 3], 7, ["inline", "2 processes", "2 threads"]),
        pytest.param(
            *("Begun", [9, 3], 2, ["2 processes", "3 spawned", "inline"]),
            marks=LONG_BUT_ON_JAX,
        ),
    ],
    ids=["steps", "epochs", "an epoch's end", "behind an end", "twice"],
)
def test_a_training_that_was_killed_goes_on_with_what_it_had_not_seen(
    run, tmp_path, undisturbed, kind, deaths, freq, places
):
    kill_and_resume(run, tmp_path, undisturbed, kind, deaths, freq, places)


@pytest.mark.parametrize(
    ("kind", "death", "freq", "saved"),
    [
        long("Begun", 6, 3, 3),
        long("Reshuffled", 14, "epoch", 7),
        long("Shrinks", 9, 1, 8),
    ],
)
def test_weights_that_were_not_saved_any_more_get_the_data_of_those_before(
    run, tmp_path, undisturbed, kind, death, freq, saved
):
    batches, weights = undisturbed(kind)
    arguments = kind, "2 threads", death, freq, _EPOCHS
    done = run(tmp_path, *arguments, DIES_AT="saving")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(tmp_path, kind, "2 processes", 0, freq, _EPOCHS)
    assert done.returncode == 0, done.stderr
    assert notes_of(tmp_path) == batches[saved:]
    found = json.loads((tmp_path / "weights.json").read_text())
    for mine, theirs in zip(found, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("kind", "death", "freq", "saved"),
    [
        long("Ends", 12, 4, 12),
        long("Ends", 7, 7, 7),
        long("Shrinks", 10, 3, 9),
    ],
    ids=["unknown length", "its end", "another length"],
)
def test_an_epoch_that_is_resumed_says_nothing_of_those_after_it(
    run, tmp_path, undisturbed, kind, death, freq, saved
):
    batches, _ = undisturbed(kind)
    done = run(tmp_path, kind, "inline", death, freq, _EPOCHS)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(tmp_path, kind, "2 threads", 0, freq, _EPOCHS)
    assert done.returncode == 0, done.stderr
    assert notes_of(tmp_path) == batches[saved:]


@pytest.mark.long
@pytest.mark.backend
@with_steps_per_execution
def test_a_resumed_epoch_need_not_be_a_whole_number_of_executions(
    run, tmp_path, undisturbed
):
    batches, _ = undisturbed("Drawn")
    arguments = "Drawn", "2 threads"
    two = {"STEPS_PER_EXECUTION": "2"}
    # BackupAndRestore counts a step less in the first execution.
    done = run(tmp_path, *arguments, 2, 3, _EPOCHS, **two)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(tmp_path, *arguments, 0, 3, _EPOCHS, **two)
    assert done.returncode == 0, done.stderr
    assert notes_of(tmp_path) == batches[4:]


@pytest.mark.backend
@pytest.mark.parametrize("save_freq", quickly(["epoch", 1], 1))
def test_a_dataset_that_also_validates_goes_on_with_its_own_numbers(
    save_freq, tmp_path
):
    def trained(directory, dies_in=None):
        orders = []

        class Dies(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                orders.append(dataset._fastdata.loader.epoch)

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == dies_in:
                    raise RuntimeError("it dies")

        dataset = Drawn(seed=3)
        backup = keras.callbacks.BackupAndRestore(
            str(directory / "backup"), save_freq=save_freq
        )
        checkpoint = DatasetCheckpoint(directory / "data.json")
        with dataset:
            try:
                fit(
                    dataset,
                    backup,
                    checkpoint,
                    Dies(),
                    epochs=4,
                    validation_data=dataset,
                )
            except RuntimeError:
                assert dies_in
        return orders

    whole = trained(tmp_path / "whole")
    first = trained(tmp_path / "part", dies_in=2)
    assert first + trained(tmp_path / "part") == whole


class _Latest(keras.metrics.Metric):
    """The mean of the latest targets, which tells one batch from others."""

    def __init__(self):
        super().__init__(name="latest")
        self.latest = self.add_variable((), "zeros", name="latest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.latest.assign(keras.ops.mean(y_true))

    def result(self):
        return self.latest + 0.0


class _Dies(keras.callbacks.Callback):
    """Notes the batches that are trained on, and breaks off once."""

    def __init__(self, directory, after=None, evaluates=None, waits=False):
        super().__init__()
        self.file = directory / "trained.json"
        self.after = after
        self.waits = waits
        self.evaluates = evaluates

    def trained(self):
        if not self.file.exists():
            return []
        return json.loads(self.file.read_text())

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        trained = self.trained()
        trained.append([self.epoch, float(logs["latest"])])
        self.file.write_text(json.dumps(trained))
        if self.evaluates is not None and len(trained) == 2:
            next(iter(self.evaluates))
        if len(trained) == self.after and not self.waits:
            raise InterruptedError

    def on_epoch_end(self, epoch, logs=None):
        if len(self.trained()) == self.after:
            raise InterruptedError


def trained_in_parts(
    directory,
    make,
    deaths,
    evaluates=False,
    save_freq=1,
    steps_per_epoch=None,
):
    """Epoch and targets of each step of a training that is broken off.

    With `save_freq="epoch"`, deaths wait until the end of an epoch.
    """
    directory.mkdir()
    for after in [*deaths, None]:
        with make() as dataset:
            waits = save_freq == "epoch"
            evaluated = dataset if evaluates else None
            dies = _Dies(directory, after, evaluated, waits)
            backup = keras.callbacks.BackupAndRestore(
                str(directory / "backup"), save_freq=save_freq
            )
            checkpoint = DatasetCheckpoint(directory / "data.json", save_freq=1)
            model = model_of()
            model.compile("sgd", "mse", metrics=[_Latest()])
            with contextlib.suppress(InterruptedError):
                model.fit(
                    dataset,
                    verbose=0,
                    epochs=3,
                    steps_per_epoch=steps_per_epoch,
                    shuffle=False,
                    callbacks=[backup, checkpoint, dies],
                )
    return dies.trained()


@pytest.mark.backend
@pytest.mark.parametrize("kind", quickly([Spoiled, Ends], Spoiled))
def test_an_epoch_of_which_nothing_good_is_left_is_not_begun_again(
    tmp_path, kind
):
    def make():
        return kind(seed=3, on_error="skip", workers=0)

    whole = trained_in_parts(tmp_path / "whole", make, [])
    length = len(whole) // 3
    deaths = [length, 2 * length, 3 * length]
    assert trained_in_parts(tmp_path / "parts", make, deaths) == whole


class _Grows(Drawn):
    """Keras goes on with the length that it was told first."""

    def on_epoch_end(self):
        self.length = 9


@pytest.mark.backend
@pytest.mark.parametrize(
    ("death", "save_freq"), [(7, 1), (7, "epoch"), long(3, 1)]
)
def test_a_resumed_training_keeps_the_length_that_keras_knows(
    tmp_path, death, save_freq
):
    def make():
        return _Grows(seed=3, workers=0)

    whole = trained_in_parts(tmp_path / "whole", make, [])
    parts = trained_in_parts(
        tmp_path / "parts", make, [death], save_freq=save_freq
    )
    assert [epoch for epoch, _ in whole] == [0] * 7 + [1] * 7 + [2] * 7
    assert parts == whole


class _Doubles(Drawn):
    def on_epoch_end(self):
        self.length *= 2


@pytest.mark.backend
@pytest.mark.parametrize(
    ("kind", "length", "steps", "deaths"),
    [
        (Shrinks, 7, 4, [4]),
        (Shrinks, 7, 4, [6]),
        (_Doubles, 3, 2, [2]),
        (_Doubles, 3, 2, [3]),
        (_Doubles, 3, 4, [3, 6]),
    ],
)
def test_a_pass_that_outlives_a_change_of_the_length_is_resumed_whole(
    tmp_path, kind, length, steps, deaths
):
    """With steps for an epoch, Keras goes on with a pass after the hooks."""

    def make():
        return kind(length=length, seed=3, workers=0)

    options = {"save_freq": "epoch", "steps_per_epoch": steps}
    whole = trained_in_parts(tmp_path / "whole", make, [], **options)
    parts = trained_in_parts(tmp_path / "parts", make, deaths, **options)
    assert len(whole) > deaths[-1]
    assert parts == whole


class _Longer(Ends):
    """Nobody knows how long its epochs are; each is longer by two batches."""

    def __getitem__(self, index):
        if index == self.length + 2 * self.epoch:
            raise EndOfData
        return Drawn.__getitem__(self, index)


@pytest.mark.backend
@pytest.mark.parametrize("death", quickly([2, 4, 9], 4))
def test_epochs_of_unknown_lengths_are_trained_on_to_their_ends(
    tmp_path, death
):
    """Keras would take the first length for that of all epochs."""

    def make():
        return _Longer(length=3, seed=3, workers=0)

    whole = trained_in_parts(tmp_path / "whole", make, [])
    assert [epoch for epoch, _ in whole] == [0] * 3 + [1] * 5 + [2] * 7
    assert trained_in_parts(tmp_path / "parts", make, [death]) == whole


@pytest.mark.backend
def test_an_epoch_that_is_resumed_after_another_began_keeps_their_numbers(
    tmp_path,
):
    def make():
        return Drawn(seed=3, workers=0)

    whole = trained_in_parts(tmp_path / "whole", make, [], evaluates=True)
    parts = trained_in_parts(tmp_path / "parts", make, [4], evaluates=True)
    assert parts == whole


def _fit_until_interrupted(model, directory, save_freq, epochs, *callbacks):
    """Trains with checkpoints in a directory, until InterruptedError if any."""
    backup = keras.callbacks.BackupAndRestore(
        str(directory / "backup"), save_freq=save_freq
    )
    checkpoint = DatasetCheckpoint(directory / "data.json")
    with (
        Drawn(seed=3, workers=0) as dataset,
        contextlib.suppress(InterruptedError),
    ):
        model.fit(
            dataset,
            verbose=0,
            epochs=epochs,
            shuffle=False,
            callbacks=[*callbacks, backup, checkpoint],
        )


@pytest.mark.backend
@pytest.mark.parametrize("accumulated", quickly([None, 3], 3))
@pytest.mark.parametrize(
    ("saves", "save_freq"),
    [([4, 1], 2), long([1], 2), long([2], 7), long([2], "epoch")],
)
def test_a_kill_between_the_weights_and_their_metadata_loses_no_batch(
    tmp_path, saves, save_freq, accumulated
):
    def trained(directory, saves):
        directory.mkdir()
        for last in [*saves, None]:
            model = model_of()
            optimizer = keras.optimizers.SGD(
                1e-3, gradient_accumulation_steps=accumulated
            )
            model.compile(optimizer, "mse", metrics=[_Latest()])
            save, count = model.save_weights, itertools.count(1)

            def save_weights(*args, save=save, count=count, last=last, **more):
                save(*args, **more)
                if next(count) == last:
                    raise InterruptedError  # no metadata is written

            model.save_weights = save_weights
            notes = _Dies(directory)
            _fit_until_interrupted(model, directory, save_freq, 3, notes)
        return notes.trained(), model.get_weights()

    batches, weights = trained(tmp_path / "whole", [])
    assert len(batches) == 3 * _LENGTH
    found, found_weights = trained(tmp_path / "parts", saves)
    assert found == batches
    assert_same(found_weights, weights)


class OwnOptimizer(keras.Model):
    """Trains without `self.optimizer`, which then counts no steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.build((None, 3))

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        step = getattr(self, f"_train_step_on_{keras.backend.backend()}")
        return step(*args)

    def _train_step_on_tensorflow(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self._loss(self(data[0]), data[1])
        variables = self.trainable_weights
        for variable, slope in zip(
            variables, tape.gradient(loss, variables), strict=True
        ):
            variable.assign_sub(0.1 * slope)
        return {"loss": loss}

    def _train_step_on_torch(self, data):
        import torch

        self.zero_grad()
        loss = self._loss(self(data[0]), data[1])
        loss.backward()
        with torch.no_grad():
            for variable in self.trainable_weights:
                variable.assign_sub(0.1 * variable.value.grad)
        return {"loss": loss}

    def _train_step_on_jax(self, state, data):
        import jax

        trainable, frozen, *others = state

        def loss_of(trainable):
            predicted, _ = self.stateless_call(trainable, frozen, data[0])
            return self._loss(predicted, data[1])

        loss, slopes = jax.value_and_grad(loss_of)(trainable)
        trainable = [
            variable - 0.1 * slope
            for variable, slope in zip(trainable, slopes, strict=True)
        ]
        return {"loss": loss}, (trainable, frozen, *others)

    @staticmethod
    def _loss(predicted, wanted):
        return keras.ops.mean((predicted - wanted) ** 2)


def _weights_of_a_training_with_kills(directory, make, kills):
    """Trains; fails before or behind the saves of each part in `kills`."""
    directory.mkdir()
    for number, moment in [*kills, (0, "")]:
        model = make()
        save, count = model.save_weights, itertools.count(1)

        def save_weights(
            *args, save=save, count=count, last=number, moment=moment, **more
        ):
            is_last = next(count) == last
            if is_last and moment == "before":
                raise InterruptedError
            save(*args, **more)
            if is_last:
                raise InterruptedError

        model.save_weights = save_weights
        _fit_until_interrupted(model, directory, 2, 2)
    return model.get_weights()


@pytest.mark.backend
@pytest.mark.parametrize("counts_steps", [True, False])
@pytest.mark.parametrize(
    "kills",
    [
        [(2, "behind")],
        [(2, "before"), (1, "before")],
        [(3, "before"), (1, "before"), (1, "before")],
        [(2, "before"), (1, "behind"), (3, "before"), (1, "behind")],
    ],
)
def test_kills_around_the_saving_of_weights_lose_and_repeat_no_batch(
    tmp_path, kills, counts_steps
):
    def make():
        model = model_of() if counts_steps else OwnOptimizer()
        model.compile("sgd", "mse")
        return model

    whole = _weights_of_a_training_with_kills(tmp_path / "whole", make, [])
    parts = _weights_of_a_training_with_kills(tmp_path / "parts", make, kills)
    assert_same(parts, whole)


@pytest.mark.long
@pytest.mark.backend
@pytest.mark.parametrize("seed", range(20))
def test_a_training_that_is_killed_anywhere_goes_on(
    run, tmp_path, undisturbed, seed
):
    draw = random.Random(seed)
    freq = draw.choice([1, 2, 3, 5, "epoch"])
    deaths = [draw.randint(1, 12), draw.randint(1, 6)]
    places = [draw.choice([*KILLED_PLACES]) for _ in range(3)]
    kind = draw.choice(["Drawn", "Reshuffled", "Begun"])
    kill_and_resume(run, tmp_path, undisturbed, kind, deaths, freq, places)


def fit(dataset, *callbacks, **kwargs):
    return model_of().fit(
        dataset, verbose=0, callbacks=list(callbacks), **kwargs
    )


@pytest.mark.backend
def test_an_initial_epoch_has_the_data_of_that_epoch(tmp_path):
    def losses(**kwargs):
        checkpoint = DatasetCheckpoint(tmp_path / "data.json")
        with Drawn(seed=3) as dataset:
            rows = []
            model = model_of()
            model.compile(keras.optimizers.SGD(0.0), "mse")
            history = model.fit(
                dataset, verbose=0, callbacks=[checkpoint], **kwargs
            )
            rows += history.history["loss"]
        return rows

    expected = losses(epochs=4)
    found = losses(epochs=4, initial_epoch=2)
    np.testing.assert_allclose(found, expected[2:], rtol=1e-6)


@pytest.mark.backend
@pytest.mark.parametrize("place", ["inline", "2 processes", "4 threads"])
def test_a_callback_that_sets_the_epoch_each_time_restarts_no_resumed_epoch(
    place,
):
    with Drawn(seed=3, shuffle=True) as dataset:
        walk = iter(dataset)
        next(walk)
        state = dataset.state_dict()

    def losses(*callbacks):
        model = model_of()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
            dataset.load_state_dict(state)
            calls = [call(dataset) for call in callbacks]
            history = model.fit(dataset, epochs=3, verbose=0, callbacks=calls)
        return history.history["loss"]

    def sets_epoch(dataset):
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: dataset.set_epoch(epoch)
        )

    assert losses(sets_epoch) == losses()


def test_a_state_for_another_epoch_than_fit_begins_with_is_left_alone(
    tmp_path, caplog
):
    path = tmp_path / "data.json"
    checkpoint = DatasetCheckpoint(path, delete_checkpoint=False)
    with Drawn(seed=3) as dataset:
        fit(dataset, checkpoint, epochs=2)
    saved = json.loads(path.read_text())
    assert [s["epoch"] for s in saved["states"]] == [1, 2]
    with Drawn(seed=3) as dataset:
        fit(dataset, checkpoint, epochs=1)
        assert dataset.state_dict()["epoch"] == 1
    assert "`initial_epoch=2`" in caplog.text


def test_the_checkpoint_must_come_behind_the_backup(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    checkpoint = DatasetCheckpoint(tmp_path / "data.json")
    with (
        Drawn() as dataset,
        pytest.raises(ValueError, match="must come behind BackupAndRestore"),
    ):
        fit(dataset, checkpoint, backup)


@pytest.mark.parametrize(
    ("has_weights", "says"),
    [
        (True, r"after batch 3 of epoch 2.*\.bkp"),
        (False, "epoch 2, but has no weights.* at the end of `fit`"),
    ],
)
def test_weights_of_a_moment_that_was_not_saved_are_an_error(
    tmp_path, has_weights, says
):
    folder = tmp_path / "backup"
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    with Drawn() as dataset:
        fit(dataset, backup, epochs=1)
        (folder / "training_metadata.json").write_text(
            '{"epoch": 2, "batch": 3}'
        )
        if not has_weights:
            (folder / "latest.weights.h5").unlink()
        with pytest.raises(ValueError, match=says):
            fit(dataset, backup, DatasetCheckpoint(tmp_path / "data.json"))


def test_a_file_of_somebody_elses_is_refused(tmp_path):
    path = tmp_path / "data.json"
    path.write_text("not ours")
    with (
        Drawn() as dataset,
        pytest.raises(ValueError, match="not written by DatasetCheckpoint"),
    ):
        fit(dataset, DatasetCheckpoint(path))
    assert path.read_text() == "not ours"


def test_data_of_another_kind_is_said_to_be_left_out(tmp_path, caplog):
    x = np.zeros((8, 3), "float32")
    path = tmp_path / "data.json"
    model_of().fit(x, x[:, :1], verbose=0, callbacks=[DatasetCheckpoint(path)])
    assert "is no FastPyDataset" in caplog.text
    assert not path.exists()


def test_the_checkpoint_survives_keras_saving(tmp_path):
    checkpoint = DatasetCheckpoint(tmp_path / "a", 5, delete_checkpoint=False)
    config = keras.saving.serialize_keras_object(checkpoint)
    found = keras.saving.deserialize_keras_object(config)
    assert found.get_config() == checkpoint.get_config()
    for wrong in ("batch", 0, 1.5, None):
        with pytest.raises((ValueError, TypeError), match="`save_freq`"):
            DatasetCheckpoint("a", wrong)


# -- what goes on beyond an epoch ----------------------------------------------


class Dies(keras.callbacks.Callback):
    """Ends the training when an epoch begins."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("killed")


def losses_until(dataset, folder, *callbacks, epochs, steps_per_epoch):
    """The mean loss of each epoch, of a model that does not learn."""
    model = model_of()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    found = []
    callbacks = [
        keras.callbacks.BackupAndRestore(str(folder / "backup")),
        DatasetCheckpoint(folder / "data.json"),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: found.append(logs["loss"])
        ),
        *callbacks,
    ]
    with dataset:
        try:
            model.fit(
                dataset,
                verbose=0,
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                callbacks=callbacks,
            )
        except RuntimeError as error:
            assert str(error) == "killed"  # noqa: PT017
    return found


@pytest.mark.backend
@pytest.mark.parametrize("dies_at", [long(1), 2, long(3)])
@pytest.mark.parametrize("ahead", [False, True])
def test_with_steps_per_epoch_the_data_goes_on_where_it_was(
    ahead, dies_at, tmp_path, monkeypatch
):
    if ahead:
        # As on an accelerator, where Keras fetches one batch ahead.
        if keras.backend.backend() != "jax":
            pytest.skip("Keras does so on JAX alone")
        monkeypatch.setattr("jax.default_backend", lambda: "gpu")

    def run(folder, *callbacks):
        dataset = Drawn(length=12, seed=3, shuffle=False)
        return losses_until(
            dataset, folder, *callbacks, epochs=6, steps_per_epoch=4
        )

    expected = run(tmp_path / "undisturbed")
    found = run(tmp_path, Dies(dies_at))
    assert len(found) == dies_at
    found += run(tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class _Trained(keras.metrics.Metric):
    """The first number of the inputs of every step, in all epochs."""

    def __init__(self):
        super().__init__(name="trained")
        self.count = self.add_variable((), "zeros", name="count")
        self.kept = self.add_variable((64,), "zeros", name="kept")

    def update_state(self, y_true, y_pred, sample_weight=None):
        here = keras.ops.arange(64, dtype="float32") == self.count
        number = keras.ops.cast(y_true[0, 0], "float32")
        kept = keras.ops.convert_to_tensor(self.kept)
        self.kept.assign(keras.ops.where(here, number, kept))
        self.count.assign(self.count + 1)

    def reset_state(self):
        """Nothing: epochs do not matter."""

    def result(self):
        return self.count + 0

    def numbers(self):
        kept = keras.ops.convert_to_numpy(self.kept)
        count = int(keras.ops.convert_to_numpy(self.count))
        return [int(number) for number in kept[:count]]


class _Numbers(Drawn):
    """Each batch has its number as a target."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x, x[:, :1]


class _DiesAfter(keras.callbacks.Callback):
    """Ends the training after so many executions."""

    def __init__(self, executions):
        super().__init__()
        self.left = executions

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            raise RuntimeError("killed")


# Keras 3.16 stacks the batches of an execution on JAX.
@pytest.mark.backend
@with_steps_per_execution
@pytest.mark.parametrize(
    ("steps_per_epoch", "ahead"),
    [(None, False), (6, True), long(None, True), long(6, False)],
)
def test_a_training_of_several_steps_per_execution_goes_on_where_it_was(
    steps_per_epoch, ahead, tmp_path, monkeypatch
):
    if ahead:
        # As on an accelerator, where Keras fetches what comes next ahead.
        if keras.backend.backend() != "jax":
            pytest.skip("Keras does so on JAX alone")
        monkeypatch.setattr("jax.default_backend", lambda: "gpu")

    def run(path, *callbacks):
        trained = _Trained()
        model = model_of()
        model.compile("sgd", "mse", metrics=[trained], steps_per_execution=4)
        checkpoint = DatasetCheckpoint(path, 1, delete_checkpoint=False)
        saved = json.loads(path.read_text()) if path.exists() else None
        with (
            _Numbers(length=22, seed=3, workers=2) as dataset,
            contextlib.suppress(RuntimeError),
        ):
            model.fit(
                dataset,
                verbose=0,
                epochs=2 if steps_per_epoch is None else 6,
                initial_epoch=saved["states"][-1]["epoch"] if saved else 0,
                steps_per_epoch=steps_per_epoch,
                callbacks=[checkpoint, *callbacks],
            )
        return trained.numbers()

    expected = run(tmp_path / "whole")
    # Of 22 batches, epochs cut at 6 steps train on 8, 8 and 6.
    assert len(expected) == 44
    assert expected[:22] != sorted(expected[:22]) == [*range(22)]
    for executions in (3, 7):
        path = tmp_path / str(executions)
        first = run(path, _DiesAfter(executions))
        found = first + run(path)
        assert 0 < len(first) < 44
        if steps_per_epoch is None:
            assert found == expected
        else:
            # The epoch that was broken off has all its steps again.
            assert len(found) > len(first) + 8
            assert found[:44] == expected[: len(found)]


@pytest.mark.long
def test_on_mirrored_devices_what_was_fetched_ahead_does_not_count(
    tmp_path, zygote
):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("tf.distribute is TensorFlow's")
    script = tmp_path / "train.py"
    script.write_text(
        """
import json
import keras
import tensorflow as tf
from resume_samples import Drawn
from keras_fastdata import DatasetCheckpoint

cpu = tf.config.list_physical_devices("CPU")[0]
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


def where(epoch, logs):
    with open("data.json") as file:
        print("at", json.load(file)["states"][-1]["dataset"]["position"])


model.fit(
    Drawn(length=12, seed=3, shuffle=False),
    epochs=3,
    steps_per_epoch=3,
    verbose=0,
    callbacks=[
        keras.callbacks.BackupAndRestore("backup"),
        DatasetCheckpoint("data.json"),
        keras.callbacks.LambdaCallback(on_epoch_end=where),
    ],
)
"""
    )
    done = zygote.run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["at", "3", "at", "6", "at", "9"]


@pytest.mark.backend
def test_a_dataset_in_hand_is_trained_on_in_a_second_stage(tmp_path):
    with Reshuffled(seed=3) as dataset:
        expected = fit(dataset, epochs=4).history["loss"]
    checkpoint = DatasetCheckpoint(tmp_path / "data.json")
    model = model_of()
    found = []
    with Reshuffled(seed=3) as dataset:
        for first, last in ((0, 2), (2, 4)):
            history = model.fit(
                dataset,
                epochs=last,
                initial_epoch=first,
                callbacks=[checkpoint],
                verbose=0,
            )
            found += history.history["loss"]
    assert len(found) == len(expected)


@pytest.mark.parametrize("is_set", [False, True])
def test_who_has_hooks_and_no_seed_is_told_before_it_is_too_late(
    is_set, tmp_path, caplog, monkeypatch
):
    model = model_of()  # which sets Keras's seed
    monkeypatch.setattr(
        "keras.src.utils.rng_utils.get_random_seed", lambda: None
    )
    np.random.set_bit_generator(np.random.MT19937(1 if is_set else None))
    with Reshuffled() as dataset:
        saves = DatasetCheckpoint(tmp_path / "data.json")
        model.fit(dataset, callbacks=[saves], verbose=0)
    assert ("has no `seed`" in caplog.text) == (not is_set)


def test_who_has_drawn_a_seed_for_hooks_is_told_which_to_pass():
    with Reshuffled() as dataset:
        fit(dataset)
        state = dataset.state_dict()
        drawn = loader_of(dataset).seed
    random.seed(drawn)  # `fit` has set it
    with Reshuffled() as other:
        loader_of(other).hooks.run(other, "on_epoch_end")
        with pytest.raises(ValueError, match=f"Pass `seed={drawn}`"):
            other.load_state_dict(state)


# -- several processes and epochs ----------------------------------------------


def test_states_from_before_the_first_batch_agree_on_the_order():
    def shards():
        return [Drawn(8, shard=(i, 2), shuffle=True) for i in (0, 1)]

    states = [dataset.state_dict() for dataset in shards()]
    seen = []
    for dataset, state in zip(shards(), states, strict=True):
        dataset.load_state_dict(through_json(state))
        with dataset:
            seen += [int(x[0, 0]) for x, _ in dataset]
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("place", ["2 processes", "4 threads"])
def test_choosing_the_epoch_keeps_the_workers(place):
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        expected = [list(dataset) for _ in range(4)]
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        assert_same(list(dataset), expected[0])
        workers = dataset._fastdata.loader._pool.workers
        for epoch in (1, 3, 2, 0, 1, 1):
            dataset.set_epoch(epoch)
            assert_same(list(dataset), expected[epoch])
        assert dataset._fastdata.loader._pool.workers is workers


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("place", ["inline", "2 processes", "4 threads"])
def test_a_chosen_epoch_begins_again_if_its_first_batch_was_interrupted(
    place, position
):
    """The interrupted iterator is still there, such as in a traceback."""
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        walk = iter(dataset)
        expected = list(walk)[position:]
        following = list(dataset)
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        if position:
            walk = iter(dataset)
            for _ in range(position):
                next(walk)
            dataset.load_state_dict(dataset.state_dict())
        interrupted = iter(dataset)
        interrupted.request()  # the epoch has begun, and no batch has come
        dataset.set_epoch(0)
        state = dataset.state_dict()
        assert_same(list(dataset), expected)
        assert_same(list(interrupted), following)
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as resumed:
        resumed.load_state_dict(state)
        assert_same(list(resumed), expected)


@pytest.mark.parametrize("place", ["inline", "2 processes", "4 threads"])
def test_a_chosen_epoch_begins_again_when_its_iterator_has_been_dropped(place):
    """The iterator was interrupted, and lived on until the epoch was chosen."""
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        expected = list(dataset)
        following = list(dataset)
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        walk = iter(dataset)
        walk.request()  # the epoch has begun, and no batch has come
        dataset.set_epoch(0)
        walk = iter(dataset)
        assert_same(list(walk), expected)
        assert_same(list(dataset), following)


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("place", ["inline", "2 processes", "4 threads"])
def test_the_next_epoch_can_be_chosen_when_one_has_delivered_nothing(
    place, is_dropped, is_asked
):
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        _, *expected = [list(dataset) for _ in range(3)]
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        walk = iter(dataset)
        walk.request()  # the epoch has begun, and no batch has come
        if is_asked:
            dataset.set_epoch(0)
        if is_dropped:
            del walk
        dataset.set_epoch(1)
        for batches in expected:
            assert_same(list(dataset), batches)


class Fails(keras.callbacks.Callback):
    """Raises an error before a batch has been trained on."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self._fail)

    def _fail(self, *_, **__):
        raise ValueError("mine")


@pytest.mark.backend
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin"]
)
def test_an_epoch_can_be_chosen_again_after_a_callback_has_failed(
    hook, is_built
):
    """The error keeps the iterator of `fit`, as it does in a notebook."""
    model = keras.Sequential([keras.layers.Dense(1)])
    if is_built:
        model.build((None, 3))
    model.compile("sgd", "mse")
    with Drawn(seed=3, shuffle=True) as dataset:
        expected = list(dataset)
    with Drawn(seed=3, shuffle=True) as dataset:
        with pytest.raises(ValueError, match="mine"):
            model.fit(dataset, verbose=0, callbacks=[Fails(hook)])
        dataset.set_epoch(0)
        assert_same(list(dataset), expected)


@pytest.mark.parametrize("place", ["inline", "2 processes"])
def test_an_epoch_that_was_chosen_after_its_begin_goes_on(place):
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        expected = [list(dataset) for _ in range(2)]
    with Drawn(seed=3, shuffle=True, **PLACES[place]) as dataset:
        walk = iter(dataset)
        walk.request()
        dataset.set_epoch(0)
        assert_same([*walk, *dataset], [*expected[0], *expected[1]])


def test_a_state_of_a_chosen_epoch_knows_the_hooks():
    with Reshuffled(seed=5) as dataset:
        fit(dataset, epochs=2)
        dataset.set_epoch(7)
        state = through_json(dataset.state_dict())
        expected = list(dataset)
    with Reshuffled(seed=5) as other:
        other.load_state_dict(state)
        assert_same(list(other), expected)


@pytest.mark.parametrize("number", [np.int64(4), np.uint8(4)])
def test_a_length_of_numpys_is_a_number_to_json(number):
    class Sized(Drawn):
        num_batches = number

    with Sized(seed=3) as dataset:
        next(iter(dataset))
        assert through_json(dataset.state_dict())["num_batches"] == 4


@pytest.mark.parametrize(
    ("length", "error"), [(2.5, TypeError), (-1, ValueError), ("4", TypeError)]
)
def test_a_length_that_cannot_be_one_is_refused(length, error):
    class Sized(Drawn):
        num_batches = length

    with (
        Sized() as dataset,
        pytest.raises(error, match=r"`Sized\.num_batches` must"),
    ):
        next(iter(dataset))


def test_keras_waits_for_steps_where_a_number_of_them_is_counted(tmp_path):
    path = tmp_path / "data.json"
    assert DatasetCheckpoint(path).async_safe
    assert not DatasetCheckpoint(path, save_freq=3).async_safe


@pytest.mark.backend
def test_a_checkpoint_stands_where_training_does_without_other_callbacks(
    tmp_path,
):
    seen = []

    class Noting(DatasetCheckpoint):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            saved = json.loads((tmp_path / "data.json").read_text())
            seen.append(saved["states"][-1]["dataset"]["position"])

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with Numbered(length=200, workers=2) as dataset:
        noting = Noting(tmp_path / "data.json", save_freq=1)
        model.fit(dataset, verbose=0, callbacks=[noting])
    assert seen == [*range(1, 200), 0]
