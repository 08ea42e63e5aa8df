"""An exception of `__getitem__` reaches the caller as what it was."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

import keras_fastdata
from keras_fastdata import FastPyDataset, LoaderError, WorkerDiedError

KINDS = {
    "process": {"workers": 2, "use_multiprocessing": True},
    "thread": {"workers": 2},
    "inline": {"workers": 0},
}
WHERE = {
    "process": r"worker \d \(pid \d+\)",
    "thread": r"worker thread \d",
    "inline": "the calling thread",
}
BROKEN = 2  # the batch that cannot be built
THIS_FILE = __file__

pytestmark = pytest.mark.timeout(60)


# -- exceptions of every make -------------------------------------------------

RAISERS = {}


def raises(function):
    RAISERS[function.__name__] = function
    return function


class TwoArguments(Exception):
    def __init__(self, path, code):
        super().__init__(f"{path} has code {code}")
        self.path = path
        self.code = code


class KeywordsOnly(Exception):
    def __init__(self, *, path):
        self.path = path

    def __str__(self):
        return f"cannot read {self.path}"


class MissingSample(OSError):
    def __init__(self, path, tries):
        super().__init__(errno.ENOENT, "no such sample", path)
        self.tries = tries


class HoldsLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.code = 7


class Counted(Exception):
    made = 0

    def __init__(self, text):
        super().__init__(text)
        Counted.made += 1


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("it has no text")


class Irreducible(Exception):
    def __reduce__(self):
        raise RuntimeError("it cannot be reduced")


class OwnReduction(Exception):
    def __init__(self, path, code):
        super().__init__(f"{path} has code {code}")
        self.path = path
        self.code = code

    def __reduce__(self):
        return type(self), (self.path, self.code)


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


class ReadOnly(Exception):
    def __init__(self, text, code):
        super().__init__(text)
        vars(self)["code"] = code

    def __setattr__(self, name, value):
        raise AttributeError("it is read-only")


class Falsy(Exception):
    def __len__(self):
        return 0


class OneWay:
    """Can be pickled, and then not be unpickled."""

    def __reduce__(self):
        return _refuse, ()


class Wordless:
    """Can be neither pickled nor printed."""

    def __reduce__(self):
        raise RuntimeError("it cannot be reduced")

    def __repr__(self):
        raise RuntimeError("it has no text")


def _refuse():
    raise RuntimeError("it cannot be loaded")


@raises
def builtin_error():
    raise ValueError("sample 7 is broken", 7)


@raises
def two_arguments():
    raise TwoArguments("a.png", 3)


@raises
def keywords_only():
    raise KeywordsOnly(path="a.png")


@raises
def key_error():
    raise KeyError("label")


@raises
def oserror_subclass():
    raise MissingSample("a.png", tries=3)


@raises
def oserror_of_two_files():
    os.rename("no/such/file", "no/such/place")


@raises
def unicode_decode_error():
    b"caf\xe9".decode("utf-8")


@raises
def import_error():
    raise ImportError("no decoder", name="decoder", path="decoder.py")


@raises
def json_error():
    json.loads("{")


@raises
def called_process_error():
    raise subprocess.CalledProcessError(3, ["decode"], output=b"x")


@raises
def numpy_axis_error():
    np.zeros((2, 2)).sum(axis=5)


@raises
def lock_among_the_arguments():
    raise ValueError("a.png", threading.Lock(), 3)


@raises
def argument_without_words():
    raise ValueError("a.png", Wordless())


@raises
def argument_that_is_an_exception():
    raise ValueError(TwoArguments("a.png", 3))


@raises
def attribute_that_is_an_exception():
    error = ValueError("a.png")
    error.reason = TwoArguments("a.png", 3)
    raise error


@raises
def defined_in_a_function():
    class Local(Exception):
        pass

    raise Local("a.png")


@raises
def exception_group():
    raise ExceptionGroup(
        "two samples",
        [TwoArguments("a.png", 3), ExceptionGroup("one", [KeyError("label")])],
    )


@raises
def text_that_raises():
    raise Unspeakable("a.png")


@raises
def reduction_of_its_own():
    raise OwnReduction("a.png", 3)


@raises
def slots():
    raise Slotted("a.png", 3)


@raises
def read_only_attributes():
    raise ReadOnly("a.png", 3)


@raises
def notes_of_its_own():
    error = ValueError("a.png")
    error.add_note("It was downloaded twice.")
    raise error


@raises
def a_megabyte_of_text():
    raise ValueError("0123456789abcdef" * 65536)


@raises
def deep_recursion():
    deep_recursion()


@raises
def a_cause():
    try:
        int("seven")
    except ValueError as error:
        raise TwoArguments("a.png", 3) from error


@raises
def causes_of_causes():
    try:
        a_cause()
    except TwoArguments as error:
        raise KeyError("label") from error


@raises
def a_cause_that_is_not_handled():
    raise TwoArguments("a.png", 3) from KeyError("label")


@raises
def a_context():
    try:
        int("seven")
    except ValueError:
        raise TwoArguments("a.png", 3)  # noqa: B904


@raises
def from_none():
    try:
        int("seven")
    except ValueError:
        raise TwoArguments("a.png", 3) from None


@raises
def a_cause_that_is_falsy():
    raise TwoArguments("a.png", 3) from Falsy("label")


# -- datasets -----------------------------------------------------------------


class Raising(FastPyDataset):
    """Raises what a file says, so that its workers need no restart."""

    def __init__(self, orders, **kwargs):
        super().__init__(**kwargs)
        self.orders = orders

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == BROKEN and (name := self.orders.read_text()):
            RAISERS[name]()
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


class Broken(FastPyDataset):
    """Calls `fail` for batch `at`, in epochs from `since` on."""

    def __init__(self, fail, at=BROKEN, since=0, **kwargs):
        super().__init__(**kwargs)
        self.fail = fail
        self.at = at
        self.since = since

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.at and self.epoch >= self.since:
            self.fail()
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


class Endless(Broken):
    num_batches = None


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def raising(kind, tmp_path_factory):
    """A dataset whose workers serve every test of their kind."""
    orders = tmp_path_factory.mktemp("raising") / "orders"
    orders.write_text("")
    with Raising(orders, **KINDS[kind]) as dataset:
        walk(dataset)
        yield dataset


@pytest.fixture(scope="module")
def model():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def walk(dataset):
    return sum(1 for _ in dataset)


def fit(model, dataset, **kwargs):
    return model.fit(dataset, verbose=0, **kwargs)


def caught(function):
    """What `function` raises."""
    try:
        function()
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


def facts(error, chain=True):
    """All there is to know about an exception, as something comparable."""
    if error is None:
        return None
    attributes = {k: v for k, v in vars(error).items() if k != "__notes__"}
    for cls in type(error).__mro__:
        names = (*vars(cls).get("__slots__", ()), *BUILT_IN.get(cls, ()))
        attributes.update((n, getattr(error, n, None)) for n in names)
    try:
        text = str(error)
    except RuntimeError:
        text = None
    found = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "args": plain(error.args),
        "attributes": {k: plain(v) for k, v in attributes.items()},
        "text": re.sub("0x[0-9a-f]+", "0x", text) if text else text,
    }
    if isinstance(error, BaseExceptionGroup):
        found["exceptions"] = plain(error.exceptions)
    if chain:
        found["cause"] = facts(error.__cause__)
        found["context"] = facts(error.__context__ or error.__cause__)
        found["suppress"] = error.__suppress_context__
    return found


BUILT_IN = {
    OSError: ("errno", "strerror", "filename", "filename2"),
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
    ImportError: ("name", "path", "msg"),
}


def plain(value):
    """`value`, or something that equals its like from another process."""
    if isinstance(value, BaseException):
        return facts(value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (str, int, bytes, type(None))):
        return value
    try:
        return re.sub("0x[0-9a-f]+", "0x", repr(value))
    except RuntimeError:
        return None


def frames(error):
    """The frames of this file, from `__getitem__` on."""
    ours = [
        (frame.name, frame.lineno, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == THIS_FILE
    ]
    names = [name for name, *_ in ours]
    return ours[names.index("__getitem__") + 1 :]


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_where(error, kind, dataset="Raising", batch=BROKEN, epoch=r"\d+"):
    pattern = (
        rf"While building batch {batch} of epoch {epoch} of {dataset}, "
        rf"in {WHERE[kind]}\."
    )
    return sum(bool(re.fullmatch(pattern, n)) for n in error.__notes__) == 1


# What cannot be the same in another process, and is compared on its own.
DIFFERENT = {"argument_without_words"}


@pytest.mark.parametrize("name", RAISERS)
def test_an_exception_arrives_as_what_it_was(raising, kind, name):
    raising.orders.write_text(name)
    there = caught(RAISERS[name])
    here = caught(lambda: walk(raising))
    assert type(here).__qualname__ == type(there).__qualname__
    assert is_where(here, kind)
    ours = frames(here)
    theirs = frames_of(there)
    assert ours[:3] == theirs[:3]
    assert len(ours) > len(theirs) // 2  # of a recursion, most
    if name not in DIFFERENT:
        assert facts(here) == facts(there)
    for note in getattr(there, "__notes__", ()):
        assert note in here.__notes__
    raising.orders.write_text("")
    assert walk(raising) == 4


def frames_of(error):
    """The frames of this file, below `caught`."""
    return [
        (frame.name, frame.lineno, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if frame.filename == THIS_FILE
    ]


@pytest.mark.parametrize("name", RAISERS)
def test_an_exception_arrives_through_fit(raising, kind, model, name):
    raising.orders.write_text(name)
    there = caught(RAISERS[name])
    here = caught(lambda: fit(model, raising))
    assert type(here).__qualname__ == type(there).__qualname__
    assert is_where(here, kind)
    assert frames(here)[:3] == frames_of(there)[:3]
    if name not in DIFFERENT:
        assert facts(here, chain=False) == facts(there, chain=False)
    if there.__cause__ is not None:
        # Keras raises `from None`; the note has what was lost.
        assert here.__cause__ is None
        assert facts(here.__context__) == facts(there.__cause__)
        notes = "\n".join(here.__notes__)
        for cause in [*chain(there)][1:]:
            shown = traceback.format_exception_only(cause)
            assert shown[0].rpartition(".")[2].strip() in notes
    raising.orders.write_text("")
    assert len(fit(model, raising).history["loss"]) == 1


def test_the_frames_of_a_cause_are_the_users(raising):
    raising.orders.write_text("a_cause")
    there = caught(a_cause).__cause__.__traceback__
    here = caught(lambda: walk(raising)).__cause__.__traceback__
    ours, theirs = (
        [(f.filename, f.name, f.lineno) for f in traceback.extract_tb(tb)]
        for tb in (here, there)
    )
    assert ours == theirs


def test_the_frames_inside_an_exception_group_are_the_users():
    there = caught(_raise_group)
    with Broken(_raise_group, **KINDS["process"]) as dataset:
        here = caught(lambda: walk(dataset))
    for ours, theirs in zip(here.exceptions, there.exceptions, strict=True):
        assert frames_of_inner(ours) == frames_of_inner(theirs)
        assert ours.__notes__ == theirs.__notes__


def _raise_group():
    errors = []
    for function in (two_arguments, key_error):
        try:
            function()
        except Exception as error:
            error.add_note(f"By {function.__name__}.")
            errors.append(error)
    raise ExceptionGroup("both", errors)


def frames_of_inner(error):
    extracted = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.name, f.lineno) for f in extracted]


def test_a_class_made_in_a_function_is_caught_by_its_own_name(kind):
    class Local(Exception):
        def hint(self):
            return "look at a.png"

    class LocalDataset(Broken):
        def __getitem__(self, index):
            if index == self.at:
                raise Local("a.png")
            return super().__getitem__(index)

    methods = {**vars(Local)}, {**vars(LocalDataset)}
    with (
        LocalDataset(None, **KINDS[kind]) as dataset,
        pytest.raises(Local) as found,
    ):
        walk(dataset)
    assert type(found.value) is Local
    assert found.value.hint() == "look at a.png"
    assert methods == ({**vars(Local)}, {**vars(LocalDataset)})


def test_an_init_with_side_effects_runs_where_it_is_raised_alone():
    made = Counted.made
    with Broken(_raise_counted, **KINDS["process"]) as dataset:
        error = caught(lambda: walk(dataset))
    assert type(error) is Counted
    assert error.args == ("a.png",)
    assert Counted.made == made


def _raise_counted():
    raise Counted("a.png")


def test_a_lock_in_an_attribute_costs_that_attribute():
    with Broken(_raise_lock, **KINDS["process"]) as dataset:
        error = caught(lambda: walk(dataset))
    assert type(error) is HoldsLock
    assert (error.args, error.code) == (("a.png",), 7)
    assert not hasattr(error, "lock")
    assert any("lock" in note for note in error.__notes__[1:])


def _raise_lock():
    raise HoldsLock("a.png")


def test_an_attribute_that_cannot_be_loaded_costs_that_attribute():
    with Broken(_raise_one_way, **KINDS["process"]) as dataset:
        error = caught(lambda: walk(dataset))
    assert type(error) is ValueError
    assert (error.args, error.code) == (("a.png",), 7)
    assert not hasattr(error, "thing")
    assert any("thing" in note for note in error.__notes__[1:])


def _raise_one_way():
    error = ValueError("a.png")
    error.thing = OneWay()
    error.code = 7
    raise error


def test_an_argument_that_cannot_be_loaded_costs_that_argument():
    with Broken(_raise_one_way_argument, **KINDS["process"]) as dataset:
        error = caught(lambda: walk(dataset))
    assert type(error) is ValueError
    assert error.args[0] == "a.png"
    assert "OneWay" in repr(error.args[1])


def _raise_one_way_argument():
    raise ValueError("a.png", OneWay())


@pytest.mark.parametrize("way", ["loop", "fit"])
def test_an_exception_that_refuses_to_be_pickled_shows_its_text(
    kind, way, model
):
    with Broken(_raise_irreducible, **KINDS[kind]) as dataset:
        run = walk if way == "loop" else functools.partial(fit, model)
        error = caught(lambda: run(dataset))
    # As itself or as text, but not as the death of a worker.
    assert type(error) in (Irreducible, LoaderError)
    shown = "".join(traceback.format_exception(error))
    assert "Irreducible: a.png" in shown
    assert "_raise_irreducible" in shown
    assert is_where(error, kind, "Broken") or f"epoch 0 of {Broken}" in shown


def _raise_irreducible():
    raise Irreducible("a.png")


@pytest.mark.parametrize("way", ["loop", "fit"])
def test_stop_iteration_does_not_end_the_epoch(kind, way, model):
    """As in a generator: an epoch that ends early must not look complete."""
    with Broken(_stop, **KINDS[kind]) as dataset:
        run = walk if way == "loop" else functools.partial(fit, model)
        with pytest.raises(RuntimeError) as found:
            run(dataset)
    shown = "".join(traceback.format_exception(found.value))
    assert "StopIteration" in shown
    assert "_stop" in shown
    assert "While building batch 2 of epoch 0 of Broken" in shown


def _stop():
    next(iter([]))


@pytest.mark.parametrize("way", ["loop", "fit"])
@pytest.mark.parametrize(
    "cls", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
def test_what_is_no_exception_arrives_as_itself(kind, way, cls, model):
    fail = functools.partial(_raise_base, cls)
    with Broken(fail, **KINDS[kind]) as dataset:
        run = walk if way == "loop" else functools.partial(fit, model)
        with pytest.raises(cls, match=r"a\.png") as found:
            run(dataset)
        assert type(found.value) is cls
        assert frames(found.value)[-1][0] == "_raise_base"
        dataset.fail = str
        assert walk(dataset) == 4


def _raise_base(cls):
    raise cls("a.png")


@pytest.mark.parametrize("way", ["loop", "fit"])
def test_sys_exit_is_not_lost(kind, way, model, capfd):
    with Broken(_exit, **KINDS[kind]) as dataset:
        run = walk if way == "loop" else functools.partial(fit, model)
        error = caught(lambda: run(dataset))
    if kind == "process":
        # It ends the worker, as it would end any process.
        assert type(error) is WorkerDiedError
        assert (error.exit_code, error.batch_index) == (1, BROKEN)
        assert "no more samples" in f"{error}{capfd.readouterr().err}"
    else:
        assert type(error) is SystemExit
        assert error.code == "no more samples"


def _exit():
    sys.exit("no more samples")


def test_a_hundred_chained_exceptions_arrive_soon(kind):
    with Broken(_retry, **KINDS[kind]) as dataset:
        error = caught(lambda: walk(dataset))
    assert str(error) == "gave up"
    assert str(error.__cause__) == "try 99"
    assert str(error.__cause__.__context__) == "try 98"


def _retry():
    _try_again(99)


def _try_again(number):
    error = None
    for number in range(100):
        try:
            try:
                raise error or ValueError("first")
            except Exception:
                raise ValueError(f"try {number}")  # noqa: B904
        except Exception as raised:
            error = raised
    raise TimeoutError("gave up") from error


# -- wherever Keras asks for the batch ----------------------------------------

RUNS = {
    "fit": lambda model, dataset: fit(model, dataset),
    "second_epoch": lambda model, dataset: fit(model, dataset, epochs=3),
    "validation": lambda model, dataset: fit(
        model, _healthy(), validation_data=dataset
    ),
    "evaluate": lambda model, dataset: model.evaluate(dataset, verbose=0),
    "predict": lambda model, dataset: model.predict(dataset, verbose=0),
    "class_weight": lambda model, dataset: fit(
        model, dataset, class_weight={0: 1.0, 1: 2.0}
    ),
    "train_on_batch": lambda model, dataset: [
        model.train_on_batch(*batch) for batch in dataset
    ],
}


def _healthy():
    return Broken(None, at=None, workers=0)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("run", RUNS)
def test_an_exception_arrives_from_every_batch_of_every_method(
    kind, model, run, at
):
    since = 1 if run == "second_epoch" else 0
    dataset = Broken(two_arguments, at=at, since=since, **KINDS[kind])
    with dataset, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = list(warnings.filters), warnings.showwarning
        error = caught(lambda: RUNS[run](model, dataset))
        assert (list(warnings.filters), warnings.showwarning) == before
    assert type(error) is TwoArguments
    assert str(error) == "a.png has code 3"
    assert is_where(error, kind, "Broken", at, since)
    assert [w for w in shown if "ran out of data" in str(w.message)] == []


@pytest.mark.parametrize("run", ["fit", "evaluate", "predict"])
def test_an_exception_arrives_from_a_dataset_without_an_end(kind, model, run):
    steps = {"steps_per_epoch": 2, "epochs": 9} if run == "fit" else {}
    steps = steps or {"steps": 9}
    dataset = Endless(two_arguments, at=5, **KINDS[kind])
    with dataset, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        method = getattr(model, run)
        error = caught(lambda: method(dataset, verbose=0, **steps))
        assert list(warnings.filters) == before
    assert type(error) is TwoArguments
    assert is_where(error, kind, "Endless", 5)
    assert [w for w in shown if "ran out of data" in str(w.message)] == []


def test_a_dataset_that_really_runs_out_of_data_is_still_warned_of(
    kind, model
):
    with Broken(None, at=None, **KINDS[kind]) as dataset:
        error = caught(lambda: fit(model, dataset, epochs=2))
        assert isinstance(error, TypeError | BaseException)


def test_the_same_dataset_and_model_train_after_a_failure(kind, model):
    with Broken(two_arguments, **KINDS[kind]) as dataset:
        for _ in range(3):
            with pytest.raises(TwoArguments):
                fit(model, dataset)
        dataset.fail = str
        history = fit(model, dataset, epochs=2)
        assert len(history.history["loss"]) == 2
        assert walk(dataset) == 4


def test_the_batches_before_the_failure_are_delivered(kind):
    with Broken(two_arguments, at=3, **KINDS[kind]) as dataset:
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        with pytest.raises(TwoArguments):
            next(batches)
        # As with a generator: what has raised is over.
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "__len__"])
def test_an_exception_of_a_hook_arrives_as_itself(kind, hook, model):
    class Hooked(Broken):
        pass

    setattr(Hooked, hook, lambda self: two_arguments())
    with Hooked(str, **KINDS[kind]) as dataset:
        error = caught(lambda: fit(model, dataset))
    assert type(error) is TwoArguments
    assert str(error) == "a.png has code 3"


# -- a whole script -----------------------------------------------------------

SCRIPT = """
    import sys

    import keras
    import numpy as np

    from keras_fastdata import FastPyDataset

    TRIES = 0


    class BrokenSample(Exception):
        def __init__(self, path, code):
            super().__init__(f"{path} has code {code}")
            self.path = path

        def hint(self):
            return f"look at {self.path}, {TRIES}"


    class Samples(FastPyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            global TRIES
            TRIES += 1
            if index == 2:
                self.fail()
            return np.zeros((4, 2)), np.zeros((4, 1))

        def fail(self):
            raise BrokenSample("a.png", 3)


    def snapshot():
        names = ("BrokenSample", "Samples", "snapshot", "np", "keras")
        return {
            **{name: globals()[name] for name in names},
            **{("BrokenSample", k): v for k, v in vars(BrokenSample).items()},
            **{("Samples", k): v for k, v in vars(Samples).items()},
        }


    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    samples = Samples(workers=2, use_multiprocessing=True)
    before = snapshot()
    caught = 0
    for run in (list, lambda samples: model.fit(samples, verbose=0)):
        try:
            run(samples)
        except BrokenSample as error:
            caught += 1
            assert type(error) is BrokenSample
            assert error.hint() == "look at a.png, 0", error.hint()
        after = snapshot()
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert Samples.__getitem__.__globals__ is globals()
        assert BrokenSample.hint.__globals__ is globals()
        assert TRIES == 0
    assert caught == 2
    print("as it was", flush=True)
    model.fit(samples, verbose=0)
"""


def test_a_script_ends_with_the_exception_and_nothing_else(tmp_path):
    """Classes of `__main__`, which no worker can import."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    package = Path(keras_fastdata.__file__).parent.parent
    path = [str(package), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.stdout == "as it was\n", ended.stderr
    assert ended.returncode == 1
    head, _, tail = ended.stderr.partition("Traceback")
    for noise in ("Exception ignored", "Error", "ran out of data", "leaked"):
        assert noise not in head
    last = [line for line in tail.splitlines() if not line.startswith("  ")]
    assert last[:2] == [
        " (most recent call last):",
        "BrokenSample: a.png has code 3",
    ]
    assert re.fullmatch(
        r"While building batch 2 of epoch 2 of Samples, "
        r"in worker \d \(pid \d+\)\.",
        last[2],
    )
    assert last[3:] == []
    line = 'raise BrokenSample("a.png", 3)'
    number = [
        n
        for n, text in enumerate(script.read_text().splitlines(), 1)
        if text.strip() == line
    ]
    assert f'File "{script}", line {number[0]}, in fail\n    {line}' in (
        textwrap.dedent(tail).replace("\n  ", "\n")
    )
