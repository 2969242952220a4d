"""Events, effects and the `Node` interface: every protocol is a deterministic state machine.

A node receives *events* with a time, and returns *effects*. It reads no clock, opens no socket
and draws no random number, so the same class runs on sockets and in the simulator. The driver
carries effects out in list order, and keeps one timer per node.

The driver's loop: step every waiting message; when none is left, step `BatchEnd`, on which the
node sends what it gathered for the batch; then sleep until there is input or the timer is due.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from ziplog.core.message import Message
from ziplog.types import Durability


class Event(msgspec.Struct, frozen=True, gc=False):
    """An input of a node."""


class Received(Event, frozen=True, gc=False):
    """A message arrived. `src` is the route to its sender, or the sender's name if known."""

    src: bytes
    message: Message


class BatchEnd(Event, frozen=True, gc=False):
    """No more input is waiting: the node sends what it gathered for the batch."""


class Wakeup(Event, frozen=True, gc=False):
    """The time that `next_wakeup` returned has come (or something else woke the driver)."""


class Pressed(Event, frozen=True, gc=False):
    """The driver has frames that it has not read, or no longer (docs/protocol.md, section 4.1).

    While `unread` is true, a node must not conclude from silence that a peer is down.
    """

    unread: bool


class Persisted(Event, frozen=True, gc=False):
    """Every entry of a `Persist` effect, up to this stream position, is on stable storage.

    It comes after each flush, also after one of watermark records alone.
    """

    fseq: int


class StorageChanged(Event, frozen=True, gc=False):
    """The store started (`full`) or stopped refusing new entries for lack of space (D53)."""

    full: bool
    #: Why it is full, and what to do.
    reason: str = ""


class StopRequested(Event, frozen=True, gc=False):
    """The process is to end: the node orders `Stop` when nothing waits for it, or soon anyway."""


class ArchiveOpened(Event, frozen=True, gc=False):
    """This server's archive listens at a port; 0: the archive process has ended."""

    port: int


class SettingsChanged(Event, frozen=True, gc=False):
    """The operator changed settings of this server."""

    suspicion_ms: int
    #: Limits of each client's insert rate, in records and bytes; 0: none.
    inserts_per_s: int = 0
    insert_bytes_per_s: int = 0


class LevelRequested(Event, frozen=True, gc=False):
    """The operator changed the durability level in the cluster file."""

    level: Durability


class LevelRecorded(Event, frozen=True, gc=False):
    """A `RecordLevel` is done: the level is on stable storage."""

    level: Durability


class WireRecorded(Event, frozen=True, gc=False):
    """A `RecordWire` is done: the version is on stable storage."""

    wire: int


class Committed(Event, frozen=True, gc=False):
    """The replicated state machine applied a command; `result` is what it returned."""

    command: bytes
    result: bytes


class LeaderChanged(Event, frozen=True, gc=False):
    """The Raft group has a new leader: its name, or "" while there is none."""

    leader: str
    #: Whether this node is the leader.
    is_self: bool
    #: The term that it leads in.
    term: int = 0


class Restored(Event, frozen=True, gc=False):
    """A snapshot replaced the replicated state machine; `Committed` continues after it."""

    snapshot: bytes


class PeersChanged(Event, frozen=True, gc=False):
    """The names of the other nodes of the Raft group that are connected now, sorted."""

    connected: tuple[str, ...]


class Call(Event, frozen=True, gc=False):
    """A request of the local user; `Complete` with the same id will answer it."""

    id: int
    request: Any


#: How a `ConnectionChanged.problem` starts if this process lacks descriptors or memory.
SHORTAGE: Final = "this process cannot open a connection: "


class ConnectionChanged(Event, frozen=True, gc=False):
    """A connection that the node requested was established, or an attempt failed.

    The transport tries again after each failure. Only the drivers of clients pass this event.
    """

    name: bytes
    #: Why there is no connection: "connection refused"; "": it is established.
    problem: str


