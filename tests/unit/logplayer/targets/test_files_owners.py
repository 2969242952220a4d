"""Files with two owners, crashes, and any order of steps; docs/player.md, section 7."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer.contract import Fenced, Opened, Retry
from logplayer.targets import files_target
from logplayer.targets.files_target import FilesTarget
from logplayer.targets.staged_records import Chain
from tests.properties import examples
from tests.unit.logplayer.targets.databases import GSNS, batch, record, task
from tests.unit.logplayer.targets.files_directory import files, names, opened, stored
from tests.unit.shard.disk import Crash, Disk
from ziplog.cli.rendering import as_json
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from logplayer.targets.staged_records import Frame


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power of the real disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


# --- two owners ---


def test_former_owner_is_fenced(tmp_path: Path) -> None:
    former, of = opened(tmp_path)
    former.deliver(batch(of, 1, 4))
    successor, later = opened(tmp_path, 2, position=4, has_moved=True)
    with pytest.raises(Fenced, match="a later term than 1"):
        former.deliver(batch(of, 4, 9))
    with pytest.raises(Fenced, match="later term 2"):
        former.open(of)
    successor.deliver(batch(later, 4, 9))
    assert stored(tmp_path) == [1, 2, 3, 5, 8]
    assert not list(tmp_path.rglob("*.stage"))


def test_former_owner_passes_no_positions(tmp_path: Path) -> None:
    former, of = opened(tmp_path)
    successor, later = opened(tmp_path, 2)
    successor.deliver(batch(later, 1, 20, []))
    with pytest.raises(Fenced, match="a later term than 1"):
        former.deliver(batch(of, 1, 10, []))
    assert names(tmp_path) == [".ziplog-0000000000000000002"]
    assert files(tmp_path).open(task(3, has_moved=True)) == Opened(20)


def before_link(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something before the next link, while its owner stands still."""
    link = os.link

    def acted(*arguments: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        act()
        link(*arguments)

    monkeypatch.setattr(os, "link", acted)


def test_owner_that_stood_still_before_its_link_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, of = opened(tmp_path)

    def succeed() -> None:
        successor = files(tmp_path)
        assert successor.open(task(2)) == Opened(15)
        successor.deliver(batch(task(2), 15, 22))

    before_link(monkeypatch, succeed)
    with pytest.raises(Fenced, match="another process removed"):
        former.deliver(batch(of, 1, 15))
    assert stored(tmp_path) == [1, 2, 3, 5, 8, 13, 14, 15, 21]
    assert len(names(tmp_path)) == 3


def test_owner_that_stood_still_before_it_looks_finds_the_later_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, of = opened(tmp_path)
    write = former._written

    def written(name: str, write_to: Callable[[BinaryIO], object]) -> Path:
        part = write(name, write_to)
        opened(tmp_path, 2)
        return part

    monkeypatch.setattr(former, "_written", written)
    with pytest.raises(Fenced, match="a later term than 1"):
        former.deliver(batch(of, 1, 4))
    assert stored(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("has_part", [False, True])
def test_owner_that_stood_still_as_it_opened_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_part: bool
) -> None:
    former = files(tmp_path)
    write = former._written

    def written(name: str, write_to: Callable[[BinaryIO], object]) -> Path:
        opened(tmp_path, 2)
        return write(name, write_to)

    if has_part:
        before_link(monkeypatch, lambda: opened(tmp_path, 2))
    else:
        monkeypatch.setattr(former, "_written", written)
    with pytest.raises(Fenced):
        former.open(task(1))
    assert names(tmp_path) == [".ziplog-0000000000000000002"]


def test_file_that_a_former_owner_adds_during_an_open_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, of = opened(tmp_path)
    before_link(monkeypatch, lambda: former.deliver(batch(of, 1, 4)))
    assert files(tmp_path).open(task(2)) == Opened(4)


def test_file_that_a_former_owner_starts_during_an_open_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, _ = opened(tmp_path)
    unlink, parts = Path.unlink, list[Path]()

    def start(path: Path, **options: bool) -> None:
        if path == former._own and not parts:
            parts.append(former._written("records", lambda file: file.write(as_json(record(1)))))
            assert former._own.exists()
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", start)
    assert files(tmp_path).open(task(2)) == Opened(1)
    with pytest.raises(Fenced, match="another process removed"):
        former._link(parts[0], tmp_path / "part-000" / "0000000000000000001.jsonl")


def test_former_owner_that_stands_still_in_an_open_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, of = opened(tmp_path)
    former.deliver(batch(of, 1, 4))
    names = FilesTarget._names

    def overtaken(target: FilesTarget) -> list[str]:
        found = names(target)
        monkeypatch.undo()
        assert files(tmp_path).open(task(2)) == Opened(4)
        return found

    monkeypatch.setattr(FilesTarget, "_names", overtaken)
    with pytest.raises(Fenced, match="a later term than 1"):
        former.open(of)


@pytest.mark.parametrize("has_records", [False, True])
def test_an_emptied_directory_is_not_taken_for_complete(tmp_path: Path, has_records: bool) -> None:
    target, of = opened(tmp_path)
    target.deliver(batch(of, 1, 4))
    target.deliver(batch(of, 4, 4))
    for path in (tmp_path / "part-000").iterdir():
        path.unlink()
    with pytest.raises(Fenced, match="it is gone"):
        target.deliver(batch(of, 4, 9) if has_records else batch(of, 4, 9, []))
    with pytest.raises(ConfigError, match="the directory is empty"):
        files(tmp_path).open(task(2, 4, has_moved=True))


def test_a_late_open_makes_an_emptied_directory_begin_at_the_start(tmp_path: Path) -> None:
    """The claim of the late `open` is from before the cursor first moved."""
    owner, of = opened(tmp_path, 2)
    owner.deliver(batch(of, 1, 4))
    for path in (tmp_path / "part-000").iterdir():
        path.unlink()
    assert files(tmp_path).open(task(1)) == Opened(1)
    with pytest.raises(Fenced, match="it is gone"):
        owner.deliver(batch(of, 4, 9))
    successor, later = files(tmp_path), task(3, 4, has_moved=True)
    assert successor.open(later) == Opened(1)
    successor.deliver(batch(later, 1, 9))
    assert stored(tmp_path) == [gsn for gsn in GSNS if gsn < 9]


@pytest.mark.parametrize("stop", [4, 9, 15])
@pytest.mark.parametrize("is_behind", [False, True])
def test_the_name_decides_where_a_file_system_shows_changes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, *, is_behind: bool
) -> None:
    """An owner that sees its own identity file for too long."""
    former, of = opened(tmp_path)
    successor, later = opened(tmp_path, 2)
    successor.deliver(batch(later, 1, 9))
    if is_behind:
        successor.deliver(batch(later, 9, 15))
    monkeypatch.setattr(Path, "exists", lambda _: True)
    with pytest.raises(Fenced, match="exists: another process wrote it"):
        former.deliver(batch(of, 1, stop))
    expected = [gsn for gsn in GSNS if gsn < (15 if is_behind else 9)]
    assert stored(tmp_path) == expected
    assert not list(tmp_path.rglob("*.part"))


