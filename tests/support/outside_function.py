"""A module whose function `__getattr__` gives its settings."""

_values = {"scale": 1}


def __getattr__(name):
    try:
        return _values[name]
    except KeyError:
        raise AttributeError(name) from None


def update(**values):
    _values.update(values)
