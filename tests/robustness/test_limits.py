"""Under every limit a loader works, or says what to raise.

Each test is a training process of its own that is limited, and then has its
limits lifted: nothing hangs, nothing is left, and the dataset goes on. The
functions that run there come before the tests that run them.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid

import limit_samples
import pytest
from limit_runs import (
    Trainers,
    address_space,
    attempt,
    environment,
    lift_limits,
    limit,
    run_python,
    script_for,
)
from places import quickly
from samples import Numbered, numbers
from trainers import START_METHODS

from keras_fastdata.workers import supervisor
from keras_fastdata.workers.process.forkservers import forkserver_pids

PROCESSES = {"workers": 2, "use_multiprocessing": True}
METHODS = ["forkserver", "spawn", "fork"]
KILOBYTE, MEGABYTE, GIGABYTE, TERABYTE = (1 << (10 * n) for n in (1, 2, 3, 4))


def _for_the_full_run(*values):
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


every_method = pytest.mark.parametrize("method", START_METHODS)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory, zygote):
    return Trainers(zygote, tmp_path_factory.mktemp("runs"))


def _processes(method, **kwargs):
    return {**PROCESSES, "start_method": method, **kwargs}


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _says(outcome, *words):
    """Whether an attempt ended in an error of ours that has these words."""
    if outcome["worked"] or not outcome["ours"]:
        return False
    return all(word in outcome["text"] for word in words)


def _works_or_says(outcome, *words):
    return outcome["worked"] or _says(outcome, *words)


WORKED = {"worked": True}
OF_FILES = "open files", "ulimit -n"
OF_SPACE = "address space", "ulimit -v"
OF_PROCESSES = "processes", "ulimit -u"
OF_FILE_SIZE = "file size", "ulimit -f"


# -- users ---------------------------------------------------------------------


def under_another_user():
    """Workers from before and after this process gave up its rights."""
    told, nobody = [], 65534
    supervisor.GRACE_S = 0.3
    logger = logging.getLogger("keras_fastdata")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    before = limit_samples.OfUser(**PROCESSES)
    roots = [batch.tolist()[0] for batch in before]
    stuck = limit_samples.OfUser(stuck=1, workers=1, use_multiprocessing=True)
    batches = iter(stuck)
    next(batches)
    os.setgroups([])
    os.setresgid(nobody, nobody, nobody)
    os.setresuid(nobody, nobody, 0)
    if not os.access(sys.executable, os.X_OK, effective_ids=True):
        os.setresuid(0, 0, 0)
        stuck.close()
        return None
    after = limit_samples.OfUser(**PROCESSES)
    users = [batch.tolist() for batch in after]
    before.workers = 1
    restarted = [batch.tolist() for batch in before]
    stuck.close()
    for dataset in (before, after):
        dataset.close()
    os.setresuid(0, 0, 0)
    return {
        "before": roots,
        "after": users + restarted,
        "told": [text for text in told if "EPERM" in text],
    }


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="needs the rights of root")
def test_new_workers_have_the_user_that_the_trainer_has_become(trainers):
    found = trainers.run(under_another_user).check()
    if found is None:
        pytest.skip("needs an interpreter that other users may run")
    assert found["before"] == [0] * 4
    assert found["after"] == [[65534, 65534]] * 8
    (text,) = found["told"]
    assert text.startswith("Worker 0 (pid ")
    assert "may not be killed (EPERM)" in text


# -- open files ----------------------------------------------------------------


def under_limit(name, value, keywords):
    """Two epochs under a limit; one when it is lifted."""
    limit(name, value)
    dataset = Numbered(length=20, **keywords)
    outcomes = [attempt(dataset, epochs=2)]
    lift_limits()
    outcomes.append(attempt(dataset))
    dataset.close()
    return outcomes


@pytest.mark.long
@every_method
def test_sixty_four_descriptors_suffice_for_two_workers(trainers, method):
    run = trainers.run(under_limit, "NOFILE", 64, _processes(method))
    assert run.check() == [WORKED, WORKED]


@pytest.mark.long
@every_method
def test_sixty_four_descriptors_are_said_to_be_few_for_forty_workers(
    trainers, method
):
    keywords = _processes(method, workers=40)
    under, lifted = trainers.run(under_limit, "NOFILE", 64, keywords).check()
    assert _says(under, *OF_FILES), under
    assert lifted == WORKED


def with_few_descriptors(method):
    """Epochs with ever more descriptors, until one works."""
    before = _descriptors()
    outcomes = []
    for free in range(2, 30):
        highest = max(map(int, os.listdir("/proc/self/fd")))
        limit("NOFILE", highest + free)
        dataset = Numbered(length=4, **_processes(method))
        outcomes.append(attempt(dataset))
        dataset.close()
        lift_limits()
        if outcomes[-1]["worked"]:
            break
    del dataset
    gc.collect()
    return outcomes, _descriptors() - before


@pytest.fixture(scope="module", params=METHODS)
def few_descriptors(trainers, request):
    """What `with_few_descriptors` returned, by start method."""
    return trainers.run(with_few_descriptors, request.param).check()


@pytest.mark.long
def test_any_number_of_descriptors_suffices_or_is_said_to_be_few(
    few_descriptors,
):
    outcomes, _ = few_descriptors
    assert outcomes[-1]["worked"]
    assert len(outcomes) > 5
    assert [o for o in outcomes if not _works_or_says(o, *OF_FILES)] == []


@pytest.mark.long
def test_an_attempt_with_too_few_descriptors_leaves_none_open(few_descriptors):
    outcomes, more = few_descriptors
    assert not outcomes[0]["worked"]
    assert more == 0


def _open_all():
    files = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return files


def with_files_opened_amid(event, method):
    """An epoch, then no descriptor is left; then what `event` says."""
    limit("NOFILE", 80)
    dataset = Numbered(length=20, **_processes(method))
    outcomes = [attempt(dataset)]
    files = _open_all()
    if event == "the dataset changes":
        dataset.mark_changed()
    elif event == "workers die":
        for worker in dataset._fastdata.loader._pool.workers._workers.values():
            os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(0.2)
    elif event == "the loader is closed":
        dataset.close()
        files += _open_all()
    outcomes += [attempt(dataset), attempt(dataset)]
    for file in files:
        os.close(file)
    outcomes.append(attempt(dataset))
    dataset.close()
    return outcomes


@every_method
def test_an_epoch_needs_no_descriptor_once_workers_run(trainers, method):
    run = trainers.run(with_files_opened_amid, "nothing", method)
    assert run.check() == [WORKED] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    "event", ["the dataset changes", "workers die", "the loader is closed"]
)
@every_method
def test_descriptors_that_run_out_amid_training_are_named_when(
    trainers, event, method
):
    run = trainers.run(with_files_opened_amid, event, method)
    before, first, second, after = run.check()
    assert before == WORKED
    assert _works_or_says(first, *OF_FILES), first
    assert _works_or_says(second, *OF_FILES), second
    assert after == WORKED


def with_a_forkserver_of_few():
    """Forty workers of a fork server that may open few files."""
    first = Numbered(length=4, **PROCESSES)
    outcomes = [attempt(first)]
    (pid,) = forkserver_pids()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, 40))
    second = Numbered(length=4, workers=40, use_multiprocessing=True)
    outcomes += [attempt(second), attempt(first)]
    second.close()
    first.close()
    outcomes.append(attempt(second))
    second.close()
    return outcomes


def test_a_new_state_waits_while_too_many_descriptors_are_under_way(
    monkeypatch,
):
    send_fds, refused = socket.send_fds, []

    def refuse(*arguments):
        if len(refused) < 3:
            refused.append(arguments)
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send_fds(*arguments)

    with Numbered(**PROCESSES) as dataset:
        assert numbers(dataset) == list(range(10))
        dataset.length = 12
        monkeypatch.setattr(socket, "send_fds", refuse)
        assert numbers(dataset) == list(range(12))
    assert len(refused) == 3


def test_a_forkserver_without_descriptors_is_named_and_harms_no_other(trainers):
    run = trainers.run(with_a_forkserver_of_few)
    first, second, again, afresh = run.check()
    assert first == again == afresh == WORKED
    assert _says(second, *OF_FILES), second
    assert "Success" not in second["text"]


def with_greedy_workers():
    """Epochs of workers that have opened all they may."""
    dataset = limit_samples.Greedy(**PROCESSES)
    limit("NOFILE", 100)
    epochs = []
    for level in range(3):
        dataset.level = level
        try:
            epochs.append([batch.tolist() for batch in dataset])
        except RuntimeError as error:
            epochs.append(f"{type(error).__name__}: {error}")
    dataset.close()
    return epochs


def test_a_worker_without_descriptors_says_so_when_it_needs_one(trainers):
    first, second, third = trainers.run(with_greedy_workers).check()
    assert first == [[index, 0] for index in range(6)]
    assert second.startswith("LoaderError: ")
    assert "ulimit -n" in second
    assert "Greedy" in second
    assert third == [[index, 2] for index in range(6)]


# -- memory --------------------------------------------------------------------


def under_address_space(more, keywords):
    """As `under_limit`, with so many bytes more than are in use."""
    return under_limit("AS", address_space() + more, keywords)


@pytest.mark.long
@every_method
@pytest.mark.parametrize("more", [24 * GIGABYTE, 20 * TERABYTE])
def test_limited_address_space_suffices(trainers, more, method):
    keywords = _processes(method)
    run = trainers.run(under_address_space, more, keywords)
    assert run.check() == [WORKED, WORKED]


@pytest.mark.long
@every_method
@pytest.mark.parametrize("more", [4 * MEGABYTE, 3 * GIGABYTE])
def test_too_little_address_space_suffices_or_is_named(trainers, more, method):
    run = trainers.run(under_address_space, more, _processes(method))
    under, lifted = run.check()
    assert _works_or_says(under, *OF_SPACE), under
    assert lifted == WORKED


def test_threads_need_no_reserved_address_space(trainers):
    run = trainers.run(under_address_space, GIGABYTE, {"workers": 2})
    assert run.check() == [WORKED, WORKED]


def with_too_large_batches(more, where):
    limit("AS", address_space() + more)
    sizes = [1000, 80 * MEGABYTE, 1000]
    dataset = limit_samples.Varied(sizes, where, **PROCESSES)
    batches = iter(dataset)
    first = next(batches).nbytes
    try:
        second = next(batches).nbytes
    except RuntimeError as error:
        second = f"{type(error).__name__}: {error}"
    dataset.sizes = [1000] * 3
    third = [batch.nbytes for batch in dataset]
    dataset.close()
    return first, second, third


@pytest.mark.parametrize(
    "where", quickly(["private", "place", "pickled"], "private")
)
def test_a_batch_too_large_for_a_slot_is_named_and_harms_no_other(
    trainers, where
):
    run = trainers.run(with_too_large_batches, 24 * GIGABYTE, where)
    first, second, third = run.check()
    assert first == 1000
    assert second.startswith("LoaderError: ")
    assert "smaller batches" in second
    # Slots are this small for one reason only.
    assert "ulimit -v" in second
    assert third == [1000] * 3


def with_hungry_workers(*kinds):
    """Two epochs that need too much memory and one that does not, by kind."""
    found = []
    for keywords in kinds:
        dataset = limit_samples.Hungry(**keywords)
        outcomes = [attempt(dataset), attempt(dataset)]
        dataset.at = -1
        outcomes.append(attempt(dataset))
        dataset.close()
        found.append(outcomes)
    return found


@pytest.mark.parametrize(
    "kinds",
    [
        [{"workers": 0}, {"workers": 2}, _processes("forkserver")],
        *_for_the_full_run(list(map(_processes, ["spawn", "fork"]))),
    ],
    ids=["quick", "long"],
)
def test_a_memory_error_of_the_users_is_the_users(trainers, kinds):
    for first, second, after in trainers.run(
        with_hungry_workers, *kinds
    ).check():
        for outcome in (first, second):
            assert outcome["error"] == "_ArrayMemoryError" or (
                outcome["error"] == "MemoryError"
            )
            assert "Unable to allocate 32.0 TiB" in outcome["text"]
            assert any("batch 2" in note for note in outcome["notes"])
            assert "__getitem__" in outcome["frames"]
        assert after == WORKED


def in_a_cgroup(group, huge):
    """A batch for which the group has no memory, among small ones."""
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
    dataset = limit_samples.Varied(
        [1000, 1000, huge, 1000], max_worker_restarts=1, **PROCESSES
    )
    batches = iter(dataset)
    sizes = [next(batches).nbytes, next(batches).nbytes]
    try:
        sizes.append(next(batches).nbytes)
    except RuntimeError as error:
        sizes.append(f"{type(error).__name__}: {error}")
    del batches
    dataset.sizes = [1000] * 3
    sizes += [batch.nbytes for batch in dataset]
    dataset.close()
    return sizes


def _own_group():
    """The folder of this process's memory control group, and its limit."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                folder = "/sys/fs/cgroup/memory" + path
                return folder, "memory.limit_in_bytes"
            if number == "0":
                unified = "/sys/fs/cgroup" + path, "memory.max"
    return unified


