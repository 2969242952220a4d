"""The simulated disk without power cuts: it behaves as a real one, for replaced modules only."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.sim.disks import fresh_module, sync
from tests.sim.hashing import printed_under_any_hashes
from tests.simulator.disk import Disk, installed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

NEW = os.O_WRONLY | os.O_CREAT
#: No descriptor, here or there.
CLOSED = 1 << 20


# --- while the power is on -----------------------------------------------------------------------


def result_of(action: Callable[[], Any]) -> Any:
    """Return an action's result, or its error number."""
    try:
        result = action()
    except OSError as error:
        return OSError, error.errno
    return (
        None if isinstance(result, int | os.PathLike) and not isinstance(result, bool) else result
    )


def act(random: Random, system: Any, directory: Any, open_files: dict[int, int]) -> Any:
    """Do one random operation; return its result."""
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
        lambda: system.link(path, other),
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
        (directory / "x" / "y").mkdir,
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
            results = act(dice, os, real, files)
            assert act(same_dice, module.os, simulated, simulated_files) == results
            assert {p.name: p.read_bytes() for p in real.iterdir()} == {
                p.name: p.read_bytes() for p in simulated.iterdir()
            }
        for fd in files.values():
            os.close(fd)
        paths = (p for s in range(seed + 1) for p in disk.path(f"{s}").iterdir())
        used = sum({id(disk.find(p)): p.stat().st_size for p in paths}.values())
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
    """`fdopen` and `open` with an opener: the descriptor stays open, or is closed."""
    path = disk.path("x")
    fd = module.os.open(path, NEW)
    with module.os.fdopen(fd, "wb", closefd=False) as file:
        file.write(b"ab" * 50)
        assert path.read_bytes() == b""
    assert path.read_bytes() == b"ab" * 50
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
    with pytest.raises(OSError, match="Bad file descriptor"):
        module.os.fdopen(fd, "wb")


def test_directories(disk: Disk) -> None:
    path = disk.path("a/b")
    with pytest.raises(FileNotFoundError):
        path.mkdir()
    path.mkdir(parents=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / "x").touch()
    with pytest.raises(FileExistsError):
        (path / "x").mkdir(exist_ok=True)
    assert [p.is_dir() for p in (path, path / "x")] == [True, False]
    assert [p.is_file() for p in (path, path / "x")] == [False, True]
    with pytest.raises(IsADirectoryError):
        path.unlink()
    with pytest.raises(OSError, match="cross-device"):
        (path / "x").replace(disk.path("x"))
    with pytest.raises(FileNotFoundError):
        disk.path("y").chmod(0o600)


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


# --- one seed, one disk --------------------------------------------------------------------------


def life(seed: int) -> str:
    """Return the results of a disk's random operations."""
    random, results = Random(seed), []
    module: Any = fresh_module()
    with installed([module], random):
        disk = Disk(random)
        directory = disk.path("d")
        directory.mkdir()
        sync(disk.path(""))
        for _ in range(40):
            files: dict[int, int] = {}
            results += [act(random, module.os, directory, files) for _ in range(30)]
            results.append(disk.flip())
            results.append(disk.tear())
            disk.power_cut()
            results.append([(path.name, path.read_bytes()) for path in directory.iterdir()])
    return repr(results)


def test_the_same_seed_is_the_same_disk() -> None:
    assert life(1) == life(1)
    assert life(1) != life(2)


def test_a_disk_does_not_depend_on_the_hashes_of_strings() -> None:
    code = "from tests.sim.test_disk import life; print(life(3))"
    assert printed_under_any_hashes(code) == f"{life(3)}\n"
