"""The metrics of cursors, and of the players whose tasks they are.

A player's cursors have the names PLAYER/TARGET/PARTITION, and its processes own cursors
PLAYER/members/N (docs/player.md, section 3). Every series of a cursor has the labels `player`,
`target` and `partition`; they are empty if no player of the name has a process, or had one. See
docs/monitoring.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.units import NS_PER_S
from ziplog.monitor.exposition import Family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ziplog.core.first_seen import FirstSeen
    from ziplog.monitor.exposition import Labels, Sample
    from ziplog.types import CursorInfo

_MEMBERS: Final = "members"


class ListedCursor(NamedTuple):
    """A cursor, and what the monitor knows of it."""

    info: CursorInfo
    #: Age of the first record that it has not passed, in seconds; 0: it has passed all.
    lag_s: float
    #: Time since its last move or change, in seconds; None: it has none.
    move_age_s: float | None


class Tail(NamedTuple):
    """The end of the log at one time."""

    #: The position of the last stable record, and the first position that is not trimmed.
    last: int
    trim: int
    #: When the last position reached its values.
    times: FirstSeen
    #: Monotonic, in ns.
    now: int

    def first_missing(self, info: CursorInfo) -> int:
        """Return the first position that is there and that a cursor has not passed."""
        return max(info.position.gsn, self.trim)

    def is_older(self, position: int) -> bool:
        """Whether records from a position on were there before the first observation."""
        first = self.times.first
        return first is not None and position <= min(first, self.last)

    def lag_s(self, position: int, inserted_at: Mapping[int, int]) -> float:
        """Return the age of the first record from a position on, in seconds; 0: there is none.

        Args:
            position: see `first_missing`.
            inserted_at: for positions that are older than the observations: the monotonic time of
                the first record from there on, in ns.

        """
        if position > self.last:
            return 0.0
        if self.is_older(position) and position in inserted_at:
            return max(self.now - inserted_at[position], 0) / NS_PER_S
        return self.times.age_s(position, self.now)


def is_member(name: str) -> bool:
    """Whether a cursor stands for a process of a player, and not for a position."""
    parts = name.split("/")
    return len(parts) == 3 and parts[1] == _MEMBERS and parts[2].isdecimal()


def families(listed: Sequence[ListedCursor] | None) -> Iterator[Family]:
    """Yield the metrics of all cursors; None: they are unknown, also their number."""
    cursors = listed or ()
    members: dict[str, int] = {}
    for info, *_ in cursors:
        if is_member(info.name):
            player = info.name.partition("/")[0]
            members[player] = members.get(player, 0) + _is_owned(info)
    positions = [
        (one, _labels(one.info.name, members)) for one in cursors if not is_member(one.info.name)
    ]
    yield Family("ziplog_cursors", "gauge", "Number of cursors.", _number(listed))
    yield Family(
        "ziplog_player_members", "gauge", "Processes of the player that renew their claims.",
        [({"player": player}, count) for player, count in members.items()],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_lag_seconds", "gauge",
        "Age of the first record that the cursor has not passed; 0: it has passed all.",
        [(labels, one.lag_s) for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_owned", "gauge", "Whether a client owns the cursor and renews its claim.",
        [(labels, _is_owned(one.info)) for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_paused", "gauge", "Whether the cursor is paused.",
        [(labels, one.info.state == "paused") for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_holding", "gauge", "Whether the cursor keeps records from being trimmed.",
        [(labels, one.info.is_holding) for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_term", "gauge", "The cursor's term; each claim raises it.",
        [(labels, one.info.term) for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_position", "gauge", "The cursor's position.",
        [(labels, one.info.position.gsn) for one, labels in positions],
    )  # fmt: skip
    yield Family(
        "ziplog_cursor_move_age_seconds", "gauge", "Time since the cursor's last move or change.",
        [(labels, one.move_age_s) for one, labels in positions if one.move_age_s is not None],
    )  # fmt: skip


def _number(listed: Sequence[ListedCursor] | None) -> list[Sample]:
    return [] if listed is None else [({}, len(listed))]


def _is_owned(info: CursorInfo) -> bool:
    return bool(info.owner) and not info.is_silent


def _labels(name: str, players: Mapping[str, int]) -> Labels:
    parts = name.split("/")
    if len(parts) == 3 and parts[0] in players and parts[2].isdecimal():
        player, target, partition = parts
    else:
        player = target = partition = ""
    return {"cursor": name, "player": player, "target": target, "partition": partition}
