"""
Title: Tables in Parquet, from a bucket
Author: keras_fastdata contributors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: Train on columns of Parquet files that lie elsewhere.
Accelerator: None
"""

"""
## Introduction

A table lies in many Parquet files, on a disk or in a bucket. A `SampleDataset`
of `sources.Parquet` has its rows by index. So it can shuffle them, leave out
the batches that an interrupted training has had, and give each of several
processes its share. Each batch comes once in an epoch.

`pip install 'keras-fastdata[parquet,remote]'` installs what this example uses.
"""

"""
## Setup

The example makes a table of flights, and writes it to 8 files. The files lie in
the file system `memory://` of the package fsspec, in place of `s3://`.
"""

import sys
import tempfile

import fsspec
import keras
import numpy as np
import pyarrow
import pyarrow.parquet

from keras_fastdata import SampleDataset, combine, sources

ROWS, EPOCHS = 40_000, 4
CARRIERS = np.array(["Blue", "Green", "Red", "White", "Yellow"])

keras.utils.set_random_seed(1)


def write_flights(folder, rng):
    """Writes flights; late ones are those of some carriers, in the evening."""
    carrier = rng.integers(len(CARRIERS), size=ROWS)
    hour = rng.integers(5, 24, size=ROWS)
    miles = rng.gamma(3, 300, size=ROWS)
    chance = 1 / (1 + np.exp(6 - 0.3 * hour - 0.8 * (carrier == 2)))
    columns = {
        "carrier": CARRIERS[carrier],
        "hour": hour.astype("int8"),
        "miles": miles.astype("float32"),
        "late": rng.random(ROWS) < chance,
        "notes": np.full(ROWS, "not needed here"),
    }
    table = pyarrow.table(columns)
    files = fsspec.filesystem("memory")
    for number, start in enumerate(range(0, ROWS, ROWS // 8)):
        with files.open(f"{folder}/{number}.parquet", "wb") as file:
            part = table.slice(start, ROWS // 8)
            pyarrow.parquet.write_table(part, file, row_group_size=1000)


write_flights("flights", np.random.default_rng(0))

"""
## The source

Files are fetched once, and kept in a cache on disk that all processes share.
Only the named columns are decoded.
"""

cache = tempfile.TemporaryDirectory()
flights = sources.Parquet(
    "memory://flights/*.parquet",
    columns=["carrier", "hour", "miles", "late"],
    storage=sources.Storage(cache_dir=cache.name),
)
print(f"{len(flights):,} flights with {', '.join(flights.columns)}")

"""
## The dataset

`label` names the column of the targets; the other ones are the inputs, a dict.
To read a row, its whole row group has to be decoded. With `shuffle_window`, the
rows of a few row groups are shuffled together, and then those of the next ones.

`combine.split` divides the rows. `combine.map` has the workers change batches:
here it numbers the carriers, for only TensorFlow has strings.
"""


def prepared(batch):
    """Numbers the carriers, and gives each number an axis of its own."""
    x, y = batch
    carrier = np.searchsorted(CARRIERS, x["carrier"].astype(str))
    numbers = {name: x[name][:, None] for name in ("hour", "miles")}
    return {"carrier": carrier.astype("int32"), **numbers}, y[:, None]


rows = SampleDataset(
    flights,
    256,
    label="late",
    shuffle=True,
    shuffle_window=4_000,
    seed=1,
)
train, valid = combine.split(rows, 0.9, shuffle=True)

"""
## Train
"""


def make_model():
    carrier = keras.Input((), dtype="int32", name="carrier")
    hour = keras.Input((1,), name="hour")
    miles = keras.Input((1,), name="miles")
    numbers = keras.layers.Concatenate()(
        [
            keras.layers.Embedding(len(CARRIERS), 4)(carrier),
            keras.layers.Rescaling(1 / 24)(hour),
            keras.layers.Rescaling(1 / 3000)(miles),
        ]
    )
    hidden = keras.layers.Dense(16, activation="relu")(numbers)
    late = keras.layers.Dense(1, activation="sigmoid")(hidden)
    inputs = {"carrier": carrier, "hour": hour, "miles": miles}
    return keras.Model(inputs, late)


model = make_model()
model.compile(
    keras.optimizers.Adam(0.01),
    "binary_crossentropy",
    metrics=[keras.metrics.AUC(name="area")],
)
history = model.fit(
    combine.map(train, prepared, by="batches", workers=2),
    validation_data=combine.map(valid, prepared, by="batches"),
    epochs=EPOCHS,
    verbose=2,
)

"""
## Look at the result
"""

area = history.history["val_area"][-1]
print(f"Area under the curve, for flights that were left out: {area:.2f}")
cache.cleanup()
if area < 0.7:
    sys.exit("The model should have learned when flights are late.")
