"""A `Sequence` as people write it, with an augmentation library inside."""

from __future__ import annotations

import importlib.util
import os

import numpy as np

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # asks the network

if not hasattr(np, "sctypes"):
    # imgaug 0.4 reads it when it is imported; NumPy 2 has it no more.
    np.sctypes = {
        "int": [np.int8, np.int16, np.int32, np.int64],
        "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
        "float": [np.float16, np.float32, np.float64],
    }

if importlib.util.find_spec("torchvision"):
    import torch

    # Wheels for CUDA cannot load their operators beside a torch without it.
    # No transform calls these, but the import asks that they are declared.
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _operators.define(
                f"{_name}(Tensor boxes, Tensor scores, float iou) -> Tensor"
            )


class Albumentations:
    def __init__(self):
        import albumentations

        self.pipeline = albumentations.Compose(
            [
                albumentations.OneOf([albumentations.GaussNoise(p=1)], p=1),
                albumentations.ShiftScaleRotate(p=1),
                albumentations.Compose([albumentations.GaussNoise(p=1)]),
            ]
        )

    def __call__(self, image):
        return self.pipeline(image=image)["image"]


class Audiomentations:
    """It takes the image for a sound."""

    def __init__(self):
        import audiomentations

        self.pipeline = audiomentations.Compose(
            [
                audiomentations.Gain(p=1),
                audiomentations.TimeStretch(p=1),
                audiomentations.AddGaussianNoise(p=1),
            ]
        )

    def __call__(self, image):
        sound = image.astype("float32").reshape(-1) / 255
        return self.pipeline(sound, sample_rate=16_000)


class Imgaug:
    def __init__(self):
        from imgaug import augmenters

        self.pipeline = augmenters.Sequential(
            [
                augmenters.Affine(rotate=(-20, 20)),
                augmenters.SomeOf(1, [augmenters.Fliplr(0.5)]),
                augmenters.AdditiveGaussianNoise(scale=(10, 20)),
            ],
            random_order=True,
        )

    def __call__(self, image):
        return self.pipeline(image=image)


class Torchvision:
    def __init__(self):
        from torchvision.transforms import v2

        self.pipeline = v2.Compose(
            [
                v2.ToImage(),
                v2.RandomAffine(20, translate=(0.2, 0.2)),
                v2.ColorJitter(0.5, 0.5),
                v2.ToDtype(torch.float32, scale=True),
                v2.GaussianNoise(),
            ]
        )

    def __call__(self, image):
        return self.pipeline(image).numpy()


LIBRARIES = {
    "albumentations": Albumentations,
    "audiomentations": Audiomentations,
    "imgaug": Imgaug,
    "torchvision": Torchvision,
}


class Images:
    """Images by number, each augmented anew."""

    def __init__(self, library):
        image = np.random.default_rng(0).integers(0, 255, (32, 32, 3))
        self.image = image.astype("uint8")
        self.augmentation = LIBRARIES[library]()

    def __getitem__(self, index):
        return self.augmentation(self.image)


class Loader:
    """48 of them, in batches of 6."""

    def __init__(self, library):
        self.images = Images(library)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.stack([self.images[6 * index + k] for k in range(6)])
