"""A module whose variables are found by texts that code computes."""

import random
import sys

scale = 1
rng = random.Random(3)
_parts = ("sc", "ale")
LIMIT = 100


class Options:
    extent = 1


options = Options()
options.extent = 5


def scaled(number):
    return number * scale


def of_globals():
    return globals()["".join(_parts)]


def of_modules():
    return getattr(sys.modules[__name__], "".join(_parts))


def draw_of_globals():
    return globals()["".join("rng")].random()
