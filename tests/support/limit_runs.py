"""Runs a function as a training process of its own, and misses nothing.

`Trainers` forks for each run from a process that has imported Keras, so that a
run costs what it does and not three seconds more. `run_python` starts an
interpreter, for what only its start can tell. Both give the run a session of
its own, and report what is left in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback

PATIENCE_S = 280.0  # for a run to end
SETTLE_S = 60.0  # for what was asked to end to be gone


@dataclasses.dataclass
class Run:
    """How a training process ended.

    Attributes:
        result: What the function returned, through JSON.
        status: Exit status; negative for a signal.
        stdout: What it printed.
        stderr: The same, on standard error.
        left: Command lines of the processes that outlived it.
        hung: Whether it had to be killed.
    """

    result: object
    status: int
    stdout: str
    stderr: str
    left: list[str]
    hung: bool

    def check(self):
        """The result of a run that ended well and left nothing."""
        assert not self.hung, f"hung\n{self.stdout}\n{self.stderr}"
        assert self.status == 0, f"{self.status}\n{self.stderr}"
        assert self.left == []
        return self.result


class Trainers:
    """Runs functions in training processes that are forked from the zygote."""

    def __init__(self, zygote, folder):
        self.zygote = zygote
        self.folder = folder
        self.count = 0

    def run(self, function, *args, environ=None):
        """Runs `function(*args)` in a fork; its module is imported there."""
        self.count += 1
        place = self.folder / f"run{self.count}"
        place.mkdir()
        task = {
            "module": function.__module__,
            "function": function.__name__,
            "args": args,
            "result": str(place / "result"),
        }
        with (
            open(place / "stdout", "wb") as out,
            open(place / "stderr", "wb") as err,
        ):
            pid = self.zygote.start(
                f"import limit_runs\nlimit_runs.be_a_trainer({task!r})\n",
                [str(place / "train.py")],
                [out.fileno(), err.fileno()],
                **(environ or {}),
            )
        hung = not _ends(pid)
        if hung:
            _kill_session(pid)
        status = self.zygote.ask({"reap": pid})
        left = _left_of(pid)
        result = None
        with contextlib.suppress(FileNotFoundError):
            result = json.loads((place / "result").read_text())
        out, err = ((place / n).read_text() for n in ("stdout", "stderr"))
        return Run(result, status, out, err, left, hung)


def run_python(command, **kwargs):
    """Runs a command; its last line, if JSON, is the result."""
    kwargs.setdefault("env", environment())
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        **kwargs,
    )
    hung = False
    with process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            hung = True
            _kill_session(process.pid)
            out, err = process.communicate()
    result = None
    with contextlib.suppress(ValueError, IndexError):
        result = json.loads(out.splitlines()[-1])
    left = _left_of(process.pid)
    return Run(result, process.returncode, out, err, left, hung)


def environment(**changes):
    """This process's environment, with the test's modules to be found."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_path()),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **changes,
    }


def _path():
    return [os.path.abspath(p) for p in sys.path if p]


def _ends(pid):
    """Waits for the end of a process, which is not ours; not for ever."""
    pidfd = os.pidfd_open(pid)
    try:
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    finally:
        os.close(pidfd)


def _stat(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _session(leader):
    """The processes of a session that have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = _stat(name)
            if stat and int(stat[3]) == leader and stat[0] not in "ZX":
                found.append(int(name))
    return found


def _left_of(leader):
    """Command lines of what stays in a session; kills it."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for pid in left:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            lines.append(file.read().replace("\0", " ")[:200])
    _kill_session(leader)
    return lines


def _kill_session(leader):
    for pid in _session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- in the fork ---------------------------------------------------------------


def be_a_trainer(task):
    """Runs a function, lifts all limits, and writes what it has returned."""
    function = getattr(
        importlib.import_module(task["module"]), task["function"]
    )
    try:
        result = json.dumps(function(*task["args"]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(99) from None
    lift_limits()
    os.umask(0o022)
    with open(task["result"], "w") as file:
        file.write(result)


# -- for the functions ---------------------------------------------------------


def limit(name, value):
    """Sets the soft limit `name` ("NOFILE", ...) of this process."""
    which = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))


def lift_limits():
    """Raises every soft limit to what it may be."""
    for name in ("NOFILE", "AS", "NPROC", "FSIZE", "MEMLOCK", "STACK", "DATA"):
        which = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (hard, hard))


def address_space():
    """Bytes of address space this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def attempt(dataset, epochs=1):
    """Walks through a dataset of `Numbered`'s; says what came of it."""
    from keras_fastdata import LoaderError

    try:
        for _ in range(epochs):
            seen = [int(x.flat[0]) for x, _ in dataset]
            if seen != list(range(len(dataset))):
                raise AssertionError(f"wrong batches: {seen}")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        return {
            "worked": False,
            "error": type(error).__name__,
            "ours": isinstance(error, LoaderError),
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "frames": [frame.name for frame in frames],
        }
    return {"worked": True}


def script_for(function, *args):
    """The text of a script that runs a function and prints its result."""
    # As bytes: a script in the C locale cannot spell what is not ASCII.
    path = [os.fsencode(p) for p in _path()]
    return (
        "import sys\n"
        "import os\n"
        f"sys.path[:0] = map(os.fsdecode, {path!r})\n"
        "import limit_runs\n"
        f"limit_runs.main({function.__module__!r}, {function.__name__!r}, "
        f"{json.dumps(args)!r})\n"
    )


def main(module, function, args):
    """Runs a function and prints what it returns, as JSON."""
    function = getattr(importlib.import_module(module), function)
    print(json.dumps(function(*json.loads(args))), flush=True)
