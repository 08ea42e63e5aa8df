"""How TensorFlow's `fit` gets its batches: none copied, lost or traced anew."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
from places import KINDS, quickly

pytestmark = pytest.mark.usefixtures("kept_forkserver")

keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow alone is fed so", allow_module_level=True)

import tensorflow as tf  # noqa: E402
from samples import Numbered, Ragged  # noqa: E402

from keras_fastdata import FastPyDataset  # noqa: E402
from keras_fastdata.keras_bridge import tensorflow_iterator  # noqa: E402
from keras_fastdata.memory.arena import aligned_empty  # noqa: E402

everywhere = pytest.mark.parametrize("place", quickly(KINDS, "process"))


class Counting(keras.Model):
    """Learns nothing; counts how often its step is traced."""

    def __init__(self):
        super().__init__()
        self.traced = 0
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.seen = self.add_weight(
            shape=(32,), initializer="zeros", trainable=False
        )
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def train_step(self, data):
        self.traced += 1
        x, _ = data
        place = tf.reshape(self.steps, (1, 1))
        self.seen.assign(
            tf.tensor_scatter_nd_update(
                self.seen.value, place, tf.reshape(x[0, 0], (1,))
            )
        )
        self.steps.assign(self.steps.value + 1)
        return {"loss": tf.reduce_mean(x)}

    def numbers(self):
        return self.seen.numpy()[: int(self.steps.numpy())].astype(int).tolist()


def trained(dataset, epochs=2, **compiled):
    model = Counting()
    model.compile("sgd", **compiled)
    model.fit(dataset, epochs=epochs, shuffle=False, verbose=0)
    return model


@everywhere
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_last_batch_that_is_shorter_is_no_reason_to_trace_anew(
    place, jit_compile
):
    with Ragged(**KINDS[place]) as dataset:
        model = trained(dataset, epochs=3, jit_compile=jit_compile)
    assert model.numbers() == 3 * list(range(7))
    assert model.traced == 1


@everywhere
@pytest.mark.parametrize("steps", quickly([2, 3, 7, 10], 3, 10))
def test_several_steps_in_one_call_get_each_batch_once(place, steps):
    with Ragged(**KINDS[place]) as dataset:
        model = trained(dataset, steps_per_execution=steps)
    assert model.numbers() == 2 * list(range(7))


@everywhere
def test_a_step_that_runs_eagerly_gets_each_batch_once(place):
    with Ragged(**KINDS[place]) as dataset:
        model = trained(dataset, run_eagerly=True)
    assert model.numbers() == 2 * list(range(7))


@everywhere
def test_functions_that_run_eagerly_get_each_batch_once(place):
    tf.config.run_functions_eagerly(True)
    try:
        with Ragged(**KINDS[place]) as dataset:
            model = trained(dataset)
    finally:
        tf.config.run_functions_eagerly(False)
    assert model.numbers() == 2 * list(range(7))


class OwnFunction(Counting):
    """Has a train function of its own, which asks the iterator itself."""

    def make_train_function(self, force=False):
        @tf.function
        def take(iterator):
            return self.train_step(iterator.get_next())

        self.train_function = take
        return take


@everywhere
def test_a_train_function_of_the_users_gets_each_batch_once(place):
    model = OwnFunction()
    model.compile("sgd")
    with Ragged(**KINDS[place]) as dataset:
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert model.numbers() == 2 * list(range(7))


class TwoSteps(Counting):
    """Has a train function of its own, which takes two batches in a graph."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def make_train_function(self, force=False):
        @tf.function
        def one(iterator):
            return self.train_step(next(iterator))

        @tf.function
        def loop(iterator):
            logs = {"loss": 0.0}
            for _ in tf.range(2):
                logs = self.train_step(next(iterator))
            return logs

        @tf.function
        def nested(iterator):
            one(iterator)
            return one(iterator)

        @tf.function
        def branches(iterator):
            one(iterator)
            return tf.cond(
                self.steps % 2 == 0,
                lambda: self.train_step(iterator.get_next()),
                lambda: self.train_step(iterator.get_next()),
            )

        functions = {"loop": loop, "nested": nested, "branches": branches}
        self.train_function = functions[self.how]


