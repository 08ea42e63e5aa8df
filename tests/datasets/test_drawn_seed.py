"""A program that seeds its generators has the same batches in each run."""

from __future__ import annotations

import copy
import pickle
import random

import keras
import numpy as np
import pytest
from samples import OwnRng, Random, Shuffles, equal

from keras_fastdata import GeneratorDataset

pytestmark = pytest.mark.usefixtures("kept_forkserver")

RNG = np.random.default_rng(0)  # a test replaces it

PLACES = [{"workers": 0}, {"workers": 2, "use_multiprocessing": True}]


class DrawsOfGlobal(OwnRng):
    def __getitem__(self, index):
        return RNG.integers(2**60, size=2)


class DrawsOfBoth(OwnRng):
    def __getitem__(self, index):
        return RNG.random(2), self.rng.random(2), np.random.random(2)


def epochs_of(dataset):
    with dataset:
        return [list(dataset) for _ in range(2)]


def run(make, **arguments):
    """Returns what a run of a program has, with the other seeds drawn anew."""
    random.seed()
    return epochs_of(make(**arguments))


SEEDED = {
    "a generator": lambda seed: np.random.default_rng(seed),
    "a generator of old": lambda seed: np.random.RandomState(seed),
    "a bit generator": lambda seed: np.random.MT19937(seed),
    "one in a list": lambda seed: [np.random.default_rng([seed, 1])],
    "one of several": lambda seed: (
        np.random.default_rng([3, 4]),
        np.random.default_rng(seed),
    ),
    "one with a spawned seed": lambda seed: np.random.Generator(
        np.random.Philox(np.random.SeedSequence(seed).spawn(2)[1])
    ),
}


class HasGenerator(OwnRng):
    """A batch is what its generators draw."""

    def __init__(self, thing, **kwargs):
        super().__init__(**kwargs)
        self.things = thing if isinstance(thing, (list, tuple)) else [thing]

    def __getitem__(self, index):
        return np.concatenate([_drawn_from(thing) for thing in self.things])


def _drawn_from(thing):
    if isinstance(thing, np.random.BitGenerator):
        thing = np.random.Generator(thing)
    return thing.random(2)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_who_seeds_np_random_alone_has_the_same_batches_again(place):
    def seeded(seed):
        np.random.seed(seed)
        return run(Random, **place)

    first = seeded(7)
    assert equal(seeded(7), first)
    assert not equal(seeded(8), first)


@pytest.mark.parametrize("name", SEEDED)
def test_a_numpy_generator_with_a_seed_in_the_dataset_decides(name):
    def seeded(seed):
        return run(HasGenerator, thing=SEEDED[name](seed), workers=0)

    first = seeded(3)
    assert equal(seeded(3), first)
    assert not equal(seeded(4), first)


def test_a_numpy_generator_with_a_seed_in_a_global_decides(monkeypatch):
    def seeded(seed):
        monkeypatch.setitem(globals(), "RNG", np.random.default_rng(seed))
        return run(DrawsOfGlobal, workers=0)

    first = seeded(3)
    assert equal(seeded(3), first)
    assert not equal(seeded(4), first)


class Noisy(HasGenerator):
    """A batch is what its generators draw, and what `np.random` draws."""

    def __getitem__(self, index):
        return super().__getitem__(index), np.random.random(2)


def parts_of(thing, kind=Noisy, **place):
    """Returns the draws of the generators, and the other ones."""
    epochs = epochs_of(kind(thing, **place))
    return [[batch[n] for e in epochs for batch in e] for n in range(2)]


def test_the_seed_of_np_random_does_not_change_the_generators_of_the_dataset():
    def seeded(shared, own):
        np.random.seed(shared)
        return parts_of(np.random.RandomState(own), workers=0)

    drawn, noise = seeded(1, 1)
    assert equal(seeded(1, 1), [drawn, noise])
    again, other_noise = seeded(2, 1)
    assert equal(again, drawn)
    assert not equal(other_noise, noise)
    assert not equal(seeded(1, 2)[0], drawn)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_datasets_with_generators_of_one_seed_share_no_other_draws(place):
    """Images and masks are drawn alike; members of an ensemble have noise."""
    make = np.random.default_rng
    (images, noise), (masks, other) = (
        parts_of([make(3), make()], **place) for _ in range(2)
    )
    assert equal([x[:2] for x in images], [x[:2] for x in masks])
    assert not any(map(equal, [x[2:] for x in images], [x[2:] for x in masks]))
    assert not any(map(equal, noise, other))


