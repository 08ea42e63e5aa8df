"""Reports, plots and notebook fragments of what `LoaderHealth` measured.

Records are simulated (`health_records`), but for one of a real fit. Pages are
also opened in Chromium, where that is installed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html.parser
import io
import json
import os
import pathlib
import re
import shutil
import sys

import keras
import numpy as np
import pytest
from health_records import (
    BUSY_BUILDER,
    START_S,
    empty_record,
    simulated_record,
)
from samples import Numbered

import keras_fastdata
from keras_fastdata import GeneratorDataset, LoaderHealth
from keras_fastdata.health.account import TimeAccount
from keras_fastdata.health.hot_lines import HotLine
from keras_fastdata.health.reasons import Kind
from keras_fastdata.health.report import axes, drawing, windows
from keras_fastdata.health.report.figure import plot
from keras_fastdata.health.report.html import write_report
from keras_fastdata.health.report.notebook import summary_html
from keras_fastdata.health.summary import summarize
from keras_fastdata.health.verdict import Verdict
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.metrics.recorder import SPANS_KEPT, Skipped, Span

_EVIL = "<script>alert(1)</script>"
_DURATION = re.compile(r"-?[\d,.]+ (?:s|ms)")


@functools.cache
def _many():
    """32 workers, and more batches than are kept."""
    return simulated_record(
        workers=32, epochs=4, batches=2100, build_s=0.4, queue=64
    )


def _evil_record():
    """Markup wherever a user can put text."""
    record = simulated_record(
        verdict=Verdict(Kind.STRAGGLERS, f"Slow {_EVIL}.", f"Do {_EVIL}.", 2.0),
        dataset=_EVIL,
        skipped=(
            Skipped(_EVIL, 3, f"Traceback:\n  File\nValueError: {_EVIL}\n"),
            Skipped("A'\"&", 4, "</pre></details><img src=x onerror=alert(1)>"),
        ),
    )
    settings = {
        **record.settings,
        "start_method": _EVIL,
        "worker_env": {_EVIL: "hidden-token"},
        "ray_options": {"init": {"env_vars": {"KEY": "hidden-token"}}},
    }
    return dataclasses.replace(record, settings=settings)


class _Parser(html.parser.HTMLParser):
    """Counts tags, and collects attributes and text."""

    def __init__(self):
        super().__init__()
        self.tags = collections.Counter()
        self.attributes = []
        self.texts = []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def _parse(page):
    parser = _Parser()
    parser.feed(page)
    parser.text = "\n".join(parser.texts).replace("\N{NO-BREAK SPACE}", " ")
    return parser


@pytest.fixture
def written(tmp_path):
    """Writes a record's report; returns its text."""

    def write(record):
        path = tmp_path / "report.html"
        write_report(record, path)
        return path.read_text("utf-8")

    return write


# -- what the page says ------------------------------------------------------


def test_the_page_says_the_verdict_and_how_long_training_waited(written):
    record = simulated_record()
    text = _parse(written(record)).text
    assert "io_bound" in text
    assert "90% of that it waits for files" in text
    assert "Waiting needs no core" in text
    summary = record.summary
    account = summary.account
    waited, whole = f"{account.waiting_s:.1f} s", f"{account.total_s:.1f} s"
    assert f"Training waited {waited} of {whole} for data" in text
    assert f"Waiting for data\n{waited}" in text
    assert "free data" not in text.lower()


def test_the_page_accounts_for_all_time_from_the_call_of_fit(written):
    record = simulated_record()
    account = record.summary.account
    text = _parse(written(record)).text
    assert f"Where the time went: {account.total_s:.1f} s" in text
    account_text = text[text.index("Where the time went") :]
    shares = re.findall(r"^(\d+)%$", account_text, re.MULTILINE)[:3]
    assert len(shares) == len(account.parts) == 3
    assert abs(sum(map(int, shares)) - 100) <= 2
    assert formatting.duration(account.total_s) in summary_html(record.summary)


def test_every_epoch_and_validation_has_a_row(written):
    record = simulated_record(epochs=3)
    validations = [
        dataclasses.replace(epoch, phase="validation")
        for epoch in record.summary.epochs
    ]
    summary = summarize(list(record.summary.epochs), validations)
    text = _parse(written(dataclasses.replace(record, summary=summary))).text
    found = re.findall(r"^(?:Epoch|Validation) \d$", text, re.MULTILINE)
    assert found == [
        f"{what} {number}"
        for number in (1, 2, 3)
        for what in ("Epoch", "Validation")
    ]


