"""What a consensus node takes from its peers, message by message: nothing committed is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ziplog.test_raft import Words, free_endpoints
from ziplog.runtime import plain
from ziplog.runtime.conflict import Comparison, compare
from ziplog.runtime.journal import Entry, Journal, JournalError
from ziplog.runtime.raft import Raft
from ziplog.runtime.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: The entry that every log begins with.
FIRST = (b"\1", 1, 0)
TERM = 5
#: What every later entry is.
WORD = b"\0word"


def entries(first: int, *terms: int) -> list[tuple[bytes, int, int]]:
    return [(WORD, first + n, term) for n, term in enumerate(terms)]


class Wire:
    """In place of the connections: what the node sends, and what was on disk by then."""

    ready = True

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.votes: list[tuple[int, str | None]] = []
        self.ends: list[int] = []

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        again = self.journal._path.read_bytes()
        reader = Journal.__new__(Journal)
        reader.entries, reader.term, reader.voted_for = [], 0, None
        reader._path = self.journal._path  # type: ignore[misc]
        reader._replay(again)
        self.votes.append((reader.term, reader.voted_for))
        self.ends.append(reader.entries[-1].index)
        self.sent.append((node.id, message))
        return True

    def destroy(self) -> None:
        """Nothing: the node's own connections are closed by the test."""


