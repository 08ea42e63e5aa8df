"""Lists the variables that a function's code reads, assigns and edits.

The code does not run: its instructions are followed in order, with what each
one leaves on Python's stack and in local variables. Branches are not followed,
so that something may be missed where an expression branches.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._modules import (
    ASKING,
    GIVING_ALL,
    imported_names,
    imports_in,
    instructions,
    is_users,
    names_in,
    names_in_texts,
    nested_code,
)

# Methods that edit a container.
_EDITING = {
    *("add", "append", "appendleft", "clear", "discard", "extend"),
    *("extendleft", "insert", "move_to_end", "pop", "popitem", "popleft"),
    *("remove", "reverse", "rotate", "setdefault", "sort", "update"),
    *("difference_update", "fill", "intersection_update", "subtract"),
    "symmetric_difference_update",
}

_LOADING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR")
# What gives all variables of a module; `sys.modules` gives the module itself.
_ALL = {*GIVING_ALL, "modules"}

# First parameters of methods. A function may have another first parameter.
_SELVES = ("self", "s", "this", "me")


class Root(enum.Enum):
    """Where code finds an object."""

    GLOBAL = enum.auto()  # in a global variable
    OUTER = enum.auto()  # in a variable of an outer function
    CLASS = enum.auto()  # it is the class of the method
    SELF = enum.auto()  # it is the object of the method
    TYPE = enum.auto()  # it is Python's `type`


class Target(NamedTuple):
    """What code names: `a.b` is `Target(Root.GLOBAL, ("a", "b"))`."""

    root: Root
    names: tuple[str, ...] = ()
    is_item: bool = False  # whether it is an item of what is named

    def part(self, name: str) -> Target:
        """Returns the target that an attribute of this one is."""
        if name == "__class__":
            return Target(Root.CLASS)
        return Target(self.root, (*self.names, name))

    def item(self) -> Target:
        """Returns what an item counts as: the container itself."""
        return self._replace(is_item=True)


# Variables that are bound by their names. Python makes `__class__`.
_BOUND = {
    "self": Target(Root.SELF),
    "cls": Target(Root.CLASS),
    "__class__": Target(Root.CLASS),
}


@dataclasses.dataclass(frozen=True)
class CodeNames:
    """The names that a function and its nested functions use."""

    variables: frozenset[str]  # global variables that they read
    # Modules that they import, each with what is imported from it.
    imported: frozenset[tuple[str, tuple[str, ...]]]
    # Variables, and attributes of classes, modules and objects.
    assigned: frozenset[Target]
    edited: frozenset[Target]  # containers


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType, package: str | None) -> CodeNames:
    """Returns the names that a code object and those nested inside it use.

    Relative imports begin at `package`.
    """
    scan = _Scan()
    for part in nested_code(code):
        scan.follow(part)
    return CodeNames(
        names_in_texts(code).union(scan.variables),
        frozenset(imports_in(code, package)),
        frozenset(one._replace(is_item=False) for one in scan.assigned),
        frozenset(one._replace(is_item=False) for one in scan.edited),
    )


def changes_of(parts: Iterable[types.CodeType]) -> set[Target]:
    """Returns what code assigns in global variables, or edits.

    Also what methods change in their object or its class. Code objects nested
    inside `parts` are left out.
    """
    scan = _Scan()
    for part in parts:
        scan.follow(part)
    return {one for one in scan.assigned | scan.edited if one.names}


def modules_passed_on(
    code: types.CodeType, variables: dict[str, Any]
) -> Iterator[types.ModuleType]:
    """Yields the user's modules that code may give to other code.

    The other code then reads variables there that this code does not name. So
    does the function `getattr`; and `globals()` gives the code's own module.

    Args:
        code: The code, with code objects nested inside it.
        variables: Its global variables.
    """
    names, passed_on = names_in(code), _names_passed_on(code)
    waiting, seen = [variables], {id(variables)}
    for held in waiting:  # grows
        for name in names & held.keys():
            module = held[name]
            if isinstance(module, types.ModuleType) and is_users(
                module.__name__
            ):
                if name in passed_on:
                    yield module
                if id(vars(module)) not in seen:
                    seen.add(id(vars(module)))
                    waiting.append(vars(module))
    imported = imported_names(code, variables.get("__package__"))
    is_own = "globals" in names or {"sys", "modules"} <= names
    own = (str(variables.get("__name__")),) if is_own else ()
    for name in (*own, *imported):
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType) and is_users(name):
            yield module


@functools.lru_cache(maxsize=4096)
def computes_names(code: types.CodeType) -> bool:
    """Returns whether code finds a variable by a text that it may compute.

    So does `getattr(module, name)`, but not `getattr(module, "name")`.
    """
    return any(
        not _ALL.isdisjoint(part.co_names)
        or (not ASKING.isdisjoint(part.co_names) and _computes_attribute(part))
        for part in nested_code(code)
    )


def _computes_attribute(code: types.CodeType) -> bool:
    """Returns whether `getattr` gets a name that may be no constant."""
    depth = 0  # of Python's stack
    pending: list[int] = []  # the depths at which such a function is
    latest: dict[int, str] = {}  # which instruction led to a depth
    for step in instructions(code):
        is_call = step.opname == ("PRECALL" if _HAS_PRECALL else "CALL")
        start = depth - (step.arg or 0)
        if is_call and pending and pending[-1] == start:
            pending.pop()
            if latest.get(start + 2) != "LOAD_CONST":
                return True
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        latest[depth] = step.opname
        if step.argval in ASKING and step.opname in _LOADING:
            pending.append(depth)
    return bool(pending)


@functools.lru_cache(maxsize=4096)
def _names_passed_on(code: types.CodeType) -> frozenset[str]:
    """Returns names of values of which code not only reads an attribute."""
    return frozenset(
        step.argval
        for part in nested_code(code)
        for step, after in itertools.pairwise(instructions(part))
        if step.opname in _LOADING
        and (
            after.opname not in ("LOAD_ATTR", "LOAD_METHOD")
            or after.argval == "__dict__"
        )
    )


class _Scan:
    """Collects what the instructions of code objects read and write."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self.assigned: set[Target] = set()
        self.edited: set[Target] = set()
        # Of each object on Python's stack; `None` if that is not known.
        self._stack: list[Target | None] = []
        # Of local variables, as assigned last. Those that nested functions use
        # are kept for these.
        self._locals: dict[str, Target | None] = {}
        self._shared: dict[str, Target | None] = dict(_BOUND)
        self._own: tuple[str, ...] = ()  # of the latter, the present code's

    def follow(self, code: types.CodeType) -> None:
        self._stack = []
        self._locals = dict(_BOUND)
        self._own = code.co_cellvars
        first = code.co_varnames[0] if code.co_argcount else ""
        if first in _SELVES and _is_method(code):
            self._locals[first] = self._shared[first] = Target(Root.SELF)
        for step in instructions(code):
            name, operation = step.argval, step.opname
            if operation == "COPY":
                self._stack.append(self._at(step.arg or 1))
            elif operation == "SWAP":
                self._swap(step.arg or 1)
            else:
                found = self._apply(operation, name)
                self._move(step, found)

    def _apply(self, operation: str, name: Any) -> Target | None:
        """Notes what an instruction does; returns what it loads."""
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.variables.add(name)
            is_type = name == "type"
            return (
                Target(Root.TYPE) if is_type else Target(Root.GLOBAL, (name,))
            )
        if operation == "STORE_DEREF" and name in self._own:
            self._shared[name] = _as_local(self._at(1))
        elif operation in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"):
            is_global = operation != "STORE_DEREF"
            root = Root.GLOBAL if is_global else Root.OUTER
            self.assigned.add(Target(root, (name,)))
        elif operation.startswith("LOAD_") and "DEREF" in operation:
            return self._shared.get(name) or Target(Root.OUTER, (name,))
        elif "_FAST" in operation:
            return self._local(operation, name)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = self._at(1)
            if owner is not None and _edits(name):
                self.edited.add(owner)
            return None if owner is None else owner.part(name)
        elif operation in ("STORE_ATTR", "DELETE_ATTR"):
            if (owner := self._at(1)) is not None:
                self.assigned.add(owner.part(name))
        elif operation == "BINARY_SUBSCR":
            owner = self._at(2)
            return None if owner is None else owner.item()
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            depth = 3 if operation == "STORE_SLICE" else 2
            if (owner := self._at(depth)) is not None:
                self.edited.add(owner)
        elif operation.startswith("CALL") and (
            self._at(1) in (Target(Root.SELF), Target(Root.CLASS))
            and Target(Root.TYPE) in self._stack[-3:-1]
        ):
            return Target(Root.CLASS)
        return None

    def _local(self, operation: str, name: Any) -> Target | None:
        """Follows what stores or loads a local variable, or two in 3.13."""
        *others, last = name if isinstance(name, tuple) else (name,)
        stored = []
        if operation == "STORE_FAST_STORE_FAST":
            stored = [*others, last]
        elif operation.startswith("STORE_FAST"):
            stored = others or [last]
        for depth, each in enumerate(stored, 1):
            self._locals[each] = _as_local(self._at(depth))
        return self._locals.get(last) if "LOAD" in operation else None

    def _at(self, depth: int) -> Target | None:
        """Returns the object at a depth of the stack; 1 is the top."""
        return self._stack[-depth] if len(self._stack) >= depth else None

    def _swap(self, depth: int) -> None:
        while len(self._stack) < depth:
            self._stack.insert(0, None)
        stack = self._stack
        stack[-1], stack[-depth] = stack[-depth], stack[-1]

    def _move(self, step: dis.Instruction, loaded: Target | None) -> None:
        """Changes the stack's depth, and puts what was loaded on top."""
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        if _HAS_PRECALL and step.opname in ("PRECALL", "CALL"):
            # The first takes the arguments away, which the second one needs.
            effect = 0 if step.opname == "PRECALL" else effect - (step.arg or 0)
        if effect > 0:
            self._stack += [None] * effect
        elif effect < 0:
            del self._stack[effect:]
        is_store = step.opname.startswith(("STORE", "DELETE", "POP"))
        leaves_top = is_store and "LOAD" not in step.opname
        if not self._stack or leaves_top or step.opname in _KEEPING:
            return
        self._stack[-1] = loaded
        if effect == _WITH_NULL and step.opname == "LOAD_GLOBAL":
            self._stack[-2] = loaded  # in Python 3.13 below the NULL


def _edits(method: str) -> bool:
    """Returns whether a method edits a container, array or tensor."""
    if method.startswith("_") or not method.endswith("_"):
        return method in _EDITING
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return hasattr(tensor, method)  # as `copy_`


def _as_local(value: Target | None) -> Target | None:
    """Returns what a local variable is once a value is assigned to it."""
    # An item may be a copy: a slice, an array's rows.
    return None if value and value.is_item else value


def _is_method(code: types.CodeType) -> bool:
    """Returns whether code was written in the body of a class."""
    where = code.co_qualname.rpartition(".")[0]
    return bool(where) and not where.endswith("<locals>")


_HAS_PRECALL = sys.version_info < (3, 12)
_WITH_NULL = 2
# Instructions that leave the top of the stack as it is.
_KEEPING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}
