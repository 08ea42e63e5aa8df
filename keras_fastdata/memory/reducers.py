"""Pickles objects that pickle refuses or would copy needlessly.

    locks, conditions, `threading.local`    made again, in their first state
    files open for reading                  opened again, at the same position
    open .npz files                         opened again
    `np.memmap`, and views of one           mapped again
    memoryviews                             views of an array
    arrays that share memory                views of one array
    tensors of PyTorch                      over the memory of an array
    h5py files, groups and datasets         opened again
    cached functions of `__main__`          wrapped again, with an empty cache
    weak dicts                              with their items, held weakly
    Keras's callbacks                       without the model that they are for
    Keras's layers                          also of the user's classes, whole
    markers (`MISSING = object()`)          by the names that modules have
    the global random generators            the worker's own
    classes of `__main__`                   without attributes deleted there
    objects of `__main__` with a name       by value, see `by_name`
    objects with `__getattr__`              without a call of it
    subclasses that pickle does not keep    whole, see `lossy_reductions`

A file must be the same one in the worker: a file that was deleted or replaced
is refused, and a memory map of such a file travels by value. Threads, processes
and queues are refused, because a copy of them would wait for ever.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import importlib
import io
import mmap
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main, loaded, packages_of
from keras_fastdata.memory import (
    by_name,
    delegating,
    hidden_uses,
    keras_layers,
    lossy_reductions,
    rebuilt_classes,
    tensors,
)
from keras_fastdata.memory.limited_stream import LimitedStream, LimitError
from keras_fastdata.memory.markers import MarkerPlaces, is_marker, marker_at
from keras_fastdata.memory.module_variables import ModuleVariables
from keras_fastdata.memory.shared_arrays import (
    SharedArrays,
    owner_of,
    view_again,
)

Reduced = str | tuple[Any, ...]

# They consist of locks and plain attributes, so that pickling would succeed.
LIVE = (
    threading.Thread,
    subprocess.Popen,
    concurrent.futures.Executor,
    queue.Queue,
    # Each copy would delete the file at its end.
    tempfile._TemporaryFileWrapper,
)


_OF_MODULES = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Extends cloudpickle's pickler to locks, files, memory maps and more.

    The module's docstring lists the objects.

    Attributes:
        modules: Collects the names of the modules that the pickle refers to,
            unless it is `None`.
        arrays: Reduces arrays that share memory, unless it is `None`.
        variables: Notes objects that modules hold, too, unless it is `None`.
    """

    modules: set[str] | None = None
    arrays: SharedArrays | None = None
    variables: ModuleVariables | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        script = sys.modules.get("__mp_main__")
        if getattr(script, "__name__", "") == "__mp_main__":
            # Else cloudpickle takes it for a module that workers can import.
            # (In other processes, this is a second name of `__main__`.)
            cloudpickle.register_pickle_by_value(script)
        self._markers = MarkerPlaces()
        # What functions share in the worker for each cell that they share here;
        # with the cell, whose id could otherwise become another one's.
        self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}

    def observe(
        self,
        modules: set[str] | None,
        arrays: SharedArrays,
        variables: ModuleVariables | None,
    ) -> None:
        """Sets what collects modules' names and shared objects."""
        self.modules, self.arrays = modules, arrays
        self.variables = variables

    def reducer_override(self, obj: Any) -> Any:
        if self.variables is not None:
            self.variables.look(obj)
        if self.arrays is not None:
            shared = _reduce_shared(obj, self.arrays)
            if shared is not None:
                return shared
        if type(obj).__name__ in _GENERATORS and (name := _global_name(obj)):
            return _global_generator, name
        if is_marker(obj) and (place := self._markers.of(obj)):
            return marker_at, (*place, type(obj))
        if isinstance(obj, LIVE):
            raise TypeError(
                f"cannot pickle a {type(obj).__name__}: a copy would not be "
                "connected to the original"
            )
        kind: Any = type(obj)
        packages = packages_of(kind)
        if "h5py" in packages and (h5py := loaded("h5py")) is not None:
            if isinstance(obj, (h5py.Group, h5py.Dataset)):
                self._note(h5py)
                return _reduce_h5(obj)
            if kind.__name__ in _OF_H5 and kind.__module__.startswith("h5py."):
                raise TypeError(
                    f"cannot pickle a {kind.__name__} of h5py: hold the file, "
                    "group or dataset in place of its `attrs` or `dims`"
                )
        if "keras" in packages and (keras := loaded("keras")) is not None:
            if isinstance(obj, keras.callbacks.Callback):
                return _reduce_callback(obj)
            reduced = keras_layers.reduce_layer(keras, obj, _can_be_pickled)
            if reduced is not NotImplemented:
                return reduced
        reduced = by_name.reduce_by_origin(obj)
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            for reduce in _OF_OBJECTS:
                reduced = reduce(obj)
                if reduced is not NotImplemented:
                    break
        elif isinstance(reduced, tuple) and len(reduced) == _BY_VALUE:
            if isinstance(obj, type):
                reduced = rebuilt_classes.completed(obj, reduced)
            elif isinstance(obj, types.FunctionType):
                hidden_uses.add(obj, reduced[2][1])
                if self.variables is not None:
                    self.variables.look_in(reduced[2][1]["__globals__"])
                if obj.__closure__:
                    make, (*args, _), *rest = reduced
                    cells = tuple(map(self._shared, obj.__closure__))
                    reduced = make, (*args, cells), *rest
            *rebuild, state, _, _, set_state = reduced
            named = set_state, state, obj.__qualname__
            return *rebuild, named, None, None, _set_class
        # What travels by value needs no import of the module that defines it.
        if reduced is NotImplemented and isinstance(obj, _OF_MODULES):
            self._note(obj)
        return reduced

    def _shared(self, cell: types.CellType) -> types.CellType:
        """Returns the empty cell that stands for a cell in the worker.

        cloudpickle makes one for each function and fills it later. A variable
        that one function sets would not be the other function's.
        """
        new = cell, types.CellType()
        return self._cells.setdefault(id(cell), new)[1]

    def _note(self, obj: Any) -> None:
        """Adds the name of a module, or of an object's module, to `modules`."""
        is_module = isinstance(obj, types.ModuleType)
        name = getattr(obj, "__name__" if is_module else "__module__", None)
        if self.modules is not None and isinstance(name, str):
            self.modules.add(name)


