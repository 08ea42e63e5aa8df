"""Samples of tar files: which files are one, where they lie, and how read."""

from __future__ import annotations

import functools
import io
import pickle
import tarfile

import numpy as np
import pytest
import webdataset
from matrix import assert_exactly_once, in_every_way
from PIL import Image

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources import index, tar
from keras_fastdata.sources.storage import Storage

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture
def storage(tmp_path):
    return Storage(cache_dir=tmp_path / "cache")


def write(path, *members, **kwargs):
    """Writes files, given by name and content, with Python's library."""
    with tarfile.open(path, "w", **kwargs) as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return str(path)


def shards(folder, count, samples):
    """Writes shards with WebDataset; the classes are numbered through."""
    for shard in range(count):
        with webdataset.TarWriter(str(folder / f"{shard:03}.tar")) as sink:
            for number in range(samples * shard, samples * (shard + 1)):
                row = np.full(3, number / 2, "float32")
                key = f"{number:06}"
                sink.write({"__key__": key, "cls": number, "npy": row})
    return str(folder / "*.tar")


# -- samples in every way ----------------------------------------------------


@in_every_way
@pytest.mark.parametrize("window", [None, 8])
def test_every_sample_comes_once(tmp_path, storage, place, way, window):
    paths = shards(tmp_path, 4, 5)
    decode = {"cls": int, "npy": "npy"}
    source = sources.Tar(paths, decode, storage=storage)
    assert source.part_lengths == [5] * 4
    make = functools.partial(SampleDataset, source, 3, shuffle_window=window)
    assert_exactly_once(make, lambda b: b["cls"], 20, place, way)


def test_samples_are_those_of_webdataset(tmp_path, storage):
    paths = shards(tmp_path, 2, 5)
    files = sorted(map(str, tmp_path.glob("*.tar")))
    wanted = webdataset.WebDataset(files, shardshuffle=False)
    for one, other in zip(
        wanted, sources.Tar(paths, storage=storage), strict=True
    ):
        kept = ("__key__", "cls", "npy")
        assert {name: one[name] for name in kept} == other


def test_a_pickled_source_gives_the_same_samples(tmp_path, storage):
    source = sources.Tar(shards(tmp_path, 2, 5), {"cls": int}, storage=storage)
    assert source[7] == {"cls": 7}
    again = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 2000
    found = again.__getitems__([9, 0, 5, 0])
    assert [sample["cls"] for sample in found] == [9, 0, 5, 0]
    assert again[-1] == {"cls": 9}
    with pytest.raises(IndexError, match="no sample 10; there are 10"):
        again[10]


def test_the_index_is_made_once(tmp_path, storage, monkeypatch):
    paths = shards(tmp_path, 3, 2)
    monkeypatch.setattr(index, "_GROUP", 2)
    sources.Tar(paths, storage=storage)
    scanned = []
    scan = tar._members
    monkeypatch.setattr(
        tar, "_members", lambda *args: scanned.append(args[1]) or scan(*args)
    )
    assert len(sources.Tar(paths, storage=storage)) == 6
    assert scanned == []
    write(tmp_path / "003.tar", ("a.cls", b"1"))
    assert sources.Tar(paths, storage=storage).part_lengths == [2, 2, 2, 1]
    assert scanned == [str(tmp_path / f"00{n}.tar") for n in (2, 3)]


# -- which files are a sample ------------------------------------------------


def test_files_of_one_name_up_to_the_first_dot_are_a_sample(tmp_path, storage):
    path = write(
        tmp_path / "a.tar",
        ("./one.jpg", b"1"),
        ("./one.SEG.png", b"2"),
        ("x.y/two.jpg", b"3"),
        ("__meta__/a.json", b"{}"),
        ("no_extension", b"4"),
        ("x.y/two.cls", b"5"),
        ("two.cls", b""),
    )
    assert list(sources.Tar(path, storage=storage)) == [
        {"__key__": "./one", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "x.y/two", "jpg": b"3", "cls": b"5"},
        {"__key__": "two", "cls": b""},
    ]


def test_two_files_of_one_field_are_an_error(tmp_path, storage):
    path = write(tmp_path / "a.tar", ("a.jpg", b""), ("a.JPG", b""))
    with pytest.raises(ValueError, match=r"two files 'a\.JPG' in one sample"):
        sources.Tar(path, storage=storage)


@pytest.mark.parametrize(
    "kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
@pytest.mark.parametrize("name", ["é", "n" * 90, f"{'f' * 80}/{'n' * 60}"])
def test_every_kind_of_tar_file_is_read(tmp_path, storage, kind, name):
    members = [
        (f"{name}{n}.txt", b"x" * size) for n, size in enumerate([0, 600, 9])
    ]
    path = write(tmp_path / "a.tar", *members, format=kind)
    found = list(sources.Tar(path, storage=storage))
    assert [(f"{s['__key__']}.txt", s["txt"]) for s in found] == members


def test_long_names_links_and_folders_are_read(tmp_path, storage):
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT
    ) as shard:
        for name, kind in [
            ("folder", tarfile.DIRTYPE),
            ("folder/" + "n" * 200 + ".txt", tarfile.REGTYPE),
            ("link.txt", tarfile.SYMTYPE),
        ]:
            member = tarfile.TarInfo(name)
            member.type = kind
            shard.addfile(member)
    (sample,) = sources.Tar(tmp_path / "a.tar", storage=storage)
    assert sample == {"__key__": "folder/" + "n" * 200, "txt": b""}


