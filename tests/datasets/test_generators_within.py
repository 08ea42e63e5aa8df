"""Random generators are found and seeded wherever a dataset reaches them."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import random
import threading
import types
import warnings
import weakref

import far_generators
import generator_kinds
import keras
import numpy as np
import pytest
from far_generators import HasMeta, MakesThemLate, Wraps
from generator_kinds import Everywhere, Seedable, Slots
from samples import Holds, equal
from trainers import START_METHODS

from keras_fastdata import (
    FastPyDataset,
    GeneratorDataset,
    LoaderError,
    accelerate,
)
from keras_fastdata.building import attributes, build, seeding
from keras_fastdata.building.held_generators import Search

pytestmark = pytest.mark.usefixtures("kept_forkserver")


def _epochs(dataset, count=2):
    with dataset, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`start_method='fork'`")
        return [list(dataset) for _ in range(count)]


@pytest.fixture(scope="module")
def inline():
    return _epochs(Everywhere(seed=1, workers=0))


def test_every_draw_is_another_one(inline):
    draws = np.concatenate([batch for epoch in inline for batch in epoch])
    assert len(set(draws.tolist())) == len(draws) == 312


@pytest.mark.parametrize("start_method", START_METHODS)
def test_draws_are_the_same_in_workers_of_every_kind(start_method, inline):
    place = {"use_multiprocessing": True, "start_method": start_method}
    assert equal(_epochs(Everywhere(seed=1, workers=2, **place)), inline)


def test_generators_of_the_program_are_left_as_they_were_found(inline):
    outside = [
        generator_kinds.RNG,
        generator_kinds.Everywhere.tool,
        generator_kinds._with_default.__defaults__[0],
    ]

    def states():
        bits = [one.bit_generator for one in outside]
        return [(one.state, one.seed_seq) for one in bits]

    before = states()
    assert equal(_epochs(Everywhere(seed=1, workers=0)), inline)
    assert states() == before


@pytest.mark.parametrize("tries", [1, 1000], ids=["once", "always"])
def test_a_container_that_a_thread_changes_does_not_end_the_search(
    tries, monkeypatch
):
    fails = iter(range(tries))

    def read(container):
        if next(fails, None) is not None:
            raise RuntimeError("deque mutated during iteration")
        return iter(container)

    monkeypatch.setitem(attributes._READERS, collections.deque, read)
    dataset = types.SimpleNamespace(
        parts=collections.deque([np.random.default_rng(1)]),
        rng=np.random.default_rng(2),
    )
    found = Search(dataset).held
    assert len(found) == (2 if tries == 1 else 1)


def _refuse(*_):
    raise AssertionError("a method of the user's class ran")


@pytest.mark.parametrize(
    "kind", [list, tuple, set, frozenset, collections.deque, dict]
)
def test_no_method_of_a_container_runs_amid_the_search(kind):
    methods = ["__iter__", "__len__", "keys", "values", "items", "get"]
    own = type("Own", (kind,), dict.fromkeys(methods, _refuse))
    parts = [(0, np.random.default_rng(1)), (1, np.random.default_rng(2))]
    found = Search(types.SimpleNamespace(parts=own(parts))).held
    assert len(found) == 2


class Named:
    def __repr__(self):
        raise KeyError("a name")


@pytest.mark.parametrize("make", [lambda: lambda: 0, object, Named])
def test_a_stream_does_not_depend_on_the_address_of_a_key(make):
    def streams():
        keys = [make(), (1, make()), "plain"]
        rngs = {key: np.random.default_rng() for key in keys}
        found = Search(types.SimpleNamespace(rngs=rngs)).held
        return keys, [held.key for held in found]

    (_keys, one), (_others, other) = streams(), streams()
    assert one == other
    assert len(set(one)) == 3


def test_those_that_a_wrapped_dataset_holds_are_seeded(inline):
    class Wrapped:
        def __init__(self):
            self.inner = [Slots()]

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.inner[0].rng.integers(2**60, size=1)

    places = {0: {}, 2: {"use_multiprocessing": True}}
    found = [
        _epochs(accelerate(Wrapped(), workers, seed=1, **place))
        for workers, place in places.items()
    ]
    assert equal(*found)
    assert len({int(b[0]) for epoch in found[0] for b in epoch}) == 8


def test_what_a_generator_draws_from_is_seeded_for_its_shard():
    held = np.random.default_rng(0)

    def make(shard_index, num_shards):
        for _ in range(4):
            yield held.integers(2**60, size=1)

    places = {0: {}, 1: {}, 2: {}}
    places[1] = places[2] = {"use_multiprocessing": True}
    found = [
        _epochs(
            GeneratorDataset(
                make, num_shards=2, workers=workers, seed=1, **place
            )
        )
        for workers, place in places.items()
    ]
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    draws = {int(x[0]) for epoch in found[0] for x in epoch}
    assert len(draws) == 16


class _DrawsFromTheModule(FastPyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([generator_kinds.of_the_module()])


def test_a_cache_refuses_batches_drawn_from_a_generator_of_the_module():
    with (
        _DrawsFromTheModule(workers=0, cache="memory") as dataset,
        pytest.raises(LoaderError, match="the generator `generator_kinds"),
    ):
        list(dataset)


@pytest.mark.parametrize(
    "dataset",
    [_DrawsFromTheModule(), Holds(Seedable(), lambda thing, _: thing.draw())],
    ids=["module", "object"],
)
def test_auto_is_told_of_them_before_it_tries_threads(dataset):
    told = []

    class Observer:
        observes = True
        on_global_rng = staticmethod(told.append)

    builder = build.Builder(lambda: dataset, 1, observer=Observer())
    builder.build(0, 0, 0)
    assert len(told) == 1


@pytest.mark.parametrize("is_deep", [False, True])
def test_auto_seeds_a_generator_that_the_first_build_makes(is_deep):
    def draw(thing, _):
        if is_deep:
            return thing.draw()
        if dataset.rng is None:
            dataset.rng = np.random.default_rng(0)
        return dataset.rng.integers(2**60)

    found, told = [], []
    observer = types.SimpleNamespace(observes=True, on_global_rng=told.append)
    for each in (None, observer):
        dataset = Holds(generator_kinds.Lazily(), draw)
        dataset.rng = None
        builder = build.Builder(lambda: dataset, 1, observer=each)  # noqa: B023
        found.append([builder.build(0, index, 0) for index in range(4)])
    assert found[0] == found[1]
    assert "that the dataset holds" in told[0]


@pytest.mark.parametrize(
    "keep",
    [
        far_generators.in_a_dict,
        far_generators.in_a_list,
        far_generators.in_an_object,
        far_generators.in_an_object_in_a_dict,
        far_generators.in_a_dict_in_a_dict,
        far_generators.in_a_tuple_in_a_list,
        far_generators.in_an_object_in_an_object_in_a_dict,
    ],
)
def test_generators_that_later_builds_make_are_seeded(keep):
    expected = _epochs(MakesThemLate(keep, seed=1, workers=0), 3)
    draws = [batch[0] for epoch in expected for batch in epoch]
    assert len(set(draws)) == 12
    for count in (1, 2):
        place = {"workers": count, "use_multiprocessing": True}
        assert equal(_epochs(MakesThemLate(keep, seed=1, **place), 3), expected)


class _Op:
    """Makes its generator when it is first used."""

    def __init__(self, number):
        self.number, self.rng = number, None

    def draw(self):
        if self.rng is None:
            self.rng = np.random.default_rng(self.number)
        return self.rng.random()


class _OpWithoutNone(_Op):
    def __init__(self, number):
        self.number = number

    def __getattr__(self, name):
        if name != "rng":
            raise AttributeError(name)


class _Sample:
    def __init__(self):
        self.crop, self.label = None, "cat"


class _Lacks:
    a = b = c = d = e = None


class _HasSamples(FastPyDataset):
    """Has many objects in which a build could put a generator."""

    def __init__(self, make, op, **kwargs):
        super().__init__(seed=1, **kwargs)
        self.annotations = [make() for _ in range(400)]
        self.transform = types.SimpleNamespace(
            ops=[op(number) for number in range(30)]
        )

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transform.ops[index % 4].draw()


@pytest.mark.parametrize("op", [_Op, _OpWithoutNone])
@pytest.mark.parametrize(
    "make", [lambda: None, lambda: {"crop": None}, _Sample, _Lacks]
)
def test_many_samples_hide_no_generator_that_a_build_makes(make, op):
    place = {"workers": 3, "use_multiprocessing": True}
    expected = _epochs(_HasSamples(make, op, workers=0))
    assert _epochs(_HasSamples(make, op, **place)) == expected


def _draws(thing, use, indices):
    """What a worker draws that builds these batches, by index."""
    dataset = Holds(thing, use)
    builder = build.Builder(lambda: dataset, 1, private=True)
    return {index: float(builder.build(0, index, 0)) for index in indices}


def _late(make_home, name):
    """Draws from a generator that takes the place of `None` from batch 2 on."""

    def draw(thing, index):
        if index < 2:
            return index
        home = make_home(thing)
        if home[name] is None:
            home[name] = np.random.default_rng(0)
        return home[name].random()

    return draw


def _of_a_global(thing, index):
    global _RNG
    if index < 2:
        return index
    if _RNG is None:
        _RNG = np.random.default_rng(0)
    return _RNG.random()


class _WithClassAttribute:
    rng = None

    def draw(self, index):
        if index < 2:
            return index
        if type(self).rng is None:
            type(self).rng = np.random.default_rng(0)
        return type(self).rng.random()


def _of_an_object(thing, index):
    if index < 2:
        return index
    if thing.rng is None:
        thing.rng = Slots()
    return thing.rng.rng.random()


_RNG = None


@pytest.mark.parametrize(
    ("thing", "use"),
    [
        (lambda: types.SimpleNamespace(rng=None), _late(vars, "rng")),
        (lambda: {"rng": None}, _late(lambda thing: thing, "rng")),
        (lambda: [None], _late(lambda thing: thing, 0)),
        (lambda: None, _of_a_global),
        (_WithClassAttribute, _WithClassAttribute.draw),
        (lambda: types.SimpleNamespace(rng=None), _of_an_object),
    ],
    ids=["attribute", "dict", "list", "global", "class", "in an object"],
)
def test_one_that_takes_the_place_of_none_is_seeded(thing, use, monkeypatch):
    found = []
    for indices in ([0, 2, 1, 3], [1, 3, 0, 2]):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "_RNG", None)
            patch.setattr(_WithClassAttribute, "rng", None)
            found.append(_draws(thing(), use, indices))
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 4


def test_one_that_each_build_replaces_within_an_object_is_seeded():
    def draw(thing, _):
        thing.rng = np.random.default_rng(thing.rng.integers(2**40))
        return thing.rng.random()

    def thing():
        return types.SimpleNamespace(rng=np.random.default_rng(0))

    indices = [0, 1, 2, 3]
    assert _draws(thing(), draw, indices) == _draws(
        thing(), draw, reversed(indices)
    )


def test_one_in_an_attribute_of_a_thread_is_seeded():
    def draw(thing, _):
        if not hasattr(thing, "rng"):
            thing.rng = np.random.default_rng(0)
        return thing.rng.random()

    indices = [0, 1, 2, 3]
    assert _draws(threading.local(), draw, indices) == _draws(
        threading.local(), draw, reversed(indices)
    )


@pytest.fixture
def late_torch(monkeypatch):
    """A function that imports torch, which seems not to be imported before."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    found = []
    monkeypatch.setattr(seeding, "loaded_torch", lambda: [None, *found][-1])

    def import_torch():
        found[:] = [torch]
        return torch

    import_torch.undo = found.clear
    return import_torch


