"""State outside of the dataset is the training process's in every worker."""

from __future__ import annotations

import abc
import argparse
import array
import collections
import configparser
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import operator
import random
import re
import struct
import sys
import threading
import types
import typing
import weakref
import zlib
import zoneinfo

import cloudpickle
import keras
import numpy as np
import outside_class
import outside_config as conf
import outside_function
import outside_made
import outside_object
import outside_package.inner
import outside_samples
import outside_text
import outside_wrappers
import outside_wrapt
import pandas as pd
import pytest
from outside_holders import (
    SIZES,
    SUBCLASSES,
    Exclusive,
    Level,
    OfVariable,
    Refusing,
    SetUp,
    add_number,
    factor_of,
    greatest_in,
    held_by,
    holders_of_a_number,
    holding,
    made_by_second,
    sets_up,
)
from outside_samples import (
    CallsItself,
    Divided,
    Frameworks,
    HasAttributes,
    NamesOne,
    Referring,
    depth_of,
    settings,
)
from PIL import Image, ImageFile
from places import EVERY_KIND
from samples import Holds, refused
from sklearn import pipeline

from keras_fastdata import FastPyDataset
from keras_fastdata._modules import is_users, is_users_class
from keras_fastdata.building.code_names import Root, names_of
from keras_fastdata.building.reachable import reachable
from keras_fastdata.building.referred_names import variables_of
from keras_fastdata.engine import (
    framework_settings,
    outside_state,
    plain_values,
    sent_digest,
    told_state,
)
from keras_fastdata.engine.kinds import kind_of
from keras_fastdata.engine.library_objects import digest_of
from keras_fastdata.engine.outside_state import OutsideState
from keras_fastdata.engine.stable_pickle import is_installed
from keras_fastdata.engine.told_forms import can_be_told

PROCESSES = {"workers": 2, "use_multiprocessing": True}
KINDS = {
    "forkserver": PROCESSES,
    "spawn": {**PROCESSES, "start_method": "spawn"},
    "fork": {**PROCESSES, "start_method": "fork"},
}
PLACES = [
    *("inline", "thread", "process"),
    *(
        pytest.param(kind, marks=pytest.mark.long)
        for kind in ("spawn", "portable", "fork")
    ),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]

SCRIPT = """
import argparse
import numpy as np
from keras_fastdata import FastPyDataset

class Tool:
    strength = 1

    def __init__(self):
        self.used = 1

args = argparse.Namespace(scale=1)
table = np.arange(3)
tool = Tool()

def change(x):
    return x + 1

class Mine(FastPyDataset):
    factor = 1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([[
            change(0), args.scale, table[1], tool.used, Tool.strength,
            self.factor
        ]])

def show(dataset):
    print(*sorted({str(batch.tolist()) for batch in dataset}))

for method in ("forkserver", "fork"):
    kinds = {"use_multiprocessing": True, "start_method": method}
    with Mine(workers=2, **kinds) as dataset:
        show(dataset)
        def change(x):
            return x + 2
        show(dataset)
        args.scale = 3
        table[1] = 4
        tool.used = 5
        show(dataset)
        Tool.strength = 6
        Mine.factor = 7
        show(dataset)
    def change(x):
        return x + 1
    args.scale = table[1] = tool.used = Tool.strength = Mine.factor = 1
"""

# What one epoch sees, and what the next one does not see any longer.
ADDED_SCRIPT = """
import numpy as np
from keras_fastdata import FastPyDataset

class Tool:
    strength = 1

class Base(FastPyDataset):
    factor = 1

    def grown(self):
        return 1

class Mine(Base):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            added = later()
        except NameError:
            added = 1
        return np.array([[self.factor, self.grown(), tool.strength, added]])

tool = Tool()

def show(dataset):
    print(*sorted({str(batch.tolist()) for batch in dataset}))

for method in ("forkserver", "fork"):
    kinds = {"use_multiprocessing": True, "start_method": method}
    with Mine(workers=2, **kinds) as dataset:
        show(dataset)
        Mine.factor = 2
        show(dataset)
        Mine.grown = lambda self: 3
        show(dataset)
        tool.strength = 4
        show(dataset)
        def later():
            return 5
        show(dataset)
        del Mine.factor, Mine.grown, tool.strength, later
        show(dataset)
        former = Mine.__getitem__
        def doubled(self, index, former=former):
            return 2 * former(self, index)
        Mine.__getitem__ = doubled
        show(dataset)
        def later():
            return 5
        show(dataset)
    Mine.__getitem__ = former
    del later
"""


def _walk(dataset):
    """What all batches of one epoch say."""
    (found,) = {str(batch[0]) for batch in dataset}
    return found


@pytest.fixture
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize(
    "kind",
    [
        "forkserver",
        pytest.param("spawn", marks=pytest.mark.long),
        "fork",
    ],
)
def test_plain_variables_of_modules_are_carried_when_an_epoch_begins(
    kind, patch
):
    patch.setattr(conf, "SCALE", 3)
    patch.setattr(conf, "ARGS", argparse.Namespace(rate=0.5))
    with Referring(**KINDS[kind]) as dataset, Referring(workers=0) as inline:
        assert _walk(dataset) == "[3, 1, [1], {'rate': 0.5}, 1, 1, True]"
        patch.setattr(outside_samples, "FACTOR", 2)
        patch.setattr(Referring, "offset", 4)
        patch.setitem(conf.OPTIONS, "sizes", [5, 6])
        conf.ARGS.rate = 0.25
        patch.setattr(conf.config, "depth", 7)
        patch.setattr(conf.Config, "depth", 8)
        wanted = "[6, 4, [5, 6], {'rate': 0.25}, 7, 8, True]"
        assert _walk(dataset) == wanted
        assert _walk(inline) == wanted


def test_variables_of_a_module_that_a_method_imports_are_found(
    tmp_path, monkeypatch
):
    (tmp_path / "around").mkdir()
    for name, text in (
        ("__init__", ""),
        ("scales", "SCALE = 2"),
        (
            "read",
            "class Read:\n"
            "    def __getitem__(self, index):\n"
            "        from .scales import SCALE\n"
            "        return SCALE",
        ),
    ):
        (tmp_path / "around" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    dataset = importlib.import_module("around.read").Read()
    assert dataset[0] == 2
    found = [v.name for v in variables_of(dataset)]
    assert "around.scales.SCALE" in found
    for name in ("around", "around.read", "around.scales"):
        monkeypatch.delitem(sys.modules, name)


def _by_a_text(thing):
    return getattr(conf, "SCALE")  # noqa: B009


@pytest.mark.parametrize(
    ("thing", "read"),
    [
        (conf, lambda thing: thing.SCALE),
        ([conf], lambda thing: thing[0].SCALE),
        (None, _by_a_text),
    ],
    ids=["attribute", "item", "text"],
)
def test_variables_of_a_module_that_an_object_holds_are_found(thing, read):
    class Reads:
        def __init__(self):
            self.thing = thing

        def __getitem__(self, index):
            return read(self.thing)

    found = [v.name for v in variables_of(Reads())]
    assert "outside_config.SCALE" in found
    assert "outside_config.LARGE" not in found


def test_what_builds_assign_is_each_workers_own(patch):
    patch.setattr(conf, "_is_ready", True)
    with Referring(**PROCESSES) as dataset:
        assert _walk(dataset).endswith("True]")


def test_what_cannot_be_carried_is_said_once(patch, caplog):
    dataset = Referring()
    state = OutsideState()
    state.look(dataset, is_shared=False)
    assert not state.notice_changes()
    for _ in range(2):
        patch.setattr(outside_samples, "_scaled", refused())
        assert state.notice_changes()
        state.look(dataset, is_shared=False)
        assert not state.notice_changes()
    (said,) = caplog.messages
    assert "`outside_samples._scaled`" in said


@pytest.mark.parametrize("kind", ["forkserver", "spawn"])
@pytest.mark.parametrize("is_patched", [False, True])
def test_what_pickle_refuses_in_place_of_a_function_is_said_to_be_lost(
    kind, is_patched, patch, caplog
):
    if is_patched:
        patch.setattr(outside_samples, "_scaled", refused())
    with Referring(**KINDS[kind]) as dataset:
        assert _walk(dataset).startswith("[1, ")
    said = [text for text in caplog.messages if "`outside_samples." in text]
    assert len(said) == is_patched
    assert all("`outside_samples._scaled`" in text for text in said)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_partial_in_a_list_keeps_may_change_without_a_warning(
    place, patch, caplog
):
    sizes = [1]
    step = functools.partial(conf.total, sizes=sizes, more=0)
    patch.setitem(conf.OPTIONS, "sizes", [step])
    use = lambda _, index: conf.OPTIONS["sizes"][0](index)  # noqa: E731
    with Holds(0, use, **EVERY_KIND[place]) as dataset:
        assert [int(batch) for batch in dataset] == [1, 2, 3]
        sizes.append(10)
        assert [int(batch) for batch in dataset] == [11, 12, 13]
        step.keywords["more"] = 100
        assert [int(batch) for batch in dataset] == [111, 112, 113]
    assert not caplog.messages


@pytest.mark.parametrize("place", PLACES)
def test_a_marker_of_a_module_is_the_same_object_everywhere(place, patch):
    use = lambda held, _: (  # noqa: E731
        held[0] is conf.MISSING and conf.found["value"] is conf.MISSING
    )
    with Holds([conf.MISSING], use, **EVERY_KIND[place]) as dataset:
        assert all(dataset)
        patch.setitem(conf.found, "other", [1])
        assert all(dataset)


def test_a_class_in_c_is_not_the_users_if_its_module_is_unknown():
    kind = type(contextvars.Token.MISSING)
    assert kind.__module__ not in sys.modules
    assert not is_users_class(kind)


def test_an_object_with_content_in_c_is_no_marker(patch, caplog):
    use = lambda *_: conf.layout.unpack(b"\1\0\0\0")[0]  # noqa: E731
    with Holds(0, use, **EVERY_KIND["process"]) as dataset:
        list(dataset)
        patch.setattr(conf, "layout", struct.Struct(">i"))
        assert {int(batch) for batch in dataset} == {1}
    assert "has set `outside_config.layout`" in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_functions_and_classes_that_the_program_chooses_are_used(
    place, patch, caplog
):
    use = lambda *_: conf.transform(conf.Chosen.depth)  # noqa: E731
    with Holds(0, use, **EVERY_KIND[place]) as dataset:
        assert {float(batch) for batch in dataset} == {1}
        for transform, chosen, expected in (
            (operator.neg, conf.Shallow, -1),
            (np.sqrt, conf.Deep, 3),
            (conf.doubled, conf.Deep, 18),
            (abs, conf.Shallow, 1),
        ):
            patch.setattr(conf, "transform", transform)
            patch.setattr(conf, "Chosen", chosen)
            assert {float(batch) for batch in dataset} == {expected}
    assert not caplog.messages


@pytest.mark.parametrize("place", PLACES)
def test_methods_may_be_named_like_those_of_containers(place, patch, caplog):
    found = []
    with CallsItself(**EVERY_KIND[place]) as dataset:
        for scale in (1, 2, 3):
            patch.setattr(conf, "SCALE", scale)
            found += [int(batch[0]) for batch in dataset]
    assert found == [1, 1, 2, 2, 3, 3]
    assert not caplog.messages


def test_a_fault_of_the_search_for_variables_is_not_silent(patch, caplog):
    patch.setattr(outside_state, "variables_of", lambda _: 1 / 0)
    with Referring(workers=0) as dataset:
        assert len(list(dataset)) == 6
    (said,) = set(caplog.messages)
    assert "outside of Referring will not be noticed" in said


def test_a_look_from_another_thread_is_no_change():
    dataset, state = Referring(), OutsideState()
    looks = threading.Thread(
        target=state.look, args=[dataset], kwargs={"is_shared": True}
    )
    looks.start()
    looks.join()
    assert not state.notice_changes()


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_map_of_another_file_is_there_and_the_first_file_is_as_it_was(
    kind, patch, tmp_path
):
    for number, name in enumerate("ab"):
        np.save(tmp_path / f"{name}.npy", np.full(3, number))
    first, second = (
        np.load(tmp_path / f"{name}.npy", mmap_mode="r+") for name in "ab"
    )
    patch.setattr(conf, "ARRAY", first)
    use = lambda _, index: conf.ARRAY[index]  # noqa: E731
    with Holds(0, use, **EVERY_KIND[kind]) as dataset:
        assert [int(batch) for batch in dataset] == [0] * 3
        patch.setattr(conf, "ARRAY", second)
        assert [int(batch) for batch in dataset] == [1] * 3
    assert np.load(tmp_path / "a.npy").tolist() == [0] * 3


def test_a_map_in_a_worker_is_not_filled(patch, tmp_path):
    """The module has mapped one file, and the program another one."""
    maps = []
    for number, name in enumerate("ab"):
        np.save(tmp_path / f"{name}.npy", np.full(3, number))
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r+"))
    patch.setattr(sys, "meta_path", [*sys.meta_path])
    patch.setattr(told_state, "_received", told_state._Received())
    patch.setattr(conf, "value", maps[1])
    state = OutsideState()
    dataset = UsesValues()
    state.look(dataset, is_shared=False)
    sent = cloudpickle.dumps(state.told)
    patch.setattr(conf, "value", maps[0])
    cloudpickle.loads(sent)
    assert conf.value.tolist() == [1] * 3
    assert np.load(tmp_path / "a.npy").tolist() == [0] * 3


def test_what_processes_are_to_share_is_said_to_be_lost(patch, caplog):
    patch.setattr(conf, "refuses", multiprocessing.Value("i", 3))
    use = lambda *_: bool(conf.refuses)  # noqa: E731
    with Holds(0, use, **PROCESSES) as dataset:
        list(dataset)
    assert "has set `outside_config.refuses`" in caplog.text


def test_workers_that_share_a_fork_lose_nothing(patch, caplog):
    state = OutsideState()
    state.look(Referring(), is_shared=True)
    patch.setattr(outside_samples, "_scaled", refused())
    assert state.notice_changes()
    assert not caplog.messages


def test_settings_of_frameworks_are_carried_and_nothing_is_imported(patch):
    patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    patch.setattr(Image, "MAX_IMAGE_PIXELS", 123)
    before = np.seterr(under="raise")
    try:
        with Frameworks(
            ["PIL"], workers=1, use_multiprocessing=True
        ) as dataset:
            batches = iter(dataset)
            found = {str(next(batches)[0])}
            assert found == {"[[], 'raise', True, 123]"}
            patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
            np.seterr(under="warn")
            assert _walk(dataset) == "[['PIL'], 'warn', True, None]"
    finally:
        np.seterr(**before)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_numpy_errors_are_treated_alike_in_every_kind_of_workers(kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Flatten()])
    with Divided(**EVERY_KIND[kind]) as dataset:
        for action, result in ("raise", 0), ("ignore", np.inf), ("raise", 0):
            with np.errstate(divide=action):
                predicted = model.predict(dataset, verbose=0)
                np.testing.assert_array_equal(list(dataset), [[[result]]] * 4)
                np.testing.assert_array_equal(predicted, [[result]] * 4)


