"""Several processes that train together: each batch once, over all of them."""

from __future__ import annotations

import collections
import json
import logging
import pathlib
import socket
import sys
import types

import keras
import numpy as np
import pytest
import shard_runs
from hypothesis import given
from hypothesis import strategies as st
from places import PLACES
from resume_samples import Drawn
from samples import Numbered
from shard_runs import BATCHES, EPOCHS, ROWS, Seen, Steps, fit
from trainers import Script

from keras_fastdata import (
    GeneratorDataset,
    LoaderError,
    LoaderHealth,
    SampleDataset,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.schedule import plan_epoch
from keras_fastdata.engine.sharding import Shard

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_SCRIPT = pathlib.Path(shard_runs.__file__)


def orders(length, count, shuffle, epoch=0):
    plans = [
        plan_epoch(
            length,
            shuffle=shuffle,
            seed=3,
            epoch=epoch,
            shard=Shard(index, count),
        )
        for index in range(count)
    ]
    return [
        [plan.index_at(place) for place in range(plan.num_batches)]
        for plan in plans
    ]


@given(
    samples=st.integers(1, 300),
    batch_size=st.integers(1, 9),
    count=st.integers(1, 12),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_shards_are_equal_exhaustive_disjoint_and_in_the_order_of_one(
    samples, batch_size, count, shuffle, epoch
):
    length = -(-samples // batch_size)
    (whole,) = orders(length, 1, shuffle, epoch)
    shards = orders(length, count, shuffle, epoch)
    assert {len(shard) for shard in shards} == {-(-length // count)}
    # Step by step, they are the order of one process.
    together = [index for step in zip(*shards, strict=True) for index in step]
    assert together[:length] == whole
    assert sorted(whole) == list(range(length))
    # What fills up the last step is what came first.
    filled = together[length:]
    assert len(filled) < count
    assert filled == [whole[n % length] for n in range(len(filled))]


def test_an_endless_dataset_is_dealt_out_likewise():
    plans = [
        plan_epoch(None, shuffle=False, seed=0, epoch=0, shard=Shard(n, 3))
        for n in range(3)
    ]
    dealt = [[plan.index_at(place) for place in range(4)] for plan in plans]
    assert dealt == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert all(plan.holds(10**9) for plan in plans)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_has_the_batches_of_its_shard_with_the_bytes_of_one(workers):
    with Drawn(seed=3, shuffle=True) as dataset:
        whole = [list(dataset) for _ in range(2)]
    for index in range(3):
        with Drawn(
            seed=3, shuffle=True, shard=(index, 3), workers=workers
        ) as dataset:
            for epoch in range(2):
                found = list(dataset)
                expected = (whole[epoch] * 2)[index : index + 7 : 3]
                np.testing.assert_equal(found, expected)


def test_shards_without_a_seed_draw_the_same_order():
    shards = []
    for index in range(2):
        with Drawn(shuffle=True, length=8, shard=(index, 2)) as dataset:
            shards.append([x[0, 0] for x, _ in dataset])
    assert sorted(shards[0] + shards[1]) == list(range(8))


def _join(patch, index):
    """Has torch say that this is process `index` of 2 that train together."""
    library = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: index,
    )
    patch.setitem(sys.modules, "torch.distributed", library)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "workers",
    [PLACES[place] for place in ("inline", "1 thread", "1 process")],
    ids=["inline", "thread", "process"],
)
def test_batches_seen_before_the_processes_join_leave_no_seed(
    workers, index, monkeypatch
):
    with Drawn(shuffle=True, length=8, seed=0, **workers) as dataset:
        next(iter(dataset))  # of epoch 0
        expected = list(dataset)[index::2]
        outside = dataset.rng.random()
    with Drawn(shuffle=True, length=8, **workers) as dataset:
        first = next(iter(dataset))
        assert dataset.state_dict()["seed"] != 0
        assert dataset.rng.random() != outside
        _join(monkeypatch, index)
        np.testing.assert_equal(list(dataset), expected)
        assert dataset.state_dict()["seed"] == 0
        assert dataset.rng.random() == outside
        del first


def test_a_loaded_seed_stays_when_the_processes_join(monkeypatch):
    with Drawn(shuffle=True, length=8, workers=0) as dataset:
        batches = iter(dataset)
        next(batches), next(batches)
        state = dataset.state_dict()
        expected = list(batches)[::2]
    with Drawn(shuffle=True, length=8, workers=0) as dataset:
        dataset.load_state_dict(state)
        _join(monkeypatch, 0)
        np.testing.assert_equal(list(dataset), expected)
        assert dataset.state_dict()["seed"] == state["seed"]


def test_a_prefetched_epoch_does_not_keep_the_shard_from_before(monkeypatch):
    with Numbered(8, workers=1, seed=1) as dataset:
        batches = iterate(loader_of(dataset), dataset, shuffle=False)
        batches.prefetch_next(True)
        assert len(list(batches)) == 8
        _join(monkeypatch, 1)
        found = [int(x[0, 0]) for x, _ in batches.iterate_next()]
    assert found == [1, 3, 5, 7]


def test_samples_keep_their_order_for_any_number_of_processes():
    def seen(count):
        shards = []
        for index in range(count):
            with SampleDataset(
                np.arange(48), 4, shuffle=True, seed=1, shard=(index, count)
            ) as dataset:
                shards.append(list(dataset))
        steps = zip(*shards, strict=True)
        return np.concatenate([batch for step in steps for batch in step])

    np.testing.assert_array_equal(seen(1), seen(2))
    np.testing.assert_array_equal(seen(1), seen(4))


@pytest.mark.backend
def test_fit_has_the_steps_of_the_shard_and_health_says_whose_they_are(
    caplog,
):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    health = LoaderHealth(verbose=0)
    steps = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    with (
        caplog.at_level(logging.INFO, "keras_fastdata"),
        Numbered(9, shard=(1, 2), workers=2) as dataset,
    ):
        model.fit(dataset, epochs=2, verbose=0, callbacks=[Steps(), health])
    assert steps == [0, 1, 2, 3, 4] * 2
    said = "batch 2 of each 2 that follow one another (shard=)"
    assert said in str(health.summary())
    assert health.summary().shard == said
    assert [r.message for r in caplog.records].count(
        f"Numbered has {said}."
    ) == 1


def test_another_number_of_processes_goes_on_at_the_end_of_a_step():
    with Drawn(seed=3, shuffle=True, length=24) as dataset:
        whole = list(dataset)
    with Drawn(seed=3, shuffle=True, length=24, shard=(0, 4)) as dataset:
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        state = dataset.state_dict()
    assert state["position"] == 12
    with Drawn(shuffle=True, length=24, shard=(2, 3)) as dataset:
        dataset.load_state_dict(state)
        np.testing.assert_equal(list(dataset), whole[12 + 2 :: 3])
    with (
        Drawn(shuffle=True, length=24, shard=(2, 5)) as dataset,
        pytest.raises(
            ValueError, match=r"12 batches into its epoch.*5 of them"
        ),
    ):
        dataset.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong", [(2, 2), (-1, 2), (0, 0), (0,), (0, 1, 2), "all", 1, (0.5, 2)]
)
def test_what_is_no_shard_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="`shard"):
        Numbered(shard=wrong)


def test_generators_cannot_be_dealt_out_by_batches():
    with (
        GeneratorDataset(lambda: iter(range(9)), shard=(0, 2)) as dataset,
        pytest.raises(LoaderError, match="one after the other"),
    ):
        next(iter(dataset))


# -- real processes -----------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(zygote, how, count=1, **environment):
    """What each of `count` processes says it has done."""
    port = free_port()
    scripts = [
        Script(zygote, [_SCRIPT, how, rank, count, port], None, environment)
        for rank in range(count)
    ]
    found = []
    for done in [script.end() for script in scripts]:
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def single():
    """The losses of one process that trains on the same steps."""
    return fit(Steps(), Seen())


_RUNS = {
    "jax": [
        ("jax_processes", 2, {}),
        (
            "jax_devices",
            1,
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        ),
    ],
    "tensorflow": [
        pytest.param("tensorflow_mirrored", 1, {}, marks=pytest.mark.long),
        ("tensorflow_workers", 2, {}),
    ],
    "torch": [("torch_processes", 2, {})],
}


@pytest.mark.backend
@pytest.mark.parametrize(
    ("how", "count", "environment"), _RUNS[keras.backend.backend()]
)
def test_every_sample_is_trained_on_once_and_the_loss_is_that_of_one_process(
    how, count, environment, single, zygote
):
    found = run(zygote, how, count, **environment)
    for epoch in range(EPOCHS):
        parts = [one["samples"][epoch] for one in found]
        assert {len(part) for part in parts} == {BATCHES * ROWS // count}
        times = collections.Counter(number for part in parts for number in part)
        assert times == dict.fromkeys(range(BATCHES * ROWS), 1)
    for one in found:
        np.testing.assert_allclose(one["losses"], single, rtol=1e-4)
