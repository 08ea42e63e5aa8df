"""Installed packages are imported once, before the workers are forked.

The packages of these tests are files in a folder "site-packages". Each notes
the process that imports it: all workers have the same note if they share one
import, and their own if each imports the package itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import pathlib
import resource
import signal
import sys
import textwrap
import threading
import types

import keras
import numpy as np
import psutil
import pytest
from places import EVERY_KIND, PLACES, everywhere, quickly
from samples import Numbered, numbers
from trainers import Trainer

from keras_fastdata import LoaderError
from keras_fastdata import _modules as modules
from keras_fastdata.workers.process import (
    forkserver_connection,
    forkservers,
    imports,
)

PROCESSES = {"workers": 2, "use_multiprocessing": True}
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
kept = pytest.mark.usefixtures("kept_forkserver")

NOTE = "import os\nIMPORTED_BY = os.getpid()\n"

# Each batch tells who has built it and who has imported the modules.
DATASET = """
import itertools
import os
import sys
{imports}
from keras_fastdata import FastPyDataset

# Not a number: workers would be told what it is in the training process.
IMPORTED_BY = (pid for pid in itertools.repeat(os.getpid())).__next__
PACKAGES = {packages}

class Told(FastPyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        found = {{name: sys.modules.get(name) for name in PACKAGES}}
        told = {{k: getattr(v, "IMPORTED_BY", 0) for k, v in found.items()}}
        return {{"worker": os.getpid(), "mine": IMPORTED_BY(), **told,
                 "more": {more}}}
"""


class Site:
    """A folder of installed packages, and one of the user's modules."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.installed = folder / "site-packages"
        self.mine = folder / "mine"
        self.once = folder / "once"
        self.names: list[str] = []
        for each in (self.installed, self.mine):
            each.mkdir()

    def package(self, name: str, source: str = "") -> str:
        """Writes a package that notes who imports it, and imports it here."""
        source = textwrap.dedent(source)
        file = self.installed / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(NOTE + f"ONCE = {str(self.once)!r}\n" + source)
        self._import(name)
        return name

    def trouble(self, name: str, source: str) -> str:
        """Writes a package whose first import elsewhere runs `source`."""
        self.once.touch()
        source = textwrap.indent(textwrap.dedent(source), "    ")
        name = self.package(
            name,
            "import contextlib, signal, subprocess, sys, threading, time\n"
            "first = False\n"
            "with contextlib.suppress(FileExistsError):\n"
            "    os.close(os.open(ONCE, os.O_CREAT | os.O_EXCL))\n"
            "    first = True\n"
            f"if first:\n{source}\n",
        )
        self.once.unlink()
        return name

    def dataset(self, *imported, name="told", more="0", tells=None):
        """Writes a module of the user's, and returns its class of datasets."""
        self.module(
            name,
            DATASET.format(
                imports="\n".join(f"import {each}" for each in imported),
                packages=repr([*(tells or imported)]),
                more=more,
            ),
        )
        return sys.modules[name].Told

    def module(self, name: str, source: str) -> None:
        (self.mine / f"{name}.py").write_text(source)
        self._import(name)

    def _import(self, name: str) -> None:
        self.names.append(name)
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        importlib.import_module(name)


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path)
    # What is compiled in the same second would hide what is written later.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # As pytest does, it would give each phase of a test an environment.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.syspath_prepend(str(made.mine))
    monkeypatch.syspath_prepend(str(made.installed))
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


def told(dataset):
    """What the batches of an epoch tell; some of each worker's."""
    found = list(dataset)
    for told in found:
        assert told["mine"] == told["worker"]  # never shared
    return found


def importers(batches, package):
    return {int(batch[package]) for batch in batches}


def assert_shared(batches, *packages):
    for package in packages:
        (importer,) = importers(batches, package)
        assert importer not in {batch["worker"] for batch in batches}
        assert importer != os.getpid()


def assert_own(batches, package):
    assert all(batch[package] == batch["worker"] for batch in batches)


def refusals(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Each worker process imports")
    ]


# -- what is shared ------------------------------------------------------------


