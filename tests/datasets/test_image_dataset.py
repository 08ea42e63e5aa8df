"""Image files: decoded, turned, resized, labelled, and found in folders."""

from __future__ import annotations

import functools
import pathlib
import sys

import keras
import numpy as np
import pytest
import simplejpeg
from image_samples import doubled, flipped, halves_of_a_png
from PIL import Image, ImageOps
from places import PLACES, everywhere, quickly

from keras_fastdata import ImageFileDataset
from keras_fastdata.datasets import decoding

pytestmark = pytest.mark.usefixtures("kept_forkserver")

SIZE = (24, 32)


def picture(width=90, height=60, seed=0):
    """A smooth picture that is different at every corner."""
    rng = np.random.default_rng(seed)
    corners = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype="uint8"))
    return corners.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def paths(tmp_path):
    """Seven PNGs of different sizes."""
    made = []
    for number in range(7):
        path = tmp_path / f"{number}.png"
        picture(60 + 7 * number, 50 + 3 * number, number).save(path)
        made.append(path)
    return made


def read(path, **kwargs):
    """One image, as the dataset reads it."""
    kwargs.setdefault("image_size", SIZE)
    with ImageFileDataset([path], workers=0, **kwargs) as dataset:
        (batch,) = dataset
    return batch[0]


def plain(path, size=SIZE):
    """The same in plain Pillow, without a shortcut."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return np.asarray(
        upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    )


def assert_near(images, wanted, most=1):
    """Within rounding: the order of rows and columns is not Pillow's."""
    assert images.shape == wanted.shape
    assert abs(images.astype(int) - wanted).max() <= most


# -- batches -----------------------------------------------------------------


@everywhere
def test_batches_are_those_of_a_plain_loop(place, paths):
    dataset = ImageFileDataset(paths, range(7), SIZE, 3, **PLACES[place])
    with dataset:
        batches = list(dataset)
    assert [len(images) for images, _ in batches] == [3, 3, 1]
    images, labels = map(np.concatenate, zip(*batches, strict=True))
    assert images.dtype == "uint8"
    assert labels.dtype == "int32"
    assert labels.tolist() == list(range(7))
    np.testing.assert_array_equal(images, np.stack(list(map(read, paths))))
    assert_near(images, np.stack(list(map(plain, paths))))


@everywhere
def test_no_image_and_one_image(place, paths):
    with ImageFileDataset([], [], SIZE, **PLACES[place]) as dataset:
        assert list(dataset) == []
    with ImageFileDataset(paths[:1], [3], SIZE, **PLACES[place]) as dataset:
        ((images, labels),) = dataset
    assert images.shape == (1, *SIZE, 3)
    assert labels.tolist() == [3]


@everywhere
def test_a_transform_may_draw_for_each_image(place, paths):
    kwargs = {"transform": flipped, "seed": 3, "shuffle": True}
    by_size = []
    for size in (2, 4):
        dataset = ImageFileDataset(
            paths, range(7), SIZE, size, **kwargs, **PLACES[place]
        )
        with dataset:
            found = {
                int(label): image.tobytes()
                for images, labels in dataset
                for image, label in zip(images, labels, strict=True)
            }
        by_size.append(found)
    assert by_size[0] == by_size[1]
    unflipped = {n: read(path).tobytes() for n, path in enumerate(paths)}
    same = sum(by_size[0][n] == unflipped[n] for n in range(7))
    assert 0 < same < 7


def test_a_transform_of_the_image_alone_gets_it_alone(paths):
    np.testing.assert_array_equal(
        read(paths[0], transform=doubled), read(paths[0]) // 2 * 2
    )


def test_a_transform_may_write_to_its_image(paths):
    def darken(image):
        image[:4] = 0
        return image

    assert not read(paths[0], transform=darken)[:4].any()


class Darker(ImageFileDataset):
    def transform(self, image):
        return image // 2


