"""The loaders that are compared, each in its fastest ordered configuration.

All take a workload and yield nested NumPy arrays, in order, epoch after epoch.
Where it can be chosen, 8 batches are made ahead.

- fastdata: `FastPyDataset` with worker processes. "fastdata empty" builds in
  memory from `self.empty`, "fastdata threads" has threads, "fastdata portable"
  has `start_method="portable"`, "fastdata ray" has Ray actors.
- stock inline, stock threads, stock processes: `keras.utils.PyDataset`,
  through the adapter that `fit` uses (a plain `for` over one has no workers).
  One thread is no thread to Keras, so threads need two producers.
- torch: `DataLoader(batch_size=None, persistent_workers=True)`. Its default
  collation turns arrays into tensors in the worker, and tensors travel in
  shared memory, where arrays would be pickled; `.numpy()` is free.
- grain: `mp_prefetch`, with no reading threads, as its documentation advises
  for data that is in memory already.
- loky: batches are submitted ahead to an executor, and come through its pipe.
- spdl: `iterate_in_subprocess` with a `SharedMemorySegmentPool`. It has one
  producer; two are two of them, taken in turns.
- tf generator: `tf.data.Dataset.from_generator`, prefetched. Two producers are
  two generators, interleaved deterministically; they share the GIL.
- ray: one actor for each producer, asked in turns; arrays are views of Ray's
  object store. "ray loop" asks for one batch at a time, as a plain loop does.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any

from benchmarks.workloads import Indexed, Workload, leaves

ENDLESS = 10**9
AHEAD = 8


class Loader:
    """One epoch of batches for each `iter`, until it is closed.

    Args:
        workload: Makes a batch of an index.
        workers: Producers of batches.
        batches: Length of an epoch.
        ahead: Batches to make ahead.
    """

    needs: tuple[str, ...] = ()

    def __init__(
        self, workload: Workload, workers: int, batches: int, ahead: int
    ) -> None:
        self.workload = workload
        self.workers = workers
        self.batches = batches
        self.ahead = ahead
        self.open()

    @property
    def ahead_each(self) -> int:
        """Batches for each producer to make ahead."""
        return math.ceil(self.ahead / max(1, self.workers))

    def open(self) -> None:
        """Makes what lasts longer than an epoch."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def for_fit(self) -> Any:
        """What `fit` takes in its place."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the producers."""

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fastdata(Loader):
    """Ours, with processes."""

    needs: tuple[str, ...] = ("benchmarks.ours",)
    processes = True
    in_place = False

    def open(self) -> None:
        from benchmarks.ours import InPlace, Ours

        self.dataset = (InPlace if self.in_place else Ours)(
            self.workload,
            self.batches,
            workers=self.workers,
            use_multiprocessing=self.processes,
            max_queue_size=self.ahead,
            **self.more(),
        )

    def more(self) -> dict[str, Any]:
        """Further arguments of the dataset."""
        return {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def for_fit(self) -> Any:
        return self.dataset

    def close(self) -> None:
        self.dataset.close()


class FastdataEmpty(Fastdata):
    """Ours, with processes that build where the batch travels."""

    in_place = True


class FastdataThreads(Fastdata):
    """Ours, with threads."""

    processes = False


class FastdataPortable(Fastdata):
    """Ours, with processes as every system has them."""

    def more(self) -> dict[str, Any]:
        return {"start_method": "portable"}


class FastdataRay(Fastdata):
    """Ours, with Ray actors."""

    needs = ("benchmarks.ours", "ray")

    def more(self) -> dict[str, Any]:
        init = _local_ray(self)
        return {"executor": "ray", "ray_options": {"init": init}}


class Stock(Loader):
    """Keras's own, in the caller."""

    needs = ("keras",)
    processes = False
    inline = True

    def open(self) -> None:
        import keras

        class Dataset(Indexed, keras.utils.PyDataset):
            """The workload, as Keras knows it."""

        self.dataset = Dataset(
            self.workload,
            self.batches,
            workers=0 if self.inline else self.workers,
            use_multiprocessing=self.processes,
            max_queue_size=self.ahead,
        )

    def __iter__(self) -> Iterator[Any]:
        from keras.src.trainers.data_adapters import py_dataset_adapter

        adapter = py_dataset_adapter.PyDatasetAdapter(self.dataset)
        adapter.on_epoch_begin()
        yield from adapter._get_iterator()
        adapter.on_epoch_end()

    def for_fit(self) -> Any:
        return self.dataset


class StockThreads(Stock):
    """Keras's own, with threads."""

    inline = False


class StockProcesses(StockThreads):
    """Keras's own, with processes."""

    processes = True


class Torch(Loader):
    """PyTorch's loader of what is batched already."""

    needs = ("torch",)

    def open(self) -> None:
        from torch.utils.data import DataLoader

        self.loader = DataLoader(
            Indexed(self.workload, self.batches),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.ahead_each,
            persistent_workers=True,
        )

    def __iter__(self) -> Iterator[Any]:
        return map(_as_numpy, self.loader)

    def for_fit(self) -> Any:
        return self.loader

    def close(self) -> None:
        del self.loader


class Grain(Loader):
    """Grain's processes."""

    needs = ("grain",)

    def open(self) -> None:
        import grain
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # Grain reads them in each worker
        self.dataset = (
            grain.MapDataset.range(self.batches)
            .map(self.workload)
            .to_iter_dataset(
                grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
            )
            .mp_prefetch(
                grain.multiprocessing.MultiprocessingOptions(
                    num_workers=self.workers,
                    per_worker_buffer_size=self.ahead_each,
                )
            )
        )

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.dataset)
        try:
            yield from batches
        finally:
            batches.close()


