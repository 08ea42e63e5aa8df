"""LoaderHealth names the lines that building batches takes longest in."""

from __future__ import annotations

import collections
import inspect
import itertools
import sys
import threading
import types

import hot_samples
import keras
import pytest
from hot_samples import WAYS, Slow

from keras_fastdata import LoaderHealth
from keras_fastdata.health.hot_lines import HotLine, hot_lines
from keras_fastdata.metrics import stack_sampler
from keras_fastdata.metrics.timing import Stopwatch

KINDS = {
    "inline": {},
    "threads": {"workers": 2},
    "processes": {"workers": 2, "use_multiprocessing": True},
}


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hot") / "data"
    path.write_bytes(bytes(30_000_000))
    return str(path)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(
            pytest.param(way, kind, marks=pytest.mark.long)
            for way in WAYS
            for kind in KINDS
        ),
        ("python_loop", "inline"),
        ("sleep", "threads"),
        ("sleep", "processes"),
    ],
)
def test_the_line_that_takes_longest_is_found(way, kind, model, path):
    health = LoaderHealth(verbose=0)
    epochs = 1
    with Slow(way, path, **KINDS[kind]) as dataset:
        model.fit(dataset, epochs=epochs, verbose=0, callbacks=[health])
        while not health.summary().hot_lines:  # too few samples: a busy machine
            epochs *= 2
            model.fit(dataset, epochs=epochs, verbose=0, callbacks=[health])
    hottest = health.summary().hot_lines[0]
    lines = inspect.getsource(hot_samples).splitlines()
    assert lines[hottest.line - 1].endswith("HOT")
    assert hottest.function in inspect.getsource(WAYS[way])
    assert hottest.file == hot_samples.__file__
    assert hottest.share > 0.4


def _line_of(function, end):
    """The number of the line of a function that ends so."""
    lines, first = inspect.getsourcelines(function)
    (found,) = (n for n, line in enumerate(lines) if line.endswith(f"{end}\n"))
    return first + found


