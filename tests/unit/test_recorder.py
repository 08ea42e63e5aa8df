"""What is remembered of batches, and in how much memory."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_fastdata.engine.settings import Settings
from keras_fastdata.metrics import recorder
from keras_fastdata.metrics.quantiles import Distribution
from keras_fastdata.metrics.recorder import Recorder, Skipped, Span

MEGABYTE = 1_000_000


def span(batch=0, build_s=0.01, retries=0, **fields):
    """A batch that took so long to build; 1 ms to store, and 1 to open."""
    values = dict.fromkeys(Span._fields, 0.0)
    values.update(
        batch=batch,
        retries=retries,
        nbytes=1000,
        depth=2,
        began_s=1.0,
        built_s=1.0 + build_s,
        stored_s=1.001 + build_s,
        opened_s=0.001,
        cpu_s=build_s / 2,
        **fields,
    )
    return Span(**values)


# -- quantiles ---------------------------------------------------------------


@given(
    st.lists(st.floats(1.1e-6, 8e4), min_size=1, max_size=200),
    st.floats(0, 1),
)
def test_a_quantile_is_within_one_percent_of_a_value_seen(values, share):
    distribution = Distribution()
    distribution.add(np.array(values))
    exact = np.quantile(values, share, method="inverted_cdf")
    assert distribution.count == len(values)
    assert distribution.quantile(share) == pytest.approx(exact, rel=0.011)


def test_quantiles_do_not_depend_on_the_order_or_the_parts():
    values = np.random.default_rng(0).exponential(0.01, 5000)
    whole, parts = Distribution(), Distribution()
    whole.add(values)
    for part in np.array_split(np.sort(values), 7):
        parts.add(part)
    assert whole.histogram() == parts.histogram()


def test_without_values_a_quantile_is_0():
    assert Distribution().quantile(0.5) == 0.0
    assert Distribution().histogram() == []


def test_values_out_of_range_count_as_the_nearest():
    distribution = Distribution()
    distribution.add(np.array([0.0, 1e-9, 1e9]))
    assert distribution.quantile(0.5) == 0.0
    assert distribution.quantile(1.0) == pytest.approx(1e5, rel=0.03)


# -- a tally -----------------------------------------------------------------


def test_sums_are_those_of_the_batches():
    heard = Recorder()
    heard.add(span(0, waited_s=9.0), 0.5)
    for batch in range(1, 1000):
        heard.add(span(batch), 0.0)
    heard.add(span(1000, build_s=3.0, retries=1), 2.0)
    heard.add_hook(0.25)
    heard.flush()
    batch_stats = heard.batch_stats
    assert heard.batches == batch_stats.batches == 1001
    assert heard.waited_s == 2.75
    assert batch_stats.wait_s == 2.5
    assert batch_stats.hook_s == 0.25
    assert batch_stats.first_wait_s == 0.5
    assert (batch_stats.retried, batch_stats.retried_wait_s) == (1, 2.0)
    assert batch_stats.nbytes == 1_001_000
    assert batch_stats.build_s == pytest.approx(13.0)
    assert batch_stats.cpu_s == pytest.approx(6.5)
    assert batch_stats.store_s == pytest.approx(1.001)
    assert batch_stats.open_s == pytest.approx(1.001)
    assert batch_stats.slowest[0].batch == 1000
    assert batch_stats.slowest[0].waited_s == 2.0
    assert batch_stats.build.quantile(0.5) == pytest.approx(0.01, rel=0.011)


def test_a_new_stretch_begins_with_sums_of_its_own():
    heard = Recorder()
    heard.add(span(), 1.0)
    heard.begin()
    heard.add(span(7), 0.0)
    heard.flush()
    assert heard.batch_stats.batches == 1
    assert heard.batch_stats.wait_s == 0
    assert heard.batches == 2


def test_a_batch_that_was_not_timed_is_counted_and_waited_for():
    heard = Recorder()
    heard.add(None, 0.5)
    heard.flush()
    assert (heard.batches, heard.waited_s) == (1, 0.5)
    assert heard.batch_stats.batches == 0


def test_a_batch_stands_for_those_beside_it_that_were_not_looked_at():
    heard = Recorder(interval_s=0.1)
    short, long = span(0, 0.01, waited_s=9.0), span(1, 0.5)
    for one in (short, None, None, long, None, short, None):
        heard.add(one, 0.25)
    heard.flush()
    batch_stats = heard.batch_stats
    assert batch_stats.batches == 7
    assert batch_stats.wait_s == 7 * 0.25
    assert batch_stats.nbytes == 7000
    # The long one is the only one of its kind.
    assert batch_stats.build_s == pytest.approx(6 * 0.01 + 0.5)
    assert batch_stats.build.count == batch_stats.wait.count == 7
    assert batch_stats.slowest[0].batch == 1
    heard.begin()
    heard.add(long, 0.0)
    heard.add(None, 0.0)
    heard.flush()
    assert heard.batch_stats.batches == 2


@given(st.lists(st.sampled_from("sl-"), max_size=60), st.integers(1, 7))
def test_every_batch_is_stood_for_once(kinds, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_BLOCK", block)
        heard = Recorder(interval_s=0.1)
        for kind in ["s", *kinds]:
            heard.add({"s": span(), "l": span(0, 0.5)}.get(kind), 0.0)
        heard.flush()
    assert heard.batch_stats.batches == 1 + len(kinds)
    assert heard.batch_stats.build.count == 1 + len(kinds)


class Source:
    """A loader whose queue holds 16 batches."""

    settings = Settings(max_queue_size=16)


@pytest.mark.parametrize("most", [16, 37])
def test_the_depth_counts_batches_that_were_not_looked_at(most):
    heard = Recorder(interval_s=1.0)
    source = Source()
    if most == 16:
        heard.attach_source(source, {})
    now_s = recorder.time.monotonic()
    for batch in range(40):
        # All were there, and the queue was long, when the first was asked for.
        one = span(batch)._replace(stored_s=now_s - 1, depth=0)
        heard.add(None if batch % 4 else one, 0.0)
    heard.flush()
    depth = heard.spans()[:, Span._fields.index("depth")]
    counted = [37 - 4 * place for place in range(10)]
    assert depth.tolist() == [min(count, most) for count in counted]


# -- the ring ----------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 511, 8192, 8193, 20_000])
def test_the_latest_spans_are_kept_in_order(count):
    heard = Recorder()
    for batch in range(count):
        heard.add(span(batch), 0.0)
    kept = heard.spans()[:, Span._fields.index("batch")].tolist()
    assert kept == list(range(max(0, count - recorder.SPANS_KEPT), count))


def test_every_span_is_told_once_and_in_order():
    told = []
    heard = Recorder(
        on_spans=lambda spans: told.extend(spans[:, 1].astype(int))
    )
    for batch in range(2000):
        heard.add(span(batch), 0.0)
    heard.flush()
    assert told == list(range(2000))


@pytest.mark.parametrize(
    "count", [50_000, pytest.param(1_000_000, marks=pytest.mark.long)]
)
def test_a_million_batches_take_at_most_ten_megabytes(count):
    one = span()
    gc.collect()
    tracemalloc.start()
    try:
        heard = Recorder()
        for _ in range(count):
            heard.add(one, 0.0)
        heard.flush()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert heard.batch_stats.batches == count
    assert peak < 10 * MEGABYTE


def test_of_many_skipped_batches_the_latest_thousand_are_kept():
    heard = Recorder()
    for index in range(1500):
        heard.skip(Skipped("Data", index, "ValueError"))
    assert heard.skips == 1500
    assert [s.index for s in heard.skipped] == list(range(500, 1500))


# -- who hears ---------------------------------------------------------------


def test_a_recorder_hears_of_its_own_thread_until_it_leaves():
    heard = Recorder()
    here = threading.get_ident()
    recorder.attach(heard)
    assert recorder.current_for(here) is heard
    assert recorder.current_for(here + 1) is None
    recorder.detach(Recorder())
    assert recorder.current_for(here) is heard
    recorder.detach(heard)
    recorder.detach(heard)
    assert recorder.current_for(here) is None


def test_the_later_of_two_recorders_hears_until_it_leaves():
    here = threading.get_ident()
    first, second = Recorder(), Recorder()
    recorder.attach(first)
    recorder.attach(second)
    assert recorder.current_for(here) is second
    recorder.detach(first)
    assert recorder.current_for(here) is second
    recorder.attach(first)
    recorder.detach(first)
    recorder.detach(second)
    assert recorder.current_for(here) is None


def test_batches_of_which_none_was_looked_at_are_like_the_last_before():
    heard = Recorder(interval_s=1.0)
    heard.add(span(), 0.5)
    heard.flush()
    build_s = heard.batch_stats.build_s
    heard.begin()
    for _ in range(3):
        heard.add(None, 0.25)
    heard.flush()
    assert heard.batch_stats.batches == 3
    assert heard.batch_stats.build_s == pytest.approx(3 * build_s)
    assert heard.batch_stats.wait_s == 0.75
    heard.begin()
    heard.flush()
    assert heard.batch_stats.batches == 0


def test_a_recorder_that_is_gone_hears_of_nothing():
    heard = Recorder()
    recorder.attach(heard)
    del heard
    gc.collect()
    assert recorder.current_for(threading.get_ident()) is None
    recorder.detach(Recorder())


def test_waits_for_ready_batches_tell_what_handing_over_takes():
    heard = Recorder()
    for batch in range(9):
        heard.add(span(batch)._replace(stored_s=999.0), 1e-4, 1000.0)
        heard.add(span(batch)._replace(stored_s=998.0), 5.0, 1000.0)
    heard.flush()
    assert math.isnan(heard.batch_stats.take_s)  # nine are too few
    # This one waited for a core too.
    heard.add(span(9)._replace(stored_s=999.0), 0.5, 1000.0)
    heard.flush()
    assert heard.batch_stats.take_s == pytest.approx(1e-4, rel=0.011)


def test_the_depth_counts_batches_that_lay_ready_when_one_was_asked_for():
    heard = Recorder()
    now_s = recorder.time.monotonic()
    moments = [(3, 1.5), (1, 3.5), (2, 4), (9, 10)]  # stored, delivered
    for batch, (stored_s, delivered_s) in enumerate(moments):
        one = span(batch)._replace(stored_s=now_s + stored_s, depth=0)
        heard.add(one, 0.25, now_s + delivered_s)
    heard.flush()
    depth = heard.spans()[:, Span._fields.index("depth")]
    # The first was waited for, with the second in the queue already.
    assert depth.tolist() == [1, 2, 1, 1]
    assert heard.batch_stats.depth == 5
