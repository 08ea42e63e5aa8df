"""`EpochProgress` knows where Keras stands, whatever events Keras sends.

The state machine plays Keras's `EpochIterator`: a probe or none, a reset, and
epochs over data of some length, with or without `steps_per_epoch` and
`steps_per_execution`, some of which fetch a batch ahead of the step.
"""

from __future__ import annotations

import hypothesis.stateful as stateful
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from places import FULL

from keras_fastdata.keras_bridge.fit_progress import EpochProgress, FitPhase

NOT_STARTED, PROBE, BETWEEN, IN_EPOCH = FitPhase


def probed():
    """The progress behind a probe of one batch, and the reset."""
    progress = EpochProgress()
    progress.begin_epoch()
    progress.begin_iterator()
    progress.count_batch()
    assert progress.end_epoch(is_reset=True)
    return progress


def fetch(progress, batches):
    for _ in range(batches):
        progress.count_batch()


# -- the phases --------------------------------------------------------------


def test_a_fit_of_a_model_that_is_built_starts_with_the_reset():
    progress = EpochProgress()
    assert progress.phase is NOT_STARTED
    assert progress.end_epoch(is_reset=True)
    assert progress.phase is BETWEEN


def test_what_is_fetched_before_the_reset_is_a_probe():
    progress = EpochProgress()
    progress.begin_epoch()
    assert progress.phase is PROBE
    assert progress.is_within_epoch
    assert not progress.has_started
    assert progress.end_epoch(is_reset=True)
    assert progress.phase is BETWEEN


def test_only_the_first_reset_undoes_a_probe():
    progress = probed()
    progress.begin_epoch()
    assert progress.phase is IN_EPOCH
    assert not progress.end_epoch(is_reset=False)
    # Validation data is reset before each of its epochs.
    assert not progress.end_epoch(is_reset=True)
    assert progress.phase is BETWEEN


def test_a_prediction_without_a_probe_ends_and_undoes_nothing():
    progress = EpochProgress()
    progress.begin_epoch()
    assert not progress.end_epoch(is_reset=False)
    assert progress.phase is NOT_STARTED


def test_an_evaluation_that_was_stopped_is_reset_amid_its_epoch():
    progress = probed()
    progress.begin_epoch()
    assert not progress.end_epoch(is_reset=True)
    assert progress.phase is BETWEEN


@pytest.mark.parametrize("make", [EpochProgress, probed])
def test_an_epoch_that_has_not_ended_cannot_begin_again(make):
    progress = make()
    progress.begin_epoch()
    phase = progress.phase
    with pytest.raises(ValueError, match="called twice without"):
        progress.begin_epoch()
    assert progress.phase is phase


def test_an_epoch_may_end_twice():
    # PyTorch with `steps_per_execution`, where the last execution is short.
    progress = probed()
    progress.begin_epoch()
    progress.end_epoch(is_reset=False)
    assert not progress.end_epoch(is_reset=False)
    assert progress.phase is BETWEEN


# -- the batches -------------------------------------------------------------


def test_without_steps_nothing_lags_behind_at_the_end_of_an_epoch():
    progress = probed()
    progress.begin_epoch()
    progress.begin_iterator()
    fetch(progress, 3)
    assert progress.lag(2) == 1
    progress.end_epoch(is_reset=False)
    assert progress.lag(None) == 0


def test_with_steps_an_epoch_goes_on_where_the_one_before_has_ended():
    progress = probed()
    progress.begin_epoch(3)
    progress.begin_iterator()
    fetch(progress, 4)  # one ahead
    progress.end_epoch(is_reset=False)
    assert progress.lag(None) == 1
    progress.begin_epoch(3, continues=True)
    assert progress.delivered_now == 1
    fetch(progress, 1)
    assert progress.lag(1) == 1


def test_steps_count_in_whole_executions():
    progress = probed()
    progress.begin_epoch(4, 3)
    progress.begin_iterator()
    fetch(progress, 6)
    progress.end_epoch(is_reset=False)
    assert progress.trained == 6


def test_an_iterator_begun_ahead_of_its_epoch_has_trained_on_nothing():
    progress = probed()
    progress.begin_epoch(2)
    progress.begin_iterator()
    fetch(progress, 2)
    progress.begin_iterator()  # of the next epoch
    fetch(progress, 1)
    progress.end_epoch(is_reset=False)
    assert (progress.delivered, progress.trained) == (1, 0)


# -- all sequences -----------------------------------------------------------


class KerasPlayed(stateful.RuleBasedStateMachine):
    """Keras, over one dataset; and what was fetched and trained on in truth."""

    @stateful.initialize(
        length=st.integers(1, 9),
        steps=st.none() | st.integers(1, 6),
        execution=st.integers(1, 3),
        ahead=st.integers(0, 1),
    )
    def begin(self, length, steps, execution, ahead):
        self.progress = EpochProgress()
        self.length, self.steps = length, steps
        self.execution, self.ahead = execution, ahead
        self.is_reset = False
        self.drop_iterator()

    def drop_iterator(self):
        self.has_iterator = False
        self.steps_seen = 0

    def begin_epoch(self):
        continues = bool(self.steps and self.steps_seen and self.has_iterator)
        self.progress.begin_epoch(
            self.steps, self.execution, continues=continues
        )
        if not continues:
            self.drop_iterator()

    def execute(self):
        """One call of the train function."""
        if not self.has_iterator:
            self.has_iterator = True
            self.fetched = self.trained = 0
            self.progress.begin_iterator()
        self.steps_seen += self.execution
        self.trained = min(self.trained + self.execution, self.length)
        while self.fetched < min(self.trained + self.ahead, self.length):
            self.fetched += 1
            self.progress.count_batch()

    def play(self, executions=None):
        """An epoch: all of it, or as many executions."""
        self.begin_epoch()
        before = self.trained if self.has_iterator else 0
        epoch_steps = self.steps or self.length
        for step in range(0, epoch_steps, self.execution):
            if self.steps_seen >= self.length or executions == 0:
                break
            self.execute()
            if executions is not None:
                executions -= 1
            assert self.progress.delivered == self.fetched
            if self.steps_seen <= self.length:
                done = step + self.execution
                assert done == self.trained - before
                assert self.progress.lag(done) == self.fetched - self.trained

    @stateful.precondition(lambda self: not self.is_reset)
    @stateful.rule(executions=st.integers(0, 2))
    def probe(self, executions):
        self.play(executions)
        assert self.progress.phase is PROBE
        self.reset()

    @stateful.rule()
    def reset(self):
        first, self.is_reset = not self.is_reset, True
        self.drop_iterator()
        assert self.progress.end_epoch(is_reset=True) is first
        assert self.progress.phase is BETWEEN

    @stateful.rule()
    def epoch(self):
        self.play()
        assert self.progress.phase is (IN_EPOCH if self.is_reset else PROBE)
        runs_on = self.steps and self.steps_seen < self.length
        assert self.progress.end_epoch(is_reset=False) is False
        assert self.progress.phase is (
            BETWEEN if self.is_reset else NOT_STARTED
        )
        if runs_on:
            assert self.progress.lag(None) == self.fetched - self.trained
        else:
            assert self.progress.lag(None) == 0
            self.drop_iterator()

    @stateful.precondition(lambda self: self.is_reset)
    @stateful.rule(executions=st.integers(0, 2))
    def stopped_epoch(self, executions):
        self.play(executions)
        assert self.progress.is_within_epoch
        self.reset()


KerasPlayed.TestCase.settings = settings(max_examples=200 if FULL else 50)
test_every_sequence_of_keras = KerasPlayed.TestCase
