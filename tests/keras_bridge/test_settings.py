"""What the constructor of `FastPyDataset` takes, refuses, and lets change.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import decimal
import fractions
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import pickle
import threading
import time
import types
import warnings

import numpy as np
import pytest
from samples import Numbered, equal, numbers

from keras_fastdata import (
    ArrayDataset,
    FastPyDataset,
    GeneratorDataset,
    ImageFileDataset,
    SampleDataset,
    accelerate,
)
from keras_fastdata._dataset_internals import internals_of, loader_of
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.settings import Settings
from keras_fastdata.workers.thread import ThreadPool

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_PATIENCE_S = 120.0


def _settings_of(**arguments):
    """The settings of a dataset that was constructed with `arguments`."""
    return Numbered(**arguments)._fastdata.settings


# -- what is accepted --------------------------------------------------------

_DEFAULTS = {
    "workers": 1,
    "use_multiprocessing": False,
    "max_queue_size": 10,
    "max_queue_bytes": None,
    "seed": None,
    "shuffle": None,
    "start_method": None,
    "batch_timeout": None,
    "max_worker_restarts": 3,
    "on_error": "raise",
    "shard": "auto",
    "cache": None,
    "cache_bytes": None,
    "cache_version": None,
    "executor": "local",
    "worker_env": None,
    "ray_options": None,
}

# Argument: values, each with what it becomes where that is something else.
_ACCEPTED = {
    "workers": [0, 1, 2, 500, (np.int64(3), 3), (np.uint8(0), 0)],
    "use_multiprocessing": [True, False, (np.True_, True), (1, True)],
    "max_queue_size": [0, 1, 10, 100_000, (np.int32(7), 7)],
    "max_queue_bytes": [None, 1, 1 << 40, (np.uint64(9), 9)],
    "seed": [None, 0, 5, 2**63 - 1, 2**200, (np.int16(3), 3)],
    "shuffle": [None, True, False, (np.False_, False), (0, False)],
    "start_method": [None, "forkserver", "spawn", "fork"],
    "batch_timeout": [
        None,
        0.5,
        (5, 5.0),
        1e-9,
        1e9,
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (fractions.Fraction(1, 4), 0.25),
    ],
    "max_worker_restarts": [0, 3, 1_000, (np.int64(2), 2)],
    "on_error": ["raise", "skip"],
    "shard": ["auto", None, ([0, 1], (0, 1)), ((np.int64(1), 2), (1, 2))],
    "cache": [None, "memory", (pathlib.PurePosixPath("memory"), "memory")],
    "cache_bytes": [None, 1, 1 << 40, (np.uint64(9), 9)],
    "cache_version": [None, 0, 3, "", "b"],
    "executor": ["local", "ray"],
    "worker_env": [
        None,
        {},
        {"OMP_NUM_THREADS": "2", "EMPTY": ""},
        (types.MappingProxyType({"A": "1"}), {"A": "1"}),
    ],
    "ray_options": [None],  # others are for Ray alone, and below
}


def test_the_tables_of_this_file_name_every_argument():
    fields = [field.name for field in dataclasses.fields(Settings)]
    parameters = inspect.signature(FastPyDataset).parameters
    assert list(_DEFAULTS) == fields
    assert [*_ACCEPTED] == fields
    assert [*parameters] == [*fields, "unknown"]


def test_the_defaults_are_those_of_the_signature_and_of_the_settings():
    assert dataclasses.asdict(_settings_of()) == _DEFAULTS
    assert dataclasses.asdict(Settings()) == _DEFAULTS
    parameters = inspect.signature(FastPyDataset).parameters
    assert {n: parameters[n].default for n in _DEFAULTS} == _DEFAULTS


@pytest.mark.parametrize("name", _ACCEPTED)
def test_a_value_that_is_allowed_is_kept(name):
    for value in _ACCEPTED[name]:
        given, kept = value if isinstance(value, tuple) else (value, value)
        found = getattr(_settings_of(**{name: given}), name)
        assert found == kept
        assert type(found) is type(kept)


def test_the_first_three_arguments_may_be_positional_as_in_keras():
    dataset = FastPyDataset(3, True, 20)
    assert dataset.workers == 3
    assert dataset.use_multiprocessing is True
    assert dataset.max_queue_size == 20
    with pytest.raises(TypeError, match="positional"):
        FastPyDataset(3, True, 20, 1000)


def test_every_constructor_argument_is_described():
    described = inspect.cleandoc(FastPyDataset.__doc__)
    for name in _DEFAULTS:
        assert f"\n    {name}: " in described


# -- what is refused ---------------------------------------------------------

_WRONG_TYPE = {
    "workers": [1.0, "2", None, True, np.True_, [1], np.float32(1)],
    "use_multiprocessing": ["yes", None, 2, [], "True"],
    "max_queue_size": [10.0, "10", None, False],
    "max_queue_bytes": [1e9, "1GB", True],
    "cache": [3, True, b"memory", ["memory"]],
    "cache_bytes": [1e9, "1GB", True],
    "cache_version": [1.0, True, ("a", 1)],
    "seed": [1.5, "0", False, (1, 2), np.random.SeedSequence(0)],
    "shuffle": ["batch", 2, "False"],
    "batch_timeout": [True, np.False_, "5", [5], 1j, decimal.Decimal(5)],
    "max_worker_restarts": [None, 3.0, "3", True],
    "worker_env": [
        "A=1",
        [("A", "1")],
        {"A": 1},
        {1: "A"},
        {"A": None},
        {"A": b"1"},
    ],
}
_WRONG_VALUE = {
    "workers": [-1, np.int64(-2)],
    "max_queue_size": [-1, np.int8(-1)],
    "max_queue_bytes": [0, -1],
    "cache_bytes": [0, -1],
    "seed": [-1, np.int64(-1)],
    "start_method": ["thread", "", "Fork", 5],
    "batch_timeout": [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf],
    "max_worker_restarts": [-1],
    "on_error": ["ignore", None, 0, "Skip", ("raise", "skip")],
    "executor": ["threads", None, ""],
}
_ALLOWED = {
    "workers": "integer",
    "use_multiprocessing": "True or False",
    "max_queue_size": "integer",
    "max_queue_bytes": "integer",
    "seed": "integer",
    "shuffle": "True or False",
    "start_method": "'forkserver', 'spawn', 'fork'",
    "batch_timeout": "seconds",
    "max_worker_restarts": "integer",
    "on_error": "'raise', 'skip'",
    "cache": "path of a directory",
    "cache_bytes": "integer",
    "cache_version": "string or an integer",
    "executor": "'local', 'ray'",
    "worker_env": "dict of strings to strings",
}
_LEAST = {
    "workers": 0,
    "max_queue_size": 0,
    "max_queue_bytes": 1,
    "cache_bytes": 1,
    "seed": 0,
    "max_worker_restarts": 0,
}


@pytest.mark.parametrize("name", _WRONG_TYPE)
def test_a_value_of_the_wrong_type_is_a_type_error_that_says_so(name):
    for value in _WRONG_TYPE[name]:
        with pytest.raises(TypeError, match="Received: ") as caught:
            Numbered(**{name: value})
        message = str(caught.value)
        assert f"`{name}`" in message
        assert f"Received: {value!r}" in message
        assert _ALLOWED[name] in message


@pytest.mark.parametrize("name", _WRONG_VALUE)
def test_a_value_out_of_range_is_a_value_error_that_says_so(name):
    for value in _WRONG_VALUE[name]:
        with pytest.raises(ValueError, match="Received: ") as caught:
            Numbered(**{name: value})
        message = str(caught.value)
        received = str(value) if name in _LEAST else repr(value)
        assert f"`{name}`" in message
        assert message.endswith(f"Received: {received}")
        assert _ALLOWED[name] in message
        if name in _LEAST:
            assert f"at least {_LEAST[name]}" in message


def test_no_more_workers_are_taken_than_the_board_has_lines_for():
    message = r"`workers` must be at most 1,?024\. Received: 1,?025"
    for processes in (False, True):
        settings = _settings_of(workers=1_024, use_multiprocessing=processes)
        assert settings.workers == 1_024
        with pytest.raises(ValueError, match=message):
            Numbered(workers=1_025, use_multiprocessing=processes)
    dataset = Numbered(workers=2)
    with pytest.raises(ValueError, match=message):
        dataset.workers = 1_025
    assert dataset.workers == 2


def test_an_environment_variable_that_cannot_be_is_refused_by_its_name():
    for name in ("", "A=B", "A\0"):
        with pytest.raises(ValueError, match="`worker_env`") as caught:
            Numbered(worker_env={"FINE": "1", name: "1"})
        assert repr(name) in str(caught.value)
    with pytest.raises(ValueError, match="`worker_env`") as caught:
        Numbered(worker_env={"A": "1\0"})
    assert repr("1\0") in str(caught.value)


_RAY_OPTIONS = [
    ("16 CPUs", TypeError, "must be a dict"),
    ({3: 1}, TypeError, "must be a dict"),
    ({"init": 3}, TypeError, "arguments of `ray.init`"),
    ({"address": 6379}, TypeError, "must be a string"),
    ({"address": "ray://head:10001"}, ValueError, "a proxy"),
    ({"timeout_s": "long"}, TypeError, "a number of seconds"),
    ({"timeout_s": True}, TypeError, "a number of seconds"),
    ({"timeout_s": 0}, ValueError, "more than 0"),
    ({"timeout_s": math.nan}, ValueError, "more than 0"),
    ({"max_restarts": 3}, ValueError, "max_worker_restarts"),
    ({"name": "mine"}, ValueError, "not the user's to set"),
]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    _RAY_OPTIONS,
    ids=[str(o[0])[:30] for o in _RAY_OPTIONS],
)
def test_an_option_for_ray_that_cannot_be_had_is_refused(options, error, text):
    with pytest.raises(error, match=text) as caught:
        Numbered(executor="ray", ray_options=options)
    assert "`ray_options" in str(caught.value)


def test_options_for_ray_are_kept():
    options = {"num_cpus": 1, "address": "head:6379", "timeout_s": 5}
    found = _settings_of(executor="ray", ray_options=options)
    assert found.ray_options == options


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"workers": "auto"}, "`workers='auto'`"),
        ({"start_method": "spawn"}, "`start_method='spawn'`"),
    ],
    ids=str,
)
def test_what_ray_cannot_do_is_refused(other, text):
    with pytest.raises(ValueError, match="`executor=") as caught:
        Numbered(executor="ray", **other)
    assert text in str(caught.value)


def test_options_for_ray_need_ray():
    with pytest.raises(ValueError, match="executor='ray'"):
        Numbered(ray_options={"num_cpus": 1})


def test_ray_without_workers_builds_in_the_caller():
    assert _settings_of(executor="ray", workers=0).kind == "inline"
    assert _settings_of(executor="ray").kind == "ray"


def test_unknown_arguments_are_all_named_beside_those_there_are():
    with pytest.raises(TypeError) as caught:
        Numbered(worker=2, max_queue=3)
    message = str(caught.value)
    assert message.startswith(
        "Numbered received unknown arguments: max_queue, worker. "
    )
    for name in _DEFAULTS:
        assert name in message
    assert message.endswith(" Did you mean `max_queue_size` and `workers`?")


def test_an_unknown_argument_is_held_against_those_of_the_subclass():
    class Sized(Numbered):
        def __init__(self, image_size, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(TypeError) as caught:
        Sized(3, imagesize=3)
    message = str(caught.value)
    assert "It takes: image_size, length, " in message
    assert message.endswith(" Did you mean `image_size`?")
    with pytest.raises(TypeError, match=r"ray_options\.$"):
        Sized(3, colour="red")


def test_a_number_in_quotes_is_shown_without_them():
    with pytest.raises(TypeError) as caught:
        Numbered(workers="4")
    assert str(caught.value) == (
        '`workers` must be an integer of at least 0 or "auto". Received: '
        "'4' (of type str). Pass `workers=4`, or `int(...)` of it."
    )


def test_an_address_is_no_place_for_a_cache():
    with pytest.raises(ValueError, match=r"'s3://bucket/a'\. Mount it"):
        Numbered(cache="s3://bucket/a", cache_version=1)


def test_a_length_that_is_no_integer_is_shown():
    class Halves(Numbered):
        def __len__(self):
            return 12 / 2

    with pytest.raises(TypeError) as caught:
        iter(Halves(workers=0)).__next__()
    assert str(caught.value) == (
        "`Halves.__len__()` must be an integer. Received: 6.0 (of type "
        "float). Divide with `//`, or round with `math.ceil`."
    )


# -- what does not change ----------------------------------------------------


def test_settings_are_frozen():
    settings = _settings_of(workers=2)
    for name, value in _DEFAULTS.items():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, name, value)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(settings, name)
    assert settings.workers == 2


def test_settings_do_not_follow_the_dictionary_they_were_made_from():
    environment = {"A": "1"}
    settings = _settings_of(worker_env=environment)
    environment["A"] = "2"
    assert settings.worker_env == {"A": "1"}


def test_construction_starts_no_thread_and_draws_no_random_number():
    threads = threading.active_count()
    state = np.random.get_state()
    datasets = [Numbered(workers=4) for _ in range(3)]
    assert threading.active_count() == threads
    assert equal(np.random.get_state()[1], state[1])
    del datasets


# -- Keras's three settings --------------------------------------------------


def test_keras_settings_are_properties_that_can_be_set():
    dataset = Numbered()
    for name, values in {
        "workers": [0, 5, np.int64(2)],
        "use_multiprocessing": [True, False],
        "max_queue_size": [0, 1, 50, np.int64(3)],
    }.items():
        assert isinstance(getattr(type(dataset), name), property)
        assert getattr(type(dataset), name).__doc__
        assert name not in vars(dataset)
        for value in values:
            setattr(dataset, name, value)
            assert getattr(dataset, name) == value
            assert getattr(dataset._fastdata.settings, name) == value


def test_a_wrong_value_is_refused_by_the_setters_and_changes_nothing():
    dataset = Numbered(workers=2, max_queue_size=4)
    with pytest.raises(ValueError, match=r"`workers`.*at least 0.*-1"):
        dataset.workers = -1
    with pytest.raises(TypeError, match=r"`workers`.*'2'"):
        dataset.workers = "2"
    with pytest.raises(TypeError, match=r"`use_multiprocessing`.*'no'"):
        dataset.use_multiprocessing = "no"
    with pytest.raises(ValueError, match=r"`max_queue_size`.*at least 0.*-1"):
        dataset.max_queue_size = -1
    assert dataset.workers == 2
    assert dataset.use_multiprocessing is False
    assert dataset.max_queue_size == 4


def test_setting_one_leaves_the_others_as_they_were():
    dataset = Numbered(workers=2, seed=5, shuffle=True, worker_env={"A": "1"})
    dataset.max_queue_size = 3
    assert dataclasses.asdict(dataset._fastdata.settings) == {
        **_DEFAULTS,
        "workers": 2,
        "seed": 5,
        "shuffle": True,
        "worker_env": {"A": "1"},
        "max_queue_size": 3,
    }


def _threads_of(dataset):
    prefix = f"keras_fastdata-{type(dataset).__name__}-"
    return {t for t in threading.enumerate() if t.name.startswith(prefix)}


class Meeting(FastPyDataset):
    """As many batches as workers; each waits until all are being built.

    So an epoch shows by its end that there are that many workers, in as many
    threads or processes. A batch is (process, thread).
    """

    def __init__(self, folder, **kwargs):
        super().__init__(**kwargs)
        self.folder = str(folder)
        self.participants = max(1, self.workers)

    def __len__(self):
        return self.participants

    def __getitem__(self, index):
        folder = pathlib.Path(self.folder)
        me = f"{os.getpid()}-{threading.get_ident()}"
        (folder / f"{self.epoch}-{me}").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while len(list(folder.glob(f"{self.epoch}-*"))) < self.participants:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{me} has waited for the others")
            time.sleep(0.005)
        return np.array([os.getpid(), threading.get_ident()])


def _builders(dataset):
    """Who built the batches of one epoch: (process, thread) each."""
    return {tuple(batch.tolist()) for batch in dataset}


def test_other_workers_build_after_workers_was_set(tmp_path):
    here = os.getpid()
    with Meeting(tmp_path, workers=1) as dataset:
        (one,) = _builders(dataset)
        assert one[0] == here
        assert one[1] != threading.get_ident()

        dataset.workers = dataset.participants = 3
        three = _builders(dataset)
        assert len(three) == len(_threads_of(dataset)) == 3

        dataset.workers = 0
        dataset.participants = 1
        assert _builders(dataset) == {(here, threading.get_ident())}
        assert not _threads_of(dataset)

        dataset.workers = dataset.participants = 2
        dataset.use_multiprocessing = True
        two = {pid for pid, _ in _builders(dataset)}
        assert len(two) == 2
        assert here not in two

        dataset.workers = dataset.participants = 3
        pids = {pid for pid, _ in _builders(dataset)}
        assert len(pids) == 3
        assert here not in pids

        dataset.use_multiprocessing = False
        assert {pid for pid, _ in _builders(dataset)} == {here}


def test_workers_set_between_epochs_of_fit_build_the_next_epoch():
    import keras

    seen = []

    class Grow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                seen.append(len(_threads_of(dataset)))

        def on_epoch_end(self, epoch, logs=None):
            dataset.workers += 2

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Numbered(workers=1) as dataset:
        model.fit(dataset, epochs=3, callbacks=[Grow()], verbose=0)
        assert seen == [1, 3, 5]


def test_setting_workers_within_an_epoch_loses_and_repeats_nothing():
    with Numbered(length=40, workers=2) as dataset:
        batches = iter(dataset)
        seen = numbers(next(batches) for _ in range(5))
        for workers, processes in [
            (3, False),
            (0, False),
            (2, True),
            (1, True),
        ]:
            dataset.workers = workers
            dataset.use_multiprocessing = processes
            seen += numbers(next(batches) for _ in range(5))
        assert seen + numbers(batches) == list(range(40))


class Counting(Numbered):
    """Counts the batches that were built in this process."""

    built = 0

    def __getitem__(self, index):
        batch = super().__getitem__(index)
        type(self).built += 1
        return batch


def _wait_until_built(count):
    deadline = time.monotonic() + _PATIENCE_S
    while Counting.built < count and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("size", [1, 4])
def test_max_queue_size_bounds_what_is_built_ahead(size, monkeypatch):
    monkeypatch.setattr(Counting, "built", 0)
    with Counting(length=50, workers=1, max_queue_size=9) as dataset:
        dataset.max_queue_size = size
        batches = iter(dataset)
        next(batches)
        _wait_until_built(1 + size)
        dataset.close()
        assert Counting.built == 1 + size


class _Asked:
    """Counts the batches that threads are asked for."""

    def __init__(self, monkeypatch):
        self.count = 0
        self._submit = ThreadPool.submit
        monkeypatch.setattr(
            ThreadPool, "submit", lambda *args: self._count(*args)
        )

    def _count(self, workers, request):
        self.count += 1
        return self._submit(workers, request)


@pytest.mark.backend
@pytest.mark.parametrize("shuffle", [False, True])
def test_keras_loops_have_no_more_built_ahead_than_max_queue_size(
    shuffle, monkeypatch
):
    import keras
    from keras_facts import fetches_ahead

    most, ahead = 4, []

    class Ahead(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ahead.append(asked.count - (batch + 1))

        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    arguments = {"callbacks": [Ahead()], "verbose": 0}
    for run in (
        functools.partial(model.fit, shuffle=shuffle),
        model.evaluate,
        model.predict,
    ):
        ahead.clear()
        asked = _Asked(monkeypatch)
        with Numbered(length=20, max_queue_size=most) as dataset:
            run(dataset, **arguments)
        assert asked.count == 20
        # What Keras has itself does not wait in our queue.
        assert max(ahead) == most + fetches_ahead()


def test_batches_looked_at_before_their_turn_count_as_ready(monkeypatch):
    asked = _Asked(monkeypatch)
    with Numbered(length=20, max_queue_size=4, seed=1) as dataset:
        batches = iterate(loader_of(dataset), dataset, shuffle=True)
        assert numbers(batches.peek(2).values()) == [0, 1]
        first = [next(batches)]
        assert asked.count - 1 <= 4
        assert sorted(numbers(first) + numbers(batches)) == list(range(20))
    assert asked.count == 20


def test_batches_looked_at_before_their_turn_leave_room_in_a_short_queue(
    monkeypatch,
):
    asked = _Asked(monkeypatch)
    with Numbered(length=20, max_queue_size=2, seed=1) as dataset:
        batches = iterate(loader_of(dataset), dataset, shuffle=True)
        batches.peek(2)
        first = [next(batches)]
        assert asked.count == 2 + 1 + 2  # the two are built again
        assert sorted(numbers(first) + numbers(batches)) == list(range(20))
    assert asked.count == 20 + 2


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_a_max_queue_size_of_zero_is_no_bound(kind):
    workers = {"workers": 0 if kind == "inline" else 2}
    processes = {"use_multiprocessing": kind == "processes"}
    with Numbered(length=30, max_queue_size=0, **workers, **processes) as few:
        assert numbers(few) == list(range(30))
        assert few.max_queue_size == 0


def test_without_a_bound_all_batches_of_an_epoch_are_asked_for(monkeypatch):
    asked = _Asked(monkeypatch)
    with Numbered(length=30, max_queue_size=0) as dataset:
        next(iter(dataset))
        assert asked.count == 30


def test_without_a_bound_and_an_end_1024_batches_are_asked_for(monkeypatch):
    asked = _Asked(monkeypatch)
    with Endless(max_queue_size=0) as dataset:
        batches = iter(dataset)
        next(batches)
        assert asked.count == 1 + 1024


class Endless(FastPyDataset):
    """Does not say how long it is."""

    def __getitem__(self, index):
        return np.array([index])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_without_a_length_is_walked_through_for_ever(workers):
    with Endless(workers=workers) as dataset:
        found = [int(b[0]) for b in itertools.islice(dataset, 30)]
    assert found == list(range(30))


# -- names that are the user's -----------------------------------------------

_EVERYDAY_NAMES = ("epoch", "rng", "seed", "shuffle", "cache", "empty")


class Everyday(Numbered):
    """Has attributes by names that this package uses too."""

    def __init__(self, **kwargs):
        for name in _EVERYDAY_NAMES:
            setattr(self, name, f"own {name}")
        super().__init__(length=3, **kwargs)

    def own(self):
        return [getattr(self, name) for name in _EVERYDAY_NAMES]

    def __getitem__(self, index):
        return np.array(self.own())


class EverydayClass(Everyday):
    """The same names, as attributes of the class and as a property."""

    epoch = "own epoch"
    rng = "own rng"
    seed = "own seed"
    shuffle = "own shuffle"
    cache = "own cache"

    @property
    def empty(self):
        return "own empty"

    def __init__(self, **kwargs):
        Numbered.__init__(self, length=3, **kwargs)


@pytest.mark.parametrize(
    "where",
    [
        {"workers": 0},
        {"workers": 2},
        {"workers": 2, "use_multiprocessing": True},
    ],
    ids=["inline", "threads", "processes"],
)
@pytest.mark.parametrize("kind", [Everyday, EverydayClass])
def test_attributes_of_the_users_own_win(kind, where):
    expected = [f"own {name}" for name in _EVERYDAY_NAMES]
    with kind(seed=3, shuffle=True, **where) as dataset:
        assert dataset.own() == expected
        assert [b.tolist() for b in dataset] == [expected] * 3
        settings = dataset._fastdata.settings
        assert (settings.seed, settings.shuffle) == (3, True)


_PRIVATE_WORDS = [
    "_loader",
    "_internals",
    "_state_of",
    "_replace",
    "_note_assigned",
    "_samples",
    "_sampler",
    "_shares",
    "_padded",
    "_read",
    "_rows",
    "_count",
    "_transformed",
    "_shards",
    "_num_batches",
    "_workers",
    "_walk",
    "_plan",
]


def mine(self, *_, **__):
    """In place of a method that another might call."""
    raise AssertionError("somebody called a method of the user's")


def _with_methods(kind):
    """A subclass whose methods have all those names."""
    return type("WithMethods", (kind,), dict.fromkeys(_PRIVATE_WORDS, mine))


def _with_attributes(kind):
    """A subclass whose attributes have all those names."""

    class WithAttributes(kind):
        def __init__(self, *args, **kwargs):
            for name in _PRIVATE_WORDS:
                setattr(self, name, name)
            super().__init__(*args, **kwargs)
            assert [getattr(self, n) for n in _PRIVATE_WORDS] == _PRIVATE_WORDS
            for name in _PRIVATE_WORDS:
                setattr(self, name, None)

    return WithAttributes


_READY_MADE = {
    Numbered: lambda kind, **where: kind(length=4, **where),
    SampleDataset: lambda kind, **where: kind(
        list(range(8)), 2, sampler=np.ones(8), pad_to=None, **where
    ),
    ArrayDataset: lambda kind, **where: kind(
        np.arange(8)[::-1], None, None, 2, np.negative, shuffle=True, **where
    ),
    ImageFileDataset: lambda kind, **where: kind(
        ["a", "bb"], decoder=measured, **where
    ),
    GeneratorDataset: lambda kind, **where: kind(
        counted, 2, num_shards=2, restart=True, **where
    ),
}


def measured(path, size):
    """An image that tells how long its path is."""
    return np.full((*size, 3), len(path), np.uint8)


def counted(shard_index, num_shards):
    """Items for a generator dataset."""
    yield from range(shard_index, 8, num_shards)


def test_a_dataset_has_one_private_name():
    ours = [name for name in vars(FastPyDataset) if name.startswith("_")]
    dunder = [name for name in ours if name.startswith("__")]
    assert set(ours) - set(dunder) <= {"_fastdata", "_repr_html_"}
    assert set(vars(Numbered())) == {"_fastdata", "length", "shape"}


def test_private_names_of_ready_made_datasets_begin_with_our_own():
    made = [make(kind) for kind, make in _READY_MADE.items()]
    for dataset in [*made, accelerate([1, 2])]:
        names = set(vars(dataset))
        for kind in type(dataset).__mro__:
            if kind.__module__.startswith("keras_fastdata."):
                names |= set(vars(kind))
        private = {n for n in names if n[0] == "_" and n[:2] != "__"}
        others = {n for n in private if not n.startswith("_fastdata")}
        assert others <= {"_repr_html_"}  # which IPython looks for


@pytest.mark.parametrize(
    "where",
    [{"workers": 0}, {"workers": 2, "use_multiprocessing": True}],
    ids=["inline", "processes"],
)
@pytest.mark.parametrize("named", [_with_attributes, _with_methods])
@pytest.mark.parametrize("kind", _READY_MADE)
def test_private_names_of_the_users_own_change_no_batch(kind, named, where):
    make = _READY_MADE[kind]
    with make(kind, seed=1) as dataset:
        expected = list(dataset)
    with make(named(kind), seed=1, **where) as dataset:
        for batch, other in zip(dataset, expected, strict=True):
            np.testing.assert_equal(batch, other)
        with contextlib.suppress(AttributeError):  # no setter there
            dataset.workers = 1
        assert json.dumps(dataset.state_dict())


@pytest.mark.parametrize("named", [_with_attributes, _with_methods])
def test_a_dataset_with_such_names_trains_with_processes(named):
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with named(Numbered)(workers=1, use_multiprocessing=True) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_an_attribute_of_the_users_own_can_be_changed_and_deleted():
    with Numbered(seed=1) as dataset:
        dataset.epoch = 7
        assert dataset.epoch == 7
        list(dataset)
        assert dataset.epoch == 7
        del dataset.epoch
        assert dataset.epoch == 1  # one walk has begun


# -- copies ------------------------------------------------------------------


class Stamped(Numbered):
    """Batches carry the process they were built in."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = {"offset": np.arange(100)}

    def __getitem__(self, index):
        return np.array([os.getpid()]), self.table["offset"][[index]]


