"""Reads an image file into an array of pixels of a given size.

    open -> decode (JPEGs at reduced size) -> turn upright -> resize

Pillow does all steps if it is alone. If they are installed, simplejpeg decodes
JPEGs, and cykooz.resizer resizes.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_faster
from keras_fastdata._validation import one_of

FORMATS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
# Names of filters in cykooz_resizer, and in Pillow.
RESAMPLING = {
    "nearest": (None, "NEAREST"),
    "bilinear": ("bilinear", "BILINEAR"),
    "bicubic": ("catmull_rom", "BICUBIC"),
    "area": ("box", "BOX"),
    "lanczos3": ("lanczos3", "LANCZOS"),
}
_ORIENTATION = 0x0112  # the EXIF tag
_LYING = (5, 6, 7, 8)  # orientations that swap height and width

# A thread keeps the memory that it decodes into for its next image, up to this
# size. Fresh memory from the kernel would cost half as much time as decoding.
_KEPT_BYTES = 1 << 25

Pixels = npt.NDArray[np.uint8]  # of shape (height, width, channels)
_Box = tuple[float, float, float, float]  # left, upper, right, lower


class _Kept(threading.local):
    """The memory and the resizer that a thread reuses for each image."""

    memory = np.empty(0, np.uint8)  # to decode into
    resizer: Any = None  # a `cykooz_resizer.Resizer`, after the first use

    def room(self, nbytes: int) -> Pixels:
        """Returns a buffer for an image; a later call can reuse the buffer."""
        if nbytes > _KEPT_BYTES:
            return np.empty(nbytes, np.uint8)
        if nbytes > self.memory.nbytes:
            self.memory = np.empty(nbytes, np.uint8)
        return self.memory


_kept = _Kept()


def require() -> None:
    """Raises an `ImportError` if Pillow cannot be imported."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ImageFileDataset reads images with Pillow, which cannot be "
            f"imported ({error}). Pass a `decoder`, or `pip install "
            "'keras-fastdata[images]'`, which is Pillow with two packages "
            "that make it faster."
        ) from None


def check(color_mode: str, crops: bool, pads: bool) -> None:
    """Raises `ValueError` unless arguments about an image's form are valid."""
    one_of("color_mode", color_mode, tuple(MODES))
    if crops and pads:
        raise ValueError(
            "Only one of `crop_to_aspect_ratio` and `pad_to_aspect_ratio` may "
            "be True."
        )


def decode_as_tensorflow(path: str, mode: str) -> Any:
    """Reads an image file as `tf.io.decode_image` does.

    It ignores EXIF orientation and transparency. simplejpeg has the DCT that
    TensorFlow uses for JPEGs; without it, values differ by a few of 255.

    Args:
        path: The file. Of a moving GIF the first picture is read.
        mode: A key of `MODES`.

    Returns:
        A uint8 array `(height, width, channels)`, possibly read-only. The next
        JPEG in this thread overwrites it.
    """
    from PIL import Image

    with Image.open(path) as image:
        simplejpeg = import_faster("simplejpeg")
        is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
        if is_jpeg and simplejpeg is not None:
            with open(path, "rb") as file:
                data = file.read()
            name = "GRAY" if mode == "grayscale" else MODES[mode]
            room = _kept.room(math.prod(image.size) * len(name))
            return simplejpeg.decode_jpeg(data, name, fastdct=True, buffer=room)
        if mode == "grayscale" and image.format == "JPEG":
            image.draft("L", image.size)
        plain = _in_bytes(image)
        if mode == "grayscale" and plain.mode not in ("L", "LA", "1"):
            # The weights of libpng.
            colours = np.asarray(plain.convert("RGB")).astype(np.int32)
            grey = colours @ np.array([9797, 19234, 3737], np.int32) >> 15
            return grey.astype(np.uint8)[:, :, np.newaxis]
        found = np.asarray(plain.convert(MODES[mode]))
    return found[:, :, np.newaxis] if found.ndim == 2 else found


@dataclasses.dataclass(frozen=True)
class ImageSpec:
    """The size and format that images are converted to."""

    size: tuple[int, int]  # height and width
    mode: str  # a key of `MODES`
    interpolation: str  # a key of `RESAMPLING`
    crops: bool  # to the aspect ratio of `size`
    pads: bool  # with black, to that ratio


def read(path: str, form: ImageSpec) -> Pixels:
    """Reads an image file into an array `(height, width, channels)`.

    The array may be read-only.
    """
    from PIL import Image

    height, width = form.size
    with Image.open(path) as image:
        orientation = image.getexif().get(_ORIENTATION, 1)
        size = image.size[::-1] if orientation in _LYING else image.size
        box, wanted = _fitted(size, form)
        # The decoded image must not be smaller than the result.
        scale = max(
            wanted[0] / (box[2] - box[0]), wanted[1] / (box[3] - box[1])
        )
        pixels = _decode(image, MODES[form.mode], scale, orientation)
    if form.crops:
        across, down = pixels.shape[1] / size[0], pixels.shape[0] / size[1]
        left, upper = round(box[0] * across), round(box[1] * down)
        kept = (
            max(1, round((box[2] - box[0]) * across)),
            max(1, round((box[3] - box[1]) * down)),
        )
        pixels = pixels[upper : upper + kept[1], left : left + kept[0]]
    resized = _resize(pixels, wanted, form.interpolation)
    if wanted == (width, height):
        return resized
    whole = np.zeros((height, width, resized.shape[2]), np.uint8)
    left, upper = (width - wanted[0]) // 2, (height - wanted[1]) // 2
    whole[upper : upper + wanted[1], left : left + wanted[0]] = resized
    return whole


