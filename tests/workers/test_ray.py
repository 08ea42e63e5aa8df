"""`executor="ray"`: every contract holds where workers are Ray actors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import keras
import numpy as np
import psutil
import pytest
import ray_samples
from generator_kinds import Everywhere
from lateness import only_the_stuck_are_late, worker_of
from ray_samples import Drawn
from samples import equal

from keras_fastdata import (
    BatchTimeoutError,
    GeneratorDataset,
    LoaderError,
    LoaderHealth,
    WorkerDiedError,
)

ray = pytest.importorskip("ray", reason="Ray is not installed")

from keras_fastdata.workers.ray.object_store import StoreUsage, store_usage  # noqa: E402

_STORE = 120 * 2**20
_WAIT_S = 120

pytestmark = [pytest.mark.alone]


@pytest.fixture(scope="module")
def nodes():
    """Three nodes, the first of which is this process's."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        one = {"num_cpus": 2, "object_store_memory": _STORE}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**one, "include_dashboard": False},
        )
        cluster.add_node(**one)
        cluster.add_node(**one)
        ray.init(address=cluster.address, logging_level="ERROR")
        cluster.one = one
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(nodes):
    """In place of the usual check: Ray starts and keeps what it likes."""
    shared = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + _WAIT_S
    while living := _living_actors():
        assert time.monotonic() < deadline, f"left behind: {living}"
        time.sleep(0.05)
    left = {n for n in os.listdir("/dev/shm") if "keras" in n} - shared
    assert not left


@contextlib.contextmanager
def _another_node(nodes, **also):
    """A node that is there until it is removed, or the test has ended."""
    node = nodes.add_node(**nodes.one, **also)
    try:
        yield node
    finally:
        if node in nodes.worker_nodes:
            nodes.remove_node(node)


def _living_actors():
    from ray._private import state

    table = state.actors()
    return [
        actor["ActorID"]
        for actor in table.values()
        if actor["State"] not in ("DEAD",)
    ]


def _on_ray(cls, *args, **kwargs):
    return cls(*args, **{"workers": 3, "executor": "ray", **kwargs})


