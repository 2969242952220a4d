"""Clients of a run with players: one inserts, one reads all, one is the operator of cursors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.sim.workload import FETCH_NS, FETCH_RECORDS, Client
from tests.simulator.kernel import MS, S
from ziplog.client.common.requests import (
    EditRequest,
    FetchRequest,
    InsertRequest,
    SubscribeRequest,
    TrimRequest,
)
from ziplog.types import RID_GENESIS, CursorInfo, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.player.plan import PlayerPlan
    from tests.sim.workload import Shared

_CALL_NS: Final = 5 * S
_KEYS: Final = (b"a", b"b", b"c", b"d", b"e", None)


class Inserter(Client):
    """A client that inserts the records of a run."""

    def __init__(self, shared: Shared, name: str, plan: PlayerPlan) -> None:
        super().__init__(shared, name)
        self.left = self.open = plan.records
        self._think_ns: Final = plan.span_ms * MS // plan.records

    def next_call(self) -> None:
        if not self.left:
            return
        self.left -= 1
        pause = self.random.randrange(2 * self._think_ns)
        self.shared.cluster.kernel.after(pause, self.unless_killed(self._insert))

    def _insert(self) -> None:
        request = InsertRequest(
            self.deadline(60 * S), [self.shared.payload()], RID_GENESIS,
            self.random.choice(_KEYS), 0,
        )  # fmt: skip
        self.program().call(request, self._inserted)

    def _inserted(self, result: Any) -> None:
        if not isinstance(result, BaseException):
            self.shared.known += result
        self.open -= 1
        self.next_call()


class Admin(Client):
    """An operator of cursors and trims."""

    def next_call(self) -> None:
        """Do nothing: the run calls `edit` and `trim`."""

    def edit(
        self, name: str, what: Any, position: RecordId, then: Callable[[CursorInfo | None], None]
    ) -> None:
        """Change a cursor; `then` gets it if that succeeded, None if it was deleted."""
        request = EditRequest(self.deadline(_CALL_NS), name, what, position)

        def done(result: Any) -> None:
            if not isinstance(result, BaseException):
                then(result)

        self.program().call(request, done)

    def trim(self, position: RecordId, *, force: bool) -> None:
        """Trim the log; the service refuses what cursors hold."""
        request = TrimRequest(self.deadline(_CALL_NS), position, force)
        self.program().call(request, lambda _result: None)


class Auditor(Client):
    """A client that reads the whole log as it grows, before anything of it is trimmed."""

    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__(shared, name)
        self.records: Final[list[Record]] = []
        self._subscription = 0

    @property
    def is_done(self) -> bool:
        """Whether it has all records that are known."""
        last = self.records[-1].rid if self.records else RID_GENESIS
        return last >= max(self.shared.known)

    def next_call(self) -> None:
        request = SubscribeRequest(self.deadline(60 * S), RID_GENESIS, follow=True)
        self.program().call(request, self._subscribed)

    def _subscribed(self, number: Any) -> None:
        assert isinstance(number, int), number
        self._subscription = number
        self._fetch()

    def _fetch(self) -> None:
        request = FetchRequest(self.deadline(FETCH_NS), self._subscription, FETCH_RECORDS)
        self.program().call(request, self._fetched)

    def _fetched(self, result: Any) -> None:
        assert not isinstance(result, BaseException), result
        self.records.extend(result.records)
        self._fetch()
