"""The metrics that nodes report: their types and help texts.

A node sends names, labels and values only. The monitor exports what is listed here. Rule: a
counter's name ends in `_total`, and units are seconds, bytes and records. See docs/monitoring.md.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Entry(NamedTuple):
    """The type and the help text of a metric."""

    kind: Kind
    text: str


_SAMPLED: Final = "Sampled: about one in 64."

CATALOGUE: Final[dict[str, Entry]] = {
    # Every process.
    "ziplog_build_info": Entry("gauge", "1; the versions that the node runs."),
    "ziplog_start_time_seconds": Entry("gauge", "When the process started, in Unix time."),
    "ziplog_time_seconds": Entry("gauge", "The node's clock when it replied, in Unix time."),
    "process_cpu_seconds_total": Entry("counter", "User and system CPU time of the process."),
    "process_resident_memory_bytes": Entry("gauge", "Resident memory of the process."),
    "process_open_fds": Entry("gauge", "Open file descriptors of the process."),
    "ziplog_loop_turn_seconds": Entry(
        "histogram", f"Duration of an iteration of the event loop, without its sleep. {_SAMPLED}"
    ),
    "ziplog_loop_busy_seconds_total": Entry("counter", "CPU time of the event loop's thread."),
    "ziplog_connections": Entry("gauge", "Open connections, by the side that opened them."),
    "ziplog_connections_cut_total": Entry(
        "counter",
        "Connections that the node closed. malformed: other data than frames; flood: incomplete"
        " frames used too much memory; silent: the peer acknowledged nothing; limit: too few"
        " descriptors were free.",
    ),
    "ziplog_handshakes_total": Entry(
        "counter",
        "Established connections whose peer sent its greeting (ok), something else (malformed) or"
        " nothing complete before the connection ended (ended).",
    ),
    "ziplog_frames_total": Entry(
        "counter", "Frames received, and frames accepted for sending, by direction."
    ),
    "ziplog_frame_bytes_total": Entry(
        "counter", "Bytes that the frames' connections received and sent, by direction."
    ),
    "ziplog_frames_dropped_total": Entry(
        "counter",
        "Frames dropped. Not sent: queue, unknown-peer. Received: overload (too many waited),"
        " malformed, version (not known to this release).",
    ),
    # Storage servers.
    "ziplog_records_total": Entry(
        "counter",
        "Records placed. At a backup by path; slow: acked after the primary's decision.",
    ),
    "ziplog_record_bytes_total": Entry(
        "counter", "Bytes of the placed records, with their keys and times."
    ),
    "ziplog_refused_total": Entry("counter", "Requests of clients that the server refused."),
    "ziplog_ack_duration_seconds": Entry(
        "histogram",
        f"From the arrival of an insert to its ack. {_SAMPLED} path: the server's short path, or"
        " full.",
    ),
    "ziplog_order_wait_seconds": Entry(
        "histogram", "From a primary's decision until all replicas hold it. Sampled: one at a time."
    ),
    "ziplog_flush_duration_seconds": Entry("histogram", "Duration of an fdatasync."),
    "ziplog_flushed_bytes_total": Entry("counter", "Bytes of entries put on stable storage."),
    "ziplog_unflushed_bytes": Entry("gauge", "Bytes of entries not yet on stable storage."),
    "ziplog_replica_lag_records": Entry("gauge", "Records of the primary that the peer lacks."),
    "ziplog_replica_lag_seconds": Entry(
        "gauge", "Age of the oldest such record, to the second before."
    ),
    "ziplog_reads_total": Entry("counter", "Reads of single positions, by result."),
    "ziplog_delivered_records_total": Entry(
        "counter", "Records sent to subscriptions; a record counts once for each."
    ),
    "ziplog_delivered_bytes_total": Entry("counter", "Bytes sent to subscriptions."),
    "ziplog_subscriptions": Entry("gauge", "Open subscriptions."),
    "ziplog_subscriptions_behind": Entry(
        "gauge", "Subscriptions to which not all stable records were sent."
    ),
    "ziplog_reader_lag_seconds": Entry(
        "gauge",
        "Age of the oldest stable record that was not sent to the slowest subscription, to the"
        " second before, and at most since the first snapshot.",
    ),
    "ziplog_sessions": Entry("gauge", "Clients that the server remembers."),
    "ziplog_stored_bytes": Entry("gauge", "Bytes of the entries that are kept."),
    "ziplog_segments": Entry("gauge", "Segment files that are kept."),
    "ziplog_archive_lag_bytes": Entry(
        "gauge", "Bytes of complete, stable segments that wait for the archive; none: unknown."
    ),
    "ziplog_damaged_entries": Entry("gauge", "Entries that were unreadable at the start."),
    "ziplog_repairs_total": Entry("counter", "Repairs of unreadable entries, by result."),
    # Membership nodes and failure handlers.
    "ziplog_raft_leader": Entry("gauge", "Whether the node leads its Raft group."),
    "ziplog_raft_term": Entry("gauge", "The node's Raft term."),
    "ziplog_raft_applied_index": Entry("gauge", "The last Raft entry that the node applied."),
    "ziplog_raft_journal_bytes": Entry("gauge", "Size of the Raft journal."),
    "ziplog_raft_commit_duration_seconds": Entry(
        "histogram", "From the proposal of a command to its commit, at the node that proposed it."
    ),
    "ziplog_suspicions_total": Entry("counter", "Reports of servers that suspect a peer."),
    "ziplog_recoveries_total": Entry(
        "counter", "Recoveries begun. cause: a server restarted, or is silent."
    ),
    "ziplog_recovery_duration_seconds": Entry(
        "histogram", "From the first suspicion until the shard is in the leases again."
    ),
    # Coordinators of LogDB.
    "logdb_ready": Entry("gauge", "Whether the coordinator serves requests."),
    "logdb_lag_seconds": Entry(
        "gauge",
        "Age of the oldest record that the servers reported and the coordinator has not applied, to"
        " the second before.",
    ),
    "logdb_keys": Entry("gauge", "Keys of the database."),
    "logdb_data_bytes": Entry("gauge", "Bytes of all keys and values."),
    "logdb_log_bytes": Entry("gauge", "Bytes of the log that are not trimmed."),
    "logdb_dead_bytes": Entry("gauge", "Bytes of the log that no key needs."),
    "logdb_sessions": Entry("gauge", "Clients of the coordinator."),
    "logdb_snapshots": Entry("gauge", "Open snapshots."),
    "logdb_waiting": Entry("gauge", "Requests that wait."),
    "logdb_cache_bytes": Entry("gauge", "Bytes of cached values."),
    "logdb_commits_total": Entry("counter", "Transactions that committed, the replay apart."),
    "logdb_aborts_total": Entry("counter", "Transactions that aborted, the replay apart."),
    "logdb_commit_duration_seconds": Entry(
        "histogram",
        "From the insertion of a transaction's record, by its client's clock, until the coordinator"
        " decides it. Sampled: the last one of the records that arrive together.",
    ),
    "logdb_cleaner_rounds_total": Entry("counter", "Rounds of the cleaner, by result."),
    "logdb_cleaner_moved_bytes_total": Entry("counter", "Bytes of values that it moved."),
    "logdb_cleaner_copied_records_total": Entry(
        "counter", "Records of other programs that it inserted again, to trim the log before them."
    ),
    "logdb_cleaner_stopped": Entry(
        "gauge", "Whether a record of a later version keeps it from trimming the log."
    ),
    "logdb_cache_requests_total": Entry("counter", "Lookups of values in the cache."),
}
