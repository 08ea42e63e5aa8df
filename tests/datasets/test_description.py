"""What `repr` and a notebook say of a dataset, and when they must not ask."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading

import numpy as np
import pytest
from samples import Numbered

from keras_fastdata import FastPyDataset, GeneratorDataset, accelerate
from keras_fastdata._dataset_internals import loader_of, own_loader
from keras_fastdata.metrics import formatting


class Labelled(FastPyDataset):
    """Batches of dicts."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = {"image": np.zeros((2, 8, 8, 3), "uint8"), "text": np.array(["a"])}
        return x, np.zeros(2, "float32")


class Printed(FastPyDataset):
    """Builds batches of its own `repr`."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.array([repr(self)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "<Numbered: 10 batches; 1 thread>"),
        ({"workers": 0}, "<Numbered: 10 batches; inline>"),
        (
            {"workers": 2, "use_multiprocessing": True, "cache": "memory"},
            "<Numbered: 10 batches; 2 processes; cache 'memory'>",
        ),
        ({"workers": 2, "shard": (1, 4)}, "2 threads; shard 2 of 4>"),
        ({"workers": "auto"}, 'inline (workers="auto")>'),
        ({"workers": 3, "executor": "ray"}, "3 Ray actors>"),
    ],
)
def test_a_new_dataset_says_its_length_and_settings(arguments, text):
    dataset = Numbered(**arguments)
    assert text in repr(dataset)
    assert own_loader(dataset) is None


def test_shapes_and_dtypes_are_said_once_a_batch_was_delivered():
    with Labelled(workers=1) as dataset:
        iterator = iter(dataset)
        assert "uint8" not in repr(dataset)
        next(iterator)
        assert repr(dataset) == (
            "<Labelled: 3 batches of ({'image': uint8 (2, 8, 8, 3), "
            "'text': str (1,)}, float32 (2,)); 1 thread>"
        )


def test_a_changed_dataset_says_shapes_when_its_next_batch_has_come():
    with Numbered(workers=0) as dataset:
        list(dataset)
        dataset.shape = (2, 2)
        next(iter(dataset))
        assert "float32 (2, 2)" in repr(dataset)


def test_the_length_is_not_asked_in_the_midst_of_an_epoch():
    asked = []

    class Counting(Numbered):
        def __len__(self):
            asked.append(1)
            return self.length

    with Counting(workers=0) as dataset:
        next(iter(dataset))
        count = len(asked)
        assert repr(dataset).startswith("<Counting: 10 batches of ")
        assert len(asked) == count
        dataset.length = 3
        assert repr(dataset).startswith("<Counting: 3 batches of ")


def test_a_length_that_raises_or_is_unknown_is_left_out():
    class Raising(Numbered):
        def __len__(self):
            raise OSError("no such folder")

    class Endless(FastPyDataset):
        num_batches = None

        def __getitem__(self, index):
            return np.zeros(1)

    assert repr(Raising()) == "<Raising: 1 thread>"
    assert repr(Endless()).startswith("<Endless: unknown number of batches;")


def test_a_length_that_prints_the_dataset_does_not_recurse():
    class Logging(Numbered):
        def __len__(self):
            self.said = repr(self)
            return self.length

    dataset = Logging()
    assert repr(dataset) == "<Logging: 10 batches; 1 thread>"
    assert dataset.said == "..."


def test_a_dataset_that_is_being_made_can_be_printed(recwarn):
    said = []

    class Early(Numbered):
        def __init__(self):
            said.append(repr(self))
            super().__init__()
            said.append(repr(self))

    Early()
    assert said == ["<Early>", "<Early: 10 batches; 1 thread>"]
    assert not recwarn.list


def test_copies_and_unpickled_datasets_can_be_printed():
    dataset = Numbered(workers=2)
    text = repr(dataset)
    for other in (
        copy.copy(dataset),
        copy.deepcopy(dataset),
        pickle.loads(pickle.dumps(dataset)),
    ):
        assert repr(other) == text
        assert own_loader(other) is None


@pytest.mark.parametrize("processes", [False, True])
def test_a_dataset_can_be_printed_in_a_worker(processes):
    with Printed(workers=1, use_multiprocessing=processes) as dataset:
        kind = "process" if processes else "thread"
        assert next(iter(dataset))[0] == f"<Printed: 1 batch; 1 {kind}>"


def test_printing_does_not_wait_for_the_lock_of_the_loader():
    with Numbered(workers=0) as dataset:
        next(iter(dataset))
        lock = loader_of(dataset)._pool.lock
        said = []
        other = threading.Thread(
            target=lambda: said.append((repr(dataset), dataset._repr_html_()))
        )
        with lock:
            other.start()
            other.join(timeout=60)
        assert len(said) == 1


def test_the_users_own_repr_wins_also_in_a_notebook():
    class Own(Numbered):
        def __repr__(self):
            return "own"

    class Mixin:
        def __repr__(self):
            return "mixin"

    class Mixed(Numbered, Mixin):
        pass

    @dataclasses.dataclass(eq=False)
    class Data(FastPyDataset):
        rows: int

        def __post_init__(self):
            super().__init__()

        def __len__(self):
            return 1

    assert (repr(Own()), Own()._repr_html_()) == ("own", None)
    assert (repr(Mixed()), Mixed()._repr_html_()) == ("mixin", None)
    assert repr(Data(3)).endswith("Data(rows=3)")
    assert Data(3)._repr_html_() is None


def test_ready_made_datasets_say_their_workers_and_what_they_wrap():
    def numbers(shard_index, num_shards):
        yield from range(4)

    made = GeneratorDataset(numbers, 2, workers=2)
    assert "2 threads" in repr(made)
    assert "unknown number of batches" in repr(made)
    assert repr(accelerate([1, 2])).startswith("<accelerate(list): 2 batches")


def test_what_a_notebook_shows_is_escaped():
    class Cached(Numbered):
        pass

    Cached.__name__ = "<b>"
    page = Cached(cache="<i>", cache_version=1)._repr_html_()
    assert "<b>&lt;b&gt;</b>" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def test_the_structure_of_odd_batches_is_described():
    class Pretender:
        shape = property(lambda self: 1 / 0)

    assert formatting.structure([np.zeros((2, 3)), "text"]) == (
        "[float64 (2, 3), str]"
    )
    assert formatting.structure((np.int8(3),)) == "(int8 (),)"
    with Numbered(workers=0) as dataset:
        loader_of(dataset)._fetcher.results.note_structure((Pretender(),))
        assert "of tuple" in repr(dataset)
