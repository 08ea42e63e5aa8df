"""Distinguishes the user's modules from installed modules.

Also reads the names that a code object uses, and the modules that a code object
or a module imports.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle

from keras_fastdata._call_stack import ignoring_errors

_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
# Packages that each worker has before it loads the dataset.
_ALWAYS_THERE = {
    *sys.stdlib_module_names,
    *("cloudpickle", "keras_fastdata", "numpy"),
}
_SCRIPTS = {"__main__", "__mp_main__"}
MADE_BY_CODE = 1 << 9  # the flag of a class that a class statement made
# Functions that ask for a variable by a text, and what gives all variables.
ASKING = {"getattr", "hasattr"}
GIVING_ALL = {"__dict__", "attrgetter", "dir", "getmembers", "globals", "vars"}
# The names that code uses to find a variable by a text.
_BY_TEXT = ASKING | GIVING_ALL
# The functions that import a module which a text names.
_IMPORTING = {"import_module", "__import__"}
# The functions that run code in a text.
_EVALUATING = {"eval", "exec"}
_OF_TABLES = {"query", "eval"}  # methods that do
_OF_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def is_main(name: Any) -> bool:
    """Returns whether a module is the program's script, or works as one.

    `multiprocessing` gives the script another name in a process that it spawns.
    """
    return isinstance(name, str) and name in _SCRIPTS


def note_scripts(names: Iterable[str]) -> None:
    """Has the user's modules among `names` count as scripts from now on.

    A worker must not import a module that trains while it is imported.
    """
    for name in names:
        if name not in _SCRIPTS and name in sys.modules and is_users(name):
            cloudpickle.register_pickle_by_value(sys.modules[name])
            _SCRIPTS.add(name)


def scripts() -> frozenset[str]:
    """Returns the names of the modules that count as scripts."""
    return frozenset(_SCRIPTS)


def is_users(name: Any, *, if_unknown: bool = False) -> bool:
    """Returns whether a module is part of the user's program.

    The user's modules are `__main__`, and files outside of the standard
    library and of the folders of installed packages. `if_unknown` is the
    result for a module that has no file, or is not imported in this process.
    """
    if not isinstance(name, str):
        return False  # a class may set `__module__` to anything
    if is_main(name):
        return True
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "keras_fastdata":
        return False
    module = sys.modules.get(top)
    if isinstance(module, types.ModuleType):
        file = getattr(module, "__file__", None)
        folders = list(getattr(module, "__path__", ()))
    else:
        file = None if module is None else _file_found(top)
        folders = []
    if file and folders:
        place = os.path.dirname(file)  # TensorFlow puts Keras's before its own
    elif file or folders:
        place = file or folders[0]
    else:
        return if_unknown
    return not _has_installed(os.path.dirname(place))


def modules_of_user() -> list[str]:
    """Returns the names of the user's modules that are imported."""
    names = list(sys.modules)
    tops = {name: name.partition(".")[0] for name in names}
    users = {top for top in set(tops.values()) if is_users(top)}
    return [name for name in names if tops[name] in users or is_main(name)]


def is_users_module(module: types.ModuleType) -> bool:
    """Returns whether a module is part of the user's program.

    Also if it was loaded by its path, or was made of a text, and so is in no
    list of modules.
    """
    if sys.modules.get(module.__name__) is module:
        return is_users(module.__name__)
    file = vars(module).get("__file__")
    if file is None:
        return is_users(module.__name__, if_unknown=True)
    return isinstance(file, str) and is_users_file(file)


def modules_behind(package: types.ModuleType) -> list[types.ModuleType]:
    """Returns the modules in which a `__getattr__` of a package may look."""
    if "__getattr__" not in vars(package):
        return []
    prefix = f"{package.__name__}."
    return [
        module
        for name, module in sorted(sys.modules.copy().items())
        if name.startswith(prefix) and isinstance(module, types.ModuleType)
    ]


