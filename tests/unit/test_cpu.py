"""How many cores may be used, and how busy they are."""

from __future__ import annotations

import io
import os
import time

import pytest

from keras_fastdata.metrics import cgroup, cpu

STAT = (
    "cpu  100 0 0 100 0 0 0 0 0 0\n"
    "cpu0 {0} 0 0 0 0 0 0 0 0 0\n"
    "cpu1 {1} 0 0 0 0 0 0 0 0 0\n"
    "intr 5\n"
)


@pytest.fixture
def machine(monkeypatch):
    """A machine of which only these files exist, and whose cores are two."""
    files = {}

    def fake_open(path):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(cgroup, "open", fake_open, raising=False)
    monkeypatch.setattr(cpu, "open", fake_open, raising=False)
    monkeypatch.setattr(cpu, "_affinity", lambda: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    files["/proc/stat"] = STAT.format(0, 0)
    return files


def test_affinity_says_how_many_there_are():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cpu.read().allowed == 1
    finally:
        os.sched_setaffinity(0, before)


def test_without_a_cgroup_all_count(machine):
    reading = cpu.read()
    assert (reading.allowed, reading.quota) == (2, False)
    assert reading.busy_s == 0


def test_ticks_are_summed_over_the_allowed_cores(machine, monkeypatch):
    machine["/proc/stat"] = STAT.format(150, 350)
    assert cpu.read().busy_s == 5.0
    monkeypatch.setattr(cpu, "_affinity", lambda: {1})
    assert cpu.read().busy_s == 3.5


def test_a_quota_of_a_cgroup_is_the_limit(machine):
    machine["/proc/self/cgroup"] = "0::/pod/box\n"
    machine["/sys/fs/cgroup/pod/box/cpu.max"] = "max 100000\n"
    machine["/sys/fs/cgroup/pod/cpu.max"] = "150000 100000\n"
    machine["/sys/fs/cgroup/pod/cpu.stat"] = "usage_usec 2500000\nuser 1\n"
    reading = cpu.read()
    assert (reading.allowed, reading.quota) == (1.5, True)
    assert reading.busy_s == 2.5


def test_a_quota_of_an_old_cgroup_is_the_limit(machine):
    machine["/proc/self/cgroup"] = "4:cpu,cpuacct:/box\n3:memory:/x\n"
    folder = "/sys/fs/cgroup/cpu/box"
    machine[f"{folder}/cpu.cfs_quota_us"] = "50000\n"
    machine[f"{folder}/cpu.cfs_period_us"] = "100000\n"
    machine[f"{folder}/cpuacct.usage"] = "1500000000\n"
    reading = cpu.read()
    assert (reading.allowed, reading.busy_s) == (0.5, 1.5)
    machine[f"{folder}/cpu.cfs_quota_us"] = "-1\n"
    assert cpu.read().allowed == 2


def test_a_quota_beyond_the_cores_does_not_count(machine):
    machine["/proc/self/cgroup"] = "0::/\n"
    machine["/sys/fs/cgroup/cpu.max"] = "800000 100000\n"
    reading = cpu.read()
    assert (reading.allowed, reading.quota) == (2, False)


def test_nothing_is_known_where_the_kernel_says_nothing(machine):
    machine.clear()
    before = cpu.read()
    assert (before.allowed, before.busy_s) == (2, None)
    assert cpu.busy_cores(before, cpu.read()) is None


def test_busy_cores_are_those_between_two_readings():
    before = cpu.Reading(10.0, 2, False, 100.0)
    assert cpu.busy_cores(before, cpu.Reading(12.0, 2, False, 103.0)) == 1.5
    assert cpu.busy_cores(before, cpu.Reading(12.0, 2, False, 109.0)) == 2
    assert cpu.busy_cores(before, before) is None


def test_a_core_that_computes_is_seen():
    before = cpu.read()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    # The kernel counts in ticks of some milliseconds.
    assert cpu.read().busy_s - before.busy_s > 0.2
