"""Datasets of which one line is known to take most of the time."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
from PIL import Image, ImageFilter

from keras_fastdata import FastPyDataset

X = np.zeros((4, 2), "float32")
_IMAGE = Image.effect_noise((600, 600), 50)
_MATRIX = np.ones((700, 700))
_LOCK = threading.Lock()


class Slow(FastPyDataset):
    """A dataset whose `__getitem__` is slow in the way that is named."""

    def __init__(self, way, path="", **settings):
        super().__init__(**settings)
        self.way, self.path = way, path

    def __len__(self):
        return 40

    def __getitem__(self, index):
        WAYS[self.way](self)
        return X, X[:, :1]


def python_loop(_):
    total = 0
    for number in range(400_000):
        total += number * number  # HOT
    return total


def pil_call(_):
    return _IMAGE.filter(ImageFilter.GaussianBlur(8))  # HOT


def numpy_call(_):
    return np.linalg.svd(_MATRIX[:300, :300])  # HOT


def sleep(_):
    time.sleep(0.02)  # HOT


def file_read(dataset):
    with open(dataset.path, "rb", buffering=0) as file:
        return file.read()  # HOT


def lock(_):  # of one worker alone
    timer = threading.Timer(0.02, _LOCK.release)
    _LOCK.acquire()
    timer.start()
    with _LOCK:  # HOT
        timer.join()


def generator(_):
    def numbers():
        for number in range(10):
            time.sleep(0.002)  # HOT
            yield number

    return list(numbers())


def _logged(function):
    @functools.wraps(function)
    def call(dataset):
        return function(dataset)

    return call


@_logged
def decorator(_):
    return sum(range(1_000_000))  # HOT


def c_extension(_):
    return sorted(np.random.RandomState(0).rand(60_000).tolist())  # HOT


def recursion(_):
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # HOT

    return fibonacci(24)


WAYS = {
    way.__name__: way
    for way in (
        python_loop,
        pil_call,
        numpy_call,
        sleep,
        file_read,
        lock,
        generator,
        decorator,
        c_extension,
        recursion,
    )
}
