"""CPU cost of many shards at the membership service: the real service, emulated storage servers.

Time is virtual. Every server's heartbeats are decoded and stepped, every lease is committed at
once, every message is encoded as by the driver, and every lease's owner table is read. Only sockets
and the disk are left out. The result is the CPU time divided by the virtual time, in cores.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from mms.service import MembershipService
from mms.state import ClusterState
from tests.services import cluster_config
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Committed,
    LeaderChanged,
    Propose,
    Received,
    Send,
    Wakeup,
)
from ziplog.core.units import NS_PER_S
from ziplog.core.view import NO_DIGEST, unfold
from ziplog.wire import Heartbeat, LeaseAnnounced, Rate, decode, encode

if TYPE_CHECKING:
    from ziplog.core.node import Effect, Event
    from ziplog.core.view import Lease

_REPLICAS: Final = 2
_RATE_PER_S: Final = 1000


def measure(shards: int, seconds: float, epoch_ms: int = 10) -> dict[str, float]:
    """Run `shards` active shards of two replicas for `seconds` of virtual time.

    Returns:
        `cpu_share` (of one core), `cpu_s`, `virtual_s`, and the counts `heartbeats`, `leases`,
        `commands`, `rates` (reports that one changed: 1 % of the shards a second), `announcements`
        (encoded), `sends` (messages to servers), `encoded_bytes`, `wire_bytes` (of all messages).

    """
    emulation = _Emulation(shards, epoch_ms)
    emulation.run(NS_PER_S)  # the first lease, and the change to the epochs of work
    emulation.counts = dict.fromkeys(emulation.counts, 0)
    started = time.process_time()
    emulation.run(int(seconds * NS_PER_S))
    cpu_s = time.process_time() - started
    emulation.service.check()
    return {"cpu_share": cpu_s / seconds, "cpu_s": cpu_s, "virtual_s": seconds, **emulation.counts}


_COUNTS: Final = (
    "heartbeats", "leases", "commands", "rates", "announcements", "sends", "encoded_bytes",
    "wire_bytes",
)  # fmt: skip


class _Emulation:
    def __init__(self, shards: int, epoch_ms: int) -> None:
        config = cluster_config(shards, f=_REPLICAS - 1, epoch_ms=epoch_ms)
        self.service = MembershipService(config, "mms-0", pid=1, cluster=1, incarnation=1, now=0)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._consensus = ClusterState()
        self._servers = [
            (b"route-%d" % index, shard.id, node.name, node.endpoint)
            for shard in config.shards
            for index, node in enumerate(shard.replicas, _REPLICAS * shard.id)
        ]
        self._held = (0, NO_DIGEST)
        self._lease: Lease | None = None
        self._frontier = 0
        self._sent = 0
        #: Shards with changing rates: each in turn goes up by a half, and back.
        self._rates = [_RATE_PER_S] * shards
        self._changed = 0
        self._now = self._next_heartbeat = self._next_change = 1
        self._step(LeaderChanged("mms-0", is_self=True))

    def run(self, duration_ns: int) -> None:
        """Run for `duration_ns` of virtual time: each server sends one heartbeat per second."""
        stop = self._now + duration_ns
        while self._now < stop:
            due = self.service.next_wakeup()
            if due is not None and due <= min(self._next_heartbeat, self._next_change):
                self._now = max(self._now, due)
                self._step(Wakeup())
            elif self._next_heartbeat <= self._next_change:
                self._now = max(self._now, self._next_heartbeat)
                self._next_heartbeat = self._now + NS_PER_S // len(self._servers)
                self._heartbeat()
            else:
                self._now = max(self._now, self._next_change)
                self._next_change = self._now + NS_PER_S * 100 // len(self._rates)
                self._change()
            self._step(BatchEnd())

    def _change(self) -> None:
        if not self._held[0]:
            return
        shard = self._changed * 7 % len(self._rates)
        self._changed += 1
        self._rates[shard] = _RATE_PER_S * 5 // 2 - self._rates[shard]
        self.counts["rates"] += 1
        frame = encode(Rate(1, shard, 1, self._rates[shard]))
        self._step(Received(self._servers[shard * _REPLICAS][0], decode(frame)))

    def _heartbeat(self) -> None:
        route, shard, name, endpoint = self._servers[self._sent % len(self._servers)]
        self._sent += 1
        number, digest = self._held
        frame = encode(
            Heartbeat(
                1, name, endpoint, shard, 1, 1, 1, "up", True, self._rates[shard], self._frontier,
                self._frontier, number, digest, 0, shard_state="live" if number else "",
            )
        )  # fmt: skip
        self.counts["heartbeats"] += 1
        self._step(Received(route, decode(frame)))

    def _step(self, event: Event) -> None:
        for effect in self.service.step(event, self._now):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        counts = self.counts
        if isinstance(effect, Propose):
            counts["commands"] += 1
            self._step(Committed(effect.command, self._consensus.apply(effect.command)))
        elif isinstance(effect, Send | Broadcast):
            counts["announcements"] += 1
            size = len(encode(effect.message))
            to = len(effect.dsts) if isinstance(effect, Broadcast) else 1
            counts["encoded_bytes"] += size
            counts["sends"] += to
            counts["wire_bytes"] += size * to
            if isinstance(effect.message, LeaseAnnounced):
                self._hold(effect.message)

    def _hold(self, message: LeaseAnnounced) -> None:
        runs = message.runs
        if message.steps and self._lease is not None:
            runs = unfold(self._lease, message.after, message.steps)
        lease = runs[-1].last if runs else None
        if lease is not None and lease.number > self._held[0]:
            self.counts["leases"] += 1
            self._held, self._lease = (lease.number, lease.digest), lease
            self._frontier = lease.base
            for member in lease.members:
                lease.take(member.shard, lease.next_owned(member.shard, lease.base), 16)
