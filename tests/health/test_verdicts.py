"""Ten situations, each a real `fit`, and the reason `LoaderHealth` names.

They run alone. If other programs use many of the cores meanwhile, the reason is
that cores are full, and the advice says so. `test_loader_health.py` has such a
`fit` with a simulated clock, and `test_verdict_function.py` has each reason.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
from situations import (
    Batches,
    Burning,
    Dying,
    Reshuffling,
    Sleeping,
    Straggling,
    Strided,
)

from benchmarks.known_steps import (
    model_of_the_first_column,
    model_with_steps_of,
)
from keras_fastdata import LoaderHealth
from keras_fastdata.health.reasons import Kind

PROCESS = {"workers": 1, "use_multiprocessing": True}
PROCESSES = {"workers": 2, "use_multiprocessing": True}

pytestmark = [pytest.mark.backend, pytest.mark.alone]


@dataclasses.dataclass
class Situation:
    """A dataset, and a model with steps of so many seconds."""

    dataset: type
    arguments: dict
    step_s: float = 0.002


SITUATIONS = {
    "compute_bound": Situation(Batches, {"workers": 1}, 0.02),
    "build_cpu_bound": Situation(Burning, {"seconds": 0.015, **PROCESS}),
    "gil_bound": Situation(Burning, {"seconds": 0.01, "workers": 2}),
    "io_bound": Situation(Sleeping, {"seconds": 0.02, "workers": 1}),
    "cores_full": Situation(Burning, {"seconds": 0.02, **PROCESSES}),
    "transfer_bound": Situation(Strided, {"length": 12, **PROCESS}, 0.0),
    "stragglers": Situation(Straggling, {"workers": 1}, 0.005),
    "late_start": Situation(Reshuffling, {"seconds": 0.2, "workers": 8}, 0.027),
    "too_few_batches": Situation(
        Reshuffling, {"seconds": 0.1, "length": 3, "workers": 4}
    ),
    "unstable_workers": Situation(
        Dying, {"max_worker_restarts": 1000, **PROCESSES}
    ),
}


@pytest.fixture
def two_cores():
    """On larger machines the same as on the smallest."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:2]))
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def one_core():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def _health_of(situation, tmp_path, epochs=2):
    health = LoaderHealth(verbose=0)
    arguments = dict(situation.arguments)
    if situation.dataset is Dying:
        arguments["folder"] = tmp_path
    if situation.dataset is Strided:
        model = model_of_the_first_column(2048, "uint8")
    else:
        model = model_with_steps_of(situation.step_s)
    with situation.dataset(**arguments) as dataset:
        model.fit(dataset, epochs=epochs, verbose=0, callbacks=[health])
    return health.summary().epochs[-1]


def test_every_reason_has_its_situation():
    assert set(SITUATIONS) == set(Kind)


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.parametrize("kind", SITUATIONS)
def test_the_reason_is_named(kind, attempt, two_cores, tmp_path):
    epoch = _health_of(SITUATIONS[kind], tmp_path)
    found = epoch.verdict
    assert found.kind == kind or (found.kind == "cores_full" and found.others)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["build_cpu_bound", "gil_bound", "cores_full"])
def test_on_one_core_nobody_is_told_to_take_more_processes(
    kind, one_core, tmp_path
):
    epoch = _health_of(SITUATIONS[kind], tmp_path)
    assert epoch.verdict.kind == "cores_full", epoch
    assert "workers=" not in epoch.verdict.advice
    assert "More workers would not help" in epoch.verdict.advice
