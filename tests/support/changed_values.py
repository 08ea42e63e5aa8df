"""What a dataset reads of `changed_config`, also by names of its own."""

from __future__ import annotations

import changed_config as conf
from changed_config import (
    Derived,
    Settings,
    Single,
    attributes,
    items,
    keyed,
    lower,
    point,
    root,
)


def _tree(node):
    parent = None if node.parent is None else node.parent.value
    return node.value, parent, [*map(_tree, node.children)]


def read_all():
    """All values, as a dict of texts."""
    inner = Settings.Inner
    node, mixed = conf.tree["node"], conf.tree["mixed"]
    found = {
        "attributes": (conf.attributes, attributes, conf.same_attributes),
        "lower": ([*conf.lower.items()], [*lower.items()]),
        "items": (conf.items, items),
        "sevens": (dict(conf.sevens), conf.sevens["a"], conf.sevens["q"]),
        "points": (conf.point, point, conf.frozen, conf.slotted),
        "root": (_tree(conf.root), _tree(root)),
        "color": (conf.color, conf.Color(conf.color.value), [*conf.Color]),
        "size": (conf.size, conf.count + 1),
        "space": (conf.space.a, conf.space.point),
        "lists": dict(conf.lists),
        "tree": (len(conf.tree), _tree(node), mixed, conf.tree[1, 2]),
        "pair": conf.pair,
        "sets": sorted(map(sorted, conf.sets)),
        "queue": conf.queue,
        "chain": sorted(conf.chain.items()),
        "arrays": (conf.array.tolist(), conf.records.tolist()),
        "objects": [*conf.objects],
        "functions": (conf.power(3), conf.functions[conf.active](5)),
        "chosen": (conf.chosen(4), conf.Chosen.scale, conf.Chosen.sizes),
        "names": sorted(conf.functions),
        "settings": (Settings.scale, Settings.sizes, Settings.point),
        "derived": (Derived.scale, Derived.sizes, inner.depth),
        "single": (Single().scale, conf.single.scale),
        "keyed": (conf.keyed["a"], keyed["a"]),
        "view": dict(conf.view),
        "closure": conf.read(),
        "late": (_tree(conf.late()), dict(conf.late_items())),
    }
    return {name: repr(value) for name, value in found.items()}
