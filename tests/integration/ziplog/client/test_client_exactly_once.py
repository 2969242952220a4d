"""Exactly-once inserts through recoveries and over a faulty network (docs/protocol.md, 11)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.client.fakes import ClientHarness, FakeCluster, S, refused
from tests.unit.ziplog.client.storms import in_a_storm, insert_all
from ziplog import wire


class FailingCluster(FakeCluster):
    """Shards fail and come back in the next view; units of one replica alone may be lost."""

    def __init__(self, harness: ClientHarness, seed: int) -> None:
        super().__init__(harness, seed)
        #: The replicas that acked a unit.
        self.holders: dict[tuple[int, int], set[int]] = {}
        self.quiet: set[int] = set()
        self.joined: set[int] = set()
        #: The probability that a server refuses a copy as full, and the number of copies that it
        #: promised never to accept in this view: by shard, server and seq.
        self.lack = 0.0
        self.promised: dict[tuple[int, int, int], int] = {}

    def serve(self, name: str, message: Any) -> None:
        shard = getattr(message, "shard", None)
        if shard in self.quiet:
            return
        if isinstance(message, wire.Insert) and shard in self.joined:
            self.reply(refused(message, int(name[3]), "not-ready"))
            return
        if isinstance(message, wire.Insert) and self.refuses_as_full(int(name[3]), message):
            return
        super().serve(name, message)

    def insert(self, server: int, message: wire.Insert) -> None:
        super().insert(server, message)
        key = (message.shard, message.seq)
        if key in self.placed:
            self.holders.setdefault(key, set()).add(server)

    def refuses_as_full(self, server: int, message: wire.Insert) -> bool:
        """Refuse a copy as full, and later copies that an earlier promise covers."""
        shard, seq = message.shard, message.seq
        if message.view != self.views[shard] or (shard, seq) in self.placed:
            return False
        copies = self.promised.get((shard, server, seq), 0)
        if message.copy > copies and self.random.random() < self.lack:
            copies = message.copy
            self.promised[shard, server, seq] = copies
        if message.copy <= copies:
            self.reply(msgspec.structs.replace(refused(message, server, "full"), copies=copies))
        return message.copy <= copies

    def fail(self, shard: int) -> None:
        """Fail a shard now, recover it soon, and bring it back later."""
        if shard in self.quiet or shard in self.joined:
            return
        self.quiet.add(shard)
        self.later(self.random.randrange(1, 900), lambda: self.notice(shard))
        self.later(self.random.randrange(900, 1500), lambda: self.decide(shard))
        self.later(self.random.randrange(1500, 4000), lambda: self.come_back(shard))

    def notice(self, shard: int) -> None:
        self.states[shard] = "recovering"

    def decide(self, shard: int) -> None:
        self.quiet.discard(shard)
        self.joined.add(shard)
        self.views[shard] += 1
        self.promised = {key: n for key, n in self.promised.items() if key[0] != shard}
        self.states[shard] = "recovering"
        survivor = self.random.randrange(self.replicas)
        keys = [key for key in self.placed if key[0] == shard]
        # A replica that acked a unit holds all units that were placed before it.
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


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    repetition=st.sampled_from([0.0, 0.3]),
    lack=st.sampled_from([0.0, 0.5]),
    pin=st.booleans(),
    failures=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 1)), max_size=6),
)
def test_every_record_is_in_the_log_once_or_reported_absent(
    seed: int,
    loss: float,
    repetition: float,
    lack: float,
    pin: bool,
    failures: list[tuple[int, int]],
) -> None:
    cluster = in_a_storm(FailingCluster, seed, loss, repetition, pin=pin)
    cluster.lack = lack
    for ms, shard in failures:
        cluster.later(ms, partial(cluster.fail, shard))
    insert_all(cluster, 600 * S)
