"""Modules register in one another while they are imported, in workers too."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from places import KINDS

pytestmark = pytest.mark.usefixtures("kept_forkserver")
_PROCESSES = KINDS["process"]
_DATA = """
import numpy as np
import registry_base
{at_top}
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        {in_build}
        return np.array([registry_parts.value(), registry_base.count()])
"""
# Each has a base, in which parts register, and the parts. `value` and `count`
# are of what the parts have registered.
_REGISTRIES = {
    "a function that refuses a name twice": (
        """
NAMES, TABLE = [], {}
def register(function):
    if function.__name__ in NAMES or function.__name__ in TABLE:
        raise KeyError(f"{function.__name__} is already registered")
    NAMES.append(function.__name__)
    TABLE[function.__name__] = function
    return function
def count(): return len(NAMES) + len(TABLE)
""",
        """
@registry_base.register
def one(): return 1
@registry_base.register
def two(): return 2
def value(): return registry_base.TABLE[registry_base.NAMES[-1]]()
""",
    ),
    "a method that refuses a name twice": (
        """
class Registry:
    def __init__(self):
        self.table = {}
    def register(self, name):
        def register(function):
            assert name not in self.table
            self.table[name] = function
            return function
        return register
KNOWN = Registry()
def count(): return len(KNOWN.table)
""",
        """
@registry_base.KNOWN.register("one")
def _one(): return 1
def value(): return registry_base.KNOWN.table["one"]()
""",
    ),
    "a base class that refuses a subclass twice": (
        """
class Base:
    known = {}
    def __init_subclass__(cls):
        assert cls.__name__ not in Base.known
        Base.known[cls.__name__] = cls
def count(): return len(Base.known)
""",
        """
class One(registry_base.Base): ...
value = lambda: len(registry_base.Base.known["One"].__name__)
""",
    ),
    "a subclass of dict that refuses a key twice": (
        """
class Table(dict):
    def __setitem__(self, key, value):
        assert key not in self
        super().__setitem__(key, value)
TABLE = Table()
def count(): return len(TABLE)
""",
        """
registry_base.TABLE["one"] = 1
def value(): return registry_base.TABLE["one"]
""",
    ),
    "numbers that a function counts": (
        """
latest = 0
def next_number():
    global latest
    latest += 1
    return latest
def count(): return latest
""",
        """
class One: number = registry_base.next_number()
class Two: number = registry_base.next_number()
def value(): return Two.number
""",
    ),
    "a list that the body of a module appends to": (
        """
names = []
def count(): return len(names)
""",
        """
registry_base.names.append("one")
if len(registry_base.names) == 1:
    def value(): return 1
else:
    def value(): return 2
""",
    ),
    "a function that works once": (
        """
is_ready = False
def prepare():
    global is_ready
    if is_ready:
        raise RuntimeError("prepared twice")
    is_ready = True
def count(): return int(is_ready)
""",
        """
registry_base.prepare()
def value(): return 1
""",
    ),
}
_PARTS = "import registry_parts"


def _write_all(write, registry, **imports):
    base, parts = _REGISTRIES[registry]
    write("registry_base", base)
    write("registry_parts", "import registry_base\n" + parts)
    places = {"at_top": "", "in_build": ""} | imports
    write("registry_data", _DATA.format(**places))
    return importlib.import_module("registry_data").Data


def _batches(dataset):
    with dataset:
        return [np.array(list(dataset)).tolist() for _ in range(2)]


_COMPUTED = (
    "import importlib; registry_parts = importlib.import_module("
    "'_'.join(['registry', 'parts']))"
)
# How the data's module imports the parts. The program has imported what a
# build imports before workers do: it builds inline first.
_IMPORTS = {
    "at the top": {"at_top": _PARTS},
    "in a build": {"in_build": _PARTS},
    "in a build, by a computed name": {"in_build": _COMPUTED},
}


@pytest.mark.parametrize("registry", _REGISTRIES)
@pytest.mark.parametrize("imports", _IMPORTS)
def test_workers_register_what_modules_register_in_the_modules_they_import(
    imports, registry, write
):
    data = _write_all(write, registry, **_IMPORTS[imports])
    expected = _batches(data(workers=0))
    assert _batches(data(**_PROCESSES)) == expected


def test_numbers_in_the_order_of_imports_are_those_of_the_trainer(write):
    """A worker may import the modules in another order."""
    write(
        "registry_base",
        "class Base:\n"
        "    known = []\n"
        "    def __init_subclass__(cls):\n"
        "        Base.known.append(cls)\n"
        "        cls.number = len(Base.known)\n"
        "def count(): return len(Base.known)\n",
    )
    write("registry_two", "import registry_base as b\nclass Two(b.Base): ...\n")
    write(
        "registry_parts",
        "import registry_base as b\nclass One(b.Base): ...\n"
        "import registry_two\n"
        "def value(): return 10 * One.number + registry_two.Two.number\n",
    )
    places = {"at_top": _PARTS, "in_build": ""}
    write("registry_data", _DATA.format(**places))
    importlib.import_module("registry_two")
    data = importlib.import_module("registry_data").Data
    assert _batches(data(**_PROCESSES)) == [[[21, 2]] * 2] * 2


_CONFIG = """
size = 1
def set_size(new):
    global size
    size = new
