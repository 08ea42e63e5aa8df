"""Image files to a plain loop, in batches of 32, resized to 224 by 224.

    python -m benchmarks.images [options of python -m benchmarks]

Two producers, or Keras's and TensorFlow's own number of threads. The files are
made once, in the folder for temporary files.

- camera: 400 JPEGs of 1600 by 1200, of which a smaller image is decoded where
  the decoder is asked for one.
- web: 2,000 JPEGs of 500 by 375, too small for that.

"torch" and "stock" decode whole images with Pillow, as their tutorials do;
"torch draft" has the code of ours. "docstring" is the class in the docstring of
`keras.utils.PyDataset`, with scikit-image. "generator" is Keras's
`ImageDataGenerator` with rotations, in the caller; and with `accelerate`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.meter import again_and_again, measure_loop

FIGURES = (
    harness.Figure("images_per_s", "images/s", larger_is_better=True),
    harness.Figure("cpu_ms", "CPU ms/batch"),
    harness.Figure("peak_pss_mb", "PSS MB"),
)
TIMEOUT_S = 120.0
SIDE = 224
BATCH = 32
PRODUCERS = 2
FILES = {"camera": (400, 1600, 1200), "web": (2000, 500, 375)}
LOADERS = (
    "fastdata",
    "fastdata threads",
    "keras",
    "torch",
    "torch draft",
    "stock",
    "docstring",
    "generator",
    "generator accelerated",
)


def cases() -> Iterator[harness.Case]:
    return harness.combine(files=tuple(FILES), loader=LOADERS)


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    paths = make_files(case["files"])
    labels = np.arange(len(paths)) % 10
    with contextlib.ExitStack() as stack:
        batches = _FEEDS[case["loader"]](paths, labels, stack)
        figures = measure_loop(batches, seconds, peers.AHEAD)
    figures["images_per_s"] = figures["batches_per_s"] * BATCH
    return figures


def make_files(kind: str) -> list[str]:
    """Paths of images that compress like photographs."""
    from PIL import Image

    count, width, height = FILES[kind]
    folder = pathlib.Path(tempfile.gettempdir(), f"benchmark-images-{kind}")
    paths = [folder / "a" / f"{number:04}.jpg" for number in range(count)]
    folder.joinpath("a").mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        if path.exists():
            continue
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), "uint8"))
        smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
        grain = rng.normal(0, 12, (height, width, 1))
        pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype("uint8")
        partial = path.with_suffix(f".{os.getpid()}")
        Image.fromarray(pixels).save(partial, "JPEG", quality=85)
        partial.rename(path)
    return [str(path) for path in paths]


# -- what feeds --------------------------------------------------------------


def _ours(processes: bool) -> Any:
    def feed(
        paths: list[str], labels: np.ndarray, stack: contextlib.ExitStack
    ) -> Iterator[Any]:
        from keras_fastdata import ImageFileDataset

        dataset = ImageFileDataset(
            paths,
            labels,
            SIDE,
            BATCH,
            drop_remainder=True,
            workers=PRODUCERS,
            use_multiprocessing=processes,
            max_queue_size=peers.AHEAD,
        )
        stack.enter_context(dataset)
        return again_and_again(dataset)

    return feed


def _keras(
    paths: list[str], labels: np.ndarray, stack: contextlib.ExitStack
) -> Iterator[Any]:
    import keras

    folder = pathlib.Path(paths[0]).parent.parent
    dataset = keras.utils.image_dataset_from_directory(
        str(folder),
        image_size=(SIDE, SIDE),
        batch_size=BATCH,
        shuffle=False,
        verbose=False,
    )
    for images, numbers in dataset.repeat():
        yield images.numpy(), numbers.numpy()


def _torch(draft: bool) -> Any:
    def feed(
        paths: list[str], labels: np.ndarray, stack: contextlib.ExitStack
    ) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        loader = DataLoader(
            Samples(paths, labels, draft),
            batch_size=BATCH,
            drop_last=True,
            num_workers=PRODUCERS,
            prefetch_factor=peers.AHEAD // PRODUCERS,
            persistent_workers=True,
        )
        return again_and_again(loader)

    return feed


def _stock(read: Callable[[str], np.ndarray]) -> Any:
    def feed(
        paths: list[str], labels: np.ndarray, stack: contextlib.ExitStack
    ) -> Iterator[Any]:
        batches = Batches(paths, labels, read)
        loader = peers.open_loader(
            "stock processes", batches, PRODUCERS, len(paths) // BATCH
        )
        return again_and_again(stack.enter_context(loader))

    return feed


def _generator(place: dict[str, Any]) -> Any:
    def feed(
        paths: list[str], labels: np.ndarray, stack: contextlib.ExitStack
    ) -> Iterator[Any]:
        from keras.src.legacy.preprocessing.image import ImageDataGenerator

        from keras_fastdata import accelerate

        images = ImageDataGenerator(
            rotation_range=20, horizontal_flip=True
        ).flow_from_directory(
            pathlib.Path(paths[0]).parent.parent,
            target_size=(SIDE, SIDE),
            batch_size=BATCH,
            seed=1,
        )
        dataset = accelerate(images, max_queue_size=peers.AHEAD, **place)
        return again_and_again(stack.enter_context(dataset))

    return feed


class Batches:
    """A batch of images, read as in the docstring of `PyDataset`."""

    def __init__(
        self,
        paths: list[str],
        labels: np.ndarray,
        read: Callable[[str], np.ndarray],
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.read = read

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * BATCH, (index + 1) * BATCH)
        images = np.array([self.read(path) for path in self.paths[part]])
        return images, self.labels[part]


class Samples:
    """Images as PyTorch's tutorials read them, or as `ImageFileDataset` does.

    Args:
        paths: Of the files.
        labels: A number for each.
        draft: Whether only so much is decoded as the new size needs.
    """

    def __init__(
        self, paths: list[str], labels: np.ndarray, draft: bool
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.draft = draft

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return read_with_pillow(self.paths[index], self.draft), self.labels[
            index
        ]


def read_with_pillow(path: str, draft: bool = False) -> np.ndarray:
    """One image of 224 by 224."""
    from PIL import Image

    with Image.open(path) as image:
        if draft:
            image.draft("RGB", (SIDE, SIDE))
        small = image.convert("RGB").resize(
            (SIDE, SIDE), Image.Resampling.BILINEAR
        )
    return np.array(small)


def read_with_skimage(path: str) -> np.ndarray:
    """One image, as the docstring of `PyDataset` reads it."""
    from skimage.io import imread
    from skimage.transform import resize

    image: np.ndarray = resize(imread(path), (SIDE, SIDE))
    return image


_FEEDS: dict[str, Any] = {
    "fastdata threads": _ours(processes=False),
    "fastdata": _ours(processes=True),
    "keras": _keras,
    "torch": _torch(draft=False),
    "torch draft": _torch(draft=True),
    "stock": _stock(read_with_pillow),
    "docstring": _stock(read_with_skimage),
    "generator": _generator({"workers": 0}),
    "generator accelerated": _generator(
        {"workers": PRODUCERS, "use_multiprocessing": True}
    ),
}


if __name__ == "__main__":
    harness.main(["images"])
