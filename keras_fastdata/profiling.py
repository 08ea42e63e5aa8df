"""Measures which kind and number of workers suit a dataset best.

A few dozen batches are built in the caller, by one and two threads, and by one
and two processes. Each trial has a loader of its own, so that the dataset's
loader keeps its workers, its seed and its epoch number. `metrics/cost_model.py`
predicts the rates of more workers.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata._dataset_internals import internals_of
from keras_fastdata._validation import integer
from keras_fastdata.building import interface
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import has_random_access
from keras_fastdata.errors import DatasetPicklingError
from keras_fastdata.metrics import cost_model, formatting, ram
from keras_fastdata.metrics import cpu as machine
from keras_fastdata.metrics.cost_model import MOST, WAITS, Choice, Costs
from keras_fastdata.metrics.gil import GilProbe
from keras_fastdata.metrics.notice import Notice
from keras_fastdata.metrics.recorder import BatchStats, Recorder
from keras_fastdata.metrics.worker_kinds import WorkerKind

_WIDTH = 80
_LABEL = 12  # columns
_TRIED = ((0, False), (1, False), (2, False), (1, True), (2, True))
_LITTLE = 0.2  # share of time: below, Python's lock is not in the way
_BUSY = 0.75  # of the expected rate: below, the cores were not free
_INLINE = 1.25  # times the rate of workers: building inline is then advised
_SEED = 0  # without a user's seed; drawing one would change `random`


@dataclasses.dataclass(frozen=True)
class Rate:
    """Batches per second for one kind and number of workers.

    Attributes:
        kind: The kind of workers, such as "thread".
        workers: The number of workers; 0 for inline.
        measured: The measured rate; `None` if it was not tried.
        expected: The highest rate to expect if the cores are free.
    """

    kind: WorkerKind
    workers: int
    measured: float | None
    expected: float


@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """The measured cost of building batches, and the advised workers.

    `str(profile)` is a report of at most 80 columns.

    Attributes:
        dataset: Class name of the dataset.
        num_batches: Batches in an epoch; `None` if the data has no end.
        nbytes: Bytes of a batch's arrays, on average.
        build_s_p50: Median time of `__getitem__`, in the caller.
        build_s_p95: The time that 95% of calls did not exceed.
        computing: The share of a build that needs a core: 0 to 1. The rest
            is waiting.
        gil_held: Share of the time that Python's lock was held while two
            threads built; NaN if the builds were too quick to measure.
        start_s: Time until the first worker process began its first batch.
        worker_nbytes: Memory of a worker process (PSS, which divides shared
            memory among its users); `None` if unknown.
        cores: Cores that this process may use.
        rates: Batches per second, measured and expected.
        workers: The number of workers to use.
        use_multiprocessing: Whether the workers should be processes.
        max_queue_size: The value to raise `max_queue_size` to, so that all
            workers have work; `None` if the dataset's is large enough.
        reason: Why these workers are advised.
        no_processes: Why worker processes could not be tried, or "".
    """

    dataset: str
    num_batches: int | None
    nbytes: int
    build_s_p50: float
    build_s_p95: float
    computing: float
    gil_held: float
    start_s: float
    worker_nbytes: int | None
    cores: float
    rates: tuple[Rate, ...]
    workers: int
    use_multiprocessing: bool
    max_queue_size: int | None
    reason: str
    no_processes: str = ""

    @property
    def call(self) -> str:
        """The advised constructor call, as text."""
        return cost_model.call(
            self.dataset,
            self.workers,
            self.use_multiprocessing,
            self.max_queue_size,
        )

    def to_json(self) -> str:
        """Returns the profile as JSON; unknown values are null."""
        found = {**dataclasses.asdict(self), "call": self.call}
        return json.dumps(_finite(found), indent=2)

    def __repr__(self) -> str:
        build = formatting.duration(self.build_s_p50)
        return f"<Profile of {self.dataset}: {build} a batch; use {self.call}>"

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for display in a notebook."""
        facts = formatting.html_table(_facts(self), align="left")
        rates = formatting.html_table(_rows(self), _COLUMNS)
        advice = [f"Use `{self.call}`.", self.reason, *_notes(self)]
        texts = "<br>".join(map(html.escape, advice))
        name = html.escape(f"{self.dataset}: {_length(self.num_batches)}")
        return f"<div><b>{name}</b>{facts}{rates}<p>{texts}</p></div>"

    def __str__(self) -> str:
        facts = itertools.starmap(_labelled, _facts(self))
        return "\n\n".join(
            [
                f"{self.dataset}: {_length(self.num_batches)}",
                "\n".join(facts),
                _table(self),
                _conclusion(self),
            ]
        )


