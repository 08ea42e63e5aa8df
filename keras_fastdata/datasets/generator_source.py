"""The source of a `GeneratorDataset`: a factory, an iterable, an iterator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._validation import boolean
from keras_fastdata.datasets.iterables import Passes
from keras_fastdata.metrics.worker_kinds import WorkerLimit

# What can be split among workers, in words.
_FACTORY = (
    "a function `factory(shard_index, num_shards)`, which makes a generator of "
    "one part of the items"
)


class GeneratorSource(NamedTuple):
    """The user's factory or iterator, and the parameters of the factory.

    For an iterable that serves any number of passes, `factory` is `Passes`.
    """

    factory: Any
    is_iterator: bool = False
    takes_shards: bool = False  # `shard_index` and `num_shards`
    names_shards: bool = False  # whether these are the parameters' names
    takes_rng: bool = False
    takes_start: bool = False

    @staticmethod
    def of(factory: Any) -> GeneratorSource:
        """Creates the source; raises `TypeError` if `factory` is unsuitable."""
        if hasattr(factory, "__next__"):
            return GeneratorSource(factory, is_iterator=True)
        if not callable(factory):
            passes = Passes.over(factory)
            if passes is not None:
                return GeneratorSource(passes, takes_shards=passes.splits)
            raise TypeError(
                "`factory` must be a function that makes a generator, an "
                f"iterable or an iterator. Received a {type(factory).__name__}"
                ". Pass an object with numbered items to `SampleDataset`; pass "
                "`lambda: iter(items)` to iterate over it."
            )
        try:
            parameters = dict(inspect.signature(factory).parameters)
        except ValueError:
            return GeneratorSource(
                factory
            )  # a function in C may have no signature
        rng = _pop_parameter(parameters, "rng", factory)
        start = _pop_parameter(parameters, "start", factory)
        kinds = inspect.Parameter
        positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        variable = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        rest = parameters.values()
        needed = [p for p in rest if p.default is p.empty]
        needed = [p for p in needed if p.kind not in variable]
        by_name = _shard_parameters(parameters, factory)
        named = bool(by_name)
        first = by_name or [p for p in rest if p.kind in positional][:2]
        many = any(p.kind is kinds.VAR_POSITIONAL for p in rest)
        # Positional parameters that have defaults are for the user.
        wanted = [p.default is p.empty for p in first]
        shards = many or named or wanted == [True, True]
        if any(p not in (first if shards else []) for p in needed):
            names = ", ".join(p.name for p in needed)
            raise TypeError(
                "`factory` must be callable as `factory()` or as "
                f"`factory(shard_index, num_shards)`; it needs ({names}). "
                "`functools.partial` fills in the others."
            )
        return GeneratorSource(factory, False, shards, named, rng, start)

    def check(self, num_shards: int, processes: bool) -> None:
        """Raises `ValueError` if the workers cannot use the source."""
        if num_shards > 1 and not self.takes_shards:
            what = "iterator" if self.is_iterator else "factory"
            if isinstance(self.factory, Passes):
                what = type(self.factory.iterable).__name__
            raise ValueError(
                f"This {what} cannot be split among {num_shards} workers or "
                "shards: each would give the same items. Pass a function "
                "`factory(shard_index, num_shards)` that makes a generator of "
                "one item in `num_shards`, or of some of the files; or use "
                "`workers=1`."
            )
        if processes and self.is_iterator:
            raise ValueError(
                "An iterator cannot go to a worker process: it cannot be "
                "copied, and each copy would give the same items. Pass the "
                "function that makes it, without calling it, so that the "
                "worker calls it; or use a thread of this process, with "
                "`use_multiprocessing=False`."
            )
        if processes and not getattr(self.factory, "travels", True):
            raise ValueError(
                f"A {type(self.factory.iterable).__name__} cannot go to a "
                "worker process. Use a thread of this process, with "
                "`workers=1`: TensorFlow runs the dataset in threads of its "
                "own."
            )

    def limit(self, num_shards: int | None) -> WorkerLimit:
        """Returns which workers can use the source.

        `num_shards` is `None` if there is one shard for each worker.
        """
        if self.is_iterator:
            return WorkerLimit(1, False, f"Pass {_FACTORY}, not an iterator.")
        if not self.takes_shards:
            return WorkerLimit(1, True, f"Pass {_FACTORY}.")
        how_more = "Raise `num_shards`, which changes the order of batches."
        return WorkerLimit(num_shards, True, how_more if num_shards else "")

    def restarts(self, asked: bool | None, num_batches: int | None) -> bool:
        """Returns whether every epoch makes new generators.

        Raises `ValueError` if the argument `restart` does not suit the source.
        """
        restarts = boolean(
            "restart", not self.is_iterator if asked is None else asked
        )
        if restarts and self.is_iterator:
            raise ValueError(
                "`restart=True` needs a function that makes a generator; an "
                "iterator can be iterated through once."
            )
        if not restarts and num_batches is None and not self.is_iterator:
            raise ValueError(
                "`restart=False` needs `num_batches`, the number of batches "
                "after which an epoch ends and the next one goes on."
            )
        return restarts

    def make(
        self, index: int, num_shards: int, stream: tuple[int, ...], start: int
    ) -> Iterator[Any]:
        """Creates a generator, or returns the user's iterator unchanged."""
        if self.is_iterator:
            iterator: Iterator[Any] = self.factory
            return iterator
        if isinstance(self.factory, Passes):
            key, _, times = stream
            return self.factory.begin(index, num_shards, key + times)
        named: dict[str, Any] = {}
        if self.takes_rng:
            named["rng"] = np.random.default_rng(stream)
        if self.takes_start:
            named["start"] = start
        shard: tuple[int, ...] = ()
        if self.names_shards:
            named |= {"shard_index": index, "num_shards": num_shards}
        elif self.takes_shards:
            shard = index, num_shards
        made = self.factory(*shard, **named)
        try:
            return iter(made)
        except TypeError:
            raise TypeError(
                "`factory` must return a generator or another iterable. It "
                f"returned a {type(made).__name__}."
            ) from None


def _shard_parameters(
    parameters: dict[str, inspect.Parameter], factory: Any
) -> list[inspect.Parameter]:
    """Returns the parameters with the names of both; none if one is missing."""
    found = [
        parameter
        for name, parameter in parameters.items()
        if name in ("shard_index", "num_shards")
        and name not in getattr(factory, "keywords", {})
        and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    ]
    return found if len(found) == 2 else []


def _pop_parameter(parameters: dict[str, Any], name: str, factory: Any) -> bool:
    """Removes parameter `name`; returns whether to pass an argument for it."""
    found = parameters.get(name)
    if found is None or name in getattr(factory, "keywords", {}):
        return False
    del parameters[name]
    return found.default in (inspect.Parameter.empty, None, 0)
