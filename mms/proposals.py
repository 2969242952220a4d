"""Commands about shards that were proposed, and of which consensus has not told yet.

Rule: the same command is not proposed again before it has had its time; one that says something
else is, at once. Invariant: one of each kind is remembered for a shard. What was lost with a leader
costs time only. See docs/protocol.md, sections 11 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Propose

if TYPE_CHECKING:
    from mms.commands import Command
    from ziplog.core.node import Effect

#: A command that is not committed after this time is proposed again.
RETRY_NS: Final = 1_000_000_000


class Proposals:
    """What one part of the service has proposed."""

    def __init__(self) -> None:
        #: By shard and kind: the last command, and when it was proposed.
        self._pending: Final[dict[tuple[int, type[Command]], tuple[bytes, int]]] = {}

    def propose(self, shard: int, command: Command, now: int) -> list[Effect]:
        """Propose a command that is about `shard`, unless it was proposed just now (in ns)."""
        key, encoded = (shard, type(command)), command.encode()
        before, at = self._pending.get(key, (b"", 0))
        if before == encoded and now < at + RETRY_NS:
            return []
        self._pending[key] = (encoded, now)
        return [Propose(encoded)]

    def on_decided(self, shard: int, kind: type[Command]) -> None:
        """Note that consensus took, or refused, a command."""
        self._pending.pop((shard, kind), None)

    def clear(self) -> None:
        """Forget all: this node does not lead any more."""
        self._pending.clear()
