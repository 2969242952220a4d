"""The leases in a server's own log: what the next watermark record adds, and what may be held.

A rebuild of the membership service reads the leases from the logs of storage servers. A lease that
no log has must not be given out again. Rule: a server holds no lease that is more than
`MAX_UNRECORDED` leases after the last one on its own disk. So a rebuild knows a bound of all leases
in which a server has acked a record (docs/protocol.md, section 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.recorded_value import RecordedValue
from ziplog.core.view import MAX_UNRECORDED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.storage.store import Store
    from ziplog.core.view import LeaseRun


class RecordedLeases:
    """The leases that one server's log has."""

    def __init__(self, store: Store) -> None:
        #: The number of the last lease.
        self._last: Final = RecordedValue(store, store.mark.lease if store.mark is not None else 0)

    def may_hold(self, lease: int) -> bool:
        """Whether the server may hold lease number `lease`; call it before a step's records."""
        self._last.update()
        return lease <= self._last.on_disk + MAX_UNRECORDED

    def news(self, runs: Iterable[LeaseRun], frontier: int) -> list[LeaseRun]:
        """Return the runs that the next record adds.

        These are the runs with leases that this process did not record. The first record of a
        process has all runs that end above the frontier.
        """
        recorded = self._last.recorded
        return [
            run
            for run in runs
            if run.last.number > recorded and (recorded or run.last.stop > frontier)
        ]

    def on_record(self, lease: int, fseq: int) -> None:
        """Note a record with the leases up to number `lease`, after entry `fseq`.

        The store gets it at the end of this step.
        """
        self._last.on_record(lease, fseq)
