"""What a client knows of keys is their state, and only reads that may be old use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb import wire
from logdb.client import known_states, operations
from logdb.client.known_states import FRESH_NS, MAX_STATES, QUIET_REPLIES, KnownStates
from logdb.client.requests import GetRequest, ScanRequest, ValidateRequest
from logdb.client.transaction import TransactionSets
from logdb.errors import TransactionAborted
from logdb.records import Entry, KeyRead, Write
from tests.properties import examples
from tests.unit.logdb.client.fakes import FakeDatabase, v
from tests.unit.ziplog.client.fakes import CLUSTER, MS
from ziplog import wire as log_wire
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.types import Gsn

LARGEST = 1 << 20
KEYS = [b"a", b"b", b"c"]

# --- the known states are the log's ---

keys = st.sampled_from(KEYS)
values = st.one_of(st.none(), st.binary(min_size=1, max_size=2))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("other"), keys, values),
        st.tuples(st.just("mine"), keys, values),
        st.tuples(st.just("conflict")),
        st.tuples(st.just("get"), st.lists(keys, unique=True, min_size=1), st.booleans()),
        st.tuples(st.just("arrives"), st.integers(0, 3)),
        st.tuples(st.just("is lost"), st.integers(0, 3)),
    ),
    max_size=60,
)


class Log:
    """The log, the replies that are under way to a client, and what the client knows."""

    def __init__(self) -> None:
        #: After each record: the version and value of each key.
        self.states: list[dict[bytes, tuple[Gsn, bytes | None]]] = [dict.fromkeys(KEYS, (0, None))]
        self.changed_at = 0
        self.replies: list[tuple[Any, ...]] = []
        self.known = KnownStates()
        self.known_position = 0

    def apply(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("other", key, value):
                self._write(key, value)
            case ("mine", key, value):
                changed_at = self.changed_at
                write = Write(key, value, None, len(value or b""))
                decided = self._decided("committed", self._write(key, value), changed_at)
                self.replies.append((decided, [write], {key: value}))
            case ("conflict",):
                self.states.append(self.states[-1])
                self.replies.append((self._decided("conflict", len(self.states) - 1, 0), [], {}))
            case ("get", wanted, is_known):
                self.replies.append((self._got(wanted, self.changed_at if is_known else None),
                                     wanted))  # fmt: skip
            case ("arrives", index) if index < len(self.replies):
                self._receive(*self.replies.pop(index))
            case ("is lost", index) if index < len(self.replies):
                # A reply to a call that was cancelled: its position is known.
                reply, *_ = self.replies.pop(index)
                self.known_position = max(self.known_position, reply.position.gsn)

    def _write(self, key: bytes, value: bytes | None) -> Gsn:
        gsn = len(self.states)
        self.states.append(self.states[-1] | {key: (0 if value is None else gsn, value)})
        self.changed_at = gsn
        return gsn

    def _decided(self, outcome: Any, gsn: Gsn, changed_at: Gsn) -> wire.Decided:
        return wire.Decided(CLUSTER, b"session1", 1, RecordId(gsn, 0), outcome, [], changed_at)

    def _got(self, wanted: list[bytes], changed_at: Gsn | None) -> wire.Got:
        gsn = len(self.states) - 1
        found = []
        for key in wanted:
            version, value = self.states[gsn][key]
            entry = None if value is None else Entry(version, RecordId(version, 0), len(value))
            found.append(wire.KeyResult(entry, value))
        return wire.Got(CLUSTER, 1, RecordId(gsn, 0), found, [], changed_at)

    def _receive(self, reply: Any, *of: Any) -> None:
        self.known_position = max(self.known_position, reply.position.gsn)
        if isinstance(reply, wire.Got):
            self.known.on_got(*of, reply, 0)
        else:
            self.known.on_decided(reply, *of, 0)

    def find(self, key: bytes) -> tuple[Gsn, bytes | None] | None:
        found = self.known.find([key], [], self.known_position, 0)
        return None if found is None else tuple(found[0])  # type: ignore[return-value]


@examples(400)
@given(steps)
def test_a_known_state_is_the_state_at_the_known_position(history: list[Any]) -> None:
    log = Log()
    with patch.object(known_states, "QUIET_REPLIES", 0):
        for step in history:
            log.apply(step)
            for key in KEYS:
                assert log.find(key) in {None, log.states[log.known_position][key]}


def test_own_writes_and_replies_are_known_until_another_client_writes() -> None:
    log = Log()
    with patch.object(known_states, "QUIET_REPLIES", 0):
        for step in (("get", [b"a", b"b"], True), ("mine", b"a", b"1"), ("mine", b"c", None)):
            log.apply(step)
            log.apply(("arrives", 0))
        assert [log.find(key) for key in KEYS] == [(1, b"1"), (0, None), (0, None)]
        log.apply(("other", b"b", b"2"))
        log.apply(("mine", b"a", b"3"))
        log.apply(("arrives", 0))
    assert [log.find(key) for key in KEYS] == [None, None, None]
    with patch.object(known_states, "QUIET_REPLIES", 0):
        assert [log.find(key) for key in KEYS] == [(4, b"3"), None, None]


def test_states_are_bounded_and_large_values_are_not_kept() -> None:
    known = KnownStates()

    def write(gsn: Gsn, key: bytes, value: bytes) -> None:
        decided = wire.Decided(CLUSTER, b"session1", 1, RecordId(gsn, 0), "committed", [], gsn - 1)
        known.on_decided(decided, [Write(key, value, None, len(value))], {key: value}, 0)

    for number in range(1, MAX_STATES + 2):
        write(number, b"%d" % number, b"v")
    last = MAX_STATES + 1
    assert known.find([b"1"], [], last, 0) is None
    assert known.find([b"2", b"%d" % last], [], last, 0) == [(2, b"v"), (last, b"v")]
    write(last + 1, b"2", bytes(known_states.MAX_VALUE_BYTES + 1))
    assert known.find([b"2"], [], last + 1, 0) is None
    assert known.find([b"3"], [], last + 1, 0) == [(3, b"v")]


# --- the client ---


@pytest.fixture
def db() -> FakeDatabase:
    """Return the database of a client that has written alone for a while."""
    db = FakeDatabase().open()
    for _ in range(QUIET_REPLIES):
        increment(db, b"k")
    db.first.received.clear()
    return db


def read(db: FakeDatabase, sets: TransactionSets, *wanted: bytes) -> list[bytes | None]:
    return db.drive(sets.get(wanted, db.harness.until()))


def increment(db: FakeDatabase, key: bytes) -> int:
    sets = TransactionSets(LARGEST)
    (found,) = read(db, sets, key)
    value = 1 if found is None else found[0] + 1
    sets.write(key, v(value))
    db.drive(sets.commit(db.harness.until()))
    return value


def requests(db: FakeDatabase) -> list[type]:
    """Return the kinds of the requests to the coordinator since the last call."""
    found = [type(message) for message in db.first.received]
    db.first.received.clear()
    return found


def test_a_lone_client_reads_what_it_wrote_without_a_request(db: FakeDatabase) -> None:
    assert increment(db, b"k") == QUIET_REPLIES + 1
    assert increment(db, b"k") == QUIET_REPLIES + 2
    assert requests(db) == []
    assert db.harness.core.stats()["known_reads"] >= 2
    assert db.get(b"k") == [v(QUIET_REPLIES + 2)]
    assert requests(db) == [wire.Get], "a read outside a transaction is fresh"


def test_the_version_of_a_separate_value_is_its_own_position(db: FakeDatabase) -> None:
    with patch.object(operations, "INLINE_BYTES", 0):
        for number in range(1, 4):
            assert increment(db, b"k") == QUIET_REPLIES + number
    assert requests(db) == []


def test_an_absent_key_is_known_once_it_was_read(db: FakeDatabase) -> None:
    assert read(db, TransactionSets(LARGEST), b"absent") == [None]
    assert requests(db) == [wire.Get]
    sets = TransactionSets(LARGEST)
    assert read(db, sets, b"absent", b"k") == [None, v(QUIET_REPLIES)]
    assert not db.drive(sets.exists(b"absent", db.harness.until()))
    assert requests(db) == []


def test_an_old_read_is_found_by_the_commit_and_the_next_one_is_requested(
    db: FakeDatabase,
) -> None:
    db.write(b"k", 100)
    with pytest.raises(TransactionAborted) as caught:
        increment(db, b"k")
    assert caught.value.conflicts == [b"k"]
    assert requests(db) == []
    assert increment(db, b"k") == 101
    assert requests(db) == [wire.Get]


def test_a_client_beside_others_requests_each_read(db: FakeDatabase) -> None:
    for number in range(3 * QUIET_REPLIES):
        db.write(b"other", number)
        db.get(b"other")
        requests(db)
        increment(db, b"k")
        assert requests(db) == [wire.Get]


def test_states_are_used_for_a_moment_only(db: FakeDatabase) -> None:
    db.harness.now += FRESH_NS + 1
    increment(db, b"k")
    assert requests(db) == [wire.Get]
    assert FRESH_NS < 50 * MS


def test_a_later_position_makes_the_next_read_a_request(db: FakeDatabase) -> None:
    db.write(b"other", 1)
    assert db.do(ValidateRequest, [KeyRead(b"absent", 0)], []) > RecordId(0, 0)
    requests(db)
    read(db, TransactionSets(LARGEST), b"k")
    assert requests(db) == [wire.Get]


def test_reads_of_one_transaction_are_of_one_state(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    read(db, sets, b"k")
    increment(db, b"k")
    increment(db, b"l")
    requests(db)
    # The state of `l` is known, but it is later than the first read.
    with pytest.raises(TransactionAborted) as caught:
        read(db, sets, b"l")
    assert caught.value.conflicts == [b"k"]
    assert requests(db) == [wire.Get]


def test_a_read_after_a_scan_is_a_request(db: FakeDatabase) -> None:
    page = db.do(ScanRequest, b"", None, 10, fresh=False)
    requests(db)
    db.do(GetRequest, [b"k"], ranges=[page.range])
    assert requests(db) == [wire.Get]


def test_a_coordinator_of_the_release_before_reports_no_changes(db: FakeDatabase) -> None:
    for message in (
        wire.Got(CLUSTER, 1, RecordId(9, 0), [], [], 5),
        wire.Decided(CLUSTER, b"session1", 1, RecordId(9, 0), "committed", [], 5),
    ):
        fields = msgspec.msgpack.decode(log_wire.encode(message))
        former = wire.decode(msgspec.msgpack.encode(fields[:-1]))
        assert fields[-1] == 5
        # As a reader of the release before does with the new field.
        assert wire.decode(msgspec.msgpack.encode([*fields, 6])) == message
        assert former == msgspec.structs.replace(message, unchanged_since=None)
    say = db.first.say

    def say_less(message: Any) -> None:
        if isinstance(message, wire.Got | wire.Decided):
            message = msgspec.structs.replace(message, unchanged_since=None)
        say(message)

    db.first.say = say_less  # type: ignore[method-assign]
    for _ in range(2 * QUIET_REPLIES):
        increment(db, b"k")
    requests(db)
    increment(db, b"k")
    assert requests(db) == [wire.Get]


def test_the_states_of_a_former_cluster_are_dropped(db: FakeDatabase) -> None:
    core = db.harness.core
    position = core.known_position.gsn

    def find() -> object:
        return core.known_states.find([b"k"], [], position, db.harness.now)

    with patch.object(known_states, "QUIET_REPLIES", 0):
        assert find() is not None
        core._coordinators.cluster = CLUSTER + 1
        assert not core.accept_connected_log()
        assert find() is None


def test_a_new_log_begins_at_lower_positions() -> None:
    log = Log()
    for _ in range(5):
        log.apply(("mine", b"a", b"1"))
        log.apply(("arrives", 0))
    known, log = log.known, Log()
    known.reset()
    log.known = known
    log.apply(("mine", b"a", b"2"))
    log.apply(("arrives", 0))
    with patch.object(known_states, "QUIET_REPLIES", 0):
        assert log.find(b"a") == (1, b"2")
