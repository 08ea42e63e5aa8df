"""`LoaderHealth`: does training wait for its data?

Where a test compares times, the clock is simulated: it stands still but for
what sleeps, so no load of the machine changes a figure. What is slow sleeps
for long enough that a share is far from the 0.5 it is compared with. All tests
train one model, because its first epoch takes its time to compile the step.
"""

from __future__ import annotations

import collections
import csv
import ctypes
import dataclasses
import functools
import itertools
import json
import re
import sys
import threading
import time
from pathlib import Path

import generator_samples
import keras
import numpy as np
import places
import pytest
from keras_facts import with_steps_per_execution
from samples import Numbered

from keras_fastdata import (
    ArrayDataset,
    GeneratorDataset,
    LoaderHealth,
    keras_bridge,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.callbacks import device, loader_health, saving_time
from keras_fastdata.datasets import generator_workers
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.pausing import Pausing
from keras_fastdata.health import epoch_monitor, step_clock
from keras_fastdata.health.account import TimeAccount
from keras_fastdata.health.measured import Measured
from keras_fastdata.keras_bridge import adapter, batches
from keras_fastdata.metrics import cpu, formatting, recorder, timing
from keras_fastdata.metrics.sampling import SamplingState
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers.process.pool import ProcessPool
from keras_fastdata.workers.thread import ThreadPool

pytestmark = pytest.mark.usefixtures("kept_forkserver")
on_each_backend = pytest.mark.backend

_SLOW_S = 0.025  # a step or a test that is slow
_WAIT_S = 2 * _SLOW_S  # a batch that is slow to come
# Half of eight steps are sampled, and the usual wait is known from the others.
# On PyTorch one of these has no wait: each step fetches the next one's batch.
_ESTIMATED_S = 2.1 * _WAIT_S
_TIME = r"[\d.]+ (?:s|ms)"
_LINE = re.compile(
    rf"LoaderHealth: (\w+(?: \d+)?) waited ({_TIME}) of {_TIME} for data "
    rf"\((\d+)%, (?:still )?(\w+)\)"
    rf"(?:, {_TIME} of it in steps that builds slow down)?\."
)


@pytest.fixture(autouse=True)
def _cores_are_idle(monkeypatch):
    """Whatever else the machine is at: it would be the verdict."""
    monkeypatch.setattr(cpu, "busy_cores", lambda before, after: 0.5)


class SimulatedTime:
    """Stands for the module `time`: it is as late as what slept makes it.

    As with the real one, no variable of Python holds the time. Batches could
    depend on a variable, and would be built again.
    """

    _real = time

    def __init__(self):
        self._now = ctypes.c_double(time.monotonic())

    @property
    def now_s(self):
        return self._now.value

    @now_s.setter
    def now_s(self, now_s):
        self._now.value = now_s

    def monotonic(self):
        self.now_s += 1e-6
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds):
        self.now_s += seconds

    def process_time(self):
        return 0.0

    def __getattr__(self, name):
        return getattr(self._real, name)


@pytest.fixture
def simulated_time(monkeypatch):
    """Has this module, and all that measures a `fit`, a simulated clock."""
    simulated = SimulatedTime()
    measuring = batches, epoch_monitor, recorder, step_clock, timing
    for module in (*measuring, adapter, loader_health, saving_time):
        monkeypatch.setattr(module, "time", simulated)
    monkeypatch.setattr(timing.RunDelay, "read", lambda self: 0.0)
    monkeypatch.setitem(globals(), "time", simulated)


class SlowData(Numbered):
    """Takes its time over every batch."""

    def __init__(self, seconds=_WAIT_S, length=8, **kwargs):
        super().__init__(length=length, **{"workers": 0, **kwargs})
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


class ReshuffledSlowData(SlowData):
    """Begins no epoch before its hook has run."""

    def on_epoch_end(self):
        self.order = np.random.permutation(self.length)


class FreeData(Numbered):
    """Has its batches at hand."""

    def __init__(self, length=8, **kwargs):
        super().__init__(length=length, **{"workers": 0, **kwargs})


class SlowSteps(keras.callbacks.Callback):
    """Stands for a model that takes its time over every step."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(_SLOW_S)


class SlowTests(keras.callbacks.Callback):
    """Stands for a validation that takes its time over every step."""

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(2.5 * _SLOW_S)


class PlainData(keras.utils.PyDataset):
    """Keras's own kind of dataset, slow as well."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        time.sleep(0.01)
        return np.zeros((4, 3), "float32"), np.zeros((4, 1), "float32")


def _arrays(batches=2):
    return np.zeros((4 * batches, 3)), np.zeros((4 * batches, 1))


