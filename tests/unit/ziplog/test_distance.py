"""Time-outs follow the round trip: today's values at 0 ms, and no constant is forgotten."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from mms.leases import LeasePlan, shape
from shard.membership.draining import Draining
from shard.ordering.backup import Backup
from shard.ordering.lag_fix import LagFix
from shard.ordering.primary import Primary
from shard.recovery.failure_detector import FailureDetector
from shard.state.replica_state import ReplicaConfig, ReplicaState
from tests.memory_store import MemoryStore
from ziplog.core import distance
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.view import Replica
from ziplog.raft.pysyncobj_adapter import configuration
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[3]
PACKAGES: Final = ("ziplog", "shard", "mms", "failure_handler")
UNITS: Final = {"NS_PER_MS": NS_PER_MS, "NS_PER_S": NS_PER_S}
#: By the ending of a constant: the number of its units in a millisecond.
PER_MS: Final = {"_NS": NS_PER_MS, "_MS": 1}
FUNCTIONS: Final[dict[str, Callable[[int], int]]] = {
    name: function
    for name, function in inspect.getmembers(distance, inspect.isfunction)
    if not name.startswith("_")
}
#: Each time-out in ms: in a local network, and with 120 ms.
EXPECTED: Final = {
    "body_grace_ns": (2, 32),
    "request_interval_ns": (5, 180),
    "resend_after_ns": (20, 240),
    "state_transfer_retry_ns": (100, 340),
    "idle_epoch_interval_ns": (50, 0),
    "quiet_ns": (20, 120),
    "stop_notice_ns": (100, 340),
    "waiting_ns": (250, 250),
    "min_lease_ms": (160, 720),
    "late_ns": (100, 340),
    "proposal_retry_ns": (1000, 1000),
    "recovery_repeat_ns": (100, 340),
    "freeze_ns": (1000, 1000),
    "left_out_ns": (500, 500),
    "isolated_ns": (700, 1180),
    "primary_report_ns": (100, 340),
    "restart_order_ns": (300, 540),
    "min_election_ns": (500, 500),
    "max_election_ns": (1200, 1200),
    "leader_fallback_ns": (1000, 1000),
    "connection_silence_ns": (3500, 3500),
    "initial_retransmit_ns": (500, 500),
    "min_retransmit_ns": (200, 240),
    "min_request_retry_ns": (0, 240),
    "outline_grace_ns": (200, 240),
    "archive_timeout_ns": (2000, 2960),
    "archive_grace_ns": (500, 740),
    "want_interval_ns": (50, 240),
    "stream_silence_ns": (1000, 1000),
}
#: Constants below 500 ms that stay as they are, by the reason.
EXCEPTIONS: Final = {
    "an interval of work that waits for no answer": {
        "shard.ordering.lag_fix.HINT_INTERVAL_NS",
        "shard.ordering.insert_rate.BURST_NS",
        "shard.ordering.plain_inserts.MAX_PLAIN_NS",
        "shard.ordering.plain_inserts.GENERAL_END_INTERVAL_NS",
        "shard.ordering.rate.SAMPLE_INTERVAL_NS",
        "shard.ordering.rate.REPORT_INTERVAL_NS",
        "shard.ordering.rate.MIN_HEARTBEAT_NS",
        "shard.ordering.rate._NO_PAUSE_NS",
        "shard.ordering.watermarks.WATERMARK_DELAY_NS",
        "shard.ordering.forwards.LINGER_NS",
        "shard.ordering.reports.LINGER_AGAIN_NS",
        "shard.ordering.reports.REPORT_LINGER_NS",
        "shard.ordering.epoch_closer.EPOCH_END_DELAY_NS",
        "shard.membership.heartbeat.READERS_HEARTBEAT_NS",
        "shard.membership.heartbeat.STOPPING_HEARTBEAT_NS",
        "shard.recovery.watermark_records.WATERMARK_INTERVAL_NS",
        "shard.ordering.epoch_closer.STREAM_ACTIVE_NS",
        "mms.cursor_moves._INTERVAL_NS",
        "mms.leases._MIN_WEIGHTS_INTERVAL_NS",
        "mms.leases._INTERVAL_PER_MEMBER_NS",
        "mms.read_barriers.INTERVAL_NS",
        "mms.reconfiguration._WANT_NS",
        "mms.trims._WANT_NS",
        "mms.stragglers._HEARTBEAT_NS",
        "mms.stragglers._MIN_INTERVAL_NS",
        "failure_handler.service.TICK_NS",
        "ziplog.client.common.routing._MIN_AGE_NS",
        "ziplog.client.common.routing._SILENT_AGE_NS",
        "ziplog.client.seals.settled_prefix._PAUSE_NS",
    },
    "this machine only: a file, a socket, a process, a step": {
        "shard.membership.draining._SEAL_CHECK_INTERVAL_NS",
        "shard.state.session_tables._PAUSE_NS",
        "ziplog.deploy.restart_policy.FIRST_PAUSE_NS",
        "ziplog.deploy.supervisor_thread._POLL_NS",
        "ziplog.deploy.supervisor_thread._UNCHANGED_NS",
        "ziplog.runtime.driver._FLUSH_RETRY_NS",
        "ziplog.runtime.driver._STEP_BUDGET_NS",
        "ziplog.runtime.listener._RETRY_NS",
        "ziplog.runtime.connection._RETRY_NS",
        "ziplog.runtime.transport._LINGER_NS",
        "ziplog.segments.directory._SETTLED_NS",
    },
    "a pause after an answer, not a time for one": {
        "ziplog.runtime.transport._MAX_NODE_RETRY_NS",
        "mms.leases._REFUSED_NS",
        "ziplog.client.admin.cluster_calls._TRIM_RETRY_NS",
        "ziplog.client.inserts.retransmission.REFUSED_BACKOFF_NS",
        "ziplog.client.reads.frontier_stream._MIN_BACKOFF_NS",
        "ziplog.client.reads.lease_follower._FIRST_RETRY_NS",
    },
    "it follows the measured round trip": {"ziplog.client.reads.read._MIN_NEXT_NS"},
    "`StepContext.retry_at` stretches it": {
        "ziplog.client.bulk.outline._MIN_BACKOFF_NS",
        "ziplog.client.common.membership_client._FIRST_RETRY_NS",
        "ziplog.client.inserts.locate.MIN_BACKOFF_NS",
        "ziplog.client.inserts.sync._MIN_BACKOFF_NS",
        "ziplog.client.reads.barrier._MIN_BACKOFF_NS",
        "ziplog.client.reads.read._MIN_BACKOFF_NS",
        "ziplog.client.reads.read._MIN_RETRANSMIT_NS",
        "ziplog.client.reads.tail._ALL_FROM_NS",
        "ziplog.client.reads.tail._MIN_BACKOFF_NS",
    },
    "a repetition costs one small message while something is amiss": {
        "shard.membership.draining.DRAINED_INTERVAL_NS",
        "shard.membership.draining.LEAVING_INTERVAL_NS",
        "shard.ordering.awaiting_lease.QUERY_INTERVAL_NS",
        "shard.ordering.backup.SETTLE_INTERVAL_NS",
        "shard.recovery.failure_detector.SUSPECT_INTERVAL_NS",
        "ziplog.client.cursors.claims._CLAIM_INTERVAL_NS",
        "ziplog.runtime.publications._RETRY_MS",
    },
    "a bound of a setting": {
        "shard.recovery.failure_detector._LEAST_SUSPICION_MS",
        "ziplog.client.admin.cluster_calls._LEAST_CONTACT_NS",
        "ziplog.core.cursors.MIN_LEASE_MS",
    },
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_local_network_keeps_its_times_and_a_wide_one_stretches_them(name: str) -> None:
    unit = 1 if name.endswith("_ms") else NS_PER_MS
    found = tuple(FUNCTIONS[name](rtt_ms) / unit for rtt_ms in (0, 120))
    assert found == EXPECTED[name]


def test_no_time_for_an_answer_is_shorter_than_the_round_trip() -> None:
    # These are no times for an answer.
    others = {"body_grace_ns", "idle_epoch_interval_ns", "min_lease_ms"}
    for name, function in FUNCTIONS.items():
        for rtt_ms in () if name in others else range(1, 1001, 37):
            assert function(rtt_ms) >= rtt_ms * NS_PER_MS, name


def test_half_a_lease_holds_a_commit_an_announcement_and_a_retry() -> None:
    for rtt_ms in (0, 40, 250, 1000):
        for epoch_ms in (1, 10, 100):
            epochs, _ = shape(epoch_ms, rtt_ms)
            assert epochs * epoch_ms / 2 >= max(80, 3 * rtt_ms)


def test_a_plan_of_leases_takes_the_round_trip() -> None:
    lease = LeasePlan(10, 120).propose((), 0, active=True, other_members=False)
    assert lease.epochs * lease.epoch_ms >= 720


def test_a_server_takes_the_round_trip_of_its_cluster_file() -> None:
    node = Replica("shard-0-0", "host:1")
    config = ReplicaConfig(
        node.name, node.endpoint, 0, 0, (node,), (), "memory", 1, Limits(rtt_ms=120)
    )
    state = ReplicaState(config, MemoryStore(), 1)
    backup, primary = Backup(state), Primary(state, LagFix(state))
    assert backup._body_grace_ns == 32 * NS_PER_MS
    assert backup._request_interval_ns == 180 * NS_PER_MS
    assert primary._forwards._resend_after == 240 * NS_PER_MS
    assert FailureDetector(state, 0)._waiting_ns == 250 * NS_PER_MS
    assert Draining(state)._quiet_ns == 120 * NS_PER_MS


def test_elections_take_several_round_trips_unless_a_node_is_alone() -> None:
    far = [configuration("127.0.0.1:1", index=i, count=3, rtt_ms=500) for i in range(3)]
    ranges = [(one.raftMinTimeout, one.raftMaxTimeout) for one in far]
    assert ranges == [(1.5, 1.75), (2.0, 2.25), (2.5, 2.75)], "two nodes never stand together"
    assert far[0].leaderFallbackTimeout == 2.0
    configuration("127.0.0.1:1", index=2, count=3, rtt_ms=1000).validate()
    alone = configuration("127.0.0.1:1", index=0, count=1, rtt_ms=500)
    assert (alone.raftMinTimeout, alone.raftMaxTimeout) == (0.05, 0.06)


def test_every_short_time_follows_the_round_trip_or_has_a_reason_not_to() -> None:
    listed = [name for names in EXCEPTIONS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(_short_times()) == set(listed)


def _short_times() -> Iterator[str]:
    """Yield the constants named `..._NS` or `..._MS` below 500 ms, with their modules."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            known = dict(UNITS)
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name, value = node.target.id, _value(node.value, known)
                    if value is None:
                        continue
                    known[name] = value
                    limit = 500 * PER_MS[name[-3:]] if name[-3:] in PER_MS else 0
                    if value < limit:
                        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                        yield f"{module}.{name}"


def _value(node: ast.expr | None, known: dict[str, int]) -> int | None:
    """Return the value of an expression of whole numbers and constants; None: it is another."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=ast.Mult() | ast.FloorDiv() as op, right=right):
            one, other = _value(left, known), _value(right, known)
            if one is None or other is None:
                return None
            return one * other if isinstance(op, ast.Mult) else one // other
    return None