def test_a_subclass_may_have_a_transform(paths):
    with Darker(paths[:1], image_size=SIZE, workers=0) as dataset:
        (batch,) = dataset
    np.testing.assert_array_equal(batch[0], read(paths[0]) // 2)


def test_a_decoder_whose_values_would_change_is_refused(paths):
    with pytest.raises(TypeError, match="returned float64"):
        read(paths[0], decoder=halves_of_a_png)


def test_another_decoder_takes_the_place_of_pillow(paths):
    image = read(paths[0], decoder=halves_of_a_png, dtype="float32")
    np.testing.assert_array_equal(image, np.full((*SIZE, 3), 0.5, "float32"))


@pytest.mark.backend
@pytest.mark.parametrize("place", ["2 processes", "4 threads"])
def test_a_model_trains_on_images(place, paths):
    model = keras.Sequential(
        [
            keras.Input((*SIZE, 3), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(7),
        ]
    )
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    dataset = ImageFileDataset(
        paths, range(7), SIZE, 4, shuffle=True, **PLACES[place]
    )
    with dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


# -- one image ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "channels"), [("rgb", 3), ("rgba", 4), ("grayscale", 1)]
)
@pytest.mark.parametrize("kind", ["RGB", "L", "P", "LA", "RGBA", "1", "CMYK"])
def test_every_kind_of_image_has_the_channels_asked_for(
    mode, channels, kind, tmp_path
):
    path = tmp_path / ("image.jpg" if kind == "CMYK" else "image.png")
    picture().convert(kind).save(path)
    image = read(path, color_mode=mode)
    assert image.shape == (*SIZE, channels)
    with Image.open(path) as opened:
        wanted = opened.convert("L" if channels == 1 else mode.upper())
    wanted = np.asarray(wanted.resize(SIZE[::-1], Image.Resampling.BILINEAR))
    difference = image.astype(int) - wanted.reshape(image.shape)
    assert abs(difference).mean() < 3


def test_sixteen_bits_become_eight(tmp_path):
    values = np.linspace(0, 65535, 60 * 90).reshape(60, 90).astype("uint16")
    Image.fromarray(values).save(tmp_path / "deep.png")
    image = read(tmp_path / "deep.png", color_mode="grayscale")
    assert image.min() < 5
    assert image.max() > 250
    assert 120 < image.mean() < 135


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [picture(seed=n).convert("P") for n in range(3)]
    path = tmp_path / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert_near(read(path), plain(path))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(90, 60), (1600, 1200)], ids=str)
def test_images_are_turned_upright(orientation, size, tmp_path):
    upright = picture(*size)
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright
    if orientation in undo:
        stored = upright.transpose(undo[orientation])
    path = tmp_path / "photo.jpg"
    stored.save(path, exif=exif, quality=95)
    wanted = upright.resize(SIZE[::-1], Image.Resampling.BILINEAR)
    difference = read(path).astype(int) - np.asarray(wanted)
    assert abs(difference).mean() < 2


@pytest.fixture
def decoded(monkeypatch):
    """The sizes that images have been decoded in."""
    sizes = []
    decode = decoding._decode

    def noted(*args):
        pixels = decode(*args)
        sizes.append((pixels.shape[1], pixels.shape[0]))
        return pixels

    monkeypatch.setattr(decoding, "_decode", noted)
    return sizes


@pytest.mark.parametrize("aspect", ["", "crop", "pad"])
@pytest.mark.parametrize(
    "size", quickly([(1600, 1200), (700, 1900)], (700, 1900)), ids=str
)
def test_a_jpeg_that_shrinks_is_decoded_small_and_looks_the_same(
    aspect, size, tmp_path, decoded
):
    path = tmp_path / "photo.jpg"
    picture(*size).save(path, quality=95)
    picture(*size).save(path.with_suffix(".png"))
    how = {f"{aspect}_to_aspect_ratio": True} if aspect else {}
    small, whole = read(path, **how), read(path.with_suffix(".png"), **how)
    assert decoded[0][0] <= size[0] / 4
    assert decoded[1] == size
    assert abs(small.astype(int) - whole).mean() < 3


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_in_its_own_size_has_the_pixels_that_pillow_finds(
    mode, tmp_path
):
    path = tmp_path / "photo.jpg"
    picture(64, 48).convert(mode).save(path, quality=80)
    with Image.open(path) as image:
        wanted = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(read(path, image_size=(48, 64)), wanted)


def test_a_jpeg_is_decoded_at_half_its_size_where_that_will_do(
    tmp_path, decoded
):
    path = tmp_path / "photo.jpg"
    picture(500, 375).save(path)
    read(path, image_size=224)
    read(path, image_size=(187, 250))
    read(path, image_size=(188, 251))
    assert decoded == [(500, 375), (250, 188), (500, 375)]


