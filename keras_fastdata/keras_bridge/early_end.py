"""Data that ends before Keras expects it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from keras_fastdata.keras_bridge.keras_internals import KerasIterator

_log = logging.getLogger("keras_fastdata")


class EarlyEnd:
    """Data that ends before Keras expects it, and why.

    Either an exception is on its way around TensorFlow, or batches were left
    out. Keras warns that the data ran out, which would be out of place, and
    then reports the end of the epoch to the adapter. Where the user asked for
    too many steps, what Keras would advise does not exist here.
    """

    def __init__(self) -> None:
        self._deferred: _DeferredError | None = None
        self._iterator = KerasIterator()

    def expect(self, iterator: KerasIterator, warn: Callable[[], None]) -> None:
        """Says who would warn, and what warns instead."""
        self._iterator = iterator
        iterator.warn_by(warn)

    def stop_early(self) -> None:
        """Has Keras not warn of an end of the data that is about to come."""
        self._iterator.warn_by(_no_warning)

    def put_aside(self, error: BaseException) -> bool:
        """Keeps an exception for `raise_pending`, before the data is ended.

        Returns:
            `False` where Keras runs no epoch: nobody would come to raise it.
        """
        if not self._iterator.can_warn:
            return False
        if self._deferred is None:
            self._deferred = _DeferredError(error)
        self.stop_early()
        return True

    def raise_pending(self) -> None:
        """Ends the quiet, and raises the exception if there was one."""
        self._iterator.warn_by(None)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            error = deferred.take()
            context = error.__context__
            try:
                raise error
            finally:
                # Not TensorFlow's end of data, which is being handled here.
                BaseException.__setattr__(error, "__context__", context)


class _DeferredError:
    """An exception that is logged, if it is never taken.

    The only thing here with code that runs when it is collected: there a
    KeyboardInterrupt would be lost.
    """

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        error, self._error = self._error, None
        assert error is not None
        return error

    def __del__(self) -> None:
        if self._error is not None:
            _log.error(
                "Training was stopped before it came to this error, which its "
                "data raised:",
                exc_info=self._error,
            )


def _no_warning() -> None:
    """In place of Keras's warning that data ran out."""
