"""`TraceWriter`: every batch and step, as a file that Perfetto opens."""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import os
import subprocess
import sys
import textwrap
import time
import tracemalloc

import numpy as np
import psutil
import pytest
from samples import Numbered

from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.settings import Settings
from keras_fastdata.health.epoch_monitor import EpochMonitor
from keras_fastdata.health.report import trace
from keras_fastdata.health.report.trace import TraceWriter
from keras_fastdata.health.step_clock import Step
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.metrics.recorder import Span

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_BATCH_S = 0.01
_BEGAN_S = 1000.0


def _span(k, worker=None, began_s=_BEGAN_S, **changes):
    """The k-th batch; its step begins when it has been delivered."""
    start_s = began_s + k * _BATCH_S
    span = Span(
        epoch=0,
        batch=k,
        worker=k % 2 if worker is None else worker,
        retries=0,
        nbytes=48,
        depth=1,
        queued_s=start_s,
        began_s=start_s,
        built_s=start_s + 0.002,
        stored_s=start_s + 0.003,
        delivered_s=start_s + 0.006,
        opened_s=0.0005,
        waited_s=0.002,
        cpu_s=0.001,
        delay_s=0.0001,
    )
    return span._replace(**changes)


def _step(number, phase="train", began_s=_BEGAN_S, batches=1):
    start_s = began_s + number * _BATCH_S + 0.004
    ended_s = start_s + batches * _BATCH_S
    return Step(phase, 0, number, start_s, ended_s, 0.002, number == 1)


def _tell(writer, spans, steps, phase="train", epoch=0):
    writer.begin(phase, epoch)
    if spans:
        writer.batches(np.array(spans))
    for step in steps:
        writer.step(step)
    writer.end()


def _read(path):
    found = json.loads(path.read_text("ascii"))
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    assert found["displayTimeUnit"] == "ms"
    return found["traceEvents"]


def _of(events, name, phase="X"):
    return [e for e in events if e["name"] == name and e["ph"] == phase]


def _ends(event):
    return event["ts"] + event["dur"]


def _holds(slice_, event):
    same = (slice_["pid"], slice_["tid"]) == (event["pid"], event["tid"])
    return same and slice_["ts"] <= event["ts"] <= _ends(slice_) + 1e-6


def _arrows(events):
    """Pairs of build and step, by their arguments."""
    starts, finishes = ({}, {})
    for event in events:
        if event["ph"] in ("s", "f"):
            found = starts if event["ph"] == "s" else finishes
            assert event["id"] not in found
            found[event["id"]] = event
    assert set(starts) == set(finishes)
    pairs = []
    for number, start in starts.items():
        finish = finishes[number]
        assert start["ts"] <= finish["ts"]
        assert finish["bp"] == "e"
        (build,) = [e for e in _of(events, "build") if _holds(e, start)]
        (step,) = [e for e in _of(events, "step") if _holds(e, finish)]
        pairs.append((build["args"]["batch"], step["args"]["step"]))
    return sorted(pairs)


def _names(events, kind):
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in _of(events, kind, "M")
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def writer(path):
    writer = TraceWriter(path)
    yield writer
    writer.close({}, "Images")


# -- what is in it -----------------------------------------------------------


def test_every_batch_has_its_build_its_store_and_its_delivery(writer, path):
    _tell(writer, [_span(k) for k in range(6)], [_step(k) for k in range(6)])
    writer.close({}, "Images")
    events = _read(path)
    for name in ("build", "store", "deliver"):
        found = [e["args"]["batch"] for e in _of(events, name)]
        assert found == list(range(6)), name
    for build, store, deliver in zip(
        *(_of(events, name) for name in ("build", "store", "deliver")),
        strict=True,
    ):
        assert build["dur"] == pytest.approx(2000)
        assert _ends(build) == pytest.approx(store["ts"])
        assert _ends(store) <= _ends(deliver)
        assert deliver["dur"] == pytest.approx(2000)
        assert (build["pid"], build["tid"]) == (store["pid"], store["tid"])
        assert build["pid"] != deliver["pid"]


def test_what_a_batch_took_is_told_with_it(writer, path):
    _tell(writer, [_span(3, retries=2, epoch=7)], [])
    writer.close({}, "Images")
    events = _read(path)
    assert _of(events, "build")[0]["args"] == {
        "batch": 3,
        "epoch": 7,
        "bytes": 48,
        "queue_depth": 1,
        "retries": 2,
        "cpu_ms": 1.0,
        "core_delay_ms": 0.1,
    }
    assert _of(events, "deliver")[0]["args"] == {
        "batch": 3,
        "epoch": 7,
        "queue_depth": 1,
        "waited_ms": 2.0,
        "opened_ms": 0.5,
    }


