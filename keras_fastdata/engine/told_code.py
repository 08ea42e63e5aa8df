"""Tells workers the code of functions that their modules make otherwise.

A module may choose between two functions when it is imported, by a value that
the program has changed before or since; or a tool has replaced the code.
Workers import the module themselves. What its source gives under the
function's name without a choice, they have; other code is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.machinery
import marshal
import sys
import types
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._modules import is_main, nested_code, spec_of
from keras_fastdata.building.variables import Variable
from keras_fastdata.engine.module_sources import known_source
from keras_fastdata.engine.told_forms import ToldForm


@dataclasses.dataclass(frozen=True)
class SentCode(ToldForm):
    """Describes the code of a function."""

    file: str
    outer: tuple[str, ...]  # the names of outer variables
    content: str  # see `_digest_of`
    marshalled: npt.NDArray[np.uint8] = dataclasses.field(
        compare=False, repr=False
    )

    def is_missing(self, before: Any) -> bool:
        """Returns whether a function that has the code `before` lacks it.

        Raises:
            ValueError: The function is another one: its code is in another
                file, or has other outer variables.
        """
        if _digest_of(before) == self.content:
            return False
        if (before.co_filename, before.co_freevars) != (self.file, self.outer):
            raise ValueError(f"not the function of {self.file}")
        return True

    def make(self) -> types.CodeType:
        code: types.CodeType = marshal.loads(self.marshalled.tobytes())
        return code


@dataclasses.dataclass(frozen=True)
class SentFunction(ToldForm):
    """Describes a function whose module has another one in its place now.

    After `importlib.reload`, other modules may have the former function.
    """

    module: str
    name: str
    code: SentCode

    def is_missing(self, before: Any) -> bool:
        code = getattr(before, "__code__", None)
        return code is None or _digest_of(code) != self.code.content

    def make(self) -> types.FunctionType:
        variables = vars(importlib.import_module(self.module))
        return types.FunctionType(self.code.make(), variables, self.name)


def function_form(function: types.FunctionType) -> SentFunction | None:
    """Returns a function that its module has no more; `None` for others."""
    module, name = function.__module__, function.__qualname__
    home = sys.modules.get(module)
    if home is None or is_main(module) or function.__closure__:
        return None
    present = vars(home).get(name)
    if present is function or not isinstance(present, types.FunctionType):
        return None
    return SentFunction(module, name, _sent(function.__code__))


def code_form(variable: Variable, code: types.CodeType) -> SentCode | None:
    """Returns the code of a function, or `None` if workers have it.

    Workers also lack what an import hook has made of the source, and take it
    from the hook, if they have the hook.
    """
    module = sys.modules.get(variable.module)
    loader = getattr(spec_of(module), "loader", None)
    if type(loader) is not importlib.machinery.SourceFileLoader:
        return None
    source = known_source(variable.module)
    if source is None or not source.text:
        return None
    name = ".".join(map(str, variable.path[:-1]))
    if _alone_in(source.text, source.path).get(name) == _digest_of(code):
        return None
    return _sent(code)


def _sent(code: types.CodeType) -> SentCode:
    marshalled = np.frombuffer(marshal.dumps(code), np.uint8)
    named = code.co_filename, code.co_freevars
    return SentCode(*named, _digest_of(code), marshalled)


@functools.lru_cache(maxsize=256)
def _alone_in(text: bytes, path: str) -> dict[str, str]:
    """Returns digests of the functions of a source, by qualified name.

    A name that stands for two functions is left out. `text` is compressed.
    """
    code = compile(zlib.decompress(text), path, "exec", dont_inherit=True)
    found: dict[str, list[str]] = {}
    for part in nested_code(code):
        found.setdefault(part.co_qualname, []).append(_digest_of(part))
    return {
        name: digests[0] for name, digests in found.items() if len(digests) == 1
    }


@functools.lru_cache(maxsize=4096)
def _digest_of(code: types.CodeType) -> str:
    """Returns a digest that is equal for code which does the same."""
    digest = hashlib.blake2b(digest_size=16)
    for part in nested_code(code):
        texts = (
            *(part.co_qualname, part.co_code, part.co_exceptiontable),
            *(part.co_names, part.co_varnames, part.co_freevars),
            *(part.co_cellvars, part.co_flags, part.co_argcount),
            *(part.co_posonlyargcount, part.co_kwonlyargcount),
            *map(_text_of, part.co_consts),
        )
        digest.update(repr(texts).encode("utf-8", "replace"))
    return digest.hexdigest()


def _text_of(constant: Any) -> str:
    """Returns a text of a constant, in which the items of sets are sorted."""
    if isinstance(constant, types.CodeType):
        return constant.co_qualname
    if isinstance(constant, (tuple, frozenset)):
        texts = [*map(_text_of, constant)]
        is_set = isinstance(constant, frozenset)
        return repr(sorted(texts) if is_set else texts)
    return f"{type(constant).__name__} {constant!r}"
