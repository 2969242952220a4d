"""How a replica takes over the log of the one that a recovery chose; and how that one gives it.

It asks for what follows its last entry; the answer is more of the log, or where the two logs part
(as in Raft: the same number and view, the same log up to there). Then come the sessions. A server
that remembers its former view (a *witness*) changes nothing before all of it is here: should the
survivor die meanwhile, the witness's memory counts. Rule: one question at a time, repeated until
answered. Invariant: what this server knew to be stable stays (docs/protocol.md, section 11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.recovery.log_comparison import (
    digest_of,
    entries_after,
    may_be_same,
    watermark_at,
    first_gsn_of,
)
from shard.state.session_tables import MUCH
from shard.state.sessions import Sessions, end_of_table, size_of
from shard.storage.store import FullError
from ziplog.core.entries import SessionTable, SettledUnit
from ziplog.core.node import Halt, LogWarning, Persist
from ziplog.segments.entry import BusyError, Entry, UnreadableError
from ziplog.wire import Fetch, Fetched, Logged

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import ViewDecided

_MS: Final = 1_000_000
#: A question is asked again after so long.
_RETRY_NS: Final = 100 * _MS
#: One answer holds about so many bytes of entries, or of sessions: they take longer to make.
_ANSWER_BYTES: Final = 2 * 1024 * 1024
_ANSWER_TABLE_BYTES: Final = 512 * 1024
#: With more that is not on disk yet, nothing more is asked for.
_MAX_BACKLOG_BYTES: Final = 64 * 1024 * 1024


class StateTransfer:
    """One replica on its way into a view."""

    def __init__(
        self, state: ReplicaState, decision: ViewDecided, now: int, *, is_witness: bool
    ) -> None:
        self._state: Final = state
        self.decision: Final = decision
        self._survivor: Final = state.config.replicas[decision.survivor].name.encode()
        #: The last entry that this server holds, or has ordered to be stored.
        store = state.store
        # A log of which nothing can be read cannot be compared: all of it is taken anew.
        is_empty = store.first_fseq > store.last_fseq or not store.last_view
        self._after, self._after_view = (0, 0) if is_empty else (store.last_fseq, store.last_view)
        #: What has come of the sessions: how many tables, up to which unit, and what they say.
        self._tables = 0
        self._last_unit = (b"", 0)
        self._sessions: Final = Sessions()
        #: What is kept back until all is here: the entries to store, and where to cut before that.
        self._staged: list[Entry] | None = [] if is_witness else None
        self._cut_to: int | None = None
        #: The survivor has trimmed what follows our last entry.
        self._is_outdated = False
        #: What the survivor knew to be stable.
        self._stable = 0
        #: All of it has come.
        self._is_complete = False
        #: It was said that the log cannot be cut.
        self._has_warned = False
        self._request_due = now
        #: When to read again what the system refused to read; None: it refused nothing.
        self._retry_due: int | None = None

    # --- asking ---

    def tick(self, now: int) -> None:
        """Ask (again), if that is due."""
        if now < self._request_due or self._is_complete:
            return
        self._request_due = now + _RETRY_NS
        state = self._state
        if state.full or state.store.backlog_bytes > _MAX_BACKLOG_BYTES:
            return
        state.send(
            self._survivor,
            Fetch(
                state.cluster, state.shard, self.decision.view, state.server,
                self._after, self._after_view, self._tables, *self._last_unit,
            ),
        )  # fmt: skip

    def next_wakeup(self) -> int | None:
        """Return when to ask again, or to read again."""
        return self._retry_due if self._is_complete else self._request_due

    def retry_later(self, now: int) -> None:
        """Note that the system refused to read a file that is needed to join: try again later."""
        self._retry_due = now + _RETRY_NS

    def is_retry_due(self, now: int) -> bool:
        """Whether it is time to try again to join; if so, it is noted as tried."""
        if self._retry_due is None or now < self._retry_due:
            return False
        self._retry_due = None
        return True

    # --- taking ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> None:
        """Take an answer to the last question."""
        if (
            route != self._survivor
            or answer.view != self.decision.view
            or (answer.after, answer.after_view) != (self._after, self._after_view)
            or answer.session != self._tables
            or self._is_complete
        ):
            return
        self._stable = max(self._stable, min(answer.stable, answer.last))
        is_handled = True
        if answer.keep < answer.after:
            is_handled = self._cut(answer.keep)
        elif answer.after < answer.last:
            is_handled = self._append(answer)
        else:
            self._add_sessions(answer, now)
        self._request_due = now if is_handled else now + _RETRY_NS
        self.tick(now)

    def _add_sessions(self, answer: Fetched, now: int) -> None:
        """Take more of the survivor's sessions."""
        tables = answer.sessions
        if tables:
            self._sessions.take(tables, now)
            self._tables += len(tables)
            self._last_unit = end_of_table(tables[-1])
        self._sessions.horizon = max(self._sessions.horizon, answer.horizon)
        self._is_complete = answer.sessions_left == 0

    def _cut(self, keep: int) -> bool:
        """Drop what the survivor does not have: it was never acked by all. False: not now."""
        state, store = self._state, self._state.store
        stable = state.stream.stable
        if keep == self._after - 1:
            # The survivor has nothing of our last entry's view there: all of that view goes.
            keep = max(min(keep, store.last_of(self._after_view - 1)), min(keep, stable))
        if keep < stable:
            state.out.append(Halt(
                f"view {self.decision.view} of shard {state.shard} has other entries from number"
                f" {keep + 1} on, but {stable} was stable here: two histories were decided"
            ))  # fmt: skip
            return True
        if self._staged is not None:
            assert not self._staged, "the survivor's log has changed"
            self._cut_to = keep
        elif not self._truncate(keep):
            return False
        self._after, self._after_view = keep, store.view_at(keep)
        return True

    def _truncate(self, keep: int) -> bool:
        """Cut this server's log; False if that cannot be done now: it is tried again."""
        state = self._state
        try:
            state.store.truncate(keep)
        except (FullError, BusyError):
            return False
        except UnreadableError as error:
            if not self._has_warned:
                self._has_warned = True
                state.out.append(LogWarning(
                    f"{state.config.name} cannot join view {self.decision.view}, as it cannot cut"
                    f" its log: {error}. Put the file back, or start this server again"
                ))  # fmt: skip
            return False
        state.persisted = min(state.persisted, keep)
        return True

    @property
    def can_take_over(self) -> bool:
        """Whether this server's own unstable entries are to make room for the survivor's.

        All of these are here; or they begin with what lies so far ahead that all before is stable.
        """
        return self._staged is not None and (self._is_complete or self._is_outdated)

    def take_over(self) -> bool:
        """Store what was kept back, in the place of this server's own; False: not now."""
        if self._is_complete and self._cut_to is not None and not self._truncate(self._cut_to):
            self._is_complete, self._tables, self._last_unit = False, 0, (b"", 0)
            self._sessions.clear()
            self._request_due += _RETRY_NS
            return False
        staged, self._staged = self._staged, None
        if self._is_complete:
            self._state.out += map(Persist, staged or ())
        return True

    def _append(self, answer: Fetched) -> bool:
        """Take more of the survivor's log; False: not now."""
        state = self._state
        entries = [Entry(e.fseq, e.view, e.decision) for e in answer.entries]
        # Without any, all of the survivor's log was trimmed.
        first = entries[0].fseq if entries else answer.last + 1
        is_next = first == self._after + 1
        if self._staged is not None and not is_next:
            self._is_outdated = True
            return True
        # A log that was begun anew, and is empty still, may have been begun further on than this.
        if not is_next or (self._staged is None and state.store.last_fseq != self._after):
            if not self._reset(
                first - 1, next(filter(None, map(first_gsn_of, entries)), answer.trim)
            ):
                return False
            state.trim = max(state.trim, answer.trim)
        if self._staged is None:
            state.out += map(Persist, entries)
        else:
            self._staged += entries
        self._after = entries[-1].fseq if entries else answer.last
        self._after_view = entries[-1].view if entries else 0
        return True

    def _reset(self, fseq: int, gsn: int) -> bool:
        """Begin anew behind an entry, at a gsn; False if there is no space for that now."""
        try:
            self._state.store.reset(fseq, gsn)
        except FullError:
            return False
        self._state.persisted = fseq
        self._state.bytes_since_table = MUCH  # nothing stored here tells of the sessions
        return True

    def try_finish(self, now: int) -> bool:
        """Whether all of it is here and on disk; then the sessions are those of the survivor."""
        state = self._state
        if not self._is_complete or self._staged is not None or state.persisted < self._after:
            return False
        if not may_be_same(digest_of(state.store), self.decision.digest):
            state.out.append(Halt(
                f"the log of view {self.decision.view} of shard {state.shard} is not the one that"
                " was decided"
            ))  # fmt: skip
            return False
        self._restore_stream()
        state.sessions.take_over(self._sessions, now, state.store.last_end - 1)
        return True

    def _restore_stream(self) -> None:
        """Stand where the survivor stands."""
        store, stream = self._state.store, self._state.stream
        stable, durable = stream.stable_mark, stream.durable_mark
        if self._stable > stable.fseq:
            stable = watermark_at(store, self._stable)
        if durable.fseq < store.first_fseq - 1:
            durable = watermark_at(store, store.first_fseq - 1)
        stream.restore(stable, durable, list(entries_after(store, stable.fseq)))


