"""Modules that a program changes at random are seen by every kind of worker."""

from __future__ import annotations

import pathlib

import pytest

_SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "random_changes.py"
_KINDS = [
    "process",
    "thread",
    "cached inline",
    "cached thread",
    "cached process",
]
_QUICK = {("process", 1), ("process", 6), ("cached inline", 2)}


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        (kind, seed)
        if (kind, seed) in _QUICK
        else pytest.param(kind, seed, marks=pytest.mark.long)
        for kind in _KINDS
        for seed in range(12)
    ],
)
def test_batches_have_the_values_that_modules_have_when_an_epoch_begins(
    kind, seed, zygote
):
    done = zygote.run(_SCRIPT, str(seed), kind)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
