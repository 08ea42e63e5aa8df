"""What people hold: the same samples in the objects of many libraries.

Each function returns arguments of `SampleDataset`, and how to read the numbers
of the samples from a batch. It skips the test where its library is missing.
"""

from __future__ import annotations

import numpy as np
import pytest

COUNT = 20
LETTERS = [chr(97 + k) for k in range(COUNT)]


def columns():
    """A table: numbers, halves, letters, classes, pairs and lists."""
    return {
        "number": list(range(COUNT)),
        "half": [k / 2 for k in range(COUNT)],
        "letter": LETTERS,
        "pair": [[k, -k] for k in range(COUNT)],
        "many": [[k] * (1 + k % 3) for k in range(COUNT)],
    }


def _table(source, names="number half letter pair many"):
    kwargs = {
        "source": source,
        "columns": names.split(),
        "label": "number",
        "pad_to": {"many": 3} if "many" in names else None,
    }
    return kwargs, lambda batch: batch[1]


def pandas_frame(_):
    return _table(pytest.importorskip("pandas").DataFrame(columns()))


def polars_frame(_):
    return _table(pytest.importorskip("polars").DataFrame(columns()))


def arrow_table(_):
    pa = pytest.importorskip("pyarrow")
    table = pa.table(columns())
    parts = [table.slice(begin, 3) for begin in range(0, COUNT, 3)]
    return _table(pa.concat_tables(parts))


def arrow_dataset(folder):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table(columns())
    for name, begin in ("a", 0), ("b", 12):
        part = table.slice(begin, 12)
        path = folder / f"{name}.parquet"
        parquet.write_table(part, path, row_group_size=5)
    return _table(pytest.importorskip("pyarrow.dataset").dataset(folder))


def hugging_face(_):
    datasets = pytest.importorskip("datasets")
    return _table(datasets.Dataset.from_dict(columns()))


def hugging_face_file(folder):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(columns())
    made.save_to_disk(folder / "saved")
    found = datasets.load_from_disk(folder / "saved").with_format("pandas")
    return _table(found.shuffle(seed=1))


def hugging_face_images(_):
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    images = [
        image.fromarray(np.full((4, 5, 3), k, np.uint8)) for k in range(COUNT)
    ]
    made = datasets.Dataset.from_dict(
        {"image": images, "number": list(range(COUNT))}
    ).cast_column("image", datasets.Image())
    return _table(made, "image")


def structured_array(_):
    kinds = [
        ("number", "i8"),
        ("half", "f8"),
        ("letter", "U1"),
        ("pair", "i8", 2),
    ]
    names = [kind[0] for kind in kinds]
    rows = zip(*(columns()[name] for name in names), strict=True)
    source = np.array([(*row[:3], tuple(row[3])) for row in rows], kinds)
    return _table(source, " ".join(names))


def zarr_array(folder):
    zarr = pytest.importorskip("zarr")
    array = zarr.open(
        str(folder / "a.zarr"), mode="w", shape=(COUNT, 2), dtype="i8"
    )
    array[:] = np.arange(COUNT)[:, None] * [1, 2]
    return {"source": array}, lambda batch: batch[:, 0]


def h5_array(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file["rows"] = np.arange(COUNT)[:, None] * [1, 2]
    return (
        {"source": h5py.File(folder / "a.h5")["rows"]},
        lambda batch: batch[:, 0],
    )


def torch_dataset(_):
    torch = pytest.importorskip("torch")
    numbers = torch.arange(COUNT)
    source = torch.utils.data.TensorDataset(torch.ones(COUNT, 2), numbers)
    return {"source": source}, lambda batch: batch[1]


def grain_source(_):
    grain = pytest.importorskip("grain")
    source = grain.sources.RangeDataSource(0, COUNT, 1)
    return {"source": source}, np.asarray


def grain_map(_):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(COUNT).map(Named())
    return {"source": source, "label": "number"}, lambda batch: batch[1]


class Named:
    def __call__(self, number):
        return {"number": number, "list": [number, 1]}


def dict_rows(_):
    names = columns()
    source = [
        dict(zip(names, row, strict=True))
        for row in zip(*names.values(), strict=True)
    ]
    return _table(source)


def paths(folder):
    source = [folder / f"{number}.png" for number in range(COUNT)]
    return {"source": source}, lambda batch: [
        int(path.rpartition("/")[2][:-4]) for path in batch
    ]


HELD = {
    function.__name__: function
    for function in (
        *(pandas_frame, polars_frame, arrow_table, arrow_dataset),
        *(hugging_face, hugging_face_file, hugging_face_images),
        *(structured_array, zarr_array, h5_array, torch_dataset),
        *(grain_source, grain_map, dict_rows, paths),
    )
}
