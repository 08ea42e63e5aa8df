"""Equal objects have equal pickles, in each run."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest

from keras_fastdata.engine.stable_pickle import Found, pickle_of


def _pickled(value):
    buffers = []
    pickled = pickle_of(value, Found(), buffers.append)
    return [pickled, *(bytes(buffer.raw()) for buffer in buffers)]


def test_a_layer_of_keras_is_the_same_at_any_time(monkeypatch):
    def layer(scale):
        return keras.layers.Rescaling(scale, name="one")

    before = _pickled(layer(2))
    in_a_day_s = time.time() + 86400
    localtime = time.localtime
    monkeypatch.setattr(
        time, "localtime", lambda now_s=in_a_day_s: localtime(now_s)
    )
    assert _pickled(layer(2)) == before != _pickled(layer(3))


def test_the_weights_of_a_model_count():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    before = _pickled(model)
    assert _pickled(model) == before
    model.layers[0].kernel.assign(np.full((3, 1), 7))
    assert _pickled(model) != before


class Own(keras.layers.Layer):
    pass


def test_the_code_of_a_layer_of_the_users_counts():
    found = Found()
    pickle_of([Own()], found)
    assert Own in found.code


def test_the_code_of_a_tensor_of_the_users_counts():
    torch = pytest.importorskip("torch")
    own = type("Own", (torch.Tensor,), {})
    found = Found()
    pickle_of([torch.ones(1).as_subclass(own)], found)
    assert own in found.code


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_equal_tensors_of_torch_are_the_same(dtype, shape):
    torch = pytest.importorskip("torch")

    def tensor(value=1, shape=shape, dtype=dtype):
        return torch.full(shape, value, dtype=getattr(torch, dtype))

    one, other = tensor(), tensor()
    assert _pickled([one]) == _pickled([other])
    assert _pickled([one]) != _pickled([tensor(shape=(*shape, 1))])
    assert _pickled([one]) != _pickled([tensor(dtype="int64")])
    if one.numel():
        assert _pickled([one]) != _pickled([tensor(0)])
