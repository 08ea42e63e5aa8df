"""A message comes whole through a pipe, or not at all."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import connection

import pytest

from keras_fastdata.workers.portable.pipes import Inbox, Outbox


@pytest.fixture
def ends():
    reader, writer = connection.Pipe(duplex=False)
    with reader, writer:
        yield reader, writer


@pytest.mark.parametrize("nbytes", [0, 1, 4000, 4088, 4089, 30_000])
def test_a_message_of_any_size_comes_whole(nbytes, ends):
    reader, writer = ends
    message = bytes(range(256)) * (nbytes // 256 + 1)
    Outbox(writer).send(message[:nbytes])
    assert Inbox(reader).receive() == message[:nbytes]


def test_a_message_larger_than_the_pipe_waits_for_its_reader(ends):
    reader, writer = ends
    message = bytes(10**6)
    sends = threading.Thread(target=Outbox(writer).send, args=[message])
    sends.start()
    assert Inbox(reader).receive() == message
    sends.join()


def test_messages_of_several_threads_do_not_mix(ends):
    reader, writer = ends
    outbox, inbox = Outbox(writer), Inbox(reader)
    threads = [
        threading.Thread(target=outbox.send, args=[letter * 100_000])
        for letter in (b"a", b"b", b"c")
    ]
    for thread in threads:
        thread.start()
    found = sorted(inbox.receive() for _ in threads)
    assert found == [letter * 100_000 for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.join()


class _Interrupted:
    """A pipe of which a signal handler interrupts the first part.

    The handler runs before the part is written, or after.
    """

    def __init__(self, pipe, handler, is_after):
        self._pipe = pipe
        self._handlers = {is_after: handler}

    def send_bytes(self, part):
        self._handlers.pop(False, int)()
        self._pipe.send_bytes(part)
        self._handlers.pop(True, int)()


@pytest.mark.parametrize("is_after", [False, True])
def test_a_signal_handler_may_send_while_its_thread_sends(is_after, ends):
    reader, writer = ends
    first, second = b"a" * 10_000, b"b" * 10_000
    pipe = _Interrupted(writer, lambda: outbox.send(second), is_after)
    outbox, inbox = Outbox(pipe), Inbox(reader)
    outbox.send(first)
    assert [inbox.receive(), inbox.receive()] == [first, second]


@pytest.mark.parametrize("nbytes", [1, 10_000])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_message_that_an_exception_of_a_handler_interrupts_comes_once(
    is_after, nbytes, ends
):
    reader, writer = ends
    outbox = Outbox(_Interrupted(writer, lambda: 1 / 0, is_after))
    with pytest.raises(ZeroDivisionError):
        outbox.send(b"a" * nbytes)
    outbox.send(b"b")
    inbox = Inbox(reader)
    assert [inbox.receive(), inbox.receive()] == [b"a" * nbytes, b"b"]
    assert not reader.poll(0)


def test_a_message_without_its_last_part_is_never_returned(ends):
    reader, writer = ends
    first = connection.Pipe(duplex=False)
    with contextlib.closing(first[0]), contextlib.closing(first[1]):
        sends = threading.Thread(
            target=Outbox(first[1]).send, args=[bytes(6000)]
        )
        sends.start()
        sends.join()
        writer.send_bytes(first[0].recv_bytes())
    inbox = Inbox(reader)
    assert inbox.receive_part() is None
    assert not reader.poll(0)  # nobody waits for the rest
    writer.close()
    with pytest.raises(EOFError):
        inbox.receive_part()
