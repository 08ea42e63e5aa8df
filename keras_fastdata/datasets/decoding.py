"""From an image file to its pixels, in the size that they are wanted in.

open -> decode (of a JPEG: no more than is needed) -> turn upright -> resize
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
RESAMPLING = {
    "nearest": "NEAREST",
    "bilinear": "BILINEAR",
    "bicubic": "BICUBIC",
    "area": "BOX",
    "lanczos3": "LANCZOS",
}
_ORIENTATION = 0x0112  # the EXIF tag
_LYING = (5, 6, 7, 8)  # orientations that swap height and width

_Box = tuple[float, float, float, float]  # left, upper, right, lower


def require() -> None:
    """Raises an `ImportError` unless images can be decoded."""
    try:
        import PIL.Image  # noqa: F401
        import simplejpeg  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "ImageFileDataset reads images with Pillow and simplejpeg: "
            "`pip install 'keras-fastdata[images]'`. Or pass a `decoder`."
        ) from error


@dataclasses.dataclass(frozen=True)
class Form:
    """What images are to become.

    Attributes:
        size: Height and width.
        mode: A key of `MODES`.
        interpolation: A key of `RESAMPLING`.
        crops: Whether to cut off what does not fit the aspect ratio.
        pads: Whether to fill up with black instead.
    """

    size: tuple[int, int]
    mode: str
    interpolation: str
    crops: bool
    pads: bool


def read(path: str, form: Form) -> npt.NDArray[np.uint8]:
    """Reads an image file.

    Returns:
        Of shape `(height, width, channels)`; may be read-only.
    """
    pixels = np.asarray(_read(path, form))
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def _read(path: str, form: Form) -> Any:
    from PIL import Image, ImageOps

    height, width = form.size
    mode = MODES[form.mode]
    with Image.open(path) as image:
        lies = image.getexif().get(_ORIENTATION, 1) in _LYING
        size = image.size[::-1] if lies else image.size
        box, wanted = _fitted(size, form)
        # Every part of the box must be there in the size it is wanted in.
        scale = max(
            wanted[0] / (box[2] - box[0]), wanted[1] / (box[3] - box[1])
        )
        needed = (
            math.ceil(scale * image.size[0]),
            math.ceil(scale * image.size[1]),
        )
        decoded = _decode(image, mode, needed)
        upright = _in_bytes(ImageOps.exif_transpose(decoded))
        if upright.mode != mode:
            upright = upright.convert(mode)
    if form.crops:
        shrunk = upright.size[0] / size[0], upright.size[1] / size[1]
        left, upper = round(box[0] * shrunk[0]), round(box[1] * shrunk[1])
        kept = (
            max(1, round((box[2] - box[0]) * shrunk[0])),
            max(1, round((box[3] - box[1]) * shrunk[1])),
        )
        upright = upright.crop((left, upper, left + kept[0], upper + kept[1]))
    resampling = Image.Resampling[RESAMPLING[form.interpolation]]
    resized = upright.resize(wanted, resampling)
    if wanted == (width, height):
        return resized
    whole = Image.new(mode, (width, height))
    corner = (width - wanted[0]) // 2, (height - wanted[1]) // 2
    whole.paste(resized, corner)
    return whole


def _decode(image: Any, mode: str, needed: tuple[int, int]) -> Any:
    """Decodes an opened image, a JPEG at a smaller size where that will do.

    Args:
        image: What `PIL.Image.open` returned.
        mode: The mode it is wanted in.
        needed: The least width and height that will do.
    """
    # Pillow decodes JPEGs with the same library; but asks only for halves of
    # halves, not for every eighth, and takes a third longer for whole ones.
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        import simplejpeg
        from PIL import Image

        is_gray = "L" in (image.mode, mode)
        image.fp.seek(0)
        try:
            pixels = simplejpeg.decode_jpeg(
                image.fp.read(),
                "GRAY" if is_gray else "RGB",
                min_width=needed[0],
                min_height=needed[1],
            )
        except ValueError:
            pass  # Pillow may put up with it, or says what is wrong
        else:
            decoded = Image.fromarray(pixels[:, :, 0] if is_gray else pixels)
            decoded.getexif().update(image.getexif())  # how to turn it
            return decoded
    image.draft("L" if mode == "L" else "RGB", needed)
    return image


def _fitted(size: tuple[int, int], form: Form) -> tuple[_Box, tuple[int, int]]:
    """Which part of an image becomes how large a part of the result.

    Args:
        size: Of the image: width and height.
        form: What it is to become.
    """
    height, width = form.size
    whole = (0.0, 0.0, float(size[0]), float(size[1]))
    if form.crops:
        # To the pixel what Keras takes.
        kept = (
            max(1, min(size[0], int(size[1] * width / height))),
            max(1, min(size[1], int(size[0] * height / width))),
        )
        left, upper = (size[0] - kept[0]) // 2, (size[1] - kept[1]) // 2
        return (left, upper, left + kept[0], upper + kept[1]), (width, height)
    if form.pads:
        scale = min(width / size[0], height / size[1])
        return whole, (
            max(1, round(size[0] * scale)),
            max(1, round(size[1] * scale)),
        )
    return whole, (width, height)


def _in_bytes(image: Any) -> Any:
    """An image of 16 bits a channel as one of 8."""
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    values = np.asarray(image).astype(np.int64) >> 8
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
