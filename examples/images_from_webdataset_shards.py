"""
Title: Images in WebDataset shards, from S3
Author: keras_fastdata contributors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: Train on tar files in a bucket, and go on after a killed training.
Accelerator: None
"""

"""
## Introduction

A WebDataset shard is a tar file with the files of many samples: `17.png` and
`17.cls` are one sample. Other loaders read shards from front to end. So they
shuffle a little, and an interrupted epoch begins again.

`sources.Tar` notes where each file lies in a shard. Its samples have numbers.
They are shuffled all together, each comes once in an epoch, and a training
that was interrupted goes on with the batch that it had not seen yet.

`pip install 'keras-fastdata[remote,images]' s3fs` installs what is needed to
read shards from S3, and `pip install 'moto[server]'` a server for this example.
"""

"""
## Setup

The data are scikit-learn's handwritten digits, in 6 shards. An S3 server of
this machine has them.
"""

import io
import logging
import sys
import tarfile
import tempfile

import fsspec
import keras
import numpy as np
import PIL.Image
from moto.server import ThreadedMotoServer
from sklearn.datasets import load_digits

from keras_fastdata import SampleDataset, combine, sources

SHARDS, EPOCHS = 6, 6

keras.utils.set_random_seed(1)

logging.getLogger("werkzeug").setLevel("ERROR")  # a line for each request
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
options = {
    "key": "any",
    "secret": "any",
    "client_kwargs": {
        "endpoint_url": f"http://{host}:{port}",
    },
}


def add(shard, name, data):
    """Adds a file to a shard."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    shard.addfile(member, io.BytesIO(data))


def write_shard(path, numbers, digits):
    """Writes images and labels, as the package webdataset would."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as shard:
        for number in numbers:
            pixels = (digits.images[number] * 15.9).astype("uint8")
            image = io.BytesIO()
            PIL.Image.fromarray(pixels).save(image, "png")
            add(shard, f"{number:05}.png", image.getvalue())
            add(shard, f"{number:05}.cls", b"%d" % digits.target[number])
    files.pipe(path, written.getvalue())


files = fsspec.filesystem("s3", **options)
files.mkdir("digits")
digits = load_digits()
for shard, numbers in enumerate(
    np.array_split(np.arange(len(digits.target)), SHARDS)
):
    write_shard(f"digits/train-{shard:03}.tar", numbers, digits)

"""
## The dataset

`decode` says what becomes of each file of a sample. A shard is fetched when the
first of its samples is needed, and kept in a cache on disk that all processes
share. Connections that break are tried again.

`label` names the part of a sample that is the target. `columns` names the one
that is the input.
"""

cache = tempfile.TemporaryDirectory()
shards = sources.Tar(
    f"s3://digits/train-{{000..{SHARDS - 1:03}}}.tar",
    decode={"png": "grayscale", "cls": int},
    storage=sources.Storage(options, cache_dir=cache.name),
)
samples = SampleDataset(
    shards,
    32,
    columns="png",
    label="cls",
    shuffle=True,
    seed=1,
    workers=2,
    use_multiprocessing=True,
)
train, valid = combine.split(samples, 0.85, shuffle=True)
print(f"{len(shards):,} samples in {SHARDS} shards, {len(train)} batches")

"""
## Train, and stop in the middle
"""


def make_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


model = make_model()
batches = iter(train)
seen = [next(batches) for _ in range(5)]
state = train.state_dict()
del batches
print(f"Stopped before batch {state['position']} of epoch {state['epoch']}.")

"""
The state is a small dict. `DatasetCheckpoint` writes it beside the model's
weights. Here a new dataset takes it, and has exactly the batches that are left.
"""

train.load_state_dict(state)
rest = list(train)
together = np.concatenate([labels for _, labels in seen + rest])
print(f"{len(seen)} + {len(rest)} batches, {len(together):,} samples")

"""
## Look at the result
"""

history = model.fit(train, validation_data=valid, epochs=EPOCHS, verbose=2)
accuracy = history.history["val_accuracy"][-1]
print(f"Accuracy on digits that were left out: {accuracy:.1%}")
train.close()
valid.close()
cache.cleanup()
server.stop()
if accuracy < 0.9:
    sys.exit("The model should have learned the digits.")
