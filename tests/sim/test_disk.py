"""The simulated disk: like a real one while the power is on; what a power cut may leave of it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path, PurePosixPath
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from ziplog.sim.disk import Disk, installed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ziplog.sim.filesystem import Descriptor, DiskPath

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(300)
NEW = os.O_WRONLY | os.O_CREAT
#: No descriptor, here or there.
CLOSED = 1 << 20


def fresh_module() -> ModuleType:
    """Return a module that has what production modules have."""
    module = ModuleType("module")
    vars(module).update(os=os, fcntl=fcntl, uuid=uuid, secrets=secrets, Path=Path)
    return module


@pytest.fixture
def module() -> Iterator[Any]:
    module = fresh_module()
    with installed([module], Random(5)):
        yield module


@pytest.fixture
def disk() -> Disk:
    return Disk(Random(1))


def put(path: DiskPath, *contents: bytes) -> Descriptor:
    """Write to the end of a file, which is made if need be, in so many steps."""
    fd = path.disk.open(path, NEW | os.O_APPEND)
    for content in contents:
        path.disk.write(fd, content)
    return fd


def sync(path: DiskPath) -> None:
    """Sync a file or directory."""
    fd = path.disk.open(path, os.O_RDONLY)
    path.disk.sync(fd)
    path.disk.close(fd)


def outcomes(
    prepare: Callable[[Disk], DiskPath], seeds: Iterable[int] = SEEDS
) -> list[bytes | None]:
    """Return what a file is after power cuts, once for each seed; None: it is not there."""
    results = []
    for seed in seeds:
        disk = Disk(Random(seed))
        path = prepare(disk)
        disk.power_cut()
        results.append(path.read_bytes() if path.exists() else None)
    return results


# --- while the power is on -----------------------------------------------------------------------


def result_of(action: Callable[[], Any]) -> Any:
    """Return what something returned, or the number of its error."""
    try:
        result = action()
    except OSError as error:
        return OSError, error.errno
    return (
        None if isinstance(result, int | os.PathLike) and not isinstance(result, bool) else result
    )


def act(random: Random, system: Any, directory: Any, open_files: dict[int, int]) -> Any:
    """Do one thing at random; return what came of it."""
    path = directory / f"{random.randrange(3)}.f"
    other = directory / f"{random.randrange(3)}.f"
    number, offset, size = random.randrange(3), random.randrange(40), random.randrange(30)
    content = random.randbytes(size)
    fd = open_files.get(number, CLOSED)

    def open_another() -> None:
        access = random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))
        more = (0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_TRUNC, os.O_APPEND)
        fresh = system.open(path, access | random.choice(more), 0o600)
        if number in open_files:
            system.close(open_files[number])
        open_files[number] = fresh

    def close() -> None:
        system.close(open_files.pop(number, CLOSED))

    written = (
        lambda: str(system.pwrite(fd, content, offset)),
        lambda: str(system.write(fd, content)),
        lambda: str(system.pwritev(fd, [content[:7], content[7:]], offset)),
    )
    actions = (
        open_another,
        close,
        *written,
        lambda: system.pread(fd, size, offset),
        lambda: system.read(fd, size),
        partial(system.fsync, fd),
        lambda: system.truncate(path, offset),
        lambda: path.replace(other),
        lambda: path.unlink(missing_ok=size > 9),
        path.read_bytes,
        lambda: path.write_bytes(content),
        lambda: path.touch(0o600),
        lambda: path.stat().st_size,
        lambda: system.open(path / "below", os.O_RDONLY),
        lambda: system.open(directory, os.O_WRONLY),
        lambda: system.open(path, os.O_RDONLY | os.O_DIRECTORY),
        path.exists,
        lambda: sorted(p.name for p in directory.glob("[01]*.f")),
        directory.mkdir,
        lambda: directory.mkdir(exist_ok=True),
        lambda: (directory / "x" / "y").mkdir(),
    )  # fmt: skip
    return result_of(random.choice(actions))


def test_it_does_what_the_real_one_does(module: Any, disk: Disk, tmp_path: Path) -> None:
    for seed in range(60):
        real, simulated = tmp_path / f"{seed}", disk.path(f"{seed}")
        real.mkdir()
        simulated.mkdir()
        files: dict[int, int] = {}
        simulated_files: dict[int, int] = {}
        dice, same_dice = Random(seed), Random(seed)
        for _ in range(120):
            told = act(dice, os, real, files)
            assert act(same_dice, module.os, simulated, simulated_files) == told
            assert {p.name: p.read_bytes() for p in real.iterdir()} == {
                p.name: p.read_bytes() for p in simulated.iterdir()
            }
        for fd in files.values():
            os.close(fd)
        used = sum(p.stat().st_size for s in range(seed + 1) for p in disk.path(f"{s}").iterdir())
        disk.kill()
        assert disk.used_bytes == used


def test_paths_are_taken_apart_as_everywhere(disk: Disk) -> None:
    for text in ("a", "a/b.seg", "a/b.c.tmp", "a/.hidden", "a/b/c"):
        path, real = disk.path("x") / text, PurePosixPath("x") / text
        assert (path.name, path.suffix) == (real.name, real.suffix)
        for mine, its in (
            (path.with_suffix(".new"), real.with_suffix(".new")),
            (path.with_name("y.z"), real.with_name("y.z")),
            (path.parent, real.parent),
        ):
            assert str(mine) == f"{disk.name}/{its}"
            assert mine == disk.path(str(its))
    assert disk.path("a") / "b" < disk.path("a/c")
    assert disk.path("a") != Disk(Random(1)).path("a")
    assert disk.path("a").parent == disk.path("").parent == disk.path("")
    assert len({disk.path("a"), disk.path("a"), disk.path("b")}) == 2


def test_no_path_reaches_a_real_file(disk: Disk, module: Any) -> None:
    with pytest.raises(TypeError, match="simulated"):
        os.fspath(disk.path("x"))
    with pytest.raises(TypeError, match="simulated"):
        open(disk.path("x"), "wb")  # noqa: PTH123, SIM115 - it must not
    for text in ("/etc/passwd", "relative", "/disk-00000000/x"):
        with pytest.raises(ValueError, match="no simulated disk"):
            module.open(text, "rb")


def test_a_string_leads_back_to_its_disk(disk: Disk, module: Any) -> None:
    path, gone = disk.path("a/b"), str(Disk(Random(2)).path("a/b"))
    assert module.Path(str(path)) == resolve(path) == path
    with pytest.raises(ValueError, match="no simulated disk"):
        module.Path(gone)


def test_modules_get_their_own_back() -> None:
    module = fresh_module()
    before = dict(vars(module))

    def use() -> None:
        with installed([module]):
            changed = {name for name in vars(module) if vars(module)[name] is not before.get(name)}
            assert changed == {"os", "fcntl", "uuid", "secrets", "Path", "open"}
            raise InterruptedError

    with pytest.raises(InterruptedError):
        use()
    assert vars(module) == before


def test_what_is_no_longer_real_stays_as_it_is() -> None:
    module = fresh_module()
    module.os = stand_in = object()  # type: ignore[attr-defined]
    with installed([module]):
        assert module.os is stand_in
    assert module.os is stand_in


def test_nothing_is_random(module: Any) -> None:
    def draw() -> list[Any]:
        with installed([other := fresh_module()], Random(5)):
            o: Any = other
            return [o.os.urandom(9), o.os.getpid(), o.uuid.uuid4(), o.secrets.token_hex(8)]

    assert draw() == draw()
    assert len(draw()[3]) == 16
    assert draw()[2].version == 4


def test_streams(module: Any, disk: Disk) -> None:
    """As `fdopen` and `open` with an opener are used: a descriptor that is left open, or is not."""
    path = disk.path("x")
    fd = module.os.open(path, NEW)
    with module.os.fdopen(fd, "wb", closefd=False) as file:
        file.write(b"ab" * 5000)
        assert len(path.read_bytes()) < 10_000
    assert path.read_bytes() == b"ab" * 5000
    module.os.close(fd)

    def opener(at: Any, flags: int) -> int:
        fd = module.os.open(at, flags, 0o600)
        assert isinstance(fd, int)
        return fd

    with module.open(path, "wb", opener=opener) as file:
        file.write(b"new")
        file.flush()
        module.os.fsync(file.fileno())
    sync(disk.path(""))
    disk.power_cut()
    with path.open("rb") as file:
        assert (file.read(1), file.read()) == (b"n", b"ew")
    with module.open(str(path), "ab") as file:
        file.write(b"er")
    assert path.read_bytes() == b"newer"
    with pytest.raises(OSError, match="Bad file descriptor"):
        module.os.close(fd)


def test_locks(module: Any, disk: Disk) -> None:
    system, flock = module.os, module.fcntl.flock
    exclusive = module.fcntl.LOCK_EX | module.fcntl.LOCK_NB
    path = disk.path("lock")
    first, second = (system.open(path, NEW) for _ in range(2))
    flock(first, exclusive)
    flock(first, exclusive)
    with pytest.raises(BlockingIOError):
        flock(second, exclusive)
    flock(second, module.fcntl.LOCK_UN)  # not its own
    with pytest.raises(BlockingIOError):
        flock(second, exclusive)
    flock(first, module.fcntl.LOCK_UN)
    flock(second, exclusive)
    system.close(second)
    flock(first, exclusive)
    disk.kill()
    with pytest.raises(OSError, match="Bad file descriptor"):
        flock(first, exclusive)
    flock(system.open(path, os.O_RDONLY), exclusive)


# --- what a power cut leaves ---------------------------------------------------------------------


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
    # As long as the write that was torn made it, or all of them.
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

    sizes = {len(content or b"") for content in outcomes(prepare, range(60))}
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
    assert disk.write(fd, b"b" * 50) == 30  # a part of it fits
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


def test_the_call_fails_that_was_said(disk: Disk) -> None:
    """Once, with nothing done; what does not change anything is not counted."""
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


# --- one seed, one disk --------------------------------------------------------------------------


def life(seed: int) -> str:
    """Return all that a disk went through."""
    random, told = Random(seed), []
    module: Any = fresh_module()
    with installed([module], random):
        disk = Disk(random)
        directory = disk.path("d")
        directory.mkdir()
        sync(disk.path(""))
        for _ in range(40):
            files: dict[int, int] = {}
            told += [act(random, module.os, directory, files) for _ in range(30)]
            told.append(disk.flip())
            told.append(disk.tear())
            disk.power_cut()
            told.append([(path.name, path.read_bytes()) for path in directory.iterdir()])
    return repr(told)


def test_the_same_seed_is_the_same_disk() -> None:
    assert life(1) == life(1)
    assert life(1) != life(2)


def test_a_disk_does_not_depend_on_the_hashes_of_strings() -> None:
    code = "from tests.sim.test_disk import life; print(life(3))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": salt},
        ).stdout
        for salt in ("1", "2")
    }
    assert len(told) == 1
