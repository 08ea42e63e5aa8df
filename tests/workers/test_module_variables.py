"""Objects that a module and the dataset hold are one object in workers, too."""

from __future__ import annotations

import json

import held_by_module
import numpy as np
import pytest
from held_by_both import HoldsObjectsOfModule
from places import EVERY_KIND
from trainers import START_METHODS

from keras_fastdata.memory.module_variables import ModuleVariables
from keras_fastdata.memory.shared_state import pickle_in_parts

pytestmark = pytest.mark.filterwarnings("ignore:`start_method='fork'`")


@pytest.fixture(autouse=True)
def _module_is_left_as_it_was():
    yield
    held_by_module.config.size = held_by_module.namespace.size = 4
    held_by_module.settings["size"] = held_by_module.sizes[0] = 4


@pytest.mark.parametrize("start_method", START_METHODS)
def test_what_changes_in_an_attribute_changes_in_the_module(start_method):
    expected = list(HoldsObjectsOfModule(workers=0))
    for index, batch in enumerate(expected):
        assert batch[-4:].tolist() == [index] * 4
    with HoldsObjectsOfModule(
        workers=2, use_multiprocessing=True, start_method=start_method
    ) as dataset:
        assert np.array_equal(list(dataset), expected)


_SCRIPT = """
import numpy as np
from keras_fastdata import FastPyDataset
from held_by_module import config, generator, jitter, settings, sizes, told

class Data(FastPyDataset):
    scale = config

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.scale.size = settings["size"] = sizes[0] = index
        return np.array([generator.random(), jitter(), *told()]).round(9)

if __name__ == "__main__":
    with Data(seed=7, **{kind!r}) as dataset:
        print(np.array([list(dataset) for _ in range(2)]).tolist())
"""


def test_what_a_script_imports_from_a_module_stays_one_with_it(
    tmp_path, zygote
):
    told = set()
    for kind in ("inline", "process", "spawn", "portable"):
        path = tmp_path / f"script_{kind}.py"
        path.write_text(_SCRIPT.replace("{kind!r}", repr(EVERY_KIND[kind])))
        ran = zygote.run(path)
        assert ran.returncode == 0, ran.stderr
        told.add(ran.stdout)
    (found,) = told
    for epoch in json.loads(found):
        for index, (*_, size, _, setting, also_size) in enumerate(epoch):
            assert (size, setting, also_size) == (index, index, index)


def test_only_objects_that_can_change_are_looked_for():
    found = ModuleVariables()
    for value in (4, "text", held_by_module.Config, held_by_module.jitter, ()):
        found.look(value)
    assert not found.found
    found.look(held_by_module.config)
    assert ("held_by_module", "config") in found.found


def test_a_class_whose_attributes_cannot_be_read_is_pickled_as_before():
    class Refuses:
        @property
        def __dict__(self):
            raise ValueError

    ModuleVariables().look(Refuses())


def test_the_pickle_of_a_state_without_such_objects_is_as_small_as_before():
    pickled, _ = pickle_in_parts({"a": [1, 2, 3]})
    assert b"module_variables" not in bytes(pickled)