@pytest.fixture
def group():
    """A control group with 1 GiB of memory."""
    folder, knob = _own_group()
    made = os.path.join(folder, f"keras_fastdata-{uuid.uuid4().hex[:8]}")
    try:
        os.mkdir(made)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            with open(os.path.join(made, knob), "w") as file:
                file.write(str(GIGABYTE))
        except OSError as error:
            pytest.skip(f"no control group here limits memory: {error}")
        yield made
    finally:
        for _ in range(100):
            try:
                os.rmdir(made)
                break
            except OSError:
                time.sleep(0.05)


def test_a_worker_that_the_kernel_kills_for_memory_is_named(trainers, group):
    run = trainers.run(in_a_cgroup, group, 3 * GIGABYTE)
    first, second, third, *after = run.check()
    assert [first, second] == [1000, 1000]
    assert third.startswith("WorkerDiedError: ")
    assert "SIGKILL" in third
    assert "memory" in third
    assert "batch 2" in third
    assert after == [1000] * 3


# -- processes -----------------------------------------------------------------


def with_few_processes(keywords):
    """Epochs with ever more processes allowed, until one works.

    The limit binds nobody who is root; hence a user without other processes.
    """
    outcomes = []
    # TensorFlow aborts where it cannot have its threads: it is to have them.
    attempt(Numbered(length=4))
    running = _tasks_of_this_user()
    for more in range(-1, 8):
        limit("NPROC", running + more)
        dataset = Numbered(length=4, **keywords)
        outcomes.append(attempt(dataset))
        lift_limits()
        outcomes[-1]["lifted"] = attempt(dataset)
        dataset.close()
        if outcomes[-1]["worked"] and more > 3:
            break
    return outcomes


