"""A long list of which there is one copy for all worker processes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from keras_fastdata import FastPyDataset, SharedList

pytestmark = pytest.mark.usefixtures("kept_forkserver")

ITEMS = ["", "a", "b.jpg", "\N{SNOWMAN}", b"", b"\x00\xff", 7, None, (1, "x")]
ITEMS += [os.fsdecode(b"not \xff text"), 1.5, Path("/tmp/x"), 1 << 80]


def test_it_holds_what_it_was_given():
    shared = SharedList(ITEMS)
    assert list(shared) == ITEMS
    assert len(shared) == len(ITEMS)
    assert [type(item) for item in shared] == [type(item) for item in ITEMS]


@pytest.mark.parametrize("index", [0, 5, -1, -13, np.int64(3), np.uint8(4)])
def test_items_are_found_by_any_index(index):
    assert SharedList(ITEMS)[index] == ITEMS[index]


@pytest.mark.parametrize(
    "part",
    [
        slice(None),
        slice(2, 5),
        slice(-3, None),
        slice(None, None, -2),
        slice(5, 2),
        slice(3, 100),
    ],
)
def test_a_slice_is_a_plain_list(part):
    found = SharedList(ITEMS)[part]
    assert type(found) is list
    assert found == ITEMS[part]


@pytest.mark.parametrize("index", [13, -14, 10**9])
def test_there_is_nothing_beyond_its_ends(index):
    with pytest.raises(IndexError, match=f"Item {index} of a list of 13"):
        SharedList(ITEMS)[index]


@pytest.mark.parametrize("index", ["a", 1.0, None])
def test_an_index_is_an_integer(index):
    with pytest.raises(TypeError):
        SharedList(ITEMS)[index]


def test_it_does_what_sequences_do():
    shared = SharedList(iter(["a", "b", "a"]))
    assert "b" in shared
    assert "c" not in shared
    assert shared.index("b") == 1
    assert shared.count("a") == 2
    assert list(reversed(shared)) == ["a", "b", "a"]
    assert not SharedList([])
    assert list(SharedList([])) == []


def test_it_shows_its_first_items():
    assert repr(SharedList(range(1000))) == (
        "SharedList([0, 1, 2, ...], length=1000)"
    )
    assert repr(SharedList(["a"])) == "SharedList(['a'], length=1)"


def test_it_cannot_be_changed():
    with pytest.raises(TypeError):
        SharedList(ITEMS)[0] = "b"


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        SharedList([1, lambda: 0])


def test_its_bytes_travel_beside_the_pickle():
    shared = SharedList(f"photos/{i}.jpg" for i in range(100_000))
    buffers = []
    body = pickle.dumps(shared, 5, buffer_callback=buffers.append)
    assert len(body) < 1000
    again = pickle.loads(body, buffers=buffers)
    assert again[99_999] == "photos/99999.jpg"


class Paths(FastPyDataset):
    """Reports how many Python objects its worker would have to keep."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.paths = SharedList(f"photos/{i}.jpg" for i in range(600_000))

    def __len__(self):
        return 6

    def __getitem__(self, index):
        found = self.paths[index * 100_000 : index * 100_000 + 4]
        return np.array([[path] for path in found]), np.zeros((4, 1))


def test_workers_read_it_where_it_lies():
    with Paths(workers=2, use_multiprocessing=True) as dataset:
        for index, (x, _) in enumerate(dataset):
            first = index * 100_000
            assert x[:, 0].tolist() == [
                f"photos/{i}.jpg" for i in range(first, first + 4)
            ]
        pids = dataset._fastdata.loader.pool_stats().pids.values()
        assert len(pids) == 2
        for pid in pids:
            # The strings would take 40,000 more.
            assert _private_kb(pid) < 60_000


def _private_kb(pid):
    return sum(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Private_")
    )


SCRIPT = """
import collections
import numpy as np
from keras_fastdata import FastPyDataset, SharedList

Sample = collections.namedtuple("Sample", "path label")

class Samples(FastPyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.samples = SharedList(Sample(f"{i}.jpg", i) for i in range(4))
    def __len__(self):
        return 4
    def __getitem__(self, index):
        sample = self.samples[index]
        assert type(sample) is Sample, type(sample)
        return np.array([[sample.label]]), np.zeros((1, 1))

with Samples(workers=1, use_multiprocessing=True) as dataset:
    print([int(x[0, 0]) for x, _ in dataset])
"""


@pytest.mark.long
def test_items_of_a_class_of_main_arrive_in_workers(tmp_path, zygote):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = zygote.run(path)
    assert ended.stdout == "[0, 1, 2, 3]\n", ended.stderr
