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
    ChangeRegionRequest,
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
from ziplog.core.units import NEVER
from ziplog.core.view import LeaseRun, Member, run_of
from ziplog.errors import (
    ClusterMismatchError,
    ConfigError,
    UnavailableError,
    VersionError,
)
from ziplog.types import RecordId

# --- the service ---


def test_connect_asks_all_endpoints_and_names_them_without_a_reply() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    call = harness.call(ConnectRequest(harness.until(2 * S)))
    assert [name for name, _ in harness.sent] == ["a:1", "b:2"]
    harness.pass_time(2 * S)
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert "at a:1 (no reply), b:2 (no reply); check" in str(error)


def test_the_first_contact_ends_at_once_if_no_node_can_be_reached() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    call = harness.call(ConnectRequest(harness.until()))
    harness.step(ConnectionChanged(b"a:1", "connection refused"))
    assert call not in harness.answers
    harness.step(ConnectionChanged(b"b:2", ""))
    harness.step(ConnectionChanged(b"elsewhere:3", "connection refused"))
    assert call not in harness.answers
    harness.step(ConnectionChanged(b"b:2", "the name does not resolve: unknown"))
    error = harness.answers[call]
    assert type(error) is UnavailableError
    reached = "a:1 (connection refused), b:2 (the name does not resolve: unknown)"
    assert f"at {reached}; check" in str(error)


def node_info(role: str, wire_version: int = wire.VERSION) -> wire.NodeInfo:
    return wire.NodeInfo(
        CLUSTER, 0, role, "x-0", "c", "9.1.0", wire_version, wire_version, ["mms:1"]
    )


def test_a_node_of_another_service_is_named_at_once() -> None:
    harness = ClientHarness(endpoints=["a:1"])
    call = harness.call(ConnectRequest(harness.until()))
    harness.step(Received(b"elsewhere:1", node_info("handler")))
    assert call not in harness.answers
    harness.step(Received(b"a:1", node_info("storage")))
    error = harness.answers[call]
    assert type(error) is UnavailableError
    why = "this is storage server x-0 of cluster 'c'; its membership service is at mms:1"
    assert f"at a:1 ({why});" in str(error)


def test_a_cluster_of_another_version_is_a_version_error() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    call = harness.call(ConnectRequest(harness.until()))
    harness.step(Received(b"a:1", node_info("membership", wire.VERSION + 1)))
    assert call not in harness.answers
    harness.step(ConnectionChanged(b"b:2", "connection refused"))
    error = harness.answers[call]
    assert type(error) is VersionError
    assert f"Ziplog 9.1.0 there speaks wire version {wire.VERSION + 1}, this client" in str(error)


def test_a_client_ignores_descriptions_after_a_reply() -> None:
    harness = ClientHarness(endpoints=["a:1"])
    harness.connect(placement(0))
    call = harness.call(StatusRequest(harness.until(S)))
    for name in (b"a:1", SERVICE.encode()):
        harness.step(Received(name, node_info("membership", wire.VERSION + 1)))
    assert call not in harness.answers
    assert not harness.failures


def test_a_cluster_that_uses_a_later_version_fails_all_calls() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    assert harness.core._routing.wire == 1
    harness.call(TailRequest(harness.until(60 * S)))
    harness.pass_time(2 * S)
    hello = next(message for _, message in reversed(harness.sent) if type(message) is wire.Hello)
    reply = msgspec.structs.replace(info(hello.request, [placement(0)], []), wire=2)
    harness.step(Received(SERVICE.encode(), reply))
    [error] = harness.failures
    assert type(error) is VersionError
    known = "uses wire version 2, but this client knows 1: install a release that knows 2"
    assert known in str(error)


