"""Workers use the resource tracker of the training process.

Otherwise a worker that ends would take shared memory of the training process
with it, and leave its own.
"""

import contextlib
import os
import signal
from multiprocessing import resource_tracker, shared_memory

import numpy as np
import pytest
from trainers import Trainer

from keras_fastdata import FastPyDataset

START_METHODS = ["forkserver", "spawn", "fork", "portable"]

pytestmark = pytest.mark.filterwarnings("ignore:.*start_method='fork'")


class Trackers(FastPyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([_tracker_of_this_process()])


def _tracker_of_this_process():
    return os.fstat(resource_tracker._resource_tracker.getfd()).st_ino


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_have_the_tracker_of_the_trainer(start_method):
    kinds = {"use_multiprocessing": True, "start_method": start_method}
    with Trackers(workers=2, **kinds) as data:
        assert {number.item() for number in data} == {
            _tracker_of_this_process()
        }


class Opens(FastPyDataset):
    """Each worker opens shared memory by name, and kills itself once."""

    def __init__(self, name, folder, **kwargs):
        super().__init__(**kwargs)
        self.name, self.folder = name, folder

    def on_worker_start(self):
        self.memory = shared_memory.SharedMemory(self.name)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self.folder}/{index}")
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([self.memory.buf[index]])


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_killed_worker_removes_no_memory_of_the_trainer(
    start_method, tmp_path
):
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        memory.buf[:8] = bytes(range(8))
        data = Opens(
            memory.name,
            tmp_path,
            workers=2,
            use_multiprocessing=True,
            start_method=start_method,
            max_worker_restarts=8,
        )
        with data:
            for _ in range(2):
                assert [number.item() for number in data] == [*range(8)]
        shared_memory.SharedMemory(memory.name).close()
    finally:
        memory.close()
        memory.unlink()


_MAKES = """
import multiprocessing
from multiprocessing import shared_memory

class Makes(Data):
    def on_worker_start(self):
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.memory = shared_memory.SharedMemory(create=True, size=8)

data = Makes(start_method={start_method!r})
next(iter(data))
say("training")
time.sleep(600)
"""


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_killed_program_leaves_no_memory_of_its_workers(start_method, zygote):
    with Trainer(zygote, _MAKES.format(start_method=start_method)) as trainer:
        assert trainer.line() == "training"
        trainer.send(signal.SIGKILL)
        assert trainer.end() == -signal.SIGKILL
        trainer.leaves_no_process()
        trainer.leaves_no_segment()


_SIGNALED = """
import multiprocessing.resource_tracker
import warnings

warnings.simplefilter("error")
data = Data()
assert numbers(data) == list(range(20))
tracker = multiprocessing.resource_tracker._resource_tracker._pid
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    os.kill(tracker, number)
data.close()
assert numbers(data) == list(range(20))
say(multiprocessing.resource_tracker._resource_tracker._pid == tracker)
"""


def test_signals_to_a_whole_job_do_not_end_the_tracker(zygote):
    with Trainer(zygote, _SIGNALED) as trainer:
        assert trainer.line() == "True", trainer.errors()
        assert trainer.end() == 0
        trainer.leaves_nothing()