@kept
def test_workers_share_the_import_of_an_installed_package(site, caplog):
    kind = site.dataset(site.package("alpha"), site.package("beta"))
    with kind(**PROCESSES) as dataset:
        assert_shared(told(dataset), "alpha", "beta")
    assert not refusals(caplog)


@kept
def test_a_package_that_a_module_of_the_user_imports_is_shared(site):
    site.package("alpha")
    site.module("tools", "import alpha\n")
    with site.dataset("tools", tells=["alpha"])(**PROCESSES) as dataset:
        assert_shared(told(dataset), "alpha")


@kept
def test_a_package_that_an_attribute_is_of_is_shared(site):
    site.package("alpha", "class Thing: pass\n")
    kind = site.dataset(more="sys.modules['alpha'].IMPORTED_BY")
    with kind(**PROCESSES) as dataset:
        dataset.thing = sys.modules["alpha"].Thing()
        assert_shared(told(dataset), "more")


@kept
def test_a_package_that_a_class_of_the_script_names_is_shared(site):
    alpha = sys.modules[site.package("alpha")]
    base = site.dataset()

    class Local(base):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "alpha": alpha.IMPORTED_BY}

    with Local(**PROCESSES) as dataset:
        assert_shared(told(dataset), "alpha")


@kept
def test_later_datasets_share_what_earlier_ones_have_imported(site):
    site.package("alpha"), site.package("beta")
    one = site.dataset("alpha", name="one")
    other = site.dataset("alpha", "beta", name="other")
    with (
        one(**PROCESSES) as first,
        one(**PROCESSES) as again,
        other(**PROCESSES) as more,
    ):
        batches = told(first)
        importer = importers(batches, "alpha")
        assert importers(told(again), "alpha") == importer
        both = told(more)
        assert_shared(both, "alpha", "beta")
        assert importers(both, "alpha") == importer
        assert importers(both, "beta") != importer


@kept
def test_a_dataset_has_no_packages_of_another(site):
    heavy = site.dataset(site.package("alpha"), name="heavy")
    light = site.dataset(name="light", more="'alpha' in sys.modules")
    with heavy(**PROCESSES) as one, light(**PROCESSES) as other:
        told(one)
        assert not any(batch["more"] for batch in told(other))


@kept
def test_the_module_of_a_class_that_travels_by_value_is_not_imported(site):
    site.package("alpha")
    site.module(
        "makes",
        """
import os
import sys
import alpha
from keras_fastdata import FastPyDataset

def make(**kwargs):
    class Local(FastPyDataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return {"found": [*{"alpha", "makes"} & {*sys.modules}]}
    return Local(**kwargs)
""",
    )
    with sys.modules["makes"].make(**PROCESSES) as dataset:
        assert [batch["found"] for batch in dataset] == [[]] * 4


TRAINS = """
import dataclasses
import keras
import numpy as np
from keras_fastdata import FastPyDataset

SCALE = 2

@dataclasses.dataclass
class Item:
    number: int

def scaled(item):
    return item.number * SCALE

class Numbers(FastPyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.items = [Item(number) for number in range(4)]
    def __len__(self):
        return 4
    def __getitem__(self, index):
        {first}
        x = np.full((2, 1), scaled(self.items[index]), "float32")
        return x, np.full((2, 1), os.getpid(), "float32")

numbers = Numbers(workers=2, use_multiprocessing=True)
with numbers:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(numbers, epochs=2, verbose=0)
    model.predict(numbers, verbose=0)
"""


@pytest.mark.backend
def test_a_module_may_train_while_it_is_imported(site):
    site.module("trains_once", NOTE + TRAINS.format(first=""))
    module = sys.modules["trains_once"]
    module.SCALE = 3
    with module.numbers as dataset:
        batches = [(int(x[0, 0]), int(y[0, 0])) for x, y in dataset]
    assert [x for x, _ in batches] == [0, 3, 6, 9]
    assert os.getpid() not in {pid for _, pid in batches}


@pytest.mark.backend
def test_a_worker_that_would_train_during_an_import_is_an_error(site):
    (site.mine / "uses_trains.py").write_text("import trains_again\n")
    text = NOTE + TRAINS.format(first="import uses_trains")
    with pytest.raises(LoaderError, match="`trains_again`, which has used"):
        site.module("trains_again", text)


