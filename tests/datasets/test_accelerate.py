"""Datasets of Keras's, built by our workers."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from accelerate_samples import (
    Endless,
    OfClass,
    Old,
    Plain,
    Property,
    Shuffled,
    Slot,
)
from keras.src.legacy.preprocessing.image import ImageDataGenerator
from PIL import Image
from places import KINDS

from keras_fastdata import FastPyDataset, accelerate

# Workers import Keras with these datasets, which takes seconds; a fork has it.
FORKED = {"use_multiprocessing": True, "start_method": "fork"}
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


def walk(dataset, epochs=2):
    """Several epochs, as nested tuples of bytes."""
    with dataset:
        return [
            [tuple(part.tobytes() for part in batch) for batch in dataset]
            for _ in range(epochs)
        ]


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_come_in_order_and_draw_alike_in_any_number_of_processes(
    workers,
):
    made = accelerate(Old(), workers, seed=3, **FORKED)
    found = walk(made)
    assert found == walk(accelerate(Old(), 0, seed=3))
    draws = [draw for epoch in found for _, draw in epoch]
    assert len(set(draws)) == 18
    indices = [np.frombuffer(x, int)[0] for x, _ in found[0]]
    assert indices == list(range(9))


@pytest.mark.backend
@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_hooks_run_in_the_training_process_and_reach_the_workers(
    workers,
):
    orders = []
    inner = Shuffled()

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            orders.append(inner.order.tolist())

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with accelerate(inner, workers, **(FORKED if workers else {})) as dataset:
        model.fit(
            dataset, epochs=2, shuffle=False, verbose=0, callbacks=[Note()]
        )
        found = [int(x[0, 0]) for x, _ in dataset]
    assert orders[0] != orders[1]
    assert found == inner.order.tolist()
    assert sorted(found) == list(range(9))


@pytest.mark.parametrize("workers", [0, 2])
def test_hooks_called_by_hand_reach_the_workers_whosever_they_are(workers):
    inner = Shuffled()

    def found(batches):
        return [int(x[0, 0]) for x, _ in batches]

    with accelerate(inner, workers, **(FORKED if workers else {})) as dataset:
        seen = [found(dataset)]
        for one in (dataset, inner):
            one.on_epoch_end()
            seen.append(found(dataset))
            assert seen[-1] == inner.order.tolist()
        batches = iter(dataset)
        next(batches)
        dataset.on_epoch_end()
        assert found(batches) == inner.order.tolist()[1:]
    assert len(set(map(tuple, seen))) == 3


def test_a_dataset_that_knows_nothing_of_keras_will_do():
    with accelerate(Plain(), 2) as dataset:
        assert [int(x[0, 0]) for x, _ in dataset] == [0, 1, 2]


def test_a_dataset_without_an_end_has_none():
    with accelerate(Endless(), 2, seed=1) as dataset:
        assert dataset.num_batches is None
        found = [int(x[0, 0]) for x, _ in itertools.islice(dataset, 20)]
    assert found == list(range(20))


def test_the_datasets_own_attributes_are_there():
    dataset = accelerate(Old())
    assert dataset.name == "old"
    assert dataset.length == len(dataset) == 9
    with pytest.raises(AttributeError, match="colour"):
        _ = dataset.colour


def test_an_attribute_named_dataset_or_loader_is_the_wrapped_ones():
    inner = Old()
    inner.dataset, inner._loader = ["its samples"], "its loader"
    with accelerate(inner, 2) as dataset:
        assert len(list(dataset)) == 9
        assert (dataset.dataset, dataset._loader) == (
            ["its samples"],
            "its loader",
        )


def test_setting_one_of_them_sets_it_there():
    inner = Old()
    with accelerate(inner, 2) as dataset:
        assert len(list(dataset)) == 9
        dataset.length = 4
        assert inner.length == 4
        assert len(list(dataset)) == 4
        dataset.workers = 1
        assert dataset.workers == 1


@pytest.mark.parametrize("kind", [OfClass, Property, Slot])
@pytest.mark.parametrize("processes", [False, True])
def test_setting_what_its_class_declares_sets_it_there(kind, processes):
    inner = kind()
    with accelerate(inner, 2, **(FORKED if processes else {})) as dataset:
        assert [int(x[0, 0]) for x, _ in dataset] == [0, 1, 2]
        dataset.level = 1
        assert inner.level == 1
        assert [int(x[0, 0]) for x, _ in dataset] == [10, 11, 12]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (iter([1]), "cannot be asked for batch 7"),
        (accelerate(Plain()), "FastPyDataset already"),
        (Plain, r"the class Plain; pass `Plain\(\.\.\.\)`"),
    ],
    ids=["generator", "ours", "class"],
)
def test_what_cannot_be_shared_out_is_refused(dataset, said):
    with pytest.raises(TypeError, match=said):
        accelerate(dataset)


def test_an_unknown_argument_is_said_to_be_accelerates():
    with pytest.raises(TypeError, match=r"^accelerate .*mean `workers`\?$"):
        accelerate(Plain(), num_workers=2)


def test_a_dataset_with_hooks_of_keras_own_has_none():
    idle = FastPyDataset.on_epoch_end
    assert type(accelerate(Old())).on_epoch_end is idle
    assert type(accelerate(Shuffled())).on_epoch_end is not idle


# -- ImageDataGenerator --------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Twelve different images of two classes."""
    rng = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (4, 4, 3), "uint8")
        Image.fromarray(pixels).resize((20, 20)).save(path)
    return tmp_path


