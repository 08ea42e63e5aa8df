"""What the user is shown while a batch is waited for."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import types

import keras
import numpy as np
import pytest
from rich.console import Console
from slow_samples import Opening

from keras_fastdata import FastPyDataset
from keras_fastdata.metrics import notice
from keras_fastdata.metrics.notice import LoadedPackages, Notice


class _Screen:
    """Where notices are shown, in a test."""

    def __init__(self):
        self.texts = []
        self.is_clear = True
        self.seen = threading.Event()

    def show(self, text):
        self.texts.append(text)
        self.is_clear = False
        self.seen.set()

    def clear(self):
        self.is_clear = True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so."""
    world = types.SimpleNamespace(now_s=100.0)
    fake = types.SimpleNamespace(monotonic=lambda: world.now_s)
    monkeypatch.setattr(notice, "time", fake)
    return world


@pytest.fixture
def screen(monkeypatch):
    found = _Screen()
    monkeypatch.setattr(notice, "_find_place", lambda: found)
    return found


@pytest.fixture
def at_once(monkeypatch, screen):
    """Has waits of any length shown."""
    for name in ("LEAST_S", "_PREPARE_S", "_REFRESH_S"):
        monkeypatch.setattr(notice, name, 0.0)
    return screen


class Late(FastPyDataset):
    """Builds batch `late` only once something was shown."""

    def __init__(self, shown, late, **kwargs):
        super().__init__(**kwargs)
        self.shown = shown
        self.late = late

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == self.late:
            assert self.shown.wait(60)
        return np.zeros((2, 3), "float32"), np.zeros(2, "float32")


# -- a notice ------------------------------------------------------------------


def test_a_short_wait_is_not_shown(clock, screen):
    shown = Notice()
    for clock.now_s in (100.0, 101.0, 101.9):
        shown.look(lambda: "waiting")
    shown.end()
    assert screen.texts == []


def test_a_long_wait_is_shown_with_its_seconds_until_it_ends(clock, screen):
    shown = Notice()
    for clock.now_s in (101.0, 102.0, 102.1, 103.0):
        shown.look(lambda: "waiting")
    assert screen.texts == ["waiting (2 s)", "waiting (3 s)"]
    assert not screen.is_clear
    shown.end()
    assert screen.is_clear


def test_one_notice_is_visible_at_a_time(clock, screen):
    first, second = Notice(), Notice()
    clock.now_s = 103.0
    first.look(lambda: "first")
    second.look(lambda: "second")
    second.end()
    assert screen.texts == ["first (3 s)"]
    assert not screen.is_clear
    first.end()
    clock.now_s = 104.0
    second.look(lambda: "second")
    assert screen.texts[1:] == ["second (4 s)"]
    second.end()


def test_a_forked_child_does_not_wait_for_the_parents_notice(
    clock, screen, monkeypatch
):
    parents = Notice()
    clock.now_s = 103.0
    parents.look(lambda: "parent")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    childs = Notice()
    clock.now_s = 106.0
    childs.look(lambda: "child")
    childs.end()
    assert screen.texts == ["parent (3 s)", "child (3 s)"]


def test_a_logger_above_warning_shows_nothing(clock, screen):
    logger = logging.getLogger("keras_fastdata")
    logger.setLevel(logging.ERROR)
    try:
        shown = Notice()
        clock.now_s = 103.0
        shown.look(lambda: "waiting")
        shown.end()
    finally:
        logger.setLevel(logging.NOTSET)
    assert screen.texts == []


def test_an_error_in_a_notice_ends_no_training(clock, screen):
    shown = Notice()
    clock.now_s = 103.0
    shown.look(lambda: 1 / 0)
    screen.clear = lambda: 1 / 0
    clock.now_s = 104.0
    shown.look(lambda: "waiting")
    shown.end()
    assert screen.texts == ["waiting (4 s)"]


# -- where it is shown ---------------------------------------------------------


