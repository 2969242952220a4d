"""Power cuts and other faults of a simulated disk."""

from __future__ import annotations

import errno
import os
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.sim.disks import SEEDS, outcomes, put, sync
from tests.simulator.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.filesystem import DiskPath


# --- power cuts ----------------------------------------------------------------------------------


def test_what_was_synced_survives_whatever_happens() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"a" * 700)
        disk.sync(fd)
        sync(disk.path(""))
        disk.write(fd, b"b" * 600)
        disk.write(fd, b"c" * 2000)
        disk.write(fd, b"d" * 100)
        return disk.path("x")

    whole = b"a" * 700 + b"b" * 600 + b"c" * 2000 + b"d" * 100
    kept: set[int] = set()
    tails: set[str] = set()
    lengths: set[int] = set()
    for content in outcomes(prepare):
        assert content is not None
        assert content[:700] == whole[:700]
        assert len(content) <= len(whole)
        at = next((i for i, byte in enumerate(content) if byte != whole[i]), len(content))
        kept.add(at)
        tail = content[at:]
        tails.add("none" if not tail else "zeros" if not any(tail) else "garbage")
        lengths |= {len(content)} if tail else set()
    ends = {700, 1300, 3300, 3400}
    assert ends <= kept
    torn = kept - ends
    assert {at for at in torn if at % 512}
    assert {at for at in torn if at % 512 == 0} == {1024, 1536, 2048, 2560, 3072}
    assert tails == {"none", "zeros", "garbage"}
    # The length after the torn write, or after all writes.
    assert lengths <= ends
    assert {1300, 3300, 3400} <= lengths


def test_overwrites_survive_in_order() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"....")
        disk.sync(fd)
        sync(disk.path(""))
        fd = disk.open(disk.path("x"), os.O_WRONLY)
        for step in range(3):
            disk.pwrite(fd, b"%d%d" % (step, step), step)
        return disk.path("x")

    whole = {b"....", b"00..", b"011.", b"0122"}
    torn = {b"0...", b"01..", b"012."}
    assert set(outcomes(prepare)) == whole | torn


def test_a_gap_is_zeros_and_a_write_beyond_is_one_step(disk: Disk) -> None:
    path = disk.path("x")
    fd = put(path, b"a")
    disk.sync(fd)
    sync(disk.path(""))
    fd = disk.open(path, os.O_WRONLY)
    disk.pwrite(fd, b"b", 3)
    assert path.read_bytes() == b"a\0\0b"
    disk.power_cut()
    assert path.read_bytes()[:1] == b"a"


def test_a_truncation_happened_or_did_not() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"0123456789")
        disk.sync(fd)
        sync(disk.path(""))
        disk.resize(fd.file, 4)
        disk.write(fd, b"ab")
        return disk.path("x")

    found = set(outcomes(prepare))
    assert {b"0123456789", b"0123", b"0123ab", b"0123a"} < found
    assert all(c == b"0123456789" or (c and c[:4] == b"0123" and len(c) <= 6) for c in found)


def test_a_file_that_was_not_truncated_is_not_longer_either() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"0123456789")
        disk.sync(fd)
        sync(disk.path(""))
        disk.resize(fd.file, 4)
        disk.write(fd, b"a" * 20)
        return disk.path("x")

    kept = [content for content in outcomes(prepare) if content and len(content) > 4]
    assert b"0123456789" in kept
    assert b"0123" + b"a" * 20 in kept
    assert all(content[4:10] != b"456789" or len(content) == 10 for content in kept)


def test_a_lengthened_file_is_as_it_was_or_longer() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"ab")
        disk.sync(fd)
        sync(disk.path(""))
        disk.resize(fd.file, 4)
        return disk.path("x")

    assert {b"ab", b"ab\0\0"} <= set(outcomes(prepare))


def test_a_new_name_may_be_lost_until_its_directory_is_synced() -> None:
    def prepare(disk: Disk, *, is_synced: bool) -> DiskPath:
        disk.sync(put(disk.path("x"), b"content"))
        if is_synced:
            sync(disk.path(""))
        return disk.path("x")

    assert set(outcomes(lambda disk: prepare(disk, is_synced=False))) == {None, b"content"}
    assert set(outcomes(lambda disk: prepare(disk, is_synced=True))) == {b"content"}


def test_a_link_may_be_lost_until_its_directory_is_synced() -> None:
    def prepare(disk: Disk, *, is_synced: bool) -> DiskPath:
        part, name = disk.path("part"), disk.path("name")
        disk.sync(put(part, b"content"))
        sync(disk.path(""))
        disk.link(part, name)
        if is_synced:
            sync(disk.path(""))
        part.unlink()
        assert disk.used_bytes == len(b"content")
        return name

    assert set(outcomes(lambda disk: prepare(disk, is_synced=False))) == {None, b"content"}
    assert set(outcomes(lambda disk: prepare(disk, is_synced=True))) == {b"content"}


