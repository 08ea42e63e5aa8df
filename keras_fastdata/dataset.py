"""`FastPyDataset`: what users subclass in place of `keras.utils.PyDataset`."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    TypeVar,
    overload,
)

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata._dataset_internals import (
    Internals,
    answer,
    give_internals,
    internals_of,
    loader_of,
    note_assigned,
    own_internals,
    plain_iterator,
    replace_settings,
    settings_in_effect,
    state_dict_of,
)
from keras_fastdata._validation import arguments_of, integer, unknown_arguments
from keras_fastdata.building import build
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.state_dict import State

if TYPE_CHECKING or _process_role.is_worker():
    # A worker needs the user's methods and ours, not Keras's base class.
    _Base = object
else:
    from keras_fastdata import keras_bridge

    _Base = keras_bridge.PyDataset

_T = TypeVar("_T")


_NOTICED = "_fastdata_notices"  # the mark of a hook whose calls are noticed


class _WhileBuilding(Generic[_T]):
    """A name that yields to an attribute of the user's own.

    `epoch` and `rng` are everyday names in people's datasets. A descriptor
    without `__set__` is only asked where the instance has no such attribute.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, dataset: None, owner: type) -> _WhileBuilding[_T]: ...

    @overload
    def __get__(self, dataset: FastPyDataset, owner: type) -> _T: ...

    def __get__(self, dataset: FastPyDataset | None, owner: type) -> Any:
        if dataset is None:
            return self
        return answer(dataset, self._name)


