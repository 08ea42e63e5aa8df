"""Whether a batch costs the same in long epochs and with many workers.

    python -m benchmarks.scale [options of python -m benchmarks]

- schedule: the shuffled order of an epoch of 10^3 to 10^9 batches: the time
  and memory to have it, and the time to ask it for the next index. It may take
  4 GB; more is a failure.
- workers: 1 to 32 producers whose builds wait 4 ms for each of them, so that
  250 batches a second are possible with any number.
"""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator

from benchmarks import harness, peers
from benchmarks.meter import measure_loop
from benchmarks.workloads import Waiting

FIGURES = (
    harness.Figure("plan_ms", "to have it ms"),
    harness.Figure("plan_mb", "memory MB"),
    harness.Figure("us_per_index", "us/index"),
    *harness.THROUGHPUT,
)
TIMEOUT_S = 60.0
LENGTHS = tuple(10**power for power in range(3, 10))
WORKERS = (1, 2, 4, 8, 16, 32)
WAIT_S = 0.004
LOADERS = (
    "fastdata",
    "fastdata threads",
    "stock processes",
    "stock threads",
    "torch",
)
MOST_BYTES = 4 * 2**30
INDICES = 1000


def cases() -> Iterator[harness.Case]:
    yield from harness.combine(what=["schedule"], batches=LENGTHS)
    yield from harness.combine(
        what=["workers"], workers=WORKERS, loader=LOADERS
    )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    if case["what"] == "schedule":
        return _schedule(case["batches"])
    workers = case["workers"]
    build = Waiting(WAIT_S * workers)
    ahead = max(peers.AHEAD, 2 * workers)
    with peers.open_loader(
        case["loader"], build, workers, ahead=ahead
    ) as loader:
        return measure_loop(iter(loader), seconds, ahead)


def _schedule(length: int) -> dict[str, float]:
    from keras_fastdata.engine.schedule import plan_epoch

    _limit_memory()
    plan_epoch(10, shuffle=True, seed=0, epoch=0)
    began = time.perf_counter()
    schedule = plan_epoch(length, shuffle=True, seed=0, epoch=1)
    planned = time.perf_counter()
    for position in range(INDICES):
        schedule.index_at(position)
    ended = time.perf_counter()
    del schedule
    tracemalloc.start()
    schedule = plan_epoch(length, shuffle=True, seed=0, epoch=2)
    for position in range(INDICES):
        schedule.index_at(position)
    _, peak_bytes = tracemalloc.get_traced_memory()
    return {
        "plan_ms": (planned - began) * 1e3,
        "plan_mb": peak_bytes / 1e6,
        "us_per_index": (ended - planned) / INDICES * 1e6,
    }


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = mapped + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    harness.main(["scale"])
