"""Arrays in a batch that something else refers to are copied, others not."""

from __future__ import annotations

import array
import collections
import gc
import threading

import keras
import numpy as np
import pytest
import scipy.sparse

from keras_fastdata import FastPyDataset
from keras_fastdata.memory.arena import aligned_empty
from keras_fastdata.memory.ownership import take

BUFFER = np.zeros((4, 3), "float32")
Pair = collections.namedtuple("Pair", ["x", "y"])


def ones():
    return np.ones((4, 3), "float32")


def ids(batch):
    found = [id(leaf) for leaf in keras.tree.flatten(batch)]
    gc.collect()  # PyTorch's function leaves a cycle that refers to the leaves
    return found


@pytest.mark.parametrize(
    "make",
    [
        ones,
        lambda: (ones(), ones()),
        lambda: Pair(ones(), {"a": [ones()]}),
        lambda: ones()[1:],
        lambda: ones().reshape(-1)[::2].T,
        lambda: (lambda x: (x, x))(ones()),
        lambda: aligned_empty((4, 3)),
        lambda: np.frombuffer(b"\0" * 8),
        lambda: np.broadcast_to(np.ones(3), (4, 3)),
        lambda: memoryview(b"\0" * 8),
        lambda: "text",
    ],
    ids=[
        "array",
        "tuple",
        "nested",
        "slice",
        "view of a view",
        "twice the same",
        "aligned",
        "over bytes",
        "broadcast",
        "memory of bytes",
        "text",
    ],
)
def test_what_only_the_batch_refers_to_is_not_copied(make):
    batches = [make()]
    before = ids(batches[0])
    assert ids(take(batches)) == before
    assert not batches


@pytest.mark.parametrize(
    "make",
    [
        lambda kept: kept,
        lambda kept: kept[:2],
        lambda kept: kept.reshape(-1)[::2],
        lambda kept: memoryview(kept),
        lambda kept: np.frombuffer(kept, "uint8"),
        lambda kept: np.broadcast_to(kept, (2, 4, 3)),
        lambda kept: np.ma.array(kept, copy=False),
    ],
    ids=[
        "array",
        "slice",
        "view of a view",
        "memory",
        "over memory",
        "broadcast",
        "masked",
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda leaf: leaf,
        lambda leaf: (leaf, ones()),
        lambda leaf: Pair(ones(), {"a": [leaf]}),
        lambda leaf: collections.deque([leaf]),
    ],
    ids=["bare", "tuple", "nested", "deque"],
)
def test_a_buffer_that_somebody_keeps_is_copied(make, wrap):
    kept = ones()
    batches = [wrap(make(kept))]
    kind = type(batches[0])
    batch = take(batches)
    kept[:] = 7
    if wrap(0) != 0:
        assert type(batch) is kind
    for leaf in keras.tree.flatten(batch):
        assert 7 not in np.asarray(leaf).view("float32")


def test_a_structure_that_somebody_keeps_is_copied_with_its_arrays():
    kept = {"x": ones(), "y": (ones(),)}
    batch = take([kept])
    kept["x"][:] = kept["y"][0][:] = 7
    assert batch["x"].max() == batch["y"][0].max() == 1


def test_only_the_array_that_is_kept_is_copied():
    batches = [(ones(), BUFFER[:2])]
    fresh = id(batches[0][0])
    x, y = take(batches)
    assert id(x) == fresh
    assert not np.shares_memory(y, BUFFER)


@pytest.mark.parametrize("kept", [bytearray(b"abc"), array.array("f", [1, 2])])
def test_a_kept_buffer_of_another_kind_is_copied_as_what_it_is(kept):
    batch = take([(kept,)])
    assert type(batch[0]) is type(kept)
    assert batch[0] == kept
    assert batch[0] is not kept


@pytest.mark.parametrize(
    "kept", [[1, 2], {"a": 1}, collections.deque([1]), {"a": [1, None]}]
)
def test_a_structure_of_numbers_that_somebody_keeps_is_copied(kept):
    batch = take([(kept, 0)])
    assert batch[0] == kept
    assert batch[0] is not kept


def test_arrays_in_an_object_array_and_records_that_are_kept_are_copied():
    kept = np.array([ones(), "a", None, {"x": ones()}], dtype=object)
    records = np.ones(2, [("a", "f4"), ("b", "i4")])
    objects, record = take([(kept, records[1])])
    kept[0][:] = kept[3]["x"][:] = 7
    records["a"] = 7
    assert objects[0].max() == objects[3]["x"].max() == record["a"] == 1
    assert objects[1:3].tolist() == ["a", None]


class Logarithms(dict):
    """Changes what it is given."""

    def __setitem__(self, key, value):
        super().__setitem__(key, np.log(value))