class DrawsOfOwnAndGlobal(HasGenerator):
    def __getitem__(self, index):
        return super().__getitem__(index), RNG.random(2)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_seeded_generator_in_a_global_changes_no_draws_of_the_datasets_own(
    place, monkeypatch
):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(7))
    (images, noise), (masks, other) = (
        parts_of(np.random.default_rng(3), DrawsOfOwnAndGlobal, **place)
        for _ in range(2)
    )
    assert equal(images, masks)
    assert not any(map(equal, noise, other))


def test_streams_with_generators_of_one_seed_share_no_other_draws():
    def stream():
        rng = np.random.default_rng(3)

        def numbers():
            for _ in range(8):
                yield rng.random(2), np.random.random(2)

        with GeneratorDataset(numbers, batch_size=2, workers=0) as dataset:
            return [batch for _ in range(2) for batch in dataset]

    first, second = stream(), stream()
    assert equal([x for x, _ in first], [x for x, _ in second])
    assert not any(
        equal(x, y) for (_, x), (_, y) in zip(first, second, strict=True)
    )


def test_who_seeds_random_alone_has_the_same_batches_again():
    def seeded(seed):
        random.seed(seed)
        return epochs_of(HasGenerator(np.random.default_rng(), workers=0))

    first = seeded(1)
    assert equal(seeded(1), first)
    assert not equal(seeded(2), first)


def test_threads_that_draw_from_np_random_do_not_change_what_keras_seeded(
    monkeypatch,
):
    seed = "keras.src.utils.rng_utils.get_random_seed"
    monkeypatch.setattr(seed, lambda: 7)

    def seeded(draws):
        keras.utils.set_random_seed(7)
        np.random.random(draws)  # as threads of another dataset do
        return epochs_of(OwnRng(workers=0))

    assert equal(seeded(3), seeded(5))


class DrawsOfClass(OwnRng):
    own = np.random.default_rng(5)

    def __getitem__(self, index):
        return self.own.random(2), self.rng.random(2), np.random.random(2)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["global", "class", "given", "stream"])
def test_a_second_set_random_seed_repeats_all_but_what_shared_generators_draw(
    kind, place, monkeypatch
):
    """As with stock Keras, where the shared generator goes on."""
    seed = "keras.src.utils.rng_utils.get_random_seed"
    monkeypatch.setattr(seed, lambda: 7)
    rng = np.random.default_rng(5)
    monkeypatch.setitem(globals(), "RNG", rng)
    makes = {
        "global": lambda: DrawsOfBoth(**place),
        "class": lambda: DrawsOfClass(**place),
        "given": lambda: DrawsOfGiven(rng, **place),
        "stream": lambda: GeneratorDataset(
            _stream_of_global,
            batch_size=2,
            **{**place, "workers": min(1, place["workers"])},
        ),
    }

    def seeded():
        keras.utils.set_random_seed(7)
        batches = [
            batch for epoch in epochs_of(makes[kind]()) for batch in epoch
        ]
        return [batch[0] for batch in batches], [batch[1:] for batch in batches]

    (drawn, rest), (others, again) = seeded(), seeded()
    assert equal(again, rest)
    assert not any(map(equal, drawn, others))


class DrawsOfGiven(HasGenerator):
    def __getitem__(self, index):
        drawn = super().__getitem__(index)
        return drawn, self.rng.random(2), np.random.random(2)


def _stream_of_global(count=8):
    for _ in range(count):
        yield RNG.random(2), np.random.random(2), random.random()


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))],
    ids=["copied", "pickled"],
)
@pytest.mark.parametrize("kind", SEEDED)
def test_a_copy_of_a_used_dataset_draws_alike_with_any_workers(kind, copied):
    def batches(place):
        keras.utils.set_random_seed(7)
        with HasGenerator(SEEDED[kind](5), **place) as dataset:
            list(dataset)
            another = copied(dataset)
        return epochs_of(another)

    inline, in_processes = map(batches, PLACES)
    assert equal(inline, in_processes)