class _NamedByPosition(Chain):
    """A broken rule: a file has the name of the position at which its frames start."""

    def __iter__(self) -> Iterator[Frame]:
        start = self.stop
        for frame in super().__iter__():
            self.first = start
            yield frame


@pytest.mark.parametrize("is_broken", [False, True])
def test_owners_with_different_positions_give_a_record_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    """The successor passes a position without a record; the former owner sees that late."""
    if is_broken:
        monkeypatch.setattr(files_target, "Chain", _NamedByPosition)
    former, of = opened(tmp_path)
    former.deliver(batch(of, 1, 4))
    successor, later = opened(tmp_path, 2, position=4, has_moved=True)
    successor.deliver(batch(later, 4, 5, []))
    successor.deliver(batch(later, 5, 9))
    monkeypatch.setattr(Path, "exists", lambda _: True)
    with suppress(Fenced) if is_broken else pytest.raises(Fenced, match="another process wrote"):
        former.deliver(batch(of, 4, 9))
    assert stored(tmp_path) == ([1, 2, 3, 5, 8, 5, 8] if is_broken else [1, 2, 3, 5, 8])


@pytest.mark.parametrize("term", [1, 2])
def test_staged_file_of_a_later_worker_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    """A worker that stood still as it opened finds a staged file after a gap."""
    former, of = opened(tmp_path)
    find = former._stages
    successor, later = files(tmp_path, roll_bytes=10_000), task(term)

    def found() -> list[Path]:
        successor.open(later)
        successor.deliver(batch(later, 1, 4))
        successor.deliver(batch(later, 4, 4))
        successor.deliver(batch(later, 4, 9))
        return find()

    monkeypatch.setattr(former, "_stages", found)
    with suppress(Fenced):
        former.open(of)
    successor.deliver(batch(later, 9, 15))
    assert files(tmp_path).open(task(3)) == Opened(15)
    assert stored(tmp_path) == [gsn for gsn in GSNS if gsn < 15]
    assert not list(tmp_path.rglob("*.stage"))


