"""Mutants: deliberate bugs, each of which breaks one rule of production code during a run.

They show that the simulator can find such bugs. Rule: a mutant is a context manager that replaces
methods or constants and restores them; production code does not know it. Each has a draw of its
own (`Mutant.draw`, described by its `focus`), which makes the rule's situation frequent and the
search short. Invariant: only an AssertionError counts as found: from a checker, from a replica's
own invariants, or because the cluster does not become whole. Any other exception is a bug of the
mutant, and propagates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from shard.recovery.old_copies import OldCopyDetector
from tests.sim.plan import Fault, Plan, draw
from tests.sim.run import run
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.wire import Beat


class Mutant(NamedTuple):
    """A broken rule."""

    name: str
    #: The rule in a sentence, with its decision.
    rule: str
    #: The difference of its runs from those of `python -m tests.sim`; they are also short.
    focus: str
    draw: Callable[[int], Plan]
    broken: Callable[[], AbstractContextManager[None]]

    def __str__(self) -> str:
        return self.name


class Found(NamedTuple):
    """A found mutant: the seed and the failure."""

    seed: int
    failure: str


MUTANTS: Final[dict[str, Mutant]] = {}

#: Replaces an attribute of a class or module while it is entered.
replaced: Final = patch.object


@contextmanager
def logs_are_not_compared() -> Iterator[None]:
    """Have servers not compare their logs: that finds, and mends, what some mutants break."""

    def trusts_all(self: OldCopyDetector, _beat: Beat) -> bool:
        self._uncompared.clear()
        self._state.is_compared = True
        return False

    with replaced(OldCopyDetector, "compare", trusts_all):
        yield


def search(mutant: Mutant, budget_seeds: int, first: int = 1) -> Found | None:
    """Run seeds of a mutant's draw until one fails; None: none failed.

    Args:
        mutant: the mutant.
        budget_seeds: maximum number of seeds.
        first: the first seed.

    Raises:
        Exception: not an AssertionError: the mutant itself is wrong.

    """
    for seed in range(first, first + budget_seeds):
        try:
            with mutant.broken():
                run(mutant.draw(seed))
        except AssertionError as error:
            return Found(seed, " ".join(str(error).split()))
    return None


def is_clean(mutant: Mutant, seed: int) -> bool:
    """Run the same plan without the mutant; its errors propagate."""
    return run(mutant.draw(seed)).operations > 0


# --- draws ---------------------------------------------------------------------------------------

LAN: Final = Conditions()
#: Frames overtake each other.
SLOW: Final = Conditions(delay_ns=(50 * US, 10 * MS))
LOSSY: Final = Conditions(delay_ns=(50 * US, 10 * MS), loss=0.05, repeats=0.05)


def busy(seed: int, *faults: Fault, **changes: Any) -> Plan:
    """Return a small cluster with all load at the beginning, and these faults."""
    plan = draw(seed, faults=0)._replace(
        shards=1, f=1, durability="memory", mms=1, handlers=1, writers=4, readers=1, calls=60,
        lanes=1, think_us=2_000, conditions=SLOW, naps=False, span_ms=500, is_raft_real=False,
    )  # fmt: skip
    return plan._replace(faults=faults, **changes)


def undisturbed(seed: int) -> Plan:
    """Return a run without faults."""
    return busy(seed)


def two_shards(seed: int) -> Plan:
    """Return a run of two shards without faults, most of it within one epoch."""
    return busy(seed, shards=2, think_us=0, conditions=LAN)


def lossy(seed: int) -> Plan:
    """Return a run without faults, over a network that loses frames."""
    return busy(seed, conditions=LOSSY)


def kill_the_primary(seed: int) -> Plan:
    """Return a run in which the primary is killed under load."""
    at_ms = Random(f"kill {seed}").randrange(10, 200)
    return busy(seed, Fault(at_ms, "kill", ("shard-0-0",)), lanes=8)


def kill_and_lose(seed: int) -> Plan:
    """Return a run in which the primary is killed under load, and a frame in five is lost."""
    lossy_links = Conditions(delay_ns=(20 * US, 3 * MS), loss=0.2)
    return kill_the_primary(seed)._replace(conditions=lossy_links, lanes=4, think_us=0)


def kill_any_server(seed: int) -> Plan:
    """Return a run of two shards in which a server is killed under load."""
    random = Random(f"kill {seed}")
    name = random.choice(("shard-0-0", "shard-0-1"))
    return busy(seed, Fault(random.randrange(10, 200), "kill", (name,)), shards=2)


def part_the_servers(seed: int) -> Plan:
    """Return a run in which only primary and backup lose contact with each other."""
    pairs = ("shard-0-0", "shard-0-1", "shard-0-1", "shard-0-0")
    at_ms = Random(f"cut {seed}").randrange(10, 200)
    return busy(
        seed, Fault(at_ms, "cut", pairs, 2_000), writers=24, think_us=200_000,
        conditions=Conditions(delay_ns=(20 * US, 2 * MS)),
    )  # fmt: skip


def mutant(focus: Callable[[int], Plan], text: str) -> Callable[..., Callable[..., Any]]:
    """Register a mutant with its draw and the draw's text; its docstring is the rule."""

    def register(broken: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name, rule = broken.__name__, " ".join((broken.__doc__ or "").split())
        MUTANTS[name] = Mutant(name, rule, text, focus, contextmanager(broken))
        return broken

    return register
