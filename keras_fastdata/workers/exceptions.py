"""Exceptions on their way from a worker to the caller of `fit`.

An exception travels as a description that is taken apart and put together
without running its class's `__init__`, so that one with two arguments or none
arrives as well as any other. Its frames travel through tblib. Each part is
pickled on its own: a lock in an attribute costs that attribute, not the
exception. What cannot be rebuilt at all arrives as a `LoaderError` with the
full text.
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
from typing import Any

import cloudpickle
import tblib

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs

_MAX_CHAIN = 16  # causes of causes
_MAX_NESTED = 3  # exceptions that are attributes of exceptions
_MAX_TEXT = 64 * 1024  # characters
PACKAGE = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""
)


@dataclasses.dataclass(frozen=True)
class PickledPart:
    """One argument or attribute.

    Attributes:
        pickled: The value, or `None` where it cannot be pickled.
        text: What it looks like.
    """

    pickled: bytes | None
    text: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """One exception, taken apart.

    Attributes:
        text: The formatted traceback, should nothing else be of use.
        make: Pickled function and class that rebuild it, or `None`.
        args: What they are called with.
        state: Attributes, by name.
        frames: The traceback, frame by frame, as tblib describes it.
        notes: What `add_note` added.
        cause: `__cause__`, taken apart.
        context: `__context__`, taken apart.
        suppress_context: `__suppress_context__`.
        number: Among those that are described together.
        same_as: The number of the one that this is, if it was met before.
    """

    text: str
    make: bytes | None = None
    args: tuple[PickledPart, ...] = ()
    state: dict[str, PickledPart] = dataclasses.field(default_factory=dict)
    frames: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    cause: Failure | None = None
    context: Failure | None = None
    suppress_context: bool = False
    number: int = 0
    same_as: int | None = None


class Unpicklable:
    """Stands for an argument that could not travel; it looks like it did."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def dump_exception(error: BaseException) -> bytes:
    """Describes an exception so that `load_exception` can rebuild it."""
    if isinstance(error, bdb.BdbQuit):
        debugger = no_debugger().with_traceback(error.__traceback__)
        for text in _notes_of(error):
            note(debugger, text)
        error = debugger
    try:
        return pickle.dumps(_describe(error, _MAX_CHAIN), protocol=5)
    except Exception:
        # An exception made to be difficult, or too deep for pickle.
        return pickle.dumps(Failure(_text_of(error)[-_MAX_TEXT:]), protocol=5)


def load_exception(described: bytes) -> BaseException:
    """Rebuilds the exception, or a `LoaderError` with its text."""
    failure: Failure = pickle.loads(described)
    try:
        return _rebuild(failure)
    except Exception:
        # Other people's code once more: an exception may hook into anything.
        return _text_alone(failure)


def note(error: BaseException, text: str) -> None:
    """`error.add_note(text)`, also for one that lets nobody set attributes."""
    notes = [*_notes_of(error), text]
    BaseException.__setattr__(error, "__notes__", notes)


def note_causes(error: BaseException) -> None:
    """Names what led to an exception, a line each, before all other notes."""
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
    """Drops our frames from tracebacks, as Keras drops its own, and likewise.

    Re-raised by a bare `raise`, the exception does not get the frame back that
    called this. `keras.config.disable_traceback_filtering()` keeps all.
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
    """The formatted traceback, from the user's first frame on."""
    own = error.__traceback__
    try:
        return _text_of(error.with_traceback(_outside_the_package(own)))
    finally:
        error.with_traceback(own)


def look_of(value: Any) -> str:
    """`repr(value)`, whatever that does."""
    return _safely(repr, value)


def no_debugger() -> LoaderError:
    """The error for a debugger that was started in a worker process."""
    return LoaderError(
        "A debugger was started in a worker process, which has no terminal. "
        "Make the dataset with `workers=0` to debug `__getitem__` in the "
        "training process, or call `dataset[index]` yourself."
    )