@pytest.mark.long
def test_settings_of_keras_and_torch_are_carried_to_workers_that_import_them():
    torch = pytest.importorskip("torch")
    was = keras.config.floatx(), keras.config.image_data_format()
    keras.config.set_floatx("float64")
    keras.config.set_image_data_format("channels_first")
    torch.set_default_dtype(torch.float64)
    try:
        with Frameworks(
            ["keras", "torch"], workers=1, use_multiprocessing=True
        ) as dataset:
            found = {str(batch[0]) for batch in dataset}
    finally:
        keras.config.set_floatx(was[0])
        keras.config.set_image_data_format(was[1])
        torch.set_default_dtype(torch.float32)
    assert all(
        "'float64', 'channels_first', 'torch.float64'" in text for text in found
    )


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        pytest.param(
            SCRIPT,
            [
                "[[1, 1, 1, 1, 1, 1]]",
                "[[2, 1, 1, 1, 1, 1]]",
                "[[2, 3, 4, 5, 1, 1]]",
                "[[2, 3, 4, 5, 6, 7]]",
            ],
            id="changes",
        ),
        pytest.param(
            ADDED_SCRIPT,
            [
                "[[1, 1, 1, 1]]",
                "[[2, 1, 1, 1]]",
                "[[2, 3, 1, 1]]",
                "[[2, 3, 4, 1]]",
                "[[2, 3, 4, 5]]",
                "[[1, 1, 1, 1]]",
                "[[2, 2, 2, 2]]",
                "[[2, 2, 2, 10]]",
            ],
            id="adds_or_replaces",
        ),
    ],
)
def test_between_epochs_the_workers_get_what_a_script(
    script, wanted, tmp_path, zygote
):
    path = tmp_path / "script.py"
    path.write_text(script)
    ran = zygote.run(path)
    assert ran.stdout.splitlines() == wanted * 2, ran.stderr


def test_what_a_worker_adds_to_its_class_stays_when_the_class_changes(patch):
    class Mine(FastPyDataset):
        factor = 1

        def __len__(self):
            return 2

        def on_worker_start(self):
            type(self).made = 1

        def __getitem__(self, index):
            return np.array([self.factor, self.made])

    with Mine(**PROCESSES) as dataset:
        for factor in (1, 2):
            patch.setattr(Mine, "factor", factor)
            assert [batch.tolist() for batch in dataset] == [[factor, 1]] * 2


def test_a_module_is_the_users_own_as_soon_as_it_is_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "imported_later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = [is_users("imported_later"), is_installed("imported_later")]
    monkeypatch.setitem(sys.modules, "imported_later", None)
    monkeypatch.delitem(sys.modules, "imported_later")
    importlib.import_module("imported_later")
    assert before == [False, False]
    assert is_users("imported_later")
    assert not is_installed("imported_later")


def test_whose_a_module_is_depends_on_the_folder_that_it_lies_in():
    for name in ("numpy", "keras.layers", "json", "keras_fastdata.errors"):
        assert not is_users(name), name
    assert is_users("outside_config")
    assert is_users("__main__")


def test_an_installed_package_that_has_folders_elsewhere_is_installed(
    monkeypatch, tmp_path
):
    # As TensorFlow does with Keras's, which may be installed in any folder.
    monkeypatch.setattr(pytest, "__path__", [str(tmp_path), *pytest.__path__])
    assert not is_users("pytest")


@pytest.mark.parametrize(
    "make",
    [
        collections.OrderedDict,
        lambda items: collections.defaultdict(list, items),
        collections.Counter,
    ],
)
def test_containers_of_the_standard_library_are_sent_and_watched(patch, make):
    patch.setattr(conf, "OPTIONS", make({"sizes": 5}))
    dataset, state = Referring(), OutsideState()
    state.look(dataset, is_shared=False)
    assert state.told.values["outside_config"]["OPTIONS",] == {"sizes": 5}
    conf.OPTIONS["sizes"] = 6
    assert state.notice_changes()


@pytest.mark.parametrize(
    ("value", "put"),
    [
        ([1, np.ones(2000)], lambda made, item: made.insert(1, item)),
        ({"a": np.ones(2000)}, lambda made, item: made.update(a=item)),
        (
            types.SimpleNamespace(a=np.ones(2000), b=1),
            lambda made, item: setattr(made, "b", item),
        ),
    ],
    ids=["list", "dict", "namespace"],
)
def test_an_item_of_a_container_that_holds_an_array_is_watched(
    patch, value, put
):
    patch.setattr(conf, "OPTIONS", value)
    dataset, state = Referring(), OutsideState()
    for item in (np.ones(2000), 500):
        state.look(dataset, is_shared=True)
        assert not state.notice_changes()
        put(value, item)
        if isinstance(value, list):
            value.pop()
        assert state.notice_changes()


@pytest.mark.parametrize("make", [dict, set, collections.deque])
def test_a_container_may_grow_in_another_thread_during_a_look(make, patch):
    class Item:
        """May be referred to weakly."""

    held = make([(Item(), Item())])
    weakly = plain_values.weakly

    def weakly_while_it_grows(value):
        if isinstance(value, (Item, tuple)):
            grow = getattr(held, "add", None) or getattr(held, "append", None)
            (grow or held.setdefault)((Item(), Item()))
        return weakly(value)

    dataset, state = Holds(0, lambda *_: len(held)), OutsideState()
    patch.setattr(plain_values, "weakly", weakly_while_it_grows)
    state.look(dataset, is_shared=True)
    assert state.notice_changes()


def test_a_pickled_object_changes_no_digest_of_code():
    class Tool:
        """Pickle adds an attribute to its class."""

    with Holds(Tool(), lambda *_: 0, **PROCESSES) as dataset:
        before = sent_digest.digest_of(dataset)
        list(dataset)
        assert "__slotnames__" in vars(Tool)
        assert sent_digest.digest_of(dataset) == before


def test_none_in_place_of_an_object_that_is_gone_is_a_change(patch):
    class Options:
        """May be referred to weakly."""

    patch.setattr(conf, "OPTIONS", Options())
    dataset, state = Referring(), OutsideState()
    state.look(dataset, is_shared=True)
    assert not state.notice_changes()
    conf.OPTIONS = None
    assert state.notice_changes()


def test_an_ordered_dict_that_the_program_set_is_there_in_processes(patch):
    patch.setattr(conf, "OPTIONS", collections.OrderedDict(sizes=[5]))
    with Referring(**PROCESSES) as dataset:
        for size in (6, 7):
            conf.OPTIONS["sizes"] = [size]
            assert f"[{size}]" in _walk(dataset)


def test_each_of_several_classes_of_one_name_is_watched():
    def make(factor):
        class Tool:
            strength = factor

            def use(self):
                return self.strength

        return Tool()

    tools = [make(1), make(2)]
    state = OutsideState()
    dataset = Holds(tools, lambda tools, _: [tool.use() for tool in tools])
    for tool in tools:
        state.look(dataset, is_shared=False)
        type(tool).strength = 3
        assert state.notice_changes()


def test_a_change_of_a_metaclass_reaches_processes():
    class Meta(type):
        factor = 1

    class Tool(metaclass=Meta):
        pass

    with Holds(Tool, lambda tool, _: type(tool).factor, **PROCESSES) as dataset:
        for factor in (1, 2):
            Meta.factor = factor
            assert [int(batch) for batch in dataset] == [factor] * 3


def test_a_class_that_gets_other_bases_has_them_in_processes():
    class One:
        factor = 1

    class Two:
        factor = 2

    class Tool(One):
        pass

    with Holds(Tool, lambda tool, _: tool.factor, **PROCESSES) as dataset:
        for base in (One, Two, One):
            Tool.__bases__ = (base,)
            assert [int(batch) for batch in dataset] == [base.factor] * 3


def test_an_object_that_gets_an_attribute_of_that_name_hides_no_change():
    class Config:
        factor = 1

    class Item:
        pass

    with Holds((Config, Item), factor_of, **PROCESSES) as dataset:
        for factor in (1, 2):
            Config.factor = factor
            assert [int(batch) for batch in dataset] == [factor] * 3


class Assigning:
    def of_self(self, thing):
        self.a = thing.b = 1
        self.c += 1
        self.inner.d = 2

    def of_classes(self):
        type(self).a = self.__class__.b = 1
        Referring.c += 1
        conf.config.d = conf.e = 2

    @classmethod
    def of_cls(cls):
        cls.a = 1

    def of_nothing(self, thing):
        thing[conf.KEY].size = 1
        return conf.config

    def of_locals(s, thing):
        config, made = conf.config, s.made
        config.d = thing.b = 1
        made.append(1)
        inner = s.inner
        thing = inner
        thing.e = 2

    def of_copies(self, rows):
        part = self.files[1:3]
        part.sort()
        chosen = self.array[rows]
        chosen[:] = 0

    def of_shared(self, keys):
        kind, made = type(self), self.made
        made[0] = self.inner.items[1] = [self.look(key) for key in keys]
        kind.latest = [kind.look(made, key) for key in keys]
        return lambda: made.append(self.seen.pop())

    def of_items(self, key):
        conf.TABLE[self.keys[key]] = conf.COUNTS["n"] = 1
        self.made.append(conf.READ[key])


