"""Files elsewhere arrive whole, whatever happens on the way."""

from __future__ import annotations

import functools
import io
import os
import pickle
import random
import signal
import threading
import types

import fsspec.asyn
import keras
import numpy as np
import pytest
from crash_samples import kill
from matrix import assert_exactly_once, in_every_way, same
from PIL import Image
from places import EVERY_KIND, KINDS, quickly
from processes import workers
from servers import FileServer, S3Server, s3_options
from storage_samples import process, reads
from trainers import Trainer

from keras_fastdata import ImageFileDataset
from keras_fastdata.sources import remote
from keras_fastdata.sources.storage import Storage

CONTENT = random.Random(1).randbytes(100_000)


@pytest.fixture(scope="module", autouse=True)
def _is_warm(s3):
    """Starts what `fsspec` and this module keep."""
    fsspec.asyn.get_loop()


@pytest.fixture(autouse=True)
def _delays_are_short(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 1e-6)


@pytest.fixture
def web():
    with FileServer() as server:
        server.files["/a.bin"] = CONTENT
        yield server


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        for number in range(10):
            server.put(f"images/{number}.png", picture(number))
        server.put("a.bin", CONTENT)
        yield server


@pytest.fixture
def proxy(s3):
    """Between the client and the S3 server; it has the faults."""
    with FileServer(s3.url) as server:
        yield server


@pytest.fixture(params=["https", "s3"])
def place(request, tmp_path):
    """A file, the server that has it, and a storage that reads it."""
    if request.param == "s3":
        proxy = request.getfixturevalue("proxy")
        return Place(
            proxy, s3_options(proxy.url), "s3://data", "/data", tmp_path
        )
    web = request.getfixturevalue("web")
    return Place(web, {}, web.url, "", tmp_path)


class Place:
    def __init__(self, server, options, start, folder, cache):
        self.server = server
        self.arguments = {"options": options, "cache_dir": cache}
        self.storage = Storage(**self.arguments, attempts=4)
        self.path, self.missing = f"{start}/a.bin", f"{start}/missing.bin"
        self.of_server = f"{folder}/a.bin"
        self.faults = server.faults[self.of_server]

    def impatient(self, attempts):
        """A storage that has connected, and does not wait for long."""
        storage = Storage(**self.arguments, attempts=attempts)
        storage._remote.version(self.path)
        storage._remote._timeout_s = 0.3
        return storage


def picture(number):
    file = io.BytesIO()
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (20, 20, 3), dtype="uint8")
    pixels[0, 0] = number
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


# -- one file ----------------------------------------------------------------


def test_a_file_is_fetched_once(place):
    assert place.storage.read(place.path) == CONTENT
    assert place.storage.read(place.path) == CONTENT
    assert place.server.count("GET", place.of_server) == 1
    copy = pickle.loads(pickle.dumps(place.storage))
    assert copy.read(place.path) == CONTENT
    assert place.server.count("GET", place.of_server) == 1


@pytest.mark.parametrize(
    "faults",
    [["drop"], ["truncate"], [503, 503], [500, "drop", "truncate"]],
    ids=str,
)
def test_a_file_arrives_whole_after_errors(place, faults):
    place.faults.extend(faults)
    assert place.storage.read(place.path) == CONTENT
    assert not place.faults


@pytest.mark.parametrize("fault", ["drop", "truncate", 503, 429])
def test_after_all_attempts_the_error_names_file_and_cause(place, fault):
    place.faults.extend([fault] * 200)
    with pytest.raises(OSError, match="in 4 attempts") as caught:
        place.storage.read(place.path)
    assert place.path in str(caught.value)
    cause = caught.value.__cause__
    assert type(cause).__name__ in str(caught.value)
    assert len(place.faults) == 200 - 4
    if fault == "truncate":
        assert "50000 bytes of 100000 have arrived" in str(caught.value)
    place.faults.clear()
    assert place.storage.read(place.path) == CONTENT


