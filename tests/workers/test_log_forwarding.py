"""What a worker logs, warns of and prints arrives as if it had not moved."""

from __future__ import annotations

import collections
import importlib
import logging
import os
import re
import sys
import textwrap
import threading
import time
import traceback
import types
import warnings

import numpy as np
import pytest
from places import KINDS

from keras_fastdata import FastPyDataset

PROCESSES = KINDS["process"]
# Workers write to the stderr of the fork server that forks them; this one is
# started within the test, and so writes to where the test looks.
FRESH = {"worker_env": {"NURSERY": "fresh"}}
NOTICE = 25
LOG = logging.getLogger("relay.data")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]


class Talking(FastPyDataset):
    """Calls `say(index)` for each batch, and `hello` and `goodbye` around."""

    def __init__(self, say, length=4, hello=bool, goodbye=bool, **kwargs):
        super().__init__(**kwargs)
        self.say = say
        self.length = length
        self.hello = hello
        self.goodbye = goodbye

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.say(index)
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")

    def on_worker_start(self):
        self.hello()

    def on_worker_stop(self):
        self.goodbye()


class OwnWarning(UserWarning):
    pass


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def records():
    """What reaches a handler of the logger "relay.data"."""
    found = []
    handler = Collector(found)
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    yield found
    LOG.removeHandler(handler)
    LOG.setLevel(logging.NOTSET)


class Collector(logging.Handler):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def emit(self, record):
        self.found.append(record)


def walk(dataset):
    return sum(1 for _ in dataset)


def say(say, kind="process", **kwargs):
    """Has every batch say it, and waits for the workers' end."""
    with Talking(say, **{**KINDS[kind], **kwargs}) as dataset:
        assert walk(dataset) == dataset.length


def messages(records):
    return sorted(record.getMessage() for record in records)


# -- log records --------------------------------------------------------------


def log_index(index):
    LOG.info("batch %d of %s", index, "a.png")


def test_every_record_arrives_once_and_as_it_was(kind, records, caplog):
    began = time.time()
    say(log_index, kind)
    ended = time.time()
    wanted = [f"batch {n} of a.png" for n in range(4)]
    assert messages(records) == wanted
    assert messages(caplog.records) == wanted  # the root's handler
    line = log_index.__code__.co_firstlineno + 1
    for record in records:
        assert (record.name, record.levelno) == ("relay.data", logging.INFO)
        assert record.levelname == "INFO"
        assert (record.pathname, record.lineno) == (__file__, line)
        assert record.funcName == "log_index"
        assert began <= record.created <= ended
        assert (record.process == os.getpid()) == (kind != "process")


def test_the_records_of_one_worker_keep_their_order(kind, records):
    say(log_three_times, kind)
    by_batch = collections.defaultdict(list)
    for record in records:
        batch, number = record.msg.split(":")
        by_batch[batch].append(number)
    assert len(by_batch) == 4
    assert all(numbers == ["0", "1", "2"] for numbers in by_batch.values())


def log_three_times(index):
    for number in range(3):
        LOG.info(f"{index}:{number}")


def test_what_is_below_the_level_does_not_arrive(kind, records):
    LOG.setLevel(logging.ERROR)
    say(log_at_all_levels, kind)
    assert messages(records) == ["error"] * 4
    records.clear()
    LOG.setLevel(logging.DEBUG)
    try:
        logging.disable(logging.WARNING)
        say(log_at_all_levels, kind)
    finally:
        logging.disable(logging.NOTSET)
    assert messages(records) == ["error"] * 4


def test_a_level_of_a_parent_holds_for_its_children(kind, caplog):
    with caplog.at_level(logging.WARNING, "relay"):
        say(log_at_all_levels, kind)
    assert messages(caplog.records) == ["error"] * 4 + ["warning"] * 4


def test_a_level_that_is_raised_later_holds(kind, records):
    with Talking(log_at_all_levels, **KINDS[kind]) as dataset:
        walk(dataset)
        records.clear()
        LOG.setLevel(logging.ERROR)
        walk(dataset)
    assert messages(records) == ["error"] * 4


def log_at_all_levels(index):
    LOG.debug("debug")
    LOG.info("info")
    LOG.warning("warning")
    LOG.error("error")


def test_filters_of_the_logger_apply(kind, records):
    def even(record):
        return record.args[0] % 2 == 0 if record.args else "2" in record.msg

    LOG.addFilter(even)
    try:
        say(log_index, kind)
    finally:
        LOG.removeFilter(even)
    assert "batch 2 of a.png" in messages(records)
    assert "batch 1 of a.png" not in messages(records)


