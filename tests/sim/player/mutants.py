"""Mutants of players: each breaks one rule, and the oracle finds it.

The draw of a mutant makes its situation frequent, so few seeds are needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

import logplayer.task
from logplayer.contract import Batch, Fenced, Opened, Retry, Task
from logplayer.members import Members
from logplayer.targets import files_target
from logplayer.targets.files_target import FilesTarget
from logplayer.task import PlayerTask
from mms.cursor_table import CursorTable
from mms.cursors import Cursors
from tests.sim.mutants_of_cursors import trims_pass_what_cursors_hold
from tests.sim.player.files import SharedDisk
from tests.sim.player.plan import LEASE_MS, FaultKind, PlayerFault, PlayerPlan, TargetPlan
from tests.sim.player.run import run_player
from tests.sim.player.targets import Row, Store
from tests.simulator.filesystem import Directory
from ziplog.core.units import NEVER
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mms.commands import ClaimCursor, Refusal
    from tests.simulator.filesystem import Descriptor


class PlayerMutant(NamedTuple):
    """A broken rule."""

    name: str
    rule: str
    draw: Callable[[int], PlayerPlan]
    broken: Callable[[], AbstractContextManager[None]]

    def __str__(self) -> str:
        return self.name


MUTANTS: Final[dict[str, PlayerMutant]] = {}
replaced: Final = patch.object


def search(mutant: PlayerMutant, budget_seeds: int, first: int = 1) -> tuple[int, str] | None:
    """Run seeds of a mutant's draw until one fails; return the seed and the failure."""
    for seed in range(first, first + budget_seeds):
        try:
            with mutant.broken():
                run_player(mutant.draw(seed))
        except AssertionError as error:
            return seed, " ".join(str(error).split())
    return None


# --- draws ---


def plan_of(seed: int, *faults: PlayerFault, **changes: Any) -> PlayerPlan:
    """Return a small plan with these faults."""
    plan = PlayerPlan(
        seed=seed, players=1, targets=(TargetPlan("store", 1, 3),), records=60, unknown=0.0,
        memory_bytes=2_000, commit_ms=20, span_ms=1_000, faults=tuple(sorted(faults)),
    )  # fmt: skip
    return plan._replace(**changes)


def calm(seed: int) -> PlayerPlan:
    """Return a run in which further processes come, without a fault."""
    faults = [PlayerFault(300, "add-player"), PlayerFault(600, "add-player")]
    targets = (TargetPlan("sink", 3, 3), TargetPlan("store", 2, 3))
    return plan_of(seed, *faults, targets=targets)


def unknown(seed: int) -> PlayerPlan:
    """Return a run with steps of unknown outcome."""
    return plan_of(seed, unknown=0.3)


def unknown_twice(seed: int) -> PlayerPlan:
    """Return a run of a store and a sink with steps of unknown outcome."""
    return plan_of(seed, unknown=0.3, targets=(TargetPlan("sink", 1, 3), TargetPlan("store", 1, 3)))


def after_effect(seed: int) -> PlayerPlan:
    """Return a run with steps that fail after their effect."""
    return plan_of(seed, unknown=0.3, outcomes=("after",))


def zombies(seed: int) -> PlayerPlan:
    """Return a run in which processes stand still for longer than the lease, in slow steps."""
    random = Random(f"zombies {seed}")
    faults = [PlayerFault(200, "target-slow", 0, 6_000)]
    for number in range(4):
        for_ms = random.randrange(LEASE_MS, 4 * LEASE_MS)
        at_ms = 1_500 * number + random.randrange(600, 1_000)
        faults.append(PlayerFault(at_ms, "pause-player", number % 2, for_ms))
    return plan_of(seed, *faults, players=2, span_ms=6_000, records=150)


def zombies_and_seeks(seed: int) -> PlayerPlan:
    """Return a run with processes that stand still in a step while the cursor is sought back."""
    plan = zombies(seed)
    pauses = [fault for fault in plan.faults if fault.kind == "pause-player"]
    seeks = [PlayerFault(one.at_ms + LEASE_MS, "seek", 0) for one in pauses]
    return plan._replace(faults=tuple(sorted([*plan.faults, *seeks])))


def downs(seed: int) -> PlayerPlan:
    """Return a run in which a target is away for longer than the ring lasts."""
    random = Random(f"downs {seed}")
    fault = PlayerFault(random.randrange(100, 400), "target-down", 0, 700)
    targets = (TargetPlan("store", 1, 3), TargetPlan("store", 1, 3))
    return plan_of(seed, fault, memory_bytes=100, records=100, targets=targets)


def empties(seed: int) -> PlayerPlan:
    """Return a run in which a target loses everything."""
    return plan_of(seed, PlayerFault(500, "target-empty", 0))


