"""How the package is put together: who may import whom, and what it costs."""

from __future__ import annotations

import ast
import collections
import doctest
import functools
import graphlib
import importlib
import inspect
import itertools
import json
import os
import pathlib
import pkgutil
import subprocess
import sys
import tomllib
import types

import keras
import pytest
from package_source import ROOT, trees
from places import LONG_BUT_ON_JAX

import keras_fastdata

_PACKAGE = "keras_fastdata"

# From top to bottom: a module imports from its own room and those below.
_ROOMS = [
    "__init__",
    "__main__",
    "commands",
    "profiling",
    "cli_target",
    "combine",
    "datasets",
    "dataset",
    "callbacks",
    "health",
    "iterators",
    "shared_list",
    "sources",
    "display",
    "keras_bridge",
    "_dataset_internals",
    "engine",
    "building",
    "workers",
    "memory",
    "metrics",
    "errors",
    "_validation",
    "_process_role",
    "_base_class",
    "_atomic_write",
    "_unimported",
    "_modules",
    "_call_stack",
    "_recent",
    "_extras",
]
_HEAVY = {
    "tensorflow",
    "jax",
    "torch",
    "jinja2",
    "matplotlib",
    "PIL",
    "ray",
}
_PUBLIC = [
    "ArrayDataset",
    "BatchTimeoutError",
    "DatasetCheckpoint",
    "DatasetPicklingError",
    "EndOfData",
    "FastPyDataset",
    "GeneratorDataset",
    "ImageFileDataset",
    "LoaderError",
    "LoaderHealth",
    "SampleDataset",
    "SharedList",
    "ThreadSafeIterator",
    "WorkerDiedError",
    "accelerate",
    "audio_dataset_from_directory",
    "image_dataset_from_directory",
    "profile",
    "text_dataset_from_directory",
    "threadsafe_generator",
    "timeseries_dataset_from_array",
]


# -- reading the source ------------------------------------------------------


@functools.cache
def _modules():
    """The source of every module, by its dotted name."""
    found = {}
    for path, tree in trees().items():
        parts = (_PACKAGE, *pathlib.PurePath(path).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 2:
            parts = parts[:-1]
        found[".".join(parts)] = tree
    return found


def _imported(nodes):
    """The dotted names that import statements among `nodes` may load."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _at_top_level(tree):
    """Every node that runs when the module is imported."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _is_for_types(node.test):
            waiting.extend(node.orelse)
            continue
        yield node
        if not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        ):
            waiting.extend(ast.iter_child_nodes(node))


def _is_for_types(test):
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _module_of(name):
    """The module of ours that a dotted name is, or is in; else `None`."""
    while name and name not in _modules():
        name = name.rpartition(".")[0]
    if name:
        return name
    return None


def _our_imports(nodes):
    for name in _imported(nodes):
        if name.split(".")[0] == _PACKAGE:
            yield _module_of(name) or f"{_PACKAGE}.__init__"


def _room_of(module):
    return module.split(".")[1]


def _height(module):
    return -_ROOMS.index(_room_of(module))


# -- who imports whom --------------------------------------------------------


def test_every_module_is_in_a_room_that_has_its_place():
    assert {_room_of(module) for module in _modules()} == set(_ROOMS)


def test_a_module_imports_only_from_its_room_and_those_below():
    upwards = [
        f"{module} imports {name}"
        for module, tree in _modules().items()
        for name in _our_imports(ast.walk(tree))
        if _height(name) > _height(module)
    ]
    assert upwards == []


