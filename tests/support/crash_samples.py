"""Datasets whose workers die on cue, and the hand that kills.

This module imports neither Keras nor pytest, so that a worker which imports
it does not. What outlives a worker is written to files of one directory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import random
import select
import signal
import sys
import threading
import time

import numpy as np

from keras_fastdata import FastPyDataset
from keras_fastdata.memory.arena import Segment
from keras_fastdata.workers import messages

SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigsegv": signal.SIGSEGV,
    "sigabrt": signal.SIGABRT,
    "sigterm": signal.SIGTERM,
}
EXITS = {"exit0": 0, "exit3": 3, "sysexit": 5}


def die(how):
    """Ends this process."""
    faulthandler.disable()  # a fork has its trainer's
    if how == "sysexit":
        sys.exit(EXITS[how])
    if how in EXITS:
        os._exit(EXITS[how])
    if how == "forkserver":
        os.kill(os.getppid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), SIGNALS[how])
    while True:
        signal.pause()


@contextlib.contextmanager
def ending(*pids):
    """Waits at the end of the block until these processes have ended."""
    with contextlib.ExitStack() as closing:
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pidfd in pidfds:
            closing.callback(os.close, pidfd)
        yield
        for pidfd in pidfds:
            select.select([pidfd], [], [])


def kill(*pids, also=()):
    """Kills processes; returns when they, and those `also`, have ended."""
    with ending(*pids, *also):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class Fate:
    """Ends the process, the first `times` times it is met.

    The times are counted in files, which outlive the process.
    """

    def __init__(self, directory, how, times=1):
        self.directory = pathlib.Path(directory)
        self.how = how
        self.times = times

    def meet(self, key=""):
        """Dies, unless it has for this `key` as often as it must."""
        if self.count(f"met{key}") <= self.times:
            self.count("deaths")
            die(self.how)

    def count(self, name):
        """How often this was called with `name`, this call included."""
        with open(self.directory / name, "ab") as file:
            file.write(b"x")
            file.flush()
            return file.tell()

    def counted(self, name):
        """How often `count` was called with `name`."""
        path = self.directory / name
        return path.stat().st_size if path.exists() else 0

    @property
    def deaths(self):
        return self.counted("deaths")


class Trap:
    """Meets a fate when it is unpickled."""

    def __init__(self, fate):
        self.fate = fate

    def __setstate__(self, state):
        vars(self).update(state)
        self.fate.meet()


class Leaf:
    """A part of a batch that may meet a fate when it is pickled."""

    def __init__(self, value, fate=None):
        self.value = value
        self.fate = fate

    def __reduce__(self):
        if self.fate is not None:
            self.fate.meet()
        return Leaf, (self.value,)


class Drawn(FastPyDataset):
    """Batches of every way to draw, some of it large enough to be lent."""

    length = 8

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        large = self.empty((16, 512), "float64")
        self.rng.standard_normal(out=large)
        return {
            "index": np.array([self.epoch, index]),
            "numpy": np.random.randint(2**60, size=3),
            "python": random.getrandbits(60),
            "large": large,
            "leaf": self.leaf(index),
        }

    def leaf(self, index):
        return Leaf(index)


class DiesUnpickled(Drawn):
    """Dies while it is unpickled."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.trap = Trap(fate)


class DiesStarting(Drawn):
    """Dies in `on_worker_start`."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def on_worker_start(self):
        self.fate.meet()


class DiesBuilding(Drawn):
    """Dies in `__getitem__`, over each of the batches `at`."""

    def __init__(self, fate, at=(3,), each_epoch=False, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate
        self.at = at
        self.each_epoch = each_epoch

    def __getitem__(self, index):
        batch = super().__getitem__(index)
        if index in self.at:
            self.fate.meet((index, self.epoch if self.each_epoch else 0))
        return batch


class DiesEncoding(Drawn):
    """Dies while batch 3 is pickled, its arrays being in the slot already."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def leaf(self, index):
        return Leaf(index, self.fate if index == 3 else None)


class DiesNoting(Drawn):
    """Dies as it is about to note a ticket on the board, or its end."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def on_worker_start(self):
        note = Segment.set_heartbeat

        def dies(segment, worker, task_id):
            if bool(task_id) == self.at_a_task:
                self.fate.meet()
            note(segment, worker, task_id)

        Segment.set_heartbeat = dies


class DiesTaking(DiesNoting):
    """Dies with a ticket in its hand that it has not noted."""

    at_a_task = True


class DiesAnswering(DiesNoting):
    """Dies with a note about a ticket whose result it has sent."""

    at_a_task = False


class DiesChanged(Drawn):
    """Dies while a new state of it is unpickled, once `change` was called."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def change(self):
        self.trap = Trap(self.fate)


