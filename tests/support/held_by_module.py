"""Objects in variables of a module that datasets hold, too."""

from __future__ import annotations

import random
import types

import numpy as np


class Config:
    """A setting that code changes."""

    size = 4


generator = np.random.default_rng(21)
python_generator = random.Random(21)
config = Config()
namespace = types.SimpleNamespace(size=4)
settings = {"size": 4}
sizes = [4]


def jitter():
    """Draws from this module's generators."""
    return generator.normal() + python_generator.gauss(0, 1)


def told():
    """The settings as this module has them."""
    return [config.size, namespace.size, settings["size"], *sizes]
