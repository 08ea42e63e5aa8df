"""Training processes that a test starts, and all that is left of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

# What differs between start methods is told apart in the full run.
START_METHODS = [
    "forkserver",
    pytest.param("spawn", marks=pytest.mark.long),
    pytest.param("fork", marks=pytest.mark.long),
]

_PATIENCE_S = 240.0  # for a trainer to come to its next line, or its end
_AGAIN_S = 60.0  # before somebody who pressed Ctrl-C does so again
_GONE_S = 60.0  # for its family to be gone after that
_TAG = "KERAS_FASTDATA_TEST_TRAINER"
_ZYGOTE = pathlib.Path(__file__).parent / "zygote.py"

PRELUDE = """
import gc, os, signal, subprocess, sys, threading, time, warnings
import keras
import numpy as np
from keras_fastdata import FastPyDataset

warnings.filterwarnings("ignore", "`start_method='fork'`")

def say(*words):
    print(*words, flush=True)

def pythonify_logs(logs):
    return {key: float(value) for key, value in (logs or {}).items()}

# Keras's own drops a Ctrl-C that comes within it: it has a bare `except`.
keras.src.utils.python_utils.pythonify_logs = pythonify_logs

class Data(FastPyDataset):
    def __init__(self, length=20, pause_s=0.0, log=None, **kwargs):
        super().__init__(workers=2, use_multiprocessing=True, **kwargs)
        self.length, self.pause_s, self.log = length, pause_s, log
    def on_worker_start(self):
        self.child = subprocess.Popen(["sleep", "600"])
        if self.log:
            with open(self.log, "a") as log:
                log.write("start\\n")
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        time.sleep(self.pause_s)
        x = np.full((4, 3), index, "float32")
        return x, x[:, :1]

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            say("training")

class Do(keras.callbacks.Callback):
    def __init__(self, what):
        super().__init__()
        self.what = what
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.what()

def fail():
    raise RuntimeError("mine")

