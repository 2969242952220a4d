"""Appends in scripts: each condition of a seal is needed (docs/protocol.md, section 17).

In each script a call returns once its position is sealed, and an insert begins after that. With a
rule broken, the insert gets the lower position. Without, it does not, or the call returns later.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shard.serving.readers import Readers
from tests.sim.mutation import replaced
from tests.sim.script import DELAY_NS, Call, Client, Stage, stage
from tests.sim.stories import Story
from tests.simulator.kernel import MS, S
from ziplog.client.common.lease_map import LeaseMap
from ziplog.client.common.requests import InsertRequest, ReadRequest, TailRequest
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.inserts.results import Results
from ziplog.client.reads import tail
from ziplog.client.reads.frontier_stream import FrontierStream
from ziplog.client.seals.seals import Seals
from ziplog.core.units import NEVER
from ziplog.errors import OutcomeUnknownError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import (
    Ahead,
    Forward,
    Insert,
    LeaseAnnounced,
    Refused,
    RelayedInsert,
    Unsubscribe,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from shard.serving.readers import Subscription
    from ziplog.client.common.unknown_outcome import UnknownOutcome

    #: Runs a script; returns the position that was sealed before `later` began (0: none was).
    Script = Callable[[Stage], tuple[int, Call]]

#: The servers of shard 1; the append is at shard 0.
PRIMARY, BACKUP = "shard-1-0", "shard-1-1"
#: A position so far ahead in the epoch that other shards have many free positions before it.
FAR = 100


def clients(s: Stage) -> tuple[Client, Client]:
    """Return a client that has appended at shard 0 before, and one that inserts at shard 1."""
    appender, other = Client(s, "appender"), Client(s, "other", shard=1)
    appender.wait(appender.append(b"first"))
    return appender, other


def silence(s: Stage) -> None:
    """Lose all questions to shard 1's primary to give up its positions."""
    s.lose("appender", PRIMARY, Want)
    s.lose("shard-0-0", PRIMARY, Ahead)
    s.lose("mms-0", PRIMARY, Want)


def sealed(call: Call, gsn: int) -> int:
    """Return the position that a call has sealed by now; 0: none."""
    return gsn if call.ended and not isinstance(call.result, BaseException) else 0


# --- one server's word ---------------------------------------------------------------------------


@contextmanager
def decided_is_reported() -> Iterator[None]:
    """A bare stream reports what is decided, not what is stable; all streams are at primaries."""

    def send_frontier(self: Readers, _key: object, subscription: Subscription) -> None:
        state = self._state
        frontier = max(state.frontier, state.clock.next_owned(state.stream.end))
        self._deliver(subscription, max(frontier, subscription.sent), [], frontier)

    primaries = replaced(FrontierStream, "_replica", lambda _self, route: route.names[0])
    with primaries, replaced(Readers, "_send_frontier", send_frontier):
        yield


def primary_dies(s: Stage) -> tuple[int, Call]:
    """The primary gives up positions and dies; its backup has promised one of them."""
    appender, other = clients(s)
    base = s.fresh_epoch()
    s.lose(PRIMARY, BACKUP, Forward)
    append = appender.append(b"append", after=base + FAR)
    s.run(600 * MS)
    before = sealed(append, base + FAR)
    s.lose("other", PRIMARY, Insert)
    later = other.insert(b"later")
    s.run(2 * DELAY_NS)
    s.cluster.nodes[PRIMARY].kill()
    s.heal()
    appender.wait(append)
    return before, later


@contextmanager
def guesses_are_reported() -> Iterator[None]:
    """A bare stream reports what a backup has promised, not only what is stable."""

    def send_frontier(self: Readers, _key: object, subscription: Subscription) -> None:
        state, guesses = self._state, self._guesses
        promised = guesses._promised_end if guesses is not None else 0
        frontier = max(state.frontier, state.clock.next_owned(promised))
        self._deliver(subscription, max(frontier, subscription.sent), [], frontier)

    with replaced(Readers, "_send_frontier", send_frontier):
        yield


