"""The fake cluster on real sockets: a membership service and a shard's replicas, in a thread."""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING, Any

from tests.unit.ziplog.client.fakes import SERVICE, ClientHarness, FakeCluster, endpoint
from ziplog import wire
from ziplog.core.view import Placement, Replica
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from typing import Self

    from ziplog.core.message import Message


class ServedCluster(FakeCluster):
    """Replies at once, except to message types in `silent`."""

    def __init__(self, replicas: int = 2) -> None:
        super().__init__(ClientHarness(), seed=1, shards=1, replicas=replicas)
        names = [SERVICE, *(endpoint(0, server) for server in range(replicas))]
        self._transports = {name: Transport("127.0.0.1:0") for name in names}
        self.endpoint = self.service = self._at(SERVICE)
        self._reply_to: tuple[str, bytes] = ("", b"")
        self._routes: dict[int, tuple[str, bytes]] = {}
        #: Messages of these types get no reply.
        self.silent: set[type] = set()
        #: Every received message.
        self.received: list[Any] = []
        #: A frame to send before the next reply.
        self.garbage: bytes | None = None
        self.arrived = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._transports[SERVICE].wake()
        self._thread.join()
        for transport in self._transports.values():
            transport.close()

    def _at(self, name: str) -> str:
        found = self._transports[name].endpoint
        assert found is not None
        return found

    def placements(self) -> list[Placement]:
        addresses = [self._at(endpoint(0, server)) for server in range(self.replicas)]
        replicas = tuple(Replica(a, a) for a in addresses)
        return [Placement(0, self.views[0], self.states[0], replicas)]

    def wait_for_inserts(self, payload: bytes, count: int = 1) -> None:
        """Wait until this many inserts with this payload arrived."""

        def came() -> bool:
            inserts = [m for m in self.received if isinstance(m, wire.Insert)]
            return sum(payload in m.body for m in inserts) >= count

        with self.arrived:
            assert self.arrived.wait_for(came, 10)

    def wait_for(self, *kinds: type) -> None:
        """Wait until a message of each of these types arrived."""
        with self.arrived:
            assert self.arrived.wait_for(
                lambda: set(kinds) <= {type(message) for message in self.received}, 10
            )

    def _run(self) -> None:
        while not self._is_stopping:
            for name, transport in self._transports.items():
                while (received := transport.receive()) is not None:
                    self._take(name, *received)
            if not any(transport.ready() for transport in self._transports.values()):
                select.select([t.fileno() for t in self._transports.values()], [], [], 0.5)
            for transport in self._transports.values():
                transport.poll()

    def _take(self, name: str, route: bytes, frame: bytes) -> None:
        message = wire.decode(frame)
        self._reply_to = (name, route)
        if isinstance(message, wire.Subscribe):
            self._routes[message.subscription] = self._reply_to
        if type(message) not in self.silent:
            self.serve(name, message)
        with self.arrived:
            self.received.append(message)
            self.arrived.notify_all()

    def reply(self, message: Message) -> None:
        name, route = self._reply_to
        if self.garbage is not None:
            self._transports[name].send(route, self.garbage)
            self.garbage = None
        if isinstance(message, wire.Deliver | wire.Trimmed):
            name, route = self._routes[message.subscription]
        self._transports[name].send(route, wire.encode(message))
