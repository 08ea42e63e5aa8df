"""An exception of `__getitem__` reaches the caller as what it was."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import io
import json
import linecache
import os
import re
import subprocess
import sys
import textwrap
import threading
import traceback
import types
import urllib.error
import warnings

import executing
import numpy as np
import pytest
from places import KINDS, NO_TRAINER, in_each_trainer
from samples import Holds

from keras_fastdata import FastPyDataset, LoaderError, WorkerDiedError
from keras_fastdata.workers import exceptions

WHERE = {
    "process": r"worker \d \(pid \d+\)",
    "thread": r"worker thread \d",
    "inline": "the calling thread",
}
# Workers write to the stderr of the fork server that forks them; this one is
# started within the test, and so writes to where the test looks.
FRESH = {"worker_env": {"NURSERY": "fresh"}}
BROKEN = 2  # the batch that cannot be built

pytestmark = pytest.mark.usefixtures("kept_forkserver")


# -- exceptions of every make -------------------------------------------------

RAISERS = {"nothing": bool}
MATRIX = []


def raises(function):
    """Marks one of the functions that `Raising` can be told to call."""
    RAISERS[function.__name__] = function
    return function


def raises_what_travels_well(function):
    """Marks one whose exception is to arrive without any difference."""
    MATRIX.append(function.__name__)
    return raises(function)


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


class Ends(Exception):
    """Ends the process that copies it, prints it or asks for its state."""

    def __reduce__(self):
        raise SystemExit(3)

    def __setstate__(self, state):
        raise SystemExit(3)

    def __str__(self):
        raise SystemExit(3)


class EndsOnLoading(Exception):
    def __setstate__(self, state):
        raise SystemExit(3)


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


@raises_what_travels_well
def builtin_error():
    raise ValueError("sample 7 is broken", 7)


@raises_what_travels_well
def two_arguments():
    raise TwoArguments("a.png", 3)


@raises_what_travels_well
def keywords_only():
    raise KeywordsOnly(path="a.png")


@raises_what_travels_well
def key_error():
    raise KeyError("label")


@raises_what_travels_well
def oserror_subclass():
    raise MissingSample("a.png", tries=3)


@raises_what_travels_well
def oserror_of_two_files():
    os.rename("no/such/file", "no/such/place")


@raises_what_travels_well
def unicode_decode_error():
    b"caf\xe9".decode("utf-8")


@raises_what_travels_well
def import_error():
    raise ImportError("no decoder", name="decoder", path="decoder.py")


@raises_what_travels_well
def json_error():
    json.loads("{")


@raises_what_travels_well
def called_process_error():
    raise subprocess.CalledProcessError(3, ["decode"], output=b"x")


@raises_what_travels_well
def numpy_axis_error():
    np.zeros((2, 2)).sum(axis=5)


@raises_what_travels_well
def lock_among_the_arguments():
    raise ValueError("a.png", threading.Lock(), 3)


@raises
def argument_without_words():
    raise ValueError("a.png", Wordless())


@raises_what_travels_well
def argument_that_is_an_exception():
    raise ValueError(TwoArguments("a.png", 3))


@raises_what_travels_well
def attribute_that_is_an_exception():
    error = ValueError("a.png")
    error.reason = TwoArguments("a.png", 3)
    raise error


@raises_what_travels_well
def defined_in_a_function():
    class Local(Exception):
        pass

    raise Local("a.png")


@raises_what_travels_well
def exception_group():
    raise ExceptionGroup(
        "two samples",
        [TwoArguments("a.png", 3), ExceptionGroup("one", [KeyError("label")])],
    )


@raises_what_travels_well
def text_that_raises():
    raise Unspeakable("a.png")


@raises_what_travels_well
def reduction_of_its_own():
    raise OwnReduction("a.png", 3)


@raises_what_travels_well
def slots():
    raise Slotted("a.png", 3)


@raises
def read_only_attributes():
    raise ReadOnly("a.png", 3)


@raises_what_travels_well
def notes_of_its_own():
    error = ValueError("a.png")
    error.add_note("It was downloaded twice.")
    raise error


@raises_what_travels_well
def a_megabyte_of_text():
    raise ValueError("0123456789abcdef" * 65536)


@raises_what_travels_well
def deep_recursion():
    deep_recursion()


@raises_what_travels_well
def a_cause():
    try:
        int("seven")
    except ValueError as error:
        raise TwoArguments("a.png", 3) from error


@raises_what_travels_well
def causes_of_causes():
    try:
        a_cause()
    except TwoArguments as error:
        raise KeyError("label") from error


@raises_what_travels_well
def a_cause_that_is_not_handled():
    raise TwoArguments("a.png", 3) from KeyError("label")


@raises_what_travels_well
def a_context():
    try:
        int("seven")
    except ValueError:
        raise TwoArguments("a.png", 3)  # noqa: B904


@raises_what_travels_well
def from_none():
    try:
        int("seven")
    except ValueError:
        raise TwoArguments("a.png", 3) from None


@raises_what_travels_well
def a_cause_that_is_falsy():
    raise TwoArguments("a.png", 3) from Falsy("label")


@raises
def group_of_what_was_raised():
    errors = []
    for function in (two_arguments, key_error):
        try:
            function()
        except Exception as error:
            error.add_note(f"By {function.__name__}.")
            errors.append(error)
    raise ExceptionGroup("both", errors)


@raises
def counted():
    raise Counted("a.png")


@raises
def lock_in_an_attribute():
    raise HoldsLock("a.png")


@raises
def attribute_that_cannot_be_loaded():
    error = ValueError("a.png")
    error.thing = OneWay()
    error.code = 7
    raise error


@raises
def argument_that_cannot_be_loaded():
    raise ValueError("a.png", OneWay())


@raises
def irreducible():
    raise Irreducible("a.png")


@raises
def one_that_ends_the_process():
    raise Ends("a.png")


@raises
def one_whose_loading_ends_the_process():
    error = EndsOnLoading("a.png")
    error.code = 3  # so that it has a state
    raise error


@raises
def stop_iteration():
    next(iter([]))


@raises
def a_hundred_contexts():
    error = ValueError("first")
    for number in range(100):
        try:
            try:
                raise error
            except Exception:
                raise ValueError(f"try {number}")  # noqa: B904
        except Exception as raised:
            error = raised
    raise TimeoutError("gave up") from error


# -- datasets -----------------------------------------------------------------


class Delegates(Exception):
    """Looks elsewhere for what it has not."""

    def __init__(self, response):
        super().__init__("bad response")
        self.response = response

    def __getattr__(self, name):
        return getattr(self.response, name)


@raises_what_travels_well
def attributes_from_elsewhere():
    raise Delegates([1, 2])


@raises
def http_error():
    raise urllib.error.HTTPError("http://x", 404, "gone", {}, io.BytesIO())


class Raising(FastPyDataset):
    """Raises what a file says, so that its workers need no restart."""

    def __init__(self, orders, **kwargs):
        super().__init__(**kwargs)
        self.orders = orders

    def tell(self, name, at=BROKEN, since=0):
        self.orders.write_text(f"{name} {at} {since}")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        name, at, since = self.orders.read_text().split()
        if index == int(at) and self.epoch >= int(since):
            RAISERS[name]()
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


class Broken(FastPyDataset):
    """Calls `fail` for batch `at`; for what takes a worker's life."""

    def __init__(self, fail, at=BROKEN, **kwargs):
        super().__init__(**kwargs)
        self.fail = fail
        self.at = at

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.at:
            self.fail()
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


