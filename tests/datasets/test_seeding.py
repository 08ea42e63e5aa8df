"""A batch is a function of dataset, seed, epoch and index alone."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings

import keras
import numpy as np
import pytest
from samples import (
    Foreign,
    Inner,
    Lazy,
    Nested,
    Outer,
    OwnRng,
    Random,
    Shuffles,
    ShufflesByRng,
    equal,
)

from keras_fastdata import FastPyDataset, GeneratorDataset
from keras_fastdata.building import global_rng, seeding

pytestmark = pytest.mark.usefixtures("kept_forkserver")

PLACES = [
    {"workers": 0},
    *(
        pytest.param(
            {"workers": n, "use_multiprocessing": True, "start_method": method},
            marks=() if n == 2 or method == "fork" else pytest.mark.long,
        )
        for method in ("forkserver", "spawn", "fork")
        for n in (1, 2, 4)
    ),
]


def _epochs(dataset, count=3):
    with dataset, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`start_method='fork'`")
        return [list(dataset) for _ in range(count)]


@pytest.fixture(scope="module")
def reference():
    return _epochs(Random(seed=3, workers=0))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_bytes_are_the_same_wherever_batches_are_built(place, reference):
    assert equal(_epochs(Random(seed=3, **place)), reference)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_self_rng_gives_the_same_bytes_in_threads(workers):
    inline = _epochs(OwnRng(seed=3, workers=0))
    assert equal(_epochs(OwnRng(seed=3, workers=workers)), inline)


def test_every_draw_of_every_batch_and_epoch_is_different(reference):
    for source in range(1, 5):
        draws = {
            int(batch[source][0]) for epoch in reference for batch in epoch
        }
        assert len(draws) == 24


def test_the_generators_of_one_batch_do_not_share_a_stream(reference):
    for epoch in reference:
        for batch in epoch:
            assert len({int(part[0]) for part in batch[1:]}) == 4


def test_another_seed_gives_other_bytes(reference):
    other = _epochs(Random(seed=4, workers=0))
    assert not equal(other[0][0][1], reference[0][0][1])


def test_inline_leaves_the_global_generators_as_they_were():
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state(), random.getstate()
    with Random(seed=3, workers=0) as dataset:
        list(dataset)
    after = np.random.get_state(), random.getstate()
    assert before[1] == after[1]
    assert all(map(np.array_equal, before[0], after[0]))


def test_set_random_seed_makes_a_run_repeatable():
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        runs.append(
            _epochs(Random(workers=2, use_multiprocessing=True), count=2)
        )
    assert equal(runs[0], runs[1])


def test_the_seed_is_drawn_at_first_use_and_not_at_construction():
    dataset = Random(workers=0)
    keras.utils.set_random_seed(7)
    first = _epochs(dataset, count=1)
    keras.utils.set_random_seed(7)
    assert equal(_epochs(Random(workers=0), count=1), first)


def test_generators_deep_in_the_dataset_are_seeded_too():
    inline = _epochs(Nested(seed=1, workers=0), count=2)
    processes = Nested(seed=1, workers=2, use_multiprocessing=True)
    assert equal(_epochs(processes, count=2), inline)
    assert len({batch.tobytes() for epoch in inline for batch in epoch}) == 8


def test_a_generator_made_in_the_worker_is_seeded_from_its_first_batch_on():
    dataset = Lazy(seed=1, workers=2, use_multiprocessing=True)
    batches = _epochs(dataset, count=2)
    assert len({b.tobytes() for epoch in batches for b in epoch}) == 12
    assert equal(batches, _epochs(Lazy(seed=1, workers=0), count=2))


def test_reseed_is_called_for_every_batch():
    inline = _epochs(Foreign(seed=1, workers=0), count=2)
    processes = Foreign(seed=1, workers=3, use_multiprocessing=True)
    assert equal(_epochs(processes, count=2), inline)
    assert len({int(b[0]) for epoch in inline for b in epoch}) == 12


def test_threads_that_draw_from_shared_generators_are_warned_once():
    with Random(seed=1, workers=2) as dataset:
        with pytest.warns(UserWarning, match=r"self\.rng") as caught:
            first = list(dataset)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(dataset)
    assert len(first) == 8
    assert len([w for w in caught if "self.rng" in str(w.message)]) == 1


def test_threads_that_use_self_rng_are_not_warned():
    with OwnRng(seed=1, workers=2) as dataset, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(dataset)


@pytest.mark.parametrize("modern", [False, True])
def test_what_a_hook_draws_does_not_depend_on_the_workers(modern):
    def orders(**place):
        with Shuffles(modern=modern, seed=2, **place) as dataset:
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            found = []
            for _ in range(3):
                model.predict(dataset, verbose=0)
                found.append([int(b[0, 0]) for b in dataset])
            return found

    inline = orders(workers=0)
    assert orders(workers=2, use_multiprocessing=True) == inline
    assert len(set(map(tuple, inline))) > 1
    assert all(sorted(order) == list(range(6)) for order in inline)


def _with_a_hook(kind):
    kind.on_epoch_end = lambda self: self.python.shuffle(self.order)
    return kind


@_with_a_hook
class Decorated(OwnRng):
    """Its hook draws from a generator from which builds draw as well."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.python, self.order = random.Random(3), list(range(10))

    def __getitem__(self, index):
        return np.array([self.order[index], self.python.random()])


