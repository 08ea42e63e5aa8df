"""Has workers run the code that the trainer has imported.

A user may edit a module while the program runs. A worker that starts later
would import other code than the trainer has. So the trainer keeps the sources
of the user's modules as they were when a dataset first used them.

A module may read files by relative paths when it is imported, and the program
may then change its current folder. So workers import each module in the folder
that the program was in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import types
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata._modules import current_folder, is_users_file, spec_of
from keras_fastdata.engine.import_changes import ImportChanges
from keras_fastdata.engine.seen_values import Noted, Seen, users_among

_MOST_BYTES = 8 << 20  # of all sources, compressed


class SourceFile(NamedTuple):
    """The file of a module as it was."""

    path: str
    modified_ns: int
    nbytes: int
    text: bytes  # compressed; b"" if it is not a file of Python code
    folder: str  # in which the program imported it; "" if unknown
    seen: Seen  # the settings in other modules that it saw then

    @staticmethod
    def of(path: str, folder: str, seen: Seen) -> SourceFile:
        if not path.endswith(".py") or not os.path.isfile(path):
            return SourceFile(path, 0, 0, b"", folder, seen)
        with open(path, "rb") as file:
            text = zlib.compress(file.read())
            found = os.fstat(file.fileno())
        stamp = found.st_mtime_ns, found.st_size
        return SourceFile(path, *stamp, text, folder, seen)

    @property
    def is_package(self) -> bool:
        """Whether the module is a package."""
        return os.path.basename(self.path) == "__init__.py"

    def spec(self, name: str) -> importlib.machinery.ModuleSpec:
        """Returns the spec of a module whose file is not there any more."""
        folder = os.path.dirname(self.path)
        spec = importlib.util.spec_from_file_location(
            name,
            self.path,
            submodule_search_locations=[folder] if self.is_package else None,
        )
        assert spec is not None
        return spec

    @property
    def can_be_compiled(self) -> bool:
        """Whether the file is Python code."""
        try:
            compile(zlib.decompress(self.text), self.path, "exec")
        except (SyntaxError, ValueError, zlib.error):
            return False
        return True

    def is_there(self, path: str | None = None) -> bool:
        """Returns whether the file, or another one, seems to be the same."""
        try:
            found = os.stat(path or self.path)
        except OSError:  # somebody has removed it
            return False
        stamp = found.st_mtime_ns, found.st_size
        return stamp == (self.modified_ns, self.nbytes)


Sources = dict[str, SourceFile]  # by module


class _Known(NamedTuple):
    """What was found of a module at the first look."""

    spec: Any  # another one for each import
    codes: list[types.CodeType]
    file: SourceFile | None

    def is_current(self, held: dict[str, Any]) -> bool:
        """Returns whether the module still has the code of this file.

        A tool may replace the code of functions without an import.
        """
        if held.get("__spec__") is not self.spec:
            return False
        if self.file is None or self.file.is_there():
            return True
        known = set(map(id, self.codes))
        return all(id(code) in known for code in _codes_of(held))


_known: dict[str, _Known] = {}


class _Notice(NamedTuple):
    """What there was when a module was first noticed."""

    spec: Any  # another one for each import
    folder: str  # the current folder
    settings: Noted  # those of the user's modules


class _Notices:
    """Notices, by module."""

    of: dict[str, _Notice] = {}
    # What the user's modules of the latest notice change.
    changes = ImportChanges()

    @classmethod
    def look(cls) -> None:
        """Notes what there is now for modules that were imported since."""
        new = {
            name: spec
            for name, module in sys.modules.copy().items()
            if (spec := spec_of(module)) is not None
            and (name not in cls.of or cls.of[name].spec is not spec)
        }
        if new:
            has_users = bool(users_among(new))
            settings = Noted(sys.modules if has_users else ())
            if has_users:
                cls.changes = settings.changes
            folder = current_folder()
            for name, spec in new.items():
                cls.of[name] = _Notice(spec, folder, settings)


notice_modules = _Notices.look
notice_modules()


class _Users:
    """The user's modules, by name, of so many modules in all."""

    count = 0
    modules: dict[str, types.ModuleType] = {}

    @classmethod
    def look(cls) -> None:
        """Looks through all modules, if there seem to be others."""
        known = cls.modules.items()
        if cls.count == len(sys.modules) and all(
            sys.modules.get(name) is module for name, module in known
        ):
            return
        cls.count = len(sys.modules)
        cls.modules = {
            name: module
            for name, module in sys.modules.copy().items()
            if _is_users(module)
        }


