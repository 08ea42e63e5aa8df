"""`Storage`: files are found by pattern, and kept once for all processes."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import stat
import sys
import threading

import fsspec
import pytest
from storage_samples import (
    Make,
    content_of,
    holds,
    last,
    makes,
    process,
    read,
    takes,
    wanders,
)

from keras_fastdata.sources import file_cache
from keras_fastdata.sources.storage import Storage

# -- finding -----------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    for name in ("b.txt", "a.txt", "c.bin", "x[1].txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def names(paths):
    return [os.path.basename(path) for path in paths]


def test_a_pattern_gives_its_files_by_name(files):
    assert names(Storage().find(files / "?.txt")) == ["a.txt", "b.txt"]


def test_paths_and_patterns_keep_their_order(files):
    found = Storage().find([files / "c.bin", str(files / "[ab].*")])
    assert names(found) == ["c.bin", "a.txt", "b.txt"]


def test_a_range_gives_a_path_for_each_number():
    found = Storage().find("part-{08..11}-of-{0..1}.tar")
    assert found[:3] == ["part-08-of-0.tar", "part-08-of-1.tar", found[2]]
    assert found[2:] == [
        *("part-09-of-0.tar", "part-09-of-1.tar", "part-10-of-0.tar"),
        *("part-10-of-1.tar", "part-11-of-0.tar", "part-11-of-1.tar"),
    ]


def test_a_file_that_is_named_like_a_pattern_is_found(files):
    assert names(Storage().find(files / "x[1].txt")) == ["x[1].txt"]
    (files / "{1..2}").touch()
    assert names(Storage().find(files / "{1..2}")) == ["{1..2}"]


@pytest.mark.parametrize("pattern", ["*.none", "memory://nowhere/*.none"])
def test_a_pattern_without_files_is_an_error_that_shows_it(pattern):
    with pytest.raises(FileNotFoundError, match=r"\.none"):
        Storage().find(pattern)


def test_no_paths_at_all_are_an_error():
    with pytest.raises(FileNotFoundError, match="`paths` is empty"):
        Storage().find([])


def test_the_question_mark_of_an_address_is_no_pattern():
    path = "https://host/a.png?key=[1]"
    assert Storage().find(path) == [path]


def test_a_local_file_is_read_where_it_is(files):
    storage = Storage(cache_dir=files / "cache")
    path = str(files / "a.txt")
    assert storage.read(path) == b"a.txt"
    with storage.local(path) as local:
        assert local == path
    assert not (files / "cache").exists()


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_files_in_memory_are_found_and_read(memory, tmp_path):
    for number in (2, 0, 1):
        memory.pipe(f"/f/{number}.bin", bytes([number]))
    memory.pipe("/f/more.bin/0.txt", b"")  # a folder
    storage = Storage(cache_dir=tmp_path)
    found = storage.find("memory://f/*.bin")
    assert names(found) == ["0.bin", "1.bin", "2.bin"]
    assert [storage.read(path) for path in found] == [b"\0", b"\1", b"\2"]
    with storage.local(found[1]) as local:
        assert local.endswith(".bin")
        assert read(local) == b"\1"


def test_a_file_that_has_changed_is_fetched_again(memory, tmp_path):
    path = "memory://f/a.bin"
    memory.pipe("/f/a.bin", b"one")
    assert Storage(cache_dir=tmp_path).read(path) == b"one"
    memory.pipe("/f/a.bin", b"two")
    assert Storage(cache_dir=tmp_path).read(path) == b"two"


def test_an_empty_file_has_no_bytes(memory, tmp_path):
    memory.pipe("/empty", b"")
    assert Storage(cache_dir=tmp_path).read("memory://empty") == b""


def test_without_a_cache_nothing_is_written(memory, tmp_path):
    memory.pipe("/a", b"a")
    storage = Storage(cache_dir=tmp_path, cache_bytes=0)
    assert storage.read("memory://a") == b"a"
    assert list(tmp_path.iterdir()) == []
    with storage.local("memory://a") as local:
        assert read(local) == b"a"
    assert entries(tmp_path) == {}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="memory://no/file"):
        Storage(cache_dir=tmp_path).read("memory://no/file")


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    storage = Storage(cache_dir=tmp_path)
    with pytest.raises(ValueError, match="Protocol not known: magic"):
        storage.read("magic://a/b")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, "s3", raising=False)
    with pytest.raises(ImportError, match=r"s3://a/b .*Install s3fs.*\[remote"):
        storage.read("s3://a/b")


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"cache_bytes": -1}, "`cache_bytes` must be an integer of at least 0"),
        ({"attempts": 0}, "`attempts` must be an integer of at least 1"),
        ({"timeout_s": 0}, "`timeout_s` must be more than 0"),
    ],
)
def test_an_argument_out_of_range_is_named(kwargs, error):
    with pytest.raises(ValueError, match=error):
        Storage(**kwargs)


def test_a_copy_in_another_process_has_the_same_pickle(memory, tmp_path):
    memory.pipe("/f/a.bin", b"one")
    storage = Storage({"x": 1}, cache_dir=tmp_path)
    storage.find("memory://f/*.bin")
    before = pickle.dumps(storage)
    assert storage.read("memory://f/a.bin") == b"one"
    assert pickle.dumps(storage) == before
    assert pickle.dumps(pickle.loads(before)) == before


# -- the cache ---------------------------------------------------------------


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes"
    path.touch()
    return path


def folder_in(parent):
    return parent / f"keras_fastdata-{os.geteuid()}"


def entries(parent):
    """The sizes of all entries, by name."""
    return {
        path.name: path.stat().st_size
        for path in folder_in(parent).iterdir()
        if not path.name.startswith(".")
    }


def hidden(parent):
    """The names of what is no entry."""
    found = (path.name for path in folder_in(parent).iterdir())
    return {name for name in found if name.startswith(".")}


def total(parent):
    return int((folder_in(parent) / ".size").read_text())


def use(storage, notes, key):
    with storage.entry(key, Make(notes, key)) as path:
        assert read(path) == content_of(key)


def test_an_entry_is_made_once(tmp_path, notes):
    for _ in range(2):
        use(Storage(cache_dir=tmp_path), notes, "a")
    assert notes.read_text() == "a\n"
    assert list(entries(tmp_path).values()) == [1000] == [total(tmp_path)]
    assert hidden(tmp_path) == {".size"}


def test_all_of_it_is_for_this_user_alone(tmp_path, notes):
    use(Storage(cache_dir=tmp_path), notes, "a")
    folder = folder_in(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}


def test_a_key_may_be_any_text(tmp_path, notes):
    for key in ("", "../../a", "\0\n", "é" * 5000, "\udcff", "a" * 300):
        use(Storage(cache_dir=tmp_path), notes, key)
    assert len(entries(tmp_path)) == 6
    assert {*tmp_path.iterdir()} == {notes, folder_in(tmp_path)}


def test_the_default_directory_is_that_of_the_users_caches(
    tmp_path, notes, monkeypatch
):
    storage = Storage()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    use(storage, notes, "a")
    assert entries(tmp_path / "caches")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    use(storage, notes, "a")
    assert entries(tmp_path / ".cache")


def begins(taker):
    taker.send("take it")
    return taker.recv() == "begins"


def test_processes_that_want_an_entry_have_it_made_once(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    with (
        process(makes, storage, notes, "a") as (_, maker),
        process(takes, storage, notes, "a") as (_, first),
        process(takes, storage, notes, "a") as (_, second),
    ):
        assert maker.recv() == "half"
        assert [begins(first), begins(second)] == [True, True]
        maker.send("go on")
        for connection in (maker, first, second):
            assert connection.recv() == content_of("a")
    assert notes.read_text() == "a\n"


def test_threads_that_want_an_entry_have_it_made_once(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    make = Make(notes, "a")

    def make_late(path):
        begun.set()
        go_on.wait()
        make(path)

    def take():
        with storage.entry("a", make_late) as path:
            found.append(read(path))

    found = []
    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [content_of("a")] * 3
    assert notes.read_text() == "a\n"


def test_the_next_process_makes_what_a_killed_one_has_begun(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    with (
        process(makes, storage, notes, "a") as (maker, says),
        process(takes, storage, notes, "a") as (_, taker),
    ):
        assert says.recv() == "half"
        assert begins(taker)
        maker.kill()
        assert taker.recv() == content_of("a")
    assert notes.read_text() == "a\n" * 2
    assert hidden(tmp_path) == {".size"}


def test_the_next_process_makes_what_another_could_not(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    with (
        process(makes, storage, notes, "a") as (_, maker),
        process(takes, storage, notes, "a") as (_, taker),
    ):
        assert maker.recv() == "half"
        assert begins(taker)
        maker.send("fail")
        assert str(maker.recv()) == "on purpose"
        assert taker.recv() == content_of("a")
    assert hidden(tmp_path) == {".size"}


def test_what_killed_processes_have_left_is_removed(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    with process(makes, storage, notes, "a") as (maker, says):
        assert says.recv() == "half"
        maker.kill()
    assert len(hidden(tmp_path)) == 2
    file_cache._cleaned.discard(str(folder_in(tmp_path)))  # a new process
    use(storage, notes, "b")
    assert hidden(tmp_path) == {".size"}


def test_what_is_being_made_is_no_leftover(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=1000)
    with process(makes, storage, notes, "a") as (_, maker):
        assert maker.recv() == "half"
        use(storage, notes, "b")
        use(storage, notes, "c")  # which evicts
        assert len(hidden(tmp_path)) == 3
        maker.send("go on")
        assert maker.recv() == content_of("a")


# -- its bound ---------------------------------------------------------------


def made(notes):
    """What was made, in order."""
    return notes.read_text().split()


def test_the_least_recently_used_entry_is_evicted(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=3000)
    for key in "abcad":
        use(storage, notes, key)
    assert sum(entries(tmp_path).values()) == 3000 == total(tmp_path)
    for key in "acd":
        use(storage, notes, key)
    assert made(notes) == [*"abcd"]
    use(storage, notes, "b")
    assert made(notes) == [*"abcdb"]


def test_an_entry_in_use_stays(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=2000)
    with process(holds, storage, notes, "a") as (_, holder):
        path = holder.recv()
        for key in "bcdef":
            use(storage, notes, key)
            assert sum(entries(tmp_path).values()) <= 2000
            assert read(path) == content_of("a")
        holder.send("end")
        assert holder.recv() == "left"
        use(storage, notes, "g")
        use(storage, notes, "h")
    assert not os.path.exists(path)


def test_entries_in_use_may_exceed_the_bound_until_they_are_left(
    tmp_path, notes
):
    storage = Storage(cache_dir=tmp_path, cache_bytes=1500)
    with contextlib.ExitStack() as stack:
        paths = [
            stack.enter_context(storage.entry(key, Make(notes, key)))
            for key in "abc"
        ]
        assert [*map(read, paths)] == [*map(content_of, "abc")]
        assert total(tmp_path) == 3000
    assert sum(entries(tmp_path).values()) == 1000 == total(tmp_path)


def test_an_entry_larger_than_the_bound_stays_while_it_is_used(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=10)
    use(storage, notes, "a")
    assert entries(tmp_path) == {}


def test_an_entry_of_a_killed_process_is_not_in_use(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=1000)
    with process(holds, storage, notes, "a") as (holder, says):
        path = says.recv()
        holder.kill()
    use(storage, notes, "b")
    assert not os.path.exists(path)


def test_each_training_evicts_down_to_its_own_bound(tmp_path, notes):
    large = Storage(cache_dir=tmp_path, cache_bytes=5000)
    small = Storage(cache_dir=tmp_path, cache_bytes=2000)
    for key in "abcde":
        use(large, notes, key)
    use(small, notes, "f")
    assert sum(entries(tmp_path).values()) == 2000 == total(tmp_path)
    for key in "fghij":
        use(large, notes, key)
    assert sum(entries(tmp_path).values()) == 5000 == total(tmp_path)


@pytest.mark.parametrize("text", [None, "", "12", "nonsense", "9" * 30])
def test_the_size_is_counted_again_if_its_file_is_lost(tmp_path, notes, text):
    storage = Storage(cache_dir=tmp_path, cache_bytes=2000)
    use(storage, notes, "a")
    use(storage, notes, "b")
    path = folder_in(tmp_path) / ".size"
    path.unlink() if text is None else path.write_text(text)
    use(storage, notes, "c")
    assert sum(entries(tmp_path).values()) == 2000 == total(tmp_path)


def test_a_time_to_come_does_not_keep_an_entry_for_ever(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=2000)
    use(storage, notes, "a")
    (old,) = entries(tmp_path)
    os.utime(folder_in(tmp_path) / old, (2**34, 2**34))
    use(storage, notes, "b")
    use(storage, notes, "c")
    assert old not in entries(tmp_path)


def test_many_small_entries_are_evicted_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes seconds
    storage = Storage(cache_dir=tmp_path, cache_bytes=10240)

    def make(path):
        with open(path, "wb") as file:
            file.write(b"12345678")

    for number in range(1281):
        with storage.entry(str(number), make):
            pass
    # A sixteenth of the bound is free.
    assert total(tmp_path) == 9600 == sum(entries(tmp_path).values())


# -- what may happen to the directory ----------------------------------------


def test_the_directory_may_be_removed_between_uses(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path / "cache")
    use(storage, notes, "a")
    remove(tmp_path / "cache")
    use(storage, notes, "a")
    assert entries(tmp_path / "cache")


def remove(folder):
    for path in [*folder_in(folder).iterdir()]:
        path.unlink()
    folder_in(folder).rmdir()
    folder.rmdir()


def test_the_directory_may_be_removed_while_an_entry_is_made(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path / "cache")
    removed = []

    def make(path):
        if not removed:
            removed.append(path)
            remove(tmp_path / "cache")
        Make(notes, "a")(path)

    with storage.entry("a", make) as path:
        assert read(path) == content_of("a")
        remove(tmp_path / "cache")
    use(storage, notes, "a")


def test_a_missing_file_in_make_is_an_error(tmp_path):
    def make(path):
        raise FileNotFoundError("of the user")

    with (
        pytest.raises(FileNotFoundError, match="of the user"),
        Storage(cache_dir=tmp_path).entry("a", make),
    ):
        pass


def refuse(code):
    def make(path):
        raise OSError(code, os.strerror(code))

    return make


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(code, tmp_path):
    with (
        pytest.raises(OSError, match=r"keras_fastdata-.*`cache_dir`") as caught,
        Storage(cache_dir=tmp_path).entry("a", refuse(code)),
    ):
        pass
    assert caught.value.errno == code
    assert hidden(tmp_path) == {".size"}


def test_on_a_full_disk_entries_make_room_for_others(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)
    for key in "abcd":
        use(storage, notes, key)

    def make(path):
        if len(entries(tmp_path)) > 2:
            refuse(errno.ENOSPC)(path)
        Make(notes, "e")(path)

    with storage.entry("e", make) as path:
        assert read(path) == content_of("e")
    assert sum(entries(tmp_path).values()) == 3000 == total(tmp_path)
    use(storage, notes, "d")
    assert made(notes) == [*"abcde"]


def test_another_error_of_make_is_its_own(tmp_path):
    with (
        pytest.raises(OSError, match="Permission denied") as caught,
        Storage(cache_dir=tmp_path).entry("a", refuse(errno.EACCES)),
    ):
        pass
    assert "cache_dir" not in str(caught.value)


def read_only(monkeypatch, folder):
    """Has the system refuse to write below a folder, even to root."""
    real = file_cache._private

    def refuse(path, flags=os.O_RDWR, **_):
        if flags & (os.O_CREAT | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags)

    monkeypatch.setattr(file_cache, "_private", refuse)
    monkeypatch.setattr(os, "utime", lambda path, **_: refuse(path))


def test_a_read_only_directory_still_gives_its_entries(
    tmp_path, notes, monkeypatch
):
    storage = Storage(cache_dir=tmp_path / "cache")
    use(storage, notes, "a")
    read_only(monkeypatch, tmp_path / "cache")
    use(storage, notes, "a")
    with (
        pytest.raises(OSError, match=r"Read-only.*another `cache_dir`"),
        storage.entry("b", Make(notes, "b")),
    ):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path, notes):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=rf"{tmp_path}/file.*Pass another"),
        Storage(cache_dir=tmp_path / "file").entry("a", Make(notes, "a")),
    ):
        pass


@pytest.mark.parametrize("how", ["writable by others", "a link", "a file"])
def test_a_directory_that_others_may_write_to_is_refused(how, tmp_path, notes):
    folder = folder_in(tmp_path)
    if how == "a link":
        (tmp_path / "other").mkdir(0o700)
        folder.symlink_to(tmp_path / "other")
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with (
        pytest.raises(OSError, match=r"keras_fastdata-") as caught,
        Storage(cache_dir=tmp_path).entry("a", Make(notes, "a")),
    ):
        pass
    assert "another `cache_dir`" in str(caught.value)


def test_a_folder_of_another_user_is_refused(tmp_path, notes, monkeypatch):
    use(Storage(cache_dir=tmp_path), notes, "a")
    mine = folder_in(tmp_path)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    mine.rename(folder_in(tmp_path))
    with (
        pytest.raises(PermissionError, match="must be this user's"),
        Storage(cache_dir=tmp_path).entry("a", Make(notes, "a")),
    ):
        pass


# -- where there are no locks, and after a fork ------------------------------


@pytest.fixture(params=["not in Python", "not on the disk"])
def no_locks(request, monkeypatch):
    if request.param == "not in Python":
        monkeypatch.setattr(file_cache, "fcntl", None)
        return

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(file_cache.fcntl, "flock", refuse)


def test_without_locks_entries_are_made_and_used(no_locks, tmp_path, notes):
    storage = Storage(cache_dir=tmp_path, cache_bytes=2000)
    for key in "aabbcc":
        use(storage, notes, key)
    assert made(notes) == [*"abc"]
    # Who knows whether another process uses one; each was used just now.
    assert total(tmp_path) == 3000
    for name in entries(tmp_path):
        os.utime(folder_in(tmp_path) / name, (0, 0))
    use(storage, notes, "d")
    assert total(tmp_path) == 2000


def test_without_locks_two_threads_may_both_make_an_entry(
    no_locks, tmp_path, notes
):
    storage = Storage(cache_dir=tmp_path)
    both = threading.Barrier(2)

    def take():
        def make(path):
            both.wait()
            Make(notes, "a")(path)
            both.wait()

        with storage.entry("a", make) as path:
            found.append(read(path))

    found = []
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [content_of("a")] * 2
    assert hidden(tmp_path) == {".size"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_does_not_keep_what_its_parent_has_locked(
    tmp_path, notes
):
    storage = Storage(cache_dir=tmp_path, cache_bytes=1000)
    ours, theirs = os.pipe()
    with storage.entry("a", Make(notes, "a")):
        child = os.fork()
        if not child:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    use(storage, notes, "b")
    try:
        assert len(entries(tmp_path)) == 1
        use(storage, notes, "b")
        assert made(notes) == ["a", "b"]
    finally:
        os.close(theirs)
        os.close(ours)
        assert os.waitpid(child, 0)[1] == 0


# -- many processes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "rounds"),
    [(3, 100), pytest.param(12, 2000, marks=pytest.mark.long)],
)
def test_many_processes_read_only_right_bytes_and_keep_the_bound(
    workers, rounds, tmp_path
):
    keys = ["k" * length for length in range(30)]
    limits = [4000, 8000]
    with contextlib.ExitStack() as stack:
        said = [
            stack.enter_context(
                process(wanders, tmp_path, limits[seed % 2], seed, rounds, keys)
            )[1]
            for seed in range(workers)
        ]
        assert [*map(last, said)] == [[]] * workers
    assert hidden(tmp_path) == {".size"}
    assert sum(entries(tmp_path).values()) == total(tmp_path) <= max(limits)


@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=pytest.mark.long)]
)
def test_processes_that_are_killed_leave_only_right_bytes(kills, tmp_path):
    keys = ["k" * length for length in range(30)]
    rng = random.Random(kills)
    with contextlib.ExitStack() as stack:
        running = []
        for seed in range(kills + 2):
            arguments = tmp_path, 4000, seed, 10**6, keys
            running.append(stack.enter_context(process(wanders, *arguments)))
            if len(running) > 2:
                killed, said = running.pop(0)
                for _ in range(rng.randrange(20)):
                    assert isinstance(said.recv(), int)
                killed.kill()
    with process(wanders, tmp_path, 4000, 0, 100, keys) as (_, said):
        assert last(said) == []
    assert hidden(tmp_path) == {".size"}
    assert sum(entries(tmp_path).values()) <= total(tmp_path) <= 4000


def test_an_interrupt_frees_what_was_locked(tmp_path, notes):
    storage = Storage(cache_dir=tmp_path)

    def interrupt(path):
        Make(notes, "a")(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), storage.entry("a", interrupt):
        pass
    assert hidden(tmp_path) == set()
    use(storage, notes, "a")