def _opened(kind):
    """The batches of an epoch of a dataset that is closed then."""
    with kind(**PROCESSES) as dataset:
        return told(dataset)


def test_the_fork_server_is_kept_for_the_next_dataset(site):
    site.package("alpha")
    kind = site.dataset("alpha")
    before, after = _opened(kind), _opened(kind)
    assert importers(after, "alpha") == importers(before, "alpha")
    workers = ({batch["worker"] for batch in each} for each in (before, after))
    assert set.isdisjoint(*workers)


def test_a_dataset_with_more_packages_uses_the_kept_fork_server(site):
    site.package("alpha")
    site.package("beta")
    before = _opened(site.dataset("alpha"))
    after = _opened(site.dataset("alpha", "beta", name="more"))
    assert_shared(after, "beta")
    assert importers(after, "alpha") == importers(before, "alpha")


def test_one_fork_server_is_kept_at_most(site):
    kinds = [
        site.dataset(site.package(name), name=f"with_{name}")
        for name in ("alpha", "beta", "gamma")
    ]
    for kind in kinds:
        (last,) = importers(_opened(kind), kind.__module__[len("with_") :])
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    # The other one has forked it.
    assert last in found
    assert len(found) == 2
    forkservers.close_kept()
    assert not psutil.Process().children()


@pytest.mark.parametrize("end", ["time", "kill"])
def test_a_kept_fork_server_that_has_ended_is_replaced(end, site, monkeypatch):
    if end == "time":
        monkeypatch.setattr(forkserver_connection, "_KEPT_S", 0.01)
    site.package("alpha")
    kind = site.dataset("alpha")
    with kind(**PROCESSES) as dataset:
        (before,) = importers(told(dataset), "alpha")
        process = psutil.Process(before)
    if end == "kill":
        process.kill()
    process.wait(60)
    after = _opened(kind)
    assert_shared(after, "alpha")
    assert importers(after, "alpha") != {before}


def test_a_kept_fork_server_ends_with_the_one_that_it_is_a_fork_of(
    site, monkeypatch
):
    monkeypatch.setattr(forkserver_connection, "_KEPT_S", 0.01)
    site.package("alpha")
    kind = site.dataset("alpha")
    with kind(**PROCESSES) as dataset:
        told(dataset)
        first = psutil.Process().children()
    assert len(first) == 1
    psutil.wait_procs(first, 60)
    assert not first[0].is_running()


def test_a_kept_fork_server_keeps_no_output_of_the_program_open(site):
    site.package("alpha")
    kind = site.dataset("alpha", more="os.write(1, b'.')")
    read, write = os.pipe()
    before = os.dup(1)
    try:
        os.dup2(write, 1)
        os.close(write)
        batches = _opened(kind)
    finally:
        os.dup2(before, 1)
        os.close(before)
    with open(read, "rb") as written:
        assert written.read() == b"." * len(batches)  # and comes to an end


def test_a_fork_server_that_is_used_again_has_the_output_again(site, capfd):
    site.package("alpha")
    kind = site.dataset("alpha", more="os.write(1, b'.')")
    before, after = _opened(kind), _opened(kind)
    assert importers(after, "alpha") == importers(before, "alpha")
    assert capfd.readouterr().out == "." * len(before + after)


