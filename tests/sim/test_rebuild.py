"""The membership service's state is lost and rebuilt under load; see tests/sim/rebuild."""

from __future__ import annotations

from random import Random

import pytest

from tests.properties import seeds
from tests.sim.mutation import LAN, LOSSY, SLOW, busy
from tests.sim.plan import Fault, draw
from tests.sim.rebuild import Loss, rebuild
from tests.sim.run import run
from tests.sim.script import LONG_NS, Client, stage
from ziplog.client.common.requests import TrimRequest
from ziplog.types import RecordId

#: What else is lost: nothing, killed servers, the failure handlers, servers, power.
AMOUNTS = (0, 1, 2, 4, 7, 8, 10)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_clients_go_on_after_a_rebuild(seed: int, amount: int) -> None:
    """A server may die before, so that views differ; another one dies after the rebuild."""
    random = Random(f"rebuilds {seed} {amount}")
    at_ms = random.randrange(100, 1_500)
    faults = [
        Fault(random.randrange(10, at_ms), "kill", (f"shard-{random.randrange(2)}-0",)),
        Fault(at_ms, "rebuild", amount=amount),
        Fault(at_ms + 6_000, "kill", ("shard-1-1",)),
    ]
    plan = busy(
        seed, *faults, shards=2, mms=random.choice((1, 3)), think_us=20_000, calls=100,
        conditions=random.choice((LAN, LOSSY)), f=random.choice((1, 2)),
        durability=random.choice(("memory", "disk")),
    )  # fmt: skip
    assert run(plan).records > 0


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_two_rebuilds_follow_each_other(seed: int) -> None:
    faults = (Fault(300, "rebuild", amount=seed), Fault(8_000, "rebuild", amount=4))
    assert run(busy(seed, *faults, shards=2, think_us=50_000, calls=200)).faults == 2


def test_a_trim_that_returned_survives_a_rebuild_after_a_power_cut() -> None:
    """Level `memory`: the trim point is on the servers' disks when the call returns."""
    with stage() as s:
        client = Client(s, "a")
        for payload in (b"one", b"two", b"three"):
            last = client.wait(client.insert(payload)).gsns[0]
        client.wait(client.begin(TrimRequest(client.process.clock() + LONG_NS, RecordId(last, 0))))
        rebuild(s.cluster, Loss.of(8))
        assert s.cluster.state.trim == last


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_of_all_servers_after_a_view_was_decided_loses_nothing(seed: int) -> None:
    """The survivor has joined the view and waits for a suspended server; the run finds no loss."""
    name = f"shard-0-{seed % 2}"
    faults = (Fault(500, "suspend", (name,), 9_000), Fault(5_000, "rebuild", amount=16))
    plan = busy(seed, *faults, shards=2, think_us=50_000, calls=60, durability="memory")
    assert run(plan).faults == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_rebuild_keeps_the_only_copy_of_a_damaged_entry(seed: int) -> None:
    """A damaged disk is a failure of its server: no other one loses its directory."""
    faults = (Fault(700, "rot", ("shard-0-1",)), Fault(1_400, "rebuild", amount=4))
    plan = busy(seed, *faults, shards=2, think_us=20_000, calls=60, durability="disk")
    assert run(plan).faults == 2


@pytest.mark.parametrize("after_ms", range(0, 200, 20))
def test_a_shard_that_a_rebuild_forgets_is_added_again(after_ms: int) -> None:
    """All machines lose power while the shard joins; the run ends once all its servers are up."""
    faults = (
        Fault(300, "add-shard", ("shard-2",)),
        Fault(300 + after_ms, "rebuild", amount=8),
    )
    plan = busy(1, *faults, shards=2, think_us=50_000, calls=30, conditions=SLOW, durability="disk")
    assert run(plan).faults == 2


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_any_plan_survives_a_rebuild(seed: int) -> None:
    plan = draw(seed, is_raft_real=False)._replace(naps=False)
    random = Random(f"any rebuild {seed}")
    added = Fault(random.randrange(plan.span_ms), "rebuild", amount=random.randrange(16))
    run(plan._replace(faults=tuple(sorted((*plan.faults, added)))))


def test_the_amount_of_a_fault_states_the_losses() -> None:
    assert Loss.of(0) == Loss(kills=False, handlers=False, servers=False, power=False)
    assert Loss.of(9) == Loss(kills=True, handlers=False, servers=False, power=True)