@pytest.mark.parametrize("how", ["loop", "nested", "branches"])
def test_a_graph_of_the_users_may_ask_for_batches_wherever_it_likes(how):
    model = TwoSteps(how)
    model.compile("sgd")
    with Numbered(length=8, workers=2) as dataset:
        model.fit(dataset, steps_per_epoch=4, shuffle=False, verbose=0)
    assert model.numbers() == list(range(8))


def test_an_error_reaches_the_user_from_a_train_function_of_their_own():
    model = TwoSteps("loop")
    model.compile("sgd")
    with Fails(workers=2) as dataset, pytest.raises(OSError, match="gone"):
        model.fit(dataset, steps_per_epoch=4, shuffle=False, verbose=0)


class Fails(Numbered):
    """Raises in its batch 6, of 8."""

    length = 8

    def __getitem__(self, index):
        if index == 6:
            raise OSError("The disk is gone.")
        return super().__getitem__(index)


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch >= 4


def test_an_error_that_training_does_not_come_to_is_logged(caplog):
    filters = list(warnings.filters)
    with Fails(workers=2) as dataset:
        model = Counting()
        model.compile("sgd", steps_per_execution=4)
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[Stops()])
    gc.collect()
    # TensorFlow may have something to say of other tests' models.
    (record,) = [r for r in caplog.records if r.name == "keras_fastdata"]
    assert "before it came to this error" in record.getMessage()
    assert isinstance(record.exc_info[1], OSError)
    assert warnings.filters == filters


class TurnsEager(keras.callbacks.Callback):
    """Has everything run eagerly from the fourth step on."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self.how == "functions":
            tf.config.run_functions_eagerly(True)
        elif batch == 3:
            self.model.run_eagerly = True
            self.model.make_train_function(force=True)


@pytest.mark.parametrize("how", ["functions", "model"])
def test_a_training_may_turn_eager_in_mid_epoch(how):
    model = Counting()
    model.compile("sgd")
    try:
        with Numbered(length=7, workers=2) as dataset:
            model.fit(
                dataset, shuffle=False, verbose=0, callbacks=[TurnsEager(how)]
            )
    finally:
        tf.config.run_functions_eagerly(False)
    assert model.numbers() == list(range(7))


class WithMemory(Counting):
    """Makes a variable of its first batch."""

    first = None

    def train_step(self, data):
        if self.first is None:
            self.first = tf.Variable(data[0][:1, :1])
        return super().train_step(data)


def test_a_step_may_make_a_variable_of_its_data():
    model = WithMemory()
    model.compile("sgd")
    with Numbered(length=5, workers=2) as dataset:
        model.fit(dataset, shuffle=False, verbose=0)
    assert model.numbers() == list(range(5))


@pytest.mark.parametrize("kind", ["double", "variable", "keras variable"])
def test_tensors_of_another_type_and_variables_are_values(kind):
    make = {
        "double": lambda x: tf.constant(x, tf.float64),
        "variable": tf.Variable,
        "keras variable": keras.Variable,
    }[kind]

    class Mixed(Numbered):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            x = np.asarray(x, "float32")
            return (make(x) if index == 2 else tf.constant(x)), y

    with Mixed(length=4, workers=0) as dataset:
        assert trained(dataset, epochs=1).numbers() == list(range(4))


class Evaluates(keras.callbacks.Callback):
    """Evaluates and predicts amid an epoch."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            loss = self.model.evaluate(self.dataset, verbose=0)
            self.found.append(float(loss))
            self.found.append(len(self.model.predict(self.dataset, verbose=0)))