@pytest.mark.parametrize("faults", [["stall"], ["stall", 503, "stall"]])
def test_a_request_that_takes_too_long_is_made_again(place, faults):
    storage = place.impatient(attempts=100)
    place.faults.extend(faults)
    assert storage.read(place.path) == CONTENT
    assert not place.faults


def test_requests_that_all_take_too_long_are_an_error(place):
    storage = place.impatient(attempts=2)
    place.faults.extend(["stall", "stall"])
    with pytest.raises(OSError, match=r"in 2 attempts.*FSTimeoutError"):
        storage.read(place.path)
    assert not place.faults


def test_a_missing_file_is_asked_for_once(place):
    with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
        place.storage.read(place.missing)
    paths = {request[1].partition("?")[0] for request in place.server.requests}
    assert place.server.count("HEAD") == 1
    assert len(place.server.requests) == 2  # the other one looks for a folder
    assert place.of_server not in paths


def test_a_file_that_is_refused_is_asked_for_once(place):
    server = place.server
    server.head_faults[place.of_server].extend([403] * 9)
    place.faults.extend([403] * 9)
    with pytest.raises(PermissionError, match=r"a\.bin"):
        place.storage.read(place.path)
    assert server.count("HEAD") == 1 >= server.count("GET")


class HubError(Exception):
    """An error as `huggingface_hub` raises it."""

    def __init__(self, status):
        super().__init__("the hub says no")
        self.response = types.SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (HubError(403), PermissionError),
        (HubError(404), FileNotFoundError),
        (HubError(418), OSError),
        (HubError(503), None),
        (HubError(429), None),
        (PermissionError("Forbidden"), PermissionError),
        (TypeError("an option"), TypeError),
        (ConnectionResetError(), None),
        (TimeoutError(), None),
        (EOFError(), None),
    ],
    ids=repr,
)
def test_which_errors_another_attempt_may_mend(error, raised):
    path, attempts = "memory://a", []
    files = remote.RemoteFiles({}, 3, 1.0)

    def ask(system):
        attempts.append(1)
        raise error

    with pytest.raises(raised or OSError) as caught:
        files._tried(path, ask)
    assert len(attempts) == (1 if raised else 3)
    assert path in str(caught.value) or caught.value is error


def test_nothing_is_drawn_from_the_users_generators(place):
    place.faults.extend(["drop", 503, "truncate"])
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert place.storage.read(place.path) == CONTENT
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_large_file_is_fetched_in_parts(place, monkeypatch):
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 30_000)
    place.faults.extend([None, "drop", None, "truncate"])
    assert place.storage.read(place.path) == CONTENT
    ranges = [r[2] for r in place.server.requests if r[0] == "GET"]
    assert ranges == [
        *("bytes=0-29999", "bytes=30000-59999", "bytes=30000-59999"),
        *("bytes=60000-89999", "bytes=60000-89999", "bytes=90000-99999"),
    ]


def test_a_file_that_changes_while_it_is_fetched_is_an_error(
    web, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 60_000)
    storage = Storage(cache_dir=tmp_path)
    web.faults["/a.bin"].append("stall")

    def change():
        web.stalled.wait()
        web.files["/a.bin"] = CONTENT[::-1]
        web.go_on.set()

    thread = threading.Thread(target=change)
    thread.start()
    with pytest.raises(OSError, match=r"a\.bin has changed"):
        storage.read(f"{web.url}/a.bin")
    thread.join()
    assert storage.read(f"{web.url}/a.bin") == CONTENT[::-1]


def test_a_file_that_has_changed_is_fetched_again(web, tmp_path):
    path = f"{web.url}/a.bin"
    assert Storage(cache_dir=tmp_path).read(path) == CONTENT
    web.files["/a.bin"] = CONTENT[::-1]
    assert Storage(cache_dir=tmp_path).read(path) == CONTENT[::-1]


