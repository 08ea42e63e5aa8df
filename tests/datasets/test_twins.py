"""The twins of Keras's utilities: batches, arguments, errors, differences."""

from __future__ import annotations

import functools
import inspect
import pathlib
import struct
import sys
import wave

import keras
import numpy as np
import pytest
from matrix import assert_exactly_once, in_every_way
from PIL import Image
from places import KINDS, in_each_trainer, quickly
from twin_samples import brightness, first_bytes

import keras_fastdata
from keras_fastdata import (
    audio_dataset_from_directory,
    image_dataset_from_directory,
    text_dataset_from_directory,
    timeseries_dataset_from_array,
)

pytestmark = pytest.mark.usefixtures("kept_forkserver")

TWINS = [
    "audio_dataset_from_directory",
    "image_dataset_from_directory",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
]
SIZE = (12, 17)


def of_keras(name, *args, **kwargs):
    if isinstance(kwargs.get("labels"), list):
        kwargs["labels"] = list(kwargs["labels"])  # Keras shuffles the list
    return getattr(keras.utils, name)(*args, **kwargs)


def flat(batch):
    return list(batch) if isinstance(batch, tuple) else [batch]


def assert_same(ours, theirs):
    """Asserts that a dataset has the batches of one of Keras's, to the byte."""
    with ours:
        found = list(ours)
    wanted = list(theirs.as_numpy_iterator())
    assert len(found) == len(wanted) == len(ours)
    for batch, other in zip(found, wanted, strict=True):
        for part, known in zip(flat(batch), flat(other), strict=True):
            known = np.asarray(known, object if type(known) is bytes else None)
            assert (part.dtype, part.shape) == (known.dtype, known.shape)
            if known.dtype == object:
                assert part.tolist() == known.tolist()
            else:
                assert part.tobytes() == known.tobytes()


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_the_arguments_and_defaults_of_keras(name):
    theirs = inspect.signature(getattr(keras.utils, name)).parameters
    ours = inspect.signature(getattr(keras_fastdata, name)).parameters
    *shared, kwargs = ours.values()
    assert kwargs.kind is kwargs.VAR_KEYWORD
    described = [(p.name, p.default, p.kind) for p in shared]
    assert described == [(p.name, p.default, p.kind) for p in theirs.values()]


# -- folders -----------------------------------------------------------------


def picture(size, seed, mode="RGB"):
    """A picture with smooth and sharp parts."""
    rng = np.random.default_rng(seed)
    corners = Image.fromarray(rng.integers(0, 256, (3, 4, 4), dtype="uint8"))
    smooth = np.array(corners.resize(size, Image.Resampling.BICUBIC))
    smooth[::7, ::5] = rng.integers(0, 256, 4)
    smooth[..., 3] = 255 if mode != "RGBA" else smooth[..., 3]
    found = Image.fromarray(smooth)
    return (
        found.convert("RGB").convert("P")
        if mode == "P"
        else found.convert(mode)
    )


def write_wave(path, samples, channels=1, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, "<i2").tobytes())


def sound(count, seed, channels=1):
    rng = np.random.default_rng(seed)
    return rng.integers(-(1 << 15), 1 << 15, (count, channels))


