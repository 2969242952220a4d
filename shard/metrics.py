"""The metrics of a storage server, from its state and its store (docs/monitoring.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.entries import Place
from ziplog.core.first_seen import FirstSeen
from ziplog.wire import Durations, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.state.replica_state import ReplicaState
    from shard.storage.segment_store import SegmentStore
    from ziplog.core.histogram import Histogram


class StorageMetrics:
    """The metrics of one storage server."""

    def __init__(
        self,
        state: ReplicaState,
        store: SegmentStore,
        archive_next: Callable[[], int] = lambda: 0,
    ) -> None:
        """Report on a replica.

        Args:
            state: of the replica.
            store: its entries.
            archive_next: returns the first entry that is not in its archive's files; 0: unknown.

        """
        self._state: Final = state
        self._store: Final = store
        self._archive_next: Final = archive_next
        self._labels: Final = {"shard": str(state.shard)}
        role = "backup" if state.server else "primary"
        self._role: Final = self._labels | {"role": role}
        #: Of earlier snapshots: the primary's last entry, and the server's frontier.
        self._entries: Final = FirstSeen()
        self._frontiers: Final = FirstSeen()

    def collect(self, short_acks: Histogram, now: int) -> tuple[list[Value], list[Durations]]:
        """Return the metrics.

        Args:
            short_acks: durations of the acks on the short path.
            now: in ns.

        """
        state, counters, labels = self._state, self._state.counters, self._labels
        values = [
            *self._records(),
            Value("ziplog_record_bytes_total", state.placed_bytes, self._role),
            *self._store_values(),
            *self._lags(now),
            *self._reader_lag(now),
            Value("ziplog_delivered_records_total", counters.delivered_records, labels),
            Value("ziplog_delivered_bytes_total", counters.delivered_bytes, labels),
            Value("ziplog_subscriptions", counters.subscriptions, labels),
            Value("ziplog_sessions", len(state.sessions.by_client), labels),
        ]
        for name, label, counts in (
            ("ziplog_refused_total", "reason", counters.refused),
            ("ziplog_reads_total", "result", counters.reads),
            ("ziplog_repairs_total", "result", counters.repairs),
        ):
            values += [Value(name, n, labels | {label: key}) for key, n in counts.items()]
        durations = [
            Durations.of("ziplog_ack_duration_seconds", counters.acks, self._role | _path("full")),
            Durations.of("ziplog_ack_duration_seconds", short_acks, self._role | _path("short")),
            Durations.of(
                "ziplog_flush_duration_seconds", self._store.flusher.flush_durations, labels
            ),
        ]
        if not state.server:
            durations.append(
                Durations.of("ziplog_order_wait_seconds", counters.order_waits, labels)
            )
        return values, durations

    def _records(self) -> list[Value]:
        """Return the placed records: at a backup, with whether their acks waited."""
        state, name = self._state, "ziplog_records_total"
        if not state.server:
            return [Value(name, state.placed_records, self._role)]
        waited = state.counters.waited_records
        return [
            Value(name, state.placed_records - waited, self._role | _path("fast")),
            Value(name, waited, self._role | _path("slow")),
        ]

    def _store_values(self) -> list[Value]:
        store, labels = self._store, self._labels
        damaged = sum(last - first + 1 for first, last in store.damage)
        archive_next = self._archive_next()
        waiting = store.sealed_bytes(archive_next, self._state.stream.stable)
        return [
            *([Value("ziplog_archive_lag_bytes", waiting, labels)] if archive_next else []),
            Value("ziplog_flushed_bytes_total", store.flusher.flushed_bytes, labels),
            Value("ziplog_unflushed_bytes", store.backlog_bytes, labels),
            Value("ziplog_stored_bytes", store.stored_bytes, labels),
            Value("ziplog_segments", store.segment_count, labels),
            Value("ziplog_damaged_entries", damaged, labels),
        ]

    def _lags(self, now: int) -> list[Value]:
        """Return how far each backup is behind its primary."""
        state, stream = self._state, self._state.stream
        values: list[Value] = []
        for index, held in state.counters.replicated.items():
            labels = self._labels | {"peer": state.config.replicas[index].name}
            missing = stream.decisions_after(held)
            records = sum(len(one.gsns) for one in missing if type(one) is Place)
            values.append(Value("ziplog_replica_lag_records", records, labels))
            age_s = self._entries.age_s(held + 1, now)
            values.append(Value("ziplog_replica_lag_seconds", age_s, labels))
        self._entries.observe(stream.last, now)
        return values

    def _reader_lag(self, now: int) -> list[Value]:
        """Return how far the slowest subscription is behind this server."""
        frontier, labels = self._state.frontier, self._labels
        behind = [one.sent for one in self._state.counters.lagging.values() if one.sent < frontier]
        self._frontiers.observe(frontier, now)
        age_s = self._frontiers.age_s(min(behind) + 1, now) if behind else 0.0
        return [
            Value("ziplog_subscriptions_behind", len(behind), labels),
            Value("ziplog_reader_lag_seconds", age_s, labels),
        ]


def _path(path: str) -> dict[str, str]:
    return {"path": path}
