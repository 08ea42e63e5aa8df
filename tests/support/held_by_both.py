"""A dataset that holds objects of a module."""

from __future__ import annotations

import held_by_module
import numpy as np

from keras_fastdata import FastPyDataset


class HoldsObjectsOfModule(FastPyDataset):
    """Draws from its attributes, changes them, and asks the module."""

    def __init__(self, **kwargs):
        super().__init__(seed=7, **kwargs)
        self.held = held_by_module.generator, held_by_module.python_generator
        self.config = held_by_module.config
        self.namespace = held_by_module.namespace
        self.settings = held_by_module.settings
        self.sizes = held_by_module.sizes

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.config.size = self.namespace.size = index
        self.settings["size"] = self.sizes[0] = index
        drawn = [one.random() for one in self.held]
        return np.array(
            [*drawn, held_by_module.jitter(), *held_by_module.told()]
        )
