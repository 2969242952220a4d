"""The states of keys that a client knows, so that its transactions read them without a request.

A client that writes alone knows what its next transaction reads: its own writes, and earlier
replies. Each `Got` and `Decided` names the last change of any key before it (`unchanged_since`). If
that change is not after the position of the known states, they are the states at the position of
the reply, too; otherwise all are dropped. Only reads inside a transaction use them: such reads may
be slightly old, and the commit compares them.

Invariant: each known state is the key's state at `position`. See docs/logdb.md, section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logdb.records import KeyRead, Write
    from logdb.wire import Decided, Got
    from ziplog.types import Gsn

#: Time after a reply during which the states at its position are used, in nanoseconds.
FRESH_NS: Final = 5 * NS_PER_MS
#: Number of successive replies without another client's change after which states are used.
#: Clients that write by turns never reach it: their reads would be too old, and they would abort.
QUIET_REPLIES: Final = 8
#: Maximum number of states, and maximum bytes of a value.
MAX_STATES: Final = 1_000
MAX_VALUE_BYTES: Final = 1_024


class KnownState(NamedTuple):
    """A key's state."""

    #: The gsn of the record with the value; 0: the key is absent.
    version: Gsn
    value: bytes | None


class KnownStates:
    """The states of keys at one position of the log."""

    __slots__ = ("_confirmed_at", "_position", "_quiet_replies", "_states")

    def __init__(self) -> None:
        """Start without states."""
        self._position: Gsn = 0
        #: By key, in the order in which they became known.
        self._states: Final[dict[bytes, KnownState]] = {}
        #: When a coordinator reported the position, in monotonic nanoseconds.
        self._confirmed_at = 0
        #: Replies since the last one that reported a change by another client.
        self._quiet_replies = 0

    def find(
        self, keys: Sequence[bytes], reads: Sequence[KeyRead], position: Gsn, now: int
    ) -> list[KnownState] | None:
        """Return the states of keys at a position; None: they must be requested.

        Args:
            keys: the keys.
            reads: the transaction's earlier reads, which must be unchanged.
            position: the greatest position that a coordinator has reported.
            now: monotonic nanoseconds.

        """
        states = self._states
        if (
            position != self._position
            or self._quiet_replies < QUIET_REPLIES
            or now - self._confirmed_at > FRESH_NS
        ):
            return None
        for read in reads:
            known = states.get(read.key)
            if known is None or known.version != read.version:
                return None
        found = []
        for key in keys:
            known = states.get(key)
            if known is None:
                return None
            found.append(known)
        return found

    def on_got(self, keys: Sequence[bytes], got: Got, now: int) -> None:
        """Add the states of a reply that was just received, and that has all values."""
        if not self._advance(got.position.gsn, got.unchanged_since, now):
            return
        for key, one in zip(keys, got.found, strict=True):
            self._add(key, 0 if one.entry is None else one.entry.version, one.value)

    def on_decided(
        self,
        decided: Decided,
        writes: Sequence[Write],
        values: Mapping[bytes, bytes | None],
        now: int,
    ) -> None:
        """Add the writes of an own transaction whose decision was just received.

        Args:
            decided: the decision.
            writes: the writes of the commit record.
            values: by key: what they write; None: a deletion.
            now: monotonic nanoseconds.

        """
        position = decided.position.gsn
        if decided.outcome != "committed":
            self.clear()
            return
        if not self._advance(position, decided.unchanged_since, now):
            return
        for write in writes:
            value = values[write.key]
            if value is None:
                self._add(write.key, 0, None)
            else:
                self._add(write.key, position if write.rid is None else write.rid.gsn, value)

    def _advance(self, position: Gsn, unchanged_since: Gsn | None, now: int) -> bool:
        """Move the states to the position of a reply; return False if they are later."""
        if position < self._position:
            return False
        if unchanged_since is None or unchanged_since > self._position:
            self.clear()
        else:
            self._quiet_replies += 1
        self._position, self._confirmed_at = position, now
        return True

    def _add(self, key: bytes, version: Gsn, value: bytes | None) -> None:
        states = self._states
        if value is not None and len(value) > MAX_VALUE_BYTES:
            states.pop(key, None)
            return
        states[key] = KnownState(version, value)
        if len(states) > MAX_STATES:
            del states[next(iter(states))]

    def clear(self) -> None:
        """Drop all states: others may have changed them."""
        self._states.clear()
        self._quiet_replies = 0

    def reset(self) -> None:
        """Drop the states and their position: they are of another log."""
        self.clear()
        self._position = 0
