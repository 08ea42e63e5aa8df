"""Functions with the names, arguments and batches of Keras's utilities.

They differ from Keras's in these points:

- The result is a `FastPyDataset`, whatever `format` is; its arrays are NumPy's.
  For `subset="both"` it is a tuple.
- With `shuffle`, all samples are shuffled together, anew in each epoch, by seed
  and epoch. Keras shuffles them once, and then within a buffer. Batches that
  are not shuffled, the files of a split, and `file_paths` are the same.
- `batch_size=None` gives samples one by one, as in Keras. The dataset counts
  them as batches.
- If a split leaves no file on one side, both subsets are refused. With
  "categorical", `labels` that are no classes from 0 on are refused.
- `verbose=False` prints nothing at all.
- Folders must be on a file system of this machine.
"""

from __future__ import annotations

import os
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_extra
from keras_fastdata._validation import integer, one_of
from keras_fastdata.datasets import decoding, images, keras_pixels
from keras_fastdata.datasets.arrays import ArrayDataset
from keras_fastdata.datasets.directories import FileDataset, Folder
from keras_fastdata.datasets.windows import Windows
from keras_fastdata.memory.ownership import map_leaves

_Labels = Sequence[int] | str | None
_Path = str | os.PathLike[str]


def image_dataset_from_directory(
    directory: _Path,
    labels: _Labels = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    batch_size: int | None = 32,
    image_size: int | Sequence[int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    interpolation: str = "bilinear",
    follow_links: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    data_format: str | None = None,
    format: str = "tf",
    verbose: bool = True,
    **kwargs: Any,
) -> Any:
    """Does what `keras.utils.image_dataset_from_directory` does.

    Arguments and batches are the same. The differences are those that all
    functions of this module have (see there), and:

    - JPEGs have other pixels, by a few of 255, if simplejpeg is not installed
      (`pip install 'keras-fastdata[images]'`), or if they are in CMYK.
    - A palette in BMP, and transparency in BMP, GIF and black-and-white PNG,
      are read as other programs do.
    - Files that Keras cannot decode, such as JPEGs as "rgba", are read.

    Workers import TensorFlow for other interpolations than "bilinear",
    "nearest" and "bicubic". `ImageFileDataset` takes less time, resizes with
    antialiasing, and turns photos upright.

    Further arguments are `transform`, which gets an image, and the others of
    `SampleDataset` but `source`, such as `workers`.

    Example:

    >>> import tempfile
    >>> import PIL.Image
    >>> from keras_fastdata import image_dataset_from_directory
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     PIL.Image.new("RGB", (40, 30), "red").save(f"{folder}/a.png")
    ...     dataset = image_dataset_from_directory(folder, labels=None)
    ...     dataset[0].shape
    Found 1 files.
    (1, 256, 256, 3)
    """
    arguments = locals()
    decoding.require()
    decoding.check(color_mode, crop_to_aspect_ratio, pad_to_aspect_ratio)
    interpolation = interpolation.lower()
    one_of("interpolation", interpolation, keras_pixels.INTERPOLATIONS)
    if data_format is None:
        from keras_fastdata import keras_bridge

        data_format = keras_bridge.image_data_format()
    one_of("data_format", data_format, ("channels_first", "channels_last"))
    reader = keras_pixels.KerasPixels(
        images.size_of(image_size),
        color_mode,
        interpolation,
        crop_to_aspect_ratio,
        pad_to_aspect_ratio,
        data_format == "channels_first",
    )
    return _datasets(reader, arguments)


def text_dataset_from_directory(
    directory: _Path,
    labels: _Labels = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    batch_size: int | None = 32,
    max_length: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    follow_links: bool = False,
    format: str = "tf",
    verbose: bool = True,
    **kwargs: Any,
) -> Any:
    """Does what `keras.utils.text_dataset_from_directory` does.

    Arguments and batches are the same. The differences are those that all
    functions of this module have (see there).

    A batch of texts is an array of `bytes`, of dtype object. Layers such as
    `TextVectorization` take it. So does `fit` on TensorFlow, which makes a
    string tensor of it. On JAX and PyTorch `fit` takes no strings: pass a
    `transform` that gets a text as `bytes` and returns numbers.

    Further arguments are `transform`, and those of `SampleDataset` but
    `source`, such as `pad_to` and `workers`.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_fastdata import text_dataset_from_directory
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.txt").write_text("To be")
    ...     text_dataset_from_directory(folder, None, verbose=False)[0]
    array([b'To be'], dtype=object)
    """
    arguments = locals()
    if max_length is not None:
        max_length = integer("max_length", max_length, least=0)
    return _datasets(Text(max_length), arguments)


def audio_dataset_from_directory(
    directory: _Path,
    labels: _Labels = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    batch_size: int | None = 32,
    sampling_rate: int | None = None,
    output_sequence_length: int | None = None,
    ragged: bool = False,
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    follow_links: bool = False,
    verbose: bool = True,
    **kwargs: Any,
) -> Any:
    """Does what `keras.utils.audio_dataset_from_directory` does.

    Arguments and batches are the same. The differences are those that all
    functions of this module have (see there), and:

    - There is no `ragged=True`.
    - `sampling_rate` needs the package soxr (`pip install
      'keras-fastdata[audio]'`) in place of tensorflow_io; values differ.

    As in Keras, WAV files of 16-bit PCM are read, and
    `output_sequence_length` counts samples before they are resampled.

    Further arguments are `transform`, which gets an array `(samples,
    channels)`, and those of `SampleDataset` but `source`.

    Example:

    >>> import tempfile, wave
    >>> from keras_fastdata import audio_dataset_from_directory
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with wave.open(f"{folder}/a.wav", "wb") as file:
    ...         file.setparams((1, 2, 16_000, 0, "NONE", None))
    ...         file.writeframes(bytes(1600))
    ...     audio_dataset_from_directory(folder, None, verbose=False)[0].shape
    (1, 800, 1)
    """
    arguments = locals()
    if ragged:
        raise ValueError(
            "There are no ragged batches in NumPy. Leave out `ragged=True`: "
            "sequences are padded with 0 to the longest of the batch; or to "
            "`output_sequence_length`. Or pass `batch_size=None`: they come "
            "one by one, each in its own length."
        )
    if sampling_rate is not None:
        sampling_rate = integer("sampling_rate", sampling_rate, least=1)
        import_extra("soxr", "`sampling_rate` needs soxr", "audio")
    length = output_sequence_length
    if length is None:
        kwargs.setdefault("pad_to", "longest")
    else:
        length = integer("output_sequence_length", length, least=0)
    return _datasets(Wave(length, sampling_rate), arguments)


def timeseries_dataset_from_array(
    data: Any,
    targets: Any,
    sequence_length: int,
    sequence_stride: int = 1,
    sampling_rate: int = 1,
    batch_size: int | None = 128,
    shuffle: bool = False,
    seed: int | None = None,
    start_index: int | None = None,
    end_index: int | None = None,
    format: str = "tf",
    **kwargs: Any,
) -> ArrayDataset:
    """Does what `keras.utils.timeseries_dataset_from_array` does.

    Arguments and batches are the same. The differences are those that all
    functions of this module have (see there), and: data without any window
    are refused, and so are too few targets, which Keras finds out later.
    Workers share `data`; a memory map of a file may be larger than memory.

    Further arguments are those of `ArrayDataset` but `x` and `y`, such as
    `transform` and `workers`.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import timeseries_dataset_from_array
    >>> x = np.arange(10)
    >>> dataset = timeseries_dataset_from_array(x, x[3:], 3, batch_size=2)
    >>> windows, next_values = dataset[1]
    >>> windows.tolist(), next_values.tolist()
    ([[2, 3, 4], [3, 4, 5]], [5, 6])
    """
    one_of("format", format, ("tf", "grain"))
    length = integer("sequence_length", sequence_length, least=1)
    start, end = _bounds(len(data), start_index, end_index)
    for name, step in (
        ("sampling_rate", sampling_rate),
        ("sequence_stride", sequence_stride),
    ):
        if integer(name, step, least=1) >= len(data):
            raise ValueError(
                f"`{name}` must be less than the length of `data`, "
                f"{len(data)}. Received: {step}"
            )
    starts = end - start - (length - 1) * sampling_rate
    if targets is not None:
        starts = min(starts, len(targets))
    count = -(-starts // sequence_stride)
    if count < 1:
        raise ValueError(
            f"There is no window of {length} steps, {sampling_rate} apart, in "
            f"`data` from {start} to {end}, with a target."
        )
    series = _as_tensor(data[start:end])
    windows = Windows(series, length, sequence_stride, sampling_rate, count)
    next_values = None
    if targets is not None:
        last = (count - 1) * sequence_stride
        next_values = _as_tensor(targets[start:end])[
            : last + 1 : sequence_stride
        ]
        if len(next_values) < count:
            raise ValueError(
                f"`targets` must have one for each of {count} windows. As in "
                f"Keras, the first is `targets[start_index]`. There are "
                f"{len(targets)} targets; `start_index` is {start}."
            )
    kind = ArrayDataset if batch_size is not None else OneWindow
    return kind(
        windows,
        next_values,
        batch_size=1 if batch_size is None else batch_size,
        shuffle=shuffle,
        seed=seed,
        **kwargs,
    )


class DirectoryDataset(FileDataset):
    """The dataset of the functions above: one sample for each file.

    Attributes:
        paths: The paths of all samples.
        labels: The labels as an array, or `None`.
        class_names: The names of the classes, or `None`.
        reader: The function that reads a file.
    """

    def __init__(
        self,
        paths: list[str],
        labels: npt.ArrayLike | None,
        reader: Callable[[str], Any],
        batch_size: int | None = 32,
        transform: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        size = 1 if batch_size is None else batch_size
        super().__init__(paths, labels, size, transform, **kwargs)
        self.reader = reader

    @property
    def file_paths(self) -> list[str]:
        """The paths of all samples, as a list."""
        return list(self.paths)

    def _fastdata_read(self, path: str) -> Any:
        return self.reader(path)


class OneFile(DirectoryDataset):
    """A dataset whose batches are single samples, for `batch_size=None`."""

    def __getitem__(self, index: int) -> Any:
        return map_leaves(_first, super().__getitem__(index))


class OneWindow(ArrayDataset):
    """A dataset whose batches are single samples, for `batch_size=None`."""

    def __getitem__(self, index: int) -> Any:
        return map_leaves(_first, super().__getitem__(index))


def _first(leaf: Any) -> Any:
    return leaf[0, ...]


# -- readers, which can be pickled --------------------------------------------


@dataclass(frozen=True)
class Text:
    """Reads the first bytes of a text file."""

    length: int | None  # the most bytes to read
    noun = "text files"
    formats = (".txt",)

    def __call__(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read(self.length)


@dataclass(frozen=True)
class Wave:
    """Reads a WAV file into a float32 array `(samples, channels)`."""

    length: int | None  # in samples of the file
    rate: int | None  # to which to resample afterwards
    noun = "audio files"
    formats = (".wav",)

    def __call__(self, path: str) -> npt.NDArray[np.float32]:
        with wave.open(path, "rb") as file:
            if file.getsampwidth() != 2:
                raise ValueError(
                    "Only WAV files of 16-bit PCM are read, as in Keras. This "
                    f"one has {8 * file.getsampwidth()} bits. Convert it."
                )
            count = file.getnframes()
            data = file.readframes(count)
            channels, rate = file.getnchannels(), file.getframerate()
        if len(data) < 2 * count * channels:
            raise ValueError(f"The file ends before its {count} samples.")
        found = np.frombuffer(data, "<i2").reshape(-1, channels)
        sound = np.zeros(
            (count if self.length is None else self.length, channels), "float32"
        )
        np.divide(found[: len(sound)], 32768, out=sound[:count])
        if self.rate in (None, rate):
            return sound
        import soxr

        return soxr.resample(sound, rate, self.rate)  # type: ignore[no-any-return]


# -- arguments ----------------------------------------------------------------


def _datasets(reader: Any, arguments: dict[str, Any]) -> Any:
    """Returns the datasets of a function's `locals()`."""
    one_of("format", arguments.get("format", "tf"), ("tf", "grain"))
    folder = Folder(
        **{part.name: arguments[part.name] for part in fields(Folder)}
    )
    size = arguments["batch_size"]
    kind = DirectoryDataset if size is not None else OneFile

    def make(paths: list[str], labels: Any, **how: Any) -> DirectoryDataset:
        return kind(paths, labels, reader, size, **how, **arguments["kwargs"])

    return folder.datasets(make, reader.noun, reader.formats)


def _bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Checks `start_index` and `end_index` as Keras does, and returns them."""
    if start and not 0 <= start < length:
        raise ValueError(
            "`start_index` must be at least 0, and less than the length of "
            f"`data`, {length}. Received: {start}"
        )
    if end and not (start or 0) < end < length:
        raise ValueError(
            f"`end_index` must be more than `start_index`, {start or 0}, and "
            f"less than the length of `data`, {length}. Leave it out to go to "
            f"the end. Received: {end}"
        )
    return start or 0, length if end is None else end


def _as_tensor(values: Any) -> npt.NDArray[Any]:
    """Converts to an array; Python's numbers get 32 bits, as in TensorFlow."""
    if isinstance(values, np.ndarray):
        return values  # a memory map stays one
    first = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    narrow = {float: np.float32, int: np.int32}.get(type(first))
    return np.asarray(values, narrow)
