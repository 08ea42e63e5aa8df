"""Runs scripts as training processes that have imported Keras already.

A request has a script and brings the descriptors of its standard output and
standard error; it is run by a fork of this process, which has imported pytest,
and Keras but not used it, and nothing of this package. The fork is a session of
its own, so that every process it starts can be told by its session.

This process is no child of the tests', which look at all their children. It
ends when the tests close their end of the socket.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import warnings

if os.fork():
    os._exit(0)

gc.disable()  # a quarter of the time that Keras takes to be imported
import keras  # noqa: E402, F401
import pytest  # noqa: E402, F401 - scripts may import modules of tests


def next_script(requests: socket.socket) -> tuple[str, str]:
    """Answers requests; returns in each new process, with what it shall run.

    Returns:
        The text of a script, and its path.
    """
    while True:
        datagram, fds, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not datagram:
            os._exit(0)
        request = json.loads(datagram)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            reply = os.waitstatus_to_exitcode(status)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX and Python 3.12 warn
                reply = os.fork()
            if not reply:
                requests.close()
                os.setsid()
                for number, fd in enumerate(fds, 1):
                    os.dup2(fd, number)
                    os.close(fd)
                os.environ.update(request["environ"])
                os.chdir(request["folder"])
                sys.argv[:] = request["argv"]
                sys.path[0] = os.path.dirname(sys.argv[0])
                return request["script"], sys.argv[0]
            for fd in fds:
                os.close(fd)
        requests.send(json.dumps(reply).encode())


# Else the collections of each fork, as at its end, would copy all of Keras.
gc.freeze()
gc.enable()
# It may be ignored where the tests run.
signal.signal(signal.SIGINT, signal.default_int_handler)
_source, __file__ = next_script(socket.socket(fileno=int(sys.argv[1])))
exec(compile(_source, __file__, "exec"))
