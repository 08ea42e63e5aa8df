"""`Packed`: rows of a fixed length, each with several token sequences.

All sequences are assigned to rows before the first row is read, from their
lengths alone. So each row has an index, as the samples of any source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import fits, integer, one_of
from keras_fastdata.sources.source import Indices
from keras_fastdata.sources.tables import as_source

_TOKENS = "tokens"
_PLACES = ("segment_ids", "positions")
_READ = 1024  # samples that are read together, where their lengths are unknown


class Packed:
    """A source of rows of a fixed length, packed from shorter sequences.

    Each sequence goes to the first row that has room for it (first-fit). A row
    is a dict of arrays of shape `(length,)`:

    - `tokens`: the sequences, one after the other, then padding. If samples
      are dicts, there is such an array for each feature, under its own name.
    - `segment_ids`, int32: 1 for the tokens of the row's first sequence, 2 for
      those of the second, ...; 0 for padding.
    - `positions`, int32: the place of each token in its sequence, from 0; 0
      for padding.

    The rows stay the same in all epochs. `SampleDataset(Packed(...),
    shuffle=True)` shuffles them.

    Args:
        source: Samples by index, or a table, as `SampleDataset` takes it. Each
            sample is a sequence: an array or a list, with tokens along its
            first axis. Or a dict of such sequences, which are equally long:
            tokens, targets, weights.
        length: The length of a row in tokens, at least 1.
        lengths: The number of tokens of each sample, as integers. `None`:
            every sample is read once, to learn it.
        features: The names of the parts to pack, if samples are dicts.
            `None`: all parts.
        too_long: What becomes of a sequence of more than `length` tokens.
            "error": a `ValueError`. "split": each `length` tokens, and the
            rest, are a sequence of their own. "cut": it loses its end.
            "drop": it is left out, as empty sequences always are. Defaults
            to "error".
        seed: Sequences are packed in a random order that depends on this
            integer. `None`: in the order of the source, so that a row has
            neighbours; this is quicker where a source reads neighbours
            together, as `sources.Parquet` does.
        pad_value: The value of the padding in `tokens` and features. Defaults
            to 0.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A sequence is too long, or an argument is out of range.
            While rows are read: a sample is not as long as `lengths` says, or
            differs from the first sample in its dtype.

    A model must not attend from one sequence of a row to another. In Keras:

    ```python
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    x = keras.layers.MultiHeadAttention(8, 64)(
        x, x, attention_mask=same, use_causal_mask=True
    )
    ```

    `positions` go into the embedding of positions, and `segment_ids > 0` are
    the weights of the loss.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import sources
    >>> texts = [np.arange(1, 4), np.arange(11, 16), np.arange(21, 23)]
    >>> packed = sources.Packed(texts, length=6)
    >>> packed
    Packed(2 rows of 6 tokens from 3 sequences, padding 16.7%)
    >>> packed[0]["tokens"]
    array([ 1,  2,  3, 21, 22,  0])
    >>> packed[0]["segment_ids"]
    array([1, 1, 1, 2, 2, 0], dtype=int32)
    >>> packed[0]["positions"]
    array([0, 1, 2, 0, 1, 0], dtype=int32)
    """

    def __init__(
        self,
        source: Any,
        length: int,
        *,
        lengths: npt.ArrayLike | None = None,
        features: Sequence[str] | None = None,
        too_long: str = "error",
        seed: int | None = None,
        pad_value: float = 0,
    ) -> None:
        one_of("too_long", too_long, ("error", "split", "cut", "drop"))
        self._source = source = as_source(source)
        self._length = integer("length", length, least=1)
        self._pad_value = pad_value
        first = source[0] if len(source) else ()
        self._is_dict = isinstance(first, Mapping)
        if features is not None and not self._is_dict:
            raise ValueError(
                "`features` are for samples that are dicts. The first sample "
                f"is a {type(first).__name__}."
            )
        self._features = list(
            features or (first if self._is_dict else [_TOKENS])
        )
        self.columns = [*self._features, *_PLACES]
        if len({*self.columns}) < len(self.columns):
            raise ValueError(
                "Rows get `segment_ids` and `positions`, and samples have "
                f"{self._features}. Pass the names to pack as `features`."
            )
        if len(source):
            self._check_first()
        found = self._counts() if lengths is None else lengths
        counts = _checked(found, source)
        samples, starts, sizes = _pieces(counts, self._length, too_long)
        self._left_out = len(counts) - len(np.unique(samples))
        # No tokens, but the dtype and the further axes of each feature.
        likes = self._sequences(samples[:1].tolist()) if len(samples) else []
        self._like = [np.asarray(sequence)[:0] for (sequence,) in likes]
        for like in self._like:
            if like.dtype.kind in "iu" and not fits(pad_value, like.dtype):
                raise ValueError(
                    f"`pad_value={pad_value!r}` does not fit into sequences of "
                    f"{like.dtype}."
                )
        order = np.arange(len(samples))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        rows = first_fit(sizes[order], self._length)
        order = order[np.argsort(rows, kind="stable")]
        # Row i has the pieces from `_ends[i]` to `_ends[i + 1]`. A piece is a
        # part of a sample, as a rule all of it.
        self._ends = np.append(0, np.bincount(rows).cumsum())
        self._samples = _compact(samples[order])
        self._starts = _compact(starts[order])
        self._sizes = _compact(sizes[order])

    @property
    def padding(self) -> float:
        """The share of padding in all rows, from 0 to 1."""
        tokens = int(self._sizes.sum(dtype=np.int64))
        return 1 - tokens / (len(self) * self._length) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __repr__(self) -> str:
        left_out = f", {self._left_out:,} left out" if self._left_out else ""
        return (
            f"Packed({len(self):,} rows of {self._length:,} tokens from "
            f"{len(self._source):,} sequences{left_out}, padding "
            f"{self.padding:.1%})"
        )

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Returns a row.

        Raises:
            IndexError: There is no row at that index.
        """
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(
        self, indices: list[int]
    ) -> list[dict[str, npt.NDArray[Any]]]:
        """Returns several rows."""
        columns = self.get_columns(np.array(indices, np.int64), self.columns)
        return [
            {name: column[place] for name, column in columns.items()}
            for place in range(len(indices))
        ]

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns parts of several rows, stacked along a new first axis."""
        starts = self._ends[indices]
        counts = self._ends[indices + 1] - starts
        ends = counts.cumsum()  # in `pieces`, for each row
        first = np.repeat(ends - counts, counts)
        pieces = np.arange(len(first)) - first
        numbers = pieces + 1
        pieces += np.repeat(starts, counts)
        sizes = self._sizes[pieces]
        unused = self._length - np.add.reduceat(sizes, ends - counts)
        batch = self._batch(pieces, ends.tolist(), unused.tolist(), names)
        # The padding of a row is one more piece, with the number 0.
        numbers = np.insert(numbers, ends, 0).astype(np.int32)
        sizes = np.insert(sizes, ends, unused)
        segment_ids = np.repeat(numbers, sizes)
        positions = np.arange(len(segment_ids), dtype=np.int32)
        positions -= np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions *= segment_ids > 0
        shape = len(indices), self._length
        batch["segment_ids"] = segment_ids.reshape(shape)
        batch["positions"] = positions.reshape(shape)
        return {name: batch[name] for name in names}

    def _batch(
        self,
        pieces: Indices,
        ends: list[int],
        unused: list[int],
        names: Sequence[str],
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns the features in `names` of rows that end at `ends`."""
        samples = self._samples[pieces].tolist()
        starts = self._starts[pieces].tolist()
        sizes = self._sizes[pieces].tolist()
        batch = {}
        for name, like, sequences in zip(
            self._features, self._like, self._sequences(samples), strict=True
        ):
            if name not in names:
                continue
            shape = self._length, *like.shape[1:]
            padding = np.full(shape, self._pad_value, like.dtype)
            parts = []
            for place, sequence in enumerate(map(np.asarray, sequences)):
                start, size = starts[place], sizes[place]
                have = len(sequence)
                if min(have - start, self._length) != size:
                    raise ValueError(
                        f"{name!r} of sample {samples[place]} has {have} "
                        "tokens. `lengths`, or another feature, has another "
                        "number for this sample."
                    )
                if not np.can_cast(sequence.dtype, like.dtype):
                    raise ValueError(
                        f"{name!r} of sample {samples[place]} is "
                        f"{sequence.dtype}, not {like.dtype}. Return the same "
                        "dtype from every sample."
                    )
                parts.append(sequence[start : start + size])
            for row in reversed(range(len(ends))):
                parts.insert(ends[row], padding[: unused[row]])
            batch[name] = np.concatenate(parts).reshape(-1, *shape)
        return batch

    def _sequences(self, indices: list[int]) -> list[Sequence[Any]]:
        """Returns, for each feature, the sequences of samples."""
        source, features = self._source, self._features
        if self._is_dict and hasattr(source, "get_columns"):
            columns = source.get_columns(np.array(indices, np.int64), features)
            return [columns[name] for name in features]
        together = getattr(source, "__getitems__", None)
        samples = (
            together(indices) if together else [source[i] for i in indices]
        )
        if not self._is_dict:
            return [samples]
        return [[sample[name] for sample in samples] for name in features]

    def _check_first(self) -> None:
        """Raises `ValueError` if a feature of sample 0 is no sequence."""
        named = zip(self._features, self._sequences([0]), strict=True)
        for name, (sequence,) in named:
            if not np.ndim(sequence):
                raise ValueError(
                    f"{name!r} of sample 0 is no sequence: {sequence!r}. Pass "
                    "the names of what to pack as `features`."
                )

    def _counts(self) -> Indices:
        """Reads every sample once, and returns the number of its tokens."""
        counts: list[int] = []
        for first in range(0, len(self._source), _READ):
            last = min(first + _READ, len(self._source))
            counts += map(len, self._sequences([*range(first, last)])[0])
        return np.array(counts, np.int64)