@pytest.mark.parametrize(
    ("function", "assigned", "edited"),
    [
        (Assigning.of_self, {"self.a", "self.c", "self.inner.d"}, set()),
        (
            Assigning.of_classes,
            {"cls.a", "cls.b", "Referring.c", "conf.config.d", "conf.e"},
            set(),
        ),
        (Assigning.of_cls.__func__, {"cls.a"}, set()),
        (Assigning.of_nothing, set(), set()),
        (
            Assigning.of_locals,
            {"conf.config.d", "self.inner.e"},
            {"self.made"},
        ),
        (Assigning.of_copies, set(), set()),
        (
            Assigning.of_shared,
            {"cls.latest"},
            {"self.made", "self.inner.items", "self.seen"},
        ),
        (
            Assigning.of_items,
            set(),
            {"conf.TABLE", "conf.COUNTS", "self.made"},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_code_assigns_is_told_apart_by_what_it_belongs_to(
    function, assigned, edited
):
    def shown(targets):
        roots = {Root.SELF: ("self",), Root.CLASS: ("cls",)}
        return {".".join((*roots.get(t.root, ()), *t.names)) for t in targets}

    names = names_of(function.__code__, None)
    assert shown(names.assigned) == assigned
    assert shown(names.edited) == edited


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("function", [conf.scaled, conf.cached])
def test_what_a_module_has_computed_is_dropped_with_its_variable(
    function, kind, patch
):
    patch.setattr(conf, "SCALE", 1)
    with Holds(function, lambda held, _: held(), **EVERY_KIND[kind]) as dataset:
        for scale in (2, 3, 1):
            conf.rescale(scale)
            assert [int(batch) for batch in dataset] == [scale] * 3


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (float("nan"), float("nan"), False),
        (np.float64("nan"), np.float64("nan"), False),
        (0.0, -0.0, True),
        (1, True, True),
        ([0.0], [-0.0], True),
    ],
    ids=repr,
)
def test_a_number_differs_if_it_is_another_number(
    before, after, differs, patch
):
    dataset, state = Referring(), OutsideState()
    patch.setattr(conf, "SCALE", before)
    state.look(dataset, is_shared=False)
    patch.setattr(conf, "SCALE", after)
    assert bool(state.notice_changes()) == differs


@pytest.mark.parametrize("kind", PLACES)
def test_what_an_object_of_a_module_has_computed_is_dropped_with_it(
    kind, patch
):
    patch.setattr(conf, "SCALE", 1)
    with Holds(
        conf.Frozen, lambda *_: conf.memo.scaled(), **EVERY_KIND[kind]
    ) as dataset:
        for scale in (2, 3, 1):
            conf.rescale(scale)
            conf.memo.kept.clear()
            assert [int(batch) for batch in dataset] == [scale] * 3


def test_workers_that_start_anew_keep_their_fork_server(patch):
    patch.setattr(conf, "SCALE", 1)
    # Not above: a stripped interpreter cannot import the module.
    from keras_fastdata.workers.process.forkservers import (
        forkserver_pids,
    )

    found = set()
    with Referring(workers=1, use_multiprocessing=True) as dataset:
        for scale in (1, 2, 3):
            patch.setattr(conf, "SCALE", scale)
            assert _walk(dataset).startswith(f"[{scale}, ")
            workers = dataset._fastdata.loader.pool_stats().pids
            servers = [pid for pid in forkserver_pids() if pid]
            found.add((*workers.values(), *servers))
    workers, *servers = zip(*found, strict=True)
    assert len(set(workers)) == 3
    assert all(len(set(pids)) == 1 for pids in servers)


@pytest.mark.parametrize("kind", PLACES)
def test_an_object_that_forbids_assignments_is_replaced(kind, patch):
    patch.setattr(conf, "frozen", conf.Frozen(1))
    with Holds(
        None, lambda *_: conf.frozen.scale, **EVERY_KIND[kind]
    ) as dataset:
        for scale in (2, 3, 1):
            conf.frozen = dataclasses.replace(conf.frozen, scale=scale)
            assert [int(batch) for batch in dataset] == [scale] * 3


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("key", [conf.Side.LEFT, ("a", 1), int], ids=repr)
def test_keys_of_a_container_may_be_more_than_texts(kind, key, patch):
    patch.setattr(conf, "BY_KEY", dict(conf.BY_KEY))
    with Holds(
        key, lambda held, _: conf.BY_KEY[held], **EVERY_KIND[kind]
    ) as dataset:
        for value in (1, 2, 3):
            conf.BY_KEY[key] = value
            assert [int(batch) for batch in dataset] == [value] * 3


@pytest.mark.parametrize("kind", PLACES)
def test_a_value_that_a_descriptor_has_converted_is_not_converted_again(kind):
    try:
        with Holds(
            0, lambda *_: conf.converting.scale, **EVERY_KIND[kind]
        ) as dataset:
            for scale in (3, 5):
                conf.converting.scale = scale
                assert [int(batch) for batch in dataset] == [2 * scale] * 3
    finally:
        conf.converting.scale = 1


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("kind", PLACES)
def test_a_type_of_python_or_numpy_is_a_value(kind, cache, patch, caplog):
    use = lambda *_: np.array([conf.DTYPE(0.5)])  # noqa: E731
    with Holds(0, use, cache=cache, **EVERY_KIND[kind]) as dataset:
        for dtype in (np.float64, int, float, np.float32):
            patch.setattr(conf, "DTYPE", dtype)
            wanted = np.array([dtype(0.5)])
            assert all(
                (batch.dtype, batch[0]) == (wanted.dtype, wanted[0])
                for batch in dataset
            )
    assert not caplog.text


def test_an_attribute_that_cannot_be_set_is_said_to_be_lost(patch, caplog):
    patch.setattr(conf, "refuses", conf.Refuses(2))
    with Holds(None, lambda *_: conf.refuses.scale, **PROCESSES) as dataset:
        list(dataset)
    assert "has set `outside_config.refuses.scale`" in caplog.text


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("name", "make", "read"),
    [
        ("frozen_slots", conf.FrozenSlots, lambda value: value.scale),
        (
            "frozen",
            lambda scale: conf.Frozen(conf.FrozenSlots(scale)),
            lambda value: getattr(value.scale, "scale", value.scale),
        ),
        ("_table", conf.FrozenSlots, lambda value: value.scale),
        ("curve", lambda scale: np.poly1d([scale]), lambda value: value(0)),
        (
            "LARGE",
            lambda scale: [conf.Config(scale)] * 2000,
            lambda value: getattr(value[0], "depth", 0),
        ),
    ],
    ids=["slots", "nested", "none", "library", "large list"],
)
def test_objects_with_a_small_pickle_reach_processes(
    name, make, read, kind, patch, caplog
):
    use = {
        "frozen_slots": lambda *_: read(conf.frozen_slots),
        "frozen": lambda *_: read(conf.frozen),
        "_table": lambda *_: read(conf._table),
        "curve": lambda *_: read(conf.curve),
        "LARGE": lambda *_: read(conf.LARGE),
    }[name]
    with Holds(0, use, **EVERY_KIND[kind]) as dataset:
        for scale in (3, 4):
            patch.setattr(conf, name, make(scale))
            assert [int(batch) for batch in dataset] == [scale] * 3
    assert not caplog.text


# How to read and how to set what a module makes when it is first needed.
MADE_WHEN_NEEDED = [
    (
        lambda: conf.options()["scale"],
        lambda scale: conf.options().update(scale=scale),
    ),
    (
        lambda: conf.Settings().scale,
        lambda scale: setattr(conf.Settings(), "scale", scale),
    ),
]


def _set_default(scale):
    conf.scaled_by_default.__defaults__ = (scale,)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", PLACES[1:])
@pytest.mark.parametrize(
    ("read", "change"),
    [
        *MADE_WHEN_NEEDED,
        (lambda: conf.Scaled.scale, conf.Scaled.set_scale),
        (lambda: conf.scaled_by_cell(), conf.set_cell),
        (lambda: conf.scaled_by_default(), _set_default),
        (
            lambda: conf.scaled_by_alias() * conf.HELD["scale"] ** 0,
            lambda scale: conf.HELD.update(scale=scale),
        ),
    ],
    ids=["dict", "object", "class", "cell", "default", "alias"],
)
def test_what_only_the_program_changes_of_a_module_reaches_workers(
    read, change, kind, is_first, patch
):
    patch.setattr(conf, "_options", None)
    patch.setattr(conf.Settings, "_only", None)
    try:
        with Holds(read, lambda held, _: held(), **EVERY_KIND[kind]) as dataset:
            for scale in (5, 1, 2) if is_first else (1, 2, 1):
                if is_first or scale == 2:
                    change(scale)
                    is_first = True
                assert [int(batch) for batch in dataset] == [scale] * 3
    finally:
        change(1)


class Counted(Holds):
    """Counts its builds in a module, and has a method named like a dict's."""

    builds = 0
    scale = 1

    @classmethod
    def update(cls, scale):
        cls.scale = scale

    def __getitem__(self, index):
        Counted.builds += 1
        {}.update(index=index)
        return np.asarray(super().__getitem__(index) * Counted.scale)