def test_a_kept_dict_of_another_kind_is_copied_with_its_values():
    counter = collections.Counter(a=2, b=1)
    batch = take([(counter, 0)])
    assert batch[0] == counter
    logarithms = Logarithms()
    logarithms["a"] = np.e * ones()
    batch = take([(logarithms, 0)])
    logarithms["a"] = 7 * ones()
    assert type(batch[0]) is Logarithms
    np.testing.assert_allclose(batch[0]["a"], ones())


def test_a_mask_that_is_filled_again_is_copied():
    mask = np.zeros(3, bool)
    batch = take([(np.ma.array(np.ones(3), mask=mask, copy=False),)])
    mask[:] = True
    assert batch[0].tolist() == [1, 1, 1]


def test_a_sparse_matrix_that_is_filled_again_is_copied():
    kept = scipy.sparse.csr_matrix(np.eye(3))
    batch = take([{"x": kept}])
    kept.data[:] = 7
    assert batch["x"].max() == 1


class Table:
    """As one of pandas."""

    __module__ = "pandas.core.frame"

    def __init__(self, rows):
        self.rows = rows

    def copy(self):
        return Table(list(self.rows))


def test_a_table_that_is_filled_again_is_copied():
    kept = Table([1, 2])
    batch = take([(kept, ones())])
    kept.rows[:] = [7, 7]
    assert batch[0].rows == [1, 2]


def test_an_array_that_cannot_be_written_to_is_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", BUFFER)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(take([mapped[1:3]]), mapped)


def test_arrays_of_jax_over_a_kept_buffer_are_copied():
    jax = pytest.importorskip("jax")
    buffer = aligned_empty((4, 3), "float32")
    buffer[:] = 1
    kept = jax.device_put(buffer)
    taken = take([(kept, jax.random.key(0))])[0]
    buffer[:] = 2
    assert isinstance(taken[0], jax.Array)
    assert (np.asarray(taken[0]) == 1).all()
    assert (np.asarray(kept) == 2).all()  # JAX uses the buffer itself


def _is_copied(variable):
    batch = take([(variable, {"a": variable})])
    variable.assign(ones() * 2)
    return all(
        keras.ops.convert_to_numpy(leaf).tolist() == ones().tolist()
        for leaf in (batch[0], batch[1]["a"])
    )


@pytest.mark.backend
def test_a_variable_of_keras_that_is_assigned_again_is_copied():
    assert _is_copied(keras.Variable(ones()))


def test_a_variable_of_tensorflow_that_is_assigned_again_is_copied():
    tensorflow = pytest.importorskip("tensorflow")
    assert _is_copied(tensorflow.Variable(ones()))


def test_a_sparse_matrix_that_is_a_dict_is_no_structure():
    matrix = scipy.sparse.dok_array((4, 3), dtype="float32")
    matrix[1, 2] = 5
    taken = take([(matrix, ones())])[0]
    assert (taken.toarray() == matrix.toarray()).all()


@pytest.mark.parametrize("how", ["detach", "data", "inference", "alone"])
def test_tensors_of_torch_that_share_memory_are_copied(how):
    torch = pytest.importorskip("torch")
    with torch.inference_mode(how == "inference"):
        kept = torch.ones(4)
        parts = {
            "detach": kept.detach,
            "data": lambda: kept.data,
            "inference": lambda: kept[:2],
            "alone": lambda: torch.ones(2),
        }
        batches = [parts[how]()]
        address = batches[0].data_ptr()
        batch = take(batches)
        kept.fill_(2)
    assert batch.tolist() == [1] * len(batch)
    assert (batch.data_ptr() == address) == (how == "alone")


def test_tensors_of_torch_are_copied_alike():
    torch = pytest.importorskip("torch")
    kept = torch.ones(4)
    shared = ones()
    batches = [(kept, kept[:2], torch.from_numpy(shared), torch.ones(4))]
    fresh = batches[0][3].data_ptr()
    batch = take(batches)
    kept[:] = 7
    shared[:] = 7
    assert [float(tensor.max()) for tensor in batch] == [1, 1, 1, 1]
    assert batch[3].data_ptr() == fresh


class Refilled(FastPyDataset):
    """Batch i is full of i, in one buffer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.buffer = np.zeros((4, 3), "float32")
        self.built = threading.Semaphore(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.buffer[:] = index
        self.built.release()
        return self.buffer


def test_a_batch_that_waits_keeps_its_values_while_the_next_is_built():
    with Refilled(workers=1) as dataset:
        batches = iter(dataset)
        first = next(batches)
        for _ in range(6):
            dataset.built.acquire()
        found = [first.max(), *(batch.max() for batch in batches)]
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.backend
@pytest.mark.parametrize("workers", [0, 1])
def test_predict_sees_a_buffer_that_is_filled_again_as_stock_keras_does(
    workers,
):
    model = keras.Sequential([keras.layers.Flatten()])
    with Refilled(workers=workers) as dataset:
        found = model.predict(dataset, verbose=0)
    assert found[::4, 0].tolist() == [0, 1, 2, 3, 4, 5]
