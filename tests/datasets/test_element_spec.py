"""The shapes and dtypes of batches, before any training."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_fastdata import (
    ArrayDataset,
    FastPyDataset,
    GeneratorDataset,
    LoaderError,
    SampleDataset,
    accelerate,
)


def described(spec):
    return keras.tree.map_structure(
        lambda each: None if each is None else (each.shape, each.dtype), spec
    )


def test_the_structure_is_that_of_a_batch_and_the_first_axis_is_unknown():
    x = {"a": np.ones((9, 2, 3), "uint8"), "b": np.ones(9, "float32")}
    dataset = ArrayDataset(x, np.ones(9, bool), batch_size=4)
    assert described(dataset.element_spec) == (
        {"a": ((None, 2, 3), "uint8"), "b": ((None,), "float32")},
        ((None,), "bool"),
    )


@pytest.mark.parametrize("odd", [0, 4, 8])
def test_an_axis_whose_length_differs_is_unknown(odd):
    rows = [np.ones((2 + (index == odd), 3), "int32") for index in range(9)]
    dataset = SampleDataset(rows, 3, pad_to="longest")
    assert described(dataset.element_spec) == ((None, None, 3), "int32")


def test_strings_are_strings_whatever_their_length():
    dataset = SampleDataset(["a" * index for index in range(9)], 2)
    assert described(dataset.element_spec) == ((None,), "string")


def test_a_generator_has_a_spec_and_an_iterator_would_lose_its_items():
    def items():
        yield np.ones(2), None

    assert described(GeneratorDataset(items).element_spec) == (
        ((None,), "float64"),
        None,
    )
    with pytest.raises(LoaderError, match="items come once"):
        GeneratorDataset(items()).element_spec  # noqa: B018


def test_a_model_can_be_made_from_it():
    dataset = ArrayDataset(np.ones((9, 2), "float32"), batch_size=4)
    spec = dataset.element_spec
    layer = keras.layers.Dense(3)
    assert layer(keras.Input(batch_shape=spec.shape)).shape == (None, 3)


def test_no_batch_is_taken_from_the_epoch():
    with ArrayDataset(np.arange(4), batch_size=1, workers=0) as dataset:
        iterator = iter(dataset)
        assert next(iterator) == [0]
        dataset.element_spec  # noqa: B018
        assert [batch.item() for batch in iterator] == [1, 2, 3]


def test_a_dataset_without_batches_says_so():
    with pytest.raises(ValueError, match="has no batch"):
        SampleDataset([]).element_spec  # noqa: B018


def test_a_dataset_may_have_an_attribute_of_that_name():
    class Own(FastPyDataset):
        def __init__(self):
            super().__init__()
            self.element_spec = "mine"

    class Method(SampleDataset):
        def element_spec(self):
            return "mine"

    assert Own().element_spec == "mine"
    assert Method([1]).element_spec() == "mine"


def test_an_accelerated_dataset_has_a_spec():
    class Old(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((2, index + 1), "float32")

    spec = accelerate(Old()).element_spec
    assert described(spec) == ((None, None), "float32")