@pytest.mark.parametrize("term", [1, 2])
def test_staged_file_of_a_later_worker_stays_where_a_file_system_shows_changes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    """A worker that sees its own identity file for too long finds the next staged file."""
    former, of = opened(tmp_path)
    find = former._stages
    successor, later = files(tmp_path, roll_bytes=10_000), task(term)

    def found() -> list[Path]:
        successor.open(later)
        successor.deliver(batch(later, 1, 4))
        return find()

    monkeypatch.setattr(former, "_stages", found)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    with suppress(Fenced):
        former.open(of)
    successor.deliver(batch(later, 4, 9))
    with suppress(Fenced):
        successor.deliver(batch(later, 9, 9))
    assert files(tmp_path).open(task(3)) == Opened(9)
    assert stored(tmp_path) == [gsn for gsn in GSNS if gsn < 9]


def test_unfinished_files_of_former_terms_are_removed(tmp_path: Path) -> None:
    opened(tmp_path)
    part = tmp_path / "part-000"
    left = part / ".0000000000000000001.jsonl.1.77.0.part"
    of_later = part / ".0000000000000000001.jsonl.3.77.0.part"
    for path in (left, of_later):
        path.write_text("half a li")
    opened(tmp_path, 2)
    assert not left.exists()
    assert of_later.exists()


# --- crashes ---


@pytest.mark.parametrize("roll_bytes", [1, 110, 10_000])
def test_any_crash_leaves_each_record_once(tmp_path: Path, roll_bytes: int) -> None:
    """The machine stops at any operation; afterwards the directory has all names, or synced ones.

    What `deliver` or `open` returned is there: the cursor may have moved.
    """
    allowed = 0
    while True:
        directory = tmp_path / str(allowed)
        part = directory / "a" / "part-000"
        part.mkdir(parents=True)
        disk, returned = Disk(pytest.MonkeyPatch(), part, allowed), 0
        try:
            target, of = files(directory / "a", roll_bytes=roll_bytes), task()
            returned = target.open(of).position or 0
            for stop in (4, 9, 9, 12, 15, 20, 20, 22):
                target.deliver(batch(of, returned, stop))
                returned = stop
            later = task(2, position=9, has_moved=True)
            returned = files(directory / "a").open(later).position or 0
            is_done = True
        except Crash:
            is_done = False
        disk.restore()
        for kind in ("everything", "only_synced"):
            left = directory / kind
            left.mkdir()
            getattr(disk, kind)(left / "part-000")
            again, of = files(left), task(3, position=returned or 1, has_moved=returned > 1)
            position = again.open(of).position
            assert position is not None
            assert position >= returned
            again.deliver(batch(of, position, 40))
            assert stored(left) == list(GSNS)
            assert not [*left.rglob("*.part"), *left.rglob("*.stage")]
        if is_done:
            return
        allowed += 1


@pytest.mark.parametrize("term", [1, 2])
def test_name_that_was_not_synced_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    target, of = opened(tmp_path)
    sync = files_target.sync_directory
    synced: list[list[str]] = []

    def fail(directory: Path) -> None:
        if list(directory.glob("*.jsonl")):
            raise OSError(errno.EIO, "broken")

    def noted(directory: Path) -> None:
        synced.append(sorted(path.name for path in directory.iterdir()))
        sync(directory)

    monkeypatch.setattr(files_target, "sync_directory", fail)
    with pytest.raises(Retry, match="broken"):
        target.deliver(batch(of, 1, 4))
    monkeypatch.setattr(files_target, "sync_directory", noted)
    assert target.open(task(term)) == Opened(4)
    assert [name for name in synced[-1] if not name.endswith(".stage")] == [
        f".ziplog-{term:019}",
        "0000000000000000001.jsonl",
    ]


# --- any order of steps ---

steps = st.tuples(
    st.sampled_from(["claim", "open", "deliver", "idle", "seek", "roll", "close"]),
    st.integers(0, 1),
    st.integers(1, 12),
    # The operation before which the process dies, or stands still while the other one acts.
    st.integers(0, 9),
)