def serve(state: ReplicaState, route: bytes, question: Fetch) -> UnreadableError | None:
    """Answer a replica that takes over this one's log, or repairs its own; or return why not."""
    store = state.store
    after, last = question.after, store.last_fseq
    keep = _common(state, after, question.after_view)
    entries: list[Entry] = []
    sessions: list[SessionTable] = []
    left = 0
    if keep == after and after < last:
        try:
            entries = store.read_after(after, _ANSWER_BYTES)
        except BusyError:
            return None  # the replica asks again
        except UnreadableError as error:
            return error
    elif keep == after:
        sessions, left = _some_sessions(state, question)
    state.send(
        route,
        Fetched(
            state.cluster, state.shard, question.view, state.server, after, question.session,
            keep, last, [Logged(e.fseq, e.view, e.decision) for e in entries],  # type: ignore[arg-type]
            sessions, left, state.trim, state.stream.stable, question.after_view,
            state.sessions.horizon,
        ),
    )  # fmt: skip
    return None


def _common(state: ReplicaState, after: int, view: int) -> int:
    """Return up to where a log whose last entry is this one may be kept, as far as is known."""
    store = state.store
    if after < store.first_fseq or (after <= store.last_fseq and store.view_at(after) == view):
        return after
    return min(after - 1, store.last_of(view))


def _some_sessions(state: ReplicaState, question: Fetch) -> tuple[list[SessionTable], int]:
    """Return the sessions that follow those that the question names, and whether more are left."""
    if question.client is None:
        return _whole_sessions(state, question.session)
    after = (question.client, question.seq)
    sessions, is_more = state.sessions.part(after, _ANSWER_TABLE_BYTES)
    return sessions, int(is_more)


def _whole_sessions(state: ReplicaState, start: int) -> tuple[list[SessionTable], int]:
    """Return sessions from number `start` on, as servers took them once, and how many are left."""
    clients = sorted(state.sessions.by_client)
    chosen: list[SessionTable] = []
    left = _ANSWER_BYTES
    for client in clients[start:]:
        session = state.sessions.by_client[client]
        units = [unit for unit in session.units.values() if unit.confirmed]
        plain = [SettledUnit(unit.seq, unit.slots, unit.checksum) for unit in units]
        chosen.append(
            SessionTable(client, session.first_incomplete, plain, horizon=session.horizon)
        )
        left -= size_of(chosen[-1])
        if left <= 0:
            break
    return chosen, max(len(clients) - start - len(chosen), 0)
