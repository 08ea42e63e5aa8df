"""`ImageFileDataset` builds batches of images from image files."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import check_local, one_of
from keras_fastdata.datasets import decoding
from keras_fastdata.datasets.order import Sampler
from keras_fastdata.datasets.samples import SampleDataset
from keras_fastdata.datasets.sampling import (
    labels_of,
    overridable_property,
    take_transform,
    transformed,
)
from keras_fastdata.shared_list import SharedList
from keras_fastdata.workers import exceptions

FORMATS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")

Image = npt.NDArray[Any]


class ImageFileDataset(SampleDataset):
    """Builds batches of images from image files.

    A batch is `images`, or `(images, labels)`. Images have the shape `(n,
    height, width, channels)` and values from 0 to 255. They are turned upright
    by their EXIF data, and resized with antialiasing. A JPEG that shrinks is
    decoded at reduced size. Pillow reads the files. With the extra `images`,
    simplejpeg decodes JPEGs in two thirds of Pillow's time, and cykooz.resizer
    resizes in a fifth of it; values may then differ by a few of 255.

    Args:
        paths: Paths of the files, one for each sample; with a `decoder`,
            anything that the decoder can read.
        labels: A number, or an array of numbers, for each file; or `None`.
            Integers arrive as int32, others as float32.
        image_size: Height and width, or one integer for both. Defaults to
            256 by 256.
        batch_size: Samples in a batch, at least 1. Defaults to 32.
        transform: A function that gets one image, of shape `(height, width,
            channels)`, and returns an image. It may write to its argument. If
            it has a parameter `rng`, it receives a NumPy generator of the
            image's own. A subclass may define a method `transform` instead.
        color_mode: "rgb", "rgba" or "grayscale": 3, 4 or 1 channels.
        interpolation: "bilinear", "nearest", "bicubic", "area" or "lanczos3".
        crop_to_aspect_ratio: Whether to crop images to the aspect ratio of
            `image_size` instead of distorting them.
        pad_to_aspect_ratio: Whether to pad images with black instead.
        dtype: "uint8", which moves a quarter of the bytes of "float32", or
            another type that holds 0 to 255. The values are the same.
        decoder: A function `decoder(path, image_size)` that reads a file in
            place of Pillow. It returns an array of shape `(height, width,
            channels)`, of `dtype` or of a type that `dtype` can hold.
        drop_remainder: As in `SampleDataset`.
        shuffle: As in `SampleDataset`.
        sampler: As in `SampleDataset`.
        **kwargs: `samples_per_epoch` and `replacement` as in `SampleDataset`,
            and the arguments of `FastPyDataset`. Decoding does not hold
            Python's lock, so that threads are as fast as processes.

    Attributes:
        paths: The paths of all samples.
        labels: The labels as an array, or `None`.
        class_names: The names of the labels, if they come from a directory.

    Raises:
        ImportError: Pillow is not installed, and there is no `decoder`.
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range.

    Fetching batches raises whatever reading a file raises, with the path in a
    note.

    Example:

    >>> import tempfile
    >>> import PIL.Image
    >>> from keras_fastdata import ImageFileDataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [f"{folder}/{n}.png" for n in range(3)]
    ...     for path in paths:
    ...         PIL.Image.new("RGB", (40, 30), "red").save(path)
    ...     dataset = ImageFileDataset(paths, [0, 1, 0], image_size=(16, 24))
    ...     images, labels = dataset[0]
    >>> images.shape, images.dtype, labels.tolist()
    ((3, 16, 24, 3), dtype('uint8'), [0, 1, 0])
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        labels: npt.ArrayLike | None = None,
        image_size: int | Sequence[int] = (256, 256),
        batch_size: int = 32,
        transform: Callable[..., Any] | None = None,
        *,
        color_mode: str = "rgb",
        interpolation: str = "bilinear",
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        dtype: npt.DTypeLike = "uint8",
        decoder: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
        shuffle: bool | None = None,
        sampler: Sampler | npt.ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            None,
            batch_size,
            drop_remainder=drop_remainder,
            shuffle=shuffle,
            sampler=sampler,
            **kwargs,
        )
        self.paths = SharedList(_checked_paths(paths, decoder))
        self.labels = _labels_of(labels, len(self.paths))
        self._fastdata_one_hot = 0  # the number of classes, if one-hot
        self.class_names: list[str] | None = None
        self.image_size = _size_of(image_size)
        take_transform(self, transform)
        one_of("color_mode", color_mode, tuple(decoding.MODES))
        one_of("interpolation", interpolation, tuple(decoding.RESAMPLING))
        self.color_mode, self.interpolation = color_mode, interpolation
        if crop_to_aspect_ratio and pad_to_aspect_ratio:
            raise ValueError(
                "Only one of `crop_to_aspect_ratio` and `pad_to_aspect_ratio` "
                "may be True."
            )
        self.crop_to_aspect_ratio = bool(crop_to_aspect_ratio)
        self.pad_to_aspect_ratio = bool(pad_to_aspect_ratio)
        self.dtype = np.dtype(dtype)
        if not np.can_cast(np.uint8, self.dtype) and decoder is None:
            raise ValueError(
                f"`dtype` must hold 0 to 255. Received: {self.dtype}"
            )
        self.decoder = decoder

    @classmethod
    def from_directory(
        cls,
        directory: str | os.PathLike[str],
        labels: Sequence[int] | str | None = "inferred",
        label_mode: str | None = "int",
        class_names: Sequence[str] | None = None,
        color_mode: str = "rgb",
        batch_size: int = 32,
        image_size: int | Sequence[int] = (256, 256),
        shuffle: bool = True,
        seed: int | None = None,
        validation_split: float | None = None,
        subset: str | None = None,
        interpolation: str = "bilinear",
        follow_links: bool = False,
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Makes a dataset of the images in a folder and its subfolders.

        Images are found and labelled as Keras does.

        The arguments are those of `keras.utils.image_dataset_from_directory`.

        Args:
            directory: The folder. For inferred labels it has a subfolder for
                each class.
            labels: "inferred": from the subfolders. A list of integers: the
                labels of all files in alphabetical order. `None`: no labels.
            label_mode: "int": int32. "binary": float32 0 or 1, of shape
                `(n, 1)`. "categorical": float32, one-hot. `None`: no labels.
            class_names: The subfolders to use, in the order of their labels.
            color_mode: As in `ImageFileDataset`.
            batch_size: As in `ImageFileDataset`.
            image_size: As in `ImageFileDataset`.
            shuffle: Whether samples come in a new random order every epoch.
                The files of a split are then drawn at random too.
            seed: Seed of the split and of the dataset. A random split needs
                one.
            validation_split: The share of the files to use for validation,
                between 0 and 1. Keras chooses the same files for the same
                seed.
            subset: "training", "validation", or "both" for a pair of
                datasets; the second one does not shuffle.
            interpolation: As in `ImageFileDataset`.
            follow_links: Whether to follow symbolic links to folders.
            crop_to_aspect_ratio: As in `ImageFileDataset`.
            pad_to_aspect_ratio: As in `ImageFileDataset`.
            verbose: Whether to print how many files and classes were found,
                and how many files a split leaves.
            **kwargs: The other arguments of `ImageFileDataset`.

        Returns:
            A dataset, or a pair of datasets, with `class_names` set.

        Raises:
            ValueError: There are no images, or arguments contradict each
                other.
        """
        check_local("directory", directory)
        _check_split(validation_split, subset, shuffle, seed)
        folder = os.fspath(directory)
        paths, numbers, names = _labelled_files(
            folder, labels, label_mode, class_names, follow_links
        )
        if verbose:
            classes = f" belonging to {len(names)} classes" if names else ""
            print(f"Found {len(paths)} files{classes}.")
        made: list[Any] = []
        parts = _parts(len(paths), validation_split, subset, shuffle, seed)
        for part, places in parts.items():
            if verbose and part:
                print(f"Using {len(places)} files for {part}.")
            if not len(places):
                raise ValueError(
                    f"No images found in directory {directory}, or too few to "
                    f"split. Files must end in one of {', '.join(FORMATS)}."
                )
            dataset = cls(
                [paths[place] for place in places],
                None if numbers is None else numbers[places],
                image_size,
                batch_size,
                color_mode=color_mode,
                interpolation=interpolation,
                crop_to_aspect_ratio=crop_to_aspect_ratio,
                pad_to_aspect_ratio=pad_to_aspect_ratio,
                shuffle=shuffle and not made,
                seed=seed,
                **kwargs,
            )
            dataset.class_names = names
            if label_mode == "categorical" and names is not None:
                dataset._fastdata_one_hot = len(names)
            made.append(dataset)
        return made[0] if len(made) == 1 else tuple(made)

    @overridable_property
    def num_samples(self) -> int:
        """The number of files."""
        return len(self.paths)

    def get_sample(self, index: int) -> Any:
        """Returns image `index`, or `(image, label)` if there are labels."""
        path = self.paths[index]
        try:
            image = _read(self, path)
        except Exception as error:
            exceptions.note(error, f"While reading {path}.")
            raise
        if self.transform is not None:
            image = transformed(self, image)
        if self.labels is None:
            return image
        label = self.labels[index]
        if self._fastdata_one_hot:
            row = np.zeros(self._fastdata_one_hot, "float32")
            row[label] = 1
            return image, row
        return image, label


@labels_of.register
def _(dataset: ImageFileDataset) -> Any:
    if dataset.labels is None:
        raise ValueError(
            f"`sampler` is about classes, and this {type(dataset).__name__} "
            "has no `labels`."
        )
    return dataset.labels


def _read(dataset: ImageFileDataset, path: str) -> Image:
    if dataset.decoder is None:
        form = decoding.ImageSpec(
            dataset.image_size,
            dataset.color_mode,
            dataset.interpolation,
            dataset.crop_to_aspect_ratio,
            dataset.pad_to_aspect_ratio,
        )
        image: Image = decoding.read(path, form)
    else:
        image = np.asarray(dataset.decoder(path, dataset.image_size))
        floats = image.dtype.kind == dataset.dtype.kind == "f"
        if not floats and not np.can_cast(image.dtype, dataset.dtype):
            raise TypeError(
                f"`decoder` returned {image.dtype}, and {dataset.dtype} cannot "
                "hold all its values. Pass its type as `dtype`."
            )
    if image.dtype != dataset.dtype:
        return image.astype(dataset.dtype)
    # A read-only array is Pillow's; a transform may write to its argument.
    own = image.flags.writeable or dataset.transform is None
    return image if own else image.copy()


def _checked_paths(paths: Any, decoder: Any) -> list[str]:
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(
            f"`paths` must be the paths of the files. Received {paths!r}; "
            "for a folder, see `ImageFileDataset.from_directory`."
        )
    files = [os.fspath(path) for path in paths]
    if decoder is None:
        decoding.require()
        way_out = "; or pass a `decoder(path, image_size)` that reads it from "
        way_out += "where it is"
        for path in files:
            check_local("paths", path, way_out)
    return files


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


def _size_of(image_size: int | Sequence[int]) -> tuple[int, int]:
    given: Any = image_size
    try:
        sides = [operator.index(side) for side in given]
    except TypeError:  # one integer for both, or an invalid value
        sides = [given] * 2 if hasattr(given, "__index__") else []
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(
            "`image_size` must be a height and a width, at least 1. Received: "
            f"{image_size!r}"
        )
    return int(sides[0]), int(sides[1])


# -- folders -----------------------------------------------------------------


def _labelled_files(
    directory: str,
    labels: Sequence[int] | str | None,
    mode: str | None,
    class_names: Sequence[str] | None,
    follow_links: bool,
) -> tuple[list[str], npt.NDArray[Any] | None, list[str] | None]:
    """Returns the paths, labels and class names of the images in a folder.

    The order is the same as in Keras.
    """
    if mode is not None:
        one_of("label_mode", mode, ("int", "binary", "categorical"))
    if class_names is not None and labels != "inferred":
        raise ValueError('`class_names` needs `labels="inferred"`.')
    if mode is None or labels is None:
        return list(_files_below(directory, follow_links)), None, None
    if isinstance(labels, str):
        one_of("labels", labels, ("inferred",))
        names = _classes_in(directory, class_names)
        found = [
            list(_files_below(os.path.join(directory, name), follow_links))
            for name in names
        ]
        paths = [path for files in found for path in files]
        numbers = np.repeat(np.arange(len(names)), [len(f) for f in found])
    else:
        paths = list(_files_below(directory, follow_links))
        numbers = np.asarray(labels)
        if numbers.shape != (len(paths),):
            raise ValueError(
                f"`labels` must have one label for each of the {len(paths)} "
                f"files in {directory}. Received {len(labels)}."
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


def _files_below(directory: str, follow_links: bool) -> Iterator[str]:
    for root, _, names in sorted(
        os.walk(directory, followlinks=follow_links), key=lambda found: found[0]
    ):
        for name in sorted(names):
            if name.lower().endswith(FORMATS):
                yield os.path.join(root, name)


def _parts(
    count: int,
    share: float | None,
    subset: str | None,
    shuffle: bool,
    seed: int | None,
) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the indices of each subset's files, as a dict by subset name.

    Without a split, the only name is empty.
    """
    order = np.arange(count)
    if not share:
        return {"": order}
    # The split is drawn, rounded down and taken from the end, as in Keras.
    if shuffle:
        np.random.RandomState(seed).shuffle(order)
    split = count - int(share * count)
    parts = {"training": order[:split], "validation": order[split:]}
    return parts if subset == "both" else {str(subset): parts[str(subset)]}


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
