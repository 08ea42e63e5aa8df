"""Defines and checks the result of `state_dict`.

A batch is a function of the dataset, seed, epoch and index, so that a place in
the order is all there is to know. Only what epoch hooks have done to the
dataset is more than that: hooks are seeded by their number, so they are run
again, and a digest tells whether the dataset has become what it was.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_fastdata._validation import integer
from keras_fastdata.building.interface import EPOCH_HOOKS
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.errors import LoaderError

VERSION = 1
_OPTIONAL = "next_epoch", "epoch_batches"  # left out where they are `None`
_DEPTH = 6  # of objects within objects that a digest covers
_PLAIN = (bool, int, float, complex, str)
_MOST_BYTES = 1 << 26  # of an array that are looked at, about
_MANY = 1000  # items that are looked at as an array, if they make one


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a dataset: the position of its next batch.

    Attributes:
        epoch: The epoch of the next batch.
        position: How many batches come before that one in its epoch.
        num_batches: Length of an epoch, or `None`.
        shuffle: Whether its order is drawn; `None` before it has begun.
        within: Whether Keras was between the begin and the end of an epoch,
            and so whether the end hook was still to come.
        hooks: The epoch hooks that have run, each as its name and epoch.
        digest: The digest of the dataset after them; empty without hooks.
        next_epoch: Number of the epoch that begins after this one; `None`:
            `epoch` + 1. It is larger where another epoch has begun meanwhile,
            such as that of an evaluation.
        epoch_batches: Length of the epoch of the next batch; `None`:
            `num_batches`. It differs where a hook has changed the length since
            the epoch began.
    """

    seed: int
    epoch: int
    position: int
    num_batches: int | None
    shuffle: bool | None
    within: bool = False
    hooks: tuple[tuple[str, int], ...] = ()
    digest: str = ""
    next_epoch: int | None = None
    epoch_batches: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the state as a dict that can be stored as JSON."""
        state = {"version": VERSION, **dataclasses.asdict(self)}
        state["hooks"] = [list(hook) for hook in self.hooks]
        for name in _OPTIONAL:
            if state[name] is None:
                del state[name]
        return state

    @classmethod
    def from_dict(
        cls, state: Any, dataset: str, also: Collection[str] = ()
    ) -> State:
        """Creates a state from the result of `as_dict`.

        The user may pass anything as `state`. `also` names fields that states
        of this dataset have besides.

        Raises:
            ValueError: A field is missing, unknown or invalid.
        """
        if not isinstance(state, Mapping) or "version" not in state:
            raise ValueError(
                f"This is no state of a dataset: {state!r:.200}. Pass what "
                f"`state_dict()` of a {dataset} has returned."
            )
        version = state["version"]
        if type(version) is not int or version != VERSION:
            raise ValueError(
                f"The state has version {version!r:.200}, and this "
                f"keras_fastdata knows version {VERSION}."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        known = {"version", *names, *also}
        if missing := sorted(known - set(_OPTIONAL) - set(state)):
            raise ValueError(f"The state lacks: {', '.join(missing)}.")
        if unknown := [name for name in state if name not in known]:
            raise ValueError(
                f"The state of a {dataset} has no field {unknown[0]!r:.200}. "
                f"It has: {', '.join(sorted(known))}. Take out what you have "
                "added to it."
            )
        fields = {
            name: _checked(name, state[name])
            for name in [*names, *also]
            if name in state
        }
        name = "epoch_batches" if "epoch_batches" in fields else "num_batches"
        if None is not fields[name] < fields["position"]:
            raise ValueError(
                f"`position` of the state must be at most its `{name}`, "
                f"{fields[name]}. Received: {fields['position']}"
            )
        return cls(**{name: fields[name] for name in names if name in fields})

    def check(
        self,
        dataset: str,
        seed: int | None,
        hooks: tuple[tuple[str, int], ...],
        is_drawn: bool,
    ) -> None:
        """Raises `ValueError` if a dataset cannot resume from this state.

        Args:
            dataset: The dataset's class name.
            seed: The dataset's seed; `None` if any seed may be set.
            hooks: The hooks that have run.
            is_drawn: Whether the user has passed no seed.
        """
        if seed is not None and seed != self.seed:
            has = f"has seed={seed}. Pass that one, or none, which takes over "
            has += "the state's."
            if is_drawn:
                has = "has drawn another for its epoch hooks, which have run "
                has += f"already. Pass `seed={self.seed}` to its constructor."
            raise ValueError(
                f"The state is of a dataset with seed={self.seed}, and this "
                f"{dataset} {has}"
            )
        # Keras may end an epoch before the first one, to build the model: the
        # numbers of the epochs are others then.
        before = [name for name, _ in self.hooks[: len(hooks)]]
        if [name for name, _ in hooks] != before:
            raise ValueError(
                f"The epoch hooks of this {dataset} have run as "
                f"{_listed(hooks)}; those of the state as "
                f"{_listed(self.hooks)}. Resume with a new dataset and a new "
                "model, on the same backend of Keras, with the same hooks."
            )

    def check_length(self, dataset: str, num_batches: int | None) -> None:
        """Raises `ValueError` if `num_batches` differs from the state's."""
        if num_batches != self.num_batches:
            raise ValueError(
                f"The state is of a dataset of {self.num_batches} batches an "
                f"epoch, and this {dataset} has {num_batches}. Give it the "
                "data and the batch size it had. A length that depends on "
                "`self.epoch` cannot be resumed: set it in `on_epoch_end`."
            )

    def check_order(self, dataset: str, shuffle: bool) -> None:
        """Raises `ValueError` if `shuffle` differs from the state's."""
        if self.shuffle not in (None, shuffle):
            raise ValueError(
                f"The state is of an epoch with shuffle={self.shuffle}, and "
                f"this one of {dataset} has shuffle={shuffle}. Pass "
                "the same `shuffle`, to the dataset or to `fit`."
            )

    def check_digest(self, dataset: str, digest: str) -> None:
        """Raises `LoaderError` if `digest` differs from the state's digest."""
        if digest != self.digest:
            raise LoaderError(
                f"The {len(self.hooks)} calls of epoch hooks that the state "
                f"knows of were repeated, but {dataset} is not what it was: "
                "its attributes differ. Hooks can be repeated if they depend "
                "on the dataset, on `self.rng`, `np.random` or `random`, and "
                "on `self.epoch`; and if nobody else assigns attributes. "
                "`__getitem__` may change others than the hooks, such as "
                "`self.cache[i] = x`. What it passes to a function that "
                "changes it (`np.add(a, b, out=self.x)`) counts, unless "
                "processes build."
            )