@functools.lru_cache(maxsize=64)
def _file_found(name: str) -> str | None:
    """Returns the file of a module that has put an object in its place."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec.origin if spec is not None and spec.has_location else None


def loaded(name: str) -> Any:
    """Returns a module; `None` if it is not imported, or not to its end.

    Another thread may import it at this moment. Then it may lack anything.
    """
    module = sys.modules.get(name)
    is_half = getattr(spec_of(module), "_initializing", False)
    return None if is_half else module


def spec_of(module: Any) -> Any:
    """Returns a module's spec, of which each import makes a new one.

    `None` for anything else. The module is not asked for an attribute: it may
    import others then.
    """
    is_module = isinstance(module, types.ModuleType)
    return vars(module).get("__spec__") if is_module else None


def is_users_code(name: Any) -> bool:
    """Returns whether a function whose globals have a name is the user's."""
    return is_users(name, if_unknown=has_no_module(name))


def is_users_class(kind: type) -> bool:
    """Returns whether a class is part of the user's program."""
    # Also if its globals have no name, or `dataclasses.make_dataclass` made it.
    if kind.__module__ in ("builtins", "types"):
        is_known = getattr(types, kind.__name__, None) is kind
        return bool(kind.__flags__ & MADE_BY_CODE) and not is_known
    if has_no_module(kind.__module__) and not kind.__flags__ & MADE_BY_CODE:
        return False  # of a library in C, under a name that is no module's
    return is_users_code(kind.__module__)


@functools.lru_cache(maxsize=1024)
def packages_of(kind: Any) -> frozenset[str]:
    """Returns the packages of a class and its base classes."""
    modules = (str(base.__module__) for base in kind.__mro__)
    return frozenset(module.partition(".")[0] for module in modules)


def has_no_module(name: Any) -> bool:
    """Returns whether code with a module's name is in no module.

    Such code was run by `exec` or `runpy`, and travels to workers by value.
    """
    return isinstance(name, str) and name not in sys.modules


@functools.lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Returns whether a file of Python code is part of the user's program.

    Code without a file has a name such as "<stdin>".
    """
    if file.startswith("<frozen"):
        return False
    ours = (_STDLIB, os.path.dirname(__file__))
    folder = os.path.dirname(os.path.abspath(file))
    inside = any(os.path.join(folder, "").startswith(o + os.sep) for o in ours)
    return not inside and not _has_installed(folder)


@functools.lru_cache(maxsize=4096)
def _has_installed(folder: str) -> bool:
    """Returns whether a folder holds installed packages."""
    folder = os.path.abspath(folder)
    if any(part in _INSTALLED for part in folder.split(os.sep)):
        return True
    try:
        # Installed packages have `.dist-info` folders beside them.
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and all code objects nested inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Returns the instructions of a code object.

    None of what only looks like one: that of wrapt has parts of two functions.
    """
    try:
        return [*dis.get_instructions(code)]
    except IndexError:
        return []


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes that a code object uses.

    Code objects nested inside it are included. So are the texts of code that
    finds a variable by a text, as `getattr(module, "SCALE")` does.
    """
    names = {n for part in nested_code(code) for n in part.co_names}
    if names & _BY_TEXT:
        for part in nested_code(code):
            names.update(n for n in part.co_consts if isinstance(n, str))
    return frozenset(names) | names_in_texts(code)


@functools.lru_cache(maxsize=4096)
def names_in_texts(code: types.CodeType) -> frozenset[str]:
    """Returns the names in texts that a code object may run.

    With `eval`, or with methods of pandas: `table.query("age > @LIMIT")`. Code
    objects nested inside it are included.
    """
    parts = [*nested_code(code)]
    if any(map(_evaluates, parts)):
        code_in_text = r".+"
    elif any(not _OF_TABLES.isdisjoint(part.co_names) for part in parts):
        code_in_text = r"@[\w.]+"
    else:
        return frozenset()
    texts = (one for part in parts for one in part.co_consts)
    return frozenset(
        name
        for text in texts
        if isinstance(text, str)
        for one in re.findall(code_in_text, text)
        for name in re.findall(r"\b[^\W\d]\w*", one)
    )


def _evaluates(code: types.CodeType) -> bool:
    """Returns whether code names `eval` or `exec`, but not as an attribute."""
    return not _EVALUATING.isdisjoint(code.co_names) and any(
        step.argval in _EVALUATING and step.opname in _OF_VARIABLES
        for step in instructions(code)
    )


@functools.lru_cache(maxsize=4096)
def has_with(code: types.CodeType) -> bool:
    """Returns whether a code object has a `with` statement."""
    return any(
        step.opname == "WITH_EXCEPT_START"
        for part in nested_code(code)
        for step in instructions(part)
    )


def imports_in(
    code: types.CodeType, package: str | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each module that a code object imports, and the imported names.

    Code objects nested inside it are included, and modules that are named in a
    text. Relative imports begin at `package`.
    """
    for part in nested_code(code):
        used = {*part.co_names}
        if used & _IMPORTING or {"sys", "modules"} <= used:
            for text in part.co_consts:
                if isinstance(text, str) and _is_dotted(text):
                    with contextlib.suppress(ImportError):
                        yield importlib.util.resolve_name(text, package), ()
        loaded: list[Any] = []
        for step in instructions(part):
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                loaded.append(step.argval)
            elif step.opname == "IMPORT_NAME":
                level, names = loaded[-2:]
                with contextlib.suppress(ImportError):  # beyond the package
                    module = "." * level + step.argval
                    name = importlib.util.resolve_name(module, package)
                    yield name, names or ()


