"""How a replica has its peers give it stable entries that it cannot read any more.

    whole --a reader comes upon damage--> asking --all of it has come--> whole
    asking --nobody can give it--> hopeless for a while

Rule: one question at a time, to one peer after the other; meanwhile readers are told `unknown`.
Only stable entries are asked for: they are the same on all replicas. Invariant: what is held here
until it is stored is bounded (docs/protocol.md, section 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.entry import Entry, FullError, UnreadableError
from ziplog.node import Warn
from ziplog.wire import Fetch, Place

if TYPE_CHECKING:
    from shard.state import ReplicaState
    from ziplog.wire import Fetched

_MS: Final = 1_000_000
#: Without an answer for so long, the next peer is asked.
_ANSWER_NS: Final = 1000 * _MS
#: Each peer is asked so often before it is hopeless.
_ROUNDS: Final = 3
#: Looking for what is missing reads files as a whole: not more often than this,
_LOOK_AGAIN_NS: Final = 1000 * _MS
#: and not so soon once it was hopeless.
_HOPELESS_NS: Final = 60_000 * _MS
#: What has come is stored when it is so much, or all.
_STORE_BYTES: Final = 16 * 1024 * 1024


class Repair:
    """One replica's damage, as far as a reader came upon it."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The position that a reader wanted, and why it could not have it.
        self._gsn, self._why = 0, ""
        #: The entries that are asked for, first and last; None: none are.
        self._hole: tuple[int, int] | None = None
        #: What has come of them, and its bytes.
        self._come: list[Entry] = []
        self._come_bytes = 0
        #: How many questions led nowhere; it tells whose turn it is.
        self._failures = 0
        self._is_asked = False
        self._due = 0
        self._look_due = 0

    # --- asking ---

    def needed(self, gsn: int, error: UnreadableError, now: int) -> None:
        """Get what a reader could not be told, unless something else is being got."""
        state = self._state
        if self._hole is not None or now < self._look_due or state.state not in {"up", "joined"}:
            return
        self._look_due = now + _LOOK_AGAIN_NS
        self._gsn, self._why = gsn, str(error)
        try:
            hole = state.store.damaged_range(gsn)
        except UnreadableError as fault:
            self._give_up(str(fault), now)
            return
        if hole is None:
            self._give_up("nothing tells which entries are missing", now)
        elif not state.peers:
            self._give_up("there is no other replica", now)
        elif hole[0] <= state.stream.stable:
            self._failures = 0
            self._begin(hole[0], min(hole[1], state.stream.stable), now)

    def _begin(self, first: int, last: int, now: int) -> None:
        self._hole = (first, last)
        self._come, self._come_bytes = [], 0
        self._is_asked, self._due = False, now
        self.woke(now)

    def next_wakeup(self) -> int | None:
        """Return when to ask again."""
        return self._due if self._hole is not None else None

    def woke(self, now: int) -> None:
        """Ask, if that is due."""
        state = self._state
        if self._hole is None or now < self._due:
            return
        if state.state not in {"up", "joined"}:
            # What is stable in the view to come, its survivor will say.
            self._hole = None
            return
        if self._is_asked:
            self._fail("no replica answers", now)
            return
        self._is_asked, self._due = True, now + _ANSWER_NS
        after, view = self._last_known()
        question = Fetch(state.cluster, state.shard, state.view, state.server, after, view, 0)
        state.send(self._peer, question)

    @property
    def _peer(self) -> bytes:
        """Whose turn it is."""
        peers = self._state.peers
        return peers[self._failures % len(peers)]

    def _last_known(self) -> tuple[int, int]:
        """Return the number and the view of the entry before those that are to come."""
        assert self._hole is not None, "nothing is asked for"
        if self._come:
            return self._come[-1].fseq, self._come[-1].view
        first, last = self._hole
        store = self._state.store
        before = first - 1
        # Of an entry that was trimmed nothing is known; mostly it is of the same view as the next.
        view = store.view_at(before) or (store.view_at(last + 1) if before else 0)
        return before, view

    # --- taking ---

    def fetched(self, route: bytes, answer: Fetched, now: int) -> bool:
        """Take an answer; whether it was one to the last question."""
        if self._hole is None or not self._is_asked or route != self._peer:
            return False
        after, _ = self._last_known()
        if (answer.view, answer.after, answer.session) != (self._state.view, after, 0):
            return False
        _, last = self._hole
        come = [Entry(e.fseq, e.view, e.decision) for e in answer.entries if e.fseq <= last]
        is_next = [e.fseq for e in come] == list(range(after + 1, after + 1 + len(come)))
        if answer.keep < after or not come or not is_next:
            self._fail("no replica has them", now)
            return True
        self._come += come
        self._come_bytes += sum(map(_size, come))
        self._is_asked, self._due = False, now
        if come[-1].fseq == last or self._come_bytes >= _STORE_BYTES:
            self._store(now)
        self.woke(now)
        return True

    def _store(self, now: int) -> None:
        state, come = self._state, self._come
        assert self._hole is not None, "nothing was asked for"
        _, last = self._hole
        try:
            is_stored = state.store.repair(come)
        except FullError:
            # The store says so itself. Whoever reads it later asks for it again.
            self._hole = None
            return
        except UnreadableError as error:
            self._give_up(str(error), now)
            return
        if not is_stored:
            self._fail("what other replicas have does not fit", now)
        elif come[-1].fseq < last:
            self._begin(come[-1].fseq + 1, last, now)
        else:
            self._hole, self._come = None, []
            self._look_due = now
            state.out.append(Warn(
                f"{state.config.name} could not read entries up to {last} ({self._why}); they are"
                f" whole again, with the help of {self._peer.decode()}. Have a look at the disk"
            ))  # fmt: skip

    def _fail(self, why: str, now: int) -> None:
        """Turn to the next peer, or give it up."""
        assert self._hole is not None, "nothing was asked for"
        self._failures += 1
        if self._failures >= _ROUNDS * len(self._state.peers):
            first, last = self._hole
            self._give_up(f"{why}: entries {first} to {last}", now)
        else:
            self._begin(*self._hole, now)

    def _give_up(self, why: str, now: int) -> None:
        self._hole, self._come = None, []
        self._look_due = now + _HOPELESS_NS
        state = self._state
        state.out.append(Warn(
            f"{state.config.name} cannot read gsn {self._gsn} ({self._why}), and could not have it"
            f" repaired ({why}). Put the missing file back, or stop this server and move its data"
            " directory away: it joins with an empty one"
        ))  # fmt: skip


def _size(entry: Entry) -> int:
    decision = entry.decision
    return len(decision.body or b"") if type(decision) is Place else 0