class Endless(Broken):
    num_batches = None


@pytest.fixture(scope="module", params=in_each_trainer)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def raising(kind, tmp_path_factory):
    """A dataset whose workers serve every test of their kind."""
    orders = tmp_path_factory.mktemp("raising") / "orders"
    with Raising(orders, **KINDS[kind]) as dataset:
        dataset.tell("nothing")
        walk(dataset)
        yield dataset


_models = []


@pytest.fixture
def model():
    """One model for all tests, as long as Keras lets it live."""
    import keras

    try:
        for kept in _models:
            for variable in (*kept.variables, *kept.optimizer.variables):
                variable.numpy()
    except TypeError:
        # On JAX, Keras loses the variables of a model when the first batch of
        # an epoch raises, whatever the dataset is.
        _models.clear()
    if not _models:
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        _models.append(made)
    return _models[0]


def walk(dataset):
    return sum(1 for _ in dataset)


def fit(model, dataset, **kwargs):
    return model.fit(dataset, shuffle=False, verbose=0, **kwargs)


@pytest.fixture(params=[pytest.param("loop", marks=NO_TRAINER), "fit"])
def run(request):
    """A way to go through a dataset."""
    if request.param == "loop":
        return walk
    return functools.partial(fit, request.getfixturevalue("model"))