@pytest.mark.parametrize("is_on_disk", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("place", ["inline", "thread"])
@pytest.mark.parametrize(
    ("read", "change"),
    [
        *MADE_WHEN_NEEDED,
        (lambda: 1, lambda scale: Counted.update(scale)),
    ],
    ids=["dict", "object", "class"],
)
def test_what_builds_have_made_and_the_program_edits_makes_a_cache_invalid(
    read, change, place, is_alone, is_on_disk, patch, tmp_path
):
    patch.setattr(conf, "_options", None)
    patch.setattr(conf.Settings, "_only", None)
    patch.setattr(Counted, "scale", 1)
    patch.setattr(Counted, "builds", 0)
    use = lambda held, _: held()  # noqa: E731
    other = Holds(0, lambda *_: 0, workers=0)
    kinds = {"cache": "memory", **EVERY_KIND[place]}
    if is_on_disk:
        kinds |= {"cache": tmp_path, "cache_version": 1}
    with Counted(read, use, **kinds) as dataset:
        for scale in (1, 5, 5, 2, 2):
            change(scale)
            assert [int(batch) for batch in dataset] == [scale] * 3
            if not is_alone:
                list(other)
    assert Counted.builds == 9


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_items_of_large_and_of_unusual_containers_are_variables(place, cache):
    rows = [{"weight": 0} for _ in range(1500)]
    held = [
        *(collections.UserDict(a=0), collections.ChainMap({"a": 0})),
        *(bytearray(b"a"), array.array("d", [0])),
    ]

    def use(*_):
        return [
            rows[700]["weight"],
            *(held[0]["a"], held[1]["a"], held[2][0], held[3][0]),
        ]

    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for change in (
            lambda: rows[700].update(weight=1),
            *(lambda: held[0].update(a=1), lambda: held[1].update(a=1)),
            lambda: held[2].__setitem__(0, 1),
            lambda: held[3].__setitem__(0, 1),
        ):
            change()
            assert [batch.tolist() for batch in dataset] == [use()] * 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_a_helper_may_read_the_environment_by_a_name_that_it_is_given(
    cache, place, patch
):
    with NamesOne(0, None, cache=cache, **EVERY_KIND[place]) as dataset:
        for number, other in ((0, 0), (1, 0), (1, 2)):
            patch.setenv("KFD_NUMBER", str(number))
            patch.setenv("KFD_OTHER", str(other))
            assert np.array(list(dataset)).tolist() == [[number, other]] * 3


MODULES_ON_THE_WAY = {
    "an argument": lambda *_: depth_of(conf),
    "a result": lambda *_: depth_of(settings()),
    "an item": lambda *_: sum(depth_of(one) for one in (conf,)),
    "an argument of a library's": lambda *_: next(map(depth_of, [conf])),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("way", MODULES_ON_THE_WAY)
def test_a_module_may_be_given_to_code_that_reads_its_variables(
    way, cache, place, patch
):
    use = MODULES_ON_THE_WAY[way]
    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for depth in (3, 4):
            patch.setattr(conf.Chosen, "depth", depth)
            assert [int(batch) for batch in dataset] == [depth] * 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_flags_and_configurations_of_the_standard_library_are_variables(
    place, cache
):
    held, other = threading.Event(), threading.Event()
    parser = configparser.ConfigParser()
    parser["a"] = {"size": "0"}

    def use(held, _):
        return [held.is_set(), other.is_set(), int(parser["a"]["size"])]

    with Holds(held, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for change in (
            *(held.set, other.set, held.clear),
            lambda: parser["a"].update(size="1"),
            lambda: parser.set("a", "size", "2"),
        ):
            change()
            batches = [batch.tolist() for batch in dataset]
            assert batches == [use(held, 0)] * 3


@pytest.mark.parametrize("kind", PLACES[2:])
def test_workers_start_anew_when_the_former_ones_have_ended(
    kind, patch, tmp_path
):
    kinds = {**EVERY_KIND[kind], "workers": 1}
    with Exclusive(tmp_path / "one", lambda *_: conf.cached(), **kinds) as held:
        for scale in (2, 3, 1):
            conf.rescale(scale)
            assert [int(batch) for batch in held] == [scale] * 3


SET_UP_SCRIPT = """
import collections
import numpy as np
from keras_fastdata import FastPyDataset

TABLE, OPTIONS, ARRAY = None, {"in": {"size": 0}, "level": 0}, np.zeros(2)
ROWS = [[0], {"level": 0}]
QUEUE, GROWN = collections.deque([0], maxlen=1), [[0]]

class Slot:
    __slots__ = ("size", "level")

SLOT = Slot()
SLOT.size = SLOT.level = 0

def helper():
    return helper.size, OPTIONS["level"]

helper.level = 0

class Config:
    size = 0

class Mine(FastPyDataset):
    size = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.epochs = 0

    def __len__(self):
        return 4

    def on_epoch_end(self):
        self.epochs += 1

    def on_worker_start(self):
        global TABLE
        TABLE, OPTIONS["in"]["size"], ARRAY[:], helper.size = 1, 1, 1, 1
        Config.size = Mine.size = ROWS[0][0] = SLOT.size = 1
        QUEUE.append(1)
        GROWN[0].append(1)

    def __getitem__(self, index):
        sizes = [TABLE, OPTIONS["in"]["size"], ARRAY[0], Config.size]
        size, level = helper()
        sizes += [size, self.size, ROWS[0][0], SLOT.size, QUEUE[0]]
        sizes += [GROWN[0][-1]]
        levels = {OPTIONS["level"], ROWS[1]["level"], SLOT.level}
        levels |= {level, helper.level}
        return np.array([[*map(int, sizes), self.epochs, *levels]])

def set_level(level):
    OPTIONS["level"] = ROWS[1]["level"] = SLOT.level = helper.level = level

for method in ("forkserver", "spawn"):
    kinds = {"use_multiprocessing": True, "start_method": method}
    with Mine(workers=2, **kinds) as dataset:
        for epoch in range(3):
            print(*sorted({str(batch.tolist()) for batch in dataset}))
            dataset.on_epoch_end()
            set_level(epoch + 1)
    set_level(0)
"""


def test_what_a_worker_of_a_script_sets_up_stays(tmp_path, zygote):
    path = tmp_path / "script.py"
    path.write_text(SET_UP_SCRIPT)
    ran = zygote.run(path)
    ones = "1, " * 10
    wanted = [f"[[{ones}{epoch}, {epoch}]]" for epoch in range(3)]
    assert ran.stdout.splitlines() == wanted * 2, ran.stderr


@pytest.mark.parametrize("place", ["process", "portable"])
@pytest.mark.parametrize(
    "kind", ["class", "module", "item of a module", "setting"]
)
def test_what_a_worker_sets_up_stays_when_the_dataset_changes(kind, place):
    kinds = EVERY_KIND[place]
    with SetUp(sets_up(kind), lambda held, _: held[1](), **kinds) as dataset:
        for _ in range(3):
            assert [int(batch) for batch in dataset] == [5] * 3
            dataset.changed = True


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "keras" else name
        for name in holders_of_a_number()
    ],
)
def test_what_the_program_edits_is_found_wherever_it_is(name, place, cache):
    read, change = holders_of_a_number()[name]
    kinds = EVERY_KIND[place]
    with Holds(0, lambda *_: read(), cache=cache, **kinds) as dataset:
        for number in (1, 2):
            change(number)
            assert [int(batch) for batch in dataset] == [number] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize("name", SUBCLASSES)
def test_an_edit_of_a_container_of_the_users_class_is_seen(name, place, cache):
    held = SUBCLASSES[name]()
    kinds = EVERY_KIND[place]
    with Holds(held, greatest_in, cache=cache, **kinds) as dataset:
        for number in range(3):
            add_number(held, number)
            assert [int(batch) for batch in dataset] == [number] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
def test_an_array_of_a_module_is_sent_with_its_items(place, cache, patch):
    def use(*_):
        return [*conf.ARRAY.tolist(), *conf.same_array()]

    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for change in (
            lambda: conf.ARRAY.fill(2),
            lambda: conf.ARRAY.__setitem__(0, np.nan),
            lambda: patch.setattr(conf, "ARRAY", np.arange(3)),
            lambda: patch.setattr(conf, "ARRAY", np.zeros(3, bool)),
        ):
            change()
            found = [batch.tolist() for batch in dataset]
            np.testing.assert_array_equal(found, [use()] * 3)
    patch.undo()
    conf.ARRAY[:] = 1


def test_an_array_in_a_namespace_of_a_module_is_sent(patch, caplog):
    with Holds(0, lambda *_: conf.SPACE.mean[0], **PROCESSES) as dataset:
        for number in (2, 3):
            patch.setattr(conf.SPACE, "mean", np.full(2, number))
            assert [int(batch) for batch in dataset] == [number] * 3
    assert "SPACE" not in caplog.text


@pytest.mark.parametrize("is_large", [False, True])
def test_an_array_of_a_module_that_is_too_large_is_said_to_be_lost(
    is_large, patch, caplog
):
    # Before the workers start, so that no change is seen.
    patch.setattr(conf, "ARRAY", np.ones((1 << 17) + is_large))
    with Holds(0, lambda *_: len(conf.ARRAY), **PROCESSES) as dataset:
        list(dataset)
    assert ("`outside_config.ARRAY`" in caplog.text) == is_large


@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize("cache", [None, "memory"])
def test_equal_containers_of_other_types_or_order_are_a_change(place, cache):
    held = [{"a": 1, "b": 2}]

    def use(*_):
        return str(held[0])

    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for new in ({"a": 1.0, "b": 2}, {"b": 2, "a": 1.0}, {"b": True * 2}):
            held[0] = new
            assert [str(batch) for batch in dataset] == [str(new)] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["thread", "process"])
def test_an_object_that_refuses_to_be_looked_into_hides_no_change(place, cache):
    refusing, config = Refusing(), types.SimpleNamespace(scale=0)

    def use(*_):
        return config.scale if type(refusing) is Refusing else -1

    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for scale in (1, 2):
            config.scale = scale
            assert [int(batch) for batch in dataset] == [scale] * 3


def test_enums_and_arrays_have_one_digest():
    array = np.zeros(2)

    class Local(enum.Enum):
        ONE = 1
        f = enum.member(len)

    dataset = Holds(0, lambda *_: (array[0], Local.ONE, Level.EASY))
    digest = sent_digest.digest_of(dataset)
    assert digest is not None
    assert digest == sent_digest.digest_of(dataset)


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["slot", "items", "nested"])
def test_an_attribute_of_an_object_that_code_names_is_a_variable(
    kind, place, cache
):
    thing, holder = holding(kind)

    def size(*_):
        return (holder[0]["key"][0] if kind == "nested" else holder).size

    with Holds(0, size, cache=cache, **EVERY_KIND[place]) as dataset:
        for wanted in (1, 2):
            thing.size = wanted
            assert [int(batch) for batch in dataset] == [wanted] * 3


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_what_the_program_changes_amid_an_epoch_stays_out_of_a_directory(
    place, patch, tmp_path
):
    kinds = {"cache": tmp_path, "cache_version": 1, "max_queue_size": 1}
    for value in (2, 1):
        patch.setattr(conf, "SCALE", 1)
        use = lambda *_: conf.SCALE  # noqa: E731
        found = []
        with Holds(0, use, **kinds, **EVERY_KIND[place]) as dataset:
            for batch in dataset:
                found.append(int(batch))
                patch.setattr(conf, "SCALE", value)
    assert found == [1] * 3


def test_a_setting_without_a_change_is_no_change():
    known = framework_settings.read()
    assert {"keras", "PIL.Image", "PIL.ImageFile"} <= known.keys()
    assert list(framework_settings.changed()) == []


def set_size(size, patch):
    patch.setenv("KERAS_FASTDATA_SIZE", str(size))


def set_argument(size, patch):
    patch.setattr(sys, "argv", ["script.py"] * size)


def set_parsed(size, patch):
    patch.setattr(sys, "argv", ["script.py", f"--size={size}"])


def set_floatx(size, patch):
    patch.setattr(keras.src.backend.config, "_FLOATX", f"float{8 * size}")


OF_PROCESS = {
    "environment": set_size,
    "constant": set_size,
    "arguments": set_argument,
    "parsed": set_parsed,
    "floats": set_floatx,
}


@pytest.mark.parametrize("place", ["inline", "thread", "process"])
@pytest.mark.parametrize("cache", [None, "memory", "directory"])
@pytest.mark.parametrize("kind", OF_PROCESS)
def test_what_a_process_has_been_given_may_change(
    kind, cache, place, patch, tmp_path
):
    if (kind, place) == ("floats", "process"):
        pytest.skip("its workers would import Keras; see `Frameworks`")
    size, set_it = SIZES[kind], OF_PROCESS[kind]
    kinds = dict(EVERY_KIND[place])
    if cache is not None:
        is_memory = cache == "memory"
        kinds["cache"] = cache if is_memory else tmp_path
        kinds["cache_version"] = None if is_memory else 1
    with Holds(0, size, **kinds) as dataset:
        for wanted in (2, 4, 4, 2):
            set_it(wanted, patch)
            assert [int(batch) for batch in dataset] == [wanted] * 3
    if cache == "directory":
        assert len([*tmp_path.glob("*/*.batch")]) == 6
        with Holds(1, size, **kinds) as other:
            assert [int(batch) for batch in other] == [3] * 3


@pytest.mark.parametrize("kind", PLACES)
def test_an_attribute_may_name_an_environment_variable(kind, patch):
    with OfVariable(**EVERY_KIND[kind]) as dataset:
        for sizes in ([1, 2], [3, 2], [3, 4]):
            patch.setenv(OfVariable.NAME, str(sizes[0]))
            patch.setenv(dataset.name, str(sizes[1]))
            assert [batch.tolist() for batch in dataset] == [sizes] * 3


CURVE = None


