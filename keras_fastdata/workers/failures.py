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
import traceback
import types
from typing import Any

import cloudpickle
import tblib

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import classes

_MAX_CHAIN = 16  # causes of causes
_MAX_TEXT = 64 * 1024  # characters
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Failure:
    """One exception, taken apart.

    Attributes:
        text: The formatted traceback, should nothing else be of use.
        recipe: Pickled (class, builder, arguments), or `None`.
        state: Attribute names and their pickled values.
        left_out: Attributes that could not be pickled.
        frames: The traceback as tblib's dictionary, or `None`.
        notes: What `add_note` added.
        cause: `__cause__`, taken apart.
        context: `__context__`, taken apart.
        suppress_context: `__suppress_context__`.
    """

    text: str
    recipe: bytes | None
    state: dict[str, bytes]
    left_out: tuple[str, ...]
    frames: dict[str, Any] | None
    notes: tuple[str, ...]
    cause: Failure | None
    context: Failure | None
    suppress_context: bool


class Unpicklable:
    """Stands for an argument that could not travel; it looks like it did."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def take_apart(error: BaseException) -> bytes:
    """Describes an exception so that `put_together` can rebuild it."""
    if isinstance(error, bdb.BdbQuit):
        error = no_debugger().with_traceback(error.__traceback__)
    return pickle.dumps(_describe(error, _MAX_CHAIN), protocol=5)


def put_together(described: bytes) -> BaseException:
    """Rebuilds the exception, or a `LoaderError` with its text."""
    return _rebuild(pickle.loads(described))


def no_debugger() -> LoaderError:
    """The error for a debugger that was started in a worker process."""
    return LoaderError(
        "A debugger was started in a worker process, which has no terminal. "
        "Make the dataset with `workers=0` to debug `__getitem__` in the "
        "training process, or call `dataset[index]` yourself."
    )


def _describe(error: BaseException, depth: int) -> Failure:
    text = _text_of(error)
    recipe = _own_recipe_of(error)
    state, left_out = ({}, []) if recipe else _state_of(error)
    cause, context = error.__cause__, error.__context__
    frames = _outside_the_package(error.__traceback__)
    return Failure(
        text=text[-_MAX_TEXT:],
        recipe=recipe or _recipe_of(error),
        state=state,
        left_out=tuple(left_out),
        frames=tblib.Traceback(frames).to_dict() if frames else None,
        notes=tuple(str(n) for n in getattr(error, "__notes__", ())),
        cause=_describe(cause, depth - 1) if cause and depth else None,
        context=(
            _describe(context, depth - 1)
            if context and context is not cause and depth
            else None
        ),
        suppress_context=error.__suppress_context__,
    )


def _text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as broken:
        # The user's `__str__` may raise anything.
        return f"{type(error).__name__} (its text cannot be had: {broken!r})"


def _own_recipe_of(error: BaseException) -> bytes | None:
    """The recipe of a class that says how to pickle it, if it works."""
    cls = type(error)
    if not _says_how_to_pickle(cls):
        return None
    recipe = _dumps((_given, (error,)))
    try:
        works = recipe and type(pickle.loads(recipe)[1][0]) is cls
    except Exception:
        # The class's own recipe raises; rebuild the exception without it.
        works = False
    return recipe if works else None


def _recipe_of(error: BaseException) -> bytes | None:
    cls = type(error)
    reduced = error.__reduce_ex__(4)
    if not isinstance(reduced, tuple):
        return None
    if isinstance(cls.__init__, types.FunctionType):
        # What the built-in base was given: OSError's `args` lack the path.
        given = _picklable_args(reduced[1])
        return _dumps((_bare, (cls, given, _picklable_args(error.args))))
    return _dumps((_called, (reduced[0], _picklable_args(reduced[1]))))


def _says_how_to_pickle(cls: type) -> bool:
    names = ("__reduce__", "__reduce_ex__", "__setstate__", "__getstate__")
    return any(
        isinstance(vars(base).get(name), types.FunctionType)
        for base in cls.__mro__
        for name in names
    )


def _picklable_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if _dumps(args) is not None:
        return args
    return tuple(
        arg if _dumps(arg) is not None else Unpicklable(repr(arg))
        for arg in args
    )


def _state_of(error: BaseException) -> tuple[dict[str, bytes], list[str]]:
    state: dict[str, bytes] = {}
    left_out = []
    reduced = error.__reduce_ex__(4)
    attributes = dict(getattr(error, "__dict__", {}))
    if isinstance(reduced, tuple) and len(reduced) > 2:
        extra = reduced[2]
        attributes.update(extra if isinstance(extra, dict) else {})
    for name, value in attributes.items():
        pickled = None if name == "__notes__" else _dumps(value)
        if pickled is not None:
            state[name] = pickled
        elif name != "__notes__":
            left_out.append(f"{name} ({type(value).__name__})")
    return state, left_out


def _outside_the_package(
    tb: types.TracebackType | None,
) -> types.TracebackType | None:
    """Drops our own frames above the user's."""
    first = tb
    while tb and tb.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        tb = tb.tb_next
    return tb or first


def _rebuild(failure: Failure) -> BaseException:
    error = _rebuild_alone(failure)
    if error is None:
        return LoaderError(
            "A worker raised an exception that cannot be rebuilt in this "
            f"process. Its text:\n\n{failure.text}"
        )
    if failure.frames is not None:
        frames = tblib.Traceback.from_dict(failure.frames).as_traceback()
        error = error.with_traceback(frames)
    if failure.notes:
        error.__notes__ = list(failure.notes)
    if failure.left_out:
        names = ", ".join(failure.left_out)
        error.add_note(f"Left behind in the worker, unpicklable: {names}.")
    if failure.context is not None:
        error.__context__ = _rebuild(failure.context)
    if failure.cause is not None:
        error.__cause__ = _rebuild(failure.cause)
        if failure.context is None:
            error.__context__ = error.__cause__
    error.__suppress_context__ = failure.suppress_context
    return error


def _rebuild_alone(failure: Failure) -> BaseException | None:
    if failure.recipe is None:
        return None
    try:
        make, args = pickle.loads(failure.recipe)
        error = make(*args)
        for name, pickled in failure.state.items():
            setattr(error, name, pickle.loads(pickled))
    except Exception:
        # Other people's constructors, setters and imports; the text remains.
        return None
    return error if isinstance(error, BaseException) else None


def _given(error: BaseException) -> BaseException:
    return error


def _called(make: Any, args: tuple[Any, ...]) -> Any:
    return make(*args)


def _bare(
    cls: type[BaseException], given: tuple[Any, ...], args: tuple[Any, ...]
) -> BaseException:
    """An instance on which only the built-in part of `__init__` has run."""
    error = cls.__new__(cls, *given)
    builtin = next(b for b in cls.__mro__ if b.__module__ == "builtins")
    initialize: Any = vars(builtin).get("__init__", BaseException.__init__)
    with contextlib.suppress(TypeError):
        # Raised for a subclass of, say, UnicodeDecodeError with arguments
        # of its own.
        initialize(error, *given)
    error.args = args
    return error


def _dumps(value: Any) -> bytes | None:
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except Exception:
        # Pickling runs other people's code, which may raise anything.
        return None
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with classes as references to resolve first."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            reduced = classes.reduce_class(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)
