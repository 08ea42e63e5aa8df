"""What an error message says about memory is what the kernel says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time

import pytest
from samples import Deadly

from keras_fastdata import WorkerDiedError
from keras_fastdata.metrics import cgroup, ram

GIB = 1 << 30
JOB = "/sys/fs/cgroup/job"
PROCESSES = {"workers": 2, "use_multiprocessing": True}
MEMINFO = {
    "/proc/meminfo": (
        "MemTotal:       16777216 kB\n"
        "MemFree:          524288 kB\n"
        "MemAvailable:    4194304 kB\n"
        "HugePages_Total:       0\n"
    )
}
MACHINE = "4.0 of 16.0 GiB of the machine's memory are free"
FIGURES = re.compile(
    r"Now \d+\.\d of \d+\.\d GiB of the machine's memory are free"
)


@pytest.fixture
def memory_now(monkeypatch):
    """`memory.left_now` on a machine of which only these files exist."""

    def ask(files):
        def fake_open(path):
            if path not in files:
                raise FileNotFoundError(path)
            if isinstance(files[path], OSError):
                raise files[path]
            return io.StringIO(files[path])

        monkeypatch.setattr(cgroup, "open", fake_open, raising=False)
        return ram.left_now()

    return ask


def _v2(folder, limit, used, kills=0):
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.events": f"low 0\noom 9\noom_kill {kills}\n",
    }


def _v1(folder, limit, used, kills=0):
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.oom_control": (
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        ),
    }


def _uses(used, limit):
    return f"this container uses {used} of the {limit} GiB it may have"


def test_a_machine_without_cgroups_is_described_alone(memory_now):
    assert memory_now(MEMINFO) == f"Now {MACHINE}."


def test_a_machine_that_says_nothing_is_not_described(memory_now):
    assert memory_now({}) == ""
    assert memory_now({"/proc/meminfo": "MemTotal: 1 kB\n"}) == ""
    assert memory_now({"/proc/meminfo": "\nMemTotal\n:\nMemFree: x\n"}) == ""


@pytest.mark.parametrize("kills", [0, 3])
def test_the_limit_of_a_cgroup_of_version_2(memory_now, kills):
    files = {
        **MEMINFO,
        "/proc/self/cgroup": "0::/job/step\n",
        **_v2("/sys/fs/cgroup/job/step", 2 * GIB, GIB, kills),
    }
    ends = f", the kernel has killed {kills} processes in it so far"
    assert memory_now(files) == (
        f"Now {MACHINE}, {_uses('1.0', '2.0')}{ends if kills else ''}."
    )


@pytest.mark.parametrize("kills", [0, 3])
def test_the_limit_of_a_cgroup_of_version_1(memory_now, kills):
    files = {
        **MEMINFO,
        "/proc/self/cgroup": (
            "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/job:a/step\n0::/\n"
        ),
        **_v1("/sys/fs/cgroup/memory/job:a/step", 2 * GIB, GIB, kills),
    }
    ends = f", the kernel has killed {kills} processes in it so far"
    assert memory_now(files) == (
        f"Now {MACHINE}, {_uses('1.0', '2.0')}{ends if kills else ''}."
    )


def test_a_controller_that_shares_its_hierarchy_is_found(memory_now):
    files = {
        "/proc/self/cgroup": "4:cpu,memory:/job\n",
        **_v1("/sys/fs/cgroup/memory/job", 4 * GIB, GIB),
    }
    assert memory_now(files) == f"Now {_uses('1.0', '4.0')}."


def test_the_limit_may_be_that_of_a_cgroup_further_out(memory_now):
    files = {
        "/proc/self/cgroup": "0::/job/step/task\n",
        **_v2("/sys/fs/cgroup/job/step/task", "max", GIB),
        **_v2("/sys/fs/cgroup/job", 8 * GIB, 3 * GIB, 1),
    }
    assert memory_now(files) == (
        f"Now {_uses('3.0', '8.0')}, the kernel has killed 1 process in it "
        "so far."
    )
    files = {
        "/proc/self/cgroup": "4:memory:/job/step\n",
        **_v1("/sys/fs/cgroup/memory/job/step", 9223372036854771712, GIB),
        **_v1("/sys/fs/cgroup/memory/job", 8 * GIB, 3 * GIB),
    }
    assert memory_now(files) == f"Now {_uses('3.0', '8.0')}."


@pytest.mark.parametrize(
    ("place", "made"),
    [
        ("0::/", _v2("/sys/fs/cgroup", 4 * GIB, GIB)),
        ("4:memory:/", _v1("/sys/fs/cgroup/memory", 4 * GIB, GIB)),
        ("0::/docker/ab", _v2("/sys/fs/cgroup", 4 * GIB, GIB)),
        ("4:memory:/docker/ab", _v1("/sys/fs/cgroup/memory", 4 * GIB, GIB)),
    ],
    ids=["v2", "v1", "v2-outer-path", "v1-outer-path"],
)
def test_in_a_container_the_limit_is_where_the_root_seems_to_be(
    memory_now, place, made
):
    assert memory_now({"/proc/self/cgroup": f"{place}\n", **made}) == (
        f"Now {_uses('1.0', '4.0')}."
    )


def test_no_limit_is_not_reported(memory_now):
    files = {
        **MEMINFO,
        "/proc/self/cgroup": "4:memory:/job\n0::/job\n",
        **_v1("/sys/fs/cgroup/memory/job", 9223372036854771712, GIB, 5),
        **_v2("/sys/fs/cgroup/job", "max", GIB, 5),
    }
    assert memory_now(files) == f"Now {MACHINE}."


def test_files_that_cannot_be_read_cost_what_is_in_them(memory_now):
    files = {
        **MEMINFO,
        "/proc/self/cgroup": "0::/job\n",
        **_v2("/sys/fs/cgroup/job", 2 * GIB, GIB),
    }
    files["/sys/fs/cgroup/job/memory.current"] = PermissionError()
    assert memory_now(files) == f"Now {MACHINE}."
    files["/proc/self/cgroup"] = PermissionError()
    assert memory_now(files) == f"Now {MACHINE}."


@pytest.mark.skipif(
    not os.path.exists("/proc/meminfo"), reason="the kernel has no /proc"
)
def test_this_machine_has_memory():
    assert FIGURES.match(ram.left_now())


def test_a_worker_that_was_killed_is_reported_with_figures(tmp_path):
    dataset = Deadly(tmp_path / "deaths", max_worker_restarts=0, **PROCESSES)
    with dataset, pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
        list(dataset)
    message = str(caught.value)
    assert "The kernel kills processes when memory runs out" in message
    assert "lower `workers` or `max_queue_size`" in message
    assert FIGURES.search(message)
    assert re.search(r"\. `dataset\[3\]` builds that batch in this", message)


def test_a_worker_that_crashed_is_not(tmp_path):
    dataset = Deadly(
        tmp_path / "deaths",
        how="sigsegv",
        max_worker_restarts=0,
        **PROCESSES,
    )
    with dataset, pytest.raises(WorkerDiedError, match="SIGSEGV") as caught:
        list(dataset)
    assert "GiB" not in str(caught.value)


# -- memory that does run out ------------------------------------------------


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


@pytest.fixture
def small_cgroup():
    """The file that moves a process to where it may have 1.5 GiB.

    A cgroup is made only where this process is at the root of what it sees:
    there, a child of the root is our own, and elsewhere somebody manages the
    place that we are in.
    """
    with open("/proc/self/cgroup") as file:
        places = [line.strip().split(":", 2)[1:] for line in file]
    name = f"keras_fastdata-test-{os.getpid()}"
    if ["memory", "/"] in places:
        path, limit = f"/sys/fs/cgroup/memory/{name}", "memory.limit_in_bytes"
    elif places == [["", "/"]]:
        path, limit = f"/sys/fs/cgroup/{name}", "memory.max"
    else:
        pytest.skip("this process is not at the root of a memory cgroup")
    try:
        os.mkdir(path)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        try:
            _write(f"{path}/{limit}", str(3 * GIB // 2))
        except OSError as error:
            pytest.skip(f"no limit can be set: {error}")
        with contextlib.suppress(OSError):
            _write(f"{path}/memory.swap.max", "0")
        yield f"{path}/cgroup.procs"
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                os.rmdir(path)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def test_a_worker_that_takes_too_much_is_killed_and_the_trainer_told(
    small_cgroup, tmp_path, zygote
):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        f"with open({small_cgroup!r}, 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        "from slow_samples import Allocates\n"
        "from keras_fastdata import WorkerDiedError\n"
        "with Allocates(workers=1, use_multiprocessing=True,\n"
        "               max_worker_restarts=0) as dataset:\n"
        "    try:\n"
        "        list(dataset)\n"
        "    except WorkerDiedError as error:\n"
        "        print(error.exit_code, error)\n"
    )
    said = zygote.run(script).stdout
    assert said.startswith(f"{-signal.SIGKILL} Worker 0 ")
    assert "was killed by SIGKILL" in said
    assert FIGURES.search(said)
    assert re.search(r"this container uses \d\.\d of the 1\.5 GiB", said)
    assert "the kernel has killed 1 processes in it so far" in said


def test_nothing_left_is_not_taken_for_nobody_tells(memory_now):
    own = {"/proc/self/cgroup": "0::/job\n"}
    memory_now({**MEMINFO, **own, **_v2(JOB, 2 * GIB, 2 * GIB)})
    assert ram.free() == 0
    memory_now({})
    assert ram.free() is None


def test_files_that_need_not_lie_in_memory_take_none(memory_now):
    text = memory_now(
        {
            **MEMINFO,
            "/proc/self/cgroup": "0::/job\n",
            **_v2(JOB, 8 * GIB, 8 * GIB),
            f"{JOB}/memory.stat": f"anon 5\ninactive_file {3 * GIB}\n",
        }
    )
    assert "uses 5.0 of the 8.0 GiB" in text
    assert ram.free() == 3 * GIB