@pytest.mark.parametrize("change", ["cores", "limit", "output"])
@pytest.mark.parametrize("base", ["open", "closed"])
def test_workers_start_with_what_the_program_has_now(
    base, change, site, tmp_path
):
    site.package("alpha")
    site.package("beta")
    inherits = (
        "[len(os.sched_getaffinity(0)), "
        "__import__('resource').getrlimit(2)[0], os.fstat(1).st_ino]"
    )
    kind = site.dataset("alpha", "beta", more=inherits)
    assert resource.RLIMIT_DATA == 2
    cores = os.sched_getaffinity(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = os.dup(1)
    with contextlib.ExitStack() as stack:
        # The fork server that the other one is a fork of.
        less = site.dataset("alpha", name="less")(**PROCESSES)
        told(stack.enter_context(less))
        if base == "closed":
            less.close()
            _opened(kind)
        try:
            if change == "cores":
                os.sched_setaffinity(0, {min(cores)})
            elif change == "limit":
                resource.setrlimit(resource.RLIMIT_DATA, (2**50, hard))
            else:
                with open(tmp_path / "output", "w") as file:
                    os.dup2(file.fileno(), 1)
            expected = [
                len(os.sched_getaffinity(0)),
                resource.getrlimit(resource.RLIMIT_DATA)[0],
                os.fstat(1).st_ino,
            ]
            assert all(list(b["more"]) == expected for b in _opened(kind))
        finally:
            os.sched_setaffinity(0, cores)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            os.dup2(before, 1)
            os.close(before)


@pytest.mark.parametrize("base", ["open", "closed"])
def test_a_package_of_which_a_part_was_reloaded_is_imported_again(base, site):
    site.package("alpha")
    part = site.installed / "alpha" / "part.py"
    part.write_text("def scale():\n    return 1\n")
    importlib.import_module("alpha.part")
    site.names.append("alpha.part")
    site.module("uses_part", "import alpha.part\n")
    kind = site.dataset("alpha.part", "uses_part", more="alpha.part.scale()")
    with kind(**PROCESSES) as before:
        assert {int(b["more"]) for b in told(before)} == {1}
        if base == "closed":
            before.close()
        part.write_text("def scale():\n    return 22\n")
        importlib.invalidate_caches()
        importlib.reload(sys.modules["alpha.part"])
        assert {int(b["more"]) for b in _opened(kind)} == {22}


@pytest.mark.parametrize("kept", [True, False])
def test_an_upgraded_package_is_told_of_and_workers_may_have_the_old_one(
    kept, site, caplog
):
    site.package("alpha", "VERSION = iter([1] * 16).__next__\n")
    kind = site.dataset("alpha", more="alpha.VERSION()")
    assert all(b["more"] == 1 for b in _opened(kind))
    if not kept:
        forkservers.close_kept()
    file = site.installed / "alpha" / "__init__.py"
    file.write_text(file.read_text().replace("[1]", "[22]"))
    assert not caplog.records
    after = 1 if kept else 22
    for _ in range(2):
        assert all(b["more"] == after for b in _opened(kind))
    (warning,) = caplog.records
    assert "package `alpha` has changed on disk" in warning.getMessage()


def test_workers_find_a_package_that_was_installed_meanwhile(
    site, tmp_path, monkeypatch
):
    folder = tmp_path / "later"
    monkeypatch.syspath_prepend(str(folder))
    site.package("alpha")
    kind = site.dataset(
        "alpha",
        more="__import__('importlib.util').util.find_spec('late') is not None",
    )
    assert not any(b["more"] for b in _opened(kind))
    folder.mkdir()
    (folder / "late.py").touch()
    importlib.invalidate_caches()
    assert all(b["more"] for b in _opened(kind))


@kept
def test_a_module_of_the_user_may_change_between_two_datasets(site):
    site.package("alpha")
    before = site.dataset("alpha", more="'before'")
    with before(**PROCESSES) as one:
        batches = told(one)
        after = site.dataset("alpha", more="'after'")
        with after(**PROCESSES) as other:
            later = told(other)
    assert {str(batch["more"]) for batch in later} == {"after"}
    assert importers(later, "alpha") == importers(batches, "alpha")


@kept
@pytest.mark.parametrize("change", ["package", "environ", "folder", "path"])
def test_packages_are_imported_again_after_a_change(
    change, site, monkeypatch, tmp_path
):
    site.package("alpha", "SEEN = os.environ.get('SEEN'), os.getcwd(), 1\n")
    kind = site.dataset("alpha", more="alpha.SEEN")
    with kind(**PROCESSES) as before:
        batches = told(before)
        assert_shared(batches, "alpha")
        if change == "package":
            site.package("alpha", "SEEN = 0, os.getcwd(), 'another version'\n")
            kind = site.dataset("alpha", more="alpha.SEEN")
        elif change == "environ":
            monkeypatch.setenv("SEEN", "yes")
        elif change == "folder":
            monkeypatch.chdir(tmp_path)
        else:
            monkeypatch.syspath_prepend(str(tmp_path))
        with kind(**PROCESSES) as after:
            later = told(after)
    assert_shared(later, "alpha")
    assert importers(later, "alpha").isdisjoint(importers(batches, "alpha"))
    seen = later[0]["more"]
    if change == "package":
        assert seen[2] == "another version"
    elif change == "environ":
        assert seen[0] == "yes"
    elif change == "folder":
        assert seen[1] == str(tmp_path)


@kept
def test_a_package_is_imported_in_the_environment_of_workers(site):
    site.package(
        "alpha",
        "SEEN = [os.environ.get(n) for n in ('CUDA_VISIBLE_DEVICES',"
        " 'OMP_NUM_THREADS', 'MINE')]\n"
        "os.environ['SET_BY_ALPHA'] = 'yes'\n",
    )
    os.environ.pop("SET_BY_ALPHA")
    kind = site.dataset(
        "alpha", more="[*alpha.SEEN, os.environ.get('SET_BY_ALPHA')]"
    )
    with kind(worker_env={"MINE": "1"}, **PROCESSES) as dataset:
        batches = told(dataset)
    assert_shared(batches, "alpha")
    assert batches[0]["more"] == ["", "1", "1", "yes"]


@kept
def test_an_import_that_draws_random_numbers_changes_no_batch(site):
    site.package(
        "alpha",
        "import random\nimport numpy as np\n"
        "np.random.rand(os.getpid() % 7)\nrandom.random()\n",
    )
    kind = site.dataset("alpha")

    class Drawn(kind):
        def __getitem__(self, index):
            import random

            return np.array([np.random.rand(), random.random()])

    with (
        Drawn(seed=3, **PROCESSES) as dataset,
        Drawn(seed=3, workers=0) as inline,
    ):
        np.testing.assert_array_equal(list(dataset), list(inline))


GENERATORS = """
import random
import numpy as np
class Random(random.Random):
    pass
class Transform:
    R = np.random.RandomState()
DRAWN = [random.Random().random, Random().random, Transform.R.rand,
         np.random.default_rng().random, np.random.Generator(
             np.random.Philox()).random]
CHOSEN = [random.Random(3).random, np.random.RandomState(3).rand,
          np.random.default_rng(3).random,
          np.random.default_rng(np.random.SeedSequence(3).spawn(1)[0]).random]
CHOSEN[0].__self__.seed()
CHOSEN[0].__self__.seed(4)
"""


@kept
def test_workers_draw_different_numbers_from_generators_of_a_package(
    site, tmp_path
):
    site.package("alpha", GENERATORS)
    site.package("beta", GENERATORS)
    kinds = []
    for name, imported in ("one", "alpha"), ("other", "alpha, beta"):
        site.module(
            name,
            f"""
import os, pathlib, time
import {imported}
from keras_fastdata import FastPyDataset

class Draws(FastPyDataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        # Each of two workers builds one batch.
        folder = pathlib.Path({str(tmp_path)!r}, "{name}")
        folder.mkdir(exist_ok=True)
        (folder / str(index)).touch()
        while not (folder / str(1 - index)).exists():
            time.sleep(0.001)
        draws = {{
            kind: [draw() for one in ({imported},) for draw in vars(one)[kind]]
            for kind in ("DRAWN", "CHOSEN")
        }}
        return {{"worker": os.getpid(), "alpha": alpha.IMPORTED_BY, **draws}}
""",
        )
        kinds.append(sys.modules[name].Draws)
    one, other = (kind(**PROCESSES) for kind in kinds)
    with one, other:
        for dataset in (one, other):
            first, second = dataset
            assert_shared([first, second], "alpha")
            np.testing.assert_array_equal(first["CHOSEN"], second["CHOSEN"])
            drawn = [*first["DRAWN"], *second["DRAWN"]]
            assert len(set(drawn)) == len(drawn)


@kept
def test_handlers_of_a_package_for_forks_run_in_each_worker(site):
    site.package(
        "alpha",
        "FORKS = []\n"
        "os.register_at_fork(after_in_child=lambda: FORKS.append(1))\n",
    )
    kind = site.dataset("alpha", more="len(alpha.FORKS)")
    with kind(**PROCESSES) as dataset:
        assert {int(batch["more"]) for batch in told(dataset)} == {1}


def test_what_a_package_prints_is_printed_once(site, capfd):
    site.package(
        "alpha",
        "import ctypes\nprint('by Python', end='; ')\n"
        "ctypes.CDLL(None).printf(b'by C; ')\n",
    )
    kind = site.dataset("alpha")
    capfd.readouterr()
    with kind(**PROCESSES) as dataset:
        assert_shared(told(dataset), "alpha")
    printed = capfd.readouterr().out
    assert printed.count("by Python") == printed.count("by C") == 1


@kept
def test_a_program_that_has_ended_does_not_keep_a_package_from_being_shared(
    site, caplog
):
    site.package("alpha", "import subprocess\nsubprocess.run(['true'])\n")
    with site.dataset("alpha")(**PROCESSES) as dataset:
        assert_shared(told(dataset), "alpha")
    assert not refusals(caplog)


# -- what is not shared --------------------------------------------------------

TROUBLES = {
    "raises": ("raise ValueError('no')", "raised ValueError: no"),
    "asks": ("input()", "raised EOFError"),
    "debugs": ("breakpoint()", "A debugger was started in a worker process"),
    "exits": ("sys.exit(3)", "raised SystemExit: 3"),
    "ends": ("os._exit(3)", "ends the process (exit code 3)"),
    "crashes": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "ends the process (exit code -9)",
    ),
    "thread": (
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "leaves 1 thread running",
    ),
    "process": (
        "left = subprocess.Popen(['sleep', '600'])",
        "leaves a process running",
    ),
    "lock": (
        "import multiprocessing; left = multiprocessing.Lock()",
        "makes a lock that all workers would share",
    ),
    "lock for spawned processes": (
        "import multiprocessing as mp; left = mp.get_context('spawn').Lock()",
        "makes a lock that all workers would share",
    ),
    "shared memory": (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "left = SharedMemory(create=True, size=8); left.unlink()",
        "opens /dev/shm/",
    ),
    "mine": ("import tools", "imports tools, which is not installed"),
    "forks": (
        "os.register_at_fork(before=lambda: os._exit(4))",
        "ends when it is to fork",
    ),
    "later": (
        "os.register_at_fork(before=lambda: threading.Thread(\n"
        "    target=time.sleep, args=(600,), daemon=True).start())",
        "a thread was started later",
    ),
}


