"""Whether a thread that wants Python's lock finds it held."""

from __future__ import annotations

import hashlib
import sys
import threading
import time

import pytest

from keras_fastdata.metrics.gil import GilProbe
from keras_fastdata.metrics.recorder import Recorder


@pytest.fixture
def probe():
    recorder = Recorder()
    made = GilProbe(recorder)
    made.recorder = recorder
    yield made
    made.close()


def _share_while(probe, work, threads=2):
    """What the probe tells of a second in which threads do `work`."""
    over = threading.Event()

    def run():
        while not over.is_set():
            work()

    crowd = [threading.Thread(target=run) for _ in range(threads)]
    for thread in crowd:
        thread.start()
    probe.take()
    probe.watch()
    time.sleep(1.0)
    share = probe.take()
    over.set()
    for thread in crowd:
        thread.join()
    return share


@pytest.mark.long
@pytest.mark.alone  # else the cores are full
def test_python_code_holds_it(probe):
    assert _share_while(probe, lambda: sum(range(1000))) > 0.5


@pytest.mark.long
@pytest.mark.alone  # else the cores are full
def test_sleeping_does_not(probe):
    assert _share_while(probe, lambda: time.sleep(0.001)) < 0.25


@pytest.mark.long
@pytest.mark.alone  # else the cores are full
def test_code_that_lets_go_of_it_does_not(probe):
    megabytes = bytes(8 << 20)
    hashed = lambda: hashlib.sha256(megabytes).digest()  # noqa: E731
    assert _share_while(probe, hashed, threads=1) < 0.25


def test_without_a_look_nothing_is_known(probe):
    assert probe.take() != probe.take()  # NaN


def test_it_ends_when_no_batch_comes_any_more(probe, monkeypatch):
    monkeypatch.setattr("keras_fastdata.metrics.gil._IDLE_S", 0.1)
    probe.watch()
    thread = probe._thread
    thread.join(120)
    assert not thread.is_alive()
    probe.watch()
    assert probe._thread.is_alive()


def test_it_ends_with_its_recorder():
    recorder = Recorder()
    probe = GilProbe(recorder)
    probe.watch()
    thread = probe._thread
    del recorder
    thread.join(120)
    assert not thread.is_alive()
    probe.close()
    probe.close()


def test_a_python_without_it_has_no_probe(probe, monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    probe.watch()
    assert probe.take() == 0
    assert not any("gil-probe" in t.name for t in threading.enumerate())
