"""State transfer: a joining replica copies the survivor's log and sessions.

The joining replica requests the entries after its last one. The survivor answers with entries, or
with the point where the two logs part. (As in Raft, equal number and view mean equal logs up to
there.) Sessions follow. A *witness*, a server that remembers its former view, changes nothing until
everything has arrived: if the survivor dies, the witness may be the next one. Rule: one request at
a time, repeated until answered. Invariant: entries that this server knew to be stable stay
(docs/protocol.md, section 11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.recovery.log_comparison import (
    digest_of,
    entries_after,
    first_gsn_of,
    may_be_same,
    watermark_at,
)
from shard.state.session_tables import OVERDUE_BYTES
from shard.state.sessions import Sessions, end_of_table, size_of
from shard.storage.store import FullError
from ziplog.core import distance
from ziplog.core.entries import SessionTable, SettledUnit
from ziplog.core.node import Halt, LogWarning, Persist
from ziplog.core.units import NS_PER_MS
from ziplog.segments.entry import BusyError, Entry, UnreadableError
from ziplog.wire import Fetch, Fetched, Logged

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import ViewDecided

#: Bytes of entries, or of sessions, in one answer. Sessions take longer to encode.
_ANSWER_BYTES: Final = 2 * 1024 * 1024
_ANSWER_TABLE_BYTES: Final = 512 * 1024
#: Maximum time for an answer: after a cut link heals, the request is repeated this late at most.
_MAX_RETRY_NS: Final = 2_000 * NS_PER_MS
#: Bytes not yet on disk above which no more entries are requested.
_MAX_BACKLOG_BYTES: Final = 64 * 1024 * 1024


class StateTransfer:
    """The state transfer of one joining replica."""

    def __init__(
        self, state: ReplicaState, decision: ViewDecided, now: int, *, is_witness: bool
    ) -> None:
        self._state: Final = state
        self.decision: Final = decision
        self._retry_ns: Final = distance.state_transfer_retry_ns(state.config.limits.rtt_ms)
        #: Time for an answer. It doubles with each one that takes longer: an answer is large, and
        #: repeated ones would fill the way for the next.
        self._answer_ns = self._retry_ns
        self._is_answered = True
        self._survivor: Final = state.config.replicas[decision.survivor].name.encode()
        #: The last entry that this server holds or is about to store.
        store = state.store
        # A log without a readable entry cannot be compared: it is copied as a whole.
        is_empty = store.first_fseq > store.last_fseq or not store.last_view
        self._after, self._after_view = (0, 0) if is_empty else (store.last_fseq, store.last_view)
        #: The last entry here that is known to be stable. Trimmed ones were, also if the log could
        #: not be read at the start.
        self._known: Final = max(state.stream.stable, store.first_fseq - 1)
        #: The received session tables: their number, their last unit, their content.
        self._tables = 0
        self._last_unit = (b"", 0)
        self._sessions: Final = Sessions()
        #: A witness stages entries until everything has arrived, and where to cut before them.
        self._staged: list[Entry] | None = [] if is_witness else None
        self._cut_to: int | None = None
        #: The survivor holds our last entry, or that entry is stable.
        self._is_common = False
        #: The survivor has trimmed the entries after our last one.
        self._is_outdated = False
        #: The last entry that the survivor knew to be stable.
        self._stable = 0
        #: Everything has arrived.
        self._is_complete = False
        #: The warning that the log cannot be cut was logged.
        self._has_warned = False
        self._request_due = now
        #: When to retry a read that the system refused; None: none was refused.
        self._retry_due: int | None = None

    # --- requests ---

    def tick(self, now: int) -> None:
        """Send or repeat the request, if it is due."""
        if now < self._request_due or self._is_complete:
            return
        state = self._state
        if state.full or state.store.backlog_bytes > _MAX_BACKLOG_BYTES:
            self._request_due = now + self._retry_ns
            return
        if not self._is_answered:
            self._answer_ns = max(self._answer_ns, min(2 * self._answer_ns, _MAX_RETRY_NS))
        self._is_answered = False
        self._request_due = now + self._answer_ns
        state.send(
            self._survivor,
            Fetch(
                state.cluster, state.shard, self.decision.view, state.server,
                self._after, self._after_view, self._tables, *self._last_unit,
            ),
        )  # fmt: skip

    def next_wakeup(self) -> int | None:
        """Return when to repeat the request, or the refused read."""
        return self._retry_due if self._is_complete else self._request_due

    def retry_later(self, now: int) -> None:
        """Schedule a retry: the system refused to read a file that is needed to join."""
        self._retry_due = now + self._retry_ns

    def take_due_retry(self, now: int) -> bool:
        """Clear the scheduled retry if it is due; return whether it was."""
        if self._retry_due is None or now < self._retry_due:
            return False
        self._retry_due = None
        return True

    # --- answers ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> None:
        """Handle an answer to the last request."""
        if (
            route != self._survivor
            or answer.view != self.decision.view
            or (answer.after, answer.after_view) != (self._after, self._after_view)
            or answer.session != self._tables
            or self._is_complete
        ):
            return
        self._stable = max(self._stable, min(answer.stable, answer.last))
        self._is_answered = is_handled = True
        keep = self._kept_by(answer)
        if keep < answer.after:
            is_handled = self._cut(keep, answer.trim)
        elif answer.after < answer.last:
            is_handled = self._append(answer)
        else:
            self._add_sessions(answer, now)
        self._request_due = now if is_handled else now + self._retry_ns
        self.tick(now)

    def _kept_by(self, answer: Fetched) -> int:
        """Return the last entry of this server's log that stays.

        The survivor also keeps what it has trimmed and cannot compare. An entry that is not stable
        here may then differ, although the answer begins right after it.
        """
        if answer.keep < answer.after or self._is_common:
            return answer.keep
        if self._known < answer.after and self._state.stream.stable_end <= answer.trim:
            return self._known
        self._is_common = True
        return answer.keep

    def _add_sessions(self, answer: Fetched, now: int) -> None:
        """Add a part of the survivor's sessions."""
        tables = answer.sessions
        if tables:
            self._sessions.add_tables(tables, now)
            self._tables += len(tables)
            self._last_unit = end_of_table(tables[-1])
        self._sessions.horizon = max(self._sessions.horizon, answer.horizon)
        self._is_complete = answer.sessions_left == 0

    def _cut(self, keep: int, trim: int) -> bool:
        """Drop entries that the survivor lacks: not all replicas acked them. False: retry later.

        If the survivor's trim point is after all that was stable here, its log may begin behind
        the common part, so it cannot name that part's end.
        """
        state, store = self._state, self._state.store
        stable = self._known
        if keep == self._after - 1:
            # The survivor has no entry of our last entry's view there: drop the whole view.
            keep = max(min(keep, store.last_of(self._after_view - 1)), min(keep, stable))
        if state.stream.stable_end <= trim:
            keep = max(keep, stable)
        if keep < stable:
            state.effects.append(Halt(
                f"view {self.decision.view} of shard {state.shard} has other entries from number"
                f" {keep + 1} on, but entries up to {stable} were stable here: two histories were"
                " decided"
            ))  # fmt: skip
            return True
        if not store.view_at(keep):
            keep = stable  # the survivor cannot compare an entry of unknown view
        if self._staged is not None:
            assert not self._staged, "the survivor's log has changed"
            self._cut_to = keep
        elif not self._truncate(keep):
            return False
        self._after, self._after_view = keep, store.view_at(keep)
        return True

    def _truncate(self, keep: int) -> bool:
        """Cut this server's log; False: not possible now, retry later."""
        state = self._state
        try:
            state.store.truncate(keep)
        except (FullError, BusyError):
            return False
        except UnreadableError as error:
            if not self._has_warned:
                self._has_warned = True
                state.effects.append(LogWarning(
                    f"{state.config.name} cannot join view {self.decision.view} because it cannot"
                    f" cut its log: {error}. Restore the file, or restart this server"
                ))  # fmt: skip
            return False
        state.persisted = min(state.persisted, keep)
        return True

    @property
    def can_take_over(self) -> bool:
        """Whether the survivor's log can replace this server's own unstable entries.

        It has arrived completely, or it begins so far ahead that all entries before are stable.
        """
        return self._staged is not None and (self._is_complete or self._is_outdated)

    def take_over(self) -> bool:
        """Replace this server's own entries by the staged ones; False: retry later."""
        if self._is_complete and self._cut_to is not None and not self._truncate(self._cut_to):
            self._is_complete, self._tables, self._last_unit = False, 0, (b"", 0)
            self._sessions.clear()
            self._request_due += self._retry_ns
            return False
        staged, self._staged = self._staged, None
        if self._is_complete:
            self._state.effects += map(Persist, staged or ())
        return True

    def _append(self, answer: Fetched) -> bool:
        """Append a part of the survivor's log; False: retry later."""
        state = self._state
        entries = [Entry(e.fseq, e.view, e.decision) for e in answer.entries]
        # Without entries, the survivor's whole log was trimmed.
        first = entries[0].fseq if entries else answer.last + 1
        is_next = first == self._after + 1
        if self._staged is not None and not is_next:
            self._is_outdated = True
            return True
        # An empty log after a reset may begin further on than this answer.
        if not is_next or (self._staged is None and state.store.last_fseq != self._after):
            if not self._reset(
                first - 1, next(filter(None, map(first_gsn_of, entries)), answer.trim)
            ):
                return False
            state.trim = max(state.trim, answer.trim)
        if self._staged is None:
            state.effects += map(Persist, entries)
        else:
            self._staged += entries
        self._after = entries[-1].fseq if entries else answer.last
        self._after_view = entries[-1].view if entries else 0
        return True

    def _reset(self, fseq: int, gsn: int) -> bool:
        """Restart the log after an entry, at a gsn; False: no space now."""
        try:
            self._state.store.reset(fseq, gsn)
        except FullError:
            return False
        self._state.persisted = fseq
        self._state.bytes_since_table = OVERDUE_BYTES  # the new log has no session table
        return True

    def try_finish(self, now: int) -> bool:
        """Install the survivor's sessions once everything is on disk; return whether it is."""
        state = self._state
        if not self._is_complete or self._staged is not None or state.persisted < self._after:
            return False
        if not may_be_same(digest_of(state.store), self.decision.digest):
            state.effects.append(Halt(
                f"the log of view {self.decision.view} of shard {state.shard} is not the one that"
                " was decided"
            ))  # fmt: skip
            return False
        self._restore_stream()
        state.sessions.adopt(self._sessions, now, state.store.last_end - 1)
        return True

    def _restore_stream(self) -> None:
        """Set the decision log to the survivor's position."""
        store, stream = self._state.store, self._state.stream
        stable, durable = stream.stable_mark, stream.durable_mark
        if max(self._stable, self._known) > stable.fseq:
            stable = watermark_at(store, max(self._stable, self._known))
        if durable.fseq < store.first_fseq - 1:
            durable = watermark_at(store, store.first_fseq - 1)
        stream.restore(stable, durable, list(entries_after(store, stable.fseq)))