@kept
@pytest.mark.parametrize("how", TROUBLES)
def test_workers_import_a_package_themselves_where_sharing_it_fails(
    how, site, caplog
):
    source, reason = TROUBLES[how]
    site.module("tools", "")
    site.trouble("bad", source)
    site.package("good")
    kind = site.dataset("good", "bad")
    with kind(**PROCESSES) as dataset, kind(**PROCESSES) as again:
        batches = told(dataset)
        if how != "later":  # then the first worker was forked before
            assert_own(batches, "bad")
        if how not in ("forks", "later"):
            assert_shared(batches, "good")
        assert_own(told(again), "bad")
    (line,) = refusals(caplog)
    assert "`bad`" in line
    assert reason in line


@kept
def test_an_import_that_hangs_is_given_up(site, caplog, monkeypatch):
    monkeypatch.setattr(forkserver_connection, "_IMPORT_TIMEOUT_S", 0.5)
    site.trouble("stuck", "threading.Event().wait()")
    with site.dataset("stuck")(**PROCESSES) as dataset:
        assert_own(told(dataset), "stuck")
    (line,) = refusals(caplog)
    assert "`stuck`" in line
    assert "takes over 0.5 s" in line


# The first import elsewhere tells its process and the one that this is a fork
# of, and waits until it is killed.
WAITS = """
with open(ONCE + "-told", "w") as pipe:
    pipe.write(f"{os.getpid()} {os.getppid()}")
threading.Event().wait()
"""


