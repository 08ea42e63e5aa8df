"""Transfers exceptions from a worker to the training process.

An exception is pickled as a description, and rebuilt without running its
class's `__init__`: exceptions whose `__init__` takes two arguments, or none,
arrive too. tblib describes the frames. (tblib's own `pickle_exception` loses
slots and the fields of `UnicodeDecodeError`, and one lock in an attribute fails
the whole exception.) Each argument and attribute is pickled on its own, so that
a lock in an attribute costs that attribute alone. An exception that cannot be
rebuilt arrives as a `LoaderError` with the full text.
"""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import io
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import tblib

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs

_MAX_CHAIN = 16  # causes of causes that travel
_MAX_NESTED = 3  # exceptions in attributes of exceptions that travel
_MAX_TEXT = 64 * 1024  # characters of a traceback's text that travel
PACKAGE = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""
)


class _Part(NamedTuple):
    """One argument or attribute of an exception.

    Attributes:
        pickled: The value, or `None` if it cannot be pickled.
        text: The value's `repr`, shown if it cannot be loaded.
    """

    pickled: bytes | None
    text: str


class _Description(NamedTuple):
    """The data to rebuild one exception, without its cause and context.

    Attributes:
        text: The formatted traceback, used if nothing else can be.
        make: The pickled exception, or a pickled function that makes it.
        args: The arguments of that function.
        state: The exception's attributes, by name.
        frames: The traceback, frame by frame, as tblib describes it.
        notes: The texts that `add_note` added.
    """

    text: str
    make: bytes | None
    args: tuple[_Part, ...]
    state: dict[str, _Part]
    frames: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]


class Unpicklable:
    """Placeholder with the `repr` of a value that pickle cannot transfer."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def dump_exception(error: BaseException) -> bytes:
    """Pickles an exception for `load_exception`."""
    if isinstance(error, bdb.BdbQuit):
        debugger = no_debugger().with_traceback(error.__traceback__)
        for text in _notes_of(error):
            note(debugger, text)
        error = debugger
    # `None` for an exception made to be difficult, or too deep for pickle.
    pickled = _dumps(error)
    return pickle.dumps((_text_of(error)[-_MAX_TEXT:], pickled), protocol=5)


def load_exception(described: bytes) -> BaseException:
    """Unpickles an exception; on failure, returns a `LoaderError` instead."""
    text, pickled = pickle.loads(described)
    if pickled is not None:
        # Loading runs the user's code, which may raise anything.
        with contextlib.suppress(Exception):
            error: BaseException = pickle.loads(pickled)
            return error
    return _text_alone(text)


def note(error: BaseException, text: str) -> None:
    """Adds a note, even if the exception's class forbids setting attributes."""
    notes = [*_notes_of(error), text]
    BaseException.__setattr__(error, "__notes__", notes)


def note_causes(error: BaseException) -> None:
    """Inserts a first note that lists the causes of an exception."""
    lines: list[str] = []
    cause = error.__cause__
    while cause is not None and len(lines) < _MAX_CHAIN:
        said = "".join(traceback.format_exception_only(cause)).strip()
        lines.append(f"Caused{_place_of(cause)} by {said}")
        cause = cause.__cause__
    if lines:
        notes = ["\n".join(lines), *_notes_of(error)]
        BaseException.__setattr__(error, "__notes__", notes)


def shorten(error: BaseException) -> None:
    """Filters this package's frames out of the traceback of an exception.

    A bare `raise` afterwards does not add the caller's frame again.
    `keras.config.disable_traceback_filtering()` keeps all frames.
    """
    keras = sys.modules.get("keras")
    if keras and not keras.config.is_traceback_filtering_enabled():
        return
    met: set[int] = set()
    last: BaseException | None = error
    while last is not None and id(last) not in met:
        met.add(id(last))
        tb = _without_the_package(last.__traceback__)
        BaseException.__setattr__(last, "__traceback__", tb)
        last = last.__cause__ or last.__context__


def text_of(error: BaseException) -> str:
    """Formats the traceback of an exception from the user's first frame on."""
    own = error.__traceback__
    try:
        return _text_of(error.with_traceback(_outside_the_package(own)))
    finally:
        error.with_traceback(own)


def look_of(value: Any) -> str:
    """Returns `repr(value)`, or a placeholder if `repr` raises."""
    return _safely(repr, value)


def no_debugger() -> LoaderError:
    """Returns the error to raise if a debugger starts in a worker process."""
    return LoaderError(
        "A debugger was started in a worker process, which has no terminal. "
        "Make the dataset with `workers=0` to debug `__getitem__` in the "
        "training process, or call `dataset[index]` yourself."
    )


