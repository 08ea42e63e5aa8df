"""Draws the samples of a batch: images as a grid, other data as a table.

A batch is built as the training would build it, in the caller and from a copy
of the dataset. So neither the dataset nor its workers take notice.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._dataset_internals import (
    internals_of,
    own_loader,
    twin_of,
)
from keras_fastdata.building import build
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.display.description import name_of
from keras_fastdata.display.figure import new_figure, plain
from keras_fastdata.metrics import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHANNELS = (1, 3, 4)
_LEAST_SIDE = 4  # pixels of what is taken for an image
_MOST_BYTE = 255
_MOST_COLUMNS = 10  # of a table
_MOST_NUMBERS = 8  # of a sample's array that are written out
_MOST_LETTERS = 24
_CELL_IN = 2.1  # inches of an image
_ROW_IN = 0.3  # inches of a row of a table

_Array = npt.NDArray[Any]


class Part(NamedTuple):
    """One array of a batch, with the rows of the samples to show.

    Attributes:
        name: A name such as "x['image']" or "y".
        rows: The array, or its first rows; `None` if it cannot be shown.
        structure: The dtype and shape of the whole array, as text.
        is_target: Whether it belongs to the targets or the sample weights.
    """

    name: str
    rows: _Array | None
    structure: str
    is_target: bool


def build_batch(dataset: Any, index: int) -> Any:
    """Builds a batch without changing the dataset's epoch or random state.

    The batch has the bytes that it has in the epoch that begins next, if the
    seed is known by now.
    """
    loader, seed = own_loader(dataset), internals_of(dataset).settings.seed
    epoch = 0
    if loader is not None:
        seed, epoch = loader.description().seed, loader.epoch
    twin = twin_of(dataset)
    builder = build.Builder(lambda: twin, seed or 0)
    with preserved_globals():
        builder.start(0)
        try:
            return builder.build(epoch, index, 0)
        finally:
            builder.stop(0)


def draw(dataset: Any, index: int, count: int) -> Figure:
    """Draws the first samples of batch `index` as a Matplotlib figure."""
    new_figure("Pictures of samples", 1, 1)  # fails before anything is built
    parts = parts_of(build_batch(dataset, index), count)
    shown = min(count, max((_length(part) for part in parts), default=0))
    title = f"{name_of(dataset)}, batch {index}"
    images = [part for part in parts if _is_image(part)]
    if images:
        return _draw_images(dataset, title, parts, images, shown)
    return _draw_table(dataset, title, parts, shown)


# -- the parts of a batch ------------------------------------------------------


def parts_of(batch: Any, count: int) -> list[Part]:
    """Returns a `Part` for each array of a batch, with the first rows."""
    is_split = isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 3
    pieces = tuple(batch) if is_split else (batch,)
    names = ("x", "y", "weight")
    return [
        _part(name, leaf, count, is_target=place > 0)
        for place, piece in enumerate(pieces)
        for name, leaf in _leaves(names[place], piece)
    ]


def _leaves(name: str, piece: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(piece, dict):
        for key, value in piece.items():
            yield from _leaves(f"{name}[{key!r}]", value)
    elif isinstance(piece, (tuple, list)):
        for place, value in enumerate(piece):
            yield from _leaves(f"{name}[{place}]", value)
    elif piece is not None:
        yield name, piece


def _part(name: str, leaf: Any, count: int, *, is_target: bool) -> Part:
    structure = type(leaf).__name__
    rows: _Array | None = None
    # A sparse tensor, or an object of the user's, may raise anything.
    with ignoring_errors():
        structure = formatting.structure(leaf)
        rows = np.asarray(leaf[:count])
    if rows is not None and rows.ndim == 0:
        rows = None
    return Part(name, rows, structure, is_target)


def _length(part: Part) -> int:
    return 0 if part.rows is None else len(part.rows)


def _is_image(part: Part) -> bool:
    """Returns whether an array looks like a batch of images."""
    rows = part.rows
    if rows is None or rows.dtype.kind in "SUOMm":
        return False
    if rows.ndim == 3:
        height, width = rows.shape[1:]
        is_square = height == width or rows.dtype == np.uint8
        return is_square and min(height, width) >= _LEAST_SIDE
    return rows.ndim == 4 and (
        _has_channels(rows, -1) or _has_channels(rows, 1)
    )


def _has_channels(rows: _Array, axis: int) -> bool:
    sides = rows.shape[1:3] if axis == -1 else rows.shape[2:]
    return rows.shape[axis] in _CHANNELS and min(sides) >= _LEAST_SIDE


# -- images --------------------------------------------------------------------


def pixels(rows: _Array) -> _Array:
    """Converts images to colours from 0 to 1, of shape `(n, h, w[, c])`.

    Bytes, and numbers from 0 to 255, are divided by 255. Numbers from 0 to 1
    stay. All others are scaled from their lowest to their highest.
    """
    if rows.ndim == 4:
        if not _has_channels(rows, -1):
            rows = np.moveaxis(rows, 1, -1)
        if rows.shape[-1] == 1:
            rows = rows[..., 0]
    is_byte = rows.dtype == np.uint8
    found = np.nan_to_num(rows.astype(np.float32), posinf=0.0, neginf=0.0)
    low, high = float(found.min()), float(found.max())
    if is_byte or (low >= 0 and _is_of_bytes(found, high)):
        return found / _MOST_BYTE
    if low >= 0 and high <= 1:
        return found
    return (found - low) / max(high - low, 1e-9)


def _is_of_bytes(found: _Array, high: float) -> bool:
    """Returns whether pixel values seem to range from 0 to 255.

    Images in which 1 is white may exceed 1 a little, where they were resized.
    A mask that has only few classes is no image of bytes.
    """
    is_mask = high < 64 and bool((found == np.round(found)).all())
    return 2 < high <= _MOST_BYTE + 1 and not is_mask


def _range_of(rows: _Array) -> str:
    """Returns the lowest and the highest number of an array as one text."""
    return f"{_number(rows.min())} to {_number(rows.max())}"


def _draw_images(
    dataset: Any, title: str, parts: list[Part], images: list[Part], shown: int
) -> Figure:
    """Draws a grid of images; the titles are the labels of their samples."""
    per_sample = len(images)
    columns = math.ceil(math.sqrt(shown / per_sample)) or 1
    rows = math.ceil(shown / columns)
    others = [part for part in parts if part not in images]
    lines = max(1, len(others))
    figure = new_figure(
        "Pictures of samples",
        max(4.5, columns * per_sample * _CELL_IN),
        rows * (_CELL_IN + 0.2 * lines) + 0.6,
    )
    panels = figure.subplots(rows, columns * per_sample, squeeze=False).flat
    converted = [pixels(part.rows) for part in images if part.rows is not None]
    for sample in range(shown):
        labels = [
            text for part in others if (text := _label(dataset, part, sample))
        ]
        for place, (part, colours) in enumerate(
            zip(images, converted, strict=True)
        ):
            panel = next(panels)
            if sample < len(colours):
                _draw_image(panel, colours[sample], part)
            else:
                panel.set_axis_off()
            caption = "\n".join(labels) if not place else part.name
            panel.set_title(plain(caption), fontsize="small")
    for panel in panels:
        panel.set_axis_off()
    notes = [
        f"{part.name}: {part.structure}, {_range_of(part.rows)}"
        for part in images
        if part.rows is not None
    ]
    figure.suptitle(plain("\n".join([title, *notes])), fontsize="small")
    return figure


def _draw_image(panel: Axes, colours: _Array, part: Part) -> None:
    colormap = "viridis" if part.is_target else "gray"
    panel.imshow(colours, vmin=0, vmax=1, cmap=colormap)
    panel.set_axis_off()


def _label(dataset: Any, part: Part, sample: int) -> str:
    """Returns the text to draw above a sample's image, such as its class."""
    text = _value(dataset, part, sample)
    return text if part.name == "y" or not text else f"{part.name}: {text}"


