"""Augmentation libraries as they are: other images in every epoch."""

from __future__ import annotations

from augmenter_samples import Loader

from keras_fastdata import accelerate


def _images(workers, **place):
    with accelerate(Loader(), workers, seed=1, **place) as dataset:
        epochs = [batch for _ in range(2) for batch in dataset]
    return [image.tobytes() for batch in epochs for image in batch]


def test_albumentations_draws_alike_in_workers_and_never_twice():
    inline = _images(0)
    assert len(set(inline)) == len(inline) == 32
    assert _images(2, use_multiprocessing=True) == inline