@pytest.mark.parametrize("kept_bytes", [0, 1 << 25])
def test_images_that_are_not_resized_share_no_memory(
    kept_bytes, tmp_path, monkeypatch
):
    # What a thread decodes into is used for the next image.
    monkeypatch.setattr(decoding, "_KEPT_BYTES", kept_bytes)
    paths = [tmp_path / f"{number}.jpg" for number in range(2)]
    for path, colour in zip(paths, ("white", "black"), strict=True):
        Image.new("RGB", (64, 48), colour).save(path)
    form = decoding.ImageSpec((48, 64), "rgb", "bilinear", False, False)
    white, black = (decoding.read(str(path), form) for path in paths)
    assert (white == 255).all()
    assert (black == 0).all()


def test_a_jpeg_of_inks_is_read(tmp_path):
    path = tmp_path / "print.jpg"
    Image.new("CMYK", (40, 30), (255, 0, 0, 0)).save(path)
    assert (read(path) == [0, 255, 255]).all()


def test_a_jpeg_with_something_in_between_is_read_as_pillow_reads_it(tmp_path):
    path = tmp_path / "photo.jpg"
    picture(64, 48).save(path)
    good = read(path)
    data = path.read_bytes()
    at = data.index(b"\xff\xda")  # the scan begins
    path.write_bytes(data[:at] + b"junk" + data[at:])
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(path.read_bytes())
    np.testing.assert_array_equal(read(path), good)


def _with_border(width, height):
    """White, but for a black border of a fifth at its longer sides."""
    pixels = np.full((height, width), 255, "uint8")
    if width > height:
        pixels[:, : width // 5] = pixels[:, -width // 5 :] = 0
    else:
        pixels[: height // 5] = pixels[-height // 5 :] = 0
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(100, 60), (60, 100)], ids=str)
def test_cropping_cuts_the_longer_sides_off(size, tmp_path):
    path = tmp_path / "wide.png"
    _with_border(*size).save(path)
    kwargs = {"image_size": 30, "color_mode": "grayscale"}
    assert read(path, crop_to_aspect_ratio=True, **kwargs).min() == 255
    assert read(path, **kwargs).min() == 0


@pytest.mark.parametrize("size", [(100, 60), (60, 100)], ids=str)
def test_padding_fills_the_shorter_sides_with_black(size, tmp_path):
    path = tmp_path / "wide.png"
    Image.new("L", size, 255).save(path)
    image = read(
        path,
        image_size=50,
        color_mode="grayscale",
        pad_to_aspect_ratio=True,
    )[:, :, 0]
    if size[0] < size[1]:
        image = image.T
    assert (image[10:40] == 255).all()
    assert (image[:10] == 0).all()
    assert (image[40:] == 0).all()


@pytest.mark.parametrize(
    "interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos3"]
)
def test_every_interpolation_is_pillows(interpolation, paths):
    resampling = {
        "nearest": 0,
        "lanczos3": 1,
        "bilinear": 2,
        "bicubic": 3,
        "area": 4,
    }[interpolation]
    with Image.open(paths[0]) as image:
        wanted = np.asarray(image.resize(SIZE[::-1], resampling))
    found = read(paths[0], interpolation=interpolation)
    # Some filters overshoot, and are cut off in between.
    assert_near(found, wanted, 8 if interpolation == "lanczos3" else 2)


@pytest.mark.parametrize("size", [(8, 5), (8, 7), (5, 8), (9, 4)], ids=str)
def test_cropping_takes_the_pixels_that_keras_takes(size, tmp_path):
    width, height = size
    side = min(size)
    pixels = np.arange(width * height, dtype="uint8").reshape(height, width)
    path = tmp_path / "small.png"
    Image.fromarray(pixels).save(path)
    kwargs = {
        "image_size": (side, side),
        "interpolation": "nearest",
        "crop_to_aspect_ratio": True,
    }
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "small.png")
    theirs = by_keras(tmp_path, labels=None, color_mode="grayscale", **kwargs)
    wanted = next(iter(theirs)).numpy()[0]
    found = read(path, color_mode="grayscale", **kwargs)
    np.testing.assert_array_equal(found, wanted)


def test_a_narrow_crop_leaves_something(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (90, 60), "red").save(path)
    found = read(path, image_size=(1, 1000), crop_to_aspect_ratio=True)
    assert (found == [255, 0, 0]).all()


# -- files that cannot be read -----------------------------------------------


