"""All checks accept an undisturbed cluster."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from tests.cluster import PureCluster
from tests.properties import examples
from tests.sim.checks import (
    Deliveries,
    Row,
    StableLogs,
    check_insert_order,
    check_replicas_agree,
    unfinished,
)
from tests.sim.history import History
from tests.sim.linearizability import explain
from tests.sim.ownership import Ownership
from tests.sim.verdict import lease_of, plain
from tests.world import S, shard_names
from ziplog.client.common.requests import FetchRequest, InsertRequest, SubscribeRequest
from ziplog.core.units import NEVER
from ziplog.errors import NoSuchRecordError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable


def watch(cluster: PureCluster, known: StableLogs) -> None:
    """Pass the new entries of every server to the checks."""
    known.ownership.learn(map(lease_of, cluster.groups["mms-0"].machine.runs))
    for replica in cluster.replicas():
        name = replica.config.name
        state = cluster.world.nodes[name].state
        log = known.shard(replica.shard)
        store = cluster.world.stores[name]
        entries = [plain(e) for e in store.log if e.fseq > log.observed(name)]
        log.observe(name, min(state.stream.stable, store.last_fseq), entries, state.frontier)


def make_call(
    cluster: PureCluster, history: History, client: Any, request: Any, then: Callable[[Any], None]
) -> None:
    """Make a call, and record it."""
    number = history.call(client.name, cluster.world.now, request)
    try:
        result = client.call(request)
    except NoSuchRecordError as error:
        result = error
    history.returned(number, cluster.world.now, result)
    then(result)


@examples(5)
@given(st.integers(0, 2**32))
def test_a_cluster_that_nothing_disturbs_passes(seed: int) -> None:
    random = Random(seed)
    cluster = PureCluster(2, 1)
    cluster.run(2 * S)
    known, history, deliveries = StableLogs(Ownership()), History(seed=seed), Deliveries()
    clients = [
        cluster.client(f"c{i}", lambda _p, _k, live: random.choice(list(live))) for i in (0, 1)
    ]
    rids: list[RecordId] = [RID_GENESIS]
    for number in range(12):
        names = [b"%d/%d" % (number, part) for part in range(random.choice((1, 1, 3)))]
        request = InsertRequest(
            clients[0].deadline(), names, random.choice(rids), None, 7, many=len(names) > 1
        )
        make_call(cluster, history, random.choice(clients), request, rids.extend)
        watch(cluster, known)
    subscription: list[int] = []
    subscribe = SubscribeRequest(clients[1].deadline(), RID_GENESIS, False)
    make_call(cluster, history, clients[1], subscribe, subscription.append)
    is_over: list[bool] = []

    def received(fetched: Any) -> None:
        rows = [Row(r.rid.gsn, r.rid.shard, r.payload) for r in fetched.records]
        deliveries.add("c1", 1, rows)
        is_over.append(fetched.ended)

    while not any(is_over):
        make_call(cluster, history, clients[1], FetchRequest(NEVER, subscription[0], 5), received)
        watch(cluster, known)
    cluster.run(1 * S)
    watch(cluster, known)
    assert len(known.records) == len(rids) - 1 == len(deliveries.rows)
    deliveries.check_against(known.records)
    check_insert_order(history.operations, known.records.values())
    history.check()
    assert explain(history.operations) is None
    assert all(known.shard(shard).closed for shard in (0, 1))
    assert not unfinished(history, cluster.world.now, 20 * S)
    stores = cluster.world.stores
    for shard in (0, 1):
        rows = {
            name: [plain(e) for e in stores[name].log if e.fseq] for name in shard_names(shard, 1)
        }
        check_replicas_agree(shard, {name: (10**9, entries) for name, entries in rows.items()})