def _tasks_of_this_user():
    count = 0
    for name in os.listdir("/proc"):
        try:
            if (
                name.isdigit()
                and os.stat(f"/proc/{name}").st_uid == os.getuid()
            ):
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


# A user of this process's own: another run must not count for the same limit.
_NOBODY = 61184 + os.getpid() % 4000
# Reads every file, as the interpreter may be in root's home, and no more.
_AS_NOBODY = (
    "setpriv",
    f"--reuid={_NOBODY}",
    f"--regid={_NOBODY}",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
)


def _as_nobody():
    """The start of a command that runs the rest as a user of its own."""
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv (util-linux) to become another user")
    tried = subprocess.run(
        [*_AS_NOBODY, "true"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"needs the privilege to become another user: {tried}")
    return _AS_NOBODY


def _run_script(folder, function, *args, command=(), flags=(), **kwargs):
    """Runs a function as a script in `folder`."""
    script = folder / "train.py"
    script.write_text(script_for(function, *args))
    for path in (folder, *folder.parents):
        # Another user is to get here; the folders of a test are private.
        if path.stat().st_uid != os.getuid() or path == path.parent:
            break
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o055)
    run = [*command, sys.executable, *flags, str(script)]
    return run_python(run, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize(
    "keywords",
    [{"workers": 2}, *map(_processes, METHODS)],
    ids=["thread", *METHODS],
)
def test_any_number_of_processes_suffices_or_is_said_to_be_few(
    keywords, tmp_path
):
    run = _run_script(
        tmp_path, with_few_processes, keywords, command=_as_nobody()
    )
    outcomes = run.check()
    assert not outcomes[0]["worked"]
    assert outcomes[-1]["worked"]
    assert [o for o in outcomes if not _works_or_says(o, *OF_PROCESSES)] == []
    assert [o["lifted"] for o in outcomes if not o["lifted"]["worked"]] == []


# -- the size of files, the stack, and so on -----------------------------------


@pytest.mark.long
@pytest.mark.parametrize("value", [20 * GIGABYTE, 20 * TERABYTE])
def test_a_limit_on_file_sizes_leaves_room_enough(trainers, value):
    run = trainers.run(under_limit, "FSIZE", value, PROCESSES)
    assert run.check() == [WORKED, WORKED]


@pytest.mark.long
@pytest.mark.parametrize("value", [0, KILOBYTE, 64 * KILOBYTE, GIGABYTE])
def test_a_limit_on_file_sizes_is_named(trainers, value):
    # Anonymous memory is a file to the kernel.
    run = trainers.run(under_limit, "FSIZE", value, PROCESSES)
    under, lifted = run.check()
    assert _says(under, *OF_FILE_SIZE), under
    assert lifted == WORKED


def with_all_limits_at_once(method):
    """With limits that have nothing to do with us."""
    limit("MEMLOCK", 0)
    limit("CORE", 0)
    limit("STACK", 128 * KILOBYTE)
    limit("RTPRIO", 0)
    limit("NICE", 0)
    limit("MSGQUEUE", 0)
    dataset = Numbered(length=20, **_processes(method))
    outcome = attempt(dataset, epochs=2)
    dataset.close()
    return outcome


@pytest.mark.long
@every_method
def test_locked_memory_core_files_and_stack_do_not_matter(trainers, method):
    assert trainers.run(with_all_limits_at_once, method).check() == WORKED


def test_a_process_that_cannot_start_to_fork_workers_is_named(trainers):
    run = trainers.run(under_limit, "STACK", 16 * KILOBYTE, PROCESSES)
    under, lifted = run.check()
    assert _says(under, "ulimit"), under
    assert lifted == WORKED


def test_a_worker_that_cannot_start_is_named(trainers):
    keywords = _processes("spawn")
    run = trainers.run(under_limit, "STACK", 16 * KILOBYTE, keywords)
    under, lifted = run.check()
    assert under["error"] == "WorkerDiedError", under
    assert _says(under, "SIGSEGV", "start"), under
    assert lifted == WORKED


# -- places --------------------------------------------------------------------


def epochs_of(keywords):
    """Two epochs, a new state, and one more."""
    dataset = Numbered(length=20, **keywords)
    first = attempt(dataset, epochs=2)
    dataset.mark_changed()
    second = attempt(dataset)
    dataset.close()
    return [first, second]


def in_an_odd_place(place, method):
    """As `epochs_of`, where something that most have is lacking."""
    if place == "a deleted working directory":
        folder = f"{os.environ['TMPDIR']}/{uuid.uuid4().hex}"
        os.mkdir(folder)
        os.chdir(folder)
        os.rmdir(folder)
    elif place == "no home":
        del os.environ["HOME"]
    elif place == "a temporary folder that is missing":
        os.environ["TMPDIR"] = "/nonexistent/folder"
    elif place == "a umask that forbids all":
        os.umask(0o777)
    elif place == "no environment":
        os.environ.clear()
    return epochs_of(_processes(method))


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    "place",
    [
        "a deleted working directory",
        "no home",
        "a temporary folder that is missing",
        "a umask that forbids all",
        "no environment",
    ],
)
def test_batches_arrive_in(trainers, place, method, tmp_path, monkeypatch):
    if place == "a deleted working directory":
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = trainers.run(in_an_odd_place, place, method, environ=dict(os.environ))
    assert run.check() == [WORKED, WORKED]


