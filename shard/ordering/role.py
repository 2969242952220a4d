"""What the two roles of a replica, primary and backup, have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shard.state.sessions import HeldUnit, Session
    from ziplog.segments.entry import Entry
    from ziplog.types import Gsn


class Role(Protocol):
    """The part of a replica that orders units: its primary or its backup."""

    #: Whether `on_batch_end` must follow each batch of plain inserts.
    forwards_at_once: bool

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

    def on_ahead_hint(self, gsn: Gsn, now: int, /) -> bool:
        """Decide the positions below `gsn` for readers of another shard; False: a backup cannot."""
        ...

    @property
    def rest_until(self) -> int:
        """Time until which the role needs no further `on_batch_end`, in ns."""
        ...

    def on_batch_end(self, now: int, /) -> list[Entry] | None:
        """Send what a batch caused; return what became stable."""
        ...