def test_an_upgrade_is_finished_or_the_obstacle_is_named() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    for wire_in_use, obstacle in ((1, "shard-0-1 is down"), (2, "")):
        call = harness.call(FinishUpgradeRequest(harness.until(S), 2))
        request = next(m for _, m in reversed(harness.sent) if type(m) is wire.FinishUpgrade)
        assert request.wire == 2
        reply = wire.UpgradeFinished(CLUSTER, request.request, wire_in_use, obstacle)
        harness.step(Received(SERVICE.encode(), reply))
        if obstacle:
            error = harness.answers[call]
            assert type(error) is UnavailableError
            assert "still uses wire version 1, because not all nodes know version 2:" in str(error)
            assert f"version 2: {obstacle}. Start a release there" in str(error)
        else:
            assert harness.answers[call] == 2
    call = harness.call(StatusRequest(harness.until(S)))
    harness.pass_time(S)
    assert "did not send the status before the deadline" in str(harness.answers[call])
    call = harness.call(FinishUpgradeRequest(harness.until(S), 2))
    harness.pass_time(S)
    assert "did not confirm the use of wire version 2" in str(harness.answers[call])


@pytest.mark.parametrize(
    ("is_lost", "what"), [(True, "eu is given up"), (False, "eu counts again")]
)
def test_a_region_is_changed_or_the_obstacle_is_named(is_lost: bool, what: str) -> None:
    harness = ClientHarness()
    harness.connect(placement(0, regions=("eu", "us")))
    for obstacle in ("shard-0-1 may run", ""):
        call = harness.call(ChangeRegionRequest(harness.until(S), "eu", is_lost))
        request = next(m for _, m in reversed(harness.sent) if type(m) is wire.ChangeRegion)
        assert (request.region, request.is_lost) == ("eu", is_lost)
        harness.step(Received(SERVICE.encode(), wire.UpgradeFinished(CLUSTER, request.request, 1)))
        assert call not in harness.answers
        reply = wire.RegionChanged(CLUSTER, request.request, "eu", obstacle)
        harness.step(Received(SERVICE.encode(), reply))
        if obstacle:
            error = harness.answers[call]
            assert type(error) is UnavailableError
            assert f"does not give up region eu: {obstacle}" in str(error)
        else:
            assert harness.answers[call] is None
    call = harness.call(ChangeRegionRequest(harness.until(S), "eu", is_lost))
    harness.take(wire.ChangeRegion)
    harness.pass_time(S)
    numbers = {message.request for _, message in harness.take(wire.ChangeRegion)}
    assert len(numbers) == 1, "it is repeated until it is answered"
    assert f"did not confirm that region {what}" in str(harness.answers[call])


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_region_without_servers_is_refused_with_those_that_exist(is_lost: bool) -> None:
    harness = ClientHarness()
    known = placement(0, regions=("us", "eu"))
    harness.connect(known)

    def changed(region: str) -> int:
        call = harness.call(ChangeRegionRequest(harness.until(S), region, is_lost))
        (_, request), *_ = harness.take(wire.ChangeRegion)
        obstacle = "no storage server is there" if is_lost else ""
        reply = wire.RegionChanged(CLUSTER, request.request, region, obstacle)
        harness.step(Received(SERVICE.encode(), reply))
        return call

    call = changed("ue")
    harness.inform(known)
    error = harness.answers[call]
    assert type(error) is ConfigError
    assert "is in region ue; give one with storage servers: eu, us" in str(error)
    call = changed("ap")
    assert call not in harness.answers, "a shard may have been added there"
    harness.inform(known, placement(1, regions=("ap", "eu")))
    assert type(harness.answers[call]) is (UnavailableError if is_lost else type(None))


def test_all_calls_fail_if_all_nodes_that_can_be_reached_are_of_another_cluster() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    harness.connect(placement(0))
    refusal = wire.Refused(CLUSTER + 1, 0, 0, 0, 1, "wrong-cluster", "this is another one")
    harness.step(ConnectionChanged(SERVICE.encode(), "connection refused"))
    harness.step(Received(b"a:1", refusal))
    harness.step(Received(b"127.0.0.1:8000", refusal))  # A storage server does not count.
    assert not harness.failures
    harness.step(Received(b"b:2", refusal))
    [error] = harness.failures
    assert isinstance(error, ClusterMismatchError)
    assert (error.expected, error.found) == (f"{CLUSTER:032x}", f"{CLUSTER + 1:032x}")
    assert error.endpoint == "b:2"
    assert not error.retriable
    assert vars(copy(error)) == vars(error)


