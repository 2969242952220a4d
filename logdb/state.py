"""The database's state at a position of the log: applies one record after the other.

It is a pure function of the records, so all coordinators compute the same state, also from a
checkpoint. Invariant: `restore` of an `image` and the entries gives the state at its position, with
every counter that affects a decision. See docs/logdb.md, sections 4 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.decisions import Decisions
from logdb.log_usage import LogUsage
from logdb.records import (
    MOVE_BYTES,
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Decision,
    Entry,
    Moved,
    Segment,
    TransactionId,
    Value,
    Write,
    decode,
    is_foreign,
    is_part,
)
from logdb.validation import Outcome, decide
from logdb.versions import Versions
from ziplog.types import RID_GENESIS, Gsn, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from logdb.versions import Row
    from ziplog.types import Record

    #: Called before a key changes, with the key, its former entry and its new one (None: absent).
    Observer = Callable[[bytes, Entry | None, Entry | None], None]

_OF_CHECKPOINTS: Final = frozenset({CheckpointBegun, CheckpointPart, CheckpointDone})
#: Maximum number of open rounds.
MAX_BEGUN: Final = 64


class Applied(msgspec.Struct, frozen=True, gc=False):
    """A commit record that was just decided."""

    id: TransactionId
    #: The commit record's rid.
    position: RecordId
    outcome: Outcome
    conflicts: list[bytes]
    #: The writes that took effect; empty if it was not committed.
    writes: list[Write]
    #: No key changed after this gsn and before the record.
    unchanged_since: Gsn = 0

    @property
    def changed(self) -> list[bytes]:
        """The keys that changed."""
        return [write.key for write in self.writes]

    @property
    def values(self) -> list[tuple[bytes, bytes]]:
        """The keys with inline values; their version is the commit record's gsn."""
        return [
            (write.key, write.value)
            for write in self.writes
            if write.value is not None and write.rid is None
        ]


class BegunRound(msgspec.Struct, frozen=True, gc=False):
    """A `CheckpointBegun` that was applied."""

    position: RecordId
    coordinator: bytes
    #: The announced cut, at most its own position.
    cut: Gsn


