"""Whole recoveries in virtual time, with real failure handlers and a real membership service."""

import pytest

from failure_handler.state import Begin, Decide, Finish, HandlerState
from mms.commands import GrantLease
from tests.services import MS, S
from tests.unit.failure_handler.servers import FLUSH, HOP
from tests.unit.failure_handler.world import COMMIT, World, config, reach
from ziplog.wire import Frozen, Reinserted, Suspect, ViewDecided

# --- the plain course ------------------------------------------------------------------------


@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_returns_after_a_server_died(f: int, index: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.kill(world.server(0, index))
    world.until_live(view=2)
    (begin,) = world.decided(Begin)
    assert (begin.attempt.candidate == 0) == (index != 0)
    assert not begin.attempt.from_limbo
    assert len(world.decided(Decide)) == len(world.decided(Finish)) == 1
    assert world.insert("two")
    world.run(5 * S)
    assert len(world.commands) == 3 + (f > 1)  # with more than two replicas, a view is confirmed
    assert world.status()["losses"] == []


def test_nothing_waits_between_the_suspicion_and_the_decision() -> None:
    world = World().live()
    world.supervised = False
    world.kill(world.server(0, 1))
    reach(world, "suspected")
    (suspected,) = [at for at, _, _, message in world.sent if type(message) is Suspect]
    world.until(lambda: bool(world.messages(ViewDecided)))
    decided = next(at for at, _, _, message in world.sent if type(message) is ViewDecided)
    # Begin, RemoveShard, Decide; Suspect, Remove, Removed, Freeze, Frozen.
    assert decided - suspected == 3 * COMMIT + FLUSH + 5 * HOP


def test_other_shards_continue() -> None:
    world = World(config(shards=3)).live()
    world.supervised = False
    world.kill(world.server(1, 0))
    world.until(lambda: world.consensus.shards.get(1) is not None)
    world.run(10 * S)
    last = world.mms.state.last
    assert last is not None
    assert [member.shard for member in last.members] == [0, 2]
    states = {shard["id"]: shard["state"] for shard in world.status()["shards"]}
    assert states == {0: "live", 1: "recovering", 2: "live"}
    world.server(1, 0).restart()
    world.until_live(1, view=2)
    last = world.mms.state.last
    assert [(member.shard, member.view) for member in last.members] == [(0, 1), (1, 2), (2, 1)]


def test_several_shards_are_recovered_at_once() -> None:
    world = World(config(shards=3)).live()
    world.kill(world.server(0, 0), world.server(1, 1), world.server(2, 0))
    for shard in range(3):
        world.until_live(shard, view=2)


def test_one_recovery_after_the_other() -> None:
    world = World(config(f=2)).live()
    for view in range(2, 8):
        world.kill(world.server(0, view % 3))
        world.until_live(view=view)
        assert world.insert(f"in {view}")
    assert len(world.decided(Begin)) == 6


def test_f_servers_may_die_at_once() -> None:
    world = World(config(f=2)).live()
    assert world.insert("one", flush=False)
    world.kill(world.server(0, 0), world.server(0, 2))
    world.until_live(view=2)
    assert world.decided(Begin)[0].attempt.candidate == 1


# --- who survives ------------------------------------------------------------------------------


def test_of_two_servers_that_suspect_each_other_the_primary_survives() -> None:
    world = World().live()
    # The backup's report comes first, and does not suspect the primary.
    first, second = world.server(0, 1), world.server(0, 0)
    first.always_suspects, second.always_suspects = {0}, {1}
    world.network = lambda src, _dst, message: (
        [20 * MS] if type(message) is Suspect and src == second.name else [HOP]
    )
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 1  # it suspects the primary
    first.always_suspects, second.always_suspects = set(), set()
    world.until_live(view=2)

    world = World(config(f=2)).live()
    world.server(0, 1).always_suspects, world.server(0, 0).always_suspects = {2}, {1, 2}
    world.network = lambda src, _dst, message: (
        [50 * MS] if type(message) is Suspect and src == "shard-0-0" else [HOP]
    )
    for index in (1, 0):
        world.server(0, index).send_report()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 0  # the primary was waited for
    for server in world.servers:
        server.always_suspects = set()
    world.until_live(view=2)
    assert len(world.decided(Decide)) == 1


def test_a_silent_primary_is_not_waited_for_long() -> None:
    world = World(config(f=2)).live()
    world.network = lambda src, _dst, message: (
        [] if type(message) is Suspect and src == "shard-0-0" else [HOP]
    )
    world.server(0, 1).always_suspects = {2}
    reach(world, "suspected")
    start = world.now
    reach(world, "begun", S)
    assert 100 * MS <= world.now - start <= 200 * MS
    assert world.decided(Begin)[0].attempt.candidate == 1


def test_without_the_primary_the_longest_log_survives() -> None:
    world = World(config(f=2)).live()
    world.insert("one", but=1)
    world.insert("two", but=1)
    world.kill(world.server(0, 0))
    # Both report before the first attempt can begin.
    world.server(0, 1).report_times[0] = world.server(0, 2).report_times[0] = world.now - S
    for server in (world.server(0, 2), world.server(0, 1)):
        server.send_report()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 2


def test_the_primary_survives_even_if_another_server_holds_more() -> None:
    world = World(config(f=2)).live()
    world.insert("one", but=0)
    world.server(0, 1).report_times[2] = world.server(0, 0).report_times[2] = world.now - S
    for index in (1, 0):
        world.server(0, index).send_report()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 0


def test_a_witness_of_a_view_that_is_over_does_not_keep_the_others_waiting() -> None:
    world = World().live()
    assert world.insert("one")
    survivor, witness = world.server(0, 1), world.server(0, 0)
    survivor.always_suspects = {0}
    world.until(lambda: witness.state == "frozen")
    survivor.always_suspects = set()
    world.kill(survivor)  # before the witness has received anything from it
    world.until_live(limit=10 * S)
    assert world.decided(Begin)[1].attempt.candidate == 1
    assert world.insert("two")


def test_a_frozen_loser_of_an_older_attempt_may_survive_the_next_one() -> None:
    world = World(config(f=2)).live()
    world.insert("one")
    world.kill(world.server(0, 2))
    reach(world, "frozen")
    world.network = lambda src, _dst, message: (
        [] if type(message) is Frozen and src == "shard-0-0" else [HOP]
    )
    world.until(lambda: len(world.decided(Begin)) > 1)
    assert world.decided(Begin)[1].attempt.candidate == 1
    world.until_live(view=3)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_survivor_that_no_other_server_hears_makes_room_for_another_one(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure handler hears it; alone it could not confirm its view."""
    world = World(config(f=2)).live()
    world.supervised = False
    lonely, servers = world.servers[index].name, {server.name for server in world.servers}

    def is_linked(src: str, dst: str) -> bool:
        return lonely not in {src, dst} or not {src, dst} <= servers

    monkeypatch.setattr(world, "is_linked", is_linked)
    world.until(lambda: any(one.confirmed > 1 for one in world.consensus.shards.values()), 5 * S)
    last = world.decided(Begin)[-1].attempt
    assert last.candidate != index
    assert len(world.decided(Begin)) <= 2
    world.run(10 * S)
    assert world.decided(Begin)[-1].attempt == last


def test_a_slow_join_does_not_replace_the_survivor() -> None:
    """The servers that still have to join hear the survivor in its later view."""
    world = World(config(f=2)).live()
    world.supervised = False
    world.network = lambda _src, dst, message: (
        [] if type(message) is ViewDecided and dst != "shard-0-0" else [HOP]
    )
    world.server(0, 0).always_suspects = {1}
    reach(world, "decided")
    world.server(0, 0).always_suspects = set()
    world.run(10 * S)
    assert [server.state for server in world.servers] == ["joined", "frozen", "frozen"]
    assert len(world.decided(Begin)) == 1


def test_every_server_that_has_joined_learns_that_its_view_is_confirmed() -> None:
    """The last server may never return, so that the view does not start."""
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(world.server(0, 2))
    world.until(lambda: any(one.confirmed > 1 for one in world.consensus.shards.values()), 5 * S)
    world.sent.clear()
    world.run(1 * S)
    decided = [(dst, m.is_confirmed) for _, _, dst, m in world.sent if type(m) is ViewDecided]
    assert set(decided) == {("shard-0-0", True), ("shard-0-1", True)}


# --- who is to be started again ----------------------------------------------------------------


def test_only_servers_that_a_recovery_waits_for_are_restarted() -> None:
    world = World(config(f=2, shards=2)).live()
    world.supervised = False
    assert world.orders() == []
    world.kill(world.server(0, 2))
    reach(world, "removed")
    world.until(lambda: world.orders() == ["shard-0-2"], 2 * S)
    world.run(5 * S)
    assert world.orders() == ["shard-0-2"]
    world.server(0, 2).restart()
    world.until_live(view=2)
    assert world.orders() == []


def test_no_restart_is_ordered_while_the_shard_returns() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    reach(world, "joined")
    # The reply does not come: the servers are up and silent, and the recovery is not finished.
    world.network = lambda _src, _dst, message: [] if type(message) is Reinserted else [HOP]
    world.until(lambda: all(server.state == "up" for server in world.servers))
    for _ in range(20):
        assert world.orders() == []
        world.run(50 * MS)
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live(view=2, limit=3 * S)


def test_a_new_leader_that_finds_all_servers_up_orders_no_restart_for_long() -> None:
    world = World(config(handlers=3)).live()
    world.kill(world.server(0, 1))
    reach(world, "joined")
    world.network = lambda _src, _dst, message: [] if type(message) is Reinserted else [HOP]
    world.until(lambda: all(server.state == "up" for server in world.servers))
    world.fail_over()
    world.until(lambda: bool(world.decided(Finish)), 1100 * MS)
    assert world.orders() == []


# --- a failure handler that has forgotten ------------------------------------------------------


def forget(world: World) -> None:
    """Delete the failure handler's data directory."""
    world.consensus.shards.clear()
    world.log.clear()
    world.handlers.clear()
    world.start_handler("fh-0")
    world.elect("fh-0")


def test_a_handler_that_has_forgotten_old_recoveries_uses_no_number_again() -> None:
    world = World().live()
    for view in (2, 3):
        world.kill(world.server(0, 0))
        world.until_live(view=view)
    forget(world)
    world.kill(world.server(0, 1))
    world.until_live(view=4)


def test_a_handler_that_forgot_a_recovery_under_way_does_not_guess_its_decision() -> None:
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(world.server(0, 2))
    world.network = lambda _src, dst, message: (
        [] if type(message) is ViewDecided and dst == "shard-0-1" else [HOP]
    )
    reach(world, "entered")
    forget(world)
    assert world.server(0, 1).view == 1
    before = len(world.commands)
    world.run(10 * S)
    assert len(world.commands) == before
    assert world.status()["shards"][0]["obstacle"] == (
        "the failure handler lost its data directory during a recovery, and does not know the view"
        " that was decided. Rebuild the membership service (ziplog membership rebuild)"
    )
    # When all have lost their views, no view has to be guessed.
    world.network = lambda _src, _dst, _message: [HOP]
    world.kill(*world.servers)
    for server in world.servers:
        server.restart()
    world.until_live()


def test_the_next_view_has_the_regions_that_its_servers_report() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    for index, server in enumerate(world.servers[:2]):
        server.region = f"region {index}"
    world.until_live(view=2)
    started = next(p for c in grants(world) for p in c.placements if p.view == 2)
    assert [replica.region for replica in started.replicas] == ["region 0", "region 1"]


def grants(world: World) -> list[GrantLease]:
    return [command for command in world.mms_commands if isinstance(command, GrantLease)]


def test_a_new_leader_announces_no_view_that_has_started() -> None:
    """A server that crashed in it must not join it again: it has forgotten what it acked there."""
    world = World(config(handlers=3)).live()
    world.kill(world.server(0, 0))
    reach(world, "returned")
    del world.handlers[world.leader]
    world.leader = ""
    world.until(lambda: all(server.state == "up" for server in world.servers))
    world.kill(world.server(0, 1))
    world.run(1500 * MS)
    assert world.server(0, 1).state == "limbo"
    assert not world.decided(Finish)
    world.sent = []
    world.elect("fh-1")
    world.until_live(view=3)
    assert {message.view for message in world.messages(ViewDecided)} == {3}


def test_a_view_that_a_rebuilt_service_awaits_is_reported_again() -> None:
    """The service was rebuilt from before `Finish`, which was committed only then."""
    world = World(config(f=0, handlers=3)).live()
    world.kill(world.server(0, 0))
    reach(world, "joined")
    del world.handlers[world.leader]
    world.leader = ""
    world.run(300 * MS)
    world.commit(Finish(0, 2).encode())
    world.elect("fh-1")
    world.until_live(view=2)


def test_a_handler_with_an_old_directory_begins_no_attempt() -> None:
    world = World().live()
    world.kill(world.server(0, 0))
    world.until_live(view=2)
    old = list(world.log)
    world.kill(world.server(0, 0))
    world.until_live(view=3)
    world.log, world.consensus = old, HandlerState()
    for command, _ in old:
        world.consensus.apply(command)
    world.start_handler("fh-0")
    world.elect("fh-0")
    begun = world.decided(Begin)
    world.kill(world.server(0, 1))
    world.run(20 * S)
    assert world.decided(Begin) == begun
    assert "in view 3, but the failure handler only has view 2" in " ".join(world.warnings)