def test_a_level_of_ones_own_keeps_its_name(kind, records):
    logging.addLevelName(NOTICE, "NOTICE")
    say(log_notice, kind)
    assert [record.levelname for record in records] == ["NOTICE"] * 4


def log_notice(index):
    LOG.log(NOTICE, "batch %d", index)


def test_a_traceback_is_printed_once(kind, records):
    say(log_exception, kind)
    for record in records:
        text = logging.Formatter("%(levelname)s %(message)s").format(record)
        assert text.startswith("ERROR cannot read a.png\n")
        assert text.count("Traceback (most recent call last)") == 1
        assert text.count("ValueError: invalid literal for int()") == 1
        assert "in log_exception" in text
        assert text.count("Stack (most recent call last)") == 1
    assert len(records) == 4


def log_exception(index):
    try:
        int("seven")
    except ValueError:
        LOG.exception("cannot read %s", "a.png", stack_info=True)


def test_arguments_that_cannot_be_pickled_are_in_the_message(kind, records):
    say(log_lock, kind)
    assert len(records) == 4
    for record in records:
        assert re.fullmatch("held by <unlocked .*>: 3", record.getMessage())


def log_lock(index):
    LOG.info("held by %s: %d", threading.Lock(), 3)


def test_a_percent_sign_in_a_message_is_left_alone(kind, records):
    say(log_percent, kind)
    assert messages(records) == ["100% of %s"] * 4


def log_percent(index):
    LOG.info("100% of %s")


def test_extra_attributes_arrive(kind, records):
    say(log_extra, kind)
    assert sorted(record.batch for record in records) == [0, 1, 2, 3]


def log_extra(index):
    LOG.info("hello", extra={"batch": index})


def test_an_extra_that_cannot_be_pickled_costs_that_one(kind, records):
    say(log_lock_as_extra, kind)
    assert messages(records) == ["hello"] * 4
    assert sorted(record.batch for record in records) == [0, 1, 2, 3]


def log_lock_as_extra(index):
    LOG.info("hello", extra={"batch": index, "lock": threading.Lock()})


def test_an_extra_that_cannot_be_loaded_does_not_end_the_epoch(records):
    say(log_stranger)
    assert messages(records) == ["hello"] * 4


def log_stranger(index):
    module = sys.modules.setdefault("there", types.ModuleType("there"))
    if not hasattr(module, "Stranger"):
        module.Stranger = type("Stranger", (), {"__module__": "there"})
    LOG.info("hello", extra={"guest": module.Stranger()})


@pytest.mark.parametrize("character", ["x", "\N{GRINNING FACE}"])
def test_a_long_record_arrives_shortened(records, capfd, character):
    say(LONG[character], **FRESH)
    assert len(records) == 4
    for record in records:
        assert record.getMessage().startswith(character * 10_000)
    assert capfd.readouterr().err == ""


def log_long(index):
    LOG.info("x" * 1_000_000)


def log_long_and_wide(index):
    LOG.info("\N{GRINNING FACE}" * 1_000_000)


LONG = {"x": log_long, "\N{GRINNING FACE}": log_long_and_wide}


def test_a_flood_of_records_ends_neither_the_epoch_nor_close(records):
    say(log_flood)
    assert len(records) == 4 * 2000
    with Talking(log_flood, **PROCESSES) as dataset:
        next(iter(dataset))
        time.sleep(0.2)  # the workers now wait for somebody to listen


def log_flood(index):
    for number in range(2000):
        LOG.info("%d %s", number, "x" * 100)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_handler_of_the_logger_gets_a_record_once(start_method, tmp_path):
    path = tmp_path / "log"
    handler = logging.FileHandler(path, delay=True)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        say(log_index, start_method=start_method)
    finally:
        LOG.propagate = True
        LOG.setLevel(logging.NOTSET)
        LOG.removeHandler(handler)
        handler.close()
    written = sorted(path.read_text().splitlines())
    assert written == [f"batch {n} of a.png" for n in range(4)]


OWN_HANDLER = """
    import logging

    log = logging.getLogger(__name__)
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = {propagate}


    def say(index):
        log.info("batch %d", index)
"""


@pytest.mark.parametrize("propagate", [True, False])
def test_a_handler_made_by_an_imported_module_prints_a_record_once(
    kind, propagate, tmp_path, monkeypatch, capfd
):
    name = f"own_handler_{kind}_{propagate}"
    source = textwrap.dedent(OWN_HANDLER).format(propagate=propagate)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    say(importlib.import_module(name).say, kind, **FRESH)
    monkeypatch.delitem(sys.modules, name)
    printed = sorted(capfd.readouterr().err.splitlines())
    assert printed == [f"batch {n}" for n in range(4)]


