"""Whether what `LoaderHealth` recommends is nearly the best, and as forecast.

    python -m benchmarks.advice [--only NAME ...] [--kind KIND ...]
        [--rounds N] [--json FILE] [--list]

Each pipeline has batches of another kind. It is trained with LoaderHealth from
each of three settings: inline, 2 threads, 2 processes. The call that the
summary recommends is then run, and so is a grid of settings; their rounds take
turns. A line of the table has, for an epoch after the first one:

    recommended   the recommended setting; "-" if nothing is recommended, and
                  then the present setting counts; "auto" is measured after
                  three more epochs, in which it chooses
    forecast      the time that the summary forecast for that setting; empty
                  where it only says what to try
    came          the time that was measured, a median
    error         how far the forecast is from that; at most 20% is wanted
                  (where a whole `fit` counts, the forecast is for its later
                  epochs alone)
    best          the quickest setting of the grid, and its time
    ratio         came / best; at most 1.25 is wanted
    account       how far the account of the fit is from its wall clock; at
                  most 2% is wanted

A recommendation is tried even where the summary would leave it out because the
fit is short. KERAS_BACKEND chooses the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.processes import kill_session
from keras_fastdata import FastPyDataset

MARK = "ROW "
TIMEOUT_S = 300.0
ROUNDS = 3
SECONDS = 1.0  # of a `fit`, after its first epoch
CHOOSING = 3  # epochs in which `workers="auto"` may still try others
EPOCHS = 3  # of a `fit` that counts as a whole
NEAR = 1.4  # times the best of the first round: slower is not run again
LOOPS = 3  # processes that compute, on a saturated machine
STRAGGLES = 13  # batches: one of them is slow
COLUMNS = 8
MEGABYTES = 16

Arguments = dict[str, Any]


def setting(workers: int, processes: bool) -> Arguments:
    """The arguments for some workers, with a queue that keeps all busy."""
    arguments: Arguments = {"workers": workers}
    if processes:
        arguments["use_multiprocessing"] = True
    if workers > 10:
        arguments["max_queue_size"] = 2 * workers
    return arguments


KINDS = {
    "inline": setting(0, False),
    "threads": setting(2, False),
    "processes": setting(2, True),
}
GRID = [
    setting(0, False),
    *(setting(n, p) for p in (False, True) for n in (1, 2, 4, 8, 16)),
]


# -- the pipelines ------------------------------------------------------------


def _sleep(seconds: float) -> Callable[[int], None]:
    return lambda index: time.sleep(seconds)


def _python(seconds: float) -> Callable[[int], None]:
    """Computes in Python, which holds its lock."""

    def build(index: int) -> None:
        until_s = time.thread_time() + seconds
        while time.thread_time() < until_s:
            sum(range(200))

    return build


def _native(seconds: float) -> Callable[[int], None]:
    """Computes without Python's lock."""

    def build(index: int) -> None:
        until_s = time.thread_time() + seconds
        while time.thread_time() < until_s:
            hashlib.sha256(_BYTES)

    return build


def _first(index: int) -> None:
    """The first batch of each process loads something."""
    with _LOADING:
        if not _LOADED:
            time.sleep(1.0)
            _LOADED.append(True)
    time.sleep(0.01)


def _straggle(index: int) -> None:
    time.sleep(0.002 if index % STRAGGLES else 0.3)


def _at_hand(index: int) -> None:
    """Costs nothing."""


