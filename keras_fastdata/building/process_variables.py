"""Finds environment variables and `sys.argv` in the code of a dataset."""

from __future__ import annotations

import functools
import inspect
import os
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
_PARSING = {"parse_args", "parse_known_args"}  # of `argparse`


def process_variables(
    code: types.CodeType, variables: Mapping[str, Any], dataset: Any
) -> Iterator[Variable]:
    """Yields what a code object reads of its process.

    An environment variable counts if the code has its name as a text, as in
    `os.environ["SIZE"]`, or names a global variable, or an attribute of the
    dataset, with this text. Any other text there is taken for a name as well,
    of a variable that is not set.

    Args:
        code: The code object.
        variables: Its global variables.
        dataset: The dataset.
    """
    names = names_in(code)
    if names & _READING:
        for part in nested_code(code):
            assigned = set(_assigned_in(part))
            named = [
                found
                for name in part.co_names
                for found in (variables.get(name), _attribute(dataset, name))
            ]
            for text in (*part.co_consts, *named):
                if isinstance(text, str):
                    yield Variable(
                        functools.partial(os.environ.__getitem__, text),
                        (ItemKey(text),),
                        ENVIRONMENT,
                        by_value=False,
                        is_assigned=bool(names & _ASSIGNING)
                        or text in assigned,
                    )
    if {"sys", "argv"} <= names or names & _PARSING:
        yield Variable(_arguments, ("argv",), "sys", by_value=False)


def _attribute(dataset: Any, name: str) -> Any:
    """Returns an attribute of the dataset or of its class, or `None`."""
    of_class = inspect.getattr_static(type(dataset), name, None)
    return attributes_of(dataset).get(name, of_class)


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
