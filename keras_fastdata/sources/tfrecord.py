"""Reads the records of TFRecord files by index."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_extra
from keras_fastdata.sources.index import Arrays, Index
from keras_fastdata.sources.records import Records
from keras_fastdata.sources.source import Column, Indices
from keras_fastdata.sources.storage import Paths, Storage

# A record: its length, the checksum of that, its data, the checksum of these.
_HEADER = 12  # bytes
_FOOTER = 4
_COMPRESSED = (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda")
_DTYPES = {"bytes_list": object, "float_list": np.float32}
_DTYPES["int64_list"] = np.int64
# The messages of `tf.train.Example`: a type and a name for each field.
_MESSAGES = {
    "BytesList": ["repeated bytes value"],
    "FloatList": ["repeated float value"],
    "Int64List": ["repeated int64 value"],
    "Feature": [
        "optional BytesList bytes_list",
        "optional FloatList float_list",
        "optional Int64List int64_list",
    ],
    "FeatureEntry": ["optional string key", "optional Feature value"],
    "Features": ["repeated Features.FeatureEntry feature"],
    "Example": ["optional Features features"],
}


class TFRecord(Records):
    """Records of TFRecord files, by index.

    Where each record lies is found once, and kept in the storage's cache. The
    files must not be compressed.

    Args:
        paths: A path, a pattern such as "data/*.tfrecord", or a list of these.
        features: For records that are `tf.train.Example`s: a dict with the
            shape of each feature to read. `()`: one value. `(2, 3)`: so many
            values. `None`: any number of values, in an array of one dimension.
            Specifications such as `tf.io.FixedLenFeature` are taken for their
            shape. Numbers become arrays of float32 or int64, as they were
            written; other values are bytes. `features=None`: a sample is the
            bytes of a record.
        storage: Finds, reads and caches files. `None`: `Storage()`.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: crc32c is missing.
        ValueError: A file is damaged or compressed; while records are read: a
            record is damaged, or not as `features` say.

    Example:

    >>> import os, tempfile, tensorflow as tf
    >>> from keras_fastdata import sources
    >>> path = os.path.join(tempfile.mkdtemp(), "numbers.tfrecord")
    >>> with tf.io.TFRecordWriter(path) as writer:
    ...     for number in range(3):
    ...         x = tf.train.FloatList(value=[number, number / 2])
    ...         feature = {"x": tf.train.Feature(float_list=x)}
    ...         features = tf.train.Features(feature=feature)
    ...         example = tf.train.Example(features=features)
    ...         writer.write(example.SerializeToString())
    >>> sources.TFRecord(path, {"x": (2,)})[1]
    {'x': array([1. , 0.5], dtype=float32)}
    """

    def __new__(
        cls, paths: Paths = (), features: Any = None, **kwargs: Any
    ) -> TFRecord:
        """Chooses the class: only examples have columns."""
        examples = cls is TFRecord and features is not None
        return super().__new__(_Examples if examples else cls)

    def __init__(
        self,
        paths: Paths,
        features: Mapping[str, Any] | None = None,
        *,
        storage: Storage | None = None,
    ) -> None:
        _crc32c()
        index = Index(storage, paths, "TFRecord", _scan)
        super().__init__(index, index.counts)
        self._shapes = {
            name: _shape(name, given)
            for name, given in (features or {}).items()
        }

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples with the given indices, in their order."""
        return self._records(np.asarray(indices, np.int64))

    def _records(self, indices: Indices) -> list[bytes]:
        """Returns the data of records, after a check of their checksums."""
        crc32c = _crc32c()
        arrays = self._index.arrays
        starts = arrays["start"][indices]
        ends = starts + arrays["length"][indices] + _FOOTER
        records = self._read(indices, starts, ends)
        found = [record[:-_FOOTER] for record in records]
        whole = np.frombuffer(b"".join(records), np.uint8)
        ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
        wanted = whole[ends[:, None] + np.arange(-_FOOTER, 0)].view("<u4")[:, 0]
        sums = np.fromiter(map(crc32c, found), np.uint32, len(found))
        damaged = _masked(sums) != wanted
        if damaged.any():
            place = int(np.flatnonzero(damaged)[0])
            raise ValueError(
                f"{self._name(int(indices[place]))} is damaged: its checksum "
                "differs from that of its data. Write or copy the file again, "
                "or leave it out of `paths`."
            )
        return found

    def _name(self, index: int) -> str:
        """Returns where a record is, for an error message."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        start = self._index.arrays["start"][index] - _HEADER
        return f"Record {index} (byte {start} of {self._index.paths[file]})"


class _Examples(TFRecord):
    """Records that are `tf.train.Example`s: a sample is a dict."""

    def __init__(
        self, paths: Paths, features: Mapping[str, Any], **kwargs: Any
    ) -> None:
        super().__init__(paths, features, **kwargs)
        self.columns = list(self._shapes)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples with the given indices, in their order."""
        columns = self.get_columns(np.asarray(indices, np.int64), self.columns)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> dict[str, Column]:
        """Returns the features `names` of the records `indices`, in order."""
        indices = np.asarray(indices, np.int64)
        records = self._records(indices)
        parsed: list[Any] = []
        try:
            for example in map(_messages()["Example"].FromString, records):
                parsed.append(example.features.feature)
        except Exception as error:  # of protobuf; its class varies
            raise ValueError(
                f"{self._name(int(indices[len(parsed)]))} is no "
                f"`tf.train.Example`: {error} Leave out `features` to get the "
                "bytes of the records."
            ) from error
        return {name: self._column(name, parsed, indices) for name in names}

    def _column(self, name: str, parsed: list[Any], indices: Indices) -> Column:
        shape = self._shapes[name]
        features = [feature[name] for feature in parsed]
        kind, *others = _kinds_of(features) or ["float_list"]
        for place, feature in enumerate(features if others else ()):
            if getattr(feature, others[0]).value:
                raise ValueError(
                    f"{self._name(int(indices[place]))} has the values of "
                    f"feature {name!r} in a {others[0]}, and other records "
                    f"have them in a {kind}. Write the files again, with one "
                    "kind of list for each feature."
                )
        lengths, values = _values_of(features, kind)
        wrong = lengths != (lengths if shape is None else math.prod(shape))
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"{self._name(int(indices[place]))} has {lengths[place]} "
                f"values of feature {name!r} in a {kind}, and its shape in "
                f"`features` is {shape}. Pass `None` as its shape if the "
                "number of values differs. The record has the features "
                f"{sorted(parsed[place])}."
            )
        if shape is None and len(set(lengths.tolist())) == 1:
            shape = (int(lengths[0]),)
        if shape is not None:
            return values.reshape(len(features), *shape)
        return np.split(values, np.cumsum(lengths))[: len(features)]