def test_a_directory_that_is_synced_does_not_sync_its_files() -> None:
    def prepare(disk: Disk) -> DiskPath:
        put(disk.path("x"), b"ab")
        sync(disk.path(""))
        return disk.path("x")

    assert {b"", b"a", b"ab"} <= set(outcomes(prepare))
    assert None not in outcomes(prepare)


def test_a_file_without_its_directory_is_nowhere() -> None:
    def prepare(disk: Disk) -> DiskPath:
        (disk.path("d") / "e").mkdir(parents=True)
        disk.sync(put(disk.path("d/e/x"), b"content"))
        sync(disk.path("d/e"))
        sync(disk.path("d"))
        return disk.path("d/e/x")

    assert set(outcomes(prepare)) == {None, b"content"}


def test_a_rename_happened_or_did_not() -> None:
    found = set()
    for seed in SEEDS:
        disk = Disk(Random(seed))
        old, new = disk.path("old"), disk.path("new")
        disk.sync(put(old, b"1"))
        disk.sync(put(new, b"2"))
        sync(disk.path(""))
        old.replace(new)
        disk.power_cut()
        found.add(tuple((p.name, p.read_bytes()) for p in sorted(disk.path("").iterdir())))
    assert found == {(("new", b"1"),), (("new", b"2"), ("old", b"1"))}


def test_names_change_in_order() -> None:
    found = set()
    for seed in SEEDS:
        disk = Disk(Random(seed))
        for name in "ab":
            disk.path(name).touch()
        sync(disk.path(""))
        disk.path("c").touch()
        disk.path("a").unlink()
        disk.path("b").replace(disk.path("d"))
        disk.power_cut()
        found.add("".join(sorted(path.name for path in disk.path("").iterdir())))
    assert found == {"ab", "abc", "bc", "cd"}


def test_an_end_of_the_process_loses_nothing_that_was_written(module: Any, disk: Disk) -> None:
    path = disk.path("x")
    fd = put(path, b"content")
    disk.kill()
    assert path.read_bytes() == b"content"
    with pytest.raises(OSError, match="Bad file descriptor"):
        module.os.write(fd, b"more")

    def prepare(disk: Disk) -> DiskPath:
        put(disk.path("x"), b"content")
        disk.kill()  # it syncs nothing
        return disk.path("x")

    assert {None, b"", b"content"} <= set(outcomes(prepare))


def test_what_waits_for_long_is_written_back() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"))
        sync(disk.path(""))
        for _ in range(3000):
            disk.write(fd, b"x")
        return disk.path("x")

    contents = outcomes(prepare, range(60))
    sizes = {len(content or b"") for content in contents}
    assert contents.count(b"x" * 3000) > 5, "often all survive"
    assert min(sizes) >= 3000 - 1024
    assert max(sizes) == 3000
    assert len(sizes) > 20


def test_what_a_power_cut_left_is_synced() -> None:
    for seed in SEEDS:
        disk = Disk(Random(seed))
        put(disk.path("x"), b"abc" * 400)
        disk.power_cut()
        found = {p.name: p.read_bytes() for p in disk.path("").iterdir()}
        disk.power_cut()
        assert {p.name: p.read_bytes() for p in disk.path("").iterdir()} == found
        assert disk.used_bytes == sum(map(len, found.values()))


def test_a_file_that_came_back_takes_space_as_before() -> None:
    came_back = 0
    for seed in range(20):
        disk = Disk(Random(seed))
        path = disk.path("x")
        disk.sync(put(path, b"content"))
        sync(disk.path(""))
        path.unlink()
        disk.power_cut()
        if path.exists():
            came_back += 1
            assert path.read_bytes() == b"content"
            assert disk.used_bytes == 7
    assert 0 < came_back < 20


# --- faults --------------------------------------------------------------------------------------


def test_one_bit_flips_in_what_was_synced() -> None:
    flipped, bits = set(), set()
    for seed in SEEDS:
        disk = Disk(Random(seed))
        fd = put(disk.path("d.seg"), b"0123")
        disk.sync(fd)
        sync(disk.path(""))
        disk.write(fd, b"4567")
        disk.sync(put(disk.path("other"), b"0123"))
        damage = disk.flip(lambda path: path.name.endswith(".seg"))
        assert damage is not None
        assert (damage.path, damage.stop) == (disk.path("d.seg"), damage.start + 1)
        content = damage.path.read_bytes()
        changed = [
            (i, a ^ b) for i, (a, b) in enumerate(zip(content, b"01234567", strict=True)) if a != b
        ]
        assert [i for i, _ in changed] == [damage.start]
        flipped.add(damage.start)
        bits.add(changed[0][1])
        disk.power_cut()
        assert damage.path.read_bytes()[:4] == content[:4]
        assert disk.path("other").read_bytes() == b"0123" if disk.path("other").exists() else True
    assert flipped == {0, 1, 2, 3}
    assert bits == {1 << bit for bit in range(8)}