@pytest.fixture
def importing(site):
    """A pipe that a package, whose first import waits, is heard through."""
    pipe = pathlib.Path(f"{site.once}-told")
    os.mkfifo(pipe)
    site.trouble("waiting", WAITS)
    return pipe


@contextlib.contextmanager
def when_importing(pipe, act):
    """Calls `act` with two process ids as soon as the package tells them."""
    thread = threading.Thread(
        target=lambda: act(*map(int, pipe.read_text().split()))
    )
    thread.start()
    yield
    thread.join()


@kept
def test_a_fork_server_that_is_killed_amid_an_import(site, importing, caplog):
    with (
        site.dataset("waiting")(**PROCESSES) as dataset,
        when_importing(importing, lambda pid, _: os.kill(pid, signal.SIGKILL)),
    ):
        assert_own(told(dataset), "waiting")
    (line,) = refusals(caplog)
    assert "`waiting`" in line
    assert "exit code -9" in line


def test_a_fork_server_that_is_killed_while_its_fork_imports(
    site, importing, caplog
):
    with (
        site.dataset("waiting")(**PROCESSES) as dataset,
        when_importing(importing, lambda _, pid: os.kill(pid, signal.SIGKILL)),
    ):
        # No package is to blame, so another fork server imports it.
        assert_shared(told(dataset), "waiting")
    assert not refusals(caplog)


