"""`ImageFileDataset` builds batches of images from image files."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import one_of
from keras_fastdata.datasets import decoding, directories
from keras_fastdata.datasets.directories import FileDataset
from keras_fastdata.datasets.order import Sampler
from keras_fastdata.datasets.sampling import ORDER_ARGUMENTS
from keras_fastdata.sources.storage import Storage, is_remote

Image = npt.NDArray[Any]


class ImageFileDataset(FileDataset):
    """Builds batches of images from image files.

    A batch is `images`, or `(images, labels)`. Images have the shape `(n,
    height, width, channels)` and values from 0 to 255. They are turned upright
    by their EXIF data, and resized with antialiasing. A JPEG that shrinks is
    decoded at reduced size. Pillow reads the files. With the extra `images`,
    simplejpeg decodes JPEGs in two thirds of Pillow's time, and cykooz.resizer
    resizes in a fifth of it; values may then differ by a few of 255.

    Args:
        paths: Paths of the files, one for each sample, also such as
            `s3://bucket/name`; with a `decoder`, anything that the decoder can
            read.
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
        storage: The `keras_fastdata.sources.Storage` that fetches files such
            as `s3://bucket/name` and keeps them on disk. `None` makes one; a
            `decoder` then gets such paths as they are.
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
        storage: Storage | None = None,
        drop_remainder: bool = False,
        shuffle: bool | None = None,
        sampler: Sampler | npt.ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            _checked_paths(paths, decoder),
            labels,
            batch_size,
            transform,
            drop_remainder=drop_remainder,
            shuffle=shuffle,
            sampler=sampler,
            **kwargs,
        )
        self.image_size = size_of(image_size)
        decoding.check(color_mode, crop_to_aspect_ratio, pad_to_aspect_ratio)
        one_of("interpolation", interpolation, tuple(decoding.RESAMPLING))
        self.color_mode, self.interpolation = color_mode, interpolation
        self.crop_to_aspect_ratio = bool(crop_to_aspect_ratio)
        self.pad_to_aspect_ratio = bool(pad_to_aspect_ratio)
        self.dtype = np.dtype(dtype)
        if not np.can_cast(np.uint8, self.dtype) and decoder is None:
            raise ValueError(
                f"`dtype` must hold 0 to 255. Received: {self.dtype}"
            )
        self.decoder = decoder
        is_far = decoder is None and any(map(is_remote, self.paths))
        self.storage = Storage() if storage is None and is_far else storage

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
            **kwargs: The other arguments of `ImageFileDataset`. With a
                `sampler`, `shuffle` only says how files are split. Of a pair,
                the first dataset alone takes it.

        Returns:
            A dataset, or a pair of datasets, with `class_names` set.

        Raises:
            ValueError: There are no images, or arguments contradict each
                other.
        """
        folder = directories.Folder(
            directory,
            labels,
            label_mode,
            class_names,
            shuffle,
            seed,
            validation_split,
            subset,
            follow_links,
            verbose,
        )

        order = {n: kwargs.pop(n) for n in ORDER_ARGUMENTS & kwargs.keys()}

        def make(paths: list[str], numbers: Any, **how: Any) -> Any:
            if order.get("sampler") is not None:
                how["shuffle"] = None
            how |= order
            order.clear()  # the second of a pair has all its files, in order
            return cls(
                paths,
                numbers,
                image_size,
                batch_size,
                color_mode=color_mode,
                interpolation=interpolation,
                crop_to_aspect_ratio=crop_to_aspect_ratio,
                pad_to_aspect_ratio=pad_to_aspect_ratio,
                **how,
                **kwargs,
            )

        return folder.datasets(make, "images", decoding.FORMATS)

    def _fastdata_read(self, path: str) -> Image:
        if self.storage is None:
            return _read(self, path)
        with self.storage.local(path) as local:
            return _read(self, local)


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
    return files


def size_of(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns height and width; raises `ValueError` if they are invalid."""
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
