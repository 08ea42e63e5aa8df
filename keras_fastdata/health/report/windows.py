"""Converts the batches and steps of a record into rows of timeline bars.

There is a row for the steps of training, and one for each worker. A fit has
far more batches than a page has pixels. A timeline therefore shows a window of
it, in which single batches are visible. Bars narrower than a pixel are merged
into a bar with the share of time that they fill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata.health.record import Record
from keras_fastdata.health.step_clock import Step
from keras_fastdata.health.summary import EpochHealth
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.recorder import Span

_KINDS = ("lost", "build", "copy", "compute", "compile", "slowed", "wait")
MOST_ROWS = 64  # of workers; more could not be distinguished
_FEW_STEPS = 60  # a record with no more is shown as a whole
_STEPS = 40  # in a window, or as many as
_BUILDS = 3.0  # usual builds take, but at most
_MOST_STEPS = 160


class Bar(NamedTuple):
    """An activity with its beginning and end, drawn as a bar.

    Attributes:
        what: "build", "copy" or "lost" for a worker; "compute", "compile",
            "slowed" or "wait" for training.
        begin_s: The beginning, by `time.monotonic`.
        end_s: The end, by `time.monotonic`.
        share: The share of that time that it fills; below 1 if merged.
        title: A description.
    """

    what: str
    begin_s: float
    end_s: float
    share: float
    title: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a timeline: the activities of one worker, or of training.

    Attributes:
        name: A name such as "worker 3".
        title: A description; may be empty.
        bars: The bars, by kind, and of each kind in order.
    """

    name: str
    title: str
    bars: tuple[Bar, ...]


class Window(NamedTuple):
    """A time interval of a record that one timeline shows.

    The times are those of `time.monotonic`.

    Attributes:
        name: A name such as "the beginning".
        begin_s: The beginning.
        end_s: The end.
    """

    name: str
    begin_s: float
    end_s: float


