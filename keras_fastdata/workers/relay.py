"""Log records and warnings of a worker, handed to the training process.

In the worker every record goes to one handler of the root logger and every
warning that passes the filters to one hook; both send. In the training process
each is given to the logger of its name, or to the warnings filters, as if it
had happened there.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

from keras_fastdata.workers import messages
from keras_fastdata.workers.messages import Kind

_NO_LEVEL = logging.NOTSET
_MAX_TEXT = 64 * 1024  # characters of one record; a datagram holds no more


@dataclasses.dataclass(frozen=True)
class Habits:
    """How the training process logs and warns; workers follow it.

    Attributes:
        levels: Level of each logger that has one of its own; "" is the root.
        disabled: The argument of `logging.disable`.
        filters: `warnings.filters`, each category as (module, name): a
            filter for a warning of some library must not import it.
    """

    levels: dict[str, int]
    disabled: int
    filters: list[tuple[Any, Any, tuple[str, str], Any, int]]

    @staticmethod
    def of_this_process() -> Habits:
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
        return Habits(levels, logging.root.manager.disable, filters)

    def apply(self) -> None:
        """Takes them on, as far as the modules they name are imported."""
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
    """A category that no warning has."""


Send = Callable[[Kind, bytes], None]


def install(send: Send) -> None:
    """Sends this process's records and warnings through `send`."""
    logging.root.handlers[:] = [_Sender(send)]

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        del file, line
        parts = (str(message)[:_MAX_TEXT], category, filename, lineno)
        body = _picklable(parts, (parts[0], UserWarning, *parts[2:]))
        send(Kind.WARNING, body)

    warnings.showwarning = showwarning


class Receiver:
    """Hands on what workers sent, in the training process."""

    def __init__(self) -> None:
        # Shared by all workers, so that "once" means once among them all.
        self._registry: dict[Any, Any] = {}

    def receive(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.LOG:
            record = pickle.loads(body)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        else:
            text, category, filename, lineno = pickle.loads(body)
            warnings.warn_explicit(
                text, category, filename, lineno, registry=self._registry
            )


class _Sender(logging.Handler):
    def __init__(self, send: Send) -> None:
        super().__init__(_NO_LEVEL)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # As logging.handlers.QueueHandler.prepare: arguments and
            # tracebacks become text, because they may not pickle.
            text = self.format(record)[:_MAX_TEXT]
            record = copy.copy(record)
            record.message = record.msg = text
            record.args = None
            record.exc_info = record.exc_text = record.stack_info = None
            plain = logging.makeLogRecord(
                {k: v for k, v in vars(record).items() if k in _RECORD}
            )
            self._send(Kind.LOG, _picklable(record, plain))
        except Exception:
            self.handleError(record)


_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message"}


def _picklable(value: Any, otherwise: Any) -> bytes:
    try:
        body = pickle.dumps(value)
        pickle.loads(body)
    except Exception:
        # Whatever `extra=` held, or a category made in a function.
        body = pickle.dumps(otherwise)
    if len(body) > messages.MAX_DATAGRAM_BYTES:
        return pickle.dumps(otherwise)
    return body
