"""Simulated network: frames between processes may be late, lost, duplicated, reordered or held.

Rule: to a process it looks like the production transport (`ziplog.runtime.transport`). A name
reaches the process that listens at an endpoint, now or later. A frame arrives with the name of the
connection that it answers, or with a return route. The network drops rather than blocks. A
restarted process is a new peer: routes to its former incarnation lead nowhere. If `queues` is set,
it receives what was sent to its endpoint while no process listened there.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from tests.simulator.kernel import MS, US

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.kernel import Kernel
    from tests.simulator.process import Process

Pair = tuple[str, str]

#: Time until a frame that waited for a process is sent to it, and the most frames that wait.
_RECONNECT_NS: Final = (1 * MS, 100 * MS)
_MAX_QUEUED: Final = 10_000
#: Share of the publications that are lost, beside those that the conditions lose.
_LOST_PUBLICATIONS: Final = 0.1
#: `Network.on_carry` returns this for a frame to lose.
LOST: Final = -1


class Conditions(NamedTuple):
    """Delays and faults of frames. Probabilities are per frame and independent."""

    #: Minimum and maximum delay in nanoseconds; frames of one link may overtake.
    delay_ns: tuple[int, int] = (20 * US, 200 * US)
    loss: float = 0.0
    repeats: float = 0.0
    #: Probability of an additional delay, and its maximum in nanoseconds.
    stalls: float = 0.0
    stall_ns: int = 50 * MS


class Network:
    """All links of a simulation.

    Attributes:
        conditions: of every link; may change at any time.

    """

    def __init__(self, kernel: Kernel, conditions: Conditions | None = None) -> None:
        self.kernel: Final = kernel
        self.conditions = conditions or Conditions()
        #: Links (from, to) that lose all frames, and links that hold their frames.
        self._cut: set[Pair] = set()
        self._clogged: dict[Pair, list[Callable[[], None]]] = {}
        self._listening: dict[str, SimTransport] = {}
        #: Whether frames to an endpoint without a process wait for the next one, as in the queue of
        #: a connection that is attempted again. Otherwise they are lost.
        self.queues = False
        #: By endpoint: calls that send one waiting frame each.
        self._queued: dict[str, list[Callable[[], None]]] = {}
        #: By publisher's endpoint: the receivers of its publications, and their name for it.
        self._receivers: dict[str, dict[SimTransport, bytes]] = {}
        #: Called with every sent frame: (from, to, frame).
        self.on_frame: Callable[[str, str, bytes], object] | None = None
        #: Returns the minimum and maximum delay of a link (from, to) in nanoseconds, or None for
        #: the conditions' delay. Repeats and stalls are those of the conditions.
        self.delay_of: Callable[[str, str], tuple[int, int] | None] = lambda _src, _dst: None
        #: Returns the probability of a loss on a link (from, to), if above the conditions' one.
        self.loss_of: Callable[[str, str], float] = lambda _src, _dst: 0.0
        #: Returns a frame's (from, to, frame) delay in nanoseconds, or `LOST`, or None for the
        #: conditions' delay. Cut and clogged links stay so. For scripts that need an exact order.
        self.on_carry: Callable[[str, str, bytes], int | None] | None = None

    # --- faults ---

    def cut(self, src: str, dst: str) -> None:
        """Lose every frame from one process to another, until `heal`."""
        self._cut.add((src, dst))

    def clog(self, src: str, dst: str) -> None:
        """Hold every frame from one process to another, until `heal`."""
        self._clogged.setdefault((src, dst), [])

    def heal(self, src: str, dst: str) -> None:
        """Restore a link; held frames arrive now."""
        self._cut.discard((src, dst))
        for arrive in self._clogged.pop((src, dst), ()):
            self.kernel.after(self.conditions.delay_ns[0], arrive)

    def heal_all(self) -> None:
        """Restore every link."""
        self._cut.clear()
        for pair in list(self._clogged):
            self.heal(*pair)

    def is_cut(self, src: str, dst: str) -> bool:
        """Whether a link loses every frame."""
        return (src, dst) in self._cut

    def is_clogged(self, src: str, dst: str) -> bool:
        """Whether a link holds every frame."""
        return (src, dst) in self._clogged

    # --- frames ---

    def carry(
        self, src: str, dst: str, frame: bytes, arrive: Callable[[], None], wait_ns: int = 0
    ) -> None:
        """Send a frame in `wait_ns`; `arrive` is called at its arrival: never, once or twice."""
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
        loss = max(conditions.loss, self.loss_of(src, dst))
        if loss and chance() < loss:
            return
        times = 2 if conditions.repeats and chance() < conditions.repeats else 1
        low, high = self.delay_of(src, dst) or conditions.delay_ns
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

    # --- endpoints ---

    def listen(self, endpoint: str, transport: SimTransport) -> None:
        """Bind a transport to an endpoint ("host:port")."""
        assert endpoint not in self._listening, f"{endpoint} is in use"
        self._listening[endpoint] = transport
        waiting = self._queued.pop(endpoint, ())
        if waiting:
            delay = self.kernel.random.randint(*_RECONNECT_NS)
            for send in waiting:
                self.kernel.after(delay, send)

    def queue(self, endpoint: str, send: Callable[[], None]) -> bool:
        """Keep a frame until a process listens at an endpoint; return whether it is kept."""
        if not self.queues:
            return False
        waiting = self._queued.setdefault(endpoint, [])
        if len(waiting) == _MAX_QUEUED:
            return False
        waiting.append(send)
        return True

    def leave(self, endpoint: str) -> None:
        """Unbind an endpoint."""
        self._listening.pop(endpoint, None)

    def receivers(self, endpoint: str) -> dict[SimTransport, bytes]:
        """Return the receivers of a publisher, with the name of it that each has."""
        return self._receivers.setdefault(endpoint, {})

    def at(self, endpoint: str) -> SimTransport | None:
        """Return the transport that listens at an endpoint now."""
        return self._listening.get(endpoint)


class _Connection(NamedTuple):
    """A name for an endpoint, and the return route of the other end."""

    name: bytes
    endpoint: str
    route: bytes


class SimTransport:
    """One process's transport, in place of `ziplog.runtime.transport.Transport`."""

    def __init__(self, network: Network, process: Process) -> None:
        """Listen at the process's endpoint, if it has one."""
        self.owner: Final = process.name
        self.endpoint: Final = process.endpoint
        self.dropped = self.garbage = 0
        #: Always empty: an absent peer is silent.
        self.changes: dict[bytes, str] = {}
        #: Without effect: a frame is in flight at once.
        self.gathers = False
        self._network, self._process = network, process
        self._is_open = True
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._connections: dict[bytes, _Connection] = {}
        #: By publisher's name: the endpoint at which it publishes.
        self._publishers: dict[bytes, str] = {}
        #: By return route: the peer that connected, and its connection.
        self._inbound: dict[bytes, tuple[SimTransport, _Connection]] = {}
        self._routes: dict[tuple[SimTransport, bytes], bytes] = {}
        if self.endpoint is not None:
            network.listen(self.endpoint, self)

    def connect(self, name: bytes, endpoint: str) -> None:
        """Map `name` to the peer that listens at `endpoint`, permanently."""
        known = self._connections.get(name)
        if known is None or known.endpoint != endpoint:
            number = self._network.kernel.random.getrandbits(64)
            self._connections[name] = _Connection(name, endpoint, number.to_bytes(8, "big"))

    def disconnect(self, name: bytes) -> None:
        """Remove a name."""
        self._connections.pop(name, None)

    def publish(self, frame: bytes) -> None:
        """Send a frame to all receivers of this process's publications; some get none."""
        assert self.endpoint is not None
        for peer, name in self._network.receivers(self.endpoint).items():
            if self._network.kernel.random.random() >= _LOST_PUBLICATIONS:
                self._carry(peer, frame, partial(peer.on_publication, name, self.endpoint, frame))

    def receive_publications(self, name: bytes, endpoint: str) -> None:
        """Receive what `name` publishes at `endpoint`, and nowhere else."""
        former = self._publishers.get(name)
        if former is not None:
            self._network.receivers(former).pop(self, None)
        self._publishers[name] = endpoint
        self._network.receivers(endpoint)[self] = name

    def on_publication(self, name: bytes, endpoint: str, frame: bytes) -> None:
        """Queue an arrived publication."""
        if self._publishers.get(name) == endpoint:
            self.on_frame(name, frame)

    def send(self, dst: bytes, frame: bytes) -> None:
        """Send a frame to a name or along a route; drop it if that leads nowhere."""
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
            send = partial(self._send_queued, connection, frame)
            self.dropped += not self._network.queue(connection.endpoint, send)
            return
        route = peer.route_to(self, connection)
        self._carry(peer, frame, lambda: peer.on_frame(route, frame))

    def _send_queued(self, connection: _Connection, frame: bytes) -> None:
        """Send a frame that waited, unless this process ended or disconnected meanwhile."""
        if self._is_open and self._connections.get(connection.name) is connection:
            self._send_out(connection, frame)

    def _send_back(self, peer: SimTransport, connection: _Connection, frame: bytes) -> None:
        """Answer along a peer's connection, if that still exists."""
        self._carry(peer, frame, lambda: peer.on_answer(connection, frame))

    def _carry(self, peer: SimTransport, frame: bytes, arrive: Callable[[], None]) -> None:
        self._network.carry(self.owner, peer.owner, frame, arrive, self._process.spent_ns)

    def flush_gathered(self) -> None:
        """Do nothing: no frame waits."""

    def route_to(self, peer: SimTransport, connection: _Connection) -> bytes:
        """Return the return route to a peer that connected."""
        route = self._routes.get((peer, connection.route))
        if route is None:
            route = b"\0" + self._network.kernel.random.getrandbits(64).to_bytes(8, "big")
            self._routes[peer, connection.route] = route
            self._inbound[route] = (peer, connection)
        return route

    def on_frame(self, src: bytes, frame: bytes) -> None:
        """Queue an arrived frame."""
        if self._is_open:
            self._inbox.append((src, frame))
            self._process.wake()

    def on_answer(self, connection: _Connection, frame: bytes) -> None:
        """Queue a frame that arrived along one of this transport's own connections."""
        if self._connections.get(connection.name) is connection:
            self.on_frame(connection.name, frame)

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return the next frame and its source; None if there is none."""
        return self._inbox.popleft() if self._inbox else None

    def poll(self) -> None:
        """Do nothing: `receive` returns every frame that has arrived."""

    @property
    def is_waiting(self) -> bool:
        """Whether frames wait."""
        return bool(self._inbox)

    def wait(self, timeout_ns: int | None) -> None:
        """Record that the owner sleeps, and return immediately; `wake` resumes it."""
        self._process.sleep(timeout_ns)

    def wait_and_receive(self, timeout_ns: int | None) -> None:
        """Do `wait`: a frame that arrives later resumes the owner, which then receives it."""
        self.wait(timeout_ns)

    def wake(self) -> None:
        """End the owner's sleep."""
        self._process.wake()

    def close(self) -> None:
        """Disconnect from the network; frames in flight are lost."""
        self._is_open = False
        self._inbox.clear()
        for endpoint in self._publishers.values():
            self._network.receivers(endpoint).pop(self, None)
        if self.endpoint is not None:
            self._network.leave(self.endpoint)