# -- values --------------------------------------------------------------------


def _value(dataset: Any, part: Part, sample: int) -> str:
    """Returns a short text for the values of one sample in an array."""
    if part.rows is None or sample >= len(part.rows):
        return ""
    row = np.asarray(part.rows[sample])
    if row.size == 1:
        row = row.reshape(())[()]
    if np.ndim(row) == 0:
        return _scalar(dataset, part, row)
    if part.is_target and row.ndim == 1 and _is_zeros_and_ones(part.rows):
        classes = np.flatnonzero(row)
        names = [_class_name(dataset, int(c)) or str(c) for c in classes]
        return formatting.shortened(", ".join(names) or "none", _MOST_LETTERS)
    if row.ndim == 1 and row.size <= _MOST_NUMBERS:
        text = ", ".join(_scalar(None, part, value) for value in row)
        return formatting.shortened(text, 2 * _MOST_LETTERS)
    if row.dtype.kind in "SUO":
        return formatting.structure(row)
    return f"{formatting.structure(row)}, {_range_of(row)}"


def _is_zeros_and_ones(rows: _Array) -> bool:
    """Returns whether targets consist of zeros and ones, like one-hot rows."""
    return rows.dtype.kind in "buif" and bool(np.isin(rows, (0, 1)).all())


def _scalar(dataset: Any, part: Part, value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, np.number):
        if part.is_target and part.name != "weight":
            named = _class_name(dataset, value)
            if named:
                return named
        return _number(value)
    return formatting.shortened(str(value), _MOST_LETTERS)