_DUPLICATORS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda dataset: pickle.loads(pickle.dumps(dataset)),
}
_PROCESSES = {"workers": 1, "use_multiprocessing": True}


def _pids(batches):
    return {int(pid[0]) for pid, _ in batches}


@pytest.fixture(params=_DUPLICATORS)
def duplicate(request):
    return _DUPLICATORS[request.param]


def test_a_copy_has_the_settings_and_the_batches_of_its_original(duplicate):
    original = Stamped(
        length=7, seed=11, shuffle=True, workers=2, max_queue_size=3
    )
    with original, duplicate(original) as other:
        assert type(other) is Stamped
        assert internals_of(other).settings == internals_of(original).settings
        orders = [
            [int(offset[0]) for _, offset in dataset]
            for dataset in (original, other)
        ]
        assert orders[0] == orders[1]
        assert sorted(orders[0]) == list(range(7))


def test_a_copy_has_workers_of_its_own(duplicate):
    original = Stamped(**_PROCESSES)
    with original:
        pids = _pids(original)
        with duplicate(original) as other:
            its_pids = _pids(other)
            assert len(its_pids) == 1
            assert not its_pids & pids
            assert os.getpid() not in its_pids | pids
            assert _pids(original) == pids
            assert _pids(other) == its_pids


def test_a_copy_made_within_an_epoch_leaves_the_epoch_alone(duplicate):
    with Stamped(length=12, workers=2) as original:
        batches = iter(original)
        seen = [next(batches) for _ in range(4)]
        with duplicate(original) as other:
            assert [int(o[0]) for _, o in other] == list(range(12))
        seen += batches
        assert [int(o[0]) for _, o in seen] == list(range(12))


