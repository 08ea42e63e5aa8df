"""A program that changes its modules between epochs, at random.

Prints each value that a batch of the next epoch has otherwise, and warnings.
Arguments: a seed, and one of `KINDS`.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
import sys
import types

import changed_config as conf
import changed_values
import numpy as np

from keras_fastdata import FastPyDataset

EPOCHS = 12
_PROCESS = {"workers": 1, "use_multiprocessing": True}
KINDS = {
    "process": _PROCESS,
    "thread": {"workers": 1},
    "cached inline": {"workers": 0, "cache": "memory"},
    "cached thread": {"workers": 1, "cache": "memory"},
    "cached process": {**_PROCESS, "cache": "memory"},
}
_number = itertools.count(11).__next__
_random = random.Random(int(sys.argv[1]))


class Reads(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array([json.dumps(changed_values.read_all())])


def _replace():
    """Puts another value into a variable of the module, or of a class."""
    made = {
        "attributes": conf.Attributes(a=_number(), inner=conf.Attributes()),
        "same_attributes": conf.Attributes(a=_number()),
        "lower": conf.Lower(z=_number()),
        "items": conf.Items([_number()]),
        "sevens": conf.Sevens(a=_number()),
        "point": conf.Point(_number()),
        "frozen": conf.Frozen(_number()),
        "slotted": conf.Slotted(_number(), conf.Point(_number())),
        "root": conf.Node(_number()).add(conf.Node(_number())),
        "color": _random.choice([*conf.Color]),
        "size": conf.Size(_number()),
        "count": conf.Count(_number()),
        "array": np.arange(_number()),
        "records": np.array([(_number(), 2.0)], conf.records.dtype),
        "pair": (conf.Point(_number()), conf.Slotted(_number())),
        "power": functools.partial(pow, _number()),
        "active": _random.choice([*conf.functions]),
        "chosen": _random.choice([conf.plus_one, conf.plus_two, abs]),
        "Chosen": _random.choice([conf.Settings, conf.Derived]),
        "view": types.MappingProxyType({"a": _number()}),
    }
    name = _random.choice([*made])
    setattr(conf, name, made[name])
    return name


def _edit():
    """Edits an object of the module in place."""
    point, number = conf.Point, _number()
    edits = {
        "attributes.a": lambda: conf.attributes.update(a=number),
        "attributes.k": lambda: conf.attributes.update({f"k{number}": 1}),
        "lower": lambda: conf.lower.move_to_end(next(iter(conf.lower))),
        "lower.a": lambda: conf.lower.update(A=number),
        "items": lambda: conf.items.append(number),
        "sevens": lambda: conf.sevens.update({f"k{number}": 1}),
        "point.x": lambda: setattr(conf.point, "x", number),
        "point.more": lambda: conf.point.more.append(number),
        "slotted.x": lambda: setattr(conf.slotted, "x", number),
        "slotted.point.x": lambda: setattr(conf.slotted.point, "x", number),
        "root.value": lambda: setattr(conf.root, "value", number),
        "root.add": lambda: conf.root.add(conf.Node(number)),
        "root[0].value": lambda: setattr(
            conf.root.children[0], "value", number
        ),
        "root[0].add": lambda: conf.root.children[0].add(conf.Node(number)),
        "space.a": lambda: setattr(conf.space, "a", number),
        "space.point.x": lambda: setattr(conf.space.point, "x", number),
        "lists": lambda: conf.lists["q"].append(number),
        "tree.node": lambda: setattr(conf.tree["node"], "value", number),
        "tree.mixed[0].x": lambda: setattr(conf.tree["mixed"][0], "x", number),
        "tree.mixed[1]": lambda: conf.tree["mixed"].__setitem__(
            1, conf.Frozen(number)
        ),
        "tree[1, 2].x": lambda: setattr(conf.tree[1, 2], "x", number),
        "tree+": lambda: conf.tree.update({(number, 1): conf.Node(number)}),
        "pair[0].x": lambda: setattr(conf.pair[0], "x", number),
        "pair[1].point.x": lambda: setattr(conf.pair[1].point, "x", number),
        "sets": lambda: conf.sets.add(frozenset([number])),
        "queue": lambda: conf.queue.append(number),
        "queue.x": lambda: [
            setattr(each, "x", number)
            for each in conf.queue
            if isinstance(each, point)
        ],
        "chain": lambda: conf.chain.maps[1].update(b=number),
        "array": lambda: conf.array.__setitem__(1, number),
        "records": lambda: conf.records["a"].__setitem__(0, number),
        "objects": lambda: conf.objects.__setitem__(1, point(number)),
        "objects.x": lambda: setattr(conf.objects[0], "x", number),
        "functions": lambda: conf.functions.update(
            one=_random.choice([conf.plus_one, conf.plus_two])
        ),
        "functions.pow": lambda: conf.functions.update(
            pow=functools.partial(pow, number)
        ),
        "Settings.scale": lambda: setattr(conf.Settings, "scale", number),
        "Settings.sizes": lambda: conf.Settings.sizes.append(number),
        "Settings.point": lambda: setattr(
            conf.Settings, "point", point(number)
        ),
        "Settings.point.x": lambda: setattr(conf.Settings.point, "x", number),
        "Inner.depth": lambda: setattr(conf.Settings.Inner, "depth", number),
        "Derived.scale": lambda: setattr(conf.Derived, "scale", number),
        "single": lambda: setattr(conf.Single(), "scale", number),
        "keyed": lambda: conf.keyed.__setitem__("a", number),
        "write": lambda: conf.write(number),
        "late.value": lambda: setattr(conf.late(), "value", number),
        "late[0].value": lambda: setattr(
            conf.late().children[0], "value", number
        ),
        "late_items": lambda: conf.late_items().update(a=number),
    }
    name = _random.choice([*edits])
    edits[name]()
    return name


def main():
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    changes = []
    for dataset in [Reads(**KINDS[sys.argv[2]])]:
        for epoch in range(EPOCHS):
            changes.append(
                [
                    _random.choice([_edit, _edit, _replace])()
                    for _ in range(_random.choice([1, 1, 2, 3]))
                ]
            )
            expected = changed_values.read_all()
            for batch in dataset:
                seen = json.loads(str(batch[0]))
                for name, value in expected.items():
                    if seen[name] != value:
                        print(f"epoch {epoch}, after {changes[-3:]}: {name}")
                        print(f"    {value}\n    {seen[name]}")
        dataset.close()


if __name__ == "__main__":
    main()
