"""The thesis, claim by claim: one test for each, in the order of sections 4.2.1 to 4.2.4.

Quotations are from Cong Ding, *Building a Scalable Shared Log* (Cornell 2020). The tests run the
real state machines of servers, membership service and clients in virtual time; a message takes
50 us.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest

from tests.cluster import Client, PureCluster
from tests.world import MS, US, Link, shard_names
from ziplog import policy
from ziplog.client.common.requests import FetchRequest
from ziplog.core.entries import Place, Skip
from ziplog.core.gsn import Schedule
from ziplog.errors import NoSuchRecordError, TrimmedError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId
from ziplog.wire import Forward, InsertAck, Report, Subscribe

DELAY = 50 * US


@pytest.fixture
def cluster() -> PureCluster:
    return PureCluster(shards=2, f=1)


@pytest.fixture
def alice(cluster: PureCluster) -> Client:
    return cluster.client("alice", policy.round_robin())


# --- 4.2.1 Ziplog API ---


def test_4_2_1_insert_after_adds_a_record_and_returns_its_identifier(alice: Client) -> None:
    """'The InsertAfter method adds a new record to the log and returns a record identifier.'"""
    rid = alice.insert(b"record")
    assert alice.read(rid).payload == b"record"


def test_4_2_1_the_new_record_is_after_the_named_one(alice: Client) -> None:
    """'It guarantees that the new record is inserted after the one whose identifier is passed.'"""
    rids = [alice.insert(b"first")]
    for _ in range(20):  # on alternating shards
        rids.append(alice.insert(b"next", rids[-1]))
    assert all(a < b for a, b in pairwise(rids))
    assert {rid.shard for rid in rids} == {0, 1}


def test_4_2_1_rid_genesis_is_before_every_record(alice: Client) -> None:
    """'RID_GENESIS corresponding to the start of the log ... if the location is not important.'"""
    assert alice.insert(b"anywhere", RID_GENESIS) > RID_GENESIS


def test_4_2_1_set_policy_selects_the_shard(cluster: PureCluster) -> None:
    """'The SetPolicy method lets clients select in which shard the record will be stored.'"""
    client = cluster.client("bob", policy.pin(1))
    assert client.insert(b"there").shard == 1
    client.core.set_policy(policy.pin(0))
    assert client.insert(b"here").shard == 0


def test_4_2_1_subscribe_reads_from_the_record_on_and_waits_for_future_ones(alice: Client) -> None:
    """'Sequentially read the log starting from the record ... and wait for future records.'"""
    rids = [alice.insert(b"0")]
    rids += [alice.insert(b"%d" % n, rids[-1]) for n in (1, 2)]
    subscription = alice.subscribe(rids[0])
    delivered: list[RecordId] = []
    while len(delivered) < len(rids):
        delivered += [record.rid for record in alice.fetch(subscription)]
    assert delivered == sorted(rids)
    waiting = alice.begin(fetch_request(alice, subscription))
    later = alice.insert(b"later", rids[-1])
    assert [record.rid for record in alice.end(waiting).records] == [later]


def fetch_request(client: Client, subscription: int) -> Any:
    return FetchRequest(client.deadline(), subscription, 100)


def test_4_2_1_rid_recent_starts_at_a_recently_inserted_record(alice: Client) -> None:
    """'To start reporting from a recently inserted (but not necessarily the latest) record.'"""
    rids = [alice.insert(b"0")]
    for n in range(1, 20):
        rids.append(alice.insert(b"%d" % n, rids[-1]))
    alice.read_all()
    records = alice.fetch(alice.subscribe(RID_RECENT))
    assert records
    assert records[0].rid in rids[-2:]


def test_4_2_1_trim_deletes_all_records_before_a_record(alice: Client) -> None:
    """'Trim, which deletes all records stored before a specific record identifier.'"""
    rids = [alice.insert(b"0")]
    rids += [alice.insert(b"%d" % n, rids[-1]) for n in (1,)]
    rids.append(alice.insert(b"2", rids[-1]))
    alice.trim(rids[2])
    for rid in rids[:2]:
        with pytest.raises(TrimmedError):
            alice.read(rid)
    assert alice.read(rids[2]).payload == b"2"


# --- 4.2.2 Design overview ---


def test_4_2_2_without_a_policy_the_shard_is_random() -> None:
    """'Ziplog chooses a random shard if no policy has been specified.'"""
    choose = policy.random()
    assert {choose(b"", None, [0, 1, 2]) for _ in range(200)} == {0, 1, 2}


def test_4_2_2_a_record_identifier_is_its_gsn_and_its_shard(
    cluster: PureCluster, alice: Client
) -> None:
    """'A tuple consisting of its global sequence number and the shard identifier.'"""
    rid = alice.insert(b"record")
    store = cluster.world.stores[f"shard-{rid.shard}-0"]
    entry = store.find(rid.gsn)
    assert entry is not None
    assert isinstance(entry.decision, Place)


def test_4_2_2_subscribe_is_sent_to_every_shard(cluster: PureCluster, alice: Client) -> None:
    """'The client library sends a <SUBSCRIBE, g> message to every shard.'"""
    alice.insert(b"record")
    alice.fetch(alice.subscribe())
    assert {message.shard for message in cluster.sent("alice", Subscribe)} == {0, 1}


def test_4_2_2_records_come_in_increasing_order_without_skipping_any(
    cluster: PureCluster, alice: Client
) -> None:
    """'Presents them to the client in increasing gsn order, without skipping over any gsn.'"""
    rids = sorted(alice.insert(b"%d" % n) for n in range(30))
    bob = cluster.client("bob")
    assert [record.rid for record in bob.read_all()] == rids


def test_4_2_2_a_missing_gsn_holds_later_records_back(cluster: PureCluster) -> None:
    """'It must hold off processing records with larger gsns until it receives the missing one.'"""
    client = cluster.client("carol", policy.pin(1))
    later = client.insert(b"at shard 1")
    cluster.world.paused.add("shard-0-1")  # nothing of shard 0 can become stable
    subscription = client.subscribe()
    assert client.fetch(subscription, timeout=300 * MS) == []
    cluster.world.paused.clear()
    assert [record.rid for record in client.fetch(subscription)] == [later]


# --- 4.2.3 Global sequence number assignment ---


def test_4_2_3_every_gsn_belongs_to_exactly_one_shard() -> None:
    """'(i) no gsn belongs to more than one shard, and (ii) each ... belongs to some shard.'"""
    schedule = Schedule([(1, 3), (2, 2), (7, 5)])
    owned = [schedule.offsets(shard, 0, schedule.slot_from(shard, 1000)) for shard in (1, 2, 7)]
    assert sorted(chain.from_iterable(owned)) == list(range(1000))


def test_4_2_3_fig_4_2_expected_arrivals_are_projected_onto_one_axis() -> None:
    """Fig. 4.2: 3 records/ms at shard 1, 2 records/ms at shard 2; equal times by shard id."""
    schedule = Schedule([(1, 3), (2, 2)])
    # Expected arrivals: shard 1 at 1/3, 2/3, 3/3 ms, shard 2 at 1/2, 2/2 ms.
    assert [schedule.owner(offset) for offset in range(5)] == [1, 2, 1, 1, 2]


def test_4_2_3_an_epoch_has_members_rates_a_base_and_an_end(cluster: PureCluster) -> None:
    """'Each broadcast starts a new epoch by sharing with all shards four items.'"""
    lease = cluster.replicas()[0].clock.lease
    assert [member.shard for member in lease.members] == [0, 1]
    assert all(member.weight >= 1 for member in lease.members)
    assert lease.epoch_base(lease.first_epoch) == lease.base
    assert lease.epoch_base(lease.first_epoch + lease.epochs) == lease.stop


def test_4_2_3_the_next_base_is_the_ending_gsn_plus_one(
    cluster: PureCluster, alice: Client
) -> None:
    """'Making the base gsn of the next epoch equal to the ending gsn of the current, plus one.'"""
    leases = [cluster.replicas()[0].clock.last]
    for _ in range(80):
        alice.insert(b"keeps the cluster active")
        cluster.run(10 * MS)
        if cluster.replicas()[0].clock.last != leases[-1]:
            leases.append(cluster.replicas()[0].clock.last)
    assert len(leases) >= 3
    assert all(a.stop == b.base for a, b in pairwise(leases))
    assert all(b.predecessor == a.digest for a, b in pairwise(leases))


def test_4_2_3_arrivals_above_the_expected_rate_take_the_next_gsns(
    cluster: PureCluster,
) -> None:
    """'If records are received at a higher rate than expected, shards assign their next gsns.'"""
    client = cluster.client("eager", policy.pin(0))
    rids = client.call(client.inserting([b"x"] * 100))
    assert [b.gsn - a.gsn for a, b in pairwise(rids)] == [2] * 99


def test_4_2_3_an_epoch_ends_with_one_token_for_all_unused_gsns(
    cluster: PureCluster, alice: Client
) -> None:
    """'Each shard creates a single special no-op token covering every gsn ... past the last.'"""
    rid = alice.insert(b"the only record of its epoch")
    cluster.run(30 * MS)
    decisions = [
        decision
        for message in cluster.sent(f"shard-{rid.shard}-0", Forward)
        for decision in message.decisions
    ]
    placed = next(i for i, d in enumerate(decisions) if type(d) is Place)
    token = decisions[placed + 1]
    assert type(token) is Skip
    assert token.start == rid.gsn + 1
    assert token.stop - token.start > 1_000_000


def test_4_2_3_another_shards_token_does_not_decide_owned_positions(
    cluster: PureCluster, alice: Client
) -> None:
    """'It is possible for the shard that owns a gsn to have associated it with a record, while
    other shards have instead associated it with the special no-op token.'"""
    rids = [alice.insert(b"0")]
    rids.append(alice.insert(b"1", rids[-1]))  # on the other shard
    cluster.run(30 * MS)  # both shards' tokens cover both positions
    assert [record.rid for record in alice.read_all()] == rids


