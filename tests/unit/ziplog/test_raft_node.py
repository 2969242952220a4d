"""Messages of a leader to a Raft node, one by one: no committed entry is lost."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

import pysyncobj.config
import pytest

from tests.unit.ziplog.bench import TERM, WORD, Bench, Words, entries, snapshot
from ziplog.raft import codec, raft_node
from ziplog.raft.journal import Entry, JournalError
from ziplog.raft.log_matching import LogMatch, compare
from ziplog.raft.pysyncobj_adapter import MAX_PROPOSALS, URGENT_PROPOSALS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def propose(node: Bench, done: list[bool], term: int | None = None) -> None:
    """Propose a command in a term, by default the current one; `done` gets if it was applied."""
    success = pysyncobj.config.FAIL_REASON.SUCCESS
    term = node.node.raftCurrentTerm if term is None else term
    node.node.propose_command(b"one", term, lambda _, failure: done.append(failure == success))


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


def test_entry_after_an_unknown_one_is_requested_again(bench: Callable[..., Bench]) -> None:
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


def test_entries_with_a_gap_are_rejected(bench: Callable[..., Bench]) -> None:
    node = bench()
    with pytest.raises(ValueError, match="follow each other"):
        node.hear(
            node.b, type="append_entries", term=TERM, commit_index=1, prevLogIdx=1,
            prevLogTerm=0, entries=entries(3, 5),
        )  # fmt: skip
    assert node.terms == [0]


def test_former_leader_receives_only_the_term(bench: Callable[..., Bench]) -> None:
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
    whole = codec.dumps((WORD, 2, TERM))
    # The library counts slightly short, and sends "finish" twice.
    long_entry(node, [("start", whole[:3]), ("finish", whole[3:-2]), ("finish", whole[-2:])])
    assert node.terms == [0, TERM]
    assert node.answer()["next_node_idx"] == 3


def test_long_entry_with_a_missing_piece_is_rejected(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = codec.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:3]), ("finish", whole[5:])])
    assert node.terms == [0]
    assert not node.answer()["success"]


def test_transfer_in_pieces_may_restart(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = codec.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:5]), ("start", whole[:3]), ("finish", whole[3:])])
    assert node.terms == [0, TERM]
    piece = (snapshot(9, 5)[:40], True, False)
    node.hear(node.b, type="append_entries", term=TERM, commit_index=9, serialized=piece)
    assert node.snapshot(snapshot(9, 5))["next_node_idx"] == 10


def test_pieces_of_two_leaders_are_not_one_entry(bench: Callable[..., Bench]) -> None:
    node = bench()
    whole = codec.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:3])])
    node.hear(
        node.c, type="append_entries", term=TERM + 1, commit_index=1, prevLogIdx=1,
        prevLogTerm=0, transmission="finish", data=whole[3:],
    )  # fmt: skip
    assert node.terms == [0]


def test_transfer_in_pieces_is_bounded(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziplog.raft.raft_node._MAX_SNAPSHOT", 100)
    node = bench()
    with pytest.raises(ValueError, match="more than 100 bytes in pieces"):
        node.snapshot(bytes(150))


def test_a_late_long_entry_deletes_nothing(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, TERM, TERM, TERM))
    whole = codec.dumps((WORD, 2, TERM))
    long_entry(node, [("start", whole[:3]), ("finish", whole[3:])])
    assert node.terms == [0, TERM, TERM, TERM]


# --- snapshots ---


def test_newer_snapshot_is_installed(bench: Callable[..., Bench]) -> None:
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


def test_older_snapshot_is_refused(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5, 5, 5, 5))
    node.append(5, 5, commit=4)
    node.tick()
    answer = node.snapshot(snapshot(4, 5))
    # Committed entries need not be sent, though.
    assert (answer["success"], answer["next_node_idx"]) == (True, 5)
    assert node.machine.words == [b"word"] * 3
    assert node.terms == [0, 5, 5, 5, 5]
    assert not (node.directory / "snapshot").exists()


def test_entries_after_a_snapshot_are_kept(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 5, 5, 5, 5))
    assert node.snapshot(snapshot(3, 5))["success"]
    assert [entry.index for entry in node.journal.entries] == [2, 3, 4, 5]
    assert node.committed == 3


def test_entries_that_conflict_with_a_snapshot_are_deleted(bench: Callable[..., Bench]) -> None:
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


def test_a_snapshot_that_a_full_disk_refuses_is_not_requested_at_once(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_encoded: bytes, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    node = bench(entries(2, 5))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with monkeypatch.context() as full:
        full.setattr(raft_node, "store", refuse)
        node.snapshot(snapshot(9, 5))
        answers = [node.append(9, 5, 5) for _ in range(3)]
        assert [(one["success"], one["reset"]) for one in answers] == [(False, False)] * 3
    now += 10
    assert node.append(9, 5, 5)["reset"]
    assert node.snapshot(snapshot(9, 5))["next_node_idx"] == 10
    assert node.append(9, 5, 5)["success"]


def led(bench: Callable[..., Bench]) -> Bench:
    """Return a leader of term 4, which has applied the beginning of its term."""
    node = bench(entries(2, 4))
    node.lead(4)
    node.acknowledge(node.b, 4, term=4)
    node.tick()
    assert node.node.leads()
    return node


def follow(node: Bench) -> None:
    """Let b lead a later term."""
    node.hear(
        node.b, type="append_entries", term=TERM, commit_index=1, prevLogIdx=1, prevLogTerm=0,
        entries=[],
    )  # fmt: skip
    assert node.node.leader_id() == node.b.id


def test_snapshot_completes_waiting_commands(bench: Callable[..., Bench]) -> None:
    node = led(bench)
    done: list[bool] = []
    propose(node, done)
    node.tick()
    assert node.journal.entries[-1].command == b"\0one"
    node.snapshot(snapshot(9, 5))
    assert done == [False]


def test_a_command_may_be_proposed_while_a_snapshot_is_loaded(bench: Callable[..., Bench]) -> None:
    node = led(bench)
    node.node._SyncObj__currentVersionFuncNames = {}  # as it is for a moment meanwhile
    node.raft.propose(b"one", 4)
    node.tick()
    assert node.journal.entries[-1].command == b"\0one"


def test_a_leader_takes_no_command_before_its_term_has_begun(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead(4)
    done: list[bool] = []
    propose(node, done)
    node.tick()
    assert done == [False]
    assert node.terms == [0, 4, 4]


def test_commands_of_a_former_leader_are_not_kept_for_the_next_one(
    bench: Callable[..., Bench],
) -> None:
    node = led(bench)
    node.node._SyncObj__raftState = 0  # it stepped down: it heard no majority
    node.node._SyncObj__raftLeader = None
    done: list[bool] = []
    propose(node, done)
    node.tick()
    assert done == [False]
    node.wire.sent.clear()
    follow(node)
    node.tick()
    assert all(message["type"] != "apply_command" for _, message in node.wire.sent)
    assert node.terms == [0, 4, 4]


def test_a_leader_takes_no_command_of_an_earlier_term(bench: Callable[..., Bench]) -> None:
    """Its service has not yet handled the entries of the leaders in between."""
    node = led(bench)
    done: list[bool] = []
    propose(node, done, 3)
    node.tick()
    assert done == [False]
    assert node.terms == [0, 4, 4]


def test_commands_of_a_follower_are_not_forwarded(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    follow(node)
    done: list[bool] = []
    propose(node, done)
    node.tick()
    assert done == [False]
    assert all(message["type"] != "apply_command" for _, message in node.wire.sent)


def test_forwarded_commands_are_refused(bench: Callable[..., Bench]) -> None:
    node = led(bench)
    with pytest.raises(LookupError):
        node.hear(node.b, type="apply_command", command=b"\0one", request_id=1)
    node.tick()
    assert node.terms == [0, 4, 4]


def test_a_snapshot_that_cannot_be_restored_stops_the_node(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = bench(entries(2, 4))
    monkeypatch.setattr(Words, "restore", lambda *_: 1 / 0)
    with pytest.raises(JournalError, match=r"snapshot .* cannot be restored: ZeroDivisionError"):
        node.snapshot(snapshot(9, 5))
    assert not any(message["type"] == "next_node_idx" and message["success"]
                   for _, message in node.wire.sent)  # fmt: skip


# --- invalid messages ---


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


# --- log matching ---


def held(first: int, *terms: int) -> list[Entry]:
    return [Entry(b"", first + n, term) for n, term in enumerate(terms)]


@pytest.mark.parametrize(
    ("own", "came", "found"),
    [
        (held(3, 1), held(4, 1, 1), LogMatch(0, contradicts=False)),
        (held(3, 1, 1), held(4, 1), LogMatch(1, contradicts=False)),
        (held(3, 1, 1, 1), [], LogMatch(0, contradicts=False)),
        (held(3, 1, 1), held(4, 1, 1), LogMatch(1, contradicts=False)),
        (held(3, 1, 1, 1), held(4, 1, 2), LogMatch(1, contradicts=True)),
        (held(3, 2), held(4, 1), None),
        ([], held(4, 1), None),
    ],
)
def test_entries_are_compared_one_by_one(
    own: list[Entry], came: list[Entry], found: LogMatch | None
) -> None:
    assert compare(own, 1, came) == found


def test_other_commands_leave_places_for_urgent_ones(bench: Callable[..., Bench]) -> None:
    node = led(bench)
    for _ in range(MAX_PROPOSALS + 10):
        node.raft.propose(b"other", 4)
    for _ in range(URGENT_PROPOSALS + 10):
        node.raft.propose(b"urgent", 4, is_urgent=True)
    node.tick()
    commands = [entry.command for entry in node.journal.entries]
    assert commands.count(b"\0other") == MAX_PROPOSALS - URGENT_PROPOSALS
    assert commands.count(b"\0urgent") == URGENT_PROPOSALS
    node.acknowledge(node.b, commands.index(b"\0urgent") + 2, term=4)  # one is committed
    node.tick()
    node.raft.propose(b"last", 4, is_urgent=True)
    node.tick()
    assert node.journal.entries[-1].command == b"\0last"