@functools.cache
def _model(name="a"):
    """A model whose training and test steps are compiled already."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with FreeData() as data, FreeData() as validation:
        model.fit(data, validation_data=validation, verbose=0)
    return model


def _fit(dataset, *callbacks, epochs=1, verbose=0, **kwargs):
    """Fits the model; returns the history of its logs."""
    model = _model()
    with dataset:
        history = model.fit(
            dataset,
            epochs=epochs,
            callbacks=list(callbacks),
            verbose=verbose,
            **kwargs,
        )
    return history.history


# -- the share ---------------------------------------------------------------


@on_each_backend
def test_slow_data_is_waited_for_most_of_the_time(simulated_time):
    logs = _fit(SlowData(), LoaderHealth(0), epochs=2)
    assert len(logs["data_wait"]) == 2
    assert all(0.5 < share <= 1 for share in logs["data_wait"])


@on_each_backend
def test_free_data_is_hardly_waited_for(simulated_time):
    logs = _fit(FreeData(), LoaderHealth(0), SlowSteps(), epochs=2)
    assert len(logs["data_wait"]) == 2
    assert all(0 <= share < 0.5 for share in logs["data_wait"])


@pytest.mark.parametrize(
    ("where", "pool"),
    [
        ({"workers": 1}, ThreadPool),
        ({"workers": 1, "use_multiprocessing": True}, ProcessPool),
    ],
    ids=["thread", "process"],
)
def test_waits_for_workers_are_seen(where, pool, monkeypatch, tmp_path):
    gate = tmp_path / "gate"

    class Gated(Numbered):
        """Batch 5 comes when training has waited for it."""

        def __getitem__(self, index):
            while index == 5 and not gate.exists():
                time.sleep(0.001)
            return super().__getitem__(index)

    class Trained(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1

    def wait_for_long(workers, timeout_s):
        if trained.steps >= 5:
            time.sleep(1.0)
            gate.touch()
        return wait(workers, timeout_s)

    trained, wait = Trained(), pool.wait
    monkeypatch.setattr(pool, "wait", wait_for_long)
    logs = _fit(
        Gated(length=8, **where), LoaderHealth(0), trained, shuffle=False
    )
    assert 0 < logs["data_wait"][0] <= 1


def test_the_share_is_a_plain_number_in_the_logs():
    logs = _fit(FreeData(), LoaderHealth(0))
    assert all(type(share) is float for share in logs["data_wait"])
    json.dumps(logs["data_wait"])


@on_each_backend
def test_epochs_are_measured_one_by_one(simulated_time):
    class SlowsDown(FreeData):
        epochs_begun = 0

        def on_epoch_begin(self):
            self.epochs_begun += 1

        def __getitem__(self, index):
            if self.epochs_begun == 2:
                time.sleep(_WAIT_S)
            return super().__getitem__(index)

    class ShortSteps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(_SLOW_S / 4)

    first, second, third = _fit(
        SlowsDown(workers=0), LoaderHealth(0), ShortSteps(), epochs=3
    )["data_wait"]
    assert first < 0.5
    assert second > 0.5
    assert third < 0.5


def test_a_fit_is_measured_whatever_was_trained_before(simulated_time):
    health = LoaderHealth(0)
    assert _fit(SlowData(), health)["data_wait"][-1] > 0.5
    assert _fit(FreeData(), health, SlowSteps())["data_wait"][-1] < 0.5
    assert _fit(SlowData(), health)["data_wait"][-1] > 0.5


@on_each_backend
def test_steps_per_epoch_cut_what_is_measured(simulated_time):
    logs = _fit(
        SlowData(length=24), LoaderHealth(0), steps_per_epoch=8, epochs=3
    )
    assert len(logs["data_wait"]) == 3
    assert all(0.5 < share <= 1 for share in logs["data_wait"])


@on_each_backend
@pytest.mark.parametrize("workers", [2, 0])
def test_short_epochs_of_quick_batches_have_a_share_each(workers):
    dataset = FreeData(length=1000, max_queue_size=64, workers=workers)
    logs = _fit(dataset, LoaderHealth(0), steps_per_epoch=3, epochs=12)
    assert len(logs["data_wait"]) == 12


# -- within a callback ---------------------------------------------------------


class Evaluates(keras.callbacks.Callback):
    """Evaluates on slow data in the middle of an epoch."""

    def __init__(self, *callbacks, epochs=(0, 1, 2)):
        super().__init__()
        self.callbacks, self.epochs = list(callbacks), epochs
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self.epoch in self.epochs:
            with SlowData(length=4) as data:
                self.model.evaluate(data, callbacks=self.callbacks, verbose=0)


@on_each_backend
def test_an_evaluation_within_a_callback_is_no_training(simulated_time):
    health = LoaderHealth(0)
    _fit(FreeData(), health, SlowSteps(), Evaluates(), epochs=3)
    epochs = health.summary().epochs
    assert [epoch.batches for epoch in epochs] == [8, 8, 8]
    assert [epoch.phase for epoch in epochs] == ["train"] * 3
    assert max(epoch.build_s_p95 for epoch in epochs) < _WAIT_S / 2


class EvaluatesFirst(keras.callbacks.Callback):
    """Evaluates before the first batch of every epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        with SlowData(length=4) as data:
            self.model.evaluate(data, verbose=0)


@on_each_backend
@pytest.mark.parametrize("order", [1, -1], ids=["behind", "before"])
def test_an_evaluation_at_the_begin_of_an_epoch_is_no_training(
    order, simulated_time
):
    health = LoaderHealth(0)
    _fit(FreeData(), *[health, EvaluatesFirst()][::order], epochs=2)
    epochs = health.summary().epochs
    assert [epoch.batches for epoch in epochs] == [8, 8]
    assert max(epoch.build_s_p95 for epoch in epochs) < _WAIT_S / 2


@on_each_backend
def test_an_evaluation_within_a_fit_may_be_measured_too():
    health, inner = LoaderHealth(0), LoaderHealth(0)
    logs = _fit(SlowData(), health, Evaluates(inner, epochs=[1]), epochs=3)
    assert len(logs["data_wait"]) == 3
    assert [e.batches for e in health.summary().epochs] == [8, 8, 8]
    (found,) = inner.summary().epochs
    assert (found.phase, found.batches) == ("evaluate", 4)


@on_each_backend
def test_the_callback_of_the_fit_goes_on_through_an_evaluation_with_it():
    health = LoaderHealth(0)
    logs = _fit(SlowData(), health, Evaluates(health, epochs=[1]), epochs=3)
    assert len(logs["data_wait"]) == 3
    assert [e.batches for e in health.summary().epochs] == [8, 8, 8]
    model = _model()
    with FreeData() as data:
        model.evaluate(data, callbacks=[health], verbose=0)
    (found,) = health.summary().epochs
    assert (found.phase, found.epoch) == ("evaluate", 0)


class _Fails(SlowData):
    def __getitem__(self, index):
        raise ValueError("mine")


class _TriesToEvaluate(Evaluates):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            with _Fails() as data, pytest.raises(ValueError, match="mine"):
                self.model.evaluate(data, callbacks=self.callbacks, verbose=0)


@on_each_backend
def test_the_callback_of_the_fit_goes_on_after_an_evaluation_that_raised(
    tmp_path,
):
    health = LoaderHealth(0, trace=tmp_path / "trace.json")
    with FreeData() as validation:
        _fit(
            SlowData(),
            health,
            _TriesToEvaluate(health),
            epochs=2,
            validation_data=validation,
        )
    summary = health.summary()
    assert [e.batches for e in summary.epochs] == [8, 8]
    assert [e.batches for e in summary.validations] == [8, 8]
    trace = json.loads((tmp_path / "trace.json").read_text())
    steps = [
        event["args"]["phase"]
        for event in trace["traceEvents"]
        if event["name"] == "step"
    ]
    assert collections.Counter(steps) == {"train": 16, "validation": 16}


