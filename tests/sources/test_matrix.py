"""The ready-made datasets over plain sources, in every way to read them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from matrix import assert_exactly_once, in_every_way

from keras_fastdata import ArrayDataset, SampleDataset

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@in_every_way
def test_a_list(place, way):
    make = functools.partial(SampleDataset, list(range(20)), 3)
    assert_exactly_once(make, np.asarray, 20, place, way)


@in_every_way
def test_arrays(place, way):
    make = functools.partial(ArrayDataset, np.arange(20), batch_size=3)
    assert_exactly_once(make, np.asarray, 20, place, way)


def test_the_check_sees_a_sample_that_is_missing():
    make = functools.partial(SampleDataset, [*range(18), 0, 1], 3)
    with pytest.raises(AssertionError):
        assert_exactly_once(make, np.asarray, 20, "inline", "shuffled")


@pytest.mark.parametrize("way", ["shuffled", "resumed", "sharded"])
def test_the_check_sees_bytes_that_differ(way):
    def make(workers, **kwargs):
        dtype = "float32" if workers else "float64"
        source = np.arange(20).astype(dtype)
        return SampleDataset(source, 3, workers=workers, **kwargs)

    with pytest.raises(AssertionError):
        assert_exactly_once(make, np.asarray, 20, "thread", way)