class Bench:
    """A node of three that runs no thread and talks to nobody."""

    def __init__(
        self, directory: Path, held: list[tuple[bytes, int, int]], *, is_voter: bool = True
    ) -> None:
        self.directory = directory
        self.machine = Words()
        self.events: list[Any] = []
        if not directory.exists():
            journal = Journal(directory)
            for entry in (FIRST, *held):
                journal.append(Entry(*entry))
            if is_voter:
                journal.set_voter({})
            if held:
                journal.set_vote(held[-1][2], None)
            journal.close()
        names = dict(zip("abc", free_endpoints(3), strict=True))
        self.raft = Raft(
            "a", names, directory, self.machine,
            on_event=self.events.append, on_fatal=self.events.append,
        )  # fmt: skip
        self.node = self.raft._sync
        self.journal = self.raft._journal
        self.wire = Wire(self.journal)
        self._real_wire = self.node._SyncObj__transport
        self.node._SyncObj__transport = self.wire
        peers = {node.id: node for node in self.node.otherNodes}
        self.b, self.c = peers[names["b"]], peers[names["c"]]
        for peer in (self.b, self.c):
            self.node._SyncObj__onNodeConnected(peer)
        self.never_elected()

    def never_elected(self) -> None:
        self.node._SyncObj__raftElectionDeadline = float("inf")

    def hear(self, peer: Any, **message: Any) -> None:
        self.node._SyncObj__onMessageReceived(peer, plain.loads(plain.dumps(message)))

    def append(
        self, previous: int, previous_term: int, *terms: int, commit: int = 1, term: int = TERM,
        **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Hear entries of b, which leads; return the answer."""
        self.hear(
            self.b, type="append_entries", term=term, commit_index=commit, prevLogIdx=previous,
            prevLogTerm=previous_term, entries=entries(previous + 1, *terms), **more,
        )  # fmt: skip
        return self.answer()

    def snapshot(self, data: bytes, size: int = 50, commit: int = 1) -> dict[str, Any]:
        """Hear a snapshot of b, in pieces; return the last answer."""
        pieces = [data[at : at + size] for at in range(0, len(data), size)] + [b""]
        for number, piece in enumerate(pieces):
            self.hear(
                self.b, type="append_entries", term=TERM, commit_index=commit,
                serialized=(piece, number == 0, number == len(pieces) - 1),
            )  # fmt: skip
        return self.answer()

    def answer(self) -> dict[str, Any]:
        _, message = self.wire.sent[-1]
        assert message["type"] == "next_node_idx"
        return message

    def lead(self, term: int = TERM) -> None:
        self.node._SyncObj__setCurrentTerm(term, self.node.selfNode.id)
        self.node._SyncObj__onBecomeLeader()

    def acknowledge(
        self, peer: Any, next_index: int, *, term: int = TERM, success: bool = True,
        reset: bool = False, joining: str | None = None,
    ) -> None:  # fmt: skip
        self.hear(
            peer, type="next_node_idx", term=term, next_node_idx=next_index,
            success=success, reset=reset, joining=joining,
        )  # fmt: skip

    def tick(self) -> None:
        self.node.doTick(0.0)

    def match(self, peer: Any) -> int:
        return int(self.node._SyncObj__raftMatchIndex[peer])

    def following(self, peer: Any) -> int:
        return int(self.node._SyncObj__raftNextIndex[peer])

    @property
    def terms(self) -> list[int]:
        return [entry.term for entry in self.journal.entries]

    @property
    def committed(self) -> int:
        return int(self.node.raftCommitIndex)

    def close(self) -> None:
        self.node._SyncObj__transport = self._real_wire
        self.raft.stop()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(held: list[tuple[bytes, int, int]] | None = None, **more: Any) -> Bench:
        directory = tmp_path / str(len(benches))
        benches.append(Bench(more.pop("directory", directory), held or [], **more))
        return benches[-1]

    yield make
    for one in benches:
        one.close()


# --- entries ---


def test_entries_are_on_disk_before_they_are_acknowledged(bench: Callable[..., Bench]) -> None:
    node = bench()
    answer = node.append(1, 0, 5, 5)
    assert answer == {
        "type": "next_node_idx", "term": TERM, "next_node_idx": 4,
        "success": True, "reset": False, "joining": None,
    }  # fmt: skip
    assert node.terms == [0, 5, 5]
    assert node.wire.ends == [3]


def test_late_and_repeated_entries_delete_nothing(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5, 5, 5, 5))
    assert node.append(1, 0, 5)["next_node_idx"] == 3
    assert node.append(2, 5)["next_node_idx"] == 3
    assert node.append(1, 0)["success"]
    assert node.terms == [0, 5, 5, 5, 5]


def test_only_contradicted_entries_are_replaced(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4, 4))
    assert node.append(2, 4, 4, 5)["next_node_idx"] == 5
    assert node.terms == [0, 4, 4, 5]


def test_an_entry_behind_an_unknown_one_is_asked_for_again(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4))
    far = node.append(9, 5, 5)
    assert (far["success"], far["reset"], far["next_node_idx"]) == (False, True, 4)
    other = node.append(3, 5, 5)  # it is held with another term
    assert (other["success"], other["reset"], other["next_node_idx"]) == (False, True, 2)
    assert node.terms == [0, 4, 4]


def test_a_leader_that_contradicts_what_is_committed_stops_the_node(
    bench: Callable[..., Bench],
) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.append(4, 4, commit=3)
    assert node.committed == 3
    with pytest.raises(JournalError, match="contradicts entry 3, which is committed"):
        node.append(2, 4, 5)
    with pytest.raises(JournalError, match="contradicts entry 3, which is committed"):
        node.append(3, 5)
    assert node.terms == [0, 4, 4, 4]
    node.append(3, 4, 5)  # behind it, it may
    assert node.terms == [0, 4, 4, 5]


def test_nothing_is_committed_that_was_not_compared(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.append(2, 4, commit=4)
    assert node.committed == 2
    node.append(2, 4, 4, commit=9)
    assert node.committed == 3
    node.append(1, 0, commit=1)  # an old message takes nothing back
    assert node.committed == 3


def test_entries_that_skip_one_are_no_message(bench: Callable[..., Bench]) -> None:
    node = bench()
    with pytest.raises(ValueError, match="follow each other"):
        node.hear(
            node.b, type="append_entries", term=TERM, commit_index=1, prevLogIdx=1,
            prevLogTerm=0, entries=entries(3, 5),
        )  # fmt: skip
    assert node.terms == [0]


def test_a_former_leader_is_told_the_term_and_nothing_else(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.append(2, 4)
    answer = node.append(1, 0, 3, 3, term=3)
    assert (answer["term"], answer["success"], answer["reset"]) == (TERM, False, False)
    assert node.terms == [0, 4]


def long_entry(
    node: Bench, pieces: list[tuple[str, bytes]], previous: tuple[int, int] = (1, 0)
) -> None:
    for transmission, data in pieces:
        node.hear(
            node.b, type="append_entries", term=TERM, commit_index=1, prevLogIdx=previous[0],
            prevLogTerm=previous[1], transmission=transmission, data=data,
        )  # fmt: skip


def test_a_long_entry_comes_in_pieces(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = plain.dumps((WORD, 2, TERM))
    # The library counts a little short, and says twice that it has finished.
    long_entry(node, [("start", whole[:3]), ("finish", whole[3:-2]), ("finish", whole[-2:])])
    assert node.terms == [0, TERM]
    assert node.answer()["next_node_idx"] == 3


def test_a_long_entry_of_which_a_piece_is_missing_is_not_taken(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = plain.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:3]), ("finish", whole[5:])])
    assert node.terms == [0]
    assert not node.answer()["success"]


def test_what_is_sent_in_pieces_may_begin_anew(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = plain.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:5]), ("start", whole[:3]), ("finish", whole[3:])])
    assert node.terms == [0, TERM]
    piece = (snapshot(9, 5)[:40], True, False)
    node.hear(node.b, type="append_entries", term=TERM, commit_index=9, serialized=piece)
    assert node.snapshot(snapshot(9, 5))["next_node_idx"] == 10


def test_what_is_sent_in_pieces_has_an_end(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziplog.runtime.receive._MAX_SNAPSHOT", 100)
    node = bench()
    with pytest.raises(ValueError, match="more than 100 bytes in pieces"):
        node.snapshot(bytes(150))


def test_a_late_long_entry_deletes_nothing(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, TERM, TERM, TERM))
    whole = plain.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:3]), ("finish", whole[3:])])
    assert node.terms == [0, TERM, TERM, TERM]


# --- snapshots ---


def snapshot(last: int, term: int, *, words: bytes = b"from the leader") -> bytes:
    previous, final = (Entry(*entry) for entry in entries(last - 1, term, term))
    return Snapshot(previous, final, words).encode()


def test_a_snapshot_that_is_ahead_is_taken(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    answer = node.snapshot(snapshot(9, 5), commit=9)
    assert (answer["success"], answer["next_node_idx"]) == (True, 10)
    assert node.machine.words == [b"from the leader"]
    assert [entry.index for entry in node.journal.entries] == [8, 9]
    node.close()
    again = bench(directory=node.directory)
    again.tick()
    assert again.machine.words == [b"from the leader"]
    assert again.node.raftLastApplied == 9


def test_a_snapshot_that_is_not_ahead_is_refused(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5, 5, 5, 5))
    node.append(5, 5, commit=4)
    node.tick()
    answer = node.snapshot(snapshot(4, 5))
    # What is committed needs not be sent, though.
    assert (answer["success"], answer["next_node_idx"]) == (True, 5)
    assert node.machine.words == [b"word"] * 3
    assert node.terms == [0, 5, 5, 5, 5]
    assert not (node.directory / "snapshot").exists()


def test_what_is_held_behind_a_snapshot_stays(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5, 5, 5, 5))
    assert node.snapshot(snapshot(3, 5))["success"]
    assert [entry.index for entry in node.journal.entries] == [2, 3, 4, 5]
    assert node.committed == 3


def test_what_contradicts_a_snapshot_goes(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4, 4))
    assert node.snapshot(snapshot(3, 5))["success"]
    assert [(entry.index, entry.term) for entry in node.journal.entries] == [(2, 5), (3, 5)]


def test_pieces_of_a_snapshot_commit_nothing(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4, 4))
    piece = (snapshot(9, 5)[:40], True, False)
    node.hear(node.b, type="append_entries", term=TERM, commit_index=9, serialized=piece)
    assert node.committed == 1
    assert node.answer()["success"] is False


def test_a_snapshot_with_a_hole_changes_nothing_on_disk(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5))
    whole = snapshot(9, 5)
    answer = node.snapshot(whole[:40] + whole[60:])
    assert (answer["success"], answer["reset"], answer["next_node_idx"]) == (False, True, 2)
    assert not (node.directory / "snapshot").exists()
    assert node.terms == [0, 5]


def test_a_snapshot_ends_the_wait_for_what_it_stands_for(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    done: list[bool] = []
    node.append(2, 4)
    node.raft.read_barrier(done.append)
    node.tick()  # it is forwarded
    request = next(m for _, m in node.wire.sent if m["type"] == "apply_command")["request_id"]
    node.hear(node.b, type="apply_command_response", request_id=request, log_idx=7, log_term=TERM)
    node.snapshot(snapshot(9, 5))
    assert done == [False]


def test_a_command_may_be_proposed_while_a_snapshot_is_loaded(bench: Callable[..., Bench]) -> None:
    node = bench()
    node.node._SyncObj__currentVersionFuncNames = {}  # as it is for a moment meanwhile
    node.raft.propose(b"one")
    node.append(1, 0)
    node.tick()
    assert [m["command"] for _, m in node.wire.sent if m["type"] == "apply_command"] == [b"\0one"]


def test_what_was_forwarded_to_a_former_leader_is_given_up(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.append(2, 4)
    done: list[bool] = []
    node.raft.read_barrier(done.append)
    node.tick()
    node.hear(
        node.c, type="append_entries", term=TERM + 1, commit_index=1, prevLogIdx=2,
        prevLogTerm=4, entries=[],
    )  # fmt: skip
    assert done == [False]
    assert node.node.leader_id() == node.c.id


def test_what_was_forwarded_to_a_leader_that_went_away_is_given_up(
    bench: Callable[..., Bench],
) -> None:
    node = bench(entries(2, 4))
    node.append(2, 4)
    done: list[bool] = []
    node.raft.read_barrier(done.append)
    node.tick()
    assert done == []
    node.node._SyncObj__onNodeDisconnected(node.b)
    node.tick()
    assert done == [False]


def test_a_snapshot_that_cannot_be_restored_stops_the_node(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = bench(entries(2, 4))
    monkeypatch.setattr(Words, "restore", lambda *_: 1 / 0)
    with pytest.raises(JournalError, match=r"snapshot .* cannot be restored: ZeroDivisionError"):
        node.snapshot(snapshot(9, 5))
    assert not any(message["type"] == "next_node_idx" and message["success"]
                   for _, message in node.wire.sent)  # fmt: skip


# --- the leader's side ---


def test_acknowledgements_of_another_term_do_not_count(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.b, 3, term=TERM - 1)
    assert node.match(node.b) == 0
    node.acknowledge(node.b, 3)
    assert node.match(node.b) == 2


def test_an_answer_of_a_later_term_ends_the_lead(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.b, 3, term=TERM + 1, success=False)
    assert not node.node._isLeader()
    assert node.journal.term == TERM + 1
    assert node.match(node.b) == 0


def test_a_late_reset_does_not_go_back_behind_what_is_held(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.lead()
    node.acknowledge(node.b, 5)
    node.acknowledge(node.b, 2, success=False, reset=True)
    assert (node.match(node.b), node.following(node.b)) == (4, 5)
    node.acknowledge(node.c, 99, success=False, reset=True)
    assert node.following(node.c) == node.journal.entries[-1].index + 1


def test_an_acknowledgement_does_not_have_entries_sent_again(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.lead()
    before = node.following(node.b)
    node.acknowledge(node.b, 3)
    assert node.following(node.b) == before == 6


def test_an_acknowledgement_of_what_was_not_sent_is_no_message(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    with pytest.raises(ValueError, match="what it was not sent"):
        node.acknowledge(node.b, 99)


def test_a_leader_counts_entries_of_its_own_term_only(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4))
    node.lead()  # its no-op is entry 4
    node.acknowledge(node.b, 4)
    node.tick()
    assert node.committed == 1
    node.acknowledge(node.b, 5)
    node.tick()
    assert node.committed == 4


def test_a_second_leader_of_one_term_stops_the_node(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    with pytest.raises(JournalError, match="leads in term 5, as this one does"):
        node.append(2, 4)


# --- votes ---


def test_a_vote_is_on_disk_before_it_is_given(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.hear(node.c, type="request_vote", term=7, last_log_index=2, last_log_term=4)
    assert node.wire.sent == [(node.c.id, {"type": "response_vote", "term": 7})]
    assert node.wire.votes == [(7, node.c.id)]
    node.hear(node.b, type="request_vote", term=7, last_log_index=9, last_log_term=6)
    assert len(node.wire.sent) == 1


def test_nobody_with_an_older_log_gets_a_vote(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4))
    node.hear(node.c, type="request_vote", term=7, last_log_index=9, last_log_term=3)
    node.hear(node.c, type="request_vote", term=8, last_log_index=2, last_log_term=4)
    assert node.wire.sent == []
    assert node.journal.term == 8


def test_a_candidate_votes_for_itself_on_disk_before_it_asks(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.node._SyncObj__raftElectionDeadline = 0.0
    node.tick()
    asked = [n for n, (_, m) in enumerate(node.wire.sent) if m["type"] == "request_vote"]
    assert len(asked) == 2
    assert node.wire.votes[asked[0]] == (5, node.node.selfNode.id)


# --- a node with a new directory ---


def test_a_new_directory_neither_votes_nor_stands(bench: Callable[..., Bench]) -> None:
    node = bench(is_voter=False)
    node.hear(node.c, type="request_vote", term=7, last_log_index=2, last_log_term=4)
    node.node._SyncObj__raftElectionDeadline = 0.0
    node.tick()
    kinds = {message["type"] for _, message in node.wire.sent}
    assert kinds == {"standing"}
    assert node.journal.term == 0


def test_a_new_directory_says_so_when_it_acknowledges(bench: Callable[..., Bench]) -> None:
    node = bench(is_voter=False)
    assert node.append(1, 0, 5)["joining"] == node.journal.identity


def test_a_new_directory_is_new_no_more_once_a_leader_was_heard(
    bench: Callable[..., Bench],
) -> None:
    node = bench(is_voter=False)
    assert node.node._standing().is_new
    node.append(1, 0)
    assert not node.node._standing().is_new


def test_a_directory_that_lost_its_journal_only_is_not_new(bench: Callable[..., Bench]) -> None:
    first = bench(is_voter=False)
    first.snapshot(snapshot(9, 5))
    first.close()
    (first.directory / "journal").unlink()
    again = bench(directory=first.directory, is_voter=False)
    assert not again.node._standing().is_new
    assert again.node.is_voter is False


def test_a_new_directory_forgets_a_leader_that_went_away(bench: Callable[..., Bench]) -> None:
    node = bench(is_voter=False)
    node.append(1, 0)
    assert node.node.leader_id() == node.b.id
    node.node._SyncObj__onNodeDisconnected(node.b)
    node.tick()
    assert node.node.leader_id() == ""


def test_a_directory_keeps_its_identity_and_its_vote(bench: Callable[..., Bench]) -> None:
    first = bench(is_voter=False)
    first.append(1, 0, 5)
    identity = first.journal.identity
    first.close()
    again = bench(directory=first.directory)
    assert not again.raft._sync.is_voter
    assert again.journal.identity == identity
    assert bench(is_voter=False).journal.identity != identity


def test_a_node_that_does_not_vote_says_what_it_waits_for(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    node = bench(is_voter=False)

    def reason() -> str:
        caplog.clear()
        node.node._remind_at = 0.0
        node.node._tell()
        return caplog.text

    used = {"type": "standing", "identity": "x", "is_new": False, "founders": {}}
    assert f"start {min(node.b.id, node.c.id)} and {max(node.b.id, node.c.id)}" in reason()
    for peer in (node.b, node.c):
        node.hear(peer, is_voter=False, **used)
    assert "no majority has its old ones" in reason()
    node.hear(node.c, is_voter=True, **used)
    assert "no majority has its old ones" in reason()
    node.hear(node.b, is_voter=True, **used)
    assert "it learns from the other nodes" in reason()
    node.node._SyncObj__onNodeDisconnected(node.b)
    assert f"start {node.b.id}" in reason()
    node.hear(node.b, is_voter=True, **used)
    assert "it learns from the other nodes" in reason()


def joined(node: Bench, **change: Any) -> bool:
    told = {"term": TERM, "identity": node.journal.identity, "index": 3} | change
    node.hear(node.b, type="admitted", **told)
    return node.node.is_voter


def test_a_new_directory_votes_once_it_holds_its_barrier(bench: Callable[..., Bench]) -> None:
    node = bench(is_voter=False)
    node.append(1, 0, 4)
    assert not joined(node)  # it has not got the barrier
    node.append(2, 4, 5)
    assert not joined(node, identity="another directory's")
    assert not joined(node, term=TERM - 1)
    assert not joined(node, term=4, index=2)  # late, of a term that is over
    assert not joined(node, index=2)  # that one was of an earlier term: it proves nothing
    assert joined(node)
    # It may have voted in this term before, but for no other who led.
    assert (node.journal.term, node.journal.voted_for) == (TERM, node.b.id)
    assert node.append(3, 5)["joining"] is None


def test_a_new_directory_votes_if_its_barrier_is_in_a_snapshot(
    bench: Callable[..., Bench],
) -> None:
    node = bench(is_voter=False)
    node.append(1, 0)
    node.snapshot(snapshot(9, 5))
    assert not joined(node, index=10)
    assert joined(node, index=5)


def test_a_joiner_counts_only_after_it_was_admitted(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()  # its no-op is entry 3
    node.acknowledge(node.c, 4, joining="new")
    node.tick()
    assert (node.match(node.c), node.committed) == (0, 1)
    assert node.terms == [0, 4, 5, 5]  # the barrier
    node.acknowledge(node.b, 4)
    node.acknowledge(node.c, 5, joining="new")
    node.tick()
    assert "admitted" not in [message["type"] for _, message in node.wire.sent]
    node.acknowledge(node.b, 5)
    node.tick()
    node.acknowledge(node.c, 5, joining="new")
    admitted = {"type": "admitted", "term": TERM, "identity": "new", "index": 4}
    assert (node.c.id, admitted) in node.wire.sent
    node.acknowledge(node.c, 5)
    assert node.match(node.c) == 4
    assert node.node._joiners == {}


def test_every_leader_has_barriers_of_its_own(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.c, 4, joining="new")
    node.acknowledge(node.b, 4, term=TERM + 1, success=False)
    node.lead(TERM + 2)
    node.acknowledge(node.c, 4, term=TERM + 2, joining="new")
    assert node.terms == [0, 4, TERM, TERM, TERM + 2, TERM + 2]


def test_a_directory_that_is_lost_again_joins_again(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.c, 4)
    node.acknowledge(node.c, 2, success=False, reset=True, joining="second")
    assert (node.match(node.c), node.following(node.c)) == (0, 2)
    node.acknowledge(node.c, 2, success=False, reset=True, joining="third")
    assert [joiner.barrier for joiner in node.node._joiners.values()] == [5]


# --- what is no message ---


@pytest.mark.parametrize(
    "message",
    [
        {"type": "timeout_now", "term": 9},
        {"type": "append_entries", "term": "9", "commit_index": 1, "prevLogIdx": 1},
        {"type": "append_entries", "term": -1, "commit_index": 1, "prevLogIdx": 1},
        {"type": "next_node_idx", "next_node_idx": 2, "reset": False, "success": True},
        {"type": "apply_command", "command": b"\2membership"},
        {"type": "apply_command", "command": 7},
        {"type": "request_vote", "term": 9},
        {"type": "standing", "identity": 1, "is_voter": True, "is_new": True, "founders": {}},
    ],
)
def test_other_messages_are_refused(bench: Callable[..., Bench], message: dict[str, Any]) -> None:
    node = bench(entries(2, 4))
    with pytest.raises((ValueError, LookupError)):
        node.hear(node.b, **message)
    assert node.journal.term == 4
    assert node.wire.sent == []


# --- comparing ---


def held(first: int, *terms: int) -> list[Entry]:
    return [Entry(b"", first + n, term) for n, term in enumerate(terms)]


@pytest.mark.parametrize(
    ("own", "came", "found"),
    [
        (held(3, 1), held(4, 1, 1), Comparison(0, contradicts=False)),
        (held(3, 1, 1), held(4, 1), Comparison(1, contradicts=False)),
        (held(3, 1, 1, 1), [], Comparison(0, contradicts=False)),
        (held(3, 1, 1), held(4, 1, 1), Comparison(1, contradicts=False)),
        (held(3, 1, 1, 1), held(4, 1, 2), Comparison(1, contradicts=True)),
        (held(3, 2), held(4, 1), None),
        ([], held(4, 1), None),
    ],
)
def test_entries_are_compared_one_by_one(
    own: list[Entry], came: list[Entry], found: Comparison | None
) -> None:
    assert compare(own, 1, came) == found
