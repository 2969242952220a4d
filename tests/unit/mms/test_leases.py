"""When the next lease is proposed."""

from mms.leases import LeasePlan
from tests.services import MS, S
from ziplog.core.view import Member


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