def _can_be_pickled(value: Any) -> bool:
    """Returns whether what a layer holds can be pickled.

    Of what is large, only a part is tried.
    """
    try:
        _PicklerWithoutLayers(LimitedStream(lambda _: None)).dump(value)
    except LimitError:
        return True
    except Exception as error:
        raise_of_handler(error)
        return False  # the user's objects may raise anything
    return True


class _PicklerWithoutLayers(Pickler):
    def persistent_id(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if "keras" not in packages_of(kind):
            return None
        return id(obj) if isinstance(obj, sys.modules["keras"].Layer) else None


# -- classes that travel by value ----------------------------------------------


def _set_class(cls: type, state: tuple[Any, Any, str]) -> None:
    """Gives a class in a worker the attributes that the trainer's class has.

    Attributes that it had there before, and has no longer, are deleted. Those
    that the worker itself has set stay.
    """
    set_state, parts, qualname = state
    # cloudpickle gives it the short name of its class. The streams of random
    # generators depend on the whole name.
    with rebuilt_classes.without(rebuilt_classes.setters(cls)):
        cls.__qualname__ = qualname
        for name in _received.get(cls, set()) - parts[0].keys():
            with contextlib.suppress(AttributeError):  # the worker deleted it
                delattr(cls, name)
        _received[cls] = {*parts[0]}
        set_state(cls, parts)


def received_classes() -> list[type]:
    """Returns the classes that came to this process by value."""
    return list(_received)


_BY_VALUE = 6  # parts of what cloudpickle reduces such a class to
_received: weakref.WeakKeyDictionary[type, set[str]]
_received = weakref.WeakKeyDictionary()


# -- the global random generators ----------------------------------------------


def _global_name(generator: Any) -> tuple[str, str] | None:
    """Returns a global random generator's module and name; else `None`.

    An attribute such as `self.draw = np.random.rand` refers to the worker's
    own generator in a worker, which is seeded for each batch.
    """
    for module, name in _GLOBALS:
        if module in sys.modules:
            with contextlib.suppress(AttributeError):  # partly imported
                if _global_generator(module, name) is generator:
                    return module, name
    return None


def _global_generator(module: str, name: str) -> Any:
    found = getattr(importlib.import_module(module), name)
    return found().generator if name.startswith("get_") else found


_GENERATORS = {"Random", "RandomState", "Generator"}  # class names
_GLOBALS = (
    ("random", "_inst"),
    ("numpy.random.mtrand", "_rand"),
    ("torch", "default_generator"),
    ("imgaug.random", "get_global_rng"),
)


# -- files ---------------------------------------------------------------------


def _reduce_file(file: Any) -> Reduced:
    for stream in ("stdin", "stdout", "stderr"):
        for attribute in (stream, f"__{stream}__"):
            if file is getattr(sys, attribute):
                return getattr, (sys, attribute)
    if file.closed:
        raise TypeError("cannot pickle a closed file")
    name, mode = getattr(file, "name", None), getattr(file, "mode", None)
    if not isinstance(name, (str, bytes, os.PathLike)):
        raise TypeError("cannot pickle a file that has no path")
    if mode not in ("r", "rb", "rt"):
        raise TypeError(
            f"cannot pickle a file with mode {mode!r}; only those that are "
            "open for reading can be opened again"
        )
    path = os.path.abspath(os.fspath(name))
    try:
        same = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        same = False
    if not same or not file.seekable():
        raise TypeError(
            f"cannot pickle a file that is not, or no longer, at "
            f"{os.fsdecode(path)!r}"
        )
    if isinstance(file, io.TextIOWrapper):
        how: tuple[Any, ...] = ("r", -1, file.encoding, file.errors)
    elif isinstance(file, io.FileIO):
        how = ("rb", 0)
    else:
        how = ("rb",)
    try:
        position = file.tell()
    except OSError as error:  # of a text file, after `next(file)`
        raise TypeError(
            f"cannot pickle a file whose position is not known: {error}; read "
            "it by `readline()`, or to its end"
        ) from error
    if isinstance(file, io.TextIOWrapper):
        how = (*how, _newline_of(file, path, how, position))
    return _open_again, (path, how, position)


def _newline_of(
    file: io.TextIOWrapper, path: Any, how: tuple[Any, ...], position: int
) -> str | None:
    """Returns the argument `newline` that a text file was opened with.

    The file does not tell it, so its first lines are compared with those that
    each value gives.
    """
    try:
        file.seek(0)
        lines = _first_lines(file)
    finally:
        file.seek(position)
    for newline in (None, "", "\n", "\r", "\r\n"):
        same: tuple[Any, ...] = (*how, newline)
        with open(path, *same) as again:
            if _first_lines(again) == lines:
                return newline
    return None


def _first_lines(file: io.TextIOWrapper) -> list[str]:
    lines: list[str] = []
    with contextlib.suppress(UnicodeError):
        for _ in range(_LINES_COMPARED):
            lines.append(file.readline(_LINE_COMPARED))
    return lines


_LINES_COMPARED = 100
_LINE_COMPARED = 4096  # characters of a line


def _open_again(path: Any, how: tuple[Any, ...], position: int) -> Any:
    file = open(path, *how)  # noqa: SIM115 - the dataset closes it
    file.seek(position)
    return file


def _reduce_npz(npz: Any) -> Reduced:
    if npz.zip is None:
        raise TypeError("cannot pickle a closed file")
    return _open_npz_again, (
        npz.zip.fp,
        npz.allow_pickle,
        npz.max_header_size,
    )


def _open_npz_again(file: Any, allow_pickle: bool, header: int) -> Any:
    file.seek(0)
    return np.load(file, allow_pickle=allow_pickle, max_header_size=header)


# -- callbacks of Keras --------------------------------------------------------


def _reduce_callback(callback: Any) -> Any:
    """Returns the pickle reduction of a callback, without its model.

    `fit` sets the model, which JAX's trainer empties while it trains.
    """
    reduced = callback.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple) or len(reduced) < _WITH_STATE:
        return reduced
    make, args, state, *rest = reduced
    if isinstance(state, dict) and state.get("_model") is not None:
        state = {**state, "_model": None}
    return make, args, state, *rest


