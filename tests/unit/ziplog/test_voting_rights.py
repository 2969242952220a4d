"""Founding of a group and admission of voters, from the nodes' statuses and logs."""

from __future__ import annotations

import pytest

from ziplog.raft.voting_rights import PendingVoter, VoterStatus, founders, is_admitted


def standing(
    identity: str, *, is_new: bool = True, voters: dict[str, str] | None = None
) -> VoterStatus:
    return VoterStatus(identity, is_voter=bool(voters), is_new=is_new, founders=voters or {})


ALL = {"a": "A", "b": "B", "c": "C"}


def test_first_node_of_a_new_group_records_the_founders() -> None:
    others = {"b": standing("B"), "c": standing("C")}
    assert founders("a", standing("A"), others) == ALL


@pytest.mark.parametrize(
    ("own", "me", "others"),
    [
        # Only one node may record the founders.
        ("b", standing("B"), {"a": standing("A"), "c": standing("C")}),
        # One node sent no status: it may hold committed entries.
        ("a", standing("A"), {"b": standing("B"), "c": None}),
        # The group exists, and its founder was another directory of this node.
        ("a", standing("other"), {"b": standing("B", is_new=False, voters=ALL), "c": None}),
        ("a", standing("A"), {"b": standing("B"), "c": standing("C", is_new=False)}),
        # This node is not new.
        ("a", standing("A", is_new=False), {"b": standing("B"), "c": standing("C")}),
    ],
)
def test_node_that_may_have_lost_state_founds_no_group(
    own: str, me: VoterStatus, others: dict[str, VoterStatus | None]
) -> None:
    assert founders(own, me, others) == {}


def test_founder_learns_its_status_from_any_other() -> None:
    others = {"a": None, "c": standing("C", is_new=False, voters=ALL)}
    assert founders("b", standing("B"), others) == ALL


def test_single_node_is_its_own_group() -> None:
    assert founders("a", standing("A"), {}) == {"a": "A"}


@pytest.mark.parametrize(
    ("committed", "held", "joiners", "admitted"),
    [
        (9, {"b": 9, "c": 0}, {"c"}, True),
        (8, {"b": 9, "c": 0}, {"c"}, False),  # not committed yet
        # d may be a candidate in a term that the lost directory voted in.
        (9, {"b": 9, "c": 0, "d": 8, "e": 9}, {"c"}, False),
        (9, {"b": 9, "c": 0, "d": 9, "e": 9}, {"c"}, True),
        (9, {"b": 9, "c": 0, "d": 9, "e": 0}, {"c", "e"}, True),
    ],
)
def test_pending_voter_is_admitted_when_all_voters_hold_its_barrier(
    committed: int, held: dict[str, int], joiners: set[str], admitted: bool
) -> None:
    assert is_admitted(PendingVoter("C2", 9), committed, held, joiners) is admitted