# -- comparing an exception with one that never left its process --------------


def caught(function, *args):
    """What a call raises."""
    try:
        function(*args)
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


BUILT_IN = {
    OSError: ("errno", "strerror", "filename", "filename2"),
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
    ImportError: ("name", "path", "msg"),
}


def facts(error, chain=True):
    """All there is to know about an exception, as something comparable."""
    if error is None:
        return None
    attributes = {k: v for k, v in vars(error).items() if k != "__notes__"}
    for cls in type(error).__mro__:
        names = (*vars(cls).get("__slots__", ()), *BUILT_IN.get(cls, ()))
        attributes.update((n, getattr(error, n, None)) for n in names)
    found = {
        "class": (type(error).__module__, type(error).__name__),
        "args": plain(error.args),
        "attributes": {k: plain(v) for k, v in attributes.items()},
        "text": without_addresses(str, error),
    }
    if isinstance(error, BaseExceptionGroup):
        found["exceptions"] = plain(error.exceptions)
    if chain:
        found["cause"] = facts(error.__cause__)
        context = error.__context__
        found["context"] = facts(
            error.__cause__ if context is None else context
        )
        found["suppress"] = error.__suppress_context__
    return found


def plain(value):
    """`value`, or something that equals its like from another process."""
    if isinstance(value, BaseException):
        return facts(value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (str, int, bytes, type(None))):
        return value
    return without_addresses(repr, value)


def without_addresses(convert, value):
    try:
        return re.sub("0x[0-9a-f]+", "0x", convert(value))
    except Exception as error:
        return f"{type(error).__name__} in {convert.__name__}"