def _validates():
    """A training that computes, with a validation that waits."""
    record = simulated_record(epochs=3)
    free = Verdict(Kind.COMPUTE_BOUND, "Data is free.", "A faster model.", 1.0)
    epochs = [
        dataclasses.replace(epoch, verdict=free, data_wait=0.0)
        for epoch in record.summary.epochs
    ]
    validations = [
        dataclasses.replace(
            epoch,
            phase="validation",
            verdict=dataclasses.replace(epoch.verdict, saves_s=1.0),
        )
        for epoch in record.summary.epochs
    ]
    line = HotLine("data.py", 19, "read", 0.9)
    summary = dataclasses.replace(
        summarize(epochs, validations), validation_hot_lines=(line,)
    )
    return dataclasses.replace(record, summary=summary)


def test_a_validation_that_waits_has_the_headline(written):
    record = _validates()
    headline = record.summary.findings[0].headline
    duration = r"[\d.]+ m?s"
    pattern = f"Validation waited {duration} of {duration} for data"
    assert re.fullmatch(pattern, headline)
    page = _parse(written(record)).text
    fragment = _parse(summary_html(record.summary)).text
    for text in (page, fragment):
        validation = text.index(headline)
        assert validation < text.index("read(...)") < text.index("A faster")
        assert text.index("Training waited 0 ms") < text.index("A faster m")


def test_slow_retried_and_skipped_batches_are_listed_by_index(written):
    text = _parse(written(simulated_record())).text
    assert re.search(r"built again: 1\n.*\n5\n1\n", text, re.DOTALL)
    assert "Photos, index 17:\nValueError: not an image: photo_17.png" in text
    assert "While building batch 17 of epoch 0" in text
    slow = text[text.index("Batches that took longest") :].splitlines()
    place = slow.index("Waited for")
    assert {slow[place + 1], slow[place + 4]} == {"3", "7"}


def test_lost_workers_are_listed_with_when_and_which_process(written):
    record = simulated_record(lost=(WorkerLoss(START_S + 2.5, 1, 4243),))
    text = _parse(written(record)).text
    assert "Workers that were lost" in text
    assert re.search(r"2\.5 s\n1\n4243\n", text)


def test_a_retry_that_is_not_kept_is_still_counted(written):
    text = _parse(written(_many())).text
    assert "built again: 1\n" in text
    assert "None is among the latest 8,192 batches" in text


def test_settings_are_shown_but_no_values_of_environment_variables(written):
    page = written(_evil_record())
    text = _parse(page).text
    assert "max_worker_restarts\n3" in text
    assert f"{_EVIL} (values are not shown)" in text
    assert "hidden-token" not in page


@pytest.mark.parametrize(
    ("phase", "who"),
    [("evaluate", "The evaluation"), ("predict", "The prediction")],
)
def test_evaluations_and_predictions_are_called_what_they_are(
    written, phase, who
):
    record = simulated_record(epochs=1)
    epoch = dataclasses.replace(record.summary.epochs[0], phase=phase)
    record = dataclasses.replace(
        record,
        summary=summarize([epoch], []),
        steps=tuple(step._replace(phase=phase) for step in record.steps),
    )
    assert f"{who} waited" in _parse(written(record)).text


def test_a_record_without_batches_makes_a_page_that_says_so(written):
    parser = _parse(written(empty_record()))
    assert "No batch of a FastPyDataset was seen" in parser.text
    assert not parser.tags["svg"]


def test_a_fit_that_was_broken_off_in_its_first_epoch_makes_a_page(written):
    record = simulated_record(summary=summarize([], []))
    parser = _parse(written(record))
    assert "No epoch has ended" in parser.text
    assert parser.tags["svg"] > 3


def test_a_record_of_a_single_batch_makes_a_page(written):
    record = simulated_record(workers=1, epochs=1, batches=1)
    assert _parse(written(record)).tags["svg"] > 3


@pytest.mark.parametrize("part", ["steps", "spans"])
def test_a_record_without_steps_or_without_spans_makes_a_page(written, part):
    record = simulated_record()
    nothing = () if part == "steps" else record.spans[:0]
    record = dataclasses.replace(record, **{part: nothing})
    assert _parse(written(record)).tags["svg"] > 0
    plot(record)


