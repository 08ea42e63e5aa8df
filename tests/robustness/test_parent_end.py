"""However a training process ends, it leaves nothing and says nothing."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from places import quickly
from samples import Numbered
from trainers import START_METHODS, Trainer, endless

from keras_fastdata import LoaderError

RANDOM_ENDS = 50
ENDLESS = f"data = {endless()}\n"


# -- ended by a signal ---------------------------------------------------------

_FIT = "fit({data}, Tell())\n"


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(
    "signum", quickly([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL)
)
def test_a_trainer_that_a_signal_ends_leaves_nothing(
    signum, start_method, zygote
):
    script = _FIT.format(data=endless(start_method))
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "training"
        assert len(trainer.family()) >= 4  # it, two workers, what one runs
        trainer.send(signum)
        assert trainer.end() == -signum
        trainer.leaves_nothing()


@pytest.mark.parametrize("start_method", START_METHODS)
def test_ctrl_c_in_fit_is_a_keyboard_interrupt(start_method, zygote):
    script = _FIT.format(data=endless(start_method))
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "training"
        trainer.send(signal.SIGINT)
        assert trainer.end() == -signal.SIGINT
        trainer.leaves_nothing("KeyboardInterrupt")


def test_ctrl_c_in_a_terminal_which_all_its_group_gets(zygote):
    with Trainer(zygote, ENDLESS + "fit(data, Tell())\n") as trainer:
        assert trainer.line() == "training"
        trainer.send(signal.SIGINT, os.killpg)
        assert trainer.end() == -signal.SIGINT
        trainer.leaves_nothing("KeyboardInterrupt")


# In the quick run, test_after_ctrl_c_the_same_process_fits_again does so.
@pytest.mark.long
def test_a_script_catches_ctrl_c_itself(zygote):
    script = (
        "try:\n"
        "    fit(data, Tell())\n"
        "except KeyboardInterrupt:\n"
        "    say('caught')\n"
    )
    with Trainer(zygote, ENDLESS + script) as trainer:
        assert trainer.line() == "training"
        trainer.send(signal.SIGINT)
        assert trainer.line() == "caught"
        assert trainer.end() == 0
        trainer.leaves_nothing()


@pytest.mark.long
def test_ctrl_c_while_workers_start(zygote):
    script = (
        "class Slow(Data):\n"
        "    def on_worker_start(self):\n"
        "        super().on_worker_start()\n"
        "        say('starting')\n"
        "        time.sleep(600)\n"
        "fit(Slow())\n"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "starting"
        trainer.send(signal.SIGINT)
        assert trainer.end() == -signal.SIGINT
        trainer.leaves_nothing("KeyboardInterrupt")


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.long)])
def test_ctrl_c_again_and_again_leaves_no_process(times, zygote):
    with Trainer(zygote, ENDLESS + "fit(data, Tell())\n") as trainer:
        assert trainer.line() == "training"
        for _ in range(times):
            trainer.send(signal.SIGINT)
        assert trainer.end() == -signal.SIGINT
        # The second may meet any line of Python's own way out.
        trainer.leaves_no_process()
        errors = trainer.errors()
        assert "KeyboardInterrupt" in errors
        assert "resource_tracker" not in errors
        assert "leaked" not in errors


def test_after_ctrl_c_the_same_process_fits_again(zygote, tmp_path):
    log = tmp_path / "log"
    script = (
        # So long that no signal comes after its end.
        f"data = Data(100_000, pause_s=0.002, log={str(log)!r})\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        fit(data, Tell())\n"
        "    except KeyboardInterrupt:\n"
        "        say('caught')\n"
        "data.length = 200\n"
        "say(loss_of(data))\n"
        "say(numbers(data) == list(range(200)))\n"
    )
    with Trainer(zygote, script) as trainer:
        for _ in range(2):
            assert trainer.line() == "training"
            trainer.send(signal.SIGINT)
            assert trainer.line() == "caught"
        assert float(trainer.line()) == sum(i * i for i in range(200)) / 200
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()
    assert log.read_text().count("start") >= 2


# -- ended by itself -----------------------------------------------------------

ENDS = {
    "raises in a callback": (
        "fit(data, Do(fail))",
        1,
        "RuntimeError: mine",
    ),
    "raises in the train step": (
        "class Mine(keras.Sequential):\n"
        "    def train_step(self, *_):\n"
        "        fail()\n"
        "model = Mine([keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(data, verbose=0)",
        1,
        "RuntimeError: mine",
    ),
    "calls sys.exit in a callback": (
        "fit(data, Do(lambda: sys.exit(3)))",
        3,
        None,
    ),
    "calls os._exit in a callback": (
        "fit(data, Do(lambda: os._exit(4)))",
        4,
        None,
    ),
    "is half through an epoch": (
        "batches = iter(data)\nnext(batches)",
        0,
        None,
    ),
    "has dropped an epoch half through": (
        "for _ in data: break",
        0,
        None,
    ),
    "has a dataset in a cycle": (
        "data.itself = [data]\n"
        "batches = iter(data)\n"
        "next(batches)\n"
        "data.batches = batches.__next__\n"
        "del data, batches",
        0,
        None,
    ),
    "keeps batches": (
        "batches = iter(data)\nkept = [next(batches) for _ in range(5)]",
        0,
        None,
    ),
    "has a daemon thread that holds the dataset": (
        "def hold(batches):\n"
        "    next(batches)\n"
        "    held.set()\n"
        "    time.sleep(600)\n"
        "held = threading.Event()\n"
        "threading.Thread(\n"
        "    target=hold, args=(iter(data),), daemon=True\n"
        ").start()\n"
        "del data\n"
        "held.wait()",
        0,
        None,
    ),
    "has a daemon thread that iterates": (
        "def walk():\n"
        "    for _ in data:\n"
        "        begun.set()\n"
        "begun = threading.Event()\n"
        "threading.Thread(target=walk, daemon=True).start()\n"
        "begun.wait()",
        0,
        None,
    ),
    "has a daemon thread that waits for a batch": (
        "class Waits(Data):\n"
        "    def __getitem__(self, index):\n"
        "        say('building')\n"
        "        time.sleep(600)\n"
        "data = Waits()\n"
        "read, sys.stdout = os.pipe(), sys.stdout\n"
        "os.dup2(read[1], 1)\n"
        "threading.Thread(target=list, args=(data,), daemon=True).start()\n"
        "assert os.read(read[0], 8) == b'building'",
        0,
        None,
    ),
    "has a daemon thread that fits": (
        "begun = threading.Event()\n"
        "threading.Thread(\n"
        "    target=fit, args=(data, Do(begun.set)), daemon=True\n"
        ").start()\n"
        "begun.wait()",
        0,
        None,
    ),
}


# Each takes seconds; the others are for the full run.
_QUICK = (
    "is half through an epoch",
    "has a daemon thread that waits for a batch",
    "has a daemon thread that fits",
)


@pytest.mark.parametrize(
    "end",
    [
        end if end in _QUICK else pytest.param(end, marks=pytest.mark.long)
        for end in ENDS
    ],
)
def test_nothing_is_left_by_a_trainer_that(end, zygote):
    script, status, last_words = ENDS[end]
    with Trainer(zygote, ENDLESS + script) as trainer:
        assert trainer.end() == status, trainer.errors()
        trainer.leaves_nothing(last_words)


def test_an_exit_handler_that_comes_too_late_is_told_so():
    """One that was registered before ours runs when the workers are gone."""
    with Numbered(workers=1, use_multiprocessing=True) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset._fastdata.loader._pool._shutdown.is_asked = True
        with pytest.raises(LoaderError, match="this `atexit` handler"):
            next(batches)


def test_an_exit_handler_may_build_batches_itself_at_any_time():
    with Numbered(workers=0) as dataset:
        batches = iter(dataset)
        found = [next(batches)]
        dataset._fastdata.loader._pool._shutdown.is_asked = True
        found += batches
        assert len(found) == len(dataset)


@pytest.mark.long  # imports Keras once more
def test_an_exit_handler_may_be_the_first_to_use_processes(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(LATE_SCRIPT)
    ran = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=100
    )
    assert ran.stdout == "3\n"
    assert "Traceback" not in ran.stderr, ran.stderr


LATE_SCRIPT = """
import atexit
import numpy as np
import keras_fastdata