def test_the_lines_are_those_of_the_latest_fit(model, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    stacks = tmp_path / "stacks.txt"
    health = LoaderHealth(report=page, stacks=stacks, verbose=1)

    def watch(watched):
        """Meets each build at one line, and now and then at another."""
        within = _line_of(Slow.__getitem__, "WAYS[self.way](self)")
        hot = _line_of(WAYS[dataset.way], "# HOT")
        function = {"generator": "numbers"}.get(dataset.way, dataset.way)
        calls = (
            f"__getitem__ ({hot_samples.__file__}:{within});"
            f"{function} ({hot_samples.__file__}:{hot})",
            f"__getitem__ ({hot_samples.__file__}:{within + 1})",
        )
        for call in calls[0], calls[0], calls[0], calls[1]:
            watched.add_stack(call)

    monkeypatch.setattr(stack_sampler, "watch", watch)
    with Slow("sleep") as dataset:
        model.fit(dataset, verbose=0, callbacks=[health])
        assert "sleep (" in stacks.read_text()
        dataset.way = "generator"
        model.fit(dataset, epochs=2, verbose=0, callbacks=[health])
    assert "sleep (" not in stacks.read_text()
    assert ";numbers (" in stacks.read_text()
    assert {line.function for line in health.summary().hot_lines} == {
        "numbers",
        "__getitem__",
    }
    assert "Hottest line: `time.sleep(0.002)" in str(health.summary())
    assert "time.sleep(0.002)" in page.read_text()


class SlowFirst(Slow):
    """Is slow in the way that is named for its first batch alone."""

    is_first = True

    def __getitem__(self, index):
        if self.is_first:
            self.is_first = False
            return super().__getitem__(index)
        return hot_samples.X, hot_samples.X[:, :1]


@pytest.mark.backend
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_line_of_a_late_first_batch_is_named(
    workers, is_built, monkeypatch
):
    inputs = [keras.Input((2,))] if is_built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    place = f"{hot_samples.__file__}:{_line_of(WAYS['sleep'], '# HOT')}"
    met = []

    def watch(watched):
        if not met:  # as the first build begins
            met.extend([f"sleep ({place})"] * 30)
            for stack in met:
                watched.add_stack(stack)

    monkeypatch.setattr(stack_sampler, "watch", watch)
    health = LoaderHealth(verbose=0)
    with SlowFirst("sleep", workers=workers) as dataset:
        for number in range(2):
            model.fit(dataset, epochs=2, verbose=0, callbacks=[health])
            lines = health.summary().hot_lines
            functions = [line.function for line in lines]
            assert functions == ([] if number else ["sleep"])


class _Watched:
    thread = 0
    owns_process = False


@pytest.mark.parametrize("count", range(1, 25, 3))
def test_the_sampling_thread_may_close_what_it_samples_at_any_line(count):
    # As the garbage collector does, which may run there at any line.
    watched = _Watched()
    returns = itertools.count(1)

    def close(frame, event, function):
        if event == "c_return" and next(returns) == count:
            stack_sampler.ignore(watched)

    threading.setprofile(close)
    try:
        stack_sampler.watch(watched)
    finally:
        threading.setprofile(None)
    for thread in threading.enumerate():
        if "stack-sampler" in thread.name:
            thread.join(10)
            assert not thread.is_alive()
    assert next(returns) > count


class Unmeasured(Slow):
    """Is trained without LoaderHealth; counts its builds."""

    builds = 0

    def __getitem__(self, index):
        self.builds += 1
        return super().__getitem__(index)


def _unbuilt_model():
    """Keras needs a batch to build it, before a LoaderHealth could begin."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_without_loader_health_only_the_first_build_is_sampled(monkeypatch):
    met = []
    with Unmeasured("sleep", workers=0) as dataset:
        monkeypatch.setattr(
            Stopwatch, "add_stack", lambda *_: met.append(dataset.builds)
        )
        _unbuilt_model().fit(dataset, verbose=0)
        assert dataset.builds >= len(dataset)
    assert set(met) <= {1, 2}  # on a busy machine, the next one has begun


@pytest.mark.parametrize("workers", [0, 1])
def test_no_thread_samples_builds_that_are_not_measured(workers):
    class Looks(keras.callbacks.Callback):
        names = ()

        def on_train_batch_end(self, batch, logs=None):
            if batch == 25:  # what was built before training began is used up
                self.names = [thread.name for thread in threading.enumerate()]

    looks = Looks()
    with Unmeasured("sleep", workers=workers) as dataset:
        _unbuilt_model().fit(dataset, verbose=0, callbacks=[looks])
    assert looks.names
    assert "keras_fastdata-stack-sampler" not in looks.names


# -- the pure part -----------------------------------------------------------


def stacks(**counts):
    """Stacks such as `get_3__rotate_9`: calls with their lines."""
    found = collections.Counter()
    for path, count in counts.items():
        calls = (call.rsplit("_", 1) for call in path.split("__"))
        found[";".join(f"{f} (/home/data.py:{n})" for f, n in calls)] = count
    return found


def named(lines):
    return [(line.function, line.line, round(line.share, 2)) for line in lines]


def test_a_call_is_named_where_its_function_has_no_line_that_stands_out():
    met = stacks(get_3__rotate_9=40, get_3__rotate_10=40, get_4=20)
    assert named(hot_lines(met)) == [("get", 3, 0.8), ("get", 4, 0.2)]


def test_the_inner_line_is_named_where_it_has_most_of_the_call():
    met = stacks(get_3__rotate_9=70, get_3__rotate_10=10, get_4=20)
    assert named(hot_lines(met, most=1)) == [("rotate", 9, 0.7)]


def test_further_lines_are_found_below_the_same_call():
    met = stacks(get_3__load_5=70, get_3__load_6=20, get_3__load_7=10)
    expected = [("load", 5, 0.7), ("load", 6, 0.2), ("load", 7, 0.1)]
    assert named(hot_lines(met)) == expected
    assert named(hot_lines(met, most=2)) == expected[:2]


def test_no_line_is_named_that_calls_another_one():
    met = stacks(get_3__load_5=60, get_3__load_6=25, get_3__load_7=15)
    assert [line.line for line in hot_lines(met)] == [3]
    met = stacks(get_3__load_5=70, get_3__load_6=15, get_3__load_7=15)
    assert [line.line for line in hot_lines(met)] == [5, 6, 7]


def test_lines_of_little_share_are_left_out():
    met = stacks(get_3=990, get_4=10)
    assert named(hot_lines(met)) == [("get", 3, 0.99)]


def test_few_stacks_say_nothing():
    assert hot_lines(stacks(get_3=19)) == ()


def test_lines_of_installed_packages_count_for_the_users_line_above():
    met = collections.Counter(
        {
            f"get (/home/data.py:3);svd ({keras.__file__}:{n})": 10
            for n in range(4)
        }
    )
    assert named(hot_lines(met)) == [("get", 3, 1.0)]


def test_a_stack_without_a_line_of_the_users_is_named_by_its_outermost_call():
    met = collections.Counter(
        {f"get ({keras.__file__}:3);a (<frozen b>:1)": 30}
    )
    assert named(hot_lines(met)) == [("get", 3, 1.0)]


def test_a_line_of_a_notebook_is_placed_in_its_cell(monkeypatch):
    class Shell:
        """IPython, as far as it names the code of cells."""

        compile = property(lambda self: self)

        def format_code_name(self, name):
            return ("Cell", "In[3]") if name == "/tmp/kernel/1.py" else None

    fake = types.SimpleNamespace(get_ipython=Shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert HotLine("/tmp/kernel/1.py", 7, "read", 0.5).place == "In[3] line 7"
    assert HotLine("/home/data.py", 7, "read", 0.5).place == "data.py line 7"
