"""What lies between the last batch of an epoch and the first of the next.

    python -m benchmarks.epoch_gap [options of python -m benchmarks]

A step takes 10 ms, making a batch 5 ms, and there are two producers, so that
they keep up. With validation, which also has batches to make, the gap begins
after its last step.

- loop: how long the first batch of an epoch is waited for, once the last one
  has been dealt with.
- fit: from the end of the last step to the beginning of the next epoch's first.
  What `fit` does between epochs whatever feeds it is in the figures of
  "constant", which has its batches at hand. The steps run eagerly, so that
  they can be timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

from benchmarks import harness, peers
from benchmarks.workloads import AtHand, Waiting, touch

FIGURES = (
    harness.Figure("gap_ms", "gap ms"),
    harness.Figure("worst_gap_ms", "worst ms"),
    harness.Figure("between_steps_ms", "within an epoch ms"),
)
TIMEOUT_S = 90.0
EPOCHS = 6
BATCHES = 20
VALIDATION_BATCHES = 5
STEP_S = 0.010
BUILD_S = 0.005
PRODUCERS = 2
IN_FIT = ("fastdata", "constant", "stock processes", "torch")


def cases() -> Iterator[harness.Case]:
    yield from harness.combine(
        consumer=["loop"], validation=("no", "yes"), loader=peers.WITH_PROCESSES
    )
    yield from harness.combine(
        consumer=["fit"],
        backend=("tensorflow", "jax", "torch"),
        validation=("no", "yes"),
        loader=IN_FIT,
    )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    build, name = Waiting(BUILD_S), case["loader"]
    if name == "constant":
        build, name = AtHand(build), "stock inline"
    in_between = VALIDATION_BATCHES if case["validation"] == "yes" else 0
    run = _in_fit if case["consumer"] == "fit" else _in_loop
    with (
        peers.open_loader(name, build, PRODUCERS, BATCHES) as training,
        peers.open_loader(
            name, build, PRODUCERS, max(1, in_between)
        ) as validation,
    ):
        # The first gap still starts what lasts: workers of the validation.
        gaps_ms, within_ms = run(training, validation, in_between)
    return {
        "gap_ms": statistics.median(gaps_ms[1:]),
        "worst_gap_ms": max(gaps_ms[1:]),
        "between_steps_ms": statistics.median(within_ms),
    }


def _in_loop(
    training: peers.Loader, validation: peers.Loader, in_between: int
) -> tuple[list[float], list[float]]:
    gaps_ms, within_ms = [], []
    asked = time.perf_counter()
    for _ in range(EPOCHS):
        waits_ms = []
        for batch in training:
            waits_ms.append((time.perf_counter() - asked) * 1e3)
            touch(batch)
            time.sleep(STEP_S)
            asked = time.perf_counter()
        gaps_ms.append(waits_ms[0])
        within_ms += waits_ms[1:]
        if in_between:
            for batch in validation:
                touch(batch)
                time.sleep(STEP_S)
                asked = time.perf_counter()
    return gaps_ms[1:], within_ms


def _in_fit(
    training: peers.Loader, validation: peers.Loader, in_between: int
) -> tuple[list[float], list[float]]:
    from benchmarks.training import stamped_model

    model = stamped_model(training.workload(0), STEP_S)
    model.fit(
        training.for_fit(),
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        validation_data=validation.for_fit() if in_between else None,
    )
    gaps_ms, within_ms = [], []
    trained = 0
    for before, after in itertools.pairwise(model.steps):
        trained += before[0]
        gap_ms = (after[1] - before[2]) * 1e3
        if not after[0]:
            continue
        if trained % BATCHES:
            within_ms.append(gap_ms)
        else:
            gaps_ms.append(gap_ms)
    return gaps_ms, within_ms


if __name__ == "__main__":
    harness.main(["epoch_gap"])