def test_a_node_counts_no_longer_as_another_clusters_once_its_process_changed() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    harness.connect(placement(0))
    refusal = wire.Refused(CLUSTER + 1, 0, 0, 0, 1, "wrong-cluster", "this is another one")
    for name in (b"a:1", SERVICE.encode()):
        harness.step(Received(name, refusal))
    harness.step(ConnectionChanged(b"a:1", ""))
    harness.step(Received(b"b:2", refusal))
    assert not harness.failures


def test_a_silent_node_is_distinguished_from_an_absent_one() -> None:
    harness = ClientHarness(endpoints=["a:1"])
    call = harness.call(ConnectRequest(harness.until(S)))
    harness.step(ConnectionChanged(b"a:1", ""))
    harness.pass_time(S)
    text = str(harness.answers[call])
    assert "at a:1 (something listens there, but does not reply: no Ziplog node, or" in text


def test_a_client_that_reached_its_cluster_waits_for_nodes_that_restart() -> None:
    harness = ClientHarness(endpoints=["a:1"])
    harness.connect(placement(0))
    call = harness.call(StatusRequest(harness.until(S)))
    for name in (b"a:1", SERVICE.encode()):
        harness.step(ConnectionChanged(name, "connection refused"))
    assert call not in harness.answers
    [(_, request)] = harness.take(wire.StatusQuery)
    harness.give(wire.StatusReply(CLUSTER, request.request, b"{}"))
    assert harness.answers[call] == b"{}"


def test_later_requests_go_to_the_leader_and_follow_it() -> None:
    harness = ClientHarness(endpoints=["a:1", "b:2"])
    harness.connect(placement(0))
    call = harness.call(StatusRequest(harness.until()))
    [(name, request)] = harness.take(wire.StatusQuery)
    assert name == SERVICE
    harness.give(wire.NotLeader(CLUSTER, request.request, "new:3"))
    [(name, again)] = harness.take(wire.StatusQuery)
    assert (name, again.request) == ("new:3", request.request)
    harness.give(wire.NotLeader(CLUSTER, request.request, SERVICE))
    assert not harness.take(wire.StatusQuery), "two nodes redirect to each other"
    harness.pass_time(150 * MS)
    assert {name for name, _ in harness.take(wire.StatusQuery)} >= {SERVICE, "new:3", "a:1", "b:2"}
    harness.give(wire.StatusReply(CLUSTER, request.request, b"{}"))
    assert harness.answers[call] == b"{}"


def test_a_message_of_another_cluster_is_dropped_and_counted() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    call = harness.insert(b"x")
    insert = harness.take(wire.Insert)[0][1]
    harness.give(*(ack(insert, server, [1], cluster=8) for server in (0, 1)))
    assert call not in harness.answers
    assert harness.core.counters.protocol_errors == 2


def test_a_message_that_only_servers_may_get_is_counted() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    harness.give(wire.Report(CLUSTER, 0, 1, 1, 1, 1, 1))
    assert harness.core.counters.protocol_errors == 1


def test_client_without_pending_calls_sends_nothing() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    harness.sent.clear()
    harness.pass_time(3600 * S)
    assert not harness.sent
    assert harness.core.next_wakeup() is None


def test_placements_are_requested_once_a_second_while_a_call_is_pending() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    harness.call(ReadRequest(harness.until(60 * S), RecordId(1, 0)))
    times = 0
    for _ in range(100):
        harness.pass_time(100 * MS)
        for _, hello in harness.take(wire.Hello):
            times += 1
            harness.give(info(hello.request, [placement(0)], []))
    assert 8 <= times <= 12