def test_of_a_build_that_nobody_asked_about_no_cpu_time_is_told(writer, path):
    span = _span(0)._replace(cpu_s=math.nan, delay_s=math.nan)
    _tell(writer, [span], [])
    writer.close({}, "Images")
    (build,) = _of(_read(path), "build")
    assert "cpu_ms" not in build["args"]


def test_storing_that_takes_no_time_is_left_out(writer, path):
    span = _span(0)
    _tell(writer, [span._replace(stored_s=span.built_s)], [])
    writer.close({}, "Images")
    assert _of(_read(path), "store") == []


def test_every_step_is_there_once(writer, path):
    _tell(writer, [_span(k) for k in range(4)], [_step(k) for k in range(4)])
    writer.close({}, "Images")
    found = _of(_read(path), "step")
    assert [e["args"]["step"] for e in found] == [0, 1, 2, 3]
    assert found[1]["args"] == {
        "step": 1,
        "epoch": 0,
        "phase": "train",
        "sampled": True,
        "waited_ms": 2.0,
    }
    assert found[1]["dur"] == pytest.approx(_BATCH_S * 1e6)


def test_times_count_from_the_first_moment_and_are_never_negative(writer, path):
    # The step is told first, and began after the batch it used.
    writer.begin("train", 0)
    writer.step(_step(0))
    writer.batches(np.array([_span(0), _span(1)]))
    writer.end()
    # A validation whose first batch was made before anything else.
    _tell(writer, [_span(0, began_s=_BEGAN_S - 1)], [], "validation")
    writer.close({}, "Images")
    timed = [e for e in _read(path) if "ts" in e]
    assert min(e["ts"] for e in timed) == 0
    assert all(e.get("dur", 0) >= 0 for e in timed)
    assert _of(timed, "step")[0]["ts"] == pytest.approx(4000)


# -- names -------------------------------------------------------------------


def test_processes_and_threads_are_named(writer, path):
    _tell(writer, [_span(k) for k in range(2)], [_step(0), _step(1)])
    _tell(writer, [_span(0)], [_step(0, "validation")], "validation")
    writer.close({0: 4121, 1: 4122}, "Images")
    events = _read(path)
    assert sorted(_names(events, "process_name").values()) == [
        "training",
        "workers of Images",
    ]
    threads = _names(events, "thread_name")
    assert sorted(threads.values()) == [
        "data",
        "steps",
        "validation worker 0",
        "worker 0 (pid 4121)",
        "worker 1 (pid 4122)",
    ]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == set(threads)


def test_threads_have_no_process_in_their_names(writer, path):
    _tell(writer, [_span(0)], [])
    writer.close({}, "Images")
    assert "worker 0" in _names(_read(path), "thread_name").values()


def test_names_are_escaped(writer, path):
    name = 'Im"a\\g\nes\u2028é'
    _tell(writer, [_span(0)], [_step(0, phase='tr"ain')])
    writer.close({}, name)
    events = _read(path)
    assert f"workers of {name}" in _names(events, "process_name").values()
    assert _of(events, "step")[0]["args"]["phase"] == 'tr"ain'


def test_lost_workers_are_instants_on_their_thread(writer, path):
    _tell(writer, [_span(k) for k in range(2)], [])
    lost = [
        WorkerLoss(_BEGAN_S + 0.5, 1, 4122),
        WorkerLoss(_BEGAN_S + 1, 5, 4125),
    ]
    writer.close({}, "Images", losses=lost)
    events = _read(path)
    found = _of(events, "worker lost", "i")
    assert [(e["tid"], e["args"]["pid"]) for e in found] == [
        (1, 4122),
        (5, 4125),
    ]
    assert found[0]["ts"] == pytest.approx(500_000)
    assert "worker 5" in _names(events, "thread_name").values()


# -- arrows ------------------------------------------------------------------


def test_an_arrow_goes_from_each_build_to_its_step(writer, path):
    _tell(writer, [_span(k) for k in range(9)], [_step(k) for k in range(9)])
    writer.close({}, "Images")
    assert _arrows(_read(path)) == [(k, k) for k in range(9)]


def test_a_step_of_several_batches_has_an_arrow_from_each(writer, path):
    steps = [_step(k, batches=4) for k in (0, 4, 8)]
    _tell(writer, [_span(k) for k in range(11)], steps)
    writer.close({}, "Images")
    found = _arrows(_read(path))
    assert found == [(k, k - k % 4) for k in range(11)]


def test_a_batch_fetched_before_its_step_began_belongs_to_that_step(
    writer, path
):
    # As with PyTorch: step k begins when batch k has been delivered.
    early = [_span(k)._replace(delivered_s=_span(k).stored_s) for k in range(5)]
    _tell(writer, early, [_step(k) for k in range(5)])
    writer.close({}, "Images")
    assert _arrows(_read(path)) == [(k, k) for k in range(5)]


