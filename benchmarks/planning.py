"""What a training on 1,024 hosts would ask of each, by simulation.

    python -m benchmarks.planning [--hosts 1024] [--steps 1000]

Two parts. The order of 10^9 samples is the package's own (`engine.schedule`,
`engine.shards`, `engine.permutation`): what a host holds, what an index costs,
and whether the hosts of a step have the samples of one process's next batches.

When batches come is simulated: every host has workers that take the next ticket
when they are free, as many batches ahead as the queue allows, and deliver in
order; a step begins when the last host has its batch, and ends for all at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import tracemalloc

import numpy as np

from keras_fastdata.building.build_context import epoch_order
from keras_fastdata.engine.schedule import Schedule, plan_epoch
from keras_fastdata.engine.sharding import Shard

SAMPLES, BATCH = 10**9, 256
BATCHES = -(-SAMPLES // BATCH)
SEED, EPOCH = 1, 3


# -- the order -----------------------------------------------------------------


def of_host(index: int, hosts: int) -> Schedule:
    """The batches of one host."""
    shard = Shard(index, hosts, "planned")
    return plan_epoch(
        BATCHES, shuffle=False, seed=SEED, epoch=EPOCH, shard=shard
    )


def samples_of(place: int) -> np.ndarray:
    """The samples of a batch; the last one may be short."""
    first = place * BATCH
    positions = np.arange(first, min(first + BATCH, SAMPLES))
    return epoch_order(SEED, EPOCH, SAMPLES).at(positions)


def show_the_order(hosts: int) -> None:
    tracemalloc.start()
    began = time.perf_counter()
    schedule = of_host(7 % hosts, hosts)
    samples_of(schedule.index_at(0))
    made_s = time.perf_counter() - began
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    length = schedule.num_batches
    assert length is not None
    asked = range(0, length, max(1, length // 1000))
    began = time.perf_counter()
    for position in asked:
        samples_of(schedule.index_at(position))
    each_s = (time.perf_counter() - began) / len(asked)
    print(f"{SAMPLES:,} samples, batches of {BATCH}, {hosts:,} hosts")
    print(
        f"  a host has {length:,} batches; the order takes {nbytes / 1e3:.0f} "
        f"KB and {made_s * 1e3:.1f} ms at any place in it, and "
        f"{each_s * 1e6:.0f} us a batch"
    )
    for step in (0, length // 2, length - 1):
        check(step, hosts)
    print(
        "  first, middle and last step: the hosts together have the samples "
        "that one process would have next, each once"
    )
    gone = 1000 * hosts
    fits = [n for n in range(1, 4 * hosts + 1) if gone % n == 0]
    state = {"version": 1, "seed": SEED, "epoch": EPOCH, "position": gone}
    print(
        f"  a state after 1,000 steps: {len(json.dumps(state))} bytes and "
        f"more; {len(fits)} numbers of hosts up to {4 * hosts:,} can go on "
        f"with it: ... {', '.join(map(str, fits[-6:]))}"
    )


def check(step: int, hosts: int) -> None:
    """That a step of all hosts is what follows in the order, each once."""
    places = [of_host(h, hosts).index_at(step) for h in range(hosts)]
    wanted = [(step * hosts + h) % BATCHES for h in range(hosts)]
    assert places == wanted
    whole = [place for place in places if place >= step * hosts]
    drawn = np.concatenate([samples_of(place) for place in whole])
    assert len(np.unique(drawn)) == len(drawn)


# -- when batches come ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """What each host is like. Durations are in seconds.

    Attributes:
        workers: Of a host.
        queue: Batches that may wait, or be built, on a host.
        build_s: Median of a build; it varies by a quarter.
        step_s: Of the model.
        odd: Share of the builds that take `odd_s` more.
        odd_s: For a disk or a network that does not answer at once.
        slow: Hosts whose builds take twice as long.
        dies_s: Between two deaths of a worker of a host; 0 for none.
        back_s: Until its replacement builds.
    """

    workers: int = 8
    queue: int = 10
    build_s: float = 0.6
    step_s: float = 0.1
    odd: float = 0.0
    odd_s: float = 6.0
    slow: int = 0
    slow_workers: int = 8
    dies_s: float = 0.0
    back_s: float = 0.5


def efficiency(site: Site, hosts: int, steps: int) -> float:
    """The share of the time that the model trains."""
    rng = np.random.default_rng(0)
    most = max(site.workers, site.slow_workers if site.slow else 0)
    free = np.zeros((hosts, most))
    free[:, site.workers :] = np.inf
    if site.slow:
        free[: site.slow, : site.slow_workers] = 0.0
    everyone = np.arange(hosts)
    taken = np.zeros(site.queue)  # when each place in the queue came free
    ended = 0.0
    warm = steps // 10
    for step in range(steps + warm):
        if step == warm:
            began = ended
        build = rng.lognormal(np.log(site.build_s), 0.25, hosts)
        build[: site.slow] *= 2
        if site.odd:
            build += site.odd_s * (rng.random(hosts) < site.odd)
        if site.dies_s:
            # Half of it built, then a replacement, then all of it.
            dies = rng.random(hosts) < site.step_s / site.dies_s
            build += dies * (build / 2 + site.back_s)
        who = free.argmin(axis=1)
        begin = np.maximum(free[everyone, who], taken[step % site.queue])
        ready = begin + build
        free[everyone, who] = ready
        start = max(ended, ready.max())
        taken[step % site.queue] = start
        ended = start + site.step_s
    return steps * site.step_s / (ended - began)


CASES = {
    "as it should be": Site(),
    "1 build in 1,000 takes 6 s longer": Site(odd=0.001),
    "... and max_queue_size=128": Site(odd=0.001, queue=128),
    "... and 1 worker more": Site(odd=0.001, queue=128, workers=9),
    "a host of half the speed": Site(slow=1),
    "... with twice the workers": Site(slow=1, slow_workers=16, queue=20),
    "a worker dies every 10 min on every host": Site(dies_s=600.0),
    "... and max_queue_size=32": Site(dies_s=600.0, queue=32),
}


def show_the_times(hosts: int, steps: int) -> None:
    site = Site()
    print(
        f"{hosts:,} hosts in step: {site.workers} workers each, builds of "
        f"{site.build_s} s, steps of {site.step_s} s, max_queue_size="
        f"{site.queue}; the model trains so much of the time"
    )
    for name, case in CASES.items():
        one, all_ = (efficiency(case, n, steps) for n in (1, hosts))
        print(f"  {name:<42} {all_:6.1%}   (one host alone {one:6.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    show_the_order(given.hosts)
    show_the_times(given.hosts, given.steps)


if __name__ == "__main__":
    main()