def windows(record: Record) -> tuple[Window, ...]:
    """Returns the time intervals of a record to show as timelines.

    An empty record has no such intervals.

    A short record is shown as a whole. Of a longer one, the windows are the
    beginning, the longest wait after it, and the middle of the last epoch,
    which is typical; if it is validation that waits, those of validation.
    """
    phase = _main_phase(record)
    steps = [step for step in record.steps if step.phase == phase]
    if not steps:
        return _without_steps(record)
    count = _steps_in_view(record, steps)
    if len(record.steps) <= max(_FEW_STEPS, count):
        return (
            Window(
                "the whole run",
                _first_s(record, steps),
                record.steps[-1].ended_s,
            ),
        )
    of_last = sum(step.epoch == steps[-1].epoch for step in steps)
    last = len(steps) - of_last + max(0, of_last - count) // 2
    found = [_cut(_earliest(steps), steps, 0, steps[0].number < 0, count)]
    found[0] = found[0]._replace(begin_s=_first_s(record, steps))
    if len(steps) > count:
        waits = [step.waited_s for step in steps[count:]]
        longest = count + int(np.argmax(waits))
        first = max(0, longest - count // 2)
        found.append(_cut("the longest wait", steps, first, longest, count))
    middle = last + min(count, of_last) // 2
    what = "validation" if phase == "validation" else "epoch"
    found.append(_cut(f"in the last {what}", steps, last, middle, count))
    return tuple(found)


def rows(record: Record, window: Window, pixel_s: float) -> list[Row]:
    """Returns a window's rows of bars: first training, then each worker.

    Args:
        record: The record.
        window: The window to show.
        pixel_s: Seconds per pixel; shorter bars are merged.

    Returns:
        Training first, then at most `MOST_ROWS` workers by index.
    """
    bars = {"training": _of_steps(record, window)}
    titles = {"training": "the process that trains"}
    names = worker_names(record)[:MOST_ROWS]
    for worker, name in enumerate(names):
        bars[name] = []
        pid = record.pids.get(worker)
        titles[name] = f"{name}, process {pid}" if pid else name
    for worker, bar in _of_workers(record, window):
        if worker < len(names):
            bars[names[worker]].append(bar)
    return [
        Row(
            name,
            titles[name],
            tuple(
                bar
                for what in _KINDS
                for bar in _merge(
                    [b for b in ours if b.what == what], pixel_s, name
                )
            ),
        )
        for name, ours in bars.items()
    ]


def worker_names(record: Record) -> list[str]:
    """Returns the names of all workers, in the order of their indices."""
    workers = int(record.settings.get("workers") or 0)
    seen = int(record.column("worker").max()) + 1 if len(record.spans) else 0
    if not workers and seen <= 1:
        return ["inline"] if seen else []
    return [f"worker {i}" for i in range(max(workers, seen))]


def has_queue(record: Record) -> bool:
    """Returns whether the dataset had a queue of batches built ahead."""
    return record.settings.get("workers") != 0


def epochs(record: Record) -> list[tuple[str, float, float]]:
    """Returns the name, beginning and end of each epoch with recorded steps."""
    found: list[tuple[str, float, float]] = []
    before: Step | None = None
    for step in record.steps:
        if before and (before.phase, before.epoch) == (step.phase, step.epoch):
            found[-1] = (*found[-1][:2], step.ended_s)
        else:
            name = {
                "train": f"epoch {step.epoch + 1}",
                "validation": f"validation {step.epoch + 1}",
            }.get(step.phase, step.phase)
            found.append((name, step.began_s, step.ended_s))
        before = step
    return found


def asked_s(record: Record) -> npt.NDArray[np.float64]:
    """Returns the time at which training requested each batch."""
    asked: npt.NDArray[np.float64] = record.column(
        "delivered_s"
    ) - record.column("waited_s")
    return asked


def _main_phase(record: Record) -> str:
    phases = {step.phase for step in record.steps}
    for finding in record.summary.findings[:1]:
        if finding.phase == "Validation" and "validation" in phases:
            return "validation"
    return "train" if "train" in phases else next(iter(phases), "")


def _steps_in_view(record: Record, steps: list[Step]) -> int:
    usual_s = float(np.median([s.ended_s - s.began_s for s in steps]))
    builds = record.column("built_s") - record.column("began_s")
    build_s = float(np.median(builds)) if len(builds) else 0.0
    wanted = _BUILDS * build_s / max(usual_s, 1e-9)
    return int(min(max(_STEPS, wanted), _MOST_STEPS))


def _earliest(steps: list[Step]) -> str:
    """Returns the title of the timeline that shows the first recorded steps."""
    return "the earliest kept" if steps[0].number > 0 else "the beginning"


def _cut(
    name: str, steps: list[Step], first: int, anchor: int, count: int
) -> Window:
    """Returns a window around `anchor`, cut at long pauses between steps."""
    shown = steps[first : first + count]
    anchor -= first
    lengths = [step.ended_s - step.began_s for step in shown]
    limit_s = len(shown) / 2 * float(np.median(lengths))
    breaks = [
        place
        for place in range(1, len(shown))
        if shown[place].began_s - shown[place - 1].ended_s > limit_s
    ]
    begin = max((b for b in breaks if b <= anchor), default=0)
    end = min((b for b in breaks if b > anchor), default=len(shown))
    return Window(name, shown[begin].began_s, shown[end - 1].ended_s)


def _first_s(record: Record, steps: list[Step]) -> float:
    """Returns the start time of the first step, or of an earlier build."""
    begin_s = steps[0].began_s
    if len(record.spans) and len(record.spans) == _batches(record):
        return min(begin_s, float(record.column("began_s").min()))
    return begin_s


def _batches(record: Record) -> int:
    """Returns the number of delivered batches of all epochs and validations."""
    summary = record.summary
    return sum(e.batches for e in (*summary.epochs, *summary.validations))


def _without_steps(record: Record) -> tuple[Window, ...]:
    latest = record.spans[-_MOST_STEPS:]
    if not len(latest):
        return ()
    begin_s = float(latest[:, _BEGAN].min())
    end_s = float(latest[:, _DELIVERED].max())
    return (
        (Window("the latest batches", begin_s, end_s),)
        if end_s > begin_s
        else ()
    )


_BEGAN = Span._fields.index("began_s")
_DELIVERED = Span._fields.index("delivered_s")


def activity(step: Step) -> str:
    """Returns "compile" if Keras compiled in a step, otherwise "compute"."""
    return "compile" if step.compiled else "compute"


def waits(
    record: Record,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns each step's seconds of waiting, and of slowdown by builds.

    While the host waits for a batch, the device may still compute: this part
    of a wait belongs to the steps. And builds may slow down the steps beside
    them: this counts as waiting. Both are known of a whole epoch, and are
    divided among its steps.

    Returns:
        For each step, its seconds of waiting for a batch, and the seconds by
        which builds slow it down.
    """
    steps = record.steps
    waited = np.array([step.waited_s for step in steps])
    slowed = np.zeros(len(steps))
    places: dict[tuple[str, int], list[int]] = {}
    for place, step in enumerate(steps):
        if step.number >= 0:
            places.setdefault((step.phase, step.epoch), []).append(place)
    for epoch in record.summary.phases:
        mine = places.get((epoch.phase, epoch.epoch))
        if not mine:
            continue
        first, last = steps[mine[0]], steps[mine[-1]]
        kept = 1.0 - first.number / (last.number + last.calls)
        waited_s = kept * (epoch.waited_s - epoch.slowed_s)
        waited[mine] *= min(1.0, waited_s / max(waited[mine].sum(), 1e-9))
        slowed[mine] = _slowed([steps[i] for i in mine], epoch, kept)
    return waited, slowed


def _slowed(
    steps: list[Step], epoch: EpochHealth, kept: float
) -> npt.NDArray[np.float64]:
    """Splits the time by which builds slowed an epoch among its steps."""
    beside = [not (step.compiled or step.sampled) for step in steps]
    own = np.array([step.own_s for step in steps]) * beside
    need = np.nan_to_num(epoch.step_s * np.array([s.calls for s in steps]))
    extra = np.maximum(own - need, 0.0)
    slowed_s = kept * epoch.slowed_s
    if extra.sum() < slowed_s:
        extra = own
    most_s = float(extra.sum())
    extra *= min(slowed_s, most_s) / max(most_s, 1e-9)
    return extra


def _of_steps(record: Record, window: Window) -> list[Bar]:
    bars = []
    for step, waited_s, slowed_s in zip(
        record.steps, *waits(record), strict=True
    ):
        if step.ended_s < window.begin_s or step.began_s > window.end_s:
            continue
        title = f"step {step.number} of {step.phase} {step.epoch + 1}: "
        if step.number < 0:
            title = "before the first step: "
        if step.calls > 1:
            title = f"{step.calls} steps from {title.removeprefix('step ')}"
        turn_s = min(step.began_s + waited_s, step.ended_s)
        ended_s = max(turn_s, step.ended_s - step.excluded_s)
        own_s = max(0.0, ended_s - turn_s - slowed_s)
        bars += [
            Bar(
                "wait",
                step.began_s,
                turn_s,
                1.0,
                f"{title}waits {formatting.duration(waited_s)} for data",
            ),
            Bar(
                activity(step),
                turn_s,
                turn_s + own_s,
                1.0,
                f"{title}{activity(step)}s {formatting.duration(own_s)}",
            ),
            Bar(
                "slowed",
                turn_s + own_s,
                ended_s,
                1.0,
                f"{title}builds slow it down by "
                f"{formatting.duration(ended_s - turn_s - own_s)}",
            ),
        ]
    return _clip(bars, window)


def _of_workers(record: Record, window: Window) -> Iterator[tuple[int, Bar]]:
    ended = np.maximum(record.column("stored_s"), record.column("built_s"))
    seen = (ended > window.begin_s) & (record.column("began_s") < window.end_s)
    for values in record.spans[seen]:
        span = Span(*values)
        title = f"batch {span.batch:.0f}: "
        bars = [
            Bar(
                "build",
                span.began_s,
                span.built_s,
                1.0,
                f"{title}built in {_between(span.began_s, span.built_s)}",
            ),
            Bar(
                "copy",
                span.built_s,
                span.stored_s,
                1.0,
                f"{title}{formatting.size(span.nbytes)} copied in "
                f"{_between(span.built_s, span.stored_s)}",
            ),
        ]
        for bar in _clip(bars, window):
            yield int(span.worker), bar
    for loss in record.lost:
        back_s = _back_s(record, loss.worker, loss.at_s)
        bar = Bar("lost", loss.at_s, back_s, 1.0, f"process {loss.pid} lost")
        for clipped in _clip([bar], window):
            yield loss.worker, clipped


def _back_s(record: Record, worker: int, lost_s: float) -> float:
    """Returns when the replacement of a lost worker began its first build."""
    began = record.column("began_s")
    later = began[(record.column("worker") == worker) & (began > lost_s)]
    return float(later.min()) if len(later) else record.ended_s


def _between(begin_s: float, end_s: float) -> str:
    return formatting.duration(max(0.0, end_s - begin_s))


def _clip(bars: list[Bar], window: Window) -> list[Bar]:
    clipped = [
        bar._replace(
            begin_s=max(bar.begin_s, window.begin_s),
            end_s=min(bar.end_s, window.end_s),
        )
        for bar in bars
    ]
    return [bar for bar in clipped if bar.end_s > bar.begin_s]


def _merge(bars: list[Bar], pixel_s: float, name: str) -> Iterator[Bar]:
    """Merges bars that are narrower than a pixel with adjacent bars."""
    group: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.begin_s):
        if group and not (
            bar.begin_s - group[-1].end_s < pixel_s
            and min(_length(bar), _length(group[-1])) < pixel_s
        ):
            yield _joined(group, name)
            group = []
        group.append(bar)
    if group:
        yield _joined(group, name)


def _joined(group: list[Bar], name: str) -> Bar:
    if len(group) == 1:
        return group[0]
    what = group[0].what
    begin_s, end_s = group[0].begin_s, max(bar.end_s for bar in group)
    filled_s = sum(_length(bar) for bar in group)
    return Bar(
        what,
        begin_s,
        end_s,
        min(1.0, filled_s / (end_s - begin_s)),
        f"{name}: {formatting.duration(filled_s)} of "
        f"{formatting.duration(end_s - begin_s)} {what}, {len(group)} times",
    )


def _length(bar: Bar) -> float:
    return bar.end_s - bar.begin_s
