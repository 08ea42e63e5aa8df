"""
Title: Text classification with texts of similar length in a batch
Author: keras_fastdata contributors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: Pad, cut and mask texts, and see how little padding is needed.
Accelerator: None
"""

"""
## Introduction

Texts have different lengths, and a batch is an array. So short texts are padded
to the length of the longest text in their batch. The model computes on the
padding too, and nobody needs the result.

Less is padded if a batch has texts of similar length. `bucket_by=` sorts the
texts of many batches by length, makes batches of neighbours, and shuffles
these. Each text still comes once in an epoch, and the order is still random.
"""

"""
## Setup

The texts are the documentation of scikit-learn itself, which is in its source
files. The model learns which part of the library a text belongs to.
"""

import ast
import collections
import re
import sys
from pathlib import Path

import keras
import numpy as np
import sklearn

from keras_fastdata import SampleDataset

PARTS = [
    *("cluster", "decomposition", "ensemble", "linear_model", "metrics"),
    *("model_selection", "preprocessing", "utils"),
]
WORDS = 2000  # in the vocabulary
LONGEST = 192  # words of a text that the model reads
EPOCHS = 5

"""
## Read the texts

A text becomes a list of numbers: 2, 3, ... for the most frequent words, and 1
for all other words. 0 is padding.
"""


def read_texts(part):
    """Yields the docstrings in a folder of scikit-learn, as lists of words."""
    folder = Path(sklearn.__file__).parent / part
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
            if is_documented and (text := ast.get_docstring(node)):
                yield re.findall(r"\w+", text.lower())


texts, labels = [], []
for label, part in enumerate(PARTS):
    found = list(read_texts(part))
    texts += found
    labels += [label] * len(found)

counts = collections.Counter(word for text in texts for word in text)
numbers = {word: n for n, (word, _) in enumerate(counts.most_common(WORDS), 2)}
samples = [
    (
        {"tokens": np.array([numbers.get(word, 1) for word in text], "int32")},
        label,
    )
    for text, label in zip(texts, labels, strict=True)
]
order = np.random.default_rng(0).permutation(len(samples))
for_testing = [samples[n] for n in order[: len(order) // 5]]
for_training = [samples[n] for n in order[len(order) // 5 :]]

lengths = np.array([len(x["tokens"]) for x, _ in for_training])
print(
    f"{len(lengths)} texts, half of which have less than "
    f"{np.median(lengths):.0f} words; the longest has {lengths.max()}."
)

"""
## Make the datasets

- `pad_to="longest"` pads to the longest text of the batch.
- `truncate=192` cuts texts that are longer than that.
- `pad_to_multiple_of=32` rounds the length up. So there are only 6 different
  lengths, and JAX compiles the model 6 times at most for whole batches.
- `mask="padding_mask"` adds an array to the inputs, which is `True` where there
  are words.
"""

padding = {
    "pad_to": "longest",
    "truncate": LONGEST,
    "pad_to_multiple_of": 32,
    "mask": "padding_mask",
    "workers": 0,  # there is next to nothing to do for each batch
}


def make_dataset(**kwargs):
    return SampleDataset(
        for_training, batch_size=32, shuffle=True, seed=1, **padding, **kwargs
    )


x, y = make_dataset()[0]
for name, array in x.items():
    print(f"{name:13} {array.dtype!s:6} {array.shape}")

"""
## Compare the padding

The masks of an epoch tell the share of padding.
"""


def share_of_padding(dataset):
    masks = [x["padding_mask"] for x, _ in dataset]
    return 1 - sum(map(np.sum, masks)) / sum(map(np.size, masks))


datasets = {
    "any texts in a batch": make_dataset(),
    "texts of similar length": make_dataset(
        bucket_by=np.minimum(lengths, LONGEST), bucket_batches=20
    ),
}
shares = {name: share_of_padding(each) for name, each in datasets.items()}

"""
## Train

The pooling layer takes the mean over the words alone, because it gets the mask.
"""

keras.utils.set_random_seed(1)
tokens = keras.Input((None,), dtype="int32", name="tokens")
mask = keras.Input((None,), dtype="bool", name="padding_mask")
x = keras.layers.Embedding(WORDS + 2, 32)(tokens)
x = keras.layers.GlobalAveragePooling1D()(x, mask=mask)
x = keras.layers.Dense(len(PARTS), activation="softmax")(x)
model = keras.Model({"tokens": tokens, "padding_mask": mask}, x)
model.compile(
    keras.optimizers.Adam(1e-2),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(datasets["texts of similar length"], epochs=EPOCHS, verbose=0)

test = SampleDataset(for_testing, batch_size=32, **padding)
_, accuracy = model.evaluate(test, verbose=0)

"""
## Look at the result

With bucketing, most of the padding is gone. What the model computes on are the
words and their padding.
"""

for name, share in shares.items():
    numbers_in_all = np.minimum(lengths, LONGEST).sum() / (1 - share)
    print(f"{name:23} padding {share:5.1%}, {numbers_in_all:9,.0f} numbers")
print(f"Accuracy on other texts: {accuracy:.1%}")

without, bucketed = shares.values()
if bucketed > without / 2:
    sys.exit("With bucketing there should be less than half of the padding.")
if accuracy < 0.7:
    sys.exit(f"The accuracy is {accuracy:.0%}; it should be 70% or more.")
