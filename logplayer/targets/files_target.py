"""Targets in directories of files: exactly once.

    part-003/0000000000000001200.jsonl       records; the name is the gsn of the first one
    part-003/.ziplog-0000000000000000007     the owner of the directory, a position; of term 7
    part-003/.TERM.PID.NUMBER.stage          records of the next file, which are durable
    part-003/.NAME.TERM.PID.NUMBER.part      a file that has no name yet

Rules: a link gives a file its name, and fails if the name exists. `open` creates the identity file
of its term, removes those of lower terms, then their unfinished files, reads the names, and makes a
file of what is staged. An owner looks for its identity file between the creation and the link of a
file. So a lower term adds no file after `open`, and two owners never add the same record. A worker
removes staged files of lower terms and its own, but no other: one that adds to it may be alive.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from logplayer.contract import Fenced, Opened, Retry
from logplayer.targets import stored_positions
from logplayer.targets.file_formats import FORMATS, Format, last_gsn, require_packages, write
from logplayer.targets.staged_records import Chain, Stage
from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.durable_files import sync_directory
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from logplayer.contract import Batch, Task

#: A batch is synced, so batches are large.
BATCH_RECORDS: Final = 10_000
BATCH_BYTES: Final = 8 * 1024 * 1024
#: Staged bytes and seconds after which they become a file.
ROLL_BYTES: Final = 64 * 1024 * 1024
ROLL_S: Final = 60
MAX_ROLL_BYTES: Final = 16 * 1024**3
MAX_ROLL_S: Final = 86_400
_IDENTITY: Final = re.compile(r"\.ziplog-(\d{19})", re.ASCII)
_STAGE: Final = re.compile(r"\.(\d+)\.\d+\.\d+\.stage", re.ASCII)
_PART: Final = re.compile(r"\..+\.(\d+)\.\d+\.\d+\.part", re.ASCII)
#: A file system without hard links answers one of them.
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
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
    format: Format = "jsonl"


class FilesTarget:
    """One task's files."""

    def __init__(
        self, directory: Path, kind: Format = "jsonl", roll_bytes: int = ROLL_BYTES
    ) -> None:
        """Open nothing yet.

        Args:
            directory: of all partitions.
            kind: the format of the files.
            roll_bytes: the size of staged records that become a file, in bytes.

        """
        self._directory: Final = directory
        self._format: Final[Format] = kind
        self._roll_bytes: Final = roll_bytes
        self._name: Final = re.compile(rf"(\d{{19}})\.{kind}", re.ASCII)
        self._part = directory
        self._term = 0
        self._identity: Identity | None = None
        #: Where the next batch has to start. What is below `_finished` is in files with names.
        self._position = self._finished = -1
        self._stage: Stage | None = None
        #: The staged files of this worker that are not finished.
        self._staged: Final[set[Path]] = set()

    def open(self, task: Task) -> Opened:
        """Exclude lower terms, remove their unfinished files, and return the position.

        Raises:
            Retry: the file system refuses it now.
            Fenced: a later term is there.
            ConfigError: the directory is another task's, is empty or older than the last seek
                although the cursor moved, or has records from a sought position on; or the file
                system has no hard links.

        """
        self._drop_stage()
        self._position = -1
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
        self._identity = identity
        names = self._names()
        # A former owner may have died before it synced the last name.
        sync_directory(self._part)
        last = last_gsn(self._part / names[-1], self._format) if names else -1
        self._finished = max(identity.position, last + 1)
        last = max(last, self._finish(self._stages()))
        if task.seek > identity.seek:
            where = str(self._part)
            stored_positions.check_has_seek(where, identity.seek, self._finished, task)
            if last >= task.position:
                raise _rewind_error(self._part, last, task)
            self._store(seek=task.seek, position=task.position)
            self._finished = task.position
        # A successor removes this identity before it moves anything that was read here.
        self._check_is_owner()
        return self._finished

    def _fence(self, task: Task) -> Identity:
        """Exclude lower terms; return what the newest one of them stored."""
        term = self._newest_term()
        if term is None:
            self._check_may_create(task)
            identity = Identity(
                cluster=cluster_id(task.cluster), player=task.player, target=task.target,
                part=task.partition, parts=task.partitions, birth=task.birth, seek=task.seek,
                position=task.position, format=self._format,
            )  # fmt: skip
        else:
            self._check_is_newest(term)
            identity = _read(_identity_of(self._part, term))
            _check_is_same_task(identity, task, self._part)
            self._check_format(identity)
        if term != task.term:
            part = self._identity_part(identity)
            try:
                self._link(part, self._own)
            finally:
                part.unlink(missing_ok=True)
            sync_directory(self._part)
            self._check_is_newest(self._newest_term())
        # The order matters: see `_finish`.
        self._remove(_IDENTITY, task.term - 1)
        self._remove(_PART, task.term)
        return identity

    def _check_may_create(self, task: Task) -> None:
        """Raise ConfigError if records are missing here, or belong to something else."""
        if task.has_moved:
            raise stored_positions.missing_error(str(self._part), "the directory", task)
        if self._names() or self._stages():
            problem = f"{self._part} has records, but no file that says of which target"
            raise ConfigError(
                "directory", str(self._directory), "an empty or absent directory", message=problem
            )
        for other in sorted(self._directory.glob("part-*")):
            try:
                term = _newest_term(other)
            except NotADirectoryError:
                continue  # A file of another program.
            if term is not None:
                _check_is_same_target(_read(_identity_of(other, term)), task, other)

    def _check_format(self, identity: Identity) -> None:
        if identity.format != self._format:
            problem = (
                f"the files in {self._part} are {identity.format}, not {self._format}; the format"
                f" is fixed. Set {identity.format!r}, or use another directory and target name"
            )
            raise ConfigError("format", self._format, repr(identity.format), message=problem)

    def deliver(self, batch: Batch) -> None:
        """Stage the records, or store a position that was passed without records.

        With a batch that passes no position, or enough staged bytes, what is staged becomes a file.

        Raises:
            Retry: the file system refuses it; the records may be staged. Open it again.
            Fenced: a later term is there, or a file with the name of the first record.
            ConfigError: `map` changed the positions of records.

        """
        if batch.start != self._position or self._identity is None:
            raise Fenced(f"{self._part} is at {self._position}, not at {batch.start}")
        _check_order(batch)
        self._position = -1
        try:
            self._stage_or_store(batch)
            if self._stage and (batch.stop == batch.start or self._stage.size >= self._roll_bytes):
                self._finish([self._stage.path])
                self._drop_stage()
        except OSError as error:
            raise Retry(f"cannot write in {self._part}: {error}") from error
        self._position = batch.stop

    def _stage_or_store(self, batch: Batch) -> None:
        if batch.records and self._stage is None:
            self._check_is_owner()  # Else the new file may stay until the next claim.
            self._stage = Stage(self._part / f".{self._unique}.stage")
            self._staged.add(self._stage.path)
            sync_directory(self._part)
        if self._stage is None:
            if batch.start < batch.stop:
                self._store(position=batch.stop)
                self._finished = batch.stop
        elif batch.start < batch.stop:
            self._stage.append(batch)
            # A successor removes this identity before it reads what is staged.
            self._check_is_owner()

    def _finish(self, stages: list[Path]) -> int:
        """Make a file of staged records; return the gsn of its last record, -1 without records."""
        if not stages:
            return -1
        assert self._identity is not None
        chain, topic = Chain(stages, self._finished), self._identity.cluster
        part = self._written("records", lambda file: write(chain, file, self._format, topic))
        try:
            if chain.first >= 0:
                # A successor removes first this identity, then unfinished files, then reads the
                # names. So either it is absent here, or the successor removes the part or finds
                # the name.
                self._check_is_owner()
                self._link(part, self._part / f"{chain.first:019}.{self._format}")
                sync_directory(self._part)
        finally:
            part.unlink(missing_ok=True)
        if chain.stop > max(self._finished, chain.last + 1):
            self._store(position=chain.stop)
        self._finished = chain.stop
        for path in stages:
            if path in self._staged or _term_of(path) < self._term:
                path.unlink(missing_ok=True)
                self._staged.discard(path)
        return chain.last

    def _check_is_owner(self) -> None:
        if not self._own.exists():
            raise Fenced(f"a later term than {self._term} is in {self._part}, or it is gone")

    def check(self) -> None:
        """Look at the directory, and change nothing.

        Raises:
            UnavailableError: it cannot be created, or is no directory that can be written.

        """
        directory = self._directory.absolute()
        if not directory.parent.is_dir():
            raise UnavailableError(f"cannot create {self._directory}: its directory is absent")
        if directory.exists() and not directory.is_dir():
            raise UnavailableError(f"{self._directory} is no directory")
        parts = [path for path in (directory, *directory.glob("part-*")) if path.exists()]
        for path in parts or [directory.parent]:
            if not os.access(path, os.W_OK | os.X_OK):
                raise UnavailableError(f"cannot write in {path}; check its owner, and its disk")

    def close(self) -> None:
        """Make a file of what is staged, unless a step has failed: then the next `open` does it.

        Raises:
            OSError: the file system refuses it.
            Fenced: a later term is there.

        """
        try:
            if self._stage is not None and self._position >= 0:
                self._finish([self._stage.path])
        finally:
            self._position = -1
            self._drop_stage()

    def _drop_stage(self) -> None:
        """Close the staged file; its contents stay, if it is there."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    # --- files ---

    @property
    def _own(self) -> Path:
        """The identity file of this term."""
        return _identity_of(self._part, self._term)

    @property
    def _unique(self) -> str:
        """A part of the name of a new file: two workers of one claim never write the same one."""
        return f"{self._term}.{os.getpid()}.{next(_numbers)}"

    def _identity_part(self, identity: Identity) -> Path:
        contents = msgspec.json.encode(identity)
        return self._written(self._own.name, lambda file: file.write(contents))

    def _written(self, name: str, write_to: Callable[[BinaryIO], object]) -> Path:
        """Return a new file without a name; its contents are synced."""
        part = self._part / f".{name}.{self._unique}.part"
        try:
            with part.open("xb") as file:
                write_to(file)
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

    def _store(self, **changes: int) -> None:
        """Replace the identity file of this term."""
        assert self._identity is not None
        self._check_is_owner()  # Else an emptied directory would look complete.
        changed = msgspec.structs.replace(self._identity, **changes)
        part = self._identity_part(changed)
        try:
            part.replace(self._own)
        finally:
            part.unlink(missing_ok=True)
        sync_directory(self._part)
        self._check_is_newest(self._newest_term())
        self._identity = changed

    def _check_is_newest(self, newest: int | None) -> None:
        """Raise Fenced if a later term is there; then the file of this one has no meaning."""
        if newest is not None and newest > self._term:
            self._own.unlink(missing_ok=True)
            raise Fenced(f"{self._part} has the later term {newest}, not {self._term}")

    def _newest_term(self) -> int | None:
        return _newest_term(self._part)

    def _names(self) -> list[str]:
        """Return the names of the files with records, in order."""
        return sorted(path.name for path in self._part.iterdir() if self._name.fullmatch(path.name))

    def _stages(self) -> list[Path]:
        """Return the staged files of terms up to this one."""
        return self._of_terms(_STAGE, self._term)

    def _remove(self, pattern: re.Pattern[str], last_term: int) -> None:
        """Remove the files of terms up to `last_term`."""
        for path in self._of_terms(pattern, last_term):
            path.unlink(missing_ok=True)

    def _of_terms(self, pattern: re.Pattern[str], last_term: int) -> list[Path]:
        """Return the files of terms up to `last_term`."""
        found = [(path, pattern.fullmatch(path.name)) for path in self._part.iterdir()]
        return [path for path, one in found if one is not None and int(one[1]) <= last_term]


def connector(
    where: str,
    directory: str | os.PathLike[str],
    kind: Format,
    roll_bytes: int,
    roll_s: int,
) -> Callable[[], FilesTarget]:
    """Return how tasks connect to a directory.

    Raises:
        ConfigError: it is no path, or another argument is invalid.
        ModuleNotFoundError: a package of the format is not installed.

    """
    named = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(named, str) or not named:
        raise ConfigError("directory", directory, "the path of a directory", where)
    if kind not in FORMATS:
        raise ConfigError("format", kind, f"one of {', '.join(FORMATS)}", where)
    for name, value, most in (
        ("roll_bytes", roll_bytes, MAX_ROLL_BYTES), ("roll_s", roll_s, MAX_ROLL_S)
    ):  # fmt: skip
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(name, value, f"a whole number from 1 to {most}", where)
    require_packages(kind, where)
    return lambda: FilesTarget(Path(named).absolute(), kind, roll_bytes)


def part_of(directory: Path, partition: int) -> Path:
    """Return the directory of a partition."""
    return directory / f"part-{partition:03}"


def _identity_of(part: Path, term: int) -> Path:
    return part / f".ziplog-{term:019}"


def _term_of(stage: Path) -> int:
    found = _STAGE.fullmatch(stage.name)
    assert found is not None, f"{stage} is not a staged file"
    return int(found[1])


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
        f" `ziplog cursor seek {task.cursor} {last + 1}` continues after them"
    )
    return ConfigError("position", task.position, f"above {last}", message=problem)


def _check_order(batch: Batch) -> None:
    """Raise ConfigError if records are not in the order of positions, or beyond the batch."""
    gsns = [record.rid.gsn for record in batch.records]
    if gsns and (gsns != sorted(gsns) or gsns[0] < batch.start or gsns[-1] >= batch.stop):
        allowed = "a function that keeps the rid of a record"
        raise ConfigError("map", gsns[:3], allowed, f"target {batch.task.target}")
