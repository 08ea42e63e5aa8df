"""Makes datasets of datasets: `mix`, `concat`, `take`, `split` and others.

Each function returns a dataset, which is indexed, shuffled, resumed and
pickled like any other. A function works on samples where all given datasets
have samples (`SampleDataset`, its subclasses, `ArrayDataset`), and otherwise on
batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from keras_fastdata._dataset_internals import (
    datasets_within,
    follow,
    internals_of,
    make_twin,
    state_dict_of,
)
from keras_fastdata._validation import boolean, integer, one_of
from keras_fastdata.building import interface, seeding
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets import order as orders
from keras_fastdata.datasets.collate import Padded
from keras_fastdata.datasets.order import Order
from keras_fastdata.datasets.samples import SampleDataset
from keras_fastdata.datasets.sampling import (
    ORDER_ARGUMENTS,
    SampledDataset,
    column_of,
    epoch_of,
    labels_of,
    part_lengths_of,
    sample_of,
    samples_of,
    takes_rng,
)
from keras_fastdata.engine.sharding import has_random_access
from keras_fastdata.engine.state_dict import State
from keras_fastdata.sources.source import Indices

Places = range | Indices
Function = Callable[..., Any]


def concat(
    datasets: Iterable[FastPyDataset],
    *,
    by: str | None = None,
    **kwargs: Any,
) -> FastPyDataset:
    """Returns a dataset with all that several datasets have, one after another.

    Args:
        datasets: The datasets, at least one. Of samples, each dataset gives its
            samples; how a dataset orders and stacks them does not matter. Of
            batches, each gives its batches as its own arguments say. How many
            each has is asked once; other changes of a dataset are noticed.
        by: "samples" or "batches". `None`: "samples" if all datasets have
            samples.
        **kwargs: Arguments of `SampleDataset`, or of `FastPyDataset` for
            batches. What is left out is as in the first dataset, but
            `sampler` and `bucket_by`.

    Raises:
        TypeError: There is no dataset, or one is not a `FastPyDataset`.
        ValueError: The datasets have no samples, and `by="samples"`.

    Example:

    >>> from keras_fastdata import SampleDataset, combine
    >>> one, other = SampleDataset([1, 2, 3]), SampleDataset([40, 50])
    >>> with combine.concat([one, other], batch_size=2) as dataset:
    ...     [batch.tolist() for batch in dataset]
    [[1, 2], [3, 40], [50]]
    """
    members = _checked(datasets)
    if _are_of_samples(members, by):
        arguments = _arguments(members[0], kwargs)
        return _CombinedSamples("concat", members, **arguments)
    return _CombinedBatches("concat", members, orders.InOrder(), kwargs)


def mix(
    datasets: Iterable[FastPyDataset],
    weights: Sequence[float] | None = None,
    stop: Literal["first", "all"] | int = "first",
    *,
    by: str | None = None,
    **kwargs: Any,
) -> FastPyDataset:
    """Returns a dataset that draws from several datasets in exact proportion.

    Of the first n samples of an epoch, each dataset gives its share of n, to
    within one or two; with `shuffle=True`, wherever n is a whole number of
    turns, in which each dataset comes at least once. A dataset that comes to
    its end begins again, in another order if samples are shuffled.

    Args:
        datasets: As in `concat`.
        weights: A number above 0 for each dataset. `None`: all are equal.
        stop: "first": the epoch ends before a sample would come twice. "all":
            it ends when each sample has come. Or the number of samples (or of
            batches) in an epoch, at least 1.
        by: As in `concat`.
        **kwargs: As in `concat`. With `shuffle=True`, the order of each
            dataset's samples differs between epochs, and so does the order in
            which datasets come.

    Raises:
        TypeError: As in `concat`.
        ValueError: As in `concat`; or weights or `stop` are out of range.

    Example:

    >>> from keras_fastdata import SampleDataset, combine
    >>> many, few = SampleDataset(range(12)), SampleDataset([100, 200])
    >>> with combine.mix([many, few], [3, 1], batch_size=4) as dataset:
    ...     [batch.tolist() for batch in dataset]
    [[0, 1, 100, 2], [3, 4, 200, 5], [6, 7]]
    """
    members = _checked(datasets)
    shares = _checked_weights(weights, len(members))
    if isinstance(stop, str):
        one_of("stop", stop, ("first", "all"))
    else:
        integer("stop", stop, least=1)
    of_samples = _are_of_samples(members, by)
    counts = [_count(member, of_samples) for member in members]
    if empty := [place for place, count in enumerate(counts) if not count]:
        raise ValueError(f"Number {empty[0]} of `datasets` is empty.")
    arguments = _arguments(members[0], kwargs) if of_samples else kwargs
    shuffles = bool(arguments.get("shuffle"))
    # `fit` does not shuffle whole batches: the order has the proportions.
    arguments["shuffle"] = False
    groups, count = _groups(counts), sum(counts)
    order = orders.Mixed(groups, shares, stop, shuffles, count)
    if of_samples:
        return _CombinedSamples("mix", members, order=order, **arguments)
    return _CombinedBatches("mix", members, order, arguments)


def take(dataset: FastPyDataset, count: int) -> Any:
    """Returns a dataset of the first `count` samples, or batches, of another.

    Args:
        dataset: The dataset. The result is like it in all but its length:
            also its `num_samples` and `get_sample` are those of the whole. Of
            samples, it is a copy, which does not notice later assignments to
            `dataset`.
        count: How many, at least 0. If there are fewer, all of them.
    """
    integer("count", count, least=0)
    return _part(dataset, range(min(count, _count(dataset))))


def skip(dataset: FastPyDataset, count: int) -> Any:
    """Returns a dataset without the first `count` samples, or batches.

    Args:
        dataset: The dataset. The result is like it in all but its length.
        count: How many to leave out, at least 0.
    """
    integer("count", count, least=0)
    total = _count(dataset)
    return _part(dataset, range(min(count, total), total))


def split(
    dataset: FastPyDataset,
    share: float,
    *,
    shuffle: bool = False,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Returns two datasets, which divide the samples, or batches, of another.

    Args:
        dataset: The dataset. The results are like it in all but their length.
        share: The share of the first dataset, above 0 and below 1. It has at
            least one sample, and leaves one.
        shuffle: Whether to draw the samples of the first dataset. `False`: it
            has the first ones.
        seed: What the samples are drawn from, an integer of at least 0.

    Raises:
        ValueError: `share` is out of range, or there are not two samples.
    """
    total = _count(dataset)
    if not 0 < share < 1:
        raise ValueError(f"`share` must be between 0 and 1. Received: {share}")
    if total < 2:
        raise ValueError(
            f"{type(dataset).__name__} has {total} samples or batches, and "
            "two parts need at least 2."
        )
    first = min(max(1, round(share * total)), total - 1)
    if not boolean("shuffle", shuffle):
        parts: list[Places] = [range(first), range(first, total)]
    else:
        stream = seeding.sequence(integer("seed", seed, least=0))
        drawn = Permutation(total, stream).at(np.arange(total))
        parts = [np.sort(drawn[:first]), np.sort(drawn[first:])]
    one, other = (_part(dataset, places) for places in parts)
    return one, other


