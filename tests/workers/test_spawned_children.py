"""Datasets of the script work in processes that `multiprocessing` spawns."""

from __future__ import annotations

import pytest
from places import quickly

SCRIPT = """
import functools, multiprocessing, pickle, typing, warnings
import numpy as np
from keras_fastdata import FastPyDataset, GeneratorDataset, SharedList

SCALE = 1
OPTIONS = {"add": 0}
PLACES = {
    "process": {}, "portable": {"start_method": "portable"},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
}
UserId = typing.NewType("UserId", int)

class MyError(Exception):
    pass

class Config:
    shift = 0

class Item:
    def __init__(self, number):
        self.number = number

@functools.lru_cache
def twice(number):
    return 2 * number

class Mine(FastPyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.items = SharedList(Item(number) for number in range(4))
        self.kind = UserId

    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert self.kind(3) == 3
        number = self.items[index].number * SCALE + OPTIONS["add"]
        return Item(np.full(2, twice(number) + Config.shift))

class Failing(Mine):
    def __getitem__(self, index):
        raise MyError("of the script")

def count(shard_index, num_shards):
    yield from map(np.int64, range(shard_index, 6, num_shards))

def numbers(batches):
    return [int(batch.number[0]) for batch in batches]

def child(kind):
    global SCALE
    warnings.filterwarnings("ignore", "`start_method='fork'`")
    place = {"workers": 2, "use_multiprocessing": True, **PLACES[kind]}
    with Mine(**place) as dataset:
        told = [numbers(dataset)]
        SCALE = 10
        told.append(numbers(dataset))
        OPTIONS["add"] = 1
        told.append(numbers(dataset))
        Config.shift = 100
        told.append(numbers(dataset))
        dataset.items = SharedList([Item(7)] * 4)
        told.append(numbers(dataset))
    print(*told, sep="\\n")
    with Failing(**place) as dataset:
        try:
            list(dataset)
        except MyError as error:
            print(type(error) is MyError)
    with GeneratorDataset(
        count, batch_size=3, num_shards=2, **place
    ) as dataset:
        print([batch.tolist() for batch in dataset])

if __name__ == "__main__":
    process = multiprocessing.get_context("METHOD").Process(
        target=child, args=("KIND",)
    )
    process.start()
    process.join()
    print("ended", process.exitcode)
"""

EPOCHS = [
    [0, 2, 4, 6],
    [0, 20, 40, 60],
    [2, 22, 42, 62],
    [102, 122, 142, 162],
    [242] * 4,
]


@pytest.mark.parametrize("method", quickly(["forkserver", "spawn"], "spawn"))
@pytest.mark.parametrize(
    "kind", quickly(["process", "portable", "spawn", "fork"], "process")
)
def test_a_spawned_child_loads_classes_of_the_script(
    kind, method, tmp_path, zygote
):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("METHOD", method).replace("KIND", kind))
    ran = zygote.run(path)
    assert ran.stdout.splitlines() == [
        *map(str, EPOCHS),
        "True",
        str([[0, 2, 4], [1, 3, 5]]),
        "ended 0",
    ], ran.stderr
    assert "Warning" not in ran.stderr
    assert "do not see" not in ran.stderr