def _decode(image: Any, mode: str, scale: float, orientation: int) -> Pixels:
    """Decodes an image, and applies its EXIF orientation.

    A JPEG is decoded at half, a quarter or an eighth of its size if that is
    large enough. (Other eighths are possible, but slower than the full size.)

    `mode` is Pillow's name; `scale` is the least size, relative to the image's
    own; `orientation` is the value of the EXIF tag.
    """
    from PIL import ImageOps

    width, height = image.size
    needed = math.ceil(scale * width), math.ceil(scale * height)
    # Pillow decodes with the same library, but takes a third longer.
    simplejpeg = import_faster("simplejpeg")
    is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    if is_jpeg and simplejpeg is not None:
        pixels = _decode_jpeg(simplejpeg, image, mode, needed)
        if pixels is not None:
            return _turn(pixels, orientation)
    image.draft("L" if mode == "L" else "RGB", needed)
    upright = _in_bytes(ImageOps.exif_transpose(image))
    if upright.mode != mode:
        upright = upright.convert(mode)
    found = np.asarray(upright)
    return found[:, :, np.newaxis] if found.ndim == 2 else found


def _decode_jpeg(
    simplejpeg: Any, image: Any, mode: str, needed: tuple[int, int]
) -> Pixels | None:
    """Decodes a JPEG with simplejpeg, without applying its EXIF rotation.

    Returns `None` if simplejpeg cannot decode the file. The next JPEG in this
    thread overwrites the pixels.
    """
    least = image.size
    for _ in range(3):
        half = -(-least[0] // 2), -(-least[1] // 2)
        if half[0] < needed[0] or half[1] < needed[1]:
            break
        least = half
    image.fp.seek(0)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            image.fp.read(),
            "GRAY" if mode == "L" else mode,
            min_width=least[0],
            min_height=least[1],
            buffer=_kept.room(math.prod(image.size) * len(mode)),
        )
    except ValueError:
        return None  # Pillow may accept the file, or says what is wrong
    return pixels


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    """Applies an EXIF orientation to the pixels of an image."""
    if orientation in _LYING:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _resize(
    pixels: Pixels, size: tuple[int, int], interpolation: str
) -> Pixels:
    """Resizes an image; the result does not share memory with `pixels`."""
    height, width, channels = pixels.shape
    if size == (width, height):
        return pixels.copy()
    name, pillows = RESAMPLING[interpolation]
    # Pillow's filters, in a fifth of its time.
    cykooz = import_faster("cykooz_resizer")
    if cykooz is None:
        from PIL import Image

        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        resized = image.resize(size, Image.Resampling[pillows])
        return np.asarray(resized).reshape(size[1], size[0], channels)
    method = cykooz.ResizeAlg.nearest()
    if name is not None:
        method = cykooz.ResizeAlg.convolution(cykooz.FilterType[name])
    suffix = {1: "", 3: "x3", 4: "x4"}[channels]
    kind = getattr(cykooz.PixelType, f"U8{suffix}")
    source = cykooz.ImageData(width, height, kind, pixels.tobytes())
    target = cykooz.ImageData(*size, kind)
    options = cykooz.ResizeOptions(method, use_alpha=channels == 4)
    if _kept.resizer is None:
        _kept.resizer = cykooz.Resizer()
    _kept.resizer.resize(source, target, options)
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(
        size[1], size[0], channels
    )


def _fitted(
    size: tuple[int, int], form: ImageSpec
) -> tuple[_Box, tuple[int, int]]:
    """Returns the box to crop from an image, and the size after resizing.

    Sizes are width and height; `form.size` is height and width.
    """
    height, width = form.size
    whole = (0.0, 0.0, float(size[0]), float(size[1]))
    if form.crops:
        # The same pixels that Keras crops to.
        kept = (
            max(1, min(size[0], int(size[1] * width / height))),
            max(1, min(size[1], int(size[0] * height / width))),
        )
        left, upper = (size[0] - kept[0]) // 2, (size[1] - kept[1]) // 2
        return (left, upper, left + kept[0], upper + kept[1]), (width, height)
    if form.pads:
        scale = min(width / size[0], height / size[1])
        width, height = (max(1, round(side * scale)) for side in size)
    return whole, (width, height)


def _in_bytes(image: Any) -> Any:
    """Converts an image with 16 bits per channel to 8 bits."""
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    values = np.asarray(image).astype(np.int64) >> 8
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
