"""The command `keras-fastdata`, which is also `python -m keras_fastdata`.

    keras-fastdata profile MODULE_OR_FILE:FACTORY
    keras-fastdata doctor
    keras-fastdata demo

Exit status: 0 for success, 1 if the dataset's own code raised an exception or
`doctor` found something broken, 2 if an argument is wrong, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

_OK, _RAISED, _USAGE, _INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs a command line, and returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-fastdata",
        description="Input pipelines for Keras 3.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_profile(commands)
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can do, and what is broken",
        description=(
            "Looks at cores, memory, system calls, shared memory and packages, "
            "imports Keras, starts worker processes in each way, and says what "
            "follows. Takes about 20 seconds. The exit status is 1 if "
            "something is broken."
        ),
    )
    doctor.set_defaults(run=_doctor)
    demo = commands.add_parser(
        "demo",
        help="train a small model inline and with workers",
        description=(
            "Trains a small model on generated pictures, inline and with "
            "worker processes, and prints what LoaderHealth says of both. "
            "Takes about 20 seconds."
        ),
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="try out where the batches of a dataset are best built",
        description=(
            "Builds a few batches in the caller, in threads and in processes, "
            "and says what building takes and which workers to use."
        ),
    )
    profile.add_argument(
        "target",
        metavar="MODULE_OR_FILE:FACTORY",
        help=(
            "a FastPyDataset, a subclass of it, or a function that returns "
            "one, such as train.py:make_dataset"
        ),
    )
    profile.add_argument(
        "--batches",
        type=_count,
        default=48,
        metavar="N",
        help="batches that each kind of workers builds (default: 48)",
    )
    profile.add_argument(
        "--seconds",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="how long each kind may take (default: 5)",
    )
    profile.add_argument(
        "--json", action="store_true", help="print JSON, for programs"
    )
    profile.set_defaults(run=_profile)


def _doctor(options: argparse.Namespace) -> int:
    from keras_fastdata.commands import doctor

    return doctor.run()


def _demo(options: argparse.Namespace) -> int:
    from keras_fastdata.commands import demo

    return demo.run()


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"not a number from 1: {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")


def _profile(options: argparse.Namespace) -> int:
    # These import Keras; `--help` must not wait for that.
    from keras_fastdata import cli_target, profiling
    from keras_fastdata.metrics import formatting

    progress = _Progress()
    with _stdout_for_the_result_alone():
        try:
            dataset = cli_target.find(options.target)
            if dataset.num_batches == 0:
                raise cli_target.UsageError(f"{options.target} has no batches.")
            with contextlib.closing(progress):
                found = profiling.run(
                    dataset, options.batches, options.seconds, progress.tell
                )
        except cli_target.UsageError as error:
            text = f"keras-fastdata: {error}"
            print(formatting.wrapped(text), file=sys.stderr)
            return _USAGE
        except Exception:
            traceback.print_exc()
            return _RAISED
    print(found.to_json() if options.json else found)
    return _OK


@contextlib.contextmanager
def _stdout_for_the_result_alone() -> Iterator[None]:
    """Redirects all output of the dataset and its workers to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


class _Progress:
    """Shows a one-line progress bar if standard error is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def tell(self, done: int, of: int, what: str) -> None:
        """Shows the number of finished batches and the total number."""
        if self._shown:
            width = 20
            bar = "=" * (width * done // of)
            print(
                f"\r[{bar:{width}}] {done}/{of} batches  {what:12}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Clears the progress bar."""
        if self._shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
