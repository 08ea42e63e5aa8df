"""Workers have what modules chose when the program imported them."""

from __future__ import annotations

import importlib
import py_compile
import sys
import zipfile

import numpy as np
import outside_config as conf
import pytest
from places import KINDS
from samples import Holds

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
    "a function that exists for one value alone": """
if config.size == 2:
    def more(): return 1
def value(): return 1 + ("more" in globals())
""",
    "a method that exists for one value alone": """
class Base:
    def value(self): return 1
class Has(Base):
    if config.size == 2:
        def value(self): return 2
def value(): return Has().value()
""",
    "a member of an enumeration": """
import enum
class Has(enum.Enum):
    A = config.size
def value(): return Has.A.value
""",
    "a module": """
if config.size == 1:
    import choice_one as chosen
else:
    import choice_two as chosen
def value(): return chosen.value
""",
    "a large table": """
table = [config.size] * 300_000
def value(): return table[-1]
""",
    "what a class does for its subclasses": """
class Base:
    def __init_subclass__(cls, **kwargs): cls.size = config.size
class Has(Base): pass
def value(): return Has.size
""",
    "an object with settings": """
CHOSEN = config.settings.size
if CHOSEN == 1:
    def value(): return 1
else:
    class Value:
        def __call__(self): return 2
    value = Value()
""",
}
_CONFIG = """
import types
size = 1
class Settings: pass
settings = Settings()
settings.size = 1
"""


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
    write("choice_config", _CONFIG)
    write("choice_data", _DATA.format(_CHOICES[choice]))
    write("choice_one", "value = 1")
    write("choice_two", "value = 2")
    config = importlib.import_module("choice_config")

    def set_size(size):
        config.size = config.settings.size = size

    if is_set_before:
        set_size(2)
    data = importlib.import_module("choice_data")
    chosen, size = config.size, 3 - config.size
    seen = _epochs(lambda: data.Data(**_PROCESSES), lambda: set_size(size))
    assert seen == [[[chosen, 3 - size]] * 2, [[chosen, size]] * 2]


@pytest.mark.parametrize("choice", ["a large table", "a module"])
def test_it_stays_if_the_program_sets_the_value_before_the_first_epoch(
    choice, write
):
    """As a script does that has all imports at its top."""
    write("choice_config", _CONFIG)
    write("choice_data", _DATA.format(_CHOICES[choice]))
    write("choice_one", "value = 1")
    write("choice_two", "value = 2")
    config = importlib.import_module("choice_config")
    data = importlib.import_module("choice_data")
    config.size = 2
    with data.Data(**_PROCESSES) as dataset:
        for size in (2, 3):
            config.size = size
            assert [batch.tolist() for batch in dataset] == [[1, size]] * 2


def test_attributes_of_another_modules_object_are_no_settings(write):
    """They have the name of a setting, but are not changed by imports."""
    write("choice_config", _CONFIG)
    write(
        "choice_other",
        "class Options: pass\n"
        "options = Options()\n"
        "options.size = 5\n"
        "def reset(): options.size = 5\n"
        "reset()\n",
    )
    write("choice_data", _DATA.format(_CHOICES["functions"]))
    config = importlib.import_module("choice_config")
    importlib.import_module("choice_other")
    config.size = 2
    data = importlib.import_module("choice_data")
    seen = _epochs(
        lambda: data.Data(**_PROCESSES), lambda: setattr(config, "size", 1)
    )
    assert seen == [[[2, 2]] * 2, [[2, 1]] * 2]


