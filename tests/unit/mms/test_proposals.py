"""Commands are proposed once, and again when they must have been lost."""

from __future__ import annotations

from mms.commands import FinalizeShard, RemoveShard, RetireShard
from mms.proposals import RETRY_NS, Proposals
from ziplog.core.node import Propose


def test_the_same_command_is_proposed_again_only_after_a_delay() -> None:
    proposals, command = Proposals(), RetireShard(3)
    assert proposals.propose(3, command, 0) == [Propose(command.encode())]
    assert proposals.propose(3, command, RETRY_NS - 1) == []
    assert proposals.propose(3, command, RETRY_NS) == [Propose(command.encode())]


def test_another_command_of_the_same_kind_does_not_wait() -> None:
    proposals = Proposals()
    older, newer = RemoveShard(3, 1, 2), RemoveShard(3, 1, 4)
    assert proposals.propose(3, older, 0)
    assert proposals.propose(3, newer, 1) == [Propose(newer.encode())]


def test_kinds_and_shards_do_not_stand_in_for_each_other() -> None:
    proposals = Proposals()
    assert proposals.propose(3, RetireShard(3), 0)
    assert proposals.propose(3, FinalizeShard(3), 0)
    assert proposals.propose(4, RetireShard(4), 0)
    proposals.on_decided(3, FinalizeShard)
    assert proposals.propose(3, RetireShard(3), 1) == []
    assert proposals.propose(4, RetireShard(4), 1) == []


def test_a_decided_or_cleared_command_may_be_proposed_again_at_once() -> None:
    proposals, command = Proposals(), RetireShard(3)
    assert proposals.propose(3, command, 0)
    proposals.on_decided(3, RetireShard)
    assert proposals.propose(3, command, 0)
    proposals.clear()
    assert proposals.propose(3, command, 0)
