"""Transfers exceptions from a worker to the training process.

An exception is pickled as a description, and rebuilt without its class's
`__init__`, which may take any arguments. tblib describes the frames. (Its own
`pickle_exception` loses slots and the fields of `UnicodeDecodeError`.) Each
argument and attribute is pickled on its own, so that a lock in an attribute
costs that attribute alone. An exception that cannot be rebuilt arrives as a
`LoaderError` with the full text.
"""

from __future__ import annotations

import ast
import bdb
import contextlib
import functools
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

from keras_fastdata._modules import loaded
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs

_MAX_CHAIN = 16  # causes of causes that travel
_MAX_NESTED = 3  # exceptions in attributes of exceptions that travel
_MAX_TEXT = 64 * 1024  # characters of a traceback's text that travel
PACKAGE = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""
)


_set = BaseException.__setattr__  # a class may forbid setting attributes


class _Part(NamedTuple):
    """One argument or attribute of an exception."""

    pickled: bytes | None  # the value, or `None` if it cannot be pickled
    text: str  # the value's `repr`, shown if it cannot be loaded


class _Description(NamedTuple):
    """The data needed to rebuild one exception, without cause and context."""

    text: str  # the formatted traceback, used if nothing else can be
    # The pickled exception, or a pickled function that makes it.
    make: bytes | None
    args: tuple[_Part, ...]  # the arguments of that function
    state: dict[str, _Part]  # the exception's attributes, by name
    # The traceback, frame by frame, as tblib describes it.
    frames: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]  # the texts that `add_note` added


class Unpicklable:
    """Placeholder with the `repr` of a value that pickle cannot transfer."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def dump_exception(error: BaseException) -> bytes:
    """Pickles an exception for `load_exception`."""
    if isinstance(error, bdb.BdbQuit):
        quitted = error
        error = no_debugger().with_traceback(quitted.__traceback__)
        _set_notes(error, _notes_of(quitted))
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
    """Adds a note to an exception, even if it forbids setting attributes."""
    _set_notes(error, [*_notes_of(error), text])


def note_causes(error: BaseException) -> None:
    """Adds a note that lists an exception's causes, before its other notes."""
    lines: list[str] = []
    cause = error.__cause__
    while cause is not None and len(lines) < _MAX_CHAIN:
        said = "".join(traceback.format_exception_only(cause)).strip()
        lines.append(f"Caused{_place_of(cause)} by {said}")
        cause = cause.__cause__
    if lines:
        _set_notes(error, ["\n".join(lines), *_notes_of(error)])


def shorten(error: BaseException) -> None:
    """Removes this package's frames from the traceback of an exception.

    A bare `raise` afterwards does not add the caller's frame again.
    `keras.config.disable_traceback_filtering()` keeps all frames.
    """
    keras = loaded("keras")
    if keras and not keras.config.is_traceback_filtering_enabled():
        return
    met: set[int] = set()
    last: BaseException | None = error
    while last is not None and id(last) not in met:
        met.add(id(last))
        tb = _without_the_package(last.__traceback__)
        _set(last, "__traceback__", tb)
        last = last.__cause__ or last.__context__


def text_of(error: BaseException) -> str:
    """Formats an exception's traceback, starting at the user's first frame."""
    own = error.__traceback__
    try:
        return _text_of(error.with_traceback(_outside_the_package(own)))
    finally:
        error.with_traceback(own)


def safely(convert: Any, value: Any) -> str:
    """Returns `convert(value)` as text; a placeholder if `convert` raises."""
    try:
        return str(convert(value))
    except Exception:
        # The user's `__str__` and `__repr__` may raise anything.
        return f"<{type(value).__name__} without a text>"


def no_debugger() -> LoaderError:
    """Returns the error to raise if a debugger starts in a worker process."""
    return LoaderError(
        "A debugger was started in a worker process, which has no terminal. "
        "Make the dataset with `workers=0` to debug `__getitem__` in the "
        "training process, or call `dataset[index]` yourself."
    )


def no_breakpoint(*_: Any, **__: Any) -> None:
    """Raises an error when the user's code calls `breakpoint()` in a worker."""
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
        notes=tuple(safely(str, n) for n in _notes_of(error)),
    )


def _notes_of(error: BaseException) -> list[Any]:
    try:
        # Not `getattr`, which would ask the user's `__getattr__`.
        found = BaseException.__getattribute__(error, "__notes__")
    except AttributeError:
        return []
    return list(found) if isinstance(found, (list, tuple)) else []


def _set_notes(error: BaseException, notes: list[Any]) -> None:
    _set(error, "__notes__", notes)


def _text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:
        # The user's `__str__` may raise anything, even `SystemExit`.
        return f"{type(error).__name__} (its text cannot be had: {broken!r})"


_Recipe = tuple[bytes | None, tuple[_Part, ...], dict[str, _Part]]


