"""One node of a replicated service: the base of the membership service and the failure handler.

    follower --LeaderChanged(is_self)--> leader --LeaderChanged--> follower

The node keeps a copy of the replicated state, and handles messages by their types. Rule: each node
applies every committed command to its copy, and halts if the result differs from that of consensus.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.histogram import Histogram
from ziplog.core.node import (
    Committed,
    Halt,
    LeaderChanged,
    LevelRequested,
    PeersChanged,
    Propose,
    Received,
    ReportBadMessage,
    Restored,
    Send,
    Wakeup,
    WireRecorded,
)
from ziplog.core.units import NS_PER_S
from ziplog.core.wire_use import Release, WireUse
from ziplog.wire import NotLeader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.raft.state_machine import Machine
    from ziplog.wire import Durations, Value


#: Maximum number of commands that are timed at once.
_MAX_TIMED: Final = 64
#: Age from which on a command without a commit gives way to a new one: consensus may have lost it.
_LOST_NS: Final = 60 * NS_PER_S


class Leadership:
    """The nodes of the service, and the leader among them, as far as one node knows."""

    def __init__(self, nodes: Sequence[NodeConfig], own: str) -> None:
        self._nodes: Final = nodes
        self._own: Final = own
        self.is_self = False
        #: The last term that this node led in.
        self.term = 0
        #: Its name; "" while there is none.
        self.leader = ""
        #: The other nodes that this one can reach.
        self.connected: tuple[str, ...] = ()

    def endpoints(self) -> list[str]:
        """Return the endpoints of all nodes, the leader's first.

        Without a leader, this node's is last: no follower lists itself first.
        """
        last = self._own if not self.leader else ""
        nodes = sorted(self._nodes, key=lambda node: (node.name != self.leader, node.name == last))
        return [node.endpoint for node in nodes]

    def redirect(self, src: bytes, cluster: int, request: int) -> Effect:
        """Return the reply to a request that only the leader answers."""
        endpoint = next((node.endpoint for node in self._nodes if node.name == self.leader), "")
        return Send(src, NotLeader(cluster, request, endpoint))


class ServiceNode(ABC):
    """One node of a replicated service."""

    #: The service's name in reports.
    service: str
    #: The messages that only a leader handles.
    for_leader: frozenset[type[Message]]
    #: This node's copy of the replicated state.
    state: Machine
    _handlers: Mapping[type[Message], Callable[[bytes, Any], None]]

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        nodes: Sequence[NodeConfig],
        now: int,
        wire_use: WireUse | None,
    ) -> None:
        """Start as a follower with no state; consensus delivers the rest.

        Args:
            config: the cluster file.
            name: this node's name in it.
            nodes: all nodes of the service.
            now: monotonic nanoseconds.
            wire_use: the release, and the wire version in use; None: the first of both.

        """
        self.wire_use: Final = wire_use or WireUse(Release(), 1)
        self.config: Final = config
        #: The durability level in the cluster file now.
        self.level = config.durability
        self.name: Final = name
        self._leadership: Final = Leadership(nodes, name)
        self._effects: list[Effect] = []
        self._now = now
        #: From the proposal of a command to its commit, and when each was proposed that waits.
        self.commit_durations: Final = Histogram()
        self._proposed_at: Final[dict[bytes, int]] = {}

    def step(self, event: Event, now: int) -> list[Effect]:
        """Process one event; see `ziplog.core.node`."""
        self._check_pause(now)
        self._now = now
        match event:
            case Received():
                self._on_received(event.src, event.message)
            case Committed():
                self._time_commit(event.command)
                self._on_committed(event)
            case Wakeup():
                self._on_wakeup()
            case LeaderChanged():
                self._on_leader_changed(event)
            case PeersChanged():
                self._leadership.connected = event.connected
            case WireRecorded():
                self.wire_use.on_recorded(event.wire)
            case LevelRequested():
                self.level = event.level
            case Restored():
                self.state.restore(event.snapshot)
                self._on_restored()
        effects, self._effects = self._effects, []
        return [
            self._of_this_term(effect) if type(effect) is Propose else effect for effect in effects
        ]

    def _of_this_term(self, effect: Propose) -> Propose:
        """Return a proposal in this term, and begin to time its commit."""
        timed, now = self._proposed_at, self._now
        if len(timed) == _MAX_TIMED and now >= timed[oldest := next(iter(timed))] + _LOST_NS:
            del timed[oldest]
        if len(timed) < _MAX_TIMED:
            timed.setdefault(effect.command, now)
        return Propose(effect.command, self._leadership.term, effect.is_urgent)

    def _time_commit(self, command: bytes) -> None:
        proposed_at = self._proposed_at.pop(command, None)
        if proposed_at is not None:
            self.commit_durations.add(self._now - proposed_at)

    def metrics(self) -> tuple[list[Value], list[Durations]]:
        """Return what this service counts beside its commits."""
        return [], []

    @property
    def _is_leader(self) -> bool:
        return self._leadership.is_self

    def _on_received(self, src: bytes, message: Message) -> None:
        handler, cluster = self._handlers.get(type(message)), self.cluster
        if handler is None:
            self._reject(src, message, f"{self.service} does not accept this message")
        elif cluster and message.cluster not in {0, cluster}:
            self._on_wrong_cluster(src, message)
        elif type(message) in self.for_leader and not self._can_lead:
            self._on_request_for_leader(src, message)
        else:
            handler(src, message)

    def _on_wrong_cluster(self, src: bytes, message: Message) -> None:
        why = f"it is for cluster {message.cluster}, but this is cluster {self.cluster}"
        self._reject(src, message, why)

    def _on_request_for_leader(self, src: bytes, message: Any) -> None:
        """Handle a message that only a leader handles, at another node."""
        self._redirect(src, getattr(message, "request", 0))

    def _redirect(self, src: bytes, request: int) -> None:
        self._effects.append(self._leadership.redirect(src, self.cluster, request))

    def _reject(self, src: bytes, message: Message, why: str) -> None:
        self._effects.append(ReportBadMessage(src, f"{type(message).__name__}: {why}"))

    def _on_leader_changed(self, event: LeaderChanged) -> None:
        leadership = self._leadership
        leadership.leader = event.leader
        if leadership.is_self and (not event.is_self or event.term != leadership.term):
            leadership.is_self = False
            self._proposed_at.clear()
            self._stop_leading()
        if event.is_self and not leadership.is_self:
            leadership.is_self, leadership.term = True, event.term
            self._proposed_at.clear()
            self._start_leading()

    def _apply(self, event: Committed) -> bytes | None:
        """Apply a command to this node's copy and return the result; None: the copy is wrong."""
        result = self.state.apply(event.command)
        if result == event.result:
            return result
        self._effects.append(
            Halt(f"command result: here {result!r}, in consensus {event.result!r}")
        )
        return None

    # --- what a service adds ---

    @property
    def _can_lead(self) -> bool:
        """Whether this node handles the messages for the leader."""
        return self._is_leader

    @property
    @abstractmethod
    def cluster(self) -> int:
        """The cluster's number; 0 while it is unknown."""

    @abstractmethod
    def _check_pause(self, now: int) -> None:
        """Forgive silence if this process was paused: messages may have come meanwhile."""

    @abstractmethod
    def _on_wakeup(self) -> None: ...

    @abstractmethod
    def _on_committed(self, event: Committed) -> None: ...

    @abstractmethod
    def _on_restored(self) -> None: ...

    @abstractmethod
    def _start_leading(self) -> None: ...

    @abstractmethod
    def _stop_leading(self) -> None: ...
