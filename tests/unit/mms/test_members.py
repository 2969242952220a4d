"""Shards that are placed, retired, recovered and finalized: compared with a plain model."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mms.commands import (
    Command,
    CreateCluster,
    FinalizeShard,
    GrantLease,
    PlaceShard,
    RemoveShard,
    RetireShard,
    SetTrim,
    decode_refusal,
)
from mms.state import ClusterState
from tests.properties import examples
from ziplog.core.view import NO_DIGEST, Lease, Member, Placement, Replica

CLUSTER = 77
SIZE = 10


def servers(shard: int) -> tuple[Replica, ...]:
    return tuple(Replica(f"shard-{shard}-{i}", f"h{shard}:{i + 1}") for i in range(2))


def placement(shard: int, view: int = 1, state: str = "live") -> Placement:
    return Placement(shard, view, state, servers(shard))  # type: ignore[arg-type]


def apply(state: ClusterState, command: Command) -> str:
    refusal = decode_refusal(state.apply(command.encode()))
    state.check()
    return refusal


def lease_of(state: ClusterState, members: dict[int, int]) -> Lease:
    found = tuple(Member(shard, view, 1) for shard, view in sorted(members.items()))
    last = state.last
    if last is None:
        return Lease(1, NO_DIGEST, 1, 0, 1, SIZE, 10, found)
    return last.following(found)


def grant(state: ClusterState, members: dict[int, int], *placements: Placement) -> str:
    return apply(state, GrantLease(lease_of(state, members), list(placements)))


def working(shards: int = 2) -> ClusterState:
    state = ClusterState()
    first = [placement(shard, 1, "joining") for shard in range(shards)]
    assert apply(state, CreateCluster(CLUSTER, "c", first)) == ""
    live = [placement(shard) for shard in range(shards)]
    assert grant(state, dict.fromkeys(range(shards), 1), *live) == ""
    return state


def test_a_shard_is_placed_once_and_for_all() -> None:
    state = working()
    assert apply(state, PlaceShard(placement(2, 1, "joining"))) == ""
    before = state.snapshot()
    assert apply(state, PlaceShard(placement(2, 1, "joining"))) == ""
    other = msgspec.structs.replace(placement(2, 1, "joining"), replicas=servers(3))
    assert apply(state, PlaceShard(other)) == "exists"
    mixed = (servers(3)[0], servers(1)[1])
    for new in (mixed, (servers(3)[0],) * 2, (servers(3)[0], Replica("new", "h1:1"))):
        taken = msgspec.structs.replace(placement(3, 1, "joining"), replicas=new)
        assert apply(state, PlaceShard(taken)) == "exists"
    for wrong in (placement(3), placement(3, 2, "joining")):
        assert apply(state, PlaceShard(wrong)) == "bad-placements"
    known = tuple(msgspec.structs.replace(one, fingerprint="x") for one in servers(3))
    forged = msgspec.structs.replace(placement(3, 1, "joining"), replicas=known)
    assert apply(state, PlaceShard(forged)) == "bad-placements"
    for count in (1, 3):
        three = (*servers(3), *servers(4))[:count]
        wrong = msgspec.structs.replace(placement(3, 1, "joining"), replicas=three)
        assert apply(state, PlaceShard(wrong)) == "wrong-size"
    # Nor may a lease bring a shard along, or other servers.
    assert grant(state, {0: 1, 3: 1}, placement(3)) == "bad-placements"
    assert grant(state, {0: 1}, msgspec.structs.replace(placement(1), replicas=servers(4))) == (
        "bad-placements"
    )
    assert state.snapshot() == before


def test_a_joining_shard_is_no_member_before_it_is_live() -> None:
    state = working()
    apply(state, PlaceShard(placement(2, 1, "joining")))
    assert grant(state, {0: 1, 2: 1}) == "bad-members"
    for wrong in ("recovering", "leaving", "finalized", "joining"):
        assert grant(state, {0: 1, 1: 1}, placement(2, 1, wrong)) == "bad-placements"
    assert grant(state, {0: 1, 1: 1, 2: 1}, placement(2)) == ""


def test_a_joining_shard_may_be_recovered_and_owns_nothing() -> None:
    """One of its servers crashed before the shard was a member: only a recovery makes it live."""
    state = working()
    apply(state, PlaceShard(placement(2, 1, "joining")))
    assert apply(state, RemoveShard(2, 0, 2)) == "other-view"
    assert apply(state, RemoveShard(2, 1, 2)) == ""
    assert (state.placements[2].state, state.recovering[2].limit) == ("recovering", 1)
    state.check()
    assert grant(state, {0: 1, 1: 1}, placement(2)) == "bad-placements"
    assert grant(state, {0: 1, 1: 1, 2: 2}, placement(2, 2)) == ""
    assert state.placements[2].state == "live"


def test_a_shard_that_was_to_be_recovered_before_it_joined_is_finalized_at_once() -> None:
    state = working()
    apply(state, PlaceShard(placement(2, 1, "joining")))
    for recovery in (2, 3):
        assert apply(state, RemoveShard(2, 1, recovery)) == ""
    assert apply(state, RetireShard(2)) == ""
    assert (state.retired[2].limit, state.retired[2].is_finalized) == (1, True)
    state.check()
    # Its servers may never return. If they do, they have no pending work.
    assert grant(state, {0: 1, 1: 1}, placement(2, 3)) == "bad-placements"
    assert grant(state, {0: 1, 1: 1}, placement(2, 3, "finalized")) == ""
    # A former member has positions to finish.
    assert apply(state, RemoveShard(1, 1, 2)) == ""
    assert apply(state, RetireShard(1)) == ""
    assert not state.retired[1].is_finalized


def test_the_first_lease_without_a_shard_that_leaves_is_its_limit() -> None:
    state = working()
    assert apply(state, RetireShard(1)) == ""
    assert (state.placements[1].state, state.retired[1].limit) == ("leaving", 0)
    assert grant(state, {0: 1, 1: 1}) == ""
    assert state.retired[1].limit == 0
    assert apply(state, FinalizeShard(1)) == "has-leases"
    last = state.last
    assert last is not None
    assert grant(state, {0: 1}) == ""
    assert state.retired[1].limit == last.stop
    assert grant(state, {0: 1, 1: 1}) == "bad-members"
    for back in ("live", "parked", "leaving", "joining"):
        assert grant(state, {0: 1}, placement(1, 1, back)) == "bad-placements"
    assert apply(state, RetireShard(1)) == ""
    for _ in range(2):
        assert apply(state, FinalizeShard(1)) == ""
    assert state.placements[1].state == "finalized"
    assert apply(state, PlaceShard(placement(1, 1, "joining"))) == "retired"
    assert state.retired[1].limit == last.stop


@pytest.mark.parametrize("shard", [0, 7])
def test_only_a_leaving_shard_is_finalized(shard: int) -> None:
    assert apply(working(), FinalizeShard(shard)) == "no-such-shard"
    assert apply(working(), RetireShard(7)) == "no-such-shard"


def test_at_least_one_shard_stays_live() -> None:
    state = working(3)
    assert grant(state, {0: 1, 2: 1}, placement(1, 1, "parked")) == ""
    assert apply(state, RemoveShard(2, 1, 2)) == ""
    assert apply(state, RetireShard(0)) == "last-shard"  # the others do not take records now
    assert apply(state, RetireShard(1)) == ""
    assert apply(state, RetireShard(2)) == ""
    assert apply(state, RetireShard(0)) == "last-shard"
    fresh = ClusterState()
    apply(fresh, CreateCluster(CLUSTER, "c", [placement(0, 1, "joining")]))
    assert apply(fresh, RetireShard(0)) == "last-shard"


def test_a_snapshot_from_before_shards_left_is_read() -> None:
    state = working()
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(state.snapshot())[:9])
    copy = ClusterState()
    copy.restore(old)
    assert copy.snapshot() == state.snapshot()


# --- any order ---------------------------------------------------------------------------------


@dataclass
class Shard:
    """The model's state of one shard."""

    state: str = "joining"
    view: int = 1
    #: The end of the last lease that has it.
    end: int = 0
    is_member: bool = False
    retired: bool = False
    finalized: bool = False
    recovery: int = 0
    limit: int = 0

    @property
    def is_new(self) -> bool:
        return self.state == "joining" or (self.state == "recovering" and not self.end)

    @property
    def back(self) -> str:
        return "finalized" if self.finalized else "leaving" if self.retired else "live"


