"""The last decisions, so that a repeated commit record is applied only once.

`floor` is the position of the last forgotten decision. A copy of a forgotten record began before
its first decision, so before the floor, and expires. Bounded memory therefore suffices. Invariant:
a transaction is decided once. See docs/logdb.md, section 4.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from logdb.records import Decision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logdb.records import TransactionId
    from ziplog.types import RecordId

#: Maximum number of decisions kept.
MAX_DECISIONS: Final = 65_536


class Decisions:
    """The last decisions, in log order."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        """Start without decisions."""
        self._max: Final = max_decisions
        self._kept: Final[dict[tuple[bytes, int], Decision]] = {}
        #: The same, in log order.
        self._order: Final[deque[Decision]] = deque()
        #: The gsn of the last forgotten decision.
        self.floor = 0

    def __len__(self) -> int:
        return len(self._kept)

    def outcome(self, id_: TransactionId) -> Decision | None:
        """Return the decision about a transaction; None: it is undecided, or forgotten."""
        return self._kept.get((id_.session, id_.number))

    def add(self, id_: TransactionId, position: RecordId, committed: bool) -> None:
        """Add a decision; at the limit, forget the oldest one."""
        name = (id_.session, id_.number)
        kept = self._kept
        assert name not in kept, f"{name} was decided twice"
        kept[name] = decision = Decision(id_.session, id_.number, position, committed)
        self._order.append(decision)
        if len(kept) > self._max:
            oldest = self._order.popleft()
            del kept[oldest.session, oldest.number]
            self.floor = oldest.position.gsn

    def export(self) -> list[Decision]:
        """Return all decisions in log order, for a checkpoint."""
        return list(self._order)

    def load(self, decisions: Iterable[Decision], floor: int) -> None:
        """Load the decisions of a checkpoint into an empty table."""
        assert not self._kept, "a checkpoint is loaded into an empty state"
        self._order.extend(decisions)
        self._kept.update(((each.session, each.number), each) for each in self._order)
        self.floor = floor
