"""A batch read back is the batch that was written."""

from __future__ import annotations

import contextlib
import gc
import pickle

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from places import FULL

from keras_fastdata.memory import codec, layout
from keras_fastdata.memory.arena import Arena


@pytest.fixture(scope="module")
def arena():
    with contextlib.closing(Arena(warm_slots=4, hold_limit=8)) as made:
        yield made


def _round_trip(batch, arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    return codec.decode(codec.encode([batch], writer), arena, slot)


def _same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        _same(list(one.values()), list(other.values()))
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _same(left, right)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.dtype.hasobject:
            assert one.tolist() == other.tolist()
        else:
            assert one.tobytes() == other.tobytes()
    else:
        assert one == other or one != one


_DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.array_dtypes(max_size=3),
    hnp.unicode_string_dtypes(endianness="<"),
    hnp.byte_string_dtypes(endianness="<"),
    st.just(np.dtype(ml_dtypes.bfloat16)),
    st.just(np.dtype(ml_dtypes.float8_e4m3fn)),
)


@st.composite
def _arrays(draw):
    dtype = draw(_DTYPES)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
    size = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).bytes(size)
    if not size:
        array = np.zeros(shape, dtype)
    elif dtype.kind == "U":
        array = np.full(shape, "ä" * (dtype.itemsize // 4), dtype)
    elif dtype.kind == "b":
        array = np.frombuffer(raw, np.uint8).reshape(shape) % 2 == 1
    else:
        array = np.frombuffer(raw, dtype).reshape(shape)
    array = np.asarray(array)  # a comparison of one number is no array
    form = draw(st.sampled_from(["C", "F", "reversed", "strided", "readonly"]))
    if form == "F":
        array = np.asfortranarray(array)
    elif form == "reversed" and array.ndim:
        array = array[::-1]
    elif form == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif form == "readonly":
        array = array.copy()
        array.flags.writeable = False
    return array


_LEAVES = st.one_of(
    _arrays(),
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.booleans(),
)
_BATCHES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=200 if FULL else 60)
@given(batch=_BATCHES)
def test_any_nested_batch_survives(batch, arena):
    _same(_round_trip(batch, arena), batch)


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("shape", [(4, 2), (0, 2)])
def test_a_memoryview_arrives_as_an_array(shape, order, arena):
    array = np.arange(np.prod(shape)).reshape(shape).astype("complex64")
    array = array[::2] if order == "strided" else array.copy(order)
    back = _round_trip({"x": memoryview(array)}, arena)["x"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2020-01-01", "NaT"], "M8[s]"),
        np.array([1, 2], "m8[ns]"),
        np.array([None, "a", [1]], object),
        np.array([(1, 2.0)], [("a", "i4"), ("b", ">f8")]),
        np.zeros((3, 0, 2)),
        np.array(5),
        np.arange(12, dtype=">i4").reshape(3, 4)[:, ::-2],
        np.float64(3.0),
        np.array(["ab", "c"], np.dtypes.StringDType()),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda a: str(getattr(a, "dtype", type(a))),
)
def test_unusual_arrays_survive(array, arena):
    back = _round_trip((array,), arena)[0]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_large_arrays_of_every_layout_survive(arena):
    base = np.random.default_rng(0).normal(size=(200, 300)).astype("float32")
    for array in (base, base.T, base[::-1, ::3], np.asfortranarray(base)):
        _same(_round_trip([array], arena), [array])


def test_large_object_arrays_travel_in_the_slot(arena):
    words = np.array([f"word {i}" * 10 for i in range(5000)], object)
    _same(_round_trip((words,), arena), (words,))


def test_sparse_matrices_survive(arena):
    matrix = scipy.sparse.random(300, 300, 0.5, "csr", random_state=0)
    back = _round_trip((matrix,), arena)[0]
    assert type(back) is type(matrix)
    assert (back != matrix).nnz == 0


def test_arrays_come_back_writable_and_aligned(arena):
    x = np.ones((100, 333), "float64")
    back, small = _round_trip((x, np.ones(3)), arena)
    assert back.flags.writeable
    assert small.flags.writeable
    assert back.ctypes.data % 64 == 0
    assert small.ctypes.data % 64 == 0


def test_one_array_twice_in_a_batch_is_sent_once(arena):
    x = np.ones(100_000)
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    encoded = codec.encode([(x, x)], writer)
    assert encoded.used < 2 * x.nbytes
    one, other = codec.decode(encoded, arena, slot)
    assert one is other


def test_an_array_made_by_empty_is_not_copied(arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    x = writer.empty((100, 1000))
    x[:] = 3
    batch = [(x, x[10:20])]
    del x
    encoded = codec.encode(batch, writer)
    assert encoded.used == 400_000
    assert not encoded.retained
    whole, part = codec.decode(encoded, arena, slot)
    assert (whole == 3).all()
    assert part.shape == (10, 1000)


def test_an_array_made_by_empty_and_kept_is_copied(arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    kept = writer.empty((100, 1000))
    kept[:] = 3
    encoded = codec.encode([(kept,)], writer)
    assert encoded.retained
    kept[:] = 4
    assert (codec.decode(encoded, arena, slot)[0] == 3).all()


def test_a_slot_is_free_only_when_its_last_view_has_died(arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    encoded = codec.encode([{"x": np.ones((100, 1000))}], writer)
    view = codec.decode(encoded, arena, slot)["x"][5:6, ::2]
    gc.collect()
    assert arena.take() != slot
    assert (view == 1).all()
    del view
    gc.collect()
    assert arena.take() == slot


def test_a_crowded_arena_hands_out_private_copies():
    arena = Arena(warm_slots=2, hold_limit=3)
    arena.close()
    held = []
    for number in range(10):
        slot = arena.take()
        writer = codec.SlotWriter(arena.segment, slot, in_place=True)
        encoded = codec.encode([np.full((100, 1000), number)], writer)
        held.append(codec.decode(encoded, arena, slot))
    assert arena.crowded
    assert [int(x[0, 0]) for x in held] == list(range(10))
    assert all((x == n).all() for n, x in enumerate(held))


def test_small_arrays_do_not_hold_a_slot(arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    batch = np.ones((100, 1000)), np.arange(5)
    x, y = codec.decode(codec.encode([batch], writer), arena, slot)
    del x
    gc.collect()
    assert arena.take() == slot
    assert y.tolist() == [0, 1, 2, 3, 4]


# -- plain batches -----------------------------------------------------------


def _structure(batch, arena):
    slot = arena.take()
    writer = codec.SlotWriter(arena.segment, slot, in_place=True)
    encoded = codec.encode([batch], writer)
    arena.free(slot)
    return encoded.structure


@pytest.mark.parametrize(
    "batch",
    [
        np.ones((4, 3)),
        (np.ones((4, 3)), np.ones(4, "int64")),
        ([{"a": np.ones(3), "b": (np.ones(2), [np.ones(1)])}], np.ones(2)),
        (),
        {"image": np.ones((2, 3)).T},
    ],
    ids=["array", "pair", "nested", "nothing", "fortran"],
)
def test_plain_batches_that_look_alike_have_one_layout(batch, arena):
    structure = _structure(batch, arena)
    assert layout.unpack(structure) is layout.unpack(_structure(batch, arena))
    assert layout.unpack(structure) is not None
    _same(_round_trip(batch, arena), batch)


_TWICE = np.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        (np.ones(2), None),
        (np.ones(2), 3),
        (_TWICE, _TWICE),
        {1: np.ones(2)},
        (np.zeros((0, 2)),),
        (np.array(["a", None]),),
    ],
    ids=["None", "number", "one array twice", "keys", "empty", "objects"],
)
def test_any_other_batch_is_pickled(batch, arena):
    assert layout.unpack(_structure(batch, arena)) is None
    _same(_round_trip(batch, arena), batch)


def test_a_list_that_is_there_twice_is_one_list_on_arrival(arena):
    parts = [np.ones(2)]
    one, other = _round_trip((parts, parts), arena)
    assert one is other


@pytest.mark.parametrize("batch", ["plain", "pickled"])
def test_a_read_only_array_stays_so(batch, arena):
    array = np.ones(3)
    array.flags.writeable = False
    extra = np.ones(2) if batch == "plain" else None
    back, _ = _round_trip((array, extra), arena)
    assert not back.flags.writeable


def test_batches_of_ever_new_shapes_do_not_fill_memory(arena):
    for length in range(1, 1000):
        _same(_round_trip((np.ones(length),), arena), (np.ones(length),))
    assert len(layout._packed) <= 256
    assert len(layout._layouts) <= 256


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
    ],
)
@pytest.mark.parametrize("kind", ["plain", "pickled"])
def test_arrays_of_extension_types_survive(dtype, kind, arena):
    array = np.arange(6).astype(dtype)
    extra = np.ones(1) if kind == "plain" else None
    back, _ = _round_trip((array, extra), arena)
    assert back.dtype == dtype
    assert back.tolist() == array.tolist()


@pytest.mark.parametrize("kind", ["plain", "pickled"])
def test_a_copy_of_what_could_not_be_written_to_can_be(kind, arena):
    array = np.broadcast_to(np.arange(3.0), (4, 3))
    extra = np.ones(1) if kind == "plain" else None
    back, _ = _round_trip((array, extra), arena)
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_structured_types_that_are_equal_stay_different(arena):
    plain = np.zeros(2, [("a", "i4")])
    record = plain.astype(np.dtype((np.record, plain.dtype)))
    for array in (plain, record, plain):
        back, _ = _round_trip((array, np.ones(1)), arena)
        assert back.dtype.type is array.dtype.type


def test_bytes_are_never_taken_for_an_array_of_objects():
    leaf = layout.Leaf((1,), "O", "C", True)
    for structure in (
        layout.pack(leaf),
        layout.pack((dict, ("x",), (leaf,))),
        pickle.dumps(_Rebuilt("O")),
        pickle.dumps(_Rebuilt("T")),
    ):
        with pytest.raises(ValueError, match="array of type"):
            codec.assemble(structure, [np.zeros(64, np.uint8)])


class _Rebuilt:
    """Its pickle makes an array of a type over bytes."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __reduce__(self):
        return codec.rebuild_array, (bytes(64), self.dtype, (1,), "C")
