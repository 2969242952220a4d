"""What the driver requires of a server besides its node: a store, and a short path for inserts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.core.message import Message
    from ziplog.core.node import Effect
    from ziplog.wire import Insert, InsertAck


class EntryStore(Protocol):
    """The store interface that the driver uses."""

    #: Stream position of the last entry appended.
    last_fseq: int

    def append(self, *entries: Any) -> None:
        """Append the next entries."""
        ...

    def flush(self) -> bool:
        """Write everything to stable storage; False if there is no space for it now."""
        ...

    def flush_in_background(self, is_on: bool) -> None:
        """Flush soon what is appended, or (not `is_on`) only when `flush` is called."""
        ...


class ProposeCommand(Protocol):
    """Proposes a command of this node, and its term, to a Raft group."""

    def __call__(self, command: bytes, term: int, /, *, is_urgent: bool) -> object:
        """Propose a command; must not block."""
        ...


class InsertPath(Protocol):
    """A short path for inserts, beside the node's `step` (docs/protocol.md, section 4.2)."""

    @property
    def messages(self) -> Iterable[type[Message]]:
        """The kinds of messages that `receive` accepts."""
        ...

    def insert(self, route: bytes, message: Insert, now: int, /) -> InsertAck | None:
        """Accept an insert and return its ack; None: nothing happened, pass it to `step`.

        Without a decision (`confirmed`), there is no other effect.
        """
        ...

    def receive(self, route: bytes, message: Message, now: int, /) -> bool:
        """Handle another message; return False if nothing happened: pass it to `step`."""
        ...

    def end_batch(self, now: int, /) -> int:
        """End a batch of these messages; return the time until which no `BatchEnd` is needed."""
        ...

    @property
    def has_effects(self) -> bool:
        """Whether `pop_effects` returns any."""
        ...

    def pop_effects(self) -> list[Effect]:
        """Return the other effects of these messages since the last step."""
        ...