def test_two_of_them_are_refused():
    with pytest.raises(ValueError, match="two LoaderHealth"):
        _fit(FreeData(), LoaderHealth(0), LoaderHealth(0))


# -- validation --------------------------------------------------------------


@on_each_backend
def test_a_slow_validation_dataset_does_not_raise_the_share_of_training(
    simulated_time,
):
    with SlowData() as validation:
        logs = _fit(
            FreeData(),
            LoaderHealth(0),
            SlowSteps(),
            epochs=2,
            validation_data=validation,
        )
    assert all(share < 0.5 for share in logs["data_wait"])


@on_each_backend
@pytest.mark.parametrize("kind", ["dataset", "arrays"])
def test_slow_validation_steps_do_not_lower_the_share_of_training(
    kind, simulated_time
):
    with FreeData() as dataset:
        logs = _fit(
            ReshuffledSlowData(),
            LoaderHealth(0),
            SlowTests(),
            epochs=2,
            validation_data=dataset if kind == "dataset" else _arrays(8),
            validation_batch_size=None if kind == "dataset" else 4,
        )
    assert logs["data_wait"][-1] > 0.5


@on_each_backend
def test_a_validation_dataset_that_starts_slowly_does_not_count(simulated_time):
    """On TensorFlow its first batches are built before validation begins."""
    with SlowData(8 * _WAIT_S, length=2) as validation:
        logs = _fit(SlowData(), LoaderHealth(0), validation_data=validation)
    assert logs["data_wait"][0] > 0.5


def test_validation_every_second_epoch_is_left_out_where_it_happens(
    simulated_time,
):
    with SlowData() as validation:
        logs = _fit(
            FreeData(),
            LoaderHealth(0),
            SlowSteps(),
            epochs=4,
            validation_data=validation,
            validation_freq=2,
        )
    assert len(logs["data_wait"]) == 4
    assert len(logs["val_loss"]) == 2
    assert all(share < 0.5 for share in logs["data_wait"])


# -- who gets it -------------------------------------------------------------


@on_each_backend
def test_callbacks_listed_after_it_have_the_share(tmp_path):
    class Note(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(logs.get("data_wait"))

    before, after = Note(), Note()
    table = tmp_path / "log.csv"
    logs = _fit(
        FreeData(),
        before,
        LoaderHealth(0),
        after,
        keras.callbacks.CSVLogger(str(table)),
        epochs=2,
    )
    assert before.seen == [None, None]
    assert after.seen == logs["data_wait"]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["data_wait"]) for row in rows] == pytest.approx(
        logs["data_wait"]
    )


@on_each_backend
def test_other_logs_are_left_as_they_are():
    with FreeData() as validation:
        logs = _fit(FreeData(), LoaderHealth(0), validation_data=validation)
        without = _fit(FreeData(), validation_data=validation)
    assert set(logs) == {"data_wait", "loss", "val_loss"}
    assert set(without) == {"loss", "val_loss"}


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="event files are read and written with TensorFlow",
)
def test_tensorboard_draws_the_share(tmp_path):
    pytest.importorskip("tensorboard")
    import tensorflow as tf

    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    logs = _fit(FreeData(), LoaderHealth(0), board, epochs=2)
    shares = {}
    for path in (tmp_path / "train").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag == "epoch_data_wait":
                    share = tf.make_ndarray(value.tensor)
                    shares[event.step] = float(share)
    assert shares == pytest.approx(dict(enumerate(logs["data_wait"])))


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="event files are read and written with TensorFlow",
)
@pytest.mark.parametrize("first", [True, False])
def test_tensorboard_draws_scalars_of_the_loader(tmp_path, first):
    pytest.importorskip("tensorboard")
    import tensorflow as tf

    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    health = LoaderHealth(0)
    both = [health, board] if first else [board, health]
    logs = _fit(SlowData(), *both, epochs=2)
    found = {}
    for path in (tmp_path / "train").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag.startswith("loader/"):
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, {})[event.step] = number
    fields = dataclasses.fields(TimeAccount)
    assert set(found) == {
        f"loader/{name}"
        for name in (
            "data_wait",
            "batches_per_s",
            "build_s_p50",
            "build_s_p95",
            "queue_depth",
            "worker_utilization",
            "restarts",
            *(f"account/{field.name}" for field in fields),
        )
    }
    assert found["loader/data_wait"] == pytest.approx(
        dict(enumerate(logs["data_wait"]))
    )
    epochs = health.summary().epochs
    for epoch in epochs:
        parts = [found[f"loader/account/{f.name}"] for f in fields]
        assert sum(part[epoch.epoch] for part in parts) == pytest.approx(
            epoch.account.total_s, rel=1e-4
        )
    assert found["loader/build_s_p50"] == pytest.approx(
        {epoch.epoch: epoch.build_s_p50 for epoch in epochs}
    )
    assert set(logs) == {"data_wait", "loss"}


def test_a_fit_without_our_datasets_gets_and_prints_nothing(capsys):
    model = _model()
    x, y = _arrays()
    for data in ((x, y), (PlainData(),)):
        history = model.fit(
            *data, epochs=2, callbacks=[LoaderHealth()], verbose=0
        )
        assert "data_wait" not in history.history
    assert capsys.readouterr().out == ""


def test_one_of_our_datasets_for_validation_alone_adds_nothing(capsys):
    x, y = _arrays()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    with SlowData(_SLOW_S / 8) as validation:
        history = model.fit(
            x,
            y,
            epochs=2,
            validation_data=validation,
            callbacks=[LoaderHealth()],
            verbose=0,
        )
    assert "data_wait" not in history.history
    assert capsys.readouterr().out == ""


@on_each_backend
def test_evaluate_and_predict_are_measured_and_print_nothing(capsys):
    model = _model()
    health = LoaderHealth()
    with FreeData() as dataset:
        model.evaluate(dataset, callbacks=[health], verbose=0)
        (epoch,) = health.summary().epochs
        assert (epoch.phase, epoch.batches) == ("evaluate", 8)
        model.predict(dataset, callbacks=[health], verbose=0)
        (epoch,) = health.summary().epochs
        assert (epoch.phase, epoch.batches) == ("predict", 8)
        model.predict(np.zeros((4, 3)), callbacks=[health], verbose=0)
        assert health.summary().epochs == ()
    assert capsys.readouterr().out == ""


