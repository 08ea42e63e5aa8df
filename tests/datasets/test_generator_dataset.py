"""Generators: each item once, in one order, from as many workers as wanted."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import json
import random
import signal
import threading
import time
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
import optree
import pytest
from generator_samples import (
    Closing,
    Dying,
    DyingForgetful,
    DyingShorter,
    DyingTold,
    Ending,
    Hooked,
    Numbers,
    Walks,
    ending,
    endless,
    failing,
    labelled,
    numbers_from,
    pairs,
    ragged,
    reusing,
    shuffled,
    uneven,
    with_defaults,
    without_end,
)
from places import PLACES, everywhere, quickly, somewhere

from keras_fastdata import (
    EndOfData,
    GeneratorDataset,
    LoaderError,
    WorkerDiedError,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.building.held_generators import Search
from keras_fastdata.building.referred_names import variables_of
from keras_fastdata.datasets import generator_turns

pytestmark = pytest.mark.usefixtures("kept_forkserver")


class Pair(NamedTuple):
    x: Any
    y: Any


@optree.register_pytree_node_class(namespace="keras")
class Registered:
    """A structure that `keras.tree` knows because it was told of it."""

    def __init__(self, part):
        self.part = part

    def tree_flatten(self):
        return [self.part], None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


WRAPS = [
    lambda part: Pair(part, ()),
    lambda part: collections.OrderedDict(x=part),
    lambda part: collections.defaultdict(list, x=part),
    lambda part: collections.deque([part]),
    lambda part: [(part,)],
    Registered,
]

PROCESSES = {"workers": 4, "use_multiprocessing": True}
ONE_PROCESS = {"workers": 1, "use_multiprocessing": True}


def epochs(dataset, count):
    """So many epochs, each a list."""
    with dataset:
        return [[np.asarray(b).tolist() for b in dataset] for _ in range(count)]


# -- which items, in which order ---------------------------------------------


@everywhere
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_items_come_once_and_in_turns_wherever_they_are_made(place, count):
    dataset = GeneratorDataset(Numbers(count), num_shards=4, **PLACES[place])
    assert epochs(dataset, 2) == [[[n] for n in range(count)]] * 2


@everywhere
def test_a_shard_that_has_ended_is_left_out(place):
    dataset = GeneratorDataset(uneven, num_shards=4, **PLACES[place])
    assert epochs(dataset, 1) == [[10, 20, 30, 21, 31, 32]]


@pytest.mark.filterwarnings("error:.*share those generators")
@everywhere
def test_what_is_drawn_does_not_depend_on_the_workers(place):
    draws = ["rng"]
    if "thread" not in place:
        draws += ["numpy", "random"]
    numbers = Numbers(13, draws=draws)
    wanted = GeneratorDataset(numbers, num_shards=4, workers=0, seed=3)
    found = GeneratorDataset(numbers, num_shards=4, seed=3, **PLACES[place])
    first, second = epochs(wanted, 2)
    assert epochs(found, 2) == [first, second]
    assert [batch[0] for batch in second] == list(range(13))
    drawn = [tuple(batch[1:]) for batch in first + second]
    assert len(set(drawn)) == 26


@pytest.mark.filterwarnings("ignore:.*fork")
def test_torch_is_seeded_for_each_shard():
    torch = pytest.importorskip("torch")

    def draws(shard_index, num_shards):
        for _ in range(3):
            yield torch.rand(()).item()

    # A fork has torch; a fresh worker would take seconds to import it.
    forks = {"use_multiprocessing": True, "start_method": "fork"}
    found = [
        epochs(GeneratorDataset(draws, num_shards=2, seed=seed, **place), 2)
        for seed, place in [
            (1, {"workers": 0}),
            (1, {"workers": 2, **forks}),
            (2, {"workers": 0}),
        ]
    ]
    assert found[0] == found[1]
    drawn = [x for epoch in (*found[0], *found[2]) for x in epoch]
    assert len(set(drawn)) == len(drawn) == 24


@somewhere
def test_an_order_that_is_drawn_is_another_in_each_epoch(place):
    dataset = GeneratorDataset(shuffled, num_shards=1, seed=0, **PLACES[place])
    found = epochs(dataset, 3)
    assert [sorted(epoch) for epoch in found] == [list(range(20))] * 3
    assert found[0] != found[1] != found[2]
    assert epochs(GeneratorDataset(shuffled, seed=0, workers=0), 3) == found


def test_workers_have_a_shard_each_unless_told_otherwise():
    dataset = GeneratorDataset(uneven, workers=3)
    assert epochs(dataset, 1) == [[10, 20, 21]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_factory_without_shards_is_left_to_one(workers):
    dataset = GeneratorDataset(ragged, workers=workers)
    assert epochs(dataset, 2) == [[[1.0], [1.0] * 3, [1.0] * 2]] * 2


def test_an_epoch_that_was_broken_off_is_followed_by_a_whole_one():
    with GeneratorDataset(Numbers(9), **PROCESSES) as dataset:
        for batch in dataset:
            if batch[0] == 3:
                break
        assert [int(b[0]) for b in dataset] == list(range(9))


# -- batches of items --------------------------------------------------------


def test_requests_of_a_pass_that_was_broken_off_make_no_generator(monkeypatch):
    made, goes_on = [], threading.Event()
    iterate = generator_turns.iterate_alone

    def factory():
        made.append(len(made))
        yield from range(2)
        assert goes_on.wait(60)
        yield from range(2, 6)

    def begin(shards):
        # The thread takes the requests of the former pass meanwhile.
        goes_on.set()
        pool = loader_of(shards)._pool.workers
        while not pool._requests.empty() or pool._threads[0].activity():
            time.sleep(0.005)
        return iterate(shards)

    with GeneratorDataset(factory) as dataset:
        assert next(iter(dataset)) == 0
        monkeypatch.setattr(generator_turns, "iterate_alone", begin)
        assert [int(item) for item in dataset] == list(range(6))
    assert made == [0, 1]


def _reversed_names(num_shards, shard_index):
    yield from range(shard_index, 12, num_shards)


def _named_only(*, shard_index, num_shards):
    yield from range(shard_index, 12, num_shards)


def _after_another(start, shard_index, num_shards):
    yield from range(shard_index + start * num_shards, 12, num_shards)


def _with_other_names(part, of):
    yield from range(part, 12, of)


@pytest.mark.parametrize("place", ["inline", "2 processes", "4 threads"])
@pytest.mark.parametrize(
    "factory",
    [
        *(_reversed_names, _named_only, _after_another, _with_other_names),
        functools.partial(_reversed_names),
    ],
)
def test_a_factory_gets_its_shard_whatever_the_order_of_parameters(
    factory, place
):
    with GeneratorDataset(factory, num_shards=4, **PLACES[place]) as dataset:
        assert [int(item) for item in dataset] == [*range(12)]


@everywhere
def test_items_are_stacked(place):
    factory = functools.partial(pairs, 10)
    with GeneratorDataset(factory, 3, num_shards=2, **PLACES[place]) as dataset:
        batches = list(dataset)
    ys = [y.tolist() for x, y in batches]
    assert ys == [[0, 4, 8], [2, 6, 10], [12, 16], [14, 18]]
    for x, y in batches:
        assert y.dtype == np.float32
        np.testing.assert_array_equal(
            x["x"], np.stack([y / 2] * 3, 1), strict=True
        )


def test_a_remainder_may_be_left_out():
    dataset = GeneratorDataset(
        Numbers(10), 3, num_shards=2, drop_remainder=True
    )
    found = epochs(dataset, 1)[0]
    assert np.ravel(found).tolist() == [0, 2, 4, 1, 3, 5]


def test_all_workers_begin_at_once_in_each_epoch():
    together = threading.Barrier(4, timeout=60)

    def meeting(shard_index, num_shards):
        together.wait()
        yield shard_index

    with GeneratorDataset(meeting, workers=4) as dataset:
        assert epochs(dataset, 2) == [[0, 1, 2, 3]] * 2


def test_ragged_items_are_padded():
    dataset = GeneratorDataset(ragged, 3, pad_to="longest", pad_value=-1)
    assert epochs(dataset, 1) == [[[[1, -1, -1], [1, 1, 1], [1, 1, -1]]]]


@somewhere
def test_a_buffer_that_is_filled_again_is_copied_into_its_batch(place):
    with GeneratorDataset(reusing, 3, num_shards=1, **PLACES[place]) as dataset:
        found = [(x[:, 0].tolist(), y["x"].tolist()) for x, y in dataset]
    assert found == [
        ([0, 1, 2], [[0], [1], [2]]),
        ([3, 4, 5], [[3], [4], [5]]),
    ]


@pytest.mark.parametrize(
    ("wrap", "batch_size"),
    [*((wrap, None) for wrap in WRAPS), *((wrap, 2) for wrap in WRAPS[:-1])],
)
def test_a_buffer_that_is_filled_again_is_copied_out_of_every_structure(
    wrap, batch_size
):
    def refilled():
        buffer = np.zeros(2)
        for number in range(4):
            buffer[:] = number
            yield wrap(buffer)

    with GeneratorDataset(refilled, batch_size) as dataset:
        found = [keras.tree.flatten(batch) for batch in dataset]
    assert np.ravel(found).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_structure_that_is_copied_keeps_its_class():
    items = [wrap(np.zeros(1)) for wrap in WRAPS]
    with GeneratorDataset(lambda: iter(items)) as dataset:
        assert [type(batch) for batch in dataset] == list(map(type, items))


def test_a_memory_that_is_filled_again_is_copied_as_well():
    def refilled():
        buffer = np.zeros(2, "float32")
        for number in range(4):
            buffer[:] = number
            yield memoryview(buffer)

    with GeneratorDataset(refilled, 2, workers=0) as dataset:
        found = [batch.tolist() for batch in dataset]
    assert found == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize(
    ("most", "of_each"), [(10, [3, 3, 2, 2]), (2, [1] * 4), (0, [0] * 4)]
)
def test_the_queues_of_all_generators_are_as_long_as_asked_for(most, of_each):
    with GeneratorDataset(
        Numbers(9), workers=4, max_queue_size=most
    ) as dataset:
        queues = [
            shard.max_queue_size for shard in dataset._fastdata_plan.shards
        ]
        assert queues == of_each
        assert dataset.max_queue_size == most


@somewhere
def test_a_generator_may_say_itself_that_it_has_ended(place):
    dataset = GeneratorDataset(ending, 3, num_shards=1, **PLACES[place])
    assert epochs(dataset, 1) == [[[0, 1, 2], [3, 4]]]


def test_parameters_that_are_the_users_own_are_left_to_them():
    assert epochs(GeneratorDataset(with_defaults), 1) == [[5, 6, 7]]
    bound = functools.partial(numbers_from, start=10, stop=13)
    assert epochs(GeneratorDataset(bound), 1) == [[10, 11, 12]]
    with pytest.raises(ValueError, match="each would give the same"):
        GeneratorDataset(with_defaults, workers=2)


# -- how long an epoch is ----------------------------------------------------


@somewhere
def test_an_epoch_may_be_shorter_than_the_data(place):
    dataset = GeneratorDataset(
        Numbers(9), num_batches=4, num_shards=2, **PLACES[place]
    )
    assert len(epochs(dataset, 1)[0]) == 4
    assert epochs(dataset, 2) == [[[0], [1], [2], [3]]] * 2


@somewhere
def test_it_may_go_on_where_the_epoch_before_has_ended(place):
    dataset = GeneratorDataset(
        Numbers(5),
        num_batches=4,
        restart=False,
        **PLACES[place] | {"workers": 1},
    )
    found = [int(b[0]) for epoch in epochs(dataset, 4) for b in epoch]
    assert found == [*range(5), *range(5), *range(5), 0]


def test_shards_that_go_on_begin_anew_each_where_it_ends():
    dataset = GeneratorDataset(
        uneven, num_batches=9, restart=False, num_shards=3, workers=2
    )
    assert epochs(dataset, 1) == [[10, 20, 10, 21, 10, 20, 10, 21, 10]]


def test_too_few_batches_are_an_error_that_says_what_to_do():
    with (
        GeneratorDataset(Numbers(3), num_batches=5) as dataset,
        pytest.raises(LoaderError, match="after 3 of the 5 batches"),
    ):
        list(dataset)


def test_an_iterator_is_walked_through_once():
    with GeneratorDataset(iter(range(5))) as dataset:
        assert list(dataset) == list(range(5))
        assert list(dataset) == []


def test_an_iterator_may_be_cut_into_epochs():
    dataset = GeneratorDataset(iter(range(7)), 2, num_batches=2)
    with dataset:
        assert [b.tolist() for b in dataset] == [[0, 1], [2, 3]]
        assert [b.tolist() for b in dataset] == [[4, 5], [6]]


@pytest.mark.parametrize("workers", [0, 1])
def test_its_end_closes_generators(workers, tmp_path):
    with GeneratorDataset(Closing(tmp_path / "a"), workers=workers) as dataset:
        next(iter(dataset))
    assert (tmp_path / "a").exists()


def test_a_thread_that_close_has_given_up_does_not_stop_the_next_one():
    is_in, gate = threading.Event(), threading.Event()

    def numbers(shard_index, num_shards):
        for number in range(shard_index, 12, num_shards):
            if number == 2 and not is_in.is_set():
                is_in.set()
                assert gate.wait(60)
            yield number

    with GeneratorDataset(numbers, workers=2) as dataset:
        shards = dataset._fastdata_plan.shards[0]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert int(shards[0][1]) == 0
            former = pool.submit(shards.__getitem__, 1)
            assert is_in.wait(60)
            try:
                assert int(shards[1][1]) == 2
                assert int(shards[2][1]) == 4
            finally:
                gate.set()
            assert int(former.result(60)[1]) == 2
        assert int(shards[3][1]) == 6


def test_its_number_of_workers_is_told_and_stays():
    dataset = GeneratorDataset(Numbers(9), workers=3)
    assert dataset.workers == 3
    assert GeneratorDataset(Numbers(9), workers=0).workers == 0
    with pytest.raises(AttributeError, match="workers"):
        dataset.workers = 4
    with pytest.raises(AttributeError, match="use_multiprocessing"):
        dataset.use_multiprocessing = True
    with pytest.raises(AttributeError, match="max_queue_size"):
        dataset.max_queue_size = 20
    assert not dataset.use_multiprocessing


# -- what is refused ---------------------------------------------------------


def test_an_iterator_for_processes_is_refused_with_two_ways_out():
    with pytest.raises(ValueError, match="cannot go to a worker") as caught:
        GeneratorDataset(without_end(), use_multiprocessing=True)
    assert "without calling it" in str(caught.value)
    assert "use_multiprocessing=False" in str(caught.value)


@pytest.mark.parametrize("factory", [without_end, iter([1])])
def test_what_cannot_be_shared_out_is_refused_with_two_ways_out(factory):
    with pytest.raises(ValueError, match="each would give the same") as caught:
        GeneratorDataset(factory, workers=2)
    assert "factory(shard_index, num_shards)" in str(caught.value)
    assert "workers=1" in str(caught.value)


def test_a_factory_that_needs_something_else_is_refused():
    with pytest.raises(TypeError, match=r"it needs \(path\)"):
        GeneratorDataset(lambda path: iter(path))
    with pytest.raises(TypeError, match=r"needs \(a, b, c\)"):
        GeneratorDataset(lambda a, b, c: iter([]))


@pytest.mark.parametrize(
    ("factory", "kwargs", "error", "words"),
    [
        ([1, 2], {}, TypeError, "SampleDataset"),
        (ragged, {"on_error": "skip"}, ValueError, "has ended"),
        (ragged, {"shuffle": True}, TypeError, "takes no `shuffle`"),
        (ragged, {"restart": False}, ValueError, "needs `num_batches`"),
        (ragged, {"cache": "memory"}, ValueError, "no `cache`"),
        (ragged, {"num_batches": 0}, ValueError, "num_batches"),
        (ragged, {"num_shards": 0}, ValueError, "num_shards"),
        (ragged, {"batch_size": 0}, ValueError, "batch_size"),
        (ragged, {"bacth_size": 3}, TypeError, "bacth_size"),
        (iter([]), {"restart": True}, ValueError, "through once"),
    ],
)
def test_arguments_are_checked(factory, kwargs, error, words):
    with pytest.raises(error, match=words):
        GeneratorDataset(factory, **kwargs)


def test_arguments_that_are_refused_are_not_offered():
    with pytest.raises(TypeError) as caught:
        GeneratorDataset(without_end, batchsize=4)
    message = str(caught.value)
    assert message.endswith(" Did you mean `batch_size`?")
    for name in ("shuffle", "cache", "on_error"):
        assert name not in message


def test_what_a_factory_returns_must_be_iterable():
    with (
        GeneratorDataset(lambda: 5) as dataset,
        pytest.raises(TypeError, match="returned a int"),
    ):
        list(dataset)


# -- failures ----------------------------------------------------------------


@everywhere
def test_what_a_generator_raises_arrives_and_names_the_shard(place):
    with GeneratorDataset(failing, num_shards=2, **PLACES[place]) as dataset:
        batches = iter(dataset)
        assert [next(batches) for _ in range(3)] == [1, 1, 2]
        with pytest.raises(KeyError, match="nothing here") as caught:
            next(batches)
        assert "In batch 1 of shard 1 of 2." in caught.value.__notes__
        # And from the beginning again.
        assert next(iter(dataset)) == 1


@pytest.mark.parametrize(
    "start_method", quickly(["forkserver", "fork"], "forkserver")
)
@pytest.mark.parametrize("num_shards", [4, 6])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_the_death_of_a_worker_each_item_still_comes_once(
    tmp_path, num_shards, start_method
):
    dataset = GeneratorDataset(
        Dying(tmp_path, 400, at=201),
        num_shards=num_shards,
        start_method=start_method,
        **PROCESSES,
    )
    assert epochs(dataset, 2) == [list(range(400))] * 2
    assert (tmp_path / "died").exists()


def test_the_error_for_a_dead_worker_names_the_dataset(tmp_path):
    dataset = GeneratorDataset(
        Dying(tmp_path, 40, at=21), max_worker_restarts=0, **PROCESSES
    )
    with dataset, pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
        list(dataset)
    assert caught.value.dataset == "GeneratorDataset"
    assert "Shards" not in str(caught.value)


@pytest.mark.long
def test_of_a_hundred_thousand_items_each_comes_once_though_a_worker_dies(
    tmp_path,
):
    dataset = GeneratorDataset(Dying(tmp_path, 100_000, at=50_001), **PROCESSES)
    assert epochs(dataset, 1) == [list(range(100_000))]
    assert (tmp_path / "died").exists()


def test_a_factory_that_can_is_told_where_to_start(tmp_path):
    dataset = GeneratorDataset(DyingTold(tmp_path, 400, at=201), **PROCESSES)
    assert epochs(dataset, 1) == [list(range(400))]
    starts = (tmp_path / "starts 1").read_text().split()
    assert starts == ["0", "50"]
    assert (tmp_path / "starts 0").read_text().split() == ["0"]


@pytest.mark.parametrize("place", [{"workers": 0}, {"workers": 1}, ONE_PROCESS])
def test_a_factory_is_told_where_a_resumed_epoch_starts(tmp_path, place):
    told = DyingTold(tmp_path, 40, at=-1)
    with GeneratorDataset(told, batch_size=4, seed=0, **place) as dataset:
        batches = iter(dataset)
        began = [next(batches).tolist() for _ in range(3)]
        state = dataset.state_dict()
    with GeneratorDataset(told, batch_size=4, seed=0, **place) as dataset:
        dataset.load_state_dict(state)
        rest = [batch.tolist() for batch in dataset]
    assert [*itertools.chain(*began, *rest)] == list(range(40))
    starts = (tmp_path / "starts 0").read_text().split()
    assert starts == ["0", "12"]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_other_threads_may_ask_for_single_batches_during_a_pass(
    workers, caplog
):
    def items(shard_index, num_shards):
        yield from range(shard_index, 40, num_shards)

    with GeneratorDataset(items, 4, num_shards=2, workers=workers) as dataset:
        expected = [batch.tolist() for batch in dataset]
        found = []
        asked = threading.Event()

        def ask():
            for index in (7, 2, 9, 0):
                found.append((index, dataset[index].tolist()))
                asked.set()

        thread = threading.Thread(target=ask)
        passed = []
        for number, batch in enumerate(dataset):
            passed.append(batch.tolist())
            if number == 3:
                thread.start()
                asked.wait()
        thread.join()
        assert passed == expected
        assert [expected[index] for index, _ in found] == [b for _, b in found]
    assert not caplog.messages


@pytest.mark.parametrize("again_at", range(4, 12))
def test_a_signal_handler_may_ask_for_a_batch_while_others_are_replayed(
    again_at, request
):
    built, asked, due = [], [], {3, again_at}

    def numbers():
        for number in range(20):
            built.append(number)
            if len(built) in due:
                due.discard(len(built))
                signal.raise_signal(signal.SIGUSR1)
            yield number

    def handle(*_):
        asked.append(int(dataset[0][0]))

    before = signal.signal(signal.SIGUSR1, handle)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    with GeneratorDataset(numbers, batch_size=1, workers=0) as dataset:
        assert [int(batch[0]) for batch in dataset] == list(range(20))
    assert asked == [0, 0]


def test_a_signal_handler_may_ask_for_a_single_batch_during_a_pass(request):
    main, handled = threading.get_ident(), []

    def handle(*_):
        try:
            handled.append(dataset[0].tolist())
        except LoaderError as error:  # it comes at another moment, too
            if "about to hand one out" not in str(error):
                raise

    def items(shard_index, num_shards):
        for number in range(shard_index, 24, num_shards):
            if number == 13 and not handled:
                while not handled:
                    signal.pthread_kill(main, signal.SIGUSR1)
                    time.sleep(1.0)
            yield number

    before = signal.signal(signal.SIGUSR1, handle)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    with GeneratorDataset(items, 4, num_shards=2, workers=2) as dataset:
        found = [batch.tolist() for batch in dataset]
    assert found[0] == handled[0] == [0, 2, 4, 6]
    assert sorted(itertools.chain(*found)) == list(range(24))
    assert len(found) == 6


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_resumed_stream_tells_if_its_generators_do_not_repeat_their_items(
    repeats, num_shards, caplog
):
    offsets = itertools.repeat(0) if repeats else itertools.count()

    def items(shard_index, num_shards):
        first = next(offsets)
        yield from range(first + shard_index, first + 40, num_shards)

    def made():
        return GeneratorDataset(items, 4, num_shards=num_shards, seed=1)

    with made() as dataset:
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        state = json.loads(json.dumps(dataset.state_dict()))
    for _ in range(2):
        caplog.clear()
        with made() as other:
            other.load_state_dict(state)
            assert len(list(other)) == 7
            assert len(list(other)) == 10
        told = "is resumed at batch 3 of epoch 0, and its generators have not"
        assert (told in caplog.text) is not repeats


def test_a_stream_that_is_resumed_between_epochs_tells_nothing(caplog):
    numbers = itertools.count()

    def items():
        for _ in range(8):
            yield next(numbers)

    with GeneratorDataset(items, 4, seed=1) as dataset:
        list(dataset)
        state = dataset.state_dict()
    with GeneratorDataset(items, 4, seed=1) as dataset:
        dataset.load_state_dict(state)
        assert len(list(dataset)) == 2
    assert not caplog.messages


@pytest.mark.parametrize("is_told", [False, True])
def test_a_worker_whose_requests_were_cancelled_goes_on_with_its_generator(
    is_told,
):
    starts = []

    def make():
        starts.append(0)
        yield from range(22)

    def make_told(start):
        starts.append(start)
        yield from range(start, 22)

    factory = make_told if is_told else make
    with GeneratorDataset(factory, batch_size=4) as dataset:
        (shards,) = dataset._fastdata_plan.shards
        batches = [shards[turn][1].tolist() for turn in (0, 1, 4)]
        assert batches == [[*range(4)], [*range(4, 8)], [*range(16, 20)]]
        with pytest.raises(EndOfData):
            shards[9]
        assert shards[2][1].tolist() == [*range(8, 12)]
    assert starts == [0, 8 if is_told else 0]


@pytest.mark.parametrize("position", [2, 3])
def test_a_generator_that_stands_where_the_epoch_is_resumed_goes_on(position):
    """As Keras's look at the first batch leaves it before `fit` is resumed."""
    given = []

    def count(start):
        for number in range(start, 40):
            given.append(number)
            yield number

    def make(**place):
        return GeneratorDataset(count, batch_size=4, seed=0, **place)

    with make(workers=0) as before:
        batches = iter(before)
        began = [next(batches).tolist() for _ in range(position)]
        state = before.state_dict()
    given.clear()
    with make(workers=1, max_queue_size=position - 1) as dataset:
        probe = iter(dataset)
        next(probe)
        deadline = time.monotonic() + 60
        while len(given) < 4 * position and time.monotonic() < deadline:
            time.sleep(0.01)
        dataset.load_state_dict(state)
        rest = [batch.tolist() for batch in dataset]
    assert [*itertools.chain(*began, *rest)] == list(range(40))