@pytest.mark.backend  # the environment of TensorFlow's run has no torch
def test_torch_is_seeded_for_the_batch_that_imports_it(late_torch):
    def draw(thing, _):
        return float(late_torch().rand(()))

    found = []
    for indices in ([0, 1], [1, 0]):
        late_torch.undo()
        found.append(_draws(None, draw, indices))
    assert found[0] == found[1]


def _built_once(make, observes):
    """Whether builds are not repeated that make a generator with `make`."""
    lines = iter(range(100))

    def read(found, index):
        found.setdefault(index, make())
        return next(lines)

    dataset = Holds({}, read)
    observer = types.SimpleNamespace(observes=True, on_global_rng=str)
    builder = build.Builder(
        lambda: dataset, 1, observer=observer if observes else None
    )
    return [builder.build(0, index, 0) for index in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.Philox([1, 2])),
        lambda: np.random.SFC64(),
    ],
    ids=["default_rng", "Philox", "SFC64"],
)
@pytest.mark.parametrize("observes", [False, True])
def test_a_build_that_draws_from_no_new_generator_is_not_repeated(
    make, observes
):
    assert _built_once(make, observes)


@pytest.mark.backend
@pytest.mark.parametrize("observes", [False, True])
def test_a_build_that_imports_torch_and_draws_nothing_is_not_repeated(
    late_torch, observes
):
    assert _built_once(lambda: late_torch().Generator(), observes)


