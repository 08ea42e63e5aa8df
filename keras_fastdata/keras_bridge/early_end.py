"""Handles data that ends earlier than Keras expects."""

from __future__ import annotations

import logging
from collections.abc import Callable

from keras_fastdata.keras_bridge.keras_internals import KerasIterator

_log = logging.getLogger("keras_fastdata")


class EarlyEnd:
    """Handles data that ends earlier than Keras expects.

    Either batches were skipped, or an exception is kept until Keras reports
    the end of the epoch, because it must not pass through TensorFlow. In both
    cases Keras's warning that data ran out is suppressed. Where the user asked
    for too many steps, our warning replaces Keras's, whose advice does not fit.
    """

    def __init__(self) -> None:
        self._deferred: _DeferredError | None = None
        self._iterator = KerasIterator()

    def expect(self, iterator: KerasIterator, warn: Callable[[], None]) -> None:
        """Makes Keras call `warn` instead of warning that data ran out."""
        self._iterator = iterator
        iterator.warn_by(warn)

    def stop_early(self) -> None:
        """Allows the data to end early without a warning by Keras."""
        self._iterator.warn_by(_no_warning)

    def put_aside(self, error: BaseException) -> bool:
        """Keeps an exception, so that `raise_pending` raises it later.

        Returns `False` if Keras runs no epoch, and so would never raise it.
        """
        if not self._iterator.can_warn:
            return False
        if self._deferred is None:
            self._deferred = _DeferredError(error)
        self.stop_early()
        return True

    def raise_pending(self) -> None:
        """Restores Keras's warning, and raises the kept exception, if any."""
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
    """Holds an exception, which is logged unless `take` is called.

    `EarlyEnd` itself has no `__del__`: a KeyboardInterrupt in it would be lost.
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
    """Does nothing; replaces Keras's warning that data ran out."""