# -- generators, which have workers of their own ------------------------------


@pytest.mark.parametrize("kind", places.KINDS)
def test_generators_are_measured_in_the_workers_that_run_them(kind):
    health = LoaderHealth(verbose=0)
    factory = generator_samples.SlowPairs(0.011)
    arguments = {**places.KINDS[kind], "batch_size": 2}
    with GeneratorDataset(factory, **arguments) as dataset:
        epochs = 2
        _fit(dataset, health, epochs=epochs)
        facts = health.summary().epochs[-1].facts
        assert (facts.workers_are, facts.workers) == (
            WorkerKind.local(dataset.workers, dataset.use_multiprocessing),
            dataset.workers,
        )
        record = health._record
        workers = max(1, dataset.workers)
        assert set(record.column("worker")) == set(range(workers))
        assert record.settings["workers"] == dataset.workers
        assert len(record.pids) == (workers if kind == "process" else 0)
        # A build takes as long as its items, however long it is waited for.
        builds = record.column("built_s") - record.column("began_s")
        assert builds.min() > 0.02
        assert facts.build_s == pytest.approx(builds[-12:].sum())
        assert [int(n) for n in record.column("batch")] == [*range(12)] * 2
        while not health.summary().hot_lines:  # too few samples
            epochs *= 2
            _fit(dataset, health, epochs=epochs)
    (hottest, *_) = health.summary().hot_lines
    assert hottest.source == "time.sleep(self.seconds)"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_of_generators_pause_while_a_step_is_measured(
    kind, monkeypatch
):
    monkeypatch.setattr(generator_workers, "_QUIESCE_S", 120.0)
    busy, steps, paused = [], [], set()
    pause, resume = Pausing.pause, Pausing.resume
    monkeypatch.setattr(
        Pausing, "pause", lambda self: paused.add(self) or pause(self)
    )
    monkeypatch.setattr(
        Pausing, "resume", lambda self: paused.discard(self) or resume(self)
    )

    class Watching(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if health._monitor._clock.state is SamplingState.ISOLATED:
                steps.append(batch)
                loaders = map(loader_of, dataset._fastdata_plan.shards)
                busy.extend(
                    each._pool.workers.busy or each.pausing not in paused
                    for each in loaders
                )

    health = LoaderHealth(verbose=0)
    factory = generator_samples.SlowPairs(0.002)
    arguments = {**places.KINDS[kind], "batch_size": 2}
    with GeneratorDataset(factory, **arguments) as dataset:
        model = keras.Sequential([keras.layers.Dense(1)])  # peeks to be built
        model.compile("sgd", "mse")
        model.fit(dataset, epochs=2, callbacks=[health, Watching()], verbose=0)
        assert steps
        assert not any(busy)
        assert [len(list(dataset)) for _ in range(2)] == [12, 12]


# -- what is printed ---------------------------------------------------------


@on_each_backend
def test_a_line_after_each_epoch_names_the_reason(capsys, simulated_time):
    logs = _fit(SlowData(), LoaderHealth(), epochs=3)
    found = _LINE.findall(capsys.readouterr().out)
    assert [name for name, *_ in found] == ["epoch 1", "epoch 2", "epoch 3"]
    assert [share for *_, share, _ in found] == [
        f"{100 * share:.0f}" for share in logs["data_wait"]
    ]
    assert {kind for *_, kind in found} == {"io_bound"}


def test_the_last_lines_are_a_table_and_what_to_change(capsys, simulated_time):
    _fit(SlowData(10 * _WAIT_S), LoaderHealth(), epochs=3)
    lines = capsys.readouterr().out.splitlines()
    table = next(n for n, line in enumerate(lines) if line.split()[0] == "took")
    lines = lines[table:]
    assert lines[0].split()[:3] == ["took", "waiting", "data_wait"]
    assert [line.split()[1] for line in lines[1:4]] == ["1", "2", "3"]
    assert lines[6].startswith("12.")
    assert "s in all: waiting for data 1" in lines[6]
    assert lines[8].startswith("io_bound: Training waited 1")
    assert lines[9].startswith("Building a batch takes 5")
    last = " ".join(lines[10:])
    assert re.search(r"Use `SlowData\(.*instead of \S+ m?s\.$", last)
    assert max(map(len, lines)) <= 80


class HeldOut(SlowData):
    """Another name, which advice on validation mentions."""


def test_a_validation_that_waits_is_printed(capsys, simulated_time):
    with HeldOut(10 * _WAIT_S) as validation:
        health = LoaderHealth()
        _fit(
            FreeData(),
            health,
            SlowSteps(),
            epochs=3,
            validation_data=validation,
        )
    text = capsys.readouterr().out
    waits = [e.account.validation_wait_s for e in health.summary().epochs]
    besides = re.findall(rf"Besides: validation waiting for data {_TIME}", text)
    assert besides == [
        f"Besides: validation waiting for data {formatting.duration(wait_s)}"
        for wait_s in waits
    ]
    first, *_ = health.summary().findings
    assert first.phase == "Validation"
    lines = text.splitlines()
    assert any(line.startswith("io_bound: Validation") for line in lines)
    assert any("`HeldOut(..., workers=" in line for line in lines)


@on_each_backend
def test_the_seconds_of_waiting_are_the_same_everywhere(capsys, simulated_time):
    health = LoaderHealth()
    with SlowData() as validation:
        _fit(
            SlowData(),
            health,
            SlowSteps(),
            epochs=3,
            validation_data=validation,
        )
    summary, text = health.summary(), capsys.readouterr().out
    account = summary.account
    start_s = summary.epochs[0].start_s
    assert sum(epoch.waited_s for epoch in summary.epochs) == pytest.approx(
        account.waiting_s + account.first_batch_s - start_s
    )
    assert sum(v.waited_s for v in summary.validations) == pytest.approx(
        account.validation_wait_s
    )
    assert [waited for _, waited, *_ in _LINE.findall(text)] == [
        formatting.duration(epoch.waited_s) for epoch in summary.epochs
    ]
    for finding in summary.findings:
        seconds = account.waiting_s
        if finding.phase == "Validation":
            seconds = account.validation_wait_s
        whole = formatting.duration(account.total_s)
        waited = f"waited {formatting.duration(seconds)} of {whole} for data"
        assert finding.headline.startswith(f"{finding.phase} {waited}")
        assert finding.headline in " ".join(text.split())


# -- the account ---------------------------------------------------------------


class SlowFirst(FreeData):
    """Takes its time over the first batch that is built."""

    is_first = True

    def __getitem__(self, index):
        if self.is_first:
            self.is_first = False
            time.sleep(8.0)
        return super().__getitem__(index)


@on_each_backend
def test_the_time_before_the_first_step_is_drawn(simulated_time):
    model = keras.Sequential([keras.layers.Dense(1)])  # which fit builds
    model.compile("sgd", "mse")
    health = LoaderHealth(0)
    with SlowFirst() as dataset:
        model.fit(dataset, epochs=2, callbacks=[health], verbose=0)
    record = health._record
    start, first, *_ = record.steps
    assert (start.number, first.number) == (-1, 0)
    assert start.began_s == record.began_s
    assert start.waited_s == pytest.approx(8.0, abs=0.1)
    assert start.ended_s <= first.began_s


class SlowHooks(SlowData):
    """Takes its time over its hook."""

    def on_epoch_end(self):
        time.sleep(1.0)


class SlowCallback(keras.callbacks.Callback):
    """Takes its time after each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(3.0)


class SavesSlowly(keras.callbacks.ModelCheckpoint):
    """Takes its time to save, every five batches or after each epoch."""

    def __init__(self, **kwargs):
        super().__init__("unused.keras", **kwargs)

    def on_train_batch_end(self, batch, logs=None):
        if self.save_freq != "epoch" and batch % self.save_freq == 4:
            time.sleep(2.0)

    def on_epoch_end(self, epoch, logs=None):
        if self.save_freq == "epoch":
            time.sleep(2.0)


@on_each_backend
def test_the_wait_before_the_first_step_is_seen(simulated_time, capsys):
    health = LoaderHealth()
    _fit(SlowFirst(), health, SlowSteps(), epochs=2)
    summary = health.summary()
    assert summary.account.first_batch_s == pytest.approx(8.0, abs=0.1)
    assert summary.account.total_s == pytest.approx(8.4, abs=0.2)
    # If the model has to be built, it is built with the first batch.
    assert summary.verdict.kind in ("late_start", "stragglers")
    assert summary.is_worth_a_change
    text = " ".join(capsys.readouterr().out.split())
    assert "start and first batch 8.0 s" in text
    assert re.search(r"Training waited 8\.\d s of 8\.\d s for", text)


@on_each_backend
def test_each_second_of_a_fit_belongs_to_the_part_that_took_it(simulated_time):
    health = LoaderHealth(0)
    began_s = time.monotonic()
    with SlowData(0.1) as validation:
        _fit(
            SlowHooks(),
            health,
            SlowSteps(),
            SlowTests(),
            SlowCallback(),
            SavesSlowly(),
            epochs=2,
            validation_data=validation,
        )
    account = health.summary().account
    whole_s = time.monotonic() - began_s
    assert account.total_s == pytest.approx(whole_s, rel=0.02)
    waits_s = account.first_batch_s + account.waiting_s
    assert waits_s == pytest.approx(16 * _WAIT_S, abs=2.1 * _WAIT_S)
    assert account.first_batch_s > 0
    assert account.steps_s == pytest.approx(16 * _SLOW_S, abs=_ESTIMATED_S)
    assert account.hooks_s == pytest.approx(2.0, abs=1.1)
    assert account.callbacks_s == pytest.approx(6.0, abs=0.1)
    assert account.saving_s == pytest.approx(4.0, abs=0.1)
    assert account.validation_s + account.validation_wait_s == pytest.approx(
        16 * (0.1 + 2.5 * _SLOW_S), abs=0.3
    )


@on_each_backend
@pytest.mark.parametrize("first", [True, False])
def test_saving_within_an_epoch_is_no_step_and_no_wait(first, simulated_time):
    health, saves = LoaderHealth(0), SavesSlowly(save_freq=5)
    both = [health, saves] if first else [saves, health]
    began_s = time.monotonic()
    # On TensorFlow, two batches are built before the epoch: here its first two.
    logs = _fit(SlowData(), *both, SlowSteps(), epochs=2, shuffle=False)
    account = health.summary().account
    assert account.total_s == pytest.approx(
        time.monotonic() - began_s, rel=0.02
    )
    assert account.saving_s == pytest.approx(4.0, abs=0.1)
    assert account.steps_s == pytest.approx(16 * _SLOW_S, abs=_ESTIMATED_S)
    assert logs["data_wait"] == pytest.approx([2 / 3] * 2, abs=0.1)
    assert "on_train_batch_end" not in vars(saves)


def test_a_callback_that_saves_is_left_as_it_was_after_an_interruption(
    simulated_time,
):
    class Interrupts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    saves = SavesSlowly()
    for health in (LoaderHealth(0), LoaderHealth(0)):
        with pytest.raises(KeyboardInterrupt):
            _fit(FreeData(), health, saves, Interrupts())
        assert health.summary().account is not None
    _fit(FreeData(), health, saves)
    assert health.summary().account.saving_s == pytest.approx(2.0, abs=0.1)
    assert "on_epoch_end" not in vars(saves)


class Around(keras.callbacks.Callback):
    """Takes the time of the beginning and the end of a fit."""

    def on_train_begin(self, logs=None):
        self.began_s = time.monotonic()

    def on_train_end(self, logs=None):
        self.ended_s = time.monotonic()


@on_each_backend
def test_the_parts_of_a_real_fit_add_up_to_the_whole(tmp_path):
    health, around = LoaderHealth(0), Around()
    saves = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "model.weights.h5"), save_weights_only=True
    )
    began_s = time.monotonic()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with FreeData(workers=2) as data, FreeData() as validation:
        model.fit(
            data,
            validation_data=validation,
            epochs=2,
            callbacks=[around, health, saves],
            verbose=0,
        )
    whole_s = time.monotonic() - began_s
    account = health.summary().account
    assert around.ended_s - around.began_s <= account.total_s <= whole_s
    assert min(dataclasses.astuple(account)) >= -1e-6
    assert account.saving_s > 0
    assert sum(seconds for _, seconds in account.parts) == pytest.approx(
        account.total_s
    )
    epochs = health.summary().epochs
    epochs_s = [epoch.account.total_s for epoch in epochs]
    assert sum(epochs_s) <= account.total_s * (1 + 1e-9)
    for epoch in epochs:
        columns_s = epoch.wall_s + epoch.account.compiling_s
        assert columns_s <= epoch.account.total_s
        assert epoch.wall_s - epoch.waited_s <= epoch.account.steps_s + 1e-9


def test_compute_is_named_where_data_is_free(capsys, simulated_time):
    _fit(FreeData(), LoaderHealth(), SlowSteps(), epochs=3)
    found = _LINE.findall(capsys.readouterr().out)
    # The first epoch also starts the worker.
    assert {kind for *_, kind in found[1:]} == {"compute_bound"}


class LateOnce(FreeData):
    """Is late with each batch of its second epoch, by a sixth of a step."""

    def __getitem__(self, index):
        if self.epoch == 1:
            time.sleep(_SLOW_S / 6)
        return super().__getitem__(index)


def test_a_short_epoch_that_waits_a_little_has_the_verdict_of_the_others(
    capsys, simulated_time
):
    health = LoaderHealth()
    logs = _fit(LateOnce(), health, SlowSteps(), epochs=3)
    assert logs["data_wait"][1] > 0.1
    found = _LINE.findall(capsys.readouterr().out)
    kinds = {kind for *_, kind in found[1:]}
    summary = health.summary()
    rows = {epoch.verdict.kind for epoch in summary.epochs[1:]}
    assert kinds == rows == {summary.verdict.kind} == {"compute_bound"}


class Pauses(SlowSteps):
    """Once in an epoch does something that has nothing to do with data."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch == 5:
            time.sleep(6 * _SLOW_S)


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="What JAX tells of compiling"
)
def test_jax_tells_which_steps_compile(tmp_path):
    class Ragged(FreeData):
        """Its last batch is smaller."""

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            rows = 1 if index == 7 else len(x)
            return x[:rows], y[:rows]

    health = LoaderHealth(0, trace=tmp_path / "trace.json")  # looks at each
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Ragged() as dataset:
        model.fit(
            dataset, epochs=2, shuffle=False, callbacks=[health], verbose=0
        )
    compiled = [(s.epoch, s.number) for s in health._record.steps if s.compiled]
    assert (0, 7) in compiled
    assert all(epoch == 0 for epoch, _ in compiled)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="What PyTorch tells of compiling"
)
def test_slow_steps_of_pytorch_are_not_taken_for_compiling(tmp_path):
    """Such as steps that threads keep from Python's lock."""
    calls = itertools.count()

    class SlowAtTimes(keras.layers.Layer):
        def call(self, x):
            # Not at the beginning, where steps are sampled.
            time.sleep(0.1 if 20 <= next(calls) < 25 else 0.0)
            return x

    health = LoaderHealth(0, trace=tmp_path / "trace.json")  # looks at each
    model = keras.Sequential([SlowAtTimes(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with FreeData(30) as dataset:
        model.fit(dataset, callbacks=[health], verbose=0)
    # Before its first step, Keras builds the model.
    compiled = [s.number for s in health._record.steps if s.compiled]
    assert set(compiled) <= {-1}
    assert health.summary().epochs[0].wall_s > 0.2


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="What PyTorch tells of compiling"
)
def test_pytorch_tells_how_long_it_has_compiled():
    import torch

    read_compiling_s = device.compiling_clock()
    before_s = read_compiling_s()
    torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(3))
    assert read_compiling_s() > before_s


def test_time_that_neither_waits_nor_builds_took_is_not_lost_to_data(
    simulated_time,
):
    health = LoaderHealth(verbose=0)
    # Inline: in a thread, a build may last as long as a step, by this clock.
    _fit(FreeData(), health, Pauses(), epochs=3)
    for epoch in health.summary().epochs[1:]:
        assert epoch.verdict.kind == "compute_bound"
        assert epoch.free_s <= epoch.wall_s


@on_each_backend
def test_the_build_before_the_first_step_slows_no_step_down(simulated_time):
    health = LoaderHealth(verbose=0)
    model = keras.Sequential([keras.layers.Dense(1)])  # which fit builds
    model.compile("sgd", "mse")
    with SlowFirst() as data:
        model.fit(data, callbacks=[health, Pauses()], verbose=0)
    (epoch,) = health.summary().epochs
    assert epoch.start_s == pytest.approx(8.0, abs=0.1)
    assert epoch.waited_s < _SLOW_S
    assert epoch.worker_utilization < 0.5


@on_each_backend
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="of JAX's dispatch"
)
def test_what_jax_was_asked_for_has_been_computed_after_a_synchronization():
    class Looks(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_begin(self, batch, logs=None):
            state = getattr(self.model, "_jax_state", None)
            if batch and state:
                values = [value for part in state.values() for value in part]
                self.ready = [value.is_ready() for value in values]
                device.synchronize(self.model)
                assert all(value.is_ready() for value in values)
                self.seen += not all(self.ready)

    model = keras.Sequential(
        [keras.Input((1000,))]
        + [keras.layers.Dense(1000) for _ in range(6)]
        + [keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    looks = Looks()
    looks.seen = 0
    x, y = np.ones((256, 1000), "float32"), np.ones((256, 1), "float32")
    data = ArrayDataset(np.repeat(x, 6, 0), np.repeat(y, 6, 0), batch_size=256)
    with data:
        model.fit(data, verbose=0, callbacks=[looks])
    assert looks.seen  # or there was nothing to wait for


@on_each_backend
@pytest.mark.parametrize("verbose", [1, 2])
def test_a_line_comes_on_its_own_after_the_progress_bars(verbose, capsys):
    _fit(FreeData(), LoaderHealth(), epochs=3, verbose=verbose)
    lines = [line for line in capsys.readouterr().out.split("\n") if line]
    lines = [line for line in lines if not line.startswith("Besides: ")]
    places = [n for n, line in enumerate(lines) if "LoaderHealth" in line]
    for place in reversed(places):  # a long line goes on in the next one
        if not lines[place].endswith("."):
            lines[place] += f" {lines.pop(place + 1)}"
    places = [n for n, line in enumerate(lines) if "LoaderHealth" in line]
    assert len(places) == 3
    for number, place in enumerate(places, 1):
        assert _LINE.fullmatch(lines[place])[1] == f"epoch {number}"
        assert "data_wait" in lines[place - 1]
        assert "loss" in lines[place - 1]
    assert [lines[place + 1] for place in places[:-1]] == [
        "Epoch 2/3",
        "Epoch 3/3",
    ]
    assert lines[places[-1] + 1].split()[0] == "took"  # the table


def test_verbose_0_prints_nothing(capsys):
    logs = _fit(FreeData(), LoaderHealth(verbose=0), epochs=2)
    assert len(logs["data_wait"]) == 2
    assert capsys.readouterr().out == ""


def test_a_fit_that_was_broken_off_leaves_no_line_to_the_next(capsys):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("after the epoch")

    health = LoaderHealth()
    with pytest.raises(RuntimeError, match="after the epoch"):
        _fit(FreeData(), health, Fails())
    capsys.readouterr()
    x, y = _arrays()
    _model().fit(x, y, callbacks=[health], verbose=0)
    assert capsys.readouterr().out == ""


def test_another_verbose_is_a_value_error_that_says_so():
    for verbose in (2, -1, "auto", "1", None, 0.5):
        message = f"`verbose` must be 0 or 1. Received: {verbose!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            LoaderHealth(verbose)


# -- what is left behind -----------------------------------------------------


def test_a_page_is_written_at_the_end(tmp_path, simulated_time):
    pytest.importorskip("jinja2")
    page = tmp_path / "deep" / "health.html"
    _fit(SlowData(), LoaderHealth(0, report=page), epochs=2)
    text = page.read_text()
    assert "io_bound" in text
    assert "SlowData" in text


def test_a_report_that_cannot_be_written_does_not_end_a_fit(
    caplog, capsys, simulated_time
):
    pytest.importorskip("jinja2")
    logs = _fit(SlowData(), LoaderHealth(report="/proc/nowhere/health.html"))
    assert len(logs["loss"]) == 1
    assert "The report could not be written" in caplog.text
    assert "io_bound" in capsys.readouterr().out


def test_a_report_is_not_replaced_by_one_of_no_batch_at_all(tmp_path):
    pytest.importorskip("jinja2")
    path = tmp_path / "health.html"
    health = LoaderHealth(0, report=path)
    _fit(SlowData(), health)
    page = path.read_text()
    _model().fit(PlainData(), verbose=0, callbacks=[health])
    assert path.read_text() == page


def test_folders_are_made_for_a_trace(tmp_path):
    path = tmp_path / "a" / "b" / "trace.json"
    _fit(SlowData(), LoaderHealth(0, trace=path))
    assert path.exists()


def test_without_jinja2_a_report_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"keras-fastdata\[report\]"):
        LoaderHealth(report="health.html")
    LoaderHealth(trace="trace.json")


@on_each_backend
@pytest.mark.parametrize(
    "spe", [1, pytest.param(4, marks=with_steps_per_execution)]
)
def test_a_trace_has_every_batch_and_step(tmp_path, spe):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=spe)
    path = tmp_path / "trace.json"
    health = LoaderHealth(0, trace=path)
    with FreeData(length=12, workers=2) as data:
        model.fit(data, epochs=2, verbose=0, callbacks=[health])
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    names = collections.Counter(event["name"] for event in slices)
    assert names["build"] == names["deliver"] == 24
    assert names["step"] == 24 / spe
    builds = collections.Counter(
        (e["args"]["epoch"], e["args"]["batch"])
        for e in slices
        if e["name"] == "build"
    )
    assert set(builds.values()) == {1}
    assert len(builds) == 24
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == 24
    assert all(starts[number] <= ends[number] for number in starts)


def test_after_a_fit_that_was_broken_off_a_trace_has_every_batch(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("after the epoch")

    with pytest.raises(RuntimeError, match="after the epoch"):
        _fit(FreeData(), LoaderHealth(0), Fails())
    path = tmp_path / "trace.json"
    _fit(FreeData(workers=2), LoaderHealth(0, trace=path))
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "build" for event in events) == 8


def test_a_trace_of_a_fit_that_was_broken_off_is_finished(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("after the epoch")

    path = tmp_path / "trace.json"
    health = LoaderHealth(0, trace=path)
    with pytest.raises(RuntimeError, match="after the epoch"):
        _fit(FreeData(), health, Fails())
    health.set_params({})  # Keras does, when the next call begins
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "build" for event in events) == 8


def test_there_is_nothing_to_plot_before_a_fit():
    with pytest.raises(RuntimeError, match="nothing to plot yet"):
        LoaderHealth().plot()


def test_it_plots_and_a_notebook_shows_it(simulated_time):
    pytest.importorskip("matplotlib")
    health = LoaderHealth(0)
    _fit(SlowData(), health)
    assert len(health.plot().axes) >= 4
    assert "io_bound" in health._repr_html_()


class BreaksOff(keras.callbacks.Callback):
    """Interrupts an epoch as Ctrl-C does, or its validation."""

    def __init__(self, epoch, hook):
        super().__init__()
        self.epoch = epoch
        setattr(self, hook, self._interrupt)

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch

    def _interrupt(self, batch, logs=None):
        if (batch, self.current) == (4, self.epoch):
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "hook", ["on_train_batch_begin", "on_train_batch_end", "on_test_batch_end"]
)
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_was_interrupted_is_in_the_summary(epoch, hook):
    health = LoaderHealth(0)
    model, data = _model(), {"validation_data": SlowData()}
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            SlowData(),
            epochs=3,
            verbose=0,
            callbacks=[health, BreaksOff(epoch, hook)],
            **data,
        )
    summary = health.summary()
    assert len(summary.epochs) == epoch + 1
    assert summary.epochs[-1].batches >= 4
    assert summary.verdict is not None
    assert summary.account.waiting_s > 0
    assert str(health.summary()) == str(summary)
    model.fit(SlowData(), verbose=0, callbacks=[health])
    assert len(health.summary().epochs) == 1


