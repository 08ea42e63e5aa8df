"""A dataset whose batches depend on state outside of it.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import outside_config as conf
from samples import Holds

from keras_fastdata import FastPyDataset

FACTOR = 1
FRAMEWORKS = ["PIL", "jax", "keras", "tensorflow", "torch"]


def _scaled(value):
    return value * conf.SCALE * FACTOR


class Referring(FastPyDataset):
    """Returns what it refers to, as text."""

    offset = 1

    def __len__(self):
        return 6

    def __getitem__(self, index):
        found = [
            _scaled(1),
            self.offset,
            conf.OPTIONS["sizes"],
            vars(conf.ARGS) if conf.ARGS else None,
            conf.config.depth,
            conf.Config.__dict__["depth"],
            conf.is_ready(),
        ]
        return np.array([repr(found)])


class CallsItself(FastPyDataset):
    """Its methods have names of methods that edit a container."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = {}

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self[index] = conf.SCALE
        return self.fill(index)

    def __setitem__(self, index, value):
        self.update({index: value})

    def update(self, values):
        self.seen.update(values)

    def fill(self, index):
        return np.array([self.seen[index]])


class Frameworks(FastPyDataset):
    """Imports what it needs when it needs it, and returns the settings."""

    def __init__(self, names, **kwargs):
        super().__init__(**kwargs)
        self.names = names

    def __len__(self):
        return 2

    def __getitem__(self, index):
        found = [
            [name for name in FRAMEWORKS if name in sys.modules],
            np.geterr()["under"],
        ]
        if "PIL" in self.names:
            from PIL import Image, ImageFile

            found += [ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS]
        if "keras" in self.names:
            import keras

            found += [keras.config.floatx(), keras.config.image_data_format()]
        if "torch" in self.names:
            import torch

            found += [str(torch.get_default_dtype())]
        return np.array([repr(found)])


class Divided(FastPyDataset):
    """Returns what a division by zero gives."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            return np.ones((1, 1)) / np.zeros((1, 1))
        except FloatingPointError:
            return np.zeros((1, 1))


class HasAttributes(FastPyDataset):
    """Has a dict in its class whose attributes are its items."""

    options = conf.Attributes(scale=1)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array(self.options.scale)


def depth_of(module):
    return module.Chosen.depth


def settings():
    return conf


def _number_in(name):
    return int(os.environ.get(name, "0"))


class NamesOne(Holds):
    """Reads two variables of the environment, each by a name in its code."""

    name = "KFD_NUMBER"

    def __getitem__(self, index):
        return np.array([_number_in(self.name), _number_in("KFD_OTHER")])