def serve(state: ReplicaState, route: bytes, request: Fetch) -> UnreadableError | None:
    """Answer a replica that copies this one's log or repairs its own; return the error, if any."""
    store = state.store
    after, last = request.after, store.last_fseq
    keep = _common(state, request)
    entries: list[Entry] = []
    sessions: list[SessionTable] = []
    left = 0
    if keep == after and after < last:
        try:
            entries = store.read_after(after, _ANSWER_BYTES)
        except BusyError:
            return None  # the replica repeats the request
        except UnreadableError as error:
            return error
    elif keep == after:
        sessions, left = _some_sessions(state, request)
    state.send(
        route,
        Fetched(
            state.cluster, state.shard, request.view, state.server, after, request.session,
            keep, last, [Logged(e.fseq, e.view, e.decision) for e in entries],  # type: ignore[arg-type]
            sessions, left, state.trim, state.stream.stable, request.after_view,
            state.sessions.horizon,
        ),
    )  # fmt: skip
    return None


def _common(state: ReplicaState, request: Fetch) -> int:
    """Return the last entry up to which the log of a request may be kept.

    A replica that joins sends view 0 with an entry that it has trimmed; such an entry was stable.
    """
    store, after, view = state.store, request.after, request.after_view
    low, high = store.views_at(after)
    is_same = low <= view <= high or (not view and bool(request.view))
    if after < store.first_fseq or (after <= store.last_fseq and is_same):
        return after
    return min(after - 1, store.last_of(view))


def _some_sessions(state: ReplicaState, request: Fetch) -> tuple[list[SessionTable], int]:
    """Return the sessions after those that the request names, and whether more are left."""
    if request.client is None:
        return _whole_sessions(state, request.session)
    after = (request.client, request.seq)
    sessions, is_more = state.sessions.part(after, _ANSWER_TABLE_BYTES)
    return sessions, int(is_more)


def _whole_sessions(state: ReplicaState, start: int) -> tuple[list[SessionTable], int]:
    """Return sessions from index `start` on in the older format, and how many are left."""
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
