"""Asks every node of a cluster for its metrics, once a second, over connections of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import ProtocolError
from ziplog.monitor.rates import NodeReply
from ziplog.runtime.clock import now_ns
from ziplog.runtime.resolver import Resolver
from ziplog.runtime.transport import Transport
from ziplog.status_document import nodes_of
from ziplog.wire import Metrics, MetricsQuery, NodeInfo, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Interval between two queries of a node.
_INTERVAL_NS: Final = NS_PER_S
#: Age of the last reply above which a node counts as silent: it missed two queries.
MAX_AGE_NS: Final = 2500 * NS_PER_MS
#: Interval between checks for the replies to one query.
_POLL_S: Final = 0.01

_NONE: Final = Metrics(0, 0, [], [])


class LocalEndpoints:
    """Finds out which endpoints ("host:port") have an address of this machine. For one thread.

    Looks a host up until it resolves, then no more. Never blocks: a name service that does not
    answer must not delay the queries to other nodes.
    """

    def __init__(self) -> None:
        """Know no host."""
        self._resolver: Final = Resolver()
        self._known: Final[dict[str, bool]] = {}

    def __call__(self, endpoint: str) -> bool:
        """Return whether an endpoint has an address of this machine; no until it resolves."""
        host = endpoint.rpartition(":")[0]
        if host not in self._known:
            address = self._resolver.address_of(host)
            if address is None:
                return False
            self._known[host] = _is_bindable(address)
        return self._known[host]


def _is_bindable(address: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def endpoints_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the names and endpoints of all nodes of a status document."""
    return {node["name"]: node["endpoint"] for node in nodes_of(document)}


def replies_of(document: dict[str, Any], limit_s: float) -> dict[str, NodeReply | None]:
    """Ask all nodes of a status document once; None: a node did not reply within the limit."""
    polls = NodePolls(lambda: endpoints_of(document))
    deadline = now_ns() + int(limit_s * NS_PER_S)
    polls.start()
    try:
        while not (found := polls.replies()) or None in found.values():
            if now_ns() >= deadline:
                break
            time.sleep(_POLL_S)
    finally:
        polls.stop()
    return found


class NodePolls:
    """The last replies of all nodes. One thread asks; any thread reads."""

    def __init__(self, endpoints: Callable[[], Mapping[str, str]]) -> None:
        """Prepare to ask.

        Args:
            endpoints: returns the names and the endpoints ("host:port") of all nodes that are known
                now; called once a second.

        """
        self._endpoints: Final = endpoints
        self._transport: Final = Transport()
        self._replies: Final[dict[str, NodeReply]] = {}
        #: When each known node replied last, or became known, in ns.
        self._replied_at: Final[dict[str, int]] = {}
        self._known: dict[str, str] = {}
        self._request = 0
        self._stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="node polls", daemon=True)

    def start(self) -> None:
        """Start to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and close the connections."""
        self._stopped.set()
        self._transport.wake()
        self._thread.join()

    def replies(self) -> dict[str, NodeReply | None]:
        """Return the last reply of each known node; None: it has not replied lately."""
        oldest = now_ns() - MAX_AGE_NS
        known, replies = self._known, self._replies
        return {
            name: reply if (reply := replies.get(name)) is not None and reply.at >= oldest else None
            for name in known
        }

    def silence_s(self, name: str) -> float | None:
        """Return the time since a node replied, or since it is known; None: it is unknown."""
        since = self._replied_at.get(name)
        return None if since is None else (now_ns() - since) / NS_PER_S

    def _run(self) -> None:
        try:
            due = now_ns()
            while not self._stopped.is_set():
                now = now_ns()
                if now >= due:
                    due = now + _INTERVAL_NS
                    self._ask()
                self._transport.wait(due - now)
                while (received := self._transport.receive()) is not None:
                    self._on_frame(*received)
        finally:
            self._transport.close()

    def _ask(self) -> None:
        found = dict(self._endpoints())
        for name in self._known.keys() - found.keys():
            self._transport.disconnect(name.encode())
            self._replies.pop(name, None)
            self._replied_at.pop(name, None)
        for name in found.keys() - self._known.keys():
            self._replied_at[name] = now_ns()
        self._known = found
        self._request += 1
        frame = encode(MetricsQuery(0, self._request))
        for name, endpoint in found.items():
            self._transport.connect(name.encode(), endpoint)
            self._transport.send(name.encode(), frame)

    def _on_frame(self, name: bytes, frame: bytes) -> None:
        try:
            message = decode(frame)
        except ProtocolError:
            return
        if isinstance(message, (Metrics, NodeInfo)):
            # A node of an earlier release replies with its description.
            metrics = message if isinstance(message, Metrics) else _NONE
            self._replied_at[name.decode()] = now = now_ns()
            self._replies[name.decode()] = NodeReply(metrics, now)
