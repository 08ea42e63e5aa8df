"""Files by format, to a plain loop, in shuffled batches.

    python -m benchmarks.formats [options of python -m benchmarks]

Two producers; tf.data has as many threads as it wants. The files are made
once, in the folder for temporary files. Ours are read once before they are
measured, as the index and what row groups decode to are kept; "datasets" keeps
an Arrow file too.

- table: Parquet, 1,000,000 rows of 16 float32 and a label, in 10 row groups, in
  batches of 256. "windows" shuffles in windows of 200,000 rows.
- tokens: Parquet, 100,000 lists of 256 int32, and a label, in batches of 256.
- images: 4 tar files of 500 JPEGs of 256 by 256, in batches of 32. All decode
  with simplejpeg, and WebDataset and "windows" shuffle 1,000 samples at a time.
- examples: 200,000 `tf.train.Example`s of 64 floats and a label, in batches of
  256. tf.data parses whole batches, and shuffles 10,000 records at a time.
- pictures: the JPEGs in TFRecord files; tf.data decodes them itself.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.meter import again_and_again, measure_loop

FIGURES = harness.THROUGHPUT
TIMEOUT_S = 120.0
PRODUCERS = 2
COLUMNS = [f"x{number}" for number in range(16)]
SIDE = 256
BATCHES = {"table": 256, "tokens": 256, "images": 32}
BATCHES |= {"examples": 256, "pictures": 32}
_OURS = ("fastdata", "fastdata windows")
LOADERS = {
    "table": (*_OURS, "datasets", "torch"),
    "tokens": (*_OURS, "datasets", "torch"),
    "images": (*_OURS, "webdataset"),
    "examples": (*_OURS, "tf.data"),
    "pictures": (*_OURS, "tf.data"),
}
WINDOWS = {"table": 200_000, "tokens": 20_000, "images": 1000}
WINDOWS |= {"examples": 10_000, "pictures": 1000}


def cases() -> Iterator[harness.Case]:
    for files, loaders in LOADERS.items():
        yield from harness.combine(files=(files,), loader=loaders)


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    files, loader = case["files"], case["loader"]
    paths = make_files(f"formats-{files}", _WRITERS[files]())
    with contextlib.ExitStack() as stack:
        feed = _PEERS.get(loader, _ours)
        feeds = feed(files, paths, loader, stack)
        return measure_loop(feeds, seconds, peers.AHEAD)


# -- files -------------------------------------------------------------------


def make_files(
    name: str, writers: Iterable[Callable[[str], None]]
) -> list[str]:
    """Paths of the files, which are made if they are not there."""
    folder = pathlib.Path(tempfile.gettempdir(), f"benchmark-{name}")
    folder.mkdir(exist_ok=True)
    paths = []
    for number, write in enumerate(writers):
        path = folder / f"{number:04}"
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            write(str(partial))
            partial.rename(path)
        paths.append(str(path))
    return paths


def _table() -> Iterator[Callable[[str], None]]:
    def write(path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rng = np.random.default_rng(0)
        count = 1_000_000
        columns = {name: rng.random(count, "float32") for name in COLUMNS}
        columns["y"] = rng.integers(0, 10, count)
        pq.write_table(pa.table(columns), path, row_group_size=count // 10)

    yield write


def _tokens() -> Iterator[Callable[[str], None]]:
    def write(path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 30_000, 100_000 * 256, "int32")
        ends = np.arange(0, len(tokens) + 1, 256, "int32")
        lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens))
        table = {"tokens": lists, "y": rng.integers(0, 10, len(lists))}
        pq.write_table(pa.table(table), path, row_group_size=10_000)

    yield write


def jpeg(number: int) -> bytes:
    """An image that compresses like a photograph."""
    from PIL import Image

    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), "uint8"))
    smooth = coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    grain = rng.normal(0, 8, (SIDE, SIDE, 1))
    pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype("uint8")
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=85)
    return content.getvalue()


def _images() -> Iterator[Callable[[str], None]]:
    def write(path: str, shard: int) -> None:
        import webdataset

        with webdataset.TarWriter(path) as sink:
            for number in range(500 * shard, 500 * shard + 500):
                key, label = f"{number:06}", number % 10
                sink.write({"__key__": key, "jpg": jpeg(number), "cls": label})

    for shard in range(4):
        yield functools.partial(write, shard=shard)


def _records(
    path: str, numbers: range, content: Callable[[int], dict[str, Any]]
) -> None:
    import tensorflow as tf

    lists = {float: tf.train.FloatList, int: tf.train.Int64List}
    names = {float: "float_list", int: "int64_list"}
    with tf.io.TFRecordWriter(path) as sink:
        for number in numbers:
            features = {}
            for name, values in content(number).items():
                kind = names.get(type(values[0]), "bytes_list")
                made = lists.get(type(values[0]), tf.train.BytesList)
                features[name] = tf.train.Feature(**{kind: made(value=values)})
            example = tf.train.Example(
                features=tf.train.Features(feature=features)
            )
            sink.write(example.SerializeToString())


def _examples() -> Iterator[Callable[[str], None]]:
    rng = np.random.default_rng(0)

    def content(number: int) -> dict[str, Any]:
        return {"x": rng.random(64).tolist(), "y": [number % 10]}

    for file in range(4):
        numbers = range(50_000 * file, 50_000 * file + 50_000)
        yield functools.partial(_records, numbers=numbers, content=content)


def _pictures() -> Iterator[Callable[[str], None]]:
    def content(number: int) -> dict[str, Any]:
        return {"x": [jpeg(number)], "y": [number % 10]}

    for file in range(4):
        numbers = range(500 * file, 500 * file + 500)
        yield functools.partial(_records, numbers=numbers, content=content)


_WRITERS = {
    "table": _table,
    "tokens": _tokens,
    "images": _images,
    "examples": _examples,
    "pictures": _pictures,
}


# -- what feeds --------------------------------------------------------------


def decoded(content: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(content)


def decoded_picture(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": decoded(sample["x"]), "y": sample["y"]}


def _ours(
    files: str, paths: list[str], loader: str, stack: contextlib.ExitStack
) -> Iterator[Any]:
    from keras_fastdata import SampleDataset, sources

    kwargs: dict[str, Any] = {}
    if files in ("table", "tokens"):
        source: Any = sources.Parquet(paths)
        kwargs["label"] = "y"
    elif files == "images":
        source = sources.Tar(paths, decode={"jpg": decoded, "cls": int})
        kwargs["label"] = "cls"
    elif files == "examples":
        source = sources.TFRecord(paths, {"x": (64,), "y": ()})
        kwargs["label"] = "y"
    else:
        source = sources.TFRecord(paths, {"x": (), "y": ()})
        kwargs |= {"transform": decoded_picture, "label": "y"}
    if loader.endswith("windows"):
        kwargs["shuffle_window"] = WINDOWS[files]
    dataset = SampleDataset(
        source,
        BATCHES[files],
        shuffle=True,
        drop_remainder=True,
        workers=PRODUCERS,
        use_multiprocessing=True,
        max_queue_size=peers.AHEAD,
        **kwargs,
    )
    stack.enter_context(dataset)
    for _ in dataset:  # what is kept is made
        pass
    return again_and_again(dataset)


def _datasets(
    files: str, paths: list[str], loader: str, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import datasets

    table = datasets.Dataset.from_parquet(paths).with_format("numpy")
    while True:
        shuffled = table.shuffle()
        yield from shuffled.iter(BATCHES[files], drop_last_batch=True)


def _torch(
    files: str, paths: list[str], loader: str, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import datasets
    import torch

    table = datasets.Dataset.from_parquet(paths).with_format("torch")
    loaded = torch.utils.data.DataLoader(
        table,
        BATCHES[files],
        shuffle=True,
        drop_last=True,
        num_workers=PRODUCERS,
        prefetch_factor=peers.AHEAD // PRODUCERS,
        persistent_workers=True,
    )
    for batch in again_and_again(loaded):
        yield {name: values.numpy() for name, values in batch.items()}


def _webdataset(
    files: str, paths: list[str], loader: str, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import webdataset

    samples = webdataset.WebDataset(
        paths, shardshuffle=100, nodesplitter=None, empty_check=False
    )
    samples = (
        samples.shuffle(WINDOWS[files])
        .to_tuple("jpg", "cls")
        .map_tuple(decoded, int)
        .batched(BATCHES[files], partial=False)
    )
    loaded = webdataset.WebLoader(
        samples,
        batch_size=None,
        num_workers=PRODUCERS,
        prefetch_factor=peers.AHEAD // PRODUCERS,
        persistent_workers=True,
    )
    for images, labels in again_and_again(loaded):
        yield np.asarray(images), np.asarray(labels)


def _tf_data(
    files: str, paths: list[str], loader: str, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import tensorflow as tf

    shape, kind = ([64], tf.float32) if files == "examples" else ([], tf.string)
    features = {
        "x": tf.io.FixedLenFeature(shape, kind),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }
    auto = tf.data.AUTOTUNE
    records = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    records = records.interleave(
        tf.data.TFRecordDataset, num_parallel_calls=auto
    ).shuffle(WINDOWS[files])
    if files == "examples":
        batches = records.batch(BATCHES[files], drop_remainder=True).map(
            lambda each: tf.io.parse_example(each, features), auto
        )
    else:

        def picture(record: Any) -> Any:
            found = tf.io.parse_single_example(record, features)
            pixels = tf.io.decode_jpeg(found["x"], 3)
            return tf.ensure_shape(pixels, (SIDE, SIDE, 3)), found["y"]

        batches = records.map(picture, auto).batch(
            BATCHES[files], drop_remainder=True, num_parallel_calls=auto
        )
    return batches.repeat().prefetch(peers.AHEAD).as_numpy_iterator()


_PEERS = {
    "datasets": _datasets,
    "torch": _torch,
    "webdataset": _webdataset,
    "tf.data": _tf_data,
}


if __name__ == "__main__":
    harness.main(["formats"])