@functools.lru_cache(maxsize=4096)
def imported_names(
    code: types.CodeType, package: str | None
) -> tuple[str, ...]:
    """Returns the names of all modules that code may import.

    What is imported from a module may be a module, too. See `imports_in`.
    """
    names: dict[str, None] = {}
    for module, parts in imports_in(code, package):
        names |= dict.fromkeys([module, *(f"{module}.{n}" for n in parts)])
    return tuple(names)


def _is_dotted(text: str) -> bool:
    """Returns whether a text may be the name of a module."""
    return all(name.isidentifier() for name in text.lstrip(".").split("."))


def installed_imports(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the installed modules that an import of `names` also imports.

    Only modules that this process has imported count, in the order in which
    they were imported. The user's modules are searched for import statements,
    except within functions and classes; the standard library and what this
    package needs are left out.

    Args:
        names: Modules that another process will import.
    """
    waiting, seen, found = list(names), set(), set()
    for name in waiting:
        if name in seen or (module := sys.modules.get(name)) is None:
            continue
        seen.add(name)
        if _is_importable(module, name):
            if is_users(name):
                parts = name.split(".")
                waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
                with ignoring_errors():  # not Python, or gone
                    waiting += _imports_of(module, str(module.__file__))
            elif name.partition(".")[0] not in _ALWAYS_THERE:
                found.add(name)
    return tuple(name for name in list(sys.modules) if name in found)


def _is_importable(module: Any, name: str) -> bool:
    """Returns whether another process can import a module from its files."""
    spec = spec_of(module)
    if spec is None or spec.name != name or is_main(name):
        return False
    return bool(spec.has_location or spec.submodule_search_locations)


def _imports_of(module: types.ModuleType, file: str) -> Iterator[str]:
    """Yields the names of modules that a module's import statements may name.

    A statement that has bound no name did not run, such as one that is for
    type checkers alone.
    """
    held = vars(module)
    for node in _import_statements(file, os.stat(file).st_mtime_ns):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                if bound in held:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, held.get("__package__"))
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) in held:
                    yield base
                    yield f"{base}.{alias.name}"


@functools.lru_cache(maxsize=1024)
def _import_statements(file: str, _: int) -> list[ast.AST]:
    """Returns a file's import statements outside functions and classes."""
    waiting: list[ast.AST] = [ast.parse(pathlib.Path(file).read_bytes())]
    found: list[ast.AST] = []
    for node in waiting:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif not isinstance(node, _SCOPES):
            waiting += [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, _STATEMENTS)
            ]
    return found


def import_folders() -> list[Any]:
    """Returns `sys.path`, with the folders that its relative entries stand for.

    These do not change when the program changes the current folder: what it has
    imported from there, workers import from there.
    """
    folders: list[Any] = []
    for entry in sys.path:
        finder = sys.path_importer_cache.get(entry)
        if entry == "" and current_folder() != _FOLDER:
            folders += [_FOLDER, entry]
        elif isinstance(finder, importlib.machinery.FileFinder):
            folders.append(finder.path)  # where Python has looked
        else:
            folders.append(entry)
    return folders


def current_folder() -> str:
    """Returns the working directory, or "" if somebody has removed it."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_FOLDER = current_folder()  # where the program began
