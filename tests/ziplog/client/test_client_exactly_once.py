"""Exactly once, through recoveries and over a bad network (docs/protocol.md, section 11)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ziplog.client.fakes import (
    MS,
    FakeCluster,
    Glass,
    S,
    refused,
)
from tests.ziplog.client.test_client_recovery import pinned, resolve
from ziplog import wire
from ziplog.client.lane import UNIT_RECORDS
from ziplog.errors import OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from ziplog.types import RecordId


class FailingCluster(FakeCluster):
    """Shards fail and come back in the next view; what one replica alone held may be gone."""

    def __init__(self, glass: Glass, seed: int) -> None:
        super().__init__(glass, seed)
        #: The replicas that acked a unit.
        self.holders: dict[tuple[int, int], set[int]] = {}
        self.quiet: set[int] = set()
        self.joined: set[int] = set()

    def serve(self, name: str, message: Any) -> None:
        shard = getattr(message, "shard", None)
        if shard in self.quiet:
            return
        if isinstance(message, wire.Insert) and shard in self.joined:
            self.reply(refused(message, int(name[3]), "not-ready"))
            return
        super().serve(name, message)
        key = (shard, getattr(message, "seq", 0))
        if isinstance(message, wire.Insert) and key in self.placed:
            self.holders.setdefault(key, set()).add(int(name[3]))  # type: ignore[arg-type]

    def fail(self, shard: int) -> None:
        """Let a shard fail now, be decided on soon, and come back later."""
        if shard in self.quiet or shard in self.joined:
            return
        self.quiet.add(shard)
        self.later(self.random.randrange(1, 900), lambda: self.notice(shard))
        self.later(self.random.randrange(900, 1500), lambda: self.decide(shard))
        self.later(self.random.randrange(1500, 4000), lambda: self.come_back(shard))

    def later(self, ms: int, act: Any) -> None:
        self.in_flight.append((self.glass.now + ms * MS, next(self.counter), act))

    def notice(self, shard: int) -> None:
        self.states[shard] = "recovering"

    def decide(self, shard: int) -> None:
        self.quiet.discard(shard)
        self.joined.add(shard)
        self.views[shard] += 1
        self.states[shard] = "recovering"
        survivor = self.random.randrange(self.replicas)
        keys = [key for key in self.placed if key[0] == shard]
        # Who has acked a unit holds all that was placed before it.
        while keys and survivor not in self.holders.get(keys[-1], set()):
            gsns = self.placed.pop(keys.pop())
            self.units[shard] = [unit for unit in self.units[shard] if unit[0] != gsns]
        self.holders |= {key: set(range(self.replicas)) for key in keys}

    def locate(self, server: int, message: wire.Locate) -> None:
        key = (message.shard, message.seq)
        if key not in self.placed or len(self.holders.get(key, ())) == self.replicas:
            super().locate(server, message)

    def come_back(self, shard: int) -> None:
        self.joined.discard(shard)
        self.states[shard] = "live"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    repetition=st.sampled_from([0.0, 0.3]),
    pin=st.booleans(),
    failures=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 1)), min_size=1, max_size=6),
)
def test_every_record_is_there_once_or_said_not_to_be(
    seed: int, loss: float, repetition: float, pin: bool, failures: list[tuple[int, int]]
) -> None:
    glass = Glass(pinned if pin else lambda payload, _k, live: live[len(payload) % len(live)])
    cluster = FailingCluster(glass, seed)
    glass.connect(*cluster.placements())
    cluster.loss, cluster.repetition = loss, repetition
    for ms, shard in failures:
        cluster.later(ms, partial(cluster.fail, shard))
    expected: dict[RecordId, bytes] = {}
    calls: dict[int, list[bytes]] = {}
    for number in range(40):
        count = 1 if number % 4 else UNIT_RECORDS + 1
        payloads = [b"%d-%d" % (number, part) * (1 + number % 2) for part in range(count)]
        calls[glass.insert(*payloads, timeout=(600 if number % 3 else 1) * S)] = payloads
        end = glass.now + 10 * MS
        cluster.later(10, lambda: None)
        cluster.run(lambda: glass.now >= end)  # noqa: B023 - run at once
    for call, payloads in calls.items():
        cluster.run(lambda: call in glass.answers)  # noqa: B023 - run at once
        rids = glass.answers.pop(call)
        if isinstance(rids, OutcomeUnknownError):
            rids = cluster.result(resolve(glass, rids, 600 * S))
        elif isinstance(rids, UnavailableError):
            rids = rids.results
        assert [rid for rid in rids if rid] == sorted(rid for rid in rids if rid)
        expected |= {rid: p for rid, p in zip(rids, payloads, strict=False) if rid}
    cluster.run(lambda: not under_way_at(glass))
    assert cluster.log == sorted((rid.gsn, payload) for rid, payload in expected.items())


def under_way_at(glass: Glass) -> list[int]:
    """Return the shards with units whose fate is not known."""
    return [shard for shard, lane in glass.core._inserts._lanes.items() if lane.unsettled]
