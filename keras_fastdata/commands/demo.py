"""`keras-fastdata demo`: one training, inline and with workers."""

from __future__ import annotations

import time
from typing import Any

import keras

from keras_fastdata.callbacks.loader_health import LoaderHealth
from keras_fastdata.commands.pictures import BATCHES, READ_S, Pictures
from keras_fastdata.metrics import formatting

_EPOCHS = 3
_WORKERS = 8


def run() -> int:
    """Trains twice, prints what `LoaderHealth` says, and returns 0."""
    _say(
        "A small model learns to tell stripes apart, on Keras "
        f"{keras.__version__} with {keras.backend.backend()}. An epoch has "
        f"{BATCHES} batches of 32 pictures. To read a batch takes "
        f"{READ_S * 1e3:.0f} ms, as from a network; the demo sleeps for that "
        "time."
    )
    model = _compiled_model()
    call = f"workers={_WORKERS}, use_multiprocessing=True"
    _heading("1. Inline, as stock Keras does by default: workers=0")
    inline_s = _train(model, workers=0)
    _heading(f"2. With worker processes: {call}")
    workers_s = _train(model, workers=_WORKERS, use_multiprocessing=True)
    _heading("The difference")
    _say(
        f"{_EPOCHS} epochs took {formatting.duration(inline_s)} inline, and "
        f"{formatting.duration(workers_s)} with {_WORKERS} worker processes"
        f"{_factor(inline_s / workers_s)}. The batches were the same."
    )
    _say(
        "For a dataset of yours, `keras-fastdata profile "
        "train.py:make_dataset` finds the workers that it needs."
    )
    return 0


def _compiled_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            keras.layers.Conv2D(8, 5, strides=4, activation="relu"),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(Pictures(workers=0), steps_per_epoch=1, verbose=0)
    return model


def _train(model: Any, **kwargs: Any) -> float:
    """Returns the seconds of a `fit` whose workers have started."""
    with Pictures(seed=1, **kwargs) as pictures:
        for _ in pictures:
            pass
        began_s = time.monotonic()
        model.fit(
            pictures, epochs=_EPOCHS, verbose=0, callbacks=[LoaderHealth()]
        )
        return time.monotonic() - began_s


def _factor(ratio: float) -> str:
    return f": {ratio:.1f} times as fast" if ratio >= 1.05 else ""


def _heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _say(text: str) -> None:
    print(formatting.wrapped(text), flush=True)
