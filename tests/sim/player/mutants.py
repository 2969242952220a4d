"""Mutants of players: each breaks one rule, and the oracle finds it.

The draw of a mutant makes its situation frequent, so few seeds are needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import logplayer.task
from logplayer.contract import Batch, Fenced, Opened, Retry, Task
from logplayer.members import Members
from logplayer.task import PlayerTask
from mms.cursors import Cursors
from tests.sim.player.plan import LEASE_MS, PlayerFault, PlayerPlan, TargetPlan
from tests.sim.player.run import run_player
from tests.sim.player.targets import Row, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    """A target does the effect and stores the position in one atomic step (P3)."""
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
    """A target stores the term before the first step of a claim (P4)."""
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
    """A target refuses a step of another term (P3)."""

    def delivered(self: Store, batch: Batch) -> None:
        row = self.rows.get(batch.task.partition)
        if row is None or row.position != batch.start:
            raise Fenced("another position")
        self.apply(row, batch)

    with replaced(Store, "deliver", delivered):
        yield


@mutant(seeks)
def seek_without_number() -> Iterator[None]:
    """A seek of the cursor counts more than the position of the target (P7)."""

    def opened(self: Store, task: Task) -> Opened:
        row = self.rows.get(task.partition)
        if row is None:
            row = Row(task.birth, 0, task.seek, task.position, task.position)
            self.rows[task.partition] = row
        row.term = task.term
        return Opened(row.position, row.mark)

    with replaced(Store, "open", opened):
        yield


# --- the node ---


@mutant(after_effect)
def unknown_is_failure() -> Iterator[None]:
    """After a step of unknown outcome the target is opened before anything else (P5)."""
    retry = PlayerTask._retry

    def retried(self: PlayerTask, error: Exception, step: str) -> None:
        must_open = self._must_open
        retry(self, error, step)
        self._must_open = must_open

    with replaced(PlayerTask, "_retry", retried):
        yield


@mutant(unknown_twice)
def unknown_is_success() -> Iterator[None]:
    """A step of unknown outcome is not taken for done (P5)."""
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
    """The cursor moves to what is durable at the target only (P6)."""
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
    """A target without a position, behind a cursor that moved, fails the task (P7)."""

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
    """Batches of a task follow each other without a gap (P9)."""
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