class DiesWhenTold(Drawn):
    """Tells what its workers do, and has each end itself on a word.

    The word is whatever is written to a FIFO that is named by the worker's
    process id. It is of no use for `sys.exit`, which ends just its thread.
    """

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def on_worker_start(self):
        word = self._path(f"word-{os.getpid()}")
        os.mkfifo(word)

        def attach():
            with open(word) as file:
                file.read()
            die(self.fate.how)

        threading.Thread(target=attach, daemon=True).start()
        note = Segment.set_heartbeat

        def tells(segment, worker, task_id):
            note(segment, worker, task_id)
            if not task_id:
                self.fate.count("answered")

        Segment.set_heartbeat = tells

    def __getitem__(self, index):
        self._path(f"builder-{index}").write_text(str(os.getpid()))
        return super().__getitem__(index)

    def answered(self):
        """How many requests the workers have done with."""
        return self.fate.counted("answered")

    def builder_of(self, index):
        """The process that began batch `index` last."""
        return int(self._path(f"builder-{index}").read_text())

    def tell(self, pid):
        """Has worker `pid` end itself."""
        self._path(f"word-{pid}").write_text("die")

    def _path(self, name):
        return self.fate.directory / name


class Gated(Drawn):
    """Builds a batch of `gated` when it is let, as long as its gate stands.

    A gate is a FIFO: opening it for writing waits until a worker is there,
    and closing it lets the worker go on.
    """

    def __init__(self, directory, gated=(), **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)
        for index in gated:
            os.mkfifo(self.gate(index))

    def gate(self, index):
        return self.directory / f"gate-{index}"

    def builder_of(self, index):
        """The process at the gate of batch `index`."""
        return int((self.directory / f"builder-{index}").read_text())

    def __getitem__(self, index):
        if self.gate(index).exists():
            pid = str(os.getpid())
            (self.directory / f"builder-{index}").write_text(pid)
            self.gate(index).read_bytes()
        return super().__getitem__(index)


class DiesStopping(Drawn):
    """Dies in `on_worker_stop`."""

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def on_worker_stop(self):
        self.fate.meet()


class WaitsStopping(Drawn):
    """Waits in `on_worker_stop` to be killed."""

    def __init__(self, directory, **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)

    def on_worker_stop(self):
        (self.directory / f"stopping-{os.getpid()}").touch()
        signal.pause()


class KeepsItsArray(DiesBuilding):
    """Keeps the array of `self.empty` that its batches are built in."""

    array = None

    def __getitem__(self, index):
        batch = super().__getitem__(index)
        if self.array is None:
            self.array = self.empty((16, 512), "float64")
        self.array[:] = batch["large"]
        batch["large"] = self.array
        return batch


class KeepsLate(FastPyDataset):
    """Worker 0 waits before it notes its first ticket, and keeps its array.

    It goes on once the FIFO `gate` has been opened and closed. From batch 8
    on, the two workers build in turns.
    """

    array = None

    def __init__(self, directory, **kwargs):
        super().__init__(**kwargs)
        self.turns = Fate(directory, None)
        os.mkfifo(self.turns.directory / "gate")

    def __len__(self):
        return 24

    def on_worker_start(self):
        directory, worker = self.turns.directory, self.worker_index
        (directory / f"pid-{worker}").write_text(str(os.getpid()))
        if worker:
            while not self.turns.counted("notes"):  # the late one has a ticket
                time.sleep(0.001)
            return
        note = Segment.set_heartbeat

        def waits(segment, worker, task_id):
            if self.turns.count("notes") == 1:
                (directory / "gate").read_bytes()
            note(segment, worker, task_id)

        Segment.set_heartbeat = waits

    def __getitem__(self, index):
        if index >= 8:
            turn = self.turns.count(f"turns-{self.worker_index}")
            other = f"turns-{1 - self.worker_index}"
            while self.turns.counted(other) < turn:
                time.sleep(0.001)
        if self.worker_index:
            array = self.empty((64, 1024))
        else:
            if self.array is None:
                self.array = self.empty((64, 1024))
            array = self.array
        array[:] = index
        return array


class FailsAtLength(Drawn):
    """Fails in `on_worker_start` with more words than one message holds.

    The first worker dies after the first of its messages.
    """

    def __init__(self, fate, **kwargs):
        super().__init__(**kwargs)
        self.fate = fate

    def on_worker_start(self):
        pack = messages.ResultMessage.pack
        first = self.fate.count("starts") == 1
        sent = []

        def dies(result):
            if first and sent:
                die(self.fate.how)
            sent.append(result)
            return pack(result)

        messages.ResultMessage.pack = dies
        raise ValueError("long " * 100_000)


class Stated(FastPyDataset):
    """Shows its state, and what `self.rng` draws, in every batch.

    A batch is not finished while there is a file `hold-<index>`; who builds
    it makes a file `at-<index>-<pid>`.
    """

    length = 12
    shape = (8, 1024)
    state = 0

    def __init__(self, directory, **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        large = self.empty(self.shape, "int64")
        large[:] = self.rng.integers(2**40, size=self.shape)
        hold = self.directory / f"hold-{index}"
        if hold.exists():
            (self.directory / f"at-{index}-{os.getpid()}").touch()
        while hold.exists():
            time.sleep(0.001)
        large += self.state
        return np.array([self.epoch, index, self.state]), large