def _is_users(module: Any) -> bool:
    if not isinstance(module, types.ModuleType):
        return False
    held = vars(module)  # without a `__getattr__` of the module's
    path = held.get("__file__")
    has_file = held.get("__spec__") is not None and isinstance(path, str)
    return has_file and is_users_file(path)


def import_changes() -> ImportChanges:
    """Returns what the user's modules change while they are imported."""
    return _Notices.changes


class PackedSources:
    """The sources in one array, which travels to workers once.

    A state of the dataset that follows refers to the array of the one before.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    @functools.cached_property
    def _array(self) -> npt.NDArray[np.uint8]:
        pickled = pickle.dumps(self.sources)
        return np.frombuffer(pickled, np.uint8).copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._array,)


def _unpack(array: npt.NDArray[np.uint8]) -> PackedSources:
    return PackedSources(pickle.loads(array.tobytes()))


NO_SOURCES = PackedSources({})
_latest = NO_SOURCES


def packed() -> PackedSources:
    """Returns the sources of the user's modules, as they were at first."""
    global _latest
    now = _sources()
    if now != _latest.sources:
        _latest = PackedSources(now)
    return _latest


def known_source(name: str) -> SourceFile | None:
    """Returns the source of a module of the user's, if it is known."""
    known = _known.get(name)
    return None if known is None else known.file


def _sources() -> Sources:
    """Returns the sources; a module that is imported again begins anew."""
    found: Sources = {}
    nbytes = 0
    _Users.look()
    notice_modules()
    for name, module in _Users.modules.items():
        held = vars(module)
        known = _known.get(name)
        if known is None or not known.is_current(held):
            notice = _Notices.of[name]
            seen = notice.settings.seen_by(name)
            file = _file_at(held["__file__"], notice.folder, seen)
            if known is not None and not (file and file.can_be_compiled):
                file = known.file  # the program runs on with the former code
            known = _known[name] = _Known(
                held["__spec__"], _codes_of(held), file
            )
        if known.file is not None:
            nbytes += len(known.file.text)
            if nbytes > _MOST_BYTES:
                break
            found[name] = known.file
    return found


def _codes_of(held: dict[str, Any]) -> list[types.CodeType]:
    """Returns the code of a module's functions and methods in its file.

    The program may have set others there.
    """
    name, members = held.get("__name__"), list(held.values())
    for value in list(members):
        if isinstance(value, type) and value.__module__ == name:
            members += vars(value).values()
    return [
        value.__code__
        for value in members
        if isinstance(value, types.FunctionType)
        and value.__code__.co_filename == held.get("__file__")
    ]


def _file_at(path: str, folder: str, seen: Seen) -> SourceFile | None:
    try:
        return SourceFile.of(path, folder, seen)
    except OSError:
        return None


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    """Changes to a folder, if it is not "", for the time of an import."""
    before = current_folder()
    if folder in ("", before):
        yield
        return
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        if current_folder() == folder:  # the module has not changed it
            with contextlib.suppress(OSError):
                os.chdir(before)


def use_former(
    loader: importlib.machinery.SourceFileLoader, source: SourceFile
) -> None:
    """Has a loader run a former source, if the file has another one now."""
    if not source.text or source.is_there(loader.path):
        return
    text = zlib.decompress(source.text)

    def get_code(_: str) -> types.CodeType:
        code: types.CodeType = compile(
            text, loader.path, "exec", dont_inherit=True
        )
        return code

    setattr(loader, "get_code", get_code)  # noqa: B010 - a method
