"""Upgrades: the releases of all nodes, and the wire version that the cluster uses.

    FinishUpgrade -- a node is down, or does not know the version: a read barrier, then still so
                  --> UpgradeFinished (obstacle)
    FinishUpgrade -- `RaiseWire` committed --> UpgradeFinished

Rule: the version in use rises only on an operator's request, and only while every registered node
reports that it knows the higher one. Until then all nodes can return to the former release. The
leader reports the version in use to each node whose heartbeat names another one.

See docs/protocol.md, section 15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms import membership_rules
from mms.commands import RaiseWire
from mms.proposals import NO_SHARD, Proposals
from mms.servers import UP_NS
from mms.waiting_requests import WaitingRequests
from ziplog.core.node import Connect, Send
from ziplog.core.units import NS_PER_S
from ziplog.core.wire_use import WireRange
from ziplog.wire import FinishUpgrade, NodeInfo, NodeInfoQuery, UpgradeFinished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mms.servers import FailureHandlers, Servers
    from mms.state import ClusterState
    from ziplog.config import ClusterConfig
    from ziplog.core.node import Effect
    from ziplog.core.wire_use import Release
    from ziplog.wire import HandlerHeartbeat, Heartbeat

#: Interval between the leader's questions to the other membership nodes.
_QUERY_NS: Final = NS_PER_S
#: Maximum number of nodes that a refusal names.
_MAX_NAMED: Final = 20


class Peers:
    """The other nodes of the membership service, and how they describe themselves."""

    def __init__(self, config: ClusterConfig, name: str) -> None:
        self._nodes: Final = [node for node in config.mms if node.name != name]
        self._last_infos: dict[str, tuple[NodeInfo, int]] = {}
        self._is_connected = False
        self._due = 0

    def query(self, cluster: int, now: int) -> list[Effect]:
        """Ask the other nodes for their releases, if that is due."""
        if now < self._due or not self._nodes:
            return []
        self._due = now + _QUERY_NS
        queries = [Send(node.name.encode(), NodeInfoQuery(cluster, 0)) for node in self._nodes]
        return [*self.connect(), *queries]

    def connect(self) -> list[Effect]:
        """Connect to the other nodes, unless that was done."""
        if self._is_connected:
            return []
        self._is_connected = True
        return [Connect(node.name.encode(), node.endpoint) for node in self._nodes]

    def is_from_peer(self, src: bytes) -> bool:
        """Whether a message came over this node's own connection to another node."""
        return any(src == node.name.encode() for node in self._nodes)

    def on_node_info(self, src: bytes, info: NodeInfo, now: int) -> bool:
        """Store what a node of this service sent of itself; return whether it did."""
        if src.decode(errors="replace") != info.node or info.role != "membership":
            return False
        self._last_infos[info.node] = (info, now)
        return True

    def info(self, name: str, now: int) -> NodeInfo | None:
        """Return the last description of a node; None if it is not recent."""
        info, heard_at = self._last_infos.get(name, (None, 0))
        return info if now - heard_at < UP_NS else None


