"""Connects the training process with its workers by sockets.

Two socket pairs of type SOCK_SEQPACKET are shared by all workers of a loader.
A datagram is received whole, by exactly one reader. The task socket is
therefore a work queue that needs no lock and no feeder thread, and a killed
worker can take nothing with it but the request in its hand.

    trainer --task--> task socket --> whichever worker is free
    trainer <--result, log record-- result socket <-- every worker
    trainer --version + descriptor--> control socket of one worker
"""

from __future__ import annotations

import select
import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets in blocking mode."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(True)
    return ends


def socket_of(fd: int) -> socket.socket:
    """Wraps a descriptor from another process in a blocking socket."""
    end = socket.socket(fileno=fd)
    end.setblocking(True)
    return end


def wait_readable(fd: int, timeout_s: float | None = None) -> bool:
    """Waits until a descriptor is readable; returns False on a timeout."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
