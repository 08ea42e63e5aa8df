"""A function in an object of C that claims to be the function."""

import wrapt

scale = 1


@wrapt.decorator
def scaled(function, _, args, kwargs):
    return function(*args, **kwargs) * scale


@scaled
def one():
    return 1