# --- 4.2.4 Replication ---


def test_4_2_4_without_contention_an_insert_takes_two_message_delays(alice: Client) -> None:
    """'In the absence of contention, consensus requires only two message delays.'"""
    alice.insert(b"warm")
    began = alice.cluster.world.now
    alice.insert(b"fast")
    assert alice.cluster.world.now - began == 2 * DELAY
    assert alice.core.counters.slow_path == 0


def contended(cluster: PureCluster) -> tuple[Client, Client, int, int]:
    """Let two clients' records reach primary and backup in opposite orders, beginning now."""
    first, second = cluster.client("first"), cluster.client("second")
    primary, backup = shard_names(0, 1)
    cluster.world.links["first", primary] = Link(lambda: 40 * US)
    cluster.world.links["second", backup] = Link(lambda: 40 * US)
    calls = first.begin(first.inserting([b"A"])), second.begin(second.inserting([b"B"]))
    return first, second, *calls


def test_4_2_4_contention_adds_one_message_delay(cluster: PureCluster) -> None:
    """'Contention only adds one message delay'; 'matching acks after at most three.'"""
    first, second, a, b = contended(cluster)
    began = cluster.world.now
    first.end(a)
    second.end(b)
    assert 2 * DELAY < cluster.world.now - began <= 3 * DELAY
    assert first.core.counters.slow_path == 1
    assert second.core.counters.slow_path == 1