def test_closing_a_copy_does_not_end_the_workers_of_its_original(duplicate):
    with Stamped(**_PROCESSES) as original:
        pids = _pids(original)
        duplicate(original).close()
        with duplicate(original):
            pass
        assert _pids(original) == pids


def test_dropping_a_copy_does_not_end_the_workers_of_its_original(duplicate):
    with Stamped(**_PROCESSES) as original:
        pids = _pids(original)
        other = duplicate(original)
        del other
        assert _pids(original) == pids


def test_changing_a_copy_does_not_have_its_original_build_again(
    duplicate, monkeypatch
):
    monkeypatch.setattr(Counting, "built", 0)
    with Counting(length=9, workers=1, max_queue_size=8) as original:
        batches = iter(original)
        assert numbers([next(batches)]) == [0]
        _wait_until_built(9)
        other = duplicate(original)
        other.length = 4
        other.workers = 3
        assert numbers(batches) == list(range(1, 9))
        assert Counting.built == 9
        with other:
            assert numbers(other) == [0, 1, 2, 3]


def test_settings_of_a_copy_are_its_own(duplicate):
    original = Numbered(workers=2)
    other = duplicate(original)
    other.workers = 4
    assert (original.workers, other.workers) == (2, 4)
    original.max_queue_size = 3
    assert (original.max_queue_size, other.max_queue_size) == (3, 10)
    again = duplicate(other)
    assert again.workers == 4


