"""The leases in a server's own log: what the next watermark record adds, and what may be held.

A rebuild of the membership service reads the leases from the logs of storage servers. A lease that
no log has must not be given out again. Rule: a server holds no lease that is more than
`MAX_UNRECORDED` leases after the last one on its own disk. So a rebuild knows a bound of all leases
in which a server has acked a record (docs/protocol.md, section 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.view import MAX_UNRECORDED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.storage.store import Store
    from ziplog.core.view import LeaseRun


class RecordedLeases:
    """The leases that one server's log has."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store
        #: The last lease known to be on the disk; 0: none.
        self._on_disk = store.mark.lease if store.mark is not None else 0
        #: The oldest record that may not be on the disk: its lease, and the last entry before it.
        self._pending: tuple[int, int] | None = None
        #: The last lease that this process recorded; 0: none.
        self._recorded = 0

    def may_hold(self, lease: int) -> bool:
        """Whether the server may hold lease number `lease`; call it before a step's records."""
        self._check_disk()
        return lease <= self._on_disk + MAX_UNRECORDED

    def news(self, runs: Iterable[LeaseRun], frontier: int) -> list[LeaseRun]:
        """Return the runs that the next record adds.

        These are the runs with leases that this process did not record. The first record of a
        process has all runs that end above the frontier.
        """
        return [
            run
            for run in runs
            if run.last.number > self._recorded and (self._recorded or run.last.stop > frontier)
        ]

    def on_record(self, lease: int, fseq: int) -> None:
        """Note a record with the leases up to number `lease`, after entry `fseq`.

        The store gets it at the end of this step.
        """
        self._recorded = max(self._recorded, lease)
        self._pending = self._pending or (lease, fseq)

    def _check_disk(self) -> None:
        """Check whether the oldest pending record is on the disk."""
        if self._pending is None:
            return
        lease, fseq = self._pending
        if self._store.backlog_bytes == 0:
            self._on_disk, self._pending = max(self._on_disk, self._recorded), None
        elif self._store.flushed_fseq > fseq:  # a record has no number: the entry after it has
            self._on_disk, self._pending = max(self._on_disk, lease), None
