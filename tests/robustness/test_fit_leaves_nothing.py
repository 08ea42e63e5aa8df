"""After `fit`, a dataset that is dropped takes its workers along."""

from __future__ import annotations

import gc
import threading

import keras
import psutil
import pytest
from places import KINDS, LONG_BUT_ON_JAX, quickly
from samples import Numbered

pytestmark = pytest.mark.backend


@pytest.mark.parametrize("place", quickly(["thread", "process"], "process"))
def test_a_dataset_dropped_after_fit_leaves_no_process_and_no_thread(place):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset, validation = Numbered(**KINDS[place]), Numbered(**KINDS[place])
    model.fit(dataset, validation_data=validation, epochs=2, verbose=0)
    model.predict(dataset, verbose=0)
    assert psutil.Process().children() or place == "thread"
    del dataset, validation
    gc.collect()
    assert not psutil.Process().children()
    assert not [t for t in threading.enumerate() if "keras_fastdata" in t.name]


ENDS = {
    "falls off its end": "pass",
    "is half through an epoch": "it = iter(data); next(it)",
    "calls sys.exit": "sys.exit(0)",
    "calls os._exit": "os._exit(0)",
}


@pytest.mark.parametrize(
    ("end", "place"),
    [
        # On TensorFlow, `test_parent_end.py` has such an end.
        pytest.param(
            "is half through an epoch", "process", marks=LONG_BUT_ON_JAX
        ),
        pytest.param(
            "is half through an epoch", "thread", marks=pytest.mark.long
        ),
    ]
    + [
        pytest.param(end, "process", marks=pytest.mark.long)
        for end in ENDS
        if end != "is half through an epoch"
    ],
)
def test_a_script_ends_cleanly_when_it(end, place, tmp_path, zygote):
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, os, sys, keras, numpy as np\n"
        "faulthandler.enable()\n"
        "from keras_fastdata import FastPyDataset\n"
        "class D(FastPyDataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n"
        "        x = np.ones((64, 1024), 'float32')\n"
        "        return x, x[:, :1]\n"
        f"data = D(**{KINDS[place]!r})\n"
        "model = keras.Sequential([keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(data, verbose=0)\n"
        "print('trained', flush=True)\n"
        f"{ENDS[end]}\n"
    )
    done = zygote.run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    noise = [
        line
        for line in done.stderr.splitlines()
        if "keras_fastdata" in line or "Exception" in line or "Error" in line
    ]
    # TensorFlow reports that it found no GPU, at level E.
    assert [line for line in noise if "cuda" not in line.lower()] == []
