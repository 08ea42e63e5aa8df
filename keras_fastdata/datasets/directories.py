"""Finds and labels the files of a folder, as Keras's utilities do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import check_local, one_of
from keras_fastdata.datasets.samples import SampleDataset
from keras_fastdata.datasets.sampling import (
    labels_of,
    overridable_property,
    take_transform,
    transformed,
)
from keras_fastdata.shared_list import SharedList
from keras_fastdata.workers import exceptions


class FileDataset(SampleDataset):
    """Base class of the datasets that have one file for each sample.

    A sample is what `_fastdata_read` returns for the path, after `transform`;
    and the label, if there are labels. `ImageFileDataset` describes the
    arguments and attributes.
    """

    def __init__(
        self,
        paths: Iterable[str],
        labels: npt.ArrayLike | None,
        batch_size: int,
        transform: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(None, batch_size, **kwargs)
        self.paths = SharedList(paths)
        self.labels = _labels_of(labels, len(self.paths))
        self._fastdata_one_hot = 0  # the number of classes, if one-hot
        self.class_names: list[str] | None = None
        take_transform(self, transform)

    @overridable_property
    def num_samples(self) -> int:
        """The number of files."""
        return len(self.paths)

    def get_sample(self, index: int) -> Any:
        """Returns what file `index` holds, and its label if there are any."""
        path = self.paths[index]
        try:
            part = self._fastdata_read(path)
        except Exception as error:
            exceptions.note(error, f"While reading {path}.")
            raise
        if self.transform is not None:
            part = transformed(self, part)
        if isinstance(part, bytes):
            # NumPy's own strings would all take as much as the longest.
            part = np.asarray(part, object)
        if self.labels is None:
            return part
        label = self.labels[index]
        if self._fastdata_one_hot:
            row = np.zeros(self._fastdata_one_hot, "float32")
            row[label] = 1
            return part, row
        return part, label

    def _fastdata_read(self, path: str) -> Any:
        raise NotImplementedError


@labels_of.register
def _(dataset: FileDataset) -> Any:
    if dataset.labels is None:
        raise ValueError(
            f"`sampler` is about classes, and this {type(dataset).__name__} "
            "has no `labels`."
        )
    return dataset.labels


_Made = TypeVar("_Made", bound=FileDataset)


@dataclasses.dataclass(frozen=True)
class Folder:
    """Which files of a folder to use, and how to label and split them.

    The fields are arguments of `ImageFileDataset.from_directory`.
    """

    directory: str | os.PathLike[str]
    labels: Sequence[int] | str | None
    label_mode: str | None
    class_names: Sequence[str] | None
    shuffle: bool
    seed: int | None
    validation_split: float | None
    subset: str | None
    follow_links: bool
    verbose: bool

    def datasets(
        self,
        make: Callable[..., _Made],
        noun: str,
        formats: tuple[str, ...],
    ) -> Any:
        """Returns a dataset of the files, or two for `subset="both"`.

        Args:
            make: Returns a dataset: `make(paths, labels, shuffle=, seed=)`.
            noun: What the files are, for messages.
            formats: How the names of files end, in small letters.
        """
        check_local("directory", self.directory)
        share = self.validation_split or None
        _check_split(share, self.subset, self.shuffle, self.seed)
        paths, numbers, names = _labelled_files(
            os.fspath(self.directory),
            self.labels,
            self.label_mode,
            self.class_names,
            self.follow_links,
            formats,
        )
        if self.verbose:
            classes = f" belonging to {len(names)} classes" if names else ""
            print(f"Found {len(paths)} files{classes}.")
        parts = _parts(len(paths), share, self.shuffle, self.seed)
        if not all(map(len, parts.values())):
            raise ValueError(
                f"No {noun} found in directory {self.directory}, or too few to "
                f"split. Files must end in one of {', '.join(formats)}."
            )
        made: list[_Made] = []
        for part, places in parts.items():
            if self.subset not in (None, "both", part):
                continue
            if self.verbose and part:
                print(f"Using {len(places)} files for {part}.")
            dataset = make(
                [paths[place] for place in places],
                None if numbers is None else numbers[places],
                shuffle=self.shuffle and not made,
                seed=self.seed,
            )
            dataset.class_names = names
            if self.label_mode == "categorical" and names is not None:
                dataset._fastdata_one_hot = len(names)
            made.append(dataset)
        return made[0] if len(made) == 1 else tuple(made)


def _labelled_files(
    directory: str,
    labels: Sequence[int] | str | None,
    mode: str | None,
    class_names: Sequence[str] | None,
    follow_links: bool,
    formats: tuple[str, ...],
) -> tuple[list[str], npt.NDArray[Any] | None, list[str] | None]:
    """Returns the paths, labels and class names of the files in a folder.

    The order is the same as in Keras.
    """
    if mode is not None:
        one_of("label_mode", mode, ("int", "binary", "categorical"))
    if class_names is not None and labels != "inferred":
        raise ValueError('`class_names` needs `labels="inferred"`.')
    below = follow_links, formats
    if mode is None or labels is None:
        return list(_files_below(directory, *below)), None, None
    if isinstance(labels, str):
        one_of("labels", labels, ("inferred",))
        names = _classes_in(directory, class_names)
        found = [
            list(_files_below(os.path.join(directory, name), *below))
            for name in names
        ]
        paths = [path for files in found for path in files]
        numbers = np.repeat(np.arange(len(names)), [len(f) for f in found])
    else:
        paths = list(_files_below(directory, *below))
        numbers = np.asarray(labels)
        if numbers.shape != (len(paths),):
            raise ValueError(
                f"`labels` must have one label for each of the {len(paths)} "
                f"files in {directory}. Received shape {numbers.shape}."
            )
        names = [str(number) for number in np.unique(numbers)]
    count = len(names)
    if mode == "binary":
        if count != 2:
            raise ValueError(
                '`label_mode="binary"` needs two classes. There are '
                f"{count}: {names}"
            )
        numbers = numbers.astype("float32")[:, np.newaxis]
    elif mode == "categorical" and not np.isin(numbers, range(count)).all():
        raise ValueError(
            f'`label_mode="categorical"` needs labels from 0 to {count - 1}, '
            f"one for each of {count} classes. Received: from "
            f"{numbers.min()} to {numbers.max()}."
        )
    return paths, numbers, names


def _classes_in(directory: str, wanted: Sequence[str] | None) -> list[str]:
    """Returns the names of the class folders, in the order of their labels."""
    names = sorted(
        entry.name
        for entry in os.scandir(directory)
        if entry.is_dir() and not entry.name.startswith(".")
    )
    if wanted is None:
        return names
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(
            f"`class_names` must be folders of {directory}. It has no "
            f"{missing}; it has {names}."
        )
    return list(wanted)


def _files_below(
    directory: str, follow_links: bool, formats: tuple[str, ...]
) -> Iterator[str]:
    for root, _, names in sorted(
        os.walk(directory, followlinks=follow_links), key=lambda found: found[0]
    ):
        for name in sorted(names):
            if name.lower().endswith(formats):
                yield os.path.join(root, name)


def _parts(
    count: int, share: float | None, shuffle: bool, seed: int | None
) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the indices of each subset's files, as a dict by subset name.

    Without a split, the only name is empty.
    """
    order = np.arange(count)
    # The split is drawn, rounded down and taken from the end, as in Keras.
    if shuffle and seed is not None:
        np.random.RandomState(seed).shuffle(order)
    if share is None:
        return {"": order}
    split = count - int(share * count)
    return {"training": order[:split], "validation": order[split:]}