def first_fit(sizes: Indices, length: int) -> Indices:
    """Returns for each size the number of its row, from 0.

    Each goes to the first row where the sum of the sizes stays at most
    `length`.
    """
    # A binary tree over the rows: what is left in a row, and above that the
    # most that is left in the rows below. The children of node n are 2 * n and
    # 2 * n + 1. Row i is node `width` + i.
    width, left = 1, [0, length]
    nodes = []
    for size in sizes.tolist():
        if left[1] < size:
            width, left = 2 * width, _doubled(left, length)
        node = 1
        while node < width:
            node *= 2
            if left[node] < size:
                node += 1
        nodes.append(node - width)
        left[node] -= size
        while node > 1:
            most = max(left[node], left[node ^ 1])
            node //= 2
            if left[node] == most:
                break
            left[node] = most
    return np.array(nodes, np.int64)


def _doubled(left: list[int], length: int) -> list[int]:
    """Returns the tree of `first_fit` for twice as many rows."""
    found = [length] * (2 * len(left))
    level = 1
    while level < len(left):
        found[2 * level : 3 * level] = left[level : 2 * level]
        level *= 2
    return found


def _pieces(
    counts: Indices, length: int, too_long: str
) -> tuple[Indices, Indices, Indices]:
    """Returns sample, first token and size of each sequence to pack."""
    if too_long == "error" and (counts > length).any():
        sample = int(np.argmax(counts > length))
        raise ValueError(
            f"Sample {sample} has {counts[sample]:,} tokens, and `length` is "
            f"{length:,}. Pass a larger `length`, or `too_long`: 'split', "
            "'cut' or 'drop'."
        )
    parts = -(-counts // length)  # 0 for an empty sequence
    if too_long == "drop":
        parts[parts > 1] = 0
    elif too_long == "cut":
        parts = np.minimum(parts, 1)
    samples = np.repeat(np.arange(len(counts)), parts)
    starts = np.arange(len(samples)) - np.repeat(parts.cumsum() - parts, parts)
    starts *= length
    return samples, starts, np.minimum(counts[samples] - starts, length)


def _checked(lengths: npt.ArrayLike, source: Any) -> Indices:
    """Checks the argument `lengths`."""
    found = np.asarray(lengths)
    if found.shape != (len(source),) or found.dtype.kind not in "iu":
        raise ValueError(
            f"`lengths` must have an integer for each of {len(source):,} "
            f"samples. Received: shape {found.shape}, {found.dtype}"
        )
    if found.min(initial=0) < 0:
        raise ValueError(f"`lengths` has negative numbers: {found.min()}")
    return found.astype(np.int64)


def _compact(values: Indices) -> npt.NDArray[Any]:
    """Returns integers as int32 if they fit into it."""
    fits = values.max(initial=0) <= np.iinfo(np.int32).max
    return values.astype(np.int32) if fits else values