def backup_is_ahead(s: Stage) -> tuple[int, Call]:
    """The backup has two units that the primary lacks, and promises them its next positions."""
    appender, other = clients(s)
    third = Client(s, "third", shard=1)
    s.fresh_epoch()
    s.lose("other", PRIMARY, Insert)
    s.lose(BACKUP, PRIMARY, RelayedInsert)
    silence(s)
    other.insert(b"one")
    s.run(DELAY_NS + MS)
    other.insert(b"two")
    s.run(DELAY_NS + MS)
    ((first,), _) = sorted(s.guesses(BACKUP).values())
    append = appender.append(b"append", after=first)
    s.run(600 * MS)
    before = sealed(append, first + 1)
    later = third.insert(b"later")
    third.wait(later)
    s.heal()
    appender.wait(append)
    return before, later


# --- which shards --------------------------------------------------------------------------------


@contextmanager
def only_new_members_count() -> Iterator[None]:
    """The seal waits for the members of the newest lease only."""
    settled_end = LeaseMap.settled_end

    def of_members(
        self: LeaseMap, position: int, frontiers: dict[int, int], _shards: object = None
    ) -> int:
        runs = self.runs
        members = {member.shard for member in runs[-1].last.members} if runs else set()
        return settled_end(self, position, frontiers, members)

    with replaced(LeaseMap, "settled_end", of_members):
        yield


@contextmanager
def only_live_shards_are_surveyed() -> Iterator[None]:
    """The survey before a first append asks live shards only."""
    with replaced(tail, "_was_member", lambda placement: placement.state == "live"):
        yield


def shard_leaves(s: Stage, *, is_first: bool = False) -> tuple[int, Call]:
    """Shard 1 is no member of the next lease; its servers have not heard of it.

    `is_first`: the append is the first call of its client.
    """
    appender, other = clients(s)
    silence(s)
    for name in (PRIMARY, BACKUP):
        s.lose("mms-0", name, LeaseAnnounced)
    old = s.cluster.state.last
    s.operator.change("remove", 1)

    def has_left() -> bool:
        last = s.cluster.state.last
        return last is not None and last != old and len(last.members) == 1

    s.until(has_left)
    last = s.cluster.state.last
    assert last is not None
    if is_first:
        appender = Client(s, "newcomer")
        s.lose("newcomer", PRIMARY, Want)
    append = appender.append(b"append", after=last.base + FAR)
    s.run(20 * MS)  # the survey waits for the service
    before = sealed(append, last.base + FAR)
    later = other.insert(b"later")
    s.run(20 * DELAY_NS)
    s.heal()
    appender.wait(append)
    return before, later


def shard_leaves_before_a_first_append(s: Stage) -> tuple[int, Call]:
    return shard_leaves(s, is_first=True)


# --- what waits ----------------------------------------------------------------------------------


@contextmanager
def tail_is_not_sealed() -> Iterator[None]:
    """A sealed tail is the result of the tail query."""

    def start_tail(self: Seals, call: int, request: TailRequest) -> None:
        self._tail_queries.start(call, request)

    with replaced(Seals, "start_tail", start_tail):
        yield


def tail_is_far(s: Stage) -> tuple[int, Call]:
    """The last record is far ahead, and shard 1 has not given up what lies before it."""
    appender, other = clients(s)
    base = s.fresh_epoch()
    silence(s)
    appender.wait(appender.insert(b"far", after=base + FAR))
    query = appender.begin(TailRequest(NEVER, sealed=True))
    s.run(60 * DELAY_NS)  # The query waits for the service.
    before = sealed(query, base + FAR)
    later = other.wait(other.insert(b"later"))
    s.heal()
    appender.wait(query)
    return before, later


@contextmanager
def resolve_does_not_wait() -> Iterator[None]:
    """`resolve` returns as soon as the outcome is known."""

    def resolve(self: Results, number: int, _deadline: int, outcome: UnknownOutcome) -> None:
        self._context.complete(number, list(outcome.results))

    with replaced(Results, "resolve", resolve):
        yield