@pytest.mark.backend
def test_a_real_fit_makes_a_page_and_a_figure(written):
    health = LoaderHealth(verbose=0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Numbered(length=8, workers=2) as data:
        model.fit(data, epochs=2, callbacks=[health], verbose=0)
    text = _parse(written(health._record)).text
    assert "LoaderHealth: Numbered" in text
    assert f"training data\n{data!r}" in text
    assert "16 batches" in text
    assert "worker 1" in text
    plot(health._record)


def _pairs(index, count):
    """The rows of one shard of four batches of two."""
    for row in range(index, 8, count):
        yield np.full(3, row, "float32"), np.zeros(1, "float32")


def test_a_page_describes_a_dataset_of_generators_as_its_repr_does(written):
    health = LoaderHealth(verbose=0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with GeneratorDataset(_pairs, batch_size=2, workers=2) as data:
        model.fit(data, callbacks=[health], verbose=0)
        assert "2 threads" in repr(data)
        assert (
            f"training data\n{data!r}" in _parse(written(health._record)).text
        )


# -- what users named --------------------------------------------------------


def test_what_users_named_or_raised_is_text_and_never_markup(written):
    page = written(_evil_record())
    parser = _parse(page)
    assert "script" not in parser.tags
    assert "img" not in parser.tags
    assert f"LoaderHealth: {_EVIL}" in parser.text
    assert f"ValueError: {_EVIL}" in parser.text
    assert f"Slow {_EVIL}." in parser.text


def test_a_traceback_with_half_a_character_is_written(written):
    record = simulated_record(
        skipped=(Skipped("Photos", 1, "OSError: photo_\udcff.png"),)
    )
    assert r"photo_\udcff.png" in written(record)


def test_what_stands_between_backquotes_is_code(written):
    page = written(simulated_record())
    assert "pass <code>workers=8</code>: 2.0" in page


def test_an_odd_backquote_is_left_as_it_is(written):
    verdict = Verdict(Kind.IO_BOUND, "One ` only.", "`a` and `b`.", 2.0)
    page = written(simulated_record(verdict=verdict))
    assert "One ` only." in page
    assert "<code>a</code> and <code>b</code>." in page


# -- the file ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_missing_folders_are_made(tmp_path, kind):
    path = tmp_path / "a" / "b" / "report.html"
    write_report(simulated_record(), kind(path))
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_page_that_is_there_is_replaced_and_nothing_lies_beside(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("before")
    write_report(simulated_record(), path)
    assert "before" not in path.read_text("utf-8")[:100]
    assert list(tmp_path.iterdir()) == [path]


def test_where_writing_fails_the_page_before_stays(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def fail(*_):
        raise OSError("no space is left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(simulated_record(), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_refers_to_nothing_outside_itself(written):
    parser = _parse(written(_many()))
    links = [v for k, v in parser.attributes if k in ("src", "href")]
    assert links == ["data:,"]
    assert not parser.tags["script"]


def test_the_page_of_a_long_run_stays_small(written):
    record = _many()
    assert len(record.spans) == SPANS_KEPT
    assert len(written(record)) < 1_000_000


def test_the_template_is_part_of_the_package():
    root = pathlib.Path(keras_fastdata.__file__).parent
    assert (root / "health" / "report" / "page.html.jinja").is_file()


# -- timelines ---------------------------------------------------------------


def test_a_short_run_is_shown_at_once():
    record = simulated_record(epochs=1, batches=30)
    (stretch,) = windows.windows(record)
    assert stretch.name == "the whole run"
    rows = windows.rows(record, stretch, pixel_s=1e-6)
    assert [row.name for row in rows] == ["training", "worker 0", "worker 1"]
    builds = [bar for row in rows for bar in row.bars if bar.what == "build"]
    assert len(builds) == 30


def test_a_long_run_is_shown_in_parts_where_batches_can_be_told_apart():
    record = _many()
    parts = windows.windows(record)
    assert [part.name for part in parts] == [
        "the earliest kept",
        "the longest wait",
        "in the last epoch",
    ]
    longest = max(record.steps[200:], key=lambda step: step.waited_s)
    assert parts[1].begin_s <= longest.began_s
    assert longest.ended_s <= parts[1].end_s
    for part in parts:
        shown = [
            step
            for step in record.steps
            if part.begin_s <= step.began_s < part.end_s
        ]
        assert 1 <= len(shown) <= 160


def test_a_long_validation_in_between_is_not_shown():
    record = simulated_record(epochs=2, batches=80)
    cut = 100.0  # seconds between the epochs
    steps = tuple(
        step._replace(
            began_s=step.began_s + cut * step.epoch,
            ended_s=step.ended_s + cut * step.epoch,
        )
        for step in record.steps
    )
    record = dataclasses.replace(record, steps=steps)
    for part in windows.windows(record):
        assert part.end_s - part.begin_s < cut


def test_workers_that_never_built_have_an_empty_row():
    record = simulated_record(workers=2, epochs=1, batches=10)
    record.settings["workers"] = 4
    (stretch,) = windows.windows(record)
    rows = windows.rows(record, stretch, pixel_s=1e-6)
    assert [row.name for row in rows][3:] == ["worker 2", "worker 3"]
    assert rows[4].bars == ()


def test_no_more_rows_are_drawn_than_can_be_told_apart():
    record = simulated_record(workers=300, epochs=1, batches=600)
    rows = windows.rows(record, windows.windows(record)[0], 0.001)
    assert len(rows) == 1 + windows.MOST_ROWS


def test_bars_narrower_than_a_pixel_become_one_that_says_what_share_it_is():
    record = simulated_record(workers=1, epochs=1, batches=50, step_s=0.1)
    (stretch,) = windows.windows(record)
    rows = windows.rows(record, stretch, pixel_s=1.0)
    (build,) = [bar for bar in rows[1].bars if bar.what == "build"]
    exact = windows.rows(record, stretch, pixel_s=0.0)[1].bars
    filled_s = sum(b.end_s - b.begin_s for b in exact if b.what == "build")
    assert build.share == pytest.approx(
        filled_s / (build.end_s - build.begin_s)
    )
    assert "50 times" in build.title


def test_bars_stay_within_their_stretch():
    record = _many()
    for part in windows.windows(record):
        for row in windows.rows(record, part, 0.001):
            for bar in row.bars:
                assert part.begin_s <= bar.begin_s < bar.end_s <= part.end_s


def test_a_lost_worker_is_lost_until_its_replacement_builds():
    record = simulated_record(epochs=1, batches=30)
    (stretch,) = windows.windows(record)
    rows = windows.rows(record, stretch, pixel_s=1e-6)
    (lost,) = [bar for bar in rows[2].bars if bar.what == "lost"]
    ours = record.column("began_s")[record.column("worker") == 1]
    assert lost.begin_s == record.lost[0].at_s
    assert lost.end_s == ours[ours > lost.begin_s].min()


def test_waiting_and_computing_fill_every_step():
    record = simulated_record(epochs=1, batches=30)
    charts = {chart.name: chart for chart in drawing.over_time(record)}
    boxes = charts["Training"].boxes
    filled = sum(box.width * box.height for box in boxes)
    assert filled == pytest.approx(drawing.WIDTH * drawing.HEIGHT, rel=0.02)


def _slowed(beside_s=0.008, device_s=0.0):
    """A run whose host sees no more waiting than the account has.

    Builds slow down each step by `beside_s`, and for `device_s` of each wait
    the device still computes.
    """
    record = simulated_record(workers=1, epochs=2, batches=40, build_s=0.03)
    epochs = []
    for epoch in record.summary.epochs:
        steps = [step for step in record.steps if step.epoch == epoch.epoch]
        wait_s = sum(step.waited_s for step in steps)
        lost_s = wait_s + len(steps) * (beside_s - device_s)
        facts = dataclasses.replace(
            BUSY_BUILDER,
            wall_s=epoch.wall_s,
            free_s=epoch.wall_s - lost_s,
            wait_s=wait_s,
        )
        changes = {"facts": facts, "data_wait": facts.data_wait}
        epochs.append(
            dataclasses.replace(epoch, **changes, step_s=0.01 - beside_s)
        )
    account = TimeAccount(
        steps_s=sum(epoch.wall_s - epoch.waited_s for epoch in epochs),
        waiting_s=sum(epoch.waited_s for epoch in epochs),
    )
    summary = summarize(epochs, [], None, account)
    return dataclasses.replace(record, summary=summary)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (_slowed(), {"wait", "slowed", "compute"}),
        (_slowed(beside_s=0.0), {"wait", "compute"}),
        (_slowed(beside_s=0.0, device_s=0.004), {"wait", "compute"}),
    ],
    ids=["builds beside steps", "no step is slower", "device computes"],
)
def test_the_charts_divide_the_time_as_the_account_does(record, parts):
    begin_s, end_s = record.steps[0].began_s, record.steps[-1].ended_s
    charts = {chart.name: chart for chart in drawing.over_time(record)}
    per_s = drawing.WIDTH * drawing.HEIGHT / (end_s - begin_s)
    drawn = collections.Counter()
    for box in charts["Training"].boxes:
        drawn[box.what] += box.width * box.height / per_s
    assert set(drawn) == parts
    account = record.summary.account
    lost_s = drawn["wait"] + drawn["slowed"]
    assert lost_s == pytest.approx(account.waiting_s, rel=0.01)
    assert drawn["compute"] == pytest.approx(account.steps_s, rel=0.01)
    window = windows.Window("all", begin_s, end_s)
    training = windows.rows(record, window, pixel_s=1e-9)[0]
    barred = collections.Counter()
    for bar in training.bars:
        barred[bar.what] += bar.end_s - bar.begin_s
    assert barred == pytest.approx(drawn, rel=0.01)


def test_saving_is_neither_waiting_nor_computing():
    record = simulated_record(epochs=1, batches=30)
    *steps, last = record.steps
    saves = last._replace(ended_s=last.ended_s + 9.0, excluded_s=9.0)
    record = dataclasses.replace(record, steps=(*steps, saves))
    window = windows.Window("all", steps[0].began_s, saves.ended_s)
    bars = windows.rows(record, window, pixel_s=1e-9)[0].bars
    assert max(bar.end_s for bar in bars) == pytest.approx(last.ended_s)


def test_the_page_says_how_long_builds_slow_the_steps_down(written):
    record = _slowed()
    slowed_s = sum(epoch.slowed_s for epoch in record.summary.epochs)
    told = formatting.duration(slowed_s)
    page = written(record)
    assert f"{told} of it in steps that builds slow down" in _parse(page).text
    assert '<i class="slowed"></i>slowed down by builds' in page
    page = written(_slowed(beside_s=0.0))
    assert "builds slow" not in page
    assert "slowed down by" not in page


def test_batches_built_in_the_caller_have_no_queue():
    record = simulated_record(workers=1)
    record.settings["workers"] = 0
    names = [chart.name for chart in drawing.over_time(record)]
    assert names == ["Epochs", "Training"]
    assert windows.worker_names(record) == ["inline"]


# -- axes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds",
    [
        np.full(10, 0.25),
        np.linspace(0.030, 0.034, 99),
        np.geomspace(1e-4, 100, 99),
        np.zeros(5),
        np.array([0.0, 0.0, 3.0]),
        np.array([7200.0]),
    ],
    ids=["equal", "narrow", "wide", "zero", "some zero", "hours"],
)
def test_a_histogram_counts_every_duration_and_its_marks_have_units(seconds):
    figure = axes.histogram(seconds)
    assert figure.counts.sum() + figure.at_once == len(seconds)
    marks = axes.duration_marks(figure)
    assert marks
    for mark in marks:
        assert 0 <= mark.place <= 1
        assert _DURATION.fullmatch(mark.label)
    assert len({mark.label for mark in marks}) == len(marks)


def test_a_median_that_lies_left_of_all_bins_has_no_line():
    seconds = np.array([0.0] * 9 + [0.020, 0.030])
    assert [name for name, _ in axes.histogram(seconds).lines] == ["p95"]
    chart = drawing.histogram("wait", seconds)
    assert [what for what, _ in chart.uprights] == ["p95"]
    assert "9 under 0.01 ms are not drawn" in chart.note


def test_there_is_no_histogram_of_nothing():
    assert axes.histogram(np.empty(0)) is None


@pytest.mark.parametrize("length_s", [1e-3, 0.05, 1.0, 77.0, 9000.0])
def test_marks_of_time_are_round_distinct_and_in_seconds(length_s):
    marks = axes.time_marks(5003.21, 5003.21 + length_s, 5000.0)
    labels = [mark.label for mark in marks]
    assert 2 <= len(set(labels)) == len(labels) <= 9
    assert all(re.fullmatch(r"[\d,.]+ s", label) for label in labels)


def test_a_series_is_cut_where_nothing_was_asked_for():
    moments = np.concatenate([np.arange(0.0, 50.0), np.arange(80.0, 130.0)])
    found = axes.series(moments, np.ones(100))
    first, second = found.parts()
    assert first.begin_s[-1] < 50
    assert second.begin_s[0] > 78


def test_every_figure_has_its_units(written):
    page = written(simulated_record())
    below = re.findall(r'class="mark[^"]*" style="left[^"]*">([^<]*)<', page)
    assert len(below) > 10
    assert all(_DURATION.fullmatch(label) for label in below)
    left = re.findall(r'class="mark[^"]*" style="bottom[^"]*">([^<]*)<', page)
    assert len(left) > 8
    assert all(re.fullmatch(r"[\d,]+%?", label) for label in left)
    assert "how many batches" in page
    assert "Batches that were ready" in page


# -- without the extra -------------------------------------------------------


def test_without_jinja2_a_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"'keras-fastdata\[report\]'"):
        write_report(simulated_record(), tmp_path / "a" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"'keras-fastdata\[report\]'"):
        plot(simulated_record())


# -- the fragment for notebooks ----------------------------------------------


def test_a_fragment_needs_neither_jinja2_nor_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    parser = _parse(summary_html(simulated_record().summary))
    assert "io_bound" in parser.text
    assert "data_wait = waiting / took" in parser.text
    assert "epoch 2" in parser.text


def test_a_fragment_escapes_what_it_says():
    parser = _parse(summary_html(_evil_record().summary))
    assert "script" not in parser.tags
    assert f"Slow {_EVIL}." in parser.text


def test_a_fragment_closes_every_tag_that_it_opens():
    fragment = summary_html(simulated_record(epochs=20).summary)
    for tag, count in _parse(fragment).tags.items():
        assert tag == "br" or fragment.count(f"</{tag}>") == count


def test_a_fragment_of_many_epochs_shows_the_first_and_the_last():
    text = _parse(summary_html(simulated_record(epochs=40).summary)).text
    assert "epoch 6\n" in text
    assert "epoch 7\n" not in text
    assert "epoch 40\n" in text


def test_a_fragment_of_nothing_says_so():
    assert "no batch" in summary_html(empty_record().summary)


# -- figures -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(simulated_record, id="two", marks=pytest.mark.long),
        pytest.param(_many, id="many"),
        pytest.param(empty_record, id="none"),
    ],
)
def test_a_figure_can_be_written_without_pyplot(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    picture = io.BytesIO()
    plot(make()).savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_every_panel_of_a_figure_has_units():
    figure = plot(simulated_record())
    panels = {panel.get_label(): panel for panel in figure.axes}
    assert panels["timeline"].get_xlabel() == "time since the start (s)"
    assert panels["queue"].get_xlabel() == "time since the start (s)"
    assert panels["queue"].get_ylabel() == "batches ready"
    for name in ("build", "wait"):
        assert panels[name].get_ylabel() == "batches"
        labels = [t.get_text() for t in panels[name].get_xticklabels()]
        assert all(_DURATION.fullmatch(label) for label in labels)


def test_a_figure_has_a_row_for_training_and_each_worker():
    (panel, *_) = plot(simulated_record()).axes
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == ["training", "worker 0", "worker 1"]


def test_a_class_name_is_not_taken_for_mathematics():
    picture = io.BytesIO()
    plot(simulated_record(dataset="A$\\frac$B")).savefig(picture)
    assert picture.getvalue()


# -- in a browser ------------------------------------------------------------


def _find(*names):
    return next(filter(None, map(shutil.which, names)), None)


_CHROMIUM = _find("chromium", "chromium-browser", "google-chrome")
_DRIVER = _find("chromedriver")
_in_browser = pytest.mark.skipif(
    not (_CHROMIUM and _DRIVER),
    reason="Chromium and chromedriver are not both installed",
)


@pytest.fixture
def browser(monkeypatch):
    """Chromium, which notes its console and its requests."""
    monkeypatch.setenv("SE_AVOID_STATS", "true")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(options, webdriver.ChromeService(_DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a record's report; returns the browser."""

    def show(record, width=1280):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": 900,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            },
        )
        path = tmp_path / "report.html"
        write_report(record, path)
        browser.get(path.as_uri())
        return browser

    return show


def _requests(browser):
    events = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


@_in_browser
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(simulated_record, id="two", marks=pytest.mark.long),
        pytest.param(_many, id="many"),
        pytest.param(empty_record, id="none", marks=pytest.mark.long),
    ],
)
def test_the_browser_has_nothing_to_complain_of_and_nothing_to_fetch(
    shown, make
):
    browser = shown(make())
    assert browser.get_log("browser") == []
    urls = {url for url in _requests(browser) if not url.startswith("data:")}
    assert urls == {browser.current_url}
    assert browser.current_url.startswith("file:")