@pytest.mark.parametrize(
    ("place", "rows"),
    [("inline", 3), ("process", 3), ("inline", 200_000)],
)
def test_a_directory_is_for_one_content_of_a_table_that_the_program_sets(
    place, rows, patch, tmp_path
):
    kinds = {"cache": tmp_path, "cache_version": 1, **EVERY_KIND[place]}
    for number in (1, 2, 1):
        table = pd.DataFrame({"a": np.full(rows, number)})
        patch.setattr(conf, "table_or_none", table)
        use = lambda _, index: conf.table_or_none["a"].to_numpy()[index]  # noqa: E731
        with Holds(0, use, **kinds) as dataset:
            assert [int(batch) for batch in dataset] == [number] * 3
    assert len([*tmp_path.glob("*/*.batch")]) == 6


@pytest.mark.parametrize("place", ["inline", "process"])
def test_a_directory_is_for_one_content_of_an_object_of_a_library(
    place, patch, tmp_path
):
    kinds = {"cache": tmp_path, "cache_version": 1, **EVERY_KIND[place]}
    with Holds(0, lambda *_: conf.table_or_none(0), **kinds) as dataset:
        for scale in (1, 2, 1):
            patch.setattr(conf, "table_or_none", np.poly1d([scale]))
            assert [int(batch) for batch in dataset] == [scale] * 3
    assert len([*tmp_path.glob("*/*.batch")]) == 6


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_objects_of_libraries_that_the_program_sets_stay_out_of_a_directory(
    place, patch, tmp_path, caplog
):
    module, layer = sys.modules[__name__], keras.layers.Rescaling
    patch.setattr(module, "CURVE", layer(1))
    kinds = {"cache": tmp_path, "cache_version": 1, **EVERY_KIND[place]}
    with Holds(0, lambda *_: CURVE.scale, **kinds) as dataset:
        for scale in (1, 2, 2, 1, 1):
            if CURVE.scale != scale:
                patch.setattr(module, "CURVE", layer(scale))
            assert [int(batch) for batch in dataset] == [scale] * 3
    assert len([*tmp_path.glob("*/*.batch")]) == 3
    (message,) = {*caplog.messages}
    assert message == (
        "The cache of Holds is in memory now, because "
        "`test_outside_state.CURVE` has changed: the package cannot tell its "
        "value from others in another run. Keep it in an attribute of the "
        "dataset."
    )


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["inline", "thread", "process"])
def test_a_class_that_code_names_by_a_generic_alias_may_change(
    place, cache, patch
):
    use = lambda *_: conf.IntBox().size  # noqa: E731
    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for size in (1, 2, 2):
            patch.setattr(conf.Box, "size", size)
            assert [int(batch) for batch in dataset] == [size] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["inline", "thread", "process"])
def test_the_code_of_a_function_in_a_module_may_be_replaced(
    place, cache, patch, caplog
):
    use = lambda *_: conf.constant()  # noqa: E731
    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        assert [int(batch) for batch in dataset] == [1] * 3
        patch.setattr(conf.constant, "__code__", (lambda: 2).__code__)
        is_lost = place == "process"
        assert [int(batch) for batch in dataset] == [1 if is_lost else 2] * 3
    said = "set `outside_config.constant`" in caplog.text
    assert said == is_lost


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["inline", "thread", "process"])
def test_a_context_manager_of_the_program_sets_a_variable(place, cache):
    use = lambda *_: conf.Mode.level  # noqa: E731
    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        found = [[int(batch) for batch in dataset]]
        with conf.Mode(3):
            found.append([int(batch) for batch in dataset])
        found.append([int(batch) for batch in dataset])
    assert found == [[1] * 3, [3] * 3, [1] * 3]


@pytest.mark.parametrize("place", ["inline", "thread", "process"])
def test_a_directory_is_for_items_that_the_program_has_set(
    place, patch, tmp_path
):
    def use(*_):
        batch = np.empty(1, int)
        batch[0] = conf.items["size"]  # an item that builds set
        return batch[0]

    kinds = {"cache": tmp_path, "cache_version": 1, **EVERY_KIND[place]}
    for size in (1, 2, 1):  # like three runs
        patch.setitem(conf.items._values, "size", 1)
        conf.items["size"] = size
        with Holds(0, use, **kinds) as dataset:
            assert [int(batch) for batch in dataset] == [size] * 3
    assert len([*tmp_path.glob("*/*.batch")]) == 6


def settings_kept_by(cache):
    @cache
    def get_settings():
        return types.SimpleNamespace(scale=1)

    return get_settings


@pytest.mark.parametrize("place", ["inline", "thread"])
@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize(
    "keep", [functools.cache, functools.lru_cache], ids=["all", "some"]
)
def test_an_object_that_a_cached_function_returns_may_change(
    keep, cache, place
):
    held = settings_kept_by(keep)
    use = lambda get, _: get().scale  # noqa: E731
    with Holds(held, use, cache=cache, **EVERY_KIND[place]) as dataset:
        for scale in (1, 2, 2, 3):
            if scale > 1:
                held().scale = scale
            assert [int(batch) for batch in dataset] == [scale] * 3


@pytest.mark.parametrize(
    "keep", [functools.cache, functools.lru_cache], ids=["all", "some"]
)
def test_a_cached_function_keeps_no_object_if_it_returns_numbers(keep):
    @keep
    def add(*numbers, more=0):
        return sum(numbers) + more

    dataset = Holds(add, lambda add, index: add(index), workers=0)
    for calls in (lambda: add(), lambda: add(1, 2), lambda: add(3, more=4)):
        calls()
        kept = [each for each in variables_of(dataset) if each.is_kept]
        assert [each.is_assigned for each in kept] == [True]


def test_workers_lack_what_changes_in_a_result_of_a_cached_function(caplog):
    held = settings_kept_by(functools.cache)
    use = lambda get, _: get().scale  # noqa: E731
    with Holds(held, use, **EVERY_KIND["process"]) as dataset:
        for scale in (1, 2, 3):
            held().scale = scale
            assert [int(batch) for batch in dataset] == [1] * 3
    assert "scale`, and worker processes do not see it" in caplog.text


CALLS = {
    "none": ((), {}),
    "one": (("b",), {}),
    "keyword": (("b",), {"number": 2}),
}


@pytest.mark.parametrize(
    "place", ["process", pytest.param("portable", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_result_that_the_program_set_before_the_first_epoch_is_said(
    call, is_set, place, patch, caplog
):
    args, kwargs = call
    patch.setattr(
        conf.get_settings(*args, **kwargs), "scale", 2 if is_set else 1
    )
    use = lambda *_: conf.get_settings(*args, **kwargs).scale  # noqa: E731
    with Holds(0, use, **EVERY_KIND[place]) as dataset:
        assert [int(batch) for batch in dataset] == [1] * 3
    shown = "(...)" if args else "()"
    name = f"`outside_config.get_settings{shown}.scale` differs"
    assert (name in caplog.text) == is_set
    assert caplog.text.count("differs between") == is_set


@pytest.mark.parametrize("is_set", [False, True])
def test_a_set_result_of_a_function_in_an_attribute_is_said(is_set, caplog):
    held = settings_kept_by(functools.cache)
    held().scale = 2 if is_set else 1
    use = lambda get, _: get().scale  # noqa: E731
    with Holds(held, use, **EVERY_KIND["process"]) as dataset:
        assert [int(batch) for batch in dataset] == [1] * 3
    assert ("`self.thing().scale` differs" in caplog.text) == is_set


RESULT_SCRIPT = """
import functools, logging, sys, types
import numpy as np
from keras_fastdata import FastPyDataset

logging.basicConfig(stream=sys.stdout, format="%(message)s")

@functools.cache
def get_settings():
    return types.SimpleNamespace(scale=1, table=[1] * 2000)

def scale():
    return get_settings().scale

class Mine(FastPyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array(scale())

for value in (1, 2):
    get_settings().scale = value
    with Mine(workers=2, use_multiprocessing=True) as dataset:
        print(*dataset)
"""


def test_a_set_result_of_a_function_of_the_script_is_said(tmp_path, zygote):
    path = tmp_path / "script.py"
    path.write_text(RESULT_SCRIPT)
    said = zygote.run(path).stdout.splitlines()
    warning = next(line for line in said if "differs" in line)
    said.remove(warning)
    assert said == ["1 1 1 1"] * 2
    assert warning.startswith("`__main__.get_settings().scale` differs")


def test_workers_make_a_lazily_made_object_that_has_not_just_attributes(
    patch, caplog
):
    patch.setattr(conf, "_open", None)
    conf.opened().scale = 2
    use = lambda *_: conf.opened().scale  # noqa: E731
    with Holds(0, use, **EVERY_KIND["process"]) as dataset:
        assert [int(batch) for batch in dataset] == [2] * 3
    assert not caplog.messages


class Mixed(Holds):
    """Counts in the dict that has its scale too."""

    def __getitem__(self, index):
        self.thing["count"] += 1
        return np.asarray(self.thing["scale"])


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_an_item_beside_what_builds_edit_makes_a_cache_invalid(place):
    thing = {"count": 0, "scale": 1}
    kinds = {"cache": "memory", **EVERY_KIND[place]}
    with Mixed(thing, None, **kinds) as dataset:
        for scale in (1, 2, 2, 3):
            thing["scale"] = scale
            assert [int(batch) for batch in dataset] == [scale] * 3
    assert thing["count"] == 9


class Scheduled:
    """Calls the method that the program calls when an object is made."""

    def __init__(self):
        self.__post_init__()

    def __post_init__(self):
        self.set_scale(1)

    def set_scale(self, scale):
        self.scale = scale


def test_init_of_a_class_that_builds_do_not_name_is_the_programs():
    with Holds(Scheduled(), lambda held, _: held.scale) as dataset:
        variables = variables_of(dataset)
    (scale,) = (v for v in variables if v.name == ".self.thing.scale")
    assert not scale.is_assigned


@pytest.mark.parametrize("place", ["inline", "thread"])
@pytest.mark.parametrize("is_held", [True, False])
def test_what_the_program_edits_amid_an_epoch_makes_a_cache_invalid(
    place, is_held
):
    thing = types.SimpleNamespace(size=1)
    kinds = {"cache": "memory", "max_queue_size": 1, **EVERY_KIND[place]}
    use = (lambda held, _: held.size) if is_held else lambda *_: thing.size
    with Holds(thing if is_held else 0, use, **kinds) as dataset:
        for number, _ in enumerate(dataset):
            thing.size = 2 if number else 1
        for _ in range(2):
            assert [int(batch) for batch in dataset] == [2] * 3


def _count_unseen(held, index):
    setattr(held, "count", held.count + 1)  # noqa: B010
    return index


def test_builds_of_another_dataset_change_nothing_that_was_changed_before(
    caplog,
):
    thing = types.SimpleNamespace(size=0)
    use = lambda held, _: held.size  # noqa: E731
    kinds = {"workers": 0, "cache": "memory"}
    with Holds(thing, use, **kinds) as dataset:
        for size in range(1, 5):
            thing.size = size
            with Holds(thing, use, workers=0) as other:
                list(other)
            assert [int(batch) for batch in dataset] == [size] * 3
    assert not caplog.messages


def test_a_cache_that_builds_empty_again_and_again_is_named_once(caplog):
    thing = types.SimpleNamespace(count=0)
    with Holds(thing, _count_unseen, workers=0, cache="memory") as dataset:
        for epoch in range(1, 6):
            assert [int(batch) for batch in dataset] == [0, 1, 2]
            assert thing.count == 3 * epoch
    (warning,) = (r for r in caplog.records if "emptied twice" in r.message)
    assert "`self.thing.count` changed" in warning.message


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_what_the_program_assigns_after_a_break_is_not_named(place, caplog):
    use = lambda held, _: held  # noqa: E731
    with Holds(1, use, cache="memory", **EVERY_KIND[place]) as dataset:
        for number in range(1, 6):
            dataset.thing = number
            for batch in dataset:
                assert int(batch) == number
                break
    assert not caplog.messages


def _kept(place):
    """Settings with which changes that are not noticed show."""
    is_here = place in ("inline", "thread")
    return {**EVERY_KIND[place], "cache": "memory" if is_here else None}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(conf, "NOT_YET"), (conf.config, "not_yet")],
    ids=["module", "object"],
)
def test_a_variable_may_come_and_go(owner, name, place, patch):
    def use(*_):
        return getattr(conf, "NOT_YET", 0) + getattr(conf.config, "not_yet", 0)

    with Holds(0, use, **_kept(place)) as dataset:
        assert [int(batch) for batch in dataset] == [0] * 3
        for value in (1, 2):
            patch.setattr(owner, name, value, raising=False)
            assert [int(batch) for batch in dataset] == [value] * 3
        patch.delattr(owner, name)
        assert [int(batch) for batch in dataset] == [0] * 3


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_first_attribute_that_hides_one_of_the_class_is_a_change(
    place, is_held
):
    thing = conf.Default()
    use = (lambda held, _: held.size) if is_held else lambda *_: thing.size
    with Holds(thing if is_held else 0, use, **_kept(place)) as dataset:
        assert [int(batch) for batch in dataset] == [0] * 3
        thing.size = 1
        assert [int(batch) for batch in dataset] == [1] * 3


@pytest.mark.parametrize("place", PLACES)
def test_what_code_assigns_to_one_object_hides_no_change_of_another(place):
    log, config = types.SimpleNamespace(), types.SimpleNamespace()

    def use(*_):
        item = {"key": types.SimpleNamespace()}
        item["key"].size = log.size = config.size
        return config.size

    with Holds(0, use, **EVERY_KIND[place]) as dataset:
        for size in (1, 2):
            config.size = size
            assert [int(batch) for batch in dataset] == [size] * 3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [10, 300_000])
