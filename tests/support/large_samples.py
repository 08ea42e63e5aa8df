"""A dataset with a list of annotations, and what lies behind that list.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import numpy as np

from keras_fastdata import FastPyDataset

classes = {f"class {n}": {"boxes": [[n], [n]]} for n in range(1_000)}
scale = 1
tree = None  # an object that the program makes


class Node:
    """A node of a tree that has two levels, and a number."""

    def __init__(self, width=0):
        self.nodes = [Node() for _ in range(width)]
        for node in self.nodes:
            node.parts = [[{}], [{}], [{}]]
        self.number = 1


class Image:
    """Has boxes."""

    def __init__(self, boxes):
        self.boxes = boxes


class Scale:
    """Multiplies by a global variable."""

    def __call__(self, x):
        return x * scale if classes else x


class Boxes(FastPyDataset):
    """Holds what is behind the images in attributes that come later."""

    def __init__(self, images, rngs=(), **kwargs):
        super().__init__(**kwargs)
        self.images = images
        self.scale = Scale()
        self.weights = {"car": 1, "parts": [1]}
        self.rngs = rngs

    def __len__(self):
        return 2

    def __getitem__(self, index):
        car = self.weights["car"]
        number = 1 if tree is None else tree.number
        return np.array([self.scale(1), car, number])


class Draws(Boxes):
    """Draws from a random generator that is behind the images."""

    def __getitem__(self, index):
        return self.rngs[0][0][0][0][0].random(2)


def images_with(boxes, images=800):
    """Returns the images of a dataset for the detection of objects."""
    return [
        {"id": i, "boxes": [[[b], 2, 3, 4] for b in range(boxes)]}
        for i in range(images)
    ]
