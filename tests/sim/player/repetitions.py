"""A source whose writers repeat rows, and the mirrors that it may have.

A repetition is no record of the log while its first copy is there. After a trim of the first copy
it may count, for a reader that begins then: so a mirror may have it, or leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.sim.player.clients import Inserter
from tests.simulator.kernel import S
from ziplog.client.common.requests import InsertRequest
from ziplog.core.entries import Origin
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.player.plan import PlayerPlan
    from tests.sim.workload import Shared
    from ziplog.types import Record

#: A row is repeated while it is one of the last ones.
_RECENT: Final = 12


class Item(NamedTuple):
    """A record of the source, or a repetition of one."""

    gsn: int
    key: bytes | None
    payload: bytes
    is_repetition: bool


class RepeatingInserter(Inserter):
    """A client whose records are rows, each of a writer of its own; it repeats some of them."""

    def __init__(self, shared: Shared, name: str, plan: PlayerPlan, share: float) -> None:
        """`share`: the probability that an insert repeats a row."""
        super().__init__(shared, name, plan)
        self._share: Final = share
        #: The requests of all rows.
        self._requests: Final[list[InsertRequest]] = []
        self.repetitions: Final[list[Item]] = []

    def _insert(self) -> None:
        if self._requests and self.random.random() < self._share:
            request = self.random.choice(self._requests[-_RECENT:])
            self.program().call(request, lambda result: self._repeated(request, result))
            return
        number = len(self._requests)
        request = InsertRequest(
            self.deadline(60 * S), [self.shared.payload()], RID_GENESIS,
            self.random.choice((b"a", b"b", None)), 0, many=True,
            shard=self.random.randrange(len(self.shared.cluster.config.shards)),
            origin=Origin(b"%016d" % number, 0, 0),
        )  # fmt: skip
        self._requests.append(request)
        self.program().call(request, self._inserted)

    def _repeated(self, request: InsertRequest, result: Any) -> None:
        if not isinstance(result, BaseException):
            (rid,), (payload,) = result, request.payloads
            self.repetitions.append(Item(rid.gsn, request.key, payload, is_repetition=True))
        self.open -= 1
        self.next_call()


def items(records: Sequence[Record], repetitions: Sequence[Item], trim: int) -> list[Item]:
    """Return what a mirror must have, and the repetitions that it may have, in order."""
    first = {one.payload: one.rid.gsn for one in records}
    return sorted(
        [
            *(Item(one.rid.gsn, one.key, one.payload, is_repetition=False) for one in records),
            *(one for one in repetitions if first[one.payload] < trim),
        ]
    )


def check_mirror(found: Sequence[Any], allowed: Sequence[Item], *, is_whole: bool) -> None:
    """Check the rows of a mirror; `is_whole`: it must have all records."""
    at = 0
    for item in allowed:
        if at == len(found) and not is_whole:
            return
        if found[at : at + 1] == [(item.key, item.payload)]:
            at += 1
        else:
            assert item.is_repetition, (
                f"exactly-once: row {at} of the mirror is {found[at : at + 1]}, not {item}"
            )
    assert at == len(found), f"exactly-once: the mirror has {found[at:]} more"