def no_breakpoint(*_: Any, **__: Any) -> None:
    """What `breakpoint()` does in a worker process."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise no_debugger()


# -- in the worker -------------------------------------------------------------


def _describe(
    error: BaseException, depth: int, seen: dict[int, int] | None = None
) -> Failure:
    """Describes an exception, and those that led to it, each of them once.

    Args:
        error: The exception.
        depth: How many in a row may have led to it.
        seen: Those that have been described: `id` to number.
    """
    seen = {} if seen is None else seen
    if id(error) in seen:
        return Failure("", same_as=seen[id(error)])
    number = seen[id(error)] = len(seen)
    _under_way.errors.append(error)
    try:
        make, args, state = _recipe_of(error)
    finally:
        _under_way.errors.pop()
    cause, context = error.__cause__, error.__context__
    if context is cause:
        context = None
    return Failure(
        text=_text_of(error)[-_MAX_TEXT:],
        make=make,
        args=args,
        state=state,
        frames=tuple(_frames_of(_outside_the_package(error.__traceback__))),
        notes=tuple(_safely(str, n) for n in _notes_of(error)),
        cause=(
            _describe(cause, depth - 1, seen)
            if cause is not None and depth
            else None
        ),
        context=(
            _describe(context, depth - 1, seen)
            if context is not None and depth
            else None
        ),
        suppress_context=error.__suppress_context__,
        number=number,
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
        # As above, of the user's `__str__` and `__repr__`.
        return f"<{type(value).__name__} without a text>"


def _recipe_of(
    error: BaseException,
) -> tuple[bytes | None, tuple[PickledPart, ...], dict[str, PickledPart]]:
    """How to make it, with which arguments, and what to set on it then."""
    cls = type(error)
    if _says_how_to_pickle(cls):
        own = _dumps(error, whole=error)
        if _loads_as(own, cls):
            return _dumps(_given), (PickledPart(own, ""),), {}
    elif not isinstance(cls.__init__, types.FunctionType):
        with contextlib.suppress(Exception):
            # An exception written in C knows best.
            reduced: Any = error.__reduce_ex__(4)
            make, args, *more = reduced
            extra = more[0] if more and isinstance(more[0], dict) else {}
            state = {**_attributes_of(error), **extra}
            return _dumps(make), _parts(args), _state(state)
    _, args, *more = _builtin_base(cls).__reduce__(error)
    extra = more[0] if more and isinstance(more[0], dict) else {}
    state = {**_attributes_of(error), **extra}
    return _dumps(_Bare(cls)), _parts(args), _state(state)


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


def _parts(values: Any) -> tuple[PickledPart, ...]:
    return tuple(_part(value) for value in values)


def _state(attributes: dict[str, Any]) -> dict[str, PickledPart]:
    attributes.pop("__notes__", None)
    return {name: _part(value) for name, value in attributes.items()}


def _part(value: Any) -> PickledPart:
    pickled = _dumps(value)
    if pickled is not None and isinstance(value, (str, bytes, int, float)):
        return PickledPart(pickled, type(value).__name__)
    return PickledPart(pickled, _safely(repr, value)[:1000])


def _outside_the_package(
    tb: types.TracebackType | None,
) -> types.TracebackType | None:
    """Drops our own frames above the user's."""
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
    """Drops all our frames but the one that raised, if it is ours."""
    links = _links_of(tb)
    kept = links.pop() if links else None
    for link in reversed(links):
        if not _is_ours(link):
            kept = types.TracebackType(
                kept, link.tb_frame, link.tb_lasti, link.tb_lineno
            )
    return kept


def _place_of(error: BaseException) -> str:
    """Where an exception was raised, outside of this package."""
    links = [x for x in _links_of(error.__traceback__) if not _is_ours(x)]
    if not links:
        return ""
    code = links[-1].tb_frame.f_code
    return (
        f" in {code.co_name} ({code.co_filename}, line {links[-1].tb_lineno})"
    )


def _frames_of(tb: types.TracebackType | None) -> Iterator[dict[str, Any]]:
    """Yields tblib's description of each frame.

    One by one, because tblib nests a traceback as deep as it is long.
    """
    while tb is not None:
        alone = types.TracebackType(
            None, tb.tb_frame, tb.tb_lasti, tb.tb_lineno
        )
        yield tblib.Traceback(alone).as_dict()
        tb = tb.tb_next


# -- in the training process ---------------------------------------------------


def _text_alone(failure: Failure) -> LoaderError:
    return LoaderError(
        "A worker raised an exception that cannot be rebuilt in this process. "
        f"Its text:\n\n{failure.text}"
    )