def _kinds_of(features: list[Any]) -> list[str]:
    """Returns the kinds of lists that values are in, the first one's first."""
    kinds = [k for k in _DTYPES if any(f.HasField(k) for f in features)]
    if len(kinds) < 2:
        return kinds
    # A list without values may be of any kind.
    found = (k for f in features for k in kinds if getattr(f, k).value)
    return list(dict.fromkeys(found)) or kinds[:1]


def _values_of(
    features: list[Any], kind: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Returns how many values are in each list of a kind, and all of them."""
    count = len(features)

    def joined() -> tuple[Any, bool]:
        # Messages that follow one another are parsed as one, whose values are
        # those of all. NumPy converts long lists much faster than short ones.
        parts = [feature.SerializeToString() for feature in features]
        whole = _messages()["Feature"].FromString(b"".join(parts))
        return getattr(whole, kind).value, len(set(map(len, parts))) == 1

    if kind == "float_list":
        values, even = joined()
        if even and not len(values) % count:
            lengths = np.full(count, len(values) // count)
            return lengths, np.array(values, np.float32)
    lists = [getattr(feature, kind).value for feature in features]
    lengths = np.fromiter(map(len, lists), np.int64, count)
    if kind == "bytes_list" or lengths.max(initial=0) < 2:
        values = [*itertools.chain.from_iterable(lists)]
    else:
        values, _ = joined()
    found = np.empty(len(values), _DTYPES[kind])
    found[:] = values
    return lengths, found


def _shape(name: str, given: Any) -> tuple[int, ...] | None:
    """Returns the shape of a feature: of a tuple, or of TensorFlow's kinds."""
    if hasattr(given, "dtype"):  # a `tf.io.FixedLenFeature`, or another
        given = getattr(given, "shape", None)
    if given is None:
        return None
    try:
        return tuple(int(size) for size in given)
    except TypeError:
        raise TypeError(
            f"`features[{name!r}]` must be a shape: a tuple of integers, or "
            f"`None` for any number of values. Received: {given!r}"
        ) from None


def _crc32c() -> Any:
    use = "The checksums of TFRecord files are computed with crc32c"
    return import_extra("crc32c", use, "tfrecord").crc32c


def _masked(sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Returns checksums as TFRecord files store them."""
    turned = (sums >> np.uint32(15)) | (sums << np.uint32(17))
    return turned + np.uint32(0xA282EAD8)  # without what exceeds 32 bits


def _scan(local: str, path: str) -> Arrays:
    """Returns where the data of each record of a file start, and how long."""
    places = [0]  # of the headers, and of the end
    size = os.path.getsize(local)
    with open(local, "rb") as file:
        memory: Any = b""
        if size:  # nothing cannot be mapped
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    read = struct.Struct("<Q").unpack_from
    while (place := places[-1]) + _HEADER <= size:
        places.append(place + _HEADER + read(memory, place)[0] + _FOOTER)
    end = places.pop()
    whole = np.array(places, np.int64)
    headers = np.frombuffer(memory, np.uint8)[
        whole[:, None] + np.arange(_HEADER)
    ]
    lengths = np.ascontiguousarray(headers[:, :8]).view("<u8")[:, 0]
    wanted = np.ascontiguousarray(headers[:, 8:]).view("<u4")[:, 0]
    sums = map(_crc32c(), map(bytes, headers[:, :8]))
    damaged = _masked(np.fromiter(sums, np.uint32, len(whole))) != wanted
    if damaged.any() or end != size:
        number, what = len(places) - (end > size), "is cut off"
        if damaged.any():
            number, what = int(damaged.argmax()), "has a damaged length"
        if memory[:2] in _COMPRESSED:
            what = "has no length, as the file is compressed"
        raise ValueError(
            f"Record {number} of {path} {what}, at byte "
            f"{[*places, end][number]}. Write the file again, without "
            "compression, or leave it out of `paths`."
        )
    return {"start": whole + _HEADER, "length": lengths.astype(np.int64)}


@functools.cache
def _messages() -> dict[str, Any]:
    """Returns the classes of `tf.train.Example` and its parts.

    They are declared here, apart from those of TensorFlow, which worker
    processes do not import, and beside which no others may be registered.
    """
    from google.protobuf import descriptor_pb2 as pb
    from google.protobuf import descriptor_pool, message_factory

    file = pb.FileDescriptorProto(
        name="example.proto", package="ours", syntax="proto3"
    )
    messages = {name: pb.DescriptorProto(name=name) for name in _MESSAGES}
    for name, fields in _MESSAGES.items():
        for number, field in enumerate(fields, 1):
            label, kind, field_name = field.split()
            of: dict[str, Any] = {"type": f"TYPE_{kind.upper()}"}
            if kind in _MESSAGES or "." in kind:
                of = {"type": "TYPE_MESSAGE", "type_name": f".ours.{kind}"}
            of |= {"name": field_name, "label": f"LABEL_{label.upper()}"}
            messages[name].field.add(number=number, **of)
    entry = messages.pop("FeatureEntry")
    entry.options.map_entry = True  # makes a dict of `feature`
    messages["Features"].nested_type.append(entry)
    file.message_type.extend(messages.values())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"ours.{name}")
        )
        for name in messages
    }
