"""The account of a `fit`: each second belongs to one part."""

from __future__ import annotations

import pytest

from keras_fastdata.health.account import EpochTimes, FitTimer
from keras_fastdata.metrics.formatting import wrapped


def test_the_parts_of_a_fit_add_up_to_its_time():
    timer = FitTimer(100.0)
    timer.end_start(110.0, first_batch_s=8.0)
    timer.add_saving(0.25)
    timer.end_callbacks(111.25)
    times = EpochTimes(0.5, wait_s=3.0, hook_s=1.0, compiling_s=2.0)
    timer.add_saving(0.5)
    timer.end_steps(120.75, times, validates=True)
    timer.end_validation(126.75, EpochTimes(1.0, wait_s=2.0, compiling_s=1.0))
    timer.end_callbacks(127.75)
    aside = EpochTimes(0.5, wait_s=2.0, excluded_s=1.0)
    timer.end_steps(131.75, aside, validates=False)
    account = timer.account
    assert account.total_s == pytest.approx(31.75)
    assert account.first_batch_s == pytest.approx(8.5)  # and one wait
    assert account.compiling_s == pytest.approx(2.0 + 2.0 + 1.0)
    assert account.steps_s == pytest.approx(3.0 + 1.0)
    assert account.waiting_s == pytest.approx(2.5 + 2.0)
    assert account.validation_s == pytest.approx(3.0)
    assert account.validation_wait_s == pytest.approx(2.0)
    assert account.hooks_s == pytest.approx(1.0)
    assert account.saving_s == pytest.approx(0.25 + 0.5)
    assert account.callbacks_s == pytest.approx(1.0 + 1.0 + 1.0)


def test_waiting_is_no_longer_than_the_steps_and_their_waits_took():
    timer = FitTimer(0.0)
    timer.end_start(1.0, first_batch_s=1.0)
    timer.end_steps(3.0, EpochTimes(0.5, wait_s=2.5), validates=False)
    timer.end_validation(4.0, EpochTimes(0.5, wait_s=2.5))
    account = timer.account
    assert account.total_s == pytest.approx(4.0)
    assert account.first_batch_s == pytest.approx(1.5)
    assert account.waiting_s == pytest.approx(1.5)
    assert account.validation_wait_s == pytest.approx(1.0)
    assert account.steps_s == account.validation_s == pytest.approx(0.0)


def test_the_text_has_the_whole_and_the_longest_part_first():
    timer = FitTimer(0.0)
    timer.end_start(9.0, first_batch_s=8.0)
    assert str(timer.account) == (
        "9.0 s in all: start and first batch 8.0 s, compiling 1.0 s."
    )


@pytest.mark.parametrize("tied", ["17.4 s", "300 ms", "line 22"])
def test_no_line_ends_between_a_number_and_what_it_belongs_to(tied):
    for words in range(9, 16):
        text = f"{'word ' * words}{tied}: {'word ' * words}"
        assert any(tied in line for line in wrapped(text).splitlines())


def test_a_constructor_call_stays_on_one_line():
    call = "`Photos(..., workers=16, use_multiprocessing=True)`"
    lines = wrapped(f"{'word ' * 13}{call}: {'word ' * 13}").splitlines()
    assert any(call in line for line in lines)
    assert max(map(len, lines)) <= 80
