"""Datasets that get stuck, take their time, or raise.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import logging
import os
import signal
import threading
import time

import numpy as np

from keras_fastdata import FastPyDataset

_LONG_S = 600.0
_MUTEX_BYTES = 64  # more than any pthread_mutex_t; all zeros is an open one

_log = logging.getLogger("slow_samples")


# -- ways to be stuck --------------------------------------------------------


def sleeps(_):
    time.sleep(_LONG_S)  # here


def deadlocks(_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # here


def reads_a_fifo(path):
    fifo = f"{path}.fifo"
    os.mkfifo(fifo)
    os.read(os.open(fifo, os.O_RDWR), 1)  # here


def holds_the_gil(_):
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    lock(mutex)
    lock(mutex)  # here


def loops(_):
    all(number >= 0 for number in itertools.count())  # here


def stops(_):
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {
    function.__name__: function
    for function in (sleeps, deadlocks, reads_a_fifo, holds_the_gil, loops)
}
WAYS["stops"] = stops


def line_of(function):
    """Where a function is stuck, in the words of `faulthandler`."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (n for n, line in enumerate(lines) if line.endswith("# here\n"))
    return f'slow_samples.py", line {first + offset} in {function.__name__}'


def strike(path, times=1):
    """Whether this is one of the first calls with `path`, in any process.

    If so, `is_stuck` says so of this process.
    """
    with open(path, "a+") as file:
        file.write("x")
        file.flush()
        struck = file.tell() <= times
    if struck:
        folder = os.path.dirname(path)
        with open(os.path.join(folder, f"stuck-{os.getpid()}"), "w"):
            pass
    return struck


def is_stuck(folder, pid):
    """Whether `strike` was true in a process, with a file of this folder."""
    return os.path.exists(os.path.join(folder, f"stuck-{pid}"))


# -- datasets ----------------------------------------------------------------


class Drawn(FastPyDataset):
    """Batch i is full of i, and of numbers that were drawn for it."""

    def __init__(self, length=8, seed=1, **kwargs):
        super().__init__(seed=seed, **kwargs)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = self.rng.normal(size=(4, 3)).astype("float32")
        return x, np.full((4, 1), index, "float32")


class Stuck(Drawn):
    """Is stuck at batch i in the way of `ways[i]`, `times` times each."""

    def __init__(self, folder, ways, times=1, **kwargs):
        super().__init__(**kwargs)
        self.folder = str(folder)
        self.ways = ways
        self.times = times

    def __getitem__(self, index):
        way = self.ways.get(index)
        batch = super().__getitem__(index)
        if way is not None:
            path = os.path.join(self.folder, f"{way}-{index}")
            if way == "encoding":
                return batch[0], SticksWhenPickled(path, self.times, batch[1])
            if strike(path, self.times):
                WAYS[way](path)
        return batch


class SticksWhenPickled:
    """Travels as an array, but not the first times."""

    def __init__(self, path, times, array):
        self.path = path
        self.times = times
        self.array = array

    def __reduce__(self):
        if strike(self.path, self.times):
            sleeps(self.path)
        return np.array, (self.array,)


class SticksWhenLoaded:
    """Is stuck when it is unpickled, but for later times."""

    def __init__(self, path, times=1):
        self.path = str(path)
        self.times = times

    def __setstate__(self, state):
        vars(self).update(state)
        if strike(self.path, self.times):
            sleeps(self.path)


class StuckAtStart(Drawn):
    """Is stuck in `on_worker_start`, the first `times` times."""

    def __init__(self, path, times=1, **kwargs):
        super().__init__(**kwargs)
        self.path = str(path)
        self.times = times

    def on_worker_start(self):
        if strike(self.path, self.times):
            sleeps(self.path)


class Freezes(Drawn):
    """Puts its process into a cgroup at batch 2, and freezes that."""

    def __init__(self, cgroup, path, **kwargs):
        super().__init__(**kwargs)
        self.cgroup = str(cgroup)
        self.path = str(path)

    def __getitem__(self, index):
        if index == 2 and strike(self.path):
            for name, text in (
                ("cgroup.procs", str(os.getpid())),
                ("freezer.state", "FROZEN"),
            ):
                with open(f"{self.cgroup}/{name}", "w") as file:
                    file.write(text)
            sleeps(self.path)
        return super().__getitem__(index)


class Gated(Drawn):
    """Batch 2 waits for a writer of each of two FIFOs, one after the other."""

    def __init__(self, fifos, **kwargs):
        super().__init__(**kwargs)
        self.fifos = [str(fifo) for fifo in fifos]

    def __getitem__(self, index):
        if index == 2:
            self.wait_for_first()
            self.wait_for_second()
        return super().__getitem__(index)

    def wait_for_first(self):
        with open(self.fifos[0]):  # here
            pass

    def wait_for_second(self):
        with open(self.fifos[1]):  # here
            pass


class TakesItsTime(Drawn):
    """Some batches take longer than the others."""

    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds.get(index, 0))
        return super().__getitem__(index)


class Talks(Drawn):
    """Logs more with every batch than sockets take."""

    def __getitem__(self, index):
        for _ in range(1000):
            _log.warning("x" * 1000)
        return super().__getitem__(index)


class TellsItsProcess(Drawn):
    """Batches say which process built them."""

    def __getitem__(self, index):
        return np.array([os.getpid(), index])


class Missing(Exception):
    """What `Flaky` raises."""


class Flaky(FastPyDataset):
    """The batches in `bad` raise; the others are full of their index.

    The class of what they raise is named, as classes that are no Exception
    do not travel well otherwise.
    """

    ERRORS = {
        cls.__name__: cls
        for cls in (
            Missing,
            StopIteration,
            MemoryError,
            KeyboardInterrupt,
            SystemExit,
            GeneratorExit,
        )
    }

    def __init__(self, bad=(), length=10, error="Missing", **kwargs):
        super().__init__(**{"seed": 1, **kwargs})
        self.bad = frozenset(bad)
        self.length = length
        self.error = error

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise self.ERRORS[self.error](f"sample {index}")
        x = self.rng.normal(size=(4, 3)).astype("float32")
        return x, np.full((4, 1), index, "float32")


class EndlessFlaky(Flaky):
    """Has no end, as a stream."""

    @property
    def num_batches(self):
        return None


class Reversing(Flaky):
    """Turns its order around after every epoch; the samples stay bad."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = list(range(self.length))

    def __getitem__(self, index):
        return super().__getitem__(self.order[index])

    def on_epoch_end(self):
        self.order.reverse()


class Allocates(Drawn):
    """Takes more and more memory at batch 2."""

    def __getitem__(self, index):
        hoard = []
        while index == 2:
            hoard.append(np.ones(1 << 22))
        return super().__getitem__(index)


class Opening(FastPyDataset):
    """Its workers start once a file is there."""

    def __init__(self, flag, **kwargs):
        super().__init__(**kwargs)
        self.flag = flag

    def __len__(self):
        return 1

    def on_worker_start(self):
        while not os.path.exists(self.flag):
            time.sleep(0.01)

    def __getitem__(self, index):
        return np.zeros(1)