def test_a_global_array_that_the_program_edits_is_a_variable(place, size):
    table = np.zeros(size)
    with Holds(0, lambda *_: table[3], **EVERY_KIND[place]) as dataset:
        for wanted in (1, 2):
            table[:] = wanted
            assert [int(batch) for batch in dataset] == [wanted] * 3


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_a_container_that_the_builds_fill_leaves_the_cache_valid(place):
    made = {}

    def use(_, index):
        made.setdefault(index, len(made))
        return made[index]

    with Holds(0, use, cache="memory", **EVERY_KIND[place]) as dataset:
        for _ in range(3):
            assert sorted(int(batch) for batch in dataset) == [0, 1, 2]
            made.clear()


def _changes_of_a_function():
    def function(factor=1, *, more=0):
        return factor * function.scale + more

    function.scale = 1
    return function, {
        "__dict__": lambda: setattr(function, "scale", 2),
        "__defaults__": lambda: setattr(function, "__defaults__", (2,)),
        "__kwdefaults__": lambda: function.__kwdefaults__.update(more=1),
    }


@pytest.mark.parametrize("part", ["__dict__", "__defaults__", "__kwdefaults__"])
def test_a_changed_part_of_a_function_reaches_processes(part):
    function, changes = _changes_of_a_function()
    with Holds(function, lambda held, _: held(), **PROCESSES) as dataset:
        assert [int(batch) for batch in dataset] == [1] * 3
        changes[part]()
        assert [int(batch) for batch in dataset] == [2] * 3


def _holders(function):
    """Objects that hold a function, in which no variable is looked for."""
    array = np.empty(1, object)
    array[0] = function
    return {
        "namespace": types.SimpleNamespace(f=function),
        "set": {function},
        "array": array,
        "vectorize": np.vectorize(function),
        "key": {function: 1},
        "many": [function] * 101,
    }


@pytest.mark.parametrize("name", [*_holders(abs)])
def test_a_change_of_code_is_noticed_wherever_an_object_holds_it(name):
    class Config:
        factor = 1

    def read(*_):
        return Config.factor

    def use(holder, _):
        return held_by(holder)()

    holder = _holders(read)[name]
    with Holds(holder, use, **PROCESSES) as dataset:
        for factor in (1, 2):
            Config.factor = factor
            assert [int(batch) for batch in dataset] == [factor] * 3


def test_a_variable_that_the_program_sets_by_a_method_of_the_code_is_sent():
    class Config:
        factor = 1

        @classmethod
        def set_factor(cls, factor):
            cls.factor = factor

    class Reads:
        def __init__(self):
            self.factor = Config.factor

    with Holds((Config, Reads), made_by_second, **PROCESSES) as dataset:
        for factor in (1, 2):
            Config.set_factor(factor)
            assert [int(batch) for batch in dataset] == [factor] * 3


def test_what_is_sent_depends_on_small_data_and_on_code():
    thing = {"data": [1], "array": np.zeros(1 << 18), "large": [0] * 2000}
    dataset = Holds(thing, lambda *_: 0)
    known = {sent_digest.digest_of(dataset)}
    assert {sent_digest.digest_of(dataset)} == known
    for count, edit in enumerate(
        [
            lambda: thing["data"].append(2),
            lambda: thing["array"].fill(1),
            lambda: thing.update(code=lambda: 1),
        ]
    ):
        edit()
        known.add(sent_digest.digest_of(dataset))
        assert len(known) == count + 2
    thing["large"][1500] = 1
    assert sent_digest.digest_of(dataset) in known


def _double(array):
    array *= 2


_LARGE_ARRAYS = {
    "two of three colours": (
        lambda: np.ones((1 << 11, 32, 32, 3), "uint8"),
        lambda array: _double(array[..., 1:]),
    ),
    "a column": (
        lambda: np.ones((1 << 16, 24), "float32"),
        lambda array: _double(array[:, 7]),
    ),
    "images of PyTorch's layout": (
        lambda: np.ones((50, 3, 64, 64), "float32").transpose(0, 2, 3, 1),
        _double,
    ),
    "every other column": (
        lambda: np.ones((80_000, 24), "float32")[:, ::2],
        _double,
    ),
    "long texts": (
        lambda: np.full(30, "a" * 100_000),
        lambda array: array[::2].fill("b"),
    ),
    "the end of bytes": (
        lambda: bytearray(1 << 21),
        lambda array: array.__setitem__(slice(1 << 20, None), b"1" * (1 << 20)),
    ),
    "the end of an array of Python": (
        lambda: array.array("d", [1]) * (1 << 18),
        lambda array: _double(np.frombuffer(array)[1 << 17 :]),
    ),
}


_SMALL_EDITS = {
    "an item": (
        lambda: np.zeros((1 << 11, 32, 32, 3), "uint8"),
        lambda array: array.__setitem__((1234, 5, 6, 1), 7),
    ),
    "two items that change places": (
        lambda: np.arange(1 << 18, dtype="float64"),
        lambda array: array.__setitem__([3, 100_000], array[[100_000, 3]]),
    ),
    "an item of an array that is not in one piece": (
        lambda: np.zeros((99, 999, 24), "float32")[1:, ::2].transpose(2, 0, 1),
        lambda array: array.__setitem__((1, 2, 3), 1),
    ),
    "the signs of an even number of items": (
        lambda: np.ones((1 << 14, 16)),
        lambda array: array.__setitem__(slice(1024), -array[:1024]),
    ),
    "a field of a record": (
        lambda: np.zeros(99_999, [("x", "f8"), ("name", "S5")]),
        lambda array: array["name"].__setitem__(54_321, b"a"),
    ),
    "the last byte": (
        lambda: bytearray((1 << 21) + 1),
        lambda array: array.__setitem__(-1, 1),
    ),
}


@pytest.fixture(params=["thread", "process"])
def place(request):
    return PROCESSES if request.param == "process" else {"workers": 2}


def _assert_that_an_edit_reaches_workers(large, edit, place):
    def use(held, _):
        return zlib.crc32(bytes(held))

    before = zlib.crc32(bytes(large))
    with Holds(large, use, **place) as dataset:
        assert [int(batch) for batch in dataset] == [before] * 3
        edit(large)
        after = zlib.crc32(bytes(large))
        assert after != before
        assert [int(batch) for batch in dataset] == [after] * 3


@pytest.mark.parametrize("name", {**_LARGE_ARRAYS, **_SMALL_EDITS})
def test_an_edit_of_a_large_array_reaches_workers(name, place):
    make, edit = (_LARGE_ARRAYS | _SMALL_EDITS)[name]
    _assert_that_an_edit_reaches_workers(make(), edit, place)


@pytest.mark.parametrize("name", _LARGE_ARRAYS)
def test_an_edit_of_a_part_of_an_array_beyond_the_limit_reaches_workers(
    name, place, monkeypatch
):
    monkeypatch.setattr(sent_digest, "MOST_BYTES", 1 << 20)
    make, edit = _LARGE_ARRAYS[name]
    _assert_that_an_edit_reaches_workers(make(), edit, place)


def test_arrays_are_read_whole_up_to_a_limit_for_all_of_them(monkeypatch):
    monkeypatch.setattr(sent_digest, "MOST_BYTES", 12 << 20)
    arrays = [np.zeros(1 << 20) for _ in range(4)]  # 8 MiB each
    dataset = Holds(arrays, lambda *_: 0)
    before = sent_digest.digest_of(dataset)
    arrays[1][1] = 1  # of a sample: between its first and second items
    assert sent_digest.digest_of(dataset) == before
    arrays[1][:] = 1
    assert sent_digest.digest_of(dataset) != before
    before = sent_digest.digest_of(dataset)
    arrays[0][1] = 1
    assert sent_digest.digest_of(dataset) != before
    before = sent_digest.digest_of(dataset)
    arrays[3][:] = 1  # nothing is left to read it
    assert sent_digest.digest_of(dataset) == before


def test_threads_read_arrays_whole_up_to_a_limit_for_all_of_them(monkeypatch):
    monkeypatch.setattr(sent_digest, "MOST_BYTES", 12 << 20)
    arrays = [np.zeros(1 << 20) for _ in range(3)]  # 8 MiB each
    small = [np.zeros(1 << 17) for _ in range(9)]  # 1 MiB each
    dataset, state = Holds([*arrays, *small], lambda *_: 0), OutsideState()

    def is_noticed(edited, where):
        state.look(dataset, is_shared=True, is_here=True)
        assert not state.notice_changes()
        edited[where] = 1
        return bool(state.notice_changes())

    assert is_noticed(arrays[0], 1)
    assert not is_noticed(arrays[2], 1)  # between two items of a sample
    assert is_noticed(arrays[2], slice(None))
    assert is_noticed(small[8], 1)


@pytest.mark.parametrize(
    "before",
    [
        [f"review {n} was a good film " * 60 for n in range(800)],
        [[*range(n, n + 1000)] for n in range(1000)],
    ],
    ids=["texts", "numbers"],
)
def test_much_data_before_an_array_hides_no_edit_of_it(before):
    scores = np.zeros(300_000)
    held = {"before": before, "scores": scores}
    with Holds(held, lambda held, _: held["scores"][1], **PROCESSES) as dataset:
        for number in range(3):
            scores[1] = number
            assert [int(batch) for batch in dataset] == [number] * 3


class HasName:
    name = 1


_METHODS_OF_PYTHON = {
    "array": (np.ones(9), "__getitem__", 3, _double),
    "items of an array": (np.ones(9), "take", 3, _double),
    "dict": ({3: 1}, "get", 3, lambda held: held.update({3: 2})),
    "list": ([1] * 9, "__getitem__", 3, lambda held: held.insert(3, 2)),
    "object": (
        *(HasName(), "__getattribute__", "name"),
        lambda held: setattr(held, "name", 2),
    ),
}


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("name", _METHODS_OF_PYTHON)
def test_an_edit_of_what_a_method_of_python_belongs_to_is_seen(
    name, cache, place
):
    owner, method, key, edit = copy.deepcopy(_METHODS_OF_PYTHON[name])
    method = getattr(owner, method)

    def use(held, _):
        return int(held(key))

    with Holds(method, use, cache=cache, **place) as dataset:
        assert [int(batch) for batch in dataset] == [1] * 3
        edit(owner)
        assert [int(batch) for batch in dataset] == [2] * 3