class OfDecorated(Decorated):
    pass


@pytest.mark.parametrize("kind", [Decorated, OfDecorated])
def test_what_a_hook_of_a_class_decorator_draws_does_not_depend_on_workers(
    kind,
):
    def epochs(**place):
        with kind(seed=2, **place) as dataset:
            found = []
            for _ in range(3):
                found.append([batch.tolist() for batch in dataset])
                dataset.on_epoch_end()
            return found

    inline = epochs(workers=0)
    assert epochs(workers=2, use_multiprocessing=True) == inline
    assert len({str(epoch) for epoch in inline}) == 3


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_a_class_gets_after_an_epoch_draws_alike(
    place, monkeypatch
):
    def run(**place):
        with OfDecorated(seed=2, **place) as dataset:
            hook = lambda self: self.order.append(self.python.random())  # noqa: E731
            list(dataset)
            monkeypatch.setattr(Decorated, "on_epoch_end", hook)
            list(dataset)
            dataset.on_epoch_end()
            return dataset.order

    assert run(**place) == run(workers=0)


def test_a_hook_that_a_base_class_gets_anew_is_that_of_all_its_classes():
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            patch.setattr(
                Decorated, "on_epoch_end", lambda _, n=number: called.append(n)
            )
            with OfDecorated(workers=0) as dataset:
                dataset.on_epoch_end()
    assert called == [0, 1, 2]


def test_self_rng_in_a_hook_is_the_hooks_own_and_repeatable():
    def orders(**place):
        with ShufflesByRng(seed=2, **place) as dataset:
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            found = []
            for _ in range(3):
                model.predict(dataset, verbose=0)
                found.append([int(b[0, 0]) for b in dataset])
            return found

    inline = orders(workers=0)
    assert orders(workers=2) == inline
    assert len(set(map(tuple, inline))) == 3


def _in_two_threads(make):
    """The epochs of two datasets, batch by batch in turn, in two threads."""
    turn = threading.Barrier(2)
    found = {}

    def take(seed):
        with make(seed) as dataset:
            batches = iter(dataset)
            found[seed] = []
            for _ in range(8):
                turn.wait(60)
                found[seed].append(next(batches))

    threads = [threading.Thread(target=take, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[1], found[2]]


class _DrawsTwice(Random):
    """Draws, lets other threads run, and draws."""

    def __getitem__(self, index):
        first = super().__getitem__(index)
        time.sleep(0.001)
        return first, super().__getitem__(index)


def test_two_inline_datasets_in_two_threads_do_not_share_their_draws():
    alone = [
        _epochs(_DrawsTwice(seed=seed, workers=0), count=1)[0]
        for seed in (1, 2)
    ]
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].tobytes(), random.getstate()
    together = _in_two_threads(lambda seed: _DrawsTwice(seed=seed, workers=0))
    assert equal(together, alone)
    assert before == (np.random.get_state()[1].tobytes(), random.getstate())


