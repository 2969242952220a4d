"""Whole recoveries in virtual time, with real failure handlers and a real membership service."""

import random
from collections.abc import Callable

import pytest

from failure_handler.state import Begin, Decide, Finish
from tests.failure_handler.world import COMMIT, FLUSH, HOP, MS, FakeServer, S, World, config, storm
from ziplog.view import fingerprint
from ziplog.wire import (
    Freeze,
    Frozen,
    LeaseAnnounced,
    Message,
    Reinserted,
    Removed,
    Suspect,
    ViewDecided,
)

#: How far a recovery to view 2 is, as the test sees it.
PHASES: dict[str, Callable[[World], bool]] = {
    "suspected": lambda world: bool(world.messages(Suspect)),
    "begun": lambda world: bool(world.commands),
    "removed": lambda world: world.mms.state.placements[0].state == "recovering",
    "asked": lambda world: bool(world.messages(Freeze)),
    "frozen": lambda world: any(server.state == "frozen" for server in world.servers),
    "promised": lambda world: bool(world.messages(Frozen)),
    "decided": lambda world: world.consensus.shards[0].view >= 2 if world.commands else False,
    "entered": lambda world: any(server.state == "joined" for server in world.servers),
    "joined": lambda world: all(server.state == "joined" for server in world.servers),
    "returned": lambda world: world.mms.state.placements[0].view >= 2,
    "finished": lambda world: bool(world.decided(Finish)),
}


def reach(world: World, phase: str, limit: int = 60 * S) -> None:
    world.until(lambda: PHASES[phase](world), limit)


def survivor(world: World) -> FakeServer:
    return world.server(0, world.consensus.shards[0].attempt.candidate)


# --- the plain course ------------------------------------------------------------------------


@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_whose_server_died_comes_back(f: int, index: int) -> None:
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


def test_other_shards_go_on() -> None:
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


def test_of_two_that_suspect_each_other_the_primary_goes_on() -> None:
    world = World().live()
    # The backup's word comes first, and it does not say that the primary is dead for sure.
    first, second = world.server(0, 1), world.server(0, 0)
    first.accuses, second.accuses = {0}, {1}
    world.network = lambda src, _dst, message: (
        [20 * MS] if type(message) is Suspect and src == second.name else [HOP]
    )
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 1  # it says that the primary is dead
    first.accuses, second.accuses = set(), set()
    world.until_live(view=2)

    world = World(config(f=2)).live()
    world.server(0, 1).accuses, world.server(0, 0).accuses = {2}, {1, 2}
    world.network = lambda src, _dst, message: (
        [50 * MS] if type(message) is Suspect and src == "shard-0-0" else [HOP]
    )
    for index in (1, 0):
        world.server(0, index).say()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 0  # it was waited for
    for server in world.servers:
        server.accuses = set()
    world.until_live(view=2)
    assert len(world.decided(Decide)) == 1


def test_a_primary_that_is_not_heard_is_not_waited_for_long() -> None:
    world = World(config(f=2)).live()
    world.network = lambda src, _dst, message: (
        [] if type(message) is Suspect and src == "shard-0-0" else [HOP]
    )
    world.server(0, 1).accuses = {2}
    reach(world, "suspected")
    start = world.now
    reach(world, "begun", S)
    assert 100 * MS <= world.now - start <= 200 * MS
    assert world.decided(Begin)[0].attempt.candidate == 1


def test_without_the_primary_the_one_that_holds_most_goes_on() -> None:
    world = World(config(f=2)).live()
    world.insert("one", but=1)
    world.insert("two", but=1)
    world.kill(world.server(0, 0))
    # Both are heard before the first attempt can begin.
    world.server(0, 1).beats[0] = world.server(0, 2).beats[0] = world.now - S
    for server in (world.server(0, 2), world.server(0, 1)):
        server.say()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 2