@pytest.mark.parametrize("place", ["data", "code"])
def test_the_code_of_much_data_and_the_first_of_much_code_are_compared(place):
    texts = [str(number) * 1000 for number in range(1000)]
    scale = [1]

    def use(*_):
        return scale, place == "code" and texts

    dataset = Holds(texts if place == "data" else 0, use)
    before = sent_digest.digest_of(dataset)
    assert before == sent_digest.digest_of(dataset)
    scale[0] = 2
    assert before != sent_digest.digest_of(dataset)


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_of_a_function_or_a_namespace_is_a_variable(kind, cache):
    def function():
        return function.factor + space.more

    function.factor, space = 1, types.SimpleNamespace(more=1)
    with Holds(
        function, lambda held, _: held(), cache=cache, **KINDS[kind]
    ) as dataset:
        assert [int(batch) for batch in dataset] == [2] * 3
        function.factor = 2
        assert [int(batch) for batch in dataset] == [3] * 3
        space.more = 3
        assert [int(batch) for batch in dataset] == [5] * 3


def test_a_class_registered_with_another_one_is_so_in_processes():
    class Base(metaclass=abc.ABCMeta):  # noqa: B024
        pass

    class Other:
        pass

    def use(kinds, _):
        return isinstance(kinds[1](), kinds[0])

    with Holds((Base, Other), use, **PROCESSES) as dataset:
        assert [int(batch) for batch in dataset] == [0] * 3
        Base.register(Other)
        assert [int(batch) for batch in dataset] == [1] * 3


IN_NO_MODULE = """
import numpy as np
from keras_fastdata import FastPyDataset

SCALE = 1
RNG = np.random.default_rng(0)

def draw():
    return SCALE, RNG.integers(2**60)

class Mine(FastPyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array(draw())
"""


@pytest.mark.parametrize("names", [{"__name__": "cells"}, {}])
def test_the_globals_of_code_that_exec_ran_are_sent_and_seeded(names):
    names = {**names}
    exec(IN_NO_MODULE, names)
    epochs = []
    for place in ({"workers": 0}, PROCESSES):
        with names["Mine"](seed=1, **place) as dataset:
            for scale in (1, 2):
                names["SCALE"] = scale
                epochs.append([batch.tolist() for batch in dataset])
    inline, processes = epochs[:2], epochs[2:]
    assert processes == inline
    assert [scale for scale, _ in inline[1]] == [2] * 4


# What a module has, and what the program sets in its place.
_VALUES = {
    "date": (datetime.date(2020, 1, 1), datetime.date(2021, 2, 3)),
    "time zone": (datetime.UTC, zoneinfo.ZoneInfo("Asia/Tokyo")),
    "time stamp": tuple(map(pd.Timestamp, ("2020", "2021"))),
    "decimal": (decimal.Decimal(1), decimal.Decimal("1.5")),
    "range": (range(3), range(4)),
    "pattern": (re.compile("a"), re.compile("b")),
    "dtype": (np.dtype("f4"), np.dtype("f2")),
    "getter": (operator.itemgetter(0), operator.itemgetter(1)),
    "buffer": (bytearray(b"a"), bytearray(b"b")),
    "standard array": (array.array("d", [1]), array.array("d", [2])),
    "whole number of an enum": (conf.Level.LOW, conf.Level.HIGH),
    "text of an enum": (conf.Word.A, conf.Word.B),
    "named tuple": (conf.Pair(1, 2), conf.Pair(datetime.date(2021, 1, 1), 3)),
    "list of dates": ([datetime.date(2020, 1, 1)], [datetime.date(2021, 1, 1)]),
    "list of a subclass": (conf.Steps([1]), conf.Steps([2, 3])),
    "number of a subclass": (conf.Number(1), conf.Number(2)),
    "set of a subclass": (conf.Names({1}), conf.Names({2})),
    "dict of a subclass": (conf.Attributes(a=1), conf.Attributes(a=2)),
    "table": (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})),
    "large list": (list(range(2000)), list(range(1, 2001))),
    "long text": ("a" * 100_000, "b" * 100_000),
    "list of objects": ([conf.Step(1)], [conf.Step(1), conf.Step(2)]),
    "frozen object": (conf.Frozen(conf.Pair(1, 2)), conf.Frozen([conf.Step])),
    "index of a table": (
        pd.DataFrame({"a": [1, 2]}),
        pd.DataFrame({"a": [1, 2]}, index=[1, 0]),
    ),
    "row of a table": (
        pd.DataFrame({"a": [0] * 5000}),
        pd.DataFrame({"a": [*[0] * 4999, 1]}),
    ),
    "last item of a large list": ([*range(2000)], [*range(1999), 0]),
    "array of texts": (
        np.array(["a"] * 500, object),
        np.array([*["a"] * 499, "b"], object),
    ),
    "end of a text": ("a" * 100_000, "a" * 99_999 + "b"),
    "masked array": (np.ma.array([1, 2]), np.ma.array([1, 2], mask=[0, 1])),
    "polynomial": (np.poly1d([1]), np.poly1d([2])),
    "ufunc": (np.sin, np.cos),
    "function": (np.sum, np.mean),
}
# Likewise, of those that do not reach processes.
_OTHER_VALUES = {
    "large table": (
        pd.DataFrame({"a": np.arange(200_000)}),
        pd.DataFrame({"a": np.arange(1, 200_001)}),
    ),
    "very long text": ("a" * 2_000_000, "b" * 2_000_000),
}


class UsesValues(FastPyDataset):
    held = None

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.array(repr((conf.value, conf.held.value, self.held)))


def _as_float(array):
    array.dtype = "f8"


def _with_other_names(array):
    array.dtype.names = "x", "y"


@pytest.mark.parametrize(
    ("dtype", "change"),
    [("i8", _as_float), ([("a", "i4"), ("b", "i4")], _with_other_names)],
    ids=["dtype", "names"],
)
@pytest.mark.parametrize("has_it", ["module", "attribute"])
@pytest.mark.parametrize(
    "kind",
    [{"workers": 0, "cache": "memory"}, PROCESSES],
    ids=["cache", "process"],
)
def test_a_dtype_that_is_changed_in_place_reaches_every_build(
    kind, has_it, dtype, change, patch
):
    array = np.zeros(3, dtype)
    patch.setattr(conf, "value", array if has_it == "module" else None)
    with UsesValues(**kind) as dataset:
        dataset.held = array if has_it == "attribute" else None
        for _ in range(2):
            expected = repr((conf.value, conf.held.value, dataset.held))
            assert [str(batch) for batch in dataset] == [expected]
            change(array)


@pytest.mark.parametrize("what", [*_VALUES, *_OTHER_VALUES])
def test_a_value_that_the_program_sets_before_the_first_epoch_is_not_lost(
    what, patch, caplog
):
    """A worker begins with another value of the same type."""
    first, value = {**_VALUES, **_OTHER_VALUES}[what]
    patch.setattr(sys, "meta_path", [*sys.meta_path])
    state, dataset = OutsideState(), UsesValues()
    for at_import, is_other in ((value, False), (first, True)):
        patch.setattr(conf, "value", value)
        patch.setattr(conf.held, "value", value)
        state.look(dataset, is_shared=False)
        sent = cloudpickle.dumps(state.told)
        patch.setattr(conf, "value", copy.copy(at_import))
        patch.setattr(conf.held, "value", copy.copy(at_import))
        caplog.clear()
        patch.setattr(told_state, "_received", told_state._Received())
        cloudpickle.loads(sent)  # as in a new worker
        told_state.finish()
        is_lost = is_other and what in _OTHER_VALUES
        assert (repr(conf.value) == repr(value)) is not is_lost
        assert (repr(conf.held.value) == repr(value)) is not is_lost
        assert len(caplog.messages) == 2 * is_lost


@pytest.mark.parametrize(
    "make",
    [
        lambda number: [number],
        lambda number: {"a": number},
        lambda number: np.full(2, number),
        conf.Config,
        lambda number: conf.Attributes(depth=number),
    ],
    ids=["list", "dict", "array", "object", "dict of a subclass"],
)
def test_names_of_one_object_may_get_objects_of_their_own(make, patch):
    patch.setattr(sys, "meta_path", [*sys.meta_path])
    patch.setattr(told_state, "_received", told_state._Received())
    state, dataset = OutsideState(), UsesValues()
    patch.setattr(conf, "value", make(2))
    patch.setattr(conf.held, "value", make(3))
    state.look(dataset, is_shared=False)
    sent = cloudpickle.dumps(state.told)
    one = make(1)
    patch.setattr(conf, "value", one)
    patch.setattr(conf.held, "value", one)
    cloudpickle.loads(sent)  # as in a new worker
    told_state.finish()
    assert repr(conf.value) == repr(make(2))
    assert repr(conf.held.value) == repr(make(3))


def test_slots_with_default_values_keep_their_own(caplog):
    """`dataclass` makes two classes then, of one name."""
    use = lambda thing, _: thing.scale + conf.other_frozen_slots.scale  # noqa: E731
    with Holds(conf.FrozenSlots(10), use, **PROCESSES) as dataset:
        assert [int(batch) for batch in dataset] == [17] * 3
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_attributes_of_a_class_may_refuse_to_be_asked(kind):
    with HasAttributes(**EVERY_KIND[kind]) as dataset:
        assert [int(batch) for batch in dataset] == [1, 1]


@pytest.mark.parametrize("kind", ["layer", "model"])
def test_weights_that_differ_in_a_worker_are_another_kind(kind):
    def make(number):
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        layer.set_weights([np.full((2, 1), number), np.zeros(1)])
        if kind == "layer":
            return layer
        return keras.Sequential([keras.Input((2,)), layer])

    assert kind_of(make(1)) == kind_of(make(1)) != kind_of(make(2))
    assert kind_of(keras.layers.Rescaling(2)) is not None


def test_weights_of_pytorch_that_differ_are_another_kind():
    torch = pytest.importorskip("torch")

    def make(number):
        linear = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(linear.weight, number)
        torch.nn.init.zeros_(linear.bias)
        return linear

    assert kind_of(make(1)) == kind_of(make(1)) != kind_of(make(2))
    assert not can_be_told(make(1))


def test_random_generators_in_an_object_of_a_library_count_as_equal():
    def make(size):
        tool = types.SimpleNamespace(size=size, rng=np.random.default_rng())
        return functools.partial(max, tool, random.Random())

    assert digest_of(make(1)) == digest_of(make(1)) != digest_of(make(2))
    assert digest_of(make(1)) is not None


def test_large_sets_are_told_apart_by_all_of_their_items():
    names = [*map(str, range(2000))]
    assert kind_of({*names}) == kind_of({*reversed(names)})
    assert kind_of({*names}) != kind_of({*names[1:], "a"})


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [(n, [n]) for n in range(1500)], lambda held: held.reverse()),
        (
            lambda: [{"id": n} for n in range(1500)],
            lambda held: held[1400].update(id=7),
        ),
        (
            lambda: {np.int64(n): np.full(2, n) for n in range(9)},
            lambda held: held.update({np.int64(4): np.full(2, 99)}),
        ),
        (
            lambda: {datetime.date(2020, 1, n + 1): [n] for n in range(9)},
            lambda held: held.update({datetime.date(2020, 1, 5): [99]}),
        ),
    ],
    ids=["shuffled", "relabeled", "keys of numpy", "dates"],
)
def test_a_container_is_the_programs_as_a_whole(
    make, change, is_first, kind, patch
):
    """Of more than 1,000 items, or whose items have no path."""
    held = make()
    patch.setattr(conf, "LARGE", held)

    def use(*_):
        values = conf.LARGE
        values = values.values() if isinstance(values, dict) else values
        return np.frombuffer(repr([*values]).encode(), np.uint8)

    with Holds(0, use, **EVERY_KIND[kind]) as dataset:
        if not is_first:
            list(dataset)
        change(held)
        dataset.mark_changed()  # items from 1,000 on are not compared
        assert all(np.array_equal(batch, use()) for batch in dataset)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("is_named", [False, True])
