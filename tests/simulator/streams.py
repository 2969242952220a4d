"""The connections between the nodes of a consensus group: streams, as TCP has them.

What is sent on a connection arrives in order, sooner or later, for as long as both ends live. What
the network loses is sent again, and comes late. An end that heard nothing for long gives up when it
sends (`ziplog.raft.connections`); the other one is told later, or finds out by itself.

Invariant: what arrives on a connection is a prefix of what was sent on it.
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

#: An end that read nothing for so long gives up (the library's `connectionTimeout`).
_SILENCE_NS: Final = 3500 * MS
#: A connection is tried again after so long (the library's `connectionRetryTime`).
_RETRY_NS: Final = 200 * MS
#: What was lost, or is held up, is sent again after so long: shortest and longest.
_AGAIN_NS: Final = (50 * MS, 400 * MS)
#: How likely a link that carries nothing breaks a connection, whenever something is sent again.
_BREAKS: Final = 1 / 32
#: What it takes to send a frame: the library sends in loops that only the clock ends.
_SEND_NS: Final = 50 * US
#: First and last on every connection; no frame is empty, or a single byte.
_BEGIN: Final = b""
_END: Final = b"\0"
#: What the library's transport drops and logs (`ziplog.raft.connections.Transport`).
_NO_MESSAGE: Final = (LookupError, TypeError, ValueError, AttributeError)

Callback = Any


class Host(Protocol):
    """The process that has connections."""

    @property
    def name(self) -> str:
        """What the network calls it."""
        ...

    def now_ns(self) -> int:
        """Return its time, in the middle of what it does."""
        ...

    def spend(self, duration_ns: int) -> None:
        """Let what it does right now take longer."""
        ...

    def wake(self) -> None:
        """Let it read soon."""
        ...


class Streams:
    """All connections of a group.

    Args:
        network: what it loses, delays and cuts is lost, late and cut here.
        names: of the group's nodes, by endpoint.

    """

    def __init__(self, network: Network, names: dict[str, str]) -> None:
        self.network: Final = network
        self.kernel: Final = network.kernel
        self.names: Final = names
        #: Messages that were none.
        self.garbage = 0
        self._wires: dict[str, Wire] = {}

    def enter(self, wire: Wire) -> None:
        """Let a process connect and be connected to. The greater endpoint calls the lesser."""
        assert wire.host.name not in self._wires, f"{wire.host.name} is there already"
        self._wires[wire.host.name] = wire
        for endpoint, peer in wire.peers.items():
            if wire.endpoint > endpoint:
                self._dial_soon(wire, self.names[peer.id])

    def leave(self, wire: Wire) -> None:
        """A process is gone."""
        if self.at(wire.host.name) is wire:
            del self._wires[wire.host.name]

    def at(self, name: str) -> Wire | None:
        """Return the process of that name that lives now."""
        return self._wires.get(name)

    def sever(self, one: str, other: str) -> None:
        """Break the connection between two nodes, if there is one; both learn of it by and by."""
        wire = self.at(one)
        end = wire.ends.get(other) if wire is not None else None
        if end is not None:
            end.abort()

    def delay_ns(self) -> int:
        """Return what a frame takes now."""
        conditions, chance = self.network.conditions, self.kernel.random.random
        low, high = conditions.delay_ns
        delay = low + int(chance() * (high - low))
        if conditions.loss and chance() < conditions.loss:
            delay += self.again_ns()
        if conditions.stalls and chance() < conditions.stalls:
            delay += int(chance() * conditions.stall_ns)
        return delay

    def again_ns(self) -> int:
        """Return how long it takes until something is sent again."""
        return self.kernel.random.randint(*_AGAIN_NS)

    def is_stuck(self, src: str, dst: str) -> bool:
        """Whether nothing passes from one to the other now."""
        return self.network.is_cut(src, dst) or self.network.is_clogged(src, dst)

    # --- connecting ---

    def redial(self, wire: Wire, peer: str) -> None:
        """A connection is gone: try again in a while, if it is this end that calls."""
        if self.at(wire.host.name) is wire and peer in wire.calls:
            self._dial_soon(wire, peer, _RETRY_NS)

    def _dial_soon(self, wire: Wire, peer: str, wait_ns: int = 0) -> None:
        round_trip_ns = self.delay_ns() + self.delay_ns()
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
        #: It may be written to: the process knows of it.
        self.is_open = False
        self.is_closed = False
        self._wire: Final = wire
        self._streams: Final = wire.streams
        self._read_at = wire.host.now_ns()
        #: What is on its way to the other end, and when each will have arrived.
        self._flow: deque[tuple[int, bytes]] = deque()
        self._is_flowing = self._is_broken = False

    # --- as the process sees it ---

    def send(self, frame: bytes) -> None:
        """Put a frame on its way, or give up."""
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
        """Take what arrived."""
        if self.is_closed:
            return
        now = self._wire.host.now_ns()
        if frame == _END or now - self._read_at > _SILENCE_NS:
            self.close()
            return
        self._read_at = now
        if frame != _BEGIN:
            self._wire.take(self.peer, frame)
            return
        former = self._wire.ends.get(self.peer)
        if former is not None and former is not self:
            former.close()  # what is left in it was said by the node's former process
        self._wire.ends[self.peer] = self
        self.is_open = True
        if self.peer in self._wire.calls:
            self._put(now, _BEGIN)
        self._wire.on_connected(self._wire.node(self.peer))

    def close(self, *, tells: bool = True) -> None:
        """Give up: what waits here is not read any more, and the other end is told at last."""
        if self.is_closed:
            return
        was_open, self.is_open, self.is_closed = self.is_open, False, True
        if self._wire.ends.get(self.peer) is self:
            del self._wire.ends[self.peer]
        self._lose_some()
        if tells:
            self._put(self._wire.host.now_ns(), _END)
        self._streams.redial(self._wire, self.peer)
        if was_open:
            self._wire.on_disconnected(self._wire.node(self.peer))
            self._wire.host.wake()

    def abort(self) -> None:
        """The network breaks the connection: both ends are told, at different times."""
        for end in (self, self.other):
            end._break()

    def _break(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._lose_some()
            delay = int(self._streams.kernel.random.random() * _SILENCE_NS)
            self._streams.kernel.after(delay, partial(self._wire.arrive, self, _END))

    # --- on the way ---

    def _put(self, now: int, frame: bytes) -> None:
        if self._is_broken:
            return
        arrival = now + self._streams.delay_ns()
        if self._flow:
            arrival = max(arrival, self._flow[-1][0])
        self._flow.append((arrival, frame))
        if not self._is_flowing:
            self._is_flowing = True
            self._streams.kernel.at(arrival, self._carry)

    def _lose_some(self) -> None:
        """Of what is on its way, a part never arrives."""
        kept = self._streams.kernel.random.randint(0, len(self._flow))
        while len(self._flow) > kept:
            self._flow.pop()

    def _carry(self) -> None:
        """Let arrive what is due."""
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
        """Hand what came over the network to the process, or turn it away."""
        listens = self._streams.at(self._wire.host.name)
        if not self.is_closed and listens is self._wire:
            self._wire.arrive(self, frame)
        elif frame != _END and listens is not None:
            # The machine knows no such connection, and says so.
            self._put(self._streams.kernel.now, _END)


class Wire:
    """A process's connections, in place of the library's `TCPTransport`."""

    #: As the library has it: there is nothing to wait for.
    ready = True

    def __init__(self, streams: Streams, host: Host, own: Any, others: Iterable[Any]) -> None:
        self.streams: Final = streams
        self.host: Final = host
        self.endpoint: Final[str] = own.id
        #: The library's nodes by endpoint, in order.
        self.peers: Final = {node.id: node for node in sorted(others, key=lambda node: node.id)}
        #: Those that this process calls.
        self.calls: Final = {streams.names[e] for e in self.peers if self.endpoint > e}
        #: The connections that there are, by the peer's name.
        self.ends: Final[dict[str, End]] = {}
        self.on_connected: Callback = None
        self.on_disconnected: Callback = None
        self._on_message: Callback = None
        self._nodes: Final = {streams.names[e]: node for e, node in self.peers.items()}
        self._inbox: Final[deque[tuple[End, bytes]]] = deque()

    def node(self, name: str) -> Any:
        """Return the library's node of that name."""
        return self._nodes[name]

    # --- what the library asks ---

    def setOnNodeConnectedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Whom to tell about a connection."""
        self.on_connected = callback

    def setOnNodeDisconnectedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Whom to tell about the end of one."""
        self.on_disconnected = callback

    def setOnMessageReceivedCallback(self, callback: Callback) -> None:  # noqa: N802
        """Whom to give what arrives."""
        self._on_message = callback

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Take no interest in observers and operators."""
        if name.startswith(("setOnReadonlyNode", "setOnUtilityMessage")):
            return lambda *_: None
        raise AttributeError(name)

    def send(self, node: Any, message: Any) -> bool:
        """Send a message; return whether there is still a connection."""
        end = self.ends.get(self.streams.names[node.id])
        if end is None or not end.is_open:
            return False
        self.host.spend(_SEND_NS)
        end.send(codec.dumps(message))
        return end.is_open

    def destroy(self) -> None:
        """End all connections, as the end of the process does; the others are told."""
        self.vanish(tells=True)

    # --- what the simulation does ---

    def vanish(self, *, tells: bool) -> None:
        """End all connections; the others may have to find out by themselves."""
        self.on_connected = self.on_disconnected = self._on_message = lambda *_: None
        self.streams.leave(self)
        for end in list(self.ends.values()):
            end.close(tells=tells)
        self._inbox.clear()

    def arrive(self, end: End, frame: bytes) -> None:
        """Let something wait until the process reads."""
        if self.streams.at(self.host.name) is self:
            self._inbox.append((end, frame))
            self.host.wake()

    def read(self) -> None:
        """Let the library take what waits."""
        inbox = self._inbox
        while inbox:
            end, frame = inbox.popleft()
            end.read(frame)

    def take(self, peer: str, frame: bytes) -> None:
        """Let the library take a message."""
        try:
            self._on_message(self._nodes[peer], codec.loads(frame))
        except _NO_MESSAGE:
            self.streams.garbage += 1