class Settings:
    def __init__(self):
        self.size = 1
    def update(self, **values):
        self.__dict__.update(values)
    def set_size(self, size):
        self.size = size
settings = Settings()
"""
_CHOICE = """
import choice_config
if {} == 2:
    def value(): return 2
else:
    def value(): return 1
"""
_CHOOSING = """
import numpy as np
import choice_config, choice_made
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.size = choice_config.size + choice_config.settings.size
    def __len__(self):
        return 2

    def __getitem__(self, index):
        size = choice_config.size + choice_config.settings.size
        return np.array([choice_made.value(), size])
"""
_SETS = {
    "size": lambda config, size: config.set_size(size),
    "settings.size": lambda config, size: config.settings.set_size(size),
    "int(settings.size)": lambda config, size: config.settings.update(
        size=size
    ),
}


@pytest.mark.parametrize("name", _SETS)
def test_a_module_chose_by_what_a_function_of_another_one_had_set(name, write):
    """The function is called by the program, and not by imports."""
    write("choice_config", _CONFIG)
    write(
        "choice_made", _CHOICE.format(name.replace("s", "choice_config.s", 1))
    )
    write("choice_data", _CHOOSING)
    config = importlib.import_module("choice_config")
    _SETS[name](config, 2)
    data = importlib.import_module("choice_data")
    with data.Data(**_PROCESSES) as dataset:
        for size in (2, 3):
            _SETS[name](config, size)
            assert [batch.tolist() for batch in dataset] == [[2, size + 1]] * 2


_LOADING = """
import numpy as np
import loading_config
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.at_load = loading_config.size

    def on_worker_start(self):
        # In names that are computed: what code assigns, workers are not told.
        getattr(loading_config, "na" + "mes").append("started")
        setattr(loading_config, "si" + "ze", 5)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        import loading_part
        return np.array(
            [self.at_load, loading_config.size, len(loading_config.names)]
        )
"""


def test_what_a_worker_sets_itself_outlives_an_import(write):
    write("loading_config", "size = 1\nnames = []")
    write(
        "loading_part",
        "import loading_config\n"
        "assert loading_config.size == 1, loading_config.size\n"
        "loading_config.names.append('part')\n",
    )
    write("loading_data", _LOADING)
    config = importlib.import_module("loading_config")
    importlib.import_module("loading_part")
    data = importlib.import_module("loading_data")
    config.size = 4
    assert config.names == ["part"]
    with data.Data(**_PROCESSES) as dataset:
        assert np.array(list(dataset)).tolist() == [[4, 5, 2]] * 2


_BY_A_TEXT = """
import numpy as np
import text_config, text_made
from keras_fastdata import FastPyDataset