@everywhere
@pytest.mark.parametrize("how", ["broken", "cut off", "missing"])
def test_a_file_that_cannot_be_read_is_named(place, how, paths):
    match how:
        case "broken":
            paths[4].write_text("no image")
        case "cut off":
            paths[4].write_bytes(paths[4].read_bytes()[:200])
        case "missing":
            paths[4].unlink()
    with (
        ImageFileDataset(paths, None, SIZE, 3, **PLACES[place]) as dataset,
        pytest.raises(OSError) as caught,  # noqa: PT011
    ):
        list(dataset)
    assert f"While reading {paths[4]}." in caught.value.__notes__


@everywhere
def test_a_batch_with_such_a_file_can_be_skipped(place, paths, caplog):
    paths[4].write_text("no image")
    dataset = ImageFileDataset(
        paths, range(7), SIZE, 3, on_error="skip", **PLACES[place]
    )
    with dataset:
        labels = [labels.tolist() for _, labels in dataset]
    assert labels == [[0, 1, 2], [6]]
    assert str(paths[4]) in caplog.text


# -- folders -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Three classes, one with a folder of its own, and what is no image."""
    names = ["cats/b.png", "cats/a.PNG", "cats/deep/c.jpg", "dogs/a.bmp"]
    names += [f"eels/{n:02}.png" for n in range(16)] + [".hidden/a.png"]
    for name in names:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(30, 20).save(path)
    (tmp_path / "images" / "cats" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def by_keras(folder, **kwargs):
    return keras.utils.image_dataset_from_directory(
        str(folder), verbose=False, **kwargs
    )


def labels_of(dataset):
    with dataset:
        return np.concatenate([labels for _, labels in dataset])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"label_mode": "categorical"},
        {"class_names": ["eels", "cats"]},
        {"class_names": ["eels", "cats"], "label_mode": "binary"},
        {"labels": list(range(21))},
        {"label_mode": None},
        {"labels": None},
    ],
    ids=str,
)
def test_files_and_labels_are_those_of_keras(arguments, folder):
    theirs = by_keras(folder, shuffle=False, image_size=(8, 8), **arguments)
    ours = ImageFileDataset.from_directory(
        folder, shuffle=False, image_size=(8, 8), workers=0, **arguments
    )
    assert list(ours.paths) == theirs.file_paths
    assert ours.class_names == theirs.class_names
    if ours.labels is None:
        assert theirs.element_spec.shape[-1] == 3
        return
    wanted = np.concatenate([labels.numpy() for _, labels in theirs])
    np.testing.assert_array_equal(labels_of(ours), wanted, strict=True)


def test_a_sampler_draws_from_the_training_part_of_a_folder(folder):
    split = {"validation_split": 0.3, "seed": 5, "subset": "both"}
    plain = ImageFileDataset.from_directory(folder, **split)
    training, validation = ImageFileDataset.from_directory(
        folder, sampler="balanced", workers=0, **split
    )
    assert list(training.paths) == list(plain[0].paths)
    _, counts = np.unique(labels_of(training), return_counts=True)
    assert np.ptp(counts) <= 1
    found = labels_of(validation)
    np.testing.assert_array_equal(found, plain[1].labels)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_split_is_that_of_keras(shuffle, folder):
    split = {"validation_split": 0.3, "seed": 5, "shuffle": shuffle}
    theirs = by_keras(folder, subset="both", **split)
    both = ImageFileDataset.from_directory(folder, subset="both", **split)
    parts = [
        ImageFileDataset.from_directory(folder, subset=name, **split)
        for name in ("training", "validation")
    ]
    for ours, part, known in zip(both, parts, theirs, strict=True):
        assert list(ours.paths) == list(part.paths) == known.file_paths
        assert ours.labels.tolist() == part.labels.tolist()
        for path, label in zip(ours.paths, ours.labels, strict=True):
            folder_name = pathlib.Path(path).relative_to(folder).parts[0]
            assert ours.class_names[label] == folder_name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"label_mode": "binary"}, "needs two classes"),
        ({"label_mode": "words"}, "label_mode"),
        ({"labels": [1, 2]}, "one label for each of the"),
        ({"class_names": ["cats", "owls"]}, r"has no \['owls'\]"),
        ({"labels": None, "class_names": ["cats"]}, "inferred"),
        ({"labels": None, "label_mode": None, "class_names": ["a"]}, "inferr"),
        (
            {"labels": list(range(5, 26)), "label_mode": "categorical"},
            "labels from 0 to",
        ),
        ({"validation_split": 2.0, "subset": "training"}, "between 0 and 1"),
        ({"validation_split": 0.5}, "both or neither"),
        ({"validation_split": 0.5, "subset": "test"}, "validation"),
        ({"validation_split": 0.5, "subset": "training"}, "Pass a `seed`"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(arguments, said, folder):
    with pytest.raises(ValueError, match=said):
        ImageFileDataset.from_directory(folder, **arguments)


def test_a_folder_without_images_says_what_is_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"No images .*\.jpeg"):
        ImageFileDataset.from_directory(tmp_path)


