"""
Title: A training loop of your own, in PyTorch
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: `for batch in dataset` without Keras's `fit`.
Accelerator: GPU, if there is one
"""

"""
## Introduction

A dataset can be used without `fit`: `for batch in dataset` is one epoch, whose
batches the workers build. Batches are NumPy arrays in shared memory, and
`torch.from_numpy` makes tensors of them without a copy. A batch does not change
as long as you keep it.
"""

"""
## Setup

The data are scikit-learn's handwritten digits.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

from keras_fastdata import SampleDataset

EPOCHS = 10

torch.manual_seed(1)
digits = load_digits()
images = (digits.images / 16).astype("float32")
for_training = len(images) * 4 // 5

"""
## Define the samples

Every digit moves by up to one pixel to the side, at random in each epoch.
"""


class MovedDigits(SampleDataset):
    """Digits that are moved at random."""

    def __init__(self, images, labels, **kwargs):
        super().__init__(**kwargs)
        self.images = images
        self.labels = labels

    @property
    def num_samples(self):
        return len(self.images)

    def get_sample(self, index):
        by = self.rng.integers(-1, 2)
        return np.roll(self.images[index], by, 1), self.labels[index]


"""
## Train
"""

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(
    torch.nn.Flatten(),
    torch.nn.Linear(64, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), 5e-3)

with MovedDigits(
    images[:for_training],
    digits.target[:for_training],
    batch_size=64,
    shuffle=True,
    seed=1,
    workers=2,
    use_multiprocessing=True,
) as dataset:
    for epoch in range(EPOCHS):
        losses = []
        for batch in dataset:
            x, y = (torch.from_numpy(part).to(device) for part in batch)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}")

"""
## Look at the result
"""

with torch.no_grad():
    guess = model(torch.from_numpy(images[for_training:]).to(device)).argmax(1)
accuracy = np.mean(guess.cpu().numpy() == digits.target[for_training:])
print(f"accuracy on other digits: {accuracy:.1%}")
if accuracy < 0.8:
    sys.exit("An accuracy of 80% or more should be reached.")
