"""Reading the call stacks of other threads."""

from __future__ import annotations

import gc
import linecache
import sys
import threading

import pytest

from keras_fastdata import _call_stack

BUILDER = "/home/build.py"
SOURCE = """
def outer(arrived, gate): inner(arrived, gate, 3)
def inner(arrived, gate, depth):
    if depth:
        inner(arrived, gate, depth - 1)
    else:
        arrived.set()
        gate.wait()
"""


@pytest.fixture
def waiting(request):
    """A thread that waits in `inner`, of the file that the test names."""
    calls = {}
    exec(compile(SOURCE, request.param, "exec"), calls)
    arrived, gate = threading.Event(), threading.Event()
    exec(compile("def build(*args): outer(*args)", BUILDER, "exec"), calls)
    thread = threading.Thread(target=calls["build"], args=(arrived, gate))
    thread.start()
    arrived.wait()
    yield thread
    gate.set()
    thread.join()


FILES = ["/home/data.py", "/home/dätä/データ/😀.py", '/home/a "b", line 1.py']


@pytest.mark.parametrize(
    ("waiting", "file"), [(file, file) for file in FILES], indirect=["waiting"]
)
def test_the_stack_of_another_thread_has_its_files_lines_and_functions(
    waiting, file
):
    stack = _call_stack.stack_of(waiting.ident)
    assert [tuple(call) for call in stack if call.file == file] == [
        (file, 8, "inner"),
        *[(file, 5, "inner")] * 3,
        (file, 2, "outer"),
    ]


@pytest.mark.parametrize("waiting", FILES[:1], indirect=True)
def test_the_folded_stack_has_a_recursion_once_and_one_line_functions(waiting):
    threads = [threading.get_ident(), waiting.ident]
    thread, stack = _call_stack.folded_stack(threads, BUILDER)
    assert thread == waiting.ident
    assert stack.startswith(
        "outer (/home/data.py:2);inner (/home/data.py:5);"
        f"inner (/home/data.py:8);wait ({threading.__file__}:"
    )
    assert _call_stack.folded_stack(threads, "/home/another.py") is None


@pytest.mark.parametrize("waiting", FILES[:1], indirect=True)
def test_a_place_is_what_a_function_has_called(waiting):
    place = _call_stack.place_of(waiting.ident, (FILES[0], "inner"))
    assert [call.line for call in place if call.file == FILES[0]] == [8, 5, 5]


@pytest.fixture
def collecting_always():
    """Lets Python collect garbage at nearly each object that is made."""
    threshold, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("waiting", FILES[:1], indirect=True)
def test_no_garbage_is_collected_while_a_stack_is_read(
    waiting, is_enabled, monkeypatch, collecting_always
):
    # CPython 3.11 would crash at times: the other thread goes on meanwhile.
    read, collected_at = [], []
    describe = _call_stack._described

    def described(frame):
        read.append([frame.f_lineno])
        return describe(frame)

    def collect(phase, info):
        collected_at.append(len(read))

    monkeypatch.setattr(_call_stack, "_described", described)
    (gc.enable if is_enabled else gc.disable)()
    gc.callbacks.append(collect)
    try:
        _call_stack.stack_of(waiting.ident)
        assert gc.isenabled() is is_enabled
    finally:
        gc.callbacks.remove(collect)
    assert len(read) > 5
    assert set(collected_at) <= {0, len(read)}


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert _call_stack.stack_of(thread.ident) == ()


@pytest.mark.parametrize(
    ("line", "is_header"),
    [
        ("    def get(self, index):\n", True),
        ("    async def get(  # of a batch\n", True),
        ("    @functools.cache\n", True),
        ("def get(self, index,\n", True),
        ("def get(self, index): return read(index)\n", False),
        ("get = lambda index: read(index)\n", False),
        ("    return default(index)\n", False),
    ],
)
def test_a_line_with_work_of_its_own_is_no_header(monkeypatch, line, is_header):
    _call_stack._is_header.cache_clear()
    monkeypatch.setattr(linecache, "getline", lambda *_: line)
    assert _call_stack._is_header("/home/data.py", 1) is is_header
    _call_stack._is_header.cache_clear()


@pytest.mark.parametrize("waiting", FILES[:1], indirect=True)
def test_without_the_lock_no_other_threads_frames_are_read(
    waiting, monkeypatch
):
    assert _call_stack.stack_of(waiting.ident)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(sys, "_current_frames", None)
    assert _call_stack.stack_of(waiting.ident) == ()