class FastPyDataset(_Base):
    """A dataset of batches, built by threads or processes in shared memory.

    Takes the place of `keras.utils.PyDataset` (`keras.utils.Sequence`): keep
    `__getitem__`, which returns batch `index`, and `__len__`, the number of
    batches, and pass the dataset to `fit`, `evaluate` or `predict`. Every
    batch arrives once, in order, with the same bytes for any number of worker
    processes; of threads too, if it draws from `self.rng` alone.

    Args:
        workers: Where batches are built. 0: in the caller, when asked for.
            n >= 1: ahead of time, by n threads, or by n processes with
            `use_multiprocessing=True`; at most 1,024. "auto": found out
            while training, and anew when builds or steps change. It begins
            in the caller, and where workers would bring more tries threads
            or processes: at most 16, the length of the queue, and what the
            cores have room for. Threads only where batches seem not to draw
            from what threads share; `__getitem__` must then stand to be
            called by several at once. Defaults to 1.
        use_multiprocessing: Whether workers are processes. Threads suit
            builds that wait (for files, the network) or run in NumPy;
            processes suit builds that run Python code. Defaults to `False`.
        max_queue_size: Batches being built or ready, in all, at least 1; 0: as
            many as there are in an epoch, up to 1,024. They take memory, and
            more workers than that idle. `fit` on TensorFlow looks at 2 before
            its first step. What a strategy of `tf.distribute` fetches ahead
            counts as delivered. Defaults to 10.
        max_queue_bytes: The same bound in bytes of shared memory, as far as
            it can be told from the largest batch so far. One batch is always
            allowed. `None`: no bound. Elsewhere than in processes it has no
            effect.
        seed: Base seed, an integer of at least 0. `None` draws one from
            Python's `random` at first use, so that
            `keras.utils.set_random_seed` makes runs repeatable.
        shuffle: `None`: what `fit(shuffle=)` says, and in order elsewhere.
            `True` or `False` decide it here, everywhere, also in `predict`.
        start_method: How processes start. `None` or "forkserver": forked
            from a small clean process, in milliseconds. "spawn": each a fresh
            interpreter. "fork": copies of the training process, for a dataset
            that cannot be pickled; it warns of the risk.
        batch_timeout: Seconds that a batch may take, more than 0. A worker
            process that takes longer is killed and replaced, as if it had
            died, and the Python stack of where it was stuck is logged. A
            thread cannot be stopped: there `BatchTimeoutError`, which has the
            stack, ends the epoch. Inline (`workers=0`) it has no effect.
            Loading the dataset and `on_worker_start` may take 60 s, or that
            long if it is more. `None`: no limit, but a batch that takes far
            longer than any before, and 30 s (60 s for a first batch, or a
            start), is logged with its stack.
        max_worker_restarts: Worker deaths survived in one epoch, at least 0.
            What a dead worker was building is built again by another. The
            second worker to die over one batch ends the epoch. Defaults to 3.
        on_error: What an exception of `__getitem__` does. "raise": it reaches
            the caller. "skip": the batch is left out, and logged with its
            traceback; the epoch is shorter by it, and `predict` returns so
            much less. More than a tenth of the dataset's batches, and more
            than one, is an error.
        shard: Which batches are this process's, where several train together.
            `(index, count)`: of each `count` that follow one another in the
            epoch's order, number `index`; so the order is the same for any
            `count`. The last ones are filled up from the beginning, so that
            every process has as many. "auto": what `keras.distribution`, a
            multi-worker strategy of `tf.distribute` in scope,
            `jax.distributed` or `torch.distributed` says, in this order; all
            batches, where none is in use. `None`: all batches.
        cache: Where batches are kept once they were built, and from the next
            epoch on come from, by index, without being built or copied again.
            "memory": in this process. Else the path of a directory, where
            they also outlive it. Their arrays are read-only. A batch that
            depends on the epoch (`self.rng`, `self.epoch` and the like; the
            random generators, but for threads) is a `LoaderError`; so is an
            epoch hook. Editing the dataset empties the cache. Batches of
            other things than arrays in tuples, lists and dicts are not kept.
            `None`: nowhere.
        cache_bytes: How much that may be; what is beyond it is built in every
            epoch. `None`: for "memory", half of the memory that is free when
            the first epoch begins; no bound for a directory, where batches of
            other states of such a dataset count as well.
        cache_version: For a directory: any string or integer; another one
            makes its batches invalid. So does a change of an attribute; of
            code that is the dataset's or among what it holds, or of plain
            globals, functions and classes that such code names; or of a file
            whose whole path is anywhere in these. Not looked at are files in
            folders, paths that are put together from parts, methods and
            attributes of global objects, installed packages, and attributes
            that builds set.
        executor: "local": workers are threads or processes of this machine,
            as above. "ray": they are Ray actors, on this machine or a
            cluster (`pip install 'keras-fastdata[ray]'`), with all that is
            said here of worker processes. Their batches come through Ray's
            object store, and large arrays in them are read-only views of it;
            of the dataset's own arrays, those of 1 MiB and more are there
            once per node, and read-only in the workers. `ray.init` is called
            unless it has been; Ray listens on ports of its own, and keeps its
            store in /dev/shm.
        worker_env: Environment variables for worker processes, over defaults
            that hide accelerators and give BLAS and OpenMP one thread each.
        ray_options: With `executor="ray"`, a dict. "address": "host:port" of
            a cluster; else what `ray.init` finds, or a Ray of its own on this
            machine. "init": a dict of other arguments of `ray.init`.
            "timeout_s": how long the cluster may take to answer, and to have
            a place for a first worker, 60 by default. All others are those
            of a Ray actor's `options`: "num_cpus" and "resources" that one
            worker takes, "scheduling_strategy" ("SPREAD" by default),
            "runtime_env", ...

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range.

    While batches are fetched, `LoaderError` and its subclasses are raised, and
    whatever `__getitem__` raises.

    While a batch is built, `self.rng`, `self.epoch`, `self.worker_index` and
    `self.empty` answer for that batch; also threads that `__getitem__` has
    started. But where several worker threads build at once, ask in
    `__getitem__` itself and hand the answer on: whose such a thread is cannot
    be told, and it gets a `LoaderError`.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import FastPyDataset
    >>> class Noise(FastPyDataset):
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return self.rng.normal(size=(8, 3)), np.full(8, index)
    >>> with Noise(workers=2, use_multiprocessing=True, seed=1) as dataset:
    ...     [int(y[0]) for x, y in dataset]
    [0, 1, 2, 3]
    """

    _fastdata: Internals

    def __init__(
        self,
        workers: int | Literal["auto"] = 1,
        use_multiprocessing: bool = False,
        max_queue_size: int = 10,
        *,
        max_queue_bytes: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        start_method: str | None = None,
        batch_timeout: float | None = None,
        max_worker_restarts: int = 3,
        on_error: str = "raise",
        shard: tuple[int, int] | str | None = "auto",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        cache_version: str | int | None = None,
        executor: str = "local",
        worker_env: Mapping[str, str] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            kind = type(self)
            raise unknown_arguments(kind.__name__, unknown, arguments_of(kind))
        settings = Settings(
            workers=workers,
            use_multiprocessing=use_multiprocessing,
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
            seed=seed,
            shuffle=shuffle,
            start_method=start_method,
            batch_timeout=batch_timeout,
            max_worker_restarts=max_worker_restarts,
            on_error=on_error,
            shard=shard,
            cache=cache,
            cache_bytes=cache_bytes,
            cache_version=cache_version,
            executor=executor,
            worker_env=worker_env,
            ray_options=ray_options,
        )
        give_internals(self, settings)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("on_epoch_begin", "on_epoch_end"):
            hook = getattr(cls, name)  # of a mixin, perhaps
            if isinstance(hook, types.FunctionType) and not (
                build.is_default_hook(hook) or hasattr(hook, _NOTICED)
            ):
                setattr(cls, name, _noticed(name, hook))
        for name in ("__setattr__", "__delattr__"):
            method = getattr(cls, name)  # which need not call ours
            if isinstance(method, types.FunctionType) and not (
                hasattr(method, _NOTICED)
            ):
                setattr(cls, name, _notes_assigned(method))

    # -- what a subclass writes ----------------------------------------------

    def __getitem__(self, index: int) -> Any:
        """Builds and returns batch `index`, from 0 to `len(self) - 1`.

        A batch is `inputs`, `(inputs,)`, `(inputs, targets)` or
        `(inputs, targets, sample_weights)`, each an array or a nested
        structure of arrays, or a dict. Arrays that the dataset keeps are
        copied, so that a buffer can be filled again for the next batch
        (though not by two threads at once); fresh arrays need no copy. A
        worker process has a copy of the dataset: what this sets on `self`
        stays there.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `__getitem__(self, index)`."
        )

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch; `None` if nobody knows.

        Then `fit` needs `steps_per_epoch`, unless `__getitem__` raises
        `EndOfData` where there is no batch any more; and nothing is shuffled.
        Override it where `__len__` will not do. It is read again at the
        start of every epoch.
        """
        kind: Any = type(self)
        if hasattr(self, "__len__"):
            # Not `len`, whose error for a float names nothing.
            return build.checked_length(
                f"{kind.__name__}.__len__()", kind.__len__(self)
            )
        raise NotImplementedError(
            f"{kind.__name__} must define `__len__(self)`, the number "
            "of batches, or the property `num_batches`, which may be None "
            "for a dataset without an end."
        )

    @build.default_hook
    def on_epoch_begin(self) -> None:
        """Called before each epoch, in the training process.

        What it changes reaches every worker before the next batch is built.
        `self.rng`, `np.random` and `random` are seeded for the call.
        """

    @build.default_hook
    def on_epoch_end(self) -> None:
        """Called after each epoch, in the training process.

        Keras also calls it once before the first epoch, and a loop of your
        own may call it. What it changes reaches every worker before the next
        batch is built. `self.rng`, `np.random` and `random` are seeded for
        the call, so that shuffling here is repeatable.
        """

    @build.default_hook
    def on_worker_start(self) -> None:
        """Called once in each worker, before its first batch.

        The place to open files and connections. In processes, what it sets
        on `self` belongs to that worker and is not overwritten: parts of the
        dataset that are in it (`Reader(self.table)`) stay as they were, where
        `Reader(self)` has them as they are. Threads share `self`: there, use
        `threading.local()`, or `self.worker_index`.
        """

    @build.default_hook
    def on_worker_stop(self) -> None:
        """Called once in each worker that ends in peace.

        In threads and in the caller that is at `close`: a dataset that was
        collected is not there to be called.
        """

    @build.default_hook
    def reseed(self, seed_sequence: np.random.SeedSequence) -> None:
        """Called before each batch, for generators we do not know.

        `np.random`, `random`, torch's default generator, and generators of
        NumPy, Python and torch that the dataset reaches are seeded already,
        and so is what has a method `set_random_seed(seed)` or `seed(seed)`.
        Not called in worker threads, which share whatever it would seed.

        Args:
            seed_sequence: The batch's own, from seed, epoch and index.
        """

    # -- while a batch is built ----------------------------------------------

    rng: _WhileBuilding[np.random.Generator] = _WhileBuilding(
        "A `np.random.Generator` for this very batch: its draws depend on "
        "seed, epoch and index alone."
    )
    rng_for: _WhileBuilding[Callable[..., np.random.Generator]] = (
        _WhileBuilding(
            "`self.rng_for(*key)`: a generator whose draws depend on seed, "
            "epoch and key, one or more integers of at least 0, such as the "
            "index of a sample; in whichever batch it is asked for."
        )
    )
    epoch_order: _WhileBuilding[Callable[[int], Permutation]] = _WhileBuilding(
        "`self.epoch_order(length)`: a random order of `range(length)` that "
        "depends on seed and epoch. `order[i]` is what comes at position i, "
        "and `order.at(positions)` the same for an array; of a billion, too, "
        "it takes no memory."
    )
    epoch: _WhileBuilding[int] = _WhileBuilding(
        "Which walk through the dataset the batch is for, from 0. Each epoch "
        "of `fit`, each validation, each `for` loop is one."
    )
    worker_index: _WhileBuilding[int | None] = _WhileBuilding(
        "Which worker builds the batch, from 0; `None` outside of workers."
    )
    empty: _WhileBuilding[build.Empty] = _WhileBuilding(
        "`self.empty(shape, dtype='float32')`: an uninitialized array. In a "
        "worker process it lies in the shared memory that the batch travels "
        "in, so that returning it copies nothing."
    )

    # -- outside of fit ------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Walks through one epoch, fed by the workers.

        In order, unless `shuffle=True`; the epoch hooks are not called.
        """
        if _process_role.is_worker():
            return plain_iterator(self)
        return iterate(loader_of(self), self, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        """Says where the dataset stands, for `load_state_dict`.

        That is the next batch after the one delivered last; batches that are
        only built ahead do not count. In a callback of `fit` a framework may
        have fetched some that it has not trained on: `DatasetCheckpoint`
        knows of those.

        Returns:
            A small dict of what JSON knows. Workers of other kinds and
            numbers make no difference to it.
        """
        return state_dict_of(self, loader_of(self).state(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next epoch begin where another dataset stood.

        For a dataset made as that one was, before its first epoch. The rest
        of that epoch comes first, byte for byte. Epoch hooks that had run
        there are run here, seeded as they were.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: A field of it is damaged, and named; or it is of a
                dataset of another length, with another seed, or with other
                epoch hooks.
            LoaderError: Its epoch hooks did not do what they had done.
        """
        state = State.from_dict(state_dict, type(self).__name__)
        loader_of(self).restore(self, state)
        internals_of(self).forget_outside_rng()

    def set_epoch(self, epoch: int) -> None:
        """Has the next epoch be number `epoch`, from 0, of any.

        Its order and bytes are then those it has in a run from the first
        epoch on: for `fit(initial_epoch=epoch)`. Epoch hooks are not run.
        """
        loader_of(self).set_epoch(self, integer("epoch", epoch, least=0))

    def mark_changed(self) -> None:
        """Says that the dataset was edited in place.

        Batches that were built ahead are dropped and built from the dataset
        as it is now. Not needed for attributes that are assigned, nor for
        what the epoch hooks change: those are noticed.
        """
        internals = own_internals(self)
        if internals is not None and internals.loader is not None:
            internals.loader.mark_changed()

    def close(self) -> None:
        """Ends the workers and waits until they are gone.

        They start again when needed. Also done when the dataset is collected
        and at the end of a `with` block. Any thread may call it, at any time,
        and so may a signal handler: a batch that is being built is built
        again. Where the handler has interrupted this dataset at work, the
        workers end when that goes on. Called by a worker, from `__getitem__`
        or `on_worker_stop` for example, it does nothing.
        """
        internals = own_internals(self)
        if internals is not None and internals.loader is not None:
            internals.loader.close()

    def __enter__(self) -> FastPyDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Keras's own three settings ------------------------------------------

    @property
    def workers(self) -> int:
        """Number of workers, at the moment; see the class."""
        return settings_in_effect(self).count

    @workers.setter
    def workers(self, value: int | Literal["auto"]) -> None:
        replace_settings(self, workers=value)

    @property
    def use_multiprocessing(self) -> bool:
        """Whether workers are processes, at the moment; see the class."""
        return settings_in_effect(self).use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        replace_settings(self, use_multiprocessing=value)

    @property
    def max_queue_size(self) -> int:
        """Batches scheduled ahead of the consumer; see the class."""
        return internals_of(self).settings.max_queue_size

    @max_queue_size.setter
    def max_queue_size(self, value: int) -> None:
        replace_settings(self, max_queue_size=value)

    # -- ours ----------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_assigned(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        note_assigned(self, name)


def _noticed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """An epoch hook whose call is noticed, whoever calls it.

    A call in `__init__` is part of how the dataset is made.
    """

    @functools.wraps(hook)
    def noticed(self: FastPyDataset, *args: Any, **kwargs: Any) -> Any:
        own = own_internals(self)
        loader = None if own is None else own.loader
        if build.is_built_for(self) or (
            loader is None
            and (_process_role.is_worker() or _is_being_made(self))
        ):
            return hook(self, *args, **kwargs)
        call = functools.partial(hook, self, *args, **kwargs)
        return loader_of(self).called_by_hand(self, name, call)

    setattr(noticed, _NOTICED, True)
    return noticed


def _is_being_made(dataset: FastPyDataset) -> bool:
    """Whether the caller is called by the dataset's `__init__`."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name in ("__init__", "__setstate__")
            and code.co_argcount
            and frame.f_locals.get(code.co_varnames[0]) is dataset
        ):
            return True
        frame = frame.f_back
    return False


def _notes_assigned(method: Callable[..., None]) -> Callable[..., None]:
    """What sets or deletes an attribute, and notes that it has."""

    @functools.wraps(method)
    def notes(self: FastPyDataset, name: str, *value: Any) -> None:
        method(self, name, *value)
        note_assigned(self, name)

    setattr(notes, _NOTICED, True)
    return notes


for _method in (FastPyDataset.__setattr__, FastPyDataset.__delattr__):
    setattr(_method, _NOTICED, True)

if not TYPE_CHECKING and not _process_role.is_worker():
    keras_bridge.register(FastPyDataset)
