"""A `Sequence` as people write it, with an augmentation library inside."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # asks the network

import albumentations
import numpy as np


class Images:
    """Images by number, each augmented anew."""

    def __init__(self):
        image = np.random.default_rng(0).integers(0, 255, (32, 32, 3))
        self.image = image.astype("uint8")
        self.augmentation = albumentations.Compose(
            [
                albumentations.OneOf([albumentations.GaussNoise(p=1)], p=1),
                albumentations.ShiftScaleRotate(p=1),
                albumentations.Compose([albumentations.GaussNoise(p=1)]),
            ]
        )

    def __getitem__(self, index):
        return self.augmentation(image=self.image)["image"]


class Loader:
    """Batches of them."""

    def __init__(self):
        self.images = Images()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.stack([self.images[4 * index + k] for k in range(4)])
