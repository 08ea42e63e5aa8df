"""Batches in shared memory: held, dropped, huge, tiny, and interrupted."""

from __future__ import annotations

import collections
import contextlib
import errno
import gc
import json
import os
import random
import re
import signal
import textwrap
import threading
import time
import traceback
import types
import warnings
import weakref

import numpy as np
import psutil
import pytest
from limit_runs import address_space
from places import FULL
from samples import KeepsItsBuffer, Numbered, Sized, numbers

from keras_fastdata import FastPyDataset
from keras_fastdata.building import build_context
from keras_fastdata.memory import arena
from keras_fastdata.workers import worker_process
from keras_fastdata.workers.process import forkservers, worker_main

# The long way round, in the full run.
INTERRUPTS = 500 if FULL else 50
PROCESSES = {"workers": 2, "use_multiprocessing": True}
pytestmark = pytest.mark.usefixtures("kept_forkserver")


def test_a_list_of_2000_batches_has_every_value_right():
    with Numbered(length=2000, shape=(64, 1024), **PROCESSES) as dataset:
        held = list(dataset)
    assert numbers(held) == list(range(2000))
    assert all((x == number).all() for number, (x, _) in enumerate(held))


def test_a_hundred_datasets_leave_address_space_for_the_program():
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            made = arena.Arena(warm_slots=1, hold_limit=16)
            stack.callback(made.close)
            assert made.segment.stride >= 1 << 27
        assert address_space() < (1 << 47) - (1 << 44)


def test_batches_outlive_their_loader():
    dataset = Numbered(length=5, shape=(64, 1024), **PROCESSES)
    held = list(dataset)
    dataset.close()
    del dataset
    gc.collect()
    assert all((x == number).all() for number, (x, _) in enumerate(held))


def test_labels_do_not_keep_the_images_alive():
    with Numbered(length=200, shape=(256, 1024), **PROCESSES) as dataset:
        labels = [y for _, y in dataset]
        arena = dataset._fastdata.loader._pool.workers._arena
        gc.collect()
        assert not arena.crowded
        assert not arena._leased
    assert [int(y[0, 0]) for y in labels] == list(range(200))


@pytest.mark.parametrize("reuse", [False, True])
def test_a_buffer_that_the_worker_keeps_is_never_seen_to_change(reuse):
    with KeepsItsBuffer(reuse=reuse, length=60, **PROCESSES) as dataset:
        for _ in range(2):
            held = []
            for number, x in enumerate(dataset):
                assert (x == number).all()
                held.append(x)
            assert all((x == number).all() for number, x in enumerate(held))


def test_a_batch_built_in_place_arrives():
    class InPlace(FastPyDataset):
        def __len__(self):
            return 50

        def __getitem__(self, index):
            x = self.empty((64, 1000), "float32")
            x[:] = index
            return x, self.empty(3, "int64")

    with InPlace(**PROCESSES) as dataset:
        for number, (x, _) in enumerate(dataset):
            assert (x == number).all()
    with InPlace(workers=2) as dataset:
        assert all((x == n).all() for n, (x, _) in enumerate(dataset))


def test_batches_of_every_size_arrive():
    sizes = [0, 1, 100, 10**4, 10**5, 10**7, 3, 10**6, 3 * 10**8, 7]
    with Sized(sizes, **PROCESSES) as dataset:
        for size, batch in zip(sizes, dataset, strict=True):
            assert batch.nbytes == size
            assert batch[:1].tolist() == [7][:size]
            assert batch[-1:].tolist() == [9][:size] if size != 1 else True


@pytest.mark.long
def test_a_batch_of_gigabytes_arrives():
    with Sized([2**31 + 5], workers=1, use_multiprocessing=True) as dataset:
        (batch,) = dataset
        assert batch.nbytes == 2**31 + 5
        assert (batch[0], batch[-1]) == (7, 9)


def test_memory_that_was_held_is_given_back():
    with Numbered(length=100, shape=(256, 1024), **PROCESSES) as dataset:
        held = list(dataset)
        arena = dataset._fastdata.loader._pool.workers._arena
        most = os.fstat(arena.segment.fd).st_blocks * 512
        del held
        gc.collect()
        list(dataset)
        assert not arena.crowded
        least = os.fstat(arena.segment.fd).st_blocks * 512
        assert least <= most
        assert least < 16 * 2**20


def test_the_queue_is_bounded_in_bytes():
    dataset = Numbered(
        length=40,
        shape=(256, 1024),
        max_queue_size=30,
        max_queue_bytes=4 * 2**20,
        **PROCESSES,
    )
    with dataset:
        batches = iter(dataset)
        for _ in range(20):
            next(batches)
            walk = batches._epoch
            assert walk.ahead <= 4
        assert numbers(batches) == list(range(20, 40))


