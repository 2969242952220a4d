"""Mutants of repeated rows (docs/protocol.md, section 14.3). See tests/sim/mutation.

Writers repeat their rows; readers begin in the middle, and know the rows before.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.sim.mutation import LAN, busy, mutant, replaced
from tests.sim.plan import Fault
from ziplog.client.reads.known_rows import KnownRows
from ziplog.client.reads.shard_stream import ShardStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan


def row_writers(seed: int, *faults: Fault, **changes: Any) -> Plan:
    """Return a run with two clients that write rows, and readers that begin anywhere."""
    return busy(
        seed, *faults, rows=2, writers=0, readers=3, shards=2, conditions=LAN, span_ms=4_000,
        **changes,
    )  # fmt: skip


def restarts(seed: int) -> Plan:
    """Return such a run, in which readers, servers and a row writer are killed."""
    random = Random(f"restarts {seed}")
    names = ("reader-0", "reader-1", "reader-2", "rows-0")
    faults = [
        Fault(random.randrange(4_000), "kill-client", (random.choice(names),)) for _ in range(6)
    ]
    servers = [Fault(random.randrange(4_000), "kill", (f"shard-{shard}-0",)) for shard in (0, 1)]
    return row_writers(seed, *faults, *servers, owners=1)


_RESTARTS: Final = "two clients repeat rows; three readers and a cursor begin anywhere; kills"


@mutant(restarts, _RESTARTS)
def tables_are_not_asked() -> Iterator[None]:
    """A reader that begins in the middle knows the rows before (14.3)."""
    with (
        replaced(KnownRows, "ready", lambda _self, members, _position: members),
        replaced(KnownRows, "check", lambda _self: None),
    ):
        yield


@mutant(restarts, _RESTARTS)
def stretch_is_skipped() -> Iterator[None]:
    """A reader applies the rows between its table and its start (14.3)."""

    def skipped(self: ShardStream, stop: int) -> None:
        while self._units and self._units[0].gsns[-1] < stop:
            size = len(self._units.popleft().body) + 64
            self._buffered -= size
            self._consumed += size

    with replaced(ShardStream, "skip", skipped):
        yield