def test_the_primary_goes_on_even_if_another_one_holds_more() -> None:
    world = World(config(f=2)).live()
    world.insert("one", but=0)
    world.server(0, 1).beats[2] = world.server(0, 0).beats[2] = world.now - S
    for index in (1, 0):
        world.server(0, index).say()
    reach(world, "begun")
    assert world.decided(Begin)[0].attempt.candidate == 0


def test_a_witness_of_a_view_that_is_over_does_not_keep_the_others_waiting() -> None:
    world = World().live()
    assert world.insert("one")
    survivor, witness = world.server(0, 1), world.server(0, 0)
    survivor.accuses = {0}
    world.until(lambda: witness.state == "frozen")
    survivor.accuses = set()
    world.kill(survivor)  # before the witness has anything from it
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


# --- all in limbo ------------------------------------------------------------------------------


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


def test_what_was_lost_is_reported() -> None:
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


def test_as_long_as_one_is_missing_nobody_is_chosen_from_limbo() -> None:
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(*world.servers)
    world.server(0, 0).restart()
    world.server(0, 2).restart()
    world.run(10 * S)
    assert world.commands == []
    world.server(0, 1).restart()
    world.until_live(view=2)


def test_a_late_word_of_an_older_view_does_not_pass_for_limbo() -> None:
    """Else whoever crashed leads, at level memory without what the other one holds."""
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
    # It has filled its log up to the limit, and dies before anybody hears of it.
    world.sent.clear()
    world.network = lambda _src, _dst, message: [] if type(message) is Frozen else [HOP]
    world.run(2 * HOP)
    world.kill(*world.servers)
    world.run(RESTARTED)
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live()
    assert [loss.start for loss in world.mms.state.losses] == [2]


RESTARTED = 600 * MS


def test_a_server_without_its_data_directory_is_never_chosen() -> None:
    world = World().live()
    assert world.insert("one")
    old = [server.identity for server in world.servers]
    world.supervised = False
    world.kill(*world.servers)
    world.run(6 * S)  # until nobody is heard
    for server in world.servers:
        server.restart(wiped=True)
    world.run(10 * S)
    assert world.commands == []
    warned = [text for text in world.warnings if "cannot be recovered" in text]
    assert len(warned) == 1
    assert "data directory" in warned[0]
    # One is put back.
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
    # It counts from now on: it is the one that survives.
    world.kill(world.server(0, 1))
    world.until_live(view=3)
    assert world.decided(Begin)[-1].attempt.candidate == 0


def test_a_new_disk_that_has_joined_carries_the_shard_if_the_survivor_dies() -> None:
    world = World().live()
    assert world.insert("one")
    # That it has joined is not heard before the survivor is gone.
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