def flow(source, seed):
    """An iterator that shuffles and augments."""
    generator = ImageDataGenerator(
        horizontal_flip=True, brightness_range=(0.5, 1.5)
    )
    if isinstance(source, np.ndarray):
        return generator.flow(
            source, np.arange(len(source)), batch_size=4, seed=seed
        )
    return generator.flow_from_directory(
        source, target_size=(16, 16), batch_size=4, seed=seed
    )


@pytest.mark.parametrize(
    ("workers", "seed", "start_method"),
    [
        (1, 7, "fork"),
        pytest.param(2, 7, "forkserver", marks=pytest.mark.long),
        (2, None, "fork"),
    ],
)
@pytest.mark.parametrize(
    "source", ["folder", pytest.param("arrays", marks=pytest.mark.long)]
)
def test_images_are_augmented_alike_in_any_number_of_processes(
    workers, source, seed, start_method, folder
):
    if source == "arrays":
        rows = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), "uint8")
        source = rows
    else:
        source = folder
    np.random.seed(1)
    inline = walk(accelerate(flow(source, seed), 0, seed=3))
    np.random.seed(1)
    made = accelerate(
        flow(source, seed),
        workers,
        use_multiprocessing=True,
        start_method=start_method,
        seed=3,
    )
    assert walk(made) == inline
    images = [x for epoch in inline for x, _ in epoch]
    assert len(set(images)) == 6


@pytest.mark.parametrize("place", KINDS)
@pytest.mark.parametrize("seeded", ["Keras's", "the wrapper"])
def test_the_first_order_comes_from_the_seed(seeded, place):
    rows, seed = np.zeros((12, 8, 8, 3), "uint8"), 7
    of_keras = seed if seeded == "Keras's" else None
    before = np.random.get_state()[1].tolist()
    made = accelerate(flow(rows, of_keras), seed=seed, **KINDS[place])
    assert np.random.get_state()[1].tolist() == before
    with made:
        found = [int(label) for _, labels in made for label in labels]
    stock = flow(rows, seed)
    stock_batches = [stock[index] for index in range(len(stock))]
    assert found == [int(y) for _, labels in stock_batches for y in labels]


@pytest.mark.backend
def test_each_epoch_of_fit_has_every_image_once_in_an_order_of_its_own():
    rows = np.zeros((12, 8, 8, 3), "uint8")
    given = []

    class Model(keras.Model):
        def train_step(self, *args):
            y = keras.ops.convert_to_numpy(args[-1][1])
            given.extend(np.array(y).ravel().astype(int).tolist())
            logs = {"loss": keras.ops.zeros(())}
            return (logs, args[0]) if len(args) > 1 else logs

        def call(self, x):
            return x

    model = Model()
    model.compile(run_eagerly=True)
    with accelerate(flow(rows, 5), 2, **FORKED) as made:
        model.fit(made, epochs=2, verbose=0)
    epochs = [given[-24:-12], given[-12:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
