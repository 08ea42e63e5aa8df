"""Finds what modules change in one another while they are imported.

A worker imports the same modules, and so does the same. A list that modules
append to while they are imported is therefore no setting of the program's, and
a module that is imported later must not find its own entry in there.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import (
    imported_names,
    instructions,
    names_in,
    nested_code,
    spec_of,
)
from keras_fastdata.building.code_names import Root, Target, changes_of
from keras_fastdata.building.variables import Path

# Methods that make an object, or restore it.
MAKING = ("__new__", "__init__", "__post_init__", "__setstate__")
# Methods that no import calls.
_BUILDING = ("__getitem__",)
_LOADING = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")


class _CodeFacts(NamedTuple):
    """What the body of a module or class says, or a function."""

    name: str  # by which code calls it
    used: frozenset[str]  # names of variables and attributes
    changed: frozenset[str]  # names of what it changes in variables
    # Those of what it changes in objects that are no modules, as a method does
    # in its object or its class.
    changed_in_objects: frozenset[str]

    @property
    def is_run(self) -> bool:
        """Whether imports run it, or may, though no code names it."""
        is_special = self.name.startswith(("__", "<"))
        return is_special and self.name not in _BUILDING


class _ModuleFacts(NamedTuple):
    """What the code of a module says."""

    spec: Any  # of the import that this is about
    names: frozenset[str]  # all that the code uses
    imported: tuple[str, ...]  # modules, or what is imported from them
    body: _CodeFacts
    functions: list[_CodeFacts]


class ImportChanges:
    """What the user's modules change while they are imported, by name."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        # By name: the modules that change a variable, or one in an object.
        self._by_bodies: dict[str, set[str]] = {}
        self._by_bodies_in_objects: dict[str, set[str]] = {}
        self._by_functions: set[str] = set()
        self._in_objects: set[str] = set()  # by functions and methods
        waiting: list[_CodeFacts] = []
        uncalled: dict[str, list[_CodeFacts]] = {}
        for module in modules:
            facts = facts_of(module)
            for name in facts.body.changed:
                self._by_bodies.setdefault(name, set()).add(module)
            for name in facts.body.changed_in_objects:
                self._by_bodies_in_objects.setdefault(name, set()).add(module)
            waiting.append(facts.body)
            for part in facts.functions:
                uncalled.setdefault(part.name, []).append(part)
        called = [
            part for parts in uncalled.values() for part in parts if part.is_run
        ]
        bodies = len(waiting)
        waiting += called
        for part in waiting:  # grows
            for name in part.used:
                waiting += uncalled.pop(name, ())
        for part in waiting[bodies:]:
            self._by_functions |= part.changed
            self._in_objects |= part.changed_in_objects

    def has(self, module: str, path: Path) -> bool:
        """Returns whether imports change a variable, or what is in there.

        What the body of its own module does is a part of what it is.
        """
        names = [step for step in path if isinstance(step, str)]
        if not names:
            return False
        name = names[-1]
        others = self._by_bodies.get(name, set()) - {module}
        if others or name in self._by_functions:
            return True
        others = self._by_bodies_in_objects.get(name, set()) - {module}
        return len(names) > 1 and bool(others or name in self._in_objects)


_known: dict[str, _ModuleFacts] = {}


def facts_of(name: str) -> _ModuleFacts:
    """Returns what the code of an imported module says."""
    module = sys.modules.get(name)
    spec = spec_of(module)
    known = _known.get(name)
    if known is not None and known.spec is spec:
        return known
    try:
        assert spec is not None
        found = _read(spec, spec.loader.get_code(name), vars(module))
    except Exception as error:
        raise_of_handler(error)
        # It has no code, or somebody has edited the file.
        nothing = _CodeFacts("", frozenset(), frozenset(), frozenset())
        found = _ModuleFacts(spec, frozenset(), (), nothing, [])
    _known[name] = found
    return found


def _read(
    spec: Any, code: types.CodeType, held: dict[str, Any]
) -> _ModuleFacts:
    bodies = [one for one in nested_code(code) if not _is_function(one)]
    functions = [
        _function(one, held)
        for body in bodies
        for one in body.co_consts
        if isinstance(one, types.CodeType) and _is_function(one)
    ]
    changed = _changed_names(changes_of(bodies), held)
    return _ModuleFacts(
        spec,
        names_in(code),
        imported_names(code, held.get("__package__")),
        _CodeFacts("", _used_by(bodies), *changed),
        functions,
    )


def _changed_names(
    targets: Iterable[Target], held: dict[str, Any]
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of changed variables, and of those in objects.

    `held` has the variables of the module whose code names the targets.
    """
    variables: set[str] = set()
    in_objects: set[str] = set()
    for target in targets:
        is_in_object = _is_in_object(target, held)
        (in_objects if is_in_object else variables).add(target.names[-1])
    return frozenset(variables), frozenset(in_objects)


def _is_in_object(target: Target, held: dict[str, Any]) -> bool:
    """Returns whether a target is surely in an object that is no module."""
    if target.root in (Root.SELF, Root.CLASS):
        return True
    first, *others = target.names
    if target.root is not Root.GLOBAL or not others or first not in held:
        return False
    for name in others:
        if not isinstance(held.get(first), types.ModuleType):
            return first in held
        held, first = vars(held[first]), name
    return False


def _is_function(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _function(code: types.CodeType, held: dict[str, Any]) -> _CodeFacts:
    codes = [*nested_code(code)]
    name, is_making = code.co_name, code.co_name in MAKING
    if is_making:  # who names the class calls it
        name = code.co_qualname.split(".")[-2:][0]
    targets = (
        target
        for target in changes_of(codes)
        if not (is_making and target.root is Root.SELF)
    )
    return _CodeFacts(name, _used_by(codes), *_changed_names(targets, held))


def _used_by(codes: list[types.CodeType]) -> frozenset[str]:
    return frozenset(
        step.argval
        for code in codes
        for step in _steps_at_import(code)
        if step.opname in _LOADING
    )


def _steps_at_import(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions of code, but not `if __name__ == "__main__"`."""
    steps = instructions(code)
    end = 0  # of what a script alone does
    for number, step in enumerate(steps):
        if step.offset < end:
            continue
        if step.argval == "__name__" and step.opname == "LOAD_NAME":
            then = [one.argval for one in steps[number + 1 : number + 3]]
            jumps = [
                one.argval
                for one in steps[number + 3 : number + 5]
                if one.opname.startswith("POP_JUMP") and "FALSE" in one.opname
            ]
            if then == ["__main__", "=="] and jumps:
                end = jumps[0]
        yield step
