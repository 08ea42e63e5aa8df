"""Packing token sequences into rows of a fixed length: ours and Grain's.

    python -m benchmarks.packing [options of python -m benchmarks]

Texts of 210 tokens on average, and 2,048 at most, lie ready in memory, and
come in random order. 8 rows of 2,048 tokens make a batch, with segment ids and
positions. "tokens/s" counts tokens, not padding.

- fastdata: `sources.Packed`, read by a `SampleDataset`.
- grain: `FirstFitPackIterDataset` with 64 rows at a time; "grain 512" has 512,
  which leaves less padding.

"first batch" includes the plan of all rows, and the start of the processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.meter import again_and_again, measure_loop

FIGURES = (
    harness.Figure("tokens_per_s", "tokens/s", larger_is_better=True),
    harness.Figure("padding_percent", "padding %"),
    harness.Figure("first_batch_ms", "first batch ms"),
    *harness.THROUGHPUT[1:],
)
TIMEOUT_S = 90.0
TEXTS = 100_000
LENGTH = 2048
BATCH = 8
COUNTED = 500  # batches whose padding is counted
LOADERS = {"fastdata": 0, "grain": 64, "grain 512": 512}
PROCESSES = {"inline": 0, "2 processes": 2}


def cases() -> Iterator[harness.Case]:
    return harness.combine(place=tuple(PROCESSES), loader=tuple(LOADERS))


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 0.8, TEXTS).clip(1, LENGTH).astype(int)
    texts = [rng.integers(1, 50_000, n, "int32") for n in lengths]
    processes, rows = PROCESSES[case["place"]], LOADERS[case["loader"]]
    began = time.perf_counter()
    batches = iter(
        _grain(texts, processes, rows) if rows else _ours(texts, processes)
    )
    next(batches)
    first_s = time.perf_counter() - began
    used = np.mean([_share(next(batches)) for _ in range(COUNTED)])
    figures = measure_loop(batches, seconds, peers.AHEAD)
    tokens = figures["batches_per_s"] * BATCH * LENGTH * float(used)
    return figures | {
        "tokens_per_s": tokens,
        "padding_percent": 100 - 100 * float(used),
        "first_batch_ms": 1e3 * first_s,
    }


def _ours(texts: list[Any], processes: int) -> Iterator[Any]:
    from keras_fastdata import SampleDataset, sources

    samples = [{"tokens": text} for text in texts]
    dataset = SampleDataset(
        sources.Packed(samples, LENGTH, seed=0),
        BATCH,
        drop_remainder=True,
        shuffle=True,
        workers=processes,
        use_multiprocessing=processes > 0,
    )
    return again_and_again(dataset)


def _grain(texts: list[Any], processes: int, rows: int) -> Iterable[Any]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain reads them in each worker
    samples = [{"tokens": text} for text in texts]
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(samples)
        .shuffle(seed=0)
        .repeat()
        .to_iter_dataset(read),
        length_struct={"tokens": LENGTH},
        num_packing_bins=rows,
        seed=0,
    ).batch(BATCH, drop_remainder=True)
    if processes:
        options = grain.multiprocessing.MultiprocessingOptions(
            num_workers=processes,
            per_worker_buffer_size=peers.AHEAD // processes,
        )
        dataset = dataset.mp_prefetch(options)
    return dataset


def _share(batch: dict[str, Any]) -> float:
    """The share of tokens in a batch."""
    ids = next(batch[name] for name in batch if name.endswith("segment_ids"))
    return float(np.mean(ids > 0))


if __name__ == "__main__":
    harness.main(["packing"])