@kept
def test_a_dataset_is_closed_amid_an_import(site, importing):
    with (
        site.dataset("waiting")(**PROCESSES) as dataset,
        when_importing(importing, lambda *_: dataset.close()),
    ):
        # A closed dataset that is read on starts new workers.
        assert_shared(told(dataset), "waiting")


def test_a_trainer_that_is_killed_amid_an_import_leaves_nothing(
    site, importing, zygote
):
    site.dataset("waiting")
    script = (
        f"sys.path[:0] = [{str(site.installed)!r}, {str(site.mine)!r}]\n"
        "open(ONCE, 'w').close()\n"
        "import told\n"
        "os.unlink(ONCE)\n"
        "next(iter(told.Told(workers=2, use_multiprocessing=True)))\n"
    )
    script = f"ONCE = {str(site.once)!r}\n" + script
    with Trainer(zygote, script) as trainer:
        importing.read_text()
        trainer.send(signal.SIGKILL)
        assert trainer.end() == -signal.SIGKILL
        trainer.leaves_nothing()


@kept
def test_a_wait_for_an_import_is_named(site, importing):
    dataset = site.dataset("waiting")(**PROCESSES)
    seen = []

    def look(*_):
        stats = dataset._fastdata.loader.pool_stats()
        while not stats.importing:
            stats = dataset._fastdata.loader.pool_stats()
        seen.append((stats.importing, stats.starting, stats.pids))
        dataset.close()

    with when_importing(importing, look):
        next(iter(dataset))
    dataset.close()
    assert seen == [("waiting", 2, {})]


@pytest.mark.backend
@pytest.mark.parametrize(
    "package",
    quickly(
        [
            *("keras", "jax", "torch", "tensorflow", "sklearn", "h5py"),
            "pyarrow",
        ],
        "keras",  # which imports its backend
        *(["sklearn", "h5py", "pyarrow"] if _ON_TENSORFLOW else []),
    ),
)
def test_workers_share_the_packages_of_every_training(
    package, site, caplog, capfd
):
    if package not in (keras.backend.backend(), "keras"):
        pytest.importorskip(package)
    importlib.import_module(package)
    kind = site.dataset(
        package, more="open('/proc/self/statm').read() and os.getppid()"
    )
    with kind(**PROCESSES) as dataset:
        batches = list(dataset)
        (forkserver,) = {int(batch["more"]) for batch in batches}
        # It is a fork of the fork server that has started first.
        assert psutil.Process(forkserver).ppid() != os.getpid()
    assert not refusals(caplog)
    assert "os.fork" not in capfd.readouterr().err


# -- what counts as imported ---------------------------------------------------


