"""Rules for columns: what is x, what is y, and which dtypes they have."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import re
import sys

import keras
import numpy as np
import pytest
from held_samples import HELD
from matrix import same
from places import KINDS, in_each_trainer

from keras_fastdata import ArrayDataset, GeneratorDataset, SampleDataset
from keras_fastdata.combine import concat

pytestmark = pytest.mark.usefixtures("kept_forkserver")

ROWS = np.array(
    [(1, 0.5, "a"), (2, 1.5, "b"), (3, 2.5, "c")],
    [("number", "i4"), ("half", "f8"), ("letter", "U1")],
)


def batch(source=ROWS, **kwargs):
    return SampleDataset(source, **kwargs)[0]


# -- columns and label ---------------------------------------------------------


def test_without_arguments_x_is_a_dict_of_all_columns():
    x = batch()
    assert list(x) == ["number", "half", "letter"]


def test_a_name_makes_x_an_array_and_a_list_makes_it_a_dict():
    assert batch(columns="number").tolist() == [1, 2, 3]
    assert list(batch(columns=["half"])) == ["half"]


def test_a_label_becomes_y_and_leaves_x():
    x, y = batch(label="number")
    assert list(x) == ["half", "letter"]
    assert y.tolist() == [1, 2, 3]


def test_a_list_of_labels_becomes_a_dict():
    x, y = batch(columns="letter", label=["number", "half"])
    assert x.tolist() == ["a", "b", "c"]
    assert list(y) == ["number", "half"]


def test_a_label_stays_in_x_if_columns_names_it():
    x, y = batch(columns="half", label="half")
    assert x.tolist() == y.tolist()


@pytest.mark.parametrize("argument", ["columns", "label"])
def test_an_unknown_name_is_refused_and_the_next_one_named(argument):
    with pytest.raises(ValueError, match=r"'numbr'.*Did you mean 'number'\?"):
        SampleDataset(ROWS, **{argument: "numbr"})
    with pytest.raises(TypeError, match="must be a name"):
        SampleDataset(ROWS, **{argument: 3})


def test_the_rules_hold_for_samples_that_are_dicts():
    rows = [{"a": [1, 2], "b": 0.5, "y": 1}, {"a": [3, 4], "b": 1.5, "y": 0}]
    x, y = batch(rows, columns="a", label="y")
    assert (x.tolist(), y.tolist()) == ([[1, 2], [3, 4]], [1, 0])
    assert batch(rows, columns=["b"])["b"].dtype == np.float32


def test_samples_without_names_have_no_label():
    with pytest.raises(TypeError, match="need samples with named parts"):
        batch([(1, 2)], label="y")


# -- transform and collate -----------------------------------------------------


def test_a_transform_gets_a_row_with_the_label_which_is_split_off_after_it():
    seen = []

    def double(row):
        seen.append(row)
        return {"twice": 2 * row["half"], "number": -row["number"]}

    x, y = batch(columns="half", label="number", transform=double)
    assert seen[1] == {"half": 1.5, "number": 2}
    assert type(seen[1]["half"]) is float
    assert x["twice"].tolist() == [1, 3, 5]
    assert x["twice"].dtype == np.float32
    assert y.tolist() == [-1, -2, -3]


def test_a_transform_may_make_the_label_or_return_a_tuple():
    def label(row):
        return {"x": row["half"], "y": row["number"] > 1}

    assert batch(label="y", transform=label)[1].tolist() == [0, 1, 1]
    pair = batch(label="half", transform=lambda row: (row["half"], 1))
    assert pair[1].tolist() == [1, 1, 1]


def test_a_transform_draws_the_same_for_a_sample_in_any_batch():
    def noisy(row, rng):
        return {**row, "draw": rng.random()}

    found = {}
    for size in 1, 2:
        with SampleDataset(
            ROWS, size, transform=noisy, shuffle=True, seed=1, workers=0
        ) as dataset:
            for part in dataset:
                found.setdefault(size, {}).update(
                    zip(part["number"].tolist(), part["draw"], strict=True)
                )
    assert found[1] == found[2]
    assert len(set(found[1].values())) == 3


def test_a_transform_may_write_to_a_row():
    def clear(row):
        row["pair"][:] = 0
        return row

    kwargs, _ = HELD["structured_array"](None)
    source = kwargs["source"]
    before = source.copy()
    assert not batch(source, transform=clear)["pair"].any()
    assert (source == before).all()


def test_a_class_may_have_the_functions_as_methods():
    class Own(SampleDataset):
        def transform(self, row):
            return {**row, "half": row["half"] + self.epoch}

        def collate(self, samples):
            return np.array([sample["half"] for sample in samples])

    with Own(ROWS, workers=0) as dataset:
        list(dataset)
        assert [each.tolist() for each in dataset] == [[1.5, 2.5, 3.5]]


def test_collate_makes_the_batch_and_may_draw():
    def mixed(samples, rng):
        halves = np.array([sample["half"] for sample in samples])
        return halves, rng.random()

    with SampleDataset(ROWS, 2, collate=mixed, seed=1, workers=0) as dataset:
        (one, first), (_, second) = dataset
    assert one.tolist() == [0.5, 1.5]
    assert first != second


@pytest.mark.parametrize("name", ["transform", "collate"])
def test_what_is_no_function_is_refused(name):
    with pytest.raises(TypeError, match=f"`{name}` must be a function"):
        SampleDataset(ROWS, **{name: "sum"})


def test_a_class_with_samples_of_its_own_is_told_where_to_transform():
    class Own(SampleDataset):
        def get_sample(self, index):
            return index

    with pytest.raises(TypeError, match="Call it in `get_sample`"):
        Own(ROWS, transform=abs)


# -- values --------------------------------------------------------------------


def test_numbers_keep_their_dtype_but_float64_becomes_float32():
    kinds = ["i1", "i4", "i8", "u1", "?", "f2", "f4", "f8"]
    rows = np.zeros(2, [(kind, kind) for kind in kinds])
    assert [part.dtype for part in batch(rows).values()] == [
        *(np.dtype(kind) for kind in kinds[:-1]),
        np.float32,
    ]


def test_categories_are_their_values():
    pd = pytest.importorskip("pandas")
    pl = pytest.importorskip("polars")
    frame = pd.DataFrame({"c": pd.Categorical(["u", "v", "u"])})
    for source in (
        frame,
        pl.DataFrame({"c": ["u", "v", "u"]}).cast(pl.Categorical),
    ):
        assert batch(source, columns="c").tolist() == ["u", "v", "u"]


def test_a_string_keeps_its_zeros():
    pa = pytest.importorskip("pyarrow")
    values = [b"a\0", b"\0\0", b""]
    x = batch(pa.table({"x": values}), columns="x")
    assert x.tolist() == values


def test_lists_of_numbers_beside_strings_are_refused():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"c": [["a", 1], ["b", 2]]}, dtype=object)
    with pytest.raises(ValueError, match="'c' has values of type int, str"):
        batch(frame)


def test_a_list_in_a_dict_keeps_its_numbers_and_zeros():
    rows = [{"c": ["a", 1], "d": ["a\0"]}, {"c": ["b", 2], "d": ["b"]}]
    x = batch(rows)
    assert x["c"].tolist() == [["a", 1], ["b", 2]]
    assert x["d"].tolist() == [["a\0"], ["b"]]


def test_structs_become_dicts():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"s": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]})
    x = batch(table)["s"]
    assert x["a"].tolist() == [1, 2]
    assert x["b"].tolist() == ["x", "y"]


def test_lists_of_lists_become_axes_or_are_padded():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"m": [[[1, 2]], [[3, 4], [5, 6]]]})
    with pytest.raises(ValueError, match=r"'m'.*pad_to='longest'"):
        batch(table)
    x = batch(table, columns="m", pad_to="longest")
    assert x.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def nulls():
    pd = pytest.importorskip("pandas")
    pl = pytest.importorskip("polars")
    pa = pytest.importorskip("pyarrow")
    values = {"n": [1, None, 3], "t": ["a", None, "c"], "f": [0.5, None, 1.5]}
    frame = pd.DataFrame(values).astype({"n": "Int64", "f": "Float64"})
    return [frame, pl.DataFrame(values), pa.table(values)]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", ["n", "t", "f"])
def test_a_null_is_an_error_that_names_column_row_and_remedy(place, name):
    source = nulls()[place]
    with pytest.raises(ValueError, match=f"'{name}'.*row 1.*`columns=`"):
        batch(source, columns=name)

    def filled(row):
        return {name: 7 if row[name] is None else 8}

    x = batch(source, columns=name, transform=filled)
    assert x.tolist() == [8, 7, 8]


@pytest.mark.parametrize("lists", [[[1, 2], [3, None]], [[1], [2, None], []]])
def test_a_null_in_a_list_is_named_as_well(lists):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"'x' has no value \(null\) in row 1"):
        batch(pa.table({"x": lists}), pad_to="longest")


def test_python_objects_in_a_polars_frame_are_refused():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"x": [1], "o": pl.Series([object()])})
    with pytest.raises(TypeError, match=r"'o' has Python objects.*drop"):
        SampleDataset(frame)
    assert batch(frame.drop("o"), columns="x").tolist() == [1]


def test_integers_that_fit_no_array_are_an_error_that_names_the_column():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"big": np.array([2**70, 1], object)})
    with pytest.raises(ValueError, match="Column 'big'"):
        batch(frame)


def test_a_pandas_frame_is_read_without_arrow_too(monkeypatch):
    pd = pytest.importorskip("pandas")
    kwargs, _ = HELD["dict_rows"](None)
    values = pd.DataFrame(kwargs.pop("source")).astype({"letter": object})
    wanted = SampleDataset(values, 4, **kwargs)[1]
    absent = pd.DataFrame({"n": pd.array([1, None], "Int64"), "t": ["a", None]})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        same(SampleDataset(values, 4, **kwargs)[1], wanted)
        for name in absent:
            with pytest.raises(ValueError, match=f"'{name}'.*row 1"):
                batch(absent.astype({"t": object}), columns=name)


def test_nan_is_a_number():
    pd = pytest.importorskip("pandas")
    x = batch(pd.DataFrame({"f": [0.5, np.nan]}), columns="f")
    np.testing.assert_array_equal(x, [0.5, np.nan])


@pytest.mark.parametrize(
    "value",
    [datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), object()],
)
def test_values_that_no_model_takes_are_refused_by_the_name_of_the_column(
    value,
):
    pd = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"Column 'when'.*`columns=`"):
        batch(pd.DataFrame({"when": [value] * 3}))


def test_a_duration_can_be_converted_as_its_error_says():
    durations = {"took": np.array([1, 2], "timedelta64[m]")}
    pd = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"row\['took'\]") as info:
        batch(pd.DataFrame(durations))
    remedy = re.search("`(row.*)`", str(info.value))[1]
    assert eval(remedy, {"row": durations}).tolist() == [60, 120]


@pytest.mark.parametrize("kind", ["string_view", "run_end_encoded"])
def test_columns_of_newer_arrow_types_are_read_like_plain_ones(kind):
    pa = pytest.importorskip("pyarrow")
    if kind == "string_view":
        plain = pa.chunked_array([["a", "b"], ["b", "a longer string"]])
        newer = plain.cast(pa.string_view())
    else:
        plain = pa.chunked_array([[1, 1], [2, 1]])
        encode = pa.compute.run_end_encode
        newer = pa.chunked_array([encode(chunk) for chunk in plain.chunks])
    assert newer.type != plain.type
    same(batch(pa.table({"c": newer})), batch(pa.table({"c": plain})))


def test_numbers_of_128_bits_are_refused_with_a_conversion():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"n": pl.Series([1, 2], dtype=pl.Int128)})
    with pytest.raises(TypeError, match=r"'n' has numbers of 128 bits") as info:
        batch(frame)
    remedy = re.search("`(frame.*)`", str(info.value))[1]
    converted = eval(remedy, {"frame": frame, "pl": pl})
    assert batch(converted)["n"].tolist() == [1, 2]


def test_decimals_become_floats():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"d": [decimal.Decimal("1.5"), decimal.Decimal("2.5")]})
    assert batch(table, columns="d").tolist() == [1.5, 2.5]


def test_a_table_without_names_belongs_to_another_class():
    pd = pytest.importorskip("pandas")
    with pytest.raises(
        TypeError, match=r"must be named by strings.*ArrayDataset"
    ):
        SampleDataset(pd.DataFrame(np.ones((2, 2))))
    twice = pd.DataFrame(np.ones((2, 2)), columns=["a", "a"])
    with pytest.raises(ValueError, match="several columns with the name 'a'"):
        SampleDataset(twice)


def test_a_mixed_frame_is_sent_from_array_dataset_to_sample_dataset():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    with pytest.raises(TypeError, match="`SampleDataset"):
        ArrayDataset(frame)


def test_a_table_that_is_none_yet_or_several_is_told_what_to_pass():
    pl = pytest.importorskip("polars")
    datasets = pytest.importorskip("datasets")
    with pytest.raises(TypeError, match=r"`source\.collect\(\)`"):
        SampleDataset(pl.LazyFrame({"a": [1]}))
    several = datasets.DatasetDict(test=datasets.Dataset.from_dict({"a": [1]}))
    with pytest.raises(TypeError, match=r"`source\['test'\]`"):
        SampleDataset(several)


def test_a_filtered_arrow_dataset_is_told_to_become_a_table(tmp_path):
    kwargs, _ = HELD["arrow_dataset"](tmp_path)
    import pyarrow.dataset

    found = kwargs["source"].filter(pyarrow.dataset.field("number") > 3)
    with pytest.raises(ValueError, match=r"`source\.to_table\(\)`"):
        SampleDataset(found)


def test_a_hugging_face_dataset_gives_the_same_batch_in_any_format():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"x": [[0.5, 1.5]] * 3, "t": ["a", "b", "c"], "y": [1, 2, 3]}
    )
    wanted = batch(made, label="y")
    kinds = ["numpy", "pandas", "arrow"]
    kinds += [k for k in ("torch", "polars") if importlib.util.find_spec(k)]
    for kind in kinds:
        same(batch(made.with_format(kind), label="y"), wanted)
    shown = made.with_format("numpy", columns=["x", "y"])
    assert list(batch(shown, label="y")[0]) == ["x"]


def test_an_array_column_of_hugging_face_keeps_its_dtype_and_its_nulls():
    datasets = pytest.importorskip("datasets")
    kind = datasets.Array2D((1, 2), "uint8")
    pixels = {"pixels": kind, "parts": {"inner": kind}}

    def made(values):
        columns = {"pixels": values, "parts": [{"inner": v} for v in values]}
        return datasets.Dataset.from_dict(columns, datasets.Features(pixels))

    wanted = np.array([[[1, 2]], [[3, 4]]], "uint8")
    x = batch(made([[[1, 2]], [[3, 4]]]))
    same(x, {"pixels": wanted, "parts": {"inner": wanted}})
    with pytest.raises(ValueError, match="no value"):
        batch(made([None, [[3, 4]]]), columns="pixels")


def test_a_transform_of_hugging_face_decides_what_a_sample_is():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": [1, 2]}).with_transform(
        lambda rows: {"tokens": [[x, -x] for x in rows["x"]], "y": rows["x"]}
    )
    x, y = batch(made, label="y")
    assert x["tokens"].tolist() == [[1, -1], [2, -2]]
    assert y.tolist() == [1, 2]


def test_columns_are_masked_and_combined_like_samples():
    rows = [{"t": [1], "y": 0}, {"t": [1, 2], "y": 1}]
    kwargs = {"label": "y", "pad_to": "longest", "mask": "mask"}
    pa = pytest.importorskip("pyarrow")
    table = SampleDataset(pa.Table.from_pylist(rows), **kwargs)
    same(table[0], SampleDataset(rows, **kwargs)[0])
    both = concat([table, table], batch_size=4, pad_to="longest")
    x, y = both[0]
    assert x["t"].tolist() == [[1, 0], [1, 2]] * 2
    assert y.tolist() == [0, 1, 0, 1]


def test_labels_and_lengths_of_a_table_may_decide_the_order():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"t": [[1] * (1 + k % 4) for k in range(40)]})
    table = table.append_column("y", pa.array([int(k < 4) for k in range(40)]))
    with SampleDataset(
        table, 8, label="y", sampler="balanced", pad_to=4, workers=0, seed=1
    ) as dataset:
        assert [int(y.sum()) for _, y in dataset] == [4] * 5
    with SampleDataset(
        table,
        10,
        columns="t",
        bucket_by=lambda row: len(row["t"]),
        workers=0,
        pad_to="longest",
    ) as dataset:
        assert sorted(x.shape[1] for x in dataset) == [1, 2, 3, 4]


# -- training ------------------------------------------------------------------


def model():
    inputs = {"half": keras.Input((1,)), "pair": keras.Input((2,))}
    layer = keras.layers.Concatenate()
    joined = layer(
        [keras.ops.cast(each, "float32") for each in inputs.values()]
    )
    made = keras.Model(inputs, keras.layers.Dense(1)(joined))
    made.compile("sgd", "mse")
    return made


@pytest.mark.backend
@pytest.mark.parametrize("place", in_each_trainer)
@pytest.mark.parametrize(
    "held",
    [
        "pandas_frame",
        *(
            pytest.param(held, marks=pytest.mark.long)
            for held in (
                "polars_frame",
                "hugging_face",
                "structured_array",
                "dict_rows",
            )
        ),
    ],
)
def test_a_model_trains_on_a_table(place, held, tmp_path):

    kwargs, _ = HELD[held](tmp_path)
    kwargs |= {"columns": ["half", "pair"], "pad_to": None}
    with SampleDataset(batch_size=8, **kwargs, **KINDS[place]) as dataset:
        history = model().fit(dataset, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


@pytest.mark.backend
def test_fit_names_the_argument_for_the_targets():
    dataset = SampleDataset(ROWS, columns=["number", "half"], workers=0)
    with pytest.raises(ValueError, match=r"'number', 'half'.*`label=`"):
        model().fit(dataset, verbose=0)
    dataset = GeneratorDataset(lambda: [np.ones((2, 2))], workers=0)
    with pytest.raises(ValueError, match="without targets"):
        model().evaluate(dataset, verbose=0)


@pytest.mark.backend
def test_fit_names_targets_that_are_strings():
    dataset = SampleDataset(ROWS, columns=["half"], label="letter", workers=0)
    with pytest.raises(ValueError, match=r"y in the batches.*has strings"):
        model().fit(dataset, verbose=0)


@pytest.mark.backend
def test_a_model_with_a_step_of_its_own_needs_no_targets():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        def compute_loss(self, x, y, y_pred, *args, **kwargs):
            return keras.ops.mean(keras.ops.square(y_pred))

    own = Own()
    own.compile("sgd", "mse")
    dataset = SampleDataset(np.ones((4, 2), "float32"), 2, workers=0)
    assert own.fit(dataset, verbose=0).history["loss"]


def test_a_table_can_be_shown():
    matplotlib = pytest.importorskip("matplotlib")
    kwargs, _ = HELD["dict_rows"](None)
    figure = SampleDataset(batch_size=4, **kwargs).show(3)
    texts = [each.get_text() for each in figure.findobj(matplotlib.text.Text)]
    assert any("letter" in text for text in texts)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"label": "kind", "sampler": "balanced"},
        {"bucket_by": "tokens", "pad_to": "longest"},
    ],
)
def test_an_order_by_a_column_with_nulls_is_an_error(kwargs):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"kind": ["a", "b", None], "tokens": [[1], [2, 3], None]})
    with pytest.raises(ValueError, match=r"row 2 has none \(null\)"):
        len(SampleDataset(table, **kwargs))
