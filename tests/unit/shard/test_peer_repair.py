"""Repair of a replica from its peers: requested entries, selected peers, abandoned attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from shard.recovery import peer_repair
from shard.recovery.participant import LogClaim, MissingEntries, RecoveryParticipant
from shard.recovery.peer_repair import Repair
from shard.recovery.state_transfer import serve
from shard.state.decision_log import Watermark
from shard.state.replica_state import ReplicaConfig, ReplicaState
from shard.storage.store import FullError
from tests.memory_store import MemoryStore
from tests.unit.shard.logs import expire, place, skip
from tests.world import MS, S, address, shard_names
from ziplog.core.node import LogWarning, Send
from ziplog.segments.entry import Entry, UnreadableError
from ziplog.wire import Fetch, Fetched, Limits, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = shard_names(0, 2)
#: 20 entries: every third one is an `Expire`, every third one a `Skip`.
LOG = [
    expire(n) if n % 3 == 0 else skip(n, 10 * n, 10 * n + 4) if n % 3 == 1 else place(n, [10 * n])
    for n in range(1, 21)
]


def state_of(server: int, log: list[Entry], stable: int = 20, f: int = 2) -> ReplicaState:
    addresses = tuple(map(address, NAMES[: f + 1]))
    config = ReplicaConfig(
        NAMES[server], addresses[server].endpoint, 0, server, addresses, (), "memory", 1, Limits()
    )
    store = MemoryStore()
    for entry in log:
        store.append(entry)
    state = ReplicaState(config, store, 1)
    state.cluster, state.view, state.server_state = 77, 1, "up"
    mark = Watermark(stable, 10 * stable + 1, 10 * stable)
    state.stream.restore(mark, mark, [])
    return state


class Shard:
    """One replica with a repair, and its peers."""

    def __init__(self, damaged: set[int], *, f: int = 2, stable: int = 20) -> None:
        self.now = 1 * S
        self.state = state_of(0, LOG, stable, f)
        self.store = self.state.store
        assert isinstance(self.store, MemoryStore)
        self.store.damaged = set(damaged)
        self.peers = {NAMES[i].encode(): state_of(i, LOG, 20, f) for i in range(1, f + 1)}
        self.repair = Repair(self.state, RecoveryParticipant(self.state))
        self.asked: list[tuple[bytes, Fetch]] = []
        self.warnings: list[str] = []
        #: Changes a peer's answer in flight; None: the answer is lost.
        self.way: Callable[[bytes, Fetched], Fetched | None] = lambda _, answer: answer

    def need(self, gsn: int) -> None:
        self.repair.request(gsn, UnreadableError(f"file is damaged at {gsn}"), self.now)
        self.deliver()

    def deliver(self) -> None:
        """Deliver requests and answers until there are none."""
        while self.state.effects:
            out, self.state.effects = self.state.effects, []
            for effect in out:
                if isinstance(effect, LogWarning):
                    self.warnings.append(effect.text)
                    continue
                assert isinstance(effect, Send)
                question = decode(encode(effect.message))
                assert isinstance(question, Fetch)
                self.asked.append((effect.dst, question))
                self._answer(effect.dst, question)

    def _answer(self, name: bytes, question: Fetch) -> None:
        peer = self.peers[name]
        serve(peer, b"route", question)
        for reply in peer.effects:
            if isinstance(reply, Send):
                assert isinstance(reply.message, Fetched)
                answer = self.way(name, reply.message)
                if answer is not None:
                    assert self.repair.on_fetched(name, answer, self.now)
        peer.effects = []

    def run(self, duration: int) -> None:
        """Call `tick` at the requested times."""
        end = self.now + duration
        while (due := self.repair.next_wakeup()) is not None and due <= end:
            self.now = max(self.now, due)
            self.repair.tick(self.now)
            self.deliver()
        self.now = end

    @property
    def damaged(self) -> set[int]:
        assert isinstance(self.store, MemoryStore)
        return self.store.damaged

    @property
    def requested_peers(self) -> list[bytes]:
        return [name for name, _ in self.asked]


ONE, TWO = NAMES[1].encode(), NAMES[2].encode()


@pytest.mark.parametrize("damaged", [{1}, {8}, {20}, {4, 5, 6, 7}, set(range(1, 21))])
def test_damage_found_by_a_reader_is_repaired(damaged: set[int]) -> None:
    shard = Shard(set())
    shard.damaged.update(damaged)
    first = min(damaged)
    assert shard.repair.next_wakeup() is None
    with pytest.raises(UnreadableError):
        shard.store.find(10 * min(n for n in damaged if n % 3))
    shard.need(10 * min(n for n in damaged if n % 3))
    assert shard.damaged == set()
    assert shard.store.read_after(0, 1 << 30) == LOG
    (asked,) = shard.asked
    assert asked[0] == ONE
    assert (asked[1].after, asked[1].after_view) == (first - 1, 1 if first > 1 else 0)
    (warning,) = shard.warnings
    assert f"file is damaged at {10 * min(n for n in damaged if n % 3)}" in warning
    assert shard.repair.next_wakeup() is None


def test_the_last_record_is_known_again_once_it_is_repaired() -> None:
    shard = Shard({20})
    stream = shard.state.stream
    known = Watermark(20, 201, 190)  # the value after a start that cannot read entry 20
    stream.restore(known, known, [])
    shard.need(200)
    assert (stream.last_record, stream.stable_record, stream.durable_record) == (200, 200, 200)


def test_damage_known_at_the_start_is_repaired_without_a_read() -> None:
    """An `Expire` has no position: no reader ever finds it."""
    shard = Shard({3, 9, 10})
    shard.run(3 * S)
    assert shard.damaged == set()
    assert [(q.after, q.after_view) for _, q in shard.asked] == [(2, 1), (8, 1)]
    assert shard.repair.next_wakeup() is None


def test_damage_found_by_a_peers_request_is_repaired() -> None:
    shard = Shard(set())
    shard.damaged.update({9, 10})
    shard.repair.request_after(8, UnreadableError("file is damaged"), shard.now)
    shard.deliver()
    assert shard.damaged == set()
    (warning,) = shard.warnings
    assert "the entry after 8" in warning


def test_a_peer_that_is_silent_or_cannot_help_is_followed_by_the_next() -> None:
    shard = Shard({8})
    shard.way = lambda name, answer: answer if name == TWO else None
    shard.run(5 * S)
    assert shard.requested_peers == [ONE, TWO]
    assert shard.damaged == set()

    other = Shard({8})
    other.peers[ONE] = state_of(1, [])
    other.peers[ONE].store.reset(30, 500)  # the peer trimmed all of them
    other.run(5 * S)
    assert other.requested_peers == [ONE, TWO]
    assert other.damaged == set()


@pytest.mark.parametrize("case", ["silent", "other log", "short", "gap", "misfit"])
def test_unrepairable_damage_is_reported_once_and_retried_rarely(case: str) -> None:
    shard = Shard({8, 9})
    if case == "other log":
        for name in shard.peers:
            newer = [Entry(e.fseq, 2, e.decision) for e in LOG]
            shard.peers[name] = state_of(1, newer)
            shard.peers[name].view = 1
    changes: dict[str, Callable[[Fetched], Fetched | None]] = {
        "silent": lambda _: None,
        "other log": lambda answer: answer,
        "short": lambda answer: changed(answer, []),
        "gap": lambda answer: changed(answer, answer.entries[1:]),
        "misfit": lambda answer: changed(
            answer, [type(e)(e.fseq, 2, e.decision) for e in answer.entries]
        ),
    }
    shard.way = lambda _, answer: changes[case](answer)
    shard.run(30 * S)
    assert shard.requested_peers == [ONE, TWO] * 3
    (warning,) = shard.warnings
    assert NAMES[0] in warning
    assert "entries 8 to 9" in warning
    assert "move its data directory away" in warning
    for _ in range(50):
        shard.need(80)
    assert len(shard.asked) == 6
    shard.now += 60 * S
    shard.need(80)
    shard.run(30 * S)
    assert len(shard.asked) == 12
    assert len(shard.warnings) == 1
    assert shard.damaged == {8, 9}
    shard.now += 60 * S
    shard.way = lambda _, answer: answer
    shard.peers = {name: state_of(1, LOG) for name in shard.peers}
    shard.need(80)
    assert shard.damaged == set()


def test_remembered_unrepairable_damage_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_repair, "_MAX_UNREPAIRABLE", 4)
    shard = Shard(set())
    for gsn in range(20):
        shard.need(gsn)
        shard.now += 60 * S
    assert len(shard.repair._unrepairable) <= 4
    assert len(shard.warnings) == 20


def changed(answer: Fetched, entries: list[object]) -> Fetched:
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    return Fetched(**{**fields, "entries": entries})


def test_repair_without_peers_is_reported() -> None:
    shard = Shard({8}, f=0)
    shard.run(5 * S)
    assert shard.asked == []
    (warning,) = shard.warnings
    assert "there is no other replica" in warning


def test_damage_with_unknown_entry_numbers_is_unrepairable() -> None:
    shard = Shard({8})
    with patch.object(shard.store, "damaged_range", lambda _: None):
        shard.need(80)
    (warning,) = shard.warnings
    assert "the missing entries cannot be identified" in warning
    assert "gsn 80" in warning


def test_a_read_error_that_has_passed_is_not_unrepairable() -> None:
    """The operator must not move the directory away for it."""
    shard = Shard(set())
    shard.need(80)
    shard.repair.request_after(7, UnreadableError("file is damaged"), shard.now + 1 * S)
    shard.deliver()
    assert len(shard.warnings) == 2
    assert all("can read it now. Check the disk" in text for text in shard.warnings)
    assert shard.state.counters.repairs["impossible"] == 0
    assert shard.asked == []


def test_only_stable_entries_are_requested() -> None:
    shard = Shard({7, 8, 9}, stable=8)
    shard.run(500 * MS)
    assert shard.damaged == {9}
    shard.run(5 * S)
    assert shard.damaged == {9}
    assert {q.after for _, q in shard.asked} == {6}
    shard.state.stream.restore(Watermark(9, 91, 90), Watermark(9, 91, 90), [])
    shard.run(5 * S)
    assert shard.damaged == set()


def test_a_server_that_is_not_up_sends_no_request() -> None:
    shard = Shard({8})
    shard.state.server_state = "limbo"
    shard.need(80)
    shard.run(5 * S)
    assert shard.asked == []
    shard.state.server_state = "joined"
    shard.run(5 * S)
    assert shard.damaged == set()


def test_a_server_that_leaves_its_view_drops_the_question() -> None:
    shard = Shard({8})
    shard.way = lambda *_: None
    shard.repair.tick(shard.now)
    shard.deliver()
    assert len(shard.asked) == 1
    shard.state.server_state = "frozen"
    shard.run(5 * S)
    assert len(shard.asked) == 1
    answer = Fetched(77, 0, 1, 1, 7, 0, 7, 20, [], [], 0, 0, 20)
    assert not shard.repair.on_fetched(ONE, answer, shard.now)


def test_an_answer_to_another_request_is_not_handled() -> None:
    shard = Shard({8})
    seen: list[Fetched] = []

    def way(_: bytes, answer: Fetched) -> Fetched | None:
        seen.append(answer)
        return None

    shard.way = way
    shard.repair.tick(shard.now)
    shard.deliver()
    (answer,) = seen
    take = shard.repair.on_fetched
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    assert not take(TWO, answer, shard.now)
    for field in ("view", "after", "session"):
        assert not take(ONE, Fetched(**{**fields, field: 5}), shard.now)
    assert shard.damaged == {8}
    assert take(ONE, answer, shard.now)
    assert shard.damaged == set()
    assert not take(ONE, answer, shard.now), "it comes twice"


@pytest.mark.parametrize("f", [1, 2])
def test_answers_that_take_seconds_repair_a_large_hole(f: int) -> None:
    shard = Shard(set(range(3, 18)), f=f)
    slow: list[tuple[int, bytes, Fetched]] = []

    def way(name: bytes, answer: Fetched) -> None:
        slow.append((shard.now + 3 * S, name, changed(answer, answer.entries[:5])))

    shard.way = way
    for _ in range(50):
        shard.run(1 * S)
        while slow and slow[0][0] <= shard.now:
            _, name, answer = slow.pop(0)
            shard.repair.on_fetched(name, answer, shard.now)
            shard.deliver()
    assert shard.damaged == set()
    assert len(shard.asked) <= 3 + 3 * f


def test_a_large_hole_is_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_repair, "_STORE_BYTES", 8)
    shard = Shard(set(range(3, 18)))
    parts: list[int] = []
    store = shard.store
    real = store.repair

    def counted(entries: list[Entry]) -> bool:
        parts.append(len(entries))
        return real(entries)

    monkeypatch.setattr(store, "repair", counted)
    shard.way = lambda _, answer: changed(answer, answer.entries[:2])
    shard.run(60 * S)
    assert shard.damaged == set()
    assert sum(parts) == 15
    assert 2 < len(parts) < 8
    assert set(shard.requested_peers) == {ONE}


def test_without_space_it_waits_for_the_next_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard({8})

    def full(_: list[Entry]) -> bool:
        raise FullError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(shard.store, "repair", full)
        shard.run(5 * S)
        assert shard.damaged == {8}
        assert 1 < len(shard.asked) < 8
    shard.run(5 * S)
    assert shard.damaged == set()


def test_an_unreadable_file_is_unrepairable(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(set())
    shard.damaged.add(8)

    def unreadable(_: object) -> None:
        raise UnreadableError("file: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(shard.store, "damaged_range", unreadable)
        shard.need(80)
    (warning,) = shard.warnings
    assert "Input/output error" in warning
    other = Shard({8})
    monkeypatch.setattr(other.store, "repair", unreadable)
    other.run(5 * S)
    (warning,) = other.warnings
    assert "Input/output error" in warning


# --- in limbo ---


def views(view: int, first: int) -> list[Entry]:
    """Return a log with another view from entry `first` on."""
    return [Entry(e.fseq, view if e.fseq >= first else 1, e.decision) for e in LOG]


class Limbo(Shard):
    """One server in limbo that should lead a recovery, and its peers, also in limbo."""

    def __init__(
        self,
        damaged: set[int],
        log: list[Entry] = LOG,
        others: list[Entry] | None = None,
        *,
        stable: int = 0,
        f: int = 1,
    ) -> None:
        super().__init__(set(), f=f)
        self.state = state_of(0, log, stable, f)
        self.store = self.state.store
        assert isinstance(self.store, MemoryStore)
        self.store.damaged = set(damaged)
        #: The stored entries.
        self.parts: list[list[Entry]] = []
        self.store.repair = self._stored  # type: ignore[method-assign]
        held = log if others is None else others
        self.peers = {NAMES[i].encode(): state_of(i, held, stable, f) for i in range(1, f + 1)}
        for state in (self.state, *self.peers.values()):
            state.server_state, state.view = "limbo", 0
        self.recovery = RecoveryParticipant(self.state)
        self.repair = Repair(self.state, self.recovery)

    def _stored(self, entries: list[Entry]) -> bool:
        self.parts.append(entries)
        return MemoryStore.repair(self.store, entries)  # type: ignore[arg-type]

    def lead(self, after: int, view: int = 0) -> None:
        """Record the entry after `after` as missing."""
        error = UnreadableError(f"entry {after + 1} is damaged")
        self.recovery._record_missing(MissingEntries(after, error, view))
        self.repair.request_in_limbo(self.now)
        self.deliver()

    def run(self, duration: int) -> None:
        """Call `tick` ten times a second, the interval of reports to the handler."""
        end = self.now + duration
        while self.now < end:
            self.now += 100 * MS
            self.repair.request_in_limbo(self.now)
            self.repair.tick(self.now)
            self.deliver()


def test_a_server_that_is_to_lead_gets_what_it_cannot_read() -> None:
    """Also unstable entries: an equal view of the following entry proves that they are equal."""
    shard = Limbo({8, 9}, stable=3)
    shard.lead(7)
    assert shard.damaged == set()
    assert [(name, q.view, q.after, q.after_view) for name, q in shard.asked] == [(ONE, 0, 7, 1)]
    assert [e.fseq for e in shard.parts[0]] == [8, 9], "readable entries stay unchanged"
    assert shard.recovery.missing is None
    (warning,) = shard.warnings
    assert "repaired it with a copy from shard-0-1" in warning
    assert not shard.recovery.claim.is_damaged


@pytest.mark.parametrize(
    ("mine", "others", "is_taken"),
    [
        (views(2, 8), views(2, 8), True),
        (views(2, 10), views(2, 10), True),  # the next entry is needed as the proof
        (views(2, 9), views(2, 9), True),
        (views(2, 8), LOG, False),  # the same number, of another view
        (views(2, 10), LOG, False),
        (views(2, 10), views(3, 10), False),
        (views(2, 9), views(3, 9), False),
        (views(2, 7), LOG, False),  # the logs part before
    ],
)
def test_entries_of_a_possibly_different_history_are_not_stored(
    mine: list[Entry], others: list[Entry], *, is_taken: bool
) -> None:
    shard = Limbo({8, 9}, mine, others, stable=9)
    shard.lead(7)
    shard.run(30 * S)
    assert bool(shard.parts) == is_taken
    assert (shard.damaged == set()) == is_taken
    assert shard.recovery.claim.is_damaged != is_taken


def test_two_that_are_damaged_side_by_side_help_each_other() -> None:
    shard = Limbo({8})
    assert isinstance(shard.peers[ONE].store, MemoryStore)
    shard.peers[ONE].store.damaged = {9}
    shard.lead(7)
    assert shard.damaged == set()


def test_the_end_of_a_log_is_not_made_up() -> None:
    """There is no following entry that would identify its view."""
    shard = Limbo({19, 20})
    shard.lead(18)
    assert shard.asked == []
    assert shard.damaged == {19, 20}
    assert shard.recovery.claim == LogClaim(18, 1, 1, is_damaged=True)
    (warning,) = shard.warnings
    assert "cannot lead a recovery: entry 19 is damaged" in warning


def test_blocked_candidate_warns_once_and_claims_its_readable_log() -> None:
    log = views(5, 15)
    shard = Limbo({8}, log, [], stable=3)
    assert shard.recovery.claim == LogClaim(20, 5, 0, is_damaged=False)
    shard.lead(7)
    assert shard.recovery.claim == LogClaim(7, 1, 5, is_damaged=True), (
        "no attempt is numbered 5 again"
    )
    shard.run(100 * S)
    shard.way = lambda *_: None  # later attempts fail for another reason
    shard.run(100 * S)
    assert len(shard.asked) == 4 * 3, "a minute between two attempts"
    (warning,) = shard.warnings
    assert "cannot lead a recovery: entry 8 is damaged" in warning
    assert "data directory away" not in warning, "it may be the only one"
    assert shard.recovery.claim.is_damaged
    shard.way = lambda _, answer: answer
    shard.peers[ONE] = state_of(1, log)
    shard.run(75 * S)
    assert shard.damaged == set()
    assert shard.recovery.claim == LogClaim(20, 5, 0, is_damaged=False)


def test_claim_is_never_below_the_stable_entries() -> None:
    shard = Limbo({8}, LOG, [], stable=12)
    shard.lead(7)
    assert shard.recovery.claim == LogClaim(12, 1, 1, is_damaged=True)


def test_an_answer_that_is_stale_late_or_foreign_is_not_taken_in_limbo() -> None:
    shard = Limbo({8}, f=2)
    seen: list[Fetched] = []

    def way(_: bytes, answer: Fetched) -> Fetched | None:
        seen.append(answer)
        return None

    shard.way = way
    shard.lead(7)
    answer = seen[0]
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    take = shard.repair.on_fetched
    assert not take(TWO, answer, shard.now)
    for field in ("view", "after", "session", "after_view"):
        assert not take(ONE, Fetched(**{**fields, field: 5}), shard.now)
    missing = shard.recovery.missing
    shard.recovery.on_repaired()  # another one leads
    assert not take(ONE, answer, shard.now)
    shard.recovery.missing = missing
    shard.state.server_state = "frozen"
    assert not take(ONE, answer, shard.now)
    shard.state.server_state, shard.state.view = "joined", 2
    assert not take(ONE, answer, shard.now)
    assert not take(ONE, Fetched(**{**fields, "view": 2}), shard.now), "no peer was asked in it"
    assert shard.parts == []
    shard.state.server_state = "limbo"
    assert take(ONE, answer, shard.now)
    assert not take(ONE, answer, shard.now), "it comes twice"
    assert shard.damaged == set()


def test_joining_server_repairs_the_end_of_its_log_too() -> None:
    """The log is the survivor's, as its last entry proved."""
    shard = Limbo({19, 20}, f=2)
    for peer in shard.peers.values():
        peer.server_state, peer.view = "joined", 3
    shard.lead(18, view=3)
    assert {q.view for _, q in shard.asked} == {3}
    assert shard.damaged == set()


def test_a_request_of_another_view_is_dropped() -> None:
    shard = Limbo({8})
    shard.way = lambda *_: None
    shard.lead(7)
    assert len(shard.asked) == 1
    shard.recovery.on_repaired()
    shard.run(10 * S)
    assert len(shard.asked) == 1
    assert shard.repair.next_wakeup() is None


def test_a_large_hole_is_stored_in_parts_in_limbo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_repair, "_STORE_BYTES", 8)
    shard = Limbo(set(range(3, 18)))
    shard.way = lambda _, answer: changed(answer, answer.entries[:2])
    shard.lead(2)
    assert shard.damaged == set()
    assert [e.fseq for part in shard.parts for e in part] == list(range(3, 18))
    assert 2 < len(shard.parts) < 9
