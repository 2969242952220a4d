"""Recovery in the thesis, claim by claim: one test for each, in the order of section 4.2.5.

Quotations are from Cong Ding, *Building a Scalable Shared Log* (Cornell 2020). The tests run the
real state machines, failure handler included, in virtual time.
"""

from __future__ import annotations

import pytest

from tests.cluster import PureCluster
from tests.world import MS, US, Link, S, shard_names
from ziplog import policy
from ziplog.core.entries import Skip
from ziplog.errors import TrimmedError
from ziplog.wire import Suspect


@pytest.fixture
def watched() -> PureCluster:
    """Return a cluster with a failure handler that has been idle for a while."""
    cluster = PureCluster(shards=2, f=1, handler=True)
    cluster.run(6 * S)
    return cluster


def test_4_2_5_a_failed_server_suspends_inserts_of_its_shard_only(watched: PureCluster) -> None:
    """'the shard is temporarily unable to process insert requests (though it remains available...)'

    Other shards continue, and old records stay readable.
    """
    pinned = watched.client("pinned", policy.pin(0))
    other = watched.client("other", policy.pin(1))
    rid = pinned.insert(b"before")
    watched.run(100 * MS)
    watched.kill("shard-0-0", for_ns=60 * S)
    watched.run(3 * S)
    waiting = pinned.begin(pinned.inserting([b"during"], timeout=30 * S))
    watched.run(5 * S)
    assert (pinned.name, waiting) not in watched.world.completed
    assert other.insert(b"elsewhere").shard == 1
    assert other.read(rid).payload == b"before"
    watched.run(60 * S)
    assert watched.is_whole()


def test_4_2_5_servers_report_suspected_failures_to_the_handler(watched: PureCluster) -> None:
    """'Storage servers report suspected failures to their failure handler.'"""
    watched.world.paused.add("shard-0-1")
    watched.run(1500 * MS)
    (suspect, *_) = watched.sent("shard-0-0", Suspect)
    assert (suspect.shard, suspect.suspects) == (0, [1])


def test_4_2_5_the_reporting_server_promises_to_store_no_new_records(watched: PureCluster) -> None:
    """'the storage server promises the failure handler that it will no longer store new records'"""
    alice = watched.client("alice", policy.pin(0))
    watched.kill("shard-0-0", for_ns=60 * S)
    assert watched.run_until(
        lambda: watched.state("shard-0-1").server_state in {"frozen", "joined"}
    )
    last = watched.world.stores["shard-0-1"].last_fseq
    alice.begin(alice.inserting([b"new"], timeout=5 * S))
    watched.run(3 * S)
    assert watched.world.stores["shard-0-1"].last_fseq == last


def test_4_2_5_filled_positions_are_rolled_forward_stable_or_not(watched: PureCluster) -> None:
    """'recovery must necessarily roll forward ... the records s currently holds'

    The client has its ack; the primary fails before it could confirm anything.
    """
    world = watched.world
    world.links["shard-0-0", "shard-0-1"] = Link(lose=lambda: True)
    alice = watched.client("alice", policy.pin(0))
    rid = alice.insert(b"acked, not stable")
    assert watched.state("shard-0-1").stream.last_record < rid.gsn
    watched.kill("shard-0-0")
    world.links.clear()
    assert watched.run_until(watched.is_whole, 20 * S)
    assert alice.read(rid).payload == b"acked, not stable"
    assert all(world.stores[name].find(rid.gsn) is not None for name in shard_names(0, 1))


def test_4_2_5_unfilled_positions_become_no_ops(watched: PureCluster) -> None:
    """'these log positions can be safely filled with no-ops'

    Up to the end of the shard's leases; positions held only by the failed primary are included.
    """
    world = watched.world
    world.links["alice", "shard-0-1"] = world.links["shard-0-0", "shard-0-1"] = Link(
        lose=lambda: True
    )
    alice = watched.client("alice", policy.pin(0))
    alice.begin(alice.inserting([b"at the primary only"], timeout=1 * S))
    watched.run(500 * MS)
    gsn = watched.state("shard-0-0").stream.last_record
    assert gsn
    watched.kill("shard-0-0")
    watched.run(3 * S)
    assert watched.state("shard-0-1").view > 1
    entry = world.stores["shard-0-1"].find(gsn)
    assert entry is not None
    assert isinstance(entry.decision, Skip)