def profile(
    dataset: FastPyDataset, *, batches: int = 48, seconds: float = 5.0
) -> Profile:
    """Measures which kind and number of workers suit a dataset best.

    Builds batches in the caller, in one and two threads, and in one and two
    processes, all on this machine, also with `executor="ray"`. Run nothing else
    meanwhile.

    The dataset's settings, workers and random generators do not change. Its
    attributes keep their values; but if its methods edit such a value in
    place, that stays. Epoch hooks are not called.

    Args:
        dataset: A `FastPyDataset`.
        batches: How many batches each of the five trials builds, at least 1,
            after one batch per worker to warm up.
        seconds: How long each trial may take, more than 0. A batch that was
            begun is finished.

    Returns:
        The figures and the advice; `print` it.

    Raises:
        TypeError: `dataset` is not a `FastPyDataset`, or `batches` or
            `seconds` is not a number.
        ValueError: A number is out of range, or the dataset has no batches, or
            has a generator, as a `GeneratorDataset` has.

    Exceptions of the dataset's own code arrive unchanged.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import FastPyDataset, profile
    >>> class Zeros(FastPyDataset):
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return np.zeros((8, 3)), np.zeros(8)
    >>> found = profile(Zeros(), batches=4, seconds=1)
    >>> found.nbytes
    256
    """
    notice = Notice()
    try:
        return run(
            dataset,
            batches,
            seconds,
            lambda done, of, what: notice.look(
                lambda: f"profile: {done} of {of} batches, now {what}"
            ),
        )
    finally:
        notice.end()


Tell = Callable[[int, int, str], None]


def run(
    dataset: FastPyDataset, batches: int, seconds: float, tell: Tell
) -> Profile:
    """Measures like `profile`, and reports the progress to `tell`.

    Args:
        dataset: The dataset.
        batches: As in `profile`.
        seconds: As in `profile`.
        tell: Called with the number of batches done, their total, and a name
            of the present trial.
    """
    _check(dataset, batches, seconds)
    attributes = dict(vars(dataset))
    try:
        return _run(dataset, batches, seconds, tell)
    finally:
        # Not `setattr`, which would send the dataset to its workers again.
        vars(dataset).clear()
        vars(dataset).update(attributes)


def _check(dataset: Any, batches: Any, seconds: Any) -> None:
    if not isinstance(dataset, FastPyDataset):
        raise TypeError(
            "`profile` takes a FastPyDataset. "
            f"Received: {dataset!r} (of type {type(dataset).__name__})"
        )
    integer("batches", batches, least=1)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"`seconds` must be a number. Received: {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"`seconds` must be more than 0, and finite. Received: {seconds!r}"
        )
    if not has_random_access(dataset):
        raise ValueError(
            "`profile` needs batches that can be built in any order, and "
            f"{type(dataset).__name__} has a generator. Train with the "
            "callback `LoaderHealth()`: its report says which workers suit."
        )
    if interface.length_of(dataset) == 0:
        raise ValueError(f"{type(dataset).__name__} has no batches.")


# -- measuring ----------------------------------------------------------------


