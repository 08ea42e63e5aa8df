"""`ThreadSafeIterator` and `threadsafe_generator`: one iterator, many threads.

Nothing here waits for time to pass: threads meet at barriers and events. A
timeout is how long a broken implementation may take to be found out.
"""

from __future__ import annotations

import collections
import gc
import inspect
import itertools
import os
import sys
import threading
import time
import weakref

import keras
import numpy as np
import pytest

from keras_fastdata import ThreadSafeIterator, threadsafe_generator

_THREADS = 8
_ITEMS_PER_THREAD = 10_000
_PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _threads_take_turns_all_the_time():
    """So that what one thread may do to another does happen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class _Crew:
    """Threads that run one function each and hand back what came of it."""

    def __init__(self, function, count=_THREADS):
        self.results = [None] * count
        self._errors = []
        self._barrier = threading.Barrier(count)
        self._threads = [
            threading.Thread(target=self._run, args=(function, n))
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, function, number):
        try:
            self._barrier.wait(_PATIENCE_S)
            self.results[number] = function(number)
        except BaseException as error:
            self._errors.append(error)

    def join(self):
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self._errors == []
        return self.results


def _drain(shared):
    """Takes items until the end, and keeps asking a little longer."""
    items = []
    while True:
        try:
            items.append(next(shared))
        except StopIteration:
            break
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(shared)
    return items


def _slow_steps(n):
    """A generator that gives other threads every chance to interfere."""
    number = 0
    while number < n:
        seen = number
        yield seen
        number = seen + 1


# -- each item once ----------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda n: iter(range(n)),
        _slow_steps,
        lambda n: itertools.islice(itertools.count(), n),
        lambda n: map(int, range(n)),
    ],
    ids=["range", "generator", "islice", "map"],
)
def test_eight_threads_together_get_every_item_exactly_once(make):
    total = _THREADS * _ITEMS_PER_THREAD
    shared = ThreadSafeIterator(make(total))
    shares = _Crew(lambda _: _drain(shared)).join()
    assert sorted(itertools.chain(*shares)) == list(range(total))


def test_eight_threads_may_take_ten_thousand_items_each():
    shared = ThreadSafeIterator(_slow_steps(_THREADS * _ITEMS_PER_THREAD))
    shares = _Crew(
        lambda _: [next(shared) for _ in range(_ITEMS_PER_THREAD)]
    ).join()
    assert [len(share) for share in shares] == [_ITEMS_PER_THREAD] * _THREADS
    taken = collections.Counter(itertools.chain(*shares))
    assert set(taken.values()) == {1}
    assert len(taken) == _THREADS * _ITEMS_PER_THREAD
    with pytest.raises(StopIteration):
        next(shared)


def test_every_thread_sees_its_items_in_the_iterators_order():
    shared = ThreadSafeIterator(_slow_steps(20_000))
    for share in _Crew(lambda _: _drain(shared)).join():
        assert share == sorted(share)


def test_one_thread_alone_sees_the_iterator_as_it_is():
    assert list(ThreadSafeIterator([3, 1, 2])) == [3, 1, 2]
    assert list(ThreadSafeIterator("abc")) == ["a", "b", "c"]
    assert list(ThreadSafeIterator({"a": 1})) == ["a"]


def test_items_are_handed_out_as_they_are_and_not_kept():
    class Item:
        pass

    item = Item()
    alive = weakref.ref(item)
    shared = ThreadSafeIterator(iter([item]))
    assert next(shared) is item
    shared.close()
    del item
    gc.collect()
    assert alive() is None


def test_only_one_thread_at_a_time_is_inside_the_iterator():
    inside = 0
    most = 0

    class Counting:
        left = 1_000

        def __iter__(self):
            return self

        def __next__(self):
            nonlocal inside, most
            inside += 1
            time.sleep(0)  # lets another thread go on
            most = max(most, inside)
            inside -= 1
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    shared = ThreadSafeIterator(Counting())
    shares = _Crew(lambda _: _drain(shared)).join()
    assert sum(map(len, shares)) == 1_000
    assert most == 1


def test_it_is_its_own_iterator():
    shared = ThreadSafeIterator(range(3))
    assert iter(shared) is shared
    assert next(shared) == 0
    assert list(shared) == [1, 2]


# -- the end -----------------------------------------------------------------


def test_after_the_end_every_thread_gets_stop_iteration():
    shared = ThreadSafeIterator(_slow_steps(5))
    assert list(shared) == [0, 1, 2, 3, 4]
    assert _Crew(lambda _: _drain(shared)).join() == [[]] * _THREADS


def test_an_iterator_that_would_go_on_after_its_end_stays_ended():
    class Restless:
        """Raises StopIteration once, and then has items again."""

        def __init__(self):
            self.calls = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.calls += 1
            if self.calls == 2:
                raise StopIteration
            return self.calls

    restless = Restless()
    shared = ThreadSafeIterator(restless)
    assert list(shared) == [1]
    assert _drain(shared) == []
    assert restless.calls == 2


def test_an_empty_iterable_ends_at_once():
    assert _drain(ThreadSafeIterator([])) == []


# -- exceptions --------------------------------------------------------------


def test_an_exception_reaches_one_caller_and_ends_it_for_the_others():
    class Broken(Exception):
        pass

    def fail_after(n):
        yield from range(n)
        raise Broken("the 1001st item")

    shared = ThreadSafeIterator(fail_after(1_000))

    def take(_):
        items, failure = [], None
        while True:
            try:
                items.append(next(shared))
            except StopIteration:
                return items, failure
            except Broken as error:
                assert failure is None
                failure = error

    outcomes = _Crew(take).join()
    items = sorted(itertools.chain(*(share for share, _ in outcomes)))
    assert items == list(range(1_000))
    failures = [failure for _, failure in outcomes if failure is not None]
    assert [str(failure) for failure in failures] == ["the 1001st item"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_any_kind_arrives_unchanged_and_once(kind):
    raised = kind("as it is")

    def fail():
        yield 1
        raise raised

    shared = ThreadSafeIterator(fail())
    assert next(shared) == 1
    with pytest.raises(kind) as caught:
        next(shared)
    assert caught.value is raised
    assert _drain(shared) == []


def test_an_iterator_that_is_no_generator_ends_with_its_exception_too():
    class Flaky:
        """Would go on after its exception, were it asked to."""

        def __init__(self):
            self.calls = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.calls += 1
            if self.calls == 2:
                raise OSError("once")
            return self.calls

    flaky = Flaky()
    shared = ThreadSafeIterator(flaky)
    assert next(shared) == 1
    with pytest.raises(OSError, match="once"):
        next(shared)
    assert _drain(shared) == []
    assert flaky.calls == 2


# -- close -------------------------------------------------------------------


def _with_finally(events, items=3):
    try:
        yield from range(items)
    finally:
        events.append("finally")


def test_close_runs_the_finally_blocks_of_a_generator():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    assert next(shared) == 0
    shared.close()
    assert events == ["finally"]
    assert _drain(shared) == []


def test_close_runs_the_finally_blocks_of_nested_generators():
    events = []

    def outer():
        try:
            yield from _with_finally(events)
        finally:
            events.append("outer finally")

    shared = ThreadSafeIterator(outer())
    next(shared)
    shared.close()
    assert events == ["finally", "outer finally"]


def test_close_is_idempotent():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    next(shared)
    for _ in range(3):
        shared.close()
    assert events == ["finally"]


def test_close_from_many_threads_at_once_runs_finally_once():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    next(shared)
    _Crew(lambda _: shared.close()).join()
    assert events == ["finally"]
    assert _drain(shared) == []


def test_close_before_the_first_item_leaves_nothing_to_take():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    shared.close()
    assert _drain(shared) == []
    assert events == []  # a generator that never began has no finally to run


def test_close_after_the_end_or_an_exception_does_nothing():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    assert list(shared) == [0, 1, 2]
    shared.close()
    assert events == ["finally"]

    def fail():
        yield 1 / 0

    shared = ThreadSafeIterator(fail())
    with pytest.raises(ZeroDivisionError):
        next(shared)
    shared.close()


def test_close_of_an_iterator_without_a_close_method_ends_it():
    shared = ThreadSafeIterator(itertools.count())
    assert next(shared) == 0
    shared.close()
    assert _drain(shared) == []


def test_an_exception_of_a_finally_block_reaches_who_closes():
    def fail():
        try:
            yield 1
        finally:
            raise ValueError("in finally")

    shared = ThreadSafeIterator(fail())
    next(shared)
    with pytest.raises(ValueError, match="in finally"):
        shared.close()
    shared.close()
    assert _drain(shared) == []


class _Gate:
    """A generator that stands still inside `next` until it is let through."""

    def __init__(self):
        self.inside = threading.Event()
        self.let_through = threading.Event()
        self.finally_ran_in = []

    def items(self):
        try:
            for n in itertools.count():
                self.inside.set()
                assert self.let_through.wait(_PATIENCE_S)
                yield n
        finally:
            self.finally_ran_in.append(threading.get_ident())


def test_close_does_not_wait_for_a_thread_that_is_inside_next():
    gate = _Gate()
    shared = ThreadSafeIterator(gate.items())
    taken = []
    taker = threading.Thread(target=lambda: taken.append(next(shared)))
    taker.start()
    assert gate.inside.wait(_PATIENCE_S)
    shared.close()  # would never return if it waited: the gate is shut
    assert taken == []
    assert gate.finally_ran_in == []
    gate.let_through.set()
    taker.join(_PATIENCE_S)
    assert not taker.is_alive()
    assert taken == [0]
    assert gate.finally_ran_in == [taker.ident]
    assert _drain(shared) == []


def test_threads_that_queue_for_an_item_get_stop_iteration_after_close():
    gate = _Gate()
    shared = ThreadSafeIterator(gate.items())
    crew = _Crew(lambda _: _drain(shared))
    assert gate.inside.wait(_PATIENCE_S)
    shared.close()
    gate.let_through.set()
    shares = crew.join()
    assert sorted(itertools.chain(*shares)) == [0]
    assert len(gate.finally_ran_in) == 1


def test_a_generator_may_close_the_iterator_it_feeds():
    events = []

    def generator():
        try:
            yield 0
            shared.close()
            yield 1
            events.append("went on")
            yield 2
        finally:
            events.append("finally")

    shared = ThreadSafeIterator(generator())
    assert list(shared) == [0, 1]
    assert events == ["finally"]


def test_no_item_comes_after_close_has_returned():
    """Also when `close` meets a `next` that is just about to return."""

    class Holding:
        """A lock that is found taken at one chosen moment."""

        def __init__(self):
            self._lock = threading.Lock()
            self.on_release = None

        def __enter__(self):
            self._lock.acquire()

        def __exit__(self, *_):
            # The last moment at which another thread finds it taken.
            hook, self.on_release = self.on_release, None
            if hook is not None:
                hook()
            self._lock.release()

        def acquire(self, blocking=True):
            return self._lock.acquire(blocking=blocking)

        def release(self):
            self._lock.release()

    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    shared._lock = Holding()
    shared._lock.on_release = shared.close
    assert next(shared) == 0
    assert _drain(shared) == []
    assert events == ["finally"]


def test_an_iterator_that_is_dropped_runs_its_finally_blocks():
    events = []
    shared = ThreadSafeIterator(_with_finally(events))
    next(shared)
    del shared
    gc.collect()
    assert events == ["finally"]


# -- what may be wrapped -----------------------------------------------------


def test_what_cannot_be_iterated_over_is_refused_at_once():
    for value in (5, None, object(), int):
        with pytest.raises(TypeError, match="not iterable"):
            ThreadSafeIterator(value)


def test_an_iterator_may_be_wrapped_twice():
    shared = ThreadSafeIterator(ThreadSafeIterator(range(1_000)))
    shares = _Crew(lambda _: _drain(shared)).join()
    assert sorted(itertools.chain(*shares)) == list(range(1_000))


# -- the decorator -----------------------------------------------------------


def test_a_decorated_generator_is_shared_by_threads():
    @threadsafe_generator
    def numbers(n, *, first=0):
        number = first
        while number < first + n:
            yield number
            number += 1

    shared = numbers(_THREADS * 1_000, first=7)
    assert isinstance(shared, ThreadSafeIterator)
    shares = _Crew(lambda _: _drain(shared)).join()
    assert sorted(itertools.chain(*shares)) == list(
        range(7, 7 + _THREADS * 1_000)
    )


def test_each_call_of_a_decorated_function_begins_anew():
    @threadsafe_generator
    def numbers():
        yield from range(2)

    first, second = numbers(), numbers()
    assert next(first) == 0
    assert list(second) == [0, 1]
    assert list(first) == [1]


def test_a_decorated_function_keeps_its_name_and_signature():
    @threadsafe_generator
    def numbers(n: int, *, first: int = 0):
        """Counts."""
        yield from range(first, first + n)

    assert numbers.__name__ == "numbers"
    assert numbers.__qualname__.endswith(".numbers")
    assert numbers.__doc__ == "Counts."
    assert numbers.__module__ == __name__
    assert list(inspect.signature(numbers).parameters) == ["n", "first"]
    assert inspect.isgeneratorfunction(numbers.__wrapped__)


def test_methods_can_be_decorated():
    class Reader:
        def __init__(self, n):
            self.n = n

        @threadsafe_generator
        def rows(self):
            yield from range(self.n)

    assert list(Reader(3).rows()) == [0, 1, 2]


def test_a_decorated_function_may_return_any_iterable():
    @threadsafe_generator
    def rows():
        return [1, 2]

    assert list(rows()) == [1, 2]


def test_a_decorated_function_that_returns_no_iterable_is_refused():
    @threadsafe_generator
    def rows():
        return 5

    with pytest.raises(TypeError, match="not iterable"):
        rows()


def test_wrong_arguments_of_a_decorated_function_are_refused_at_the_call():
    @threadsafe_generator
    def numbers(n):
        yield n

    with pytest.raises(TypeError, match="missing 1 required"):
        numbers()


# -- Keras -------------------------------------------------------------------


def test_fit_is_fed_by_a_generator_over_a_shared_iterator():
    @threadsafe_generator
    def batches(n):
        for number in range(n):
            yield np.full((2, 3), number, "float32"), np.zeros((2, 1))

    shared = batches(9)
    spare = next(shared)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(
        (batch for batch in shared),
        steps_per_epoch=8,
        shuffle=False,
        verbose=0,
    )
    assert spare[0][0, 0] == 0
    assert len(history.history["loss"]) == 1
    assert _drain(shared) == []


def test_a_generator_that_asks_itself_for_an_item_is_told_so():
    def circular():
        yield next(shared)

    shared = ThreadSafeIterator(circular())
    with pytest.raises(ValueError, match="from within"):
        next(shared)
    with pytest.raises(StopIteration):
        next(shared)


class Interrupted:
    """A lock, with calls by a signal handler right inside it."""

    def __init__(self, lock, handler):
        self._lock, self._handler = lock, handler

    def __enter__(self):
        self._lock.__enter__()
        self._handler()

    def __exit__(self, *error):
        self._handler()
        self._lock.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._lock, name)


@pytest.mark.parametrize("act", ["next", "close"])
def test_a_signal_handler_may_use_the_iterator_that_it_has_interrupted(act):
    shared = ThreadSafeIterator(range(10))
    lock, taken = shared._lock, []

    def handler():
        shared._lock = lock  # a handler is not interrupted by itself
        if act == "next":
            taken.append(next(shared))
        else:
            shared.close()
        shared._lock = interrupted

    shared._lock = interrupted = Interrupted(lock, handler)
    if act == "next":
        assert next(shared) == 1
        assert taken == [0, 2]
    else:
        with pytest.raises(StopIteration):
            next(shared)


def test_a_generator_that_asks_for_an_item_while_it_is_closed_is_told_so():
    def circular():
        try:
            yield 1
        finally:
            next(shared)

    shared = ThreadSafeIterator(circular())
    assert next(shared) == 1
    with pytest.raises(ValueError, match="from within"):
        shared.close()
    with pytest.raises(StopIteration):
        next(shared)


@pytest.mark.parametrize("inside", [False, True])
def test_a_forked_child_waits_for_no_thread_of_its_parent(inside):
    entered, leave = threading.Event(), threading.Event()

    def items():
        yield 0
        if inside:
            entered.set()
            leave.wait(60)
        yield 1

    shared = ThreadSafeIterator(items())
    assert next(shared) == 0
    thread = threading.Thread(target=next, args=(shared,))
    if inside:
        thread.start()
        assert entered.wait(60)
    pid = os.fork()
    if not pid:
        good = False
        try:
            try:
                good = next(shared) == 1 and not inside
            except RuntimeError as error:
                good = inside and "was forked" in str(error)
            good = good and next(shared, "end") == "end"
        finally:
            os._exit(0 if good else 1)
    leave.set()
    if inside:
        thread.join(60)
    _, status = os.waitpid(pid, 0)
    assert status == 0