def _check_split(
    share: float | None, subset: str | None, shuffle: bool, seed: int | None
) -> None:
    if share is not None and not 0 < share < 1:
        raise ValueError(
            f"`validation_split` must be between 0 and 1. Received: {share}"
        )
    if (share is None) != (subset is None):
        raise ValueError(
            "`validation_split` is the share of files for validation, and "
            "`subset` chooses one of the two parts; pass both or neither."
        )
    if subset is not None:
        one_of("subset", subset, ("training", "validation", "both"))
        if shuffle and seed is None:
            raise ValueError(
                "Pass a `seed`, so that the training and the validation "
                "subset come from one split and have no file in common; or "
                "`shuffle=False`."
            )


def _labels_of(labels: npt.ArrayLike | None, count: int) -> Any:
    if labels is None:
        return None
    found = np.asarray(labels)
    if found.dtype.kind not in "biuf":
        raise TypeError(
            f"`labels` must be numbers. Received dtype {found.dtype}; number "
            "the classes, or use `ImageFileDataset.from_directory`."
        )
    if found.shape[:1] != (count,):
        raise ValueError(
            f"`labels` must have one label for each of the {count} paths. "
            f"Received an array of shape {found.shape}."
        )
    if found.dtype.kind == "f":
        return found.astype("float32", copy=False)
    narrow = found.astype("int32", copy=False)
    if (narrow != found).any():
        raise ValueError(
            "Integer `labels` arrive as int32. Received: from "
            f"{found.min()} to {found.max()}."
        )
    return narrow
