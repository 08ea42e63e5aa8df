"""Chooses the interpreter, paths and environment variables of workers."""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import pathlib
import subprocess
from collections.abc import Mapping

from keras_fastdata._modules import import_folders
from keras_fastdata.errors import LoaderError

# A worker sees no accelerator, and does not multiply the cores by the threads
# of BLAS and OpenMP. `worker_env` overrides.
NO_ACCELERATOR = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}
CLEAN_ENVIRONMENT = {
    **NO_ACCELERATOR,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    # glibc hands large arrays back to the kernel when they are freed, and has
    # every page of the next one zeroed anew. Keeping up to 256 MiB made
    # batches of 38.5 MB from np.random.rand come a fifth faster.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
}


def of_worker(worker_env: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the environment variables of a new worker."""
    clean = {**CLEAN_ENVIRONMENT, **hash_seed()}
    return {**os.environ, **clean, **(worker_env or {})}


@functools.cache
def hash_seed() -> dict[str, str]:
    """Returns the variable PYTHONHASHSEED of workers, for the order of sets.

    Its value is the trainer's where that was given one. One that Python has
    drawn cannot be given to another process.
    """
    name = "PYTHONHASHSEED"
    seed = os.environ.get(name, "")
    return {name: seed if seed.isdecimal() else "0"}


def interpreter() -> list[str]:
    """Returns the command that starts Python, without the code to run."""
    executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if not executable:
        raise LoaderError(
            "No Python interpreter is known to start workers with. Name one "
            "with `multiprocessing.set_executable(path)`."
        )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [executable, *flags, "-P", "-c"]


def import_paths() -> list[str]:
    """Returns the folders that a worker imports from at its very start."""
    package_parent = pathlib.Path(__file__).absolute().parents[2]
    paths = [path for path in import_folders() if isinstance(path, str)]
    return [str(package_parent), *paths]
