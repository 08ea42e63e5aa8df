"""`on_error="skip"`: a batch that raises is left out, and nothing else is."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings

import keras
import numpy as np
import pytest
from keras_facts import with_steps_per_execution
from lateness import only_the_stuck_are_late, worker_of
from places import KINDS, quickly
from samples import Deadly, equal
from slow_samples import (
    EndlessFlaky,
    Flaky,
    Missing,
    Reversing,
    Stuck,
    is_stuck,
)

from keras_fastdata import (
    BatchTimeoutError,
    LoaderError,
    LoaderHealth,
    WorkerDiedError,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.batch_iterator import iterate

pytestmark = pytest.mark.usefixtures("kept_forkserver")

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SKIP = {"on_error": "skip"}
BACKEND = keras.backend.backend()
RAN_OUT = "Your input ran out of data"


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="keras_fastdata")


def _indices(batches):
    return [int(y.flat[0]) for _, y in batches]


def _but(length, *bad):
    return [index for index in range(length) if index not in bad]


def _skips(caplog):
    """The indices of the batches that the log says are skipped."""
    said = "Batch {0} of epoch {1} of {2} is skipped (`on_error='skip'`):"
    pattern = re.escape(said).replace(r"\{0\}", r"(\d+)")
    pattern = pattern.replace(r"\{1\}", r"\d+").replace(r"\{2\}", r"\w+")
    found = [re.match(pattern, m) for m in caplog.messages]
    return [int(match[1]) for match in found if match]


# -- which batches come ------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize(
    ("length", "bad"),
    [(10, [0]), (10, [9]), (10, [4]), (20, [0, 1]), (20, [0, 19]), (1, [0])],
)
def test_the_other_batches_come_in_order_with_the_same_bytes(kind, length, bad):
    good = list(Flaky(length=length, workers=0))
    with Flaky(bad, length, **SKIP, **KINDS[kind]) as dataset:
        assert equal(list(dataset), [good[i] for i in _but(length, *bad)])


@EVERY_KIND
def test_every_epoch_skips_anew(kind):
    with Flaky([3], **SKIP, **KINDS[kind]) as dataset:
        for _ in range(3):
            assert _indices(dataset) == _but(10, 3)


@EVERY_KIND
def test_a_skipped_batch_is_logged_once_with_the_users_line(kind, caplog):
    with Flaky([3, 8], length=20, **SKIP, **KINDS[kind]) as dataset:
        list(dataset)
    assert len(caplog.messages) == 2
    for message, index in zip(caplog.messages, (3, 8), strict=True):
        first, text = message.split("\n", 1)
        assert first == (
            f"Batch {index} of epoch 0 of Flaky is skipped (`on_error='skip'`):"
        )
        assert re.search(r'slow_samples\.py", line \d+, in __getitem__', text)
        assert 'raise self.ERRORS[self.error](f"sample {index}")' in text
        assert f"Missing: sample {index}\n" in text
        assert f"While building batch {index} of epoch 0 of Flaky" in text
    assert all(r.levelno == logging.WARNING for r in caplog.records)


def test_without_skip_the_first_error_is_raised(caplog):
    with Flaky([3], workers=0) as dataset, pytest.raises(Missing):
        list(dataset)
    assert not caplog.messages


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_shuffled_epoch_skips_the_same_batches(shuffle):
    with Flaky([3], shuffle=shuffle, workers=2, **SKIP) as dataset:
        seen = [_indices(dataset) for _ in range(2)]
    assert [sorted(s) for s in seen] == [_but(10, 3)] * 2
    assert (seen[0] == seen[1]) is not shuffle


# -- how many ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "allowed"),
    [(2, 1), (9, 1), (10, 1), (19, 1), (20, 2), (29, 2), (30, 3), (100, 10)],
)
def test_more_than_a_tenth_is_an_error(length, allowed):
    bad = range(allowed)
    with Flaky(bad, length, workers=0, **SKIP) as dataset:
        assert _indices(dataset) == _but(length, *bad)
    bad = range(1, allowed + 2)
    with Flaky(bad, length + (length == 2), workers=0, **SKIP) as dataset:
        batches = iter(dataset)
        assert _indices([next(batches)]) == [0]
        with pytest.raises(LoaderError, match="more than the tenth"):
            next(batches)


@EVERY_KIND
def test_the_error_names_the_batches_and_comes_from_the_last(kind):
    with Flaky([2, 7], **SKIP, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        assert _indices(next(batches) for _ in range(6)) == [0, 1, 3, 4, 5, 6]
        with pytest.raises(LoaderError) as caught:
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        error = caught.value
        assert type(error) is LoaderError
        assert str(error) == (
            "2 of 10 batches of Flaky have raised (2, 7), more than the tenth "
            "that `on_error='skip'` leaves out. The error of batch 7 is the "
            "cause of this one."
        )
        assert isinstance(error.__cause__, Missing)
        assert error.__cause__.args == ("sample 7",)
        # The workers are as they were.
        dataset.bad = frozenset([5])
        assert _indices(dataset) == _but(10, 5)


@EVERY_KIND
def test_all_batches_bad_is_an_error(kind):
    with Flaky(range(10), **SKIP, **KINDS[kind]) as dataset:
        for _ in range(2):
            with pytest.raises(LoaderError, match="2 of 10"):
                list(dataset)


def test_a_long_list_of_batches_is_cut_short():
    with (
        Flaky(range(12), length=110, workers=0, **SKIP) as dataset,
        pytest.raises(LoaderError, match=r"8, 9, \.\.\.\)"),
    ):
        list(dataset)


@EVERY_KIND
@pytest.mark.parametrize("second", [18, 19])
def test_without_an_end_a_tenth_of_the_batches_so_far_may_raise(kind, second):
    with EndlessFlaky([0, second], **SKIP, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        before = _indices(next(batches) for _ in range(second - 1))
        assert before == list(range(1, second))
        if second == 19:
            assert _indices([next(batches)]) == [20]
        else:
            with pytest.raises(LoaderError, match="2 of the first 19 batches"):
                next(batches)


# -- what is never skipped ---------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit"])
def test_what_is_no_exception_is_raised(kind, error, caplog):
    expected = Flaky.ERRORS[error]
    with Flaky([3], error=error, **SKIP, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        assert _indices(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(expected):
            next(batches)
    assert not _skips(caplog)


@pytest.mark.parametrize("kind", ["thread", "inline"])
def test_an_exit_is_raised(kind, caplog):
    dataset = Flaky([3], error="SystemExit", **SKIP, **KINDS[kind])
    with dataset, pytest.raises(SystemExit):
        list(dataset)
    assert not _skips(caplog)


def test_an_exit_ends_a_worker_process_as_ever(caplog):
    dataset = Flaky([3], error="SystemExit", **SKIP, **KINDS["process"])
    with dataset, pytest.raises(WorkerDiedError, match="second time"):
        list(dataset)
    assert not _skips(caplog)


def test_a_death_is_raised(tmp_path, caplog):
    dataset = Deadly(tmp_path / "deaths", times=99, **SKIP, **KINDS["process"])
    with dataset, pytest.raises(WorkerDiedError):
        list(dataset)
    assert not _skips(caplog)


def test_a_timeout_is_raised(tmp_path, caplog, monkeypatch):
    only_the_stuck_are_late(
        monkeypatch,
        lambda activity: is_stuck(tmp_path, worker_of(activity)),
    )
    dataset = Stuck(
        tmp_path,
        {3: "sleeps"},
        batch_timeout=0.75,
        max_worker_restarts=0,
        **SKIP,
        **KINDS["process"],
    )
    with dataset, pytest.raises(BatchTimeoutError):
        list(dataset)
    assert not _skips(caplog)


def test_a_start_that_fails_is_raised(caplog):
    class FailsToStart(Flaky):
        def on_worker_start(self):
            raise Missing("no file")

    for where in KINDS.values():
        dataset = FailsToStart(**SKIP, **where)
        with dataset, pytest.raises(Missing, match="no file"):
            list(dataset)
    assert not _skips(caplog)


@EVERY_KIND
@pytest.mark.parametrize("error", ["StopIteration", "MemoryError"])
def test_any_exception_is_skipped(kind, error, caplog):
    with Flaky([3], error=error, **SKIP, **KINDS[kind]) as dataset:
        assert _indices(dataset) == _but(10, 3)
    assert _skips(caplog) == [3]


# -- through Keras -----------------------------------------------------------


def _model(**kwargs):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse", **kwargs)
    return model


class _Steps(keras.callbacks.Callback):
    """Counts the steps of each epoch."""

    def __init__(self):
        super().__init__()
        self.train, self.test = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.train.append(0)
        self.test.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.train[-1] += 1

    def on_test_batch_end(self, batch, logs=None):
        if self.test:
            self.test[-1] += 1


@contextlib.contextmanager
def _never_out_of_data():
    """Has Keras's warning raise, and looks after the warning filters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=RAN_OUT)
        before = list(warnings.filters)
        show = warnings.showwarning
        yield
        assert list(warnings.filters) == before
        assert warnings.showwarning is show
        with pytest.raises(UserWarning, match=RAN_OUT):
            warnings.warn(RAN_OUT, stacklevel=1)