NAMES = [
    *(f"cats/{n}" for n in range(5)),
    "cats/deep/0",
    *(f"dogs/{n}" for n in range(3)),
    *(f"eels/{n:02}" for n in range(4)),
    ".hidden/0",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of images, texts and sounds, and files of other kinds."""
    root = tmp_path_factory.mktemp("files")
    for number, name in enumerate(NAMES):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        end = (".png", ".jpg", ".PNG", ".bmp")[number % 4]
        size = (20 + 3 * number, 31 - number)
        picture(size, number).save(path.with_suffix(end), quality=80)
        text = "é" * number + f"text {name}\n" * (number % 4)
        path.with_suffix(".txt").write_text(text, "utf-8")
        write_wave(path.with_suffix(".wav"), sound(9 + 5 * number, number))
    (root / "cats" / "4.txt").write_bytes(b"ends in zeros\0\xff\0")
    (root / "cats" / "notes.md").write_text("no sample")
    linked = root / "dogs" / "linked"
    linked.symlink_to(root / "eels", target_is_directory=True)
    return root


OF_KIND = {
    "image": (image_dataset_from_directory, {"image_size": SIZE}),
    "text": (text_dataset_from_directory, {}),
    "audio": (audio_dataset_from_directory, {}),
}
in_each_kind = pytest.mark.parametrize("kind", OF_KIND)


def both(folder, kind, **kwargs):
    """The dataset of the twin, and that of Keras."""
    ours, more = OF_KIND[kind]
    kwargs = {"verbose": False, "shuffle": False, **more, **kwargs}
    theirs = of_keras(ours.__name__, str(folder), **kwargs)
    return ours(folder, workers=0, **kwargs), theirs


LABELS = list(range(len(NAMES)))
ARGUMENTS = [
    {"batch_size": 5},
    {"batch_size": None},
    {"label_mode": "categorical"},
    {"labels": "inferred", "class_names": ["eels", "cats"]},
    {"label_mode": "binary", "class_names": ["eels", "dogs"]},
    {"labels": LABELS},
    {"labels": LABELS, "label_mode": "categorical"},
    {"labels": [n % 2 for n in LABELS], "label_mode": "binary"},
    {"label_mode": None},
    {"labels": None},
    {"follow_links": True},
    {"validation_split": 0},
]


@in_each_kind
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_files_labels_and_batches_are_those_of_keras(kind, arguments, folder):
    ours, theirs = both(folder, kind, **arguments)
    assert_same(ours, theirs)
    assert ours.class_names == theirs.class_names
    if kind == "image":
        assert ours.file_paths == theirs.file_paths


@in_each_kind
@pytest.mark.parametrize("subset", ["training", "validation", "both"])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_split_is_that_of_keras(kind, subset, seed, folder):
    split = {"validation_split": 0.3, "subset": subset, "seed": seed}
    ours, theirs = both(folder, kind, **split)
    if subset == "both":
        ours, theirs = ours[1], theirs[1]
    assert_same(ours, theirs)


@pytest.mark.parametrize("split", [None, 0.3])
def test_with_a_seed_files_are_shuffled_into_the_order_of_keras(split, folder):
    how = {"shuffle": True, "seed": 7, "validation_split": split}
    subset = None if split is None else "both"
    ours, theirs = both(folder, "image", subset=subset, **how)
    if split is None:
        ours, theirs = [ours], [theirs]
    for dataset, known in zip(ours, theirs, strict=True):
        assert dataset.file_paths == known.file_paths
    if split is not None:
        # The second part of a pair is not shuffled again.
        assert_same(ours[1], theirs[1])


@in_each_kind
def test_shuffled_samples_are_those_of_keras_in_a_new_order_each_epoch(
    kind, folder
):
    how = {"labels": LABELS, "shuffle": True, "seed": 3, "batch_size": None}
    ours, theirs = both(folder, kind, **how)
    with ours:
        epochs = [
            {int(label): part.tobytes() for part, label in ours}
            for _ in range(2)
        ]
    wanted = {
        int(label): np.asarray(part).tobytes()
        for part, label in theirs.as_numpy_iterator()
    }
    if kind == "text":  # their bytes are objects
        assert set(epochs[0]) == set(wanted)
    else:
        assert epochs[0] == epochs[1] == wanted
    assert list(epochs[0]) != list(epochs[1])


def test_a_list_of_labels_is_not_changed(folder):
    labels = list(LABELS)
    text_dataset_from_directory(folder, labels, seed=1, verbose=False)
    assert labels == LABELS


@in_each_kind
@in_every_way
def test_each_file_comes_once_in_every_place(kind, place, way, folder):
    twin, more = OF_KIND[kind]
    make = functools.partial(
        twin, folder, LABELS, batch_size=3, verbose=False, **more
    )
    assert_exactly_once(make, lambda b: b[1], len(NAMES), place, way)


@in_each_kind
@pytest.mark.parametrize(
    "arguments",
    [
        {"label_mode": "binary"},
        {"label_mode": "words"},
        {"labels": [1, 2]},
        {"labels": "guessed"},
        {"labels": 3},
        {"class_names": ["cats", "owls"]},
        {"labels": None, "class_names": ["cats"]},
        {"labels": LABELS, "class_names": ["cats"]},
        {"validation_split": 2.0, "subset": "training"},
        {"validation_split": 0.5},
        {"subset": "training"},
        {"validation_split": 0.5, "subset": "test"},
        {"validation_split": 0.5, "subset": "training", "shuffle": True},
        {"validation_split": 0.01, "subset": "training"},
        {"validation_split": 0.01, "subset": "both"},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_what_keras_refuses_is_refused(kind, arguments, folder):
    twin, more = OF_KIND[kind]
    kwargs = {"verbose": False, "shuffle": False, **more, **arguments}
    with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind
        list(of_keras(twin.__name__, str(folder), **kwargs))
    with pytest.raises((TypeError, ValueError)):
        twin(folder, **kwargs)


@in_each_kind
def test_a_folder_without_files_of_the_kind_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=f"No {kind}.*found in directory"):
        OF_KIND[kind][0](tmp_path, verbose=False)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_the_format_of_keras_is_checked_and_changes_nothing(kind, folder):
    twin, more = OF_KIND[kind]
    kwargs = {"verbose": False, "shuffle": False, "workers": 0, **more}
    other = twin(folder, **kwargs)
    with other, twin(folder, format="grain", **kwargs) as one:
        np.testing.assert_array_equal(one[0][0], other[0][0])
    with pytest.raises(ValueError, match="format"):
        twin(folder, format="torch", **kwargs)


def test_what_was_found_is_printed_as_keras_does(folder, capsys):
    split = {"validation_split": 0.2, "subset": "both", "seed": 1}
    text_dataset_from_directory(folder, **split)
    ours = capsys.readouterr().out
    of_keras("text_dataset_from_directory", str(folder), **split)
    assert ours == capsys.readouterr().out != ""
    text_dataset_from_directory(folder, verbose=False, **split)
    assert capsys.readouterr().out == ""


def test_a_split_that_leaves_no_file_for_validation_is_refused(folder):
    # Keras would validate on all files.
    with pytest.raises(ValueError, match="too few to split"):
        text_dataset_from_directory(
            folder, validation_split=0.01, subset="validation", shuffle=False
        )


# -- images ------------------------------------------------------------------


_OWN = ["bilinear", "nearest", "bicubic"]
_TENSORFLOWS = ["area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic"]
_WAYS_TO_FIT = {
    "distorted": {"image_size": (9, 40)},
    "cropped": {"image_size": [40, 9], "crop_to_aspect_ratio": True},
    "padded": {"image_size": (9, 40), "pad_to_aspect_ratio": True},
    "channels first": {"image_size": 24, "data_format": "channels_first"},
}


@pytest.mark.parametrize("way", _WAYS_TO_FIT)
@pytest.mark.parametrize(
    "interpolation", quickly([*_OWN, *_TENSORFLOWS], *_OWN, "mitchellcubic")
)
def test_pixels_are_those_of_keras(interpolation, way, folder):
    if way == "cropped" and interpolation in ("gaussian", "mitchellcubic"):
        return  # Keras does not crop with these
    how = {"interpolation": interpolation, **_WAYS_TO_FIT[way]}
    assert_same(*both(folder, "image", **how))


@pytest.mark.parametrize(
    ("mode", "end", "color_modes"),
    [
        ("RGB", "jpg", ["rgb", "grayscale"]),
        ("L", "jpg", ["rgb", "grayscale"]),
        ("RGB", "png", ["rgb", "rgba", "grayscale"]),
        ("RGBA", "png", ["rgb", "rgba", "grayscale"]),
        ("L", "png", ["rgb", "rgba", "grayscale"]),
        ("LA", "png", ["rgb", "rgba", "grayscale"]),
        ("P", "png", ["rgb", "rgba", "grayscale"]),
        ("1", "png", ["rgb", "grayscale"]),
        ("I;16", "png", ["rgb", "rgba", "grayscale"]),
        ("RGB", "bmp", ["rgb", "rgba"]),
        ("L", "bmp", ["rgb", "rgba"]),
        ("RGB", "gif", ["rgb"]),
        ("moving", "gif", ["rgb"]),
    ],
)
def test_every_kind_of_file_has_the_pixels_of_keras(
    mode, end, color_modes, tmp_path
):
    more = {}
    if mode == "moving":
        more = {"save_all": True, "append_images": [picture((30, 20), 1)]}
    if mode == "I;16":
        values = np.random.default_rng(0).integers(0, 1 << 16, (20, 30))
        image = Image.fromarray(values.astype("uint16"))
    else:
        image = picture((30, 20), 0, "RGB" if mode == "moving" else mode)
    image.save(tmp_path / f"a.{end}", **more)
    for color_mode in color_modes:
        assert_same(
            *both(tmp_path, "image", color_mode=color_mode, labels=None)
        )


def test_a_photo_is_not_turned_upright_as_in_keras(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture((30, 20), 0).save(tmp_path / "a.jpg", exif=exif)
    assert_same(*both(tmp_path, "image", labels=None))


def test_without_simplejpeg_a_jpeg_differs_by_a_few_of_255(
    pillow_alone, tmp_path
):
    picture((30, 20), 0).save(tmp_path / "a.jpg", quality=80)
    how = {"labels": None, "image_size": (20, 30)}
    ours, theirs = both(tmp_path, "image", **how)
    with ours:
        (found,) = ours
    (wanted,) = theirs.as_numpy_iterator()
    assert 0 < abs(found - wanted).max() < 8


def test_what_keras_cannot_decode_is_read(tmp_path):
    picture((30, 20), 0).save(tmp_path / "a.gif")
    ours, theirs = both(tmp_path, "image", labels=None, color_mode="grayscale")
    with pytest.raises(Exception, match=r"(?i)channels"):
        list(theirs)
    with ours:
        assert ours[0].shape == (1, *SIZE, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"color_mode": "bgr"}, "rgba"),
        ({"interpolation": "magic"}, "mitchellcubic"),
        ({"image_size": (1, 2, 3)}, "height and a width"),
        ({"data_format": "sideways"}, "channels_first"),
        (
            {"crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True},
            "Only one",
        ),
    ],
    ids=str,
)
def test_what_keras_refuses_of_images_is_refused(arguments, said, folder):
    with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind
        of_keras("image_dataset_from_directory", str(folder), **arguments)
    with pytest.raises(ValueError, match=said):
        image_dataset_from_directory(folder, **arguments)


def test_the_format_of_the_data_is_that_of_the_configuration(folder):
    assert keras.config.image_data_format() == "channels_last"
    keras.config.set_image_data_format("channels_first")
    try:
        ours, theirs = both(folder, "image", batch_size=3)
        assert ours[0][0].shape == (3, 3, *SIZE)
        assert_same(ours, theirs)
    finally:
        keras.config.set_image_data_format("channels_last")


# -- texts -------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 3, 1000])
def test_texts_are_cut_after_so_many_bytes_as_in_keras(length, folder):
    assert_same(*both(folder, "text", max_length=length))


def test_a_transform_makes_numbers_of_a_text(folder):
    with text_dataset_from_directory(
        folder, shuffle=False, transform=first_bytes, workers=2
    ) as dataset:
        ((found, _),) = dataset
    assert found.dtype == "uint8"
    assert found.shape == (13, 4)


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="strings")
@pytest.mark.parametrize("place", in_each_trainer)
def test_fit_vectorizes_texts_on_tensorflow(place, folder):
    vectorize = keras.layers.TextVectorization(20, output_sequence_length=5)
    how = {"batch_size": 5, "verbose": False, **KINDS[place]}
    with text_dataset_from_directory(folder, **how) as dataset:
        vectorize.adapt(["text cats dogs eels"])
        model = keras.Sequential(
            [
                keras.Input((), dtype="string"),
                vectorize,
                keras.layers.Embedding(20, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(dataset, epochs=2, verbose=0)
        assert model.predict(dataset, verbose=0).shape == (13, 3)


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="takes it")
def test_fit_refuses_texts_on_other_backends_and_layers_take_them(folder):
    vectorize = keras.layers.TextVectorization(20, output_sequence_length=5)
    vectorize.adapt(np.array(["text cats dogs eels"]))
    dataset = text_dataset_from_directory(folder, workers=0, verbose=False)
    model = keras.Sequential([vectorize, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises((TypeError, ValueError), match=r"[Dd]type"):
        model.fit(dataset, verbose=0)
    with dataset:
        ((texts, _),) = dataset
    assert vectorize(texts).shape == (13, 5)


# -- sounds ------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 10, 1000])
def test_sounds_are_cut_and_filled_up_as_in_keras(length, folder):
    assert_same(*both(folder, "audio", output_sequence_length=length))


def test_sounds_with_different_channels_are_padded_as_in_keras(tmp_path):
    write_wave(tmp_path / "a.wav", sound(9, 0))
    write_wave(tmp_path / "b.wav", sound(7, 1, 2), channels=2)
    assert_same(*both(tmp_path, "audio", labels=None))


def wave_of(kind):
    """A WAV file that Keras does not read."""
    data = b"RIFF" + struct.pack("<I", 60) + b"WAVEfmt "
    code, bits = {"float": (3, 32), "24 bits": (1, 24)}.get(kind, (1, 16))
    size = bits // 8
    data += struct.pack("<IHHIIHH", 16, code, 1, 8000, 8000 * size, size, bits)
    data += b"data" + struct.pack("<I", 6 * size) + bytes(6 * size)
    return data[:-2] if kind == "cut off" else data


@pytest.mark.parametrize("kind", ["float", "24 bits", "cut off"])
def test_a_sound_that_keras_does_not_read_is_refused(kind, tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wave_of(kind))
    ours, theirs = both(tmp_path, "audio", labels=None)
    with pytest.raises(Exception, match=r"(?i)wav|data too short"):
        list(theirs)
    with ours, pytest.raises(Exception, match=r"16-bit|format|ends") as caught:
        list(ours)
    assert f"While reading {path}." in caught.value.__notes__


def test_sounds_are_resampled(tmp_path):
    time = np.arange(4000) / 8000
    write_wave(tmp_path / "a.wav", 20_000 * np.sin(2 * np.pi * 300 * time))
    with audio_dataset_from_directory(
        tmp_path, None, sampling_rate=4000, verbose=False, workers=0
    ) as dataset:
        (found,) = dataset
    assert found.shape == (1, 2000, 1)
    assert found.dtype == "float32"
    wanted = 20_000 / 32768 * np.sin(2 * np.pi * 300 * time[::2])
    np.testing.assert_allclose(found[0, 50:-50, 0], wanted[50:-50], atol=1e-3)


def test_without_soxr_the_error_names_the_extra(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ImportError, match=r"soxr.*\[audio\]"):
        audio_dataset_from_directory(folder, sampling_rate=8000)
    assert len(audio_dataset_from_directory(folder, verbose=False)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ragged": True}, "batch_size=None"),
        ({"ragged": True, "output_sequence_length": 3}, "ragged"),
        ({"sampling_rate": 8e3}, "sampling_rate"),
        ({"sampling_rate": 0}, "sampling_rate"),
    ],
    ids=str,
)
def test_what_is_refused_of_sounds(arguments, said, folder):
    with pytest.raises((TypeError, ValueError), match=said):
        audio_dataset_from_directory(folder, **arguments)


# -- time series -------------------------------------------------------------

STEPS = np.random.default_rng(0).normal(size=(60, 3))


def windows_of_both(*args, **kwargs):
    theirs = of_keras("timeseries_dataset_from_array", *args, **kwargs)
    kwargs.setdefault("workers", 0)
    return timeseries_dataset_from_array(*args, **kwargs), theirs


@pytest.mark.parametrize("sampling_rate", [1, 3])
@pytest.mark.parametrize("sequence_stride", [1, 4])
@pytest.mark.parametrize(
    ("start", "end", "target_count"),
    [
        (None, None, None),
        (None, None, 40),
        (None, None, 60),
        (7, None, None),
        (7, None, 60),
        (None, 30, 60),
        (5, 50, 55),
    ],
)
def test_windows_and_targets_are_those_of_keras(
    start, end, target_count, sequence_stride, sampling_rate
):
    targets = None if target_count is None else np.arange(target_count)
    assert_same(
        *windows_of_both(
            STEPS,
            targets,
            6,
            sampling_rate=sampling_rate,
            sequence_stride=sequence_stride,
            start_index=start,
            end_index=end,
            batch_size=16,
        )
    )


@pytest.mark.parametrize("batch_size", [1, 55, 1000, None])
def test_windows_come_in_batches_of_any_size(batch_size):
    args = STEPS, STEPS[6:], 6
    assert_same(*windows_of_both(*args, batch_size=batch_size))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "int64", "uint8", "bool", "complex64", "S3"],
)
def test_windows_have_the_type_of_the_data(dtype):
    data = (STEPS * 9).astype(int).astype(dtype)
    if dtype == "S3":
        data = data.astype(object)
    assert_same(*windows_of_both(data, data[5:], 5))


@pytest.mark.parametrize(
    "make",
    [
        list,
        np.asfortranarray,
        lambda x: x[::2, ::-1],
        lambda x: x.reshape(60, 3, 1, 1),
        lambda x: x[:, 0],
        lambda x: x[:, 0].tolist(),
        lambda x: (x[:, 0] * 9).astype(int).tolist(),
    ],
)
def test_data_of_any_kind_give_the_windows_of_keras(make):
    data = make(STEPS)
    assert_same(*windows_of_both(data, data[5:], 5, batch_size=7))


def test_a_memory_map_is_not_read_as_a_whole(tmp_path):
    np.save(tmp_path / "steps.npy", STEPS)
    data = np.load(tmp_path / "steps.npy", mmap_mode="r")
    ours, theirs = windows_of_both(data, data[5:], 5, batch_size=7)
    assert isinstance(ours.arrays[0].series, np.memmap)
    assert_same(ours, theirs)


def test_shuffled_windows_are_those_of_keras_in_a_new_order_each_epoch():
    how = {"shuffle": True, "seed": 3, "batch_size": 16}
    ours, theirs = windows_of_both(STEPS, np.arange(60), 5, **how)
    with ours:
        epochs = [
            {
                int(y): x.tobytes()
                for xs, ys in ours
                for x, y in zip(xs, ys, strict=True)
            }
            for _ in range(2)
        ]
    wanted = {
        int(y): x.tobytes()
        for xs, ys in theirs.as_numpy_iterator()
        for x, y in zip(xs, ys, strict=True)
    }
    assert epochs[0] == epochs[1] == wanted
    assert list(epochs[0]) != list(epochs[1])


@in_every_way
def test_each_window_comes_once_in_every_place(place, way):
    make = functools.partial(
        timeseries_dataset_from_array, STEPS, np.arange(60), 5, batch_size=9
    )
    assert_exactly_once(make, lambda b: b[1], 56, place, way)


@pytest.mark.parametrize(
    "arguments",
    [
        {"start_index": -1},
        {"start_index": 60},
        {"start_index": 9, "end_index": 9},
        {"end_index": 60},
        {"end_index": -1},
        {"sampling_rate": 0},
        {"sampling_rate": 60},
        {"sequence_stride": 0},
        {"sequence_stride": 60},
        {"format": "torch"},
    ],
    ids=str,
)
def test_what_keras_refuses_of_windows_is_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        of_keras("timeseries_dataset_from_array", STEPS, None, 5, **arguments)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        timeseries_dataset_from_array(STEPS, None, 5, **arguments)


def test_data_without_a_window_are_refused():
    # Keras makes a dataset without batches.
    with pytest.raises(ValueError, match="no window of 61 steps"):
        timeseries_dataset_from_array(STEPS, None, 61)
    with pytest.raises(ValueError, match="no window of 5 steps"):
        timeseries_dataset_from_array(STEPS, None, 5, end_index=0)


def test_too_few_targets_are_refused():
    # Keras fails in the batch that misses the first of them.
    with pytest.raises(ValueError, match="30 targets; `start_index` is 20"):
        timeseries_dataset_from_array(STEPS, np.arange(30), 5, start_index=20)


# -- training ----------------------------------------------------------------


@pytest.mark.backend
@pytest.mark.parametrize("place", in_each_trainer)
@pytest.mark.parametrize("kind", ["image", "text", "audio", "windows"])
def test_fit_takes_the_batches_of_each(kind, place, folder):
    how = {"batch_size": 5, **KINDS[place]}
    if kind == "windows":
        dataset = timeseries_dataset_from_array(
            STEPS.astype("float32"), np.arange(60) % 3, 5, **how
        )
    else:
        twin, more = OF_KIND[kind]
        transform = {"image": brightness, "text": first_bytes}.get(kind)
        if kind == "audio":
            more = {"output_sequence_length": 8}
        dataset = twin(
            folder, transform=transform, verbose=False, **more, **how
        )
    with dataset:
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        history = model.fit(dataset, epochs=2, verbose=0)
        samples = 56 if kind == "windows" else len(NAMES) - 1
        assert model.predict(dataset, verbose=0).shape == (samples, 3)
    assert np.isfinite(history.history["loss"]).all()


def test_further_arguments_are_passed_on_and_others_refused(folder):
    with text_dataset_from_directory(
        folder, batch_size=5, drop_remainder=True, workers=2, verbose=False
    ) as dataset:
        assert (len(dataset), dataset.workers) == (2, 2)
    with pytest.raises(TypeError, match="`workers`"):
        text_dataset_from_directory(folder, verbose=False, worker=2)
    with pytest.raises(TypeError, match="`workers`"):
        timeseries_dataset_from_array(STEPS, None, 5, worker=2)


def test_paths_may_be_path_objects(folder):
    assert isinstance(folder, pathlib.Path)
    assert len(text_dataset_from_directory(str(folder), verbose=False)) == 1


def test_workers_map_the_file_of_a_memory_map(tmp_path):
    np.save(tmp_path / "steps.npy", STEPS)
    data = np.load(tmp_path / "steps.npy", mmap_mode="r")
    found = []
    for place in KINDS.values():
        with timeseries_dataset_from_array(data, data, 5, **place) as dataset:
            found.append([windows.tobytes() for windows, _ in dataset])
    assert found[0] == found[1] == found[2]
