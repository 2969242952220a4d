"""Looks at every coordinator's state, record by record, and at what is left of the log.

Rule: two states that have passed the same record are equal, however they came there: from the first
record or from a checkpoint, by the first coordinator or the last. Each is compared with the model,
too. What it looks at, it does not change.
"""

from __future__ import annotations

from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from logdb import records
from logdb.records import CheckpointPart
from logdb.state import State
from tests.sim.database.model import Model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logdb.records import CheckpointDone
    from logdb.state import Applied, Image
    from tests.sim.plan import Database
    from ziplog.types import Record

#: States are compared as a whole after so many records, and where a checkpoint is made.
_EVERY: Final = 16
#: More keys than there are.
_ALL: Final = 1_000_000


class Oracle:
    """What all coordinators together saw of the log, and made of it."""

    def __init__(self, database: Database) -> None:
        self.model: Final = Model(database.decisions)
        self._has_model: Final = database.has_model
        #: From a record's place in the log to the digest of the state behind it.
        self._digests: Final[dict[int, bytes]] = {}
        #: What was made of the commit record at a gsn.
        self._outcomes: Final[dict[int, str]] = {}
        self._trim = 0
        #: How often the log was trimmed.
        self.trims = 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at every state of this process, as long as this lasts."""
        apply, image, restore = State.apply, State.image, State.restore
        oracle = self

        def applied(self: State, record: Record) -> Applied | None:
            before = self.position
            result = apply(self, record)
            oracle._took(before.gsn, record, self, result)
            return result

        def imaged(self: State) -> Image:
            oracle._compare(self)
            return image(self)

        def restored(self: State, done: CheckpointDone, parts: Any) -> None:
            restore(self, done, parts)
            oracle._compare(self)

        with (
            patch.object(State, "apply", applied),
            patch.object(State, "image", imaged),
            patch.object(State, "restore", restored),
        ):
            yield

    def _took(self, before: int, record: Record, state: State, applied: Applied | None) -> None:
        model, gsn = self.model, record.rid.gsn
        assert not before or before in model.index, f"{before} is no position that anybody passed"
        index = model.index[before] + 1 if before else 0
        outcome = applied.outcome if applied is not None else ""
        if index == len(model.records):
            told = model.take(record, decides=self._has_model)
            self._outcomes[gsn] = told.removeprefix("repeated") if self._has_model else outcome
        known = model.records[index]
        assert known == record, f"behind {before} is {record.rid}, and for others {known.rid}"
        assert self._outcomes[gsn] == outcome, (
            f"the commit record at {gsn} is decided as {outcome!r}, and by the rules it is"
            f" {self._outcomes[gsn]!r}: {records.decode(record.payload)}"
        )
        if (index + 1) % _EVERY == 0 or index in self._digests:
            self._compare(state)

    def _compare(self, state: State) -> None:
        """Hold a state against others at the same position, and against the model."""
        model, gsn = self.model, state.position.gsn
        index = model.index[gsn] if gsn else -1
        count = model.counts[index] if gsn else 0
        assert state.records == count, (
            f"{state.records} records were counted up to {gsn}, and there are {count}"
        )
        known = self._digests.setdefault(index, _digest(state))
        assert known == _digest(state), f"two states at {gsn} differ: {_shown(state)}"
        if self._has_model and index == len(model.records) - 1:
            rows = {
                key: (entry.version, entry.size) for key, entry in state.versions.after(None, _ALL)
            }
            due = {key: (held.version, len(held.value)) for key, held in model.entries.items()}
            assert rows == due, f"the state at {gsn} is {rows}, and by the rules it is {due}"

    # --- the log ---

    def look_at_trim(self, trim: int) -> None:
        """Check that a log that is trimmed before a position suffices to start from."""
        if trim <= max(self._trim, 1):
            return
        self._trim = trim
        self.trims += 1
        assert any(self._is_whole(done, trim) for _, done in self.model.done), (
            f"the log is trimmed before {trim}, and there is no checkpoint from which to go on"
        )

    def _is_whole(self, done: CheckpointDone, trim: int) -> bool:
        """Whether a checkpoint, and all that it leads to, is still there."""
        model = self.model
        if min(rid.gsn for rid in (done.position, *done.parts)) < trim:
            return False
        parts = [records.decode(model.records[model.index[rid.gsn]].payload) for rid in done.parts]
        return all(
            entry.place.gsn >= trim
            for part in parts
            if isinstance(part, CheckpointPart)
            for _, entry in part.entries
        )

    def look_at_places(self, state: State) -> None:
        """Check that what a state says of the values is in the log, if nobody knows a newer one."""
        log = self.model.records
        if not log or state.position != log[-1].rid:
            return
        for key, entry in state.versions.after(None, _ALL):
            assert entry.place.gsn >= self._trim, (
                f"the value of {key!r} is at {entry.place}, and the log is trimmed before"
                f" {self._trim}"
            )

    def check_log(self, rows: dict[int, bytes]) -> None:
        """Check that what coordinators were given is the log: payloads by gsn, as servers say."""
        given = {record.rid.gsn: record.payload for record in self.model.records}
        missing = sorted(set(rows).difference(given))
        assert not missing, f"no coordinator was given what is at {missing[:5]}"
        wrong = [gsn for gsn, payload in rows.items() if given[gsn] != payload]
        assert not wrong, f"coordinators were given something else than is at {wrong[:5]}"


def _digest(state: State) -> bytes:
    digest = blake2b(digest_size=16)
    for key, entry in state.versions.after(None, _ALL):
        digest.update(b"%b %d %d %d %d " % (key, entry.version, *entry.place, entry.size))
    for decision in state.decisions.export():
        digest.update(
            b"%b %d %d %d " % (
                decision.session, decision.number, decision.position.gsn, decision.committed
            )
        )  # fmt: skip
    rest = state.decisions.floor, state.horizon, state.first_foreign, state.log_usage.export()
    digest.update(repr(rest).encode())
    return digest.digest()


def _shown(state: State) -> str:
    return (
        f"keys {dict(state.versions.after(None, 50))}, floor {state.decisions.floor},"
        f" {len(state.decisions)} decisions, horizon {state.horizon},"
        f" foreign {state.first_foreign}, segments {state.log_usage.export()}"
    )
