"""A large list hides no other state of a dataset, or outside of it."""

from __future__ import annotations

import large_samples
import numpy as np
import pytest
from large_samples import Boxes, Draws, Image, Node, images_with
from places import KINDS

pytestmark = pytest.mark.usefixtures("kept_forkserver")
CACHED = {"workers": 0, "cache": "memory"}


@pytest.mark.parametrize("kind", [*KINDS.values(), CACHED])
def test_what_comes_behind_many_boxes_is_the_programs_in_each_epoch(
    kind, monkeypatch
):
    monkeypatch.setattr(large_samples, "scale", 10)
    monkeypatch.setattr(large_samples, "tree", Node(900))
    with Boxes(images_with(boxes=5), seed=1, **kind) as dataset:
        seen = [list(dataset)]
        monkeypatch.setattr(large_samples, "scale", 100)
        seen.append(list(dataset))
        dataset.weights["car"] = 7
        seen.append(list(dataset))
        large_samples.tree.number = 8
        seen.append(list(dataset))
    expected = [[10, 1, 1], [100, 1, 1], [100, 7, 1], [100, 7, 8]]
    assert np.array(seen).tolist() == [[one, one] for one in expected]


@pytest.mark.parametrize("images", ["dicts", "objects"])
def test_generators_behind_many_boxes_are_seeded_for_each_batch(images):
    drawn = []
    for kind in (KINDS["inline"], KINDS["process"]):
        held = images_with(boxes=30, images=1_000)
        if images == "objects":
            held = [Image([Node() for _ in range(30)]) for _ in held]
        rngs = [[[[[np.random.default_rng(3)]]]]]
        with Draws(held, rngs, seed=1, **kind) as dataset:
            drawn.append(np.array([list(dataset), list(dataset)]))
    assert len(np.unique(drawn[0])) == 8
    assert np.array_equal(*drawn)