def test_a_container_that_grows_is_searched_only_for_a_generator(monkeypatch):
    searched = []

    class Counts(Search):
        def __init__(self, dataset, *states, **how):
            searched.append(dataset)
            super().__init__(dataset, *states, **how)

    def remembers(memory, index):
        item = np.random.default_rng(0) if index == 3 else index
        memory.setdefault(index, item)
        return index

    monkeypatch.setattr(build.held_generators, "Search", Counts)
    dataset = Holds({}, remembers)
    builder = build.Builder(lambda: dataset, 1, private=True)
    for index in range(6):
        builder.build(0, index, 0)
    assert len(searched) == 3  # before and after the first build, after the 4th


def test_another_generator_changes_no_others_draws():
    def drawn(**also):
        dataset = Holds(
            {"rng": random.Random(0)}, lambda t, _: t["rng"].random()
        )
        vars(dataset).update(also)
        return build.Builder(lambda: dataset, 1).build(0, 0, 0)

    assert drawn() == drawn(a=random.Random(1), z=Slots())


def test_one_that_is_replaced_is_found_again():
    dataset = Holds([random.Random(0)], lambda thing, _: thing[0].random())
    builder = build.Builder(lambda: dataset, 1)
    first = [builder.build(0, index, 0) for index in range(4)]
    dataset.thing = [random.Random(5)]
    assert [builder.build(0, index, 0) for index in range(4)] == first


