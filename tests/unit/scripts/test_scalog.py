"""The ordering layer, and clients behind it.

Cuts only rise, whatever is lost, late or doubled, and whichever node leads.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec
import pytest
from scalog.gated import GatedCore
from scalog.messages import Cut, Follow, decode
from scalog.ordering import FOLLOW_NS, LOST_AFTER_NS, MAX_OPEN, Cuts, Ordering, Reported, exceeds

from ziplog import policy
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import InsertRequest, Preferences
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Call,
    Committed,
    Complete,
    Connect,
    LeaderChanged,
    Propose,
    Received,
    Restored,
    Send,
)
from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import Deliver, encode

if TYPE_CHECKING:
    from ziplog.core.node import Effect, Event

T_ORD = 1_000_000
LEADS, FOLLOWS = LeaderChanged("a", is_self=True), LeaderChanged("b", is_self=False)


class Node:
    """An ordering node, and the time."""

    def __init__(self) -> None:
        self.ordering, self.now = Ordering(T_ORD), 5 * T_ORD

    def step(self, *events: Event) -> list[Effect]:
        effects = [effect for event in events for effect in self.ordering.step(event, self.now)]
        self.ordering.check()
        return effects

    def pass_time(self, to: int) -> list[Effect]:
        self.now = to
        return self.step(Reported({}))

    def propose(self, shard: int, frontier: int) -> list[Effect]:
        """Report a frontier, and wait for the next multiple of T_ord."""
        self.step(Reported({shard: frontier}))
        return self.pass_time(self.now - self.now % T_ORD + T_ORD)


def proposed(effects: list[Effect]) -> list[dict[int, int]]:
    return [
        msgspec.msgpack.decode(effect.command, type=dict[int, int])
        for effect in effects
        if isinstance(effect, Propose)
    ]


def committed(cut: dict[int, int]) -> Committed:
    return Committed(b"", msgspec.msgpack.encode(cut))


# --- one node ---


def test_a_leader_proposes_at_multiples_of_t_ord_what_rose_since_the_last_time() -> None:
    node = Node()
    node.step(LEADS)
    assert node.ordering.next_wakeup() is None
    node.now += T_ORD // 3
    assert node.step(Reported({0: 7}), Reported({1: 4}), Reported({0: 9})) == []
    assert node.ordering.next_wakeup() == 6 * T_ORD
    assert proposed(node.pass_time(6 * T_ORD)) == [{0: 9, 1: 4}]
    node.step(committed({0: 9, 1: 4}))
    assert node.step(Reported({0: 9, 1: 3})) == [], "late and doubled reports change nothing"
    assert node.ordering.next_wakeup() is None
    assert proposed(node.propose(1, 5)) == [{0: 9, 1: 5}]


def test_a_report_at_the_end_of_an_interval_does_not_delay_the_cut() -> None:
    node = Node()
    node.step(LEADS, Reported({0: 7}))
    node.now = 6 * T_ORD
    assert proposed(node.step(Reported({0: 8}))) == [{0: 7}]
    assert node.ordering.next_wakeup() == 7 * T_ORD


def test_a_follower_proposes_nothing_and_knows_the_reports_once_it_leads() -> None:
    node = Node()
    assert node.propose(0, 7) == []
    node.step(LEADS)
    assert proposed(node.pass_time(9 * T_ORD)) == [{0: 7}]
    node.step(FOLLOWS)
    assert node.propose(0, 8) == []
    assert node.ordering.next_wakeup() is None


def test_a_lost_proposal_is_made_again_and_a_committed_one_is_not() -> None:
    node = Node()
    node.step(LEADS)
    assert proposed(node.propose(0, 7)) == [{0: 7}]
    lost_at = node.now + LOST_AFTER_NS
    assert node.ordering.next_wakeup() == lost_at
    assert node.pass_time(lost_at - 1) == []
    assert proposed(node.pass_time(lost_at)) == [{0: 7}]
    node.step(committed({0: 7}))
    assert node.pass_time(lost_at + 2 * LOST_AFTER_NS) == []


def test_a_limited_number_of_proposals_is_under_way() -> None:
    node = Node()
    node.step(LEADS)
    for frontier in range(1, MAX_OPEN + 1):
        assert proposed(node.propose(0, frontier)) == [{0: frontier}]
    assert node.propose(0, 100) == []
    assert node.step(committed({0: 1})) == []
    assert proposed(node.pass_time(node.now + T_ORD)) == [{0: 100}]


def test_clients_get_each_committed_cut_from_the_leader_while_they_follow() -> None:
    node = Node()
    follow = Received(b"client", Follow(0))
    assert node.step(follow, committed({0: 3})) == [], "a follower sends nothing"
    cut = Cut(0, {0: 3})
    assert node.step(LEADS) == [Broadcast((b"client",), cut)], "a new leader sends the last cut"
    assert node.step(follow) == [Send(b"client", cut)]
    assert node.step(committed({0: 3})) == [], "nothing rose"
    assert node.propose(0, 5) != []
    assert node.step(committed({0: 5})) == [Broadcast((b"client",), Cut(0, {0: 5}))]
    node.now += FOLLOW_NS
    assert node.step(committed({0: 6})) == []


def test_a_snapshot_counts_as_committed() -> None:
    node = Node()
    cuts = Cuts()
    cuts.apply(msgspec.msgpack.encode({0: 3, 1: 1}))
    node.step(Restored(cuts.snapshot()), Reported({0: 3}), LEADS)
    assert node.ordering.next_wakeup() is None
    other = Cuts()
    other.restore(cuts.snapshot())
    result = other.apply(msgspec.msgpack.encode({0: 2, 1: 5}))
    assert msgspec.msgpack.decode(result, type=dict[int, int]) == {0: 3, 1: 5}


def test_messages_survive_the_wire() -> None:
    for message in (Follow(0), Cut(0, {0: 5, 3: 2**62})):
        assert decode(encode(message)) == message


# --- the gate at a client ---


class Gate:
    """A gated core; stands in for the client core inside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.core = GatedCore(
            ["127.0.0.1:9"], bytes(16), ["127.0.0.1:1"], Preferences(policy.random())
        )
        self.seen: list[Event] = []
        self.effects: list[Effect] = []
        monkeypatch.setattr(ClientCore, "step", self._step)
        assert self.core.step(BatchEnd(), 1) == []
        self.follows = self.core._context.pop_effects()

    def _step(self, event: Event, _now: int) -> list[Effect]:
        self.seen.append(event)
        effects, self.effects = self.effects, []
        return effects

    def insert(self, call: int) -> list[Effect]:
        return self.core.step(Call(call, InsertRequest(10**12, [b"x"], RID_GENESIS, None, 0)), 2)

    def answer(self, call: int, *rids: RecordId) -> list[Effect]:
        self.effects = [Complete(call, list(rids))]
        return self.core.step(BatchEnd(), 3)

    def cut(self, **frontiers: int) -> list[Effect]:
        cut = Cut(0, {int(shard[1:]): frontier for shard, frontier in frontiers.items()})
        return self.core.step(Received(b"layer", cut), 4)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def delivered(frontier: int, src: bytes = b"server") -> Received:
    return Received(src, Deliver(1, 0, 1, 0, 1, frontier - 1, frontier, []))


