"""Every kind of batch that Keras accepts reaches the model, from processes."""

from __future__ import annotations

import re
import warnings

import keras
import numpy as np
import pytest
import scipy.sparse
from keras_facts import IS_316
from places import FULL, KINDS, quickly

from keras_fastdata import FastPyDataset
from keras_fastdata.keras_bridge import shapes

pytestmark = [pytest.mark.backend, pytest.mark.usefixtures("kept_forkserver")]

BACKEND = keras.backend.backend()
# One worker, because it imports a backend for batches of its tensors.
ONE_PROCESS = {"workers": 1, "use_multiprocessing": True}


@pytest.fixture(params=quickly(KINDS, "process"))
def place(request):
    return KINDS[request.param]


def _dataset(make, place, length=4):
    """A dataset whose batch i is `make(i)`."""

    class Made(FastPyDataset):
        def __len__(self):
            return length

        def __getitem__(self, index):
            return make(index)

    return Made(**place)


def _linear(**inputs):
    """Adds up its inputs' means, and has one weight to train."""
    tensors = {
        name: keras.Input(shape, name=name) for name, shape in inputs.items()
    }
    parts = [keras.layers.Flatten()(t) for t in tensors.values()]
    joined = keras.layers.Concatenate()(parts) if parts[1:] else parts[0]
    model = keras.Model(tensors, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    return model


X = np.arange(12, dtype="float32").reshape(4, 3) / 12
Y = np.ones((4, 1), "float32")


ARRAYS = {
    "tuple": (X, Y),
    "list": [X, Y],
    "weights": (X, Y, np.ones(4, "float32")),
    "doubles": (X.astype("float64"), Y.astype("int64")),
    "small integers": (X.astype("uint8"), Y.astype("bool")),
    "layouts": (X.tolist() and np.asfortranarray(X), Y[::-1]),
    "None for weights": (X, Y, None),
}


@pytest.mark.parametrize(
    "name", quickly(ARRAYS, "list", "weights", "small integers", "layouts")
)
def test_arrays_train(name, place):
    batch = ARRAYS[name]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with _dataset(lambda i: batch, place) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        assert np.isfinite(model.evaluate(dataset, verbose=0))


def test_nested_dicts_train(place):
    model = _linear(a=(3,), b=(2, 2))
    with _dataset(
        lambda i: ({"a": X, "b": np.ones((4, 2, 2), "float32")}, Y), place
    ) as dataset:
        assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])


@pytest.mark.parametrize("form", ["array", "tuple of one"])
def test_inputs_alone_are_predicted(form, place):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    make = {"array": lambda i: X + i, "tuple of one": lambda i: (X + i,)}
    with _dataset(make[form], place) as dataset:
        found = model.predict(dataset, verbose=0)
    expected = model.predict(
        np.concatenate([X + i for i in range(4)]), verbose=0
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.skipif(
    keras.__version__ < "3.14", reason="Keras builds no such model before 3.14"
)
def test_an_optional_input_may_be_none(place):
    a = keras.Input((3,), name="a")
    b = keras.Input((3,), name="b", optional=True)
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(a))
    model.compile("sgd", "mse")
    with _dataset(lambda i: ({"a": X, "b": None}, Y), place) as dataset:
        assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])


def test_batches_of_different_lengths_train(place):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with _dataset(lambda i: (X[: i + 1], Y[: i + 1]), place) as dataset:
        model.fit(dataset, verbose=0)
        assert len(model.predict(dataset, verbose=0)) == 10


def test_scalars_and_strings_arrive_in_a_plain_loop(place):
    batch = {
        "text": np.array(["a", "bc"]),
        "objects": np.array([None, "x", 3], object),
        "scalar": 2.5,
        "word": "hello",
        "none": None,
    }
    with _dataset(lambda i: batch, place) as dataset:
        for found in dataset:
            assert found["text"].tolist() == ["a", "bc"]
            assert found["objects"].tolist() == [None, "x", 3]
            assert (found["scalar"], found["word"]) == (2.5, "hello")
            assert found["none"] is None


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch has no sparse")
def test_scipy_sparse_inputs_train(place):
    model = keras.Sequential(
        [keras.Input((3,), sparse=True), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    matrix = scipy.sparse.csr_matrix(X)
    with _dataset(lambda i: (matrix, Y), place) as dataset:
        assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])