_WITH_STATE = 3  # parts of a reduction that has a state


# -- shared memory -------------------------------------------------------------


def _reduce_shared(obj: Any, arrays: SharedArrays) -> tuple[Any, ...] | None:
    """Returns the pickle reduction of an array or tensor that shares memory."""
    if type(obj) is np.ndarray:
        return arrays.reduce(obj)
    if not tensors.is_tensor(obj):
        return None
    array = tensors.array_of(obj)
    if array is None:
        return None
    # What is pickled as an array, is seen again as that.
    if tensors.is_left_to_pytorch(obj) and arrays.reduce(array) is None:
        return None
    return tensors.reduce_tensor(obj, array)


# -- memoryviews ---------------------------------------------------------------


def _reduce_memoryview(view: memoryview) -> Reduced:
    array = np.asarray(view)
    # An item of format "c", for one, has another type in an array.
    if array.data.format != view.format:
        raise TypeError(f"cannot pickle a memoryview of format {view.format!r}")
    return memoryview, (array,)


# -- memory maps ---------------------------------------------------------------


def _reduce_array(array: npt.NDArray[Any]) -> Reduced:
    """Returns the pickle reduction of an array.

    A view of a memory map is reduced to a part of the file.
    """
    root = owner_of(array)
    memory: Any = root.base
    if (
        isinstance(root, np.memmap)
        and isinstance(memory, mmap.mmap)
        and array.size
        and not array.dtype.hasobject
        # A copy-on-write map may differ from its file.
        and root.mode in ("r", "r+", "w+")
        and _is_mapped_at(root)
    ):
        low, high = np.lib.array_utils.byte_bounds(array)
        first, _ = np.lib.array_utils.byte_bounds(root)
        start = array.__array_interface__["data"][0]
        return _map_again, (
            type(array),
            str(root.filename),
            "r" if root.mode == "r" else "r+",
            root.offset + low - first,
            high - low,
            start - low,
            array.shape,
            array.dtype,
            array.strides,
            array.flags.writeable,
        )
    if type(array) is np.memmap:
        array = array.view(np.ndarray)  # a memory map without its file
    reduced: Reduced = array.__reduce_ex__(5)
    return reduced


