"""Workers have what the script puts into modules: its functions and classes."""

from __future__ import annotations

import pytest
from places import EVERY_KIND, quickly

_CONFIG = """
kind = mode = model = transform = None
functions, table = [], {"one": 1}

class Settings:
    hook = None
    def __init__(self):
        self.transform, self.items = None, []

class Registry:
    def __init__(self):
        self.table = {}
    def register(self, function):
        assert function.__name__ not in self.table
        self.table[function.__name__] = function
        return function

settings, known = Settings(), Registry()

class Meta(type):
    made = []
    def __new__(meta, name, bases, names):
        assert name not in [one.__name__ for one in Meta.made]
        made = super().__new__(meta, name, bases, names)
        Meta.made.append(made)
        return made

class Base(metaclass=Meta):
    pass
"""
_SCRIPT = """
import enum, functools, warnings
import numpy as np
import script_config as config
from keras_fastdata import FastPyDataset

warnings.filterwarnings("ignore", "`start_method='fork'`")
SHIFT = 5

class Mode(enum.Enum):
    ONE, TWO = 1, 2

class Derived(config.Base):
    pass

class Item:
    def __init__(self, number):
        self.number = number

def add_one(number): return number + 1
def add_two(number): return number + 2
def add_shift(number): return number + SHIFT

@config.known.register
def mine(number): return 7 * number

config.transform = add_one
config.kind, config.mode, config.model = Item, Mode.ONE, Item(3)
config.functions.append(add_one)
config.table["add"] = add_one
config.settings.transform = add_one
config.settings.items.append(Item(4))
config.Settings.hook = staticmethod(add_one)
config.partial = functools.partial(add_one)

class Data(FastPyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mode, self.function = Mode.ONE, add_one
        self.item = self.model = config.model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array([
            config.transform(index), config.functions[-1](index),
            len(config.functions), config.table["add"](index),
            len(config.table), config.settings.transform(index),
            config.settings.items[-1].number, config.Settings.hook(index),
            config.partial(index), config.known.table["mine"](index),
            len(config.known.table), config.model.number,
            type(self.item) is config.kind, config.mode is self.mode,
            config.mode is Mode.TWO, self.function is config.transform,
            self.model is config.model, isinstance(config.model, Item),
            len(config.Meta.made), config.Meta.made[-1] is Derived,
        ], int)

def change(epoch):
    global SHIFT
    if epoch == 1:
        config.transform, config.mode = add_two, Mode.TWO
        config.model.number = 9
    elif epoch == 2:
        config.transform = lambda number: number + 50
        config.functions.append(add_two)
        config.table["add"] = add_shift
        config.settings.transform = add_two
        config.settings.items[-1].number = 11
    elif epoch == 3:
        SHIFT = 6
        config.settings.items.append(Item(77))
        config.Settings.hook = staticmethod(add_two)
        config.partial, config.model = functools.partial(add_two), Item(100)

def epochs(**kwargs):
    with Data(**kwargs) as dataset:
        for epoch in range(4):
            change(epoch)
            print(np.array(list(dataset)).tolist())

if __name__ == "__main__":
    epochs(**{kind!r})
"""
_EPOCHS = [
    [1, 1, 1, 1, 2, 1, 4, 1, 1, 0, 1, 3, 1, 1, 0, 1, 1, 1, 2, 1],
    [2, 1, 1, 1, 2, 1, 4, 1, 1, 0, 1, 9, 1, 0, 1, 0, 1, 1, 2, 1],
    [50, 2, 2, 5, 2, 2, 11, 1, 1, 0, 1, 9, 1, 0, 1, 0, 1, 1, 2, 1],
    [50, 2, 2, 6, 2, 2, 77, 2, 2, 0, 1, 100, 1, 0, 1, 0, 0, 1, 2, 1],
]
# What depends on the index, by its place above.
_BY_INDEX = {**dict.fromkeys((0, 1, 3, 5, 7, 8), 1), 9: 7}


@pytest.mark.parametrize(
    "kind", quickly([*EVERY_KIND, "auto"], "inline", "process", "auto")
)
def test_workers_have_what_the_script_puts_into_a_module(
    kind, tmp_path, zygote
):
    kinds = {"workers": "auto"} if kind == "auto" else EVERY_KIND[kind]
    (tmp_path / "script_config.py").write_text(_CONFIG)
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT.replace("{kind!r}", repr(kinds)))
    ran = zygote.run(path)
    expected = [
        [
            [n + i * _BY_INDEX.get(at, 0) for at, n in enumerate(row)]
            for i in (0, 1)
        ]
        for row in _EPOCHS
    ]
    assert ran.stdout.splitlines() == [*map(str, expected)], ran.stderr
    assert "do not see" not in ran.stderr


_CLASSES = """
import collections, warnings
import numpy as np
from keras_fastdata import FastPyDataset

warnings.filterwarnings("ignore", "`start_method='fork'`")
Outer = collections.namedtuple("Outer", "x y")

def make(**kwargs):
    Inner = collections.namedtuple("Inner", "x y")

    class Data(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (Outer if index else Inner)(np.full(2, index), np.ones(1))

    return Data(**kwargs), Inner

if __name__ == "__main__":
    dataset, Inner = make(**{kind!r})
    with dataset:
        print([type(batch) for batch in dataset] == [Inner, Outer])
"""


@pytest.mark.parametrize("kind", quickly([*EVERY_KIND], "process"))
def test_batches_are_of_the_classes_of_the_script(kind, tmp_path, zygote):
    path = tmp_path / "script.py"
    path.write_text(_CLASSES.replace("{kind!r}", repr(EVERY_KIND[kind])))
    ran = zygote.run(path)
    assert ran.stdout == "True\n", ran.stderr
