"""What a program changes after this module was imported."""

import functools


class Scaler:
    """Has a method that the program may use as a function."""

    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor


scale = Scaler(1).apply


@functools.cache
def get_scaler():
    return Scaler(1)