def _recipe_of(error: BaseException) -> _Recipe:
    """Computes `make`, `args` and `state` of an exception's `_Description`."""
    cls = type(error)
    if _says_how_to_pickle(cls):
        own = _dumps(error, whole=error)
        # The class's own recipe may raise anything, even `SystemExit`.
        with contextlib.suppress(BaseException):
            if own is not None and type(pickle.loads(own)) is cls:
                return own, (), {}
    elif not isinstance(cls.__init__, types.FunctionType):
        with contextlib.suppress(Exception):
            # An exception written in C knows best how to be rebuilt.
            return _dumped(error, error.__reduce_ex__(4))
    _, *rest = _builtin_base(cls).__reduce__(error)
    return _dumped(error, (functools.partial(_bare, cls), *rest))


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
    return _Part(pickled, safely(repr, value)[:1000])


def _outside_the_package(
    tb: types.TracebackType | None,
) -> types.TracebackType | None:
    """Removes this package's frames that precede the user's first frame."""
    first = tb
    while tb and tb.tb_frame.f_code.co_filename.startswith(PACKAGE):
        tb = tb.tb_next
    return tb or first


def _links_of(tb: types.TracebackType | None) -> list[types.TracebackType]:
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
            kept = _linked(link, kept)
    return kept


def _linked(
    link: types.TracebackType, to: types.TracebackType | None
) -> types.TracebackType:
    """Returns one link of a traceback, with another one behind it.

    Where Python has no line for an instruction, the line of the `def` counts.
    """
    line = link.tb_lineno or link.tb_frame.f_code.co_firstlineno
    return types.TracebackType(to, link.tb_frame, link.tb_lasti, line)


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
        yield tblib.Traceback(_linked(link, None)).as_dict()


# -- in the training process ---------------------------------------------------


def _text_alone(text: str) -> LoaderError:
    return LoaderError(
        "A worker raised an exception that cannot be rebuilt in this process. "
        f"Its text:\n\n{text}"
    )


def _rebuild(description: _Description) -> BaseException:
    """Rebuilds an exception; `_link` then sets its cause and context."""
    left_out = []
    try:
        made = pickle.loads(description.make or b"")
        if not isinstance(made, BaseException):
            made = made(*map(_load, description.args))
        if not isinstance(made, BaseException):
            raise TypeError
        error: BaseException = made
        for name, part in description.state.items():
            value = _load(part)
            if isinstance(value, Unpicklable):
                left_out.append(f"{name} ({part.text})")
            else:
                _set(error, name, value)
    except Exception:
        # The user's constructors and imports; the text remains.
        return _text_alone(description.text)
    if description.frames:
        error = error.with_traceback(_traceback_of(description.frames))
    notes = [*_notes_of(error), *description.notes]
    if left_out:
        notes.append(f"Left behind in the worker: {', '.join(left_out)}.")
    if notes:
        _set_notes(error, notes)
    return error


def _link(
    error: BaseException,
    links: tuple[BaseException | None, BaseException | None, bool],
) -> None:
    """Sets the cause and the context of an exception."""
    cause, context, suppress = links
    if context is not None or cause is not None:
        _set(error, "__context__", cause if context is None else context)
    if cause is not None:
        _set(error, "__cause__", cause)
    _set(error, "__suppress_context__", suppress)


def _load(part: _Part) -> Any:
    if part.pickled is not None:
        with contextlib.suppress(Exception):
            # Loading runs the user's code.
            return pickle.loads(part.pickled)
    return Unpicklable(part.text)


def _bare(cls: type[BaseException], *args: Any) -> BaseException:
    """Creates an exception without running its class's own `__init__`."""
    builtin = _builtin_base(cls)
    try:
        error: BaseException = builtin.__new__(cls, *args)
    except TypeError:
        # A base class written in C needs its own `__new__`.
        error = cls.__new__(cls, *args)
    initialize: Any = vars(builtin).get("__init__", BaseException.__init__)
    try:
        initialize(error, *args)
    except TypeError:
        # A subclass of, say, UnicodeDecodeError with arguments of its own.
        _set(error, "args", args)
    return error


def _traceback_of(
    frames: tuple[dict[str, Any], ...],
) -> types.TracebackType | None:
    """Builds a traceback from the frames of another process.

    It has no column positions, as tblib's would have: these would point into
    code that raises in their place.
    """
    tb = None
    for frame in reversed(frames):
        found = tblib.Traceback.from_dict(frame)
        code = _raising_code().replace(
            co_filename=found.tb_frame.f_code.co_filename,
            co_name=found.tb_frame.f_code.co_name,
            co_firstlineno=found.tb_lineno,
        )
        link = None
        try:
            exec(code, {**found.tb_frame.f_globals}, {})
        except ZeroDivisionError:
            link = _links_of(sys.exc_info()[2])[-1]
        assert link is not None
        # Not -1 in place of its `tb_lasti`: IPython would search for ever.
        tb = _linked(link, tb)
    return tb


@functools.cache
def _raising_code() -> types.CodeType:
    """Returns code that raises an error in its first line, in no column."""
    place: dict[str, Any] = {
        "lineno": 1,
        "col_offset": -1,
        "end_col_offset": -1,
    }
    one, zero = ast.Constant(1, **place), ast.Constant(0, **place)
    division = ast.BinOp(one, ast.Div(), zero, **place)
    return compile(ast.Expression(division), "<worker>", "eval")


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
    except BaseException:
        # Pickling runs the user's code, which may raise anything, even
        # `SystemExit`.
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
                return Unpicklable, (safely(repr, obj)[:1000],)
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
