"""Yields the parts of code on which batches depend.

Each part can be pickled, or is one of which nothing else is known.
"""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata._modules import imports_in, is_main, names_in
from keras_fastdata._unimported import FoundSource, sources_of
from keras_fastdata.building.code_names import modules_passed_on
from keras_fastdata.engine.covered_values import (
    Untold,
    parts_inside,
    parts_of_value,
)
from keras_fastdata.engine.stable_pickle import is_installed

_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
# Texts and numbers that Python keeps in each class.
_PYTHONS = {"__firstlineno__", "__module__", "__qualname__"}
# What somebody may have written in a class, and what counts of it.
_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "__annotations__": lambda annotations: _texts_of(annotations),
    "__dataclass_fields__": lambda fields: [
        dict(field.metadata) for field in fields.values() if field.metadata
    ],
    "__doc__": lambda text: text,
    "__match_args__": lambda names: names,
    "__slots__": lambda names: names,
}
# What code has in it that looks for a name in a module, or in its own one.
_IN_OWN_MODULE = {"eval", "exec", "globals"}
_IN_MODULES = {"getattr", "__dict__", "vars", *_IN_OWN_MODULE}


def parts_of_code(code: Any) -> Iterator[Any]:
    """Yields the parts of a class, a function, or a module of the user's."""
    if isinstance(code, types.ModuleType):
        if is_main(code.__name__):
            return _script(code)
        return _sources_of(code.__name__, (), set())
    return _of_class(code) if isinstance(code, type) else _of_function(code)


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the parts of a class that a fingerprint covers."""
    yield from kind.__bases__
    if not is_installed(type(kind).__module__):
        yield type(kind)
    for name, value in sorted(vars(kind).items()):
        is_code = callable(value) or hasattr(type(value), "__get__")
        is_of_c = isinstance(value, types.GetSetDescriptorType)
        if name in _WRITTEN and not is_of_c:
            value = _WRITTEN[name](value)
        elif name.startswith("__") and (
            name in _PYTHONS
            or is_of_c
            or not (is_code or isinstance(value, (str, int, float)))
        ):
            continue  # Python's own, and not all of it there at once
        if name not in _WRITTEN or value:
            yield name
            yield from parts_inside(value)


def _texts_of(annotations: dict[str, Any]) -> dict[str, str]:
    """Returns annotations as texts that are the same in each run."""
    return {
        name: _ADDRESS.sub("", repr(value))
        for name, value in annotations.items()
    }


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Yields the parts of a function that a fingerprint covers."""
    code, around = function.__code__, function.__globals__
    kind: Any = type(function)
    if kind is not types.FunctionType:
        yield Untold()  # a wrapper that claims to be the function
    yield from _of_code(code)
    yield function.__defaults__
    yield function.__kwdefaults__
    if function.__annotations__:
        yield _texts_of(function.__annotations__)
    for name, value in sorted(function.__dict__.items()):
        yield name
        yield from parts_of_value(value)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield from parts_inside(cell.cell_contents)
    names = sorted(names_in(code))
    for name in names:
        for known, value in _named(name, around.get(name), names, set()):
            parts = parts_of_value(value)
            if parts:
                yield known
                yield from parts
    yield from _imported_by(code, around.get("__package__"))
    yield from _found_by_name(names, around)
    yield from modules_passed_on(code, around)


def _of_code(code: types.CodeType) -> Iterator[Any]:
    """Yields the parts of a code object that a fingerprint covers."""
    yield code.co_code
    yield code.co_names
    yield code.co_varnames
    takes = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    more = code.co_exceptiontable, takes, code.co_kwonlyargcount
    if any(more):
        yield more
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield constant


def _found_by_name(
    names: list[str], around: dict[str, Any]
) -> Iterator[types.ModuleType | type]:
    """Yields the modules and classes in which code may look for a name.

    As in `getattr(transforms, self.name)`: the source of the whole module then
    counts.
    """
    if not _IN_MODULES.isdisjoint(names):
        values = [around[name] for name in names if name in around]
        if not _IN_OWN_MODULE.isdisjoint(names):
            values.append(sys.modules.get(around.get("__name__", "")))
        yield from (
            value
            for value in values
            if isinstance(value, types.ModuleType)
            and not is_installed(value.__name__)
        )
    if "__subclasses__" in names:
        for name in names:
            for _, value in _named(name, around.get(name), names, set()):
                if isinstance(value, type):
                    yield from sorted(
                        type.__subclasses__(value), key=lambda c: c.__qualname__
                    )


def _named(
    known: str, value: Any, names: list[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a variable, or of each in a user's module."""
    if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
        yield known, value
    elif id(value) not in seen:
        seen.add(id(value))
        held = vars(value)
        for name in (*names, "__getattr__"):
            if name in held:
                yield from _named(f"{known}.{name}", held[name], names, seen)


def _imported_by(code: types.CodeType, package: str | None) -> Iterator[Any]:
    """Yields the names and sources of user modules that a function imports."""
    seen: set[str] = set()
    for module, names in imports_in(code, package):
        yield from _sources_of(module, names, seen)


def _script(main: types.ModuleType) -> Iterator[str | bytes]:
    """Yields the source of a script and of its imports; a notebook has none."""
    with contextlib.suppress(OSError, AttributeError, SyntaxError, ValueError):
        text = pathlib.Path(str(main.__file__)).read_bytes()
        yield text
        seen: set[str] = set()
        script = FoundSource(main.__name__, text, main.__package__)
        for module, names in script.imports:
            yield from _sources_of(module, names, seen)


def _sources_of(
    module: str, names: tuple[str, ...], seen: set[str]
) -> Iterator[str | bytes]:
    """Yields the name and source of a user's module and of its imports."""
    for found in sources_of(module, names, seen, but=()):
        yield found.name
        yield found.text