def test_one_deep_in_a_closed_dataset_may_be_replaced():
    def made():
        rngs = [np.random.default_rng(5)]
        return Holds(rngs, lambda rngs, _: rngs[0].random(), seed=1, workers=0)

    dataset, expected = made(), _epochs(made())
    found = [list(dataset)]
    dataset.close()
    dataset.thing[0] = np.random.default_rng(5)
    assert equal([*found, list(dataset)], expected)


def _made_late(keeps, _):
    if keeps.kept is None:
        keeps.kept = random.Random(5)
    return keeps.kept.random()


def _made_late_within(keeps, _):
    if keeps.kept is None:
        keeps.kept = types.SimpleNamespace(kept=None)
    return _made_late(keeps.kept, _)


def _made_late_in_list(keeps, _):
    if not keeps.kept:
        keeps.kept.append(random.Random(5))
    return keeps.kept[0].random()


def _kept_within(keeps, _):
    return keeps.kept.kept.random() if vars(keeps.kept) else 0


def _forget(keeps):
    keeps.kept = None


def _clear(keeps):
    keeps.kept.clear()


def _replace(keeps):
    keeps.kept = types.SimpleNamespace(kept=random.Random(5))


@pytest.mark.parametrize(
    ("kept", "draw", "change"),
    [
        (None, _made_late, _forget),
        (None, _made_late_within, _forget),
        ([], _made_late_in_list, _clear),
        (types.SimpleNamespace(), _kept_within, _replace),
    ],
)
def test_one_deep_in_a_dataset_may_be_replaced_between_epochs(
    kept, draw, change
):
    def epochs(**place):
        keeps = types.SimpleNamespace(kept=copy.deepcopy(kept))
        with Holds(keeps, draw, seed=1, **place) as dataset:
            for _ in range(4):
                yield list(dataset)
                change(keeps)

    in_processes = [*epochs(workers=2, use_multiprocessing=True)]
    assert equal([*epochs(workers=0)], in_processes)


