"""Inserts on the client's short path have the same effects as inserts on the general one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.properties import examples
from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    ack,
    connected,
    learn,
    pinned,
    refused,
    resolve,
    sent,
)
from ziplog import wire
from ziplog.client.inserts import sending
from ziplog.client.inserts.plain_inserts import PlainInserts
from ziplog.core.node import BatchEnd, Closing
from ziplog.errors import OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId


@pytest.fixture(autouse=True, scope="module")
def _groups(_no_groups: None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "IMMEDIATE_SINGLE_UNITS", 1)
        patch.setattr(sending, "MAX_SINGLE_UNITS", 2)
        yield


def warm() -> ClientHarness:
    """Return a client whose next insert takes the short path."""
    harness = connected(pinned)
    harness.core._inserts._copies._budget._units = 0
    first = harness.insert(b"first")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [10]), ack(insert, 0, [10]))
    assert harness.answers.pop(first) == [RecordId(10, 0)]
    return harness


def is_plain(harness: ClientHarness) -> bool:
    return harness.core._inserts.plain.insert is not None


# --- which inserts take the short path ---


def test_lone_insert_takes_the_short_path_to_its_end() -> None:
    harness = warm()
    for number in range(5):
        call = harness.insert(b"x")
        assert is_plain(harness)
        (insert,) = sent(harness)
        harness.give(ack(insert, 1, [20 + number]))
        assert is_plain(harness)
        assert call not in harness.answers
        harness.give(ack(insert, 0, [20 + number]))
        assert not is_plain(harness)
        assert harness.answers.pop(call) == [RecordId(20 + number, 0)]
    assert harness.core.counters.fast_path == 6


def test_backup_with_a_wrong_guess_leaves_the_insert_on_the_short_path() -> None:
    harness = warm()
    call = harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 0, [20]), ack(insert, 1, [21]))
    assert is_plain(harness)
    assert call not in harness.answers
    harness.give(replace(ack(insert, 1, [21]), counter=0))
    assert call not in harness.answers, "an older ack"
    harness.give(replace(ack(insert, 1, [20]), counter=9))
    assert harness.answers.pop(call) == [RecordId(20, 0)]
    assert (harness.core.counters.fast_path, harness.core.counters.slow_path) == (1, 1)


def test_event_between_the_acks_of_a_wrong_guess_keeps_the_slow_path() -> None:
    harness = warm()
    harness.insert(b"x")
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [21]), replace(ack(insert, 1, [20]), counter=9))
    harness.insert(b"y")
    assert not is_plain(harness)
    harness.give(ack(insert, 0, [20]))
    assert (harness.core.counters.fast_path, harness.core.counters.slow_path) == (1, 1)


def test_insert_beside_another_takes_the_general_path() -> None:
    harness = warm()
    first, second = harness.insert(b"x"), harness.insert(b"y")
    assert not is_plain(harness)
    (insert,) = sent(harness)
    harness.give(ack(insert, 1, [20]), ack(insert, 0, [20]))
    (other,) = sent(harness)
    harness.give(ack(other, 1, [21]), ack(other, 0, [21]))
    assert (harness.answers[first], harness.answers[second]) == (
        [RecordId(20, 0)],
        [RecordId(21, 0)],
    )


def test_insert_after_a_record_of_another_client_takes_the_short_path() -> None:
    harness = warm()
    call = harness.insert(b"x", after=RecordId(30, 0))
    assert is_plain(harness)
    (insert,) = sent(harness)
    assert insert.after == 30
    harness.give(ack(insert, 1, [31]), ack(insert, 0, [31]))
    assert harness.answers.pop(call) == [RecordId(31, 0)]


def test_call_with_several_records_takes_the_general_path() -> None:
    harness = warm()
    harness.insert(b"x", b"y")
    assert not is_plain(harness)


# --- both paths are equal ---

#: The n-th newest insert that was sent.
NEWEST = st.integers(0, 2)
SERVER = st.integers(0, 1)
GSN_OFFSET = st.sampled_from([0] * 8 + [1, -30])
ACK = st.tuples(
    st.just("ack"),
    NEWEST,
    SERVER,
    GSN_OFFSET,
    st.fixed_dictionaries(
        {},
        optional={
            "waited": st.just(True),
            "view": st.integers(1, 3),
            "copy": st.integers(0, 2),
            "counter": st.integers(1, 3),
            "cluster": st.integers(CLUSTER, CLUSTER + 1),
            "shard": st.integers(0, 1),
            "server": st.integers(0, 3),
            "confirmed": st.booleans(),
        },
    ),
)
PLAIN_ACK = st.tuples(st.just("ack"), st.just(0), SERVER, st.just(0), st.just({}))
INSERT = st.tuples(st.just("insert"), st.sampled_from([0, 0, 0, 1, 2, 3]), st.sampled_from([10, 1]))
REFUSAL = st.sampled_from(
    ["full", "redirect", "no-such-position", "wrong-view", "expired", "not-ready"]
)
DURATION = st.sampled_from([0, MS, 150 * MS, 250 * MS, 2 * S, 12 * S, 900 * S])
STATE = st.sampled_from(["live", "recovering", "leaving"])
OTHERS = st.one_of(
    st.tuples(st.just("many"), st.integers(2, 3)),
    st.tuples(
        st.just("refuse"),
        NEWEST,
        SERVER,
        REFUSAL,
    ),
    st.tuples(st.just("locate"), NEWEST, SERVER, st.sampled_from(["present", "absent"])),
    st.tuples(st.just("pass"), DURATION),
    st.tuples(st.just("cancel"), NEWEST),
    st.tuples(st.just("learn"), st.integers(1, 3), STATE),
    st.tuples(st.just("resolve"), NEWEST),
    st.tuples(st.just("sleep"), st.sampled_from([S, 900 * S])),
    st.tuples(st.just("close")),
)  # fmt: skip
#: An insert, an event that may end the short path, and the acks.
ROUND = st.tuples(
    INSERT,
    st.lists(PLAIN_ACK, max_size=1),
    st.lists(st.one_of(ACK, OTHERS, INSERT), max_size=2),
    st.permutations([("ack", 0, server, 0, {"counter": 2}) for server in range(2)]),
    st.lists(OTHERS, max_size=1),
).map(lambda parts: [parts[0], *parts[1], *parts[2], *parts[3], *parts[4]])
EVENTS = st.lists(ROUND, min_size=1, max_size=5).map(
    lambda rounds: [event for events in rounds for event in events]
)


class Driver:
    """Delivers events to one client, and notes all that it does."""

    def __init__(self, harness: ClientHarness) -> None:
        self.harness = harness
        self.calls: list[int] = []
        self.inserts: list[wire.Insert] = []
        self.placed: dict[int, int] = {}
        self.plain = 0
        self.trace: list[Any] = []

    def run(self, event: tuple[Any, ...]) -> None:
        """Deliver an event; the next gsns depend on the seqs only."""
        kind, *fields = event
        getattr(self, kind)(*fields)
        harness, core = self.harness, self.harness.core
        self.plain += is_plain(harness)
        names = [name for name, _ in harness.sent]
        self.inserts += sent(harness)
        answers = {call: repr(answer) for call, answer in harness.answers.items()}
        self.trace.append(
            (event, names, self.inserts[-1:], [*harness.sent], answers, repr(core.counters))
        )
        self.trace.append(core.next_wakeup())
        harness.sent.clear()

    def insert(self, after: int, timeout: int) -> None:
        rid = (RID_GENESIS, RecordId(10, 0), RecordId(25, 0), RecordId(900, 0))[after]
        self.calls.append(self.harness.insert(b"x", after=rid, timeout=timeout * S))

    def many(self, count: int) -> None:
        self.calls.append(self.harness.insert(*[b"y"] * count))

    def _newest(self, index: int) -> wire.Insert | None:
        return self.inserts[-1 - index] if index < len(self.inserts) else None

    def ack(self, index: int, server: int, offset: int, fields: dict[str, Any]) -> None:
        insert = self._newest(index)
        if insert is not None:
            first = 20 + 10 * insert.seq + offset
            gsns = list(range(first, first + insert.count))
            self.harness.give(replace(ack(insert, server, gsns), **fields))

    def refuse(self, index: int, server: int, code: Any) -> None:
        insert = self._newest(index)
        if insert is not None:
            self.harness.give(refused(insert, server, code))

    def locate(self, index: int, server: int, verdict: Any) -> None:
        insert = self._newest(index)
        if insert is not None:
            first = 20 + 10 * insert.seq
            gsns = list(range(first, first + insert.count)) if verdict == "present" else []
            view = insert.view + 1
            self.harness.give(
                wire.Located(
                    CLUSTER, insert.shard, view, server, insert.client, insert.seq, verdict, gsns
                )
            )

    def cancel(self, index: int) -> None:
        if index < len(self.calls):
            self.harness.cancel(self.calls[-1 - index])

    def learn(self, view: int, state: str) -> None:
        learn(self.harness, view, state)

    def resolve(self, index: int) -> None:
        unknown = [a for a in self.harness.answers.values() if isinstance(a, OutcomeUnknownError)]
        if index < len(unknown):
            self.calls.append(resolve(self.harness, unknown[-1 - index]))

    def close(self) -> None:
        self.harness.step(Closing())

    def sleep(self, duration: int) -> None:
        """Suspend the machine: no timer runs."""
        self.harness.now += duration

    # `pass` is a keyword.
    def __getattr__(self, name: str) -> Any:
        return {"pass": self.harness.pass_time}[name]


def run_both(events: list[tuple[Any, ...]]) -> tuple[Driver, Driver]:
    """Run the events on both paths, and compare after each of them."""
    with pytest.MonkeyPatch.context() as patch:
        short = Driver(warm())
        general = Driver(warm())
        general.harness.by_events = True
        for event in events:
            short.run(event)
            with patch.context() as without:
                without.setattr(PlainInserts, "start", lambda *_: False)
                general.run(event)
            assert short.trace[-2:] == general.trace[-2:]
        for driver in (short, general):
            driver.harness.core._inserts.take_over_plain()
        assert state(short) == state(general)
    assert not general.plain
    return short, general


def state(driver: Driver) -> list[dict[str, Any]]:
    """Return the windows of a client."""
    inserts = driver.harness.core._inserts
    return [{"budget": inserts._copies._budget._units, "highest": inserts._context.highest_gsn}] + [
        {
            name: contents(getattr(window, name))
            for name in window.__slots__
            if name not in {"inflight", "queue", "singles", "retransmit_timeout"}
        }
        | {
            "timeout": window.retransmit_timeout.ns,
            "inflight": [
                {name: contents(getattr(unit, name)) for name in unit.__slots__}
                for unit in window.inflight.values()
            ],
            "queues": [len(window.queue), len(window.singles)],
        }
        for window in inserts.windows.values()
    ]


def contents(value: Any) -> Any:
    return repr(value) if "object at" not in repr(value) else type(value).__name__


@given(EVENTS)
@examples(400)
def test_both_paths_have_the_same_effects(events: list[tuple[Any, ...]]) -> None:
    run_both(events)


def test_most_inserts_of_such_runs_are_plain() -> None:
    events: list[tuple[Any, ...]] = []
    for number in range(30):
        events += [
            ("insert", 0, 10),
            ("ack", 0, number % 2, 0, {}),
            ("ack", 0, 1 - number % 2, 0, {}),
        ]
    short, _ = run_both(events)
    assert short.plain == 60


@pytest.mark.parametrize(
    "event",
    [
        ("insert", 0, 10), ("many", 2), ("ack", 0, 0, 1, {}), ("ack", 0, 1, 0, {"waited": True}),
        ("ack", 0, 1, 0, {"view": 2}), ("ack", 0, 1, 0, {"server": 2}), ("ack", 0, 1, -30, {}),
        ("refuse", 0, 0, "redirect"), ("refuse", 0, 1, "full"), ("pass", 250 * MS),
        ("pass", 12 * S), ("pass", 900 * S), ("cancel", 0), ("learn", 2, "live"),
        ("learn", 1, "leaving"), ("close",), ("sleep", 900 * S), ("sleep", S),
        ("locate", 0, 0, "present"),
    ],
)  # fmt: skip
def test_event_ends_the_short_path_without_a_trace(event: tuple[Any, ...]) -> None:
    for before in ([], [("ack", 0, 0, 0, {})], [("ack", 0, 1, 0, {})]):
        rest = [
            ("ack", 0, 0, 0, {"counter": 2}),
            ("ack", 0, 1, 0, {"counter": 2}),
            ("pass", 20 * S),
        ]
        short, _ = run_both([("insert", 0, 10), *before, event, *rest])
        assert short.plain


@pytest.mark.parametrize(
    ("index", "offset", "fields"),
    [
        (1, 0, {"counter": 2}),
        (0, 0, {"shard": 1}),
        (0, 0, {"cluster": CLUSTER + 1}),
        (0, 0, {"copy": 2}),
        (0, 0, {"copy": 0}),
        (0, 0, {"gsns": [40, 41]}),
        (0, -30, {}),
    ],
)
def test_acks_that_are_no_plain_acks(index: int, offset: int, fields: dict[str, Any]) -> None:
    """Of the insert before, another shard or cluster, another copy; of positions that are wrong."""
    acks: list[tuple[Any, ...]] = [("ack", index, server, offset, fields) for server in (1, 0)]
    rest: list[tuple[Any, ...]] = [("ack", 0, server, 0, {"counter": 3}) for server in (1, 0)]
    for after in (0, 1):
        run_both([("insert", 0, 10), *rest, ("insert", after, 10), *acks, *rest, ("pass", 20 * S)])
        run_both([("sleep", MS), ("insert", after, 10), *acks, *rest, ("pass", 20 * S)])


def test_batch_end_leaves_the_short_path_as_it_is() -> None:
    harness = warm()
    harness.insert(b"x")
    harness.step(BatchEnd())
    assert is_plain(harness)