def filter(dataset: FastPyDataset, function: Function) -> Any:
    """Returns a dataset of the samples, or batches, that a function accepts.

    Args:
        dataset: The dataset. The result is like it in all but its length.
        function: Returns whether to keep a sample. It is called for all
            samples at once, now, in this process; their indices are kept.
    """
    element = functools.partial(_element, dataset, _is_of_samples(dataset))
    total = _count(dataset)
    kept = [place for place in range(total) if function(element(place))]
    return _part(dataset, np.asarray(kept, np.int64))


def map(
    dataset: FastPyDataset,
    function: Function,
    *,
    by: str | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a dataset of what a function makes of samples, or batches.

    Args:
        dataset: The dataset.
        function: Gets a sample and returns a sample, each time one is built,
            in a worker. If it has a parameter `rng`, it receives the NumPy
            generator of the sample.
        by: As in `concat`. By batches, the function gets a whole batch, which
            suits a table, whose columns it computes with.
        **kwargs: Arguments as of `concat`, but none about the order of
            samples: that is as in `dataset`.
    """
    if taken := ORDER_ARGUMENTS & kwargs.keys():
        raise TypeError(
            f"`map` keeps the order of `dataset`; pass `{min(taken)}` to that "
            "dataset."
        )
    if _are_of_samples([dataset], by, keeps_order=True):
        return _MappedSamples(dataset, function, _arguments(dataset, kwargs))
    order = orders.InOrder()
    return _CombinedBatches("map", [dataset], order, kwargs, function)


class _Members:
    """Several datasets, whose samples or batches have one numbering."""

    def __init__(
        self, datasets: list[FastPyDataset], of_samples: bool = True
    ) -> None:
        self.datasets = datasets
        self._of_samples = of_samples
        self._ends = np.cumsum([_count(d, of_samples) for d in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number = int(np.searchsorted(self._ends, index, "right"))
        place = index - int(self._ends[number - 1] if number else 0)
        return _element(self.datasets[number], self._of_samples, place)


class _Function:
    """A user's function of a sample or a batch, or none."""

    def __init__(self, function: Function | None) -> None:
        self._function = function
        self._draws = function is not None and takes_rng(function)

    def of(self, found: Any, owner: FastPyDataset) -> Any:
        """Returns what the function makes of `found`, built for `owner`."""
        if self._function is None:
            return found
        rng = {"rng": owner.rng} if self._draws else {}
        return self._function(found, **rng)


def _forwarded(name: str) -> Any:
    """Returns a hook that calls the hooks of the datasets within."""

    def hook(self: Any, *args: Any) -> None:
        for dataset in datasets_within(self):
            if interface.overrides(dataset, name):
                method = getattr(dataset, name)
                if name.startswith("on_epoch") and name not in vars(dataset):
                    # Not noticed by `dataset`, which has no epochs of its own.
                    plain = getattr(method, "__wrapped__", None)
                    method = plain.__get__(dataset) if plain else method
                method(*args)

    hook.__name__ = name
    setattr(hook, interface.FORWARDS, datasets_within)
    return hook


class _Combined(FastPyDataset):
    """Base class of what has other datasets; calls their hooks."""

    on_epoch_begin = _forwarded("on_epoch_begin")
    on_epoch_end = _forwarded("on_epoch_end")
    on_worker_start = _forwarded("on_worker_start")
    on_worker_stop = _forwarded("on_worker_stop")
    reseed = _forwarded("reseed")


@datasets_within.register
def _(dataset: _Combined) -> list[Any]:
    members = vars(dataset).get("_fastdata_members")
    if members is None:
        return [vars(dataset)["_fastdata_mapped"]]
    datasets: list[FastPyDataset] = members.datasets
    return datasets


class _CombinedSamples(_Combined, SampleDataset):
    """The samples of several datasets."""

    def __init__(
        self,
        made_by: str,
        datasets: list[FastPyDataset],
        *,
        order: Order | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(None, **kwargs)
        interface.set_name(self, f"combine.{made_by}")
        if order is not None:
            self._fastdata_order.give(order)
        self._fastdata_members = _Members(datasets)
        follow(self)

    @property
    def num_samples(self) -> int:
        return len(self._fastdata_members)

    def get_sample(self, index: int) -> Any:
        return self._fastdata_members[index]


class _MappedSamples(_Combined, SampleDataset):
    """The samples of a dataset, in its order, with a function of each."""

    def __init__(
        self,
        dataset: Any,
        function: Function,
        arguments: dict[str, Any],
    ) -> None:
        shuffle = internals_of(dataset).settings.shuffle
        super().__init__(None, **{**arguments, "shuffle": shuffle})
        interface.set_name(self, "combine.map")
        # The order, and the part of the samples, of `dataset`.
        self._fastdata_order = dataset._fastdata_order.copied()
        self._fastdata_mapped = dataset
        self._fastdata_function = _Function(function)
        follow(self)

    @property
    def num_samples(self) -> int:
        return int(self._fastdata_mapped.num_samples)

    def get_sample(self, index: int) -> Any:
        found = sample_of(self._fastdata_mapped, index)
        return self._fastdata_function.of(found, self)


def _of_mapped(function: Function, dataset: _MappedSamples, *args: Any) -> Any:
    return function(vars(dataset)["_fastdata_mapped"], *args)


for _function in (labels_of, part_lengths_of, column_of, samples_of):
    _ask: Any = functools.partial(_of_mapped, _function)
    _function.register(_MappedSamples, _ask)


class _CombinedBatches(_Combined):
    """The batches of several datasets."""

    def __init__(
        self,
        made_by: str,
        datasets: list[FastPyDataset],
        order: Order,
        arguments: dict[str, Any],
        function: Function | None = None,
    ) -> None:
        arguments = {**_settings(datasets[0]), **arguments}
        _check_workers(datasets, arguments["workers"])
        super().__init__(**arguments)
        interface.set_name(self, f"combine.{made_by}")
        self._fastdata_order = order
        self._fastdata_members = _Members(datasets, of_samples=False)
        self._fastdata_function = _Function(function)
        follow(self)

    def __len__(self) -> int:
        return self._fastdata_order.length(len(self._fastdata_members))

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} of {len(self)}.")
        epoch = epoch_of(self, len(self._fastdata_members))
        (place,) = self._fastdata_order.at(np.asarray([index]), epoch)
        batch = self._fastdata_members[int(place)]
        return self._fastdata_function.of(batch, self)


@state_dict_of.register
def _(dataset: _Combined, state: State) -> dict[str, Any]:
    for each in datasets_within(dataset):
        state_dict_of(each, state)  # raises if it cannot be resumed
    return state.as_dict()


@has_random_access.register
def _(dataset: _Combined) -> bool:
    return all(has_random_access(each) for each in datasets_within(dataset))


def _check_workers(datasets: list[FastPyDataset], workers: Any) -> None:
    """Raises `ValueError` if batches in sequence are for several workers."""
    others = [each for each in datasets if not has_random_access(each)]
    if others and workers not in (0, 1):
        raise ValueError(
            f"{interface.name_of(others[0])} has its batches one after the "
            "other, and of several workers each would ask for some of them: "
            "`workers` must be 0 or 1. Received: "
            f"workers={workers!r}. Pass `workers` to that dataset."
        )


def _checked(datasets: Iterable[FastPyDataset]) -> list[FastPyDataset]:
    if isinstance(datasets, FastPyDataset):
        raise TypeError("`datasets` must be a list of datasets. Received one.")
    members = list(datasets)
    if not members:
        raise TypeError("`datasets` is empty; pass at least one dataset.")
    for member in members:
        if not isinstance(member, FastPyDataset):
            raise TypeError(
                "`datasets` must be FastPyDatasets. Received an object of type "
                f"{type(member).__name__}; for a `Sequence` of Keras's, pass "
                "`keras_fastdata.accelerate(...)` of it."
            )
    return members


def _checked_weights(
    weights: Sequence[float] | None, count: int
) -> list[float]:
    if weights is None:
        return [1.0] * count
    shares = [float(weight) for weight in weights]
    if len(shares) != count:
        raise ValueError(
            f"`weights` has {len(shares)} numbers for {count} datasets; pass "
            "one for each."
        )
    if not all(0 < share < np.inf for share in shares):
        raise ValueError(
            f"`weights` must be above 0, and finite. Received: {weights}"
        )
    return shares


def _is_mixed(dataset: FastPyDataset) -> bool:
    order = getattr(dataset, "_fastdata_order", None)
    if isinstance(dataset, SampledDataset):
        order = dataset._fastdata_order.given
    return isinstance(order, orders.Mixed)


def _is_of_samples(dataset: FastPyDataset) -> bool:
    return isinstance(dataset, SampledDataset)


def _are_of_samples(
    members: list[FastPyDataset], by: str | None, keeps_order: bool = False
) -> bool:
    if by is not None:
        one_of("by", by, ("samples", "batches"))
    without = [type(m).__name__ for m in members if not _is_of_samples(m)]
    if by == "samples" and without:
        raise ValueError(
            f'{without[0]} has no samples, only batches; pass `by="batches"`.'
        )
    of_samples = by != "batches" and not without
    is_mixed = any(_is_mixed(member) for member in members)
    if of_samples and is_mixed and not keeps_order:
        raise ValueError(
            "One of `datasets` is a mix. Of its samples, the proportions would "
            'be lost: pass the datasets of that mix, or `by="batches"`.'
        )
    return of_samples


def _count(dataset: FastPyDataset, of_samples: bool | None = None) -> int:
    """Returns the number of samples of a dataset, or of its batches."""
    if of_samples is None:
        of_samples = _is_of_samples(dataset)
    if of_samples and isinstance(dataset, SampledDataset):
        subset = dataset._fastdata_order.subset
        return dataset.num_samples if subset is None else len(subset)
    count = dataset.num_batches
    if count is None:
        raise ValueError(
            f"{type(dataset).__name__} does not know how many batches it has, "
            "and this needs the number."
        )
    return count


def _element(dataset: FastPyDataset, of_samples: bool, place: int) -> Any:
    """Returns a sample of a dataset, or a batch."""
    if not (of_samples and isinstance(dataset, SampledDataset)):
        return dataset[place]
    subset = dataset._fastdata_order.subset
    return sample_of(dataset, place if subset is None else int(subset[place]))


def _groups(counts: list[int]) -> list[range]:
    ends = np.cumsum(counts).tolist()
    return [
        range(end - count, end) for end, count in zip(ends, counts, strict=True)
    ]


def _part(dataset: FastPyDataset, places: Places) -> FastPyDataset:
    """Returns a dataset of some of another's samples, or batches."""
    if _is_mixed(dataset):
        raise ValueError(
            "A mix has no parts, for its order can be drawn anew in each "
            "epoch. Take parts of its datasets, and mix these."
        )
    if not isinstance(dataset, SampledDataset):
        order = orders.Subset(orders.InOrder(), places)
        return _CombinedBatches("take", [dataset], order, {})
    part: SampledDataset = make_twin(dataset)
    part._fastdata_order = dataset._fastdata_order.of(places)
    return part


def _padding(dataset: Any, padded: Padded) -> dict[str, Any]:
    """Returns the arguments for padding, for samples that are `(x, y)`.

    Those of the dataset may be for the columns of a row.
    """
    arguments = padded.arguments()
    if isinstance(padded.to, dict) and dataset.collate is None:
        to = dataset._fastdata_choice.split(padded.to, complete=False)
        arguments["pad_to"] = list(to) if isinstance(to, tuple) else to
    return arguments


def _settings(dataset: FastPyDataset) -> dict[str, Any]:
    """Returns the arguments of `FastPyDataset` that a dataset has."""
    settings = internals_of(dataset).settings
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
    }


def _arguments(first: FastPyDataset, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for samples: those given, then the first's."""
    assert isinstance(first, SampledDataset)
    settings = _settings(first)
    if settings.pop("shuffle") is not None:
        settings["shuffle"] = first._fastdata_order.shuffles
    padded: Padded | None = getattr(first, "_fastdata_padded", None)
    return {
        **(_padding(first, padded) if padded else {}),
        "collate": getattr(first, "collate", None),
        "batch_size": first.batch_size,
        "drop_remainder": first.drop_remainder,
        **settings,
        **given,
    }
