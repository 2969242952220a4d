"""The last decisions, so that a commit record that comes twice is applied once.

Rule: `floor` is the position of the last decision that was forgotten. A copy of a forgotten one
began before its first decision, so before the floor, and is refused for that: bounded memory
suffices. Invariant: a transaction is decided once.
See docs/logdb.md, section 4.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from logdb.records import Decision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logdb.records import TransactionId
    from ziplog.types import RecordId

#: So many decisions are kept.
MAX_DECISIONS: Final = 65_536


class Decisions:
    """The last decisions, in log order."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        """Begin with none."""
        self._max: Final = max_decisions
        self._kept: Final[dict[tuple[bytes, int], Decision]] = {}
        #: The same, in log order.
        self._order: Final[deque[Decision]] = deque()
        #: The gsn of the last decision that was forgotten.
        self.floor = 0

    def __len__(self) -> int:
        return len(self._kept)

    def outcome(self, id_: TransactionId) -> Decision | None:
        """Return what became of a transaction; None: it is undecided, or forgotten."""
        return self._kept.get((id_.session, id_.number))

    def add(self, id_: TransactionId, position: RecordId, committed: bool) -> None:
        """Keep a decision; the oldest one may be forgotten for it."""
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
        """Return all, in log order, for a checkpoint."""
        return list(self._order)

    def load(self, decisions: Iterable[Decision], floor: int) -> None:
        """Take over those of a checkpoint; there must be none before."""
        assert not self._kept, "a checkpoint is loaded into an empty state"
        self._order.extend(decisions)
        self._kept.update(((each.session, each.number), each) for each in self._order)
        self.floor = floor
