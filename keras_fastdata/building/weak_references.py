"""Finds the user's objects behind weak references."""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import Any

from keras_fastdata._modules import is_users_class, packages_of

# Packages of the classes to which no weak reference is followed: such an object
# has random generators and values that are not for the batches.
_OTHERS = {"keras", "keras_fastdata", "tensorflow", "torch"}


def is_weak(value: Any) -> bool:
    """Returns whether a value is a weak reference, or a proxy of an object."""
    return type(value) in weakref.ProxyTypes or isinstance(value, weakref.ref)


def referent_of(reference: Any) -> Any:
    """Returns the object that a weak reference or a proxy refers to.

    `None` if the object is gone, or if it is not the user's, or a dataset or a
    model.
    """
    referent: Any = None
    if isinstance(reference, weakref.ref):
        referent = reference()
    else:
        with contextlib.suppress(AttributeError, ReferenceError):
            referent = reference.__repr__.__self__
    is_method = isinstance(referent, types.MethodType)
    kind: Any = type(referent.__self__ if is_method else referent)
    is_followed = is_users_class(kind) and _OTHERS.isdisjoint(packages_of(kind))
    return referent if is_followed else None
