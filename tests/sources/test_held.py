"""What people hold, read by `SampleDataset` in every way."""

from __future__ import annotations

import functools
import importlib.util
import itertools

import numpy as np
import pytest
from held_samples import COUNT, HELD
from matrix import WAYS, assert_exactly_once, same
from places import KINDS

from keras_fastdata import SampleDataset

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_QUICK = {
    ("inline", "shuffled"): HELD,
    ("thread", "sharded"): ("pandas_frame", "arrow_dataset"),
    # Some libraries take seconds to be imported in a worker.
    ("process", "resumed"): ("pandas_frame", "arrow_dataset"),
}


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_warm():
    """Has zarr start its thread, which it keeps."""
    if importlib.util.find_spec("zarr"):
        import zarr

        zarr.zeros(1)[:]


@pytest.mark.parametrize(
    ("held", "place", "way"),
    [
        pytest.param(
            held,
            *pair,
            marks=() if held in _QUICK.get(pair, ()) else pytest.mark.long,
        )
        for held in HELD
        for pair in itertools.product(KINDS, WAYS)
    ],
)
def test_each_sample_comes_once(held, place, way, tmp_path):
    kwargs, numbers = HELD[held](tmp_path)
    make = functools.partial(SampleDataset, batch_size=3, **kwargs)
    assert_exactly_once(make, numbers, COUNT, place, way)


_TABLES = (
    *("pandas_frame", "polars_frame", "arrow_table", "arrow_dataset"),
    *("hugging_face", "dict_rows"),
)


@pytest.mark.parametrize("held", _TABLES)
def test_the_same_rows_give_the_same_batch_whatever_holds_them(held, tmp_path):
    kwargs, _ = HELD[held](tmp_path)
    x, y = SampleDataset(batch_size=4, **kwargs)[1]
    assert y.tolist() == [4, 5, 6, 7]
    assert {name: str(part.dtype) for name, part in x.items()} == {
        "number": "int64",
        "half": "float32",
        "letter": "<U1",
        "pair": "int64",
        "many": "int64",
    }
    np.testing.assert_array_equal(x["half"], [2, 2.5, 3, 3.5])
    assert x["letter"].tolist() == ["e", "f", "g", "h"]
    assert x["pair"].tolist() == [[4, -4], [5, -5], [6, -6], [7, -7]]
    assert x["many"].tolist() == [[4, 4, 0], [5, 5, 5], [6, 0, 0], [7, 7, 0]]


def _unchanged(row):
    return row


@pytest.mark.parametrize("held", [*_TABLES, "structured_array"])
def test_a_transform_that_changes_nothing_changes_no_byte(held, tmp_path):
    kwargs, _ = HELD[held](tmp_path)
    same(
        SampleDataset(batch_size=4, transform=_unchanged, **kwargs)[1],
        SampleDataset(batch_size=4, **kwargs)[1],
    )
