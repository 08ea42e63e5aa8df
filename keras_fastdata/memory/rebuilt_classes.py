"""Makes classes in a worker again as they are in the trainer.

cloudpickle sends a class of `__main__`, or one made in a function, by value. In
the worker, the class is made without attributes, which then are set. Three
things would go wrong:

- A class would have no slots, and each of its objects a `__dict__`.
- Hooks of classes that were made again, such as `__init_subclass__`, would run
  once more, and without the keywords of the class. They are absent meanwhile.
- Enums are made from names and values alone. Members would lack what `__init__`
  and `__new__` of the enum gave them, and aliases would not be members. Here,
  each member gets the underlying value and the attributes of the original one.
"""

from __future__ import annotations

import contextlib
import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_fastdata._modules import is_users_class
from keras_fastdata.memory import class_refs

Reduced = tuple[Any, ...]


def completed(cls: type, reduced: Reduced) -> Reduced:
    """Completes the parts into which cloudpickle takes a class apart.

    Args:
        cls: The class.
        reduced: What cloudpickle's `reducer_override` returns for it.
    """
    if isinstance(cls, enum.EnumType):
        reduced = _with_members(cls, reduced)
    make, args, *rest = reduced
    # Pickle adds it to the class of each object that it has pickled.
    rest[0][0].pop("__slotnames__", None)
    if typing.is_typeddict(cls):
        # In Python 3.11, one that inherits from others has `dict` as its base.
        kind, name, _, *others = args
        args = kind, name, (typing.TypedDict,), *others
    bases = _bases_in(args)
    # `NamedTuple` would refuse the slots that it makes itself.
    if "__slots__" in vars(cls) and typing.NamedTuple not in bases:
        kind, name, bases, namespace, *others = args
        namespace = {**namespace, "__slots__": _slots_of(cls)}
        args = kind, name, bases, namespace, *others
    return _make_without_hooks, (make, args), *rest


def _slots_of(cls: type) -> list[str]:
    """Returns the names in a class's `__slots__`, which may be an iterator."""
    own = vars(cls).items()
    kinds = types.MemberDescriptorType, types.GetSetDescriptorType
    return [name for name, value in own if isinstance(value, kinds)]


# -- hooks --------------------------------------------------------------------


@contextlib.contextmanager
def without(hooks: Iterable[tuple[type, str]]) -> Iterator[None]:
    """Removes methods of classes for the duration of a `with` block."""
    with contextlib.ExitStack() as removed:
        for cls, name in hooks:
            removed.callback(type.__setattr__, cls, name, vars(cls)[name])
            type.__delattr__(cls, name)
        yield


def setters(cls: type) -> Iterator[tuple[type, str]]:
    """Yields the users' methods that setting a class's attributes calls."""
    kind: Any = type(cls)
    for meta in kind.__mro__:
        if is_users_class(meta):
            yield from (
                (meta, name)
                for name in ("__setattr__", "__delattr__")
                if name in vars(meta)
            )


def _make_without_hooks(make: Callable[..., type], args: Any) -> type:
    """Makes a class, while no hook of classes that were made again runs.

    A class that was made for an earlier message is not made again: hooks of
    modules may refuse a second class of its name.
    """
    *_, tracker_id, _ = args
    with without(_hooks(args)):
        made = class_refs.known_class(tracker_id) or make(*args)
        bases = _bases_in(args)
        if all(isinstance(base, type) for base in bases):
            bases = bases or (object,)
            # It may be the class of an earlier message. A metaclass may have
            # added bases that cannot be replaced.
            if made.__bases__ != bases:
                with contextlib.suppress(TypeError):
                    made.__bases__ = bases
        return made