def test_a_copy_outlives_its_original(duplicate):
    original = Numbered(length=3, workers=2, seed=4)
    list(original)
    other = duplicate(original)
    original.close()
    del original
    with other:
        assert numbers(other) == [0, 1, 2]
        assert other.workers == 2


def test_a_deep_copy_shares_no_data_and_a_shallow_one_does():
    original = Stamped()
    assert copy.copy(original).table is original.table
    deep = copy.deepcopy(original)
    assert deep.table is not original.table
    deep.table["offset"] += 1
    assert original.table["offset"][0] == 0


def test_a_pickle_holds_no_loader_and_no_workers(duplicate):
    with Stamped(workers=2) as original:
        empty = len(pickle.dumps(original))
        list(original)
        assert len(pickle.dumps(original)) == empty
        assert not _threads_of(duplicate(original)) - _threads_of(original)


# -- what a subclass must write ----------------------------------------------

_EVERYWHERE = pytest.mark.parametrize(
    "where",
    [{"workers": 0}, {"workers": 1}, _PROCESSES],
    ids=["inline", "threads", "processes"],
)


@_EVERYWHERE
def test_a_dataset_without_getitem_says_what_it_must_define(where):
    class Unfinished(FastPyDataset):
        def __len__(self):
            return 2

    message = r"^Unfinished must define `__getitem__\(self, index\)`\."
    with Unfinished(**where) as dataset:
        with pytest.raises(NotImplementedError, match=message):
            dataset[0]
        with pytest.raises(NotImplementedError, match=message):
            next(iter(dataset))


