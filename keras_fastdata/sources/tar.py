"""Reads the samples of tar files, as WebDataset writes them, by index."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_extra, import_faster
from keras_fastdata.sources.index import Arrays, Index
from keras_fastdata.sources.records import Records
from keras_fastdata.sources.storage import Paths, Storage

Decoder = Callable[[bytes], Any]
Memory = mmap.mmap | bytes
_Member = tuple[str, int, int]  # its name, where its data begin, their size

_BLOCK = 512  # bytes; headers and data begin at multiples of it
_HEADERS = 4096  # that are looked at together
_IMAGES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
_COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
_KEY_AND_FIELD = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")


class Tar(Records):
    """Samples of tar files (WebDataset shards), by index.

    Neighbouring files in a shard whose names differ only after the first dot
    are one sample: "a/1.jpg" and "a/1.cls" become the dict
    `{"__key__": "a/1", "jpg": ..., "cls": ...}`. The part after the dot is in
    lower case. Where each file lies is found once, and kept in the storage's
    cache. Shards must not be compressed.

    Args:
        paths: A path, a pattern such as "shard-{000..099}.tar", or a list of
            these.
        decode: A dict from names of fields to functions that take the bytes
            and return the value, such as `int`; or to one of the names "rgb",
            "rgba" and "grayscale" (an image: uint8 of shape (height, width,
            channels)), "json", "npy" and "text". Only the fields in the dict
            are in a sample. `None`: all fields, as bytes, and the key.
        storage: Finds, reads and caches files. `None`: `Storage()`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A shard is damaged or compressed; `decode` has an unknown
            name.

    Example:

    >>> import io, os, tarfile, tempfile
    >>> from keras_fastdata import sources
    >>> path = os.path.join(tempfile.mkdtemp(), "shard.tar")
    >>> with tarfile.open(path, "w") as shard:
    ...     for number in range(3):
    ...         for field, data in {"txt": b"one", "cls": b"7"}.items():
    ...             member = tarfile.TarInfo(f"{number}.{field}")
    ...             member.size = len(data)
    ...             shard.addfile(member, io.BytesIO(data))
    >>> sources.Tar(path)[1]
    {'__key__': '1', 'txt': b'one', 'cls': b'7'}
    >>> sources.Tar(path, decode={"txt": "text", "cls": int})[1]
    {'txt': 'one', 'cls': 7}
    """

    def __init__(
        self,
        paths: Paths,
        decode: Mapping[str, str | Decoder] | None = None,
        *,
        storage: Storage | None = None,
    ) -> None:
        self._decoders = None
        if decode is not None:
            self._decoders = {n: _decoder(n, d) for n, d in decode.items()}
        index = Index(storage, paths, "Tar", _scan)
        super().__init__(index, index.counts)
        self._first: npt.NDArray[np.int64] | None = None

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples with the given indices, in their order."""
        samples = np.asarray(indices, np.int64)
        arrays = self._index.arrays
        if self._first is None:  # for each sample, the number of its first file
            ends = np.cumsum(arrays["members"])
            self._first = ends - arrays["members"]
        begin = self._first[samples]
        end = begin + arrays["members"][samples]
        starts = arrays["offset"][begin]
        ends = arrays["offset"][end - 1] + arrays["size"][end - 1]
        read = self._read(samples, starts, ends)
        found = []
        for place, data in enumerate(read):
            members = slice(begin[place], end[place])
            fields = zip(
                arrays["field"][members].tolist(),
                (arrays["offset"][members] - starts[place]).tolist(),
                arrays["size"][members].tolist(),
                strict=True,
            )
            key = os.fsdecode(arrays["key"][samples[place]])
            found.append(self._sample(key, data, fields))
        return found

    def _sample(
        self, key: str, data: bytes, fields: Iterable[tuple[bytes, int, int]]
    ) -> dict[str, Any]:
        parts = {
            os.fsdecode(name): data[start : start + size]
            for name, start, size in fields
        }
        if self._decoders is None:
            return {"__key__": key, **parts}
        sample = {}
        for name, decoder in self._decoders.items():
            if name not in parts:
                raise ValueError(
                    f"Sample {key!r} has no field {name!r}, only "
                    f"{sorted(parts)}. Leave it out of `decode`."
                )
            try:
                sample[name] = decoder(parts[name])
            except Exception as error:
                error.add_note(f"In field {name!r} of sample {key!r}.")
                raise
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_first": None}


# -- decoding ----------------------------------------------------------------