def _hooks(args: Any) -> Iterator[tuple[type, str]]:
    """Yields the hooks that making a class would run, with their classes."""
    bases = types.resolve_bases(_bases_in(args))
    metas = {type(base): None for base in bases}
    if isinstance(args[0], type):
        metas[args[0]] = None
    hooks = (
        (bases, ("__init_subclass__",)),
        (metas, ("__prepare__", "__new__", "__init__")),
    )
    for classes, names in hooks:
        for cls in dict.fromkeys(c for one in classes for c in one.__mro__):
            if class_refs.tracker_id(cls) is not None:
                yield from ((cls, name) for name in names if name in vars(cls))


def _bases_in(args: Any) -> tuple[Any, ...]:
    """Returns the bases among the arguments that make a class.

    `Generic[int]` and the like are among them, which stand for classes.
    """
    return next(part for part in args if isinstance(part, tuple))


# -- enums --------------------------------------------------------------------


def _with_members(cls: Any, reduced: Reduced) -> Reduced:
    """Adds an enum's members and their attributes to its parts."""
    _, args, (attributes, slots), *rest, set_state = reduced
    bases, name, qualname, _, *others = args
    members = cls.__members__
    if not members:
        return reduced
    underlying = []
    for member in members.values():
        read = getattr(cls._member_type_, "__getnewargs__", None)
        underlying.append((member.value, read(member) if read else ()))
    dictionary = {
        "__new__": MemberMaker(underlying),
        "__init__": _no_init,
    } | {name: enum.member(one.value) for name, one in members.items()}
    own = {
        name: {k: v for k, v in vars(member).items() if not _is_enums(k)}
        for name, member in members.items()
    }
    attributes = {k: v for k, v in attributes.items() if k not in members}
    values = {name: member.value for name, member in members.items()}
    state = attributes, slots, own, values, set_state
    args = type(cls), bases, name, qualname, dictionary, *others
    return _make_enum, args, state, *rest, _set_state


def _make_enum(
    meta: Any,
    bases: tuple[type, ...],
    name: str,
    qualname: str,
    dictionary: dict[str, Any],
    module: str,
    *rest: Any,
) -> Any:
    """Makes an enum, as cloudpickle does, but with a metaclass of its own."""
    namespace = meta.__prepare__(name, bases)
    for key, value in dictionary.items():
        namespace[key] = value
    made = meta.__new__(meta, name, bases, namespace)
    made.__module__, made.__qualname__ = module, qualname
    return class_refs.tracked(made, rest[0])


class MemberMaker:
    """Makes the members of an enum, one after the other.

    It is the enum's `__new__` while the enum is made.
    """

    def __init__(self, underlying: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self._underlying = underlying
        self._left = iter(underlying)

    def __reduce__(self) -> Reduced:
        return MemberMaker, (self._underlying,)

    def __call__(self, cls: Any, *_: Any) -> Any:
        value, args = next(self._left)
        # The class of the underlying values, such as `int`, or `object`.
        member = cls._member_type_.__new__(cls, *args)
        member._value_ = value
        return member


def _no_init(member: Any, *_: Any) -> None:
    """Takes the place of the enum's `__init__` while the enum is made."""


def _set_state(
    cls: Any, state: tuple[Any, Any, Any, Any, Callable[..., Any]]
) -> None:
    """Gives an enum and its members the original's attributes."""
    attributes, slots, own, values, set_state = state
    if cls.__dict__.get("__init__") is _no_init:
        del cls.__init__
    if isinstance(cls.__dict__.get("__new_member__"), MemberMaker):
        del cls.__new_member__
    set_state(cls, (attributes, slots))
    for name, value in values.items():
        member = cls[name]
        vars(member).update(own[name])
        member._value_ = value  # of an earlier message, if the enum was there
        with contextlib.suppress(TypeError):  # cannot be hashed
            cls._value2member_map_.setdefault(value, member)


def _is_enums(name: str) -> bool:
    """Returns whether `enum` itself sets a member's attribute of this name."""
    is_dunder = name.startswith("__")
    is_sunder = name.startswith("_") and name.endswith("_") and not is_dunder
    return is_sunder or name == "__objclass__"