def test_what_user_code_writes_into_a_batch_stays_in_it():
    with Numbered(length=100, shape=(64, 1024), **PROCESSES) as dataset:
        for number, (x, _) in enumerate(dataset):
            assert (x == number).all()
            x += 1000


def _forked(run):
    """What `run` returns in a forked process, which then ends."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX, and Python 3.12
        pid = os.fork()
    if not pid:
        try:
            os.close(readable)
            with open(writable, "w") as file:
                json.dump(run(), file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writable)

    def result():
        with open(readable) as file:
            text = file.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    return result


def _full_of(array, value):
    return bool((array == value).all())


SHAPE = (64, 1024)


@pytest.mark.parametrize("closes", [False, True])
def test_a_forked_process_has_its_own_batches(closes):
    """It and its parent neither see nor change what the other has."""
    go, gone = os.pipe()

    def in_the_child():
        os.close(gone)
        os.read(go, 1)  # the end: the parent has used every slot again
        seen = [_full_of(x, number) for number, (x, _) in enumerate(held)]
        for x, _ in held:
            x[:] = -1
        return seen + [_full_of(x, -1) for x, _ in held]

    with Numbered(length=400, shape=SHAPE, **PROCESSES) as dataset:
        batches = iter(dataset)
        held = [next(batches) for _ in range(4)]
        if closes:
            dataset.close()
        seen = _forked(in_the_child)
        os.close(go)
        held[3][0][:] = 33
        del held[:2]
        # More than there are slots.
        rest = [_full_of(x, n) for n, (x, _) in enumerate(batches, start=4)]
        assert rest == [True] * 396
        os.close(gone)
        assert seen() == [True] * 8
        assert _full_of(held[0][0], 2)
        assert _full_of(held[1][0], 33)


def test_many_forks_leave_neither_slots_nor_descriptors():
    with Numbered(length=600, shape=SHAPE, **PROCESSES) as dataset:
        held = collections.deque(maxlen=3)
        batches = iter(dataset)
        held.append(next(batches)[0])
        descriptors = len(os.listdir("/proc/self/fd"))
        for number in range(1, 600):
            held.append(next(batches)[0])
            if number % 20 == 0:
                seen = _forked(lambda: [float(x.mean()) for x in held])()
                assert seen == [*range(number + 1)][-len(held) :]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        slots = dataset._fastdata.loader._pool.workers._arena
        held.clear()
        slots._reclaim()
        assert not slots._leased
        assert not slots._private


def test_a_process_that_a_forked_one_forks_has_its_own_batches_too():
    with Numbered(length=9, shape=SHAPE, **PROCESSES) as dataset:
        batches = iter(dataset)
        x, _ = next(batches)

        def in_the_child():
            x[:] = 1

            def in_its_child():
                seen = _full_of(x, 1)
                x[:] = 2
                return seen

            return [_forked(in_its_child)(), _full_of(x, 1)]

        assert _forked(in_the_child)() == [True, True]
        assert _full_of(x, 0)
        assert numbers(batches) == list(range(1, 9))


@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
@pytest.mark.parametrize("should_fill", [True, False])
def test_workers_that_are_forks_use_slots_that_others_were_forked_with(
    should_fill, monkeypatch
):
    def no_room(fd, stride):
        raise OSError(errno.ENOMEM, "no address space")

    class Changing(Numbered):
        level = 0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + self.level, y

    dataset = Changing(30, SHAPE, start_method="fork", **PROCESSES)
    with dataset:
        batches = iter(dataset)
        held = [next(batches)[0] for _ in range(3)]
        if not should_fill:
            monkeypatch.setattr(worker_main, "Segment", no_room)
        assert _forked(lambda: [_full_of(x, n) for n, x in enumerate(held)])()
        # New workers are forked, while slots are detached.
        dataset.level = 5
        del held[0]
        for number, (x, _) in enumerate(batches, start=3):
            assert _full_of(x, number + 5)
        assert [x[0, 0] for x in held] == [1, 2]


def test_a_slot_without_memory_for_a_copy_is_not_used_again(monkeypatch):
    def no_memory(*args, **kwargs):
        raise OSError(errno.ENOMEM, "no memory")

    with Numbered(length=400, shape=SHAPE, **PROCESSES) as dataset:
        batches = iter(dataset)
        held = [next(batches)[0]]
        go, gone = os.pipe()

        def in_the_child():
            os.close(gone)
            os.read(go, 1)
            return _full_of(held[0], 0)

        with monkeypatch.context() as patch:
            patch.setattr(arena.Segment, "make_private", no_memory)
            seen = _forked(in_the_child)
        os.close(go)
        held.clear()
        assert numbers(batches) == list(range(1, 400))
        os.close(gone)
        assert seen()


def test_what_a_process_forked_in_a_build_writes_stays_in_it():
    class Forks(FastPyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            x = self.empty(SHAPE)
            x[:] = index

            def in_the_child():
                seen = _full_of(x, index)
                x[:] = -1
                return seen

            assert _forked(in_the_child)()
            return x

    with Forks(**PROCESSES) as dataset:
        assert all(_full_of(x, number) for number, x in enumerate(dataset))


def test_a_process_forked_in_a_build_leaves_the_clock_of_its_worker_alone():
    worker = object.__new__(worker_main._SocketLoop)
    worker._start = worker_process.WorkerStart.__new__(
        worker_process.WorkerStart
    )
    object.__setattr__(worker._start, "worker", 0)
    worker._heartbeats = None  # whoever looks at it raises an error
    worker._pid = os.getppid()
    with worker._without_heartbeat():
        pass


def test_a_file_opened_while_another_thread_closes_the_arena_is_not_mapped(
    monkeypatch, tmp_path
):
    slots = arena.Arena(1, 16)
    number = slots.take()
    held = slots.lease(number, 4096)
    held[:] = 7
    (tmp_path / "another").write_bytes(bytes(1 << 20))
    real = arena.ctypes.CDLL(None, use_errno=True)
    opened = []

    def mmap(*arguments):
        if not opened:  # another thread
            slots.close()
            opened.append(os.open(tmp_path / "another", os.O_RDWR))
        real.mmap.restype, real.mmap.argtypes = mmap.restype, mmap.argtypes
        *others, offset = arguments
        return real.mmap(*others, offset)

    with monkeypatch.context() as patch:
        library = types.SimpleNamespace(mmap=mmap)
        patch.setattr(arena.ctypes, "CDLL", lambda *_, **__: library)
        slots.make_private()
    assert (held == 7).all()
    os.close(*opened)


def test_40_mb_batches_flow_where_dev_shm_holds_1_mb(tmp_path, zygote):
    script = tmp_path / "tiny_shm.py"
    script.write_text(
        "import ctypes, os, subprocess, sys, numpy as np\n"
        "from keras_fastdata import FastPyDataset\n"
        "CLONE_NEWNS = 0x20000\n"
        "if ctypes.CDLL(None).unshare(CLONE_NEWNS):\n"
        "    sys.exit('no right to mount')\n"
        "mount = 'mount --make-rprivate / && '\n"
        "mount += 'mount -t tmpfs -o size=1m tmpfs /dev/shm'\n"
        "if subprocess.run(mount, shell=True).returncode:\n"
        "    sys.exit('no right to mount')\n"
        "class D(FastPyDataset):\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, i):\n"
        "        return np.full((10, 1024, 1024), i, 'float32')\n"
        "assert os.statvfs('/dev/shm').f_blocks * 4096 <= 2**20\n"
        "with D(workers=2, use_multiprocessing=True) as d:\n"
        "    for i, x in enumerate(d):\n"
        "        assert (x == i).all()\n"
        "        assert os.listdir('/dev/shm') == []\n"
        "print('flowed')\n"
    )
    run = zygote.run(script)
    if "no right to mount" in run.stderr:
        pytest.skip("needs the privilege to mount in a private namespace")
    assert run.stdout == "flowed\n", run.stderr


def _in_dev_shm(pid):
    """What a process has mapped or opened of /dev/shm."""
    with open(f"/proc/{pid}/maps") as file:
        found = {line.partition("/dev/shm/")[2] for line in file}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            found.add(target.partition("/dev/shm/")[2])
    return found - {""}


def test_no_process_of_ours_maps_or_opens_what_is_in_dev_shm():
    # Semaphores of `multiprocessing`, say, of tests that ran before this one.
    before = _in_dev_shm(os.getpid())
    with Numbered(length=50, shape=(64, 1024), **PROCESSES) as dataset:
        next(iter(dataset))
        assert _in_dev_shm(os.getpid()) <= before
        for pid in dataset._fastdata.loader.pool_stats().pids.values():
            assert not _in_dev_shm(pid)


def test_a_collected_dataset_leaves_no_process():
    def workers():
        return psutil.Process().children(recursive=True)[1:]

    forkservers.close_kept()
    dataset = Numbered(**PROCESSES)
    list(dataset)
    assert len(workers()) == 2
    reference = weakref.ref(dataset)
    del dataset
    assert reference() is None  # at once, without the cycle collector
    while workers():  # but for the fork server, which others use
        time.sleep(0.001)


def test_a_collected_dataset_leaves_no_thread():
    dataset = Numbered(workers=2)
    list(dataset)
    del dataset
    assert not [t for t in threading.enumerate() if "keras_fastdata" in t.name]


def test_memory_is_flat_over_many_epochs():
    with Numbered(length=20, shape=(64, 1024), **PROCESSES) as dataset:

        def footprint():
            gc.collect()
            process = psutil.Process()
            maps = len(process.memory_maps(grouped=False))
            return process.num_fds(), process.num_threads(), maps

        for _ in range(5):
            list(dataset)
        before = footprint()
        for _ in range(200):
            list(dataset)
        after = footprint()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 5


@pytest.mark.parametrize(
    "place",
    [{"workers": 0}, {"workers": 2}, PROCESSES],
    ids=["inline", "thread", "process"],
)
def test_every_keyboard_interrupt_is_raised_and_no_batch_lost(place):
    rng = random.Random(0)
    sent = threading.Semaphore(0)
    go = threading.Event()
    over = threading.Event()

    def interrupt():
        while True:
            go.wait()
            if over.is_set():
                return
            go.clear()
            time.sleep(rng.uniform(0, 0.004))
            os.kill(os.getpid(), signal.SIGINT)
            sent.release()

    thread = threading.Thread(target=interrupt)
    thread.start()
    raised = 0
    try:
        with Numbered(length=10**7, shape=(16, 1024), **place) as dataset:
            batches = iter(dataset)
            expected = 0
            for _ in range(INTERRUPTS):
                before = expected
                try:
                    go.set()
                    while True:
                        x, _ = next(batches)
                        # One batch may be lost with the interrupt that struck
                        # between its delivery and this line; none else.
                        assert x[0, 0] in (expected, before + 1, expected + 1)
                        expected = int(x[0, 0]) + 1
                except KeyboardInterrupt:
                    raised += 1
                    sent.acquire()
    finally:
        over.set()
        go.set()
        thread.join()
    assert raised == INTERRUPTS


def test_an_interrupt_that_leaves_a_build_half_way_is_forgotten(monkeypatch):
    def broken_off(*_):
        raise KeyboardInterrupt

    with Numbered(workers=0) as dataset:
        batches = iter(dataset)
        with monkeypatch.context() as patch:
            patch.setattr(build_context.Building, "__exit__", broken_off)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert build_context.current_context() is None
        assert numbers(batches) == list(range(10))
        assert build_context.current_context() is None


def test_no_core_dump_fills_the_holes_of_shared_memory():
    with Numbered(workers=1, use_multiprocessing=True) as dataset:
        next(iter(dataset))
        pids = [
            os.getpid(),
            *dataset._fastdata.loader.pool_stats().pids.values(),
        ]
        for pid in pids:
            with open(f"/proc/{pid}/smaps") as file:
                _, _, ours = file.read().rpartition("memfd:keras_fastdata-b")
            (flags,) = re.findall("VmFlags: (.*)", ours)[:1]
            assert "dd" in flags.split()  # "do not include area into core dump"


def test_closed_standard_files_do_not_become_ours(tmp_path, zygote):
    script = """
        import os, sys
        for fd in range(3):
            os.close(fd)
        from samples import Numbered, numbers
        for start_method in ("forkserver", "spawn", "fork"):
            with Numbered(
                workers=1, use_multiprocessing=True, start_method=start_method
            ) as dataset:
                assert numbers(dataset) == list(range(10))
                (pid,) = dataset._fastdata.loader.pool_stats().pids.values()
                for who in ("self", pid):
                    for fd in range(3):
                        place = os.readlink(f"/proc/{who}/fd/{fd}")
                        assert "/" in place and "memfd" not in place, place
        os._exit(42)
    """
    path = tmp_path / "closes.py"
    path.write_text(textwrap.dedent(script))
    assert zygote.run(path).returncode == 42


# -- `empty` outside of a batch -----------------------------------------------


class Scratches(FastPyDataset):
    """Uses `empty` for what is in no batch, also when it is none of its own."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        scratch = self.empty((100, 100))
        scratch[:] = index
        return np.array([str(scratch[0, 0]), None], object)


class KeepsEmpty(FastPyDataset):
    """Goes on using the `empty` of its first batch."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if not hasattr(self, "_alloc"):
            self._alloc = self.empty
        batch = np.full((64, 1 + index, 8), index, "float32")
        self._alloc(batch.shape)[:] = -1
        return batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_arrays_may_have_needed_scratch_memory(workers):
    with Scratches(workers=workers, use_multiprocessing=True) as dataset:
        found = [batch[0] for batch in dataset]
    assert found == [f"{index}.0" for index in range(8)]


def test_an_empty_that_was_kept_writes_into_no_batch():
    with KeepsEmpty(workers=1, use_multiprocessing=True) as dataset:
        for index, batch in enumerate(dataset):
            assert (batch == index).all()
