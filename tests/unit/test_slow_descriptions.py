"""What takes long to describe is described once."""

from __future__ import annotations

import types

import pytest

from keras_fastdata.engine import slow_descriptions
from keras_fastdata.engine.slow_descriptions import once_if_slow


class Thing:
    size = 1


@pytest.fixture
def describe(monkeypatch):
    """Describes sizes, at a clock that each description moves."""
    now_s = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(slow_descriptions, "time", clock)

    def described(thing):
        now_s[0] += thing.size
        return thing.size

    slow_descriptions.forget()
    yield once_if_slow(described)
    slow_descriptions.forget()


def test_a_slow_description_is_kept_until_it_is_to_be_forgotten(describe):
    thing, other = Thing(), Thing()
    assert describe(thing) == describe(other) == 1
    thing.size = other.size = 2
    assert describe(thing) == describe(other) == 1
    assert describe(Thing()) == 1
    slow_descriptions.forget()
    assert describe(thing) == 2


def test_a_quick_description_is_made_each_time(describe):
    thing = Thing()
    thing.size = 0
    assert describe(thing) == 0
    thing.size = 0.01
    assert describe(thing) == 0.01


def test_another_object_at_the_same_address_is_described(describe):
    thing = Thing()
    describe(thing)
    place = next(iter(slow_descriptions._kept))
    kept = slow_descriptions._kept.pop(place)
    other = Thing()
    other.size = 3
    slow_descriptions._kept[place[0], id(other)] = kept
    del thing
    assert describe(other) == 3