def make_model():
    # Its loss is the mean of the squares of the targets, whatever it does.
    model = keras.Sequential(
        [keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model

def fit(data, *callbacks):
    return make_model().fit(data, verbose=0, callbacks=list(callbacks))

def loss_of(data):
    return round(fit(data).history["loss"][0], 2)

def numbers(batches):
    return [int(y.flat[0]) for _, y in batches]

"""


def endless(start_method="forkserver"):
    """The code of a dataset that nobody sees the end of."""
    return f"Data(10**6, pause_s=0.001, start_method={start_method!r})"


class Trainer:
    """A training process and, by its session, all it has started."""

    _tags = itertools.count()

    def __init__(self, zygote, script):
        self._zygote = zygote
        self._tag = f"{os.getpid()}-{next(self._tags)}"
        self._segments = set(os.listdir("/dev/shm"))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._out, out = os.pipe()
        self._read = b""
        self.pid = zygote.start(
            PRELUDE + script,
            ["train.py"],
            [out, self._errors.fileno()],
            **{_TAG: self._tag},
        )
        os.close(out)
        self._pidfd = os.pidfd_open(self.pid)
        self._press_again = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.end()
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._out)
        self._errors.close()

    def line(self):
        """The next line of its standard output."""
        while b"\n" not in self._read:
            more = (
                os.read(self._out, 1 << 16) if self._tells(self._out) else b""
            )
            assert more, f"no line came; standard error: {self.errors()}"
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def send(self, signum, kill=os.kill):
        """Sends a signal; SIGINT again if nothing comes of it for long.

        A library that calls Python from C may drop a KeyboardInterrupt.
        """
        kill(self.pid, signum)
        self._press_again = kill if signum == signal.SIGINT else None

    def _tells(self, fd):
        """Whether that becomes readable in time."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            if self._press_again is not None:
                left = min(left, _AGAIN_S)
            if select.select([fd], [], [], left)[0]:
                self._press_again = None
                return True
            if self._press_again is not None:
                self._press_again(self.pid, signal.SIGINT)
        return False

    def end(self):
        """Waits for its end and returns its exit status."""
        ended = self._tells(self._pidfd)
        assert ended, f"it does not end; standard error: {self.errors()}"
        os.close(self._pidfd)
        self._pidfd = None
        return self._zygote.ask({"reap": self.pid})

    def errors(self):
        # Not read(): the trainer writes where this descriptor stands.
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def family(self):
        """All processes of its session or with its mark in the environment."""
        mark = f"{_TAG}={self._tag}\0".encode()
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
                state, _, _, session = stat.rpartition(")")[2].split()[:4]
                environ = pathlib.Path(f"/proc/{pid}/environ")
                if state not in "ZX" and (
                    int(session) == self.pid or mark in environ.read_bytes()
                ):
                    found.append(int(pid))
        return found

    def leaves_no_process(self, but=()):
        deadline = time.monotonic() + _GONE_S
        while left := set(self.family()) - set(but):
            assert time.monotonic() < deadline, [_look_of(pid) for pid in left]
            time.sleep(0.02)

    def leaves_no_segment(self):
        # Other tests run beside this one; what they make there is soon gone.
        deadline = time.monotonic() + _GONE_S
        while left := set(os.listdir("/dev/shm")) - self._segments:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def leaves_nothing(self, last_words=None):
        """Checks what is left once it has ended.

        Args:
            last_words: How its one traceback ends; `None` for none.
        """
        self.leaves_no_process()
        self.leaves_no_segment()
        errors = self.errors()
        for noise in ("resource_tracker", "Exception ignored", "leaked"):
            assert noise not in errors, errors
        if last_words is None:
            assert "Traceback" not in errors, errors
            assert "keras_fastdata" not in errors, errors
        else:
            assert errors.count("Traceback") == 1, errors
            assert last_words in errors.splitlines(), errors


def _look_of(pid):
    with contextlib.suppress(OSError):
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        return pid, command.decode().replace("\0", " ")[-300:]
    return pid


class Script:
    """A training process that runs to its end, with all that it says."""

    def __init__(self, zygote, argv, folder, environ):
        self._zygote = zygote
        self._argv = [str(word) for word in argv]
        with open(self._argv[0]) as file:
            text = file.read()
        self._said = [
            tempfile.TemporaryFile(),  # noqa: SIM115
            tempfile.TemporaryFile(),  # noqa: SIM115
        ]
        self._pid = zygote.start(
            text,
            self._argv,
            [file.fileno() for file in self._said],
            folder,
            **environ,
        )

    def end(self):
        """Waits for its end; returns what `subprocess.run` would."""
        pidfd = os.pidfd_open(self._pid)
        if not select.select([pidfd], [], [], _PATIENCE_S)[0]:
            os.kill(self._pid, signal.SIGKILL)
        os.close(pidfd)
        status = self._zygote.ask({"reap": self._pid})
        texts = []
        for file in self._said:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return subprocess.CompletedProcess(self._argv, status, *texts)


class Zygote:
    """The process that trainers are forked from."""

    def __init__(self):
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        for name in ("PYTHONUNBUFFERED", "PYTHONWARNINGS"):
            environ.pop(name, None)
        with theirs:
            subprocess.run(
                [sys.executable, _ZYGOTE, str(theirs.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal: what is said waits
                pass_fds=[theirs.fileno()],
                check=True,
            )
        self._socket.settimeout(_PATIENCE_S)

    def ask(self, request, fds=()):
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            return json.loads(self._socket.recv(64))

    def start(self, text, argv, fds, folder=None, **environ):
        """Has a fork run the text of a script; returns its process id."""
        request = {
            "script": text,
            "argv": argv,
            "folder": str(folder or os.getcwd()),
            "environ": environ,
        }
        return self.ask(request, fds)

    def run(self, *argv, folder=None, **environ):
        """Runs a script with arguments, as `subprocess.run` does.

        What differs: Keras has been imported already.
        """
        return Script(self, argv, folder, environ).end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()