def _map_again(
    cls: type[npt.NDArray[Any]],
    path: str,
    mode: Any,
    offset: int,
    nbytes: int,
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...],
    writeable: bool,
) -> npt.NDArray[Any]:
    raw = np.memmap(path, np.uint8, mode, offset, (nbytes,))
    writeable = writeable and mode != "r"
    array: Any = view_again(raw, start, shape, dtype, strides, writeable)
    if issubclass(cls, np.memmap):
        array = array.view(cls)
        array.filename, array.mode, array.offset = path, mode, offset
    result: npt.NDArray[Any] = array
    return result


def _is_mapped_at(root: Any) -> bool:
    """Returns whether a memory map's path still leads to the mapped file."""
    if root.filename is None:
        return False
    address = root.__array_interface__["data"][0]
    path = os.path.realpath(root.filename)
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, rest = line.partition("-")
            end = rest.split(" ", 1)[0]
            if int(begin, 16) <= address < int(end, 16):
                # "... inode   path"; a deleted file has " (deleted)" added.
                mapped = line.rstrip("\n").split(None, 5)[5:]
                return mapped == [path.replace("\n", "\\012")]
    return False


# -- h5py ----------------------------------------------------------------------


# Classes of `attrs` and `dims`, whose copies would not open.
_OF_H5 = {"AttributeManager", "DimensionManager", "DimensionProxy"}


