"""Runs benchmarks: a fresh process for each case, in interleaved rounds.

A benchmark is a module of this package with

- `cases()`: the configurations, each a dict of labels;
- `measure(case, seconds)`: the figures of one, in a process of its own;
- `FIGURES`: what they are, the one to compare by first;
- `TIMEOUT_S`: how long a process may take before its case counts as hung.

Every round goes through all cases once, so that a slow minute of the machine
is shared by all. A case that hung or failed is not tried again, and one whose
loader is not installed is left out; both are said in the table. The results
are written to the JSON file after every round.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from benchmarks import machine, peers, table
from benchmarks.processes import kill_session

NAMES = (
    "transport",
    "seed_workload",
    "fit",
    "startup",
    "epoch_gap",
    "memory",
    "scale",
    "samples",
    "images",
    "formats",
    "packing",
    "opening",
    "data_wait",
)

Case = dict[str, Any]
MARK = "FIGURES "
EXIT_S = 5
_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One kind of number that a benchmark measures.

    Attributes:
        key: Its name in the results.
        title: Its head in the table, with the unit.
        larger_is_better: As it says.
    """

    key: str
    title: str
    larger_is_better: bool = False


THROUGHPUT = (
    Figure("batches_per_s", "batches/s", larger_is_better=True),
    Figure("cpu_ms", "CPU ms/batch"),
    Figure("consumer_cpu_us", "consumer's CPU us/batch"),
    Figure("peak_pss_mb", "PSS MB"),
)


@dataclasses.dataclass
class Result:
    """What the rounds of one case gave.

    Attributes:
        benchmark: Its module.
        case: Its labels.
        figures: For each key the values, by round.
        outcome: "ok", or why there are no (more) figures.
    """

    benchmark: str
    case: Case
    figures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    outcome: str = "ok"

    def add(self, figures: dict[str, float]) -> None:
        """Adds the values of a round."""
        for key, value in figures.items():
            self.figures.setdefault(key, []).append(value)


def load(name: str) -> ModuleType:
    """The module of a benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


def main(names: Sequence[str] = NAMES) -> None:
    """The command line of `python -m benchmarks` and of each benchmark."""
    arguments = _parse(names)
    if arguments.one:
        name, case = arguments.one
        _measure_one(name, json.loads(case), arguments.seconds)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and kill a child
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.5
    results: list[Result] = []
    described = machine.describe()
    print(machine.in_words(described))
    for name in arguments.only:
        results += (mine := _prepare(name, arguments.where))
        if arguments.list:
            for result in mine:
                print(name, json.dumps(result.case), result.outcome)
            continue
        for number in range(arguments.rounds):
            for place, result in enumerate(mine, 1):
                if result.outcome == "ok":
                    where = f"round {number + 1}, {place} of {len(mine)}"
                    _say(where, result)
                    run_once(result, arguments.seconds)
            if arguments.json:
                _save(arguments.json, described, results)
        table.show(load(name), mine)
    if arguments.plot:
        from benchmarks.plot import draw

        draw([dataclasses.asdict(result) for result in results], arguments.plot)


def _measure_one(name: str, case: Case, seconds: float) -> None:
    """What the process of a case does. Alarms end it if nobody else does."""
    signal.alarm(int(load(name).TIMEOUT_S) + EXIT_S)
    # Whatever feeds it, a training process is one that has Keras.
    peers.import_all(case.get("loader", ""))
    print(MARK + json.dumps(load(name).measure(case, seconds)), flush=True)
    # Some loaders leave threads that never end.
    signal.alarm(EXIT_S)


def run_once(result: Result, seconds: float) -> None:
    """Measures a case in a fresh process, and adds what it says."""
    timeout_s = load(result.benchmark).TIMEOUT_S
    case = json.dumps(result.case)
    one = ["--one", result.benchmark, case, "--seconds", str(seconds)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend := result.case.get("backend"):
        environment["KERAS_BACKEND"] = backend
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as e:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", *one],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=e,
            env=environment,
            start_new_session=True,
        )
        try:
            ended = f"hung for {timeout_s:g} s"
            if _has_ended(child.pid, timeout_s):
                ended = f"failed: {_why(e)}"
        finally:
            kill_session(child.pid)
            child.wait()
        out.seek(0)
        lines = [line for line in out if line.startswith(MARK)]
    if lines:
        result.add(json.loads(lines[-1].removeprefix(MARK)))
    else:
        result.outcome = ended


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Waits for the end of a child, but lets it keep its process id.

    So nobody else can have that id when what the child left is killed.
    """
    until = time.monotonic() + timeout_s
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not os.waitid(os.P_PID, pid, flags):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _why(file: Any) -> str:
    file.seek(0)
    lines = [line.rstrip() for line in file if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines or ["without a word"])[-1][:120]


def _prepare(name: str, where: list[str]) -> list[Result]:
    results = []
    for case in load(name).cases():
        if not all(_fits(case, condition) for condition in where):
            continue
        result = Result(name, case)
        loader = case.get("loader")
        if loader in peers.LOADERS and (module := peers.missing(loader)):
            result.outcome = f"left out: {module} is not installed"
        results.append(result)
    return results


def _fits(case: Case, condition: str) -> bool:
    label, _, values = condition.partition("=")
    return label not in case or str(case[label]) in values.split("|")


def _say(where: str, result: Result) -> None:
    labels = ", ".join(map(str, result.case.values()))
    print(f"{where}: {result.benchmark}: {labels}", file=sys.stderr, flush=True)


def _save(
    path: str, described: dict[str, object], results: list[Result]
) -> None:
    done = [dataclasses.asdict(result) for result in results]
    with open(f"{path}.new", "w") as file:
        json.dump({"machine": described, "results": done}, file, indent=1)
    os.replace(f"{path}.new", path)


def _parse(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures keras_fastdata and what could be used instead.",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=names)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="to time in each process"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of half a second"
    )
    parser.add_argument(
        "--where",
        nargs="+",
        default=[],
        metavar="LABEL=VALUE|VALUE",
        help="cases with these labels alone, as in 'loader=fastdata|torch'",
    )
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write throughput by size to this PNG")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def combine(**labels: Sequence[Any]) -> Iterator[Case]:
    """Every combination of the labels' values, the last varying fastest."""
    if not labels:
        yield {}
        return
    *names, last = labels
    for case in combine(**{name: labels[name] for name in names}):
        for value in labels[last]:
            yield {**case, last: value}