def test_one_that_is_replaced_at_the_same_address_is_found_again():
    dataset = Holds([random.Random(0)], lambda thing, _: thing[0].random())
    builder = build.Builder(lambda: dataset, 1)
    first = [builder.build(0, index, 0) for index in range(4)]
    address, dataset.thing = id(dataset.thing), None
    lists = [[random.Random(5)]]
    while id(lists[-1]) != address and len(lists) < 1000:
        lists.append([random.Random(5)])
    dataset.thing = lists[-1]
    assert [builder.build(0, index, 0) for index in range(4)] == first


def test_streams_of_objects_in_a_set_do_not_depend_on_its_order():
    kinds = [type(name, (Slots,), {}) for name in "ABCDE"]

    def streams():
        parts = {kind() for kind in kinds}
        found = Search(types.SimpleNamespace(parts=parts)).held
        keys = {id(held.generator.value): held.key for held in found}
        return {type(part): keys[id(part.rng)] for part in parts}, parts

    made = [streams() for _ in range(20)]  # all at other addresses
    assert all(found == made[0][0] for found, _ in made)
    assert len(set(made[0][0].values())) == 5


def test_a_build_looks_for_generators_once_where_there_are_none(monkeypatch):
    searched = []

    class Counts(Search):
        def __init__(self, dataset, *states, **how):
            searched.append(dataset)
            super().__init__(dataset, *states, **how)

    monkeypatch.setattr(build.held_generators, "Search", Counts)
    dataset = Holds([1], lambda thing, _: len(thing))
    builder = build.Builder(lambda: dataset, 1, private=True)
    for index in range(5):
        builder.build(0, index, 0)
    assert len(searched) == 2  # once more after the first build


def test_a_search_is_bounded_and_asks_nothing_of_what_it_meets():
    class Asked:
        def __getattr__(self, name):
            raise AssertionError(name)

        @property
        def rng(self):
            raise AssertionError

    deep = []
    for _ in range(100_000):
        deep = [deep]
    dataset = Holds([Asked(), deep, [[]] * 10**6, np.zeros(10**6)], len)
    dataset.rngs = [random.Random(0)]
    dataset.thing.append(dataset)
    assert [held.path for held in Search(dataset).held] == [".rngs[0]"]


def test_a_search_passes_over_what_has_no_class(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(1))
    gone = weakref.proxy(Seedable())
    with np.load(tmp_path / "a.npz") as file:
        dataset = Holds([gone, file, random.Random(0)], len)
        assert [held.path for held in Search(dataset).held] == [".thing[2]"]


def test_a_search_of_a_dataset_that_is_a_dict_builds_no_batch():
    class Parts(FastPyDataset, dict):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full(2, dict.__getitem__(self, index))

    with Parts(workers=0) as dataset:
        dict.update(dataset, {0: 5, 1: 6})
        assert [batch[0] for batch in dataset] == [5, 6]


def test_a_seedable_part_that_knows_the_dataset_does_not_keep_it():
    dataset = Holds(Seedable(), lambda thing, _: thing.draw(), workers=0)
    dataset.thing.owner = dataset
    dataset.method = dataset.__len__
    assert next(iter(dataset)) != Seedable().draw()
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None


def _brighten(layer, index):
    image = np.full((1, 2, 2, 3), 100.0 + index, "float32")
    return keras.ops.convert_to_numpy(layer(image, training=True))


def _brightening(**place):
    layer = keras.layers.RandomBrightness(0.5, seed=1)
    return Holds(layer, _brighten, **place)


