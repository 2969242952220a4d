"""What a failure handler counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from failure_handler.counters import Counters
from tests.services import S
from tests.unit.failure_handler.world import World, config

if TYPE_CHECKING:
    from failure_handler.service import FailureHandler


def counted(handler: FailureHandler | Counters) -> dict[tuple[object, ...], float]:
    values, durations = handler.metrics([]) if isinstance(handler, Counters) else handler.metrics()
    found = {(one.name, *one.labels.values()): one.value for one in values}
    (histogram,) = durations
    return found | {(histogram.name,): sum(histogram.counts)}


def test_a_recovery_is_counted_once_with_its_duration() -> None:
    world = World(config()).live()
    leader = world.handlers[world.leader]
    assert counted(leader) == {
        ("ziplog_suspicions_total", "0"): 0,
        ("ziplog_recoveries_total", "0", "restart"): 0,
        ("ziplog_recoveries_total", "0", "silence"): 0,
        ("ziplog_recovery_duration_seconds",): 0,
    }
    world.supervised = False
    world.kill(world.server(0, 1))
    world.run(5 * S)
    world.server(0, 1).restart()
    world.until_live(view=2)
    found = counted(leader)
    assert found["ziplog_suspicions_total", "0"] == 1
    assert found["ziplog_recoveries_total", "0", "silence"] == 1
    assert found[("ziplog_recovery_duration_seconds",)] == 1
    assert leader.metrics()[1][0].sum_ns > 3 * S


def test_a_server_that_restarted_is_the_cause() -> None:
    world = World(config()).live()
    world.kill(world.server(0, 1))  # Its supervisor restarts it at once.
    world.until_live(view=2)
    found = counted(world.handlers[world.leader])
    assert found["ziplog_recoveries_total", "0", "restart"] == 1


def test_repeated_reports_are_one_suspicion() -> None:
    counters = Counters()
    for now in (0, S, 2 * S, 3 * S, 6 * S):
        counters.on_suspicion(4, now)
    assert counted(counters)["ziplog_suspicions_total", "4"] == 2


def test_a_recovery_takes_from_the_first_suspicion_on() -> None:
    counters = Counters()
    counters.on_suspicion(4, 0)
    counters.on_suspicion(4, S)
    counters.on_begin(4, [], 2 * S)
    counters.on_begin(4, [], 3 * S)  # Another candidate.
    counters.on_finish(4, 5 * S)
    _, (durations,) = counters.metrics([])
    assert (sum(durations.counts), durations.sum_ns) == (1, 5 * S)
    counters.on_begin(4, [], 20 * S)  # After a restart, nothing is suspected.
    counters.on_finish(4, 21 * S)
    assert counters.metrics([])[1][0].sum_ns == 6 * S


def test_the_number_of_shards_is_limited() -> None:
    counters = Counters()
    for shard in range(1000):
        counters.on_suspicion(shard, 0)
        counters.on_begin(shard, [], 0)
        counters.on_finish(shard, S)
    values, durations = counters.metrics(range(1000))
    assert len(values) == 80
    assert sum(durations[0].counts) == 1000
