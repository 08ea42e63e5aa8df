"""How workers connected by pipes, and their training processes, may end.

These tests use nothing that only Linux, or only POSIX, has. The fixture
`_nothing_is_left_behind` looks for processes and shared memory after each.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from places import NO_TRAINING, quickly
from portable_samples import Dies, FailsToStart
from samples import equal

TWO = {
    "workers": 2,
    "use_multiprocessing": True,
    "start_method": "portable",
}
_TRAINER = f"""
import os, signal, sys
from portable_samples import Dies
dataset = Dies(length=100_000, **{TWO!r})
batches = iter(dataset)
held = [next(batches) for _ in range(5)]
print("trains", flush=True)
"""
TRAINER_ENDS = {
    "terminate": "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit": "os._exit(3)",
    "exception": "raise RuntimeError",
    "sys.exit": "sys.exit(3)",
    "last line": "",
}


@pytest.mark.parametrize("at", ["start", "build", "write"])
@pytest.mark.parametrize("how", quickly(["terminate", "3", "0"], "terminate"))
def test_the_death_of_a_worker_leaves_the_bytes_of_batches_the_same(
    at, how, tmp_path
):
    inline, deaths = Dies(workers=0, seed=3), tmp_path / "deaths"
    with Dies(deaths, at, how, seed=3, **TWO) as dataset:
        for _ in range(2):
            batches = itertools.zip_longest(inline, dataset)
            assert all(equal(one, other) for one, other in batches)
    assert deaths.read_text()


def test_an_exception_at_the_start_is_raised_with_all_its_text():
    dataset = FailsToStart(**TWO)
    with dataset, pytest.raises(KeyError, match=r"no such file x+") as caught:
        next(iter(dataset))
    assert len(str(caught.value)) > 500_000
    assert any("on_worker_start" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", quickly(TRAINER_ENDS, "os._exit"))
def test_workers_end_when_their_training_process_ends(how):
    done = subprocess.run(
        [sys.executable, "-c", _TRAINER + TRAINER_ENDS[how]],
        env={
            **os.environ,
            **NO_TRAINING,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,  # until the workers, which inherit it, have ended
        text=True,
        timeout=240,
    )
    assert done.stdout == "trains\n", done.stderr