@pytest.mark.parametrize("order", ["steps", "batches", "mixed"])
def test_batches_and_steps_may_be_told_in_any_order(order, writer, path):
    spans = [_span(k) for k in range(2000)]
    steps = [_step(k) for k in range(2000)]
    blocks = [np.array(spans[i : i + 512]) for i in range(0, 2000, 512)]
    writer.begin("train", 0)
    if order == "batches":
        for block in blocks:
            writer.batches(block)
    for step in steps:
        writer.step(step)
        if order == "mixed" and step.number % 512 == 7:
            writer.batches(blocks.pop(0))
    if order == "steps":
        for block in blocks:
            writer.batches(block)
    writer.end()
    writer.close({}, "Images")
    events = _read(path)
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == 2000
    assert all(starts[i] <= finishes[i] for i in starts)


def test_stretches_do_not_mix(writer, path):
    for stretch, phase in enumerate(["train", "validation", "train"]):
        began_s = _BEGAN_S + stretch
        _tell(
            writer,
            [_span(k, began_s=began_s) for k in range(3)],
            [_step(k, phase, began_s) for k in range(3)],
            phase,
        )
    writer.close({}, "Images")
    events = _read(path)
    assert _arrows(events) == sorted([(k, k) for k in range(3)] * 3)
    phases = [e["args"]["phase"] for e in _of(events, "step")]
    assert phases == ["train"] * 3 + ["validation"] * 3 + ["train"] * 3


def test_batches_outside_of_a_stretch_have_no_step(writer, path):
    writer.batches(np.array([_span(0)]))
    _tell(writer, [_span(1), _span(2)], [_step(0), _step(1)])
    writer.close({}, "Images")
    events = _read(path)
    assert len(_of(events, "build")) == 3
    assert len([e for e in events if e["ph"] == "s"]) == 2


def test_a_batch_without_a_step_has_no_arrow(writer, path):
    _tell(writer, [_span(k) for k in range(3)], [])
    _tell(writer, [_span(3)], [_step(5)])
    writer.close({}, "Images")
    assert _arrows(_read(path)) == []


def test_a_step_that_ended_before_the_build_has_no_arrow(writer, path):
    late = _span(9)._replace(batch=1)
    _tell(writer, [_span(0), late], [_step(0)])
    writer.close({}, "Images")
    assert _arrows(_read(path)) == [(0, 0)]


# -- the file ----------------------------------------------------------------


def test_it_takes_its_place_when_it_is_closed(writer, path):
    path.write_text("an older one")
    _tell(writer, [_span(0)], [])
    assert path.read_text() == "an older one"
    writer.close({}, "Images")
    assert _of(_read(path), "build")
    assert os.listdir(path.parent) == [path.name]
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_closing_twice_is_closing_once(writer, path):
    _tell(writer, [_span(0)], [])
    writer.close({}, "Images")
    before = path.read_bytes()
    writer.close({}, "Others", losses=[WorkerLoss(_BEGAN_S, 0, 1)])
    _tell(writer, [_span(1)], [_step(1)])
    assert path.read_bytes() == before


def test_a_trace_of_nothing_is_a_trace(writer, path):
    writer.begin("train", 0)
    writer.end()
    writer.close({}, "")
    assert {e["ph"] for e in _read(path)} == {"M"}


def test_a_writer_that_is_collected_finishes_its_trace(path):
    writer = TraceWriter(path)
    _tell(writer, [_span(0)], [_step(0)])
    del writer
    gc.collect()
    assert _arrows(_read(path)) == [(0, 0)]


_SCRIPT = """
import os, signal
import numpy as np
from test_trace import _span, _step, _tell
from keras_fastdata.health.report.trace import TraceWriter

writer = TraceWriter("trace.json")
_tell(writer, [_span(k) for k in range(3)], [_step(k) for k in range(3)])
writer.begin("train", 1)
writer.batches(np.array([_span(3)]))
"""


def _run(tmp_path, script):
    path = [*sys.path, os.path.dirname(__file__)]
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT + textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.long
def test_an_exception_that_ends_the_interpreter_leaves_a_trace(tmp_path, path):
    done = _run(tmp_path, "raise ValueError('in training')")
    assert "in training" in done.stderr
    assert len(_of(_read(path), "build")) == 4


@pytest.mark.long
def test_a_forked_child_leaves_the_trace_to_its_parent(tmp_path, path):
    done = _run(
        tmp_path,
        """
        import sys
        if not os.fork():
            sys.exit()
        os.wait()
        print(os.path.exists("trace.json"))
        """,
    )
    assert done.stdout == "False\n", done.stderr
    assert len(_of(_read(path), "build")) == 4


