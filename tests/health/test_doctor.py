"""`keras-fastdata doctor` and `demo`: what a stranger runs first."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from keras_fastdata.commands import doctor
from keras_fastdata.commands.doctor import Fact, Level

_ROOT = pathlib.Path(__file__).parents[2]
_STRIPPED = _ROOT / "tests" / "support" / "stripped"


def _run(*command, within=(), path=(), **environment):
    """Runs a command of the package; returns its status and its output."""
    paths = [*map(str, path), str(_ROOT), *filter(None, sys.path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for name, value in environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    done = subprocess.run(
        [*within, sys.executable, "-m", "keras_fastdata", *command],
        env={**variables, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    for line in done.stdout.splitlines():
        is_one_word = " " not in line.strip()  # such as a path
        assert len(line) <= 80 or is_one_word, line
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, " ".join(done.stdout.split())


def _can_unshare():
    command = ["unshare", "-m", "true"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def trial(monkeypatch):
    """Has `doctor` try nothing, and find given results."""

    def results(*steps, ended="ended with status 0"):
        monkeypatch.setattr(doctor, "_trial", lambda: ([*steps], ended))
        return [*doctor._tried()][1:]

    return results


_KERAS = {
    "step": "keras",
    "version": "3.15.1",
    "backend": "jax",
    "devices": ["cpu:0"],
    "took_s": 2.0,
}


def test_it_starts_workers_in_each_way_and_says_that_nothing_is_broken():
    status, said = _run("doctor")
    assert status == 0, said
    assert said.endswith("Nothing is broken.")
    assert re.search(
        r"forkserver \(.*s\), spawn \(.*s\), fork \(.*s\), portable \(.*s\)",
        said,
    )
    assert f"Keras {sys.modules['keras'].__version__} uses" in said
    if backend := os.environ.get("KERAS_BACKEND"):
        assert f"(KERAS_BACKEND={backend} is set)" in said


@pytest.mark.long
def test_without_what_only_linux_has_workers_are_portable():
    status, said = _run("doctor", path=[_STRIPPED])
    assert status == 0, said
    assert "The system lacks or refuses fork, memfd_create" in said
    assert 'will be new interpreters (`start_method="portable"`)' in said
    assert "in these ways built batches: portable (" in said


def test_a_backend_that_does_not_exist_is_broken():
    status, said = _run("doctor", KERAS_BACKEND="theano")
    assert status == 1
    assert "Keras cannot be imported (KERAS_BACKEND=theano is set):" in said
    assert "Choose a backend that is installed (tensorflow" in said
    assert said.endswith("1 thing is broken.")


@pytest.mark.long
def test_a_backend_whose_import_raises_is_broken(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no such symbol')")
    status, said = _run("doctor", path=[tmp_path], KERAS_BACKEND="jax")
    assert status == 1
    assert "(KERAS_BACKEND=jax is set): ImportError: no such symbol" in said


def test_the_backend_is_chosen_by_a_variable_a_file_or_nobody(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert doctor._chosen() == "KERAS_BACKEND=jax is set"
    monkeypatch.delenv("KERAS_BACKEND")
    assert doctor._chosen() == "KERAS_BACKEND is not set"
    (tmp_path / "keras.json").write_text('{"backend": "theano"}')
    assert "keras.json says theano, and" in doctor._chosen()


@pytest.mark.long
def test_a_file_may_name_a_backend_that_does_not_exist(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "theano"}')
    home = {"KERAS_BACKEND": None, "KERAS_HOME": str(tmp_path)}
    status, said = _run("doctor", **home)
    assert status == 1
    assert "keras.json says theano, and KERAS_BACKEND is not set):" in said


@pytest.mark.long
@pytest.mark.skipif(not _can_unshare(), reason="mounts need privileges")
@pytest.mark.parametrize(
    ("mount", "fact"),
    [
        ("mount -t tmpfs -o size=1m none", "/dev/shm is writable, and 1.0 MB"),
        ("mount -t tmpfs -o ro none", "/dev/shm cannot be written to."),
    ],
)
def test_workers_do_not_need_dev_shm(mount, fact):
    within = ["unshare", "-m", "sh", "-c", f'{mount} /dev/shm; exec "$@"', "-"]
    status, said = _run("doctor", within=within)
    assert status == 0, said
    assert fact in said
    assert "other workers do not." in said
    assert "forkserver (" in said


def test_a_missing_dev_shm_matters_to_portable_workers_alone(monkeypatch):
    monkeypatch.setattr(doctor, "_SHARED_MEMORY", "/nowhere")
    assert doctor._dev_shm(is_needed=False).level is Level.NOTE
    found = doctor._dev_shm(is_needed=True)
    assert found.level is Level.BROKEN
    assert found.fact == "/nowhere is missing."


@pytest.mark.long
@pytest.mark.skipif(not _can_unshare(), reason="mounts need privileges")
def test_portable_workers_need_dev_shm():
    mount = 'mount -t tmpfs -o ro none /dev/shm; exec "$@"'
    within = ["unshare", "-m", "sh", "-c", mount, "-"]
    status, said = _run("doctor", within=within, path=[_STRIPPED])
    assert status == 1
    assert "BROKEN /dev/shm cannot be written to. Worker processes need" in said
    assert "BROKEN No worker could be used that was started by port" in said
    assert said.endswith("2 things are broken.")


def test_a_broken_default_names_the_start_method_that_works(trial):
    _, good, bad = trial(
        _KERAS,
        {"step": "forkserver", "error": "LoaderError: no more processes"},
        {"step": "spawn", "took_s": 1.0},
    )
    assert good.level is Level.OK
    assert bad.level is Level.BROKEN
    assert "started by forkserver: LoaderError: no more" in bad.fact
    assert "or `start_method='spawn'`" in bad.follows


def test_another_broken_start_method_breaks_nothing(trial):
    *_, bad = trial(
        _KERAS,
        {"step": "forkserver", "took_s": 1.0},
        {"step": "fork", "begun": True},
        ended="did not end within 240 s",
    )
    assert bad.level is Level.NOTE
    assert "by fork: the process did not end within 240 s" in bad.fact


def test_a_keras_that_ends_the_process_is_broken(trial):
    (found,) = trial(
        {"step": "keras", "begun": True}, ended="ended with status -4"
    )
    assert found.level is Level.BROKEN
    assert "the process ended with status -4" in found.fact


def test_the_process_that_tries_may_end_at_any_line(monkeypatch):
    monkeypatch.setattr(doctor, "_TRIAL_S", 0.0)
    results, ended = doctor._trial()
    assert ended.startswith("did not end within")
    assert results == []


def test_a_missing_or_old_package_is_broken():
    found = doctor._required(["numpy>=2.0", "keras>=99", "no_such_package"])
    assert found.level is Level.BROKEN
    assert "keras>=99 (3." in found.fact
    assert "no_such_package (missing)" in found.fact
    assert found.follows.endswith("'keras>=99' 'no_such_package'`.")
    assert doctor._required(["numpy>=2.0"]).level is Level.OK


def test_an_extra_that_is_not_installed_is_no_fault():
    found = doctor._extra("ray", ["no_such_package>=1"])
    assert found.level is Level.NOTE
    assert "`pip install 'keras-fastdata[ray]'`" in found.follows


def test_a_finding_has_lines_of_at_most_80_characters(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = str(Fact(Level.BROKEN, "word " * 60, "other " * 60))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("  BROKEN word")
    assert all(line.startswith(" " * 9) for line in text.splitlines()[1:])


def test_one_core_gains_from_workers_only_where_builds_wait(monkeypatch):
    reading = doctor.cpu.Reading(0.0, 1.0, True, None)
    monkeypatch.setattr(doctor.cpu, "read", lambda: reading)
    found = next(doctor._machine())
    assert found.level is Level.NOTE
    assert "by the CPU quota of its cgroup" in found.fact
    assert "gain nothing from workers" in found.follows


@pytest.mark.long
def test_the_demo_trains_inline_and_with_workers():
    status, said = _run("demo")
    assert status == 0, said
    assert said.count("io_bound") > 3
    assert "The batches were the same." in said
