"""Targets in directories of files: exactly once.

    part-003/0000000000000001200.jsonl       records; the name is the gsn of the first one
    part-003/.ziplog-0000000000000000007     the owner of the directory, a position; of term 7
    part-003/.NAME.TERM.PID.NUMBER.part      a file that has no name yet

Rules: a link gives a file its name, and fails if the name exists. `open` creates the identity file
of its term, then removes those of lower terms, then their unfinished files, and reads the names
last. `deliver` looks for its identity file between the creation and the link of its file. So a
lower term adds no file after `open`, and two owners never add the same record.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logplayer.contract import Fenced, Opened, Retry
from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.durable_files import sync_directory
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logplayer.contract import Batch, Task
    from ziplog.types import Record

#: A batch is a file, so batches are large.
BATCH_RECORDS: Final = 10_000
BATCH_BYTES: Final = 64 * 1024 * 1024
_NAME: Final = re.compile(r"(\d{19})\.jsonl", re.ASCII)
_IDENTITY: Final = re.compile(r"\.ziplog-(\d{19})", re.ASCII)
_PART: Final = re.compile(r"\..+\.(\d+)\.\d+\.\d+\.part", re.ASCII)
#: A file system without hard links answers one of them.
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_TAIL_BYTES: Final = 64 * 1024
#: Two workers of one claim never write the same unfinished file.
_numbers: Final = itertools.count()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a directory; and a position below which it has everything."""

    cluster: str
    player: str
    target: str
    part: int
    parts: int
    birth: int
    seek: int
    position: int


class _LastLine(msgspec.Struct):
    """What the last line of a file has to have."""

    gsn: int