def _equal(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def _here(cls=Drawn, *args, **kwargs):
    """The same batches, built in processes of this machine."""
    local = {"workers": 2, "use_multiprocessing": True}
    with cls(*args, **kwargs, **local) as dataset:
        return list(dataset)


def _wait_for(condition):
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _workers_of(dataset):
    """The actors of a dataset: index to place."""
    workers = dataset._fastdata.loader._pool.workers
    return {i: w.location for i, w in workers._workers.items()}


def _make_ready(dataset):
    """Goes through epochs until every worker has its place."""

    def is_ready():
        batches = list(dataset)
        workers = dataset._fastdata.loader._pool.workers._workers.values()
        return batches and all(worker.is_ready for worker in workers)

    _wait_for(is_ready)


@contextlib.contextmanager
def _consumer(dataset):
    """A thread that takes what there is; in the end the gate is opened.

    Its batches must be those of an epoch in the caller.
    """
    _make_ready(dataset)
    epoch = dataset._fastdata.loader.epoch
    (dataset.directory / "shut").touch()
    found = []
    thread = threading.Thread(target=lambda: found.extend(dataset))
    thread.start()
    try:
        yield found
    finally:
        (dataset.directory / "shut").unlink()
        thread.join(_WAIT_S)
        assert not thread.is_alive()
    _equal(found, _inline(dataset, epoch))


def _inline(dataset, epoch):
    """The same epoch, built in the caller."""
    with Drawn(length=dataset.length, workers=0) as other:
        other.set_epoch(epoch)
        return list(other)


# -- the batches -------------------------------------------------------------


def test_batches_are_those_of_local_processes_epoch_after_epoch():
    with _on_ray(Drawn) as dataset:
        found = [list(dataset) for _ in range(2)]
    with Drawn(workers=2, use_multiprocessing=True) as dataset:
        for epoch in found:
            _equal(epoch, list(dataset))


@pytest.mark.backend
def test_fit_trains_on_the_batches_of_local_processes():
    losses, predicted = [], []
    for kwargs in (
        {"executor": "ray", "workers": 3},
        {"workers": 2, "use_multiprocessing": True},
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        with Drawn(size=16_384, **kwargs) as dataset:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                history = model.fit(dataset, epochs=2, verbose=0)
            losses.append(history.history["loss"])
            predicted.append(model.predict(dataset, verbose=0))
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(*predicted)


@pytest.mark.long
def test_large_arrays_are_views_of_the_store_and_small_ones_are_not():
    with _on_ray(ray_samples.Kinds, workers=1) as dataset:
        batches = list(dataset)
    for index, batch in enumerate(batches):
        large = batch["large"]
        assert large.shape == (64, 1024)
        assert (large == index).all()
        assert not large.flags.writeable
        assert large.ctypes.data % 64 == 0
        assert batch["fortran"].flags.f_contiguous
        assert (batch["fortran"] == index).all()
        np.testing.assert_array_equal(
            batch["strided"], np.arange(100_000)[::2] + index
        )
        assert batch["small"].flags.writeable
        assert batch["small"].tolist() == [index] * 3
        assert batch["none"].shape == (0, 3)
        assert batch["name"] == f"batch {index}"


@pytest.mark.long
def test_actors_do_not_import_keras():
    with _on_ray(ray_samples.Modules, workers=1) as dataset:
        assert "keras_fastdata" in (found := next(iter(dataset))["modules"])
    assert not {"keras", "tensorflow", "jax", "torch"} & set(found)


@pytest.mark.long
def test_batches_that_are_pickled_at_the_second_try_keep_their_arrays():
    with _on_ray(ray_samples.Unpicklable, workers=1) as dataset:
        for index, (small, function, large) in enumerate(dataset):
            assert function() == index
            assert small.tolist() == [index] * 9
            assert (large == -index).all()


@pytest.mark.long
def test_workers_are_on_every_node():
    with _on_ray(ray_samples.WorkerLocation, workers=6, length=60) as dataset:
        _make_ready(dataset)
        batches = list(dataset)
        places = _workers_of(dataset)
    assert [index for _, _, index in batches] == list(range(60))
    assert len({place.node for place in places.values()}) == 3
    pids = {index: place.pid for index, place in places.items()}
    assert all(pids[worker] == pid for pid, worker, _ in batches)


@pytest.mark.long
def test_two_datasets_share_the_cluster():
    with _on_ray(Drawn, seed=1) as one, _on_ray(Drawn, seed=2) as other:
        pairs = list(zip(one, other, strict=True))
    _equal([a for a, _ in pairs], _here(seed=1))
    _equal([b for _, b in pairs], _here(seed=2))


def test_changes_of_the_dataset_reach_the_workers_and_only_those():
    with _on_ray(ray_samples.Reshuffled, workers=2) as dataset:
        first = list(dataset)
        shipped = dataset._fastdata.loader._pool.workers._dataset.state
        dataset.order = dataset.order[::-1].copy()
        second = list(dataset)
        again = dataset._fastdata.loader._pool.workers._dataset.state
    assert shipped.version < again.version
    large = [b for b in shipped.buffers if isinstance(b, ray.ObjectRef)]
    assert len(large) == 1
    assert large == [b for b in again.buffers if isinstance(b, ray.ObjectRef)]
    order = np.arange(48)
    for found, wanted in ((first, order), (second, order[::-1])):
        np.testing.assert_array_equal(
            np.concatenate([mine for _, mine in found]), wanted
        )
        np.testing.assert_array_equal(
            np.concatenate([values for values, _ in found]), wanted
        )


@pytest.mark.long
def test_variables_of_modules_are_those_of_this_process(monkeypatch):
    with _on_ray(ray_samples.Scaled, workers=1) as dataset:
        for scale in (2, 3):
            monkeypatch.setattr(ray_samples, "SCALE", scale)
            assert {int(x[0, 0]) for (x,) in dataset} == {scale}


@pytest.mark.long
def test_a_dataset_may_write_to_its_small_arrays_and_is_told_of_large_ones():
    with _on_ray(ray_samples.Scratch, 1000) as dataset:
        assert [b[0] for b in dataset] == list(range(12))
    with (
        _on_ray(ray_samples.Scratch, 2 << 20) as dataset,
        pytest.raises(ValueError, match="read-only"),
    ):
        list(dataset)


def test_generators_run_in_actors():
    with GeneratorDataset(
        ray_samples.numbers, num_batches=24, workers=2, executor="ray"
    ) as dataset:
        found = [batch.tolist() for batch in dataset]
    assert found == [[n, n] for n in range(24)]


@pytest.mark.long
def test_generators_that_a_dataset_reaches_are_seeded_in_actors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _on_ray(Everywhere, seed=1) as dataset:
            found = [list(dataset) for _ in range(2)]
    with Everywhere(seed=1, workers=0) as dataset:
        wanted = [list(dataset) for _ in range(2)]
    assert equal(found, wanted)
    assert len(np.unique(wanted)) == np.size(wanted)


@pytest.mark.long
def test_batches_that_the_store_has_no_room_for_are_not_asked_for():
    nbytes = 8 * 2**20
    with _on_ray(
        Drawn, length=40, size=nbytes // 16, max_queue_size=100
    ) as dataset:
        slowly = []
        for batch in dataset:
            workers = dataset._fastdata.loader._pool.workers
            taken = workers.pool_stats().shared_nbytes
            assert taken <= workers._store // 2 + nbytes
            slowly.append(float(batch[0][0, 0]))
            if len(slowly) < 10:
                time.sleep(0.1)
        del batch
        held = list(dataset)
        assert (
            0
            < workers.pool_stats().shared_nbytes
            <= workers._store // 4 + nbytes
        )
    local = {"workers": 2, "use_multiprocessing": True}
    with Drawn(length=40, size=nbytes // 16, **local) as dataset:
        assert slowly == [float(batch[0][0, 0]) for batch in dataset]
        _equal(held, list(dataset))
    from ray._private.internal_api import memory_summary

    assert "Spilled" not in memory_summary(stats_only=True)


@pytest.mark.long
def test_an_answer_takes_memory_until_its_last_array_dies():
    store = StoreUsage()
    arrays = [np.zeros(100, "uint8"), np.ones(50, "uint8")]
    one, other = store.lease(arrays, 150)
    view = other[10:20]
    store.wait(7)
    assert (store.leased, store.nbytes) == (150, 157)
    del one, other
    assert store.leased == 150
    assert view.tolist() == [1] * 10
    del view
    store.wait(-7)
    assert (store.leased, store.nbytes) == (0, 0)


# -- what workers are told, and tell -----------------------------------------


def test_an_error_of_the_dataset_arrives_as_itself_with_the_users_line():
    with _on_ray(ray_samples.Bad) as dataset:
        batches = iter(dataset)
        found = [next(batches) for _ in range(3)]
        with pytest.raises(ray_samples.BadSampleError) as caught:
            next(batches)
        assert len(list(_on_ray_again(dataset))) == 3
    _equal(found, _here()[:3])
    assert caught.value.line == 17
    last = caught.traceback[-1]
    assert pathlib.Path(last.path).name == "ray_samples.py"
    assert "While building batch 3 of epoch 0 of Bad, in Ray worker" in (
        "".join(caught.value.__notes__)
    )


def _on_ray_again(dataset):
    with contextlib.suppress(ray_samples.BadSampleError):
        yield from dataset


@pytest.mark.long
def test_a_batch_that_raises_can_be_skipped():
    with (
        _on_ray(ray_samples.Bad, on_error="skip") as dataset,
        warnings.catch_warnings(),
    ):
        found = [int(y[0, 0]) for _, y in dataset]
    assert found == [n for n in range(12) if n != 3]


@pytest.mark.long
def test_a_dataset_that_cannot_be_loaded_says_why():
    with (
        _on_ray(ray_samples.Unloadable) as dataset,
        pytest.raises(FileNotFoundError, match=r"no index\.bin") as caught,
    ):
        list(dataset)
    assert "While Unloadable was loaded" in "".join(caught.value.__notes__)


@pytest.mark.long
def test_a_worker_whose_start_failed_runs_no_on_worker_stop(tmp_path):
    with (
        _on_ray(ray_samples.Unstarted, tmp_path) as dataset,
        pytest.raises(FileNotFoundError),
    ):
        list(dataset)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_files_are_opened_and_closed_once_in_each_worker(tmp_path):
    with _on_ray(ray_samples.Opened, tmp_path) as dataset:
        _make_ready(dataset)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {f"worker-{i}": "closed" for i in range(3)}


@pytest.mark.long
def test_log_records_and_warnings_reach_this_process(caplog):
    with (
        caplog.at_level(logging.INFO, "mine"),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        # Of several workers, an idle one may build a late batch again.
        with _on_ray(ray_samples.Told, workers=1) as dataset:
            list(dataset)
    texts = {r.getMessage() for r in caplog.records if r.name == "mine"}
    assert texts == {f"at {n}" for n in range(12)}
    mine = [w for w in heard if str(w.message) == "a bad pixel"]
    assert len(mine) == 12


@pytest.mark.long
def test_workers_have_the_environment_that_they_are_given():
    with _on_ray(
        ray_samples.Variables, worker_env={"MINE": "yes"}, workers=1
    ) as dataset:
        found = next(iter(dataset))
    with ray_samples.Variables(
        worker_env={"MINE": "yes"}, workers=1, use_multiprocessing=True
    ) as dataset:
        assert found == next(iter(dataset))
    assert found == {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MINE": "yes",
        "hash": found["hash"],
    }


@pytest.mark.backend
def test_loader_health_measures_and_judges():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    health = LoaderHealth(verbose=0)
    with _on_ray(Drawn, length=40, workers=1) as dataset:
        model.fit(dataset, epochs=2, verbose=0, callbacks=[health])
    summary = health.summary()
    assert [epoch.batches for epoch in summary.epochs] == [40, 40]
    assert summary.epochs[1].build_s_p50 > 0
    assert summary.verdict.kind
    health.plot()


# -- the end of workers ------------------------------------------------------


def test_an_actor_that_is_killed_is_replaced_and_no_byte_changes(
    tmp_path, caplog
):
    with _on_ray(ray_samples.Killed, tmp_path) as dataset:
        found = list(dataset)
    _equal(found, _here())
    (text,) = [r.getMessage() for r in caplog.records]
    # Of the one before, the answer may be lost with the worker.
    assert re.search("died while building batch [45] of epoch 0", text)
    assert "restart 1 of at most 3" in text


@pytest.mark.long
def test_a_batch_that_kills_two_workers_is_named(tmp_path):
    # A worker that dies over a copy, which another worker builds as well by
    # then, does not count against the batch.
    with _on_ray(ray_samples.Killed, tmp_path, times=3) as dataset:
        batches = iter(dataset)
        found = [next(batches) for _ in range(5)]
        with pytest.raises(WorkerDiedError, match="second time") as caught:
            next(batches)
    _equal(found, _here()[:5])
    assert caught.value.batch_index == 5
    assert caught.value.dataset == "Killed"
    assert caught.value.pid


@pytest.mark.long
def test_without_a_restart_left_the_death_is_the_error(tmp_path):
    with (
        _on_ray(
            ray_samples.Killed, tmp_path, workers=1, max_worker_restarts=0
        ) as dataset,
        pytest.raises(WorkerDiedError, match="max_worker_restarts=0"),
    ):
        list(dataset)


@pytest.mark.long
def test_actors_that_die_before_they_have_a_place_are_not_made_for_ever(caplog):
    with _on_ray(Drawn, length=40, workers=2) as dataset:
        batches = iter(dataset)
        next(batches)
        workers = dataset._fastdata.loader._pool.workers
        make = workers._actors._make_actor

        def stillborn():
            handle = make()
            ray.kill(handle)
            return handle

        workers._actors._make_actor = stillborn
        for worker in workers._workers.values():
            ray.kill(worker.handle)
        with pytest.raises(WorkerDiedError):
            list(batches)
    replaced = [r for r in caplog.records if "is replaced" in r.getMessage()]
    assert 0 < len(replaced) <= 2 * (3 + 1)


@pytest.mark.long
def test_an_actor_killed_from_outside_between_batches_is_replaced():
    with _on_ray(Drawn, length=40) as dataset:
        batches = iter(dataset)
        found = [next(batches)]
        placed = next(filter(None, _workers_of(dataset).values()))
        os.kill(placed.pid, signal.SIGKILL)
        found += batches
    _equal(found, _here(length=40))


@pytest.mark.parametrize(
    "graceful",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["ended", "killed"],
)
def test_a_node_that_ends_in_mid_epoch_changes_no_byte(
    nodes, graceful, tmp_path, caplog
):
    gated = {"gated": range(3, 40), "length": 40, "workers": 8}
    # There are as many cores as workers: that node gets two of these.
    of_each = {"ray_options": {"num_cpus": 1}}
    with (
        _another_node(nodes) as node,
        _on_ray(ray_samples.Gated, tmp_path, **gated, **of_each) as dataset,
    ):

        def lost():
            """Workers of that node that are in the middle of a batch."""
            return [
                place.pid
                for place in _workers_of(dataset).values()
                if place.node == node.node_id
                and list(tmp_path.glob(f"at-*-{place.pid}"))
            ]

        with _consumer(dataset):
            _wait_for(lost)
            pids = lost()
            nodes.remove_node(node, allow_graceful=graceful)
            _wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        losses = dataset._fastdata.loader._pool.workers.pool_stats().losses
    assert {loss.pid for loss in losses} >= set(pids)
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == len(losses)
    assert all("restart 1 of at most 3" in text for text in texts)


@pytest.mark.long
def test_what_waits_behind_a_slow_batch_is_built_by_who_is_free(tmp_path):
    with (
        _on_ray(
            ray_samples.Gated, tmp_path, workers=2, gated=[0], length=40
        ) as dataset,
        _consumer(dataset) as found,
    ):
        # The queue is ten long: all of it but the first is built meanwhile.
        _wait_for(
            lambda: all(list(tmp_path.glob(f"at-{n}-*")) for n in range(10))
        )
        assert not found


@pytest.mark.long
def test_an_interrupt_while_waiting_is_an_interrupt(tmp_path):
    with _on_ray(
        ray_samples.Gated, tmp_path, workers=2, gated=[4], length=8
    ) as dataset:
        _make_ready(dataset)
        epoch = dataset._fastdata.loader.epoch
        (tmp_path / "shut").touch()
        batches = iter(dataset)
        found = [next(batches) for _ in range(4)]
        main = threading.main_thread().ident
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        timer.join()
        (tmp_path / "shut").unlink()
        found += batches
    _equal(found, _inline(dataset, epoch))


def test_a_batch_that_takes_too_long_is_built_by_another(
    tmp_path, caplog, monkeypatch
):
    stuck = []  # the actor that came to batch 5 first

    def is_stuck(activity):
        begun = activity.request is not None and activity.request.index == 5
        if not stuck and begun and (tmp_path / "call-0").exists():
            stuck.append(worker_of(activity))
        return stuck and worker_of(activity) is stuck[0]

    only_the_stuck_are_late(monkeypatch, is_stuck)
    with _on_ray(ray_samples.Stuck, tmp_path, batch_timeout=1) as dataset:
        found = list(dataset)
    _equal(found, _here())
    (text,) = [r.getMessage() for r in caplog.records]
    assert "more than `batch_timeout=1`" in text
    assert "in sleep_for_ever" in text


@pytest.mark.long
def test_a_worker_that_has_built_is_not_late_while_nobody_asks(caplog):
    with _on_ray(Drawn, size=16_384, batch_timeout=0.5) as dataset:
        _make_ready(dataset)
        batches = iter(dataset)
        count = sum(1 for _ in zip(range(3), batches, strict=False))
        time.sleep(1.5)
        count += sum(1 for _ in batches)
    assert count == 12
    assert not caplog.records


@pytest.mark.long
def test_workers_whose_nodes_are_all_gone_are_missed(nodes):
    options = {"resources": {"rare": 1}, "timeout_s": _WAIT_S}
    with (
        _another_node(nodes, resources={"rare": 2}) as node,
        _on_ray(Drawn, workers=2, length=200, ray_options=options) as dataset,
    ):
        _make_ready(dataset)
        actors = dataset._fastdata.loader._pool.workers._actors
        shorter = dataclasses.replace(actors._plan.options, timeout_s=2)
        actors._plan = dataclasses.replace(actors._plan, options=shorter)
        batches = iter(dataset)
        next(batches)
        nodes.remove_node(node)
        with pytest.raises(LoaderError, match="within 2 s"):
            list(batches)


@pytest.mark.long
def test_a_batch_that_takes_too_long_twice_is_an_error(tmp_path):
    with (
        _on_ray(
            ray_samples.Stuck, tmp_path, times=2, batch_timeout=0.5
        ) as dataset,
        pytest.raises(BatchTimeoutError, match="Batch 5") as caught,
    ):
        list(dataset)
    assert "sleep_for_ever" in caught.value.stack
    assert caught.value.batch_index == 5


# -- what cannot be had ------------------------------------------------------


@pytest.mark.long
def test_workers_for_which_the_cluster_has_no_place_are_an_error():
    with (
        _on_ray(
            Drawn, ray_options={"num_cpus": 1000, "timeout_s": 1}
        ) as dataset,
        pytest.raises(LoaderError, match="within 1 s") as caught,
    ):
        list(dataset)
    assert "{'num_cpus': 1000}" in str(caught.value)
    assert "6 CPU" in str(caught.value)


# -- joining and leaving, in a process of its own ----------------------------


def _run(code, **env):
    text = textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    for name in list(environment):
        if re.match("RAY_(ADDRESS|AUTH_|USAGE_STATS)", name):
            del environment[name]
    return subprocess.run(
        [sys.executable, "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.long
def test_a_ray_of_its_own_leaves_nothing(tmp_path):
    """But the token that Ray keeps in the home folder, for the user alone."""
    done = _run(
        """
        import os, psutil, ray
        from ray_samples import Drawn
        before = set(os.listdir("/dev/shm"))
        own = {"address": "local"}
        with Drawn(workers=2, executor="ray", ray_options=own) as dataset:
            print(len(list(dataset)), ray.is_initialized())
            stats = os.environ.get("RAY_USAGE_STATS_ENABLED")
        print(ray.is_initialized(), stats)
        psutil.wait_procs(psutil.Process().children(recursive=True), 10)
        print(psutil.Process().children(recursive=True))
        print(set(os.listdir("/dev/shm")) - before)
        """,
        HOME=str(tmp_path),
    )
    assert done.stdout.splitlines() == [
        "12 True",
        "False None",
        "[]",
        "set()",
    ], done.stderr
    assert (tmp_path / ".ray" / "auth_token").exists()
    assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700


_CLIENT = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print(len(client.internal_kv_keys(b"", None, timeout=30)))
"""


def test_a_ray_of_its_own_is_for_this_user_of_this_machine_only(tmp_path):
    """It starts although its token cannot be kept in the home folder."""
    home = tmp_path / "file"
    home.touch()
    done = _run(
        f"""
        import os, subprocess, sys
        import psutil, ray
        from ray_samples import Drawn

        own = {{"address": "local"}}
        dataset = Drawn(workers=2, executor="ray", ray_options=own)
        print(len(list(dataset)))
        me = psutil.Process()
        print({{
            connection.laddr.ip.removeprefix("::ffff:")
            for process in [me, *me.children(recursive=True)]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }})
        address = ray.get_runtime_context().gcs_address
        strange = {{"PATH": os.environ["PATH"], "HOME": {str(tmp_path)!r}}}
        for environment in (None, strange):
            client = subprocess.run(
                [sys.executable, "-c", {_CLIENT!r}, address],
                env=environment, capture_output=True, text=True,
            )
            print(client.returncode, "InvalidAuthToken" in client.stderr)
        """,
        HOME=str(home),
    )
    assert done.stdout.splitlines() == [
        "12",
        "{'127.0.0.1'}",
        "0 False",
        "1 True",
    ], done.stderr


@pytest.mark.long
def test_the_end_of_the_program_stops_the_workers_in_peace(tmp_path):
    done = _run(f"""
        import tempfile
        from ray_samples import Opened
        early = tempfile.TemporaryDirectory()  # has an exit handler made
        own = {{"address": "local"}}
        dataset = Opened(
            {str(tmp_path)!r}, workers=1, executor="ray", ray_options=own
        )
        print(len(list(dataset)))
        """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "12\n"
    assert "Traceback" not in done.stderr
    assert (tmp_path / "worker-0").read_text() == "closed"


@pytest.mark.long
def test_a_ray_that_is_shut_down_or_was_the_parents_is_an_error():
    done = _run("""
        import os, ray
        from ray_samples import Drawn
        from keras_fastdata import LoaderError
        own = {"address": "local"}
        dataset = Drawn(workers=2, executor="ray", ray_options=own)
        batches = iter(dataset)
        next(batches)
        if not (pid := os.fork()):
            try:
                next(iter(Drawn(executor="ray")))
            except LoaderError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        next(batches)
        ray.shutdown()
        try:
            list(batches)
        except LoaderError as error:
            print(error)
        print(ray.is_initialized())
        dataset.close()
        print(len(list(dataset)))
        """)
    forked, left, joined, again = done.stdout.splitlines()
    assert "This process was forked" in forked, done.stderr
    assert "Ray was shut down" in left
    assert (joined, again) == ("False", "12"), done.stderr


@pytest.mark.long
def test_ray_that_the_user_has_joined_stays(nodes):
    with _on_ray(Drawn, workers=1) as dataset:
        list(dataset)
    assert ray.is_initialized()


@pytest.mark.long
def test_an_address_where_nobody_answers_is_an_error_at_once():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    done = _run(f"""
        from ray_samples import Drawn
        from keras_fastdata import LoaderError
        options = {{"address": "127.0.0.1:{port}", "timeout_s": 5}}
        try:
            list(Drawn(executor="ray", ray_options=options))
        except LoaderError as error:
            print(error)
        """)
    assert "Nobody answers at '127.0.0.1:" in done.stdout, done.stderr


@pytest.mark.long
def test_an_address_where_something_else_listens_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        done = _run(f"""
            from ray_samples import Drawn
            from keras_fastdata import LoaderError
            options = {{"address": "127.0.0.1:{port}", "timeout_s": 4}}
            try:
                list(Drawn(executor="ray", ray_options=options))
            except LoaderError as error:
                print(error)
            """)
    assert "no Ray cluster could be joined" in done.stdout, done.stderr
    assert "within 4 s" in done.stdout


@pytest.mark.long
def test_a_cluster_is_joined_by_its_address(nodes):
    own = {"address": nodes.address, "timeout_s": 30}
    ray.shutdown()
    try:
        with _on_ray(Drawn, workers=2, ray_options=own) as dataset:
            _equal(list(dataset), _here())
            assert ray.is_initialized()
        # Views of it that tests before have left somewhere keep it.
        assert not ray.is_initialized() or store_usage.leased
    finally:
        if not ray.is_initialized():
            ray.init(address=nodes.address, logging_level="ERROR")


@pytest.mark.long
def test_nothing_of_ray_is_imported_unless_asked_for():
    done = _run("""
        import sys
        import keras_fastdata
        from ray_samples import Drawn
        list(Drawn(workers=2, use_multiprocessing=True))
        print([n for n in sys.modules if n.partition(".")[0] == "ray"])
        """)
    assert done.stdout == "[]\n", done.stderr
