"""Each field is written by the file of its class alone."""

from __future__ import annotations

import ast

from package_source import trees

# Fields that only have the name of one of ours, and whose they are.
_FIELDS_OF_OTHERS = {
    ("building/rng_monitor.py", "before"): "a `threading.local`",
    ("engine/batch_file.py", "writeable"): "an array's flags",
    ("engine/told_import.py", "loader"): "a module's spec",
    ("keras_bridge/__init__.py", "use_multiprocessing"): "Keras's `PyDataset`",
    ("keras_bridge/__init__.py", "workers"): "Keras's `PyDataset`",
    ("memory/reducers.py", "filename"): "NumPy's `memmap`",
    ("memory/reducers.py", "mode"): "NumPy's `memmap`",
    ("memory/shared_arrays.py", "writeable"): "an array's flags",
    ("sources/remote.py", "retries"): "s3fs's file system",
    ("workers/forks.py", "start"): "Python's `threading.Thread`",
    ("workers/log_forwarding.py", "args"): "a log record",
    ("workers/process/imports.py", "seed"): "Python's `random.Random`",
    ("workers/resource_tracker.py", "_fd"): "Python's `ResourceTracker`",
}


def _classes(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _stored(node):
    """Every target of an assignment or deletion."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    else:
        return
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from target.elts
        else:
            yield target


def _fields(tree):
    """Names of the fields that classes of a module have."""
    for owner in _classes(tree):
        for node in ast.walk(owner):
            for target in _stored(node):
                if isinstance(target, ast.Attribute) and _is_own(target):
                    yield target.attr
                elif isinstance(target, ast.Name) and node in owner.body:
                    yield target.id


def _is_own(attribute):
    base = attribute.value
    return isinstance(base, ast.Name) and base.id in ("self", "cls")


def test_a_field_is_written_by_the_file_of_its_class_alone():
    owners = {file: set(_fields(tree)) for file, tree in trees().items()}
    ours = set().union(*owners.values())
    found = {
        (file, target.attr)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        for target in _stored(node)
        if isinstance(target, ast.Attribute)
        and not _is_own(target)
        and target.attr in ours - owners[file]
    }
    assert found == set(_FIELDS_OF_OTHERS)