@pytest.mark.parametrize("lacks", ["has_ranges", "has_lengths", "has_tags"])
def test_a_plain_server_will_do(web, tmp_path, lacks, monkeypatch):
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 30_000)
    setattr(web, lacks, False)
    storage = Storage(cache_dir=tmp_path)
    assert storage.read(f"{web.url}/a.bin?key=1") == CONTENT
    with storage.local(f"{web.url}/a.bin?key=1") as local:
        assert local.endswith(".bin")


# -- a bucket ----------------------------------------------------------------


def test_objects_are_found_by_pattern_with_their_versions(proxy, tmp_path):
    storage = Storage(s3_options(proxy.url), cache_dir=tmp_path)
    found = storage.find("s3://data/images/?.png")
    assert found == [f"s3://data/images/{n}.png" for n in range(10)]
    assert storage.find("s3://data/images/{0..9}.png") == found
    assert storage.find("s3://data/*") == ["s3://data/a.bin"]
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.read(found[3]) == picture(3)
    assert proxy.count("HEAD") == 0
    other = Storage(s3_options(proxy.url), cache_dir=tmp_path)
    assert other.read(found[3]) == picture(3)
    assert (
        proxy.count("HEAD"),
        proxy.count("GET", found[3].removeprefix("s3:/")),
    ) == (1, 1)


def test_a_listing_that_fails_is_asked_for_again(proxy, tmp_path):
    storage = Storage(s3_options(proxy.url), cache_dir=tmp_path)
    listing = "/data?list-type=2&prefix=&delimiter=%2F&encoding-type=url"
    proxy.faults[listing].extend([503, 500])
    assert storage.find("s3://data/*") == ["s3://data/a.bin"]
    assert not proxy.faults[listing]


# -- several processes -------------------------------------------------------


def test_two_processes_fetch_a_file_once(web, tmp_path):
    storage = Storage(cache_dir=tmp_path)
    path = f"{web.url}/a.bin"
    web.faults["/a.bin"].append("stall")
    with process(reads, storage, path) as (_, first):
        web.stalled.wait()
        with process(reads, storage, path) as (_, second):
            web.go_on.set()
            assert first.recv() == second.recv() == CONTENT
    assert web.count("GET") == 1


@pytest.mark.parametrize("start_method", quickly(["fork", "spawn"], "fork"))
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_storage_in_use_works_in_another_process(place, start_method):
    storage = Storage(**place.arguments, cache_bytes=0)
    assert storage.read(place.path) == CONTENT
    with process(reads, storage, place.path, start_method=start_method) as (
        _,
        child,
    ):
        assert child.recv() == CONTENT
    assert storage.read(place.path) == CONTENT
    assert place.server.count("GET", place.of_server) == 3


def test_a_killed_process_leaves_no_wrong_byte(web, tmp_path):
    storage = Storage(cache_dir=tmp_path)
    path = f"{web.url}/a.bin"
    web.faults["/a.bin"].append("stall")
    with process(reads, storage, path) as (started, _):
        web.stalled.wait()
        started.kill()
        started.join()
    assert storage.read(path) == CONTENT
    assert web.count("GET") == 2


# -- images ------------------------------------------------------------------

SIZE = (20, 20)


def images(start, storage, **kwargs):
    """A dataset of the images below an address."""
    paths = storage.find(f"{start}/images/{{0..9}}.png")
    kwargs = {"batch_size": 2, "image_size": SIZE, **kwargs}
    return ImageFileDataset(paths, range(10), storage=storage, **kwargs)


@pytest.fixture
def gallery(web):
    """An HTTP server of the images."""
    for number in range(10):
        web.files[f"/images/{number}.png"] = picture(number)
    return web