def _reduce_h5(obj: Any) -> Reduced:
    if not obj:
        raise TypeError("cannot pickle an object of a closed HDF5 file")
    file = obj.file
    if file.mode != "r":
        raise TypeError(
            f"cannot pickle an HDF5 file with mode {file.mode!r}: HDF5 locks "
            "it against readers; open it with mode 'r'"
        )
    if file.driver not in ("sec2", "stdio"):
        raise TypeError(
            f"cannot pickle an HDF5 file of driver {file.driver!r}: it has no "
            "path"
        )
    return _open_h5_again, (_h5_path(file), obj.name, type(obj) is type(file))


def _h5_path(file: Any) -> str:
    """Returns the path of an HDF5 file, wherever the program is now.

    A relative path leads to another file after a change of the current folder.
    """
    path: str = os.path.abspath(file.filename)
    if file.driver == "sec2":
        opened = file.id.get_vfd_handle()
        with contextlib.suppress(OSError):  # without /proc
            path = os.readlink(f"/proc/self/fd/{opened}")
        if os.name == "posix" and not _is_at(path, opened):
            raise TypeError(
                "cannot pickle an HDF5 file that was deleted or "
                f"replaced: {path}"
            )
    return path


def _is_at(path: str, opened: int) -> bool:
    """Returns whether an open file has a path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(opened))
    return False


def _open_h5_again(path: str, name: str, whole: bool) -> Any:
    h5py: Any = importlib.import_module("h5py")
    file = h5py.File(path, "r")
    return file if whole else file[name]


# -- cached functions ----------------------------------------------------------


def _reduce_cached(cached: Any) -> Reduced:
    found: Any = sys.modules.get(cached.__module__)
    if not is_main(cached.__module__):
        for name in cached.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is cached:
            return str(cached.__reduce__())
    copied = getattr(cached.__wrapped__, "__dict__", {})
    state = {
        name: value
        for name, value in vars(cached).items()
        if name not in _OF_CACHED and copied.get(name) is not value
    }
    again = cached.__wrapped__, cached.cache_parameters()
    return _cache_again, again, state or None


# What `functools.lru_cache` sets itself.
_OF_CACHED = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"}


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


# -- weak mappings -------------------------------------------------------------


def _reduce_weak_mapping(mapping: Any) -> Reduced:
    """Keeps the items, as long as something else holds them in the worker."""
    return type(mapping), (dict(mapping),)


# -- code ----------------------------------------------------------------------


def _reduce_code(code: types.CodeType) -> Reduced:
    """Keeps the file name, which cloudpickle leaves out from 3.1.3 on.

    Tracebacks show the user's lines by it.
    """
    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    # A string of its own: else the pickle depends on which strings are shared.
    return _make_code, (make, args, "".join(code.co_filename))


def _make_code(make: Any, args: Any, filename: str) -> types.CodeType:
    code: types.CodeType = make(*args)
    return code.replace(co_filename=filename)


_REDUCERS: dict[type, Any] = {
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    # A condition keeps its lock only in a private attribute.
    threading.Condition: lambda one: (threading.Condition, (one._lock,)),  # noqa: SLF001
    threading.local: lambda _: (threading.local, ()),
    io.TextIOWrapper: _reduce_file,
    io.BufferedReader: _reduce_file,
    io.FileIO: _reduce_file,
    np.lib.npyio.NpzFile: _reduce_npz,
    memoryview: _reduce_memoryview,
    np.ndarray: _reduce_array,
    np.memmap: _reduce_array,
    type(functools.lru_cache(len)): _reduce_cached,
    types.CodeType: _reduce_code,
    # `functools.singledispatch` keeps what it has found in one.
    weakref.WeakKeyDictionary: _reduce_weak_mapping,
    weakref.WeakValueDictionary: _reduce_weak_mapping,
}
Pickler.dispatch_table = collections.ChainMap(
    _REDUCERS, cloudpickle.Pickler.dispatch_table
)
# They reduce objects of certain classes, and no others.
_OF_OBJECTS: tuple[Callable[[Any], Any], ...] = (
    functools.partial(lossy_reductions.reduce_whole, _reduce_array),
    by_name.reduce_by_value,
    delegating.reduce_without_asking,
)
