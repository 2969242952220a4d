"""Checks every coordinator's state after each record, and the rest of the log.

Two states that have passed the same record are equal, whether they started from the first record or
from a checkpoint. Each is also compared with the model. The oracle changes nothing.
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

#: Records between two comparisons of whole states; also compared at each checkpoint.
_EVERY: Final = 16
#: More keys than there are.
_ALL: Final = 1_000_000


class Oracle:
    """The records and states that all coordinators together have seen."""

    def __init__(self, database: Database) -> None:
        self.model: Final = Model(database.decisions)
        self._has_model: Final = database.has_model
        #: From a record's index to the digest of the state after it.
        self._digests: Final[dict[int, bytes]] = {}
        #: The decision about the commit record at a gsn.
        self._outcomes: Final[dict[int, str]] = {}
        self._trim = 0
        #: Number of trims.
        self.trims = 0

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Look at every state of this process, as long as this lasts."""
        apply, image, restore = State.apply, State.image, State.restore
        oracle = self

        def applied(self: State, record: Record) -> Applied | None:
            before = self.position
            result = apply(self, record)
            oracle._check_applied(before.gsn, record, self, result)
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

    def _check_applied(
        self, before: int, record: Record, state: State, applied: Applied | None
    ) -> None:
        model, gsn = self.model, record.rid.gsn
        assert not before or before in model.index, f"no coordinator has passed {before}"
        index = model.index[before] + 1 if before else 0
        outcome = applied.outcome if applied is not None else ""
        if index == len(model.records):
            returned = model.take(record, decides=self._has_model)
            self._outcomes[gsn] = returned.removeprefix("repeated") if self._has_model else outcome
        known = model.records[index]
        assert known == record, f"behind {before} is {record.rid}, and for others {known.rid}"
        assert self._outcomes[gsn] == outcome, (
            f"the commit record at {gsn} is decided as {outcome!r}, and by the rules it is"
            f" {self._outcomes[gsn]!r}: {records.decode(record.payload)}"
        )
        if (index + 1) % _EVERY == 0 or index in self._digests:
            self._compare(state)

    def _compare(self, state: State) -> None:
        """Compare a state with others at the same position, and with the model."""
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

    def check_trim(self, trim: int) -> None:
        """Check that a log trimmed before a position suffices for a start."""
        if trim <= max(self._trim, 1):
            return
        self._trim = trim
        self.trims += 1
        assert any(self._is_whole(done, trim) for _, done in self.model.done), (
            f"the log is trimmed before {trim}, and there is no checkpoint from which to go on"
        )

    def _is_whole(self, done: CheckpointDone, trim: int) -> bool:
        """Whether a checkpoint, and everything that it refers to, still exists."""
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

    def check_places(self, state: State) -> None:
        """Check that the places of a state are in the log, if no coordinator has a newer state."""
        log = self.model.records
        if not log or state.position != log[-1].rid:
            return
        for key, entry in state.versions.after(None, _ALL):
            assert entry.place.gsn >= self._trim, (
                f"the value of {key!r} is at {entry.place}, and the log is trimmed before"
                f" {self._trim}"
            )

    def check_log(self, rows: dict[int, bytes]) -> None:
        """Check that coordinators received the log: payloads by gsn, as the servers have them."""
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
    rest = (
        state.decisions.floor, state.horizon, state.first_foreign, state.first_unreadable,
        state.log_usage.export(),
    )  # fmt: skip
    digest.update(repr(rest).encode())
    return digest.digest()


def _shown(state: State) -> str:
    return (
        f"keys {dict(state.versions.after(None, 50))}, floor {state.decisions.floor},"
        f" {len(state.decisions)} decisions, horizon {state.horizon},"
        f" foreign {state.first_foreign}, unreadable {state.first_unreadable},"
        f" segments {state.log_usage.export()}"
    )