_LATE = """
import numpy as np
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        {}
        return np.array([value(), 0])
"""
_LATER = "import choice_config\ndef value(): return choice_config.size\n"
_LAZY = """
import importlib
def __getattr__(name):
    if name == "choice_later":
        return importlib.import_module("." + name, __name__)
    raise AttributeError(name)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_a_build_imports_first_sees_the_programs_value(
    kind, write
):
    write("choice_config", "size = 1")
    write("choice_later", _LATER)
    write("choice_data", _LATE.format("from choice_later import value"))
    config = importlib.import_module("choice_config")
    data = importlib.import_module("choice_data")
    config.size = 2
    seen = _epochs(
        lambda: data.Data(**KINDS[kind]), lambda: setattr(config, "size", 3)
    )
    sys.modules.pop("choice_later", None)
    assert seen == [[[2, 0]] * 2, [[3, 0]] * 2]


@pytest.mark.parametrize("kind", [*KINDS.values(), {"cache": "memory"}])
def test_a_module_that_the_program_imports_after_workers_did_is_told(
    kind, write
):
    write("choice_later", "size = 1\ndef value(): return size\n")
    write("choice_data", _LATE.format("from choice_later import value"))
    data = importlib.import_module("choice_data")
    with data.Data(**kind) as dataset:
        seen = [list(dataset)]
        for size in (2, 3):
            importlib.import_module("choice_later").size = size
            seen.append(list(dataset))
    expected = [[[size, 0]] * 2 for size in (1, 2, 3)]
    assert np.array(seen).tolist() == expected


def test_a_part_that_a_package_imports_when_it_is_asked_for_sees_it_too(
    write, tmp_path
):
    (tmp_path / "choice_package").mkdir()
    write("choice_config", "size = 1")
    write("choice_package/__init__", _LAZY)
    write("choice_package/choice_later", _LATER)
    value = "value = choice_package.choice_later.value"
    write("choice_data", "import choice_package\n" + _LATE.format(value))
    config = importlib.import_module("choice_config")
    data = importlib.import_module("choice_data")
    config.size = 2
    seen = _epochs(
        lambda: data.Data(**_PROCESSES), lambda: setattr(config, "size", 3)
    )
    for name in ("choice_package", "choice_package.choice_later"):
        sys.modules.pop(name, None)
    assert seen == [[[2, 0]] * 2, [[3, 0]] * 2]


@pytest.mark.parametrize("form", ["archive", "compiled"])
def test_modules_without_a_source_file_have_the_programs_values(
    form, write, tmp_path, monkeypatch
):
    write("choice_config", "size = 1")
    write("choice_data", _DATA.format("def value(): return 0"))
    names = ("choice_config", "choice_data")
    if form == "archive":
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as file:
            for name in names:
                file.write(tmp_path / f"{name}.py", f"{name}.py")
        monkeypatch.syspath_prepend(tmp_path / "modules.zip")
    for name in names:
        if form == "compiled":
            source, target = (tmp_path / f"{name}.py{end}" for end in ("", "c"))
            py_compile.compile(str(source), cfile=str(target))
        (tmp_path / f"{name}.py").unlink()
    importlib.invalidate_caches()
    config = importlib.import_module("choice_config")
    data = importlib.import_module("choice_data")
    config.size = 2
    seen = _epochs(
        lambda: data.Data(**_PROCESSES), lambda: setattr(config, "size", 3)
    )
    assert seen == [[[0, 2]] * 2, [[0, 3]] * 2]


def test_a_marker_of_a_class_of_ones_own_is_the_same_object_in_workers():
    use = lambda held, _: (  # noqa: E731
        held[0] is conf.UNSET and held[1] is conf.Unset.NOTHING
    )
    held = [conf.UNSET, conf.Unset.NOTHING]
    with Holds(held, use, **_PROCESSES) as dataset:
        assert [bool(batch) for batch in dataset] == [True] * 3


@pytest.mark.parametrize("name", ["UNSET", "table_or_none", "new"])
def test_an_object_without_attributes_that_the_program_sets_travels(
    name, monkeypatch
):
    marker = conf.Unset()
    monkeypatch.setattr(conf, name, marker, raising=False)
    use = lambda held, _: held[0] is getattr(conf, "UNSET", None)  # noqa: E731
    with Holds([marker], use, **_PROCESSES) as dataset:
        assert [bool(batch) for batch in dataset] == [name == "UNSET"] * 3


_REGISTRY = """
names, counts, total = [], {}, 0

def register(name):
    global total
    names.append(name)
    counts[name] = total = len(names)
    return lambda function: function

class Registry:
    def __init__(self): self.names = []
    def add(self, name): self.names.append(name)

registry, plain, late, number = Registry(), [], [], 0
"""
_REGISTERED = """
import choice_config as base

@base.register("{0}")
def function(): pass

base.registry.add("{0}")
base.plain.append("{0}")
base.number += 1
first = [*base.names], len(base.plain), base.number, [*base.registry.names]
"""
# It has no variable of its own that could be a setting.
_REGISTERS_ALONE = """
import choice_config as base
base.late.append("three")
"""
_READS_REGISTRY = """
import choice_one, choice_two, choice_three
class Chosen:
    if config.late != ["three"]:
        def is_wrong(self): pass
def value():
    return repr((
        config.names, config.counts, config.total, config.registry.names,
        config.plain, config.number, choice_one.first, choice_two.first,
        hasattr(Chosen, "is_wrong")
    ))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_what_modules_register_while_they_are_imported_is_registered_once(
    kind, write
):
    write("choice_config", _REGISTRY + "size = 0")
    for name in ("one", "two"):
        write(f"choice_{name}", _REGISTERED.format(name))
    write("choice_three", _REGISTERS_ALONE)
    write("choice_data", _DATA.format(_READS_REGISTRY))
    data = importlib.import_module("choice_data")
    with data.Data(**KINDS[kind]) as dataset:
        for _ in range(2):
            assert {batch.tolist()[0] for batch in dataset} == {data.value()}