@pytest.mark.parametrize("num_shards", [4, 8])
def test_generators_that_give_something_else_the_second_time_are_found_out(
    tmp_path, num_shards
):
    factory = DyingForgetful(tmp_path, 100, at=51)
    with (
        GeneratorDataset(
            factory, num_shards=num_shards, **PROCESSES
        ) as dataset,
        pytest.raises(LoaderError, match="cannot be replayed"),
    ):
        list(dataset)


def test_generators_that_end_sooner_the_second_time_are_found_out(tmp_path):
    factory = DyingShorter(tmp_path, 100, at=51)
    with (
        GeneratorDataset(factory, **PROCESSES) as dataset,
        pytest.raises(LoaderError, match="cannot be replayed"),
    ):
        list(dataset)


# -- through Keras -----------------------------------------------------------


def _model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class Counts(keras.callbacks.Callback):
    """How many batches each epoch has."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1] += 1


@pytest.mark.backend
@somewhere
def test_fit_takes_all_that_there_is_without_a_warning(place):
    model, counts = _model(), Counts()
    with (
        GeneratorDataset(labelled, num_shards=2, **PLACES[place]) as dataset,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", ".*(ran out of data|`shuffle=True`)")
        model.fit(
            dataset,
            validation_data=dataset,
            epochs=3,
            verbose=0,
            callbacks=[counts],
        )
        assert counts.epochs == [14, 14, 14]
        assert len(model.predict(dataset, verbose=0)) == 56
        model.evaluate(dataset, verbose=0)


@pytest.mark.backend
def test_fit_takes_steps_of_what_has_no_end():
    model, counts = _model(), Counts()
    with GeneratorDataset(
        endless, num_batches=5, restart=False, workers=2
    ) as dataset:
        model.fit(dataset, epochs=3, verbose=0, callbacks=[counts])
    assert counts.epochs == [5, 5, 5]
    counts = Counts()
    with GeneratorDataset(endless, workers=2) as dataset:
        model.fit(
            dataset,
            steps_per_epoch=6,
            epochs=2,
            verbose=0,
            callbacks=[counts],
        )
    assert counts.epochs == [6, 6]


DIFFICULTY = {"level": 0}


def _of_difficulty():
    while True:
        yield np.full(3, DIFFICULTY["level"], "float32"), np.zeros(1)


class Levels(GeneratorDataset):
    """Its factory is a method."""

    def __init__(self, **kwargs):
        super().__init__(self.make, **kwargs)
        self.level = 0

    def make(self, shard_index, num_shards):
        while True:
            yield np.full(3, self.level, "float32"), np.zeros(1)


def _set_difficulty(_, level):
    DIFFICULTY["level"] = level


def _set_level(dataset, level):
    dataset.level = level


_OF_DIFFICULTY = functools.partial(GeneratorDataset, _of_difficulty)
_PROCESS = {"workers": 1, "use_multiprocessing": True}


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (_OF_DIFFICULTY, _set_difficulty, "DIFFICULTY"),
        (Levels, _set_level, "level"),
    ],
)
@pytest.mark.parametrize("workers", [{"workers": 1}, _PROCESS], ids=str)
@pytest.mark.backend
def test_what_generators_in_processes_do_not_see_is_named_once(
    workers, make, change, name, caplog, monkeypatch
):
    monkeypatch.setitem(DIFFICULTY, "level", 0)
    with make(batch_size=4, **workers) as dataset:
        edits = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, _: change(dataset, epoch + 1)
        )
        fit = {"steps_per_epoch": 3, "verbose": 0, "callbacks": [edits]}
        _model().fit(dataset, epochs=4, **fit)
    assert len(caplog.messages) == (workers is _PROCESS)
    assert name in caplog.text or workers is not _PROCESS


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("processes", [False, True])
def test_generators_that_go_on_without_a_change_tell_nothing(
    processes, count, caplog
):
    going_on = {"num_batches": 3, "restart": False, "batch_size": 2}
    places = {"workers": count, "use_multiprocessing": processes}
    with Levels(**going_on, **places) as dataset:
        for _ in range(3):
            assert len(list(dataset)) == 3
            dataset.mark_changed()
        shards = dataset._fastdata_plan.shards[0]
        searched = [variable.name for variable in variables_of(shards)]
    assert not caplog.messages
    assert any(name.endswith(".level") for name in searched)
    assert not [name for name in searched if "turns" in name]


RNG = random.Random(3)


class DrawsLevels(Levels):
    """Its hook draws from a generator in a global variable."""

    def on_epoch_end(self):
        self.level = RNG.randrange(1000)


@everywhere
def test_what_a_hook_draws_does_not_depend_on_the_present_pass(place):
    def levels(**place):
        found = []
        with DrawsLevels(num_batches=2, seed=1, **place) as dataset:
            for _ in range(3):
                found.append([int(x[0]) for x, _ in dataset])
                dataset.on_epoch_end()
            held = [held.path for held in Search(dataset).held]
        assert held == [f"{__name__}:RNG"]
        return found

    assert levels(**PLACES[place]) == levels(workers=0)


class Hooks(Levels):
    def on_epoch_end(self):
        self.level += 1


def test_a_hook_of_generators_replaces_no_worker():
    pids = set()
    with Hooks(batch_size=2, num_batches=3, **_PROCESS) as dataset:
        for level in range(3):
            assert [int(x[0, 0]) for x, _ in dataset] == [level] * 3
            (shards,) = dataset._fastdata_plan.shards
            pids.update(loader_of(shards).pool_stats().pids.values())
            dataset.on_epoch_end()
    assert len(pids) == 1


@pytest.mark.parametrize("workers", [{"workers": 1}, _PROCESS], ids=str)
def test_new_generators_see_what_has_changed_since_the_last_epoch(
    workers, caplog, monkeypatch
):
    monkeypatch.setitem(DIFFICULTY, "level", 0)
    with _OF_DIFFICULTY(num_batches=3, **workers) as dataset:
        for level in range(3):
            DIFFICULTY["level"] = level
            assert [int(x[0]) for x, _ in dataset] == [level] * 3
    assert not caplog.messages


@pytest.mark.backend
def test_keras_warns_of_fewer_batches_than_steps():
    with (
        GeneratorDataset(labelled, workers=0) as dataset,
        pytest.warns(UserWarning, match="ran out of data"),
    ):
        _model().fit(dataset, steps_per_epoch=20, verbose=0)


@pytest.mark.backend
def test_a_generator_without_items_is_said_to_have_none():
    with (
        GeneratorDataset(Numbers(0), workers=0) as dataset,
        pytest.raises(LoaderError, match="has no batch: it ended"),
    ):
        _model().fit(dataset, verbose=0)


# -- the end of data, for anyone ---------------------------------------------


@pytest.mark.backend
@everywhere
def test_a_dataset_may_say_where_it_ends(place):
    with Ending(6, **PLACES[place]) as dataset:
        assert [int(y[0, 0]) for x, y in dataset] == list(range(6))
        counts = Counts()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*ran out of data")
            _model().fit(dataset, epochs=2, verbose=0, callbacks=[counts])
        assert counts.epochs == [6, 6]


@pytest.mark.backend
def test_the_first_batch_of_an_iterator_is_not_lost_to_a_hook():
    counts = Counts()
    with Hooked(labelled(0, 1)) as dataset:
        _model().fit(dataset, verbose=0, callbacks=[counts])
    assert counts.epochs == [14]
    assert dataset.seen


@somewhere
def test_a_dataset_may_walk_through_one_that_says_where_it_ends(place):
    with Walks(**PLACES[place]) as dataset:
        assert [int(batch[0]) for batch in dataset] == [3, 3]


@somewhere
def test_where_the_length_is_known_an_early_end_is_an_error(place):
    with (
        Ending(3, said=5, **PLACES[place]) as dataset,
        pytest.raises(EndOfData),
    ):
        list(dataset)


class _Counts:
    """An iterable that counts its passes."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(range(8))


def test_a_resumed_stream_tells_that_builds_change_its_iterable(caplog):
    with GeneratorDataset(_Counts(), 2, workers=0) as dataset:
        next(iter(dataset))
        state = dataset.state_dict()
    with GeneratorDataset(_Counts(), 2, workers=0) as dataset:
        dataset.load_state_dict(state)
        list(dataset)
    assert "Its builds change what it was given, and" in caplog.text
    assert "self._fastdata" not in caplog.text