NAME = "mo" + "de"

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array(vars(text_config)[NAME] + text_made.value())
"""


def test_a_value_that_modules_saw_stays_where_code_finds_it_by_a_text(write):
    write("text_config", "mode = 1")
    write(
        "text_made",
        "import text_config\n"
        "if text_config.mode == 2:\n    def value(): return 10\n"
        "else:\n    def value(): return 20\n",
    )
    write("text_data", _BY_A_TEXT)
    importlib.import_module("text_config").mode = 2
    data = importlib.import_module("text_data")
    with data.Data(**_PROCESSES) as dataset:
        assert [int(batch) for batch in dataset] == [12] * 2


_CONTAINERS = {
    "an OrderedDict": ("OrderedDict(one=f)", "known['one']()"),
    "a defaultdict": ("defaultdict(None, one=f)", "known['one']()"),
    "a set": ("{f}", "[*known][0]()"),
    "a frozenset": ("frozenset([f])", "[*known][0]()"),
    "a namedtuple": ("namedtuple('Known', 'one')(f)", "known.one()"),
    "a view of a dict": ("MappingProxyType({'one': f})", "known['one']()"),
    "a dict in an OrderedDict": (
        "OrderedDict(a={'b': f})",
        "known['a']['b']()",
    ),
}
_OF_A_CONTAINER = """
import numpy as np
from held_base import known
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array(CALL)
"""


@pytest.mark.parametrize("what", _CONTAINERS)
@pytest.mark.parametrize("kind", ["process", "memory"])
def test_functions_in_any_container_are_searched_for_variables(
    kind, what, write
):
    made, call = _CONTAINERS[what]
    write("held_part", "number = 1\ndef f(): return number")
    write(
        "held_base",
        "from collections import OrderedDict, defaultdict, namedtuple\n"
        "from types import MappingProxyType\n"
        f"from held_part import f\nknown = {made}\n",
    )
    write("held_data", _OF_A_CONTAINER.replace("CALL", call))
    data = importlib.import_module("held_data")
    part = importlib.import_module("held_part")
    kinds = _PROCESSES if kind == "process" else {"cache": kind, "workers": 0}
    with data.Data(**kinds) as dataset:
        for number in (1, 2, 3):
            part.number = number
            assert [int(batch) for batch in dataset] == [number] * 2


_OF_OBJECTS = {
    "an OrderedDict": ("OrderedDict(one=Op())", "known['one']"),
    "a defaultdict": ("defaultdict(list, one=[Op()])", "known['one'][0]"),
    "an OrderedDict in a list": ("[OrderedDict(one=Op())]", "known[0]['one']"),
    "a namedtuple": ("namedtuple('Known', 'one')(Op())", "known.one"),
    "a view of a dict": ("MappingProxyType({'one': Op()})", "known['one']"),
}


@pytest.mark.parametrize("what", _OF_OBJECTS)
@pytest.mark.parametrize("kind", ["process", "memory"])
def test_objects_in_any_container_may_be_edited(kind, what, write):
    made, call = _OF_OBJECTS[what]
    write(
        "held_base",
        "from collections import OrderedDict, defaultdict, namedtuple\n"
        "from types import MappingProxyType\n"
        "import numpy as np\n"
        "class Op:\n    def __init__(self):\n"
        "        self.number, self.array = 1, np.ones(1, int)\n"
        f"known = {made}\n",
    )
    both = f"{call}.number * {call}.array[0]"
    write("held_data", _OF_A_CONTAINER.replace("CALL", both))
    data = importlib.import_module("held_data")
    op = eval(call, {"known": data.known})
    kinds = _PROCESSES if kind == "process" else {"cache": kind, "workers": 0}
    with data.Data(**kinds) as dataset:
        for number in (1, 2, 3):
            op.number = number
            assert [int(batch) for batch in dataset] == [number] * 2
        op.array[0] = 5
        assert [int(batch) for batch in dataset] == [15] * 2


_OF_A_REGISTRY = """
import numpy as np
from registry_base import known
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        function, arguments = known.get("one", (int, {}))
        return np.array(function(**arguments))
"""


def test_workers_see_a_lambda_in_a_tuple_that_is_registered_later(
    write, caplog
):
    write("registry_base", "known = {}")
    write(
        "registry_part",
        "def register(known, number):\n"
        "    known['one'] = (lambda added: added + number, {'added': 10})\n",
    )
    write("registry_data", _OF_A_REGISTRY)
    data = importlib.import_module("registry_data")
    part = importlib.import_module("registry_part")
    with data.Data(**_PROCESSES) as dataset:
        assert [int(batch) for batch in dataset] == [0, 0]
        for number in (1, 2):
            part.register(data.known, number)
            assert [int(batch) for batch in dataset] == [10 + number] * 2
    assert caplog.text == ""
