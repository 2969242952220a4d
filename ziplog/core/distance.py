"""Time-outs that follow the round trip between machines (pure).

Each function takes `rtt_ms` of the cluster file, the longest round trip between two machines of the
cluster and its clients, 0 to 1000 ms, and returns ns. With 0 it returns what suits a local network.
Rule: nothing that is taken for true depends on these times, only when something is sent, requested
or started. `tests/unit/ziplog/test_distance.py` lists the constants that do not follow.

See docs/regions_test_bed.md and ADR 36.
"""

from __future__ import annotations

from ziplog.core.units import NS_PER_MS, NS_PER_S

#: Round trip from which an idle shard with readers closes every epoch: a reader far away is faster
#: served by the clock than by its `Want`, which takes half a round trip.
_EVERY_EPOCH_MS = 20


def _ns(rtt_ms: int) -> int:
    return rtt_ms * NS_PER_MS


# --- storage servers ---


def body_grace_ns(rtt_ms: int) -> int:
    """Return how long a backup waits for the client's own copy before it requests the body.

    The copy and the primary's decision come by different ways.
    """
    return 2 * NS_PER_MS + _ns(rtt_ms) // 4


def request_interval_ns(rtt_ms: int) -> int:
    """Return the interval between requests for a lost part of the stream."""
    return max(5 * NS_PER_MS, _ns(rtt_ms) * 3 // 2)


def resend_after_ns(rtt_ms: int) -> int:
    """Return the time without a backup's report after which the primary forwards again."""
    return max(20 * NS_PER_MS, 2 * _ns(rtt_ms))


def state_transfer_retry_ns(rtt_ms: int) -> int:
    """Return the time without an answer after which a joining server requests a part again."""
    return 100 * NS_PER_MS + 2 * _ns(rtt_ms)


def idle_epoch_interval_ns(rtt_ms: int) -> int:
    """Return the interval between closed epochs of an idle shard with readers; 0: every epoch."""
    return 50 * NS_PER_MS if rtt_ms < _EVERY_EPOCH_MS else 0


def quiet_ns(rtt_ms: int) -> int:
    """Return the time without inserts after which a shard that leaves is drained."""
    return max(20 * NS_PER_MS, _ns(rtt_ms))


def stop_notice_ns(rtt_ms: int) -> int:
    """Return how long a shard is out of the leases until the service and most clients know it."""
    return 100 * NS_PER_MS + 2 * _ns(rtt_ms)


def waiting_ns(rtt_ms: int) -> int:
    """Return how long messages may have been under way when a paused server continues."""
    return max(250 * NS_PER_MS, 2 * _ns(rtt_ms))


# --- membership service, failure handler, consensus ---


def min_lease_ms(rtt_ms: int) -> int:
    """Return the minimum length of a lease, in ms.

    The next one is proposed half-way: that half must hold a commit (a round trip), an announcement
    (half of one), a retry, and the head start of a primary (half of one).
    """
    return max(160, 6 * rtt_ms)


def late_ns(rtt_ms: int) -> int:
    """Return the lag of a shard's reported frontier that counts as late."""
    return 100 * NS_PER_MS + 2 * _ns(rtt_ms)


def proposal_retry_ns(rtt_ms: int) -> int:
    """Return the time after which an uncommitted command is proposed again."""
    return max(1000 * NS_PER_MS, 4 * _ns(rtt_ms))


def recovery_repeat_ns(rtt_ms: int) -> int:
    """Return the interval between repetitions of a step of a recovery."""
    return 100 * NS_PER_MS + 2 * _ns(rtt_ms)


def freeze_ns(rtt_ms: int) -> int:
    """Return the time for a candidate's promise, after which another candidate is tried."""
    return max(1000 * NS_PER_MS, 4 * _ns(rtt_ms))


def left_out_ns(rtt_ms: int) -> int:
    """Return the time for a recovery's request to freeze, after which a server is left out."""
    return max(500 * NS_PER_MS, 4 * _ns(rtt_ms))


def isolated_ns(rtt_ms: int) -> int:
    """Return the time without the membership service and a peer after which a server is left out.

    A recovery takes longer if new leaders are elected, or if its requests have to be forwarded.
    """
    return left_out_ns(rtt_ms) + 2 * recovery_repeat_ns(rtt_ms)


def primary_report_ns(rtt_ms: int) -> int:
    """Return the time for the primary's report, after which another candidate may be chosen."""
    return 100 * NS_PER_MS + 2 * _ns(rtt_ms)


def restart_order_ns(rtt_ms: int) -> int:
    """Return the silence during a recovery after which a server is to be restarted."""
    return 300 * NS_PER_MS + 2 * _ns(rtt_ms)


def min_election_ns(rtt_ms: int) -> int:
    """Return the shortest silence of a Raft leader after which a follower stands for election."""
    return max(500 * NS_PER_MS, 3 * _ns(rtt_ms))


def max_election_ns(rtt_ms: int) -> int:
    """Return the longest silence of a Raft leader after which a follower stands for election."""
    return max(1200 * NS_PER_MS, 6 * _ns(rtt_ms))


def leader_fallback_ns(rtt_ms: int) -> int:
    """Return the time without a majority's answers after which a Raft leader steps down."""
    return max(1000 * NS_PER_MS, 4 * _ns(rtt_ms))


def connection_silence_ns(rtt_ms: int) -> int:
    """Return the silence after which Raft closes a connection; no shorter than an election."""
    return max(3500 * NS_PER_MS, 8 * _ns(rtt_ms))


# --- clients ---


def initial_retransmit_ns(rtt_ms: int) -> int:
    """Return the retransmission timeout of inserts before the first sample."""
    return max(500 * NS_PER_MS, 4 * _ns(rtt_ms))


def min_retransmit_ns(rtt_ms: int) -> int:
    """Return the minimum of the retransmission timeout of inserts."""
    return max(200 * NS_PER_MS, 2 * _ns(rtt_ms))


def min_request_retry_ns(rtt_ms: int) -> int:
    """Return the minimum time for an answer before any other request is sent again."""
    return 2 * _ns(rtt_ms)


def outline_grace_ns(rtt_ms: int) -> int:
    """Return the time after the first outline of a shard after which missing ones are left out."""
    return max(200 * NS_PER_MS, 2 * _ns(rtt_ms))


def archive_timeout_ns(rtt_ms: int) -> int:
    """Return the time after which archives that did not send their table are left out.

    A table of 2 MiB takes several round trips on a connection that is new.
    """
    return 2 * NS_PER_S + 8 * _ns(rtt_ms)


def archive_grace_ns(rtt_ms: int) -> int:
    """Return the time after the first table that is complete, in which a later one still counts."""
    return 500 * NS_PER_MS + 2 * _ns(rtt_ms)


def want_interval_ns(rtt_ms: int) -> int:
    """Return the interval between a reader's `Want` messages to a shard."""
    return max(50 * NS_PER_MS, 2 * _ns(rtt_ms))


def stream_silence_ns(rtt_ms: int) -> int:
    """Return the time without an answer after which a reader changes to the next replica."""
    return max(1000 * NS_PER_MS, 4 * _ns(rtt_ms))
