"""`LoaderHealth(compare=)` shows the figures of an earlier run too."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import keras
import numpy as np
import pytest
from health_records import simulated_record
from samples import Numbered

from keras_fastdata import LoaderHealth
from keras_fastdata.health import comparison
from keras_fastdata.health.comparison import Figures
from keras_fastdata.health.report.html import write_report
from keras_fastdata.health.summary import summarize

_BEFORE = Figures(
    dataset='Photos "<&',
    began="2026-01-02 03:04:05",
    workers="1 thread",
    verdict="io_bound",
    epoch_s=4.0,
    data_wait=0.8,
    batches_per_s=10.0,
    build_s=0.1,
    total_s=20.0,
)
_NOW = dataclasses.replace(
    _BEFORE,
    workers="8 threads",
    verdict="compute_bound",
    epoch_s=1.0,
    data_wait=0.1,
    batches_per_s=40.0,
    build_s=0.15,
    first_batch_s=0.2,
    total_s=20.4,
)


def _page_with(tmp_path, figures):
    path = tmp_path / "page.html"
    record = simulated_record()
    summary = dataclasses.replace(record.summary, compared=figures)
    write_report(dataclasses.replace(record, summary=summary), path)
    return path


def _fit(callback):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Numbered(workers=1) as dataset:
        model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])


def test_each_figure_has_its_former_and_present_value_and_the_change():
    assert comparison.rows(_BEFORE, _NOW) == [
        ("workers", "1 thread", "8 threads", ""),
        ("verdict", "io_bound", "compute_bound", ""),
        ("a later epoch, median", "4.0 s", "1.0 s", "4.0 times faster"),
        ("data_wait, later epochs", "80%", "10%", ""),
        ("batches/s, later epochs", "10.0", "40.0", "4.0 times faster"),
        ("build, median", "100 ms", "150 ms", "1.50 times slower"),
        ("the whole fit", "20.0 s", "20.4 s", "the same"),
    ]


def test_the_text_fits_80_columns_and_names_the_run_before():
    lines = comparison.text(_BEFORE, _NOW).splitlines()
    assert lines[0] == 'Compared with Photos "<&, 2026-01-02 03:04:05:'
    assert max(map(len, lines)) <= 80
    assert (
        len({line.index("thread") for line in lines if "thread" in line}) == 1
    )


def test_figures_survive_json_but_for_unknown_ones():
    text = _BEFORE.to_json()
    assert "first_batch_s" not in json.loads(text)
    found = Figures.from_json(text)
    assert math.isnan(found.first_batch_s)
    assert dataclasses.replace(found, first_batch_s=0.0) == dataclasses.replace(
        _BEFORE, first_batch_s=0.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "epoch_s": "x"}',
        '{"version": 1, "other": 1}',
        "{",
    ],
)
def test_damaged_figures_are_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON or ours
        Figures.from_json(text)


def test_a_page_contains_its_figures(tmp_path):
    record = simulated_record()
    path = tmp_path / "page.html"
    write_report(record, path)
    assert comparison.read(path).to_json() == record.summary.figures.to_json()


def test_names_of_users_survive_the_page_and_are_never_markup(tmp_path):
    path = _page_with(tmp_path, _BEFORE)
    page = path.read_text()
    assert "Photos &#34;&lt;&amp;" in page
    assert '"<&' not in page


def test_a_page_shows_before_and_now_only_if_it_is_to_compare(tmp_path):
    assert "Before and now" in _page_with(tmp_path, _BEFORE).read_text()
    assert "Before and now" not in _page_with(tmp_path, None).read_text()


def test_a_file_that_is_no_page_is_an_error_when_the_callback_is_made(tmp_path):
    path = tmp_path / "other.html"
    with pytest.raises(FileNotFoundError):
        LoaderHealth(compare=path)
    path.write_text("<html></html>")
    with pytest.raises(ValueError, match="`compare` must be a page"):
        LoaderHealth(compare=path)
    path.write_text('<meta name="loader-health" content="{}">')
    with pytest.raises(ValueError, match="another version"):
        LoaderHealth(compare=path)


def test_each_run_is_compared_with_the_one_before(tmp_path, capsys):
    path = str(tmp_path / "health.html")
    first = LoaderHealth(report=path, compare=path)
    _fit(first)
    assert "Compared with" not in capsys.readouterr().out
    second = LoaderHealth(report=path, compare=path)
    assert second.get_config()["compare"] == path
    _fit(second)
    printed = capsys.readouterr().out
    assert re.search(r"^Compared with Numbered, [-\d]+ [:\d]+:$", printed, re.M)
    assert re.search(r"^workers +1 thread +1 thread$", printed, re.M)
    summary = second.summary()
    before = first.summary().figures
    # Writing the page takes time too, which the page cannot know.
    assert summary.compared.total_s <= before.total_s
    assert dataclasses.replace(before, total_s=0.0) == dataclasses.replace(
        summary.compared, total_s=0.0
    )
    assert "Compared with Numbered" in summary._repr_html_()


def test_an_earlier_summary_can_be_handed_over():
    first = LoaderHealth(verbose=0)
    _fit(first)
    second = LoaderHealth(verbose=0, compare=first.summary())
    _fit(second)
    assert second.summary().compared.workers == "1 thread"
    assert second.get_config()["compare"] is None


def test_a_run_without_batches_has_no_figures():
    figures = summarize([], []).figures
    assert comparison.rows(figures, _NOW) == []
    assert comparison.rows(_NOW, figures) == []
    assert np.isnan(figures.epoch_s)
