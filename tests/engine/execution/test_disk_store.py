"""Blocks as files: what is written comes back bit by bit or not at all, also from another engine's life."""

import errno
import logging
import os
import random
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.execution.disk_store import DiskStore
from engine.transfer import StoredBlock, block_digest
from streamkv.errors import ConfigError
from streamkv.protocol import pack_ids

BLOCK_SIZE = 4
PAYLOAD_BYTES = 300
FINGERPRINT = bytes(range(32))
NAMESPACE = b"n" * 32
GENEROUS = 2**24

Open = Callable[..., tuple[DiskStore, list[StoredBlock]]]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Opens the store in tmp_path / "kv" as a new engine would: the one opened before is closed."""
    stores: list[DiskStore] = []

    def make(fingerprint: bytes = FINGERPRINT, size_bytes: int = GENEROUS) -> tuple[DiskStore, list[StoredBlock]]:
        for store in stores:
            store.close()
        store = DiskStore(str(tmp_path / "kv"))
        stores.append(store)
        _, stored = store.open(fingerprint, BLOCK_SIZE, PAYLOAD_BYTES, size_bytes, lambda stage, percent: None)
        return store, stored

    yield make
    for store in stores:
        store.close()


def block(parent: StoredBlock | None, *tokens: int) -> StoredBlock:
    parent_digest, depth = (parent.digest, parent.depth + 1) if parent else (NAMESPACE, 1)
    packed = pack_ids(tokens)
    return StoredBlock(block_digest(parent_digest, packed), parent_digest, depth, packed)


def chain(length: int, first: int = 0) -> list[StoredBlock]:
    blocks: list[StoredBlock] = []
    for i in range(length):
        blocks.append(block(blocks[-1] if blocks else None, first, i, 7, 8))
    return blocks


def payload(stored: StoredBlock) -> bytes:
    return random.Random(stored.digest).randbytes(PAYLOAD_BYTES)


def write(store: DiskStore, blocks: list[StoredBlock]) -> None:
    for stored in blocks:
        assert store.write(stored, memoryview(payload(stored)))


def read(store: DiskStore, stored: StoredBlock) -> bytes | None:
    target = bytearray(PAYLOAD_BYTES)
    return bytes(target) if store.read(stored, memoryview(target)) else None


def folder_of(root: Path, fingerprint: bytes = FINGERPRINT) -> Path:
    return root / "kv" / f"streamkv-{fingerprint.hex()}"


def path_of(root: Path, stored: StoredBlock) -> Path:
    return folder_of(root) / f"{stored.digest.hex()}.kv"


def use(root: Path, stored: StoredBlock, at_s: int) -> None:
    os.utime(path_of(root, stored), (at_s, at_s))


def test_a_block_comes_back_bit_by_bit_in_this_life_and_the_next(open_store: Open, tmp_path: Path) -> None:
    blocks = [*chain(3), block(None, 9), block(chain(1)[0], 1, 2, 3)]
    store, stored = open_store()
    assert stored == []
    write(store, blocks)
    assert [read(store, each) for each in blocks] == [payload(each) for each in blocks]
    store, stored = open_store()
    assert set(stored) == set(blocks) and len(stored) == 5
    assert [read(store, each) for each in blocks] == [payload(each) for each in blocks]
    assert sorted(path.name for path in folder_of(tmp_path).iterdir()) == sorted(f"{b.digest.hex()}.kv" for b in blocks)


def test_only_the_owner_may_read_or_write(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    write(store, chain(1))
    folder = folder_of(tmp_path)
    folder.chmod(0o777)
    open_store()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").rglob("*")}
    assert len(modes) == 3
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_what_was_used_last_comes_last_but_behind_its_parent(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    one, two, three = chain(3)
    other, leaf = block(None, 5), block(one, 6)
    write(store, [one, two, three, other, leaf])
    for at_s, each in enumerate([three, other, two, one, leaf]):
        use(tmp_path, each, 1000 + at_s)
    assert open_store()[1] == [one, two, three, other, leaf]
    store, _ = open_store()
    assert read(store, other) == payload(other)
    assert open_store()[1][-1] == other, "a read counts as a use"


def test_a_dropped_block_is_gone_and_dropping_twice_is_no_fault(open_store: Open) -> None:
    store, _ = open_store()
    one, two = chain(2)
    write(store, [one, two])
    assert store.drop(two) and store.drop(two)
    assert read(store, two) is None
    assert open_store()[1] == [one]


# damage

HEADER_BYTES = 128 + BLOCK_SIZE * 4 + 32
FILE_BYTES = HEADER_BYTES + PAYLOAD_BYTES + 32
PARTS = {
    "magic": (0, 8),
    "version": (8, 12),
    "depth": (12, 16),
    "token bytes": (16, 20),
    "payload bytes": (20, 28),
    "fingerprint": (28, 60),
    "digest": (60, 92),
    "parent digest": (92, 124),
    "tokens": (124, 136),
    "filling": (136, 140),
    "header checksum": (140, 172),
    "payload": (172, 472),
    "payload checksum": (472, 504),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("is_new_life", [False, True])
def test_a_flipped_bit_anywhere_is_a_miss_and_the_file_is_removed(
    open_store: Open, tmp_path: Path, part: str, is_new_life: bool
) -> None:
    start, end = PARTS[part]
    rng = random.Random(part)
    stored = block(None, 1, 2, 3)
    path = path_of(tmp_path, stored)
    for place in {start, end - 1, rng.randrange(start, end)}:
        store, _ = open_store()
        write(store, [stored])
        data = bytearray(path.read_bytes())
        assert len(data) == end if part == "payload checksum" else len(data) > end
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        if is_new_life:
            store, found = open_store()
            assert (found == []) == (place < PARTS["payload"][0]), "the scan reads headers only"
        assert read(store, stored) is None
        assert not path.exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_file_holds_a_read_gives_what_was_written_or_nothing(
    open_store: Open, tmp_path: Path, data: st.DataObject
) -> None:
    one, two = chain(2)
    store, _ = open_store()
    write(store, [one, two])
    path = path_of(tmp_path, two)
    whole = path.read_bytes()
    damage = data.draw(st.sampled_from(["cut", "grow", "replace", "swap", "zeros"]))
    if damage == "cut":
        spoilt = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif damage == "grow":
        spoilt = whole + data.draw(st.binary(min_size=1, max_size=40))
    elif damage == "replace":
        start = data.draw(st.integers(0, len(whole) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=min(64, len(whole) - start)))
        spoilt = whole[:start] + piece + whole[start + len(piece) :]
    elif damage == "swap":
        other = path_of(tmp_path, one).read_bytes()
        cut = data.draw(st.sampled_from([0, *(start for start, _ in PARTS.values())]))
        spoilt = whole[:cut] + other[cut:] if data.draw(st.booleans()) else other[:cut] + whole[cut:]
    else:
        start = data.draw(st.integers(0, len(whole) - 1))
        spoilt = whole[:start] + bytes(len(whole) - start)
    path.write_bytes(spoilt)
    if data.draw(st.booleans()):
        store, found = open_store()
        assert found == [one] + [two] * (two in found)
    got = read(store, two)
    if spoilt == whole:
        assert got == payload(two)
    else:
        assert got is None and not path.exists()
    assert read(store, one) == payload(one)


def test_a_block_of_another_model_size_or_version_is_foreign_even_under_our_name(
    open_store: Open, tmp_path: Path
) -> None:
    stored = block(None, 1, 2, 3, 4)
    foreign = tmp_path / "foreign"
    for fingerprint, block_size, payload_bytes in [
        (b"\1" * 32, BLOCK_SIZE, PAYLOAD_BYTES),
        (FINGERPRINT, BLOCK_SIZE + 1, PAYLOAD_BYTES),
        (FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES + 1),
    ]:
        other = DiskStore(str(foreign))
        other.open(fingerprint, block_size, payload_bytes, GENEROUS, lambda stage, percent: None)
        assert other.write(stored, memoryview(bytes(payload_bytes)))
        other.close()
        (source,) = foreign.glob(f"streamkv-{fingerprint.hex()}/*.kv")
        store, _ = open_store()
        target = path_of(tmp_path, stored)
        target.write_bytes(source.read_bytes())
        source.unlink()
        assert read(store, stored) is None and not target.exists()


def test_a_file_under_the_name_of_another_block_is_removed(open_store: Open, tmp_path: Path) -> None:
    one, two = block(None, 1), block(None, 2)
    store, _ = open_store()
    write(store, [one])
    path_of(tmp_path, one).rename(path_of(tmp_path, two))
    assert read(store, two) is None and not path_of(tmp_path, two).exists()
    write(store, [one])
    path_of(tmp_path, one).rename(path_of(tmp_path, two))
    assert open_store()[1] == []
    assert not path_of(tmp_path, two).exists()


def test_blocks_without_their_parent_are_removed_with_all_that_stand_on_them(open_store: Open, tmp_path: Path) -> None:
    blocks, other = chain(5), block(None, 9)
    store, _ = open_store()
    write(store, [*blocks, other])
    path_of(tmp_path, blocks[1]).unlink()
    assert set(open_store()[1]) == {blocks[0], other}
    assert len(list(folder_of(tmp_path).iterdir())) == 2


def test_a_block_behind_one_that_is_not_full_or_at_the_wrong_depth_is_removed(open_store: Open) -> None:
    short = block(None, 1, 2)
    whole = block(None, 1, 2, 3, 4)
    packed = pack_ids([5])
    deep = StoredBlock(block_digest(whole.digest, packed), whole.digest, 3, packed)
    store, _ = open_store()
    write(store, [short, block(short, 3), whole, deep])
    assert set(open_store()[1]) == {short, whole}


def test_what_an_interrupted_write_left_is_removed_and_what_is_not_ours_stays(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    (one,) = chain(1)
    write(store, [one])
    folder, root = folder_of(tmp_path), tmp_path / "kv"
    (folder / f"{one.digest.hex()}.part").write_bytes(b"half")
    elsewhere = tmp_path / "precious"
    elsewhere.write_bytes(b"data")
    (folder / f"{'a' * 64}.kv").symlink_to(elsewhere)
    os.mkfifo(folder / f"{'b' * 64}.kv")
    (folder / f"{'c' * 64}.kv").mkdir()
    theirs = ["notes.txt", "model.kv", f"{'A' * 64}.kv", f"{'d' * 63}.kv", f"{'e' * 64}.kv.bak"]
    for place in (folder, root):
        for name in theirs:
            (place / name).write_text("theirs")
    (root / ("streamkv-" + "f" * 64)).write_text("a file")
    assert open_store(size_bytes=8192)[1] == [one]
    assert elsewhere.read_bytes() == b"data"
    assert {path.name for path in folder.iterdir()} == {*theirs, f"{one.digest.hex()}.kv", f"{'c' * 64}.kv"}
    assert {path.name for path in root.iterdir()} == {
        *theirs,
        ".streamkv.lock",
        folder.name,
        "streamkv-" + "f" * 64,
    }


# size

UNIT = 4096


def test_the_least_recently_used_go_when_the_size_shrinks_leaves_first(open_store: Open, tmp_path: Path) -> None:
    old, new = chain(3, first=1), chain(3, first=2)
    store, _ = open_store()
    write(store, [*old, *new])
    for at_s, each in enumerate([*reversed(new), *old]):
        use(tmp_path, each, 1000 + at_s)
    use(tmp_path, new[2], 5000)  # so its parents count as used then
    assert set(open_store(size_bytes=5 * UNIT)[1]) == {*old[:2], *new}
    assert set(open_store(size_bytes=2 * UNIT + 1)[1]) == {*new[:2]}
    assert len(list(folder_of(tmp_path).iterdir())) == 2


def test_other_models_keep_half_of_the_size_the_last_used_first(open_store: Open, tmp_path: Path) -> None:
    names = [bytes([i]) * 32 for i in range(3)]
    for at_s, name in enumerate(names):
        store, _ = open_store(name)
        blocks = chain(3, first=at_s)
        write(store, blocks)
        for path in folder_of(tmp_path, name).iterdir():
            os.utime(path, (1000 + at_s, 1000 + at_s))
    (folder_of(tmp_path, names[0]) / "notes.txt").write_text("theirs")

    def num_blocks(size_bytes: int) -> int:
        store = DiskStore(str(tmp_path / "kv"))
        try:
            return store.open(FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES, size_bytes, lambda stage, percent: None)[0]
        finally:
            store.close()

    open_store()[0].close()
    assert num_blocks(18 * UNIT) == 18 - 9
    assert all(len(list(folder_of(tmp_path, name).glob("*.kv"))) == 3 for name in names)
    assert num_blocks(8 * UNIT) == 8 - 3
    assert [len(list(folder_of(tmp_path, name).glob("*.kv"))) for name in names] == [0, 0, 3]
    assert folder_of(tmp_path, names[0]).exists(), "it holds a file that is not ours"
    assert not folder_of(tmp_path, names[1]).exists()
    assert num_blocks(UNIT) == 1


def test_less_is_taken_where_the_file_system_has_no_more_and_that_is_said(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_store()
    write(store, chain(3))
    set_free(monkeypatch, 10 * UNIT)
    store.close()
    fresh, stored = open_store()
    assert len(stored) == 3
    fresh.close()
    with caplog.at_level(logging.WARNING):
        assert fresh_num_blocks(fresh.path, GENEROUS) == 3 + 9
    assert "less disk for KV blocks than asked for" in caplog.text
    set_free(monkeypatch, 0)
    assert fresh_num_blocks(fresh.path, GENEROUS) == 3, "what lies there is still of use"


def set_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    real = os.statvfs("/")
    values = [*real]
    values[1] = UNIT  # f_frsize
    values[4] = free_bytes // UNIT  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda file: os.statvfs_result(values))


def fresh_num_blocks(path: Path, size_bytes: int) -> int:
    store = DiskStore(str(path))
    try:
        return store.open(FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES, size_bytes, lambda stage, percent: None)[0]
    finally:
        store.close()


# wrong settings


def refusal(path: Path | str, size_bytes: int = GENEROUS) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        store = DiskStore(str(path), lock_wait_s=0.0)
        try:
            store.open(FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES, size_bytes, lambda stage, percent: None)
        finally:
            store.close()
    return raised.value


def test_a_path_that_cannot_be_used_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path in (
        file,
        file / "below",
        link,
        "/dev/null",
        "a\0b",
        "/proc/kv",
        "~nobody-of-that-name/kv",
        tmp_path / ("x" * 300),
    ):
        error = refusal(path)
        assert error.field == "disk_kv_path" and "cannot be used: " in error.message, path
    assert "not a folder" in refusal(file).message and "not a folder" in refusal(file / "below").message


def test_a_folder_of_ours_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "elsewhere").mkdir()
    folder_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert refusal(tmp_path / "kv").field == "disk_kv_path"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path).message
    assert "Permission denied" in refusal(tmp_path / "kv").message
    tmp_path.chmod(0o700)


def test_a_folder_that_turns_read_only_or_belongs_to_another_is_refused(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store()[0].close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert "belongs to another user" in refusal(tmp_path / "kv").message
    real_open = os.open

    def deny(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(".part"):
            raise OSError(errno.EROFS, "Read-only file system")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", deny)
    assert "Read-only file system" in refusal(tmp_path / "kv").message


def test_relative_paths_and_links_to_folders_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    store = DiskStore("link/deep/kv")
    store.open(FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES, GENEROUS, lambda stage, percent: None)
    monkeypatch.chdir("/")
    write(store, chain(1))
    store.close()
    assert len(list((tmp_path / "real" / "deep" / "kv").rglob("*.kv"))) == 1


def test_no_room_for_a_single_block_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(tmp_path, size_bytes=UNIT - 1).field == "disk_kv_size_gib"
    set_free(monkeypatch, UNIT)
    error = refusal(tmp_path)
    assert error.field == "disk_kv_path" and "GiB free, which hold no block" in error.message


def test_a_second_engine_is_refused_until_the_first_has_gone(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    error = refusal(tmp_path / "kv")
    assert error.field == "disk_kv_path" and f"in use by another engine (process {os.getpid()})" in error.message
    store.close()
    assert fresh_num_blocks(tmp_path / "kv", GENEROUS) > 0


def test_an_engine_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    code = f"""if True:
        import os, signal
        from engine.execution.disk_store import DiskStore
        store = DiskStore({str(tmp_path / "kv")!r})
        print("held", flush=True)
        signal.pause()
    """
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        assert f"process {child.pid}" in refusal(tmp_path / "kv").message
    finally:
        child.kill()
        child.communicate()
    assert fresh_num_blocks(tmp_path / "kv", GENEROUS) > 0


# faults while it runs


def test_a_full_disk_fails_the_write_and_leaves_nothing(
    open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_store()
    one, two = chain(2)
    write(store, [one])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 40, limits[1]))
        for _ in range(5):
            assert not store.write(two, memoryview(payload(two)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder_of(tmp_path).iterdir()] == [f"{one.digest.hex()}.kv"]
    assert [record.fields["count"] for record in caplog.records] == [1, 2, 4]  # type: ignore[attr-defined]
    write(store, [two])
    assert [read(store, each) for each in (one, two)] == [payload(one), payload(two)]


@pytest.mark.parametrize("call", ["open", "writev", "rename", "close"])
def test_an_error_of_any_call_fails_the_write_only(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store, _ = open_store()
    (one,) = chain(1)
    real_close = os.close

    def fail(*args: object, **kwargs: object) -> None:
        if call == "close" and isinstance(args[0], int):
            real_close(args[0])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not store.write(one, memoryview(payload(one)))
    assert list(folder_of(tmp_path).iterdir()) == []
    write(store, [one])


def test_a_write_in_small_pieces_is_whole(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store()
    (one,) = chain(1)
    monkeypatch.setattr(os, "writev", lambda file, pieces: os.write(file, pieces[0][:7]))
    monkeypatch.setattr(os, "readv", lambda file, targets, real=os.readv: real(file, [targets[0][:7]]))
    write(store, [one])
    assert read(store, one) == payload(one)


def test_a_folder_that_is_removed_while_it_runs_fails_transfers_only(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    one, two = chain(2)
    write(store, [one])
    path_of(tmp_path, one).unlink()
    folder_of(tmp_path).rmdir()
    assert read(store, one) is None
    assert not store.write(two, memoryview(payload(two)))
    assert store.drop(one)


def test_a_disk_that_has_become_read_only_still_gives_its_blocks(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store()
    (one,) = chain(1)
    write(store, [one])

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(os, "unlink", fail)
    assert read(store, one) == payload(one)
    assert not store.drop(one)


def test_loading_is_told_how_far_the_scan_is(open_store: Open, tmp_path: Path) -> None:
    store, _ = open_store()
    write(store, [block(None, i) for i in range(600)])
    store.close()
    told: list[tuple[str, float]] = []
    store = DiskStore(str(tmp_path / "kv"))
    store.open(FINGERPRINT, BLOCK_SIZE, PAYLOAD_BYTES, GENEROUS, lambda stage, percent: told.append((stage, percent)))
    store.close()
    assert {stage for stage, _ in told} == {"reading KV blocks on disk"}
    percents = [percent for _, percent in told]
    assert percents == sorted(percents) and percents[-1] == 100.0 and len(percents) >= 4