def test_an_older_view_does_not_replace_a_newer_one() -> None:
    harness = ClientHarness()
    harness.connect(placement(0, view=3))
    harness.insert(b"x", timeout=60 * S)
    harness.pass_time(2 * S)
    harness.take(wire.Insert)
    harness.inform(placement(0, view=2))
    harness.pass_time(2 * S)
    assert {m.view for _, m in harness.take(wire.Insert)} == {3}


def test_replicas_are_connected_on_use_and_disconnected_when_they_move() -> None:
    harness = ClientHarness()
    harness.connect(*(placement(shard) for shard in range(100)))
    assert len(harness.connected) == 1
    harness.insert(b"x", timeout=60 * S)
    assert harness.connected[1:] == ["Connect s0r0:1", "Connect s0r1:1"]
    harness.pass_time(1100 * MS)
    harness.inform(msgspec.structs.replace(placement(7), shard=0, view=2))
    assert set(harness.connected[3:]) == {
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
    harness = ClientHarness()
    harness.connect(placement(0), placement(1), leases=[run_of(lease([0, 1]))])
    subscription = harness.call(SubscribeRequest(harness.until(), RecordId(1, 0), True))
    request = harness.take(wire.LeaseQuery)[-1][1]
    harness.give(wire.LeaseHistory(CLUSTER, request.request, [run_of(lease([0, 1]))], [], 0))
    requests = [
        ReadRequest(harness.until(), RecordId(3, 0)),
        TailRequest(harness.until()),
        TrimRequest(harness.until(), RecordId(3, 0)),
        FetchRequest(NEVER, subscription, 10),
        ChangeRequest(harness.until(), 1, "remove"),
    ]
    for request in requests:
        harness.call(request)
    done = harness.insert(b"w")
    insert = harness.take(wire.Insert)[0][1]
    harness.give(*(ack(insert, server, [1]) for server in (0, 1)))
    assert done in harness.answers
    harness.call(SyncRequest(harness.until()))
    harness.insert(b"x")
    doubtful = harness.insert(*[b"y"] * 300, timeout=0)
    harness.pass_time(0)
    error: Any = harness.answers[doubtful]
    harness.call(ResolveRequest(harness.until(), error.doubt))
    if data.draw(st.booleans()):
        state = data.draw(st.sampled_from(["parked", "leaving", "finalized"]))
        view = data.draw(st.integers(1, 2))
        harness.core._routing.update_placements([placement(0, view=view, state=state)])
    numbers = sorted({m.request for _, m in harness.sent if hasattr(m, "request")} | {1, 2})
    numbers += sorted({m.subscription for _, m in harness.sent if hasattr(m, "subscription")})
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
        harness.give(kind(**known))
        if data.draw(st.booleans()):
            harness.pass_time(data.draw(st.integers(0, 2 * S)))


def test_the_same_events_at_the_same_times_have_the_same_effects() -> None:
    traces = []
    for _ in range(2):
        harness = ClientHarness()
        harness.connect(placement(0), placement(1))
        calls = [harness.insert(b"x") for _ in range(3)]
        insert = harness.take(wire.Insert)[0][1]
        harness.give(refused(insert, 0, "full"), refused(insert, 1, "full"))
        harness.pass_time(3 * S)
        traces.append((harness.sent, calls))
    assert traces[0] == traces[1]


def test_an_early_wakeup_and_an_unknown_cancellation_do_nothing() -> None:
    harness = ClientHarness()
    harness.connect(placement(0))
    harness.insert(b"x")
    harness.sent.clear()
    harness.step(Wakeup())
    harness.step(BatchEnd())
    harness.cancel(99)
    harness.step(Received(b"", info(1, [], [])))
    assert not harness.sent
    with pytest.raises(KeyError):
        harness.step(Call(5, "no request"))