def test_a_batch_that_is_none_is_a_clear_error(place):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with (
        _dataset(lambda i: None, place) as dataset,
        pytest.raises(ValueError, match="returned None"),
    ):
        model.fit(dataset, verbose=0)


_REPLICAS = """
import keras
import numpy as np
import tensorflow as tf
from keras_fastdata import FastPyDataset

ROWS = 16  # of a batch: its memory in a file is aligned, and not copied
np.save("x.npy", np.arange(12.0, dtype="float32").repeat(ROWS)[:, None])
MAP = np.load("x.npy", mmap_mode="r")


class Rows(FastPyDataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = MAP[index * ROWS : (index + 1) * ROWS]
        return (x, x) if self.is_map else (x.copy(), x.copy())


cpu = tf.config.list_physical_devices("CPU")[0]
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])
for is_map, arguments in (
    (True, {"workers": 0}),
    (False, {"workers": 0, "cache": "memory"}),
    (False, {"workers": 1, "use_multiprocessing": True, "cache": "memory"}),
):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    with Rows(**arguments) as dataset:
        dataset.is_map = is_map
        losses = model.fit(dataset, epochs=4, verbose=0).history["loss"]
    print("same" if len(set(losses)) == 1 else losses)
"""

if BACKEND == "tensorflow":
    import tensorflow as tf

    def ragged_and_sparse():
        """Makes a function that travels by value, and not with this module."""

        def make(_):
            import tensorflow as tf

            ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
            return {"sparse": tf.sparse.eye(3), "ragged": ragged}

        return make

    def check_ragged_and_sparse(found):
        assert isinstance(found["sparse"], tf.SparseTensor)
        dense = tf.sparse.to_dense(found["sparse"])
        assert (dense == tf.eye(3)).numpy().all()
        assert isinstance(found["ragged"], tf.RaggedTensor)
        assert found["ragged"].to_list() == [[1.0], [2.0, 3.0]]

    def test_tf_sparse_and_ragged_arrive_inline():
        with _dataset(ragged_and_sparse(), KINDS["inline"]) as dataset:
            for found in dataset:
                check_ragged_and_sparse(found)

    def test_tensors_travel_and_arrive_as_arrays_from_processes():
        """In one test, for a worker that imports TensorFlow takes seconds."""
        tensor, others = tf.range(6.0), ragged_and_sparse()

        def make(index):
            import tensorflow as tf

            if index > 1:
                return others(index)
            return tf.fill((2, 2), tensor[index]), tf.constant([index])

        with _dataset(make, ONE_PROCESS) as dataset:
            batches = list(dataset)
        for number, (x, y) in enumerate(batches[:2]):
            assert isinstance(x, np.ndarray)
            assert (x == number).all()
            assert y.tolist() == [number]
        for found in batches[2:]:
            check_ragged_and_sparse(found)

    def test_strings_train(place):
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                keras.layers.StringLookup(
                    vocabulary=["a", "b"], output_mode="one_hot"
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        words = np.array([["a"], ["b"], ["a"], ["c"]], object)
        with _dataset(lambda i: (words, Y), place) as dataset:
            loss = model.fit(dataset, verbose=0).history["loss"]
        assert np.isfinite(loss[0])

    @pytest.mark.long
    def test_tf_sparse_inputs_train(place):
        def make(index):
            import tensorflow as tf

            return tf.sparse.eye(4, 3), Y

        model = keras.Sequential(
            [keras.Input((3,), sparse=True), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        with _dataset(make, place) as dataset:
            assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])

    def test_mirrored_replicas_train(place):
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with _dataset(lambda i: (X, Y), place) as dataset:
            assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])

    def test_replicas_write_to_no_batch_that_is_kept(tmp_path, zygote):
        """Batches of a cache would change, a read-only map ends the program."""
        script = tmp_path / "train.py"
        script.write_text(_REPLICAS)
        done = zygote.run(script, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["same"] * 3

    def test_the_train_step_is_traced_once(place):
        class Counted(keras.Sequential):
            traces = 0

            def call(self, *args, **kwargs):
                type(self).traces += 1
                return super().call(*args, **kwargs)

        model = Counted([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        before = Counted.traces
        with _dataset(lambda i: (X[: 4 - i // 3], Y[: 4 - i // 3]), place) as d:
            model.fit(d, epochs=2, verbose=0)
        assert Counted.traces == before + 1


if BACKEND == "jax":

    def test_tensors_arrive_as_arrays_from_processes():
        def make(index):
            import jax.numpy as jnp

            return jnp.full((2, 2), index), jnp.array([index])

        with _dataset(make, ONE_PROCESS) as dataset:
            for number, (x, _) in enumerate(dataset):
                assert isinstance(x, np.ndarray)
                assert (x == number).all()

    @pytest.mark.parametrize("run", range(20 if FULL else 2))
    def test_asynchronous_dispatch_holds_batches_and_nothing_hangs(run):
        big = np.ones((64, 64, 64), "float32")
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(64),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        place = {**KINDS["process"], "max_queue_size": 2}
        label = np.ones((64, 1), "float32")
        with _dataset(lambda i: (big * i, label), place, 40) as dataset:
            model.fit(dataset, verbose=0, shuffle=False)


if BACKEND == "torch":

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_tensors_arrive_as_arrays_from_processes(dtype):
        def make(index):
            import torch

            small = torch.ones((2, 2)).to(getattr(torch, dtype))
            return torch.full((2, 2), index, requires_grad=False), small

        with _dataset(make, ONE_PROCESS) as dataset:
            for number, (x, small) in enumerate(dataset):
                assert isinstance(x, np.ndarray)
                assert (x == number).all()
                assert str(small.dtype) == dtype
                assert (small.astype("float32") == 1).all()


# -- batches and lengths that no model takes ----------------------------------

ROWS, TARGETS = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


class _Targetless(keras.Sequential):
    """Does not look at its targets."""

    def compute_loss(self, x=None, y=None, y_pred=None, **_):
        return keras.ops.mean(y_pred)


def _compiled(kind=keras.Sequential):
    model = kind([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _sum():
    inputs = keras.Input((2,)), keras.Input((2,))
    outputs = keras.layers.Dense(1)(keras.layers.Add()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


UNEVEN = {
    "fewer targets": (_compiled, (ROWS, TARGETS[:7])),
    "one target": (_compiled, (ROWS, TARGETS[:1])),
    "fewer weights": (_compiled, (ROWS, TARGETS, TARGETS[:7, 0])),
    "no targets": (_compiled, (ROWS, None)),
    "targets not looked at": (
        lambda: _compiled(_Targetless),
        (ROWS, TARGETS[:7]),
    ),
    "fewer in one input": (_sum, ((ROWS, ROWS[:7]), TARGETS)),
    "one in one input": (_sum, ((ROWS, ROWS[:1]), TARGETS)),
    "lists of numbers": (_compiled, (ROWS, [1.0] * 8)),
}


class _Stock(keras.utils.PyDataset):
    def __init__(self, make, length=2):
        super().__init__()
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def _error(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.filterwarnings("ignore:The structure of:UserWarning")
def test_rows_that_differ_are_refused_where_stock_keras_fails(name):
    make, batch = UNEVEN[name]
    stock = _error(make().fit, _Stock(lambda _: batch), verbose=0)
    ours = _error(
        make().fit, _dataset(lambda _: batch, KINDS["inline"]), verbose=0
    )
    assert (ours is None) == (stock is None), (ours, stock)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            (ROWS, TARGETS[:7]),
            "rows. Received: 8 in the inputs, 7 in the targets. ",
        ),
        (
            (ROWS, TARGETS, TARGETS[:7, 0]),
            "8 in the targets, 7 in the sample weights. ",
        ),
        (
            (ROWS, [1.0] * 8),
            "for 8 arrays without rows. Return arrays: `np.arr",
        ),
    ],
    ids=["targets", "weights", "lists"],
)
def test_a_batch_whose_rows_differ_is_named(odd, said, place):
    def make(index):
        even = (ROWS, TARGETS, TARGETS[:, 0])[: len(odd)]
        return odd if index == 2 else even

    with _dataset(make, place) as dataset:
        for method in ("evaluate", "fit"):
            # On JAX, an error costs a model its variables.
            run = getattr(_compiled(), method)
            error = _error(run, dataset, verbose=0)
            assert isinstance(error, ValueError)
            assert said in str(error)
            assert re.fullmatch(
                r"In batch 2 of epoch \d of Made\.", error.__notes__[-1]
            )


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((ROWS, TARGETS[:7]), "8 in the inputs, 7 in the targets. "),
        ((ROWS.tolist(), [1.0] * 8), "24 arrays without rows. Return arrays"),
        ((ROWS, [1.0] * 8), "8 arrays without rows. Return arrays"),
    ],
    ids=["targets", "lists", "lists as targets"],
)
def test_rows_that_differ_are_named_before_the_model_is_built(
    batch, said, method
):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with _dataset(lambda _: batch, KINDS["inline"]) as dataset:
        error = _error(getattr(model, method), dataset, verbose=0)
    assert said in str(error)
    assert re.fullmatch(
        r"In batch \d of epoch 0 of Made\.", error.__notes__[-1]
    )


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_batch_of_a_shape_that_the_model_does_not_take_is_named(
    method, place
):
    def make(index):
        return np.ones((8, 3 if index == 2 else 2), "float32"), TARGETS

    in_order = {"shuffle": False} if method == "fit" else {}
    with _dataset(make, place) as dataset:
        run = getattr(_compiled(), method)
        error = _error(run, dataset, verbose=0, **in_order)
    assert isinstance(error, ValueError)
    assert "shape (8, 3) where " in str(error)
    assert "In batch 2 of epoch 0 of Made." in error.__notes__


def test_a_model_may_take_batches_of_many_shapes(monkeypatch):
    checked, failure = [], shapes.failure

    def counted(*args):
        checked.append(failure(*args))
        return checked[-1]

    monkeypatch.setattr(shapes, "failure", counted)

    def make(index):
        return np.full((8, 4 + index, 2), index, "float32"), TARGETS

    def trained(kind):
        layers = [keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((None, 2)), *layers])
        model.compile("sgd", "mse")
        model.set_weights([np.ones((2, 1)), np.zeros(1)])
        return model.fit(kind, verbose=0, shuffle=False).history["loss"]

    with _dataset(make, KINDS["inline"], length=9) as dataset:
        assert trained(dataset) == trained(_Stock(make, 9))
    assert checked == [None] * (0 if BACKEND == "tensorflow" else 3)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_dataset_of_length_0_says_so(method, place):
    with (
        _dataset(lambda _: ROWS, place, length=0) as dataset,
        pytest.raises(ValueError, match=r"^Made has length 0: there is no"),
    ):
        getattr(_compiled(), method)(dataset, verbose=0)


def _after(start, caught):
    """What the warnings with a text say after it."""
    texts = [str(warning.message).partition(start) for warning in caught]
    return [rest for _, found, rest in texts if found]


def test_more_steps_than_batches_are_warned_of_with_a_way_out():
    model = _compiled()
    with (
        _dataset(lambda _: (ROWS, TARGETS), KINDS["inline"]) as dataset,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.filterwarnings("always", ".*ran out of data")
        model.fit(dataset, steps_per_epoch=6, verbose=0)
        model.evaluate(dataset, steps=5, verbose=0)
    said = _after("training. ", caught)
    assert said == [
        "Made has 4 batches, and the epoch ended after 4 of 6 steps. Leave out "
        "`steps_per_epoch`, and every epoch has all batches.",
        "Made has 4 batches, and the epoch ended after 4 of 5 steps. Leave out "
        "`steps`, and every epoch has all batches.",
    ]
    ran_out = [w for w in caught if "ran out of data" in str(w.message)]
    assert {w.filename for w in ran_out} == {__file__}


class Shrinks(FastPyDataset):
    """Each epoch has one batch less than the epoch before."""

    length = 4

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return ROWS, TARGETS

    def on_epoch_end(self):
        self.length -= 1


@pytest.mark.backend
def test_a_length_that_changes_is_not_blamed_on_the_number_of_steps():
    with (
        Shrinks(workers=0) as dataset,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.filterwarnings("always", ".*ran out of data")
        _compiled().fit(dataset, epochs=2, verbose=0)
    said = _after("training. ", caught)
    # From 3.16 on, Keras warns where `steps_per_epoch` was passed alone.
    assert said == [
        f"Shrinks has {count} batches, and the epoch ended after {count} "
        "steps. Its length has changed since Keras asked for it."
        for count in (() if IS_316 else (3, 2))
    ]