def test_4_2_4_the_primarys_order_wins_and_replicas_hold_the_same(cluster: PureCluster) -> None:
    """'All replicas eventually store R in the same log position as the shard's primary.'"""
    first, second, a, b = contended(cluster)
    rids = [first.end(a)[0], second.end(b)[0]]
    cluster.run(20 * MS)
    assert rids[0] < rids[1], "the primary saw A first"
    primary, backup = (cluster.world.stores[name] for name in shard_names(0, 1))
    for rid in rids:
        assert primary.find(rid.gsn) == backup.find(rid.gsn)


def test_4_2_4_an_overwritten_record_had_no_ack_of_the_primary_there(
    cluster: PureCluster,
) -> None:
    """'The client that issued R' could not have concluded that Ziplog had given R' [its] gsn.'"""
    first, second, a, b = contended(cluster)
    first.end(a)
    second.end(b)
    guesses = [m for m in cluster.sent("shard-0-1", InsertAck) if not m.confirmed]
    decisions = cluster.sent("shard-0-0", InsertAck)
    assert len(guesses) == len(decisions) == 2
    assert [m.gsns for m in guesses] == [m.gsns for m in decisions]  # swapped between the two
    assert first.core.counters.fast_path == second.core.counters.fast_path == 0


def test_4_2_4_the_ack_does_not_wait_for_the_disk(cluster: PureCluster) -> None:
    """'A storage server sends an acknowledgment to the client before writing to its disk.'"""
    client = cluster.client("impatient")
    for name in shard_names(0, 1):
        cluster.world.stores[name].backlog_bytes = 1  # nothing of it is flushed
    assert client.insert(b"in memory")


