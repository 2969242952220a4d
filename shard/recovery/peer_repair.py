"""How a replica has its peers give it stable entries that it cannot read any more.

    whole --damage: known from the start, or a reader came upon it--> asking
    asking --all of it has received--> whole
    asking --nobody can give it--> unrepairable, for a while

Rule: one question at a time, to one peer after the other; meanwhile readers are told `unknown`.
In service only stable entries are asked for: they are the same on all replicas. In limbo they must
be shown to be of this server's own history: view and number identify an entry, and with it all
before it. Invariant: what is held until it is stored is bounded (docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.storage.store import FullError
from ziplog.core.entries import Place
from ziplog.core.node import LogWarning
from ziplog.segments.entry import BusyError, Entry, UnreadableError
from ziplog.wire import Fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.recovery.participant import MissingEntries, RecoveryParticipant
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Fetched

_MS: Final = 1_000_000
#: Without an answer for so long, the next peer is asked.
_ANSWER_NS: Final = 1000 * _MS
#: Each peer is asked so often before it is unrepairable.
_ROUNDS: Final = 3
#: Looking for what is missing reads files as a whole: not more often than this,
_RETRY_NS: Final = 1000 * _MS
#: and not so soon once it was unrepairable.
_UNREPAIRABLE_RETRY_NS: Final = 60_000 * _MS
#: What has received is stored when it is so much, or all; what is not shown to fit yet may be more: all
#: that one file holds.
_STORE_BYTES: Final = 16 * 1024 * 1024
_UNPROVEN_BYTES: Final = 128 * 1024 * 1024
#: So much is remembered of what was unrepairable, to say it once.
_MAX_UNREPAIRABLE: Final = 1024


class Repair:
    """One replica's damage, as far as it is known."""

    def __init__(self, state: ReplicaState, recovery: RecoveryParticipant) -> None:
        self._state: Final = state
        self._recovery: Final = recovery
        #: What cannot be read, and why.
        self._subject, self._reason = "", ""
        #: The entries that are asked for, first and last; None: none are.
        self._hole: tuple[int, int] | None = None
        #: The view that they are asked for in.
        self._view: int | None = None
        #: The view of the next entry behind them, if what comes is to be shown to fit to it; or 0.
        self._proof = 0
        #: What a server in limbo asks for.
        self._missing: MissingEntries | None = None
        #: What has received of them, and its bytes.
        self._received: list[Entry] = []
        self._received_bytes = 0
        #: How many questions led nowhere; it tells whose turn it is.
        self._failures = 0
        self._is_requested = False
        #: When to ask again, and when to look for damage again.
        self._due = self._retry_due = 0
        #: The store tells of damage that is not unrepairable.
        self._has_known_damage = bool(state.store.damage)
        #: What was said to be unrepairable.
        self._unrepairable: set[object] = set()

    # --- looking ---

    def request(self, gsn: int, error: UnreadableError, now: int) -> None:
        """Get what a reader could not be told, unless something else is being got."""
        if self._can_start(now):
            self._find(f"gsn {gsn}", error, lambda: self._state.store.damaged_range(gsn), now)

    def request_after(self, fseq: int, error: UnreadableError, now: int) -> None:
        """Get the entries after `fseq`, which a peer asked for and this server could not read."""
        if self._can_start(now):
            what = f"the entry after {fseq}"
            self._find(what, error, lambda: self._state.store.damaged_after(fseq), now)

    def request_in_limbo(self, now: int) -> None:
        """Get what keeps this server from leading a recovery, or from joining a view."""
        missing = self._recovery.missing
        if missing is None:
            return
        if missing is not self._missing:
            self._missing, self._hole, self._retry_due = missing, None, now
        if self._hole is None and now >= self._retry_due:
            self._retry_due = now + _RETRY_NS
            what = f"the entry after {missing.after}"
            self._find(
                what, missing.error, lambda: self._state.store.damaged_after(missing.after), now
            )

    def _find(
        self,
        what: str,
        error: UnreadableError,
        look: Callable[[], tuple[int, int] | None],
        now: int,
    ) -> None:
        self._subject, self._reason = what, str(error)
        try:
            hole = look()
        except BusyError:
            self._retry_due = now + _RETRY_NS
            return
        except UnreadableError as fault:
            self._abandon(str(fault), now)
            return
        if hole is None:
            self._abandon("nothing tells which entries are missing", now)
        else:
            self._start(hole, now)

    def _check_store(self, now: int) -> None:
        """Begin with what the store knows to be damaged."""
        if not self._has_known_damage or not self._can_start(now):
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

    def _can_start(self, now: int) -> bool:
        is_idle = self._hole is None and now >= self._retry_due
        if not is_idle or self._state.state not in {"up", "joined"}:
            return False
        self._retry_due = now + _RETRY_NS
        return True

    def _start(self, hole: tuple[int, int], now: int) -> None:
        state, stable = self._state, self._state.stream.stable
        self._view, self._proof = self._recovery.repair_view, 0
        if state.state == "limbo":
            # Who joins has the survivor's log, as its end shows; who would lead may have another.
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
            self._abandon("what follows does not tell which entries are missing", now)
        else:
            self._restart(now)

    # --- asking ---

    def next_wakeup(self) -> int | None:
        """Return when to ask again, or to look for what to ask."""
        if self._hole is not None:
            return self._due
        return (
            self._retry_due
            if self._has_known_damage and self._state.state in {"up", "joined"}
            else None
        )

    def tick(self, now: int) -> None:
        """Ask, or look for what to ask, if that is due."""
        if self._hole is None:
            self._check_store(now)
        elif now < self._due:
            return
        elif self._recovery.repair_view != self._view:
            # Whoever reads later asks again.
            self._hole, self._received = None, []
        elif self._is_requested:
            self._try_next_peer("no replica answers", now)
        else:
            self._request(now)

    def _restart(self, now: int) -> None:
        self._received, self._received_bytes = [], 0
        self._request(now)

    def _request(self, now: int) -> None:
        state = self._state
        assert self._view is not None, "nobody may be asked"
        self._is_requested, self._due = True, now + _ANSWER_NS
        after, view = self._last_known()
        question = Fetch(state.cluster, state.shard, self._view, state.server, after, view, 0)
        state.send(self._peer, question)

    @property
    def _peer(self) -> bytes:
        """Whose turn it is."""
        peers = self._state.peers
        return peers[self._failures % len(peers)]

    def _last_known(self) -> tuple[int, int]:
        """Return the number and the view of the entry before those that are to received."""
        assert self._hole is not None, "nothing is asked for"
        if self._received:
            return self._received[-1].fseq, self._received[-1].view
        first, last = self._hole
        store, before = self._state.store, first - 1
        # Of an entry that was trimmed nothing is known; mostly it is of the same view as the next.
        view = store.view_at(before) or (store.view_at(last + 1) if before else 0)
        return before, view

    # --- taking ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> bool:
        """Take an answer; whether it was one to the last question."""
        view = self._recovery.repair_view
        if (
            self._hole is None
            or not self._is_requested
            or route != self._peer
            or view != self._view
        ):
            return False
        told = answer.view, answer.after, answer.after_view, answer.session
        if told != (view, *self._last_known(), 0):
            return False
        after = answer.after
        # What follows them here may have to received along, to show that it follows them there.
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
        """Whether what has received is of this server's own history.

        One primary or one recovery decides all of a view: an entry of the view of what follows here
        is the same everywhere, and so is all before it.
        """
        return not self._proof or self._received[-1].view == self._proof

    def _store(self, now: int) -> None:
        assert self._hole is not None, "nothing was asked for"
        state, last = self._state, self._hole[1]
        if not self._is_proven:
            self._try_next_peer("what other replicas have may be of another history", now)
            return
        received = [entry for entry in self._received if entry.fseq <= last]
        try:
            fits = state.store.repair(received)
        except (FullError, BusyError):
            # The store says so itself. Whoever reads it later asks for it again.
            self._hole, self._received = None, []
            return
        except UnreadableError as error:
            self._abandon(str(error), now)
            return
        if not fits:
            self._try_next_peer("what other replicas have does not fit", now)
            return
        state.stream.mended(received)
        if received[-1].fseq < last:
            self._hole = (received[-1].fseq + 1, last)
            self._restart(now)
        else:
            self._hole, self._received, self._retry_due = None, [], now
            self._recovery.on_repaired()
            state.out.append(LogWarning(
                f"{state.config.name} could not read {self._subject} ({self._reason}); it can again, with"
                f" the help of {self._peer.decode()}. Have a look at the disk"
            ))  # fmt: skip

    def _try_next_peer(self, why: str, now: int) -> None:
        """Turn to the next peer, or give it up."""
        assert self._hole is not None, "nothing was asked for"
        self._failures += 1
        if self._failures >= _ROUNDS * len(self._state.peers):
            first, last = self._hole
            self._abandon(f"entries {first} to {last}: {why}", now)
        else:
            self._restart(now)

    def _abandon(self, why: str, now: int) -> None:
        """Say, once, that it is unrepairable, and leave it alone for a while."""
        state = self._state
        if state.state == "limbo":
            self._hole, self._received = None, []
            self._retry_due = now + _UNREPAIRABLE_RETRY_NS
            self._recovery.repair_failed(why)
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
        state.out.append(LogWarning(
            f"{state.config.name} cannot read {self._subject} ({self._reason}), and nobody could repair"
            f" it ({why}). Put the missing file back, or stop this server and move its data"
            " directory away: it joins with an empty one"
        ))  # fmt: skip


def _size(entry: Entry) -> int:
    decision = entry.decision
    return len(decision.body or b"") if type(decision) is Place else 0
