"""What a worker changes in how resource trackers are started."""

from __future__ import annotations

import multiprocessing.util
import os

import pytest

from keras_fastdata.workers import worker_process


@pytest.fixture
def started(monkeypatch):
    """The arguments of what was started; nothing is."""
    commands = []

    def start(path, args, fds):
        commands.append(args)
        return 1

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", start)
    worker_process._spare_resource_trackers()
    return commands


@pytest.mark.parametrize("code", [str, os.fsencode])
def test_a_resource_tracker_leaves_the_group_of_its_worker(code, started):
    """Whether the arguments are text or bytes."""
    main = "from multiprocessing.resource_tracker import main;main(7)"
    args = [b"python", code("-c"), code(main)]
    assert multiprocessing.util.spawnv_passfds(b"python", args, [7]) == 1
    ((_, _, found),) = started
    assert found.startswith("import os, signal; os.setpgid(0, 0); ")
    assert found.endswith(main)


def test_other_processes_stay_in_the_group_of_their_worker(started):
    args = ["python", "-c", "from multiprocessing.spawn import spawn_main"]
    multiprocessing.util.spawnv_passfds(b"python", args, [])
    assert started == [args]