class MakesLate(HasGenerator):
    """Makes a second generator in `__len__`, or else in `__getitem__`."""

    def __init__(self, thing, in_length=False, **kwargs):
        super().__init__(thing, **kwargs)
        self.in_length, self.late = in_length, None

    def __len__(self):
        if self.in_length:
            self.make()
        return super().__len__()

    def __getitem__(self, index):
        return self.make().integers(2**60, size=2)

    def make(self):
        if self.late is None:
            self.late = np.random.default_rng(4)
        return self.late


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("in_length", [False, True])
def test_it_does_not_matter_when_a_second_seeded_generator_is_made(
    in_length, place
):
    def both_epochs(by_hand, **place):
        random.seed(3)
        keras.utils.set_random_seed(3)
        thing = np.random.default_rng(5)
        with MakesLate(thing, in_length, **place) as dataset:
            epochs = [[*iter(dataset)]]  # `list` asks for the length first
            if by_hand:
                dataset[1]
            return [*epochs, list(dataset)]

    expected = both_epochs(False, **PLACES[0])
    assert equal(both_epochs(False, **place), expected)
    assert equal(both_epochs(True, **place), expected)


def test_who_seeds_nothing_has_other_batches_in_each_run():
    assert not equal(run(OwnRng, workers=0), run(OwnRng, workers=0))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.backend
def test_who_seeds_torch_alone_has_the_same_batches_again(place):
    torch = pytest.importorskip("torch")

    def seeded(seed):
        torch.manual_seed(seed)
        return [run(OwnRng, **place) for _ in range(2)]

    first, second = seeded(7)
    assert not equal(first, second)
    assert equal(seeded(7), [first, second])
    assert not equal(seeded(8)[0], first)
    torch.seed()


@pytest.mark.backend
def test_who_does_not_seed_torch_has_other_batches_in_each_run():
    torch = pytest.importorskip("torch")
    torch.seed()
    state = torch.get_rng_state()
    first = run(OwnRng, workers=0)
    torch.set_rng_state(state)
    assert not equal(run(OwnRng, workers=0), first)


class SeedsNumpy(OwnRng):
    def __getitem__(self, index):
        np.random.seed(index)
        return np.random.random(2)


def _stream_of_random(count=8):
    for _ in range(count):
        yield np.random.random() + RNG.random()


@pytest.mark.parametrize(
    "first",
    [
        lambda place: SeedsNumpy(**place),
        lambda place: GeneratorDataset(
            _stream_of_random, batch_size=2, **place
        ),
    ],
    ids=["seeds in builds", "stream"],
)
def test_what_builds_of_another_dataset_seed_is_not_seeded_by_the_program(
    first, monkeypatch
):
    """Else the seed depended on where those batches were built."""

    def seeded(place):
        monkeypatch.setitem(globals(), "RNG", np.random.default_rng())
        random.seed(9)
        list(first(place))
        return epochs_of(DrawsOfBoth(workers=0))

    inline = seeded(PLACES[0])
    assert equal(seeded(PLACES[0]), inline)
    assert equal(seeded({"workers": 1, "use_multiprocessing": True}), inline)


def test_two_datasets_of_a_seeded_program_draw_different_numbers():
    np.random.seed(1)
    assert not equal(run(OwnRng, workers=0), run(OwnRng, workers=0))


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.RandomState, np.random.Philox]
)
def test_two_datasets_with_one_generator_draw_alike_wherever_they_build(make):
    def both(**place):
        thing = make(3)
        return [epochs_of(HasGenerator(thing, **place)) for _ in range(2)]

    inline = both(**PLACES[0])
    assert equal(both(**PLACES[1]), inline)
    assert not equal(*inline)


def test_the_generators_of_the_dataset_are_not_advanced():
    thing = np.random.default_rng(3)
    with HasGenerator(thing, seed=None) as dataset:
        _ = dataset.rng
    assert thing.integers(2**60) == np.random.default_rng(3).integers(2**60)


def test_a_generator_in_the_function_of_a_stream_decides():
    def seeded(seed):
        rng = np.random.default_rng(seed)

        def numbers():
            for _ in range(8):
                yield rng.integers(2**60)

        return run(GeneratorDataset, factory=numbers, batch_size=2)

    first = seeded(3)
    assert equal(seeded(3), first)
    assert not equal(seeded(4), first)


@pytest.mark.backend
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("modern", [False, True])
def test_fit_repeats_shuffles_as_stock_keras_does(modern, place):
    def weights():
        random.seed()
        if not modern:
            np.random.seed(3)
        model = keras.Sequential(
            [keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile("sgd", "mse")
        with Labelled(modern, **place) as dataset:
            model.fit(dataset, epochs=3, shuffle=False, verbose=0)
            return [*model.get_weights(), dataset.order]

    assert equal(weights(), weights())


class Labelled(Shuffles):
    def __getitem__(self, index):
        x = super().__getitem__(index)
        return x / 10, x % 2
