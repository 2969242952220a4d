"""The network: frames between processes, late, lost, twice, in another order, or held up.

Rule: as far as a process can tell it is the transport of production (`ziplog.runtime.transport`): a
name reaches whoever listens at an endpoint, now or later; a frame arrives with the name of the
connection that it answers, or with a route back; it drops rather than blocks. Whoever starts again
is somebody else: routes to its former self lead nowhere.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from tests.simulator.kernel import MS, US

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.kernel import Kernel
    from tests.simulator.process import Process

Pair = tuple[str, str]

#: What `Network.on_carry` says of a frame that is to be lost.
LOST: Final = -1


class Conditions(NamedTuple):
    """How frames travel. Probabilities are per frame; all are independent."""

    #: The shortest and the longest delay, in nanoseconds; frames of one link may overtake.
    delay_ns: tuple[int, int] = (20 * US, 200 * US)
    loss: float = 0.0
    repeats: float = 0.0
    #: How likely a frame is held up for longer, and for how long at most, in nanoseconds.
    stalls: float = 0.0
    stall_ns: int = 50 * MS


class Network:
    """All links.

    Attributes:
        conditions: of every link; may be changed at any time.

    """

    def __init__(self, kernel: Kernel, conditions: Conditions | None = None) -> None:
        self.kernel: Final = kernel
        self.conditions = conditions or Conditions()
        #: Links (from, to) that carry nothing; and those on which frames wait for their release.
        self._cut: set[Pair] = set()
        self._clogged: dict[Pair, list[Callable[[], None]]] = {}
        self._listening: dict[str, SimTransport] = {}
        #: Told about every frame that is sent: (from, to, frame).
        self.on_frame: Callable[[str, str, bytes], object] | None = None
        #: Decides about a single frame (from, to, frame): how long it is on its way, once and for
        #: sure, in nanoseconds; `LOST`; or None: as the conditions say. Links that are cut or
        #: clogged stay so. For scripts that need one certain order.
        self.on_carry: Callable[[str, str, bytes], int | None] | None = None

    # --- faults ---

    def cut(self, src: str, dst: str) -> None:
        """Lose every frame from one process to another, until `heal`."""
        self._cut.add((src, dst))

    def clog(self, src: str, dst: str) -> None:
        """Hold every frame from one process to another back, until `heal`."""
        self._clogged.setdefault((src, dst), [])

    def heal(self, src: str, dst: str) -> None:
        """Let a link carry frames again; those that waited arrive now."""
        self._cut.discard((src, dst))
        for arrive in self._clogged.pop((src, dst), ()):
            self.kernel.after(self.conditions.delay_ns[0], arrive)

    def heal_all(self) -> None:
        """Let every link carry frames again."""
        self._cut.clear()
        for pair in list(self._clogged):
            self.heal(*pair)

    def is_cut(self, src: str, dst: str) -> bool:
        """Whether a link loses every frame."""
        return (src, dst) in self._cut

    def is_clogged(self, src: str, dst: str) -> bool:
        """Whether a link holds every frame back."""
        return (src, dst) in self._clogged

    # --- frames ---

    def carry(
        self, src: str, dst: str, frame: bytes, arrive: Callable[[], None], wait_ns: int = 0
    ) -> None:
        """Put a frame on its way in `wait_ns`: `arrive` is called when it does, never, or twice."""
        kernel, conditions = self.kernel, self.conditions
        kernel.record(b"%b>%b %d" % (src.encode(), dst.encode(), crc32c(frame)))
        if self.on_frame is not None:
            self.on_frame(src, dst, frame)
        if (src, dst) in self._cut:
            return
        chosen = self.on_carry(src, dst, frame) if self.on_carry is not None else None
        if chosen is not None:
            if chosen >= 0:
                kernel.after(wait_ns + chosen, lambda: self._arrive((src, dst), arrive))
            return
        chance = kernel.random.random
        if conditions.loss and chance() < conditions.loss:
            return
        times = 2 if conditions.repeats and chance() < conditions.repeats else 1
        low, high = conditions.delay_ns
        for _ in range(times):
            delay = wait_ns + low + int(chance() * (high - low))
            if conditions.stalls and chance() < conditions.stalls:
                delay += int(chance() * conditions.stall_ns)
            kernel.after(delay, lambda: self._arrive((src, dst), arrive))

    def _arrive(self, link: Pair, arrive: Callable[[], None]) -> None:
        waiting = self._clogged.get(link)
        if waiting is not None:
            waiting.append(arrive)
        elif link not in self._cut:
            arrive()

    # --- who is where ---

    def listen(self, endpoint: str, transport: SimTransport) -> None:
        """Let an endpoint ("host:port") be a transport's."""
        assert endpoint not in self._listening, f"somebody listens at {endpoint} already"
        self._listening[endpoint] = transport

    def leave(self, endpoint: str) -> None:
        """Nobody listens there any more."""
        self._listening.pop(endpoint, None)

    def at(self, endpoint: str) -> SimTransport | None:
        """Return who listens at an endpoint now."""
        return self._listening.get(endpoint)


