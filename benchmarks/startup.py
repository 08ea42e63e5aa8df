"""How long until there is a batch: at first, again, and after a death.

    python -m benchmarks.startup [options of python -m benchmarks]

- first batch, in a loop: from opening the loader to its first batch (cold),
  and from asking for the next epoch to its first batch (warm).
- first batch, in `fit`: from the call of `fit` to the first batch in a
  training step, in a first and in a second call with the same loader. The
  model is built and has been trained before. What `fit` takes for itself is
  in the figures of "stock inline".
- module with Keras: eight workers, where the workload's module imports Keras;
  TensorFlow backend. How long a new interpreter takes to import Keras; from
  opening a loader until each worker has built a batch; the same for a second
  loader while the first is open; and what memory each process has of its own.
  The processes of the others are forks of this one, which has Keras already.
- restart: a worker is killed by SIGKILL; from then to the first batch that its
  replacement built. One worker, which takes 2 ms for a batch. A loader that
  cannot go on hangs or fails here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks import harness, peers, processes
from benchmarks.workloads import Filled, Waiting, touch
from keras_fastdata.workers import environment

FIGURES = (
    harness.Figure("cold_ms", "cold ms"),
    harness.Figure("warm_ms", "warm ms"),
    harness.Figure("restart_ms", "restart ms"),
    harness.Figure("import_ms", "import ms"),
    harness.Figure("ready_ms", "8 ready ms"),
    harness.Figure("further_ms", "8 further ready ms"),
    harness.Figure("private_mb", "private MB/process"),
)
TIMEOUT_S = 240.0
BATCHES = 30
BUILD_S = 0.002
WITH_KERAS = 8  # workers
IN_FIT = ("fastdata", "stock inline", "stock processes", "torch")


def cases() -> Iterator[harness.Case]:
    yield from harness.combine(
        what=["first batch, loop"], loader=peers.WITH_PROCESSES
    )
    yield from harness.combine(
        what=["first batch, fit"],
        backend=("tensorflow", "jax", "torch"),
        loader=IN_FIT,
    )
    yield from harness.combine(
        what=["module with Keras"],
        backend=["tensorflow"],
        loader=("fastdata", "stock processes", "torch", "grain", "loky"),
    )
    yield from harness.combine(what=["restart"], loader=peers.WITH_PROCESSES)


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    if case["what"] == "restart":
        return _restart(case["loader"])
    if case["what"] == "first batch, fit":
        return _in_fit(case["loader"])
    if case["what"] == "module with Keras":
        return _with_keras(case["loader"])
    return _in_loop(case["loader"])


def _in_loop(name: str) -> dict[str, float]:
    began = time.perf_counter()
    with peers.open_loader(name, Filled(1024), 2, BATCHES) as loader:
        batches = iter(loader)
        touch(next(batches))
        cold_s = time.perf_counter() - began
        for batch in batches:
            touch(batch)
        began = time.perf_counter()
        batches = iter(loader)
        touch(next(batches))
        warm_s = time.perf_counter() - began
    return {"cold_ms": cold_s * 1e3, "warm_ms": warm_s * 1e3}


def _in_fit(name: str) -> dict[str, float]:
    from benchmarks.training import stamped_model

    build = Filled(1024)
    model = stamped_model(build(0))
    with peers.open_loader(name, build, 2, BATCHES) as loader:
        took_ms = []
        for _ in range(2):
            model.steps.clear()
            began = time.perf_counter()
            model.fit(loader.for_fit(), verbose=0, shuffle=False)
            took_ms.append((model.steps[0][1] - began) * 1e3)
    return dict(zip(("cold_ms", "warm_ms"), took_ms, strict=True))


def _with_keras(name: str) -> dict[str, float]:
    from benchmarks.keras_workload import Named

    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import keras"],
        env=environment.of_worker(None),
        stderr=subprocess.DEVNULL,
        check=True,
    )
    took_ms = [(time.perf_counter() - began) * 1e3]
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            began = time.perf_counter()
            loader = opened.enter_context(
                peers.open_loader(name, Named(), WITH_KERAS)
            )
            seen: set[float] = set()
            for batch in loader:
                seen.add(touch(batch))
                if len(seen) == WITH_KERAS:
                    break
            took_ms.append((time.perf_counter() - began) * 1e3)
        _, *others = processes.family()
        private_mb = processes.private_mb(others) / len(others)
    keys = "import_ms", "ready_ms", "further_ms"
    return {**dict(zip(keys, took_ms, strict=True)), "private_mb": private_mb}


def _restart(name: str) -> dict[str, float]:
    build = Waiting(BUILD_S)
    with peers.open_loader(name, build, 1, ahead=2) as loader:
        batches = iter(loader)
        first = list(itertools.islice(batches, 50))
        worker = int(touch(first[-1]))
        del first
        os.kill(worker, signal.SIGKILL)
        began = time.perf_counter()
        for batch in batches:
            if touch(batch) != worker:
                break
        return {"restart_ms": (time.perf_counter() - began) * 1e3}


if __name__ == "__main__":
    harness.main(["startup"])
