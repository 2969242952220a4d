"""Clients that write rows and repeat them, in a run (docs/protocol.md, section 14.3).

A writer inserts batch after batch under one identity, and most batches more than once: as after a
failure. So the log holds repetitions, which readers drop. The history has one insert for each
batch, which never returns: the positions of a repeated row may be those of a repetition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.sim.workload import Client
from tests.simulator.kernel import MS, S
from ziplog.client.common.requests import InsertRequest
from ziplog.core.entries import Origin
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.sim.checks import Row
    from tests.sim.workload import Shared

#: The first bytes of each row.
PREFIX: Final = b"row "
#: Number of rows of a batch, and of all batches of a writer.
_ROWS: Final = 6
_BATCHES: Final = 12
#: Probability that a complete batch is written again.
_AGAIN: Final = 0.6
#: Maximum of the pause before a call.
_PAUSE_NS: Final = 200 * MS


class RowWriter(Client):
    """A client that writes batches of rows to one shard."""

    def __init__(self, shared: Shared, name: str, number: int, shard: int) -> None:
        super().__init__(shared, name)
        self._number: Final = number
        self._shard: Final = shard
        self._batch = -1
        self._payloads: list[bytes] = []

    def begin(self) -> None:
        """Continue with the batch of the former incarnation, as it may be incomplete."""
        if self._batch < 0:
            self._next_batch()
        self.next_call()

    def _next_batch(self) -> None:
        self._batch += 1
        prefix = PREFIX + b"%d-%d-" % (self._number, self._batch)
        self._payloads = [prefix + b"%d" % row for row in range(_ROWS)]
        history, now = self.shared.history, self.shared.cluster.kernel.now
        history.call(f"{self.process.name}/{self._batch}", now, self._request(0))

    def _request(self, deadline: int) -> InsertRequest:
        origin = Origin(b"%016d" % self._number, self._batch, 0)
        return InsertRequest(
            deadline, self._payloads, RID_GENESIS, None, 0, many=True, shard=self._shard,
            origin=origin,
        )  # fmt: skip

    def next_call(self) -> None:
        if self._batch < _BATCHES and not self.shared.is_over:
            pause = self.random.randrange(_PAUSE_NS)
            self.shared.cluster.kernel.after(pause, self.unless_killed(self._write))

    def _write(self) -> None:
        timeout = self.random.choice((20 * MS, 1 * S, 5 * S))
        self.program().call(self._request(self.deadline(timeout)), self._written)

    def _written(self, result: Any) -> None:
        if isinstance(result, list) and self.random.random() >= _AGAIN:
            self._next_batch()
        self.next_call()


def once(rows: Iterable[Row]) -> list[Row]:
    """Return the records without repetitions of rows: the first of each row counts."""
    found: list[Row] = []
    seen: set[bytes] = set()
    for row in sorted(rows):
        if not row.payload.startswith(PREFIX) or row.payload not in seen:
            found.append(row)
            seen.add(row.payload)
    return found