def test_what_a_broken_fit_has_done_can_be_plotted():
    pytest.importorskip("matplotlib")

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    health = LoaderHealth(0)
    with pytest.raises(KeyboardInterrupt):
        _fit(SlowData(), health, Breaks())
    assert len(health.plot().axes) >= 4


# -- saving ------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [0, 1])
def test_it_is_saved_and_loaded_by_keras(verbose):
    config = keras.saving.serialize_keras_object(LoaderHealth(verbose))
    assert config["registered_name"] == "keras_fastdata>LoaderHealth"
    config = json.loads(json.dumps(config))
    loaded = keras.saving.deserialize_keras_object(config)
    assert type(loaded) is LoaderHealth
    assert loaded.verbose == verbose
    assert loaded.get_config() == LoaderHealth(verbose).get_config()


def test_its_config_makes_it_again():
    given = LoaderHealth(True, Path("a.html"), Path("b.json"))
    config = given.get_config()
    assert config == {
        "verbose": 1,
        "report": "a.html",
        "trace": "b.json",
        "stacks": None,
        "compare": None,
    }
    assert json.loads(json.dumps(config)) == config
    assert LoaderHealth.from_config(config).get_config() == config
    assert LoaderHealth().get_config() == {
        "verbose": 1,
        "report": None,
        "trace": None,
        "stacks": None,
        "compare": None,
    }


