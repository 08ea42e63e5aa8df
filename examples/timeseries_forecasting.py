"""
Title: Forecasting a time series
Author: keras_fastdata contributors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: Move from Keras's timeseries_dataset_from_array by one line.
Accelerator: None
"""

"""
## Introduction

A model that forecasts a time series learns from windows: the steps from 1 to
168 and what came a day later, the steps from 2 to 169, and so on. Windows
overlap, so that an array of all windows would be 168 times as large as the
series. `keras.utils.timeseries_dataset_from_array` cuts them out on the way to
the model.

`keras_fastdata.timeseries_dataset_from_array` has the same arguments and gives
the same batches. It is a `FastPyDataset`: it needs no `tf.data`, can build
batches in threads or processes, shuffles all windows anew in every epoch, and
goes on in the middle of an epoch after a crash.
"""

"""
## Setup

The data are made here: two years of a weather station, hour by hour. The
temperature follows the year, the day, and fronts, which the air pressure shows
a day before.
"""

import contextlib
import sys
import time

import keras
import numpy as np

import keras_fastdata

DAYS = 2 * 365
WINDOW = 7 * 24  # a week of hours
AHEAD = 24  # the forecast is for the next day
EPOCHS = 2


def make_weather(rng):
    """Returns temperature and pressure, of shape (hours, 2)."""
    hours = np.arange(24 * DAYS)
    front = np.zeros(len(hours) + AHEAD)
    pushes = rng.normal(0, 0.14, len(front))
    for hour in range(1, len(front)):
        front[hour] = 0.99 * front[hour - 1] + pushes[hour]
    year = -10 * np.cos(2 * np.pi * hours / (24 * 365))
    day = -4 * np.cos(2 * np.pi * (hours - 3) / 24)
    noise = rng.normal(0, 0.5, (2, len(hours)))
    temperature = 10 + year + day + 4 * front[:-AHEAD] + noise[0]
    pressure = 1013 - 8 * front[AHEAD:] + noise[1]
    return np.stack([temperature, pressure], 1)


weather = make_weather(np.random.default_rng(0))
until = len(weather) * 3 // 4  # where training ends and validation begins
mean, deviation = weather[:until].mean(0), weather[:until].std(0)
series = ((weather - mean) / deviation).astype("float32")
temperature = series[:, 0]

"""
## Make datasets

The window that begins at step i gets target i. So the targets begin with the
temperature a day after the end of the first window. To move a program, change
the module's name; all else stays.
"""


def make_datasets(module, **kwargs):
    """Returns the windows to train on, shuffled, and those to validate on."""
    make = module.timeseries_dataset_from_array
    data, targets = series[:-AHEAD], temperature[WINDOW + AHEAD - 1 :]
    kwargs = {"sequence_length": WINDOW, "batch_size": 256, **kwargs}
    return (
        make(data, targets, shuffle=True, seed=1, end_index=until, **kwargs),
        make(data, targets, start_index=until, **kwargs),
    )


"""
## Compare the batches

The batches to validate on are those of Keras, byte for byte. Those to train on
have the same windows, in another order: Keras draws an order once, and changes
it a little from epoch to epoch. Here each epoch has an order of its own, which
depends only on the seed and the epoch.

Keras's function needs TensorFlow on every backend. Without it, ours runs alone.
"""

modules = [keras_fastdata]
with contextlib.suppress(ImportError):
    import tensorflow  # noqa: F401

    modules.append(keras.utils)


def read(module):
    """Returns the batches of an epoch as arrays, and how long they took."""
    _, dataset = make_datasets(module)
    for _ in range(2):  # in the first epoch libraries start up
        began = time.perf_counter()
        batches = [tuple(map(np.asarray, batch)) for batch in dataset]
        took = time.perf_counter() - began
    return batches, took


reading = {module: read(module) for module in modules}
(ours, _), *others = reading.values()
for stock, _ in others:
    for known, found in zip(stock, ours, strict=True):
        for part, other in zip(known, found, strict=True):
            np.testing.assert_array_equal(part, other, strict=True)

"""
## Train

The model looks at six hours at a time. The usual forecast to beat is that
tomorrow is like today. The datasets shuffle, hence `shuffle=False` in `fit`.
"""


def train(module, **kwargs):
    """Trains a model; returns its error in degrees, and the time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((WINDOW, series.shape[1])),
            keras.layers.Conv1D(16, 6, strides=6, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-3), "mse", metrics=["mae"])
    training, validation = make_datasets(module, **kwargs)
    began = time.perf_counter()
    model.fit(training, epochs=EPOCHS, shuffle=False, verbose=0)
    took = time.perf_counter() - began
    _, error = model.evaluate(validation, verbose=0)
    return error * deviation[0], took


errors = {}
print(f"{'':16} {'reading':>8} {'training':>9} {'error':>8}")
for module, (_, read_s) in reading.items():
    errors[module], took = train(module)
    print(
        f"{module.__name__:16} {read_s:6.2f} s {took:7.1f} s "
        f"{errors[module]:5.2f} °C"
    )
today = np.abs(temperature[until:-AHEAD] - temperature[until + AHEAD :])
usual = today.mean() * deviation[0]
print(f"{'as today':16} {'':8} {'':9} {usual:5.2f} °C")

"""
## Look at the result

Both train equally well. Reading the windows takes less time here, because a
batch is copied from the series in one call, and not window by window.
"""

if errors[keras_fastdata] > min(usual, 1.1 * errors.get(keras.utils, usual)):
    sys.exit("The forecasts should be better, and as good as with Keras.")
