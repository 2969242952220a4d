"""Rewritten rows in a speculation: truth and guess drop the same repetitions (section 18.2)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tests.sim.mutation import replaced
from tests.sim.script import Client, stage
from tests.sim.speculators import Promises
from tests.simulator.kernel import S
from ziplog.client.common.requests import EventBatch, EventsRequest, InsertRequest, SpeculateRequest
from ziplog.client.reads.early_stream import EarlyStream
from ziplog.core.entries import Origin
from ziplog.core.units import NEVER
from ziplog.core.writer_table import WriterTable
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.script import Stage
    from ziplog.types import Record

ROWS: Final = [b"row %d" % number for number in range(6)]


@contextmanager
def guess_keeps_repetitions() -> Iterator[None]:
    """The guess drops no repetition; the truth does."""
    pop_records = EarlyStream.pop_records

    def popped(self: EarlyStream, start: int, stop: int) -> Any:
        self._writers = WriterTable()  # type: ignore[misc]
        return pop_records(self, start, stop)

    with replaced(EarlyStream, "pop_records", popped):
        yield


class Speculator(Client):
    """A client that speculates from the beginning."""

    def __init__(self, s: Stage) -> None:
        super().__init__(s, "speculator")
        self.promises = Promises("speculator")
        self.final: list[Record] = []
        self._taken = 0
        request = SpeculateRequest(NEVER, RID_GENESIS, True)
        self._number: Final = self.wait(self.begin(request)).result
        self._fetch()

    def _fetch(self) -> None:
        self.program.call(EventsRequest(NEVER, self._number, 100, self._taken), self._fetched)

    def _fetched(self, batch: EventBatch) -> None:
        self._taken += len(batch.events)
        self.final += self.promises.add(batch.events)
        self._fetch()


def write_twice(s: Stage) -> Speculator:
    """Write rows, the same rows as another client, and one more; return the reader."""
    reader = Speculator(s)
    first, second = Client(s, "first"), Client(s, "second")
    s.run(1 * S)
    for client, rows in ((first, ROWS[:5]), (second, ROWS[:5]), (second, ROWS[:5])):
        request = InsertRequest(
            NEVER, rows, RID_GENESIS, None, 0, many=True, shard=0, origin=Origin(b"w" * 16, 0, 0)
        )
        client.wait(client.begin(request))
    first.wait(first.insert(ROWS[5]))
    s.until(lambda: reader.final and reader.final[-1].payload == ROWS[5])
    assert [record.payload for record in reader.final] == ROWS
    return reader


def test_truth_and_guess_drop_the_same_repetitions() -> None:
    with stage() as s:
        promises = write_twice(s).promises
        assert (promises.failures, promises.early) == (0, len(ROWS))
    with guess_keeps_repetitions(), stage() as s:
        assert write_twice(s).promises.failures > 0
