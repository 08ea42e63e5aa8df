"""The caller's global generators after a batch was built in its process."""

from __future__ import annotations

import random
import threading
import types
import warnings

import numpy as np
import pytest

from keras_fastdata.building import (
    drawn_seed,
    global_rng,
    mt19937,
    rng_monitor,
    seeding,
)
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.rng_monitor import GlobalRngUsedError


@pytest.fixture(autouse=True)
def _as_before():
    bits, state = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(state)


def draw():
    """A little of everything."""
    return (
        np.random.rand(3).tolist(),
        np.random.randn(3).tolist(),  # draws a fourth in advance
        np.random.randint(0, 1 << 30, 2).tolist(),
        random.random(),
        random.gauss(0, 1),
    )


def draws_with(interlude, before):
    """What is drawn after an interlude, when so much was drawn before."""
    np.random.seed(7)
    random.seed(7)
    np.random.randn(before)
    found = []
    for _ in range(4):
        interlude()
        found.append(draw())
    return found


def build_a_batch():
    with preserved_globals():
        np.random.seed(1)
        random.seed(1)
        draw()


def build_in_vain():
    with preserved_globals():
        np.random.rand(10)
        raise KeyError


def test_an_interrupt_while_states_are_put_back_leaves_no_lock(monkeypatch):
    def interrupted(state):
        raise KeyboardInterrupt

    block, free = preserved_globals(), []
    with monkeypatch.context() as patch:
        patch.setattr(random, "setstate", interrupted)
        with pytest.raises(KeyboardInterrupt), block:
            pass
    lock = global_rng._turns[0].lock

    def take_and_release():
        free.append(lock.acquire(blocking=False))
        if free == [True]:
            lock.release()

    thread = threading.Thread(target=take_and_release)
    thread.start()
    thread.join()
    assert free == [True]
    assert not global_rng.are_preserved()


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_building_leaves_no_trace(before):
    assert draws_with(build_a_batch, before) == draws_with(int, before)


def test_a_normal_number_drawn_in_advance_is_drawn_next_all_the_same():
    np.random.seed(3)
    first, second = np.random.randn(), np.random.randn()
    np.random.seed(3)
    assert np.random.randn() == first
    build_a_batch()
    build_a_batch()
    assert np.random.randn() == second


def test_one_that_the_build_drew_in_advance_is_forgotten():
    np.random.seed(3)
    first = np.random.randn()
    np.random.seed(3)
    with preserved_globals():
        np.random.randn()
    assert np.random.randn() == first


def test_another_bit_generator_is_preserved_too():
    np.random.set_bit_generator(np.random.PCG64(5))
    wanted = [np.random.rand() for _ in range(3)]
    np.random.set_bit_generator(np.random.PCG64(5))
    found = []
    for _ in range(3):
        with preserved_globals():
            np.random.rand(10)
        found.append(np.random.rand())
    assert found == wanted


def test_an_exception_leaves_no_trace_either():
    np.random.seed(3)
    wanted = np.random.rand()
    np.random.seed(3)
    with pytest.raises(KeyError):
        build_in_vain()
    assert np.random.rand() == wanted


def test_the_state_is_read_from_memory_only_if_it_lies_there(monkeypatch):
    monkeypatch.setattr(mt19937, "_packed", lambda state: b"elsewhere")
    monkeypatch.setattr(mt19937, "_known", None)
    assert draws_with(build_a_batch, 1) == draws_with(int, 1)


def test_where_nothing_was_drawn_in_between_the_slow_way_is_spared(monkeypatch):
    np.random.seed(3)
    with preserved_globals():
        draw()
    monkeypatch.delattr(np.random, "get_state")
    with preserved_globals():
        draw()


def seeded_draws():
    np.random.randn()  # draws a second one in advance, to be forgotten
    seeding.reseed_globals(7, 1, 2, 3)
    return draw()


def test_a_seed_means_the_same_where_the_state_lies_elsewhere(monkeypatch):
    usual = seeded_draws()
    assert seeded_draws() == usual
    monkeypatch.setattr(mt19937, "_packed", lambda state: b"elsewhere")
    monkeypatch.setattr(mt19937, "_known", None)
    assert seeded_draws() == usual


def test_a_seed_means_the_same_wherever_the_generator_is():
    usual = seeded_draws()
    np.random.set_bit_generator(np.random.MT19937())
    assert seeded_draws() == usual


def test_streams_with_other_keys_differ():
    found = set()
    for key in [(1,), (1, 0), (10,), (2**70, 3)]:
        for seed in (0, 1, 11, 2**70):
            seeding.reseed_globals(seed, *key)
            found.add((np.random.randint(2**62), random.random()))
    assert len(found) == 16
    assert len({drawn for drawn, _ in found}) == 16
    assert len({drawn for _, drawn in found}) == 16


def test_one_draw_amid_the_builds_of_several_threads_warns_of_nothing():
    monitor = rng_monitor.GlobalRngMonitor(warns=True)
    begun, drawn = threading.Event(), threading.Event()

    def build_meanwhile():
        monitor.begin()
        begun.set()
        assert drawn.wait(60)
        monitor.end("Data")

    other = threading.Thread(target=build_meanwhile, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.start()
        assert begun.wait(60)
        monitor.begin()
        random.random()
        drawn.set()
        other.join(60)
        monitor.end("Data")
    monitor.begin()
    random.random()
    with pytest.warns(UserWarning, match=r"Data\.__getitem__, or other"):
        monitor.end("Data")


def test_seeds_that_are_drawn_amid_builds_warn_of_nothing():
    monitor = rng_monitor.GlobalRngMonitor(warns=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            monitor.begin()
            drawn_seed.draw_seed(types.SimpleNamespace())
            monitor.end("Data")


@pytest.mark.parametrize("warns", [True, False])
def test_torchs_generator_counts_where_nothing_is_warned_of(warns, monkeypatch):
    class Torch:  # a model draws from its generator in each step
        state = 0

        def get_rng_state(self):
            self.state += 1
            return types.SimpleNamespace(numpy=lambda: np.array(self.state))

    torch = Torch()
    monkeypatch.setattr(seeding, "loaded_torch", lambda: torch)
    monitor = rng_monitor.GlobalRngMonitor(warns=warns)
    with (
        warnings.catch_warnings()
        if warns
        else pytest.raises(GlobalRngUsedError, match="drew from")
    ):
        warnings.simplefilter("error")
        for _ in range(3):
            monitor.begin()
            monitor.end("Data")
