"""`profile` and `keras-fastdata profile`: where to build batches."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import pty
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import profile_samples as samples
import pytest
from samples import Numbered

from keras_fastdata import FastPyDataset, GeneratorDataset, profile
from keras_fastdata.__main__ import main
from keras_fastdata.profiling import Profile, _settings

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_HERE = pathlib.Path(samples.__file__).parent
_FILE = samples.__file__
_QUICK = ["--batches", "3", "--seconds", "1"]


@pytest.fixture(autouse=True)
def _modules_and_path_are_put_back():
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "samples" in name or name.startswith("__fastdata"):
            del sys.modules[name]


def _profile(dataset, batches=4, seconds=2.0):
    with dataset:
        return profile(dataset, batches=batches, seconds=seconds)


def _run(*arguments, prelude="", **options):
    """The command in a process of its own; returns what it did."""
    script = (
        f"{prelude}\nimport runpy, sys\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "runpy.run_module('keras_fastdata', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )


# -- the figures -------------------------------------------------------------


def test_all_five_ways_are_measured_and_more_are_worked_out():
    found = _profile(samples.Quick())
    assert isinstance(found, Profile)
    measured = [
        (r.kind, r.workers) for r in found.rates if r.measured is not None
    ]
    assert measured == [
        ("inline", 0),
        ("thread", 1),
        ("thread", 2),
        ("process", 1),
        ("process", 2),
    ]
    assert all(r.measured > 0 for r in found.rates if r.measured is not None)
    assert all(r.expected > 0 for r in found.rates)
    for kind in ("thread", "process"):
        workers = [r.workers for r in found.rates if r.kind == kind]
        assert {1, 2, 4, 8, 16} <= set(workers)
        assert workers == sorted(workers)


def test_a_batch_and_its_build_are_described():
    found = _profile(samples.Quick())
    assert found.dataset == "Quick"
    assert found.num_batches == 3
    assert found.nbytes == 4 * 4 * 4 + 4 * 4
    assert 0 < found.build_s_p50 <= found.build_s_p95
    assert 0 <= found.computing <= 1
    assert found.start_s > 0
    assert found.worker_nbytes is None or found.worker_nbytes > 1e6
    assert found.cores > 0
    assert found.no_processes == ""


def test_a_profile_cannot_be_changed():
    found = _profile(samples.Quick())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.workers = 3


def test_the_text_names_the_call_and_fits_80_columns():
    found = _profile(samples.Sleeping())
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "Sleeping: 20 batches" in text
    assert f"Use         {found.call}" in text
    (advised,) = [line for line in text.splitlines() if "<--" in line]
    assert f" {found.workers} " in advised


def test_a_dataset_without_an_end_is_profiled():
    found = _profile(samples.Endless())
    assert found.num_batches is None
    assert "Endless: no end" in str(found)


def test_a_dataset_shorter_than_what_is_asked_for_is_walked_again():
    assert _profile(samples.Quick(), batches=10).nbytes == 80


# -- the advice --------------------------------------------------------------


def test_a_dataset_that_sleeps_is_advised_more_threads():
    found = _profile(samples.Sleeping())
    assert found.workers > 2
    assert not found.use_multiprocessing
    assert found.computing < 0.5
    assert found.workers * 2 == found.max_queue_size
    assert found.call == (
        f"Sleeping(..., workers={found.workers}, "
        f"max_queue_size={found.max_queue_size})"
    )


def test_a_queue_that_is_long_enough_is_left_alone():
    found = _profile(samples.Sleeping(max_queue_size=100))
    assert found.max_queue_size is None
    assert "max_queue_size" not in found.call


@pytest.mark.long
@pytest.mark.alone  # else the cores are full, and processes bring nothing
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core is for one worker"
)
def test_a_dataset_that_runs_python_is_advised_processes():
    found = _profile(samples.Looping(), batches=12, seconds=10)
    assert found.use_multiprocessing
    assert found.workers >= 2
    assert found.computing > 0.5
    assert found.call.endswith(", use_multiprocessing=True)")


@pytest.mark.long
def test_one_core_is_advised_no_more_than_one_worker_that_computes(tmp_path):
    done = _run(
        *["profile", f"{_FILE}:Looping", "--json", "--batches", "6"],
        prelude=(
            "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cores"] == 1
    assert found["workers"] <= 1


def test_a_dataset_that_cannot_be_pickled_is_tried_in_threads_alone():
    found = _profile(samples.Generating())
    assert "`dataset.generator`" in found.no_processes
    assert {r.kind for r in found.rates} == {"inline", "thread"}
    assert not found.use_multiprocessing
    assert math.isnan(found.start_s)
    assert json.loads(found.to_json())["start_s"] is None
    assert max(map(len, str(found).splitlines())) <= 80


# -- what stays as it was ----------------------------------------------------


class Opening(FastPyDataset):
    """Keeps notes on itself, and draws."""

    def __len__(self):
        return 4

    def on_worker_start(self):
        self.reader = object()
        self.opened = True

    def __getitem__(self, index):
        self.latest = index
        return self.rng.normal(size=3), np.zeros(3)


def test_builds_are_measured_and_not_the_cache(tmp_path):
    cached = samples.Sleeping(cache=tmp_path / "cache", cache_version=1)
    assert _profile(cached).build_s_p50 >= 0.03
    assert not (tmp_path / "cache").exists()


def test_the_dataset_is_afterwards_what_it_was():
    dataset = Opening(workers=3, max_queue_size=4)
    dataset.opened = False
    attributes = dict(vars(dataset))
    settings = dataset._fastdata.settings
    profile(dataset, batches=3, seconds=1)
    assert vars(dataset) == attributes
    assert dataset._fastdata.settings is settings
    assert (dataset.workers, dataset.use_multiprocessing) == (3, False)
    assert dataset._fastdata.loader is None


@pytest.mark.parametrize("seed", [None, 5])
def test_the_batches_afterwards_are_what_they_would_have_been(seed):
    def batches(profiled):
        random.seed(1)
        with Opening(seed=seed) as dataset:
            first = [x for x, _ in dataset]
            if profiled:
                profile(dataset, batches=3, seconds=1)
            return first + [x for x, _ in dataset], dataset.epoch

    assert np.array_equal(batches(True)[0], batches(False)[0])
    assert batches(True)[1] == batches(False)[1] == 2


def test_global_generators_are_left_alone():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    profile(Opening(), batches=3, seconds=1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_dataset_for_ray_is_measured_on_this_machine():
    dataset = Numbered(workers=2, executor="ray", ray_options={"num_cpus": 1})
    for workers, processes, kind in (
        (0, False, "inline"),
        (2, False, "thread"),
        (2, True, "process"),
    ):
        assert _settings(dataset, workers, processes).kind == kind


def test_an_epoch_under_way_goes_on():
    with Opening(workers=2, use_multiprocessing=True) as dataset:
        walk = iter(dataset)
        next(walk)
        pids = dataset._fastdata.loader.pool_stats().pids
        profile(dataset, batches=3, seconds=1)
        assert len(list(walk)) == 3
        assert dataset._fastdata.loader.pool_stats().pids == pids


def test_an_error_of_the_dataset_arrives_and_leaves_it_as_it_was():
    dataset = samples.Broken()
    attributes = dict(vars(dataset))
    with pytest.raises(ValueError, match="no such image"):
        profile(dataset, batches=4, seconds=1)
    assert vars(dataset) == attributes


# -- arguments ---------------------------------------------------------------


def test_what_is_no_dataset_is_a_type_error():
    with pytest.raises(TypeError, match=r"takes a FastPyDataset.*int"):
        profile(3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batches": 0}, ValueError),
        ({"batches": 2.5}, TypeError),
        ({"batches": True}, TypeError),
        ({"seconds": 0}, ValueError),
        ({"seconds": math.inf}, ValueError),
        ({"seconds": "5"}, TypeError),
    ],
)
def test_numbers_out_of_range_are_errors(arguments, error):
    (name,) = arguments
    with pytest.raises(error, match=f"`{name}` must be .*Received"):
        profile(samples.Quick(), **arguments)


def test_a_dataset_without_batches_is_an_error():
    with pytest.raises(ValueError, match="Empty has no batches"):
        profile(samples.Empty())


def test_a_dataset_of_a_generator_is_an_error():
    dataset = GeneratorDataset(lambda: iter([(1, 2)]), batch_size=1)
    with pytest.raises(ValueError, match=r"GeneratorDataset has a generator"):
        profile(dataset)


# -- the command -------------------------------------------------------------


@pytest.mark.long
def test_a_file_without_a_main_guard_is_profiled(tmp_path):
    # Its folder is on the path, for workers too.
    script = tmp_path / "training.py"
    script.write_text(
        "import numpy as np\n"
        "import helper\n"
        "from keras_fastdata import FastPyDataset\n"
        "with open('log', 'a') as file:\n"
        "    file.write('run\\n')\n"
        "class Helped(FastPyDataset):\n"
        "    def __len__(self):\n"
        "        return helper.LENGTH\n"
        "    def __getitem__(self, index):\n"
        "        return np.zeros(helper.LENGTH)\n"
    )
    (tmp_path / "helper.py").write_text("LENGTH = 4\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = _run("profile", f"{script}:Helped", *_QUICK, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Helped: 4 batches\n")
    assert "processes" in done.stdout
    assert _said(done.stderr) == ""
    assert (elsewhere / "log").read_text() == "run\n"


@pytest.mark.long
def test_json_is_alone_on_standard_output(tmp_path):
    done = _run("profile", f"{_FILE}:Chatty", *_QUICK, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fields = {field.name for field in dataclasses.fields(Profile)}
    assert set(found) == fields | {"call"}
    assert found["dataset"] == "Chatty"
    assert "building 0" in done.stderr
    assert "past Python" in done.stderr


@pytest.mark.parametrize(
    "target", [f"{_FILE}:quick", f"{_FILE}:make", "profile_samples:Quick"]
)
def test_a_dataset_a_function_or_a_class_will_do(target, capfd):
    assert main(["profile", target, *_QUICK]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("Quick: 3 batches\n")
    assert err == ""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("profile_samples", "MODULE:NAME or FILE.py:NAME"),
        ("nowhere:make", "no module 'nowhere'"),
        ("nowhere.py:make", "no file nowhere.py"),
        ("profile_samples:Missing", "has no 'Missing'. It has: .*:Quick"),
        ("profile_samples:number", "is 3 .of type int.. It must be"),
        ("profile_samples:make_nothing", "returned None"),
        ("profile_samples:np.ndarray", "is the class ndarray"),
        ("profile_samples:Demanding", "missing a required argument: 'folder'"),
        ("profile_samples:Empty", "has no batches"),
    ],
)
def test_what_cannot_be_profiled_is_said_and_exits_2(target, message, capfd):
    assert main(["profile", target, *_QUICK]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert max(map(len, err.splitlines())) <= 80
    assert "Traceback" not in err
    assert re.search(message, err.replace("\n", " "))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["profile"],
        ["profile", "a:b", "--batches", "0"],
        ["profile", "a:b", "--seconds", "-1"],
        ["profile", "a:b", "--seconds", "nan"],
    ],
)
def test_a_command_that_is_not_understood_exits_2(arguments, capfd):
    with pytest.raises(SystemExit) as found:
        main(arguments)
    assert found.value.code == 2
    assert "usage: keras-fastdata" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("profile_samples:Broken", "ValueError: no such image"),
        ("profile_samples:make_error", "RuntimeError: in the factory"),
    ],
)
def test_what_the_dataset_raises_is_shown_and_exits_1(target, message, capfd):
    assert main(["profile", target, *_QUICK]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" in err
    assert message in err
    assert "profile_samples.py" in err


def test_a_module_that_lacks_an_import_shows_where(tmp_path, capfd):
    script = tmp_path / "lacking.py"
    script.write_text("import nowhere_to_be_found\n")
    assert main(["profile", f"{script}:make"]) == 1
    sys.path.insert(0, str(tmp_path))
    assert main(["profile", "lacking:make"]) == 1
    assert capfd.readouterr().err.count("lacking.py") == 2


def _said(text):
    """Standard error, without what TensorFlow's C++ says when it starts."""
    noise = re.compile(r"WARNING: All log messages before absl|[IWE]\d{4} ")
    return "\n".join(li for li in text.splitlines() if not noise.match(li))


@pytest.mark.long
def test_ctrl_c_exits_130_and_says_nothing(tmp_path):
    command = [sys.executable, "-m", "keras_fastdata", "profile"]
    process = subprocess.Popen(
        [*command, f"{_FILE}:Announced"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "building").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=280)
    assert (process.returncode, out, _said(err)) == (130, "", "")


@pytest.mark.long
def test_a_terminal_shows_progress(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "keras_fastdata", "profile", *_QUICK]
    with subprocess.Popen(
        [*command, f"{_FILE}:Quick"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # EIO: the other end is closed
            pass
        os.close(ours)
        out = process.stdout.read()
    assert process.returncode == 0
    assert out.startswith("Quick: ")
    assert b"/22 batches  2 processes" in shown
    assert shown.endswith(b"\r")


def test_a_profile_is_one_line_in_a_shell_and_escaped_html_in_a_notebook():
    found = dataclasses.replace(
        profile(Numbered(), batches=1, seconds=1),
        reason="<script>",
        num_batches=None,
    )
    assert re.fullmatch(
        r"<Profile of Numbered: \S+ m?s a batch; use .*>", repr(found)
    )
    page = found._repr_html_()
    assert "Numbered: no end" in page
    assert "<th" in page
    assert "&lt;--" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