@_in_browser
def test_every_figure_is_drawn_and_every_part_of_the_timeline_is_shown(shown):
    browser = shown(_many())
    tabs = browser.find_elements("css selector", ".tabs label")
    assert [tab.text for tab in tabs] == [
        "The earliest kept",
        "The longest wait",
        "In the last epoch",
    ]
    for number, tab in enumerate(tabs, 1):
        tab.click()
        panels = browser.find_elements("css selector", ".tab")
        visible = [panel for panel in panels if panel.is_displayed()]
        assert len(visible) == 1
        assert f"tab-{number}" in visible[0].get_attribute("class")
        sizes = browser.execute_script(
            """
            return [...document.querySelectorAll("svg")]
              .filter(svg => svg.checkVisibility())
              .map(svg => {
                const box = svg.getBoundingClientRect();
                return [box.width, box.height,
                        svg.querySelectorAll("rect").length];
              })
            """
        )
        assert len(sizes) == 6  # a timeline, three over time, two histograms
        assert all(min(size) > 0 for size in sizes)


@_in_browser
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_evil_record, id="evil"),
        pytest.param(_many, id="many", marks=pytest.mark.long),
        pytest.param(empty_record, id="none", marks=pytest.mark.long),
    ],
)
def test_a_phone_need_not_scroll_sideways(shown, make):
    browser = shown(make(), width=390)
    for details in browser.find_elements("css selector", "summary"):
        details.click()
    width = browser.execute_script(
        "return document.documentElement.scrollWidth"
    )
    assert width <= 390


