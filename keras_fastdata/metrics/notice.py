"""Shows the user a message while training waits for a long time.

In a terminal, the notice is a line of standard error below the present one, so
that a progress bar of Keras's stays where it is. In a notebook it is an output
of its own. Both go away when the wait ends. Elsewhere one line is logged, at
level INFO.

There is no thread: whoever waits looks again every few milliseconds anyway, and
calls `Notice.look` each time.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from keras_fastdata._call_stack import ignoring_errors

LEAST_S = 2.0  # shorter waits are not shown
_PREPARE_S = 1.0  # when to look first at what workers have loaded
_REFRESH_S = 0.5

_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)/")
_log = logging.getLogger("keras_fastdata")


class Notice:
    """A message to the user about a long wait.

    A process shows at most one message at a time.
    """

    _visible: Notice | None = None
    _visible_in = 0  # the process; a forked child shows none

    def __init__(self, shows: bool = True) -> None:
        self._began_s = time.monotonic()
        self._next_s = self._began_s + _PREPARE_S if shows else float("inf")
        self._place: _Place | None = None

    def look(self, describe: Callable[[], str]) -> None:
        """Shows or updates the notice if the wait is already long.

        Calls `describe` every half second, from the first second on.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _REFRESH_S
        # Nothing that concerns a notice may end a training.
        with ignoring_errors():
            text = describe()
            if now_s - self._began_s < LEAST_S or not self._take_place():
                return
            if self._place is None:
                self._place = _find_place()
            self._place.show(f"{text} ({now_s - self._began_s:.0f} s)")

    def end(self) -> None:
        """Removes the notice."""
        if self._place is not None:
            with ignoring_errors():
                self._place.clear()
            self._place = None
        if Notice._visible is self:
            Notice._visible = None

    def _take_place(self) -> bool:
        """Makes this notice visible, unless another notice is visible."""
        pid = os.getpid()
        if Notice._visible is None or Notice._visible_in != pid:
            if not _log.isEnabledFor(logging.WARNING):
                return False
            Notice._visible, Notice._visible_in = self, pid
        return Notice._visible is self


class _Place:
    """Logs a notice once; base class of the other ways to show a notice."""

    _has_told = False

    def show(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.info("%s", text)

    def clear(self) -> None:
        """Removes the shown text."""


class _Terminal(_Place):
    """Shows a notice in the terminal, in the line below the cursor."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._is_shown = False

    def show(self, text: str) -> None:
        from rich.text import Text

        self.clear()
        line = Text("\n" + text, style="dim", overflow="crop", no_wrap=True)
        line.truncate(max(1, self._console.width - 1) + 1)
        self._console.print(line, end="", soft_wrap=True)
        self._console.file.flush()
        self._is_shown = True

    def clear(self) -> None:
        """Erases the notice's line, and moves the cursor to the line above."""
        if self._is_shown:
            self._is_shown = False
            self._console.file.write("\r\x1b[2K\x1b[1A")
            self._console.file.flush()


class _Notebook(_Place):
    """Shows a notice as an output of a notebook's cell."""

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("IPython.display")
        self._handle: Any = None

    def show(self, text: str) -> None:
        output = self._library.Pretty(text)
        if self._handle is None:
            self._handle = self._library.display(output, display_id=True)
        else:
            self._handle.update(output)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update(self._library.Pretty(""))


def _find_place() -> _Place:
    """Returns an object that shows notices in a notebook, terminal or log."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook()
    from rich.console import Console

    console = Console(stderr=True)
    is_screen = console.is_terminal and not console.is_dumb_terminal
    return _Terminal(console) if is_screen else _Place()


class LoadedPackages:
    """Finds out which packages processes import, from their mapped files."""

    def __init__(self) -> None:
        self._mapped: collections.Counter[str] | None = None
        self._latest = ""

    def latest(self, pids: Iterable[int]) -> str:
        """Returns the package with the most files mapped since the last call.

        Without such files, returns the previous result. The first call returns
        "".

        Args:
            pids: The processes that map the files.
        """
        mapped: collections.Counter[str] = collections.Counter()
        for pid in pids:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/maps") as maps,
            ):
                mapped.update(_PACKAGE.findall(maps.read()))
        before, self._mapped = self._mapped, mapped
        if before is not None and (new := mapped - before):
            ((self._latest, _),) = new.most_common(1)
        return self._latest