@pytest.mark.long
def test_what_a_killed_process_leaves_can_be_completed(tmp_path, path):
    done = _run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".trace.json.")
    path.write_text(left.read_text() + "]}")
    assert _arrows(_read(path)) == [(0, 0), (1, 1), (2, 2)]


def test_a_folder_that_cannot_be_made_is_told_and_raises_nothing(
    tmp_path, caplog
):
    (tmp_path / "file").touch()
    writer = TraceWriter(tmp_path / "file" / "folder" / "trace.json")
    assert "The trace cannot be written: [Errno 20]" in caplog.text
    _tell(writer, [_span(0)], [])


def _refuse(fd, text):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_trace_and_not_the_training(
    writer, path, monkeypatch, caplog
):
    _tell(writer, [_span(0)], [_step(0)])
    monkeypatch.setattr(trace, "_write_all", _refuse)
    with caplog.at_level(logging.WARNING, "keras_fastdata"):
        for _ in range(3):
            _tell(writer, [_span(1)], [_step(1)])
        writer.close({}, "Images")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    (left,) = path.parent.iterdir()
    path.write_text(left.read_text() + "]}")
    assert _arrows(_read(path)) == [(0, 0)]


def test_a_disk_that_is_full_from_the_start_is_left_without_a_file(
    path, monkeypatch, caplog
):
    monkeypatch.setattr(trace, "_write_all", _refuse)
    writer = TraceWriter(path)
    _tell(writer, [_span(0)], [_step(0)])
    writer.close({}, "Images")
    assert "The trace cannot be written: [Errno 28]" in caplog.text
    assert [*path.parent.iterdir()] == []


# -- bounds ------------------------------------------------------------------


_MOMENTS = [
    Span._fields.index(f"{name}_s")
    for name in ("queued", "began", "built", "stored", "delivered")
]


def _tell_many(writer, count, with_steps=True):
    """Tells of so many batches, to the last of which `end` has not come."""
    block = np.array([_span(k) for k in range(512)])
    for start in range(0, count, 512):
        writer.batches(block)
        if with_steps:
            writer.step(_step(start, batches=512))
        block[:, _MOMENTS] += 512 * _BATCH_S


@pytest.mark.parametrize(
    "with_steps", [True, pytest.param(False, marks=pytest.mark.long)]
)
def test_memory_is_bounded_however_many_batches_there_are(
    with_steps, writer, path, monkeypatch
):
    monkeypatch.setattr(trace, "_ARROWS", 1024)
    writer.begin("train", 0)
    tracemalloc.start()
    try:
        _tell_many(writer, 4_096, with_steps)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.end()
    writer.close({}, "Images")
    # The peak is that of the arrows, and does not grow with the batches.
    assert path.stat().st_size > 1.5e6
    assert peak < 1.5e6


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_batches_need_a_few_megabytes(writer, monkeypatch):
    # By the process's memory: tracemalloc would take five minutes.
    written = 0

    def discard(fd, text):
        nonlocal written
        written += len(text)

    monkeypatch.setattr(trace, "_write_all", discard)
    writer.begin("train", 0)
    writer.batches(np.array([_span(0)]))
    before = psutil.Process().memory_info().rss
    _tell_many(writer, 1_000_000)
    assert written > 500e6
    assert psutil.Process().memory_info().rss - before < 64e6
    writer.end()


# -- with a meter ------------------------------------------------------------


@pytest.mark.parametrize("processes", [False, True])
def test_a_meter_tells_all_that_a_dataset_delivers(processes, writer, path):
    meter = EpochMonitor(lambda: None, fetches_ahead=False, sink=writer)
    dataset = Numbered(length=7)
    settings = Settings(workers=2, use_multiprocessing=processes)
    loader = Loader(dataset, settings)
    try:
        for phase in ("train", "validation", "train"):
            meter.begin(phase, 0)
            walk = iterate(loader, dataset, shuffle=False)
            walk.time_batches(0.0)
            for number in range(7):
                meter.step(number)
                asked = time.perf_counter()
                next(walk)
                meter.recorder.attach_source(loader, {})
                waited_s = time.perf_counter() - asked
                meter.recorder.add(walk.span, waited_s)
            meter.end()
        pool_stats = loader.pool_stats()
    finally:
        meter.close()
        loader.close()
    writer.close(pool_stats.pids, "Numbered", losses=pool_stats.losses)
    events = _read(path)
    assert _arrows(events) == sorted([(k, k) for k in range(7)] * 3)
    assert bool(_of(events, "store")) == processes
    assert len(_of(events, "deliver")) == 21
    threads = _names(events, "thread_name").values()
    assert any("(pid " in name for name in threads) == processes
    for build, deliver in zip(
        _of(events, "build"), _of(events, "deliver"), strict=True
    ):
        assert _ends(build) <= _ends(deliver) + 1e-3
