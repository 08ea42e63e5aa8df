"""Finds environment variables and `sys.argv` in the code of a dataset."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from keras_fastdata._modules import instructions, names_in, nested_code
from keras_fastdata.building.attributes import attributes_of
from keras_fastdata.building.variables import ItemKey, Variable

ENVIRONMENT = "os.environ"  # the module of environment variables
_READING = {"environ", "getenv"}
_ASSIGNING = {"setdefault", "putenv", "unsetenv"}
_IN_CAPITALS = re.compile("[A-Z][A-Z0-9_]*")
_PARSING = {"parse_args", "parse_known_args"}  # of `argparse`


class ProcessVariables:
    """Finds what the code of a dataset reads of its process.

    An environment variable counts if code that reads some has its name as a
    text, as in `os.environ["SIZE"]`, or names a global variable, or an
    attribute of the dataset, with this text. Any other text there is taken for
    a name as well, of a variable that is not set. Other code may give a name to
    code that reads. So its texts count, if they are in capital letters or are
    the name of a variable that is set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._reads = False
        # Other code, with its global variables.
        self._others: list[tuple[types.CodeType, Mapping[str, Any]]] = []

    def of(
        self, code: types.CodeType, variables: Mapping[str, Any]
    ) -> Iterator[Variable]:
        """Yields what a code object reads; `variables` are its globals."""
        names = names_in(code)
        if names & _READING or any(
            _reads_environment(variables.get(name)) for name in names
        ):
            self._reads = True
            for part in nested_code(code):
                assigned = set(_assigned_in(part))
                for text in self._texts_of(part, variables):
                    is_assigned = bool(names & _ASSIGNING) or text in assigned
                    yield _variable(text, is_assigned)
        else:
            self._others.append((code, variables))
        if {"sys", "argv"} <= names or names & _PARSING:
            yield Variable(_arguments, ("argv",), "sys", by_value=False)

    def of_others(self) -> Iterator[Variable]:
        """Yields what code reads whose names other code has."""
        if not self._reads:
            return
        texts = {
            text
            for code, variables in self._others
            for part in nested_code(code)
            for text in self._texts_of(part, variables)
            if _IN_CAPITALS.fullmatch(text) or text in os.environ
        }
        for text in sorted(texts):
            yield _variable(text, is_assigned=False)

    def _texts_of(
        self, code: types.CodeType, variables: Mapping[str, Any]
    ) -> Iterator[str]:
        for name in code.co_names:
            for found in (variables.get(name), self._attribute(name)):
                if isinstance(found, str):
                    yield found
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant

    def _attribute(self, name: str) -> Any:
        """Returns an attribute of the dataset or of its class, or `None`."""
        of_class = inspect.getattr_static(type(self._dataset), name, None)
        return attributes_of(self._dataset).get(name, of_class)


def _reads_environment(value: Any) -> bool:
    """Returns whether a value is `os.environ`, or a method of it."""
    if isinstance(value, types.MethodType):
        value = value.__self__
    return value is os.environ


def _variable(name: str, is_assigned: bool) -> Variable:
    read = functools.partial(os.environ.__getitem__, name)
    return Variable(
        read, (ItemKey(name),), ENVIRONMENT, False, is_assigned=is_assigned
    )


def _assigned_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names in `os.environ["NAME"] = value`, and in `del`."""
    steps = instructions(code)
    for owner, key, step in zip(steps, steps[1:], steps[2:], strict=False):
        if (
            step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
            and owner.argval == "environ"
            and isinstance(key.argval, str)
        ):
            yield key.argval


def _arguments() -> list[str]:
    return list(sys.argv)
