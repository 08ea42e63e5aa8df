"""Where batches are built: every kind of workers but Ray, in every number.

Tests of any folder take their kinds of workers from here.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

FULL = bool(os.environ.get("KERAS_FASTDATA_FULL"))  # the long ones as well
_BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
# Marks of what starts Python again and again: with JAX that takes half as long.
LONG_BUT_ON_JAX = () if _BACKEND == "jax" else pytest.mark.long
# Marks of what a test for every backend does without the backend as well.
NO_TRAINER = () if _BACKEND == "tensorflow" else pytest.mark.long
# The environment of a script that does not train: Keras without TensorFlow is
# imported in a third of the time. Its NumPy backend needs JAX.
HAS_JAX = importlib.util.find_spec("jax") is not None
NO_TRAINING = {"KERAS_BACKEND": "numpy"} if HAS_JAX else {}
# Who builds batches: the calling thread, or two workers.
KINDS = {
    "inline": {"workers": 0},
    "thread": {"workers": 2},
    "process": {"workers": 2, "use_multiprocessing": True},
}
_PROCESS = KINDS["process"]
EVERY_KIND = {
    **KINDS,
    "spawn": {**_PROCESS, "start_method": "spawn"},
    "portable": {**_PROCESS, "start_method": "portable"},
}
if hasattr(os, "fork"):
    EVERY_KIND["fork"] = {**_PROCESS, "start_method": "fork"}
# The same, by how many there are.
PLACES = {
    "inline": {"workers": 0},
    "1 thread": {"workers": 1},
    "4 threads": {"workers": 4},
    "1 process": {"workers": 1, "use_multiprocessing": True},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
    "4 processes": {"workers": 4, "use_multiprocessing": True},
}


def quickly(values, *quick):
    """Parameters of a test, of which the quick run takes those in `quick`."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.long)
        for value in values
    ]


# For what a trainer takes from workers. JAX's and PyTorch's iterate over the
# batches, wherever those were built; TensorFlow has a graph between.
in_each_trainer = quickly(
    KINDS, *(KINDS if _BACKEND == "tensorflow" else ["process"])
)

# What these find, the others find as a rule.
everywhere = pytest.mark.parametrize(
    "place", quickly(PLACES, "inline", "1 thread", "2 processes")
)
somewhere = pytest.mark.parametrize("place", ["inline", "2 processes"])
