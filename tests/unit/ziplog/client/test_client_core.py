"""Membership requests, routes and leases of the client node; and random input."""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLIENT,
    CLUSTER,
    MS,
    SERVICE,
    ClientHarness,
    S,
    ack,
    info,
    lease,
    placement,
    refused,
)
from ziplog import wire
from ziplog.client.common.lease_map import LeaseMap
from ziplog.client.common.requests import (
    NEVER,
    ChangeRequest,
    ConnectRequest,
    FetchRequest,
    FinishUpgradeRequest,
    ReadRequest,
    StatusRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.core.entries import Body, Unit, encode_body
from ziplog.core.node import BatchEnd, Call, ConnectionChanged, Received, Wakeup
from ziplog.core.view import LeaseRun, Member, run_of
from ziplog.errors import (
    ClusterMismatchError,
    UnavailableError,
    VersionError,
)
from ziplog.types import RecordId

# --- the service ---


def test_connect_asks_all_endpoints_and_names_them_without_a_reply() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    call = glass.call(ConnectRequest(glass.until(2 * S)))
    assert [name for name, _ in glass.sent] == ["a:1", "b:2"]
    glass.pass_time(2 * S)
    error = glass.answers[call]
    assert type(error) is UnavailableError
    assert "at a:1 (no reply), b:2 (no reply); check" in str(error)


def test_the_first_contact_ends_at_once_if_no_node_can_be_reached() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    call = glass.call(ConnectRequest(glass.until()))
    glass.step(ConnectionChanged(b"a:1", "connection refused"))
    assert call not in glass.answers
    glass.step(ConnectionChanged(b"b:2", ""))
    glass.step(ConnectionChanged(b"elsewhere:3", "connection refused"))
    assert call not in glass.answers
    glass.step(ConnectionChanged(b"b:2", "the name does not resolve: unknown"))
    error = glass.answers[call]
    assert type(error) is UnavailableError
    reached = "a:1 (connection refused), b:2 (the name does not resolve: unknown)"
    assert f"at {reached}; check" in str(error)


def node_info(role: str, wire_version: int = wire.VERSION) -> wire.NodeInfo:
    return wire.NodeInfo(
        CLUSTER, 0, role, "x-0", "c", "9.1.0", wire_version, wire_version, ["mms:1"]
    )


def test_a_node_of_another_service_is_named_at_once() -> None:
    glass = ClientHarness(endpoints=["a:1"])
    call = glass.call(ConnectRequest(glass.until()))
    glass.step(Received(b"elsewhere:1", node_info("handler")))
    assert call not in glass.answers
    glass.step(Received(b"a:1", node_info("storage")))
    error = glass.answers[call]
    assert type(error) is UnavailableError
    why = "this is storage server x-0 of cluster 'c'; its membership service is at mms:1"
    assert f"at a:1 ({why});" in str(error)


def test_a_cluster_of_another_version_is_a_version_error() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    call = glass.call(ConnectRequest(glass.until()))
    glass.step(Received(b"a:1", node_info("membership", wire.VERSION + 1)))
    assert call not in glass.answers
    glass.step(ConnectionChanged(b"b:2", "connection refused"))
    error = glass.answers[call]
    assert type(error) is VersionError
    assert f"Ziplog 9.1.0 there speaks wire version {wire.VERSION + 1}, this client" in str(error)


def test_a_client_ignores_descriptions_after_a_reply() -> None:
    glass = ClientHarness(endpoints=["a:1"])
    glass.connect(placement(0))
    call = glass.call(StatusRequest(glass.until(S)))
    for name in (b"a:1", SERVICE.encode()):
        glass.step(Received(name, node_info("membership", wire.VERSION + 1)))
    assert call not in glass.answers
    assert not glass.failures


def test_a_cluster_that_uses_a_later_version_fails_all_calls() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    assert glass.core._routing.wire == 1
    glass.call(TailRequest(glass.until(60 * S)))
    glass.pass_time(2 * S)
    hello = next(message for _, message in reversed(glass.sent) if type(message) is wire.Hello)
    reply = msgspec.structs.replace(info(hello.request, [placement(0)], []), wire=2)
    glass.step(Received(SERVICE.encode(), reply))
    [error] = glass.failures
    assert type(error) is VersionError
    known = "uses wire version 2, but this client knows 1: install a release that knows 2"
    assert known in str(error)


def test_an_upgrade_is_finished_or_the_obstacle_is_named() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    for wire_in_use, obstacle in ((1, "shard-0-1 is down"), (2, "")):
        call = glass.call(FinishUpgradeRequest(glass.until(S), 2))
        request = next(m for _, m in reversed(glass.sent) if type(m) is wire.FinishUpgrade)
        assert request.wire == 2
        reply = wire.UpgradeFinished(CLUSTER, request.request, wire_in_use, obstacle)
        glass.step(Received(SERVICE.encode(), reply))
        if obstacle:
            error = glass.answers[call]
            assert type(error) is UnavailableError
            assert "still uses wire version 1, because not all nodes know version 2:" in str(error)
            assert f"version 2: {obstacle}. Start a release there" in str(error)
        else:
            assert glass.answers[call] == 2
    call = glass.call(FinishUpgradeRequest(glass.until(S), 2))
    glass.pass_time(S)
    assert "did not confirm the use of wire version 2" in str(glass.answers[call])


def test_all_calls_fail_if_all_nodes_that_can_be_reached_are_of_another_cluster() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    glass.connect(placement(0))
    refusal = wire.Refused(CLUSTER + 1, 0, 0, 0, 1, "wrong-cluster", "this is another one")
    glass.step(ConnectionChanged(SERVICE.encode(), "connection refused"))
    glass.step(Received(b"a:1", refusal))
    glass.step(Received(b"127.0.0.1:8000", refusal))  # A storage server does not count.
    assert not glass.failures
    glass.step(Received(b"b:2", refusal))
    [error] = glass.failures
    assert isinstance(error, ClusterMismatchError)
    assert (error.expected, error.found) == (f"{CLUSTER:032x}", f"{CLUSTER + 1:032x}")
    assert error.endpoint == "b:2"
    assert not error.retriable
    assert vars(copy(error)) == vars(error)


def test_a_node_counts_no_longer_as_another_clusters_once_its_process_changed() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    glass.connect(placement(0))
    refusal = wire.Refused(CLUSTER + 1, 0, 0, 0, 1, "wrong-cluster", "this is another one")
    for name in (b"a:1", SERVICE.encode()):
        glass.step(Received(name, refusal))
    glass.step(ConnectionChanged(b"a:1", ""))
    glass.step(Received(b"b:2", refusal))
    assert not glass.failures


def test_a_silent_node_is_distinguished_from_an_absent_one() -> None:
    glass = ClientHarness(endpoints=["a:1"])
    call = glass.call(ConnectRequest(glass.until(S)))
    glass.step(ConnectionChanged(b"a:1", ""))
    glass.pass_time(S)
    text = str(glass.answers[call])
    assert "at a:1 (something listens there, but does not reply: no Ziplog node, or" in text


def test_a_client_that_reached_its_cluster_waits_for_nodes_that_restart() -> None:
    glass = ClientHarness(endpoints=["a:1"])
    glass.connect(placement(0))
    call = glass.call(StatusRequest(glass.until(S)))
    for name in (b"a:1", SERVICE.encode()):
        glass.step(ConnectionChanged(name, "connection refused"))
    assert call not in glass.answers
    [(_, request)] = glass.take(wire.StatusQuery)
    glass.give(wire.StatusReply(CLUSTER, request.request, b"{}"))
    assert glass.answers[call] == b"{}"


def test_later_requests_go_to_the_leader_and_follow_it() -> None:
    glass = ClientHarness(endpoints=["a:1", "b:2"])
    glass.connect(placement(0))
    call = glass.call(StatusRequest(glass.until()))
    [(name, request)] = glass.take(wire.StatusQuery)
    assert name == SERVICE
    glass.give(wire.NotLeader(CLUSTER, request.request, "new:3"))
    [(name, again)] = glass.take(wire.StatusQuery)
    assert (name, again.request) == ("new:3", request.request)
    glass.give(wire.NotLeader(CLUSTER, request.request, SERVICE))
    assert not glass.take(wire.StatusQuery), "two nodes redirect to each other"
    glass.pass_time(150 * MS)
    assert {name for name, _ in glass.take(wire.StatusQuery)} >= {SERVICE, "new:3", "a:1", "b:2"}
    glass.give(wire.StatusReply(CLUSTER, request.request, b"{}"))
    assert glass.answers[call] == b"{}"


def test_a_message_of_another_cluster_is_dropped_and_counted() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    call = glass.insert(b"x")
    insert = glass.take(wire.Insert)[0][1]
    glass.give(*(ack(insert, server, [1], cluster=8) for server in (0, 1)))
    assert call not in glass.answers
    assert glass.core.counters.protocol_errors == 2


def test_a_message_that_only_servers_may_get_is_counted() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    glass.give(wire.Report(CLUSTER, 0, 1, 1, 1, 1, 1))
    assert glass.core.counters.protocol_errors == 1


def test_client_without_pending_calls_sends_nothing() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    glass.sent.clear()
    glass.pass_time(3600 * S)
    assert not glass.sent
    assert glass.core.next_wakeup() is None


def test_placements_are_requested_once_a_second_while_a_call_is_pending() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    glass.call(ReadRequest(glass.until(60 * S), RecordId(1, 0)))
    times = 0
    for _ in range(100):
        glass.pass_time(100 * MS)
        for _, hello in glass.take(wire.Hello):
            times += 1
            glass.give(info(hello.request, [placement(0)], []))
    assert 8 <= times <= 12


def test_an_older_view_does_not_replace_a_newer_one() -> None:
    glass = ClientHarness()
    glass.connect(placement(0, view=3))
    glass.insert(b"x", timeout=60 * S)
    glass.pass_time(2 * S)
    glass.take(wire.Insert)
    glass.inform(placement(0, view=2))
    glass.pass_time(2 * S)
    assert {m.view for _, m in glass.take(wire.Insert)} == {3}


def test_replicas_are_connected_on_use_and_disconnected_when_they_move() -> None:
    glass = ClientHarness()
    glass.connect(*(placement(shard) for shard in range(100)))
    assert len(glass.connected) == 1
    glass.insert(b"x", timeout=60 * S)
    assert glass.connected[1:] == ["Connect s0r0:1", "Connect s0r1:1"]
    glass.pass_time(1100 * MS)
    glass.inform(msgspec.structs.replace(placement(7), shard=0, view=2))
    assert set(glass.connected[3:]) == {
        "Disconnect s0r0:1", "Disconnect s0r1:1", "Connect s7r0:1", "Connect s7r1:1",
    }  # fmt: skip


# --- leases ---


@given(data=st.data())
def test_leases_learned_in_any_pieces_are_as_good_as_all_at_once(data: st.DataObject) -> None:
    all_leases = [lease([0], size=10)]
    for _ in range(data.draw(st.integers(1, 12))):
        members = data.draw(st.sampled_from([None, (Member(0, 1, 1), Member(1, 1, 1))]))
        all_leases.append(all_leases[-1].following(members))
    known = LeaseMap()
    known.extend([run_of(all_leases[0])])
    for _ in range(30):
        start = data.draw(st.integers(0, len(all_leases) - 1))
        stop = data.draw(st.integers(start + 1, len(all_leases)))
        before = known.stop
        is_whole = known.extend(runs_of(all_leases[start:stop]))
        assert is_whole == (all_leases[start].base <= before)
        assert known.stop == max(before, all_leases[stop - 1].stop if is_whole else 0)
    for gsn in range(1, known.stop):
        expected = next(one for one in all_leases if gsn < one.stop)
        found = known.lease_at(gsn)
        assert found is not None
        assert (found.number, found.base, found.members) == (
            expected.number, expected.base, expected.members,
        )  # fmt: skip
    assert known.lease_at(known.stop) is None


def runs_of(leases: list[Any]) -> list[LeaseRun]:
    """Run-length encode."""
    runs: list[LeaseRun] = []
    for one in leases:
        if runs and runs[-1].last.repeats(one):
            runs[-1] = LeaseRun(runs[-1].first, runs[-1].count + 1, one)
        else:
            runs.append(run_of(one))
    return runs


# --- random messages ---

TYPES = [
    wire.InsertAck, wire.Refused, wire.ReadReply, wire.Deliver, wire.Trimmed, wire.Frontier,
    wire.TailReply, wire.NotLeader, wire.TrimReply, wire.StatusReply,
    wire.Located, wire.Synced, wire.Leaving, wire.ShardChanged,
]  # fmt: skip


ERRORS: dict[type, list[str]] = {
    wire.TrimReply: ["", "no-such-position", "not-stable"],
    wire.ShardChanged: [
        "",
        "no-such-shard",
        "exists",
        "last-shard",
        "wrong-size",
        "retired",
        "too-many",
    ],
}


@examples(60)
@given(data=st.data())
def test_no_message_breaks_a_client(data: st.DataObject) -> None:
    glass = ClientHarness()
    glass.connect(placement(0), placement(1), leases=[run_of(lease([0, 1]))])
    subscription = glass.call(SubscribeRequest(glass.until(), RecordId(1, 0), True))
    request = glass.take(wire.LeaseQuery)[-1][1]
    glass.give(wire.LeaseHistory(CLUSTER, request.request, [run_of(lease([0, 1]))], [], 0))
    requests = [
        ReadRequest(glass.until(), RecordId(3, 0)),
        TailRequest(glass.until()),
        TrimRequest(glass.until(), RecordId(3, 0)),
        FetchRequest(NEVER, subscription, 10),
        ChangeRequest(glass.until(), 1, "remove"),
    ]
    for request in requests:
        glass.call(request)
    done = glass.insert(b"w")
    insert = glass.take(wire.Insert)[0][1]
    glass.give(*(ack(insert, server, [1]) for server in (0, 1)))
    assert done in glass.answers
    glass.call(SyncRequest(glass.until()))
    glass.insert(b"x")
    doubtful = glass.insert(*[b"y"] * 300, timeout=0)
    glass.pass_time(0)
    error: Any = glass.answers[doubtful]
    glass.call(ResolveRequest(glass.until(), error.doubt))
    if data.draw(st.booleans()):
        state = data.draw(st.sampled_from(["parked", "leaving", "finalized"]))
        view = data.draw(st.integers(1, 2))
        glass.core._routing.update_placements([placement(0, view=view, state=state)])
    numbers = sorted({m.request for _, m in glass.sent if hasattr(m, "request")} | {1, 2})
    numbers += sorted({m.subscription for _, m in glass.sent if hasattr(m, "subscription")})
    small = st.integers(0, 12)
    for _ in range(12):
        kind = data.draw(st.sampled_from(TYPES))
        fields: dict[str, Any] = {
            "cluster": CLUSTER,
            "shard": data.draw(st.integers(0, 3)),
            "view": data.draw(st.integers(0, 2)),
            "server": data.draw(st.integers(0, 3)),
            "seq": data.draw(st.integers(0, 4)),
            "client": CLIENT,
            "verdict": data.draw(st.sampled_from(["present", "absent", "pending"])),
            "counter": data.draw(small),
            "incarnation": 1,
            "confirmed": data.draw(st.booleans()),
            "gsns": data.draw(st.lists(small, min_size=1, max_size=3)),
            "code": data.draw(st.sampled_from(wire.RefusalCode.__args__)),  # type: ignore[attr-defined]
            "answer": data.draw(st.sampled_from(wire.Answer.__args__)),  # type: ignore[attr-defined]
            "units": data.draw(
                st.lists(
                    st.builds(
                        Unit, small, st.lists(small, min_size=1, max_size=2),
                        st.sampled_from([b"", encode_body(Body(0, None, [b"x"]))]),
                    ),
                    max_size=2,
                )
            ),
            "start": data.draw(st.integers(0, 3)),
            "leader": data.draw(st.sampled_from(["", SERVICE, "x:1"])),
            "document": b"{}",
            "error": data.draw(st.sampled_from(ERRORS.get(kind, [""]))),
            "stable": data.draw(small) if kind is wire.Deliver else data.draw(st.booleans()),
        }  # fmt: skip
        for name in ("request", "subscription"):
            fields[name] = data.draw(st.sampled_from(numbers))
        for name in ("gsn", "frontier", "first", "filled", "trim", "last_below", "durable"):
            fields[name] = data.draw(small)
        known = {f: v for f, v in fields.items() if f in kind.__struct_fields__}
        glass.give(kind(**known))
        if data.draw(st.booleans()):
            glass.pass_time(data.draw(st.integers(0, 2 * S)))


def test_the_same_events_at_the_same_times_have_the_same_effects() -> None:
    traces = []
    for _ in range(2):
        glass = ClientHarness()
        glass.connect(placement(0), placement(1))
        calls = [glass.insert(b"x") for _ in range(3)]
        insert = glass.take(wire.Insert)[0][1]
        glass.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
        glass.pass_time(3 * S)
        traces.append((glass.sent, calls))
    assert traces[0] == traces[1]


def test_an_early_wakeup_and_an_unknown_cancellation_do_nothing() -> None:
    glass = ClientHarness()
    glass.connect(placement(0))
    glass.insert(b"x")
    glass.sent.clear()
    glass.step(Wakeup())
    glass.step(BatchEnd())
    glass.cancel(99)
    glass.step(Received(b"", info(1, [], [])))
    assert not glass.sent
    with pytest.raises(KeyError):
        glass.step(Call(5, "no request"))