def test_a_gated_client_follows_the_layer_from_its_first_step_on(gate: Gate) -> None:
    name = b"127.0.0.1:9"
    assert gate.follows == [Connect(name, name.decode()), Send(name, Follow(0))]
    assert gate.core.next_wakeup() == 1 + FOLLOW_NS // 4


def test_an_answer_waits_until_a_cut_covers_all_of_its_records(gate: Gate) -> None:
    for call in (1, 2, 3):
        gate.insert(call)
    assert gate.answer(1, RecordId(5, 0), RecordId(8, 1)) == []
    assert gate.cut(s0=6, s1=8) == [], "position 8 is not below frontier 8"
    done = Complete(1, [RecordId(5, 0), RecordId(8, 1)])
    assert gate.cut(s1=9) == [done]
    assert gate.cut(s0=1) == []
    covered = Complete(2, [RecordId(4, 0)])
    assert gate.answer(2, RecordId(4, 0)) == [covered], "an older cut lowers nothing"
    assert gate.core.leader == b"layer"


def test_errors_and_answers_to_other_calls_pass(gate: Gate) -> None:
    gate.insert(1)
    failed = Complete(1, DeadlineError("too late"))
    gate.effects = [failed, Complete(2, RecordId(9, 0))]
    assert gate.core.step(BatchEnd(), 3) == [failed, Complete(2, RecordId(9, 0))]


