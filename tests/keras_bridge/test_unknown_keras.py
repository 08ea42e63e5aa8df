"""Whatever has changed in Keras, `fit` gets every batch, once and in order."""

from __future__ import annotations

import itertools
import json

import keras
import keras_changes
import pytest

from keras_fastdata.keras_bridge import keras_internals

# Each a `fit`: one that builds its model, one with steps, one with callbacks
# and validation.
SIX = "0 1 2 3 4 5"
BATCHES = [f"{SIX} {SIX}", SIX, f"{SIX} {SIX} {SIX} {SIX}"]


def _train_under(zygote, *names):
    """What becomes of trainings, in a process that has not imported us."""
    done = zygote.run(keras_changes.__file__, *names)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:1] == "{"]
    return [json.loads(line) for line in lines]


def _check(found):
    name = found["name"]
    feature, *_ = keras_changes.CHANGES[name]
    assert found["batches"] == BATCHES, name
    if feature is None:
        assert found["off"] == [], name
        assert found["told"] == [], name
        return
    assert feature in found["off"], name
    assert feature == "LOADER" or found["off"] == [feature], name
    # One warning, with the version, the thing and what is off.
    (told,) = found["told"]
    assert keras.__version__ in told, name
    assert "keras" in told.partition(": ")[2], name
    assert "so " in told, name


def test_training_goes_on_without_what_one_feature_needs(zygote):
    # Some, one after the other in one process; the others take long.
    some = ["nothing", "adapter moved", "epoch iterator"]
    found = _train_under(zygote, *some)
    for each in found:
        _check(each)
    assert [each["name"] for each in found] == some


def test_the_keras_that_is_here_has_all_that_is_used_as_it_was_seen():
    here = [int(part) for part in keras.__version__.split(".")[:2]]
    for use in itertools.chain(*keras_internals.USES.values()):
        assert use.fault() == "", use.thing
        first, last = (
            [int(part) for part in version.split(".")]
            for version in use.seen_in
        )
        assert first <= here <= last, use.thing


@pytest.mark.parametrize("backend", ["numpy", "openvino"])
def test_nothing_is_expected_of_a_fit_that_the_backend_does_not_have(
    monkeypatch, backend
):
    use = keras_internals.Use("keras:Model.fit", mentions="no_such_local")
    assert use.fault() == "keras.Model.fit has no `no_such_local`"
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    assert use.fault() == ""


@pytest.mark.long
@pytest.mark.backend
@pytest.mark.parametrize("name", keras_changes.names_here())
def test_training_goes_on_in_a_process_of_its_own(name, zygote):
    (found,) = _train_under(zygote, name)
    _check(found)
