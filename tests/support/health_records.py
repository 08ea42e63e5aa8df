"""Records of runs that never were: batches and steps, by simulation.

Workers take batches in turn, a queue of a fixed size lies between them and a
training that takes the same time for every step. Durations are drawn from a
generator with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import datetime
import math

import numpy as np

from keras_fastdata.engine.settings import Settings
from keras_fastdata.health.account import TimeAccount
from keras_fastdata.health.facts import Facts
from keras_fastdata.health.reasons import Kind
from keras_fastdata.health.record import Record
from keras_fastdata.health.step_clock import Step
from keras_fastdata.health.summary import EpochHealth, summarize
from keras_fastdata.health.verdict import Verdict
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.metrics.recorder import Skipped, Slow, Span
from keras_fastdata.metrics.worker_kinds import WorkerKind

START_S = 5000.0
_COPY_S = 0.0008
_VERDICT = Verdict(
    Kind.IO_BOUND,
    "Building a batch takes 50 ms, and 90% of that it waits for files.",
    "Waiting needs no core: pass `workers=8`: 2.0 s an epoch at best.",
    2.5,
)


# 100 batches in 10 s, of which steps need 2: one process that computes.
BUSY_BUILDER = Facts(
    workers_are=WorkerKind.PROCESS,
    workers=1,
    max_queue_size=10,
    batches=100,
    nbytes=100_000_000,
    wall_s=10.0,
    free_s=2.0,
    build_s=9.5,
    cpu_s=9.3,
    delay_s=0.1,
    store_s=0.1,
    open_s=0.0,
    wait_s=8.0,
    build_s_p50=0.095,
    first_wait_s=0.1,
    hook_s=0.0,
    retried=0,
    retried_wait_s=0.0,
    restarts=0,
    slowest=(Slow(0.1, 17, 0.1),),
    cores=8,
    busy_cores=1.5,
)


def empty_record():
    """A run in which no batch of ours was seen."""
    return Record(
        dataset="",
        settings={},
        backend="jax",
        began=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        began_s=START_S,
        ended_s=START_S + 1.0,
        summary=summarize([], []),
        spans=np.empty((0, len(Span._fields))),
        steps=(),
        lost=(),
        pids={},
        skipped=(),
        slowest=(),
    )


def simulated_record(
    workers=2,
    epochs=2,
    batches=60,
    build_s=0.05,
    step_s=0.01,
    queue=10,
    verdict=_VERDICT,
    **changes,
):
    """A run whose batches take `build_s` on average.

    Worker 1 is lost over batch 5 of the first epoch; batches 3 and 7 are
    built slowly.
    """
    rng = np.random.default_rng(0)
    free_s = np.full(workers, START_S + 0.5)
    now_s = START_S + 0.6
    spans, steps, found, lost = [], [], [], []
    for epoch in range(epochs):
        first = len(spans)
        for batch in range(batches):
            worker = int(np.argmin(free_s))
            retries = int(not epoch and batch == 5)
            if retries and workers > 1:
                lost.append(WorkerLoss(free_s[1] + 0.01, 1, 4243))
                free_s[1] += 0.3
            room_s = spans[-queue].delivered_s if len(spans) >= queue else 0
            began_s = max(free_s[worker], room_s)
            took_s = build_s * rng.gamma(20, 1 / 20)
            built_s = began_s + took_s * (6 if batch in (3, 7) else 1)
            stored_s = free_s[worker] = built_s + _COPY_S
            waited_s = max(0.0, stored_s + 0.0002 - now_s)
            spans.append(
                Span(
                    epoch=epoch,
                    batch=batch,
                    worker=worker,
                    retries=retries,
                    nbytes=200_000,
                    depth=0,
                    queued_s=began_s - 0.001,
                    began_s=began_s,
                    built_s=built_s,
                    stored_s=stored_s,
                    delivered_s=now_s + waited_s,
                    opened_s=0.0001,
                    waited_s=waited_s,
                    cpu_s=0.1 * took_s,
                    delay_s=0.0,
                )
            )
            ended_s = now_s + waited_s + step_s
            steps.append(
                Step("train", epoch, batch, now_s, ended_s, waited_s, False)
            )
            now_s = ended_s
        ours = spans[first:] = _with_depths(spans[first:], queue)
        found.append(_health(epoch, ours, steps[first:], workers, verdict))
    record = Record(
        dataset="Photos",
        settings=dataclasses.asdict(
            Settings(
                workers=workers,
                use_multiprocessing=True,
                max_queue_size=queue,
            )
        ),
        backend="jax",
        began=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        began_s=START_S,
        ended_s=now_s + 0.1,
        summary=summarize(found, [], None, _account(now_s - START_S, found)),
        spans=np.array(spans)[-8192:],
        steps=tuple(steps[-8192:]),
        lost=tuple(lost),
        pids={worker: 5000 + worker for worker in range(workers)},
        skipped=(
            Skipped(
                "Photos",
                17,
                "Traceback (most recent call last):\n"
                '  File "photos.py", line 12, in __getitem__\n'
                "    image = read(path)\n"
                "ValueError: not an image: photo_17.png\n"
                "While building batch 17 of epoch 0 of Photos.\n",
            ),
        ),
        slowest=tuple(
            sorted(
                (
                    Slow(s.built_s - s.began_s, s.batch, s.waited_s)
                    for s in ours
                ),
                reverse=True,
            )[:32]
        ),
    )
    return dataclasses.replace(record, **changes)


def _account(whole_s, epochs):
    waiting_s = sum(epoch.lost_s for epoch in epochs)
    steps_s = sum(epoch.wall_s for epoch in epochs) - waiting_s
    return TimeAccount(
        first_batch_s=whole_s - waiting_s - steps_s,
        steps_s=steps_s,
        waiting_s=waiting_s,
    )


def _with_depths(spans, queue):
    """The batches, knowing how many were ready when each was asked for."""
    return [
        span._replace(
            depth=sum(
                other.stored_s <= span.delivered_s - span.waited_s
                for other in spans[place : place + queue]
            )
        )
        for place, span in enumerate(spans)
    ]


def _health(epoch, spans, steps, workers, verdict):
    builds = [span.built_s - span.began_s for span in spans]
    waits = [span.waited_s for span in spans]
    wall_s = steps[-1].ended_s - steps[0].began_s
    free_s = wall_s - sum(waits)
    return EpochHealth(
        phase="train",
        epoch=epoch,
        batches=len(spans),
        verdict=verdict,
        data_wait=1 - free_s / wall_s,
        wall_s=wall_s,
        free_s=free_s,
        step_s=math.nan if epoch else 0.01,
        build_s_p50=float(np.median(builds)),
        build_s_p95=float(np.quantile(builds, 0.95)),
        wait_s_p95=float(np.quantile(waits, 0.95)),
        queue_depth_mean=float(np.mean([span.depth for span in spans])),
        worker_utilization=min(1.0, sum(builds) / wall_s / workers),
        nbytes=sum(span.nbytes for span in spans),
        restarts=sum(span.retries for span in spans),
        skipped=int(not epoch),
        retried=sum(span.retries for span in spans),
        cores=4,
        busy_cores=None if epoch else 1.25,
        workers_nbytes=None if epoch else 812_000_000,
        shared_nbytes=4_000_000,
    )