def test_it_is_a_keras_callback():
    assert issubclass(LoaderHealth, keras.callbacks.Callback)


# -- threads -----------------------------------------------------------------


def test_two_fits_in_two_threads_are_measured_apart():
    datasets = {"a": SlowData(length=8), "b": FreeData(length=12)}
    models = {name: _model(name) for name in datasets}
    healths = {name: LoaderHealth(0) for name in datasets}
    errors = []
    together = threading.Barrier(len(datasets))

    def fit(name):
        try:
            together.wait(120)
            with datasets[name] as dataset:
                models[name].fit(
                    dataset, epochs=2, callbacks=[healths[name]], verbose=0
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fit, args=(name,)) for name in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    slow, free = (healths[name].summary().epochs for name in datasets)
    assert [epoch.batches for epoch in slow] == [8, 8]
    assert [epoch.batches for epoch in free] == [12, 12]
    assert min(epoch.build_s_p50 for epoch in slow) >= _WAIT_S


def test_two_fits_in_turn_on_two_threads_do_not_mix():
    _fit(SlowData(length=8), LoaderHealth(0))
    health = LoaderHealth(0)
    thread = threading.Thread(
        target=_fit, args=(FreeData(length=5), health, SlowSteps())
    )
    thread.start()
    thread.join()
    assert [epoch.batches for epoch in health.summary().epochs] == [5]


