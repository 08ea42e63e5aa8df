"""Datasets whose random generators are far away, or made by builds.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import random
import types

import generator_kinds
import numpy as np

from keras_fastdata import FastPyDataset


class MakesThemLate(FastPyDataset):
    """Each build makes a generator of its own, if there is none yet."""

    def __init__(self, keep, **kwargs):
        super().__init__(**kwargs)
        self.thing, self._keep = types.SimpleNamespace(by_index={}), keep
        self.makers = []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rng = self._keep(self, index)
        return np.array([rng.random(), index])


def in_a_dict(dataset, index):
    found = dataset.thing.by_index
    return found.setdefault(index, np.random.default_rng(index))


def in_a_list(dataset, index):
    while len(dataset.makers) <= index:
        dataset.makers.append(random.Random(7))
    return dataset.makers[index]


class _Augmenter:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)


def in_an_object_in_a_dict(dataset, index):
    found = dataset.thing.by_index
    if index not in found:
        found[index] = _Augmenter(index)
    return found[index].rng


def in_a_dict_in_a_dict(dataset, index):
    found = dataset.thing.by_index
    if index not in found:
        found[index] = {"noise": np.random.default_rng(index), "scale": 2}
    return found[index]["noise"]


def in_a_tuple_in_a_list(dataset, index):
    while len(dataset.makers) <= index:
        dataset.makers.append((random.Random(7), 2.0))
    return dataset.makers[index][0]


class _Pipeline:
    def __init__(self, seed):
        self.steps = [str, _Augmenter(seed)]


def in_an_object_in_an_object_in_a_dict(dataset, index):
    found = dataset.thing.by_index
    if index not in found:
        found[index] = _Pipeline(index)
    return found[index].steps[1].rng


def in_an_object(dataset, index):
    name = f"rng_{index}"
    if name not in vars(dataset.thing):
        setattr(dataset.thing, name, np.random.RandomState(index))
    return getattr(dataset.thing, name)


def of_a_class_within(seed=0):
    class Local:
        rng = np.random.default_rng(seed)

    return lambda: Local.rng.integers(2**60)


def of_a_cache():
    return generator_kinds.kept().integers(2**60)


def imported():
    from generator_kinds import RNG

    return RNG.integers(2**60)


def imported_with_its_module():
    import generator_kinds as kinds

    return kinds.RNG.integers(2**60)


def of_a_module_by_a_text():
    return getattr(generator_kinds, "RNG").integers(2**60)  # noqa: B009


def _drawn_from(module):
    return module.RNG.integers(2**60)


def of_a_module_that_is_an_argument():
    return _drawn_from(generator_kinds)


class Meta(type):
    """Has a generator."""

    rng = np.random.default_rng(0)


class HasMeta(metaclass=Meta):
    """Its generator is its metaclass's."""


class Wraps(FastPyDataset):
    """Draws from what it wraps."""

    def __init__(self, thing, draw, **kwargs):
        super().__init__(**kwargs)
        self.thing, self.draw = thing, draw

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([self.draw(self.thing)])
