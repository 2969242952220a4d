"""Which acknowledgements, votes and directories a Raft node counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.bench import TERM, Bench, entries, snapshot
from ziplog.raft.journal import JournalError

if TYPE_CHECKING:
    from collections.abc import Callable


# --- the leader's side ---


def test_acknowledgements_of_another_term_do_not_count(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.b, 3, term=TERM - 1)
    assert node.match(node.b) == 0
    node.acknowledge(node.b, 3)
    assert node.match(node.b) == 2


def test_answer_of_a_later_term_ends_the_leadership(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.b, 3, term=TERM + 1, success=False)
    assert not node.node._isLeader()
    assert node.journal.term == TERM + 1
    assert node.match(node.b) == 0


def test_late_reset_does_not_resend_held_entries(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.lead()
    node.acknowledge(node.b, 5)
    node.acknowledge(node.b, 2, success=False, reset=True)
    assert (node.match(node.b), node.following(node.b)) == (4, 5)
    node.acknowledge(node.c, 99, success=False, reset=True)
    assert node.following(node.c) == node.journal.entries[-1].index + 1


def test_acknowledgement_does_not_resend_entries(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4, 4))
    node.lead()
    before = node.following(node.b)
    node.acknowledge(node.b, 3)
    assert node.following(node.b) == before == 6


def test_acknowledgement_of_unsent_entries_is_rejected(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    with pytest.raises(ValueError, match="entries that it was not sent"):
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
    with pytest.raises(JournalError, match="leads in term 5, and so does this one"):
        node.append(2, 4)


# --- votes ---


def test_a_vote_is_on_disk_before_it_is_given(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.hear(node.c, type="request_vote", term=7, last_log_index=2, last_log_term=4)
    assert node.wire.sent == [(node.c.id, {"type": "response_vote", "term": 7})]
    assert node.wire.votes == [(7, node.c.id)]
    node.hear(node.b, type="request_vote", term=7, last_log_index=9, last_log_term=6)
    assert len(node.wire.sent) == 1


def test_candidate_with_an_older_log_gets_no_vote(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4, 4))
    node.hear(node.c, type="request_vote", term=7, last_log_index=9, last_log_term=3)
    node.hear(node.c, type="request_vote", term=8, last_log_index=2, last_log_term=4)
    assert node.wire.sent == []
    assert node.journal.term == 8


def test_candidate_stores_its_own_vote_before_it_requests_votes(
    bench: Callable[..., Bench],
) -> None:
    node = bench(entries(2, 4))
    node.node._SyncObj__raftElectionDeadline = 0.0
    node.tick()
    asked = [n for n, (_, m) in enumerate(node.wire.sent) if m["type"] == "request_vote"]
    assert len(asked) == 2
    assert node.wire.votes[asked[0]] == (5, node.node.selfNode.id)


# --- a node with a new directory ---


def test_new_directory_neither_votes_nor_is_a_candidate(bench: Callable[..., Bench]) -> None:
    node = bench(is_voter=False)
    node.hear(node.c, type="request_vote", term=7, last_log_index=2, last_log_term=4)
    node.node._SyncObj__raftElectionDeadline = 0.0
    node.tick()
    kinds = {message["type"] for _, message in node.wire.sent}
    assert kinds == {"standing"}
    assert node.journal.term == 0


def test_new_directory_sends_its_identity_with_acknowledgements(
    bench: Callable[..., Bench],
) -> None:
    node = bench(is_voter=False)
    assert node.append(1, 0, 5)["joining"] == node.journal.identity


def test_new_directory_is_no_longer_new_once_it_had_a_leader(
    bench: Callable[..., Bench],
) -> None:
    node = bench(is_voter=False)
    assert node.node._own_status().is_new
    node.append(1, 0)
    assert not node.node._own_status().is_new


def test_a_directory_that_lost_its_journal_only_is_not_new(bench: Callable[..., Bench]) -> None:
    first = bench(is_voter=False)
    first.snapshot(snapshot(9, 5))
    first.close()
    (first.directory / "journal").unlink()
    (first.directory / "flushed").unlink()
    again = bench(directory=first.directory, is_voter=False)
    assert not again.node._own_status().is_new
    assert again.node.is_voter is False


def test_new_directory_forgets_a_disconnected_leader(bench: Callable[..., Bench]) -> None:
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


def test_node_without_a_vote_logs_the_reason(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    node = bench(is_voter=False)

    def reason() -> str:
        caplog.clear()
        node.node._next_non_voter_log_at = 0.0
        node.node._send_status()
        return caplog.text

    used = {"type": "standing", "identity": "x", "is_new": False, "founders": {}}
    assert f"start {min(node.b.id, node.c.id)} and {max(node.b.id, node.c.id)}" in reason()
    for peer in (node.b, node.c):
        node.hear(peer, is_voter=False, **used)
    assert "no majority has its old directories" in reason()
    node.hear(node.c, is_voter=True, **used)
    assert "no majority has its old directories" in reason()
    node.hear(node.b, is_voter=True, **used)
    assert "it copies the log from the other nodes" in reason()
    node.node._SyncObj__onNodeDisconnected(node.b)
    assert f"start {node.b.id}" in reason()
    node.hear(node.b, is_voter=True, **used)
    assert "it copies the log from the other nodes" in reason()


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
    # Its lost directory may have voted in this term, but for no other leader.
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


def test_pending_voter_counts_only_after_it_was_admitted(bench: Callable[..., Bench]) -> None:
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
    assert node.node._pending_voters == {}


def test_every_leader_has_barriers_of_its_own(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.c, 4, joining="new")
    node.acknowledge(node.b, 4, term=TERM + 1, success=False)
    node.lead(TERM + 2)
    node.acknowledge(node.c, 4, term=TERM + 2, joining="new")
    assert node.terms == [0, 4, TERM, TERM, TERM + 2, TERM + 2]


def test_directory_that_is_lost_again_is_admitted_again(bench: Callable[..., Bench]) -> None:
    node = bench(entries(2, 4))
    node.lead()
    node.acknowledge(node.c, 4)
    node.acknowledge(node.c, 2, success=False, reset=True, joining="second")
    assert (node.match(node.c), node.following(node.c)) == (0, 2)
    node.acknowledge(node.c, 2, success=False, reset=True, joining="third")
    assert [joiner.barrier for joiner in node.node._pending_voters.values()] == [5]