@pytest.mark.parametrize("count", [1, 3])
def test_a_build_that_waits_for_builds_in_other_threads_ends(
    count, monkeypatch, caplog
):
    class Waits(FastPyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            first = np.random.randint(2**60)
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                parts = pool.map(
                    lambda k: list(_DrawsTwice(1, seed=k, workers=0)),
                    range(count),
                )
                return first, list(parts), np.random.randint(2**60)

    def inner(k):
        return list(_DrawsTwice(1, seed=k, workers=0))

    alone = [inner(k) for k in range(count)]
    monkeypatch.setattr(global_rng, "_STUCK_S", 0.3)
    # Nobody has waited there, in this test with another count, for example.
    monkeypatch.setattr(global_rng, "_waits_at", set())
    with Waits(seed=1, workers=0) as dataset:
        built = list(dataset)
    assert all(equal(parts, alone) for _, parts, _ in built)
    draws = {(first, last) for first, _, last in built}
    with Waits(seed=1, workers=0) as dataset:
        assert {(first, last) for first, _, last in dataset} == draws
    assert len([r for r in caplog.records if "seems to wait" in r.msg]) == 1


def test_what_threads_ask_of_a_dataset_is_not_of_another_that_is_built():
    building, go_on = threading.Event(), threading.Event()

    class Waits(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            building.set()
            assert go_on.wait(60)
            return self.rng.integers(2**60, size=2)

    alone = OwnRng(seed=1)[0]
    asked = []
    with Waits(seed=2, workers=0) as dataset:
        builds = threading.Thread(target=lambda: asked.append(list(dataset)))
        asks = threading.Thread(target=lambda: asked.append(OwnRng(seed=1)[0]))
        builds.start()
        assert building.wait(60)
        asks.start()
        asks.join(60)
        go_on.set()
        builds.join(60)
    assert equal(asked[0], alone)
    assert equal(asked[1], list(Waits(seed=2, workers=0)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_that_is_iterated_in_a_build_gives_the_same_bytes_anywhere(
    shuffle,
):
    def built(**settings):
        inner = Inner(shuffle=shuffle, seed=9)
        with Outer(inner, seed=2, **settings) as dataset:
            return np.stack(list(dataset))

    inline = built(workers=0)
    for settings in (
        {"workers": 1, "use_multiprocessing": True},
        {"workers": 3},
    ):
        assert (built(**settings) == inline).all()
    orders = inline[:, :, 0].tolist()
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert (len({tuple(order) for order in orders}) > 1) == shuffle


def _drawn_items(rng):
    for index in range(3):
        yield np.array([index, np.random.randint(99)])


@pytest.mark.parametrize(
    "make", [Random, lambda **kwargs: GeneratorDataset(_drawn_items, **kwargs)]
)
def test_no_step_of_python_runs_while_the_lock_of_numpy_is_held(make):
    """A signal handler may come at each, and wait for a thread that draws."""
    lock, held, steps = np.random.get_bit_generator().lock, set(), 0
    is_held = getattr(lock, "_is_owned", None) or lock.locked

    def trace(frame, event, _):
        nonlocal steps
        frame.f_trace_opcodes, steps = True, steps + 1
        if is_held():
            held.add((frame.f_code.co_qualname, frame.f_lineno))
        return trace

    np.random.randn()  # leaves a number that was drawn in advance
    with make(workers=0, seed=1) as dataset:
        next(iter(dataset))  # what is imported or compiled is
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            list(dataset)
        finally:
            sys.settrace(before)
    assert not held
    assert steps > 1000


def test_a_signal_handler_reads_threads_though_it_interrupts_a_draw(
    monkeypatch,
):
    """Each batch of the threads draws, too."""
    generator, read = seeding.generator, []

    def interrupted(*key):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return generator(*key)

    with OwnRng(workers=2) as other, Random(workers=0, seed=1) as dataset:
        expected = list(Random(workers=0, seed=1))
        monkeypatch.setattr(seeding, "generator", interrupted)
        handler = signal.signal(
            signal.SIGUSR1, lambda *_: read.append(len(list(other)))
        )
        try:
            batches = list(dataset)
        finally:
            signal.signal(signal.SIGUSR1, handler)
    assert equal(batches, expected)
    assert read == [len(expected)] * len(expected)


class _Noise:
    """Calls a function when it is seeded for the second time or later."""

    def __init__(self):
        self.interrupt, self.seed_count, self.drawn = None, 0, 0

    def seed(self, seed=None):
        self.seed_count += 1
        if self.interrupt is not None and self.seed_count > 1:
            self.interrupt()
        self.drawn = seed


class _Noisy(FastPyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.noise = _Noise()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([index, self.noise.drawn])


def _fail():
    raise TypeError("no seed, please")


def test_a_seeding_method_that_raises_is_reported_and_not_called_again(caplog):
    dataset = _Noisy(workers=0, seed=1)
    dataset.noise.interrupt = _fail
    assert [index for index, _ in dataset] == [0, 1, 2, 3]
    assert [one.getMessage() for one in caplog.records] == [
        "_Noise.seed(seed) raised TypeError('no seed, please'): its draws are "
        "not seeded for each batch. Override `reseed` to seed it."
    ]


def test_a_signal_handler_may_raise_while_a_seeding_method_runs(caplog):
    def handle(*_):
        raise TimeoutError

    _, expected = _epochs(_Noisy(workers=0, seed=1), 2)
    dataset = _Noisy(workers=0, seed=1)
    dataset.noise.interrupt = lambda: signal.raise_signal(signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError):
            list(dataset)
    finally:
        signal.signal(signal.SIGUSR1, before)
    dataset.noise.interrupt = None
    assert equal(list(dataset), expected)
    assert not caplog.records


def test_in_a_forked_child_no_thread_holds_the_global_generators():
    held, forked = threading.Event(), threading.Event()

    def hold():
        with global_rng.preserved_globals():
            held.set()
            assert forked.wait(60)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        os._exit(global_rng.are_preserved())
    forked.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_length_that_depends_on_the_epoch_is_that_of_the_epoch(shuffle):
    class Longer(FastPyDataset):
        def __len__(self):
            return 3 + self.epoch

        def __getitem__(self, index):
            return np.array([self.epoch, index])

    with Longer(seed=1, shuffle=shuffle, workers=0) as dataset:
        for epoch in range(3):
            assert len(dataset) == 3 + epoch
            found = sorted(batch.tolist() for batch in dataset)
            assert found == [[epoch, index] for index in range(3 + epoch)]


class Draws(FastPyDataset):
    """Draws from `self.rng` where it is indexed."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.rng.normal()


def test_processes_of_the_program_draw_different_numbers_by_hand():
    dataset = Draws(seed=3)
    here = dataset[0]
    drawn = []
    for _ in range(2):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            drawn += pool.map(dataset.__getitem__, range(2))
    assert len({here, *drawn}) == 5


def _first_draw():
    return Draws(seed=3)[0]


def test_a_dataset_made_in_a_process_draws_what_it_would_draw_elsewhere():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_first_draw) == _first_draw()


@pytest.mark.backend
def test_workers_of_pytorchs_loader_draw_different_numbers():
    data = pytest.importorskip("torch.utils.data")
    dataset = Draws(seed=3)
    loader = data.DataLoader(dataset, batch_size=None, num_workers=2)
    drawn = [float(batch) for _ in range(2) for batch in loader]
    assert len({*drawn}) == 16


class _DrawsAtStart(FastPyDataset):
    """Shows what `on_worker_start` has drawn, and the present level."""

    def __init__(self, draw, **kwargs):
        super().__init__(**kwargs)
        self.draw, self.level = draw, 0
        self.own = np.random.default_rng(5)

    def __len__(self):
        return 4

    def on_worker_start(self):
        self.drawn = self.draw(self)
        self.look = lambda: self.level  # so it runs again for a new level

    def __getitem__(self, index):
        return np.array([self.drawn, self.look(), index])


@pytest.mark.parametrize(
    "draw",
    [
        lambda dataset: np.random.random(),
        lambda dataset: random.random(),
        lambda dataset: dataset.own.random(),
        lambda dataset: np.asarray(
            keras.layers.Dense(1)(np.ones((1, 2)))
        ).sum(),
    ],
    ids=["np.random", "random", "own", "layer"],
)
def test_on_worker_start_draws_the_same_in_all_workers(draw):
    def epochs(**place):
        with _DrawsAtStart(draw, seed=1, **place) as dataset:
            return [list(dataset) for dataset.level in range(3)]

    np.random.seed(2)
    expected = epochs(workers=0)
    assert len({batch[0] for epoch in expected for batch in epoch}) == 1
    after = np.random.random()
    for count in (1, 2):
        assert equal(epochs(workers=count, use_multiprocessing=True), expected)
    np.random.seed(2)
    assert after == np.random.random()


def test_a_lazy_keras_layer_does_not_repeat_the_build():
    class Reads(FastPyDataset):
        lines, layer = iter(range(100)), None

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.layer = self.layer or keras.layers.GaussianNoise(1.0)
            return np.array([next(self.lines)])

    assert equal(_epochs(Reads(workers=0), 1), [[[0], [1], [2], [3]]])