def test_nothing_to_damage(disk: Disk) -> None:
    put(disk.path("x"), b"not synced")
    assert disk.flip() is None
    assert disk.tear() is None
    disk.sync(put(disk.path("x")))
    assert disk.flip(lambda path: path.suffix == ".seg") is None
    assert disk.tear(lambda path: path.suffix == ".seg") is None
    assert disk.flip() is not None


def test_an_end_is_torn_off() -> None:
    tails = set()
    for seed in SEEDS:
        disk = Disk(Random(seed))
        whole = b"x" * 2000
        disk.sync(put(disk.path("x"), whole))
        damage = disk.tear()
        assert damage is not None
        assert 2000 - 512 <= damage.start < damage.stop == 2000
        content = damage.path.read_bytes()
        assert content[: damage.start] == whole[: damage.start]
        tail = content[damage.start :]
        assert len(tail) in {0, damage.stop - damage.start}
        tails.add("none" if not tail else "zeros" if not any(tail) else "garbage")
        assert disk.used_bytes == len(content)
    assert tails == {"none", "zeros", "garbage"}


def free_bytes(module: Any, disk: Disk) -> int:
    space = module.os.statvfs(disk.path(""))
    return int(space.f_bavail * space.f_frsize)


def test_a_full_disk(module: Any) -> None:
    disk = Disk(Random(1), capacity_bytes=100)
    path, other = disk.path("x"), disk.path("y")
    fd = put(path, b"a" * 70)
    assert free_bytes(module, disk) == 30
    assert disk.write(fd, b"b" * 50) == 30  # a part fits
    with pytest.raises(OSError, match="No space") as caught:
        disk.write(fd, b"c")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        disk.resize(fd.file, 101)
    overwrites = disk.open(path, os.O_WRONLY)
    assert disk.pwrite(overwrites, b"d" * 100, 0) == 100
    assert disk.pwrite(overwrites, b"e" * 9, 95) == 5
    with pytest.raises(OSError, match="No space"):
        other.write_bytes(b"f")
    disk.capacity_bytes = 40
    assert free_bytes(module, disk) == 0
    disk.resize(fd.file, 30)
    assert free_bytes(module, disk) == 10
    path.unlink()
    assert free_bytes(module, disk) == 10  # it is open
    disk.close(fd)
    disk.close(overwrites)
    assert free_bytes(module, disk) == 40
    other.write_bytes(b"g" * 40)
    disk.path("z").touch()
    disk.path("z").replace(other)
    assert free_bytes(module, disk) == 40


def test_the_selected_call_fails(disk: Disk) -> None:
    """It fails once, without an effect; calls that change nothing are not counted."""
    path = disk.path("x")
    calls: dict[str, Callable[[], object]] = {
        "create": path.touch,
        "write": lambda: disk.pwrite(disk.open(path, os.O_WRONLY), b"abc", 0),
        "sync": lambda: sync(path),
        "truncate": lambda: disk.resize(disk.open(path, os.O_RDWR).file, 2, path),
        "rename": lambda: path.replace(disk.path("y")),
    }
    for call in calls.values():
        before = disk.calls, [(p.name, p.read_bytes()) for p in disk.path("").iterdir()]
        disk.path("").exists()
        disk.fail_on(1, errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            call()
        assert before[1] == [(p.name, p.read_bytes()) for p in disk.path("").iterdir()]
        assert disk.calls == before[0] + 1
        call()
    disk.fail_on(2)
    disk.fail_on(3, InterruptedError("it ends here"))
    disk.path("z").touch()
    with pytest.raises(OSError, match="Input/output"):
        disk.path("z").touch()
    with pytest.raises(InterruptedError, match="ends here"):
        disk.path("z").touch()
    disk.path("z").touch()
    disk.fail_on(1)
    disk.clear_failures()
    disk.path("z").touch()


def test_a_sync_that_fails_puts_nothing_on_the_disk() -> None:
    def prepare(disk: Disk) -> DiskPath:
        fd = put(disk.path("x"), b"ab")
        sync(disk.path(""))
        disk.fail_on(1)
        with pytest.raises(OSError, match="Input/output"):
            disk.sync(fd)
        return disk.path("x")

    assert {b"", b"ab"} <= set(outcomes(prepare))


def test_syncs_take_time(disk: Disk) -> None:
    disk.latency_ns = 7
    fd = put(disk.path("x"), b"abc")
    assert disk.sync_ns() == 0
    disk.sync(fd)
    sync(disk.path(""))
    disk.latency_ns = 30
    disk.sync(fd)
    assert disk.sync_ns() == 44
    assert disk.sync_ns() == 0
    disk.sync(fd)
    disk.kill()
    assert disk.sync_ns() == 0