@dataclasses.dataclass
class _Trial:
    """The measurements for one kind and number of workers.

    Attributes:
        batch_stats: Sums over the batches, without those for warming up.
        rate: Batches per second.
        take_s: CPU time of the calling thread per batch.
        held: Share of the time Python's lock was held; NaN if unknown.
        start_s: Time from the first request to the start of its build.
        worker_nbytes: Memory per worker process, or `None`.
    """

    batch_stats: BatchStats
    rate: float
    take_s: float
    held: float
    start_s: float
    worker_nbytes: int | None

    @property
    def cpu_s(self) -> float:
        """CPU time per batch, including the time to store the batch."""
        return self.batch_stats.cpu_s / self.batch_stats.batches

    @property
    def blocked_s(self) -> float:
        """Time per build that is neither computing nor waiting for a core."""
        return self.batch_stats.blocked_s / self.batch_stats.batches

    @property
    def build_s(self) -> float:
        """Time per build, without the time of waiting for a core."""
        return self.cpu_s + self.blocked_s


def _run(
    dataset: FastPyDataset, batches: int, seconds: float, tell: Tell
) -> Profile:
    trials: dict[tuple[int, bool], _Trial] = {}
    no_processes = ""
    total = sum(batches + max(1, workers) for workers, _ in _TRIED)
    before = 0
    for workers, processes in _TRIED:
        kind = WorkerKind.local(workers, processes)
        what = formatting.workers(kind, workers)
        warm = max(1, workers)
        try:
            trials[workers, processes] = _try(
                dataset,
                workers,
                processes,
                batches,
                seconds,
                lambda done, at=before, what=what: tell(  # type: ignore[misc]
                    at + done, total, what
                ),
            )
        except DatasetPicklingError as error:
            no_processes = str(error)
            break
        before += batches + warm
    tell(total, total, "")
    return _conclude(dataset, trials, no_processes)


def _try(
    dataset: FastPyDataset,
    workers: int,
    processes: bool,
    batches: int,
    seconds: float,
    tell: Callable[[int], None],
) -> _Trial:
    settings = _settings(dataset, workers, processes)
    loader = Loader(dataset, settings)
    recorder = Recorder()
    probe = GilProbe(recorder)
    warm = max(1, workers)
    if settings.kind is WorkerKind.THREAD and workers > 1:
        probe.watch()
    tell(0)
    began_s = time.monotonic()
    start_s = math.nan
    mark_s, mark_cpu_s = began_s, time.thread_time()
    done = 0
    try:
        for span in _spans(loader, dataset):
            done += 1
            if done == 1:
                start_s = max(0.0, span.began_s - began_s)
                began_s = mark_s = max(began_s, span.began_s)
                mark_cpu_s = time.thread_time()  # without starting workers
            recorder.add(span, 0.0)
            now_s = time.monotonic()
            late = now_s - began_s >= seconds
            if done == warm and not late:
                # The warm-up is over: batches count from here on.
                recorder.begin()
                mark_s, mark_cpu_s = now_s, time.thread_time()
                probe.take()
            tell(done)
            if done == warm + batches or (late and done >= warm):
                break
        ended_s, cpu_s = time.monotonic(), time.thread_time()
        held = probe.take()
        pool_stats = loader.pool_stats()
        pids = pool_stats.pids.values() if pool_stats else ()
        nbytes = ram.pss(pids)
    finally:
        probe.close()
        loader.close()
    recorder.flush()
    batch_stats = recorder.batch_stats
    return _Trial(
        batch_stats,
        batch_stats.batches / max(ended_s - mark_s, 1e-9),
        (cpu_s - mark_cpu_s) / batch_stats.batches,
        held,
        start_s,
        None if nbytes is None else nbytes // max(1, len(pids)),
    )


def _settings(
    dataset: FastPyDataset, workers: int, processes: bool
) -> Settings:
    settings = internals_of(dataset).settings
    seed = settings.seed
    return dataclasses.replace(
        settings,
        workers=workers,
        use_multiprocessing=processes,
        executor="local",
        ray_options=None,
        cache=None,
        cache_bytes=None,
        cache_version=None,
        max_queue_size=max(settings.lookahead, 2 * workers),
        seed=_SEED if seed is None else seed,
    )