def test_a_handler_made_in_on_worker_start_gets_the_workers_records(
    kind, records, tmp_path
):
    hello = AddFile(tmp_path / "log")
    with Talking(log_index, hello=hello, **KINDS[kind]) as dataset:
        walk(dataset)
    wanted = [f"batch {n} of a.png" for n in range(4)]
    assert messages(records) == wanted
    assert sorted({*(tmp_path / "log").read_text().splitlines()}) == wanted
    for handler in LOG.handlers[1:]:
        LOG.removeHandler(handler)
        handler.close()


class AddFile:
    def __init__(self, path):
        self.path = path

    def __call__(self):
        LOG.addHandler(logging.FileHandler(self.path))


def test_what_the_worker_hooks_log_arrives(kind, records):
    with Talking(
        bool, hello=log_hello, goodbye=log_goodbye, **KINDS[kind]
    ) as dataset:
        walk(dataset)
        hellos = messages(records)
        assert 1 <= len(hellos) <= 2
        assert set(hellos) == {"hello"}
    workers = 1 if kind == "inline" else 2
    started = messages(records).count("hello")
    assert 1 <= started <= workers
    assert messages(records) == ["goodbye"] * started + ["hello"] * started


def log_hello():
    LOG.info("hello")


def log_goodbye():
    LOG.info("goodbye")


def test_what_is_logged_before_a_failure_arrives(kind, records):
    with Talking(log_and_fail, **KINDS[kind]) as dataset:
        with pytest.raises(ValueError, match="batch 0"):
            walk(dataset)
        assert "about to fail" in messages(records)


def log_and_fail(index):
    LOG.info("about to fail")
    raise ValueError(f"batch {index}")


def test_what_is_logged_before_a_failed_start_arrives(kind, records):
    with (
        Talking(bool, hello=log_and_refuse, **KINDS[kind]) as dataset,
        pytest.raises(ValueError, match="not today"),
    ):
        walk(dataset)
    assert "about to refuse" in messages(records)


def log_and_refuse():
    LOG.info("about to refuse")
    raise ValueError("not today")


def test_fit_builds_and_logs_every_batch_once(kind, records):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Talking(log_index, **KINDS[kind]) as dataset:
        model.fit(dataset, epochs=2, verbose=0)
    assert messages(records) == [
        f"batch {n} of a.png" for n in range(4) for _ in range(2)
    ]


# -- warnings -----------------------------------------------------------------


def warn(index):
    time.sleep(0.01)  # so that every worker gets a batch
    warnings.warn("a.png is dark", OwnWarning, stacklevel=1)


def warned(say_it, *filters, **options):
    """What is shown of the warnings of 8 batches, under these filters."""
    options = {"length": 8, **options}
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        for arguments in filters:
            warnings.filterwarnings(**arguments)
        say(say_it, **options)
    return [w for w in shown if "start_method" not in str(w.message)]


KINDS_OF_FOUR = [("process", 4), ("thread", 4), ("inline", 0)]


@pytest.mark.parametrize(("kind", "workers"), KINDS_OF_FOUR)
@pytest.mark.parametrize(
    ("action", "count"),
    [("default", 1), ("once", 1), ("module", 1), ("always", 8), ("ignore", 0)],
)
def test_a_warning_is_shown_as_often_as_the_filter_says(
    kind, workers, action, count
):
    shown = warned(warn, {"action": action}, kind=kind, workers=workers)
    assert len(shown) == count
    for warning in shown:
        assert str(warning.message) == "a.png is dark"
        assert warning.category is OwnWarning
        assert type(warning.message) is OwnWarning
        assert warning.filename == __file__
        assert warning.lineno == warn.__code__.co_firstlineno + 2


def test_the_last_filter_that_matches_decides(kind):
    ignore = {"action": "ignore"}
    always = {"action": "always"}
    by_category = {**always, "category": OwnWarning}
    assert len(warned(warn, ignore, by_category, kind=kind)) == 8
    assert warned(warn, by_category, ignore, kind=kind) == []
    by_message = {**always, "message": "a.png is"}
    assert len(warned(warn, ignore, by_message, kind=kind)) == 8
    elsewhere = {**always, "message": "b.png is"}
    assert warned(warn, ignore, elsewhere, kind=kind) == []