class Owner:
    """A process that believes to own the task."""

    def __init__(self, directory: Path, roll_bytes: int) -> None:
        self.target = files(directory, roll_bytes=roll_bytes)
        self.task = task(0)
        self.at: int | None = None

    def open(self) -> None:
        self.at = None
        with suppress(Fenced, Retry, ConfigError):  # the last one: a seek behind the files
            self.at = self.target.open(self.task).position

    def deliver(self, size: int, *, is_idle: bool = False) -> None:
        if self.at is None:
            return
        at, stop = self.at, self.at + size
        if is_idle:
            stop = next((gsn for gsn in GSNS if gsn >= at), stop)
        self.at = None
        with suppress(Fenced, Retry):
            self.target.deliver(batch(self.task, at, stop))
            self.at = stop

    def close(self) -> None:
        self.at = None
        with suppress(Fenced, OSError):  # a successor has removed its staged file
            self.target.close()


class History:
    """A directory, its cursor, and two processes."""

    def __init__(self, directory: Path, roll_bytes: int) -> None:
        self.directory = directory
        self.owners = [Owner(directory, roll_bytes), Owner(directory, roll_bytes)]
        #: The cursor, and the positions that seeks passed.
        self.term = self.seek = 0
        self.position = 1
        self.skipped: set[int] = set()
        self.claim(self.owners[0])

    def claim(self, owner: Owner) -> None:
        self.term += 1
        has_moved = self.position > 1 and not self.seek
        owner.task = task(self.term, self.position, seek=self.seek, has_moved=has_moved)
        owner.open()

    def sought(self, owner: Owner, position: int) -> None:
        self.skipped |= set(range(self.position, position))
        self.position, self.seek = position, self.seek + 1
        self.claim(owner)

    def act(self, what: str, owner: Owner, size: int) -> None:
        if what == "claim":
            self.claim(owner)
        elif what == "seek":
            self.sought(owner, self.position + size)
        elif what == "open":
            owner.open()
        elif what == "close":
            owner.close()
        else:
            owner.deliver(0 if what == "roll" else size, is_idle=what == "idle")

    def check(self) -> None:
        """Check what readers find, and what a new owner would find."""
        # The membership service refuses moves of former terms.
        current = [one for one in self.owners if one.task.term == self.term]
        self.position = max([self.position, *(one.at or 0 for one in current)])
        copy = self.directory.with_name("copy")
        shutil.copytree(self.directory, copy)
        newest = int(max((copy / "part-000").glob(".ziplog-*")).name.removeprefix(".ziplog-"))
        found = files(copy).open(task(newest + 1, self.position, has_moved=True)).position or 0
        for directory in (self.directory, copy):
            gsns = stored(directory)
            assert gsns == sorted(set(gsns))
        missing = {gsn for gsn in GSNS if gsn < max(self.position, found)} - set(stored(copy))
        assert missing <= self.skipped
        shutil.rmtree(copy)

    def finish(self) -> None:
        owner = self.owners[0]
        self.claim(owner)
        if owner.at is None:
            self.sought(owner, stored(self.directory)[-1] + 1)
        owner.deliver(100)
        owner.deliver(0)
        self.check()
        assert owner.at is not None
        assert owner.at > GSNS[-1]
        assert set(GSNS) - set(stored(self.directory)) <= self.skipped


@examples(100)
@given(plan=st.lists(steps, max_size=14), roll_bytes=st.sampled_from([1, 110, 10_000]))
def test_any_order_of_steps_keeps_each_record_once(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, int, int, int]],
    roll_bytes: int,
) -> None:
    history = History(tmp_path_factory.mktemp("files") / "out", roll_bytes)
    for what, number, size, fault in plan:
        owner = history.owners[number]
        with pytest.MonkeyPatch.context() as patch, suppress(Crash):
            interfere(patch, owner, history.owners[1 - number], fault)
            history.act(what, owner, size)
        history.check()
    history.finish()
    shutil.rmtree(history.directory)


def interfere(patch: pytest.MonkeyPatch, owner: Owner, other: Owner, fault: int) -> None:
    """Let a process die at an operation, or stand still while the other one acts."""
    left = fault
    real = {name: getattr(os, name) for name in ("link", "fsync", "fdatasync", "pwritev")}

    def counted(name: str) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if fault % 2:
                    owner.at = None
                    raise Crash
                other.deliver(4)
                other.open()
                other.deliver(3)
            return real[name](*arguments)

        return act

    for name in real:
        patch.setattr(os, name, counted(name))