def test_the_check_of_import_directions_sees_what_it_is_to_forbid():
    source = "def f():\n    from keras_fastdata.engine import loader\n"
    found = list(_our_imports(ast.walk(ast.parse(source))))
    assert found == ["keras_fastdata.engine.loader"]
    assert _height(found[0]) > _height("keras_fastdata.memory.arena")
    source = "from keras_fastdata import FastPyDataset\n"
    found = list(_our_imports(ast.walk(ast.parse(source))))
    assert found == ["keras_fastdata.__init__"]


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {
        module: set(_our_imports(_at_top_level(tree))) - {module}
        for module, tree in _modules().items()
        if module != f"{_PACKAGE}.__init__"
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_one_module_alone_names_what_is_in_keras_src():
    def names(tree):
        yield from _imported(ast.walk(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    naming = {
        module
        for module, tree in _modules().items()
        if any(name.startswith("keras.src") for name in names(tree))
    }
    assert naming == {f"{_PACKAGE}.keras_bridge.keras_internals"}


def test_no_module_reaches_keras_src_through_keras():
    reached = {
        module
        for module, tree in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "keras.src"
    }
    assert reached == set()


_FRAMES = {
    "_current_frames",
    "_getframe",
    "f_locals",
    "f_back",
    "currentframe",
    "walk_stack",
}


def test_one_module_alone_looks_at_frames_of_keras_and_one_at_all_others():
    looking = {
        module
        for module, tree in _modules().items()
        for node in ast.walk(tree)
        if {getattr(node, "attr", ""), getattr(node, "id", "")} & _FRAMES
    }
    assert looking == {
        f"{_PACKAGE}._call_stack",
        f"{_PACKAGE}.keras_bridge.keras_internals",
    }


# They end, or run in workers, or say what was raised.
_IGNORE_ALL = ("workers/", "commands/", "__main__.py", "building/build.py")


def test_no_code_ignores_what_a_signal_handler_raises():
    found = {
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        if not file.startswith(_IGNORE_ALL)
        for node in ast.walk(tree)
        if _ignores_all(node)
    }
    assert found == set()


def _ignores_all(node):
    if isinstance(node, ast.Call):
        return ast.unparse(node) == "contextlib.suppress(Exception)"
    if not isinstance(node, ast.ExceptHandler) or node.type is None:
        return False
    if ast.unparse(node.type) not in ("Exception", "BaseException"):
        return False
    again = (ast.Raise, ast.Call)
    return not any(
        isinstance(each, again)
        and ("raise" in (text := ast.unparse(each)) or "put_aside" in text)
        for each in ast.walk(node)
    )


def _private_to_keras():
    """Private attributes and locals that `USES` says Keras's code has."""
    from keras_fastdata.keras_bridge.keras_internals import USES

    uses = itertools.chain(*USES.values())
    names = {n for use in uses for n in (*use.mentions.split(), use.thing)}
    names = {name.rpartition(".")[2].rpartition(":")[2] for name in names}
    names = {n for n in names if n[0] == "_" and not n.startswith("__")}
    return names - {"_value"}  # which others have too


def test_one_module_alone_touches_what_is_private_to_keras():
    touching = collections.defaultdict(set)
    private = _private_to_keras()
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            if getattr(node, "attr", "") in private:
                touching[module].add(node.attr)
    del touching[f"{_PACKAGE}.keras_bridge.keras_internals"]
    assert touching == {
        # A method that our subclass of Keras's adapter inherits.
        f"{_PACKAGE}.keras_bridge.adapter": {"_standardize_batch"},
    }


def test_importing_a_module_imports_no_framework_but_for_tensorflows_own():
    found = [
        f"{module} imports {name}"
        for module, tree in _modules().items()
        for name in _imported(_at_top_level(tree))
        if name.split(".")[0] in _HEAVY
    ]
    assert found == [
        "keras_fastdata.keras_bridge.tensorflow_data imports tensorflow",
        "keras_fastdata.keras_bridge.tensorflow_iterator imports tensorflow",
    ]


def test_keras_is_imported_by_the_bridge_callbacks_and_commands_alone():
    rooms = {
        _room_of(module)
        for module, tree in _modules().items()
        for name in _imported(ast.walk(tree))
        if name.split(".")[0] == "keras"
    }
    assert rooms == {"keras_bridge", "callbacks", "commands"}


_LINES = {ast.ClassDef: 300, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}

# Classes and functions with more lines, and why.
_LONG = {
    "callbacks.loader_health:LoaderHealth": (
        "documents itself for users, and has a method for each of Keras's hooks"
    ),
    "dataset:FastPyDataset": "documents every argument and method for users",
    "datasets.images:from_directory": (
        "documents and passes on each argument of a dataset of images"
    ),
    "datasets.twins:image_dataset_from_directory": (
        "has the arguments of Keras's function, and lists the differences"
    ),
    "datasets.twins:timeseries_dataset_from_array": (
        "has the arguments of Keras's function, and checks each"
    ),
}


def test_no_class_has_over_300_lines_and_no_function_over_60():
    found = {
        f"{module.partition('.')[2]}:{node.name}"
        for module, tree in _modules().items()
        for node in ast.walk(tree)
        if type(node) in _LINES
        and node.end_lineno - node.lineno >= _LINES[type(node)]
    }
    assert found == set(_LONG)


def test_every_module_that_has_code_says_what_it_is_for():
    silent = [
        module
        for module, tree in _modules().items()
        if tree.body and not ast.get_docstring(tree)
    ]
    assert silent == []


# -- what is public ----------------------------------------------------------


def test_the_public_names_are_these():
    assert keras_fastdata.__all__ == _PUBLIC


def test_every_public_name_resolves_and_has_a_docstring():
    for name in _PUBLIC:
        value = getattr(keras_fastdata, name)
        assert value.__name__ == name
        assert value.__module__.startswith(f"{_PACKAGE}.")
        assert vars(value).get("__doc__") or value.__doc__, name
        assert getattr(keras_fastdata, name) is value


def test_public_methods_and_properties_have_docstrings():
    silent = []
    kinds = types.FunctionType, classmethod, property
    for name in _PUBLIC:
        value = getattr(keras_fastdata, name)
        members = vars(value) if isinstance(value, type) else {}
        for attribute, member in members.items():
            if attribute.startswith("_") or not isinstance(member, kinds):
                continue
            if not inspect.getdoc(getattr(value, attribute)):
                silent.append(f"{name}.{attribute}")
    assert silent == []


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'Fast'"):
        _ = keras_fastdata.Fast
    assert not hasattr(keras_fastdata, "Sequence")
    with pytest.raises(ImportError, match="Fast"):
        from keras_fastdata import Fast  # noqa: F401


def test_dir_lists_the_public_names():
    assert set(_PUBLIC) <= set(dir(keras_fastdata))
    assert "__version__" in dir(keras_fastdata)


def test_a_star_import_brings_the_public_names():
    namespace = {}
    exec("from keras_fastdata import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(_PUBLIC)


def test_errors_are_runtime_errors_of_one_family():
    from keras_fastdata import LoaderError

    assert issubclass(LoaderError, RuntimeError)
    for name in _PUBLIC:
        if name.endswith("Error"):
            assert issubclass(getattr(keras_fastdata, name), LoaderError)


def test_every_module_can_be_imported():
    found = [
        info.name for info in pkgutil.walk_packages([str(ROOT)], f"{_PACKAGE}.")
    ]
    assert {*found, f"{_PACKAGE}.__init__"} == set(_modules())
    for name in found:
        importlib.import_module(name)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "py.typed").exists()


def test_the_version_is_the_one_that_is_built():
    assert [int(part) for part in keras_fastdata.__version__.split(".")]
    project = ROOT.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("the package is installed; its project file is not here")
    config = tomllib.loads(project.read_text("utf-8"))
    assert "version" in config["project"]["dynamic"]
    version = config["tool"]["hatch"]["version"]
    assert version == {"path": "keras_fastdata/__init__.py"}


# -- what an import costs ----------------------------------------------------

_PRELUDE = """
import copyreg, json, os, sys, threading
def loaded(*names):
    return [name for name in names if name in sys.modules]
def children():
    tasks = f"/proc/{os.getpid()}/task"
    return [
        pid
        for task in os.listdir(tasks)
        for pid in open(f"{tasks}/{task}/children").read().split()
    ]
"""


def _in_a_fresh_process(script, tmp_path, **environment):
    """Runs a script in a new interpreter; returns the JSON it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + script],
        env={**env, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_starts_nothing_and_imports_no_keras(tmp_path):
    script = """
import keras_fastdata
light = [n for n in keras_fastdata.__all__ if n.endswith("Error")]
light += ["ThreadSafeIterator", "threadsafe_generator", "__version__"]
for name in light:
    getattr(keras_fastdata, name)
dir(keras_fastdata)
print(json.dumps([
    len(light),
    threading.active_count(),
    len(os.listdir("/proc/self/task")),
    children(),
    loaded("keras", "tensorflow", "jax", "torch", "numpy", "cloudpickle"),
]))
"""
    assert _in_a_fresh_process(script, tmp_path) == [7, 1, 1, [], []]


@pytest.mark.backend
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("FastPyDataset", marks=LONG_BUT_ON_JAX),
        pytest.param("LoaderHealth", marks=pytest.mark.long),
    ],
)
def test_keras_is_imported_when_it_is_needed_and_with_its_backend_alone(
    name, tmp_path
):
    backend = keras.backend.backend()
    # Not JAX: Keras and TensorFlow look for it themselves.
    others = sorted({"tensorflow", "torch"} - {backend})
    script = f"""
import keras_fastdata
before = loaded("keras")
keras_fastdata.{name}
print(json.dumps([
    before,
    loaded("keras", *{others}),
    [t.name for t in threading.enumerate()],
    children(),
]))
"""
    found = _in_a_fresh_process(script, tmp_path, KERAS_BACKEND=backend)
    assert found == [[], ["keras"], ["MainThread"], []]


def test_importing_the_package_changes_nothing_that_others_use(
    tmp_path, zygote
):
    script = tmp_path / "imports.py"
    script.write_text(
        _PRELUDE
        + """
import logging, pickle, random, signal, warnings
import cloudpickle, keras, numpy, tblib
def state():
    return {
        "copyreg": {str(k): str(v) for k, v in copyreg.dispatch_table.items()},
        "environ": dict(os.environ),
        "excepthook": repr(sys.excepthook),
        "filters": repr(warnings.filters),
        "handlers": repr(logging.root.handlers),
        "numpy": numpy.random.get_state()[1].tolist(),
        "random": hash(random.getstate()),
        "showwarning": repr(warnings.showwarning),
        "signals": [repr(signal.getsignal(s)) for s in signal.valid_signals()],
        "path": list(sys.path),
        "threads": [t.name for t in threading.enumerate()],
        "children": children(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
before = state()
import keras_fastdata
for name in keras_fastdata.__all__:
    getattr(keras_fastdata, name)
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""
    )
    done = zygote.run(script)
    assert done.stdout == "[]\n", done.stderr


def test_keras_is_imported_without_a_draw_from_the_users_generators(tmp_path):
    script = """
import random, numpy
def state():
    return hash(random.getstate()), numpy.random.get_state()[1].tolist()
random.seed(1)
numpy.random.seed(1)
before = state()
import keras_fastdata
keras_fastdata.GeneratorDataset
print(json.dumps([loaded("keras"), before == state()]))
"""
    assert _in_a_fresh_process(script, tmp_path) == [["keras"], True]


def test_a_generator_of_the_users_under_np_random_is_no_reason_to_warn(
    tmp_path, zygote
):
    script = tmp_path / "imports.py"
    script.write_text(
        """
import json, warnings, numpy
numpy.random.set_bit_generator(numpy.random.PCG64(1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import keras_fastdata
    keras_fastdata.GeneratorDataset
drawn = numpy.random.rand()
numpy.random.set_bit_generator(numpy.random.PCG64(1))
ours = [str(w.message) for w in caught if "legacy" in str(w.message)]
print(json.dumps([ours, drawn == numpy.random.rand()]))
"""
    )
    done = zygote.run(script)
    assert done.stdout == "[[], true]\n", done.stderr


def test_a_worker_imports_every_public_name_without_keras(tmp_path):
    script = """
from keras_fastdata import _process_role
_process_role.become_worker()
import keras_fastdata
class Squares(keras_fastdata.FastPyDataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index * index
keras_fastdata.LoaderHealth(verbose=0)
print(json.dumps([
    [getattr(keras_fastdata, n).__name__ for n in keras_fastdata.__all__],
    list(Squares()),
    loaded("keras", "tensorflow", "jax", "torch"),
    loaded("keras_fastdata.keras_bridge"),
]))
"""
    assert _in_a_fresh_process(script, tmp_path) == [
        _PUBLIC,
        [0, 1, 4],
        [],
        [],
    ]


# -- examples ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "least"),
    [
        ("keras_fastdata", 0),
        ("keras_fastdata.callbacks.loader_health", 2),
        ("keras_fastdata.dataset", 4),
        ("keras_fastdata.datasets.twins", 12),
        ("keras_fastdata.errors", 0),
        ("keras_fastdata.iterators", 4),
        ("keras_fastdata.profiling", 4),
        ("keras_fastdata.shared_list", 3),
        ("keras_fastdata.sources.packing", 7),
    ],
)
def test_the_examples_in_docstrings_do_what_they_show(module, least, capsys):
    found = doctest.testmod(importlib.import_module(module))
    assert found.failed == 0, capsys.readouterr().out
    assert found.attempted >= least


def test_every_class_and_function_for_users_shows_an_example():
    for name in _PUBLIC:
        if not name.endswith("Error"):
            doc = getattr(keras_fastdata, name).__doc__
            assert "Example:" in doc
            assert ">>> " in doc