class Numbers(keras_fastdata.FastPyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full(4, index)

def read():
    with Numbers(workers=1, use_multiprocessing=True) as dataset:
        print(len(list(dataset)))

atexit.register(read)
"""


@pytest.mark.parametrize("in_processes", [False, True])
def test_workers_that_would_start_while_python_ends_are_refused(
    in_processes, zygote
):
    """Python would wait for a new thread for ever."""
    script = (
        "import builtins\n"
        "from keras_fastdata import LoaderError\n"
        "class Late:\n"
        "    def __del__(self, error=LoaderError, data=data, write=os.write):\n"
        "        try:\n"
        "            next(iter(data))\n"
        "        except error as refused:\n"
        "            write(1, f'{refused}\\n'.encode())\n"
        "builtins.late = Late()\n"
    )
    data = f"data = Data()\ndata.use_multiprocessing = {in_processes}\n"
    with Trainer(zygote, data + script) as trainer:
        assert "because the interpreter ends" in trainer.line()
        assert trainer.end() == 0
        trainer.leaves_nothing()


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.parametrize(
    "end",
    [
        "calls os._exit in a callback",
        "is half through an epoch",
        "has a daemon thread that iterates",
    ],
)
def test_nothing_is_left_without_a_forkserver_either(end, start_method, zygote):
    script, status, last_words = ENDS[end]
    data = f"data = {endless(start_method)}\n"
    with Trainer(zygote, data + script) as trainer:
        assert trainer.end() == status, trainer.errors()
        trainer.leaves_nothing(last_words)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_outlive_the_thread_that_started_them(
    start_method, zygote, tmp_path
):
    log = tmp_path / "log"
    script = (
        f"data = Data(log={str(log)!r}, start_method={start_method!r})\n"
        "thread = threading.Thread(target=fit, args=(data,))\n"
        "thread.start()\n"
        "thread.join()\n"
        "while len(open(data.log).readlines()) < 2: time.sleep(0.01)\n"
        "say(numbers(data) == list(range(20)))\n"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()
    assert log.read_text() == "start\n" * 2


# -- with locks in workers -----------------------------------------------------

_SHARES = """
import multiprocessing
from joblib.externals.loky.backend import get_context

class Shares(Data):
    def on_worker_start(self):
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.another = get_context("loky").Lock()  # has its own tracker
"""


@pytest.mark.parametrize("start_method", START_METHODS)
def test_locks_of_workers_end_with_them(start_method, zygote):
    script = f"list(Shares(start_method={start_method!r}))\n"
    with Trainer(zygote, _SHARES + script) as trainer:
        assert trainer.end() == 0, trainer.errors()
        trainer.leaves_nothing()


# -- ended at a random moment --------------------------------------------------

LONG = {
    "fit": "say('import done')\nfit(data)\n",
    "loop": "say('import done')\nfor _ in data: pass\n",
}


@pytest.mark.long
def test_a_trainer_that_ends_at_any_moment_leaves_nothing(zygote):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in pool.map(
            lambda seed: _end_at_random(zygote, seed), range(RANDOM_ENDS)
        ):
            pass


def _end_at_random(zygote, seed):
    rng = random.Random(seed)
    script = rng.choice(sorted(LONG.items()))[1]
    signum = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    with Trainer(zygote, ENDLESS + script) as trainer:
        assert trainer.line() == "import done"
        time.sleep(rng.uniform(0, rng.choice([0.3, 3.0])))
        trainer.send(signum)
        status, errors = trainer.end(), trainer.errors()
        # TensorFlow's converters may make an error of their own of a
        # KeyboardInterrupt that strikes within them.
        swallowed = signum == signal.SIGINT and "tensorflow" in errors
        assert status == -signum or (status == 1 and swallowed), (seed, errors)
        interrupted = signum == signal.SIGINT
        trainer.leaves_nothing("KeyboardInterrupt" if interrupted else None)