@_EVERYWHERE
def test_a_dataset_without_a_length_says_what_it_must_define(where):
    class Endless(FastPyDataset):
        def __getitem__(self, index):
            return np.zeros((2, 3))

    message = r"^Endless must define `__len__\(self\)`.*`num_batches`"
    with Endless(**where) as dataset:
        with pytest.raises(NotImplementedError, match=message):
            _ = dataset.num_batches
        with pytest.raises(TypeError, match=r"Endless.*has no len"):
            len(dataset)


def test_fit_says_what_a_dataset_must_define():
    import keras

    class NoLength(FastPyDataset):
        def __getitem__(self, index):
            return np.zeros((2, 3)), np.zeros((2, 1))

    class NoItems(FastPyDataset):
        def __len__(self):
            return 2

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for kind in (NoLength, NoItems):
        message = f"^{kind.__name__} must define "
        with kind() as data, pytest.raises(NotImplementedError, match=message):
            model.fit(data, verbose=0)


def test_num_batches_may_take_the_place_of_a_length():
    class Counted(FastPyDataset):
        num_batches = 3

        def __getitem__(self, index):
            return np.array([index])

    with Counted(workers=2) as dataset:
        assert [int(batch[0]) for batch in dataset] == [0, 1, 2]


def test_a_subclass_that_does_not_call_our_init_is_warned_once():
    class Forgetful(FastPyDataset):
        def __init__(self):
            self.n = 3

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            return np.array([index])

    dataset = Forgetful()
    message = r"Forgetful\.__init__ should call `super\(\)\.__init__"
    with dataset, pytest.warns(UserWarning, match=message):
        assert [int(batch[0]) for batch in dataset] == [0, 1, 2]
    with dataset, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [int(batch[0]) for batch in dataset] == [0, 1, 2]
        assert dataset.workers == 1