def append_is_resolved(s: Stage) -> tuple[int, Call]:
    """An append is placed, and not sealed at its deadline."""
    appender, other = clients(s)
    base = s.fresh_epoch()
    silence(s)
    append = appender.append(b"append", after=base + FAR, within_ns=50 * MS)
    s.until(lambda: append.ended)
    error = append.result
    assert isinstance(error, OutcomeUnknownError)
    assert error.results is not None
    resolving = appender.begin(ResolveRequest(NEVER, error.doubt))
    s.run(20 * DELAY_NS)
    before = sealed(resolving, base + FAR)
    later = other.wait(other.insert(b"later"))
    s.heal()
    assert appender.wait(resolving).result == error.results
    return before, later


BROKEN: dict[str, tuple[Script, Callable[[], AbstractContextManager[None]]]] = {
    "decided": (primary_dies, decided_is_reported),
    "guess": (backup_is_ahead, guesses_are_reported),
    "members": (shard_leaves, only_new_members_count),
    "survey": (shard_leaves_before_a_first_append, only_live_shards_are_surveyed),
    "tail": (tail_is_far, tail_is_not_sealed),
    "resolve": (append_is_resolved, resolve_does_not_wait),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_condition_of_a_seal_is_needed(name: str) -> None:
    script, broken = BROKEN[name]

    def is_violated() -> bool:
        with stage(shards=2) as s:
            before, later = script(s)
            s.until(lambda: later.ended)
            return later.gsns[0] < before

    assert not is_violated()
    with broken():
        assert is_violated()


# --- recoveries ----------------------------------------------------------------------------------


def test_stream_that_began_before_a_server_joined_is_ended() -> None:
    with stage(shards=2) as s:
        appender, other = clients(s)
        s.run(6 * S)  # the streams are closed
        inserted = other.wait(other.insert(b"other")).gsns[0]
        s.run(2 * S)
        s.cluster.nodes[BACKUP].kill()
        s.until(lambda: s.cluster.nodes[BACKUP].is_up)
        s.until(lambda: s.state(BACKUP).frontier > inserted)
        assert s.state(BACKUP).server_state == "limbo"
        s.lose("appender", BACKUP, Unsubscribe)
        appender.wait(appender.append(b"append"))
        s.until(s.cluster.is_whole)
        refusals = s.messages(BACKUP, "appender", Refused)
        assert "the server begins another view" in [refused.detail for refused in refusals]


# --- the own shard -------------------------------------------------------------------------------


@contextmanager
def own_shard_is_not_waited_for() -> Iterator[None]:
    """The seal of an append does not wait for its own shard."""
    settled_end = LeaseMap.settled_end

    def without(
        self: LeaseMap, position: int, frontiers: dict[int, int], shards: Any = None
    ) -> int:
        return settled_end(self, position, {**frontiers, 0: NEVER}, shards)

    with replaced(LeaseMap, "settled_end", without):
        yield


def reader_misses_a_record(s: Stage) -> Story:
    """A read before an append finds no record; a recovery places one there."""
    appender, other = Client(s, "appender"), Client(s, "other")
    appender.wait(appender.append(b"first"))
    s.fresh_epoch()
    s.lose("other", "shard-0-0", Insert)
    early = other.insert(b"early")
    s.run(2 * DELAY_NS)
    ((gsn,),) = s.guesses("shard-0-1").values()
    s.lose("shard-0-0", "shard-0-1", Forward)
    append = appender.append(b"append", after=gsn)
    s.run(20 * DELAY_NS)
    read = ReadRequest(NEVER, RecordId(gsn, 0))
    reading = appender.begin(read)
    s.run(20 * DELAY_NS)
    s.cluster.nodes["shard-0-0"].kill()
    s.heal()
    other.wait(early)
    appender.wait(append)
    s.until(lambda: reading.ended)
    assert early.gsns == [gsn]
    story = Story()
    for call, request in (
        (early, InsertRequest(NEVER, [b"early"], RID_GENESIS, None, 0)),
        (append, InsertRequest(NEVER, [b"append"], RID_GENESIS, None, 0, sealed=True)),
        (reading, read),
    ):
        story.add(call.began, call.ended, request, call.result)
    return story


def test_own_shard_is_waited_for() -> None:
    with stage() as s:
        assert reader_misses_a_record(s).explain() is None
    with own_shard_is_not_waited_for(), stage() as s:
        assert reader_misses_a_record(s).explain() is not None
