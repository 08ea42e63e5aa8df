"""Workers have what modules chose when the program imported them."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest
from places import KINDS
from samples import Holds

from keras_fastdata import FastPyDataset

pytestmark = pytest.mark.usefixtures("kept_forkserver")
_PROCESSES = KINDS["process"]
_DATA = """
import dataclasses, functools, typing
import numpy as np
import choice_config as config
from keras_fastdata import FastPyDataset

{}

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array([value(), config.size])
"""
# Each has a function `value` that returns the size at the import.
_CHOICES = {
    "functions": """
if config.size == 1:
    def value(): return 1
else:
    def value(): return 2
""",
    "lambdas": "value = (lambda: 1) if config.size == 1 else (lambda: 2)",
    "classes": """
if config.size == 1:
    class Chosen:
        def value(self): return 1
else:
    class Chosen:
        def value(self): return 2
def value(): return Chosen().value()
""",
    "a default value of a static method": """
class Has:
    @staticmethod
    def value(size=config.size): return size
def value(): return Has.value()
""",
    "a default value of a class method": """
class Has:
    @classmethod
    def value(cls, size=config.size): return size
def value(): return Has.value()
""",
    "a default value of a property": """
class Has:
    def _value(self, size=config.size): return size
    value = property(_value)
    del _value
def value(): return Has().value
""",
    "a default value of a cached function": """
@functools.lru_cache
def value(size=config.size): return size
""",
    "a field of a named tuple": """
class Has(typing.NamedTuple):
    size: int = config.size
def value(): return Has().size
""",
    "a field of a dataclass": """
@dataclasses.dataclass
class Has:
    size: int = config.size
    more: list = dataclasses.field(default_factory=list)
def value(): return Has().size + len(Has().more)
""",
    "a decorator": """
def times(size):
    def decorate(function):
        @functools.wraps(function)
        def multiply(*args): return function(*args) * size
        return multiply
    return decorate
class Has:
    @classmethod
    @times(config.size)
    def value(cls): return 1
def value(): return Has.value()
""",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module; the test's end removes all."""
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        written.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in written:
        sys.modules.pop(name, None)


def _epochs(make, change):
    """The batches of two epochs, between which `change` is called."""
    with make() as dataset:
        batches = list(dataset)
        change()
        return np.array([batches, list(dataset)]).tolist()


@pytest.mark.parametrize("choice", _CHOICES)
@pytest.mark.parametrize("is_set_before", [True, False])
def test_what_a_module_chose_by_a_value_stays_chosen(
    choice, is_set_before, write
):
    write("choice_config", "size = 1")
    write("choice_data", _DATA.format(_CHOICES[choice]))
    config = importlib.import_module("choice_config")
    if is_set_before:
        config.size = 2
    data = importlib.import_module("choice_data")
    chosen, size = config.size, 3 - config.size
    seen = _epochs(
        lambda: data.Data(**_PROCESSES), lambda: setattr(config, "size", size)
    )
    assert seen == [[[chosen, 3 - size]] * 2, [[chosen, size]] * 2]
