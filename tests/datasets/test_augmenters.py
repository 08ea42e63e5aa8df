"""Augmentation libraries as they are: other images in every epoch."""

from __future__ import annotations

import importlib.util

import pytest
from augmenter_samples import LIBRARIES, Loader

from keras_fastdata import accelerate


def _images(library, workers, **place):
    with accelerate(Loader(library), workers, seed=1, **place) as dataset:
        epochs = [batch for _ in range(3) for batch in dataset]
    return [image.tobytes() for batch in epochs for image in batch]


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_draws_alike_in_workers_and_never_twice(library, workers):
    """Those that the tests do not require are there in the full run."""
    if importlib.util.find_spec(library) is None:
        pytest.skip("It is not installed.")
    inline = _images(library, 0)
    assert len(set(inline)) == len(inline) == 3 * 48
    # A fork has the library; a fresh worker would take seconds to import it.
    forked = {"use_multiprocessing": True, "start_method": "fork"}
    assert _images(library, workers, **forked) == inline
