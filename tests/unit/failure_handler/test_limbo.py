"""Shards with all servers in limbo or without data: the chosen candidate, the reported losses."""

import pytest

from failure_handler.state import Begin, Decide
from tests.services import MS, S
from tests.unit.failure_handler.servers import HOP
from tests.unit.failure_handler.world import World, config, reach
from ziplog.core.view import fingerprint
from ziplog.wire import Frozen, Removed, Suspect

RESTARTED = 600 * MS


@pytest.mark.parametrize("f", [0, 1, 2])
def test_a_shard_that_was_killed_whole_begins_with_the_longest_log(f: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.insert("two", but=0 if f else -1)
    world.kill(*world.servers)
    world.until_live(view=2)
    (begin,) = world.decided(Begin)
    assert begin.attempt.from_limbo
    assert begin.attempt.candidate == (1 if f else 0)
    (loss,) = world.status()["losses"]
    limit = world.messages(Removed)[-1].limit if world.messages(Removed) else loss["stop"]
    assert (loss["shard"], loss["start"], loss["stop"]) == (0, 3, limit)
    assert loss["epochs"][0] == 0
    assert loss["epochs"][1] > 0
    assert world.insert("three")


def test_a_possible_loss_is_reported() -> None:
    world = World().live()
    assert world.insert("one")
    assert world.insert("two", flush=False)
    world.kill(*world.servers)
    world.until(lambda: bool(world.mms.state.losses))
    assert world.mms.state.losses[0].start == 2  # the position of "two"
    world.until_live(view=2)
    assert "may be lost" in " ".join(world.warnings)


def test_an_empty_log_has_lost_from_its_beginning() -> None:
    world = World().live()
    world.insert("one", flush=False)
    world.kill(*world.servers)
    world.until_live(view=2)
    assert world.mms.state.losses[0].start == 1


def test_at_level_disk_nothing_was_lost() -> None:
    world = World(config(durability="disk")).live()
    assert world.insert("one")
    world.kill(*world.servers)
    world.until_live(view=2)
    assert world.decided(Decide)[0].decision.lost_from == 0
    assert world.status()["losses"] == []


@pytest.mark.parametrize("is_insisting", [False, True])
def test_at_level_disk_a_log_from_before_a_confirmed_view_may_lack_records(
    is_insisting: bool,
) -> None:
    """The survivor of that view, which acknowledged them, has lost its directory."""
    world = World(config(durability="disk")).live()
    assert world.insert("one")
    world.supervised = False
    world.insert("two", but=1)
    world.kill(world.server(0, 1))
    world.until(lambda: world.server(0, 0).state == "joined")
    world.kill(world.server(0, 0))
    world.run(3 * S)
    if is_insisting:  # The first promise is lost, and the server that gave it dies.
        world.network = lambda _src, _dst, message: [] if type(message) is Frozen else [HOP]
    world.server(0, 0).restart(wiped=True)
    world.server(0, 1).restart()
    if is_insisting:
        world.until(lambda: world.server(0, 1).state == "frozen")
        world.run(1 * S)
        world.kill(world.server(0, 1))
        world.network = lambda _src, _dst, _message: [HOP]
        world.server(0, 1).restart()
    world.until_live()
    assert "two" not in [what for _, what in world.server(0, 0).log]
    assert [loss.start for loss in world.mms.state.losses] == [2]


def test_no_candidate_is_chosen_from_limbo_while_a_server_is_missing() -> None:
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(*world.servers)
    world.server(0, 0).restart()
    world.server(0, 2).restart()
    world.run(10 * S)
    assert world.commands == []
    world.server(0, 1).restart()
    world.until_live(view=2)


def test_a_late_report_of_an_older_view_does_not_count_as_limbo() -> None:
    """Else the crashed server would be chosen, at level memory without the other's records."""
    world = World().live()
    world.kill(world.server(0, 1))
    world.until_live(view=2)
    late = [m for m in world.messages(Suspect) if m.node == "shard-0-0" and m.view == 1][-1]
    assert world.insert("one", flush=False)
    world.kill(world.server(0, 1))
    world.run(300 * MS)
    world.network = lambda _src, _dst, message: (
        [] if type(message) is Suspect and message.node == late.node and message != late else [HOP]
    )
    for _ in range(6):
        world.send_handler(world.server(0, 0), "fh-0", late)
        world.run(100 * MS)
    assert world.server(0, 1).state == "limbo"
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live(view=3)
    assert not any(begin.attempt.from_limbo for begin in world.decided(Begin))
    assert "one" in [what for _, what in world.server(0, 1).log]
    assert world.status()["losses"] == []


def test_a_promise_from_limbo_that_was_not_decided_hides_no_loss() -> None:
    world = World(config(f=1)).live()
    assert world.insert("one")
    assert world.insert("two", flush=False)
    world.kill(*world.servers)
    reach(world, "promised")
    # It has filled its log up to the limit, and dies before it reports.
    world.sent.clear()
    world.network = lambda _src, _dst, message: [] if type(message) is Frozen else [HOP]
    world.run(2 * HOP)
    world.kill(*world.servers)
    world.run(RESTARTED)
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live()
    assert [loss.start for loss in world.mms.state.losses] == [2]


def test_a_survivor_that_left_its_view_is_replaced() -> None:
    world = World().live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, "entered")
    world.server(0, 1).leave()
    world.until_live()
    assert len(world.decided(Begin)) == 2


def test_a_server_without_its_data_directory_is_never_chosen() -> None:
    world = World().live()
    assert world.insert("one")
    old = [server.identity for server in world.servers]
    world.supervised = False
    world.kill(*world.servers)
    world.run(6 * S)  # until no server reports
    for server in world.servers:
        server.restart(wiped=True)
    world.run(10 * S)
    assert world.commands == []
    warned = [text for text in world.warnings if "cannot be recovered" in text]
    assert len(warned) == 1
    assert "data directory" in warned[0]
    # One directory is restored.
    world.kill(world.server(0, 1))
    world.run(3 * S)
    server = world.server(0, 1)
    server.restart()
    server.identity, server.log, server.flushed = old[1], [(1, "one")], 1
    server.lease = world.mms.state.last
    world.until_live(limit=20 * S)
    assert world.decided(Begin)[0].attempt.candidate == 1


def test_a_replaced_disk_is_known_from_then_on() -> None:
    world = World().live()
    assert world.insert("one")
    world.kill(world.server(0, 0), wiped=True)
    world.until_live(view=2)
    found = world.mms.state.placements[0].replicas[0].fingerprint
    assert found == fingerprint("directory of shard-0-0'")
    assert "one" in {record for _, record in world.server(0, 0).log}
    # It counts from now on: it survives.
    world.kill(world.server(0, 1))
    world.until_live(view=3)
    assert world.decided(Begin)[-1].attempt.candidate == 0


def test_a_new_disk_that_has_joined_carries_the_shard_if_the_survivor_dies() -> None:
    world = World().live()
    assert world.insert("one")
    # Its report that it joined comes only after the survivor is gone.
    world.network = lambda _src, _dst, message: (
        [] if type(message) is Suspect and message.state == "joined" else [HOP]
    )
    world.kill(world.server(0, 0), wiped=True)
    world.until(lambda: world.server(0, 0).state == "joined")
    world.supervised = False
    world.kill(world.server(0, 1))
    world.network = lambda _src, _dst, _message: [HOP]
    world.until(lambda: len(world.decided(Decide)) == 2)
    assert world.decided(Decide)[1].decision.survivor == 0
    world.server(0, 1).restart()
    world.until_live()
    assert world.insert("two")