class Image(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint's data without the entries, all of one state."""

    position: RecordId
    floor: Gsn
    horizon: Gsn
    first_foreign: Gsn
    first_unreadable: Gsn
    records: int
    keys: int
    decisions: list[Decision]
    segments: list[Segment]


class State:
    """The database's state at a position."""

    def __init__(
        self, *, decisions: Decisions | None = None, log_usage: LogUsage | None = None
    ) -> None:
        """Start before the first record."""
        self.versions: Final = Versions()
        self.decisions: Final = Decisions() if decisions is None else decisions
        self.log_usage: Final = LogUsage() if log_usage is None else log_usage
        #: The last applied record.
        self.position: RecordId = RID_GENESIS
        #: The last commit record that changed a key, or the position of the restored checkpoint.
        self.changed_at: Gsn = 0
        #: The first foreign record, and the first unreadable one (`logdb.records`); 0: none.
        self.first_foreign = self.first_unreadable = 0
        #: The greatest announced cut: no commit may refer to a value before it.
        self.horizon = 0
        #: The log was trimmed before this gsn, or may be at any moment.
        self.trimmed = 0
        #: Number of records, without checkpoints.
        self.records = 0
        #: Decisions since this process started.
        self.commits = 0
        self.aborts = 0
        #: The last `CheckpointBegun` that was applied, and the last `CheckpointDone`'s rid.
        self.last_begun: BegunRound | None = None
        self.last_done: RecordId | None = None
        #: Rounds announced since the last completed one: the last of each coordinator, in log
        #: order.
        self.begun: Final[dict[bytes, BegunRound]] = {}
        #: Observers of changes of keys.
        self.on_change: Final[list[Observer]] = []
        #: What the restored checkpoint allows: a trim, once this record of it is applied.
        self.restored_done: RecordId | None = None
        self.restored_trim: Gsn = 0
        self._restored: CheckpointDone | None = None
        self._checkpointed = 0
        self._effects: Final[dict[type, Callable[[Any, RecordId], Applied | None]]] = {
            Commit: self._apply_commit,
            Value: self._apply_value,
            Moved: self._apply_moved,
            CheckpointBegun: self._apply_begun,
            CheckpointPart: self._apply_part,
            CheckpointDone: self._apply_done,
            type(None): self._apply_unreadable,
        }

    @property
    def since_checkpoint(self) -> int:
        """Records after the position of the last complete checkpoint, without checkpoints."""
        return self.records - self._checkpointed

    def apply(self, record: Record) -> Applied | None:
        """Apply the next record; return the decision if it is a commit record."""
        rid, payload = record.rid, record.payload
        assert rid.gsn > self.position.gsn, f"{rid} after {self.position}"
        self.position = rid
        if is_part(payload):
            return None
        if is_foreign(payload):
            self.records += 1
            self.first_foreign = self.first_foreign or rid.gsn
            return None
        ours = decode(payload)
        kind = type(ours)
        if kind not in _OF_CHECKPOINTS:
            # Otherwise a checkpoint's own records would trigger the next one.
            self.records += 1
            self.log_usage.add_record(rid.gsn, len(payload))
        return self._effects[kind](ours, rid)

    def image(self) -> Image:
        """Return a checkpoint's data of this state, without the entries."""
        return Image(
            self.position,
            self.decisions.floor,
            self.horizon,
            self.first_foreign,
            self.first_unreadable,
            self.records,
            len(self.versions),
            self.decisions.export(),
            self.log_usage.export(),
        )

    def restore(self, done: CheckpointDone, parts: Iterable[CheckpointPart]) -> None:
        """Load a checkpoint into a new state.

        Args:
            done: the record that completes the checkpoint.
            parts: its parts, in order; read one at a time.

        """
        assert not self.records, "a checkpoint is restored into a new state"
        decisions: list[Decision] = []
        segments: list[Segment] = []

        def rows() -> Iterator[Row]:
            for part in parts:
                decisions.extend(part.decisions)
                segments.extend(part.segments)
                yield from part.entries

        self.versions.load(rows())
        self.decisions.load(decisions, done.floor)
        self.log_usage.load(segments)
        self.position = done.position
        self.changed_at = done.position.gsn
        self.first_foreign = done.first_foreign
        self.first_unreadable = done.first_unreadable
        self.horizon = done.horizon
        self.records = self._checkpointed = done.records
        self._restored = done

    def choose_cut(self) -> int:
        """Return the gsn before which a round should clean the log; 0: no cut is worth it."""
        return self.log_usage.choose_cut(self.first_unreadable or self.position.gsn)

    # --- records, by type ---

    def _apply_commit(self, commit: Commit, rid: RecordId) -> Applied | None:
        verdict = decide(self.versions, self.decisions, commit, rid.gsn, self.horizon)
        outcome = verdict.outcome
        if outcome == "repeated":
            return None
        committed, changed_at = outcome == "committed", self.changed_at
        self.decisions.add(commit.id, rid, committed)
        if not committed:
            self.aborts += 1
            return Applied(commit.id, rid, outcome, verdict.conflicts, [], changed_at)
        self.commits += 1
        self.changed_at = rid.gsn
        for write in commit.writes:
            if write.rid is not None:
                self._change(write.key, Entry(write.rid.gsn, write.rid, write.size))
            elif write.value is not None:
                self._change(write.key, Entry(rid.gsn, rid, len(write.value)))
            else:
                self._change(write.key, None)
        return Applied(commit.id, rid, outcome, verdict.conflicts, commit.writes, changed_at)

    def _apply_value(self, _apply_value: Value, _rid: RecordId) -> None:
        """Do nothing: a value takes effect when a commit refers to it."""

    def _apply_moved(self, moved: Moved, rid: RecordId) -> None:
        for move in moved.moves:
            entry = self.versions.get(move.key)
            if entry is not None and entry.place == move.place:
                self._change(move.key, Entry(entry.version, rid, entry.size))

    def _apply_begun(self, begun: CheckpointBegun, rid: RecordId) -> None:
        begun_round = BegunRound(rid, begun.coordinator, min(begun.cut, rid.gsn))
        self.horizon = max(self.horizon, begun_round.cut)
        self.last_begun = begun_round
        self.begun.pop(begun_round.coordinator, None)
        self.begun[begun_round.coordinator] = begun_round
        if len(self.begun) > MAX_BEGUN:
            del self.begun[next(iter(self.begun))]

    def _apply_part(self, _apply_part: CheckpointPart, _rid: RecordId) -> None:
        """Do nothing: a part describes an earlier state."""

    def _apply_done(self, done: CheckpointDone, rid: RecordId) -> None:
        self.begun.clear()
        self._checkpointed = max(self._checkpointed, min(done.records, self.records))
        self.last_done = rid
        if done == self._restored:
            self.restored_done, self.restored_trim = rid, min(done.trim, rid.gsn)
            self._restored = None
        self.trimmed = max(self.trimmed, min(done.trim, rid.gsn))
        self.log_usage.trim(self.trimmed)

    def _apply_unreadable(self, _nothing: None, rid: RecordId) -> None:
        self.first_unreadable = self.first_unreadable or rid.gsn

    # --- keys ---

    def _change(self, key: bytes, entry: Entry | None) -> None:
        """Set a key's entry; None: the key becomes absent."""
        versions, usage = self.versions, self.log_usage
        former = versions.get(key)
        if self.on_change:
            for observe in tuple(self.on_change):  # an observer may remove itself
                observe(key, former, entry)
        if former is not None:
            usage.add_live(former.place.gsn, -(MOVE_BYTES + len(key) + former.size))
        if entry is not None:
            usage.add_live(entry.place.gsn, MOVE_BYTES + len(key) + entry.size)
            versions.put(key, entry)
        elif former is not None:
            versions.remove(key)