@_in_browser
@pytest.mark.parametrize("all_columns", [True, False])
def test_no_table_is_cut_on_a_phone(shown, all_columns):
    line = HotLine("data.py", 19, "read_a_rather_long_name" * 4, 0.9)
    record = _validates()
    full = dataclasses.replace(
        BUSY_BUILDER,
        cores=64,
        busy_cores=63.0,
        cpu_s=120.0,
        trainer_cpu_s=100.0,
        elapsed_s=10.0,
    )
    summary = dataclasses.replace(
        record.summary,
        epochs=tuple(
            dataclasses.replace(epoch, facts=full, cores=64)
            for epoch in record.summary.epochs
        ),
        hot_lines=(line,),
        compared=record.summary.figures,
    )
    stacks = {"read (data.py:19)": 30}
    record = dataclasses.replace(record, summary=summary, stacks=stacks)
    browser = shown(record, width=390)
    if all_columns:
        browser.find_element("css selector", "label[for=all-columns]").click()
    cut = browser.execute_script(
        """
        return [...document.querySelectorAll("td, th, h2, .note, dd, .scroll")]
          .filter(e => e.checkVisibility())
          .filter(e => e.getBoundingClientRect().right > innerWidth
                       || e.scrollWidth > e.clientWidth + 1)
          .map(e => e.outerHTML)
        """
    )
    assert cut == []
    busy = "td[data-name='Cores busy']"
    text = browser.find_element("css selector", busy).text
    assert text == "10.0 + 12.0 + 41.0 of 64"
    cells = browser.find_elements("css selector", ".stacks td[data-name]")
    visible = [cell for cell in cells if cell.is_displayed()]
    phases, rare = 6, 8
    hidden = 0 if all_columns else phases * rare
    assert len(visible) == len(cells) - hidden


