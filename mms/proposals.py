"""Pending proposals about shards: commands that consensus has not applied yet.

Rule: an equal command is proposed again only after `RETRY_NS`; a different one at once. Invariant:
one command of each kind is remembered for a shard. A command that is lost with a leader costs time
only. See docs/protocol.md, sections 11 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Propose
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from mms.commands import Command
    from ziplog.core.node import Effect

#: Delay before an uncommitted command is proposed again.
RETRY_NS: Final = NS_PER_S
#: The key of proposals that are about no shard.
NO_SHARD: Final = -1


class Proposals:
    """The pending proposals of one part of the service."""

    def __init__(self) -> None:
        #: By shard and kind: the last command, and when it was proposed.
        self._pending: Final[dict[tuple[int, type[Command]], tuple[bytes, int]]] = {}

    def propose(self, shard: int, command: Command, now: int) -> list[Effect]:
        """Propose a command about `shard`, unless an equal one was proposed just now (in ns)."""
        key, encoded = (shard, type(command)), command.encode()
        before, at = self._pending.get(key, (b"", 0))
        if before == encoded and now < at + RETRY_NS:
            return []
        self._pending[key] = (encoded, now)
        return [Propose(encoded)]

    def on_decided(self, shard: int, kind: type[Command]) -> None:
        """Forget a command that consensus applied or refused."""
        self._pending.pop((shard, kind), None)

    def clear(self) -> None:
        """Forget all proposals: this node no longer leads."""
        self._pending.clear()