class _Image:
    """Decodes an image, at its own size."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __call__(self, data: bytes) -> npt.NDArray[np.uint8]:
        pixels = _decode_jpeg(data, _IMAGES[self._mode])
        if pixels is not None:
            return pixels
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            pixels = np.array(image.convert(_IMAGES[self._mode]))
        return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def _decode_jpeg(data: bytes, mode: str) -> npt.NDArray[np.uint8] | None:
    """Decodes a JPEG in less time than Pillow, to the same pixels.

    Returns `None` if Pillow is needed. `mode` is Pillow's name.
    """
    simplejpeg = import_faster("simplejpeg")
    if simplejpeg is None or data[:2] != b"\xff\xd8" or mode == "L":
        return None
    with contextlib.suppress(ValueError):  # Pillow says what is wrong
        if simplejpeg.decode_jpeg_header(data)[2] in ("YCbCr", "RGB", "Gray"):
            pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, mode)
            return pixels
    return None


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data))


def _text(data: bytes) -> str:
    return data.decode()


_DECODERS: dict[str, Decoder] = {"json": json.loads, "npy": _array}
_DECODERS |= {"text": _text, **{mode: _Image(mode) for mode in _IMAGES}}


def _decoder(name: str, given: str | Decoder) -> Decoder:
    if callable(given):
        return given
    if given not in _DECODERS:
        raise ValueError(
            f"`decode[{name!r}]` must be a function or one of "
            f"{list(_DECODERS)}. Received: {given!r}"
        )
    if given in _IMAGES:
        import_extra("PIL.Image", "Images are decoded with Pillow", "images")
    return _DECODERS[given]


# -- the index ---------------------------------------------------------------


def _scan(local: str, path: str) -> Arrays:
    """Returns the samples of a shard, and where their files lie."""
    keys: list[bytes] = []
    counts: list[int] = []
    rows: list[tuple[bytes, int, int]] = []
    present: set[str] = set()
    for name, offset, size in _members(local, path):
        found = _KEY_AND_FIELD.fullmatch(name)
        if found is None or _META.match(name):
            continue
        key, field = os.fsencode(found[1]), found[2].lower()
        if not keys or keys[-1] != key:
            keys.append(key)
            counts.append(0)
            present = set()
        if field in present:
            raise ValueError(
                f"{path} has two files {name!r} in one sample. Give the files "
                "of different samples different names before the first dot."
            )
        present.add(field)
        counts[-1] += 1
        rows.append((os.fsencode(field), offset, size))
    fields, offsets, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "members": np.array(counts, np.int64),
        "key": np.array(keys, np.bytes_),
        "field": np.array(fields, np.bytes_),
        "offset": np.array(offsets, np.int64),
        "size": np.array(sizes, np.int64),
    }


def _members(local: str, path: str) -> list[_Member]:
    """Returns the files in a shard."""
    memory = _mapped(local)
    if memory[:2] in _COMPRESSED:
        raise ValueError(
            f"{path} is compressed, so that no sample can be read by itself. "
            "Write it without compression."
        )
    found = _plain_members(memory)
    return _all_members(local, path, memory) if found is None else found


def _mapped(local: str) -> Memory:
    with open(local, "rb") as file:
        if not os.path.getsize(local):  # which cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _plain_members(memory: Memory) -> list[_Member] | None:
    """Returns the files in a shard, if it has only what is usual.

    That takes a tenth of the time of `tarfile`. If the shard has anything
    else, returns `None`.
    """
    places, sizes = [], []
    place = 0
    while place < len(memory) and memory[place]:
        header = place
        try:
            size = int(memory[place + 124 : place + 136].rstrip(b"\0"), 8)
        except ValueError:
            return None
        place += _BLOCK + -(-size // _BLOCK) * _BLOCK
        if size < 0 or place > len(memory):
            return None
        kind = memory[header + 156]
        if kind == ord("x"):  # more about the next file
            about = memory[header + _BLOCK : place]
            if b"path=" in about or b"size=" in about or b"GNU." in about:
                return None
        elif kind not in b"0\0":
            return None
        else:
            sizes.append(size)
            places.append(header)
    names: list[str] = []
    for first in range(0, len(places), _HEADERS):
        found = _plain_names(memory, places[first : first + _HEADERS])
        if found is None:
            return None
        names += found
    begins = [place + _BLOCK for place in places]
    return list(zip(names, begins, sizes, strict=True))


def _plain_names(memory: Memory, places: list[int]) -> list[str] | None:
    """Returns the names in headers; `None` if one is damaged or unusual."""
    headers = np.frombuffer(memory, np.uint8)[
        np.array(places, np.int64)[:, None] + np.arange(_BLOCK)
    ]
    own = headers[:, 148:156].sum(1, dtype=np.int64)  # counts as spaces
    sums = headers.sum(1, dtype=np.int64) - own + 8 * ord(" ")
    found = [text.strip(b" ").zfill(6) for text in _texts(headers[:, 148:155])]
    if found != [b"%06o" % each for each in sums.tolist()]:
        return None
    # The old format of GNU has other things where a folder may be.
    is_ustar = headers[:, 257:265] == np.frombuffer(b"ustar\x0000", np.uint8)
    if not is_ustar.all():
        return None
    names = zip(
        _texts(headers[:, 345:500]), _texts(headers[:, :100]), strict=True
    )
    return [os.fsdecode(f + b"/" + n if f else n) for f, n in names]


def _texts(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """Returns rows of characters as texts, without what follows a zero."""
    kind = np.dtype((np.bytes_, rows.shape[1]))
    texts = np.ascontiguousarray(rows).view(kind)[:, 0].tolist()
    return [text.partition(b"\0")[0] for text in texts]


def _all_members(local: str, path: str, memory: Memory) -> list[_Member]:
    """Returns the files in a shard, with all that tar files can have."""
    found: list[_Member] = []
    fault: Any = "the data of its last file are cut off"
    try:
        with tarfile.open(local, "r:") as archive:
            for each in archive:
                if each.isreg() and not each.issparse():
                    found.append((each.name, each.offset_data, each.size))
            end = archive.offset
    except tarfile.TarError as error:
        end, fault = found[-1][1] if found else 0, error
    else:
        # `tarfile` takes a damaged header for the end.
        if end <= len(memory) and not any(memory[end : end + _BLOCK]):
            return found
    raise ValueError(
        f"{path} is damaged after file {len(found)}, at byte {end} or later: "
        f"{fault}. Write or copy it again, or leave it out of `paths`."
    )
