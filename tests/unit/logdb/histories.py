"""Random histories of a log written by LogDB's clients and coordinators, with an oracle.

The oracle keeps every key's version and value before each record. It therefore knows what a
transaction that read there saw, and decides with the whole history.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec
from hypothesis import strategies as st

from logdb.decisions import Decisions
from logdb.log_usage import LogUsage
from logdb.records import (
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    Commit,
    KeyRead,
    Move,
    Moved,
    RangeRead,
    TransactionId,
    Value,
    Write,
    decode,
    encode,
)
from logdb.state import Applied, State
from logdb.versions import digest_of
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logdb.snapshots import SnapshotCursor

KEYS: Final = [b"", b"a", b"a\0", b"b", b"bb", b"c", b"\xff", b"z"]
MAX_DECISIONS: Final = 6
#: Payloads of other programs and of later versions, and one of the latter.
FOREIGN: Final = [b"", b"hello", b"LDB\x01", b"LDB\x01\xc1", b"LDB\x02\x91\x01"]
UNREADABLE: Final = FOREIGN[-1]


def random_steps(seed: int, count: int) -> list[tuple[str, Any]]:
    """Return what happens, (kind, what) each."""
    rnd = random.Random(seed)
    max_lag = rnd.choice([3, 12])

    def key() -> bytes:
        return rnd.choice(KEYS)

    def lag() -> int:
        return rnd.choice([0, rnd.randint(0, max_lag)])

    def commit() -> dict[str, Any]:
        return {
            "reads": [(key(), lag()) for _ in range(rnd.randint(0, 3))],
            "ranges": [(key(), rnd.choice([None, key()]), lag())] if rnd.random() < 0.2 else [],
            "writes": {
                key(): rnd.choice(["inline", "rid", "delete"]) for _ in range(rnd.randint(0, 3))
            },
            "rids": rnd.randint(0, 2),
            "began": lag(),
        }

    kinds: dict[str, tuple[int, Callable[[], Any]]] = {
        "commit": (50, commit),
        "value": (20, key),
        "again": (8, lambda: rnd.randint(0, 12)),
        "move": (10, lambda: [(key(), rnd.random() < 0.8) for _ in range(rnd.randint(1, 4))]),
        "foreign": (4, lambda: rnd.choice(FOREIGN)),
        "begun": (4, lambda: rnd.randint(0, 12)),
        "done": (4, lambda: rnd.randint(0, 12)),
    }
    chosen = rnd.choices(list(kinds), [weight for weight, _ in kinds.values()], k=count)
    return [(kind, kinds[kind][1]()) for kind in chosen]


steps: Final = st.builds(random_steps, st.integers(0, 2**32), st.integers(1, 60))

Model = dict[bytes, tuple[int, bytes]]


def new_state() -> State:
    """Return a state with small bounds."""
    return State(decisions=Decisions(MAX_DECISIONS), log_usage=LogUsage(100, 50))


class History:
    """A log that is being written, and what must come of it."""

    def __init__(self) -> None:
        self.state: Final = new_state()
        self.log: Final[dict[int, Record]] = {}
        self.records: Final[list[Record]] = []
        #: Before the record of the same index: its gsn's predecessor, and the keys.
        self.before: Final[list[Model]] = []
        self.present: Model = {}
        self.results: Final[list[Applied | None]] = []
        self.expected: list[str | None] = []
        self._reads: Final[dict[tuple[bytes, int], list[tuple[Any, Any]]]] = {}
        self._decided: Final[list[tuple[tuple[bytes, int], int]]] = []
        self._committed: Final[set[tuple[bytes, int]]] = set()
        self._values: Final[list[tuple[bytes, RecordId]]] = []
        self._commits: Final[list[bytes]] = []
        self._horizon = 0
        self._number = 0

    # --- writing ---

    def write(self, kind: str, what: Any) -> None:
        """Add what a step says, apply it, and judge it."""
        payload = getattr(self, f"_{kind}")(what)
        if payload is None:
            return
        gsn = self._next()
        record = Record(RecordId(gsn, gsn % 3), payload, None, 0, 0)
        self.log[gsn] = record
        self.records.append(record)
        self.before.append(dict(self.present))
        self.expected.append(self._judge(record))
        self.results.append(self.state.apply(record))

    def _next(self) -> int:
        last = self.records[-1].rid.gsn if self.records else 0
        return last + 1 + last % 2

    def _at(self, lag: int) -> tuple[int, Model]:
        """Return a position some records ago, and the keys just behind it."""
        index = len(self.records) - lag
        if lag == 0 or not self.records:
            return (self.records[-1].rid.gsn if self.records else 0), self.present
        if index <= 0:
            return 0, {}
        return self.records[index - 1].rid.gsn, self.before[index]

    def _commit(self, what: dict[str, Any]) -> bytes:
        self._number += 1
        id_ = TransactionId(b"session%d" % (self._number % 2), self._number)
        saw: list[tuple[Any, Any]] = []
        reads, ranges, writes = [], [], []
        began = [self._at(what["began"])[0]]
        for key, lag in what["reads"]:
            gsn, model = self._at(lag)
            began.append(gsn)
            found = model.get(key)
            reads.append(KeyRead(key, found[0] if found else 0))
            saw.append((key, found))
        for start, stop, lag in what["ranges"]:
            gsn, model = self._at(lag)
            began.append(gsn)
            ranges.append(RangeRead(start, stop, _digest(model, start, stop)))
            saw.append(((start, stop), _slice(model, start, stop)))
        for key, how in what["writes"].items():
            writes.append(self._write(key, how, what["rids"]))
        self._reads[id_.session, id_.number] = saw
        payload = encode(Commit(id_, min(began), reads, ranges, writes))
        self._commits.append(payload)
        return payload

    def _write(self, key: bytes, how: str, lag: int) -> Write:
        there = [rid for each, rid in self._values if each == key]
        if how == "rid" and there:
            rid = there[-1 - lag % len(there)]
            return Write(key, rid=rid, size=len(_value(rid.gsn)))
        return Write(key) if how == "delete" else Write(key, _value(self._next()))

    def _value(self, key: bytes) -> bytes:
        gsn = self._next()
        self._values.append((key, RecordId(gsn, gsn % 3)))
        return encode(Value(key, _value(gsn)))

    def _again(self, lag: int) -> bytes | None:
        return self._commits[-1 - lag % len(self._commits)] if self._commits else None

    def _move(self, what: list[tuple[bytes, bool]]) -> bytes:
        moves = []
        for key, is_right in what:
            entry = self.state.versions.get(key)
            place = entry.place if entry is not None and is_right else RecordId(1, 1)
            moves.append(Move(key, place, self.present.get(key, (0, b"?"))[1]))
        return encode(Moved(moves))

    def _foreign(self, payload: bytes) -> bytes:
        return payload

    def _begun(self, lag: int) -> bytes:
        return encode(CheckpointBegun(b"c" * 8, self._at(lag)[0]))

    def _done(self, lag: int) -> bytes:
        trim = min(self._at(lag)[0], self._horizon)
        count = len(self.records)
        done = CheckpointDone(
            b"c" * 8, RecordId(self._at(lag)[0], 0), 0, [], 0, 0, 0, 0, max(count - lag, 0), trim
        )
        return encode(done)

    # --- the oracle ---

    def _judge(self, record: Record) -> str | None:
        """Say what a record does, and let it happen to the keys; None: no decision."""
        ours = decode(record.payload)
        if isinstance(ours, CheckpointBegun):
            self._horizon = max(self._horizon, ours.cut)
        if not isinstance(ours, Commit):
            return None
        outcome = self._outcome(ours)
        if outcome != "repeated":
            self._decided.append(((ours.id.session, ours.id.number), record.rid.gsn))
        if outcome == "committed":
            self._committed.add((ours.id.session, ours.id.number))
            for write in ours.writes:
                self._take(write, record.rid.gsn)
        return outcome

    def _outcome(self, commit: Commit) -> str:
        name = (commit.id.session, commit.id.number)
        kept, forgotten = self._decided[-MAX_DECISIONS:], self._decided[:-MAX_DECISIONS]
        if any(name == each for each, _ in kept):
            return "repeated"
        if forgotten and commit.began < forgotten[-1][1]:
            return "expired"
        if any(write.rid is not None and write.rid.gsn < self._horizon for write in commit.writes):
            return "expired"
        assert name not in self._committed, "the rules would let a transaction commit twice"
        for what, found in self._reads[name]:
            now = (
                self.present.get(what)
                if isinstance(what, bytes)
                else _slice(self.present, what[0], what[1])
            )
            if now != found:
                return "conflict"
        for write in commit.writes:
            version, _ = self.present.get(write.key, (0, b""))
            if write.rid is not None and write.rid.gsn < version:
                return "conflict"
        return "committed"

    def _take(self, write: Write, gsn: int) -> None:
        if write.rid is not None:
            self.present[write.key] = (write.rid.gsn, _value(write.rid.gsn))
        elif write.value is not None:
            self.present[write.key] = (gsn, write.value)
        else:
            self.present.pop(write.key, None)


def _value(gsn: int) -> bytes:
    return b"value of %d" % gsn + b"." * (gsn % 7)


def _slice(model: Model, start: bytes, stop: bytes | None) -> dict[bytes, tuple[int, bytes]]:
    return {
        key: found for key, found in model.items() if key >= start and (stop is None or key < stop)
    }


class _Versioned(msgspec.Struct):
    version: int


def _digest(model: Model, start: bytes, stop: bytes | None) -> bytes:
    rows: Any = [
        (key, _Versioned(found[0])) for key, found in sorted(_slice(model, start, stop).items())
    ]
    return digest_of(rows)


def checkpoint(cursor: SnapshotCursor, rows: list[Any], size: int) -> tuple[bytes, list[bytes]]:
    """Return the payloads of a cursor's checkpoint: of its end, and of its parts."""
    image = cursor.image
    parts = [CheckpointPart(rows[at : at + size], [], []) for at in range(0, len(rows), size)]
    parts.append(CheckpointPart([], image.decisions[:2], []))
    parts.append(CheckpointPart([], image.decisions[2:], image.segments))
    done = CheckpointDone(
        b"c" * 8,
        image.position,
        image.floor,
        [RecordId(1, 0)] * len(parts),
        0,
        image.keys,
        image.horizon,
        image.first_foreign,
        image.records,
        0,
        image.first_unreadable,
    )
    return encode(done), [encode(part) for part in parts]


def restored(done: bytes, parts: list[bytes]) -> State:
    """Return the state of a checkpoint."""
    state = new_state()
    end = decode(done)
    assert isinstance(end, CheckpointDone)
    decoded = [decode(part) for part in parts]
    state.restore(end, [part for part in decoded if isinstance(part, CheckpointPart)])
    return state


def everything(state: State) -> dict[str, Any]:
    """Return all of a state that may decide anything."""
    return {
        "rows": state.versions.range(b"", None, 1 << 30),
        "data_bytes": state.versions.data_bytes,
        "decisions": state.decisions.export(),
        "floor": state.decisions.floor,
        "segments": state.log_usage.export(),
        "bytes": (state.log_usage.log_bytes, state.log_usage.moving_bytes),
        "position": state.position,
        "horizon": state.horizon,
        "first_foreign": state.first_foreign,
        "first_unreadable": state.first_unreadable,
        "records": state.records,
    }
