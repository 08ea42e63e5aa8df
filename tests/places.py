"""Where batches are built: every kind and number of workers."""

from __future__ import annotations

import pytest

PLACES = {
    "inline": {"workers": 0},
    "1 thread": {"workers": 1},
    "4 threads": {"workers": 4},
    "1 process": {"workers": 1, "use_multiprocessing": True},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
    "4 processes": {"workers": 4, "use_multiprocessing": True},
}
everywhere = pytest.mark.parametrize("place", PLACES)
somewhere = pytest.mark.parametrize("place", ["inline", "2 processes"])