@on_each_backend
def test_what_was_asked_of_the_device_is_awaited_before_validation(
    monkeypatch,
):
    events = []

    class Watched(Numbered):
        def __getitem__(self, index):
            events.append(self.name)
            return super().__getitem__(index)

    monkeypatch.setattr(device, "is_asynchronous", lambda: True)
    monkeypatch.setattr(
        device, "synchronize", lambda model: events.append("awaited")
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    # Built when they are wanted, and not by a thread.
    training = Watched(length=20, workers=0)
    validation = Watched(length=2, workers=0)
    training.name, validation.name = "training", "validation"
    model.fit(
        training,
        validation_data=validation,
        epochs=2,
        verbose=0,
        callbacks=[LoaderHealth(verbose=0)],
    )
    # Of the last epoch: in the first, TensorFlow wants to know the signature.
    kinds = [kind for kind, _ in itertools.groupby(events)]
    last = max(n for n, kind in enumerate(kinds) if kind == "training")
    # It may be awaited amid the validation as well.
    assert kinds[last : last + 3] == ["training", "awaited", "validation"]


@on_each_backend
def test_a_fit_that_was_broken_off_leaves_no_workers_at_rest(monkeypatch):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise ZeroDivisionError

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    health = LoaderHealth(verbose=0)
    with FreeData(workers=1, length=12) as dataset:
        with pytest.raises(ZeroDivisionError):
            model.fit(dataset, verbose=0, callbacks=[health, Stops()])
        quiet, deliver = [], Loader.deliver
        monkeypatch.setattr(
            Loader,
            "deliver",
            lambda self, walk, data, pause_after=False: (
                quiet.append(pause_after)
                or deliver(self, walk, data, pause_after)
            ),
        )
        model.fit(dataset, verbose=0)
    assert quiet
    assert not any(quiet)
    assert health is not None


@on_each_backend
def test_no_more_batches_lie_ready_in_the_report_than_may_wait(tmp_path):
    health = LoaderHealth(trace=tmp_path / "trace.json")  # looks at each
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with FreeData(length=30, max_queue_size=4) as dataset:
        model.fit(dataset, epochs=2, callbacks=[health], verbose=0)
    assert 1 <= health._record.column("depth").max() <= 4


def test_what_is_measured_follows_the_hooks(monkeypatch):
    within_fit = False
    monkeypatch.setattr(keras_bridge, "is_within_fit", lambda: within_fit)
    health = LoaderHealth(verbose=0)

    def measured(*hooks):
        for hook, *arguments in hooks:
            getattr(health, hook)(*arguments)
        return health._measured

    call, step = ("set_params", {}), ("on_train_batch_begin", 0)
    evaluation = ("on_test_begin",), ("on_test_end",)
    assert measured() is Measured.IDLE
    assert measured(call, ("on_train_begin",)) is Measured.FIT
    assert measured(("on_epoch_begin", 0), step) is Measured.FIT
    assert measured(*evaluation) is Measured.FIT  # a validation
    within_fit = True
    assert measured(call, ("on_test_begin",)) is Measured.FIT_NESTED
    assert measured(("on_test_end",)) is Measured.FIT
    assert measured(call, ("on_predict_begin",)) is Measured.FIT_NESTED
    assert measured(step) is Measured.FIT  # the prediction has raised
    within_fit = False
    assert measured(call) is Measured.IDLE  # the fit has raised
    assert measured(("on_test_begin",)) is Measured.EVALUATE
    assert measured(("on_test_end",)) is Measured.IDLE
    assert measured(call, ("on_predict_begin",)) is Measured.PREDICT
    assert measured(("on_predict_end",)) is Measured.IDLE
    measured(call, ("on_train_begin",))
    assert measured(("on_train_end",)) is Measured.IDLE