@_in_browser
def test_markup_that_users_wrote_is_shown_and_not_run(shown):
    from selenium.common.exceptions import NoAlertPresentException

    browser = shown(_evil_record())
    for details in browser.find_elements("css selector", "summary"):
        details.click()
    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert  # noqa: B018
    text = browser.find_element("tag name", "body").text
    assert f"LoaderHealth: {_EVIL}" in text
    assert f"ValueError: {_EVIL}" in text
    assert "<img src=x onerror=alert(1)>" in text


@_in_browser
def test_the_page_follows_the_colours_of_the_system(shown):
    browser = shown(simulated_record())
    seen = {}
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        seen[scheme] = browser.execute_script(
            "const style = getComputedStyle(document.body);"
            "return [style.backgroundColor, style.color]"
        )
    (light_page, light_text), (dark_page, dark_text) = (
        [_brightness(color) for color in seen[scheme]]
        for scheme in ("light", "dark")
    )
    assert light_page > 200 > 100 > light_text
    assert dark_page < 100 < 200 < dark_text


def _styles(browser, scheme, wanted):
    """The computed styles of the first elements, in a color scheme."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    return browser.execute_script(
        "return arguments[0].map(([css, name]) =>"
        " getComputedStyle(document.querySelector(css))[name])",
        wanted,
    )


@_in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_line_of_the_mean_stands_out_from_what_is_behind_it(shown, scheme):
    wanted = [
        ("polyline.mean", "stroke"),
        ("i.mean", "backgroundColor"),
        (".chart svg", "backgroundColor"),
        ("rect.range", "fill"),
        ("rect.range", "fillOpacity"),
    ]
    colors = _styles(shown(simulated_record()), scheme, wanted)
    line, key, plane, box = map(_brightness, colors[:4])
    opacity = float(colors[4])
    assert line == key
    assert abs(line - plane) > 70
    assert abs(line - (opacity * box + (1 - opacity) * plane)) > 70


@_in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_lines_of_a_histogram_stand_out_from_its_bars(shown, scheme):
    wanted = [
        ("line.median", "stroke"),
        (".chart svg", "backgroundColor"),
        ("rect.bin", "fill"),
        ("rect.bin", "fillOpacity"),
    ]
    colors = _styles(shown(simulated_record()), scheme, wanted)
    line, plane, box = map(_brightness, colors[:3])
    opacity = float(colors[3])
    assert abs(line - (opacity * box + (1 - opacity) * plane)) > 90


def _brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_a_summary_is_shown_in_a_notebook_and_its_repr_is_one_line():
    summary = simulated_record().summary
    assert summary._repr_html_() == summary_html(summary)
    assert re.fullmatch(
        r"<HealthSummary: io_bound, data_wait 0\.\d\d of \S+ s, 2 epochs>",
        repr(summary),
    )
    nothing = summarize([], [])
    assert repr(nothing).startswith("<HealthSummary: no verdict")


# -- what is shown only where there is something -----------------------------


def test_batches_to_look_at_are_listed_only_if_some_took_far_longer(written):
    record = simulated_record(skipped=(), lost=(), workers=1)
    usual = [
        dataclasses.replace(epoch, retried=0, skipped=0, restarts=0)
        for epoch in record.summary.epochs
    ]
    summary = dataclasses.replace(record.summary, epochs=tuple(usual))
    spans = record.spans.copy()
    spans[:, Span._fields.index("retries")] = 0
    even = [slow._replace(build_s=0.06) for slow in record.slowest]
    calm = dataclasses.replace(
        record, summary=summary, spans=spans, slowest=tuple(even)
    )
    assert "to look at" not in _parse(written(calm)).text
    late = dataclasses.replace(calm, slowest=(even[0]._replace(build_s=0.2),))
    assert "to look at" in _parse(written(late)).text


def test_the_timeline_that_waits_most_is_shown_first(written):
    record = simulated_record(epochs=4, batches=100)
    late_s = 30.0
    start = record.steps[0]._replace(
        number=-1,
        began_s=START_S - late_s,
        ended_s=START_S,
        waited_s=late_s - 1.0,
        compiled=True,
    )
    late = dataclasses.replace(
        record, began_s=start.began_s, steps=(start, *record.steps)
    )
    first, *others = drawing.timelines(late)
    assert first.name == "the beginning"
    assert all(first.waiting > other.waiting for other in others)
    page = written(late)
    assert 'id="tab-1" checked' in page
    assert page.count(" checked>") == 1
    (wait,) = (
        box
        for box in first.boxes
        if "before the first" in box.title and box.what == "wait"
    )
    assert "waits 29.0 s for data (0 ms to 29.0 s)" in wait.title
    assert any(
        box.what == "compile" and "before the first step" in box.title
        for box in first.boxes
    )
    training = next(c for c in drawing.over_time(late) if c.name == "Training")
    assert training.boxes[0].what == "wait"
    assert training.boxes[0].x == 0.0


def test_the_timeline_is_that_of_validation_if_validation_waits():
    record = _validates()
    seconds_s = record.ended_s
    validation = [
        step._replace(
            phase="validation",
            began_s=step.began_s + seconds_s,
            ended_s=step.ended_s + seconds_s,
        )
        for step in record.steps
    ]
    record = dataclasses.replace(record, steps=(*record.steps, *validation))
    *_, last = windows.windows(record)
    assert last.name == "in the last validation"
    assert last.begin_s >= validation[0].began_s


def test_steps_that_compiled_are_drawn_as_compiling():
    record = simulated_record(epochs=1, batches=30)
    first, *rest = record.steps
    late = first._replace(compiled=True)
    record = dataclasses.replace(record, steps=(late, *rest))
    (stretch,) = windows.windows(record)
    training = windows.rows(record, stretch, pixel_s=1e-6)[0]
    compiling = [bar for bar in training.bars if bar.what == "compile"]
    assert [bar.end_s for bar in compiling] == [first.ended_s]
    assert "compiles 10.0 ms" in compiling[0].title
    charts = {chart.name: chart for chart in drawing.over_time(record)}
    boxes = {box.what for box in charts["Training"].boxes}
    assert boxes == {"wait", "compile", "compute"}
    assert ("compile", "compiles") in charts["Training"].keys


def test_the_machine_and_the_versions_are_on_the_page(written):
    machine = {"CPU": "Fast <8>", "keras": "3.15.1"}
    page = written(simulated_record(machine=machine))
    assert "Fast &lt;8&gt;" in page
    text = _parse(page).text
    assert "Machine and versions\nCPU\nFast <8>\nkeras\n3.15.1" in text
    assert "Machine" not in _parse(written(simulated_record())).text


@_in_browser
def test_the_columns_that_few_need_are_behind_a_toggle(shown):
    browser = shown(simulated_record())
    table = browser.find_element("css selector", "#epochs table")
    box = browser.find_element("css selector", "#epochs .scroll")
    assert "memory" not in table.text
    assert table.size["width"] <= box.size["width"]
    browser.find_element("css selector", "#epochs label").click()
    assert "memory" in table.text