def test_deliveries_wait_for_a_cut_and_stay_in_order(gate: Gate) -> None:
    first, second, other = delivered(5), delivered(4), delivered(4, b"other")
    gate.cut(s0=4)
    gate.seen.clear()
    for event in (first, second, other):
        gate.core.step(event, 5)
    assert gate.seen == [other]
    gate.cut(s0=5)
    assert gate.seen == [other, first, second]


# --- a group ---


class Group:
    """Three nodes, a consensus that delays and loses proposals, and one client of all nodes."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.now = 0
        self.nodes = [Ordering(T_ORD) for _ in range(3)]
        self.frontiers = {0: 1, 1: 1}
        #: Proposals under way; each node has applied a part of the committed events.
        self.proposals: list[bytes] = []
        self.machine = Cuts()
        self.log: list[Committed] = []
        self.applied = [0, 0, 0]
        self.old_reports: list[dict[int, int]] = []
        self.seen: dict[int, int] = {}

    def step(self, number: int, event: Event) -> None:
        for effect in self.nodes[number].step(event, self.now):
            if isinstance(effect, Propose):
                self.proposals.append(effect.command)
            elif isinstance(effect, Send | Broadcast):
                assert isinstance(effect.message, Cut)
                self.receive(effect.message.frontiers)
        self.nodes[number].check()

    def receive(self, cut: dict[int, int]) -> None:
        assert not exceeds(self.seen, cut), "a client got a lower cut"
        assert not exceeds(cut, self.frontiers), "a cut has what no shard reported"
        last = msgspec.msgpack.decode(self.machine.snapshot(), type=dict[int, int])
        assert not exceeds(cut, last), "a client got a cut before it was committed"
        self.seen = dict(cut)

    def commit_some(self) -> None:
        self.chance.shuffle(self.proposals)
        while self.proposals and self.chance.random() < 0.7:
            command = self.proposals.pop()
            if self.chance.random() < 0.8:
                self.log.append(Committed(command, self.machine.apply(command)))

    def apply(self, number: int, *, all_events: bool) -> None:
        while self.applied[number] < len(self.log) and (all_events or self.chance.random() < 0.8):
            self.applied[number] += 1
            self.step(number, self.log[self.applied[number] - 1])

    def run(self, steps: int) -> None:
        leader = 0
        for _ in range(steps):
            self.now += self.chance.randrange(T_ORD)
            self.frontiers[self.chance.randrange(2)] += self.chance.randrange(3)
            self.old_reports.append(dict(self.frontiers))
            if self.chance.random() < 0.05:
                self.step(leader, FOLLOWS)
                leader = self.chance.randrange(3)
                self.apply(leader, all_events=True)
                self.step(leader, LEADS)
            for number in range(3):
                self.step(number, Received(b"client", Follow(0)))
                self.step(number, Reported(self.chance.choice(self.old_reports[-5:])))
            self.commit_some()
            for number in range(3):
                self.apply(number, all_events=False)

    def settle(self) -> None:
        """Lose a last proposal: the client gets everything that was reported all the same."""
        leader = next(n for n, node in enumerate(self.nodes) if node._is_leader)
        self.step(leader, Reported(self.frontiers))
        self.now += T_ORD
        self.step(leader, Reported({}))
        self.proposals.clear()
        for _ in range(3):
            self.now += LOST_AFTER_NS
            self.step(leader, Reported({}))
            self.log += [Committed(c, self.machine.apply(c)) for c in self.proposals]
            self.proposals.clear()
            self.apply(leader, all_events=True)


def run_groups() -> None:
    for seed in range(20):
        group = Group(seed)
        group.step(0, LEADS)
        group.run(300)
        group.settle()
        assert group.seen == group.frontiers, "a reported frontier was never ordered"


def test_cuts_rise_and_order_everything_whatever_is_lost_late_or_led() -> None:
    run_groups()


def replace(cuts: Cuts, command: bytes) -> bytes:
    cuts.restore(command)
    return command


def send_proposed(ordering: Ordering) -> Cut:
    ordering._sent = ordering._proposed
    return Cut(0, ordering._proposed)


@pytest.mark.parametrize(
    ("where", "what", "instead"),
    [
        (Cuts, "apply", replace),
        (Ordering, "_cut", send_proposed),
        (Ordering, "_forget_proposals", lambda _ordering: None),
    ],
    ids=["a cut replaces the last one", "a proposal is sent", "a lost proposal is forgotten"],
)
def test_a_broken_rule_is_found(where: type, what: str, instead: object) -> None:
    with patch.object(where, what, instead), pytest.raises(AssertionError):
        run_groups()