def frames(error, since=None):
    """The frames in this file, below the first one named `since`."""
    found = [
        (frame.filename, frame.name, frame.lineno, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == __file__
    ]
    names = [name for _, name, *_ in found]
    return found[names.index(since) + 1 :] if since else found


def is_where(error, kind, dataset="Raising", batch=BROKEN, epoch=r"\d+"):
    """Whether one note, and only one, tells where the exception is from."""
    names = (kind, dataset, batch, epoch)
    return sum(is_where_note(n, *names) for n in error.__notes__) == 1


def is_where_note(note, kind, dataset="Raising", batch=BROKEN, epoch=r"\d+"):
    pattern = (
        rf"While building batch {batch} of epoch {epoch} of {dataset}, "
        rf"in {WHERE[kind]}\."
    )
    return bool(re.fullmatch(pattern, note))


def shown(error):
    return "".join(traceback.format_exception(error))


# -- tests --------------------------------------------------------------------


@pytest.mark.parametrize("name", MATRIX)
def test_an_exception_arrives_as_what_it_was(raising, kind, name):
    raising.tell(name)
    there = caught(RAISERS[name])
    here = caught(walk, raising)
    assert facts(here) == facts(there)
    assert_is_from_where_it_was_raised(here, there, kind)
    raising.tell("nothing")
    assert walk(raising) == 4


def assert_is_from_where_it_was_raised(here, there, kind):
    assert is_where(here, kind)
    for note in getattr(there, "__notes__", ()):
        assert here.__notes__.count(note) == 1
    ours, theirs = frames(here, "__getitem__"), frames(there, "caught")
    if isinstance(there, RecursionError):
        assert ours[:3] == theirs[:3]
        assert len(ours) > len(theirs) // 2
    else:
        assert ours == theirs


OFTEN_SEEN = (
    "two_arguments",
    "exception_group",
    "text_that_raises",
    "deep_recursion",
    "a_cause",
    "causes_of_causes",
    "a_cause_that_is_not_handled",
    "a_context",
    "from_none",
)


@pytest.mark.backend
@pytest.mark.parametrize("name", OFTEN_SEEN)
def test_an_exception_arrives_through_fit(raising, kind, model, name):
    assert_arrives_through_fit(raising, kind, model, name)


@pytest.mark.backend
@pytest.mark.parametrize("kind", ["process"], indirect=True)
@pytest.mark.parametrize("name", sorted({*MATRIX} - {*OFTEN_SEEN}))
def test_an_exception_of_any_make_arrives_through_fit(
    raising, kind, model, name
):
    assert_arrives_through_fit(raising, kind, model, name)


def assert_arrives_through_fit(raising, kind, model, name):
    raising.tell(name)
    there = caught(RAISERS[name])
    here = caught(fit, model, raising)
    assert facts(here, chain=False) == facts(there, chain=False)
    assert_is_from_where_it_was_raised(here, there, kind)
    cause = there.__cause__
    if cause is None:
        assert facts(here.__context__) == facts(there.__context__)
    else:
        # Keras raises `from None`; the note has what was lost.
        assert here.__cause__ is None
        assert facts(here.__context__) == facts(cause)
        notes = "\n".join(here.__notes__)
        while cause is not None:
            assert traceback.format_exception_only(cause)[-1].strip() in notes
            for *_, number, _ in frames(cause)[-1:]:
                assert f"({__file__}, line {number}) by " in notes
            cause = cause.__cause__
        assert is_where_note(here.__notes__[-1], kind)
    raising.tell("nothing")
    assert len(fit(model, raising).history["loss"]) == 1


def test_the_frames_of_a_cause_are_the_users(raising):
    raising.tell("a_cause")
    here, there = caught(walk, raising), caught(a_cause)
    assert frames(here.__cause__) == frames(there.__cause__)


@pytest.mark.backend
def test_no_frame_of_ours_stands_above_the_users(raising, run):
    raising.tell("two_arguments")
    assert not [f for f in files_of(caught(run, raising)) if is_ours(f)]


@pytest.mark.backend
def test_our_frames_are_there_where_keras_filters_nothing(raising, run):
    import keras

    raising.tell("two_arguments")
    keras.config.disable_traceback_filtering()
    try:
        files = files_of(caught(run, raising))
    finally:
        keras.config.enable_traceback_filtering()
    assert any(map(is_ours, files))
    assert files[-1] == __file__


def files_of(error):
    return [f.filename for f in traceback.extract_tb(error.__traceback__)]


def is_ours(file):
    return file.startswith(exceptions.PACKAGE)


def a_generator():
    yield np.zeros((4, 2), "float32")


async def a_coroutine():
    return np.zeros((4, 2), "float32")


class Unfinished(Broken):
    def __getitem__(self, index):
        return self.fail()


@pytest.mark.parametrize(
    ("function", "said"),
    [(a_generator, "a `yield` in a_gen"), (a_coroutine, "an `async def` in a")],
)
def test_code_that_has_yet_to_run_is_no_batch(kind, function, said):
    line = function.__code__.co_firstlineno
    with Unfinished(function, **KINDS[kind]) as dataset:
        error = caught(walk, dataset)
    assert type(error) is TypeError
    assert "Unfinished.__getitem__ returned a " in str(error)
    assert said in str(error)
    assert f"({__file__}, line {line})." in str(error)


def test_the_carets_of_a_traceback_point_to_the_right_place(raising):
    """Or nowhere; but not to another place."""
    raising.tell("a_cause")
    here, there = caught(walk, raising), caught(a_cause)
    ours, theirs = (
        [(f.colno, f.end_colno) for f in traceback.extract_tb(tb)]
        for tb in (here.__cause__.__traceback__, there.__cause__.__traceback__)
    )
    assert ours in (theirs, [(None, None)])
    extracted = traceback.extract_tb(here.__traceback__)
    frame = next(f for f in extracted if f.name == "__getitem__")
    if frame.colno is not None:
        line = linecache.getline(frame.filename, frame.lineno)
        assert line[frame.colno :].startswith("RAISERS[name]()")


def test_ipython_can_show_the_frames_of_a_worker(raising):
    # It would search for ever in a traceback whose `tb_lasti` is -1.
    raising.tell("a_cause")
    link, shown = caught(walk, raising).__cause__.__traceback__, []
    while link is not None:
        executing.Source.executing(link)
        shown.append(link.tb_frame.f_code.co_name)
        link = link.tb_next
    assert shown == ["a_cause"]


def test_the_frames_and_notes_inside_a_group_are_the_users(raising):
    raising.tell("group_of_what_was_raised")
    here, there = caught(walk, raising), caught(group_of_what_was_raised)
    for ours, theirs in zip(here.exceptions, there.exceptions, strict=True):
        assert frames(ours) == frames(theirs)
        assert ours.__notes__ == theirs.__notes__


def test_a_class_made_in_a_function_is_caught_by_its_own_name(kind):
    class Local(Exception):
        def hint(self):
            return "look at a.png"

    class LocalDataset(Broken):
        def __getitem__(self, index):
            if index == self.at:
                raise Local("a.png")
            return super().__getitem__(index)

    # Pickling an instance leaves a `__slotnames__` in its class.
    before = [{"__slotnames__": [], **vars(c)} for c in (Local, LocalDataset)]
    with (
        LocalDataset(None, **KINDS[kind]) as dataset,
        pytest.raises(Local) as found,
    ):
        walk(dataset)
    assert type(found.value) is Local
    assert found.value.hint() == "look at a.png"
    after = [{"__slotnames__": [], **vars(c)} for c in (Local, LocalDataset)]
    assert after == before


def test_an_init_with_side_effects_runs_once_where_it_is_raised(raising, kind):
    made = Counted.made
    raising.tell("counted")
    error = caught(walk, raising)
    assert type(error) is Counted
    assert error.args == ("a.png",)
    assert Counted.made == made + (kind != "process")


def test_a_lock_in_an_attribute_costs_that_attribute(raising, kind):
    raising.tell("lock_in_an_attribute")
    error = caught(walk, raising)
    assert type(error) is HoldsLock
    assert (error.args, error.code) == (("a.png",), 7)
    if kind == "process":
        assert not hasattr(error, "lock")
        assert any("lock" in note for note in error.__notes__)


def test_an_attribute_that_cannot_be_loaded_costs_that_attribute(raising, kind):
    raising.tell("attribute_that_cannot_be_loaded")
    error = caught(walk, raising)
    assert type(error) is ValueError
    assert (error.args, error.code) == (("a.png",), 7)
    if kind == "process":
        assert not hasattr(error, "thing")
        assert any("thing" in note for note in error.__notes__)


def test_an_argument_that_cannot_be_loaded_costs_that_argument(raising):
    raising.tell("argument_that_cannot_be_loaded")
    error = caught(walk, raising)
    assert type(error) is ValueError
    assert error.args[0] == "a.png"
    assert "OneWay" in repr(error.args[1])


def test_an_argument_without_words_costs_that_argument(raising, kind):
    raising.tell("argument_without_words")
    error = caught(walk, raising)
    assert type(error) is ValueError
    assert error.args[0] == "a.png"
    assert is_where(error, kind)


@pytest.mark.backend
def test_an_exception_that_cannot_be_reduced_shows_its_text(raising, run):
    """As itself, or as text; not as the death of a worker."""
    raising.tell("irreducible")
    error = caught(run, raising)
    assert type(error) in (Irreducible, LoaderError)
    for text in ("Irreducible: a.png", "in irreducible", "of Raising, in"):
        assert text in shown(error)


@pytest.mark.parametrize(
    "name", ["one_that_ends_the_process", "one_whose_loading_ends_the_process"]
)
def test_an_exception_that_would_end_the_worker_arrives(raising, kind, name):
    raising.tell(name)
    error = caught(walk, raising)
    assert type(error) in (Ends, EndsOnLoading, LoaderError)
    assert "of Raising, in" in "".join(error.__notes__)
    raising.tell("nothing")
    assert walk(raising) == 4


def test_an_exception_that_refuses_attributes_arrives(raising):
    raising.tell("read_only_attributes")
    error = caught(walk, raising)
    assert type(error) is ReadOnly
    assert (error.args, error.code) == (("a.png",), 3)


@pytest.mark.backend
def test_stop_iteration_does_not_end_the_epoch(raising, run):
    """As in a generator: an epoch cut short must not look complete."""
    raising.tell("stop_iteration")
    with pytest.raises(RuntimeError) as found:
        run(raising)
    assert "StopIteration" in shown(found.value)
    assert "in stop_iteration" in shown(found.value)
    assert f"While building batch {BROKEN} of epoch" in shown(found.value)


@pytest.mark.backend
@pytest.mark.parametrize("cls", [KeyboardInterrupt, asyncio.CancelledError])
def test_what_is_no_exception_arrives_as_itself(kind, run, cls):
    fail = functools.partial(_raise_it, cls)
    with Broken(fail, **KINDS[kind]) as dataset:
        error = caught(run, dataset)
        assert type(error) is cls
        assert error.args == ("a.png",)
        assert frames(error)[-1][1] == "_raise_it"
        dataset.at = None
        assert walk(dataset) == 4


def _raise_it(cls):
    raise cls("a.png")


@pytest.mark.backend
def test_what_sys_exit_says_is_not_lost(kind, run, capfd):
    with Broken(_exit, **KINDS[kind], **FRESH) as dataset:
        error = caught(run, dataset)
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


def test_a_hundred_chained_exceptions_arrive(raising):
    raising.tell("a_hundred_contexts")
    error = caught(walk, raising)
    assert str(error) == "gave up"
    assert str(error.__cause__) == "try 99"
    assert str(error.__cause__.__context__) == "try 98"


def test_the_batches_before_the_failure_are_delivered(raising):
    raising.tell("two_arguments", at=3)
    batches = iter(raising)
    for _ in range(3):
        next(batches)
    with pytest.raises(TwoArguments):
        next(batches)
    # As with a generator: what has raised is over.
    with pytest.raises(StopIteration):
        next(batches)


# -- wherever Keras asks for the batch ----------------------------------------

METHODS = {
    "fit": fit,
    "second_epoch": lambda m, dataset: fit(m, dataset, epochs=3),
    "validation": lambda m, dataset: fit(
        m, np.zeros((4, 2)), y=np.zeros((4, 1)), validation_data=dataset
    ),
    "evaluate": lambda m, dataset: m.evaluate(dataset, verbose=0),
    "predict": lambda m, dataset: m.predict(dataset, verbose=0),
    "class_weight": lambda m, dataset: fit(
        m, dataset, class_weight={0: 1.0, 1: 2.0}
    ),
    "train_on_batch": lambda m, dataset: [
        m.train_on_batch(*batch) for batch in dataset
    ],
}


@pytest.mark.backend
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_arrives_from_every_method(raising, kind, model, method):
    assert_arrives_from(raising, kind, model, method, at=3)


# The first two are those that TensorFlow's signature and the probe of JAX and
# PyTorch are made of.
@pytest.mark.backend
@pytest.mark.parametrize("kind", ["thread"], indirect=True)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_the_first_batches_arrives_from_every_method(
    raising, kind, model, method, at
):
    assert_arrives_from(raising, kind, model, method, at)


def assert_arrives_from(raising, kind, model, method, at):
    since = raising.epoch + (method == "second_epoch")
    raising.tell("two_arguments", at, since)
    with own_warnings() as warned:
        error = caught(METHODS[method], model, raising)
    assert type(error) is TwoArguments
    assert str(error) == "a.png has code 3"
    assert is_where(error, kind, "Raising", at, since)
    assert warned == []


@pytest.mark.backend
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_exception_arrives_from_a_dataset_without_an_end(
    kind, model, method
):
    options = {"steps": 9}
    if method == "fit":
        options = {"steps_per_epoch": 2, "epochs": 9, "shuffle": False}
    with (
        Endless(two_arguments, at=5, **KINDS[kind]) as dataset,
        own_warnings() as warned,
    ):
        error = caught(
            lambda: getattr(model, method)(dataset, verbose=0, **options)
        )
    assert type(error) is TwoArguments
    assert is_where(error, kind, "Endless", 5)
    assert warned == []


@contextlib.contextmanager
def own_warnings():
    """Collects what Keras warns of; the filters must end as they began."""
    texts = []
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", UserWarning)
        before = list(warnings.filters), warnings.showwarning
        yield texts
        assert (list(warnings.filters), warnings.showwarning) == before
    texts += [
        str(r.message) for r in records if issubclass(r.category, UserWarning)
    ]


@pytest.mark.backend
def test_keras_still_warns_of_a_dataset_that_runs_out_of_data(raising, model):
    raising.tell("nothing")
    with pytest.warns(UserWarning, match="ran out of data"):
        fit(model, raising, steps_per_epoch=9)


@pytest.mark.backend
def test_keras_warns_of_it_again_after_a_failure(raising, model):
    raising.tell("two_arguments")
    with pytest.raises(TwoArguments):
        fit(model, raising)
    raising.tell("nothing")
    with pytest.warns(UserWarning, match="ran out of data"):
        fit(model, raising, steps_per_epoch=9)


@pytest.mark.backend
def test_the_same_dataset_and_model_train_after_a_failure(raising, model):
    for _ in range(3):
        raising.tell("two_arguments")
        with pytest.raises(TwoArguments):
            fit(model, raising)
        raising.tell("nothing")
        assert len(fit(model, raising, epochs=2).history["loss"]) == 2
    assert walk(raising) == 4


@pytest.mark.backend
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "__len__"])
def test_an_exception_of_a_hook_arrives_as_itself(kind, hook, model):
    class Hooked(Broken):
        pass

    setattr(Hooked, hook, lambda self: two_arguments())
    with Hooked(None, at=None, **KINDS[kind]) as dataset:
        error = caught(fit, model, dataset)
    assert type(error) is TwoArguments
    assert frames(error)[-1][1] == "two_arguments"


