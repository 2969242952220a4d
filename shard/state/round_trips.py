"""Round trips to the nodes of the membership service, and to the backups, measured by one server.

    heartbeat with `sent_us` --> node --Echo(sent_us)--> a sample for that node
    forward up to an entry --> backup --report of that entry--> a sample for that backup

Rules: an echo counts if it answers one of the last heartbeats, once, and is newer than the echoes
before it from the same node. One forward at a time is measured, by the first report of each backup
that covers it. A sample above twice `rtt_ms` of the cluster file does not count: a process was
paused, or a frame was lost. Samples change when a lease begins, never which positions a server owns
(docs/protocol.md, section 20).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ziplog.core.units import NS_PER_MS

#: Number of samples of a node, and of heartbeats whose echoes count.
_KEPT: Final = 8


class RoundTrips:
    """The newest samples of each peer; none if `rtt_ms` is 0."""

    def __init__(self, rtt_ms: int) -> None:
        self._longest_ns: Final = 2 * rtt_ms * NS_PER_MS
        #: When the last heartbeats were sent, by this server's clock, in µs.
        self._sent: Final[deque[int]] = deque(maxlen=_KEPT)
        #: By node: the newest answered one of these. By peer: the samples in ns.
        self._answered: Final[dict[bytes, int]] = {}
        self._samples: Final[dict[bytes, deque[int]]] = {}
        #: By node: how long the last echoes took, in ns, also those that do not count.
        self._echoes: Final[dict[bytes, deque[int]]] = {}
        self._are_reported_too_long = False
        #: The last entry of the measured forward, its time, and the backups that reported it.
        self._forwarded = 0
        self._forwarded_at = -(2**62)
        self._reported: Final[set[bytes]] = set()
        #: The last entry that backups may hold from before a restart.
        self._held_before = 0

    def on_heartbeat_sent(self, now: int) -> int:
        """Return `sent_us` of a heartbeat that is sent now; 0: it requests no echo."""
        if not self._longest_ns:
            return 0
        self._sent.append(now // 1000)
        return now // 1000

    def on_echo(self, node: bytes, sent_us: int, now: int) -> None:
        """Add a sample, if the echo counts."""
        if sent_us not in self._sent or sent_us <= self._answered.get(node, -1):
            return
        self._answered[node] = sent_us
        self._echoes.setdefault(node, deque(maxlen=_KEPT)).append(now - sent_us * 1000)
        self._add(node, now - sent_us * 1000)

    def too_long_ms(self, node: bytes) -> int:
        """Return the least time of a node's last echoes, once, if all are above `rtt_ms`; or 0."""
        echoes = self._echoes.get(node, ())
        if len(echoes) < _KEPT or self._are_reported_too_long:
            return 0
        least_ns = min(echoes)
        self._are_reported_too_long = 2 * least_ns > self._longest_ns
        return -(-least_ns // NS_PER_MS) if self._are_reported_too_long else 0

    def on_restart(self, last: int) -> None:
        """Measure no forward without an entry after `last`: a report of the rest proves nothing."""
        self._held_before = last

    def on_forward(self, last: int, now: int) -> None:
        """Measure a forward up to entry `last`, unless another one is being measured."""
        if last > self._held_before and now - self._forwarded_at > self._longest_ns > 0:
            self._forwarded, self._forwarded_at = last, now
            self._reported.clear()

    def on_report(self, backup: bytes, held: int, now: int) -> None:
        """Add a sample, if a backup reports the measured forward for the first time."""
        if held >= self._forwarded > 0 and backup not in self._reported:
            self._reported.add(backup)
            self._add(backup, now - self._forwarded_at)

    def _add(self, peer: bytes, took: int) -> None:
        if took <= self._longest_ns:
            self._samples.setdefault(peer, deque(maxlen=_KEPT)).append(took)

    def one_way_ns(self, peer: bytes) -> int:
        """Return half of the least sample of a peer; 0: there is none."""
        samples = self._samples.get(peer)
        return min(samples) // 2 if samples else 0
