"""Files that are replaced in one piece: by whom, with which permissions."""

from __future__ import annotations

import errno
import os
import pathlib
import secrets
import time

import numpy as np
import pytest
from health_records import simulated_record
from samples import Numbered

from keras_fastdata import _atomic_write
from keras_fastdata.callbacks.saved_states import SavedStates
from keras_fastdata.engine.cache import DiskCache
from keras_fastdata.health.report.html import write_report
from keras_fastdata.health.report.trace import TraceWriter


def _checkpoint(path):
    """Saves a state of a dataset."""
    state = Numbered(2, workers=0).state_dict()
    SavedStates(str(path)).add({"epoch": 0, "saved_at": None, "dataset": state})


def _trace(path):
    TraceWriter(path).close({}, "Images")


def _batch(path):
    cache = DiskCache("Any", path.parent, None)
    cache.put(int(path.stem), np.zeros(3))
    assert cache.holds(int(path.stem))


WRITERS = {
    "data.json": _checkpoint,
    "report.html": lambda path: write_report(simulated_record(), path),
    "trace.json": _trace,
    "0.batch": _batch,
}
writers = pytest.mark.parametrize("name", WRITERS)


@writers
def test_permissions_of_a_new_file_follow_the_umask(tmp_path, name):
    before = os.umask(0o027)
    try:
        WRITERS[name](tmp_path / name)
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == [name]
    assert os.stat(tmp_path / name).st_mode & 0o777 == 0o640


@writers
def test_links_that_were_put_there_are_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text('{"states": []}')
    for link in (f"{name}.tmp", f".{name}.tmp", name):
        if link != "0.batch":  # which is read first, and is there
            (tmp_path / link).symlink_to(victim)
    WRITERS[name](tmp_path / name)
    assert victim.read_text() == '{"states": []}'
    assert not (tmp_path / name).is_symlink()


def test_a_name_that_was_guessed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    victim = tmp_path / "victim"
    link = tmp_path / ".new.guessed.tmp"
    link.symlink_to(victim)
    with (
        pytest.raises(FileExistsError),
        _atomic_write.replacing(tmp_path / "new") as file,
    ):
        file.write(b"a")
    assert not victim.exists()


def test_a_cache_removes_what_killed_writers_have_left(tmp_path):
    batch = tmp_path / "Any-1" / "0.batch"
    old, new = (pathlib.Path(_atomic_write.name_beside(batch)) for _ in "12")
    of_others = batch.parent / ".mine.tmp"
    for path in (old, new, of_others):
        path.touch()
    days_ago_s = time.time() - 2 * 24 * 3600
    os.utime(old, (days_ago_s, days_ago_s))
    os.utime(of_others, (days_ago_s, days_ago_s))
    DiskCache("Any", tmp_path / "Any-2", None)
    assert set(batch.parent.iterdir()) == {new, of_others}


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_whose_writing_fails_is_as_it_was(tmp_path, durable, error):
    path = tmp_path / ("a long name " * 20)
    path.write_text("before")

    def fail():
        with _atomic_write.replacing(path, durable=durable) as file:
            file.write(b"a half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == [path.name]
    with _atomic_write.replacing(path, durable=durable) as file:
        file.write(b"all")
    assert path.read_text() == "all"


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no device that is always full"
)
def test_a_full_disk_is_reported_with_the_path(tmp_path):
    path = tmp_path / "data.json"
    with (
        pytest.raises(OSError, match=r"No space left.*data\.json") as caught,
        _atomic_write.replacing(path),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"1")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