class Cancelled(Event, frozen=True, gc=False):
    """The local user stopped waiting for a call."""

    id: int


class Closing(Event, frozen=True, gc=False):
    """The local user makes no more calls: the driver closes the connections after this step."""


class Effect(msgspec.Struct, frozen=True, gc=False):
    """An output of a node, which the driver carries out."""


class Send(Effect, frozen=True, gc=False):
    """Send a message to a route or to a connected name. It may be lost."""

    dst: bytes
    message: Message


class Broadcast(Effect, frozen=True, gc=False):
    """Send one message to several destinations; it is encoded once."""

    dsts: tuple[bytes, ...]
    message: Message


class Publish(Effect, frozen=True, gc=False):
    """Send one message to every process that receives this node's publications. It may be lost."""

    message: Message


class ReceivePublications(Effect, frozen=True, gc=False):
    """From now on, receive what `name` publishes at `endpoint`, and nowhere else. May be repeated.

    A publication arrives as `Received`, with the name as its source.
    """

    name: bytes
    endpoint: str


class Connect(Effect, frozen=True, gc=False):
    """From now on, `name` reaches the node that listens at `endpoint` ("host:port")."""

    name: bytes
    endpoint: str


class Disconnect(Effect, frozen=True, gc=False):
    """Close the connection of a name."""

    name: bytes


class Persist(Effect, frozen=True, gc=False):
    """Append an entry to the store. At level `disk` it is flushed before any later `Send`."""

    entry: Any


class RecordLevel(Effect, frozen=True, gc=False):
    """Store the durability level in the node's directory; `LevelRecorded` reports that it is."""

    level: Durability


class Pause(Effect, frozen=True, gc=False):
    """Read no more from a peer that connected, until a time in ns."""

    route: bytes
    until: int


class FlushBeforeSend(Effect, frozen=True, gc=False):
    """From now on, flush the store before later messages are sent, or (not `is_on`) do not.

    When that begins, the whole store is flushed before the next message that needs the disk.
    """

    is_on: bool


class RecordWire(Effect, frozen=True, gc=False):
    """Store the wire version in use in the node's directory; `WireRecorded` reports that it is."""

    wire: int


class Propose(Effect, frozen=True, gc=False):
    """Propose a command to Raft; `Committed` reports when it was applied, if it ever is."""

    command: bytes
    #: The term that this node leads in, as far as it knows. Raft drops a command of another term.
    term: int = 0
    #: Consensus keeps places for it that other commands do not use.
    is_urgent: bool = False


class FailCalls(Effect, frozen=True, gc=False):
    """Complete every open call of the local users with a copy of an error."""

    error: Exception


class Complete(Effect, frozen=True, gc=False):
    """Answer a call: with a result, or with an exception to raise."""

    id: int
    result: Any


class AskArchive(Effect, frozen=True, gc=False):
    """Request a writer table from an archive; a call of `ArchiveReply` brings the answer.

    Only clients give this effect.
    """

    #: Repeated by the reply.
    number: int
    #: The archive's address.
    host: str
    port: int
    cluster: int
    shard: int
    #: The position of the requested table.
    gsn: int


class ReportBadMessage(Effect, frozen=True, gc=False):
    """The node dropped an invalid message of a peer: count it, and log it at a limited rate."""

    src: bytes
    reason: str


class LogWarning(Effect, frozen=True, gc=False):
    """Log one line for the operator, about an event that happens once."""

    text: str


class Stop(Effect, frozen=True, gc=False):
    """Nothing waits for the node: the process may end, as `StopRequested` asks."""


class Halt(Effect, frozen=True, gc=False):
    """The node cannot continue safely: log the reason and stop the process."""

    reason: str


class Node(Protocol):
    """A deterministic state machine: the same state, event and time give the same effects."""

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event at `now`, in monotonic nanoseconds."""
        ...

    def next_wakeup(self) -> int | None:
        """Return when the node wants a `Wakeup`, in monotonic nanoseconds; None: never."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...
