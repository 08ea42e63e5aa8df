"""Keras's own tests of its dataset adapter, run on our class.

The installed Keras ships them. `FastPyDataset` takes the place of `PyDataset`
in their source; what they then wrap in Keras's adapter gets ours. All 34 of
Keras 3.15 run, but for those that Keras itself skips; two of them in the full
run alone.

They import all backends. The quick run has them on PyTorch, whose import takes
longest.
"""

from __future__ import annotations

import importlib.util
import pathlib
import types
import weakref

import keras
import pytest
from places import FULL

from keras_fastdata import FastPyDataset

if keras.backend.backend() != "torch" and not FULL:
    pytest.skip("on PyTorch, and in the full run", allow_module_level=True)
pytest.importorskip("jax")
pytest.importorskip("tensorflow")
pytest.importorskip("torch")

_NAME = "keras.src.trainers.data_adapters.py_dataset_adapter_test"
_BASE = "py_dataset_adapter.PyDataset)"
# `__getitem__` yields there where it should return: Keras's test looks at no
# batch. Ours is refused, as it is no batch.
_YIELDS = "yield np.ones((2, 11)"
_LONG = [
    "test_speedup",  # sleeps for seconds
    "test_basic_flow_multiprocessing_true_false",  # as the one without an end
]


@pytest.fixture(autouse=True)
def _tracebacks_are_filtered_again():
    """Keras's test case turns its filter of tracebacks off, and not on."""
    yield
    keras.config.enable_traceback_filtering()


def _keras_tests() -> type:
    """Keras's test case, with our class as the base of its datasets."""
    found = importlib.util.find_spec(_NAME)
    if found is None or found.origin is None:
        pytest.skip("this Keras ships no tests", allow_module_level=True)
    source = pathlib.Path(found.origin).read_text()
    assert source.count(_BASE) >= 5
    source = source.replace(_YIELDS, _YIELDS.replace("yield", "return"))
    # Known to nobody by name, so that workers need not import its imports.
    module = types.ModuleType("keras_own_tests")
    vars(module)["FastPyDataset"] = FastPyDataset
    exec(source.replace(_BASE, "FastPyDataset)"), vars(module))
    case = module.PyDatasetAdapterTest
    for name in _LONG:
        setattr(case, name, pytest.mark.long(getattr(case, name)))
    return pytest.mark.backend(case)


@pytest.fixture(autouse=True)
def _datasets_are_closed(monkeypatch):
    """Keras's tests break off; a batch of one of them holds its dataset."""
    made = weakref.WeakSet()
    init = FastPyDataset.__init__

    def noted(self, *args, **kwargs):
        made.add(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(FastPyDataset, "__init__", noted)
    yield
    for dataset in list(made):
        dataset.close()


PyDatasetAdapterTest = _keras_tests()