class FilesTarget:
    """One task's files."""

    def __init__(self, directory: Path) -> None:
        """Take the directory of all partitions."""
        self._directory: Final = directory
        self._part = directory
        self._term = 0
        self._identity: Identity | None = None
        #: Where the next batch has to start.
        self._position = -1

    def open(self, task: Task) -> Opened:
        """Exclude lower terms, remove their unfinished files, and return the position.

        Raises:
            Retry: the file system refuses it now.
            Fenced: a later term is there.
            ConfigError: the directory is another task's, is empty although the cursor moved, or has
                records from a sought position on; or the file system has no hard links.

        """
        try:
            self._position = self._open(task)
        except OSError as error:
            raise Retry(f"cannot open {self._part}: {error}") from error
        return Opened(self._position)

    def _open(self, task: Task) -> int:
        self._part, self._term = part_of(self._directory, task.partition), task.term
        for made in (self._directory, self._part):
            made.mkdir(exist_ok=True)
            sync_directory(made.parent)
        identity = self._fence(task)
        names = self._names()
        # A former owner may have died before it synced the last name.
        sync_directory(self._part)
        last = _last_gsn(self._part / names[-1]) if names else -1
        if task.seek > identity.seek:
            if last >= task.position:
                raise _rewind_error(self._part, last, task)
            identity = self._store(identity, seek=task.seek, position=task.position)
        self._identity = identity
        return max(identity.position, last + 1)

    def _fence(self, task: Task) -> Identity:
        """Exclude lower terms; return what the newest one of them stored."""
        term = self._newest_term()
        if term is None:
            self._check_may_create(task)
            identity = Identity(
                cluster=cluster_id(task.cluster), player=task.player, target=task.target,
                part=task.partition, parts=task.partitions, birth=task.birth, seek=task.seek,
                position=task.position,
            )  # fmt: skip
        else:
            self._check_is_newest(term)
            identity = _read(_identity_of(self._part, term))
            _check_is_same_task(identity, task, self._part)
        if term != task.term:
            part = self._written(self._own.name, msgspec.json.encode(identity))
            try:
                self._link(part, self._own)
            finally:
                part.unlink(missing_ok=True)
            sync_directory(self._part)
            self._check_is_newest(self._newest_term())
        # The order matters: see `deliver`.
        self._remove(_IDENTITY, task.term - 1)
        self._remove(_PART, task.term)
        return identity

    def _check_may_create(self, task: Task) -> None:
        """Raise ConfigError if records are missing here, or belong to something else."""
        if task.has_moved:
            problem = (
                f"{self._part} has no position of {task.cursor}, whose cursor has moved to"
                f" {task.position}: the directory is empty, or another one. To fill it from the"
                f" beginning: `ziplog cursor seek {task.cursor} genesis`; to go on from a"
                " position, seek there"
            )
            raise ConfigError("position", None, "present", message=problem)
        if self._names():
            problem = f"{self._part} has records, but no file that says of which target"
            raise ConfigError(
                "directory", str(self._directory), "an empty or absent directory", message=problem
            )
        for other in sorted(self._directory.glob("part-*")):
            term = _newest_term(other)
            if term is not None:
                _check_is_same_target(_read(_identity_of(other, term)), task, other)

    def deliver(self, batch: Batch) -> None:
        """Add a file with the records, or store a position that was passed without records.

        Raises:
            Retry: the file system refuses it; the file may be there. Open it again.
            Fenced: a later term is there, or a file with the name of the first record.
            ConfigError: `map` changed the positions of records.

        """
        if batch.start != self._position or self._identity is None:
            raise Fenced(f"{self._part} is at {self._position}, not at {batch.start}")
        try:
            after = self._add(batch) if batch.records else batch.start
            if after < batch.stop:
                self._identity = self._store(self._identity, position=batch.stop)
        except OSError as error:
            raise Retry(f"cannot write in {self._part}: {error}") from error
        self._position = batch.stop

    def _add(self, batch: Batch) -> int:
        """Add a file; return the position after its last record."""
        gsns = [record.rid.gsn for record in batch.records]
        if gsns != sorted(gsns) or gsns[0] < batch.start or gsns[-1] >= batch.stop:
            allowed = "a function that keeps the rid of a record"
            raise ConfigError("map", gsns[:3], allowed, f"target {batch.task.target}")
        name = self._part / f"{gsns[0]:019}.jsonl"
        part = self._written(name.name, _lines(batch.records))
        try:
            # A successor removes first this identity, then unfinished files, then reads the names.
            # So either it is absent here, or the successor removes the part or finds the name.
            if not self._own.exists():
                raise Fenced(f"a later term than {self._term} is in {self._part}")
            self._link(part, name)
            sync_directory(self._part)
        finally:
            part.unlink(missing_ok=True)
        return gsns[-1] + 1

    def check(self) -> None:
        """Look at the directory, and change nothing.

        Raises:
            UnavailableError: it cannot be created.

        """
        if not self._directory.absolute().parent.is_dir():
            raise UnavailableError(f"cannot create {self._directory}: its directory is absent")

    def close(self) -> None:
        """Do nothing: no file is open between two steps."""

    # --- files ---

    @property
    def _own(self) -> Path:
        """The identity file of this term."""
        return _identity_of(self._part, self._term)

    def _written(self, name: str, contents: bytes) -> Path:
        """Return a new file without a name; its contents are synced."""
        part = self._part / f".{name}.{self._term}.{os.getpid()}.{next(_numbers)}.part"
        try:
            with part.open("xb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part

    def _link(self, part: Path, name: Path) -> None:
        try:
            os.link(part, name)
        except FileExistsError as error:
            raise Fenced(f"{name} exists: another process wrote it") from error
        except FileNotFoundError as error:
            raise Fenced(f"another process removed {part}") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            problem = f"cannot link files in {self._part}: {error.strerror}"
            allowed = "in a file system with hard links"
            raise ConfigError(
                "directory", str(self._directory), allowed, message=problem
            ) from error

    def _store(self, identity: Identity, **changes: Any) -> Identity:
        """Replace the identity file of this term."""
        changed = msgspec.structs.replace(identity, **changes)
        part = self._written(self._own.name, msgspec.json.encode(changed))
        try:
            part.replace(self._own)
        finally:
            part.unlink(missing_ok=True)
        sync_directory(self._part)
        self._check_is_newest(self._newest_term())
        return changed

    def _check_is_newest(self, newest: int | None) -> None:
        """Raise Fenced if a later term is there; then the file of this one has no meaning."""
        if newest is not None and newest > self._term:
            self._own.unlink(missing_ok=True)
            raise Fenced(f"{self._part} has the later term {newest}, not {self._term}")

    def _newest_term(self) -> int | None:
        return _newest_term(self._part)

    def _names(self) -> list[str]:
        """Return the names of the files with records, in order."""
        return sorted(path.name for path in self._part.iterdir() if _NAME.fullmatch(path.name))

    def _remove(self, pattern: re.Pattern[str], last_term: int) -> None:
        """Remove the files of terms up to `last_term`."""
        for path in list(self._part.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is not None and int(found[1]) <= last_term:
                path.unlink(missing_ok=True)


def connector(where: str, directory: str | os.PathLike[str]) -> Callable[[], FilesTarget]:
    """Return how tasks connect to a directory.

    Raises:
        ConfigError: it is no path.

    """
    named = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(named, str) or not named:
        raise ConfigError("directory", directory, "the path of a directory", where)
    return lambda: FilesTarget(Path(named).absolute())


def part_of(directory: Path, partition: int) -> Path:
    """Return the directory of a partition."""
    return directory / f"part-{partition:03}"


def _identity_of(part: Path, term: int) -> Path:
    return part / f".ziplog-{term:019}"


def _newest_term(part: Path) -> int | None:
    found = (_IDENTITY.fullmatch(path.name) for path in part.iterdir())
    return max((int(one[1]) for one in found if one is not None), default=None)


def _read(path: Path) -> Identity:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except msgspec.DecodeError as error:
        problem = f"{path}: {error}"
        raise ConfigError(str(path), "", "as the target wrote it", message=problem) from error


def _check_is_same_target(identity: Identity, task: Task, part: Path) -> None:
    """Raise ConfigError if a directory belongs to another target."""
    hint = "use another directory or target name"
    if identity.cluster != cluster_id(task.cluster):
        problem = (
            f"{part} has records of the cluster {identity.cluster}; the player's cluster is"
            f" {cluster_id(task.cluster)}"
        )
    elif (identity.player, identity.target) != (task.player, task.target):
        problem = (
            f"{part} belongs to the target {identity.target} of the player {identity.player}, not"
            f" to {task.target} of {task.player}"
        )
    elif identity.parts != task.partitions:
        problem = (
            f"the target {task.target} has {task.partitions} partitions, but {identity.parts} in"
            f" {part}; the number is fixed"
        )
        hint = (
            f"set {identity.parts}; or pause all of its cursors at one position, and add a target"
            " with another name and directory that starts there"
        )
    else:
        return
    raise ConfigError("directory", str(part), "this target's", message=f"{problem}. {hint}")


def _check_is_same_task(identity: Identity, task: Task, part: Path) -> None:
    """Raise ConfigError if a directory belongs to another cursor."""
    _check_is_same_target(identity, task, part)
    if (identity.part, identity.birth) != (task.partition, task.birth):
        problem = (
            f"{part} has the position of a former cursor {task.cursor}, created in term"
            f" {identity.birth}; the present one was created in term {task.birth}. Use another"
            " directory or target name"
        )
        raise ConfigError("directory", str(part), "this cursor's", message=problem)


def _rewind_error(part: Path, last: int, task: Task) -> ConfigError:
    problem = (
        f"{task.cursor} was sought to {task.position}, but {part} has records up to {last}: files"
        " are not written twice. Remove those from the position on, or use another directory;"
        f" `ziplog cursor seek {task.cursor} {last + 1}` goes on after them"
    )
    return ConfigError("position", task.position, f"above {last}", message=problem)


def _last_gsn(path: Path) -> int:
    """Return the gsn of a file's last record."""
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(end - size, 0))
            tail = file.read()
            if size >= end or b"\n" in tail[:-1]:
                break
            size *= 4
    line = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    try:
        return msgspec.json.decode(line, type=_LastLine).gsn
    except msgspec.DecodeError as error:
        problem = f"the last line of {path} has no gsn, so its position is not known: {error}"
        raise ConfigError("directory", str(path), "as it was written", message=problem) from error


def _lines(records: Iterable[Record]) -> bytes:
    from ziplog.cli.rendering import as_json  # noqa: PLC0415 - slow to import

    return b"".join(map(as_json, records))
