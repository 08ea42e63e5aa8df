"""Workers run the code that the trainer has imported, whatever is on disk."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import pytest
from places import EVERY_KIND, quickly
from samples import Numbered

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]

_DATA = """
import os

import edited_unused
import numpy as np
from edited_helper import scale

from keras_fastdata import FastPyDataset


class Data(FastPyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([index * scale(), os.getpid()])


class Both(Data):
    def __getitem__(self, index):
        import edited_helper

        new = edited_helper.scale()
        return np.array([new + index * scale(), os.getpid()])
"""
_NAMES = ("edited_data", "edited_helper", "edited_unused")
_HELPER = "def scale():\n    return {}\n"
_PROCESSES = [kind for kind in EVERY_KIND if kind not in ("inline", "thread")]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes the modules, and imports them."""

    def edit(text):
        path = tmp_path / "edited_helper.py"
        path.write_text(text)
        importlib.invalidate_caches()

    (tmp_path / "edited_data.py").write_text(_DATA)
    (tmp_path / "edited_unused.py").touch()
    edit(_HELPER.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    for name in _NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("edited_data")
    yield module, edit
    for name in _NAMES:
        sys.modules.pop(name, None)


def _values(dataset):
    return [int(value) for value, _ in dataset]


@pytest.mark.parametrize("kind", quickly(_PROCESSES, "process"))
@pytest.mark.parametrize("text", [_HELPER.format(100), "def scale(:", None])
def test_a_module_that_is_edited_meanwhile_is_not_imported(modules, kind, text):
    module, edit = modules
    with module.Data(**{**EVERY_KIND[kind], "workers": 1}) as dataset:
        batches = iter(dataset)
        _, pid = next(batches)
        if text is None:
            for name in _NAMES:
                os.unlink(sys.modules[name].__file__)
        else:
            edit(text)
        os.kill(int(pid), signal.SIGKILL)  # another one takes its place
        assert _values(batches) == [1, 2, 3]
        assert _values(dataset) == [0, 1, 2, 3]
    with module.Data(**EVERY_KIND[kind]) as another:
        assert _values(another) == [0, 1, 2, 3]


def test_a_module_that_is_imported_again_has_its_new_code(modules):
    module, edit = modules
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 1, 2, 3]
    edit(_HELPER.format(100))
    importlib.reload(sys.modules["edited_helper"])
    importlib.reload(module)
    for kind in ("process", "inline"):
        with module.Data(**EVERY_KIND[kind]) as dataset:
            assert _values(dataset) == [0, 100, 200, 300]


def test_a_dataset_that_begins_later_has_the_code_as_well(modules):
    """Such as one for validation, in another module."""
    module, edit = modules
    with Numbered(**EVERY_KIND["process"]) as training:
        list(training)
        edit(_HELPER.format(100))
        with module.Data(**EVERY_KIND["process"]) as validation:
            assert _values(validation) == [0, 1, 2, 3]


def test_code_that_was_replaced_in_place_is_the_edited_one(modules):
    """As IPython does, which imports no module again."""
    module, edit = modules
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 1, 2, 3]
        edit(_HELPER.format(100))
        edited = {}
        helper = sys.modules["edited_helper"]
        exec(compile(_HELPER.format(100), helper.__file__, "exec"), edited)
        sys.modules["edited_helper"].scale.__code__ = edited["scale"].__code__
        assert _values(dataset) == [0, 100, 200, 300]
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 100, 200, 300]


def test_an_edit_is_not_taken_because_the_program_sets_a_function(
    modules, monkeypatch
):
    module, edit = modules
    helper = sys.modules["edited_helper"]
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 1, 2, 3]
        edit(_HELPER.format(100))
        monkeypatch.setattr(helper, "scale", len)
        assert _values(dataset) == [0, 1, 2, 3]


def test_a_function_of_before_a_reload_stays_where_another_module_has_it(
    modules,
):
    module, edit = modules
    edit(_HELPER.format(100))
    importlib.reload(sys.modules["edited_helper"])
    for _ in range(2):
        with module.Data(**EVERY_KIND["process"]) as dataset:
            assert _values(dataset) == [0, 1, 2, 3]


def test_the_former_code_runs_on_after_a_reload_of_what_is_no_python(modules):
    module, edit = modules
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 1, 2, 3]
    edit("def scale(:")
    with pytest.raises(SyntaxError):
        importlib.reload(sys.modules["edited_helper"])
    with module.Data(**EVERY_KIND["process"]) as dataset:
        assert _values(dataset) == [0, 1, 2, 3]


def test_a_reload_of_one_module_gives_each_module_its_function(modules):
    module, edit = modules
    helper = sys.modules["edited_helper"]
    edit(_HELPER.format(100))
    importlib.reload(helper)
    for _ in range(2):
        with module.Both(**EVERY_KIND["process"]) as dataset:
            assert _values(dataset) == [100, 101, 102, 103]