_numbers = st.integers(0, 4)


class Shards(RuleBasedStateMachine):
    """Commands about five shards, in any order, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.log: list[bytes] = []
        self.shards: dict[int, Shard] = {}

    def apply(self, command: Command, expected: str, *, twice: bool = True) -> None:
        self.log.append(command.encode())
        assert decode_refusal(self.state.apply(self.log[-1])) == expected
        if not expected and twice:
            before = self.state.snapshot()
            assert decode_refusal(self.state.apply(self.log[-1])) == ""
            assert self.state.snapshot() == before

    @initialize()
    def create(self) -> None:
        first = [placement(shard, 1, "joining") for shard in (0, 1)]
        self.apply(CreateCluster(CLUSTER, "c", first), "")
        self.shards = {0: Shard(), 1: Shard()}
        self._grant({0: "live", 1: "live"}, {0: 1, 1: 1})

    @rule(number=_numbers)
    def place(self, number: int) -> None:
        shard = self.shards.get(number)
        expected = "retired" if shard is not None and shard.retired else ""
        self.apply(PlaceShard(placement(number, 1, "joining")), expected)
        self.shards.setdefault(number, Shard())

    @rule(number=_numbers)
    def retire(self, number: int) -> None:
        shard = self.shards.get(number)
        if shard is None:
            self.apply(RetireShard(number), "no-such-shard")
            return
        others = [one for n, one in self.shards.items() if n != number and not one.retired]
        takers = [one for one in others if one.state == "live" or shard.is_new]
        if not takers and not shard.retired:
            self.apply(RetireShard(number), "last-shard")
            return
        self.apply(RetireShard(number), "")
        if not shard.retired:
            shard.retired, shard.finalized = True, shard.is_new
            if shard.state != "recovering":
                shard.state = shard.back

    @rule(number=_numbers)
    def finalize(self, number: int) -> None:
        shard = self.shards.get(number)
        if shard is None or not shard.retired:
            self.apply(FinalizeShard(number), "no-such-shard")
        elif shard.state != "recovering" and shard.is_member:
            self.apply(FinalizeShard(number), "has-leases")
        else:
            self.apply(FinalizeShard(number), "")
            shard.finalized = True
            shard.state = shard.state if shard.state == "recovering" else "finalized"

    @rule(number=_numbers)
    def remove(self, number: int) -> None:
        shard = self.shards.get(number)
        if shard is None:
            self.apply(RemoveShard(number, 1, 2), "no-such-shard")
            return
        recovery = max(shard.recovery, shard.view) + 1
        self.apply(RemoveShard(number, shard.view, recovery), "")
        shard.state, shard.recovery = "recovering", recovery

    @rule(
        wanted=st.dictionaries(
            _numbers, st.sampled_from(["live", "parked", "leaving", "finalized"])
        ),
        members=st.sets(_numbers, min_size=1),
    )
    def grant(self, wanted: dict[int, str], members: set[int]) -> None:
        self._grant(wanted, {n: self._view_after(n, wanted) for n in members})

    def _view_after(self, number: int, wanted: dict[int, str]) -> int:
        shard = self.shards.get(number, Shard())
        is_back = number in wanted and shard.state == "recovering"
        return shard.recovery if is_back else shard.view

    def _grant(self, wanted: dict[int, str], members: dict[int, int]) -> None:
        placements = [placement(n, self._view_after(n, wanted), s) for n, s in wanted.items()]
        lease = lease_of(self.state, members)
        expected = self._expected(wanted, members)
        self.apply(GrantLease(lease, placements), expected)
        if expected:
            return
        for number, state in wanted.items():
            shard = self.shards[number]
            shard.view = self._view_after(number, wanted)
            shard.state = state
        for number, shard in self.shards.items():
            shard.is_member = number in members
            shard.end = lease.stop if number in members else shard.end

    def _expected(self, wanted: dict[int, str], members: dict[int, int]) -> str:
        for number, state in wanted.items():
            shard = self.shards.get(number)
            if shard is None:
                return "bad-placements"
            back = shard.back if shard.state == "recovering" else None
            may = {back} if back else set() if shard.retired else {"live", "parked"}
            if state not in may:
                return "bad-placements"
        for number in members:
            shard = self.shards.get(number)
            if shard is None:
                return "bad-members"
            is_leaving = shard.state == "leaving" and shard.is_member and number not in wanted
            if wanted.get(number, shard.state) != "live" and not is_leaving:
                return "bad-members"
        return ""

    @rule(gsn=st.integers(0, 100))
    def trim(self, gsn: int) -> None:
        last = self.state.last
        assert last is not None
        self.apply(SetTrim(gsn), "" if gsn < last.stop else "no-such-position")

    @invariant()
    def agrees(self) -> None:
        state = self.state
        state.check()
        assert {n: (s.state, s.view) for n, s in self.shards.items()} == {
            n: (p.state, p.view) for n, p in state.placements.items()
        }
        for number, shard in self.shards.items():
            retired = state.retired.get(number)
            assert (retired is not None) == shard.retired
            if retired is None:
                continue
            assert retired.is_finalized == shard.finalized
            if not retired.limit:
                assert shard.is_member
            shard.limit = shard.limit or retired.limit
            assert retired.limit == shard.limit, "a limit that moved"
            assert not retired.limit or retired.limit >= shard.end, "a position behind the limit"

    @invariant()
    def a_snapshot_is_the_state(self) -> None:
        copy: Any = ClusterState()
        copy.restore(self.state.snapshot())
        assert copy.snapshot() == self.state.snapshot()
        replayed = ClusterState()
        for command in self.log:
            replayed.apply(command)
        assert replayed.snapshot() == self.state.snapshot()


TestShards = Shards.TestCase
TestShards.settings = examples(60, stateful_step_count=25)
