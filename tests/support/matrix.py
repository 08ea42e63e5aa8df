"""Every way to read a dataset: where batches are built, and which are read.

A test of a source or of a format takes `in_every_way` and calls
`assert_exactly_once`. The quick run has each place and each way once, the full
run has all pairs.
"""

from __future__ import annotations

import itertools
import json

import keras
import numpy as np
import pytest
from places import KINDS

WAYS = ["shuffled", "resumed", "sharded"]
_QUICK = {("inline", "shuffled"), ("thread", "sharded"), ("process", "resumed")}
_SHARDS = 3

in_every_way = pytest.mark.parametrize(
    ("place", "way"),
    [
        pytest.param(*pair, marks=() if pair in _QUICK else pytest.mark.long)
        for pair in itertools.product(KINDS, WAYS)
    ],
)


def assert_exactly_once(make, numbers, samples, place, way, **kwargs):
    """Asserts that each sample comes once, with the same bytes everywhere.

    Args:
        make: A function that takes arguments of `FastPyDataset` by name, and
            `shuffle=True`, and returns a new dataset.
        numbers: A function that returns the numbers of the samples in a batch.
        samples: The number of samples; they are numbered from 0.
        place: A key of `places.KINDS`.
        way: One of `WAYS`.
        **kwargs: More arguments for `make`. `shuffle=None` leaves out the
            argument `shuffle`.
    """
    kwargs = {"shuffle": True, "seed": 5, **kwargs}
    if kwargs["shuffle"] is None:
        del kwargs["shuffle"]

    def made(**more):
        return make(**kwargs, **{**KINDS[place], **more})

    with made(workers=0, use_multiprocessing=False) as dataset:
        wanted = [list(dataset), list(dataset)]
    for epoch in wanted:
        found = np.concatenate([np.ravel(numbers(batch)) for batch in epoch])
        assert sorted(found.tolist()) == list(range(samples))
    assert len(wanted[0]) > _SHARDS, "use more samples, or smaller batches"
    check = {"shuffled": _shuffled, "resumed": _resumed, "sharded": _sharded}
    check[way](made, wanted)


def same(found, wanted):
    """Asserts that two batches, or lists of them, have the same bytes."""

    def same_leaf(one, other):
        if hasattr(one, "dtype"):
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            assert type(one) is type(other)
            assert one == other

    keras.tree.map_structure(same_leaf, found, wanted)


def _shuffled(made, wanted):
    with made() as dataset:
        same([list(dataset), list(dataset)], wanted)


def _resumed(made, wanted):
    with made() as dataset:
        iterator = iter(dataset)
        same([next(iterator), next(iterator)], wanted[0][:2])
        state = json.loads(json.dumps(dataset.state_dict()))
        del iterator
    with made() as dataset:
        dataset.load_state_dict(state)
        same([list(dataset), list(dataset)], [wanted[0][2:], wanted[1]])


def _sharded(made, wanted):
    shards = []
    for index in range(_SHARDS):
        with made(shard=(index, _SHARDS)) as dataset:
            shards.append(list(dataset))
    steps = zip(*shards, strict=True)
    found = list(itertools.chain.from_iterable(steps))
    epoch = wanted[0]
    # Batches from the beginning fill up the last step.
    same(found, epoch + epoch[: len(found) - len(epoch)])
