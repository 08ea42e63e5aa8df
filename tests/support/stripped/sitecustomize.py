"""Removes from Python what only Linux, or only POSIX, has.

With this folder in PYTHONPATH, an interpreter and those that it starts are
much like Python on Windows, as far as that can be imitated. What Python's own
`subprocess` calls on Linux stays.
"""

import builtins
import io
import mmap
import os
import select
import signal
import socket
import sys

REMOVED = {
    os: """
        fork forkpty register_at_fork memfd_create pidfd_open killpg setpgid
        getpgid setsid pread preadv pwrite pwritev posix_fallocate getresuid
        sched_getaffinity sched_setaffinity sched_getscheduler
        sched_setscheduler openpty mkfifo
    """,
    socket: "AF_UNIX SOCK_SEQPACKET send_fds recv_fds MSG_DONTWAIT",
    signal: """
        SIGKILL SIGCHLD SIGHUP SIGUSR1 SIGUSR2 SIGTTOU SIGSTOP SIGCONT SIGALRM
        SIGRTMIN SIGRTMAX SIGPIPE siginterrupt pidfd_send_signal pthread_kill
        pthread_sigmask sigwait setitimer alarm
    """,
    select: "poll epoll PIPE_BUF",
    mmap: "MADV_DONTDUMP MADV_REMOVE MAP_PRIVATE MAP_POPULATE MAP_SHARED",
}
MODULES = ["fcntl", "resource"]

for module, names in REMOVED.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in MODULES:
    sys.modules[name] = None


def _without_proc(function):
    def opened(file, *args, **kwargs):
        if isinstance(file, str) and file.startswith("/proc/"):
            raise FileNotFoundError(file)
        return function(file, *args, **kwargs)

    return opened


real_open = io.open
os.open = _without_proc(os.open)
builtins.open = io.open = _without_proc(real_open)
