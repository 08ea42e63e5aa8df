"""Whether this process is a worker, asked before anything heavy is imported.

A worker imports the user's module, which imports this package; that must not
import Keras. The fork server and the workers say what they are before that.
"""

from __future__ import annotations

_worker = False


def become_worker() -> None:
    """Declares this process a worker, or a parent of workers only."""
    global _worker
    _worker = True


def is_worker() -> bool:
    """Whether this process was started to build batches."""
    return _worker