def no_breakpoint(*_: Any, **__: Any) -> None:
    """Replaces `breakpoint()` in a worker process, to raise an error."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise no_debugger()


# -- in the worker -------------------------------------------------------------


def _describe(error: BaseException) -> _Description:
    _under_way.errors.append(error)
    try:
        make, args, state = _recipe_of(error)
    finally:
        _under_way.errors.pop()
    return _Description(
        text=_text_of(error)[-_MAX_TEXT:],
        make=make,
        args=args,
        state=state,
        frames=tuple(_frames_of(_outside_the_package(error.__traceback__))),
        notes=tuple(_safely(str, n) for n in _notes_of(error)),
    )


def _notes_of(error: BaseException) -> list[Any]:
    try:
        # Not `getattr`, which would ask the user's `__getattr__`.
        found = BaseException.__getattribute__(error, "__notes__")
    except AttributeError:
        found = None
    return list(found) if isinstance(found, (list, tuple)) else []


def _text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as broken:
        # The user's `__str__` may raise anything.
        return f"{type(error).__name__} (its text cannot be had: {broken!r})"


def _safely(convert: Any, value: Any) -> str:
    try:
        return str(convert(value))
    except Exception:
        # The user's `__str__` and `__repr__` may raise anything.
        return f"<{type(value).__name__} without a text>"


_Recipe = tuple[bytes | None, tuple[_Part, ...], dict[str, _Part]]


def _recipe_of(error: BaseException) -> _Recipe:
    """Computes `make`, `args` and `state` of an exception's `_Description`."""
    cls = type(error)
    if _says_how_to_pickle(cls):
        own = _dumps(error, whole=error)
        if _loads_as(own, cls):
            return own, (), {}
    elif not isinstance(cls.__init__, types.FunctionType):
        with contextlib.suppress(Exception):
            # An exception written in C knows best how to be rebuilt.
            return _dumped(error, error.__reduce_ex__(4))
    _, *rest = _builtin_base(cls).__reduce__(error)
    return _dumped(error, (_Bare(cls), *rest))


def _dumped(error: BaseException, reduced: Any) -> _Recipe:
    make, args, *more = reduced
    extra = more[0] if more and isinstance(more[0], dict) else {}
    state = {**_attributes_of(error), **extra}
    state.pop("__notes__", None)
    parts = {name: _part(value) for name, value in state.items()}
    return _dumps(make), tuple(map(_part, args)), parts


def _says_how_to_pickle(cls: type) -> bool:
    names = ("__reduce__", "__reduce_ex__", "__setstate__", "__getstate__")
    return any(
        isinstance(vars(base).get(name), types.FunctionType)
        for base in cls.__mro__
        for name in names
    )


def _loads_as(pickled: bytes | None, cls: type) -> bool:
    try:
        return pickled is not None and type(pickle.loads(pickled)) is cls
    except Exception:
        # The class's own recipe raises; the exception is rebuilt without it.
        return False


def _builtin_base(cls: type) -> Any:
    return next(b for b in cls.__mro__ if b.__module__ == "builtins")


def _attributes_of(error: BaseException) -> dict[str, Any]:
    found = dict(getattr(error, "__dict__", {}))
    for base in type(error).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            with contextlib.suppress(AttributeError):
                found[name] = BaseException.__getattribute__(error, name)
    return found


def _part(value: Any) -> _Part:
    pickled = _dumps(value)
    if pickled is not None and isinstance(value, (str, bytes, int, float)):
        return _Part(pickled, type(value).__name__)
    return _Part(pickled, _safely(repr, value)[:1000])


def _outside_the_package(
    tb: types.TracebackType | None,
) -> types.TracebackType | None:
    """Removes this package's frames that precede the user's first frame."""
    first = tb
    while tb and tb.tb_frame.f_code.co_filename.startswith(PACKAGE):
        tb = tb.tb_next
    return tb or first


def _links_of(
    tb: types.TracebackType | None,
) -> list[types.TracebackType]:
    links = []
    while tb is not None:
        links.append(tb)
        tb = tb.tb_next
    return links


def _is_ours(link: types.TracebackType) -> bool:
    return link.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _without_the_package(
    tb: types.TracebackType | None,
) -> types.TracebackType | None:
    """Removes this package's frames, except for the frame that raised."""
    links = _links_of(tb)
    kept = links.pop() if links else None
    for link in reversed(links):
        if not _is_ours(link):
            kept = types.TracebackType(
                kept, link.tb_frame, link.tb_lasti, link.tb_lineno
            )
    return kept


def _place_of(error: BaseException) -> str:
    """Returns text that names the innermost frame outside this package."""
    links = [x for x in _links_of(error.__traceback__) if not _is_ours(x)]
    if not links:
        return ""
    code = links[-1].tb_frame.f_code
    return (
        f" in {code.co_name} ({code.co_filename}, line {links[-1].tb_lineno})"
    )


def _frames_of(tb: types.TracebackType | None) -> Iterator[dict[str, Any]]:
    """Yields tblib's dictionary for each frame of a traceback.

    One by one, because tblib nests a traceback as deep as it is long.
    """
    for link in _links_of(tb):
        alone = types.TracebackType(
            None, link.tb_frame, link.tb_lasti, link.tb_lineno
        )
        yield tblib.Traceback(alone).as_dict()


