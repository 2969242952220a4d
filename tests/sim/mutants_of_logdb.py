"""Mutants of LogDB: rules of its decisions, reads, cleaning rounds and client.

They run without the model (`Database.has_model`). The clients' results, the rest of the log, or
differences between coordinators reveal them. See tests/sim/mutation.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

import logdb.client.commits
import logdb.state
import logdb.validation
from logdb import records
from logdb.cleaner.cleaning_round import CleaningRound
from logdb.client.commits import Commits
from logdb.client.known_states import KnownStates
from logdb.coordinator.log_tailer import LogTailer
from logdb.decisions import Decisions
from tests.sim.database import draws
from tests.sim.mutation import LAN, SLOW, mutant, replaced
from tests.sim.plan import Database, Fault, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logdb.client.commits import PendingCommit
    from logdb.coordinator.pending_requests import PendingRequest
    from logdb.records import TransactionId
    from logdb.validation import Verdict
    from logdb.versions import Versions
    from ziplog.types import RecordId

_SERVERS: Final = ("shard-0-0", "shard-0-1")
_COORDINATORS: Final = ("coordinator-0", "coordinator-1")
_LATEST: Final = 2**63 - 1


# --- draws ---------------------------------------------------------------------------------------


def _busy(seed: int, *faults: Fault, **changes: Any) -> Plan:
    """Return a run of four clients with four workers each, two coordinators and these faults."""
    database = Database(
        coordinators=2, checkpoint_every=60, decisions=1_000, segment_bytes=500, inline_bytes=100,
        cache_bytes=200, has_model=False,
    )  # fmt: skip
    plan = draws.draw(seed, faults=0)._replace(
        shards=1, f=1, durability="memory", mms=1, handlers=1, writers=4, readers=1, calls=80,
        lanes=4, think_us=2_000, conditions=SLOW, naps=False, span_ms=500, is_raft_real=False,
        database=database._replace(**changes),
    )  # fmt: skip
    return plan._replace(faults=faults)


def _pairs(sources: tuple[str, ...], target: str) -> tuple[str, ...]:
    return tuple(name for source in sources for name in (source, target))


def _undisturbed(seed: int) -> Plan:
    return _busy(seed)


def _deaf(seed: int) -> Plan:
    """A client repeatedly inserts and then receives neither the log nor a coordinator for a while.

    Its first copy of a commit record is in the log, and it inserts another one.
    """
    random = Random(f"deaf {seed}")
    sources = (*_SERVERS, *_COORDINATORS)
    faults = [
        Fault(3_000 * i + random.randrange(200), "cut", _pairs(sources, "writer-0"), 2_000)
        for i in range(4)
    ]
    plan = _busy(seed, *faults, decisions=16)
    return plan._replace(calls=1_000, think_us=200_000, span_ms=12_000)


def _deaf_and_remembered(seed: int) -> Plan:
    plan = _deaf(seed)
    assert plan.database is not None
    return plan._replace(database=plan.database._replace(decisions=1_000))


def _behind(seed: int) -> Plan:
    """A coordinator repeatedly loses the log for a while."""
    faults = [
        Fault(400 * i, "clog", _pairs(_SERVERS, _COORDINATORS[i % 2]), 300) for i in range(10)
    ]
    return _busy(seed, *faults)._replace(think_us=50_000)


def _held_up(seed: int) -> Plan:
    """Clients learn late that their values are in the log, so their commits arrive late."""
    random = Random(f"held up {seed}")
    faults = [
        Fault(700 * i + random.randrange(400), "clog", _pairs(_SERVERS, f"writer-{writer}"), 600)
        for i in range(8)
        for writer in range(3)
    ]
    plan = _busy(seed, *faults, coordinators=1, inline_bytes=0, checkpoint_every=20)
    return plan._replace(calls=200, think_us=20_000, span_ms=6_000, conditions=LAN)


# --- the decision --------------------------------------------------------------------------------


@mutant(_undisturbed, "no faults; slow network")
def reads_are_not_compared() -> Iterator[None]:
    """A transaction commits although its reads have changed (docs/logdb.md, section 4, rule 3)."""
    with replaced(logdb.validation, "conflicts", lambda *_: []):
        yield


@mutant(_held_up, "clients' commits come late, while the log is cleaned and trimmed")
def values_before_the_horizon() -> Iterator[None]:
    """A commit may refer to any value, regardless of cut and version (section 4, rules 2, 4)."""
    decide = logdb.validation.decide

    def careless(
        versions: Versions, decisions: Decisions, commit: records.Commit, gsn: int, horizon: int = 0
    ) -> Verdict:
        return decide(versions, decisions, msgspec.structs.replace(commit, writes=[]), gsn, horizon)

    with replaced(logdb.state, "decide", careless):
        yield


_DEAF: Final = "a client repeatedly receives nothing for two seconds; 16 decisions are remembered"


@mutant(_deaf, _DEAF)
def nothing_expires() -> Iterator[None]:
    """A copy of a forgotten decision is decided again (section 4, rule 2)."""
    decide = logdb.validation.decide

    def patient(
        versions: Versions, decisions: Decisions, commit: records.Commit, gsn: int, horizon: int = 0
    ) -> Verdict:
        late = msgspec.structs.replace(commit, began=_LATEST)
        return decide(versions, decisions, late, gsn, horizon)

    with replaced(logdb.state, "decide", patient):
        yield


@mutant(_deaf_and_remembered, "a client repeatedly receives nothing for two seconds")
def copies_are_decided() -> Iterator[None]:
    """A copy of a decided commit record is decided again (section 4, rule 1)."""
    add = Decisions.add

    def added(self: Decisions, id_: TransactionId, position: RecordId, committed: bool) -> None:
        self._kept.pop((id_.session, id_.number), None)
        add(self, id_, position, committed)

    with (
        replaced(Decisions, "outcome", lambda _self, _id: None),
        replaced(Decisions, "add", added),
    ):
        yield


# --- reads ---------------------------------------------------------------------------------------


@mutant(_behind, "coordinators lose the log for 300 ms, in turn")
def reads_are_not_fresh() -> Iterator[None]:
    """A coordinator answers from its own state, without a query to the log (section 6)."""
    with replaced(LogTailer, "wait_for_tail", _at_once):
        yield


def _at_once(_self: LogTailer, waiter: PendingRequest) -> None:
    waiter.resume()


@mutant(_undisturbed, "no faults; slow network")
def known_states_are_kept() -> Iterator[None]:
    """A client keeps the states that it knows although another client changed keys (section 5)."""
    with replaced(KnownStates, "clear", lambda _self: None):
        yield


@mutant(_undisturbed, "no faults; slow network")
def known_states_beside_other_reads() -> Iterator[None]:
    """A client reads what it knows beside what the transaction read before (section 5)."""
    find = KnownStates.find

    def found(self: KnownStates, keys: Any, _reads: Any, position: Any, now: int) -> Any:
        return find(self, keys, [], position, now)

    with replaced(KnownStates, "find", found):
        yield


# --- rounds --------------------------------------------------------------------------------------


@mutant(_undisturbed, "no faults; slow network")
def trimmed_before_the_checkpoint() -> Iterator[None]:
    """The log is trimmed as soon as all values are moved, before the checkpoint (section 8)."""
    save = CleaningRound._save

    def saved(self: CleaningRound, cut: int) -> Any:
        if cut:
            yield from self.trim(cut, self._state.position)
        return (yield from save(self, cut))

    with replaced(CleaningRound, "_save", saved):
        yield


# --- the client ----------------------------------------------------------------------------------


@mutant(_deaf_and_remembered, "a client repeatedly receives nothing for two seconds")
def another_number_for_a_copy() -> Iterator[None]:
    """A client inserts a record with an unknown outcome as another transaction."""
    insert = Commits._insert

    def inserted(self: Commits, commit: PendingCommit) -> None:
        if commit.tries:
            del self._open[commit.number]
            self._coordinators.forget(commit.query)
            number = self.next_number()
            record = records.decode(commit.payload or b"")
            assert isinstance(record, records.Commit)
            name = records.TransactionId(record.id.session, number)
            commit.number, commit.query = number, 0  # type: ignore[misc]
            commit.payload = records.encode(msgspec.structs.replace(record, id=name))
            self._open[number] = commit
        insert(self, commit)

    with replaced(Commits, "_insert", inserted):
        yield


@mutant(_deaf, _DEAF)
def any_copy_expires_for_all() -> Iterator[None]:
    """A client takes "expired" for an abort, although other copies may exist (section 7)."""
    with replaced(logdb.client.commits, "_is_final", lambda _attempts, _decided: True):
        yield
