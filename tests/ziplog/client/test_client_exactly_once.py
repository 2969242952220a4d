"""Exactly once, through recoveries and over a bad network (docs/protocol.md, section 11)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ziplog.client.fakes import FakeCluster, Glass, S, refused
from tests.ziplog.client.storms import in_a_storm, insert_all
from ziplog import wire


class FailingCluster(FakeCluster):
    """Shards fail and come back in the next view; what one replica alone held may be gone."""

    def __init__(self, glass: Glass, seed: int) -> None:
        super().__init__(glass, seed)
        #: The replicas that acked a unit.
        self.holders: dict[tuple[int, int], set[int]] = {}
        self.quiet: set[int] = set()
        self.joined: set[int] = set()
        #: How likely a server has no room for a copy, and how many copies it so promised, in this
        #: view, never to take: by shard, server and seq.
        self.lack = 0.0
        self.promised: dict[tuple[int, int, int], int] = {}

    def serve(self, name: str, message: Any) -> None:
        shard = getattr(message, "shard", None)
        if shard in self.quiet:
            return
        if isinstance(message, wire.Insert) and shard in self.joined:
            self.reply(refused(message, int(name[3]), "not-ready"))
            return
        if isinstance(message, wire.Insert) and self.puts_off(int(name[3]), message):
            return
        super().serve(name, message)
        key = (shard, getattr(message, "seq", 0))
        if isinstance(message, wire.Insert) and key in self.placed:
            self.holders.setdefault(key, set()).add(int(name[3]))  # type: ignore[arg-type]

    def puts_off(self, server: int, message: wire.Insert) -> bool:
        """Refuse what there is no room for, and again what was promised then."""
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
        """Let a shard fail now, be decided on soon, and come back later."""
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


@settings(max_examples=40)
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