def test_what_a_layer_of_keras_draws_does_not_depend_on_earlier_builds():
    dataset = _brightening()
    builder = build.Builder(lambda: dataset, 1, private=True)
    batches = [builder.build(0, index, 0) for index in (0, 1, 2)]
    again = [builder.build(0, index, 0) for index in (2, 0, 1)]
    assert equal([again[1], again[2], again[0]], batches)
    assert len({float(batch.flat[0]) for batch in batches}) == 3


@pytest.mark.long
@pytest.mark.backend
def test_a_layer_of_keras_draws_the_same_in_each_process_and_inline():
    inline = _epochs(_brightening(seed=1, workers=0))
    place = {"workers": 2, "use_multiprocessing": True}
    assert equal(_epochs(_brightening(seed=1, **place)), inline)


def test_a_layer_that_others_may_hold_is_left_as_it_was_found():
    dataset = _brightening(workers=0)
    before = np.asarray(dataset.thing.generator.state).tolist()
    _epochs(dataset)
    assert np.asarray(dataset.thing.generator.state).tolist() == before


def test_a_cache_refuses_what_a_layer_of_keras_draws():
    with (
        _brightening(workers=0, cache="memory") as dataset,
        pytest.raises(LoaderError, match="may differ from epoch to epoch"),
    ):
        list(dataset)