def test_a_dataset_that_is_dropped_after_a_failure_leaves_no_noise(kind, capfd):
    dataset = Broken(two_arguments, **KINDS[kind], **FRESH)
    error = caught(walk, dataset)
    assert type(error) is TwoArguments
    del dataset, error
    gc.collect()
    assert capfd.readouterr().err == ""


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
        found = {
            **{name: globals()[name] for name in names},
            **{("BrokenSample", k): v for k, v in vars(BrokenSample).items()},
            **{("Samples", k): v for k, v in vars(Samples).items()},
        }
        # Python's own notes on a class that was pickled, or looked at.
        for name in ("__slotnames__", "__annotations__"):
            found.pop(("Samples", name), None)
        return found


    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    samples = Samples(workers=1, use_multiprocessing=True)
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
        assert list(after) == list(before), after.keys() ^ before.keys()
        assert all(after[name] is before[name] for name in before)
        assert Samples.__getitem__.__globals__ is globals()
        assert BrokenSample.hint.__globals__ is globals()
        assert TRIES == 0
    assert caught == 2
    print("as it was", flush=True)
    model.fit(samples, verbose=0)
"""


@pytest.mark.backend
def test_a_script_ends_with_the_exception_and_nothing_else(tmp_path, zygote):
    """Classes of `__main__`, which no worker can import."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended = zygote.run(script)
    assert ended.stdout == "as it was\n", ended.stderr
    assert ended.returncode == 1
    head, _, tail = ended.stderr.partition("Traceback")
    for noise in ("Exception ignored", "Error", "ran out of data", "leaked"):
        assert noise not in head
    # Keras's filter misplaces some carets of frames that are not the user's.
    last = [
        line
        for line in tail.splitlines()
        if not line.startswith("  ") and line.strip("^~")
    ]
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
    assert f'  File "{script}", line {number[0]}, in fail\n    {line}\n' in tail


