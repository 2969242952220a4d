"""Mutants of mirrors: each breaks one rule, and a reader of the target log finds it.

The draw of a mutant makes its situation frequent, so few seeds are needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import msgspec

from logplayer.targets import log_target, mirror_mark
from logplayer.targets.log_target import LogTarget
from tests.sim.player.mirrors import MirrorFault, MirrorPlan, pairs, run_mirror
from ziplog.errors import OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logplayer.contract import Opened, Task


class MirrorMutant(NamedTuple):
    """A broken rule."""

    name: str
    rule: str
    draw: Callable[[int], MirrorPlan]
    broken: Callable[[], AbstractContextManager[None]]

    def __str__(self) -> str:
        return self.name


MUTANTS: Final[dict[str, MirrorMutant]] = {}


def search(mutant: MirrorMutant, budget_seeds: int) -> tuple[int, str] | None:
    """Run seeds of a mutant's draw until one fails; return the seed and the failure."""
    for seed in range(1, 1 + budget_seeds):
        try:
            with mutant.broken():
                run_mirror(mutant.draw(seed))
        except AssertionError as error:
            return seed, " ".join(str(error).split())
    return None


def mutant(draw: Callable[[int], MirrorPlan]) -> Callable[..., Any]:
    """Register a mutant with its draw; its docstring is the rule."""

    def register(broken: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name, rule = broken.__name__, " ".join((broken.__doc__ or "").split())
        MUTANTS[name] = MirrorMutant(name, rule, draw, contextmanager(broken))
        return broken

    return register


# --- draws ---


def plan_of(seed: int, *faults: MirrorFault, **changes: Any) -> MirrorPlan:
    """Return a small plan with these faults."""
    plan = MirrorPlan(
        seed=seed, players=1, partitions=1, records=40, failures=0.0, span_ms=1_000,
        faults=tuple(sorted(faults)),
    )  # fmt: skip
    return plan._replace(**changes)


def deaths(seed: int) -> MirrorPlan:
    """Return a run in which the only process dies twice."""
    return plan_of(seed, *[MirrorFault(at_ms, "kill-player") for at_ms in (300, 1_200)])


def recreations(seed: int) -> MirrorPlan:
    """Return a run in which the cursor is deleted and created again."""
    return plan_of(seed, MirrorFault(500, "recreate"))


def failures(seed: int) -> MirrorPlan:
    """Return a run in which many calls fail, and some have their effect later."""
    return plan_of(seed, failures=0.2, records=100)


def repetitions(seed: int) -> MirrorPlan:
    """Return a run whose source repeats rows, where owners die and first copies are trimmed."""
    random = Random(f"repetitions {seed}")
    kills = [
        MirrorFault(random.randrange(300, 1_500), "kill-player", number) for number in range(2)
    ]
    trims = [MirrorFault(at_ms, "trim-source") for at_ms in range(100, 2_000, 100)]
    return plan_of(seed, *kills, *trims, records=100, span_ms=1_500, repeats=0.4, commit_ms=400)


# --- mutants ---


@mutant(deaths)
def rows_from_each_claim() -> Iterator[None]:
    """The rows of a task are numbered from the cursor's start on (D7)."""
    opened, renumbered = LogTarget.open, set()

    def renumber(self: LogTarget, task: Task) -> Opened:
        result = opened(self, task)
        if self not in renumbered:
            renumbered.add(self)
            assert self._mark is not None
            self._mark = msgspec.structs.replace(self._mark, rows=0, placed=0)
            self._placed = 0
        return result

    with patch.object(LogTarget, "open", renumber):
        yield


@mutant(recreations)
def writer_without_birth() -> Iterator[None]:
    """A cursor that was created again has another writer."""
    writer = mirror_mark.writer_id

    def same(task: Task) -> bytes:
        return writer(msgspec.structs.replace(task, birth=0))

    with patch.object(log_target, "writer_id", same):
        yield


@mutant(failures)
def rows_pipelined() -> Iterator[None]:
    """A unit is sent only after all rows before it are on the disks of the shard."""

    def insert_all(
        self: LogTarget, payloads: list[bytes], keys: list[bytes | None], shard: int, row: int
    ) -> int:
        log, units, gsn = self._connected(), pairs(payloads), 0
        for start, stop in units:
            try:
                gsn = log.insert_rows(
                    payloads[start:stop], keys=keys[start:stop], shard=shard, writer=self._writer,
                    batch=0, row=row + start,
                )[-1].gsn  # fmt: skip
            except (UnavailableError, OutcomeUnknownError):
                if stop == len(payloads):
                    raise
        log.sync()
        return gsn

    with patch.object(LogTarget, "_insert", insert_all):
        yield


@mutant(repetitions)
def last_row_is_not_compared() -> Iterator[None]:
    """A claim continues only behind a row of the mirror that is its record of that number."""
    with patch.object(LogTarget, "_check_last", lambda *_: None):
        yield