# -- arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (functools.partial(ImageFileDataset, "a"), TypeError, "from_directory"),
        (
            functools.partial(ImageFileDataset, [], [1]),
            ValueError,
            "0 paths",
        ),
        (functools.partial(ImageFileDataset, ["a"], ["b"]), TypeError, "numb"),
        (functools.partial(ImageFileDataset, ["a"], [3**30]), ValueError, "32"),
        (
            functools.partial(ImageFileDataset, ["a"], dtype="int8"),
            ValueError,
            "0 to 255",
        ),
        (
            functools.partial(ImageFileDataset, ["a"], image_size=(1, 2, 3)),
            ValueError,
            "height and a width",
        ),
        (
            functools.partial(ImageFileDataset, ["a"], image_size=None),
            ValueError,
            "height and a width",
        ),
        (
            functools.partial(ImageFileDataset, ["a"], color_mode="bgr"),
            ValueError,
            "rgba",
        ),
        (
            functools.partial(ImageFileDataset, ["a"], interpolation="magic"),
            ValueError,
            "lanczos3",
        ),
        (
            functools.partial(
                ImageFileDataset,
                ["a"],
                crop_to_aspect_ratio=True,
                pad_to_aspect_ratio=True,
            ),
            ValueError,
            "Only one",
        ),
        (
            functools.partial(ImageFileDataset, ["a"], transform="flip"),
            TypeError,
            "must be a function",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_meant_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_number_of_numpys_is_a_size(paths):
    assert read(paths[0], image_size=np.int64(16)).shape == (16, 16, 3)


def test_without_labels_classes_may_be_named_all_the_same(folder):
    (name, *_) = sorted(entry.name for entry in folder.iterdir())
    dataset = ImageFileDataset.from_directory(
        folder, label_mode=None, class_names=[name]
    )
    assert dataset.labels is None


def test_without_pillow_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"Pillow, .*PIL\.Image.*\[images\]"):
        ImageFileDataset(["a"])
    assert len(ImageFileDataset(["a"], decoder=halves_of_a_png)) == 1


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_pillow_alone_gives_its_own_pixels(
    color_mode, pillow_alone, paths, tmp_path
):
    photo = tmp_path / "photo.jpg"
    picture(400, 300).save(photo)
    for path in [*paths, photo]:
        with Image.open(path) as image:
            image.draft(decoding.MODES[color_mode], (SIZE[1], SIZE[0]))
            wanted = image.convert(decoding.MODES[color_mode]).resize(
                (SIZE[1], SIZE[0]), Image.Resampling.BILINEAR
            )
        pixels = read(path, image_size=SIZE, color_mode=color_mode)
        np.testing.assert_array_equal(
            pixels, np.asarray(wanted).reshape(pixels.shape)
        )


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize(
    "split",
    [{}, {"validation_split": 0.2, "subset": "both", "seed": 1}],
    ids=["whole", "split"],
)
def test_what_was_found_is_printed_as_keras_does(
    split, with_labels, folder, capsys
):
    arguments = {} if with_labels else {"labels": None}
    ImageFileDataset.from_directory(folder, **arguments, **split)
    ours = capsys.readouterr().out
    keras.utils.image_dataset_from_directory(str(folder), **arguments, **split)
    assert ours == capsys.readouterr().out != ""
    ImageFileDataset.from_directory(folder, verbose=False, **arguments, **split)
    assert capsys.readouterr().out == ""


def test_a_decoder_gets_an_address_as_it_is():
    address = "s3://bucket/a.png"
    args = {"decoder": halves_of_a_png, "dtype": "float32"}
    with ImageFileDataset([address], **args) as dataset:
        assert dataset.storage is None
        assert dataset[0].shape == (1, 256, 256, 3)
    with pytest.raises(ValueError, match=r"`directory` .*'s3://bucket'"):
        ImageFileDataset.from_directory("s3://bucket")