def _spans(loader: Loader, dataset: FastPyDataset) -> Iterator[Any]:
    """Builds one epoch after another, and yields each batch's times."""
    for _ in itertools.count():
        epoch = iterate(loader, dataset, shuffle=False)
        epoch.time_batches(0.0)
        for _ in epoch:
            yield epoch.span
        if epoch.is_empty:
            raise ValueError(
                f"{type(dataset).__name__} has no batch that can be built."
            )


# -- concluding ---------------------------------------------------------------


def _conclude(
    dataset: FastPyDataset,
    trials: dict[tuple[int, bool], _Trial],
    no_processes: str,
) -> Profile:
    settings = internals_of(dataset).settings
    inline, held = trials[0, False], trials[2, False].held
    kinds = {False: _costs(trials[1, False], trials[2, False], held)}
    if (2, True) in trials:
        kinds[True] = _costs(trials[1, True], trials[2, True], 0.0)
    cores = machine.read().allowed
    most = max(MOST, int(cores))
    advised = cost_model.choose(
        kinds, cores, most, settings.use_multiprocessing
    )
    reason = _why(advised, kinds, cores, held)
    if inline.build_s * _INLINE < advised.period_s:
        reason = _why_inline(inline.build_s, advised.period_s)
        advised = Choice(0, False, inline.build_s)
    counts = {2**n for n in range(most.bit_length()) if 2**n <= most}
    counts |= {max(1, int(cores)), advised.workers} - {0}
    batch_stats = inline.batch_stats
    one_process = trials.get((1, True))
    last = trials.get((2, True)) or one_process
    return Profile(
        dataset=interface.name_of(dataset),
        num_batches=interface.length_of(dataset),
        nbytes=round(batch_stats.nbytes / batch_stats.batches),
        build_s_p50=batch_stats.build.quantile(0.5),
        build_s_p95=batch_stats.build.quantile(0.95),
        computing=inline.cpu_s / max(inline.build_s, 1e-9),
        gil_held=held,
        start_s=one_process.start_s if one_process else math.nan,
        worker_nbytes=last.worker_nbytes if last else None,
        cores=cores,
        rates=(
            Rate(
                WorkerKind.INLINE, 0, inline.rate, 1 / max(inline.build_s, 1e-9)
            ),
            *(
                Rate(
                    WorkerKind.local(workers, are_processes),
                    workers,
                    _measured(trials.get((workers, are_processes))),
                    1 / max(costs.period_s(workers, cores), 1e-9),
                )
                for are_processes, costs in kinds.items()
                for workers in sorted(counts)
            ),
        ),
        workers=advised.workers,
        use_multiprocessing=advised.are_processes,
        max_queue_size=cost_model.queue_for(
            advised.workers, settings.lookahead
        ),
        reason=reason,
        no_processes=no_processes,
    )


def _costs(one: _Trial, two: _Trial, held: float) -> Costs:
    lock_s = cost_model.lock_s(held, 1 / two.rate, one.cpu_s)
    shared_s = cost_model.shared_s(one.build_s, two.build_s)
    if held > _LITTLE:
        # A thread that waits for the lock seems to be blocked.
        lock_s, shared_s = max(lock_s, min(one.cpu_s, shared_s)), 0.0
    return Costs(
        one.cpu_s,
        one.blocked_s,
        lock_s,
        shared_s,
        take_s=min(one.take_s, two.take_s),
    )


def _why(
    advised: Choice, kinds: dict[bool, Costs], cores: float, held: float
) -> str:
    """Returns one or two sentences that explain the advised workers."""
    costs = kinds[advised.are_processes]
    turns = (
        "Builds run Python code, and threads take turns at that: its lock "
        f"(the GIL) is held {formatting.share(held)} of the time two of them "
        "build."
    )
    if costs.computing < WAITS:
        why = (
            f"A build waits {formatting.share(1 - costs.computing)} of its "
            "time, for files, a network or the like; that needs no core."
        )
    elif advised.are_processes:
        why = "Processes build faster than threads here."
        if held >= WAITS:
            why = f"{turns} Processes have a lock each."
    elif held >= WAITS:
        why = turns
    else:
        why = "Builds compute."
    return f"{why} {costs.why_no_more(advised.workers, cores)}"


