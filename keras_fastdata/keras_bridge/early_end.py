"""Data that ends before Keras expects it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from keras_fastdata.keras_bridge.keras_internals import (
    EpochIterator,
    Feature,
    has,
)

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
        self._iterator: Callable[[], EpochIterator | None] = _nobody

    def expect(
        self, iterator: EpochIterator | None, warn: Callable[[], None]
    ) -> None:
        """Says who would warn, and what warns instead."""
        self._iterator = _nobody
        if iterator is not None and has(Feature.QUIET_END):
            self._iterator = weakref.ref(iterator)
            iterator._interrupted_warning = warn

    def stop_early(self) -> None:
        """Has Keras not warn of an end of the data that is about to come."""
        iterator = self._iterator()
        if iterator is not None:
            iterator._interrupted_warning = _nobody

    def put_aside(self, error: BaseException) -> bool:
        """Keeps an exception for `raise_pending`, before the data is ended.

        Returns:
            `False` where Keras runs no epoch: nobody would come to raise it.
        """
        if self._iterator() is None:
            return False
        if self._deferred is None:
            self._deferred = _DeferredError(error)
        self.stop_early()
        return True

    def raise_pending(self) -> None:
        """Ends the quiet, and raises the exception if there was one."""
        iterator = self._iterator()
        if iterator is not None:
            vars(iterator).pop("_interrupted_warning", None)
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


def _nobody() -> None:
    """In place of who might warn, or of the warning."""