def at_end(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state at the end of an epoch, before `on_epoch_end` runs."""
    end = {**state, "epoch": state["epoch"] + 1, "position": 0}
    end.pop("epoch_batches", None)
    next_epoch = end.pop("next_epoch", None)
    return end if next_epoch is None else {**end, "epoch": next_epoch}


def _checked(name: str, value: Any) -> Any:
    """Converts one field of a state; raises `ValueError` if invalid."""
    allowed, read = _FIELDS[name]
    try:
        return read(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` of the state must be {allowed}. Received: "
            f"{value!r:.200} (of type {type(value).__name__})"
        ) from None


def _count(value: Any, least: int = 0) -> int:
    number = integer("", value, least=least)
    if number >= 1 << 63:
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def _hooks(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    hooks = tuple((name, _count(epoch)) for name, epoch in value)
    if any(name not in EPOCH_HOOKS for name, _ in hooks):
        raise ValueError
    return hooks


def _hexadecimal(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError
    return value


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_DIGEST = re.compile("([0-9a-f]{32})?")
_INTEGER = "an integer of at least 0"
_COUNT = f"{_INTEGER} and below 2**63"

# What each field may be, in words, and what reads it.
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "seed": (_INTEGER, functools.partial(integer, "seed", least=0)),
    "epoch": (_COUNT, _count),
    "position": (_COUNT, _count),
    "num_batches": (f"{_COUNT}, or None", _or_none(_count)),
    "shuffle": ("True, False or None", _or_none(_truth)),
    "within": ("True or False", _truth),
    "hooks": (
        'a list of pairs of "on_epoch_begin" or "on_epoch_end" and an epoch',
        _hooks,
    ),
    "digest": ("32 hexadecimal digits, or empty", _hexadecimal),
    "next_epoch": (_COUNT, _count),
    "epoch_batches": (_COUNT, _count),
    "num_shards": ("an integer of at least 1", lambda n: _count(n, least=1)),
}


def _listed(hooks: tuple[tuple[str, int], ...]) -> str:
    names = [name for name, _ in hooks]
    return f"{', '.join(names[:3]) or 'none'}{', ...' if names[3:] else ''}"


def digest(dataset: Any, names: Collection[str]) -> str:
    """Returns a hash of the values of some attributes of a dataset.

    Numbers, texts, arrays, and containers of them count; other objects, such
    as may be opened on first use, do not. Of a memory map the file's name
    counts, and of an array of more than 64 MB a part.
    """
    attributes = vars(dataset)
    known = {k: attributes.get(k) for k in names if k != PRIVATE}
    return hash_of(_parts_of(known, _DEPTH)).hex()


def hash_of(parts: Iterable[Any]) -> bytes:
    """Returns a hash of the concatenated bytes of all parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.digest()


def _parts_of(value: Any, depth: int) -> Iterator[Any]:
    """Yields the bytes of a value for computing a digest."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        yield f"{value!r};".encode("utf-8", "surrogatepass")
    elif isinstance(value, (bytes, bytearray)):
        yield value
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape};".encode()
        if isinstance(value, np.memmap):
            yield f"{value.filename};".encode()
            return
        part = value.reshape(-1)[:: 1 + value.nbytes // _MOST_BYTES]
        yield np.ascontiguousarray(part).view("uint8").data
    elif depth == 0:
        return
    elif isinstance(value, (list, tuple, np.ndarray)):
        if (array := _as_array(value)) is not None:
            yield from _parts_of(array, depth)
            return
        yield f"[{len(value)};".encode()
        for item in value:
            yield from _parts_of(item, depth - 1)
    elif isinstance(value, (set, frozenset)):
        plain = sorted(repr(v) for v in value if isinstance(v, _PLAIN))
        yield f"{{{len(value)}{plain};".encode("utf-8", "replace")
    elif isinstance(value, Mapping):
        keys = (key for key in value if isinstance(key, _PLAIN))
        for key in sorted(keys, key=repr):
            yield f"{key!r}:".encode("utf-8", "surrogatepass")
            yield from _parts_of(value[key], depth - 1)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns a long list of scalars as an array; `None` for other values."""
    if len(value) >= _MANY and not isinstance(value, np.ndarray):
        kinds = set(map(type, value))
        if len(kinds) == 1 and kinds <= {int, float, str, bool}:
            array = np.asarray(value)
            return None if array.dtype.hasobject else array
    return None
