"""Simulated connections between the nodes of a consensus group: streams, like TCP's.

Frames of a connection arrive in order, at some time, while both ends live. A lost frame is
retransmitted, and arrives late. An end that received nothing for long closes the connection when it
sends (`ziplog.raft.connections`); the other end is notified later, or times out.

Invariant: the received frames of a connection are a prefix of the sent ones.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from crc32c import crc32c

from tests.simulator.kernel import MS, US
from ziplog.raft import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.simulator.network import Network

#: Silence after which an end closes the connection (the library's `connectionTimeout`).
_SILENCE_NS: Final = 3500 * MS
#: Interval between connection attempts (the library's `connectionRetryTime`).
_RETRY_NS: Final = 200 * MS
#: Minimum and maximum retransmission timeout of lost and held frames.
_AGAIN_NS: Final = (50 * MS, 400 * MS)
#: Probability that a cut link breaks a connection, per retransmission.
_BREAKS: Final = 1 / 32
#: Duration of a send: the library sends in loops that only the clock ends.
_SEND_NS: Final = 50 * US
#: First and last marker of a connection; no frame is empty or a single byte.
_BEGIN: Final = b""
_END: Final = b"\0"
#: Errors of bad messages, which the transport drops and logs (`ziplog.raft.connections`).
_NO_MESSAGE: Final = (LookupError, TypeError, ValueError, AttributeError)

Callback = Any


class Host(Protocol):
    """The process that owns connections."""

    @property
    def name(self) -> str:
        """Its name in the network."""
        ...

    def now_ns(self) -> int:
        """Return its time within the current turn."""
        ...

    def spend(self, duration_ns: int) -> None:
        """Add time to the current turn."""
        ...

    def wake(self) -> None:
        """Schedule a read."""
        ...


class Streams:
    """All connections of a group.

    Args:
        network: its losses, delays and cuts apply here.
        names: the group's nodes by endpoint.

    """

    def __init__(self, network: Network, names: dict[str, str]) -> None:
        self.network: Final = network
        self.kernel: Final = network.kernel
        self.names: Final = names
        #: Number of invalid messages.
        self.garbage = 0
        self._wires: dict[str, Wire] = {}

    def enter(self, wire: Wire) -> None:
        """Add a process. The node with the greater endpoint connects to the other."""
        assert wire.host.name not in self._wires, f"{wire.host.name} is connected already"
        self._wires[wire.host.name] = wire
        for endpoint, peer in wire.peers.items():
            if wire.endpoint > endpoint:
                self._dial_soon(wire, self.names[peer.id])

    def leave(self, wire: Wire) -> None:
        """Remove a process."""
        if self.at(wire.host.name) is wire:
            del self._wires[wire.host.name]

    def at(self, name: str) -> Wire | None:
        """Return the connections of the live process of that name."""
        return self._wires.get(name)

    def sever(self, one: str, other: str) -> None:
        """Break the connection between two nodes, if any; both are notified later."""
        wire = self.at(one)
        end = wire.ends.get(other) if wire is not None else None
        if end is not None:
            end.abort()

    def delay_ns(self, src: str, dst: str) -> int:
        """Return the delay of a frame from one node to another."""
        conditions, chance = self.network.conditions, self.kernel.random.random
        low, high = self.network.delay_of(src, dst) or conditions.delay_ns
        delay = low + int(chance() * (high - low))
        loss = max(conditions.loss, self.network.loss_of(src, dst))
        if loss and chance() < loss:
            delay += self.again_ns()
        if conditions.stalls and chance() < conditions.stalls:
            delay += int(chance() * conditions.stall_ns)
        return delay

    def again_ns(self) -> int:
        """Return the time until a retransmission."""
        return self.kernel.random.randint(*_AGAIN_NS)

    def is_stuck(self, src: str, dst: str) -> bool:
        """Whether the link from one to the other is cut or clogged."""
        return self.network.is_cut(src, dst) or self.network.is_clogged(src, dst)

    # --- connecting ---

    def redial(self, wire: Wire, peer: str) -> None:
        """Reconnect after an interval, if this end is the connecting one."""
        if self.at(wire.host.name) is wire and peer in wire.calls:
            self._dial_soon(wire, peer, _RETRY_NS)

    def _dial_soon(self, wire: Wire, peer: str, wait_ns: int = 0) -> None:
        own = wire.host.name
        round_trip_ns = self.delay_ns(own, peer) + self.delay_ns(peer, own)
        self.kernel.after(wait_ns + round_trip_ns, partial(self._dial, wire, peer))

    def _dial(self, wire: Wire, peer: str) -> None:
        own = wire.host.name
        if self.at(own) is not wire or peer in wire.ends:
            return
        called = self.at(peer)
        if called is None or self.is_stuck(own, peer) or self.is_stuck(peer, own):
            self._dial_soon(wire, peer, _RETRY_NS)
            return
        calling, answering = End(wire, peer), End(called, own)
        calling.other, answering.other = answering, calling
        wire.ends[peer] = calling
        wire.arrive(calling, _BEGIN)


class End:
    """One end of a connection."""

    other: End

    def __init__(self, wire: Wire, peer: str) -> None:
        self.peer: Final = peer
        #: The process knows the connection and may write to it.
        self.is_open = False
        self.is_closed = False
        self._wire: Final = wire
        self._streams: Final = wire.streams
        self._read_at = wire.host.now_ns()
        #: Frames in flight to the other end, with their arrival times.
        self._flow: deque[tuple[int, bytes]] = deque()
        self._is_flowing = self._is_broken = False

    # --- the process's side ---

    def send(self, frame: bytes) -> None:
        """Send a frame, or close the connection after a timeout."""
        now = self._wire.host.now_ns()
        if now - self._read_at > _SILENCE_NS:
            self.close()
            return
        source = self._wire.host.name
        self._streams.kernel.record(
            b"%b>>%b %d" % (source.encode(), self.peer.encode(), crc32c(frame))
        )
        self._put(now, frame)

    def read(self, frame: bytes) -> None:
        """Handle an arrived frame."""
        if self.is_closed:
            return
        now = self._wire.host.now_ns()
        if frame == _END or now - self._read_at > _SILENCE_NS:
            self.close()
            return
        self._read_at = now
        if frame != _BEGIN:
            self._wire.deliver(self.peer, frame)
            return
        former = self._wire.ends.get(self.peer)
        if former is not None and former is not self:
            former.close()  # its remaining frames are from the node's former process
        self._wire.ends[self.peer] = self
        self.is_open = True
        if self.peer in self._wire.calls:
            self._put(now, _BEGIN)
        self._wire.on_connected(self._wire.node(self.peer))

    def close(self, *, notifies: bool = True) -> None:
        """Close: waiting frames are not read, and the other end is notified last."""
        if self.is_closed:
            return
        was_open, self.is_open, self.is_closed = self.is_open, False, True
        if self._wire.ends.get(self.peer) is self:
            del self._wire.ends[self.peer]
        self._lose_some()
        if notifies:
            self._put(self._wire.host.now_ns(), _END)
        self._streams.redial(self._wire, self.peer)
        if was_open:
            self._wire.on_disconnected(self._wire.node(self.peer))
            self._wire.host.wake()

    def abort(self) -> None:
        """Break the connection by the network: both ends are notified, at different times."""
        for end in (self, self.other):
            end._break()

    def _break(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._lose_some()
            delay = int(self._streams.kernel.random.random() * _SILENCE_NS)
            self._streams.kernel.after(delay, partial(self._wire.arrive, self, _END))

    # --- in flight ---

    def _put(self, now: int, frame: bytes) -> None:
        if self._is_broken:
            return
        arrival = now + self._streams.delay_ns(self._wire.host.name, self.peer)
        if self._flow:
            arrival = max(arrival, self._flow[-1][0])
        self._flow.append((arrival, frame))
        if not self._is_flowing:
            self._is_flowing = True
            self._streams.kernel.at(arrival, self._carry)

    def _lose_some(self) -> None:
        """Lose a random part of the frames in flight."""
        kept = self._streams.kernel.random.randint(0, len(self._flow))
        while len(self._flow) > kept:
            self._flow.pop()

    def _carry(self) -> None:
        """Deliver due frames."""
        self._is_flowing = False
        if not self._flow:
            return
        streams, now = self._streams, self._streams.kernel.now
        if streams.is_stuck(self._wire.host.name, self.peer):
            if not self.is_closed and streams.kernel.random.random() < _BREAKS:
                self.abort()
            self._carry_at(now + streams.again_ns())
            return
        while self._flow and self._flow[0][0] <= now:
            self.other.arrived(self._flow.popleft()[1])
        if self._flow:
            self._carry_at(self._flow[0][0])

    def _carry_at(self, when: int) -> None:
        if self._flow and not self._is_flowing:
            self._is_flowing = True
            self._streams.kernel.at(when, self._carry)

    def arrived(self, frame: bytes) -> None:
        """Deliver a frame to the process, or reject it."""
        listens = self._streams.at(self._wire.host.name)
        if not self.is_closed and listens is self._wire:
            self._wire.arrive(self, frame)
        elif frame != _END and listens is not None:
            # The machine does not know the connection: it answers with a reset.
            self._put(self._streams.kernel.now, _END)


class Wire:
    """A process's connections, in place of the library's `TCPTransport`."""

    #: As in the library: always ready.
    ready = True

    def __init__(self, streams: Streams, host: Host, own: Any, others: Iterable[Any]) -> None:
        self.streams: Final = streams
        self.host: Final = host
        self.endpoint: Final[str] = own.id
        #: The library's nodes by endpoint, in order.
        self.peers: Final = {node.id: node for node in sorted(others, key=lambda node: node.id)}
        #: The peers that this process connects to.
        self.calls: Final = {streams.names[e] for e in self.peers if self.endpoint > e}
        #: The connections by the peer's name.
        self.ends: Final[dict[str, End]] = {}
        self.on_connected: Callback = None
        self.on_disconnected: Callback = None
        self._on_message: Callback = None
        self._nodes: Final = {streams.names[e]: node for e, node in self.peers.items()}
        self._inbox: Final[deque[tuple[End, bytes]]] = deque()

    def node(self, name: str) -> Any:
        """Return the library's node of that name."""
        return self._nodes[name]

    # --- the library's interface ---

    def setOnNodeConnectedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Set the receiver of new connections."""
        self.on_connected = callback

    def setOnNodeDisconnectedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Set the receiver of closed connections."""
        self.on_disconnected = callback

    def setOnMessageReceivedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Set the receiver of messages."""
        self._on_message = callback

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore observers and operators."""
        if name.startswith(("setOnReadonlyNode", "setOnUtilityMessage")):
            return lambda *_: None
        raise AttributeError(name)

    def send(self, node: Any, message: Any) -> bool:
        """Send a message; return whether the connection is open."""
        end = self.ends.get(self.streams.names[node.id])
        if end is None or not end.is_open:
            return False
        self.host.spend(_SEND_NS)
        end.send(codec.dumps(message))
        return end.is_open

    def destroy(self) -> None:
        """Close all connections, as the end of the process does; peers are notified."""
        self.vanish(notifies=True)

    # --- the simulation's interface ---

    def vanish(self, *, notifies: bool) -> None:
        """Close all connections; without a notification, peers time out."""
        self.on_connected = self.on_disconnected = self._on_message = lambda *_: None
        self.streams.leave(self)
        for end in list(self.ends.values()):
            end.close(notifies=notifies)
        self._inbox.clear()

    def arrive(self, end: End, frame: bytes) -> None:
        """Queue a frame until the process reads."""
        if self.streams.at(self.host.name) is self:
            self._inbox.append((end, frame))
            self.host.wake()

    def read(self) -> None:
        """Deliver queued frames to the library."""
        inbox = self._inbox
        while inbox:
            end, frame = inbox.popleft()
            end.read(frame)

    def deliver(self, peer: str, frame: bytes) -> None:
        """Deliver a message to the library."""
        try:
            self._on_message(self._nodes[peer], codec.loads(frame))
        except _NO_MESSAGE:
            self.streams.garbage += 1
