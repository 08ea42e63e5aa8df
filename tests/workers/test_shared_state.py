"""A dataset's state in an anonymous file, and its later states."""

from __future__ import annotations

import array
import contextlib
import os

import numpy as np
import pytest
from samples import Numbered

from keras_fastdata.memory.shared_state import SharedState, read_shared_state

pytestmark = pytest.mark.usefixtures("kept_forkserver")

MB = 1 << 20


class Holder:
    """Something with a large array, a small one, and a word."""

    def __init__(self, nbytes=4 * MB):
        self.table = np.arange(nbytes // 4, dtype="int32")
        self.index = np.arange(1000)
        self.word = "first"


@pytest.fixture
def payload_of():
    with contextlib.ExitStack() as stack:

        def make(obj):
            payload = SharedState(obj)
            stack.callback(payload.close)
            return payload

        yield make


def size(payload):
    return os.fstat(payload.fd).st_size


def renewed(payload, holder):
    """Whether the state of `holder` has changed, and was stored."""
    before = payload.fd, payload.start
    payload.renew(holder)
    return before != (payload.fd, payload.start)


def latest(payload):
    return read_shared_state(payload.fd, payload.start)


def test_what_has_not_changed_is_not_written_again(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    before = size(payload), payload.start
    assert not renewed(payload, holder)
    assert (size(payload), payload.start) == before


def test_an_array_that_changed_in_place_is_written_alone(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    before = size(payload)
    holder.index[:] = holder.index[::-1].copy()
    assert renewed(payload, holder)
    assert size(payload) - before < MB
    found = latest(payload)
    np.testing.assert_array_equal(found.index, np.arange(1000)[::-1])
    np.testing.assert_array_equal(found.table, holder.table)


def test_a_single_byte_that_changed_is_found(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    holder.table[-1] += 1
    assert renewed(payload, holder)
    assert latest(payload).table[-1] == holder.table[-1]


def test_what_lies_beside_arrays_may_change_alone(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    before = size(payload)
    holder.word = "second"
    assert renewed(payload, holder)
    assert size(payload) - before < MB
    assert latest(payload).word == "second"


def test_an_array_may_come_go_grow_and_shrink(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    for change in (
        lambda: setattr(holder, "more", np.ones(100_000)),
        lambda: setattr(holder, "table", holder.table[:1000]),
        lambda: setattr(holder, "table", np.arange(2 * MB)),
        lambda: setattr(holder, "table", np.empty(0)),
        lambda: delattr(holder, "more"),
        lambda: setattr(holder, "index", holder.table),
    ):
        change()
        assert renewed(payload, holder)
        found = latest(payload)
        assert vars(found).keys() == vars(holder).keys()
        for name, value in vars(holder).items():
            np.testing.assert_array_equal(getattr(found, name), value)
    assert found.index is found.table


def test_a_state_gone_by_stays_as_it_was(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    first = latest(payload)
    holder.table[:] = 7
    payload.renew(holder)
    assert first.table[:3].tolist() == [0, 1, 2]
    assert latest(payload).table[:3].tolist() == [7, 7, 7]


def test_whoever_reads_it_may_write_to_a_copy_of_its_own(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    latest(payload).table[:] = 9
    assert latest(payload).table[5] == 5
    assert not renewed(payload, holder)


def test_states_gone_by_do_not_pile_up(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    for number in range(30):
        holder.table[0] = number + 1
        payload.renew(holder)
        assert size(payload) < holder.table.nbytes + 17 * MB
        assert latest(payload).table[0] == number + 1
    assert not renewed(payload, holder)


def test_a_state_that_cannot_be_pickled_leaves_the_one_before(payload_of):
    holder = Holder()
    payload = payload_of(holder)
    holder.word = (i for i in range(3))
    with pytest.raises(TypeError, match="generator"):
        payload.renew(holder)
    assert latest(payload).word == "first"


def test_a_large_array_that_changes_every_time_is_there_once():
    holder = Holder(16 * MB)
    with contextlib.closing(SharedState(holder)) as payload:
        for number in range(3):
            holder.table[0] = number + 1
            payload.renew(holder)
            assert size(payload) < 17 * MB
            assert latest(payload).table[0] == number + 1


def test_an_interrupt_while_arrays_are_compared_is_one(payload_of, monkeypatch):
    holder = Holder()
    payload = payload_of(holder)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "array_equal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            payload.renew(holder)
    assert not renewed(payload, holder)


class Reshuffled(Numbered):
    """Reverses its index after each epoch, beside a large table."""

    def __init__(self, **kwargs):
        super().__init__(length=8, **kwargs)
        self.table = np.ones(8 * MB, "uint8")
        self.index = np.arange(8)
        self.labels = 10 * np.arange(8)

    def __getitem__(self, index):
        number = self.index[index] * self.table[index]
        return np.full((4,), number), self.labels[[index]]

    def on_epoch_end(self):
        self.index[:] = self.index[::-1].copy()


def _state_files():
    """Descriptor and size of each dataset's file in this process."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "fastdata-dataset" in os.readlink(f"/proc/self/fd/{fd}"):
                found[fd] = os.stat(f"/proc/self/fd/{fd}").st_size
    return found


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_index_that_is_shuffled_each_epoch_does_not_move_the_table(method):
    with Reshuffled(
        workers=2, use_multiprocessing=True, start_method=method
    ) as dataset:
        for epoch in range(6):
            wanted = dataset.index.tolist()
            found = [int(x[0]) for x, _ in dataset]
            assert found == wanted, epoch
            dataset.on_epoch_end()
            dataset.mark_changed()
        (nbytes,) = _state_files().values()
    assert nbytes < 9 * MB


@pytest.mark.parametrize(
    ("make", "views"),
    [
        (lambda: np.zeros((8, 4), "float32"), lambda a: (a[:4], a[4:])),
        (lambda: np.zeros((8, 4), "float32"), lambda a: (a[:, :3], a[:, 3:])),
        (lambda: np.zeros((8, 4), ">i2"), lambda a: (a.T, a[::-1, ::2])),
        (lambda: np.zeros((8, 4), order="F"), lambda a: (a[1:], a.view("i8"))),
        (lambda: np.zeros(8, [("a", "i1"), ("b", "f8")]), lambda a: (a["b"],)),
    ],
    ids=["rows", "columns", "strides", "fortran", "fields"],
)
def test_arrays_that_share_memory_still_do(make, views, payload_of):
    whole = make()
    payload = payload_of({"whole": whole, "views": views(whole)})
    found = latest(payload)
    found["whole"][...] = whole[...] = 5
    for one, other in zip(found["views"], views(whole), strict=True):
        assert np.shares_memory(one, found["whole"])
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_parts_of_an_array_that_do_not_overlap_are_sent_without_the_rest(
    payload_of,
):
    table = np.zeros((1000, 1000))
    columns = [table[:, 0], table[:, 999]]
    assert size(payload_of([*columns, table[:2, 1:999]])) < MB


def test_parts_of_an_array_that_cross_share_what_they_have_in_common(
    payload_of,
):
    table = np.zeros((100, 100))
    column, row = latest(payload_of([table[:, 3], table[5]]))
    column[5] = 7
    assert row[3] == 7


def test_parts_that_lie_close_together_each_share_their_memory(payload_of):
    whole = np.zeros(40, "uint8")
    views = [whole[:20], whole[18:20], whole[22:30], whole[22:23]]
    found = latest(payload_of(views))
    found[1][:] = found[3][:] = 7
    assert found[0][18:].tolist() == [7, 7]
    assert found[2][0] == 7


@pytest.mark.parametrize(
    "spread",
    [
        lambda whole: np.lib.stride_tricks.sliding_window_view(whole, 1000),
        lambda whole: np.broadcast_to(whole, (1000, len(whole))),
        lambda whole: np.lib.stride_tricks.as_strided(whole, (999, 9), (8, 8)),
    ],
    ids=["windows", "broadcast", "strided"],
)
def test_an_array_whose_items_share_memory_is_sent_without_copies(
    spread, payload_of
):
    whole = np.arange(10_000.0)
    payload = payload_of({"windows": spread(whole)})
    assert size(payload) < MB
    assert np.array_equal(latest(payload)["windows"], spread(whole))
    both = latest(payload_of([whole, spread(whole)]))
    both[0][0] = 7
    assert both[1][0, 0] == 7


def test_a_view_that_cannot_be_written_to_stays_so(payload_of):
    whole = np.zeros(9)
    fixed = whole[2:]
    fixed.flags.writeable = False
    found = latest(payload_of([whole, fixed]))
    assert [array.flags.writeable for array in found] == [True, False]
    assert np.shares_memory(*found)


def test_arrays_that_share_memory_are_written_again_only_if_they_change(
    payload_of,
):
    whole = np.zeros(1000)
    views = [whole, whole[:500], whole[400:]]
    payload = payload_of(views)
    assert not renewed(payload, views)
    whole[450] = 1
    assert renewed(payload, views)
    assert [array.max() for array in latest(payload)] == [1, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda nbytes: array.array("B", bytes(nbytes)),
        lambda nbytes: memoryview(bytearray(nbytes)),
        lambda nbytes: memoryview(np.zeros(nbytes, "uint8")),
    ],
    ids=["bytearray", "array", "memoryview", "memoryview of an array"],
)
def test_an_array_over_another_objects_bytes_still_is(make, payload_of):
    raw = make(64)
    rows = np.frombuffer(raw, "int32").reshape(4, 4)
    found = latest(payload_of([rows, raw, rows[1:]]))
    found[1][16] = raw[16] = 7
    assert np.array_equal(found[0], rows)
    assert np.array_equal(found[2], rows[1:])
    assert found[0].sum() == 7


def test_the_bytes_of_an_array_are_not_sent_without_need(payload_of):
    rows = np.frombuffer(bytearray(4 * MB), "int32")
    assert size(payload_of([rows[:100], rows[-100:]])) < MB


def test_an_array_whose_items_share_memory_is_never_copied(payload_of):
    spread = np.broadcast_to(np.ones(3), (10**12, 3))  # 24 TB, if copied
    found = latest(payload_of({"spread": spread, "number": 1}))
    assert found["spread"].shape == spread.shape
    assert found["spread"][-1].tolist() == [1, 1, 1]


# -- tensors -------------------------------------------------------------------


def parts(torch):
    whole = torch.zeros(4, 4)
    return whole[:, :3], whole[:, 1:]


def array_of_a_tensor(torch):
    whole = torch.zeros(4, 4)
    return whole, whole.numpy()[1:]


def arrays_of_a_tensor(torch):
    whole = torch.zeros(4, 4).numpy()
    return whole, torch.from_numpy(whole).T.numpy()


def tensor_over_an_array(torch):
    whole = np.zeros((4, 4))
    return whole, torch.from_numpy(whole)[1:]


def tensors_over_parts_of_an_array(torch):
    whole = np.zeros((4, 4))
    return torch.from_numpy(whole[:3]), torch.from_numpy(whole[1:])


def weights(torch):
    layer = torch.nn.Linear(4, 4, bias=False)
    return layer.weight.detach(), layer


@pytest.mark.backend
@pytest.mark.parametrize(
    "make",
    [
        parts,
        array_of_a_tensor,
        arrays_of_a_tensor,
        tensor_over_an_array,
        tensors_over_parts_of_an_array,
        weights,
    ],
)
def test_tensors_and_arrays_that_share_memory_still_do(make, payload_of):
    torch = pytest.importorskip("torch")
    first, second = make(torch)
    copied, other = latest(payload_of([first, second]))
    first[...] = copied[...] = 5
    if isinstance(second, torch.nn.Module):
        second, other = second.weight.detach(), other.weight.detach()
    assert type(other) is type(second)
    assert np.array_equal(other, second)
    assert (np.asarray(other) == 5).any()


@pytest.mark.backend
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e5m2", "float16", "bool", "complex64"]
)
def test_a_tensor_arrives_as_it_was(dtype, payload_of):
    torch = pytest.importorskip("torch")
    numbers = torch.arange(2_400_000) % 7
    whole = numbers.reshape(2, 600, 2000).to(getattr(torch, dtype))
    for tensor in (whole, whole.permute(2, 0, 1), whole[:, 1:, ::2]):
        found = latest(payload_of([tensor]))[0]
        assert found.dtype is tensor.dtype
        assert found.shape == tensor.shape
        same = (found.to(torch.complex64) == tensor.to(torch.complex64)).all()
        assert bool(same)


@pytest.mark.backend
def test_a_tensor_that_is_more_than_numbers_is_left_to_pytorch(payload_of):
    torch = pytest.importorskip("torch")
    learned = torch.ones(3, requires_grad=True)
    spread = torch.ones(1).expand(10**9)
    sparse = torch.eye(3).to_sparse()
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    weights = torch.nn.Parameter(learned)
    given = [learned, spread, sparse, conjugate, weights, torch.ones(3)]
    found = latest(payload_of(given))
    assert [type(each) for each in found] == [type(each) for each in given]
    assert found[0].requires_grad
    assert found[1].shape == spread.shape
    assert found[2].is_sparse
    assert found[3].is_conj()
    assert found[5].resize_(9).shape == (9,)


@pytest.mark.backend
def test_workers_share_a_tensor_and_do_not_copy_it(payload_of):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(MB)
    payload = payload_of(Holder())
    before = size(payload)
    payload.renew(tensor)
    assert size(payload) - before < 5 * MB
    assert not renewed(payload, tensor)


@pytest.mark.backend
def test_a_tensor_arrives_whatever_the_default_device_is(payload_of):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, dtype=torch.bfloat16)
    with torch.device("meta"):
        payload = payload_of([tensor, tensor[1:]])
    assert torch.equal(latest(payload)[1], tensor[1:])


class Canvas(Numbered):
    """Fills an array, and returns the tensor that has its memory."""

    def __init__(self, **kwargs):
        super().__init__(length=4, **kwargs)
        import torch

        self.canvas = torch.zeros(2, 4)
        self.pixels = self.canvas.numpy()

    def __getitem__(self, index):
        self.pixels[...] = index
        return self.canvas


@pytest.mark.backend
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_a_build_writes_to_an_array_is_in_the_tensor(method):
    pytest.importorskip("torch")
    with Canvas(
        workers=2, use_multiprocessing=True, start_method=method
    ) as dataset:
        assert [int(batch[0, 0]) for batch in dataset] == [0, 1, 2, 3]


def _tensors_of_mine(torch):
    return type("MyTensor", (torch.Tensor,), {})


class Labels(Numbered):
    """Returns an item of a tensor in each batch."""

    def __init__(self, labels, **kwargs):
        super().__init__(length=4, **kwargs)
        self.labels = labels

    def __getitem__(self, index):
        return np.array([int(self.labels[index * 1000])])


@pytest.mark.backend
@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "learned", "mine"])
@pytest.mark.parametrize(
    "kind",
    [
        {"workers": 0, "cache": "memory"},
        {"workers": 2, "cache": "memory"},
        {"workers": 2, "use_multiprocessing": True},
    ],
    ids=["inline cache", "thread cache", "process"],
)
def test_batches_are_from_after_an_edit_of_a_tensor(dtype, kind):
    torch = pytest.importorskip("torch")
    labels = torch.zeros(2 * MB, dtype=getattr(torch, dtype, None))
    labels.requires_grad_(dtype == "learned")
    if dtype == "mine":  # as those of torchvision
        labels = labels.as_subclass(_tensors_of_mine(torch))
    with Labels(labels, **kind) as dataset:
        for value in (0, 1, 2):
            assert [int(batch[0]) for batch in dataset] == [0, 0, value, 0]
            with torch.no_grad():
                labels[2000] = value + 1


class Filled(Numbered):
    """Fills a tensor in place, and counts its builds."""

    def __init__(self, **kwargs):
        super().__init__(length=4, **kwargs)
        import torch

        self.built = []
        self.tensor = torch.zeros(3)

    def __getitem__(self, index):
        self.built.append(index)
        self.tensor.fill_(index)
        return self.tensor.numpy().copy()


@pytest.mark.backend
@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_that_builds_fill_makes_no_cache_invalid(workers):
    pytest.importorskip("torch")
    with Filled(workers=workers, cache="memory") as dataset:
        for _ in range(3):
            assert [int(batch[0]) for batch in dataset] == [0, 1, 2, 3]
        assert sorted(dataset.built) == [0, 1, 2, 3]
