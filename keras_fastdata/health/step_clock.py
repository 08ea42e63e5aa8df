"""Measures the time of training steps, without their waits for data.

    on_train_batch_begin i ------------------ on_train_batch_begin i + 1
            [ wait for a batch | compute, callbacks, progress bar ]

How long the *host* waits inside our iterators is not the whole truth. Where
steps are dispatched asynchronously (JAX; any accelerator) the device may have
been computing all the while. And builds slow steps down that run beside them:
they take its cores, its memory bandwidth, Python's lock. So some steps are
sampled: the workers rest, the device is synchronized before and after, and
what remains without the wait is what a step needs by itself. Then

    free_s    = what the epoch would take if its data cost no time
    data_wait = 1 - free_s / wall_s

Steps that follow each other closely are looked at together, one group in every
`Recorder.interval_s`; samples are single steps.

Sampling disturbs: meanwhile the queue fills up, or runs dry. So it becomes
rarer as an epoch goes on, and to the wall time a step that was sampled counts
as much as the others do on average. Steps that compile (the first; the first
with another shape) are left out of both. The backend says which these are
(JAX, PyTorch), or else their length and the CPU time of the thread do: a long
step in which the thread hardly computed has waited, such as for Python's lock.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from keras_fastdata.metrics.recorder import Recorder
from keras_fastdata.metrics.sampling import SamplingState

_SAMPLES = 32  # remembered
_FRESH_SAMPLES = 3  # of an epoch: what it needed is known from them alone
_WARMING_UP = 2  # epochs: caches, clocks and workers settle meanwhile
_RARE = 100  # times what sampling a step costs is the time until the next one
_PAUSE_S = 0.25  # and at least this: workers take a moment to be in step again;
_ENOUGH = 4  # and longer, the more than these an epoch has already
_CONTENDED = 0.8  # of what steps took: they must have been slowed down
_COMPILING = 10  # times what a step needs, and
_COMPILING_S = 0.05  # this much more: it must have been compiling
_MOSTLY = 0.5  # of a step: it was compiling, if the backend says so
_COMPUTING = 0.25  # of a step: its thread computed more, if it was compiling
_LONG_STEPS = 1024  # remembered one by one, to tell which compiled


class Step(NamedTuple):
    """One call of the train function, or several short calls in a row.

    Moments are those of `time.monotonic`.

    Attributes:
        phase: "train", "validation", "evaluate" or "predict".
        epoch: As Keras counts, from 0.
        number: Of its first batch in the epoch, from 0.
        began_s: When it began.
        ended_s: When the next one that was looked at began, or the epoch
            ended.
        waited_s: How long it waited for data meanwhile.
        sampled: Whether the device had done all before and after it.
        calls: How many these were.
        compiled: Whether one of them compiled, as the end of the epoch showed.
        excluded_s: Its seconds that belong to no step, such as saving.
    """

    phase: str
    epoch: int
    number: int
    began_s: float
    ended_s: float
    waited_s: float
    sampled: bool
    calls: int = 1
    compiled: bool = False
    excluded_s: float = 0.0

    @property
    def own_s(self) -> float:
        """The seconds of the step without the wait for data."""
        took_s = self.ended_s - self.began_s
        return max(0.0, took_s - self.waited_s - self.excluded_s)


@dataclasses.dataclass(frozen=True)
class EpochTiming:
    """The durations of the steps of one epoch or validation.

    Attributes:
        wall_s: Wall time, without what compiling and sampling took.
        free_s: What it would have been, had every batch been there at once.
        step_s: What one step needs by itself; NaN where it is not known.
        compiling_s: Time of steps that compiled.
        compiled: The numbers of these steps.
    """

    wall_s: float
    free_s: float
    step_s: float
    compiling_s: float
    compiled: frozenset[int] = frozenset()


class StepClock:
    """Measures the steps of one phase, such as "train", in one thread.

    Args:
        phase: What kind of steps they are.
        recorder: What knows how long that thread has waited for data.
        synchronize: Waits until the device has done all it was asked for;
            `None` where steps end only when they have been computed.
        fetches_ahead: Whether the batch of a step is fetched before
            `on_train_batch_begin`.
        tell: Called with each step that has ended.
        read_compiling_s: Returns how many seconds the backend has compiled
            so far; `None` where the backend does not tell.

    Attributes:
        state: Whether the step under way is measured by itself. The recorder
            shows it to whoever fetches batches.
    """

    def __init__(
        self,
        phase: str,
        recorder: Recorder,
        synchronize: Callable[[], None] | None,
        fetches_ahead: bool,
        tell: Callable[[Step], None],
        read_compiling_s: Callable[[], float] | None = None,
    ) -> None:
        self._tells_compiling = read_compiling_s is not None
        self._read_compiling_s = read_compiling_s or (lambda: 0.0)
        self._phase = phase
        self._recorder = recorder
        self._tell = tell
        self._asynchronous = synchronize is not None
        self._synchronize = synchronize or (lambda: None)
        self._samples: collections.deque[float] = collections.deque(
            maxlen=_SAMPLES
        )
        self._fetches_ahead = fetches_ahead
        self._epoch_timings = 0
        self._next_s = 0.0  # when a sample is due again
        self._running = False
        self._look_s = 0.0  # when to look at what has become of steps
        self.state = SamplingState.OFF

    def _move_to(self, state: SamplingState) -> None:
        """Changes the state; no other method changes it."""
        self.state = state

    def begin(self, epoch: int) -> None:
        """Starts the measurement of an epoch or a validation."""
        self._synchronize()
        self._mark = self._read(time.monotonic())
        self._sums = _Sums(epoch, self._mark)
        self._epoch_timings += 1
        self._number: int | None = None  # of the step under way
        self._calls = 0  # of the training function, since that began
        self._unmet = 0  # of those, since host and device have met
        self._look_s = 0.0
        self._move_to(SamplingState.OFF)
        self._running = True

    def step(self, number: int) -> None:
        """Notes the start of a step, which also ends the previous step."""
        if time.monotonic() < self._look_s:
            self._calls += 1
            return
        if not self._running:
            return
        due = self._is_due()
        # Where batches are fetched ahead, what follows a fetch still belongs
        # to the step before: workers rest from the fetch that begins a sample
        # to the one that ends it.
        next_state = SamplingState.OFF
        if due and self._fetches_ahead and self.state is SamplingState.OFF:
            next_state = SamplingState.PAUSING
        elif due:
            next_state = SamplingState.ISOLATED
        self._end_step(next_state)
        self._number, self._calls = number, 1
        if due:
            self._look_s = 0.0  # at the very next step
        else:
            self._look_s = self._mark.at_s + self._recorder.interval_s

    @property
    def at_s(self) -> float:
        """When the step under way began, or the measurement ended."""
        return self._mark.at_s

    def end(self, *, is_broken_off: bool = False) -> EpochTiming:
        """Ends the measurement, and returns the durations of the steps.

        The step under way counts, unless an exception has broken it off.
        """
        if not is_broken_off:
            self._end_step(SamplingState.OFF, last=True)
        self._running = False
        self._look_s = 0.0
        need_s = self._need_s()
        sums = self._sums
        compiled = []
        if not math.isnan(need_s):
            limit_s = _compiling_limit_s(need_s)
            compiled = [
                step
                for step in sums.long
                if step.is_known or step.host_s > limit_s
            ]
        compiling_s = sum(step.host_s for step in compiled)
        own_s = sums.own_s - compiling_s
        steps = sums.count - sum(step.calls for step in compiled)
        # Neither an estimate nor a noisy sample makes an epoch longer.
        whole_s = self._mark.at_s - sums.began.at_s - compiling_s
        whole_s -= self._mark.excluded_s - sums.began.excluded_s
        wall_s = self._undisturbed_s(whole_s, compiled)
        if steps and not math.isnan(need_s):
            free_s = sums.before_s + steps * need_s
            if self._asynchronous or free_s < _CONTENDED * own_s:
                own_s = free_s
        if self._asynchronous:
            # Of the few steps of a short epoch, those may have been sampled
            # at whose end the host met the device.
            wall_s = max(wall_s, own_s)
        wall_s = min(wall_s, whole_s)
        numbers = frozenset(step.number for step in compiled)
        return EpochTiming(wall_s, own_s, need_s, compiling_s, numbers)

    def _undisturbed_s(self, wall_s: float, compiled: list[_LongStep]) -> float:
        """Estimates what the wall time `wall_s` would be without sampling."""
        sums, mark = self._sums, self._mark
        usual = sums.count - sums.disturbed
        usual -= sum(step.calls for step in compiled)
        if usual <= 0:
            return wall_s - (mark.quiesced_s - sums.began.quiesced_s)
        usual_s = sums.usual_s - sum(step.whole_s for step in compiled)
        # But no more was added than the time that workers rested, or waited
        # for each other to: a batch that was late by more was late in itself.
        least_s = sums.disturbed_s - sums.quiet_s - sums.resting_s
        most_s = sums.disturbed_s + sums.quiet_s
        would_be_s = min(max(sums.disturbed * usual_s / usual, least_s), most_s)
        return wall_s + would_be_s - sums.disturbed_s

    def before_wait(self) -> None:
        """Waits for the device if the current step is being sampled."""
        if self.state is SamplingState.ISOLATED:
            self._synchronize()

    def interrupt(self) -> None:
        """Cancels the sampling of the current step."""
        self._move_to(SamplingState.OFF)

    def _is_due(self) -> bool:
        """Returns whether to sample the next step."""
        if self._number is None:
            return False  # the first compiles, or its batch is late
        is_isolated = self.state is SamplingState.ISOLATED
        if (
            self._epoch_timings <= _WARMING_UP
            and self._sums.fresh + is_isolated < _FRESH_SAMPLES
        ):
            return True
        return not is_isolated and time.monotonic() >= self._next_s

    def _read(self, at_s: float) -> _ClockReading:
        recorder = self._recorder
        return _ClockReading(
            at_s,
            recorder.waited_s,
            recorder.excluded_s,
            recorder.quiesced_s,
            recorder.batch_stats.hook_s,
            self._read_compiling_s(),
            0.0 if self._tells_compiling else time.thread_time(),
        )

    def _end_step(
        self, next_state: SamplingState, *, last: bool = False
    ) -> None:
        host_s = now_s = time.monotonic()
        sums, before = self._sums, self._mark
        is_isolated = self.state is SamplingState.ISOLATED
        met = is_isolated or next_state is SamplingState.ISOLATED or last
        if met:
            self._synchronize()
            now_s = time.monotonic()
        self._mark = mark = self._read(now_s)
        excluded_s = mark.excluded_s - before.excluded_s
        waited_s = mark.no_step_s - before.no_step_s
        own_s = max(0.0, now_s - before.at_s - waited_s)
        sums.own_s += own_s
        if self._number is None:
            sums.before_s += own_s
        else:
            sums.count += self._calls
            self._tell(
                Step(
                    self._phase,
                    sums.epoch,
                    self._number,
                    before.at_s,
                    now_s,
                    mark.waited_s - before.waited_s,
                    is_isolated,
                    self._calls,
                    excluded_s=excluded_s,
                )
            )
            quiesced_s = mark.quiesced_s - before.quiesced_s
            compiling_s = mark.compiling_s - before.compiling_s
            compiles = compiling_s > _MOSTLY * own_s
            if is_isolated and not compiles:
                self._samples.append(own_s)
                sums.fresh += 1
                cost_s = _RARE * (own_s + quiesced_s)
                pause_s = _PAUSE_S * max(1.0, sums.fresh / _ENOUGH)
                self._next_s = now_s + max(pause_s, cost_s)
            self._unmet += self._calls
            whole_s = own_s + waited_s - excluded_s
            whole_s -= mark.hook_s - before.hook_s  # no other step has one
            if self.state is not SamplingState.OFF and not compiles:
                sums.disturbed += self._calls
                sums.disturbed_s += whole_s
                sums.resting_s += quiesced_s
                sums.quiet_s += own_s
            else:
                sums.usual_s += whole_s
                step_s = host_s - before.at_s - waited_s
                computed_s = mark.cpu_s - before.cpu_s
                if compiling_s or computed_s > _COMPUTING * step_s:
                    known_s = min(compiling_s, step_s) if compiles else 0.0
                    self._note_if_long(step_s, whole_s, known_s)
        if met:
            self._unmet = 0
        self._move_to(next_state)

    def _need_s(self) -> float:
        """Returns a trimmed mean of sampled step times; NaN without samples."""
        if not self._samples:
            return math.nan
        samples, fresh = list(self._samples), self._sums.fresh
        if fresh >= _FRESH_SAMPLES:
            samples = samples[-fresh:]
        ordered = sorted(samples)
        third = len(ordered) // 3
        return statistics.fmean(ordered[third : len(ordered) - third])

    def _note_if_long(
        self, host_s: float, whole_s: float, compiling_s: float
    ) -> None:
        """Stores a step that took long, or in which Keras compiled."""
        # It is the host that compiles; waiting for the device is not it, for
        # all that it was asked for since they met.
        if host_s > _COMPILING_S and self._asynchronous and self._samples:
            host_s -= self._unmet * self._need_s()
        host_s = max(host_s, compiling_s)
        is_known = compiling_s > 0
        if host_s <= _COMPILING_S and not is_known:
            return
        long = self._sums.long
        assert self._number is not None
        long.append(
            _LongStep(host_s, whole_s, self._calls, self._number, is_known)
        )
        if len(long) > _LONG_STEPS:
            limit_s = _compiling_limit_s(self._need_s())
            long[:] = [s for s in long if s.is_known or s.host_s > limit_s]
            del long[_LONG_STEPS // 2 :]


class _ClockReading(NamedTuple):
    """The time, and the total seconds so far that belong to no step."""

    at_s: float
    waited_s: float
    excluded_s: float
    quiesced_s: float
    hook_s: float
    compiling_s: float
    cpu_s: float  # of the thread; 0 if the backend tells what it compiles

    @property
    def no_step_s(self) -> float:
        """The seconds that do not count as part of any step."""
        return self.waited_s + self.excluded_s + self.quiesced_s


@dataclasses.dataclass
class _Sums:
    """Totals over the steps of one epoch or validation.

    Attributes:
        epoch: As Keras counts, from 0.
        began: When it did.
        count: Of steps.
        fresh: How many of them were sampled.
        own_s: Their time, without the waits.
        before_s: Of that, before the first of them.
        usual_s: Of those not disturbed, with their waits.
        disturbed: How many were sampled, or ended quietly.
        disturbed_s: Time of these, with their waits.
        resting_s: Of that, until the workers rested.
        quiet_s: What these took besides, without the waits.
        long: Those that may have compiled.
    """

    epoch: int
    began: _ClockReading
    count: int = 0
    fresh: int = 0
    own_s: float = 0.0
    before_s: float = 0.0
    usual_s: float = 0.0
    disturbed: int = 0
    disturbed_s: float = 0.0
    resting_s: float = 0.0
    quiet_s: float = 0.0
    long: list[_LongStep] = dataclasses.field(default_factory=list)


class _LongStep(NamedTuple):
    """Durations of one or more long steps in which Keras possibly compiled.

    `host_s` is without waits for data, `whole_s` is with these waits. `number`
    is that of the first of them. `is_known` if the backend said that most of
    their time went into compiling.
    """

    host_s: float
    whole_s: float
    calls: int
    number: int
    is_known: bool


def _compiling_limit_s(need_s: float) -> float:
    return max(_COMPILING * need_s, need_s + _COMPILING_S)