def _fit(dataset, model=None, **kwargs):
    """Fits a model; returns the steps of each epoch, and the logs."""
    steps = _Steps()
    callbacks = [*kwargs.pop("callbacks", ()), steps]
    with dataset, _never_out_of_data():
        history = (model or _model()).fit(
            dataset,
            **{"verbose": 0, "epochs": 2, "callbacks": callbacks, **kwargs},
        )
    return steps, history.history


@pytest.mark.backend
@pytest.mark.parametrize("kind", quickly(KINDS, "process"))
@pytest.mark.parametrize("bad", [[0, 1], [18, 19]], ids=["first", "last"])
def test_fit_trains_on_without_the_bad_batches(kind, bad, caplog):
    steps, logs = _fit(
        Flaky(bad, length=20, **SKIP, **KINDS[kind]), shuffle=False
    )
    assert steps.train == [18, 18]
    assert len(logs["loss"]) == 2
    assert _skips(caplog) == bad * 2


@pytest.mark.backend
def test_fit_skips_in_a_shuffled_epoch(caplog):
    steps, _ = _fit(Flaky([0, 1], length=20, workers=2, **SKIP), shuffle=True)
    assert steps.train == [18, 18]
    assert sorted(_skips(caplog)) == [0, 0, 1, 1]


class Recorded(Flaky):
    """Notes which batches were asked for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.mark.backend
def test_every_batch_is_asked_for_once_an_epoch_good_or_bad():
    dataset = Recorded([0, 4], length=20, workers=0, **SKIP)
    _fit(dataset, shuffle=False)
    assert dataset.asked == [*range(20)] * 2


@pytest.mark.backend
def test_evaluate_and_predict_leave_the_bad_batches_out(caplog):
    model = _model()
    dataset = Flaky([0, 9], length=20, workers=2, **SKIP)
    with dataset, _never_out_of_data():
        rows = [len(model.predict(dataset, verbose=0)) for _ in range(2)]
        losses = [model.evaluate(dataset, verbose=0) for _ in range(2)]
    assert rows == [4 * 18] * 2
    assert all(np.isfinite(losses))
    assert _skips(caplog) == [0, 9] * 4


@pytest.mark.backend
def test_a_validation_that_skips_is_whole_but_for_that(caplog):
    validation = Flaky([2], workers=0, **SKIP)
    steps, logs = _fit(Flaky(workers=0), validation_data=validation)
    assert steps.train == [10, 10]
    assert steps.test == [9, 9]
    assert len(logs["val_loss"]) == 2
    assert _skips(caplog) == [2, 2]


@pytest.mark.backend
def test_training_and_validation_may_both_skip():
    validation = Flaky([0], workers=2, **SKIP)
    health = LoaderHealth(0)
    steps, logs = _fit(
        Flaky([9], workers=2, **SKIP),
        validation_data=validation,
        shuffle=False,
        callbacks=[health],
    )
    assert steps.train == [9, 9]
    assert steps.test == [9, 9]
    assert logs["skipped"] == [2, 2]
    assert [s.index for s in health.skipped] == [9, 0, 9, 0]


@pytest.mark.backend
def test_steps_per_epoch_walk_through_the_dataset_in_pieces():
    dataset = Recorded([7], workers=0, **SKIP)
    steps, _ = _fit(dataset, steps_per_epoch=5, epochs=4, shuffle=False)
    assert steps.train == [5, 4, 5, 4]
    assert dataset.asked == [*range(10)] * 2


@pytest.mark.backend
@with_steps_per_execution
@pytest.mark.parametrize("bad", quickly([[7], [19], [7, 8]], [7, 8]))
def test_several_steps_per_execution_count_the_batches_there_are(bad):
    model = _model(steps_per_execution=2)
    _fit(Flaky(bad, length=20, workers=0, **SKIP), model)
    assert int(model.optimizer.iterations.numpy()) == 2 * (20 - len(bad))


@pytest.mark.backend
def test_class_weights_apply_to_the_batches_there_are():
    weights = dict.fromkeys(range(10), 0.0)
    steps, logs = _fit(
        Flaky([3], workers=0, **SKIP), class_weight=weights, shuffle=False
    )
    assert steps.train == [9, 9]
    assert logs["loss"] == [0.0, 0.0]


@pytest.mark.backend
def test_too_many_bad_batches_end_fit_with_their_error():
    model = _model()
    with (
        Flaky([4, 8], workers=0, **SKIP) as dataset,
        _never_out_of_data(),
        pytest.raises(LoaderError, match=r"raised \(4, 8\)") as caught,
    ):
        model.fit(dataset, verbose=0, shuffle=False)
    assert type(caught.value) is LoaderError
    assert "Missing: sample 8" in "".join(caught.value.__notes__)


@pytest.mark.backend
def test_a_dataset_of_which_nothing_is_good_is_a_loader_error():
    with (
        Flaky([0], length=1, workers=0, **SKIP) as dataset,
        pytest.raises(LoaderError, match="has no batch that does not raise"),
    ):
        _model().fit(dataset, verbose=0)


@pytest.mark.backend
def test_what_was_left_out_before_the_data_changed_is_tried_again(caplog):
    # Keras calls `on_epoch_end` once before the first epoch: what raised in
    # batch 0 when the model was built, now is in the last batch.
    dataset = Reversing(bad=[0], workers=0, **SKIP)
    steps, _ = _fit(dataset, epochs=1, shuffle=False)
    assert steps.train == [9]
    assert set(_skips(caplog)) <= {0, 9}


@pytest.mark.backend
def test_a_fit_that_skips_nothing_still_warns_of_too_few_batches():
    with Flaky([2], workers=0, **SKIP) as dataset:
        model = _model()
        model.fit(dataset, verbose=0)
        dataset.bad = frozenset()
        with pytest.warns(UserWarning, match=RAN_OUT):
            model.fit(dataset, verbose=0, steps_per_epoch=15)


# -- LoaderHealth ------------------------------------------------------------


@pytest.mark.backend
@pytest.mark.parametrize("bad", [[0, 1], [5, 19]], ids=["first", "later"])
def test_loader_health_counts_and_lists_what_was_skipped(bad, capsys):
    health = LoaderHealth()
    dataset = Flaky(bad, length=20, workers=2, **SKIP)
    _, logs = _fit(dataset, callbacks=[health], shuffle=False)
    assert logs["skipped"] == [2, 2]
    assert [s.index for s in health.skipped] == bad * 2
    for skipped in health.skipped:
        assert skipped.dataset == "Flaky"
        assert skipped.traceback.startswith("Traceback (most recent call last)")
        assert f"Missing: sample {skipped.index}" in skipped.traceback
        assert "in __getitem__" in skipped.traceback
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("LoaderHealth: epoch") == 2
    assert text.count(". 2 batches were skipped.") == 2


@pytest.mark.backend
def test_a_later_fit_lists_what_itself_has_skipped(capsys):
    health = LoaderHealth()
    _fit(Flaky([5], workers=0, **SKIP), callbacks=[health], shuffle=False)
    _, logs = _fit(
        Flaky([7], workers=0, **SKIP), callbacks=[health], shuffle=False
    )
    assert [s.index for s in health.skipped] == [7, 7]
    assert logs["skipped"] == [1, 1]
    capsys.readouterr()
    _, logs = _fit(Flaky(workers=0, **SKIP), callbacks=[health])
    assert health.skipped == []
    assert "skipped" not in logs
    assert "skipped" not in capsys.readouterr().out


# -- while workers rest for a measurement --------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("bad", [(0,), (2,), (2, 3), (7,), (6, 7)])
@pytest.mark.parametrize("queue", [1, 3])
def test_batches_that_raise_are_passed_over_although_workers_rest(
    kind, bad, queue
):
    with Flaky(
        length=20, bad=bad, max_queue_size=queue, **SKIP, **KINDS[kind]
    ) as dataset:
        walk = iterate(loader_of(dataset), dataset, shuffle=False)
        found = []
        with contextlib.suppress(StopIteration):
            while True:
                found.append(walk.fetch(pause_after=len(found) % 5 != 4))
    assert _indices(found) == _but(20, *bad)
