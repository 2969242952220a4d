"""What the two roles of a replica, primary and backup, have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shard.state.sessions import HeldUnit, Session
    from ziplog.segments.entry import Entry
    from ziplog.types import Gsn


class Role(Protocol):
    """The part of a replica that orders units: its primary or its backup."""

    def can_accept(self) -> bool:
        """Whether there is room for another unit."""
        ...

    def accept(self, session: Session, unit: HeldUnit, now: int, /) -> None:
        """Order a new unit."""
        ...

    def on_copy(self, unit: HeldUnit, since: int, /) -> None:
        """Handle another copy of a known unit."""
        ...

    def plain_until(self, now: int, /) -> int:
        """Return the time until which `accept_plain` may be called if nothing else happens."""
        ...

    def accept_plain(self, session: Session, unit: HeldUnit, now: int, /) -> bool:
        """Order a new unit; return False, with nothing changed, if `accept` must do it."""
        ...

    def on_settled(self, session: Session, first_incomplete: int, now: int, /) -> None:
        """Forget the units below the client's `first_incomplete`."""
        ...

    def on_ahead_hint(self, gsn: Gsn, now: int, /) -> None:
        """Handle a hint: readers wait for the positions below `gsn` to be decided."""
        ...

    @property
    def batch_end_due(self) -> int:
        """When a batch next needs `on_batch_end`, in ns, while only plain inserts arrive."""
        ...

    def newly_stable(self, now: int, /) -> list[Entry]:
        """Return what became stable with this batch."""
        ...

    def on_batch_end(self, now: int, /) -> None:
        """Send what a batch caused to the other servers."""
        ...
