"""The contract of everything that has a protocol: a deterministic state machine.

A node is told what happened (an *event*) and when, and answers with orders (*effects*). It reads no
clock, opens no socket and draws no random number, so the same class runs on sockets and in a
simulation. The driver carries effects out in list order, and honours one deadline per node.

The driver's loop: step every message that is waiting; when none is left, step `BatchEnd`, on
which the node lets go of what it gathered for the batch; then sleep until input or the deadline.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ziplog.core.message import Message


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened."""


class Received(Event, frozen=True, gc=False):
    """A message arrived. `src` is the route back to its sender, or the sender's name if known."""

    src: bytes
    message: Message


class BatchEnd(Event, frozen=True, gc=False):
    """No more input is waiting: what was gathered for the batch goes out now."""


class Wakeup(Event, frozen=True, gc=False):
    """The deadline that `next_wakeup` named has come (or something else woke the driver)."""


class Pressed(Event, frozen=True, gc=False):
    """Frames wait that the driver has not looked at, or no more (docs/protocol.md, section 4.1).

    As long as they do, the silence of others proves nothing.
    """

    unread: bool


class Persisted(Event, frozen=True, gc=False):
    """Everything that was ordered by `Persist` up to this stream position is on stable storage."""

    fseq: int


class StorageChanged(Event, frozen=True, gc=False):
    """The store began (`full`) or ceased to refuse new entries for lack of space (D53)."""

    full: bool


class ArchiveOpened(Event, frozen=True, gc=False):
    """This server's archive listens at a port; 0: it has ended."""

    port: int


class Committed(Event, frozen=True, gc=False):
    """The replicated state machine applied a command; `result` is what it returned."""

    command: bytes
    result: bytes


class LeaderChanged(Event, frozen=True, gc=False):
    """Consensus has a new leader: its name, or "" while there is none."""

    leader: str
    #: Whether this node is it.
    is_self: bool


class Restored(Event, frozen=True, gc=False):
    """The replicated state machine was replaced by a snapshot; `Committed` goes on after it."""

    snapshot: bytes


class PeersChanged(Event, frozen=True, gc=False):
    """These other nodes of the consensus group are connected now: their names, sorted."""

    connected: tuple[str, ...]


class Call(Event, frozen=True, gc=False):
    """The local user asks for something; `Complete` with the same id will answer."""

    id: int
    request: Any


class Cancelled(Event, frozen=True, gc=False):
    """The local user no longer waits for a call."""

    id: int


class Closing(Event, frozen=True, gc=False):
    """The local user makes no more calls: the connections are closed after this step."""


class Effect(msgspec.Struct, frozen=True, gc=False):
    """An order to the driver."""


class Send(Effect, frozen=True, gc=False):
    """Send a message to a route or to a connected name. It may be lost."""

    dst: bytes
    message: Message


class Broadcast(Effect, frozen=True, gc=False):
    """Send one message to several; it is encoded once."""

    dsts: tuple[bytes, ...]
    message: Message


class Connect(Effect, frozen=True, gc=False):
    """From now on, `name` reaches the node that listens at `endpoint` ("host:port")."""

    name: bytes
    endpoint: str


class Disconnect(Effect, frozen=True, gc=False):
    """Forget a name."""

    name: bytes


class Persist(Effect, frozen=True, gc=False):
    """Append an entry to the store. At level `disk` it is flushed before any later `Send`."""

    entry: Any


class Propose(Effect, frozen=True, gc=False):
    """Hand a command to consensus; `Committed` tells when it was applied, if it ever is."""

    command: bytes


class Complete(Effect, frozen=True, gc=False):
    """Answer a call: with a result, or with an exception to raise."""

    id: int
    result: Any


class ReportBadMessage(Effect, frozen=True, gc=False):
    """A peer sent what it may not, and it was dropped: count it, and log it now and then."""

    src: bytes
    reason: str


class LogWarning(Effect, frozen=True, gc=False):
    """Log what an operator should know: one line, for what happens once."""

    text: str


class Halt(Effect, frozen=True, gc=False):
    """The node found that it cannot go on without doing harm: log why and stop the process."""

    reason: str


class Node(Protocol):
    """A deterministic participant. Same state, same event, same now: same effects."""

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event at `now`, in monotonic nanoseconds."""
        ...

    def next_wakeup(self) -> int | None:
        """Return when the node wants a `Wakeup`, in monotonic nanoseconds; None: never."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...