class Loky(Loader):
    """An executor of loky's processes."""

    needs = ("loky",)

    def open(self) -> None:
        import loky

        self.executor = loky.ProcessPoolExecutor(max_workers=self.workers)

    def __iter__(self) -> Iterator[Any]:
        submit = functools.partial(self.executor.submit, self.workload)
        ahead: collections.deque[Any] = collections.deque()
        for index in range(self.batches):
            ahead.append(submit(index))
            if len(ahead) > max(self.ahead, self.workers):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def close(self) -> None:
        self.executor.shutdown(wait=True, kill_workers=True)


class Spdl(Loader):
    """SPDL's subprocesses, each with its pool of shared memory."""

    needs = ("spdl.pipeline",)

    def open(self) -> None:
        from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

        # Each array begins at a multiple of 64 bytes.
        arrays = leaves(self.workload(0))
        nbytes = sum(array.nbytes + 64 for array in arrays)
        self.streams = [
            iterate_in_subprocess(
                functools.partial(
                    _Strided, self.workload, first, self.batches, self.workers
                ),
                buffer_size=self.ahead_each,
                # One that is read, one that is written.
                arena=SharedMemorySegmentPool(nbytes, self.ahead_each + 2),
            )
            for first in range(self.workers)
        ]

    def __iter__(self) -> Iterator[Any]:
        streams = [iter(stream) for stream in self.streams]
        for index in range(self.batches):
            yield next(streams[index % self.workers])
        for stream in streams:  # they wait to be told that all was read
            next(stream, None)

    def close(self) -> None:
        del self.streams


class TfGenerator(Loader):
    """TensorFlow's way to read a Python generator."""

    needs = ("tensorflow",)

    def open(self) -> None:
        import tensorflow as tf

        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape, array.dtype),
            self.workload(0),
        )

        def generate(first: int) -> Iterator[Any]:
            for index in range(first, self.batches, self.workers):
                yield self.workload(index)

        def stream(first: Any) -> Any:
            return tf.data.Dataset.from_generator(
                generate, args=(first,), output_signature=signature
            )

        self.dataset = (
            tf.data.Dataset.range(self.workers)
            .interleave(
                stream,
                cycle_length=self.workers,
                block_length=1,
                num_parallel_calls=self.workers,
                deterministic=True,
            )
            .prefetch(self.ahead)
        )

    def __iter__(self) -> Iterator[Any]:
        return self.dataset.as_numpy_iterator()

    def for_fit(self) -> Any:
        return self.dataset


class Ray(Loader):
    """Ray actors, and views of its object store."""

    needs = ("ray",)
    asks_ahead = True

    def open(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        ray.init(
            ignore_reinit_error=True,  # by the loader of the validation
            **_local_ray(self),
        )
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(
            _Builder
        )
        workload = ray.put(self.workload)
        self.actors = [actor.remote(workload) for _ in range(self.workers)]

    def __iter__(self) -> Iterator[Any]:
        import ray

        ahead: collections.deque[Any] = collections.deque()
        for index in range(self.batches):
            actor = self.actors[index % self.workers]
            ahead.append(actor.build.remote(index))
            if len(ahead) > self.ahead * self.asks_ahead:
                yield ray.get(ahead.popleft())
        while ahead:
            yield ray.get(ahead.popleft())

    def close(self) -> None:
        import ray

        ray.shutdown()


class RayLoop(Ray):
    """Ray actors, each asked for a batch when it is wanted."""

    asks_ahead = False


LOADERS: dict[str, type[Loader]] = {
    "fastdata": Fastdata,
    "fastdata empty": FastdataEmpty,
    "fastdata threads": FastdataThreads,
    "fastdata portable": FastdataPortable,
    "fastdata ray": FastdataRay,
    "stock inline": Stock,
    "stock threads": StockThreads,
    "stock processes": StockProcesses,
    "torch": Torch,
    "grain": Grain,
    "loky": Loky,
    "spdl": Spdl,
    "tf generator": TfGenerator,
    "ray": Ray,
    "ray loop": RayLoop,
}


# Those with worker processes, each in the way it is best at.
WITH_PROCESSES = (
    "fastdata",
    "stock processes",
    "torch",
    "grain",
    "spdl",
    "ray",
)


def missing(name: str) -> str | None:
    """What has to be installed for a loader, if it is not."""
    for module in LOADERS[name].needs:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return module.partition(".")[0]
    return None


def import_all(name: str) -> None:
    """Imports what a program that trains with a loader has imported.

    Args:
        name: Of the loader; for others it is Keras alone.
    """
    needs = LOADERS[name].needs if name in LOADERS else ()
    for module in ("keras", *needs):
        importlib.import_module(module)


def open_loader(
    name: str,
    workload: Workload,
    workers: int,
    batches: int = ENDLESS,
    ahead: int = AHEAD,
) -> Loader:
    """Opens a loader by name; see `Loader` for the rest."""
    return LOADERS[name](workload, workers, batches, ahead)


def _local_ray(loader: Loader) -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray with room for what is made ahead."""
    nbytes = sum(array.nbytes for array in leaves(loader.workload(0)))
    return {
        "num_cpus": loader.workers,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": max(200 * 2**20, 3 * loader.ahead * nbytes),
    }


class _Strided:
    """Every n-th batch of an epoch."""

    def __init__(
        self, workload: Workload, first: int, batches: int, stride: int
    ) -> None:
        self.workload = workload
        self.indices = range(first, batches, stride)

    def __iter__(self) -> Iterator[Any]:
        return map(self.workload, self.indices)


class _Builder:
    """What a Ray actor does."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def build(self, index: int) -> Any:
        return self.workload(index)


def _as_numpy(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _as_numpy(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map(_as_numpy, batch))
    return batch.numpy()