_BYTES = bytes(200_000)
_LOADING, _LOADED = threading.Lock(), []  # type: ignore[var-annotated]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A dataset and its training.

    Attributes:
        build: What building a batch takes time for.
        length: Batches in an epoch.
        step_s: What a step takes beside the model's.
        columns: Of a batch; it has 32 rows.
        arguments: Of the dataset, besides its workers.
        validates: Whether this is the validation data, and its validation is
            what counts.
        whole: Whether a whole `fit` counts, with its first batch.
        saturated: Whether busy loops run beside it.
        apart: Whether these have a session of their own, as the programs of
            another terminal do. Linux may share the cores among sessions.
    """

    build: Callable[[int], None]
    length: int
    step_s: float = 0.001
    columns: int = COLUMNS
    arguments: Arguments = dataclasses.field(default_factory=dict)
    validates: bool = False
    whole: bool = False
    saturated: bool = False
    apart: bool = False


PIPELINES = {
    "sleep 5 ms": Pipeline(_sleep(0.005), 240),
    "sleep 20 ms": Pipeline(_sleep(0.02), 100),
    "sleep 100 ms": Pipeline(_sleep(0.1), 40),
    "Python 5 ms": Pipeline(_python(0.005), 200),
    "Python 50 ms": Pipeline(_python(0.05), 32),
    "native 5 ms": Pipeline(_native(0.005), 200),
    "native 50 ms": Pipeline(_native(0.05), 32),
    "memory copies": Pipeline(_at_hand, 100, columns=MEGABYTES * 2**20 // 128),
    "slow first batch": Pipeline(_first, 100, whole=True),
    "slow validation": Pipeline(_sleep(0.02), 80, validates=True),
    "stragglers": Pipeline(_straggle, 5 * STRAGGLES),
    "tiny steps": Pipeline(_at_hand, 2000, step_s=0.0),
    "cache": Pipeline(_sleep(0.02), 80, arguments={"cache": "memory"}),
    "saturated, sleep 20 ms": Pipeline(_sleep(0.02), 100, saturated=True),
    "saturated, native 5 ms": Pipeline(_native(0.005), 100, saturated=True),
    "saturated apart, native 5 ms": Pipeline(
        _native(0.005), 100, saturated=True, apart=True
    ),
}


class Batches(FastPyDataset):
    """The batches of a pipeline."""

    def __init__(self, name: str, length: int = 0, **kwargs: Any) -> None:
        super().__init__(seed=0, **kwargs)
        self.name = name
        self.length = length or PIPELINES[name].length
        rows = 32, PIPELINES[name].columns
        self.x = np.ones(rows, "float32")
        self.y = np.ones((32, 1), "float32")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        PIPELINES[self.name].build(index)
        return (self.x.copy() if self.x.nbytes > 10_000 else self.x), self.y


# -- one pipeline, in a process of its own ------------------------------------


@dataclasses.dataclass
class Run:
    """What a `fit` took, in seconds.

    Attributes:
        epoch_s: An epoch after the first, or its validation; with
            `workers="auto"`, after the first four.
        wall_s: The whole.
        whole_s: What counts: `epoch_s`, or the whole for each epoch.
        account_s: The same as LoaderHealth accounts for it.
        call: The call that it recommends.
        forecast_s: What `epoch_s` should be then.
        why: The kind of its verdict.
    """

    epoch_s: float
    wall_s: float
    whole_s: float
    account_s: float = math.nan
    call: str = ""
    forecast_s: float = math.nan
    why: str = ""


class Trainer:
    """Trains one model on the batches of one pipeline."""

    def __init__(self, name: str) -> None:
        import keras

        self._name, self._pipeline = name, PIPELINES[name]
        inputs = keras.Input((self._pipeline.columns,))
        first = keras.layers.Lambda(
            lambda x: x[:, :COLUMNS], output_shape=(COLUMNS,)
        )(inputs)
        self._model = keras.Model(inputs, keras.layers.Dense(1)(first))
        self._model.compile("sgd", "mse")

    def fit(self, arguments: Arguments, health: Any = None) -> Run:
        """Trains with a new dataset, and with LoaderHealth if it is given."""
        pipeline, _LOADED[:] = self._pipeline, []
        # What an epoch has built ahead for the next one is no gain: epochs
        # go on as if there were always another one.
        epochs = EPOCHS if pipeline.whole else 10_000
        first = 1 + CHOOSING * (arguments["workers"] == "auto")
        clock = _clock(pipeline.step_s, first)
        arguments = pipeline.arguments | arguments
        with contextlib.ExitStack() as stack:
            dataset = stack.enter_context(Batches(self._name, **arguments))
            data = {"x": dataset}
            if pipeline.validates:
                quick = Batches("tiny steps", 40, **arguments)
                data = {
                    "x": stack.enter_context(quick),
                    "validation_data": dataset,
                }
            callbacks = [clock] if health is None else [health, clock]
            began_s = time.monotonic()
            self._model.fit(
                **data, epochs=epochs, verbose=0, callbacks=callbacks
            )
            wall_s = time.monotonic() - began_s
        epoch_s = clock.epoch_s
        if pipeline.validates:
            epoch_s = statistics.fmean(clock.validations[first:])
        run = Run(
            epoch_s, wall_s, wall_s / EPOCHS if pipeline.whole else epoch_s
        )
        if health is not None:
            self._read(health, run)
        return run

    def _read(self, health: Any, run: Run) -> None:
        summary = health.summary()
        verdict = summary.verdict
        if self._pipeline.validates:
            verdict = summary.validation_verdict
        run.account_s = summary.account.total_s
        run.call, run.forecast_s = verdict.call, verdict.forecast_s
        run.why = str(verdict.kind)


def _clock(step_s: float, first: int) -> Any:
    import keras

    class Clock(keras.callbacks.Callback):
        """Measures epochs and validations, and makes steps longer."""

        def __init__(self) -> None:
            super().__init__()
            self.validations: list[float] = []
            self.epoch_s = math.nan
            self._since_s = self._test_s = 0.0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch < first:
                self._since_s = time.monotonic()
                return
            took_s = time.monotonic() - self._since_s
            self.epoch_s = took_s / (epoch + 1 - first)
            self.model.stop_training = took_s > SECONDS

        def on_test_begin(self, logs: Any = None) -> None:
            self._test_s = time.monotonic()

        def on_test_end(self, logs: Any = None) -> None:
            self.validations.append(time.monotonic() - self._test_s)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if step_s:
                time.sleep(step_s)

        on_test_batch_end = on_train_batch_end

    return Clock()


def arguments_of(call: str) -> Arguments:
    """The arguments in a recommended call."""
    inside = call[call.index("(..., ") + len("(..., ") : -1]
    found: Arguments = eval(f"dict({inside})", {})
    return found


def measure(name: str, kinds: list[str], rounds: int) -> Iterator[Arguments]:
    """Yields a row for each kind of workers that the training begins with."""
    from keras_fastdata import LoaderHealth

    trainer = Trainer(name)
    pipeline = PIPELINES[name]
    with _loops(LOOPS if pipeline.saturated else 0, pipeline.apart):
        trainer.fit(KINDS["threads"])  # compiles
        runs = {
            kind: trainer.fit(KINDS[kind], LoaderHealth(verbose=0))
            for kind in kinds
        }
        wanted = {
            kind: arguments_of(run.call) if run.call else KINDS[kind]
            for kind, run in runs.items()
        }
        took = _take_turns(trainer, list(wanted.values()), rounds)
    times = {
        key: statistics.median(run.whole_s for run in found)
        for key, found in took.items()
    }
    grid = [_key(arguments) for arguments in GRID]
    best = min(grid, key=lambda key: times[key])
    for kind, run in runs.items():
        key = _key(wanted[kind])
        came_s = statistics.median(run.epoch_s for run in took[key])
        is_forecast = not math.isnan(run.forecast_s)
        forecast_s = run.forecast_s if is_forecast else None
        yield {
            "pipeline": name,
            "from": kind,
            "kind": run.why,
            "recommended": _short(wanted[kind]) if run.call else "-",
            "forecast_s": forecast_s,
            "came_s": came_s,
            "error": forecast_s / came_s - 1 if forecast_s else None,
            "best": _short(json.loads(best)),
            "best_s": times[best],
            "ratio": times[key] / times[best],
            "account": run.account_s / run.wall_s - 1,
            "present_s": run.epoch_s,
            "times": times,
        }


def _take_turns(
    trainer: Trainer, wanted: list[Arguments], rounds: int
) -> dict[str, list[Run]]:
    """Runs all settings once, and those that matter in more rounds."""
    took: dict[str, list[Run]] = {}
    settings = {_key(arguments) for arguments in wanted}
    keys = [_key(arguments) for arguments in GRID]
    keys += sorted(settings.difference(keys))
    for _ in range(rounds):
        for key in keys:
            run = trainer.fit(json.loads(key))
            took.setdefault(key, []).append(run)
        best_s = min(runs[0].whole_s for runs in took.values())
        keys = [
            key
            for key in keys
            if key in settings or took[key][0].whole_s < NEAR * best_s
        ]
    return took


def _key(arguments: Arguments) -> str:
    return json.dumps(arguments, sort_keys=True)


def _short(arguments: Arguments) -> str:
    workers = arguments["workers"]
    if workers == "auto":
        return "auto"
    kind = "p" if arguments.get("use_multiprocessing") else "t"
    text = f"{workers}{kind}" if workers else "inline"
    queue = arguments.get("max_queue_size")
    return f"{text}, queue {queue}" if queue else text


@contextlib.contextmanager
def _loops(count: int, apart: bool) -> Iterator[None]:
    """Runs busy loops beside the training; they end with this process."""
    program = "import os; us = os.getppid()\nwhile os.getppid() == us: pass"
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", program], start_new_session=apart
        )
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


# -- all of them --------------------------------------------------------------


def _rows_of(name: str, arguments: argparse.Namespace) -> list[Arguments]:
    """The rows of a pipeline, from a process of its own."""
    program = "from benchmarks import advice; advice.main()"
    one = ["--one", "--only", name, "--rounds", str(arguments.rounds)]
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *one, "--kind", *arguments.kind],
            stdin=subprocess.DEVNULL,
            stdout=out,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        try:
            child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{name}: took over {TIMEOUT_S:g} s", file=sys.stderr)
        finally:
            kill_session(child.pid)
            child.wait()
        out.seek(0)
        lines = [line for line in out if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


HEAD = (
    "pipeline",
    "from",
    "verdict",
    "recommended",
    "forecast",
    "came",
    "error",
    "best",
    "",
    "ratio",
    "account",
)


def _show(cells: Any) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _cells(row: Arguments) -> list[str]:
    forecast = f"{row['forecast_s']:.2f} s" if row["forecast_s"] else ""
    return [
        row["pipeline"],
        row["from"],
        row["kind"],
        row["recommended"],
        forecast,
        f"{row['came_s']:.2f} s",
        f"{row['error']:+.0%}" if forecast else "",
        row["best"],
        f"{row['best_s']:.2f} s",
        f"{row['ratio']:.2f}",
        f"{row['account']:+.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.advice",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument(
        "--only", nargs="+", choices=PIPELINES, default=list(PIPELINES)
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--list", action="store_true", help="show the names")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(arguments.only))
        return
    if arguments.one:
        (name,) = arguments.only
        for row in measure(name, arguments.kind, arguments.rounds):
            print(MARK + json.dumps(row), flush=True)
        return
    described = machine.describe()
    print(machine.in_words(described), end="\n\n")
    _show(HEAD)
    _show(["---"] * len(HEAD))
    rows: list[Arguments] = []
    began_s = time.monotonic()
    for name in arguments.only:
        rows += (found := _rows_of(name, arguments))
        for row in found:
            _show(_cells(row))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"machine": described, "rows": rows}, file, indent=1)
    _conclude(rows, time.monotonic() - began_s)


def _conclude(rows: list[Arguments], took_s: float) -> None:
    within = {
        "within 1.25 times of the best": [r["ratio"] <= 1.25 for r in rows],
        "forecast within 20%": [
            abs(r["error"]) <= 0.2 for r in rows if r["error"] is not None
        ],
        "account within 2%": [abs(r["account"]) <= 0.02 for r in rows],
    }
    print()
    for what, are in within.items():
        print(f"{what}: {sum(are)} of {len(are)}")
    print(f"It took {took_s / 60:.1f} min.")


if __name__ == "__main__":
    main()