def _why_inline(inline_s: float, best_s: float) -> str:
    return (
        f"A batch is built in {formatting.duration(inline_s)}; handing it over "
        "from a worker takes more than that "
        f"({formatting.duration(best_s)} a batch at best)."
    )


def _measured(trial: _Trial | None) -> float | None:
    return None if trial is None else trial.rate


# -- the report ---------------------------------------------------------------


def _length(num_batches: int | None) -> str:
    if num_batches is None:
        return "no end"
    return formatting.count(num_batches, "batch")


def _facts(found: Profile) -> list[tuple[str, str]]:
    """Returns the profile's measurements as pairs of a label and a text."""
    computing = formatting.share(found.computing)
    lines = [
        (
            "Build",
            f"{formatting.duration(found.build_s_p50)} a batch (p95 "
            f"{formatting.duration(found.build_s_p95)}): {computing} "
            f"computing, {formatting.share(1 - found.computing)} waiting",
        ),
        ("Batch", f"{formatting.size(found.nbytes)} in its arrays"),
    ]
    if not math.isnan(found.gil_held):
        held = formatting.share(found.gil_held)
        lines.append(("GIL", f"held {held} of the time by 2 threads"))
    if found.no_processes:
        lines.append(("Processes", found.no_processes))
    else:
        text = f"the first starts in {formatting.duration(found.start_s)}"
        if found.worker_nbytes is not None:
            text += (
                f", each takes {formatting.size(found.worker_nbytes)} of memory"
            )
        lines.append(("Processes", text))
    lines.append(("Machine", formatting.cores(found.cores)))
    return lines


_COLUMNS = ("Batches/s", "workers", "measured", "expected", "")
_PLURAL = {
    WorkerKind.INLINE: "inline",
    WorkerKind.THREAD: "threads",
    WorkerKind.PROCESS: "processes",
}


def _table(found: Profile) -> str:
    return "\n".join(
        f"{kind:{_LABEL}}{workers:>7}  {measured:>8}  {expected:>8}"
        f"  {mark}".rstrip()
        for kind, workers, measured, expected, mark in (
            _COLUMNS,
            *_rows(found),
        )
    )


def _rows(found: Profile) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each row of the table of rates."""
    shown = ""
    for rate in found.rates:
        advised = rate.workers == found.workers and (
            not rate.workers
            or rate.kind.has_copies == found.use_multiprocessing
        )
        yield (
            _PLURAL[rate.kind] if rate.kind != shown else "",
            str(rate.workers),
            _figure(rate.measured),
            _figure(rate.expected),
            "<--" if advised else "",
        )
        shown = rate.kind


def _conclusion(found: Profile) -> str:
    parts = [_labelled("Use", found.call), _labelled("", found.reason)]
    parts += [_labelled("Note", text) for text in _notes(found)]
    return "\n".join(parts)


def _notes(found: Profile) -> list[str]:
    """Returns warnings about measurements that are possibly inaccurate."""
    was_busy = any(
        rate.measured is not None and rate.measured < _BUSY * rate.expected
        for rate in found.rates
        if rate.workers and rate.kind.has_copies == found.use_multiprocessing
    )
    if not was_busy:
        return []
    return [
        "Less was measured than expected. Was something else running? "
        "Then try again when the cores are free."
    ]


def _labelled(label: str, text: str) -> str:
    lines = formatting.wrapped(text, _WIDTH - _LABEL)
    return label.ljust(_LABEL) + lines.replace("\n", "\n" + " " * _LABEL)


def _figure(rate: float | None) -> str:
    if rate is None:
        return ""
    if rate >= 99.95:
        return f"{rate:,.0f}"
    return f"{rate:.1f}" if rate >= 9.995 else f"{rate:.2f}"


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, with `None`."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
