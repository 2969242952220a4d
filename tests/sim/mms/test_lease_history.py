"""The history of leases stays bounded without trims (docs/protocol.md, section 13.2)."""

import pytest

from mms.leases import HISTORY_STEP_BYTES, LeasePlan
from tests.services import CLUSTER, MS, S
from tests.unit.mms.test_rates import send_rate, weights
from tests.unit.mms.world import World, working
from tests.world import first_lease
from ziplog.core.view import run_of
from ziplog.wire import Trim

SHORT = 16


@pytest.fixture(autouse=True)
def _short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(first_lease(3)).max_bytes
    monkeypatch.setattr("mms.leases.HISTORY_STEP_BYTES", SHORT * run)


def runs(world: World) -> int:
    return len(world.service.state.runs)


def churn(world: World, seconds: int) -> World:
    """Change the rate of a shard three times a second."""
    for turn in range(3 * seconds):
        send_rate(world, 1, 40_000 if turn % 2 else 10_000)
        world.run(S // 3)
    return world


@pytest.mark.nightly
def test_weights_that_change_all_the_time_are_granted_ever_more_rarely() -> None:
    world = churn(working(), 60)
    after_a_minute = runs(world)
    assert after_a_minute > 3 * SHORT
    churn(world, 300)
    assert runs(world) - after_a_minute < 5 * SHORT


@pytest.mark.nightly
def test_alternating_bursts_and_pauses_keep_the_history_bounded() -> None:
    world = working()
    counts = [runs(world)]
    for _ in range(90):
        world.set_active(False)
        world.run(5 * S)
        world.set_active(True)
        world.run(2 * S)
        counts.append(runs(world))
    assert counts[10] - counts[0] >= 10
    assert counts[-1] == counts[-15] < 8 * SHORT
    world.set_active(False)
    world.run(300 * S)
    assert world.lease.epoch_ms == 1000, "it is idle in the end"


def test_members_change_at_once_however_long_the_history_is() -> None:
    world = churn(working(), 120)
    assert world.service.plan.weights_interval_ns > S
    for server in world.servers[2:4]:
        server.alive = False
    world.run(6 * S)
    assert [member.shard for member in world.lease.members] == [0, 2]


def test_a_trim_makes_changes_cheap_again() -> None:
    world = churn(working(), 120)
    assert world.service.plan.weights_interval_ns > S
    for server in world.servers:
        server.frontier = world.lease.base
    world.run(S)
    world.send(Trim(CLUSTER, 9, world.lease.base - 1))
    world.run(2 * S)
    assert world.service.plan.weights_interval_ns == 0
    assert runs(world) < SHORT
    world.run(2 * S)
    send_rate(world, 1, 80_000)
    world.run(2 * S)
    assert weights(world) == [1, 8, 1]


def test_the_interval_between_new_weights_grows_with_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mms.leases.HISTORY_STEP_BYTES", HISTORY_STEP_BYTES)
    plan = LeasePlan(10)
    prices = []
    for length in (
        0,
        HISTORY_STEP_BYTES - 1,
        HISTORY_STEP_BYTES,
        5 * HISTORY_STEP_BYTES,
        2**26,
        10**12,
    ):
        plan.set_history_size(length, 0)
        prices.append(plan.weights_interval_ns)
    assert prices == [0, 0, 200 * MS, 3200 * MS, 3600 * S, 3600 * S]
