"""Repair of unreadable entries with copies from peers.

    whole --damage: known at the start, or found by a reader--> requesting
    requesting --all entries received--> whole
    requesting --no peer has them--> unrepairable, for a while

Rule: one request at a time, to one peer after the other; meanwhile readers receive `unknown`. In
service, a replica requests only stable entries: they are equal on all replicas. In limbo, received
entries must be proven to be of its own history: view and number identify an entry and all entries
before it. Invariant: the bytes held until they are stored are bounded (docs/protocol.md,
section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.storage.store import FullError
from ziplog.core.entries import Place
from ziplog.core.node import LogWarning
from ziplog.core.units import NS_PER_MS
from ziplog.segments.entry import BusyError, Entry, UnreadableError
from ziplog.wire import Fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.recovery.participant import MissingEntries, RecoveryParticipant
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Fetched

#: Timeout of a request, after which the next peer receives it.
_ANSWER_NS: Final = 1000 * NS_PER_MS
#: Requests to each peer before the repair is abandoned. Each round has twice the timeout of the one
#: before: an answer may take long, and one that comes too late is dropped.
_ROUNDS: Final = 3
#: Minimum interval between searches for missing entries: a search reads whole files.
_RETRY_NS: Final = 1000 * NS_PER_MS
#: Interval before an abandoned repair is tried again.
_UNREPAIRABLE_RETRY_NS: Final = 60_000 * NS_PER_MS
#: Received bytes that are stored at once. Unproven entries may be more, up to one segment file.
_STORE_BYTES: Final = 16 * 1024 * 1024
_UNPROVEN_BYTES: Final = 128 * 1024 * 1024
#: Maximum number of remembered unrepairable ranges; each is logged once.
_MAX_UNREPAIRABLE: Final = 1024


class Repair:
    """The known damage of one replica's log, and its repair."""

    def __init__(self, state: ReplicaState, recovery: RecoveryParticipant) -> None:
        self._state: Final = state
        self._recovery: Final = recovery
        #: The unreadable entries, and the reason, for messages.
        self._subject, self._reason = "", ""
        #: First and last of the requested entries; None: none.
        self._hole: tuple[int, int] | None = None
        #: The view of the request.
        self._view: int | None = None
        #: The view of the first entry after the hole, if received entries must be proven; else 0.
        self._proof = 0
        #: The entries that a server in limbo needs.
        self._missing: MissingEntries | None = None
        #: The received entries and their bytes.
        self._received: list[Entry] = []
        self._received_bytes = 0
        #: Number of failed requests; it selects the next peer.
        self._failures = 0
        #: When the request times out, and when to search for damage again.
        self._due = self._retry_due = 0
        #: The store reports damage that may be repairable.
        self._has_known_damage = bool(state.store.damage)
        #: The ranges that were reported as unrepairable.
        self._unrepairable: set[object] = set()

    # --- finding damage ---

    def request(self, gsn: int, error: UnreadableError, now: int) -> None:
        """Repair the entry at `gsn`, which a reader could not read, unless a repair runs."""
        if self._begin_attempt(now):
            store = self._state.store
            self._subject, self._reason = f"gsn {gsn}", str(error)
            self._find(lambda: store.damaged_range(gsn), lambda: store.scan(gsn, 1), now)

    def request_after(self, fseq: int, error: UnreadableError, now: int) -> None:
        """Repair the entries after `fseq`, which a peer requested and this server cannot read."""
        if self._begin_attempt(now):
            self._find_after(fseq, error, now)

    def request_in_limbo(self, now: int) -> None:
        """Repair the entries that this server needs to lead a recovery or to join a view."""
        missing = self._recovery.missing
        if missing is None:
            return
        if missing is not self._missing:
            self._missing, self._hole, self._retry_due = missing, None, now
        if self._hole is None and now >= self._retry_due:
            self._retry_due = now + _RETRY_NS
            self._find_after(missing.after, missing.error, now)

    def _find_after(self, fseq: int, error: UnreadableError, now: int) -> None:
        store = self._state.store
        self._subject, self._reason = f"the entry after {fseq}", str(error)
        self._find(lambda: store.damaged_after(fseq), lambda: store.read_after(fseq, 1), now)

    def _find(
        self, look: Callable[[], tuple[int, int] | None], read: Callable[[], list[Entry]], now: int
    ) -> None:
        """Find the missing entries with `look`, and request them.

        If there are none, `read` shows whether the read error has passed.
        """
        try:
            hole = look()
            is_readable = hole is None and self._is_readable(read, now)
        except BusyError:
            self._retry_due = now + _RETRY_NS
            return
        except UnreadableError as fault:
            self._abandon(str(fault), now)
            return
        if hole is not None:
            self._start(hole, now)
        elif not is_readable:
            self._abandon("the missing entries cannot be identified", now)

    def _is_readable(self, read: Callable[[], list[Entry]], now: int) -> bool:
        """Whether what could not be read can be read now.

        Raises:
            BusyError: the system refuses to read the file now.

        """
        state = self._state
        try:
            found = read()
            if state.server_state == "limbo" and not self._recovery.read_again(found, now):
                return False
        except BusyError:
            raise
        except UnreadableError:
            return False
        state.effects.append(LogWarning(
            f"{state.config.name} could not read {self._subject} ({self._reason}), and can read it"
            " now. Check the disk"
        ))  # fmt: skip
        return True

    def _check_store(self, now: int) -> None:
        """Start the repair of damage that the store knows."""
        if not self._has_known_damage or not self._begin_attempt(now):
            return
        left = [hole for hole in self._state.store.damage if hole not in self._unrepairable]
        self._has_known_damage = bool(left)
        if left:
            first, last = left[0]
            self._subject, self._reason = (
                f"entries {first} to {last}",
                "they are damaged or missing",
            )
            self._start(left[0], now)

    def _begin_attempt(self, now: int) -> bool:
        """Begin an attempt, unless one runs or was begun just now; return whether it began."""
        is_idle = self._hole is None and now >= self._retry_due
        if not is_idle or self._state.server_state not in {"up", "joined"}:
            return False
        self._retry_due = now + _RETRY_NS
        return True

    def _start(self, hole: tuple[int, int], now: int) -> None:
        state, stable = self._state, self._state.stream.stable
        self._view, self._proof = self._recovery.repair_view, 0
        if state.server_state == "limbo":
            # A joining server has the survivor's log, as its digest shows; a leader may not.
            self._proof = state.store.view_at(hole[1] + 1) if self._view == 0 else 0
        elif hole[0] > stable:
            return
        else:
            hole = (hole[0], min(hole[1], stable))
        self._failures = 0
        self._hole = hole
        if not state.peers:
            self._abandon("there is no other replica", now)
        elif self._view == 0 and not self._proof:
            self._abandon("the following entry does not identify the missing ones", now)
        else:
            self._restart(now)

    # --- requests ---

    def next_wakeup(self) -> int | None:
        """Return when the request times out, or when to search for damage."""
        if self._hole is not None:
            return self._due
        return (
            self._retry_due
            if self._has_known_damage and self._state.server_state in {"up", "joined"}
            else None
        )

    def tick(self, now: int) -> None:
        """Send a request, or search for damage, if that is due."""
        if self._hole is None:
            self._check_store(now)
        elif now < self._due:
            return
        elif self._recovery.repair_view != self._view:
            # A later read starts the repair again.
            self._hole, self._received = None, []
        else:
            self._try_next_peer("no replica answers", now)

    def _restart(self, now: int) -> None:
        self._received, self._received_bytes = [], 0
        self._request(now)

    def _request(self, now: int) -> None:
        state = self._state
        assert self._view is not None, "no request is allowed now"
        self._due = now + (_ANSWER_NS << (self._failures // len(state.peers)))
        after, view = self._last_known()
        request = Fetch(state.cluster, state.shard, self._view, state.server, after, view, 0)
        state.send(self._peer, request)

    @property
    def _peer(self) -> bytes:
        """The peer that receives the next request."""
        peers = self._state.peers
        return peers[self._failures % len(peers)]

    def _last_known(self) -> tuple[int, int]:
        """Return the number and the view of the entry before the next requested one."""
        assert self._hole is not None, "no repair runs"
        if self._received:
            return self._received[-1].fseq, self._received[-1].view
        first, last = self._hole
        store, before = self._state.store, first - 1
        # The view of a trimmed entry is unknown; mostly it is that of the next entry.
        view = store.view_at(before) or (store.view_at(last + 1) if before else 0)
        return before, view

    # --- answers ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> bool:
        """Handle an answer; return whether it was one to the last request."""
        view = self._recovery.repair_view
        if self._hole is None or route != self._peer or view != self._view:
            return False
        request = answer.view, answer.after, answer.after_view, answer.session
        if request != (view, *self._last_known(), 0):
            return False
        after = answer.after
        # The entry after the hole may be needed as the proof.
        last = self._hole[1] + bool(self._proof)
        received = [Entry(e.fseq, e.view, e.decision) for e in answer.entries if e.fseq <= last]
        is_next = [e.fseq for e in received] == list(range(after + 1, after + 1 + len(received)))
        if not received or not is_next:
            self._try_next_peer("no other replica has them", now)
            return True
        self._received += received
        self._received_bytes += sum(map(_size, received))
        is_all = received[-1].fseq == last or (
            received[-1].fseq == self._hole[1] and self._is_proven
        )
        if is_all or self._received_bytes >= (_STORE_BYTES if self._is_proven else _UNPROVEN_BYTES):
            self._store(now)
        else:
            self._request(now)
        return True

    @property
    def _is_proven(self) -> bool:
        """Whether the received entries are of this server's own history.

        One primary or one recovery decides a whole view. An entry of the view that follows the hole
        is therefore equal on all replicas, and so are all entries before it.
        """
        return not self._proof or self._received[-1].view == self._proof

    def _store(self, now: int) -> None:
        assert self._hole is not None, "no repair runs"
        state, last = self._state, self._hole[1]
        if not self._is_proven:
            self._try_next_peer("the entries of other replicas may be of another history", now)
            return
        received = [entry for entry in self._received if entry.fseq <= last]
        try:
            fits = state.store.repair(received)
        except (FullError, BusyError):
            # The store reports this itself. A later read starts the repair again.
            self._hole, self._received = None, []
            return
        except UnreadableError as error:
            self._abandon(str(error), now)
            return
        if not fits:
            self._try_next_peer("the entries of other replicas do not fit", now)
            return
        state.stream.add_repaired(received)
        if received[-1].fseq < last:
            self._hole = (received[-1].fseq + 1, last)
            self._restart(now)
        else:
            self._hole, self._received, self._retry_due = None, [], now
            self._recovery.on_repaired()
            state.counters.repairs["repaired"] += 1
            state.effects.append(LogWarning(
                f"{state.config.name} could not read {self._subject} ({self._reason}) and repaired"
                f" it with a copy from {self._peer.decode()}. Check the disk"
            ))  # fmt: skip

    def _try_next_peer(self, why: str, now: int) -> None:
        """Send the request to the next peer, or abandon the repair."""
        assert self._hole is not None, "no repair runs"
        self._failures += 1
        if self._failures >= _ROUNDS * len(self._state.peers):
            first, last = self._hole
            self._abandon(f"entries {first} to {last}: {why}", now)
        else:
            self._restart(now)

    def _abandon(self, why: str, now: int) -> None:
        """Log once that the range cannot be repaired, and wait before the next attempt."""
        state = self._state
        self._recovery.repair_failed(why)
        if state.server_state == "limbo":
            self._hole, self._received = None, []
            self._retry_due = now + _UNREPAIRABLE_RETRY_NS
            return
        unrepairable: set[object] = {known for known in (self._subject, self._hole) if known}
        is_repeated = bool(unrepairable & self._unrepairable)
        self._hole, self._received = None, []
        self._retry_due = now + _UNREPAIRABLE_RETRY_NS
        if len(self._unrepairable) >= _MAX_UNREPAIRABLE:
            self._unrepairable.clear()
        self._unrepairable |= unrepairable
        if is_repeated:
            return
        state.counters.repairs["impossible"] += 1
        state.effects.append(LogWarning(
            f"{state.config.name} cannot read {self._subject} ({self._reason}), and no peer could"
            f" repair it ({why}). Restore the missing file. Only if another replica is up and has"
            " these entries, you may instead stop this server and move its data directory away: it"
            " then joins with an empty one"
        ))  # fmt: skip


def _size(entry: Entry) -> int:
    decision = entry.decision
    return len(decision.body or b"") if type(decision) is Place else 0