@pytest.mark.parametrize("steps", [1, 2])
def test_evaluation_and_prediction_amid_an_epoch_get_all_batches(steps):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1, "relu")(inputs))
    model.compile("sgd", "mse", steps_per_execution=steps)
    with Pairs() as dataset, Pairs(workers=2) as other:
        model.evaluate(dataset, verbose=0)
        evaluates = Evaluates(other)
        model.fit(
            dataset,
            epochs=2,
            verbose=0,
            validation_data=other,
            callbacks=[evaluates],
        )
    losses, counts = evaluates.found[::2], evaluates.found[1::2]
    assert counts == [36] * len(counts)
    assert len(counts) == 2
    assert all(np.isfinite(losses))


class Pairs(FastPyDataset):
    """Nine batches of four, with weights."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        x = np.full((4, 2), index, "float32")
        return x, x[:, :1] * 2, np.ones(4, "float32")


@pytest.mark.parametrize("kind", ["same", "wider"])
def test_a_fit_on_batches_of_another_kind_is_traced_anew_at_most_once(kind):
    model = Counting()
    model.compile("sgd")
    widths = [2, 2] if kind == "same" else [2, 3]
    for width in widths:
        batch = np.zeros((3, width), "float32"), np.zeros((3, 1), "float32")
        with Fixed(*batch, workers=0) as dataset:
            model.fit(dataset, verbose=0, shuffle=False)
    assert model.traced == len(set(widths))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_second_fit_takes_the_batches_of_its_own_dataset(steps):
    model = Counting()
    model.compile("sgd", steps_per_execution=steps)
    for length in (4, 6):
        with Ragged(length, workers=0) as dataset:
            model.fit(dataset, verbose=0, shuffle=False)
    assert model.numbers() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert model.traced == 1


class Fixed(FastPyDataset):
    """Hands out the same arrays again and again."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.x, self.y


def _arrays(aligned):
    x, y = (
        aligned_empty(shape, "float32")
        if aligned
        else np.frombuffer(
            memoryview(bytearray(4 * int(np.prod(shape)) + 4))[4:], "float32"
        ).reshape(shape)
        for shape in [(64, 5000), (64, 1)]
    )
    x[:], y[:] = -1.5, 2.0
    return x, y


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("jit_compile", quickly([False, True], True))
def test_training_does_not_write_to_a_batch(aligned, jit_compile):
    x, y = _arrays(aligned)
    model = keras.Sequential(
        [
            keras.Input((5000,)),
            keras.layers.Activation("relu"),
            keras.layers.Rescaling(2.0, offset=1.0),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=jit_compile)
    model.fit(Fixed(x, y, workers=0), epochs=2, verbose=0)
    assert (x == -1.5).all()
    assert (y == 2.0).all()


def _signature(*shapes):
    return tuple(tf.TensorSpec((None, *shape[1:])) for shape in shapes)


def _iterator(batches, signature):
    source = tensorflow_iterator.TensorSource(iter(batches), signature)
    return tensorflow_iterator.DirectIterator(source, print)


def test_a_large_aligned_array_is_not_copied():
    array = aligned_empty((64, 5000))
    array[:] = 1
    (tensor,) = next(_iterator([(array,)], _signature(array.shape)))
    array[0, 0] = 7
    assert float(tensor[0, 0]) == 7


def test_an_array_lives_as_long_as_its_tensor():
    array = aligned_empty((64, 5000))
    array[:] = 1
    alive = weakref.ref(array)
    (tensor,) = next(_iterator([(array,)], _signature(array.shape)))
    del array
    gc.collect()
    assert float(tf.reduce_sum(tensor)) == 64 * 5000
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


def test_copies_of_arrays_that_are_not_aligned_share_no_memory_while_in_use():
    arrays = [np.full((600, 1000), i, "float32") for i in range(6)]
    iterator = _iterator([(a,) for a in arrays], _signature(arrays[0].shape))
    held = [next(iterator)[0] for _ in range(4)]
    assert [float(tensor[0, 0]) for tensor in held] == [0, 1, 2, 3]
    del held[1:3]
    gc.collect()
    held += [next(iterator)[0] for _ in range(2)]
    assert [float(tensor[-1, -1]) for tensor in held] == [0, 3, 4, 5]


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "int64"]
)
def test_arrays_of_any_type_arrive(dtype):
    array = np.arange(12).reshape(4, 3).astype(dtype)
    spec = (tf.TensorSpec((None, 3), dtype),)
    (tensor,) = next(_iterator([(array,)], spec))
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.dtype.name == dtype


