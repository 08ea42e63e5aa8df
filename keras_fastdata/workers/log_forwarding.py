"""Forwards a worker's log records and warnings to the training process.

In the worker every record goes to one handler of the root logger and every
warning that passes the filters to one hook; both send. In the training process
each is given to the logger of its name, or to the warnings filters, as if it
had happened there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

from keras_fastdata import _call_stack
from keras_fastdata.workers import exceptions, messages
from keras_fastdata.workers.base import LACKS, ONCE
from keras_fastdata.workers.messages import MessageKind

KINDS = {MessageKind.LOG, MessageKind.WARNING}  # of what is handed on

_MAX_BYTES = 64 * 1024  # of the text of one record


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """The logging and warning settings that workers copy from the trainer."""

    # Level of each logger that has one of its own; "" is the root.
    levels: dict[str, int]
    disabled: int  # the argument of `logging.disable`
    # `warnings.filters`, each category as (module, name): a filter for a
    # warning of some library must not import it.
    filters: list[tuple[Any, Any, tuple[str, str], Any, int]]

    @staticmethod
    def of_this_process() -> LoggingConfig:
        loggers = logging.root.manager.loggerDict
        levels = {
            name: logger.level
            for name, logger in list(loggers.items())
            if isinstance(logger, logging.Logger) and logger.level
        }
        levels[""] = logging.root.level
        filters = [
            (action, text, (kind.__module__, kind.__qualname__), module, line)
            for action, text, kind, module, line in warnings.filters
            if isinstance(kind, type)
        ]
        return LoggingConfig(levels, logging.root.manager.disable, filters)

    def apply(self) -> None:
        """Applies these log levels and warning filters to this process."""
        for name, level in self.levels.items():
            logging.getLogger(name or None).setLevel(level)
        logging.disable(self.disabled)
        found = []
        for action, text, (home, name), module, line in self.filters:
            kind = getattr(sys.modules.get(home), name, None)
            if isinstance(kind, type):
                found.append((action, text, kind, module, line))
        warnings.filters[:] = found  # type: ignore[index]
        # A public call that makes the module notice the new list.
        warnings.simplefilter("default", _Never)


class _Never(Warning):
    """A warning category that matches no warning."""


Send = Callable[[MessageKind, bytes], None]


def install(send: Send) -> None:
    """Redirects this process's log records and warnings to `send`."""
    sender = _Sender(send)
    logging.root.handlers[:] = [sender]

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        del file, line
        given = _ForwardedWarning(
            exceptions.dump_exception(message)
            if isinstance(message, Warning)
            else None,
            _shortened(str(message)),
            _call_stack.module_at(filename, lineno),
            filename,
            lineno,
        )
        body = pickle.dumps(given)
        if len(body) > messages.MAX_DATAGRAM_BYTES:
            brief = exceptions.dump_exception(category(given.text))
            body = pickle.dumps(dataclasses.replace(given, described=brief))
        if len(body) > messages.MAX_DATAGRAM_BYTES:
            body = pickle.dumps(dataclasses.replace(given, described=None))
        send(MessageKind.WARNING, body)

    warnings.showwarning = showwarning


def take_over() -> None:
    """Removes the log handlers that importing the user's modules added.

    The training process has imported them too, and its handlers will do.
    """
    sender = next(h for h in logging.root.handlers if isinstance(h, _Sender))
    logging.root.handlers[:] = [sender]
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = []
            logger.propagate = True


@dataclasses.dataclass(frozen=True)
class _ForwardedWarning:
    """A warning that a worker sends to the training process."""

    described: bytes | None  # the instance, as an exception that is taken apart
    text: str  # what it says, should it not be put together
    module: str | None  # the module that warns, which filters may name
    filename: str
    lineno: int


class Receiver:
    """Logs the records and issues the warnings that workers have sent."""

    def __init__(self) -> None:
        # What is to be handed on, oldest first.
        self.waiting: collections.deque[tuple[MessageKind, bytes]] = (
            collections.deque()
        )
        self._said: set[str] = set()  # that is to be said once
        # By file, and shared by all workers, so that "once" means once among
        # them all.
        self._registries: dict[str, dict[Any, Any]] = {}

    @property
    def tells_of_lack(self) -> bool:
        """Whether a worker lacks a value that the training process has."""
        return any(said.startswith(LACKS) for said in self._said)

    def put(self, kind: MessageKind, body: bytes) -> None:
        """Queues a message from a worker, without running the user's code."""
        self.waiting.append((kind, body))

    def hand_on(self) -> None:
        """Logs the queued records, and issues the queued warnings."""
        while self.waiting:
            kind, body = self.waiting.popleft()
            if kind is MessageKind.LOG:
                self._log(*pickle.loads(body))
            else:
                self._warn(pickle.loads(body))

    def _log(self, record: logging.LogRecord, extra: dict[str, bytes]) -> None:
        record.levelname = logging.getLevelName(record.levelno)
        for name, pickled in extra.items():
            with contextlib.suppress(Exception):
                # Loading runs other people's code.
                vars(record)[name] = pickle.loads(pickled)
        if ONCE in extra:
            said = str(vars(record).get(ONCE))
            if said in self._said:
                return
            self._said.add(said)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)

    def _warn(self, given: _ForwardedWarning) -> None:
        message: Any = None
        if given.described is not None:
            message = exceptions.load_exception(given.described)
        if not isinstance(message, Warning):
            message = UserWarning(given.text)
        warnings.warn_explicit(
            message,
            type(message),
            given.filename,
            given.lineno,
            given.module,
            self._registries.setdefault(given.filename, {}),
        )


class _Sender(logging.Handler):
    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # As logging.handlers.QueueHandler.prepare: arguments and
            # tracebacks become text, because they may not pickle.
            text = _shortened(self.format(record))
            plain = logging.makeLogRecord(
                {k: v for k, v in vars(record).items() if k in _RECORD}
            )
            plain.message = plain.msg = text
            plain.args = None
            plain.exc_info = plain.exc_text = plain.stack_info = None
            extra = {
                name: _dumps(value)
                for name, value in vars(record).items()
                if name not in _RECORD
            }
            body = pickle.dumps((plain, extra))
            if len(body) > messages.MAX_DATAGRAM_BYTES:
                body = pickle.dumps((plain, {}))
            self._send(MessageKind.LOG, body)
        except Exception:
            self.handleError(record)


_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message"}


def _dumps(value: Any) -> bytes:
    """Pickles a value, or its `repr` if the value cannot be pickled."""
    with contextlib.suppress(Exception):
        # Pickling runs other people's code.
        return pickle.dumps(value)
    return pickle.dumps(exceptions.safely(repr, value))


def _shortened(text: str) -> str:
    """Truncates a text so that it fits into one message."""
    if len(text) <= _MAX_BYTES // 4:
        return text
    return text.encode("utf-8", "replace")[:_MAX_BYTES].decode(errors="ignore")