def _class_name(dataset: Any, label: Any) -> str:
    """Returns a class's name from `dataset.class_names`, or "" if unknown."""
    names = getattr(dataset, "class_names", None)
    if not isinstance(names, (list, tuple)) or label != int(label):
        return ""
    if not 0 <= label < len(names):
        return ""
    return formatting.shortened(str(names[int(label)]), _MOST_LETTERS)


def _number(value: Any) -> str:
    if isinstance(value, (np.integer, np.bool_)):
        return str(int(value))
    return f"{float(value):.4g}" if np.isreal(value) else f"{value:.4g}"


# -- other data ----------------------------------------------------------------


def _draw_table(
    dataset: Any, title: str, parts: list[Part], shown: int
) -> Figure:
    """Draws a table with a row per sample and a column per value."""
    columns: dict[str, list[str]] = {}
    wide = sum(map(_is_wide, parts))
    most = max(2, (_MOST_COLUMNS - len(parts) + wide) // max(1, wide))
    for part in parts:
        columns.update(_columns(dataset, part, shown, most))
    names = list(columns)
    left_out = len(names) - _MOST_COLUMNS
    if left_out > 0:  # of the inputs, which come first
        kept = _MOST_COLUMNS - 1
        targets = sum(not name.startswith("x") for name in names)
        first = max(1, kept - targets)
        names = [*names[:first], "...", *names[first + left_out + 1 :]]
        columns["..."] = ["..."] * shown
    cells = [[columns[name][row] for name in names] for row in range(shown)]
    notes = textwrap.fill(
        "; ".join(f"{part.name}: {part.structure}" for part in parts), 110
    )
    widths = [
        max(len(name), *(len(row[place]) for row in cells), 4) + 2
        for place, name in enumerate(names)
    ]
    figure = new_figure(
        "Pictures of samples",
        max(4.5, 0.085 * sum(widths) + 0.4),
        _ROW_IN * (shown + 2) + 0.25 * (notes.count("\n") + 2),
    )
    figure.suptitle(plain(f"{title}\n{notes}"), fontsize="small")
    panel = figure.subplots()
    panel.set_axis_off()
    from matplotlib.transforms import Bbox

    if cells and names:
        table = panel.table(
            [[plain(cell) for cell in row] for row in cells],
            colLabels=[plain(name) for name in names],
            colWidths=[width / sum(widths) for width in widths],
            cellLoc="right",
            bbox=Bbox.unit(),
        )
        table.auto_set_font_size(False)
        table.set_fontsize(8)
    return figure


def _columns(
    dataset: Any, part: Part, shown: int, most: int
) -> dict[str, list[str]]:
    """Returns the table columns of one array, as a dict by heading.

    An input has a column for each number of a sample.
    """
    if part.rows is None:
        return {part.name: [part.structure] * shown}
    if not _is_wide(part):
        return {part.name: [_value(dataset, part, row) for row in range(shown)]}
    found = {}
    width = part.rows.shape[1]
    count = width if width <= most else most - 1
    for place in range(count):
        name = f"{part.name}[:, {place}]"
        column = part._replace(name=name, rows=part.rows[:, place])
        found[name] = [_value(dataset, column, row) for row in range(shown)]
    if count < width:
        found[f"{part.name}[:, {count}:]"] = ["..."] * shown
    return found


def _is_wide(part: Part) -> bool:
    """Returns whether an array needs several columns, one for each number."""
    rows = part.rows
    return (
        rows is not None
        and not part.is_target
        and rows.ndim == 2
        and rows.shape[1] > 1
    )