# --- everything may die, at any time -----------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("f", [1, 2])
def test_the_survivor_dies(phase: str, f: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.kill(world.server(0, f))
    reach(world, phase)
    world.kill(survivor(world) if world.commands else world.server(0, 0))
    world.run(S)
    world.until_live()
    assert world.insert("two")
    world.run(10 * S)
    assert world.is_live()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("f", [1, 2])
def test_everybody_dies(phase: str, f: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    world.kill(*world.servers)
    world.run(S)
    world.until_live()
    assert world.insert("two")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("handlers", [1, 3])
def test_another_leader_goes_on(phase: str, handlers: int) -> None:
    world = World(config(handlers=handlers)).live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    before = len(world.decided(Begin))
    world.fail_over()
    world.until_live(limit=10 * S)
    assert world.insert("two")
    # It goes on with the attempt that it found.
    assert len(world.decided(Begin)) == max(before, 1)
    world.run(5 * S)
    assert len(world.decided(Finish)) == 1
    assert world.orders() == []


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("copies", [[HOP, HOP, 5 * MS, S], [350 * MS], [90 * MS, 2 * S]])
def test_messages_that_come_late_and_twice_change_nothing(phase: str, copies: list[int]) -> None:
    world = World().live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    world.network = lambda _src, _dst, _message: copies
    world.until_live(limit=30 * S)
    world.network = lambda _src, _dst, _message: [HOP]
    world.run(5 * S)
    world.until_live(limit=30 * S)
    assert world.insert("two")


@pytest.mark.parametrize(
    "kind", ["Suspect", "Remove", "Removed", "Freeze", "Frozen", "ViewDecided", "Reinsert",
             "Reinserted", "LeaseAnnounced"],
)  # fmt: skip
def test_the_first_message_of_each_kind_is_lost(kind: str) -> None:
    world = World().live()
    assert world.insert("one")
    lost: list[Message] = []

    def network(_src: str, _dst: str, message: Message) -> list[int]:
        if type(message).__name__ == kind and len(lost) < 3:
            lost.append(message)
            return []
        return [HOP]

    world.kill(world.server(0, 1))
    world.network = network
    world.until_live(view=2, limit=10 * S)
    assert lost
    assert len(world.decided(Begin)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_a_storm_of_everything(seed: int) -> None:
    generator = random.Random(seed)
    world = World(config(shards=2, f=generator.choice([0, 1, 2]), handlers=3)).live()
    world.network = storm(seed)
    for number in range(12):
        world.insert(f"{number}", flush=generator.random() < 0.8)
        choice = generator.random()
        if choice < 0.5:
            server = generator.choice(world.servers)
            # More than f must not lose their disks.
            may_be_wiped = world.config.f > 0 and world.is_live(server.shard)
            world.kill(server, wiped=may_be_wiped and generator.random() < 0.2)
        elif choice < 0.7:
            world.fail_over()
        elif choice < 0.8:
            generator.choice(world.servers).accuses = {0}
        world.run(generator.randrange(2 * S))
    world.network = lambda _src, _dst, _message: [HOP]
    for server in world.servers:
        server.accuses.clear()
    world.run(3 * S)
    for shard in range(2):
        world.until_live(shard, limit=120 * S)


def test_a_joined_server_that_missed_the_start_of_its_view_is_not_forgotten() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    reach(world, "joined")
    waits = world.server(0, 1).name
    world.network = lambda _src, dst, message: (
        [] if type(message) is LeaseAnnounced and dst == waits else [HOP]
    )
    reach(world, "finished")
    world.supervised = False
    world.kill(world.server(0, 0))
    # Its announcement does not come any more: it stays as it is, and suspects the other one.
    world.until(lambda: len(world.decided(Begin)) == 2, 10 * S)
    assert world.server(0, 1).state == "joined"
    world.network = lambda _src, _dst, _message: [HOP]
    world.server(0, 0).restart()
    world.until_live(limit=10 * S)


def test_a_shard_that_is_out_of_service_is_heard_though_all_its_servers_are_fine() -> None:
    world = World(config(shards=2)).live()
    server = world.server(0, 0)
    # One word of doubt, which is taken back; then the handler forgets the way to the server.
    server.accuses = {1}
    reach(world, "begun")
    server.accuses = set()
    world.network = lambda _src, _dst, message: [] if type(message) is Freeze else [HOP]
    world.run(S)
    world.fail_over()
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live(limit=5 * S)
    last = world.mms.state.last
    assert last is not None
    assert [member.shard for member in last.members] == [0, 1]


# --- who is to be started again ----------------------------------------------------------------


def test_only_those_that_a_recovery_waits_for_are_ordered() -> None:
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


def test_nobody_is_ordered_while_the_shard_returns() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    reach(world, "joined")
    # The answer does not come: the servers are up and silent, and nothing is finished.
    world.network = lambda _src, _dst, message: [] if type(message) is Reinserted else [HOP]
    world.until(lambda: all(server.state == "up" for server in world.servers))
    for _ in range(20):
        assert world.orders() == []
        world.run(50 * MS)
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live(view=2, limit=3 * S)


def test_a_new_leader_that_finds_everything_up_orders_nobody_for_long() -> None:
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
    """The failure handler loses its data directory."""
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
    # When all have lost their views, nothing has to be guessed.
    world.network = lambda _src, _dst, _message: [HOP]
    world.kill(*world.servers)
    for server in world.servers:
        server.restart()
    world.until_live()