def silences(seed: int) -> PlayerPlan:
    """Return a run in which a process does not reach the membership service."""
    return plan_of(seed, PlayerFault(300, "isolate-player", 0, 4 * LEASE_MS), span_ms=3_000)


def seeks(seed: int) -> PlayerPlan:
    """Return a run with seeks."""
    faults = [PlayerFault(at_ms, "seek", 0) for at_ms in (400, 800)]
    return plan_of(seed, *faults)


def pauses(seed: int) -> PlayerPlan:
    """Return a run with cursors that are paused at a position."""
    return plan_of(seed, PlayerFault(100, "pause", 1), span_ms=3_000)


def trims(seed: int) -> PlayerPlan:
    """Return a run with a target that is down while the log is trimmed."""
    down, later = PlayerFault(100, "target-down", 0, 1_500), PlayerFault(900, "kill-player", 0)
    some = [PlayerFault(at_ms, "trim") for at_ms in range(300, 900, 50)]
    targets = (TargetPlan("store", 1, 3), TargetPlan("sink", 1, 3))
    return plan_of(seed, down, later, *some, targets=targets, memory_bytes=100)


def deletions(seed: int) -> PlayerPlan:
    """Return a run in which cursors are deleted while processes stand still in slow steps."""
    plan = zombies(seed)
    deleted = [
        PlayerFault(one.at_ms + 200, "delete", 0)
        for one in plan.faults
        if one.kind == "pause-player"
    ]
    return plan._replace(faults=tuple(sorted([*plan.faults, *deleted])))


def power_cuts(seed: int) -> PlayerPlan:
    """Return a run with a directory of files whose machine loses its power."""
    random = Random(f"power {seed}")
    cuts = [PlayerFault(random.randrange(200, 1_800), "target-power") for _ in range(5)]
    targets = (TargetPlan("files", 1, 3),)
    return plan_of(seed, *cuts, targets=targets, stalls=0.01, span_ms=2_000, records=100)


def late_disks(seed: int) -> PlayerPlan:
    """Return a run of files on a disk that shows changes of other processes late."""
    targets = (TargetPlan("files", 3, 8, roll_bytes=1),)
    return late_stages(seed)._replace(players=3, targets=targets, records=200)


def late_stages(seed: int) -> PlayerPlan:
    """Return such a run with files of several batches."""
    targets = (TargetPlan("files", 2, 3),)
    return plan_of(seed, players=2, targets=targets, stalls=0.05, shows_late=True, span_ms=3_000)


def seeks_of_files(seed: int) -> PlayerPlan:
    """Return a run of files whose cursor is sought, also in front of what they have."""
    faults = [PlayerFault(at_ms, "seek", 0) for at_ms in (400, 600, 800)]
    return plan_of(seed, *faults, targets=(TargetPlan("files", 1, 3),))