def test_4_2_5_a_server_that_fails_while_its_state_is_acquired_is_not_relied_on() -> None:
    """'it would be unsafe ... to start roll-forward recovery while relying on an incomplete state'

    The handler acquires another server's state: with at most f failures, one is left.
    """
    cluster = PureCluster(shards=1, f=2, handler=True)
    cluster.run(6 * S)
    alice = cluster.client("alice", policy.pin(0))
    rid = alice.insert(b"kept")
    cluster.kill("shard-0-0", for_ns=30 * S)
    assert cluster.run_until(
        lambda: any(cluster.state(name).server_state == "frozen" for name in shard_names(0, 2)[1:])
    )
    (frozen,) = [n for n in shard_names(0, 2)[1:] if cluster.state(n).server_state == "frozen"]
    cluster.kill(frozen, for_ns=30 * S)
    (last,) = {"shard-0-1", "shard-0-2"} - {frozen}
    assert cluster.run_until(lambda: cluster.state(last).server_state == "joined", 20 * S)
    assert cluster.run_until(cluster.is_whole, 60 * S)
    assert alice.read(rid).payload == b"kept"


def test_4_2_5_the_membership_service_removes_the_shard_and_takes_it_back(
    watched: PureCluster,
) -> None:
    """'The MMS temporarily removes the shard from the configuration ... re-inserts the recovered
    shard in the configuration using its original shard identifier.'
    """
    machine = watched.groups["mms-0"].machine
    watched.kill("shard-0-0", for_ns=5 * S)
    assert watched.run_until(lambda: machine.placements[0].state == "recovering", 5 * S)
    assert watched.run_until(lambda: {m.shard for m in machine.last.members} == {1}, 5 * S)
    limit = watched.state("shard-0-1").stream.end
    assert watched.run_until(watched.is_whole, 20 * S)
    assert {m.shard for m in machine.last.members} == {0, 1}
    assert machine.placements[0].view > 1
    alice = watched.client("alice", policy.pin(0))
    assert alice.insert(b"again").gsn >= limit, "in epochs after those that were recovered"


def test_4_2_5_trimmed_positions_are_not_rolled_forward(watched: PureCluster) -> None:
    """'(unless the corresponding log positions have been trimmed)'"""
    alice = watched.client("alice", policy.pin(0))
    rids = [alice.insert(b"%d" % n) for n in range(6)]
    alice.trim(rids[3])
    watched.world.stores["shard-0-1"] = type(watched.world.stores["shard-0-1"])()
    watched.kill("shard-0-1")
    assert watched.run_until(watched.is_whole, 20 * S)
    with pytest.raises(TrimmedError):
        alice.read(rids[0])
    assert watched.state("shard-0-1").trim == rids[3].gsn
    assert alice.read(rids[4]).payload == b"4"


def test_4_2_5_servers_reject_duplicates(watched: PureCluster) -> None:
    """'all storage servers reject duplicate records received from client libraries'

    They ack the record's slots again, also after a recovery.
    """
    world = watched.world
    world.link.repeat = lambda: True
    alice = watched.client("alice", policy.pin(0))
    rids = [alice.insert(b"%d" % n) for n in range(5)]
    watched.kill("shard-0-0")
    pending = alice.begin(alice.inserting([b"5"], timeout=30 * S))
    rids += alice.end(pending)
    assert watched.run_until(watched.is_whole, 20 * S)
    assert [(r.rid, r.payload) for r in alice.read_all()] == [
        (rid, b"%d" % n) for n, rid in enumerate(rids)
    ]


def test_4_2_5_a_backup_removes_other_copies_of_a_record() -> None:
    """'backup servers ... remove any other copies of R in other slots before storing R in slot j'

    So the survivor of a recovery holds the record once.
    """
    cluster = PureCluster(shards=1, f=1, handler=True)
    cluster.run(6 * S)
    world = cluster.world
    alice, bob = (cluster.client(name, policy.pin(0)) for name in ("alice", "bob"))
    world.links["alice", "shard-0-0"] = Link(delay=lambda: 300 * US)
    a = alice.begin(alice.inserting([b"A"]))
    cluster.run(100 * US)
    b = bob.begin(bob.inserting([b"B"]))
    rids = {b"A": alice.end(a)[0], b"B": bob.end(b)[0]}
    assert rids[b"B"] < rids[b"A"], "the primary's order is not the backup's"
    cluster.kill("shard-0-0")
    assert cluster.run_until(cluster.is_whole, 20 * S)
    assert {r.payload: r.rid for r in alice.read_all()} == rids