@pytest.fixture
def wanted(tmp_path):
    """The batches of the same images on this machine."""
    paths = [tmp_path / f"{number}.png" for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(picture(number))
    with ImageFileDataset(paths, range(10), SIZE, 2, workers=0) as dataset:
        return list(dataset)


def labels(batch):
    return batch[1]


@in_every_way
def test_images_elsewhere(place, way, gallery, tmp_path, kept_forkserver):
    storage = Storage(cache_dir=tmp_path)
    make = functools.partial(images, gallery.url, storage)
    assert_exactly_once(make, labels, 10, place, way)
    assert gallery.count("GET") == 10


@pytest.mark.parametrize("kind", quickly(EVERY_KIND, "process"))
def test_images_in_a_bucket(kind, s3, tmp_path, wanted, kept_forkserver):
    storage = Storage(s3_options(s3.url), cache_dir=tmp_path / "cache")
    with images("s3://data", storage, **EVERY_KIND[kind]) as dataset:
        same(list(dataset), wanted)


@pytest.mark.backend
def test_images_elsewhere_in_fit(gallery, tmp_path, kept_forkserver):
    model = keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")]
    )
    model.compile("sgd", "mse")
    gallery.faults["/images/3.png"].extend(["drop", "truncate", 503])
    storage = Storage(cache_dir=tmp_path)
    with images(gallery.url, storage, workers=2) as dataset:
        model.fit(dataset, epochs=2, verbose=0)
    assert gallery.count("GET") == 10 + 3


@pytest.mark.parametrize("kind", quickly(EVERY_KIND, *KINDS))
def test_images_arrive_whole_after_errors(
    kind, gallery, tmp_path, wanted, kept_forkserver
):
    for number, fault in enumerate(["drop", "truncate", 503, 500] * 2):
        gallery.faults[f"/images/{number}.png"].append(fault)
    storage = Storage(cache_dir=tmp_path / "cache")
    with images(gallery.url, storage, **EVERY_KIND[kind]) as dataset:
        same(list(dataset), wanted)
        same(list(dataset), wanted)
    assert not any(gallery.faults.values())
    assert gallery.count("GET") == 10 + 8


def test_the_error_of_an_image_names_it(gallery, tmp_path):
    gallery.faults["/images/3.png"].extend([500] * 100)
    storage = Storage(cache_dir=tmp_path)
    with (
        images(gallery.url, storage, workers=0) as dataset,
        pytest.raises(OSError, match=r"/images/3\.png .* 5 attempts"),
    ):
        list(dataset)


def leftovers(folder):
    (found,) = folder.iterdir()
    return {name for name in os.listdir(found) if name.startswith(".")}


def test_after_a_killed_worker_nothing_is_lost(
    gallery, tmp_path, wanted, kept_forkserver
):
    cache, name = tmp_path / "cache", "/images/5.png"
    gallery.faults[name].append("stall")
    before = {process.pid for process in workers()}

    def kill_one():
        gallery.stalled.wait()
        (worker,) = {process.pid for process in workers()} - before
        kill(worker)

    thread = threading.Thread(target=kill_one)
    thread.start()
    one = {**KINDS["process"], "workers": 1}
    with images(gallery.url, Storage(cache_dir=cache), **one) as dataset:
        same(list(dataset), wanted)
    thread.join()
    assert gallery.count("GET", name) == 2
    assert leftovers(cache) == {".size"}


TRAINING = """
sys.path[:0] = {paths!r}
from test_remote_files import Storage, images
with images({url!r}, Storage(cache_dir={cache!r}), **{kwargs!r}) as dataset:
    list(dataset)
"""


@pytest.mark.parametrize("kind", quickly(KINDS, "process"))
def test_after_a_killed_trainer_the_next_one_goes_on(
    kind, gallery, tmp_path, wanted, zygote
):
    cache, name = tmp_path / "cache", "/images/5.png"
    gallery.faults[name].append("stall")
    script = TRAINING.format(
        paths=[os.path.dirname(__file__)],
        url=gallery.url,
        cache=str(cache),
        kwargs=KINDS[kind],
    )
    with Trainer(zygote, script) as trainer:
        gallery.stalled.wait()
        trainer.send(signal.SIGKILL)
        assert trainer.end() == -signal.SIGKILL
        trainer.leaves_nothing()
    storage = Storage(cache_dir=cache)
    with images(gallery.url, storage, workers=0) as dataset:
        same(list(dataset), wanted)
    assert leftovers(cache) == {".size"}
    assert gallery.count("GET", name) == 2
