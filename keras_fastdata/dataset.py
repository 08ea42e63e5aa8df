"""`FastPyDataset`, the class to subclass instead of `keras.utils.PyDataset`."""

from __future__ import annotations

import functools
import os
import reprlib
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

from keras_fastdata import _call_stack, _process_role
from keras_fastdata._call_stack import ignoring_errors, raise_of_handler
from keras_fastdata._dataset_internals import (
    Internals,
    answer,
    give_internals,
    internals_of,
    iterate_alone,
    loader_of,
    mark_changed,
    note_assigned,
    own_loader,
    plain_iterator,
    replace_settings,
    settings_in_effect,
    state_dict_of,
)
from keras_fastdata._validation import arguments_of, integer, unknown_arguments
from keras_fastdata.building import build_context, interface
from keras_fastdata.building.build_context import Empty
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.engine import module_sources
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.state_dict import State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if TYPE_CHECKING or _process_role.is_worker():
    # A worker needs no Keras: it calls the user's methods and ours only.
    from keras_fastdata._base_class import LateBase as _Base
else:
    from keras_fastdata import keras_bridge

    _Base = keras_bridge.PyDataset

_T = TypeVar("_T")


class _WhileBuilding(Generic[_T]):
    """A property; an instance attribute of the same name overrides it.

    `rng` and `epoch` are common names in datasets. Python only calls a
    descriptor without `__set__` if the instance has no such attribute.
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


class _ElementSpec:
    """The structure of a batch, with a `keras.KerasTensor` for each array.

    The shape has `None` for the first axis, and for each axis whose length
    differs between the first two batches and the last one. These batches are
    built in the caller, as by `show`, each time that the property is read.
    An attribute of the instance with this name overrides the property.
    """

    def __get__(self, dataset: FastPyDataset | None, owner: type) -> Any:
        if dataset is None:
            return self
        from keras_fastdata.display.element_spec import element_spec

        return element_spec(dataset)


class FastPyDataset(_Base):
    """A Keras dataset whose batches are built by threads or processes.

    Use it in place of `keras.utils.PyDataset` (`keras.utils.Sequence`): keep
    `__getitem__`, which returns batch `index`, and `__len__`, the number of
    batches, and pass the dataset to `fit`, `evaluate` or `predict`. Every
    batch arrives once and in order. Its bytes are the same for any number of
    worker processes, and of threads if it draws from `self.rng` alone. Worker
    processes return batches through shared memory.

    Args:
        workers: Where batches are built. 0: in the caller, on request.
            n >= 1: ahead of time, by n threads, or by n processes with
            `use_multiprocessing=True`; at most 1,024. "auto": chosen during
            training, and again when builds or steps change. "auto" starts in
            the caller. Where workers would help, it tries threads or
            processes: at most 16, at most the length of the queue, and no
            more than the cores can run. It tries threads only where batches
            seem not to draw from generators that threads share; several
            threads then call `__getitem__` at once. Defaults to 1.
        use_multiprocessing: Whether workers are processes. Threads suit
            builds that wait (for files, the network) or run in NumPy;
            processes suit builds that run Python code. Defaults to `False`.
        max_queue_size: How many batches may be in progress or ready, in
            total, at least 1. 0: as many as an epoch has, up to 1,024.
            Batches in the queue take memory, and workers beyond this number
            are idle. `fit` on TensorFlow fetches 2 before its first step. A
            batch that a `tf.distribute` strategy fetched ahead counts as
            delivered. Defaults to 10.
        max_queue_bytes: The same limit in bytes of shared memory, estimated
            from the largest batch so far. One batch is always allowed.
            `None`: no limit. Applies to worker processes only.
        seed: Base seed, an integer of at least 0. With `None`, the seed is
            drawn at first use. `keras.utils.set_random_seed` then makes runs
            repeatable, and so does `np.random.seed`. NumPy's random generators
            in the dataset that were given a seed repeat their numbers anyway.
        shuffle: `None`: `fit(shuffle=)` decides; elsewhere batches come in
            order. `True` or `False` decides everywhere, also in `predict`.
        start_method: How processes start. `None` or "forkserver": forked
            in milliseconds from a small clean process, which has imported the
            packages that the dataset's module imports. "spawn": each a fresh
            interpreter. "fork": copies of the training process, for a dataset
            that cannot be pickled; it warns of the risk. "portable": like
            "spawn", but with nothing that only Linux has; this is the default
            where the system lacks or forbids a part that the others need.
        batch_timeout: Seconds that a batch may take, more than 0. A worker
            process that takes longer is killed and replaced, and the Python
            stack at which it was stuck is logged. A thread cannot be
            stopped: there `BatchTimeoutError`, which has the stack, ends the
            epoch. Inline (`workers=0`) the limit has no effect. Loading the
            dataset and `on_worker_start` may take 60 s, or `batch_timeout`
            if that is more. `None`: no limit. A batch that takes more than
            30 s, and far longer than any before, is then logged with its
            stack; for a first batch, or a start, 60 s.
        max_worker_restarts: How many worker deaths an epoch survives, at
            least 0. Another worker builds the dead worker's batches again.
            The second worker to die over one batch ends the epoch. Defaults
            to 3.
        on_error: What an exception of `__getitem__` does. "raise": the
            caller receives it. "skip": the batch is left out, and its
            traceback logged; the epoch is one batch shorter, and `predict`
            returns fewer rows. Skipping more than one batch, and more than a
            tenth of all, is an error.
        shard: Which batches this process trains on, where several processes
            train together. `(index, count)`: number `index` of each `count`
            successive batches in the epoch's order. That order is the same
            for any `count`. Batches from the beginning fill up the end, so
            that every process has equally many. "auto": asks
            `keras.distribution`, a multi-worker `tf.distribute` strategy in
            scope, `jax.distributed` and `torch.distributed`, in this order;
            all batches if none is in use. `None`: all batches.
        cache: Where to keep batches once they are built. From the next epoch
            on they come from there, by index, and are not built or copied
            again. "memory": this process. Otherwise the path of a directory,
            where batches also outlive the process. Cached arrays are
            read-only. Raises `LoaderError` if batches differ between epochs
            (`self.rng`, `self.epoch` and the like; random generators, except
            in threads) or if epoch hooks are overridden. Editing the dataset
            empties the cache. Only batches of arrays in tuples, lists and
            dicts are kept. `None`: no cache.
        cache_bytes: The cache's size limit. Batches beyond it are built in
            every epoch. `None`: for "memory", half of the memory that is
            free when the first epoch begins; for a directory, no limit. In a
            directory, batches of other versions of the dataset count too.
        cache_version: For a directory: any string or integer. Another value
            makes the cached batches invalid. So does a change of an
            attribute; of the dataset's code, or the code of an object in it;
            of globals, functions and classes that such code names; or of a
            file whose whole path is in any of these. For everything else, each
            run builds one of the batches that are there, and compares the two.
        executor: "local": workers are threads or processes of this machine,
            as above. "ray": workers are Ray actors, on this machine or a
            cluster (`pip install 'keras-fastdata[ray]'`). All that is said
            here of worker processes holds for them. Their batches come
            through Ray's object store, and large arrays in them are
            read-only views of it. Arrays of the dataset of 1 MiB and more
            exist once per node, and are read-only in workers. `ray.init` is
            called unless it was before. Ray listens on ports of its own, and
            keeps its store in /dev/shm.
        worker_env: Environment variables for worker processes. They override
            defaults that hide accelerators and give BLAS and OpenMP one
            thread each.
        ray_options: A dict, for `executor="ray"`. "address": "host:port" of
            a cluster; without it, the cluster that `ray.init` finds, or a
            new Ray on this machine. "init": a dict of other arguments of
            `ray.init`. "timeout_s": how long the cluster may take to answer
            and to find a place for the first worker; 60 by default. All
            others are arguments of a Ray actor's `options`: "num_cpus" and
            "resources" for each worker, "scheduling_strategy" ("SPREAD" by
            default), "runtime_env", ...

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range.

    Fetching batches raises `LoaderError` and its subclasses, and whatever
    `__getitem__` raises.

    While a batch is built, `self.rng`, `self.epoch`, `self.worker_index` and
    `self.empty` belong to that batch, also in threads that `__getitem__` has
    started. Where several worker threads build at once, such a thread could
    belong to any of their batches, and gets a `LoaderError`: read these in
    `__getitem__` itself and pass them on.

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
        _notice_methods(type(self))  # a decorator may have set some

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        module_sources.notice_modules()  # before the program changes settings
        _notice_methods(cls)

    # -- what a subclass writes ----------------------------------------------

    def __getitem__(self, index: int) -> Any:
        """Builds and returns batch `index`, from 0 to `len(self) - 1`.

        A batch is `inputs`, `(inputs,)`, `(inputs, targets)` or
        `(inputs, targets, sample_weights)`, each an array or a nested
        structure of arrays, or a dict. Arrays that the dataset keeps are
        copied, so that a buffer can be filled again for the next batch (but
        not by two threads at once). Fresh arrays are not copied. A worker
        process has a copy of the dataset: attributes that `__getitem__` sets
        on `self` stay in that process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `__getitem__(self, index)`."
        )

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch, or `None` if it is unknown.

        With `None`, `fit` needs `steps_per_epoch`, unless `__getitem__`
        raises `EndOfData` at the end of the data; and batches are not
        shuffled. Override this property if `__len__` cannot give the number.
        It is read again at the start of every epoch.
        """
        kind: Any = type(self)
        if hasattr(self, "__len__"):
            # Not `len`: its error for a float does not name the method.
            return interface.checked_length(
                f"{kind.__name__}.__len__()", kind.__len__(self)
            )
        raise NotImplementedError(
            f"{kind.__name__} must define `__len__(self)`, the number "
            "of batches, or the property `num_batches`, which may be None "
            "for a dataset without an end."
        )

    @interface.default_hook
    def on_epoch_begin(self) -> None:
        """Override this to run code before each epoch, in the training process.

        Changes to the dataset reach every worker before the next batch is
        built. `self.rng`, `np.random` and `random` are seeded for the call.
        """

    @interface.default_hook
    def on_epoch_end(self) -> None:
        """Override this to run code after each epoch, in the training process.

        Keras also calls it once before the first epoch, and your own loop
        may call it. Changes to the dataset reach every worker before the
        next batch is built. `self.rng`, `np.random` and `random` are seeded
        for the call, so that shuffling here is repeatable.
        """

    @interface.default_hook
    def on_worker_start(self) -> None:
        """Override this to run code in each worker, before its first batch.

        Open files and connections here. In processes, attributes that it
        sets on `self` belong to that worker and are never overwritten.
        Compute values from attributes that change between epochs elsewhere,
        such as in `on_epoch_begin`: this method runs once without workers,
        but again in a worker that starts later.

        If the dataset changes, and what this method made depends on the
        dataset (`Reader(self.table)`, `self.reader.open()`, an object of a
        class of your script), each worker process calls `on_worker_stop` and
        then this method again. Threads share `self`: there, use
        `threading.local()` or `self.worker_index`.

        Without workers and in worker processes, `np.random`, `random` and the
        random generators of the dataset are seeded for the call: all workers
        draw the same numbers.

        It does not run for `dataset[index]`, or where `__getitem__` of another
        dataset reads this one: call it there.
        """

    @interface.default_hook
    def on_worker_stop(self) -> None:
        """Override this to run code at the normal end of each worker.

        For threads and for builds in the caller, `close` calls it. It is not
        called there if the dataset is garbage-collected instead.
        """

    @interface.default_hook
    def reseed(self, seed_sequence: np.random.SeedSequence) -> None:
        """Override this to seed more random generators before each batch.

        Already seeded are `np.random`, `random`, torch's default generator,
        and objects that the dataset refers to: generators of NumPy, Python,
        torch and Keras, and objects with a method `set_random_seed(seed)` or
        `seed(seed)`. Not called in worker threads, which would share the
        generators.

        Args:
            seed_sequence: Depends on the seed, epoch and index of the batch.
        """

    # -- while a batch is built ----------------------------------------------

    rng: _WhileBuilding[np.random.Generator] = _WhileBuilding(
        "A `np.random.Generator` for this batch alone: its draws depend only "
        "on seed, epoch and index. If you ask for `dataset[3]`, outside of "
        "epochs, the draws are others at each call."
    )
    rng_for: _WhileBuilding[Callable[..., np.random.Generator]] = (
        _WhileBuilding(
            "`self.rng_for(*key)`: a generator whose draws depend on seed, "
            "epoch and key, and not on the batch. The key is one or more "
            "integers of at least 0, such as the index of a sample."
        )
    )
    epoch_order: _WhileBuilding[Callable[[int], Permutation]] = _WhileBuilding(
        "`self.epoch_order(length)`: a random order of `range(length)` that "
        "depends on seed and epoch. `order[i]` is the item at position i, "
        "and `order[a:b]` an array of items. `order.at(positions)` are the "
        "items at an array of positions. Even an order of a billion items "
        "takes no memory."
    )
    epoch: _WhileBuilding[int] = _WhileBuilding(
        "The number of the epoch that the batch belongs to, from 0. Each "
        "epoch of `fit`, each validation and each `for` loop counts as one."
    )
    worker_index: _WhileBuilding[int | None] = _WhileBuilding(
        "The index of the worker that builds the batch, from 0. It is 0 if "
        "`workers=0`, and `None` in `dataset[index]`."
    )
    empty: _WhileBuilding[Empty] = _WhileBuilding(
        "`self.empty(shape, dtype='float32')`: an uninitialized array. In a "
        "worker process it lies in the shared memory of the batch, so that "
        "returning it copies nothing."
    )

    # -- outside of fit ------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of one epoch, which the workers build.

        Batches come in order, unless `shuffle=True`. The epoch hooks are not
        called. While a batch of another dataset is built, the caller builds
        these batches, and that batch's seeds decide on their order.
        """
        if build_context.is_building():
            return plain_iterator(self)
        _notice_methods(type(self))  # the program may have replaced some
        return iterate_alone(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch as a dict for `load_state_dict`.

        The position is the batch after the one delivered last; batches that
        are only built ahead do not count. In a callback of `fit`, the
        framework may have fetched batches that it has not trained on yet:
        use `DatasetCheckpoint`, which accounts for them.

        Returns:
            A small dict that JSON can hold. It does not depend on the kind or
            number of workers.
        """
        return state_dict_of(self, loader_of(self).checkpoint.save(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next epoch start at the position that `state_dict` saved.

        Call it before the first epoch, on a dataset made with the same
        arguments. The rest of the saved epoch comes first, byte for byte.
        Epoch hooks that had run before are run again, with the same seeds.

        Args:
            state_dict: A dict that `state_dict` returned.

        Raises:
            ValueError: A field is damaged (the message names it), or the
                state belongs to a dataset with another length, another seed,
                or other epoch hooks.
            LoaderError: The epoch hooks did not repeat what they had done.
        """
        state = State.from_dict(state_dict, type(self).__name__)
        loader_of(self).checkpoint.restore(self, state)
        internals_of(self).forget_outside_rng()

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, from 0.

        That epoch then has the same order and bytes as in a run from epoch
        0; use it with `fit(initial_epoch=epoch)`. Epoch hooks are not run. If
        that epoch is next in any case, nothing changes: a state that was
        loaded amid its batches still counts.
        """
        loader_of(self).checkpoint.set_epoch(
            self, integer("epoch", epoch, least=0)
        )

    def mark_changed(self) -> None:
        """Notifies the workers that the dataset was edited in place.

        Batches that were built ahead are dropped and built again from the
        present dataset. Assignments to attributes, and changes by the epoch
        hooks, are noticed without this call. A cache is emptied. If it is a
        directory that is in use, the cache is in memory from then on.
        """
        mark_changed(self, unseen=True)

    def close(self) -> None:
        """Stops the workers and waits until they have ended.

        Workers start again when they are needed. The end of a `with` block
        and garbage collection do the same. Any thread or signal handler may
        call `close` at any time; a batch in progress is built again later.
        If a signal handler interrupts a call of this dataset, the workers
        end when that call goes on. In a worker, `close` does nothing.
        """
        if (loader := own_loader(self)) is not None:
            loader.close()

    # -- how it is displayed -------------------------------------------------

    def show(self, n: int = 9, *, index: int = 0) -> Figure:
        """Draws the first samples of a batch, with their labels.

        Images become a grid, in colours from black to white whatever their
        range; the title has their dtype, shape and range. Other data become a
        table. Targets of zeros and ones are shown as the classes that they
        mark, by name if the dataset has a list `class_names`.

        The batch is built in the caller, from a copy of the dataset, as the
        epoch that begins next would have it. Workers, order, draws and the
        epoch's number do not change. Only what `__getitem__` edits in place
        does.

        Args:
            n: How many samples to draw, at least 1. Defaults to 9.
            index: The batch, at least 0. Defaults to 0.

        Returns:
            A `matplotlib.figure.Figure`. A notebook displays it, and
            `figure.savefig(path)` writes it.

        Raises:
            ImportError: Matplotlib is not installed (the extra `report`).
            LoaderError: The dataset takes its items from an iterator, which
                would lose them.
        """
        from keras_fastdata.display import samples

        return samples.draw(
            self, integer("index", index, least=0), integer("n", n, least=1)
        )

    element_spec = _ElementSpec()

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        from keras_fastdata.display import description

        inherited = super().__repr__
        try:
            if not description.is_default(inherited):
                return inherited()
            return description.dataset_text(self)
        except Exception as error:
            raise_of_handler(error)
            return object.__repr__(self)

    def _repr_html_(self) -> str | None:
        """Returns a table of the dataset's properties, for a notebook.

        Returns `None` if the class has a `__repr__` of its own, which the
        notebook then shows.
        """
        from keras_fastdata.display import description

        is_ours = type(self).__repr__ is FastPyDataset.__repr__
        with ignoring_errors():
            if is_ours and description.is_default(super().__repr__):
                return description.dataset_html(self)
        return None

    def __enter__(self) -> FastPyDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Keras's own three settings ------------------------------------------

    @property
    def workers(self) -> int:
        """The current number of workers, as the argument `workers` has it."""
        return settings_in_effect(self).count

    @workers.setter
    def workers(self, value: int | Literal["auto"]) -> None:
        replace_settings(self, workers=value)

    @property
    def use_multiprocessing(self) -> bool:
        """Whether the current workers are processes, and not threads."""
        return settings_in_effect(self).use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        replace_settings(self, use_multiprocessing=value)

    @property
    def max_queue_size(self) -> int:
        """The maximum number of batches that are requested ahead."""
        return internals_of(self).settings.max_queue_size

    @max_queue_size.setter
    def max_queue_size(self, value: int) -> None:
        replace_settings(self, max_queue_size=value)

    # -- noticing changes ----------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_assigned(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        note_assigned(self, name)


_NOTICED_METHODS = (
    *interface.EPOCH_HOOKS,
    "__setattr__",
    "__delattr__",
)


def _noticed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a subclass's method to notify the loader of each call.

    A call of a hook in `__init__` belongs to making the dataset, and is not
    noticed.
    """

    def hook(self: FastPyDataset, *args: Any, **kwargs: Any) -> Any:
        if build_context.is_built_for(self) or (
            own_loader(self) is None
            and (_process_role.is_worker() or _call_stack.is_being_made(self))
        ):
            return method(self, *args, **kwargs)
        call = functools.partial(method, self, *args, **kwargs)
        try:
            return loader_of(self).hooks.call(self, name, call)
        finally:
            internals_of(self).mark_followers()

    def assign(self: FastPyDataset, attribute: str, *value: Any) -> None:
        method(self, attribute, *value)
        note_assigned(self, attribute)

    wrapper = hook if name.startswith("on_") else assign
    setattr(wrapper, interface.NOTICED, True)
    return functools.wraps(method)(wrapper)


def _notice_methods(kind: type[FastPyDataset]) -> None:
    """Wraps methods of a class and its bases, so that calls are noticed.

    A method of a mixin is wrapped in `kind`.
    """
    for name in _NOTICED_METHODS:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        method = vars(owner)[name]
        if isinstance(method, types.FunctionType) and not (
            interface.is_default_hook(method)
            or hasattr(method, interface.NOTICED)
        ):
            is_dataset = issubclass(owner, FastPyDataset)
            wrapped = _noticed(name, method)
            setattr(owner if is_dataset else kind, name, wrapped)


for _method in (FastPyDataset.__setattr__, FastPyDataset.__delattr__):
    setattr(_method, interface.NOTICED, True)

if not TYPE_CHECKING and not _process_role.is_worker():
    keras_bridge.register(FastPyDataset)
