"""Random fault schedule: kind, node and duration of each fault, all from one seed.

Rule: a group (the replicas of a shard, the membership nodes, the failure handlers) gets its next
fault when all its members are up again, unless `beyond` is set. So at most the tolerated number of
members fail at once. Invariant: at the end every fault is healed.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fault_injection.nodes import Nodes

DAMAGE: Final = ("torn-tail", "bitflip")
KILL_GROUP: Final = "kill-group"
_STORAGE_ONLY: Final = frozenset({"fill-disk", "cut-clients", *DAMAGE})
_PAUSE_S: Final = (0.5, 4.0)
_DURATION_S: Final = (0.2, 6.0)
#: Timeout for the recovery of a group, in seconds; after it, the group's fault is left out.
_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05


_STRIKES: Final[dict[str, Callable[[Nodes, Fault], str | None]]] = {
    "kill": lambda nodes, fault: nodes.kill(fault.node),
    "pause": lambda nodes, fault: nodes.pause(fault.node),
    "restart": lambda nodes, fault: nodes.restart(fault.node),
    "cut-peers": lambda nodes, fault: nodes.cut_from_peers(fault.node),
    "cut-clients": lambda nodes, fault: nodes.cut_from_clients(fault.node),
    "cut-one-way": lambda nodes, fault: nodes.cut(fault.node, [fault.other], one_way=True),
    "isolate": lambda nodes, fault: nodes.isolate(fault.node),
    "lose": lambda nodes, fault: nodes.lose(fault.node, fault.amount),
    "slow": lambda nodes, fault: nodes.slow(fault.node, send_ms=fault.amount),
    "slow-disk": lambda nodes, fault: nodes.slow(fault.node, flush_ms=fault.amount),
    "fill-disk": lambda nodes, fault: nodes.fill_disk(fault.node, fault.amount * 1024),
    "torn-tail": lambda nodes, fault: nodes.torn_tail(fault.node, fault.amount),
    "bitflip": lambda nodes, fault: nodes.bitflip(fault.node, fault.amount),
    KILL_GROUP: lambda nodes, fault: nodes.kill_all(nodes.group_of(fault.node)),
}
#: Kinds of faults; those that damage files, or kill a whole group, are only done when asked for.
KINDS: Final = tuple(kind for kind in _STRIKES if kind not in {*DAMAGE, KILL_GROUP})


def kinds_of(text: str) -> tuple[str, ...]:
    """Return the kinds of faults in an option's text: names with commas.

    Raises:
        argparse.ArgumentTypeError: a name is unknown.

    """
    kinds = tuple(text.split(","))
    unknown = set(kinds) - set(_STRIKES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no kind of fault")
    return kinds


class Fault(NamedTuple):
    """One fault: its node, the other node of a cut, its size, and its duration in seconds."""

    kind: str
    node: str
    other: str
    amount: int
    seconds: float

    def __str__(self) -> str:
        other = f" to {self.other}" if self.kind == "cut-one-way" else ""
        unit = {"slow": "ms", "slow-disk": "ms", "lose": "%"}.get(self.kind)
        amount = f" by {self.amount} {unit}" if unit else ""
        lasts = self.kind not in {"kill", "restart", KILL_GROUP, *DAMAGE}
        return f"{self.kind} {self.node}{other}{amount}" + (
            f" for {self.seconds:.1f} s" if lasts else ""
        )


def faults(nodes: Nodes, seed: int, kinds: Sequence[str] = KINDS) -> Iterator[tuple[float, Fault]]:
    """Go through the faults of a seed, without end, each with the pause before it, in seconds."""
    chooser = random.Random(seed)  # noqa: S311 - no secret
    storage = [replica.name for shard in nodes.config.shards for replica in shard.replicas]
    while True:
        kind = chooser.choice(kinds)
        node = chooser.choice(storage if kind in _STORAGE_ONLY else nodes.names)
        others = [other for other in nodes.group_of(node) if other != node]
        yield (
            chooser.uniform(*_PAUSE_S),
            Fault(
                kind,
                node,
                chooser.choice(others or [node]),
                chooser.randint(2, 50),
                chooser.uniform(*_DURATION_S),
            ),
        )


def inject(nodes: Nodes, fault: Fault) -> str:
    """Inject a fault; return its description.

    Raises:
        UnavailableError: the node does not run.

    """
    return _STRIKES[fault.kind](nodes, fault) or ""


class Chaos:
    """Injects and heals random faults. Not thread-safe."""

    def __init__(
        self,
        nodes: Nodes,
        seed: int,
        kinds: Sequence[str],
        unhealthy: Callable[[], dict[str, str]],
        say: Callable[[str], None],
        *,
        beyond: bool = False,
    ) -> None:
        """Prepare the schedule.

        Args:
            nodes: the nodes to fail.
            seed: of all random choices.
            kinds: of `KINDS` and `DAMAGE`.
            unhealthy: returns the nodes and shards ("shard 0") that are not healthy.
            say: called with a line for each action.
            beyond: fail whole groups too.

        """
        self._nodes, self._unhealthy, self._say, self._beyond = nodes, unhealthy, say, beyond
        self._faults: Final = faults(nodes, seed, kinds)
        #: Times at which nodes are healed, in order.
        self._heals: list[tuple[float, str]] = []
        self.injected = 0

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Inject faults for `seconds`, then heal everything; `each` is called repeatedly."""
        end = time.monotonic() + seconds
        try:
            for pause, fault in self._faults:
                self._pass(min(time.monotonic() + pause, end), each)
                if time.monotonic() >= end:
                    break
                self._inject(fault, end, each)
        finally:
            self._nodes.heal_all()
            self._say("everything is healed")

    def _inject(self, fault: Fault, end: float, each: Callable[[], None]) -> None:
        deadline = min(end, time.monotonic() + _TIMEOUT_S)
        while not self._beyond and not self._is_healthy(fault.node):
            if time.monotonic() >= deadline:
                self._say(f"left out, its group is not healthy: {fault}")
                return
            self._pass(time.monotonic() + _POLL_S, each)
        try:
            said = inject(self._nodes, fault)
        except UnavailableError as error:
            self._say(f"{fault}: not done: {error}")
            return
        self.injected += 1
        self._say(f"{fault}{': ' if said else ''}{said}")
        self._heals.append((time.monotonic() + fault.seconds, fault.node))
        self._heals.sort()

    def _is_healthy(self, node: str) -> bool:
        group = self._nodes.group_of(node)
        waiting = {name for _, name in self._heals}
        return waiting.isdisjoint(group) and self._unhealthy().keys().isdisjoint(
            {*group, "the membership service", _shard_of(node)}
        )

    def _pass(self, until: float, each: Callable[[], None]) -> None:
        """Wait, and heal nodes that are due."""
        while True:
            each()
            while self._heals and self._heals[0][0] <= time.monotonic():
                _, node = self._heals.pop(0)
                self._nodes.heal(node)
                self._say(f"heal {node}")
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_S))


def _shard_of(node: str) -> str:
    """Return how a status names the shard of a node called "shard-0-1"."""
    kind, _, rest = node.partition("-")
    return f"shard {rest.partition('-')[0]}" if kind == "shard" else node
