"""Builds use `multiprocessing` and `pickle` as the program does."""

from __future__ import annotations

import pytest
from places import EVERY_KIND, quickly

_SCRIPT = """
import multiprocessing, pickle, sys, warnings
from concurrent.futures import ProcessPoolExecutor
import numpy as np
from keras_fastdata import FastPyDataset

KIND, FILE = {kind!r}, "items.pickle"
warnings.filterwarnings("ignore", "`start_method='fork'`")

class Item:
    def __init__(self, number):
        self.number = number

def double(number):
    return 2 * number

class Data(FastPyDataset):
    def __init__(self, shared=None, **kwargs):
        super().__init__(**kwargs)
        self.shared = shared

    def __len__(self):
        return 20

class OfAManager(Data):
    def __getitem__(self, index):
        return np.array(self.shared[index])

class WithAPool(Data):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        with ProcessPoolExecutor(2) as pool:
            return np.array(list(pool.map(double, [index, 10])))

class OfAFile(Data):
    def __getitem__(self, index):
        with open(FILE, "rb") as file:
            item = pickle.load(file)[index]
        return np.array(item.number if type(item) is Item else -1)

def build(kind, *args):
    with kind(*args, **KIND) as dataset:
        return np.array(list(dataset)).tolist()

if __name__ == "__main__":
    with open(FILE, "wb") as file:
        pickle.dump([Item(number) for number in range(20)], file)
    with multiprocessing.Manager() as manager:
        shared = manager.list(range(20))
        print(list(shared) == build(OfAManager, shared))
    print(build(WithAPool))
    print(build(OfAFile) == list(range(20)))
"""


@pytest.mark.parametrize(
    "kind",
    quickly(EVERY_KIND, "inline", "thread", "process", "fork"),
)
def test_builds_find_a_manager_functions_of_the_script_and_its_classes(
    kind, tmp_path, zygote, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT.format(kind=EVERY_KIND[kind]))
    ran = zygote.run(path)
    expected = ["True", "[[0, 20], [2, 20]]", "True"]
    assert ran.stdout.splitlines() == expected, ran.stderr
