"""Classes that travel to worker processes by value, and what uses them.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import abc
import enum
import typing

import numpy as np

from keras_fastdata import FastPyDataset


def enums():
    """Enums that travel by value, for they are made in a function."""

    class WithInit(enum.Enum):
        CAT = ("c", 3)
        DOG = ("d", 5)

        def __init__(self, code, legs):
            self.code, self.legs = code, legs

    class WithNew(enum.IntEnum):
        LOW = 3
        HIGH = 5

        def __new__(cls, number):
            member = int.__new__(cls, number * 2)
            member._value_ = number
            return member

    class Named(str, enum.Enum):  # noqa: UP042 - as people write it
        A = ("a", "first")
        B = ("b", "second")

        def __new__(cls, text, label):
            member = str.__new__(cls, text.upper())
            member._value_, member.label = text, label
            return member

    class Aliased(enum.Enum):
        CAT = 1
        KITTEN = 1  # noqa: PIE796
        DOG = 2

    class Flags(enum.Flag):
        R = 1
        W = 2
        RW = 3

    class Numbers(enum.IntFlag):
        A = 1
        B = 4

    class Base(enum.Enum):
        def __init__(self, *sizes):
            self.size = sum(sizes)

    class Derived(Base):
        SMALL = 1, 2
        LARGE = 30, 40

    class Auto(enum.StrEnum):
        ONE = enum.auto()
        TWO = enum.auto()

    class Actions(enum.Enum):
        DOUBLE = enum.member(lambda value: value * 2)

        def __call__(self, value):
            return self.value(value)

    class Described(enum.Enum):
        A = 1, "about A"

        def __new__(cls, number, text):
            member = object.__new__(cls)
            member._value_, member.__doc__ = number, text
            return member

    class Meta(abc.ABCMeta, enum.EnumType):
        pass

    class Interface(abc.ABC):
        @abc.abstractmethod
        def double(self):
            """Returns twice the value."""

    class Abstract(Interface, enum.Enum, metaclass=Meta):
        A = 4

        def double(self):
            return 2 * self.value

    late = Actions, Described, Abstract
    return (
        WithInit,
        WithNew,
        Named,
        Aliased,
        Flags,
        Numbers,
        Derived,
        Auto,
        late,
    )


def of_enums(kinds, index):
    """What differs between members that are alike at first sight."""
    *kinds, (actions, described, abstract) = kinds
    text = [list(map(str, kind.__members__.items())) for kind in kinds]
    with_init, with_new, named, aliased, flags, numbers, derived, _ = kinds
    text += [actions.DOUBLE(4), described.A.__doc__, abstract.A.double()]
    text += [(one.code, one.legs, one.value) for one in with_init]
    text += [(int(one), one.value, with_new(one.value)) for one in with_new]
    text += [(str.lower(one), one.value, one.label) for one in named]
    text += [aliased.KITTEN is aliased.CAT, aliased["KITTEN"].name]
    text += [flags.RW is flags.R | flags.W, ~flags.R, flags(2)]
    text += [numbers.A | numbers.B, int(numbers(5)), numbers(4) is numbers.B]
    text += [one.size for one in derived]
    return np.frombuffer(repr(text).encode(), "uint8")


def hooked():
    """A registry of classes, all of which travel by value."""

    class Plugin:
        count = 0
        names = []

        def __init_subclass__(cls, weight, **kwargs):
            super().__init_subclass__(**kwargs)
            Plugin.count += weight
            Plugin.names.append(cls.__name__)
            cls.weight = weight

    class Meta(type):
        made = []

        def __new__(meta, name, bases, namespace, tag):
            return super().__new__(meta, name, bases, namespace | {"tag": tag})

        def __init__(cls, name, bases, namespace, tag):
            super().__init__(name, bases, namespace)
            Meta.made.append(name)

    class First(Plugin, weight=5):
        pass

    class Second(First, weight=7):
        pass

    class Third(metaclass=Meta, tag="third"):
        pass

    return Plugin, Meta, First, Second, Third


def of_hooked(classes, index):
    """What the registry has counted."""
    plugin, meta, *subclasses = classes

    class Local(plugin, weight=1):
        pass

    names = [plugin.names[:2], len(plugin.names), meta.made]
    tags = [Local.weight, subclasses[1].weight, subclasses[2].tag]
    text = f"{names} {tags} {plugin.count}"
    plugin.count, plugin.names = 12, ["First", "Second"]
    return np.frombuffer(text.encode(), "uint8")


Item = typing.TypeVar("Item")


def generic():
    """Classes of which some bases are not classes, and travel by value."""

    class Box(typing.Generic[Item]):
        value = 1

    class Boxes(Box[int], typing.Sized):
        def __len__(self):
            return 2

    class Numbers(list[int]):
        pass

    class Named(typing.NamedTuple):
        value: int = 3

    class Keys(typing.TypedDict):
        value: int

    @typing.runtime_checkable
    class Shape(typing.Protocol[Item]):
        def area(self) -> Item: ...

    class MoreKeys(Keys):
        other: int

    return Box, Boxes, Numbers, Named, MoreKeys, Shape


def of_generic(classes, index):
    """What objects of these classes are and say."""
    box, boxes, numbers, named, keys, shape = classes
    return np.array(
        [
            *(box[str]().value, boxes().value, len(boxes()), *numbers([4])),
            *(named().value, named(5)[0], keys(value=6)["value"]),
            *(isinstance(boxes(), shape), index),
        ]
    )


def of_slots(kinds, index):
    """The slots of objects, and whether they have a `__dict__`, too."""
    made = [kinds[0](), *kinds[1:]]
    made[0].y = index
    return np.array(
        [made[0].y, made[1].x, *(hasattr(m, "__dict__") for m in made)]
    )


class Wraps:
    """Has the attributes of another object."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


class WrapsWithSlots(Wraps):
    __slots__ = ("more",)


class WrapsWithItems(Wraps, dict):
    pass


def of_wrapping(thing, index):
    """What a list in an object, and the object itself, have."""
    items = [*thing.items()] if isinstance(thing, dict) else []
    return f"{thing.count('a')} {thing.more} {sorted(vars(thing))} {items}"


class WrappingDataset(Wraps, FastPyDataset):
    def __init__(self, wrapped, **kwargs):
        FastPyDataset.__init__(self, **kwargs)
        self.wrapped = wrapped

    def __len__(self):
        return self.count("a") + 1

    def __getitem__(self, index):
        return np.array(self.more * index)