@pytest.mark.backend
def test_a_dataset_may_hold_the_model_that_trains_on_it():
    def losses(data):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        if data is not x:
            data.model = model
        one_batch = {"batch_size": 4} if data is x else {}
        targets = x[:, :1] if data is x else None
        history = model.fit(
            data, targets, epochs=3, shuffle=False, verbose=0, **one_batch
        )
        return history.history["loss"]

    class Rows(FastPyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            rows = x[index * 4 : index * 4 + 4]
            return rows, rows[:, :1]

        def on_epoch_end(self):
            self.ended = True

    x = np.arange(36, dtype="float32").reshape(12, 3) / 36
    with Rows(workers=0) as dataset:
        assert losses(dataset) == losses(x)


@pytest.mark.parametrize(
    "draw",
    [
        far_generators.of_a_class_within(),
        far_generators.of_a_cache,
        far_generators.imported,
        far_generators.imported_with_its_module,
        far_generators.of_a_module_by_a_text,
        far_generators.of_a_module_that_is_an_argument,
        lambda: HasMeta.rng.integers(2**60),
    ],
    ids=[
        *("a class in a function", "cached", "import", "module", "text"),
        *("argument", "metaclass"),
    ],
)
def test_one_that_is_far_from_the_dataset_is_seeded(draw):
    class Local(FastPyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.array([draw()])

    inline = _epochs(Local(seed=1, workers=0))
    draw()  # the state that a build finds makes no difference
    assert equal(_epochs(Local(seed=1, workers=0)), inline)
    processes = {"workers": 2, "use_multiprocessing": True}
    assert equal(_epochs(Local(seed=1, **processes)), inline)
    assert len({int(batch[0]) for epoch in inline for batch in epoch}) == 8


def test_one_in_an_outer_variable_that_is_replaced_is_seeded_at_once():
    def make():
        rng = np.random.default_rng(1)

        def draw(_):
            return rng.integers(2**60)

        def replace():
            nonlocal rng
            rng = np.random.default_rng(2)

        return draw, replace

    found = []
    for place in (
        {"workers": 0},
        {"workers": 2, "use_multiprocessing": True},
    ):
        draw, replace = make()
        with Wraps(None, draw, seed=1, **place) as dataset:
            found.append([list(dataset)])
            replace()
            found[-1].append(list(dataset))
    plain = np.random.default_rng(2).integers(2**60, size=4).tolist()
    assert equal(found[1], found[0])
    assert [int(batch[0]) for batch in found[0][1]] != plain


class UsesInInit:
    def __init__(self):
        self.drawn = generator_kinds.RNG.integers(2**60)


def test_one_that_only_the_init_of_a_helper_names_is_seeded():
    def draw(_):
        return UsesInInit().drawn

    inline = _epochs(Wraps(None, draw, seed=1, workers=0))
    draw(None)  # the state that a build finds makes no difference
    assert equal(_epochs(Wraps(None, draw, seed=1, workers=0)), inline)


def _wrappers():
    rng = np.random.default_rng(0)

    def draw(_=None):
        return rng.integers(2**60)

    return {
        "a mapping proxy": (
            types.MappingProxyType({"rng": rng}),
            lambda thing: thing["rng"].integers(2**60),
        ),
        "a static method": (
            staticmethod(draw),
            lambda thing: thing.__func__(),
        ),
        "a class method": (
            classmethod(draw),
            lambda thing: thing.__func__(0),
        ),
        "a property": (property(draw), lambda thing: thing.fget(0)),
        "repeat": (
            itertools.repeat(rng),
            lambda thing: next(thing).integers(2**60),
        ),
        "a module": (
            generator_kinds,
            lambda thing: thing.RNG.integers(2**60),
        ),
    }


@pytest.mark.parametrize("name", list(_wrappers()))
def test_one_within_an_object_of_python_itself_is_seeded(name):
    thing, draw = _wrappers()[name]
    with warnings.catch_warnings():
        # Later versions of Python do not pickle iterators.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        inline = _epochs(Wraps(thing, draw, seed=1, workers=0))
        draw(thing)  # the state that a build finds makes no difference
        assert equal(_epochs(Wraps(thing, draw, seed=1, workers=0)), inline)
        place = {"workers": 2, "use_multiprocessing": True}
        dataset = Wraps(thing, draw, seed=1, start_method="fork", **place)
        assert equal(_epochs(dataset), inline)
    assert len({int(batch[0]) for epoch in inline for batch in epoch}) == 8


class _LooksTheSame:
    def __repr__(self):
        return "key"


@pytest.mark.parametrize("drawn", [0, 1])
def test_a_cache_refuses_draws_from_one_of_two_generators_with_one_name(drawn):
    held = {_LooksTheSame(): np.random.default_rng(seed) for seed in (1, 2)}

    def draw(held, index):
        return [*held.values()][drawn].random()

    with (
        Holds(held, draw, workers=0, cache="memory") as dataset,
        pytest.raises(LoaderError, match="it used the generator"),
    ):
        list(dataset)


def _drawn_from(thing):
    if isinstance(thing, np.random.BitGenerator):
        thing = np.random.Generator(thing)
    return thing.random()


class Pair(FastPyDataset):
    """Two generators of one seed draw for images and masks, a third for more.

    A build makes two more, and a worker's start makes one.
    """

    made = ()
    late = None

    def __init__(self, make, **kwargs):
        super().__init__(**kwargs)
        self.make = make
        self.images, self.masks, self.other = make(3), [make(3)], make(4)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if not self.made:
            self.made = self.make(5), self.make(5)
        several = self.images, *self.masks, self.late, self.other, *self.made
        return np.array([_drawn_from(each) for each in several])

    def on_worker_start(self):
        self.late = self.make(3)

    def on_epoch_end(self):
        _drawn_from(self.images)


_MAKERS = {
    "default_rng": np.random.default_rng,
    "RandomState": np.random.RandomState,
    "Philox": np.random.Philox,
    "Random": random.Random,
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", _MAKERS)
def test_generators_of_one_seed_draw_alike_in_workers_of_every_kind(name, seed):
    inline = []
    kinds = ["forkserver"] if seed is None else ["forkserver", "fork"]
    for kind in [None, *kinds]:
        place = {"workers": 0}
        if kind:
            place = {
                "workers": 2,
                "use_multiprocessing": True,
                "start_method": kind,
            }
        random.seed(3)
        with Pair(_MAKERS[name], seed=seed, **place) as dataset:
            epochs = []
            for _ in range(3):
                epochs += dataset
                dataset.on_epoch_end()
        drawn = np.array(epochs)
        assert np.array_equal(drawn[:, 0], drawn[:, 1])
        assert np.array_equal(drawn[:, 0], drawn[:, 2])
        assert len(set(drawn[:, [0, 3, 4, 5]].ravel().tolist())) == 12 * 4
        inline = drawn if not kind else inline
        assert np.array_equal(drawn, inline)
