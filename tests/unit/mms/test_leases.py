"""When the next lease is proposed."""

from mms.commands import GrantLease, RemoveShard, decode_command
from mms.leases import LeasePlan
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config
from ziplog.core.view import Lease, Member
from ziplog.wire import Remove


def test_changes_of_members_wait_for_half_a_lease_and_at_most_a_second() -> None:
    plan = LeasePlan(1000)
    one, two = (Member(0, 1, 1),), (Member(0, 1, 1), Member(1, 1, 1))

    def grant(members: tuple[Member, ...], now: int) -> None:
        lease = plan.propose(members, now, active=True, other_members=True)
        plan.on_committed(lease, now, leading=True)

    def due_at(now: int, *, other_members: bool) -> int:
        return plan.due_at(now, active=True, other_members=other_members)

    grant(one, 0)
    assert due_at(0, other_members=False) == 8 * S
    grant(two, 5 * S)
    assert due_at(5 * S, other_members=True) == 6 * S

    plan = LeasePlan(10)
    grant(one, 0)
    assert due_at(0, other_members=True) == 80 * MS


def test_a_lease_that_is_needed_at_once_follows_the_pending_one() -> None:
    plan = LeasePlan(10)

    def propose(now: int) -> Lease:
        assert plan.due_at(now, active=True, other_members=False) <= now
        return plan.propose((Member(0, 1, 1),), now, active=True, other_members=False)

    first = propose(0)
    plan.propose_at_once()
    assert plan.due_at(5 * MS, active=True, other_members=False) == S  # when the first is lost
    plan.on_committed(first, 9 * MS, leading=True)
    propose(9 * MS)
    plan.propose_at_once()
    plan.on_refused(20 * MS)
    second = propose(20 * MS)
    plan.on_committed(second, 25 * MS, leading=True)
    assert plan.due_at(25 * MS, active=True, other_members=False) == 105 * MS


def test_shards_that_leave_together_leave_with_few_leases() -> None:
    world = World(config(shards=40), delay=300 * MS).lead().run(5 * S)
    before = len(world.log)
    for shard in range(30):
        world.send(Remove(CLUSTER, shard + 1, shard, 1, 2), b"handler")
    world.run(350 * MS)
    assert [type(decode_command(one)) for _, one in world.proposed].count(GrantLease) == 1
    world.run(S)
    assert {member.shard for member in world.lease.members} == set(range(30, 40))
    commands = [type(decode_command(one)) for one in world.log[before:]]
    assert commands.count(RemoveShard) == 30
    assert commands.count(GrantLease) <= 4
