"""Plan of a run with players, drawn from a seed: processes, targets, records, faults.

A plan is data: equal plans give equal runs.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tests.sim.plan import Plan, draw

if TYPE_CHECKING:
    from tests.simulator.network import Conditions

Kind = Literal["store", "sink", "files"]
Rejecting = Literal["", "skip", "dead-letter"]
FaultKind = Literal[
    "kill-player", "pause-player", "isolate-player", "skew-player", "add-player", "stop-player",
    "target-down", "target-slow", "target-power", "target-empty", "target-gone", "target-older",
    "pause", "resume", "seek", "release", "delete", "trim", "trim-force", "lead-mms", "kill-mms",
    "kill-receiver", "pause-receiver", "cut-receiver",
]  # fmt: skip

#: Weights of the faults of a drawn plan.
WEIGHTS: Final[dict[FaultKind, int]] = {
    "kill-player": 6, "pause-player": 6, "isolate-player": 4, "skew-player": 2, "add-player": 2,
    "stop-player": 2, "target-down": 5, "target-slow": 3, "target-power": 4, "target-empty": 1,
    "target-gone": 1, "target-older": 2,
    "pause": 2, "resume": 2, "seek": 3, "release": 2, "delete": 2, "trim": 3, "trim-force": 1,
    "lead-mms": 2, "kill-mms": 1,
}  # fmt: skip
LEASE_MS: Final = 600
#: Faults after which no target gets a record twice.
CALM: Final = frozenset({"add-player", "stop-player", "trim"})


class TargetPlan(NamedTuple):
    """A target."""

    kind: Kind
    partitions: int
    batch_records: int
    #: It rejects a seventh of the records; what happens to them, and whether it names them.
    rejected: Rejecting = ""
    names_rejected: bool = True
    #: It is behind a receiver.
    is_pushed: bool = False
    #: Staged bytes that become a file: a few batches.
    roll_bytes: int = 1_000
    linger_ms: int = 0


class PlayerFault(NamedTuple):
    """A fault, or an operator's change, of a player, a target or a cursor by their numbers."""

    at_ms: int
    kind: FaultKind
    number: int = 0
    for_ms: int = 0


class PlayerPlan(NamedTuple):
    """The plan of one run."""

    seed: int
    #: Processes at the beginning.
    players: int
    targets: tuple[TargetPlan, ...]
    records: int
    #: Probability that a step of a target fails before or after its effect, or is late.
    unknown: float
    memory_bytes: int
    commit_ms: int
    #: Time in which records are inserted and faults begin.
    span_ms: int
    faults: tuple[PlayerFault, ...]
    #: What happens to a step of unknown outcome.
    outcomes: tuple[str, ...] = ("before", "after", "after", "late")
    #: Probability that a worker stands still in a call of the disk.
    stalls: float = 0.0
    #: The disk shows changes of other machines late.
    shows_late: bool = False
    #: Those of the network; None: the seed's.
    conditions: Conditions | None = None

    @property
    def is_calm(self) -> bool:
        """Whether nothing disturbs the players."""
        is_smooth = not self.unknown and not self.stalls
        return is_smooth and all(fault.kind in CALM for fault in self.faults)

    @property
    def cluster(self) -> Plan:
        """The plan of the cluster below."""
        drawn = draw(self.seed, faults=0)
        return drawn._replace(
            shards=1 + self.seed % 2, f=0, durability="memory", mms=1 + 2 * (self.seed % 2),
            handlers=1, writers=0, readers=0, calls=0, naps=False, span_ms=self.span_ms,
            is_raft_real=False, conditions=self.conditions or drawn.conditions,
        )  # fmt: skip


def draw_player(seed: int) -> PlayerPlan:
    """Return the plan of a seed."""
    random, lingers = Random(f"player {seed}"), Random(f"linger {seed}")
    targets = tuple(
        _draw_target(random)._replace(linger_ms=lingers.choice((0, 0, 30)))
        for _ in range(random.choice((1, 2, 3)))
    )
    players, span_ms = random.choice((1, 2, 3)), random.choice((1_000, 2_000, 4_000))
    kinds = random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=random.choice((0, 2, 4, 7)))
    faults = tuple(
        sorted(
            PlayerFault(
                random.randrange(span_ms), kind, random.randrange(9),
                random.choice((100, LEASE_MS // 2, 2 * LEASE_MS, 4 * LEASE_MS)),
            )
            for kind in kinds
        )
    )  # fmt: skip
    return PlayerPlan(
        seed, players, targets, random.choice((20, 60, 150)),
        random.choice((0.0, 0.0, 0.1, 0.3)), random.choice((200, 2_000)),
        random.choice((20, 200)), span_ms, faults, stalls=random.choice((0.0, 0.0, 0.01, 0.03)),
    )  # fmt: skip


def _draw_target(random: Random) -> TargetPlan:
    kind: Kind = random.choice(("store", "store", "sink", "files"))
    partitions = random.choice((1, 1, 2, 3))
    rejected: Rejecting = random.choice(("", "", "skip", "dead-letter"))
    names_rejected = random.random() < 0.5
    if kind == "files":
        return TargetPlan(kind, partitions, 3)
    return TargetPlan(kind, partitions, 3, rejected, names_rejected)


def draw_pushed(seed: int) -> PlayerPlan:
    """Return the plan of a seed with all targets behind receivers, which have faults as well."""
    plan, random = draw_player(seed), Random(f"receivers {seed}")
    kinds: tuple[FaultKind, ...] = ("kill-receiver", "pause-receiver", "cut-receiver")
    more = [
        PlayerFault(
            random.randrange(plan.span_ms), random.choice(kinds), random.randrange(9),
            random.choice((100, LEASE_MS, 4 * LEASE_MS, 20 * LEASE_MS)),
        )
        for _ in range(random.choice((0, 2, 5)))
    ]  # fmt: skip
    return plan._replace(
        targets=tuple(one._replace(is_pushed=True) for one in plan.targets),
        faults=tuple(sorted([*plan.faults, *more])),
    )
