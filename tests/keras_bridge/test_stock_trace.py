"""The batches that reach a step are those of a stock, inline PyDataset.

The rule is what stock Keras does with `workers=1`, where nothing is built
ahead. Each case states the batches it expects; on JAX the stock dataset is
played too, and must give the very same.

Keras itself fetches a batch ahead on JAX, up to 3.14 and on accelerators. What
changes amid an epoch is then seen a batch later, and the stock dataset alone
says what is expected.

A played case reads "train 0 1 2 | test 0 1 | train 3 4 5": a part for each
epoch, evaluation and prediction, with the numbers of the batches that its step
was given. "4@7" is batch 4 of a dataset whose level was 7.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from itertools import chain
from unittest import mock

import keras
import numpy as np
import pytest
import stock_trace_samples as samples
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)
from keras_facts import IS_316, fetches_ahead, with_steps_per_execution
from places import KINDS
from stock_trace_samples import EVENTS

from keras_fastdata import keras_bridge

pytestmark = [pytest.mark.backend, pytest.mark.usefixtures("kept_forkserver")]

BACKEND = keras.backend.backend()
# Whether a model is built beforehand. On TensorFlow nothing depends on it.
BUILT = (False,) if BACKEND == "tensorflow" else (False, True)
TEN = "0 1 2 3 4 5 6 7 8 9"


# -- playing a case ----------------------------------------------------------


class Recorder(keras.Model):
    """Notes what its steps are given, and learns nothing.

    Args:
        built: Whether Keras need not build it, from a batch it probes for.
    """

    def __init__(self, built=False):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.batches = []
        if built:
            self(np.zeros((samples.ROWS, 2), "float32"))
        set_up(self)

    def call(self, x):
        return self.dense(keras.tree.flatten(x)[0])

    # JAX passes (state, data), and wants the state back; the others, (data,).

    def train_step(self, *arguments):
        *state, data = arguments
        self._note(data)
        return ({"loss": 0.0}, *state) if state else {"loss": 0.0}

    test_step = train_step

    def predict_step(self, *arguments):
        *state, data = arguments
        self._note(data)
        x = keras.ops.convert_to_tensor(keras.tree.flatten(data)[0])
        return (x, state[0][1]) if state else x

    def _note(self, data):
        number, level = to_numpy(keras.tree.flatten(data)[0])[0]
        EVENTS.append(f"{number:g}@{level:g}" if level else f"{number:g}")
        self.batches.append(keras.tree.map_structure(describe, data))


def set_up(model, **arguments):
    model.compile("sgd", run_eagerly=True, **arguments)


def to_numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


def describe(leaf):
    """A leaf of a batch as something that can be compared and printed."""
    if leaf is None:
        return None
    return f"{keras.backend.standardize_dtype(leaf.dtype)} " + str(
        to_numpy(leaf).tolist()
    )


class _Marks(keras.callbacks.Callback):
    """Notes where a part begins."""

    def on_epoch_begin(self, epoch, logs=None):
        EVENTS.append("| train")

    def on_test_begin(self, logs=None):
        EVENTS.append("| test")

    def on_predict_begin(self, logs=None):
        EVENTS.append("| predict")


class On(keras.callbacks.Callback):
    """A callback of the functions it is given."""

    def __init__(self, **functions):
        super().__init__()
        for name, function in functions.items():
            setattr(self, name, function)


def fit(model, dataset, callbacks=(), shuffle=False, **arguments):
    return model.fit(
        dataset,
        callbacks=[_Marks(), *callbacks],
        shuffle=shuffle,
        verbose=0,
        **arguments,
    )


def evaluate(model, dataset, callbacks=(), **arguments):
    marks = [_Marks(), *callbacks]
    return model.evaluate(dataset, callbacks=marks, verbose=0, **arguments)


def predict(model, dataset, callbacks=(), **arguments):
    """Predicts, and checks that the outputs are the batches, in order."""
    before = len(EVENTS)
    marks = [_Marks(), *callbacks]
    out = model.predict(dataset, callbacks=marks, verbose=0, **arguments)
    numbers = [event.split("@")[0] for event in EVENTS[before:]]
    assert [f"{row[0]:g}" for row in out[:: samples.ROWS]] == [
        number for number in numbers if number.isdigit()
    ]


def play(case, make, built):
    """Runs a case; returns what happened, and how often data ran out.

    Args:
        case: A function of a model and of `make`.
        make: Makes a dataset, from the name of its class and its arguments.
        built: Whether the model is built beforehand.
    """
    EVENTS.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case(Recorder(built), make)
    ran_out = ["ran out of data" in str(w.message) for w in caught]
    return " ".join(EVENTS).removeprefix("| "), sum(ran_out)


def make_stock(name, **arguments):
    mixin = getattr(samples, name)
    stock = type(f"Stock{name}", (mixin, keras.utils.PyDataset), {})
    return stock(**arguments)


# Each backend's trainer has its batches from processes. Inline and threads, of
# which a trainer sees no difference, are played on one backend.
_QUICK = {
    "tensorflow": ("process",),
    "jax": ("process",),
    "torch": ("process", "thread", "inline"),  # its steps are the quickest
}[BACKEND]


@pytest.fixture(
    params=[
        kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.long)
        for kind in KINDS
    ]
)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def make(kind):
    """Makes FastPyDatasets, and closes them after the test."""
    made = []

    def make_fast(name, **arguments):
        dataset = getattr(samples, f"Fast{name}")(**arguments, **kind)
        made.append(dataset)
        return dataset

    yield make_fast
    for dataset in made:
        dataset.close()


@pytest.fixture
def agree(make):
    """Checks that a case gives what is expected, and what stock gives.

    `amid_epoch` says that a case changes its dataset within an epoch, so that
    a Keras which fetches ahead gives other batches than those stated.
    """

    def check(case, expected, *, ran_out=0, built=BUILT, amid_epoch=False):
        for is_built in built:
            right = expected, ran_out
            if BACKEND == "jax":
                stock = play(case, make_stock, is_built)
                if amid_epoch and fetches_ahead():
                    right = stock
                assert stock == right, "stock Keras differs"
            assert play(case, make, is_built) == right

    return check


# -- order -------------------------------------------------------------------


def test_without_shuffle_every_epoch_is_in_order(agree):
    def case(model, make):
        fit(model, make("Sized"), epochs=3)

    agree(case, f"train {TEN} | train {TEN} | train {TEN}")


def test_shuffle_gives_each_batch_once_an_epoch_in_ever_new_orders(make):
    def case(model, make):
        fit(model, make("Sized", seed=3), epochs=4, shuffle=True)

    for built in BUILT:
        found, _ = play(case, make, built)
        orders = [part.split()[1:] for part in found.split(" | ")]
        assert len(orders) == 4
        assert all(sorted(order) == TEN.split() for order in orders)
        assert len({*map(tuple, orders), tuple(TEN.split())}) == 5


def test_fit_shuffles_when_it_is_not_told_not_to(make):
    dataset = make("Sized", seed=3)
    EVENTS.clear()
    Recorder().fit(dataset, verbose=0)
    assert sorted(EVENTS) == TEN.split()
    assert " ".join(EVENTS) != TEN


def test_a_shuffled_epoch_goes_on_where_steps_per_epoch_cut_it(make):
    def case(model, make):
        dataset = make("Sized", seed=3)
        fit(model, dataset, epochs=8, steps_per_epoch=3, shuffle=True)

    for built in BUILT:
        found, ran_out = play(case, make, built)
        parts = [part.split()[1:] for part in found.split(" | ")]
        assert [len(part) for part in parts] == [3, 3, 3, 1] * 2
        first, second = [*chain(*parts[:4])], [*chain(*parts[4:])]
        assert sorted(first) == sorted(second) == TEN.split()
        assert first != second
        assert ran_out == 2


def test_evaluate_and_predict_are_in_order_within_a_shuffled_fit(make):
    def case(model, make):
        dataset, validation = make("Sized"), make("Sized", size=4)
        fit(model, dataset, shuffle=True, validation_data=validation)
        predict(model, dataset)

    found, _ = play(case, make, False)
    assert found.split(" | ")[1:] == ["test 0 1 2 3", f"predict {TEN}"]


# -- steps and epochs --------------------------------------------------------


def test_steps_per_epoch_below_length_continues_in_the_next_epoch(agree):
    def case(model, make):
        fit(model, make("Sized"), epochs=5, steps_per_epoch=3)

    agree(
        case,
        "train 0 1 2 | train 3 4 5 | train 6 7 8 | train 9 | train 0 1 2",
        ran_out=1,
    )


def test_steps_per_epoch_that_divides_the_length_starts_over_quietly(agree):
    def case(model, make):
        fit(model, make("Sized"), epochs=3, steps_per_epoch=5)

    agree(case, "train 0 1 2 3 4 | train 5 6 7 8 9 | train 0 1 2 3 4")


def test_steps_per_epoch_above_length_warns_and_ends_with_the_data(agree):
    def case(model, make):
        fit(model, make("Sized", size=4), epochs=2, steps_per_epoch=6)

    agree(case, "train 0 1 2 3 | train 0 1 2 3", ran_out=2)


def test_steps_per_epoch_of_the_length_is_the_dataset(agree):
    def case(model, make):
        fit(model, make("Sized", size=3), epochs=3, steps_per_epoch=3)

    agree(case, "train 0 1 2 | train 0 1 2 | train 0 1 2")


def test_a_dataset_of_one_batch_gives_it_in_every_epoch(agree):
    def case(model, make):
        dataset = make("Sized", size=1)
        fit(model, dataset, epochs=3, validation_data=dataset)
        predict(model, dataset)

    agree(case, f"{'train 0 | test 0 | ' * 3}predict 0")


def test_initial_epoch_leaves_out_epochs_and_no_batches(agree):
    def case(model, make):
        fit(model, make("Sized", size=4), epochs=5, initial_epoch=3)

    agree(case, "train 0 1 2 3 | train 0 1 2 3")


def test_no_epochs_means_no_batches(agree):
    def case(model, make):
        dataset = make("Sized", size=4)
        fit(model, dataset, epochs=2, initial_epoch=2)
        fit(model, dataset, epochs=1)

    agree(case, "train 0 1 2 3")


@with_steps_per_execution
@pytest.mark.parametrize("steps", [3, 16])
def test_steps_per_execution_leaves_the_batches_as_they_are(agree, steps):
    def case(model, make):
        set_up(model, steps_per_execution=steps)
        dataset = make("Sized")
        fit(model, dataset, epochs=2, validation_data=make("Sized", size=5))
        evaluate(model, dataset)
        predict(model, dataset)

    agree(
        case,
        f"{f'train {TEN} | test 0 1 2 3 4 | ' * 2}test {TEN} | predict {TEN}",
    )


@with_steps_per_execution
def test_steps_per_execution_within_steps_per_epoch(agree):
    def case(model, make):
        set_up(model, steps_per_execution=2)
        fit(model, make("Sized"), epochs=4, steps_per_epoch=4)

    agree(
        case,
        "train 0 1 2 3 | train 4 5 6 7 | train 8 9 | train 0 1 2 3",
        ran_out=1,
    )


@with_steps_per_execution
def test_steps_per_execution_that_do_not_divide_steps_per_epoch(agree):
    def case(model, make):
        set_up(model, steps_per_execution=3)
        fit(model, make("Sized"), epochs=3, steps_per_epoch=4)

    agree(
        case,
        "train 0 1 2 3 4 5 | train 6 7 8 9 | train 0 1 2 3 4 5",
        # PyTorch asks for the batches of an execution one by one.
        ran_out=1 if BACKEND == "torch" else 0,
    )


# -- datasets without an end, and other lengths ------------------------------


def test_an_endless_dataset_goes_on_from_epoch_to_epoch(agree):
    def case(model, make):
        fit(model, make("Endless"), epochs=3, steps_per_epoch=4)

    agree(case, "train 0 1 2 3 | train 4 5 6 7 | train 8 9 10 11")


def test_an_endless_dataset_starts_over_with_every_fit(agree):
    def case(model, make):
        dataset = make("Endless")
        fit(model, dataset, epochs=2, steps_per_epoch=2)
        fit(model, dataset, epochs=2, steps_per_epoch=3)

    agree(case, "train 0 1 | train 2 3 | train 0 1 2 | train 3 4 5")


def test_an_endless_dataset_starts_over_with_every_validation(agree):
    def case(model, make):
        fit(
            model,
            make("Endless"),
            epochs=2,
            steps_per_epoch=2,
            validation_data=make("Endless"),
            validation_steps=3,
        )

    agree(case, "train 0 1 | test 0 1 2 | train 2 3 | test 0 1 2")


def test_an_endless_dataset_is_evaluated_and_predicted_for_some_steps(agree):
    def case(model, make):
        dataset = make("Endless")
        evaluate(model, dataset, steps=3)
        predict(model, dataset, steps=4)
        evaluate(model, dataset, steps=2)

    agree(case, "test 0 1 2 | predict 0 1 2 3 | test 0 1")


class _StockEndless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.zeros((2, 1))


def _told_about_shuffle(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    texts = [str(warning.message) for warning in caught]
    return any("`shuffle=True` was passed" in text for text in texts)


def test_an_endless_dataset_is_not_shuffled_and_keras_says_so(make):
    dataset = make("Endless")
    EVENTS.clear()
    told = _told_about_shuffle(
        lambda: fit(
            Recorder(), dataset, epochs=2, steps_per_epoch=3, shuffle=True
        )
    )
    # Older versions of Keras do not say so of any dataset.
    stock = _StockEndless()
    assert told == _told_about_shuffle(
        lambda: data_adapters.get_data_adapter(stock, shuffle=True)
    )
    assert " ".join(EVENTS) == "| train 0 1 2 | train 3 4 5"


def test_num_batches_may_take_the_place_of_len(agree):
    def case(model, make):
        dataset = make("ByProperty", size=4)
        fit(model, dataset, epochs=2, validation_data=dataset)
        predict(model, dataset)

    agree(
        case,
        f"{'train 0 1 2 3 | test 0 1 2 3 | ' * 2}predict 0 1 2 3",
    )


# -- validation, evaluate, predict -------------------------------------------


def test_validation_data_is_walked_through_after_every_epoch(agree):
    def case(model, make):
        validation = make("Sized", size=3)
        fit(model, make("Sized", size=4), epochs=3, validation_data=validation)

    agree(
        case,
        "train 0 1 2 3 | test 0 1 2 | train 0 1 2 3 | test 0 1 2 | "
        "train 0 1 2 3 | test 0 1 2",
    )


def test_validation_freq_may_be_a_number(agree):
    def case(model, make):
        fit(
            model,
            make("Sized", size=2),
            epochs=5,
            validation_data=make("Sized", size=3),
            validation_freq=2,
        )

    agree(
        case,
        "train 0 1 | train 0 1 | test 0 1 2 | train 0 1 | train 0 1 | "
        "test 0 1 2 | train 0 1",
    )


def test_validation_freq_may_be_a_list(agree):
    def case(model, make):
        fit(
            model,
            make("Sized", size=2),
            epochs=3,
            validation_data=make("Sized", size=3),
            validation_freq=[1, 3],
        )

    agree(
        case,
        "train 0 1 | test 0 1 2 | train 0 1 | train 0 1 | test 0 1 2",
    )


def test_validation_steps_start_over_with_every_validation(agree):
    def case(model, make):
        fit(
            model,
            make("Sized", size=2),
            epochs=3,
            validation_data=make("Sized"),
            validation_steps=4,
        )

    agree(case, " | ".join(["train 0 1 | test 0 1 2 3"] * 3))


def test_more_validation_steps_than_batches_warn_and_end(agree):
    def case(model, make):
        fit(
            model,
            make("Sized", size=2),
            epochs=2,
            validation_data=make("Sized", size=3),
            validation_steps=5,
        )

    agree(case, " | ".join(["train 0 1 | test 0 1 2"] * 2), ran_out=2)


def test_the_training_dataset_may_be_the_validation_dataset(agree):
    def case(model, make):
        dataset = make("Sized", size=4)
        fit(model, dataset, epochs=2, validation_data=dataset)

    agree(case, " | ".join(["train 0 1 2 3 | test 0 1 2 3"] * 2))


def test_validation_on_the_training_dataset_leaves_a_cut_epoch_alone(agree):
    def case(model, make):
        dataset = make("Sized", size=8)
        fit(
            model,
            dataset,
            epochs=3,
            steps_per_epoch=3,
            validation_data=dataset,
            validation_steps=5,
        )

    agree(
        case,
        "train 0 1 2 | test 0 1 2 3 4 | train 3 4 5 | test 0 1 2 3 4 | "
        "train 6 7 | test 0 1 2 3 4",
        ran_out=1,
    )


def test_arrays_may_validate_a_dataset_and_a_dataset_arrays(agree):
    x = np.zeros((2, 2), "float32")

    def case(model, make):
        dataset = make("Sized", size=3)
        fit(model, dataset, validation_data=(x, x), epochs=2)
        model.fit(x, x, validation_data=dataset, verbose=0)

    agree(
        case,
        "train 0 1 2 | test 0 | train 0 1 2 | test 0 0 0 1 2",
    )


def test_evaluate_and_predict_walk_through_the_dataset_every_time(agree):
    def case(model, make):
        dataset = make("Sized", size=4)
        predict(model, dataset)
        evaluate(model, dataset)
        evaluate(model, dataset)
        predict(model, dataset)

    agree(
        case,
        "predict 0 1 2 3 | test 0 1 2 3 | test 0 1 2 3 | predict 0 1 2 3",
    )


def test_evaluate_and_predict_take_steps(agree):
    def case(model, make):
        dataset = make("Sized")
        predict(model, dataset, steps=3)
        evaluate(model, dataset, steps=4)
        predict(model, dataset, steps=1)
        evaluate(model, dataset)

    agree(case, f"predict 0 1 2 | test 0 1 2 3 | predict 0 | test {TEN}")


def test_evaluate_and_predict_with_too_many_steps_warn_and_end(agree):
    def case(model, make):
        dataset = make("Sized", size=3)
        evaluate(model, dataset, steps=5)
        predict(model, dataset, steps=5)

    agree(case, "test 0 1 2 | predict 0 1 2", ran_out=2)


def test_callbacks_may_evaluate_and_walk_through_the_training_dataset(agree):
    def case(model, make):
        dataset = make("Sized", size=5)

        def look(batch, logs=None):
            if batch != 1:
                return
            other = Recorder(built=True)
            evaluate(other, dataset)
            predict(other, dataset, steps=2)
            walked = zip(dataset, range(3), strict=False)
            found = [f"{x[0, 0]:g}" for (x, _), _ in walked]
            EVENTS.append(f"| walk {' '.join(found)} |")

        fit(model, dataset, epochs=2, callbacks=[On(on_train_batch_end=look)])

    aside = "| test 0 1 2 3 4 | predict 0 1 | walk 0 1 2 |"
    agree(case, f"train 0 1 {aside} 2 3 4 | train 0 1 {aside} 2 3 4")


# -- fit more than once, and stopping ----------------------------------------


def test_every_fit_starts_at_the_first_batch(agree):
    def case(model, make):
        dataset = make("Sized", size=4)
        fit(model, dataset, epochs=2)
        fit(model, dataset)
        fit(model, dataset, epochs=2, steps_per_epoch=3)
        fit(model, dataset, steps_per_epoch=2)

    agree(
        case,
        "train 0 1 2 3 | train 0 1 2 3 | train 0 1 2 3 | "
        "train 0 1 2 | train 3 | train 0 1",
        ran_out=1,
    )


def test_two_models_may_be_fitted_to_one_dataset(agree):
    def case(model, make):
        dataset = make("Sized", size=4)
        fit(model, dataset)
        fit(Recorder(), dataset)

    agree(case, "train 0 1 2 3 | train 0 1 2 3")


def test_a_fit_after_one_that_was_stopped_in_mid_epoch_starts_over(agree):
    def case(model, make):
        dataset = make("Sized")

        def stop(batch, logs=None):
            model.stop_training = batch == 3

        fit(model, dataset, epochs=3, callbacks=[On(on_train_batch_end=stop)])
        fit(model, dataset, epochs=2)

    agree(case, f"train 0 1 2 3 | train {TEN} | train {TEN}")


def test_a_cut_epoch_that_was_stopped_is_not_continued_by_the_next_fit(agree):
    def case(model, make):
        dataset = make("Sized")

        def stop(batch, logs=None):
            model.stop_training = batch == 1

        arguments = {"epochs": 2, "steps_per_epoch": 4}
        stopping = [On(on_train_batch_end=stop)]
        fit(model, dataset, callbacks=stopping, **arguments)
        fit(model, dataset, **arguments)

    agree(case, "train 0 1 | train 0 1 2 3 | train 4 5 6 7")


def test_the_validation_of_a_stopped_epoch_still_happens(agree):
    def case(model, make):
        dataset = make("Sized", size=6)

        def stop(batch, logs=None):
            model.stop_training = batch == 1

        fit(
            model,
            dataset,
            epochs=2,
            validation_data=dataset,
            callbacks=[On(on_train_batch_end=stop)],
        )

    agree(case, "train 0 1 | test 0 1 2 3 4 5")


def test_an_evaluation_or_prediction_may_be_stopped(agree):
    def case(model, make):
        dataset = make("Sized", size=6)

        def stop(batch, logs=None):
            model.stop_evaluating = batch == 1
            model.stop_predicting = batch == 2

        evaluate(model, dataset, callbacks=[On(on_test_batch_end=stop)])
        predict(model, dataset, callbacks=[On(on_predict_batch_end=stop)])
        evaluate(model, dataset)

    agree(case, "test 0 1 | predict 0 1 2 | test 0 1 2 3 4 5")


def test_early_stopping_ends_fit_after_a_whole_epoch(agree):
    def case(model, make):
        dataset = make("Sized", size=3)
        for _ in range(2):
            early = keras.callbacks.EarlyStopping(monitor="loss", patience=1)
            fit(model, dataset, epochs=9, callbacks=[early])

    agree(case, " | ".join(["train 0 1 2"] * 4))


def test_an_exception_in_a_callback_leaves_the_dataset_usable(agree):
    def case(model, make):
        dataset = make("Sized", size=6)

        def fail(batch, logs=None):
            if batch == 1:
                raise RuntimeError("on purpose")

        failing = [On(on_train_batch_end=fail)]
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(model, dataset, callbacks=failing)
        fit(Recorder(), dataset)

    agree(case, "train 0 1 | train 0 1 2 3 4 5")


@pytest.mark.parametrize(
    ("hook", "before"),
    [("on_epoch_end", ""), ("on_epoch_begin", "train | ")],
)
def test_an_exception_in_a_hook_leaves_the_dataset_usable(agree, hook, before):
    def case(model, make):
        dataset = make("Sized", size=3)

        def fail():
            raise RuntimeError("on purpose")

        vars(dataset)[hook] = fail
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(model, dataset)
        del vars(dataset)[hook]
        fit(Recorder(), dataset)

    agree(case, f"{before}train 0 1 2", built=(True,))


# -- datasets that change ----------------------------------------------------


@pytest.mark.parametrize("name", ["Reversing", "ReversingInPlace"])
def test_what_on_epoch_end_changes_reaches_the_very_next_batch(agree, name):
    def case(model, make):
        dataset = make(name, size=4)
        fit(model, dataset, epochs=3)
        evaluate(model, dataset)
        predict(model, dataset)

    # on_epoch_end is called once before the first epoch, and not so before
    # a prediction.
    agree(
        case,
        "train 3 2 1 0 | train 0 1 2 3 | train 3 2 1 0 | test 3 2 1 0 | "
        "predict 0 1 2 3",
        built=(True,),
    )


@pytest.mark.parametrize("name", ["Reversing", "ReversingInPlace"])
def test_the_batch_a_model_is_built_from_is_not_used_when_stale(agree, name):
    def case(model, make):
        fit(model, make(name, size=4), epochs=2)

    agree(case, "train 3 2 1 0 | train 0 1 2 3", built=(False,))


@pytest.mark.parametrize("name", ["Reversing", "ReversingInPlace"])
def test_what_on_epoch_end_changes_reaches_the_rest_of_a_cut_epoch(agree, name):
    def case(model, make):
        fit(model, make(name), epochs=5, steps_per_epoch=3)

    agree(
        case,
        "train 9 8 7 | train 3 4 5 | train 3 2 1 | train 9 | train 9 8 7",
        ran_out=1,
        amid_epoch=True,
    )


def test_a_change_just_after_the_last_batch_reaches_the_next_epoch(agree):
    def case(model, make):
        dataset = make("Reversing", size=4)
        fit(model, dataset, epochs=4, steps_per_epoch=4)
        fit(model, dataset, epochs=3, steps_per_epoch=2)

    agree(
        case,
        "train 3 2 1 0 | train 0 1 2 3 | train 3 2 1 0 | train 0 1 2 3 | "
        "train 0 1 | train 1 0 | train 0 1",
        amid_epoch=True,
    )


def test_a_validation_dataset_may_change_itself_between_validations(agree):
    def case(model, make):
        validation = make("Reversing", size=3)
        fit(model, make("Sized", size=2), epochs=3, validation_data=validation)

    # Twice a validation: on_epoch_end comes before it as well.
    agree(case, " | ".join(["train 0 1 | test 2 1 0"] * 3))


def test_the_hooks_of_a_validation_change_the_training_data_too(agree):
    def case(model, make):
        dataset = make("Reversing", size=6)
        fit(
            model,
            dataset,
            epochs=3,
            steps_per_epoch=2,
            validation_data=dataset,
            validation_steps=3,
        )

    agree(
        case,
        "train 5 4 | test 5 4 3 | train 2 3 | test 0 1 2 | "
        "train 1 0 | test 5 4 3",
        built=(True,),
        amid_epoch=True,
    )


def test_what_on_epoch_begin_changes_reaches_the_epoch_it_begins(agree):
    def case(model, make):
        fit(model, make("ReversingAtTheBegin", size=4), epochs=3)
        fit(model, make("Rising", size=2), epochs=3)
        predict(model, make("Rising", size=2))

    agree(
        case,
        "train 3 2 1 0 | train 0 1 2 3 | train 3 2 1 0 | "
        "train 0@1 1@1 | train 0@2 1@2 | train 0@3 1@3 | predict 0@1 1@1",
        built=(True,),
    )


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras builds nothing from a batch here"
)
def test_the_epoch_begun_to_build_a_model_counts_as_with_stock_keras(agree):
    def case(model, make):
        fit(model, make("Rising", size=2), epochs=2)
        predict(Recorder(), make("ReversingAtTheBegin", size=3))

    # JAX builds the model of a prediction from a batch too, PyTorch does not.
    predicted = "0 1 2" if BACKEND == "jax" else "2 1 0"
    first = 1 if BACKEND == "jax" and IS_316 else 2
    second = first + 1
    agree(
        case,
        f"train 0@{first} 1@{first} | train 0@{second} 1@{second} | "
        f"predict {predicted}",
        built=(False,),
    )


def test_a_dataset_that_grows_is_as_long_as_when_fit_began(agree):
    def case(model, make):
        dataset = make("Growing", size=4)
        fit(model, dataset, epochs=3)
        fit(model, dataset)

    agree(
        case,
        "train 0 1 2 3 | train 0 1 2 3 | train 0 1 2 3 | train 0 1 2 3 4 5 6 7",
    )


def test_a_validation_dataset_that_grows_is_measured_every_time(agree):
    def case(model, make):
        validation = make("Growing", size=2)
        fit(model, make("Sized", size=1), epochs=3, validation_data=validation)

    agree(
        case,
        "train 0 | test 0 1 | train 0 | test 0 1 2 3 | train 0 | "
        "test 0 1 2 3 4 5",
    )


def test_a_grown_dataset_is_shuffled_in_its_whole_length(make):
    def case(model, make):
        dataset = make("Growing", size=40, seed=5)
        fit(model, dataset, epochs=4, shuffle=True)

    found, ran_out = play(case, make, False)
    orders = [part.split()[1:] for part in found.split(" | ")]
    assert ran_out == 0
    assert all(len(order) == len({*order}) == 40 for order in orders)
    # Keras takes 40 of them; the seed is one whose draw has one of the new.
    assert any(int(number) >= 40 for order in orders for number in order)


def test_a_dataset_that_shrinks_ends_early_with_a_warning(agree):
    def case(model, make):
        fit(model, make("Shrinking", size=6), epochs=2)

    ran_out = 0 if IS_316 else 2
    agree(case, "train 0 1 2 3 4 | train 0 1 2 3", ran_out=ran_out)


def test_an_attribute_set_as_an_epoch_begins_is_in_its_first_batch(agree):
    def case(model, make):
        dataset = make("Sized", size=3)

        def rise(epoch, logs=None):
            dataset.level = epoch

        rising = [On(on_epoch_begin=rise)]
        fit(model, dataset, epochs=3, callbacks=rising)
        fit(model, dataset, epochs=2, steps_per_epoch=2, callbacks=rising)

    agree(
        case,
        "train 0 1 2 | train 0@1 1@1 2@1 | train 0@2 1@2 2@2 | "
        "train 0 1 | train 2@1",
        ran_out=1,
        amid_epoch=True,
    )


def test_an_attribute_set_after_a_batch_is_in_the_next_batch(agree):
    def case(model, make):
        dataset = make("Sized", size=5)

        def rise(batch, logs=None):
            dataset.level += 1

        rising = [On(on_train_batch_end=rise)]
        fit(model, dataset, epochs=2, callbacks=rising)

    agree(
        case,
        "train 0 1@1 2@2 3@3 4@4 | train 0@5 1@6 2@7 3@8 4@9",
        amid_epoch=True,
    )


def test_an_attribute_set_in_mid_validation_is_in_the_next_batch(agree):
    def case(model, make):
        dataset = make("Sized", size=3)

        def rise(batch=None, logs=None):
            dataset.level += 1

        rising = [On(on_test_begin=rise, on_test_batch_end=rise)]
        evaluate(model, dataset, callbacks=rising)
        rising = [On(on_predict_begin=rise, on_predict_batch_end=rise)]
        predict(model, dataset, callbacks=rising)

    agree(
        case,
        "test 0@1 1@2 2@3 | predict 0@5 1@6 2@7",
        amid_epoch=True,
    )


def test_an_attribute_set_on_the_dataset_reaches_both_its_passes(agree):
    def case(model, make):
        dataset = make("Sized", size=4)

        def rise(batch=None, logs=None):
            dataset.level += 1

        fit(
            model,
            dataset,
            epochs=2,
            steps_per_epoch=2,
            validation_data=dataset,
            validation_steps=3,
            callbacks=[On(on_test_batch_end=rise)],
        )

    agree(
        case,
        "train 0 1 | test 0 1@1 2@2 | train 2@3 3@3 | test 0@3 1@4 2@5",
        amid_epoch=True,
    )


def test_an_attribute_set_between_fits_is_in_the_second(agree):
    def case(model, make):
        dataset = make("Sized", size=2)
        fit(model, dataset)
        dataset.level = 7
        fit(model, dataset)
        dataset.level = 8
        predict(model, dataset)
        del dataset.level
        evaluate(model, dataset)

    agree(case, "train 0 1 | train 0@7 1@7 | predict 0@8 1@8 | test 0 1")


def test_an_edit_in_place_is_in_the_batch_after_mark_changed(agree):
    def case(model, make):
        dataset = make("Sized", size=5)

        def edit(batch, logs=None):
            if batch % 2:
                dataset.notes["level"] += 1
                getattr(dataset, "mark_changed", int)()

        editing = [On(on_train_batch_end=edit)]
        fit(model, dataset, epochs=2, callbacks=editing)

    agree(
        case,
        "train 0 1 2@1 3@1 4@2 | train 0@2 1@2 2@3 3@3 4@4",
        amid_epoch=True,
    )


def test_data_that_changes_is_shuffled_without_loss(make):
    def case(model, make):
        dataset = make("Sized", seed=3)

        def rise(batch, logs=None):
            dataset.level += 1

        rising = [On(on_train_batch_end=rise)]
        fit(model, dataset, epochs=2, callbacks=rising, shuffle=True)

    behind = int(fetches_ahead())
    for built in BUILT:
        found, _ = play(case, make, built)
        for epoch, part in enumerate(found.split(" | ")):
            pairs = [f"{batch}@0".split("@")[:2] for batch in part.split()[1:]]
            assert sorted(number for number, _ in pairs) == TEN.split()
            levels = [int(level) for _, level in pairs]
            first = 10 * epoch
            ahead = [first] * behind
            assert levels == [*ahead, *range(first, first + 10 - behind)]


# -- hooks -------------------------------------------------------------------


def _fit(model, make):
    fit(model, make("Told", size=3), epochs=2)


def _fit_few_steps(model, make):
    fit(model, make("Told", size=5), epochs=4, steps_per_epoch=2)


def _fit_many_steps(model, make):
    fit(model, make("Told", size=3), epochs=2, steps_per_epoch=5)


def _fit_all_steps(model, make):
    fit(model, make("Told", size=3), epochs=2, steps_per_epoch=3)


def _fit_endless(model, make):
    fit(model, make("EndlessTold"), epochs=2, steps_per_epoch=2)


def _fit_twice(model, make):
    dataset = make("Told", size=3)
    fit(model, dataset, epochs=2)
    fit(model, dataset, epochs=1)


def _fit_with_validation(model, make):
    dataset, validation = make("Told", size=3), make("Told", size=2)
    validation.name = "validation-"
    fit(
        model,
        dataset,
        epochs=3,
        validation_data=validation,
        validation_freq=[1, 3],
    )


def _fit_with_itself_as_validation(model, make):
    dataset = make("Told", size=5)
    fit(
        model,
        dataset,
        epochs=3,
        steps_per_epoch=2,
        validation_data=dataset,
        validation_steps=3,
    )


def _fit_until_stopped(model, make):
    dataset = make("Told", size=4)

    def stop(batch, logs=None):
        model.stop_training = batch == 1

    stopping = [On(on_train_batch_end=stop)]
    fit(model, dataset, epochs=2, validation_data=dataset, callbacks=stopping)
    fit(model, dataset)


def _fit_while_shrinking(model, make):
    dataset = make("Told", size=4)

    def shrink(epoch, logs=None):
        del dataset.order[-1]
        getattr(dataset, "mark_changed", int)()

    shrinking = [On(on_epoch_begin=shrink)]
    fit(model, dataset, epochs=3, callbacks=shrinking)


def _evaluate(model, make):
    dataset = make("Told", size=3)
    evaluate(model, dataset)
    evaluate(model, dataset, steps=2)
    evaluate(model, make("EndlessTold"), steps=2)


def _predict(model, make):
    dataset = make("Told", size=3)
    predict(model, dataset)
    predict(model, dataset, steps=2)
    predict(model, make("EndlessTold"), steps=2)


@functools.cache
def _play_stock(case, built):
    return play(case, make_stock, built)


@pytest.mark.parametrize(
    "case",
    [
        _fit,
        _fit_few_steps,
        _fit_many_steps,
        _fit_all_steps,
        _fit_endless,
        _fit_twice,
        _fit_with_validation,
        _fit_with_itself_as_validation,
        _fit_until_stopped,
        _fit_while_shrinking,
        _evaluate,
        _predict,
    ],
)
def test_hooks_are_called_when_stock_keras_calls_them(make, case):
    for built in BUILT:
        assert play(case, make, built) == _play_stock(case, built)


def test_hooks_are_called_around_every_epoch_and_end_once_before(agree):
    agree(
        _fit,
        "end | train begin 0 1 2 end | train begin 0 1 2 end",
        built=(True,),
    )
    agree(
        _fit_with_itself_as_validation,
        "end | train begin 0 1 end end | test begin 0 1 2 end | "
        "train begin 2 3 end end | test begin 0 1 2 end | "
        "train begin 4 end end | test begin 0 1 2 end",
        ran_out=1,
        built=(True,),
    )
    agree(
        _predict,
        "predict begin 0 1 2 end | predict begin 0 1 end | "
        "predict begin 0 1 end",
        built=(True,),
    )


def test_hooks_run_in_the_training_process_and_in_the_thread_of_fit(make):
    dataset = make("Told", size=3)
    here = os.getpid(), threading.get_ident()
    seen = []

    def note():
        seen.append((os.getpid(), threading.get_ident()))

    kind = type(dataset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "on_epoch_begin", lambda self: note())
        patch.setattr(kind, "on_epoch_end", lambda self: note())
        fit(Recorder(built=True), dataset, epochs=2)
    assert seen == [here] * 5


# -- what a batch is ---------------------------------------------------------


def contents(make, form, *hows, **arguments):
    EVENTS.clear()
    model = Recorder()
    dataset = make("Sized", size=3, form=form)
    for how in hows:
        how(model, dataset, **arguments)
    return model.batches


@functools.cache
def _stock_contents(form, *hows):
    return contents(make_stock, form, *hows)


@pytest.mark.parametrize(
    "form",
    [
        samples.pair,
        samples.triple,
        samples.inputs_only,
        samples.bare,
        samples.as_list,
        samples.as_dict,
        samples.nested,
    ],
)
def test_a_step_gets_the_batch_that_stock_keras_gives_it(make, form):
    hows = fit, evaluate, predict
    found = contents(make, form, *hows)
    assert len(found) == 9
    assert found == _stock_contents(form, *hows)


def test_a_part_of_a_batch_may_be_none(make):
    # Stock Keras takes it on JAX and PyTorch alone.
    found = contents(make, samples.pair_and_none, fit, evaluate, predict)
    assert [[*batch[1:]] for batch in found] == 3 * [
        ["float32 [[0.0], [0.0]]", None],
        ["float32 [[1.0], [1.0]]", None],
        ["float32 [[2.0], [2.0]]", None],
    ]


@pytest.mark.parametrize("form", [samples.pair, samples.as_list])
def test_class_weight_becomes_the_weights_of_the_samples(make, form):
    weights = {0: 1.0, 1: 5.0, 2: 0.25}
    found = contents(make, form, fit, class_weight=weights)
    assert [batch[2] for batch in found] == [
        "float32 [1.0, 1.0]",
        "float32 [5.0, 5.0]",
        "float32 [0.25, 0.25]",
    ]
    assert found == contents(make_stock, form, fit, class_weight=weights)


def test_sample_weights_reach_the_step(make):
    found = contents(make, samples.triple, fit)
    assert [batch[2] for batch in found] == [
        "float32 [0.5, 1.5]",
        "float32 [1.5, 2.5]",
        "float32 [2.5, 3.5]",
    ]


def test_class_weight_is_not_for_validation(make):
    def contents(make):
        model = Recorder()
        dataset = make("Sized", size=2)
        fit(model, dataset, class_weight={1: 3.0}, validation_data=dataset)
        return model.batches

    found = contents(make)
    assert [len(batch) for batch in found] == [3, 3, 2, 2]
    assert found == contents(make_stock)


@pytest.mark.parametrize(
    ("form", "arguments", "match"),
    [
        (samples.pair, {"validation_split": 0.5}, "`validation_split` is only"),
        (
            samples.triple,
            {"class_weight": {0: 1.0}},
            "cannot specify `class_weight` and `sample_weight`",
        ),
        (samples.too_long, {}, "must return a tuple or a dict"),
        (samples.pair, {"y": np.zeros(3)}, "`y` should not be passed"),
        (
            samples.pair,
            {"sample_weight": np.zeros(3)},
            "`sample_weights` should not be passed",
        ),
    ],
    ids=[
        "validation_split",
        "both weights",
        "four parts",
        "y",
        "sample_weight",
    ],
)
def test_fit_refuses_what_it_refuses_of_stock_keras(
    make, form, arguments, match
):
    for maker in (make_stock, make):
        dataset = maker("Sized", size=3, form=form)
        with pytest.raises(ValueError, match=match):
            fit(Recorder(), dataset, **arguments)


# -- a forgotten constructor, and settings changed later ---------------------


@pytest.mark.filterwarnings("ignore:.*super:UserWarning")
def test_a_forgotten_constructor_is_warned_of_and_means_defaults():
    dataset = samples.FastForgetful()
    EVENTS.clear()
    with pytest.warns(UserWarning, match=r"should call `super\(\).__init__"):
        fit(Recorder(), dataset, epochs=2)
    assert " ".join(EVENTS) == "| train 0 1 2 3 | train 0 1 2 3"
    assert dataset.workers == 1
    assert dataset.use_multiprocessing is False
    assert dataset.max_queue_size == 10
    dataset.close()


def test_a_forgotten_constructor_is_warned_of_once():
    dataset = samples.FastForgetful()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Recorder(), dataset, epochs=2, validation_data=dataset)
        predict(Recorder(), dataset)
    dataset.close()
    about = [w for w in caught if "super().__init__" in str(w.message)]
    assert len(about) == 1
    assert about[0].category is UserWarning


@pytest.mark.filterwarnings("ignore:.*super:UserWarning")
def test_a_forgotten_constructor_leaves_the_settings_to_be_set(kind):
    dataset = samples.FastForgetful()
    for name, value in kind.items():
        setattr(dataset, name, value)
    assert dataset.workers == kind["workers"]
    EVENTS.clear()
    fit(Recorder(), dataset, validation_data=dataset)
    assert " ".join(EVENTS) == "| train 0 1 2 3 | test 0 1 2 3"
    dataset.close()


def test_settings_may_change_between_fits_and_within_one(make, kind):
    dataset = make("Sized", size=6)

    def change(batch, logs=None):
        if batch == 1:
            dataset.workers = 1 + batch
            dataset.use_multiprocessing = not dataset.use_multiprocessing
            dataset.max_queue_size = 3

    changing = [On(on_train_batch_end=change)]
    EVENTS.clear()
    fit(Recorder(), dataset, epochs=2, callbacks=changing)
    dataset.workers = 0
    fit(Recorder(), dataset)
    assert " ".join(EVENTS) == " ".join(["| train 0 1 2 3 4 5"] * 3)


# -- real steps --------------------------------------------------------------


class _Order(keras.metrics.Metric):
    """Keeps the first target of every batch, within compiled steps."""

    def __init__(self, slots=32):
        super().__init__(name="order")
        self.count = self.add_variable((), "zeros", name="count")
        self.kept = self.add_variable((slots,), "zeros", name="kept")

    def update_state(self, y_true, y_pred, sample_weight=None):
        slots = keras.ops.arange(self.kept.shape[0], dtype="float32")
        here = keras.ops.equal(slots, self.count)
        first = keras.ops.cast(y_true[0, 0], "float32")
        kept = keras.ops.convert_to_tensor(self.kept)
        self.kept.assign(keras.ops.where(here, first, kept))
        self.count.assign(self.count + 1)

    def result(self):
        return self.count + 0

    def note(self):
        count = int(to_numpy(self.count))
        EVENTS.extend(f"{n:g}" for n in to_numpy(self.kept)[:count])


@pytest.mark.parametrize(
    "steps_per_execution",
    [1, pytest.param(3, marks=with_steps_per_execution)],
)
def test_compiled_steps_that_learn_get_the_same_batches(
    make, steps_per_execution
):
    dataset = make("Sized", size=7, form=samples.number_as_target)
    order = _Order()
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.compile(
        keras.optimizers.SGD(1e-6),
        "mse",
        metrics=[order],
        steps_per_execution=steps_per_execution,
    )

    def note(*_, **__):
        order.note()

    EVENTS.clear()
    steps = 3
    fit(
        model,
        dataset,
        epochs=3,
        steps_per_epoch=steps,
        callbacks=[On(on_epoch_end=note)],
    )
    fit(model, dataset, epochs=2, callbacks=[On(on_epoch_end=note)])
    evaluate(model, dataset, callbacks=[On(on_test_end=note)])
    seven = "0 1 2 3 4 5 6"
    assert " ".join(EVENTS) == (
        "| train 0 1 2 | train 3 4 5 | train 6 | "
        f"train {seven} | train {seven} | test {seven}"
    )
    slope = to_numpy(model.predict(dataset, verbose=0))[:: samples.ROWS, 0]
    assert np.allclose(slope, slope[1] * np.arange(7), rtol=1e-4)


# -- stock datasets ----------------------------------------------------------


def test_a_fast_dataset_is_a_pydataset_with_an_adapter_of_its_own(make):
    dataset = make("Sized")
    assert isinstance(dataset, keras.utils.PyDataset)
    adapter = data_adapters.get_data_adapter(dataset)
    assert isinstance(adapter, PyDatasetAdapter)
    assert type(adapter) is keras_bridge.FastPyDatasetAdapter


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stock_dataset_has_the_adapter_of_keras(workers):
    dataset = make_stock("Sized", workers=workers)
    adapter = data_adapters.get_data_adapter(dataset, shuffle=True)
    assert type(adapter) is PyDatasetAdapter
    assert adapter.py_dataset is dataset
    assert adapter.shuffle is True
    assert (adapter.enqueuer is None) == (workers == 1)


def test_the_adapter_of_keras_keeps_its_own_methods():
    foreign = {
        name
        for name, value in vars(PyDatasetAdapter).items()
        if callable(value) and not value.__module__.startswith("keras.src.")
    }
    assert foreign == {"__new__"}
    ours = {
        name
        for name, value in vars(keras.utils.PyDataset).items()
        if getattr(value, "__module__", "").startswith("keras_fastdata")
    }
    assert not ours


def test_a_stock_dataset_gives_what_it_gave_before_the_import():
    def make(name, **arguments):
        # Two threads of Keras may lose a batch.
        return make_stock(name, workers=1, **arguments)

    def case(model, make):
        dataset, validation = make("Told", size=5), make("Told", size=3)
        validation.name = "validation-"
        fit(model, dataset, epochs=2, validation_data=validation)
        fit(model, dataset, epochs=1, steps_per_epoch=2)
        evaluate(model, dataset)
        predict(model, dataset)

    with_ours = play(case, make, False)
    with mock.patch.object(
        PyDatasetAdapter, "__new__", lambda cls, *_, **__: object.__new__(cls)
    ):
        without = play(case, make, False)
    assert with_ours == without