def _rebuild(
    failure: Failure, made: dict[int, BaseException] | None = None
) -> BaseException:
    """Rebuilds an exception, and those that led to it.

    Args:
        failure: What `_describe` has made of it.
        made: Those that have been rebuilt, by number.
    """
    made = {} if made is None else made
    if failure.same_as is not None:
        return made[failure.same_as]
    error, left_out = _rebuild_alone(failure)
    is_whole = error is not None
    if error is None:
        error = _text_alone(failure)
    made[failure.number] = error
    cause, context = (
        None if other is None else _rebuild(other, made)
        for other in (failure.cause, failure.context)
    )
    if not is_whole:
        return error  # whose text tells of those
    if failure.frames:
        error = error.with_traceback(_traceback_of(failure.frames))
    for text in failure.notes:
        note(error, text)
    if left_out:
        names = ", ".join(left_out)
        note(error, f"Left behind in the worker: {names}.")
    put = BaseException.__setattr__
    if context is not None or cause is not None:
        put(error, "__context__", cause if context is None else context)
    if cause is not None:
        put(error, "__cause__", cause)
    put(error, "__suppress_context__", failure.suppress_context)
    return error


def _rebuild_alone(
    failure: Failure,
) -> tuple[BaseException | None, list[str]]:
    """The exception, and the attributes that it lacks."""
    if failure.make is None:
        return None, []
    left_out = []
    try:
        error = pickle.loads(failure.make)(*map(_load, failure.args))
        if not isinstance(error, BaseException):
            return None, []
        for name, part in failure.state.items():
            value = _load(part)
            if isinstance(value, Unpicklable):
                left_out.append(f"{name} ({part.text})")
            else:
                BaseException.__setattr__(error, name, value)
    except Exception:
        # Other people's constructors and imports; the text remains.
        return None, []
    return error, left_out


def _load(part: PickledPart) -> Any:
    if part.pickled is not None:
        with contextlib.suppress(Exception):
            # Loading runs other people's code.
            return pickle.loads(part.pickled)
    return Unpicklable(part.text)


def _given(error: Any) -> Any:
    return error


@dataclasses.dataclass(frozen=True)
class _Bare:
    """Makes an instance on which only the built-in `__init__` has run."""

    cls: type[BaseException]

    def __call__(self, *args: Any) -> BaseException:
        builtin = _builtin_base(self.cls)
        try:
            error: BaseException = builtin.__new__(self.cls, *args)
        except TypeError:
            # A base class in C wants its own `__new__`.
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
    """A traceback of frames that were elsewhere."""
    chain = None
    for frame in reversed(frames):
        one = tblib.Traceback.from_dict(frame)
        one.tb_next = chain
        chain = one
    return None if chain is None else _without_columns(chain.as_traceback())


def _without_columns(tb: types.TracebackType) -> types.TracebackType:
    """Drops the columns, which are those of tblib's own line of code."""
    bare: types.TracebackType | None = None
    for link in reversed(_links_of(tb)):
        bare = types.TracebackType(bare, link.tb_frame, -1, link.tb_lineno)
    assert bare is not None
    return bare


# -- pickling ------------------------------------------------------------------


class _UnderWay(threading.local):
    """Exceptions whose attributes are being pickled, outermost first."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


_under_way = _UnderWay()


def _dumps(value: Any, whole: Any = None) -> bytes | None:
    stream = io.BytesIO()
    try:
        _ExceptionPickler(stream, whole).dump(value)
    except Exception:
        # Pickling runs other people's code, which may raise anything.
        return None
    return stream.getvalue()


class _ExceptionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with exceptions taken apart and classes as references.

    Args:
        file: Where to.
        whole: An exception to pickle as its class says.
    """

    def __init__(self, file: io.BytesIO, whole: Any) -> None:
        super().__init__(file, protocol=5)
        self._whole = whole

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and obj is not self._whole:
            outer = _under_way.errors
            if len(outer) > _MAX_NESTED or any(obj is other for other in outer):
                return Unpicklable, (_safely(repr, obj)[:1000],)
            return _rebuild, (_describe(obj, 0),)
        if isinstance(obj, type):
            reduced = class_refs.reduce_class(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)