class Upgrades:
    """Handles upgrades at one node of the membership service."""

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        state: ClusterState,
        servers: Servers,
        failure_handlers: FailureHandlers,
        release: Release,
    ) -> None:
        self._config: Final = config
        self._name: Final = name
        self._state: Final = state
        self._servers: Final = servers
        self._failure_handlers: Final = failure_handlers
        self._release: Final = release
        self.peers: Final = Peers(config, name)
        self._proposals: Final = Proposals()
        self._waiting: Final[WaitingRequests[FinishUpgrade]] = WaitingRequests()

    # --- the version in use ---

    def answer_heartbeat(self, src: bytes, message: Heartbeat | HandlerHeartbeat) -> list[Effect]:
        """Report the version in use to a node that uses another one.

        The node then uses it, or, if its release does not know it, halts.
        """
        if message.wire == self._state.wire:
            return []
        config, release = self._config, self._release
        mms = [node.endpoint for node in config.mms]
        return [
            Send(
                src,
                NodeInfo(
                    self._state.cluster, 0, "membership", self._name, config.name, release.version,
                    *release.wires, mms, self._state.wire,
                ),
            )
        ]  # fmt: skip

    # --- requests ---

    def would_refuse(self, message: FinishUpgrade, now: int) -> bool:
        """Whether there is an obstacle; an earlier proposal may still fulfil the request."""
        return message.wire > self._state.wire and any(self._obstacles(message.wire, now))

    def submit(self, src: bytes, message: FinishUpgrade, now: int) -> list[Effect]:
        """Handle an operator's request; the client repeats it until it is answered.

        A request that `would_refuse` comes after a read barrier, so that the refusal is final.
        """
        answer = self._waiting.answer(src, message)
        if answer is not None:
            return [self._reply(src, message, answer)]
        if message.wire <= self._state.wire:
            return [self._reply(src, message)]
        obstacles = list(self._obstacles(message.wire, now))
        if obstacles and self._servers.is_listening_anew(now):
            return []  # A new leader does not know yet which nodes are up.
        if obstacles and self._waiting.has(src, message):
            return []  # Its command may be applied all the same.
        if obstacles:
            more = len(obstacles) - _MAX_NAMED
            named = obstacles[:_MAX_NAMED] + ([f"and {more} more"] if more > 0 else [])
            return [self._reply(src, message, ", ".join(named))]
        self._waiting.add(src, message)
        return self._proposals.propose(NO_SHARD, RaiseWire(message.wire), now)

    def on_raised(self) -> list[Effect]:
        """Answer the requests that a commit fulfils."""
        self._proposals.on_decided(NO_SHARD, RaiseWire)
        done = self._waiting.pop(lambda message: message.wire <= self._state.wire)
        return [self._reply(src, message) for src, message in done]

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all requests; return their routes and numbers."""
        self._proposals.clear()
        return self._waiting.abandon()

    def _reply(self, src: bytes, message: FinishUpgrade, obstacle: str = "") -> Effect:
        state = self._state
        self._waiting.on_answered(src, message, obstacle)
        reply = UpgradeFinished(state.cluster, message.request, state.wire, obstacle)
        return Send(src, reply)

    def _obstacles(self, wire: int, now: int) -> Iterator[str]:
        """Yield each registered node that is down, or does not know a version, with the reason."""
        for name, found in self._reports(now):
            if found is None:
                yield f"{name} is down"
            elif not WireRange(*found[1:]).has(wire):
                version, *wires = found
                yield f"{name} ({_release(version)}) knows wire version {WireRange(*wires)}"

    def _reports(self, now: int) -> Iterator[tuple[str, tuple[str, int, int] | None]]:
        """Yield each registered node, with its release and wire versions; None: it is down."""
        for node in self._config.mms:
            if node.name == self._name:
                yield node.name, (self._release.version, *self._release.wires)
            else:
                yield node.name, _wires(self.peers.info(node.name, now))
        for node in self._config.failure_handlers:
            yield node.name, _wires(self._failure_handlers.heartbeat(node.name, now))
        for server in self._servers:
            # A shard of the cluster file may not be added yet.
            is_registered = server.shard in self._state.placements
            if is_registered and not membership_rules.is_over(self._state, server.shard):
                is_up = server.heartbeat is not None and now - server.last_heard_at < UP_NS
                yield server.name, _wires(server.heartbeat if is_up else None)

    def check(self) -> None:
        """Assert the invariant."""
        self._waiting.check()


def _wires(
    report: Heartbeat | HandlerHeartbeat | NodeInfo | None,
) -> tuple[str, int, int] | None:
    return None if report is None else (report.version, report.first_wire, report.last_wire)


def _release(version: str) -> str:
    return f"Ziplog {version}" if version else "an unknown release"
