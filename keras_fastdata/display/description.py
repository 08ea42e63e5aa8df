"""Describes a dataset in a line of text, and in a table for notebooks.

Nothing here builds a batch, starts a worker, raises, or waits for a lock of the
package. A debugger or a logger may ask for a description at any time: of a
dataset that is being made, in a worker, or while another thread trains.
"""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._dataset_internals import own_loader
from keras_fastdata.building import interface
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.engine.loader import Description
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import Shard
from keras_fastdata.metrics import formatting


def is_default(method: Any) -> bool:
    """Returns whether a bound `__repr__` is the default of `object`."""
    return getattr(method, "__objclass__", None) is object


def dataset_text(dataset: Any) -> str:
    """Describes a dataset in one line of text.

    The line has the class, length, batch, workers, cache and shard.
    """
    facts = _facts(dataset)
    length, batch = facts.pop("length", ""), facts.pop("batch", "")
    parts = [f"{length or 'batches'} of {batch}" if batch else length]
    parts += [
        text if name == "workers" else f"{name} {text}"
        for name, text in facts.items()
    ]
    text = "; ".join(filter(None, parts))
    return f"<{name_of(dataset)}: {text}>" if text else f"<{name_of(dataset)}>"


def dataset_html(dataset: Any) -> str:
    """Describes a dataset in HTML, with the same content as `dataset_text`."""
    table = formatting.html_table(_facts(dataset).items(), align="left")
    return f"<div><b>{html.escape(name_of(dataset))}</b>{table}</div>"


def name_of(dataset: Any) -> str:
    """Returns the name to show for a dataset, such as "accelerate(Images)"."""
    wrapped = vars(dataset).get("_fastdata_wrapped")
    if wrapped is not None:
        return f"accelerate({type(wrapped).__name__})"
    return interface.name_of(dataset)


def _facts(dataset: Any) -> dict[str, str]:
    """Returns a dataset's known properties as a dict of names and texts."""
    found = vars(dataset).get(PRIVATE)
    if found is None:  # its constructor has not come so far
        return _length(dataset, None)
    loader = own_loader(dataset)
    if loader is not None:
        known = loader.description()
    else:
        # A copy has the internals of its original, or their settings alone.
        known = Description(getattr(found, "settings", found))
    facts = _length(dataset, known)
    if known.structure:
        facts["batch"] = known.structure
    given = getattr(found, "settings", found)
    facts["workers"] = _workers(dataset, known.settings, given)
    if known.settings.cache is not None:
        facts["cache"] = repr(known.settings.cache)
    shard = known.shard
    if shard.count == 1 and isinstance(known.settings.shard, tuple):
        shard = Shard(*known.settings.shard)
    if shard.count > 1:
        facts["shard"] = f"{shard.index + 1} of {shard.count}"
    return facts


def _length(dataset: Any, known: Description | None) -> dict[str, str]:
    """Returns a dict with the number of batches, or {} if `__len__` raises.

    The user's code is not asked in the midst of an epoch: it may assign
    attributes, and that would look like a change of the dataset.
    """
    if known is not None and known.schedule is not None:
        total = known.schedule.total
    else:
        try:
            total = interface.length_of(dataset)
        except Exception as error:  # of the user's `__len__`
            raise_of_handler(error)
            return {}
    unknown = "unknown number of batches"
    text = unknown if total is None else formatting.count(total, "batch")
    return {"length": text}


def _workers(dataset: Any, settings: Settings, given: Settings) -> str:
    """Returns the kind and the number of the workers, such as "2 threads"."""
    plan = vars(dataset).get("_fastdata_plan")  # of a `GeneratorDataset`
    if plan is not None:
        settings = dataclasses.replace(settings, workers=plan.workers)
    text = formatting.workers(settings.kind, settings.count)
    return f'{text} (workers="auto")' if given.workers == "auto" else text