def test_4_2_4_an_unstable_read_needs_identical_responses_of_all(cluster: PureCluster) -> None:
    """'The client library needs to check that it received identical responses from all.'"""
    cluster.world.links["shard-0-0", "shard-0-1"] = Link(lambda: 5 * MS)  # forwards are late
    client = cluster.client("reader")
    rid = client.insert(b"fast, and not stable yet")
    replica = cluster.replicas()[0]
    assert replica.stream.stable_record < rid.gsn
    assert client.read(rid).payload == b"fast, and not stable yet"
    assert replica.stream.stable_record < rid.gsn
    cluster.world.paused.add("shard-0-1")
    other = client.begin(client.inserting([b"held by the primary only"], timeout=100 * MS))
    cluster.run(1 * MS)
    gsn = replica.stream.last_record
    with pytest.raises(Exception) as caught:  # noqa: PT011  the kind is what is asserted
        client.read(RecordId(gsn, 0))
    assert not isinstance(caught.value, NoSuchRecordError)
    cluster.world.paused.clear()
    with pytest.raises(TimeoutError):
        client.end(other)


def test_4_2_4_a_backup_reports_its_longest_consecutive_prefix(cluster: PureCluster) -> None:
    """'Each backup sends to the primary the highest gsn of the longest prefix of consecutive
    records received from the primary.'"""
    client = cluster.client("writer")
    lost = [True]
    cluster.world.links["shard-0-0", "shard-0-1"] = Link(lose=lambda: bool(lost and lost.pop()))
    client.insert(b"its forward is lost")
    client.insert(b"its forward arrives")
    progress = [report.replicated_up_to for report in cluster.sent("shard-0-1", Report)]
    assert all(h == 0 for h in progress[:1])
    cluster.run(50 * MS)
    reports = [report.replicated_up_to for report in cluster.sent("shard-0-1", Report)]
    assert reports == sorted(reports)
    assert reports[-1] == cluster.replicas()[0].stream.last


def test_4_2_4_stable_is_the_minimum_over_the_replicas() -> None:
    """'Sends the backups the minimum among those values ... on which all servers agree.'"""
    cluster = PureCluster(shards=1, f=2)
    client = cluster.client("writer")
    client.insert(b"before")
    cluster.run(20 * MS)
    primary = cluster.replicas()[0]
    before = primary.stream.stable_record
    cluster.world.links["shard-0-2", "shard-0-0"] = Link(lose=lambda: True)  # one report is missing
    rid = client.insert(b"held by all, reported by one")
    cluster.run(5 * MS)
    assert primary.stream.last_record == rid.gsn
    assert primary.stream.stable_record == before
    del cluster.world.links["shard-0-2", "shard-0-0"]
    assert cluster.run_until(lambda: primary.stream.stable_record >= rid.gsn)


def test_4_2_4_one_response_suffices_for_a_stable_record(cluster: PureCluster) -> None:
    """'Only if it is not [stable] ... a matching response from all; otherwise, a single one.'"""
    client = cluster.client("reader")
    rid = client.insert(b"stable")
    cluster.run(50 * MS)
    for survivor in range(2):
        cluster.world.paused = {f"shard-0-{1 - survivor}"}
        assert client.read(rid).payload == b"stable"


def test_4_2_4_a_stable_record_stays_where_it_is(cluster: PureCluster, alice: Client) -> None:
    """'They can no longer be lost or re-ordered because of storage server failures.'"""
    rids = [alice.insert(b"%d" % n) for n in range(20)]
    cluster.run(20 * MS)
    first = [(r.rid, r.payload) for r in alice.read_all()]
    for n in range(20):
        alice.insert(b"more %d" % n, rids[-1])
    assert [(r.rid, r.payload) for r in alice.read_all()][: len(first)] == first