def in_a_read_only_place(keywords):
    for folder in (os.getcwd(), os.environ["HOME"], os.environ["TMPDIR"]):
        try:
            with open(os.path.join(folder, "probe"), "w"):
                return f"{folder} can be written to"
        except PermissionError:
            continue
    return epochs_of(keywords)


@pytest.mark.long
def test_batches_arrive_where_no_folder_can_be_written_to(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    places = {
        "HOME": str(locked),
        "TMPDIR": str(locked),
    }
    run = _run_script(
        tmp_path,
        in_a_read_only_place,
        PROCESSES,
        command=_as_nobody(),
        env=environment(**places),
        cwd=locked,
    )
    assert run.check() == [WORKED, WORKED]


@pytest.mark.long
@pytest.mark.parametrize(
    "locale",
    [
        {},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=["utf-8", "C"],
)
def test_a_path_with_spaces_and_umlauts_does_not_matter(locale, tmp_path):
    folder = tmp_path / "zwölf Boxkämpfer jagen 日本"
    folder.mkdir()
    run = _run_script(
        folder,
        epochs_of_a_script,
        PROCESSES,
        env=environment(**locale),
        cwd=folder,
    )
    assert run.check() == [WORKED, WORKED]


def epochs_of_a_script(keywords):
    """As `epochs_of`; the dataset's module is imported from there, too."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    with open(os.path.join(folder, "odd.py"), "w") as file:
        file.write("from samples import Numbered\nclass Odd(Numbered): pass\n")
    sys.path.insert(0, folder)
    import odd

    dataset = odd.Odd(length=20, **keywords)
    first = attempt(dataset, epochs=2)
    dataset.mark_changed()
    second = attempt(dataset)
    dataset.close()
    return [first, second]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["-O"], {}),
        (["-I"], {}),
        (["-s", "-E"], {}),
        (["-X", "dev", "-W", "error"], {}),
        ([], {"PYTHONHASHSEED": "0", "PYTHONMALLOC": "debug"}),
        ([], {"PYTHONDEVMODE": "1", "PYTHONSAFEPATH": "1"}),
    ],
    ids=str,
)
def test_a_run_is_clean_under(flags, variables, tmp_path):
    run = _run_script(
        tmp_path,
        epochs_of,
        PROCESSES,
        flags=flags,
        env=environment(**variables),
    )
    assert run.check() == [WORKED, WORKED]
    assert "keras_fastdata" not in run.stderr
    assert "ResourceWarning" not in run.stderr
    assert "Exception ignored" not in run.stderr


def in_a_namespace():
    """Two epochs for every kind of worker."""
    kinds = [{"workers": 2}, *map(_processes, METHODS)]
    return [attempt(Numbered(length=20, **k), epochs=2) for k in kinds]


def _with_mount(mount):
    """The start of a command that runs the rest after `mount`."""
    command = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    if not shutil.which("unshare"):
        pytest.skip("needs unshare (util-linux)")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs the privilege to mount: {tried.stderr}")
    return command


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
def test_without_proc_a_loader_works_or_says_so(tmp_path):
    mount = _with_mount("mount -t tmpfs tmpfs /proc")
    outcomes = _run_script(tmp_path, in_a_namespace, command=mount).check()
    assert outcomes[0] == WORKED
    assert [o for o in outcomes if not _works_or_says(o, "/proc")] == []


@pytest.mark.long
def test_a_dev_shm_that_is_full_does_not_matter(tmp_path):
    mount = _with_mount(
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
        "{ head -c 100k /dev/zero > /dev/shm/full 2> /dev/null || true; }"
    )
    outcomes = _run_script(tmp_path, in_a_namespace, command=mount).check()
    assert outcomes == [WORKED] * 4


def larger_than_shared_memory():
    """Batches of 80 kB, for which a worker needs more after 53 kB."""
    dataset = limit_samples.Wide(**_processes("portable", workers=1))
    return [attempt(dataset)]


def test_memory_that_cannot_grow_is_named_by_a_portable_worker(tmp_path):
    mount = _with_mount("mount -t tmpfs -o size=60k tmpfs /dev/shm")
    run = _run_script(tmp_path, larger_than_shared_memory, command=mount)
    (outcome,) = run.check()
    assert _works_or_says(outcome, "Shared memory is full")


def in_portable_processes():
    """One epoch of batches in named shared memory."""
    return [attempt(Numbered(length=4, **_processes("portable")))]


def test_shared_memory_that_is_read_only_is_named(tmp_path):
    mount = _with_mount("mount -t tmpfs -o ro tmpfs /dev/shm")
    run = _run_script(tmp_path, in_portable_processes, command=mount)
    (outcome,) = run.check()
    assert _works_or_says(outcome, "Shared memory cannot be written to")


# -- max_queue_bytes -----------------------------------------------------------

BOUND = 16 * MEGABYTE
SLACK = 2 * MEGABYTE  # for the board, and for pages that are begun


def _shared_memory_of(dataset):
    """Bytes of shared memory in use, after each batch is delivered."""
    for batch in dataset:
        assert len(set(batch[:: batch.nbytes // 100].tolist())) == 1
        del batch
        time.sleep(0.01)  # training; workers run ahead meanwhile
        arena = dataset._fastdata.loader._pool.workers._arena
        yield os.fstat(arena.segment.fd).st_blocks * 512


SIZES = {
    "equal": [4 * MEGABYTE] * 60,
    "small ones first": [40_000] * 30 + [4 * MEGABYTE] * 60,
    "few small ones first": [40_000] * 3 + [4 * MEGABYTE] * 60,
    "growing": [70_000 * (number + 1) for number in range(60)],
    "in turn": [40_000, 40_000, 4 * MEGABYTE] * 20,
    "larger than the bound": [BOUND + MEGABYTE] * 10,
}


def test_a_batch_that_was_recalled_comes_although_the_queue_is_full(tmp_path):
    """The second batch makes the queue short; others have come by then.

    One worker has batch 1 and is held, another has batch 2 and is held, the
    third builds all up to batch 8. Then batch 1 comes, larger than any
    before; batch 2 is recalled, and those behind it fill the queue.
    """
    gates = {number: tmp_path / str(number) for number in (1, 2, 9)}
    for gate in gates.values():
        os.mkfifo(gate)
    lengths = [1000, BOUND] + [1000] * 10
    dataset = limit_samples.Staged(
        lengths,
        tmp_path,
        workers=3,
        use_multiprocessing=True,
        max_queue_size=30,
        max_queue_bytes=BOUND,
    )

    large_one_came = threading.Event()

    def let_through():
        for number in (9, 1):
            os.close(os.open(gates[number], os.O_WRONLY))
            gates[number].unlink()
        large_one_came.wait(60)
        os.close(os.open(gates[2], os.O_WRONLY))
        gates[2].unlink()

    director = threading.Thread(target=let_through)
    seen = []
    with dataset:
        director.start()
        for batch in dataset:
            seen.append(int(batch[0]))
            if seen[-1] == 1:
                large_one_came.set()
        director.join()
    assert seen == list(range(12))


@pytest.mark.parametrize("workers", [1, 3])
def test_max_queue_bytes_leaves_the_queue_of_threads_as_it_is(workers):
    built = threading.Semaphore(0)

    class Noted(Numbered):
        def __getitem__(self, index):
            built.release()
            return super().__getitem__(index)

    with Noted(
        length=30, workers=workers, max_queue_size=8, max_queue_bytes=1
    ) as dataset:
        next(iter(dataset))
        assert all(built.acquire(timeout=280) for _ in range(9))


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        ("small ones first", "private"),
        *(
            pytest.param(sizes, where, marks=pytest.mark.long)
            for sizes in SIZES
            for where in ("private", "place")
            if (sizes, where) != ("small ones first", "private")
        ),
    ],
)
def test_once_the_largest_batch_is_known_shared_memory_is_bounded(sizes, where):
    # In the first epoch workers may build large batches, of which the trainer
    # does not know, for as long as the trainer is busy.
    lengths = SIZES[sizes]
    dataset = limit_samples.Varied(
        lengths, where, max_queue_size=30, max_queue_bytes=BOUND, **PROCESSES
    )
    with dataset:
        list(_shared_memory_of(dataset))
        most = max(_shared_memory_of(dataset))
    # One batch is always allowed, one is in each worker's hands, and one in
    # those of the consumer: what is held does not count.
    queue = max(BOUND, max(lengths))
    assert most <= queue + 3 * max(lengths) + SLACK
