"""A fetch by itself: which phase follows which."""

from __future__ import annotations

import pytest
from fake_pool import FakePool

from keras_fastdata.engine.fetcher import Fetch, Phase


def _in(*phases):
    fetch = Fetch(pause_after=False, is_thorough=False)
    for phase in phases:
        fetch.move(phase)
    return fetch


def test_the_first_step_looks_for_the_batch_and_later_steps_change_nothing():
    fetch, pool = _in(), FakePool(1)
    fetch.begin_step(pool)
    assert (fetch.phase, fetch.workers) == (Phase.LOOKING, pool)
    fetch.move(Phase.AWAITING)
    fetch.begin_step(pool)
    assert fetch.phase is Phase.AWAITING


@pytest.mark.parametrize(
    "phases",
    [
        (),
        (Phase.LOOKING, Phase.AWAITING, Phase.LOOKING),
        (Phase.LOOKING, Phase.PAUSING),
        (Phase.LOOKING, Phase.DRAINING, Phase.BUILDING, Phase.DRAINING),
    ],
)
def test_a_fetch_may_end_in_every_phase_and_does_nothing_after_it(phases):
    with _in(*phases) as fetch:
        pass
    assert fetch.phase is Phase.ENDED
    for phase in Phase:
        with pytest.raises(AssertionError):
            fetch.move(phase)


@pytest.mark.parametrize(
    ("phases", "forbidden"),
    [
        ((), Phase.AWAITING),
        ((Phase.LOOKING,), Phase.BUILDING),
        ((Phase.LOOKING, Phase.AWAITING), Phase.PAUSING),
        ((Phase.LOOKING, Phase.PAUSING), Phase.DRAINING),
        ((Phase.LOOKING, Phase.DRAINING), Phase.LOOKING),
    ],
)
def test_a_transition_that_is_not_in_the_table_is_refused(phases, forbidden):
    fetch = _in(*phases)
    with pytest.raises(AssertionError):
        fetch.move(forbidden)
