"""Processes that use one cache, and say on a pipe how far they are.

They import neither Keras nor pytest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random

from keras_fastdata.sources.storage import Storage


@contextlib.contextmanager
def process(run, *args, start_method="spawn"):
    """Runs `run(connection, *args)` in a new process; kills it at the end."""
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe()
    started = context.Process(target=run, args=(theirs, *args))
    started.start()
    theirs.close()
    try:
        yield started, ours
    finally:
        started.kill()
        started.join()
        started.close()
        ours.close()


def content_of(key, size=1000):
    """What the entry of a key holds."""
    return random.Random(repr(key)).randbytes(size)


class Make:
    """Writes an entry, and a line of notes; waits in the middle if asked to."""

    def __init__(self, notes, key, connection=None):
        self.notes = notes
        self.key = key
        self.connection = connection

    def __call__(self, path):
        note(self.notes, self.key)
        content = content_of(self.key)
        with open(path, "wb") as file:
            file.write(content[:500])
            file.flush()
            if self.connection is not None:
                self.connection.send("half")
                if self.connection.recv() == "fail":
                    raise ValueError("on purpose")
            file.write(content[500:])


def note(notes, line):
    fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{line}\n".encode("utf-8", "backslashreplace"))
    os.close(fd)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def makes(connection, storage, notes, key):
    """Makes an entry, and says "half" in the middle of it."""
    try:
        with storage.entry(key, Make(notes, key, connection)) as path:
            connection.send(read(path))
    except ValueError as error:
        connection.send(error)


def takes(connection, storage, notes, key):
    """Takes an entry, once it is told to."""
    connection.recv()
    connection.send("begins")
    with storage.entry(key, Make(notes, key)) as path:
        connection.send(read(path))


def holds(connection, storage, notes, key):
    """Uses an entry until it is told to end."""
    with storage.entry(key, Make(notes, key)) as path:
        connection.send(path)
        connection.recv()
    connection.send("left")


class MakeSized:
    """Writes an entry of a size of its own; fails now and then."""

    def __init__(self, key, rng):
        self.content = content_of(key, 100 * (1 + len(key) * 7 % 10))
        self.rng = rng

    def __call__(self, path):
        if self.rng.random() < 0.05:
            raise ValueError("on purpose")
        with open(path, "wb") as file:
            file.write(self.content)


def wanders(connection, folder, limit, seed, rounds, keys):
    """Uses one or two entries at a time; sends the keys of wrong ones.

    After each round it tells how many there were.
    """
    storage = Storage(cache_dir=folder, cache_bytes=limit)
    rng, wrong = random.Random(seed), []
    for number in range(rounds):
        with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
            used = []
            for key in rng.sample(keys, rng.choice([1, 1, 1, 2])):
                make = MakeSized(key, rng)
                path = stack.enter_context(storage.entry(key, make))
                used.append((key, path, make.content))
            wrong += [key for key, path, held in used if read(path) != held]
        connection.send(number)
    connection.send(wrong)


def last(connection):
    """The last that a process sends."""
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv()
    return message


def reads(connection, storage, path):
    """Reads a file, and sends its content."""
    connection.send(storage.read(path))