def test_the_quick_way_finds_what_the_library_finds(tmp_path):
    shards(tmp_path, 1, 50)
    path = str(tmp_path / "000.tar")
    memory = tar._mapped(path)
    quick = tar._plain_members(memory)
    assert quick == tar._all_members(path, path, memory)
    assert len(quick) == 100


@pytest.mark.parametrize("members", [[], [("a.txt", b"1")]])
def test_small_shards_are_read(tmp_path, storage, members):
    path = write(tmp_path / "a.tar", *members)
    assert len(sources.Tar(path, storage=storage)) == len(members)
    (tmp_path / "b.tar").write_bytes(b"")
    both = sources.Tar([tmp_path / "b.tar", path], storage=storage)
    assert both.part_lengths == [0, len(members)]


# -- decoding ----------------------------------------------------------------


def test_fields_are_decoded(tmp_path, storage):
    pixels = np.arange(60, dtype="uint8").reshape(4, 5, 3)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for key in "ab":
            sink.write(
                {
                    "__key__": key,
                    "png": pixels,
                    "txt": "é",
                    "json": {"a": [1]},
                    "npy": np.ones(3),
                    "cls": 7,
                }
            )
    decode = {"png": "rgb", "txt": "text", "json": "json", "npy": "npy"}
    source = sources.Tar(
        tmp_path / "a.tar", {**decode, "cls": int}, storage=storage
    )
    found = pickle.loads(pickle.dumps(source))[1]
    np.testing.assert_array_equal(found["png"], pixels, strict=True)
    assert (found["txt"], found["json"], found["cls"]) == ("é", {"a": [1]}, 7)
    np.testing.assert_array_equal(found["npy"], np.ones(3), strict=True)


@pytest.mark.parametrize(
    ("mode", "channels"), [("grayscale", 1), ("rgb", 3), ("rgba", 4)]
)
def test_images_have_the_channels_asked_for(tmp_path, storage, mode, channels):
    content = io.BytesIO()
    Image.new("RGB", (5, 4), (9, 9, 9)).save(content, "PNG")
    path = write(tmp_path / "a.tar", ("a.png", content.getvalue()))
    (sample,) = sources.Tar(path, {"png": mode}, storage=storage)
    assert sample["png"].shape == (4, 5, channels)
    assert (sample["png"][:, :, 0] == 9).all()


MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
JPEGS = {
    "colours": ("RGB", {}),
    "grey": ("L", {}),
    "inks": ("CMYK", {}),
    "progressive": ("RGB", {"progressive": True, "subsampling": 0}),
}


@pytest.mark.parametrize("mode", ["rgb", "rgba", "grayscale"])
@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_has_the_pixels_that_pillow_gives(tmp_path, storage, kind, mode):
    bands, options = JPEGS[kind]
    size = (37, 53, len(Image.new(bands, (1, 1)).getbands()))
    noise = np.random.default_rng(0).integers(0, 256, size, "uint8")
    content = io.BytesIO()
    Image.fromarray(noise.squeeze(), bands).save(content, "JPEG", **options)
    path = write(tmp_path / "a.tar", ("a.jpg", content.getvalue()))
    with Image.open(content) as image:
        wanted = np.array(image.convert(MODES[mode]))
    found = sources.Tar(path, {"jpg": mode}, storage=storage)[0]["jpg"]
    wanted = wanted.reshape(37, 53, -1)
    np.testing.assert_array_equal(found, wanted, strict=True)


def test_an_error_while_decoding_names_the_sample(tmp_path, storage):
    path = write(tmp_path / "a.tar", ("a.cls", b"1"), ("b.cls", b"x"))
    source = sources.Tar(path, {"cls": int}, storage=storage)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        source[1]
    assert caught.value.__notes__ == ["In field 'cls' of sample 'b'."]
    source = sources.Tar(path, {"jpg": "rgb"}, storage=storage)
    with pytest.raises(
        ValueError, match=r"'a' has no field 'jpg', only \['cls'\]"
    ):
        source[0]
    with pytest.raises(
        ValueError, match=r"`decode\['cls'\]` must be a function"
    ):
        sources.Tar(path, {"cls": "int"}, storage=storage)


# -- errors ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_compressed_shard_is_an_error(tmp_path, storage, kind):
    with tarfile.open(tmp_path / "a.tar", f"w:{kind}"):
        pass
    with pytest.raises(ValueError, match=r"a\.tar is compressed"):
        sources.Tar(tmp_path / "a.tar", storage=storage)


@pytest.mark.parametrize("kept", [100, 700, 1600, 2000])
def test_a_shard_that_is_cut_off_is_an_error(tmp_path, storage, kept):
    path = write(
        tmp_path / "a.tar", *[(f"{n}.txt", b"x" * 600) for n in range(3)]
    )
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[:kept])
    with pytest.raises(
        ValueError, match=r"a\.tar is damaged after file \d, at byte"
    ):
        sources.Tar(path, storage=storage)


@pytest.mark.parametrize("damaged", [0, 1536 + 10, 1536 + 126, 1536 + 150])
def test_a_damaged_header_is_an_error(tmp_path, storage, damaged):
    path = write(
        tmp_path / "a.tar", *[(f"{n}.txt", b"x" * 600) for n in range(3)]
    )
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[damaged] ^= 7
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"a\.tar is damaged after file \d, at byte"
    ):
        sources.Tar(path, storage=storage)


def test_a_shard_that_changes_is_noticed(tmp_path, storage):
    path = write(tmp_path / "a.tar", ("a.cls", b"1"))
    source = sources.Tar(path, storage=storage)
    write(path, ("a.cls", b"22"))
    with pytest.raises(RuntimeError, match="has changed"):
        source[0]
    assert sources.Tar(path, storage=storage)[0]["cls"] == b"22"
