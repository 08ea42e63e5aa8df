"""What builds and steps take, and what that comes to with some workers."""

from __future__ import annotations

import random

from keras_fastdata.engine.tuner import INLINE, Sample, WorkerConfigChoice
from keras_fastdata.metrics.timing import Timing

QUEUE = 10
HAND_OVER_S = 30e-6


class Load:
    """What builds and steps take, and what that comes to somewhere.

    Args:
        waits_s: Of a build, without a core.
        python_s: Of a build, holding Python's lock.
        native_s: Of a build, computing without it.
        store_s: More of it in a process, to copy the batch.
        crowd_s: More waiting in any worker, as at a disk that several use.
        step_s: With it, on a device.
        step_cpu_s: The same on a core.
    """

    def __init__(
        self,
        waits_s=0,
        python_s=0,
        native_s=0,
        store_s=0,
        step_s=1e-3,
        step_cpu_s=0,
        crowd_s=0,
    ):
        self.crowd_s = crowd_s
        self.waits_s, self.python_s, self.native_s = waits_s, python_s, native_s
        self.store_s, self.step_s, self.step_cpu_s = store_s, step_s, step_cpu_s

    def cpu_s(self, choice):
        stored_s = self.store_s if choice.are_processes else 0
        return self.python_s + self.native_s + stored_s

    def build_s(self, choice):
        crowd_s = self.crowd_s if choice.workers else 0
        return self.waits_s + crowd_s + self.cpu_s(choice)

    def period_s(self, choice, cores):
        build_s = self.build_s(choice)
        step_s = self.step_s + self.step_cpu_s
        if choice == INLINE:
            return build_s + step_s
        handed_s = step_s + HAND_OVER_S
        used_s = self.cpu_s(choice) + self.step_cpu_s + HAND_OVER_S
        limits = [build_s / choice.workers, handed_s, used_s / cores]
        if not choice.are_processes:
            limits.append(self.python_s + self.step_cpu_s)
        return max(limits)

    def sample(self, choice, cores, draw):
        period_s = self.period_s(choice, cores) * draw.uniform(0.97, 1.05)
        if draw.random() < 0.02:
            period_s *= 5  # somebody else had the core
        gap_s = self.step_s + self.step_cpu_s
        build_s = self.build_s(choice)
        timing = Timing(0, build_s, build_s, self.cpu_s(choice), 0)
        wait_s = max(0, period_s - gap_s)
        return Sample(gap_s, self.step_cpu_s, wait_s, timing)


LOADS = {
    "cheap": Load(native_s=20e-6),
    "sleeping": Load(waits_s=0.01),
    "GIL-bound": Load(python_s=0.005),
    "CPU-bound": Load(native_s=0.008),
    "huge batches": Load(native_s=0.02, store_s=0.015),
    "mixed": Load(waits_s=0.005, python_s=0.005),
    "a slow step": Load(python_s=0.005, step_s=0.02),
    "a step on the cores": Load(python_s=0.005, step_s=0, step_cpu_s=0.01),
    "slow builds": Load(waits_s=0.3, native_s=0.2, step_s=0.1),
    "crowded disk": Load(waits_s=0.005, step_s=0.002, crowd_s=0.005),
    "no step": Load(native_s=200e-6, step_s=0),
}


def run(tuner, load, cores, batches, seed=0):
    """Has a tuner see so many batches; returns how often it moved."""
    draw = random.Random(seed)
    before = len(tuner.decisions)
    for _ in range(batches):
        tuner.add(load.sample(tuner.choice, cores, draw))
    return len(tuner.decisions) - before


def quickest_s(load, cores, most=QUEUE):
    """The shortest time per batch with any of several settings."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= most]
    places = [
        INLINE,
        *(WorkerConfigChoice(n, p) for n in counts for p in (False, True)),
    ]
    return min(load.period_s(choice, cores) for choice in places)
