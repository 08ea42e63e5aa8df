"""From opening many tar files to their first batch of shuffled samples.

    python -m benchmarks.opening [options of python -m benchmarks]

1,000 tar files of 20 small samples each, made once in the folder for temporary
files, in batches of 32, without workers.

- built: each file is scanned for its samples.
- kept: what a scan before found is read.
- webdataset: reads the first files alone, and shuffles 1,000 samples of them.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks import harness
from benchmarks.formats import make_files

FIGURES = (
    harness.Figure("first_batch_ms", "first batch ms"),
    harness.Figure("cpu_ms", "CPU ms"),
)
TIMEOUT_S = 90.0
SHARDS = 1000
SAMPLES = 20
BATCH = 32


def cases() -> Iterator[harness.Case]:
    return harness.combine(loader=("built", "kept", "webdataset"))


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    paths = make_files("opening", _shards())
    feed = _webdataset if case["loader"] == "webdataset" else _ours
    with tempfile.TemporaryDirectory() as cache:
        if case["loader"] != "built":
            feed(paths, cache)
        began, used = time.perf_counter(), time.process_time()
        feed(paths, cache)
        return {
            "first_batch_ms": 1e3 * (time.perf_counter() - began),
            "cpu_ms": 1e3 * (time.process_time() - used),
        }


def _shards() -> Iterator[Callable[[str], None]]:
    def write(path: str, shard: int) -> None:
        import webdataset

        with webdataset.TarWriter(path) as sink:
            for number in range(SAMPLES * shard, SAMPLES * (shard + 1)):
                key, text = f"{number:06}", f"Sample {number}"
                sink.write({"__key__": key, "txt": text, "cls": number % 9})

    for shard in range(SHARDS):
        yield functools.partial(write, shard=shard)


def _ours(paths: list[str], cache: str) -> None:
    from keras_fastdata import SampleDataset, sources

    storage = sources.Storage(cache_dir=cache)
    decode = {"txt": "text", "cls": int}
    shards = sources.Tar(paths, decode=decode, storage=storage)
    with SampleDataset(shards, BATCH, shuffle=True, label="cls") as dataset:
        next(iter(dataset))


def _webdataset(paths: list[str], cache: str) -> None:
    import webdataset

    samples = webdataset.WebDataset(
        paths, shardshuffle=100, nodesplitter=None, empty_check=False
    )
    samples = samples.shuffle(1000).to_tuple("txt", "cls").batched(BATCH)
    next(iter(samples))


if __name__ == "__main__":
    harness.main(["opening"])
