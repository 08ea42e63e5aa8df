"""The faults of stock Keras that docs/upstream.md describes.

Each has a script in docs/upstream, which shows it and uses nothing of this
package. A script ends with 0 while Keras has the fault, and with 1 and a
sentence once Keras has mended it.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import tomllib

import keras
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "docs" / "upstream"
_PAGE = _ROOT / "docs" / "upstream.md"
_BACKEND = keras.backend.backend()
_VERSION = tuple(map(int, keras.__version__.split(".")[:2]))

# What this package does not need any more, once each supported Keras has
# mended a fault.
_TO_DROP = {
    "batch_none": "the check for None in keras_bridge/adapter.py",
    "built_twice": "`Loader.peek` in engine/loader.py",
    "dropped_cause": "`spell_out_cause` in keras_bridge/batches.py",
    "empty_dataset": "the error for length 0 in keras_bridge/adapter.py",
    "equal_draws": "a row of from-sequence.md; building/seeding.py stays",
    "generator_warning": "`stop_early` in keras_bridge/early_end.py, in part",
    "killed_worker": "a row of from-sequence.md; the supervisor stays",
    "late_epoch_begin": "a section of docs/upstream.md alone",
    "lost_ctrl_c": "a line of robustness.md, and `pythonify_logs` in "
    "tests/support/trainers.py",
    "pause_between_epochs": "a row of from-sequence.md",
    "probe_batch": "`remember_first` in keras_bridge/adapter.py",
    "queue_empty": "a section of docs/upstream.md alone",
    "resume_amid_epoch": "what callbacks/dataset_checkpoint.py does beside "
    "`BackupAndRestore`, in part",
    "second_fit": "the last step of `fit` in callbacks/dataset_checkpoint.py",
    "steps_per_epoch": "a row of from-sequence.md",
    "tensorflow_error": "keras_bridge/tensorflow_iterator.py, in part",
    "unpicklable_exception": "a section of docs/upstream.md alone",
    "workers_left": "a section of docs/upstream.md alone",
    "wrong_exception": "a section of docs/upstream.md alone",
}
# The first Keras without a fault. Where all supported versions are as new, the
# fault is no longer of interest.
_MENDED_IN = {"generator_warning": (3, 16), "late_epoch_begin": (3, 16)}
_ONLY_ON = {
    "empty_dataset": ("jax", "torch"),
    "probe_batch": ("jax", "torch"),
    "tensorflow_error": ("tensorflow",),
}
# What becomes good by the class of the dataset, with no other change. (The
# barrier of `equal_draws` cannot be sent to workers.)
_MENDED_BY_THE_CLASS = sorted(
    {*_TO_DROP}
    - {
        "dropped_cause",
        "equal_draws",
        "generator_warning",
        "lost_ctrl_c",
        "resume_amid_epoch",
        "second_fit",
    }
)

pytestmark = pytest.mark.skipif(
    not _PAGE.exists(), reason="the package is installed; its docs are not here"
)


def _on_this_backend(names):
    return [n for n in names if _BACKEND in _ONLY_ON.get(n, [_BACKEND])]


def _run_all(zygote, paths):
    """Runs scripts, some at a time since most wait; returns their ends."""

    def run(path):
        # Keras forks while it has threads, so a worker may be blocked at its
        # start. An alarm then ends the script.
        for _ in range(3):
            done = zygote.run(path)
            if done.returncode in (0, 1):
                break
        return done

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return dict(zip(paths, pool.map(run, paths), strict=True))


def _unexpected(done, expected):
    return "" if done.returncode == expected else f"{done.stdout}{done.stderr}"


# A change of Keras alone can fail it.
@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*_ONLY_ON], marks=pytest.mark.backend, id="one backend"),
        pytest.param([*{*_TO_DROP} - {*_ONLY_ON}], id="every backend"),
    ],
)
def test_keras_has_not_mended_a_fault(zygote, names):
    paths = [_FOLDER / f"{name}.py" for name in _on_this_backend(names)]
    found = []
    for path, done in _run_all(zygote, paths).items():
        name = path.stem
        is_mended = name in _MENDED_IN and _MENDED_IN[name] <= _VERSION
        if said := _unexpected(done, 1 if is_mended else 0):
            found.append(
                f"Keras {keras.__version__} changed what {path.name} shows: "
                f"{said.strip()[-500:]}\nIf Keras has mended it, add it to "
                f"_MENDED_IN, and correct docs/upstream.md. Once no supported "
                f"Keras has the fault, drop: {_TO_DROP[name]}."
            )
    assert not found, "\n\n".join(found)


@pytest.mark.long
@pytest.mark.backend
def test_our_class_in_place_of_keras_mends_it(zygote, tmp_path):
    paths = []
    for name in _on_this_backend(_MENDED_BY_THE_CLASS):
        text = (_FOLDER / f"{name}.py").read_text("utf-8")
        assert text.count("keras.utils.PyDataset") == 1
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(
            text.replace(
                "import keras\n", "import keras\nimport keras_fastdata\n"
            ).replace("keras.utils.PyDataset", "keras_fastdata.FastPyDataset")
        )
    for path, done in _run_all(zygote, paths).items():
        assert not _unexpected(done, 1), (path.name, done)


def test_no_fault_is_kept_that_all_supported_versions_have_mended():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
    (oldest,) = (
        tuple(map(int, each.removeprefix("keras>=").split(".")))
        for each in project["project"]["dependencies"]
        if each.startswith("keras>=")
    )
    for name, version in _MENDED_IN.items():
        assert oldest < version, f"drop {name}: {_TO_DROP[name]}"


def test_the_page_describes_each_script():
    text = _PAGE.read_text("utf-8")
    assert {path.stem for path in _FOLDER.iterdir()} == {*_TO_DROP}
    for name in _TO_DROP:
        assert text.count(f"](upstream/{name}.py)") == 1, name


@pytest.mark.parametrize("name", _TO_DROP)
def test_a_script_is_short_and_free_of_this_package(name):
    text = (_FOLDER / f"{name}.py").read_text("utf-8")
    first, *rest = text.splitlines()
    assert first.startswith('"""')
    assert first.endswith('."""')
    assert len([line for line in rest if line.strip()]) < 25
    assert "keras_fastdata" not in text
