"""Objects within which a program edits a number, in unusual places."""

from __future__ import annotations

import collections
import types
import weakref

import numpy as np


class Level:
    """An object of the user's, which can be a key."""

    def __init__(self):
        self.level = 0


class Edited:
    """A thing that a dataset holds; reads and edits a number in it."""

    def __init__(self, held, read, edit):
        self.held, self.read, self.edit = held, read, edit


def _of_key(make):
    """A mapping with an object as key."""
    key = Level()
    return Edited(
        make(key),
        lambda held: next(iter(held)).level,
        lambda number: setattr(key, "level", number),
    )


def key_in_a_tuple():
    key = Level()
    return Edited(
        {(1, key): 2},
        lambda held: next(iter(held))[1].level,
        lambda number: setattr(key, "level", number),
    )


def _of_view(make, read):
    """What shows a dict."""
    table = {"level": 0}
    return Edited(make(table), read, lambda number: table.update(level=number))


def weak_dict():
    key = Level()
    levels = weakref.WeakKeyDictionary({key: 0})
    return Edited(
        (key, levels),
        lambda held: held[1][held[0]],
        lambda number: levels.update({key: number}),
    )


def weak_values():
    value, other = Level(), Level()
    names = weakref.WeakValueDictionary({0: value})

    def edit(number):
        del names[next(iter(names))]
        names[number] = value

    return Edited((value, other, names), lambda held: next(iter(held[2])), edit)


def memory_view():
    memory = bytearray(2000)
    return Edited(
        memoryview(memory),
        lambda held: held[1000],
        lambda number: memory.__setitem__(1000, number),
    )


def default_factory():
    value = Level()
    return Edited(
        collections.defaultdict(lambda: value.level),
        lambda held: held.default_factory(),
        lambda number: setattr(value, "level", number),
    )


def parameter():
    import torch

    weights = torch.nn.Parameter(torch.zeros(2))
    return Edited(
        {"weights": weights},
        lambda held: int(held["weights"].detach()[1]),
        lambda number: weights.data.fill_(number),
    )


def gradients():
    import torch

    tensors = [torch.zeros(2), torch.zeros(2)]

    def edit(number):
        for place, tensor in enumerate(tensors):
            tensor.requires_grad_(place < number)

    return Edited(
        tensors, lambda held: sum(t.requires_grad for t in held), edit
    )


def array_of_a_class():
    array = np.zeros(2).view(_Array)
    return Edited(
        array,
        lambda held: held.level,
        lambda number: setattr(array, "level", number),
    )


class _Array(np.ndarray):
    level = 0


HOLDERS = {
    "a key": lambda: _of_key(lambda key: {key: 0.5}),
    "a key of a counter": lambda: _of_key(
        lambda key: collections.Counter([key])
    ),
    "a key of a defaultdict": lambda: _of_key(
        lambda key: collections.defaultdict(int, {key: 1})
    ),
    "a key in a tuple": key_in_a_tuple,
    "a proxy": lambda: _of_view(
        types.MappingProxyType, lambda held: held["level"]
    ),
    "a view of values": lambda: _of_view(
        lambda table: [table.values()], lambda held: sum(held[0])
    ),
    "a weak dict": weak_dict,
    "a weak dict of values": weak_values,
    "a memoryview": memory_view,
    "a default factory": default_factory,
    "a parameter of PyTorch": parameter,
    "the gradient of a PyTorch tensor": gradients,
    "an attribute of an array": array_of_a_class,
}
