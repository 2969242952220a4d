"""One link is cut, and both ends reach all other nodes: readers and clients continue."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.sim.cluster import SimCluster
from tests.sim.mutation import LAN, busy
from tests.sim.programs import ClientProgram
from tests.sim.simulated import simulated
from tests.sim.test_parted_regions import insert_from_now_on, read_from_now_on
from tests.simulator.kernel import Kernel, S
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    CommitRequest,
    ConnectRequest,
    CursorsRequest,
    EditRequest,
    InsertRequest,
    ReadRequest,
    ReleaseRequest,
    StatusRequest,
    SubscribeRequest,
    TailRequest,
)
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ziplog.client.common.requests import Request

#: Time of the cut, and the longest pause of a reader in it.
CUT_NS: Final = 12 * S
PAUSE_NS: Final = 4 * S


@contextmanager
def running() -> Iterator[SimCluster]:
    """Yield a whole cluster with real consensus, and heal its links at the end."""
    kernel = Kernel(1)
    plan = busy(1, shards=2, mms=3, handlers=3, conditions=LAN)._replace(is_raft_real=True)
    with simulated(kernel, is_raft_real=True):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        kernel.run(3 * S)
        yield cluster
        cluster.network.heal_all()


def cut(cluster: SimCluster, links: Iterable[tuple[str, str]]) -> None:
    """Cut links in both directions."""
    leaders = {"service": cluster.mms.leader, "handler": cluster.handlers.leader}
    for link in links:
        one, other = (leaders.get(end, end) for end in link)
        cluster.network.cut(one, other)
        cluster.network.cut(other, one)


def longest_pause(links: Sequence[tuple[str, str]]) -> int:
    """Cut links; return the longest time without a record at a reader of the log."""
    with running() as cluster:
        times = read_from_now_on(cluster, "reader-0")
        insert_from_now_on(cluster, 400, "writer-0")
        cluster.kernel.run(1 * S)
        cut(cluster, links)
        start = cluster.kernel.now
        cluster.kernel.run(CUT_NS)
        points = [start, *(at for at in times if at > start), cluster.kernel.now]
        return max(later - earlier for earlier, later in pairwise(points))


@pytest.mark.parametrize(
    "links",
    [
        [("service", "shard-0-0")],
        [("service", "shard-0-1")],
        [("service", "shard-0-0"), ("service", "shard-0-1")],
        [("handler", "shard-0-0")],
        [("service", "handler")],
        [("shard-0-0", "shard-0-1")],
        [("shard-0-0", "shard-1-0")],
        [("service", "reader-0")],
    ],
    ids=str,
)
def test_readers_continue(links: list[tuple[str, str]]) -> None:
    assert longest_pause(links) < PAUSE_NS


# --- clients -------------------------------------------------------------------------------------

#: Time in which a call ends whose request the client has to repeat.
CALL_NS: Final = 4 * S


class Client:
    """A client of a cluster, which owns a cursor."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster: Final = cluster
        process = cluster.client("client")
        process.start()
        assert isinstance(process.program, ClientProgram)
        self._program: Final = process.program
        self.call(ConnectRequest(NEVER))
        claim = ClaimRequest(NEVER, "c", RID_GENESIS, "", 3000, 60, wait=False)
        self.subscription: Final[int] = self.call(claim)

    def call(self, request: Request) -> Any:
        """Return the result of a call."""
        results: list[Any] = []
        self._program.call(request, results.append)
        ended = self.cluster.kernel.run_until(lambda: results, CALL_NS)
        assert ended, f"{request} has no result"
        assert not isinstance(results[0], Exception), f"{request}: {results[0]!r}"
        return results[0]

    @property
    def has_units_in_flight(self) -> bool:
        """Whether a server has not acked a unit yet."""
        core = self._program.engine.core
        assert isinstance(core, ClientCore)
        return any(window.inflight for window in core._inserts.windows.values())

    def insert(self, shard: int = 1) -> RecordId:
        """Insert a record; shard 1 is the one whose servers the client reaches."""
        insert = InsertRequest(NEVER, [b"x"], RID_GENESIS, None, 0, shard=shard)
        rid: RecordId = self.call(insert)[0]
        return rid


@contextmanager
def client_without(end: str) -> Iterator[Client]:
    """Yield a client that reaches all nodes but one."""
    with running() as cluster:
        insert_from_now_on(cluster, 400, "writer-0")
        client = Client(cluster)
        cut(cluster, [("client", end)])
        yield client


@pytest.mark.parametrize("end", ["service", "shard-0-0", "shard-0-1"])
def test_a_client_finds_the_end_of_the_log(end: str) -> None:
    """Another node forwards its queries to the one that it does not reach."""
    with client_without(end) as client:
        before = client.insert()
        for is_sealed in (False, True):
            assert client.call(TailRequest(NEVER, sealed=is_sealed)) >= before
        client.call(SubscribeRequest(NEVER, RID_RECENT, follow=False))


@pytest.mark.parametrize("end", ["shard-0-0", "shard-0-1"])
def test_an_insert_returns_although_the_client_does_not_reach_one_server(end: str) -> None:
    """The primary gets it from the backup; one of them reports where it is."""
    with client_without(end) as client:
        first = client.insert(shard=0)
        assert client.insert(shard=0).gsn > first.gsn
        for rid in (first, client.insert()):
            assert client.call(ReadRequest(NEVER, rid)).payload == b"x"
        client.cluster.network.heal_all()
        client.cluster.kernel.run(CALL_NS)
        client.insert(shard=0)
        assert not client.has_units_in_flight


def test_a_client_that_does_not_reach_the_services_leader_keeps_its_cursors() -> None:
    with client_without("service") as client:
        for _ in range(4):
            at = client.insert()
            client.call(CommitRequest(NEVER, client.subscription, at, b""))
            moved = client.cluster.state.cursors.get("c")
            assert moved is not None
            assert moved.position == at.gsn
            assert not client.call(ClaimQuery(NEVER, client.subscription)).lost
        client.call(StatusRequest(NEVER))
        client.call(EditRequest(NEVER, "c", "pause"))
        (listed,) = client.call(CursorsRequest(NEVER))
        assert (listed.name, listed.state) == ("c", "paused")
        client.call(ReleaseRequest(NEVER, client.subscription))