# -- in the training process ---------------------------------------------------


def _text_alone(text: str) -> LoaderError:
    return LoaderError(
        "A worker raised an exception that cannot be rebuilt in this process. "
        f"Its text:\n\n{text}"
    )


def _rebuild(description: _Description) -> BaseException:
    """Rebuilds an exception; `_link` then sets its cause and context."""
    error, left_out = _rebuild_bare(description)
    if error is None:
        return _text_alone(description.text)
    if description.frames:
        error = error.with_traceback(_traceback_of(description.frames))
    for text in description.notes:
        note(error, text)
    if left_out:
        names = ", ".join(left_out)
        note(error, f"Left behind in the worker: {names}.")
    return error


def _link(
    error: BaseException,
    links: tuple[BaseException | None, BaseException | None, bool],
) -> None:
    """Sets `__cause__`, `__context__` and `__suppress_context__`."""
    cause, context, suppress = links
    put = BaseException.__setattr__
    if context is not None or cause is not None:
        put(error, "__context__", cause if context is None else context)
    if cause is not None:
        put(error, "__cause__", cause)
    put(error, "__suppress_context__", suppress)


def _rebuild_bare(
    description: _Description,
) -> tuple[BaseException | None, list[str]]:
    """Returns the exception (`None` on failure) and its lost attributes."""
    if description.make is None:
        return None, []
    left_out = []
    try:
        error = pickle.loads(description.make)
        if not isinstance(error, BaseException):
            error = error(*map(_load, description.args))
        if not isinstance(error, BaseException):
            return None, []
        for name, part in description.state.items():
            value = _load(part)
            if isinstance(value, Unpicklable):
                left_out.append(f"{name} ({part.text})")
            else:
                BaseException.__setattr__(error, name, value)
    except Exception:
        # The user's constructors and imports; the text remains.
        return None, []
    return error, left_out


def _load(part: _Part) -> Any:
    if part.pickled is not None:
        with contextlib.suppress(Exception):
            # Loading runs the user's code.
            return pickle.loads(part.pickled)
    return Unpicklable(part.text)


@dataclasses.dataclass(frozen=True)
class _Bare:
    """Creates an exception without running its class's own `__init__`."""

    cls: type[BaseException]

    def __call__(self, *args: Any) -> BaseException:
        builtin = _builtin_base(self.cls)
        try:
            error: BaseException = builtin.__new__(self.cls, *args)
        except TypeError:
            # A base class written in C needs its own `__new__`.
            error = self.cls.__new__(self.cls, *args)
        initialize: Any = vars(builtin).get("__init__", BaseException.__init__)
        try:
            initialize(error, *args)
        except TypeError:
            # A subclass of, say, UnicodeDecodeError with arguments of its own.
            BaseException.__setattr__(error, "args", args)
        return error


def _traceback_of(
    frames: tuple[dict[str, Any], ...],
) -> types.TracebackType | None:
    """Builds a traceback from the frames of another process.

    It has no column positions: these would point into the code of tblib.
    """
    tb = None
    for frame in reversed(frames):
        made = tblib.Traceback.from_dict(frame).as_traceback()
        tb = types.TracebackType(tb, made.tb_frame, -1, made.tb_lineno)
    return tb


# -- pickling ------------------------------------------------------------------


class _UnderWay(threading.local):
    """Stack of the exceptions whose attributes this thread is pickling."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


_under_way = _UnderWay()


def _dumps(value: Any, whole: Any = None) -> bytes | None:
    stream = io.BytesIO()
    try:
        _ExceptionPickler(stream, whole).dump(value)
    except Exception:
        # Pickling runs the user's code, which may raise anything.
        return None
    return stream.getvalue()


class _ExceptionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that turns exceptions into `_Description` objects.

    pickle's own memo keeps exceptions that refer to each other from being
    described twice.
    """

    def __init__(self, file: io.BytesIO, whole: Any) -> None:
        super().__init__(file, protocol=5)
        self._whole = whole
        self._chain: dict[int, int] = {}  # id to causes that may follow

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and obj is not self._whole:
            outer = _under_way.errors
            if len(outer) > _MAX_NESTED or any(obj is other for other in outer):
                return Unpicklable, (_safely(repr, obj)[:1000],)
            return self._reduced(obj, 0 if outer else _MAX_CHAIN)
        if isinstance(obj, type):
            reduced = class_refs.reduce_class(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)

    def _reduced(self, error: BaseException, chain: int) -> Any:
        chain = self._chain.get(id(error), chain)
        cause, context = error.__cause__, error.__context__
        if context is cause:
            context = None
        if not chain:
            cause = context = None
        for link in (cause, context):
            self._chain.setdefault(id(link), chain - 1)
        links = (cause, context, error.__suppress_context__)
        return _rebuild, (_describe(error),), links, None, None, _link
