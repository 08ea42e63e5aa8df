"""What `outside_package` exports."""

import random

scale = 1
rng = random.Random(3)


def scaled(number):
    return number * scale


def draw():
    return rng.random()