class Related(Exception):
    """Refers to others of its kind."""

    def __init__(self, name):
        super().__init__(name)
        self.relatives = []


@pytest.mark.parametrize("count", [1, 2, 12])
def test_exceptions_that_refer_to_each_other_travel_in_no_time(count):
    family = [Related(f"number {n}") for n in range(count)]
    for one in family:
        one.relatives.extend(family)
    described = exceptions.dump_exception(family[0])
    assert len(described) < 1 << 20
    found = exceptions.load_exception(described)
    assert isinstance(found, Related)
    assert str(found) == "number 0"


def test_what_led_to_an_exception_in_several_ways_is_described_once():
    error = ValueError("number 0")
    for number in range(1, 16):
        following = ValueError(f"number {number}")
        following.__context__ = error
        following.__cause__ = KeyError(f"cause {number}")
        following.__cause__.__context__ = error
        error = following
    described = exceptions.dump_exception(error)
    assert len(described) < 1 << 20
    found = exceptions.load_exception(described)
    assert str(found) == "number 15"
    assert str(found.__context__) == "number 14"
    assert found.__cause__.__context__ is found.__context__


# -- code without lines --------------------------------------------------------


def _without_lines(function):
    """Returns a function none of whose instructions has a line."""
    units = len(function.__code__.co_code) // 2
    none = [0xF8 | min(8, units - first) - 1 for first in range(0, units, 8)]
    code = function.__code__.replace(co_linetable=bytes(none))
    return types.FunctionType(code, {})


def _raise():
    raise ValueError("no line")


@_without_lines
def _call_without_a_line(function, _):
    function()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_no_line_arrives_as_what_it_was(kind):
    use = _call_without_a_line
    with Holds(_without_lines(_raise), use, **KINDS[kind]) as dataset:
        with pytest.raises(ValueError, match="no line") as caught:
            list(dataset)
        *_, outer, inner = [entry.name for entry in caught.traceback]
        assert (outer, inner) == ("_call_without_a_line", "_raise")