def test_a_filter_may_name_the_module_that_warns(kind):
    ignore = {"action": "ignore"}
    here = {"action": "always", "module": re.escape(__name__) + "$"}
    assert len(warned(warn, ignore, here, kind=kind)) == 8
    there = {"action": "always", "module": "somewhere_else"}
    assert warned(warn, ignore, there, kind=kind) == []


def test_a_warning_that_is_an_error_is_raised_where_it_is_given(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", OwnWarning)
        with (
            Talking(warn, **KINDS[kind]) as dataset,
            pytest.raises(OwnWarning, match="dark") as found,
        ):
            walk(dataset)
    frames = traceback.extract_tb(found.value.__traceback__)
    here = [(f.name, f.line) for f in frames if f.filename == __file__]
    name, line = here[-1]
    assert name == "warn"
    assert line.startswith("warnings.warn(")
    assert "__getitem__" in [name for name, _ in here]


def test_stacklevel_names_the_caller(kind):
    (warning,) = warned(warn_for_caller, {"action": "default"}, kind=kind)
    assert warning.filename == __file__
    assert warning.lineno == warn_for_caller.__code__.co_firstlineno + 1


def warn_for_caller(index):
    _warn_for_caller()


def _warn_for_caller():
    warnings.warn("a.png is dark", stacklevel=2)


def test_two_places_that_warn_in_the_same_words_are_two_warnings(
    kind, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    source = "import warnings\ndef say(i): warnings.warn('it is dark')\n"
    tellers = []
    for number in range(2):
        name = f"teller_{kind}_{number}"
        (tmp_path / f"{name}.py").write_text(source)
        tellers.append(importlib.import_module(name).say)
    say_both = Both(tellers)
    shown = warned(say_both, {"action": "default"}, kind=kind)
    for teller in tellers:
        monkeypatch.delitem(sys.modules, teller.__module__)
    assert len({warning.filename for warning in shown}) == 2
    assert len(shown) == 2


class Both:
    def __init__(self, tellers):
        self.tellers = tellers

    def __call__(self, index):
        for tell in self.tellers:
            tell(index)


def test_a_category_made_in_a_function_arrives_as_itself(kind):
    class LocalWarning(UserWarning):
        pass

    def warn_locally(index):
        warnings.warn("a.png is dark", LocalWarning, stacklevel=1)

    shown = warned(warn_locally, {"action": "default"}, kind=kind)
    assert [warning.category for warning in shown] == [LocalWarning]


class WarningOfTwo(UserWarning):
    def __init__(self, path, code):
        super().__init__(f"{path} has code {code}")
        self.code = code


def test_a_warning_with_two_arguments_arrives_as_itself(kind):
    (warning,) = warned(warn_of_two, {"action": "default"}, kind=kind)
    assert warning.category is WarningOfTwo
    assert str(warning.message) == "a.png has code 3"
    assert warning.message.code == 3


def warn_of_two(index):
    warnings.warn(WarningOfTwo("a.png", 3), stacklevel=1)


@pytest.mark.parametrize("character", ["x", "\N{GRINNING FACE}"])
def test_a_long_warning_arrives_shortened(character, capfd):
    default = {"action": "default"}
    (warning,) = warned(WARN_LONG[character], default, **FRESH)
    assert str(warning.message).startswith(character * 10_000)
    assert capfd.readouterr().err == ""


def warn_long(index):
    warnings.warn("x" * 1_000_000, stacklevel=1)


def warn_long_and_wide(index):
    warnings.warn("\N{GRINNING FACE}" * 1_000_000, stacklevel=1)


WARN_LONG = {"x": warn_long, "\N{GRINNING FACE}": warn_long_and_wide}


def test_what_the_worker_hooks_warn_of_arrives(kind):
    for hook in ("hello", "goodbye"):
        options = {"kind": kind, hook: warn_of_hook}
        (warning,) = warned(bool, {"action": "default"}, **options)
        assert str(warning.message) == "it is late"


def warn_of_hook():
    warnings.warn("it is late", stacklevel=1)


def test_captured_warnings_are_logged_once(kind, caplog):
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            say(warn, kind)
    finally:
        logging.captureWarnings(False)
    texts = [r.getMessage() for r in caplog.records if r.name == "py.warnings"]
    assert len(texts) == 1
    assert "OwnWarning: a.png is dark" in texts[0]


CATEGORY = """
    class HeavyWarning(UserWarning):
        pass
"""


def test_a_filter_does_not_have_workers_import_its_categorys_module(
    tmp_path, monkeypatch
):
    """PyTorch's filters would cost every worker a second or two."""
    (tmp_path / "heavy_module.py").write_text(textwrap.dedent(CATEGORY))
    monkeypatch.syspath_prepend(tmp_path)
    heavy = importlib.import_module("heavy_module")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", heavy.HeavyWarning)
        say(refuse_heavy_module)
    monkeypatch.delitem(sys.modules, "heavy_module")


def refuse_heavy_module(index):
    assert "heavy_module" not in sys.modules


def test_a_filter_whose_category_a_worker_cannot_import_stops_nothing():
    module = types.ModuleType("here_alone")
    category = type("HereWarning", (Warning,), {"__module__": "here_alone"})
    module.HereWarning = category
    sys.modules["here_alone"] = module
    try:
        shown = warned(
            warn,
            {"action": "default"},
            {"action": "error", "category": category},
        )
    finally:
        del sys.modules["here_alone"]
    assert len(shown) == 1


# -- a whole script -----------------------------------------------------------

SCRIPT = """
    import logging
    import sys
    import warnings

    import numpy as np

    from keras_fastdata import FastPyDataset


    class OwnWarning(UserWarning):
        pass


    class Samples(FastPyDataset):
        def __len__(self):
            return 4

        def on_worker_start(self):
            print(f"{self.name}: hello {self.worker_index}")

        def on_worker_stop(self):
            print(f"{self.name}: goodbye", end="")
            logging.getLogger("samples").error("%s: over", self.name)

        def __getitem__(self, index):
            print(f"{self.name}: batch {index}")
            print(f"{self.name}: trouble {index}", file=sys.stderr)
            warnings.warn(f"{self.name}: own", OwnWarning)
            warnings.warn(f"{self.name}: old", DeprecationWarning)
            logging.getLogger("samples").warning("%s: %d", self.name, index)
            return np.zeros((4, 2)), np.zeros((4, 1))


    for kind, options in KINDS.items():
        print(f"{kind}: begin")  # into a buffer, where stdout is a pipe
        with warnings.catch_warnings(record=True) as shown:
            samples = Samples(**options)
            samples.name = kind
            list(samples)
        for warning in shown:
            if warning.category in (OwnWarning, DeprecationWarning):
                print(warning.message, warning.category.__name__, "shown")
        samples.close()
        print()
    samples = Samples(workers=2, use_multiprocessing=True)
    samples.name = "left open"
    list(samples)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory, zygote):
    """Output of a script, whose classes are those of `__main__`."""
    path = tmp_path_factory.mktemp("script") / "talk.py"
    kinds = {**KINDS, "fork": {**PROCESSES, "start_method": "fork"}}
    path.write_text(textwrap.dedent(SCRIPT).replace("KINDS", repr(kinds)))
    ended = zygote.run(path)
    assert ended.returncode == 0, ended.stderr
    return ended


SCRIPT_KINDS = [*KINDS, "fork"]


@pytest.mark.parametrize("kind", [*SCRIPT_KINDS, "left open"])
def test_every_print_appears_once(script, kind):
    lines = collections.Counter(
        line
        for line in script.stdout.replace("goodbye", "goodbye\n").splitlines()
        if line.startswith(f"{kind}: ") and not line.endswith("shown")
    )
    begin = {} if kind == "left open" else {f"{kind}: begin": 1}
    hellos = [line for line in lines if "hello" in line]
    assert lines == {
        **begin,
        **{f"{kind}: batch {n}": 1 for n in range(4)},
        **dict.fromkeys(hellos, 1),
        f"{kind}: goodbye": len(hellos),
    }
    assert 1 <= len(hellos) <= 2
    trouble = re.findall(rf"^{kind}: trouble (\d)$", script.stderr, re.M)
    assert sorted(trouble) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("kind", [*SCRIPT_KINDS, "left open"])
def test_every_record_of_a_script_appears_once(script, kind):
    numbers = re.findall(rf"^{kind}: (\d)$", script.stderr, re.M)
    assert sorted(numbers) == ["0", "1", "2", "3"]
    started = script.stdout.count(f"{kind}: hello")
    assert script.stderr.count(f"{kind}: over") == started


@pytest.mark.parametrize("kind", SCRIPT_KINDS)
def test_a_category_of_a_script_arrives_as_itself(script, kind):
    assert script.stdout.count(f"{kind}: own OwnWarning shown") == 1


@pytest.mark.parametrize("kind", SCRIPT_KINDS)
def test_a_deprecation_in_a_script_is_shown_as_python_shows_it(script, kind):
    """By default, those of `__main__` are, and no others."""
    assert script.stdout.count(f"{kind}: old DeprecationWarning shown") == 1