class _Connection(NamedTuple):
    """A name that reaches an endpoint, and the route by which the other end answers."""

    name: bytes
    endpoint: str
    route: bytes


class SimTransport:
    """One process's end of the network; what `ziplog.runtime.transport.Transport` is there."""

    def __init__(self, network: Network, process: Process) -> None:
        """Listen at the process's endpoint, if it has one."""
        self.owner: Final = process.name
        self.endpoint: Final = process.endpoint
        self.dropped = self.garbage = 0
        self._network, self._process = network, process
        self._is_open = True
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._connections: dict[bytes, _Connection] = {}
        #: Routes of those who connected to us: who they are, and what they call us.
        self._inbound: dict[bytes, tuple[SimTransport, _Connection]] = {}
        self._routes: dict[tuple[SimTransport, bytes], bytes] = {}
        if self.endpoint is not None:
            network.listen(self.endpoint, self)

    def connect(self, name: bytes, endpoint: str) -> None:
        """Let `name` reach the peer that listens at `endpoint`, for good."""
        known = self._connections.get(name)
        if known is None or known.endpoint != endpoint:
            number = self._network.kernel.random.getrandbits(64)
            self._connections[name] = _Connection(name, endpoint, number.to_bytes(8, "big"))

    def disconnect(self, name: bytes) -> None:
        """Forget a name."""
        self._connections.pop(name, None)

    def send(self, dst: bytes, frame: bytes) -> None:
        """Send a frame to a name or along a route; dropped if that leads nowhere."""
        connection = self._connections.get(dst)
        if connection is not None:
            self._send_out(connection, frame)
        elif dst in self._inbound:
            self._send_back(*self._inbound[dst], frame)
        else:
            self.dropped += 1

    def _send_out(self, connection: _Connection, frame: bytes) -> None:
        peer = self._network.at(connection.endpoint)
        if peer is None:
            self.dropped += 1
            return
        route = peer.route_to(self, connection)
        self._carry(peer, frame, lambda: peer.take(route, frame))

    def _send_back(self, peer: SimTransport, connection: _Connection, frame: bytes) -> None:
        """Answer along a connection that the peer made, if that is still what it was."""
        self._carry(peer, frame, lambda: peer.take_answer(connection, frame))

    def _carry(self, peer: SimTransport, frame: bytes, arrive: Callable[[], None]) -> None:
        self._network.carry(self.owner, peer.owner, frame, arrive, self._process.spent_ns)

    def route_to(self, peer: SimTransport, connection: _Connection) -> bytes:
        """Return the route by which a peer that connected to us is answered."""
        route = self._routes.get((peer, connection.route))
        if route is None:
            route = b"\0" + self._network.kernel.random.getrandbits(64).to_bytes(8, "big")
            self._routes[peer, connection.route] = route
            self._inbound[route] = (peer, connection)
        return route

    def take(self, src: bytes, frame: bytes) -> None:
        """Take a frame that arrived."""
        if self._is_open:
            self._inbox.append((src, frame))
            self._process.wake()

    def take_answer(self, connection: _Connection, frame: bytes) -> None:
        """Take a frame that arrived along one of our own connections."""
        if self._connections.get(connection.name) is connection:
            self.take(connection.name, frame)

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return a frame that waits, and where it is from; None if there is none."""
        return self._inbox.popleft() if self._inbox else None

    @property
    def is_waiting(self) -> bool:
        """Whether frames wait."""
        return bool(self._inbox)

    def wait(self, timeout_ns: int | None) -> None:
        """Let the owner sleep. It returns at once: what follows happens when it is woken."""
        self._process.sleep(timeout_ns)

    def wake(self) -> None:
        """End the owner's sleep."""
        self._process.wake()

    def close(self) -> None:
        """Leave the network; frames on their way to here are lost."""
        self._is_open = False
        self._inbox.clear()
        if self.endpoint is not None:
            self._network.leave(self.endpoint)
