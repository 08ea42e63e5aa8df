"""Iterables of many libraries, read by `GeneratorDataset`."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest
from matrix import assert_exactly_once
from places import KINDS

from keras_fastdata import GeneratorDataset, SampleDataset
from keras_fastdata.datasets import iterables

pytestmark = pytest.mark.usefixtures("kept_forkserver")

_COUNT = 20
_PARTS = {"num_shards": 2, "batch_size": 3, "shuffle": None}


class Again:
    """An iterable that serves any number of passes."""

    def __iter__(self):
        return iter(range(_COUNT))


def split_by_torch():
    torch = pytest.importorskip("torch")

    class Split(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            step = info.num_workers if info else 1
            return iter(range(info.id if info else 0, _COUNT, step))

    return Split()


def hugging_face(shuffled=False):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"number": list(range(_COUNT)), "list": [[1, 2]] * _COUNT}
    )
    made = made.to_iterable_dataset(num_shards=4)
    return made.shuffle(seed=1, buffer_size=5) if shuffled else made


def tensorflow():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices({"number": np.arange(_COUNT)})


def grain_iterable():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(_COUNT).to_iter_dataset()


_PLACES = [
    "inline",
    "thread",
    pytest.param("process", marks=pytest.mark.long),
]


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("way", ["shuffled", "resumed"])
def test_what_torch_splits_comes_once(place, way):
    make = functools.partial(GeneratorDataset, split_by_torch())
    assert_exactly_once(make, np.asarray, _COUNT, place, way, **_PARTS)


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("way", ["shuffled", "resumed"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_what_hugging_face_splits_comes_once(place, way, shuffled):
    make = functools.partial(
        GeneratorDataset, hugging_face(shuffled), label="number"
    )
    assert_exactly_once(
        make, lambda batch: batch[1], _COUNT, place, way, **_PARTS
    )


def test_what_hugging_face_does_not_shuffle_stays_in_order():
    with GeneratorDataset(
        hugging_face(), 8, columns="number", seed=1, workers=1
    ) as dataset:
        for _ in range(2):
            assert np.concatenate(list(dataset)).tolist() == [*range(_COUNT)]


def test_what_hugging_face_shuffles_has_another_order_in_each_epoch():
    with GeneratorDataset(
        hugging_face(True), _COUNT, columns="number", seed=1, workers=0
    ) as dataset:
        (one,), (other,) = list(dataset), list(dataset)
    assert sorted(one) == sorted(other) == list(range(_COUNT))
    assert one.tolist() != other.tolist()


@pytest.mark.parametrize("place", ["inline", "thread"])
@pytest.mark.parametrize("make", [Again, tensorflow, grain_iterable])
def test_an_iterable_serves_every_epoch(place, make):
    kwargs = {"columns": "number"} if make is tensorflow else {}
    with GeneratorDataset(
        make(), 3, workers=min(1, KINDS[place]["workers"]), **kwargs
    ) as dataset:
        for _ in range(2):
            assert np.concatenate(list(dataset)).tolist() == [*range(_COUNT)]


def test_items_that_are_dicts_have_columns_and_labels():
    with GeneratorDataset(
        hugging_face(), 4, label="number", workers=0
    ) as dataset:
        x, y = next(iter(dataset))
    assert x["list"].tolist() == [[1, 2]] * 4
    assert y.tolist() == [0, 1, 2, 3]


def test_items_that_are_batches_are_split_too():
    with GeneratorDataset(
        tensorflow().batch(5), label="number", workers=0
    ) as dataset:
        x, y = next(iter(dataset))
    assert x == {}
    assert y.tolist() == [0, 1, 2, 3, 4]


def test_an_iterable_that_cannot_be_split_is_named():
    with pytest.raises(ValueError, match="This Again cannot be split among 2"):
        GeneratorDataset(Again(), workers=2)


def test_tensorflows_dataset_stays_in_its_process():
    with pytest.raises(ValueError, match="cannot go to a worker process"):
        GeneratorDataset(tensorflow(), use_multiprocessing=True)


def test_torchs_iterable_that_does_not_ask_for_its_part_is_refused():
    torch = pytest.importorskip("torch")

    class Whole(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(_COUNT))

    with GeneratorDataset(Whole(), 4, workers=1) as dataset:
        assert sum(map(len, dataset)) == _COUNT
    with (
        GeneratorDataset(Whole(), 4, num_shards=2) as dataset,
        pytest.raises(ValueError, match=r"does not ask .*get_worker_info"),
    ):
        list(dataset)


def test_a_stream_of_torch_that_waits_for_data_stops_no_other_one():
    torch = pytest.importorskip("torch")
    waits, gate = threading.Event(), threading.Event()

    class Live(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield info.id
            waits.set()
            assert gate.wait(60)
            yield info.id + info.num_workers

    two = {"num_shards": 2, "workers": 2}
    with (
        GeneratorDataset(Live(), **two) as live,
        GeneratorDataset(split_by_torch(), **two) as other,
    ):
        items = iter(live)
        try:
            assert int(next(items)) == 0
            assert waits.wait(60)
            assert [int(item) for item in other] == [*range(_COUNT)]
            assert torch.utils.data.get_worker_info().num_workers == 1
        finally:
            gate.set()
        assert [int(item) for item in items] == [1, 2, 3]
    assert torch.utils.data.get_worker_info() is None


def test_threads_take_turns_with_what_hugging_face_maps():
    # Threads that met in a mapped dataset lost items.
    busy, met = threading.Lock(), []

    def slow(row):
        met.append(not busy.acquire(blocking=False))
        time.sleep(0.001)  # long enough for another thread to come
        if not met[-1]:
            busy.release()
        return row

    with GeneratorDataset(
        hugging_face().map(slow), 3, num_shards=3, workers=3, columns="number"
    ) as dataset:
        found = [number for x in dataset for number in x.tolist()]
    assert sorted(found) == [*range(_COUNT)]
    assert not any(met)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("join", ["concatenate", "interleave"])
def test_parts_of_joined_hugging_face_streams_share_no_place(join, size):
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    streams = [
        datasets.IterableDataset.from_generator(
            _numbers, gen_kwargs={"shards": [*range(first, first + 4)]}
        )
        for first in (0, 4)
    ]
    joined = getattr(datasets, f"{join}_datasets")(streams)
    joined = joined.map(lambda row: row)
    wanted = [
        row["number"]
        for index in range(3)
        for row in distributed.split_dataset_by_node(joined, index, 3)
    ]
    kwargs = {"num_shards": 3, "columns": "number"}
    with GeneratorDataset(joined, size, workers=0, **kwargs) as dataset:
        for _ in range(2):
            found = [number for x in dataset for number in x.tolist()]
            assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_taken_of_a_shuffled_hugging_face_stream_stays_the_same(count):
    kwargs = {"columns": "number", "num_shards": count, "workers": 0}
    shuffled = hugging_face(True)
    parts = [shuffled.take(8), shuffled.skip(8).shuffle(buffer_size=3)]
    found = []
    for part in parts:
        with GeneratorDataset(part, 4, **kwargs) as dataset:
            passes = [np.concatenate([*dataset]).tolist() for _ in range(2)]
        assert set(passes[0]) == set(passes[1])
        found += passes[0]
    assert sorted(found) == [*range(_COUNT)]


def test_what_shuffles_a_part_of_a_hugging_face_stream_has_other_orders():
    part = hugging_face().take(12).shuffle(seed=1, buffer_size=12)
    with GeneratorDataset(part, 12, columns="number", workers=0) as dataset:
        (one,), (other,) = list(dataset), list(dataset)
    assert sorted(one) == sorted(other)
    assert one.tolist() != other.tolist()


def test_parts_of_a_torch_stream_have_attributes_of_their_own():
    torch = pytest.importorskip("torch")

    class Buffered(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            self.buffer = []
            for number in range(info.id, _COUNT, info.num_workers):
                self.buffer.append(number)
                if len(self.buffer) == 3:
                    yield self.buffer.pop(0)
            yield from self.buffer

    with GeneratorDataset(Buffered(), 2, num_shards=3, workers=0) as dataset:
        found = [number for x in dataset for number in x.tolist()]
        assert sorted(found) == [*range(_COUNT)]


def test_a_hugging_face_stream_that_waits_stops_no_other_one():
    datasets = pytest.importorskip("datasets")
    asked, gate = threading.Event(), threading.Event()

    def waits(shards):
        for shard in shards:
            asked.set()
            gate.wait()
            yield {"number": shard}

    def stream(function):
        return GeneratorDataset(
            datasets.IterableDataset.from_generator(
                function, gen_kwargs={"shards": [0, 1]}
            ),
            1,
            num_shards=2,
            workers=2,
            columns="number",
        )

    with stream(waits) as live, stream(_numbers) as files:
        reads = threading.Thread(target=lambda: [*live], daemon=True)
        reads.start()
        try:
            assert asked.wait(60)
            assert sorted(int(x[0]) for x in files) == [0, 1]
            assert not gate.is_set()
        finally:
            gate.set()
            reads.join()


def _numbers(shards):
    yield from ({"number": shard} for shard in shards)


@pytest.mark.parametrize(
    "make", [Again, split_by_torch, hugging_face, tensorflow, grain_iterable]
)
def test_sample_dataset_names_the_class_for_iterables(make):
    wanted = r"`GeneratorDataset\(source, batch_size=8, label='number'\)`"
    with pytest.raises(TypeError, match=wanted):
        SampleDataset(make(), 8, label="number")


@pytest.mark.parametrize("place", _PLACES)
def test_grain_keeps_the_numbers_that_it_draws(place):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(6).seed(4).random_map(_add_random)
    drawn = [source[i] for i in range(6)]
    with SampleDataset(source, 2, seed=1, **KINDS[place]) as dataset:
        for _ in range(2):
            assert np.concatenate([*dataset]).tolist() == drawn
    assert [source[i] for i in range(6)] == drawn


def _add_random(number, rng):
    return number + rng.integers(1_000)


def test_what_grain_leaves_out_is_told_so():
    grain = pytest.importorskip("grain")
    odd = grain.MapDataset.range(6).filter(lambda number: number % 2 == 1)
    with pytest.raises(ValueError, match=r"to_iter_dataset\(\)"):
        SampleDataset(odd)[0]
    with GeneratorDataset(odd.to_iter_dataset(), 3, workers=0) as dataset:
        assert next(iter(dataset)).tolist() == [1, 3, 5]


class _Reader(threading.Thread):
    """Reads in its turn until `gate` opens."""

    is_given_up = False

    def __init__(self, turn):
        super().__init__(daemon=True)
        self.turn = turn
        self.gate = threading.Event()
        self.reads = threading.Event()

    def run(self):
        with self.turn:
            self.reads.set()
            self.gate.wait()


def test_one_thread_at_a_time_reads_from_a_stream():
    turn = iterables._StreamTurn()
    first, second = _Reader(turn), _Reader(turn)
    first.start()
    first.reads.wait()
    second.start()
    assert not second.reads.wait(0.3)
    first.gate.set()
    second.reads.wait()
    second.gate.set()
    for reader in (first, second):
        reader.join()


@pytest.mark.parametrize("way", ["given up", "slow"])
def test_a_thread_that_reads_for_ever_keeps_no_stream_for_itself(
    way, monkeypatch, caplog
):
    turn = iterables._StreamTurn()
    first, second, third = (_Reader(turn) for _ in range(3))
    first.start()
    first.reads.wait()
    if way == "slow":
        monkeypatch.setattr(iterables, "_STUCK_S", -1.0)
    first.is_given_up = way == "given up"
    second.start()
    second.reads.wait()
    monkeypatch.setattr(iterables, "_STUCK_S", 60.0)
    assert ("Another thread now reads" in caplog.text) == (way == "slow")
    first.gate.set()  # it goes on, and takes nobody's turn
    first.join()
    third.start()
    assert not third.reads.wait(0.3)
    second.gate.set()
    third.reads.wait()
    third.gate.set()
    second.join()
    third.join()