def losses_of_files(seed: int) -> PlayerPlan:
    """Return a run of files that are removed, or whose cursors are deleted, while owners work.

    One directory is removed after the last record, when its owner passes positions only.
    """
    random = Random(f"losses {seed}")
    kinds: tuple[FaultKind, ...] = (
        "target-empty", "target-gone", "delete", "kill-player", "pause-player",
    )  # fmt: skip
    faults = [
        PlayerFault(
            random.randrange(200, 3_000), random.choice(kinds), random.randrange(4),
            random.choice((LEASE_MS // 2, 2 * LEASE_MS)),
        )
        for _ in range(6)
    ]  # fmt: skip
    faults.append(PlayerFault(6_000, random.choice(("target-empty", "target-gone"))))
    targets = (TargetPlan("files", 2, 3),)
    return plan_of(seed, *faults, players=2, targets=targets, stalls=0.02, span_ms=3_000)


def mutant(draw: Callable[[int], PlayerPlan]) -> Callable[..., Any]:
    """Register a mutant with its draw; its docstring is the rule."""

    def register(broken: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name, rule = broken.__name__, " ".join((broken.__doc__ or "").split())
        MUTANTS[name] = PlayerMutant(name, rule, draw, contextmanager(broken))
        return broken

    return register


# --- targets ---


@mutant(unknown)
def position_apart_from_effect() -> Iterator[None]:
    """A target does the effect and stores the position in one atomic step."""
    apply, steps = Store.apply, 0

    def applied(self: Store, row: Row, batch: Batch) -> None:
        nonlocal steps
        steps += 1
        position = row.position
        apply(self, row, batch)
        if steps % 4 == 0:
            row.position = position
            raise Retry("the connection was lost between both")

    with replaced(Store, "apply", applied):
        yield


@mutant(zombies)
def no_fence() -> Iterator[None]:
    """A target stores the term before the first step of a claim."""
    opened = Store.open

    def only_read(self: Store, task: Task) -> Opened:
        row = self.rows.get(task.partition)
        term = row.term if row is not None else None
        result = opened(self, task)
        if term is not None:
            self.rows[task.partition].term = term
        return result

    def delivered(self: Store, batch: Batch) -> None:
        row = self.rows.get(batch.task.partition)
        if row is None or row.term > batch.task.term or row.position != batch.start:
            raise Fenced("another term, or another position")
        row.term = batch.task.term
        self.apply(row, batch)

    with replaced(Store, "open", only_read), replaced(Store, "deliver", delivered):
        yield


@mutant(zombies_and_seeks)
def term_is_not_compared() -> Iterator[None]:
    """A target refuses a step of another term."""

    def delivered(self: Store, batch: Batch) -> None:
        row = self.rows.get(batch.task.partition)
        if row is None or row.position != batch.start:
            raise Fenced("another position")
        self.apply(row, batch)

    with replaced(Store, "deliver", delivered):
        yield


@mutant(seeks)
def seek_without_number() -> Iterator[None]:
    """A seek of the cursor counts more than the position of the target."""

    def opened(self: Store, task: Task) -> Opened:
        row = self.rows.get(task.partition)
        if row is None:
            row = Row(task.birth, 0, task.seek, task.position, task.position)
            self.rows[task.partition] = row
        row.term = task.term
        return Opened(row.position, row.mark)

    with replaced(Store, "open", opened):
        yield


@mutant(unknown)
def answers_come_before_the_disk() -> Iterator[None]:
    """A target answers a step when its effect is durable."""
    with replaced(Store, "flush", lambda *_: None):
        yield


# --- the node ---


@mutant(after_effect)
def unknown_is_failure() -> Iterator[None]:
    """After a step of unknown outcome the target is opened before anything else."""
    retry = PlayerTask._retry

    def retried(self: PlayerTask, error: Exception, step: str) -> None:
        must_open = self._must_open
        retry(self, error, step)
        self._must_open = must_open

    with replaced(PlayerTask, "_retry", retried):
        yield


@mutant(unknown_twice)
def unknown_is_success() -> Iterator[None]:
    """A step of unknown outcome is not taken for done."""
    on_error = PlayerTask._on_error

    def passed(self: PlayerTask, error: Exception, step: str) -> None:
        if step == "deliver" and isinstance(error, Retry):
            self._on_delivered(b"")
        else:
            on_error(self, error, step)

    with replaced(PlayerTask, "_on_error", passed):
        yield


@mutant(unknown)
def cursor_first() -> Iterator[None]:
    """The cursor moves to what is durable at the target only."""
    deliver = PlayerTask._deliver_cut

    def moved(self: PlayerTask, limit: int) -> None:
        cut = self.delivery.cut
        assert cut is not None
        self.claim.move(min(cut.stop, limit), self.claim.last_mark)
        self.claim.poll(self._context.calls.now)
        deliver(self, limit)

    with replaced(PlayerTask, "_deliver_cut", moved):
        yield


@mutant(empties)
def empty_target_is_fresh() -> Iterator[None]:
    """A target without a position, behind a cursor that moved, fails the task."""

    def unmoved(*arguments: Any) -> Task:
        return Task(*arguments[:-1], False)

    with replaced(logplayer.task, "Task", unmoved):
        yield


@mutant(downs)
def ring_skips() -> Iterator[None]:
    """A task that fell out of the ring reads for itself from its own position on."""
    look = PlayerTask._look

    def skipped(self: PlayerTask, limit: int) -> bool:
        feed, delivery = self._context.feed, self.delivery
        if feed.is_open and delivery.looked < feed.ring.start:
            delivery.looked = feed.ring.start
        return look(self, limit)

    with replaced(PlayerTask, "_look", skipped):
        yield


@mutant(unknown)
def steps_leave_gaps() -> Iterator[None]:
    """Batches of a task follow each other without a gap."""
    on_opened = PlayerTask._on_opened

    def ahead(self: PlayerTask, opened: Opened) -> None:
        cut = self.delivery.cut
        if cut is not None and opened.position == cut.start and len(cut) > 1:
            opened = Opened(cut.positions()[1], opened.mark)
        on_opened(self, opened)

    with (
        replaced(PlayerTask, "_on_opened", ahead),
        replaced(PlayerTask, "check", lambda *_: None),
    ):
        yield


@mutant(silences)
def silence_is_ignored() -> Iterator[None]:
    """A process begins no step after the membership service was silent for a lease."""
    with replaced(Members, "is_silent", lambda *_: False):
        yield


@mutant(calm)
def steals_from_the_living() -> Iterator[None]:
    """No process takes a task from an owner that is heard (D6)."""
    with replaced(Cursors, "_is_silent", lambda *_: True):
        yield


# --- cursors ---


@mutant(zombies)
def claims_are_counted_by_time() -> Iterator[None]:
    """A claim of an owned cursor begins a term; silence alone decides nothing (C5)."""
    claim = CursorTable.claim

    def claimed(self: CursorTable, command: ClaimCursor, trim: int, stop: int) -> Refusal:
        before = self.get(command.name)
        refusal = claim(self, command, trim, stop)
        after = self.get(command.name)
        if before is not None and before.owner and after is not None and not refusal:
            self._put(replace(after, term=before.term))
        return refusal

    with replaced(CursorTable, "claim", claimed):
        yield


@mutant(deletions)
def term_begins_anew() -> Iterator[None]:
    """The terms of a name grow also over its deletion (C1)."""

    def counted(method: Callable[..., Refusal]) -> Callable[..., Refusal]:
        def count(self: CursorTable, command: Any, trim: int, stop: int) -> Refusal:
            before = self.get(command.name)
            refusal = method(self, command, trim, stop)
            after = self.get(command.name)
            if after is not None and before is None:
                self._put(replace(after, birth=1, term=1))
            elif after is not None and before is not None and after.term != before.term:
                self._put(replace(after, term=before.term + 1))
            return refusal

        return count

    with (
        replaced(CursorTable, "claim", counted(CursorTable.claim)),
        replaced(CursorTable, "edit", counted(CursorTable.edit)),
        replaced(CursorTable, "check", lambda *_: None),
    ):
        yield


@mutant(trims)
def trim_passes_a_hold() -> Iterator[None]:
    """A trim deletes nothing that a cursor holds (C7)."""
    yield from trims_pass_what_cursors_hold()


@mutant(pauses)
def pause_at_is_passed() -> Iterator[None]:
    """No step passes the position at which its cursor is paused."""
    with (
        replaced(PlayerTask, "_limit", lambda _self: NEVER),
        replaced(PlayerTask, "_is_pause_reached", lambda _self: False),
    ):
        yield


# --- files ---


@mutant(late_disks)
def renamed_not_linked() -> Iterator[None]:
    """A file gets its name by a link, which replaces no other file."""
    with replaced(FilesTarget, "_link", lambda _self, part, name: part.replace(name)):
        yield


@mutant(late_stages)
def all_staged_files_are_removed() -> Iterator[None]:
    """A worker removes staged files of lower terms and its own, but no other."""

    def found(self: FilesTarget) -> list[Any]:
        return [path for path in self._part.iterdir() if path.name.endswith(".stage")]

    with replaced(FilesTarget, "_stages", found), replaced(files_target, "_term_of", lambda _: -1):
        yield


@mutant(seeks_of_files)
def files_are_written_twice() -> Iterator[None]:
    """A seek in front of the last record of a directory is refused."""
    open_files = FilesTarget._open

    def opened(self: FilesTarget, task: Task) -> int:
        try:
            return open_files(self, task)
        except ConfigError as error:
            if "not written twice" not in str(error):
                raise
            self._store(seek=task.seek, position=task.position)
            self._finished = task.position
            return self._finished

    with replaced(FilesTarget, "_open", opened):
        yield


@mutant(power_cuts)
def no_directory_sync() -> Iterator[None]:
    """The name of a file is synced before the step is done."""
    deliver = FilesTarget.deliver

    def delivered(self: FilesTarget, batch: Batch) -> None:
        with replaced(files_target, "sync_directory", lambda _directory: None):
            deliver(self, batch)

    with replaced(FilesTarget, "deliver", delivered):
        yield


@mutant(power_cuts)
def contents_are_not_synced() -> Iterator[None]:
    """The contents of a file are synced before it gets its name."""
    sync = SharedDisk.sync

    def of_directories(self: SharedDisk, fd: Descriptor) -> None:
        if isinstance(fd.node, Directory):
            sync(self, fd)

    with replaced(SharedDisk, "sync", of_directories):
        yield


@mutant(losses_of_files)
def emptied_directory_is_complete() -> Iterator[None]:
    """An owner looks for its identity before it replaces it."""
    store = FilesTarget._store

    def stored(self: FilesTarget, **changes: int) -> None:
        with replaced(FilesTarget, "_check_is_owner", lambda _self: None):
            store(self, **changes)

    with replaced(FilesTarget, "_store", stored):
        yield


@mutant(losses_of_files)
def emptied_directory_is_fresh() -> Iterator[None]:
    """A directory without an identity, behind a cursor that moved, fails the task."""
    with replaced(FilesTarget, "_check_may_create", lambda _self, _task: None):
        yield