def test_an_object_in_an_object_of_a_library_may_be_edited(kind, is_named):
    step = conf.Step(1)
    held = pipeline.Pipeline([("mine", step)] if is_named else [step])

    def use(held, _):
        (found,) = held.steps
        return (found[1] if is_named else found).size

    with Holds(held, use, **EVERY_KIND[kind]) as dataset:
        for size in (1, 2, 3):
            step.size = size
            assert [int(batch) for batch in dataset] == [size] * 3


CIRCLE_VALUES = "import circle_users\nSTEP = None\nSTEPS = {}\n"
CIRCLE_USERS = """
import circle_values
import dataclasses
import numpy as np
from keras_fastdata import FastPyDataset

class FirstStep:
    def __init__(self, size):
        self.size = size

@dataclasses.dataclass(frozen=True)
class NextStep:
    size: int
    step: FirstStep

class Uses(FastPyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        held = circle_values.STEP, circle_values.STEPS["a"].step
        return np.array([step.size for step in held])
"""


def test_a_value_may_need_a_module_that_imports_its_own(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "circle_values.py").write_text(CIRCLE_VALUES)
    (tmp_path / "circle_users.py").write_text(CIRCLE_USERS)
    values = importlib.import_module("circle_values")
    users = importlib.import_module("circle_users")
    with users.Uses(**PROCESSES) as dataset:
        for size in (3, 5):
            values.STEP = users.FirstStep(size)
            values.STEPS["a"] = users.NextStep(1, users.FirstStep(size + 1))
            assert [b.tolist() for b in dataset] == [[size, size + 1]] * 3
    assert not caplog.text
    for name in ("circle_values", "circle_users"):
        sys.modules.pop(name)


def test_only_the_dataset_of_an_iterator_in_an_attribute_is_searched():
    with Holds(1, lambda held, _: held, workers=1) as inner:
        iterator = iter(inner)
        with Holds(iterator, lambda held, _: next(held), workers=0) as dataset:
            assert int(next(iter(dataset))) == 1
            names = [variable.name for variable in variables_of(dataset)]
            steps = [step.way() for step in reachable(dataset)]
    assert ".self.thing._dataset.thing" in names
    found = {one.name for way in steps for one in way}
    assert not [name for name in names if "_loader" in name]
    assert found.isdisjoint({"._loader", "._epoch"})


def test_a_decorator_of_wrapt_may_be_what_code_refers_to():
    wrapt = pytest.importorskip("wrapt")

    @wrapt.decorator
    def twice(wrapped, instance, args, kwargs):
        return 2 * wrapped(*args, **kwargs)

    class Tool:
        @twice
        def use(self, number):
            return number

    def use(_, index):
        return Tool().use(index) if twice else 0

    with Holds(0, use, workers=0) as dataset:
        assert [int(batch) for batch in dataset] == [0, 2, 4]
    assert list(names_of(twice.__code__, None).imported) == []


# -- settings that have no name where they are used ----------------------------


def _loaded_by_path():
    path = outside_package.inner.__file__
    spec = importlib.util.spec_from_file_location("no_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


by_path = _loaded_by_path()


def _of_a_function(*_):
    return outside_function.scale


def _of_a_class(*_):
    return outside_class.scale


def _kept_by_a_class(*_):
    return outside_class.kept_scale


def _of_an_object(*_):
    return outside_object.scale


def _in_a_ufunc(*_):
    return int(outside_wrappers.ufunc(1))


def _in_a_key(*_):
    first, *_ = sorted([1, -1], key=outside_wrappers.key)
    return -first


def _in_a_weak_method(*_):
    return outside_wrappers.method()()


def _in_a_weak_dict(*_):
    return outside_wrappers.values["scaling"].scale()


def _of_a_package(*_):
    return outside_package.scaled(1)


def _of_a_path(*_):
    return by_path.scale


def _of_a_made_module(*_):
    return outside_made.scale_made()


def _in_metadata(*_):
    field, _ = dataclasses.fields(outside_wrappers.Options)
    return field.metadata["change"](1)


def _in_an_annotation(*_):
    hints = typing.get_type_hints(outside_wrappers.Options, include_extras=True)
    return hints["length"].__metadata__[0](1)


def _in_wrapt(*_):
    return outside_wrapt.one()


def _by_getattr(*_):
    return getattr(outside_text, "".join(("sc", "ale")))


def _by_vars(*_):
    return vars(outside_text)["".join(("sc", "ale"))]


def _by_dict(*_):
    return outside_text.__dict__["".join(("sc", "ale"))]


def _by_function(*_):
    return getattr(outside_text, "".join(("sc", "ale", "d")))(1)


def _by_eval(*_):
    return eval("outside_text.scale")


def _by_query(*_):
    table = pd.DataFrame({"number": [-1, 1]})
    return table.query("number == @outside_text.scale").number.item()


def _by_sys_modules(*_):
    return sys.modules["outside_text"].scale


def _of_globals(*_):
    return outside_text.of_globals()


def _of_modules(*_):
    return outside_text.of_modules()


_BY_TEXT = (
    *(_by_getattr, _by_vars, _by_dict, _by_function),
    *(_of_globals, _of_modules, _by_eval, _by_query, _by_sys_modules),
)
_SETTERS = {
    **dict.fromkeys(
        _BY_TEXT, functools.partial(setattr, outside_text, "scale")
    ),
    _in_wrapt: functools.partial(setattr, outside_wrapt, "scale"),
    _of_a_package: functools.partial(setattr, outside_package.inner, "scale"),
    _of_a_path: functools.partial(setattr, by_path, "scale"),
    _of_a_made_module: functools.partial(setattr, outside_made.made, "scale"),
    _of_a_function: lambda scale: outside_function.update(scale=scale),
    _of_a_class: functools.partial(setattr, outside_class, "scale"),
    _kept_by_a_class: functools.partial(setattr, outside_class, "kept_scale"),
    _of_an_object: functools.partial(setattr, outside_object, "scale"),
}


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "read",
    [
        *(_of_a_function, _of_a_class, _kept_by_a_class, _of_an_object),
        *(_of_a_package, _of_a_path, _of_a_made_module),
        *(_in_metadata, _in_an_annotation),
        *(_in_wrapt, *_BY_TEXT),
        *(_in_a_ufunc, _in_a_key, _in_a_weak_method, _in_a_weak_dict),
    ],
)
def test_a_setting_that_a_module_makes_is_as_it_is_now(read, place, cache):
    set_scale = _SETTERS.get(read, outside_wrappers.set_scale)
    # The dataset does not begin with what the import gives.
    set_scale(-1)
    with Holds(0, read, cache=cache, **EVERY_KIND[place]) as dataset:
        for scale in (-1, 1, -1):
            set_scale(scale)
            assert [int(batch) for batch in dataset] == [scale] * 3


@pytest.mark.parametrize("read", [_of_a_class, _kept_by_a_class])
def test_a_directory_is_for_the_setting_of_a_module_of_a_class(read, tmp_path):
    place = {"workers": 0, "cache": tmp_path, "cache_version": 1}
    with Holds(0, read, **place) as dataset:
        for scale in (-1, 1, -1):
            _SETTERS[read](scale)
            assert [int(batch) for batch in dataset] == [scale] * 3


def _draw_of_a_package(*_):
    return outside_package.draw()


def _draw_of_a_path(*_):
    return by_path.draw()


def _draw_of_a_weak_reference(*_):
    return outside_wrappers.values["scaling"].draw()


def _draw_by_dict(*_):
    return outside_text.__dict__["".join("rng")].random()


def _draw_of_globals(*_):
    return outside_text.draw_of_globals()


@pytest.mark.parametrize(
    "draw",
    [
        *(_draw_of_a_package, _draw_of_a_path, _draw_of_a_weak_reference),
        *(_draw_by_dict, _draw_of_globals),
    ],
)
def test_a_generator_behind_such_code_is_seeded(draw):
    drawn = []
    for workers in (0, 1, 2):
        places = {"workers": workers, "use_multiprocessing": workers > 0}
        with Holds(0, draw, seed=1, **places) as dataset:
            drawn.append([float(batch) for batch in dataset])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == 3


class Referred:
    """Can be referred to weakly."""

    value = 0

    def get(self):
        return self.value


_WEAKLY = {
    "reference": (weakref.ref, lambda held: held().value),
    "proxy": (weakref.proxy, lambda held: held.value),
    "method": (
        lambda referred: weakref.WeakMethod(referred.get),
        lambda held: held()(),
    ),
    "dict": (
        lambda referred: weakref.WeakValueDictionary(it=referred),
        lambda held: held["it"].value,
    ),
}


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("inline", name) for name in _WEAKLY),
        *(("thread", name) for name in _WEAKLY),
        ("process", "proxy"),
    ],
)
def test_an_edit_of_what_a_weak_reference_refers_to_is_seen(name, place, cache):
    refer, read = _WEAKLY[name]
    referred = Referred()
    use = {"use": lambda held, _: read(held), "cache": cache}
    with Holds(refer(referred), **use, **EVERY_KIND[place]) as dataset:
        for value in range(3):
            referred.value = value
            assert [int(batch) for batch in dataset] == [value] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
def test_what_the_program_sets_in_a_library_is_there(place, cache, monkeypatch):
    class Mine:
        value = 3

    def use(*_):
        mine = zoneinfo.ZoneInfoNotFoundError
        return [math.sqrt(4.0), np.whole(2.9), mine.value]

    monkeypatch.setattr(np, "whole", int, raising=False)
    monkeypatch.setattr(math, "sqrt", lambda number: number)
    monkeypatch.setattr(zoneinfo, "ZoneInfoNotFoundError", Mine)
    with Holds(0, use, cache=cache, **EVERY_KIND[place]) as dataset:
        assert [batch.tolist() for batch in dataset] == [[4, 2, 3]] * 3
        monkeypatch.setattr(np, "whole", float)
        monkeypatch.setattr(math, "sqrt", lambda number: -number)
        assert [batch.tolist() for batch in dataset] == [[-4, 2.9, 3]] * 3


def _what_may_be_deleted(*_):
    limit = getattr(outside_text, "LIMIT", -1)
    return [hasattr(outside_text, "FLAG"), limit, outside_text.options.extent]


def _member(*_):
    return dict(inspect.getmembers(outside_text))["".join(("sc", "ale"))]


def _names_found(*_):
    return ["FLAG" in dir(outside_text), "LIMIT" in dir(outside_text)]


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
def test_what_dir_and_getmembers_find_is_seen(place, cache, monkeypatch):
    module = outside_text
    more = {"cache": cache, **EVERY_KIND[place]}
    monkeypatch.setattr(module, "scale", 3)
    monkeypatch.delattr(module, "LIMIT")
    with (
        Holds(0, _member, **more) as one,
        Holds(0, _names_found, **more) as two,
    ):
        assert [int(batch) for batch in one] == [3] * 3
        assert [batch.tolist() for batch in two] == [[False, False]] * 3
        monkeypatch.setattr(module, "scale", 4)
        monkeypatch.setattr(module, "FLAG", True, raising=False)
        assert [int(batch) for batch in one] == [4] * 3
        assert [batch.tolist() for batch in two] == [[True, False]] * 3


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", PLACES)
def test_a_variable_that_the_program_deletes_is_gone(place, cache, monkeypatch):
    module = outside_text
    monkeypatch.setattr(module, "FLAG", True, raising=False)
    use = {"use": _what_may_be_deleted, "cache": cache}
    with Holds(0, **use, **EVERY_KIND[place]) as dataset:
        assert [batch.tolist() for batch in dataset] == [[1, 100, 5]] * 3
        monkeypatch.delattr(module, "FLAG")
        monkeypatch.delattr(module, "LIMIT")
        monkeypatch.delattr(module.options, "extent")
        for _ in range(2):
            assert [batch.tolist() for batch in dataset] == [[0, -1, 1]] * 3
        monkeypatch.setattr(module, "LIMIT", 3, raising=False)
        assert [batch.tolist() for batch in dataset] == [[0, 3, 1]] * 3