def test_only_import_statements_that_have_run_count(site):
    for name in ("one", "two", "three", "four", "five", "six"):
        site.package(name)
    (site.installed / "one" / "part.py").write_text("")
    importlib.import_module("one.part")
    site.module(
        "mine",
        "from typing import TYPE_CHECKING\n"
        "from one import part\n"
        "if TYPE_CHECKING:\n"
        "    import two\n"
        "try:\n"
        "    import absent\n"
        "except ImportError:\n"
        "    import three\n"
        "def later():\n"
        "    import four\n"
        "class Holder:\n"
        "    import five\n"
        "import six as other, json, numpy.random\n",
    )
    found = modules.installed_imports(["mine"])
    assert found == ("one", "three", "six", "one.part")


def test_devices_that_an_import_opens_are_seen(monkeypatch):
    with open("/dev/zero", "rb"):
        assert "/dev/zero" not in imports._open_paths()  # any process has that
        monkeypatch.setattr(imports, "_COMMON_DEVICES", set())
        assert "/dev/zero" in imports._open_paths()


@kept
@everywhere
def test_modules_that_another_thread_imports_are_left_alone(place, monkeypatch):
    """A module that is not imported to its end may lack anything."""
    for name in (*FRAMEWORKS, "torch.distributed", "PIL.ImageFile"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, half_imported(name))
    with Numbered(**PLACES[place]) as dataset:
        assert numbers(dataset) == [*range(10)]


FRAMEWORKS = ("tensorflow", "torch", "jax", "h5py", "optree", "PIL.Image")


def half_imported(name):
    """A module that has nothing yet."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__spec__._initializing = True
    return module


@kept
@everywhere
def test_an_import_at_any_moment_breaks_no_epoch(place, monkeypatch):
    """Python may switch threads whenever it collects garbage."""
    names = []

    def import_one(phase, _):
        names.append(f"imported_{len(names)}")
        monkeypatch.setitem(sys.modules, names[-1], types.ModuleType("some"))

    often = gc.get_threshold()
    with Numbered(**PLACES[place]) as dataset:
        gc.callbacks.append(import_one)
        gc.set_threshold(5)
        try:
            found = numbers(dataset)
        finally:
            gc.set_threshold(*often)
            gc.callbacks.remove(import_one)
    assert names
    assert found == [*range(10)]


# -- settings that a module has made before the program made others ------------

_SETTINGS_MODULE = """
import csv
import os
import sys

import numpy as np
import PIL.Image
from keras_fastdata import FastPyDataset

os.environ["AT_IMPORT"] = "module"
os.environ["ONLY_AT_IMPORT"] = "module"
os.chdir(os.path.dirname(__file__))
sys.argv.append("module")
csv.field_size_limit(1000)
np.seterr(over="raise")
PIL.Image.MAX_IMAGE_PIXELS = 100


def settings():
    return [
        os.environ["AT_IMPORT"],
        os.environ.get("ONLY_AT_IMPORT"),
        os.path.basename(os.getcwd()),
        sys.argv[1:],
        csv.field_size_limit(),
        np.geterr()["over"],
        PIL.Image.MAX_IMAGE_PIXELS,
    ]


class Settings(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return repr(settings())
"""
_SETTINGS_SCRIPT = """
import json
import sys

import settings_module
import csv
import numpy as np
import os
import PIL.Image

os.environ["AT_IMPORT"] = "program"
del os.environ["ONLY_AT_IMPORT"]
os.makedirs("inner", exist_ok=True)
os.chdir("inner")
sys.argv[1:] = ["program"]
csv.field_size_limit(2000)
np.seterr(over="ignore")
PIL.Image.MAX_IMAGE_PIXELS = 200

places = json.loads(PLACES)
found = [repr(settings_module.settings())]
for place in places:
    with settings_module.Settings(**place) as dataset:
        found += map(str, dataset)
print(found[0] if len(set(found)) == 1 else found)
"""


def test_the_programs_settings_hold_where_a_module_made_others(
    tmp_path, zygote
):
    (tmp_path / "settings_module.py").write_text(_SETTINGS_MODULE)
    script = tmp_path / "script.py"
    places = json.dumps([*EVERY_KIND.values()])
    script.write_text(_SETTINGS_SCRIPT.replace("PLACES", repr(places)))
    done = zygote.run(str(script))
    assert done.stdout == (
        "['program', None, 'inner', ['program'], 2000, 'ignore', 200]\n"
    ), done.stderr