def test_a_terminal_shows_it_below_the_cursor_and_erases_it():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=20)
    place = notice._Terminal(console)
    place.show("waiting for batch 5 of Photos")
    shown = file.getvalue()
    assert shown.replace("\x1b[2m", "").startswith("\nwaiting for batch")
    assert shown.count("\n") == 1
    assert "Photos" not in shown
    place.clear()
    place.clear()
    assert file.getvalue()[len(shown) :] == "\r\x1b[2K\x1b[1A"


def test_without_a_screen_one_line_is_logged(caplog, monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO, "keras_fastdata")
    place = notice._find_place()
    place.show("waiting (2 s)")
    place.show("waiting (3 s)")
    place.clear()
    assert [r.message for r in caplog.records] == ["waiting (2 s)"]
    assert sys.stderr.getvalue() == ""


def test_a_notebook_shows_it_as_an_output_that_becomes_empty(monkeypatch):
    said = []
    handle = types.SimpleNamespace(update=said.append)

    def display(output, display_id):
        said.append(output)
        return handle

    library = types.SimpleNamespace(Pretty=str, display=display)
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", library)
    place = notice._find_place()
    place.show("a")
    place.show("b")
    place.clear()
    assert said == ["a", "b", ""]


# -- what workers import -------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_package_that_a_process_imports_is_found():
    script = (
        "import sys\nprint(flush=True)\ninput()\n"
        f"sys.path[:] = {sys.path!r}\nimport numpy.linalg\n"
        "print(flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        packages = LoadedPackages()
        process.stdout.readline()
        assert packages.latest([process.pid]) == ""
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert packages.latest([process.pid]) == "numpy"
        assert packages.latest([process.pid]) == "numpy"
        process.communicate("\n", timeout=60)
    assert packages.latest([process.pid]) == "numpy"


# -- waits of a dataset --------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (0, "Late: waiting for the first batch ("),
        (2, "Late: waiting for batch 2 ("),
    ],
)
def test_a_late_batch_is_shown_until_it_comes(at_once, late, text):
    with Late(at_once.seen, late, workers=1, max_queue_size=1) as dataset:
        iterator = iter(dataset)
        for _ in range(late):
            next(iterator)
        at_once.texts.clear()
        at_once.seen.clear()
        next(iterator)
        assert at_once.texts[0].startswith(text)
        assert at_once.is_clear


def test_filling_a_cache_is_said(at_once):
    with Late(at_once.seen, 0, workers=1, cache="memory") as dataset:
        at_once.seen.clear()
        dataset.shown = types.SimpleNamespace(wait=at_once.seen.wait)
        next(iter(dataset))
    assert "which the cache keeps for later epochs" in at_once.texts[0]


def test_starting_workers_are_shown(at_once, tmp_path, monkeypatch):
    flag = tmp_path / "go"
    show = at_once.show

    def note(text):
        show(text)
        flag.touch()

    monkeypatch.setattr(at_once, "show", note)
    with Opening(str(flag), workers=2, use_multiprocessing=True) as dataset:
        next(iter(dataset))
    assert at_once.texts[0].startswith("Opening: starting 2 processes")
    assert at_once.is_clear


@pytest.mark.backend
@pytest.mark.parametrize("verbose", [0, 2])
def test_fit_shows_waits_unless_it_is_to_be_silent(at_once, verbose):
    class Slow(Late):
        def __getitem__(self, index):
            self.shown.wait(0.3 if verbose == 0 else 60)
            return super().__getitem__(index)

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Slow(at_once.seen, -1, workers=1) as dataset:
        model.fit(dataset, verbose=verbose)
    assert bool(at_once.texts) == (verbose > 0)
    assert at_once.is_clear


def test_a_wait_that_is_interrupted_leaves_nothing_on_the_screen(at_once):
    class Raising(Late):
        def __getitem__(self, index):
            assert self.shown.wait(60)
            raise KeyError(index)

    with Raising(at_once.seen, 0, workers=1) as dataset:
        with pytest.raises(KeyError):
            next(iter(dataset))
        assert at_once.texts
        assert at_once.is_clear