def test_an_array_of_another_shape_is_refused_in_plain_words():
    class Growing(Numbered):
        def __getitem__(self, index):
            return np.ones((4, 3 if index < 5 else 8)), np.ones((4, 1))

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"shape \(4, 8\) .* \(None, 3\)"):
        model.fit(Growing(workers=0), verbose=0)


def test_a_strategy_of_tensorflows_makes_its_own_dataset_of_it():
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with Numbered(workers=2) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        assert model.predict(dataset, verbose=0).shape == (40, 1)


@everywhere
def test_the_error_of_a_batch_passes_through_several_steps_in_one_call(place):
    class Bad(Numbered):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such file")
            return super().__getitem__(index)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=4)
    with (
        Bad(**KINDS[place]) as dataset,
        pytest.raises(KeyError, match="no such file"),
    ):
        model.fit(dataset, shuffle=False, verbose=0)


def test_copies_of_arrays_of_ever_other_sizes_do_not_pile_up():
    copies = tensorflow_iterator._Copies()
    for rows in range(300, 360):
        array = np.ones((rows, 1000), "float32")
        assert copies.of(array)[-1, -1] == 1
    assert sum(root.nbytes for root in copies._free) < 4 * array.nbytes
    assert len(copies._leased) <= 1 + len(copies._returned)


def test_a_batch_that_does_not_fit_ends_training_amid_several_steps():
    class Growing(Ragged):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (np.ones((4, 8), "float32"), y) if index == 2 else (x, y)

    model = Counting()
    model.compile("sgd", steps_per_execution=4)
    with pytest.raises(ValueError, match="has an array of shape"):
        model.fit(Growing(12, workers=0), shuffle=False, verbose=0)
    assert model.numbers() == [0, 1]


@pytest.mark.parametrize("place", ["inline", "thread"])
@pytest.mark.parametrize("call", ["fit", "predict"])
def test_the_end_of_other_data_is_not_the_end_of_the_epoch(place, call):
    class Nested(Numbered):
        def __getitem__(self, index):
            if index == 4:
                iter(tf.data.Dataset.range(0)).get_next()
            return super().__getitem__(index)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with (
        Nested(**KINDS[place]) as dataset,
        pytest.raises(RuntimeError, match="its epoch is not over"),
    ):
        getattr(model, call)(dataset, verbose=0)


def test_values_of_other_names_than_before_are_refused():
    class Renamed(Numbered):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"a": x, ("b" if index < 5 else "c"): x}, y

    inputs = {name: keras.Input((3,), name=name) for name in "ab"}
    outputs = keras.layers.Dense(1)(inputs["a"] + inputs["b"])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="structure"):
        model.fit(Renamed(workers=0), verbose=0)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (np.zeros((2, 5), "float32"), r"\(2, 5\) where .* had \(None, 4\)"),
        ({"a": np.zeros((2, 4), "float32")}, r"\{'a': \(2, 4\)\}.*structure"),
    ],
    ids=["shape", "structure"],
)
def test_a_batch_unlike_the_first_ones_is_named(odd, said):
    class Changing(FastPyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            x = odd if index == 3 else np.zeros((2, 4), "float32")
            return x, np.zeros((2, 1), "float32")

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with (
        Changing(workers=0) as dataset,
        pytest.raises(ValueError, match=said) as caught,
    ):
        model.fit(dataset, verbose=0, shuffle=False)
    assert caught.value.__notes__ == ["In batch 3 of epoch 0 of Changing."]
