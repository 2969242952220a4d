"""Several processes of a player: member cursors, shares, deaths, silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.sim.player.targets import Sink, Store
from tests.unit.logplayer.service import PlayerCore
from tests.unit.logplayer.world import PLAYER, Player, World, spec
from ziplog.client.common.requests import ClaimRequest, EditRequest
from ziplog.core.node import Call, Wakeup
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from ziplog.types import Record


def shared(partitions: int = 4, players: int = 2) -> tuple[World, list[Player]]:
    """Return a world with one target and several players, after a while."""
    target = Store("db")
    world = World([target], [spec(target, partitions=partitions, batch_records=5)])
    found = [world.add_player() for _ in range(players)]
    world.fill(60, keys=17)
    world.run(6000)
    return world, found


def members(world: World) -> dict[str, str]:
    return {
        cursor.name: cursor.owner_text
        for cursor in world.service.table.in_order()
        if "/members/" in cursor.name
    }


def check_all_done(world: World) -> None:
    rows: Any = world.targets["db"].rows
    payloads = [record.payload for row in rows.values() for record in row.records]
    assert sorted(payloads) == sorted(record.payload for record in world.log.records.values())


def test_each_process_owns_a_member_cursor_and_its_share() -> None:
    world, players = shared(partitions=5, players=3)
    names = [f"{PLAYER}/members/{n}" for n in range(3)]
    assert sorted(members(world)) == names
    assert sorted(members(world).values()) == [player.owner for player in players]
    assert sorted(len(player.held) for player in players) == [1, 2, 2]
    assert all(player.node.members.names == list(members(world).values()) for player in players)
    check_all_done(world)


def test_a_member_cursor_holds_no_trims() -> None:
    world, _ = shared()
    assert not world.service.get(f"{PLAYER}/members/0").is_holding
    assert world.cursor().is_holding


def test_shares_are_kept_without_moves() -> None:
    world, _ = shared(partitions=7, players=3)
    terms = [cursor.term for cursor in world.service.table.in_order()]
    world.run(30_000)
    assert [cursor.term for cursor in world.service.table.in_order()] == terms


def test_a_further_process_gets_its_share_by_drains() -> None:
    world, [first] = shared(partitions=4, players=1)
    assert len(first.held) == 4
    other = world.add_player()
    world.run(4000)
    assert (len(first.held), len(other.held)) == (2, 2)
    world.fill(20, keys=17)
    world.run(1000)
    check_all_done(world)


def test_no_task_moves_from_a_living_owner_with_a_step_under_way() -> None:
    world, [first] = shared(partitions=2, players=1)
    world.fill(10, keys=9)
    first.hangs = True
    world.run(100)
    other = world.add_player()
    world.run(10_000)
    assert not other.held
    assert "draining" in first.states()
    first.go_on()
    world.run(3000)
    assert (len(first.held), len(other.held)) == (1, 1)
    check_all_done(world)


def test_the_tasks_of_a_dead_process_are_taken_over_after_its_lease() -> None:
    world, [first, second] = shared()
    assert len(second.held) == 2
    first.is_dead = True
    world.fill(20, keys=17)
    world.run(1900)
    assert len(second.held) == 2, "its lease lasts for 3 s since it was heard"
    world.run(4500)
    assert len(second.held) == 4
    assert second.node.members.names == [second.owner]
    check_all_done(world)


def test_the_tasks_of_a_process_that_stops_are_taken_over_before_the_next_list() -> None:
    target = Store("db")
    world = World([target], [spec(target, partitions=6)], lease_ms=30_000)
    first, second, third = (world.add_player() for _ in range(3))
    world.run(35_000)
    assert [len(player.held) for player in world.players] == [2, 2, 2]
    before = [player.node.members.answered_at for player in (second, third)]
    first.stop()
    world.run(400)
    assert [len(player.held) for player in world.players] == [0, 3, 3]
    after = [player.node.members.answered_at for player in (second, third)]
    assert max(after) - min(before) < 10_000_000_000, "the lists were due anyway"


def test_a_process_that_stops_waits_for_its_probe_and_keeps_no_cursor() -> None:
    world, [first, second] = shared()
    second.core.holds_members = True
    world.run(500)
    first.stop()
    call = second.stop()
    world.run(1000)
    assert call not in second.results
    second.core.holds_members = False
    world.run(100)
    assert second.results[call] is None
    assert not any(members(world).values())


def test_lists_go_on_while_a_probe_has_no_answer() -> None:
    world, [first, _second] = shared()
    first.core.holds_members = True
    world.run(5000)
    assert not first.node.members.is_silent(world.now)


def test_a_process_probes_three_others_five_times_a_second() -> None:
    world, players = shared(partitions=6, players=6)
    first = players[4]
    before = len(first.core.requests)
    world.run(2000)
    claims = [one for one in first.core.requests[before:] if isinstance(one, ClaimRequest)]
    assert {one.name for one in claims} == {f"{PLAYER}/members/{slot}" for slot in (5, 0, 1)}
    assert 27 <= len(claims) <= 33


def test_several_dead_processes_are_found_one_after_the_other() -> None:
    world, players = shared(partitions=6, players=4)
    for player in players[:3]:
        player.is_dead = True
    world.run(8000)
    assert len(players[3].held) == 6


def test_a_process_that_stood_still_finds_its_claims_lost() -> None:
    world, [first, second] = shared()
    first.is_paused = True
    world.fill(20, keys=17)
    world.run(8000)
    assert len(second.held) == 4
    first.go_on()
    world.run(6000)
    assert (len(first.held), len(second.held)) == (2, 2)
    world.fill(20, keys=17)
    world.run(1000)
    check_all_done(world)


def test_a_member_cursor_below_the_trim_point_is_claimed_again() -> None:
    world, [first, second] = shared()
    world.service.trim(world.log.tail.gsn)
    first.is_dead = True
    third = world.add_player()
    world.run(12_000)
    assert len(second.held) + len(third.held) == 4
    assert len(members(world)) == 3


def test_an_operator_takes_a_member_cursor() -> None:
    world, players = shared()
    for name in members(world):
        world.service.edit(name, "release")
    world.run(5000)
    assert sorted(members(world).values())[-2:] == [player.owner for player in players]
    assert sorted(len(player.held) for player in players) == [2, 2]


# --- silence of the membership service (A7) ---


def test_a_process_that_is_cut_off_stops_after_a_lease() -> None:
    world, [first, second] = shared()
    first.core.is_isolated = True
    world.run(2000)
    world.fill(20, keys=17)
    world.run(500)
    before = len(first.batches())
    assert first.node.status(0)["is_cut_off"] is False
    world.run(3000)
    world.fill(20, keys=17)
    world.run(3000)
    assert len(first.batches()) - before <= 2
    assert first.node.status(0)["is_cut_off"] is True
    assert sum("membership service" in text for text in first.warnings) == 1
    assert len(second.held) == 4
    first.core.is_isolated = False
    world.run(6000)
    assert (len(first.held), len(second.held)) == (2, 2)
    check_all_done(world)


def test_a_process_that_is_cut_off_opens_no_target() -> None:
    world, [player] = shared(players=1)
    player.fault = lambda *_: "before"
    world.fill(20, keys=17)
    world.run(500)
    player.core.is_isolated = True
    world.run(3500)
    steps = len(player.steps)
    world.run(60_000)
    assert len(player.steps) == steps
    player.fault = lambda *_: None
    player.core.is_isolated = False
    world.run(3000)
    check_all_done(world)


def test_without_a_leader_it_plays_for_a_lease_and_goes_on_with_the_same_terms() -> None:
    world, players = shared()
    terms = {name: world.service.get(name).term for name in players[0].node.tasks}
    world.service.is_down = True
    world.fill(20, keys=17)
    world.run(1000)
    check_all_done(world)
    moved = world.service.get(f"{PLAYER}/db/0").position
    world.run(4000)
    world.fill(20, keys=17)
    world.run(2000)
    rows: Any = world.targets["db"].rows
    assert sum(len(row.records) for row in rows.values()) == 80
    world.service.is_down = False
    for player in players:
        world.service.heard[player.core.client] = world.now  # A new leader.
    world.run(1000)
    check_all_done(world)
    assert {name: world.service.get(name).term for name in terms} == terms
    assert world.service.get(f"{PLAYER}/db/0").position > moved


def test_a_process_begins_while_the_service_is_away() -> None:
    target = Store("db")
    world = World([target])
    world.service.is_down = True
    world.fill(5)
    player = world.add_player()
    world.run(20_000)
    assert player.states() == ["free"]
    world.service.is_down = False
    world.run(4000)
    assert len(world.payloads()) == 5


# --- cursors that do not fit ---


@pytest.mark.parametrize("partitions", [2, 5])
def test_another_number_of_partitions_ends_the_player(partitions: int) -> None:
    world, _ = shared(partitions=3, players=1)
    target = world.targets["db"]
    other_settings = World([target], [spec(target, partitions=partitions)]).settings
    other = world.add_player(other_settings)
    world.run(5000)
    assert other.node.failure is not None
    assert "3 partitions" in str(other.node.failure)
    assert "--at" in str(other.node.failure)
    assert other.halts == [str(other.node.failure)]
    assert not other.held


def test_cursors_that_were_half_created_are_completed() -> None:
    world = World([], [spec(Store("db"), partitions=3)])
    world.targets["db"] = Store("db")
    world.service.edit(f"{PLAYER}/db/2", "create")
    player = world.add_player()
    world.run(2000)
    assert player.node.failure is None
    assert len(player.held) == 3


def test_the_last_cursor_of_a_target_is_created_first() -> None:
    _, [player] = shared(partitions=3, players=1)
    created = [one.name for one in player.core.requests if isinstance(one, EditRequest)]
    assert created == [f"{PLAYER}/db/{n}" for n in (2, 0, 1)]


def test_a_task_that_cannot_be_claimed_keeps_no_other_one_from_it() -> None:
    target = Store("db")
    world = World([target], [spec(target, partitions=2)])
    world.fill(20)
    world.service.edit(f"{PLAYER}/db/0", "create", world.log.tail.gsn)
    world.service.edit(f"{PLAYER}/db/1", "create", 0)
    world.service.trim(world.log.tail.gsn)
    other = PlayerCore(world.service, b"other")
    other.step(Wakeup(), world.now)
    claim = ClaimRequest(
        NEVER, f"{PLAYER}/members/0", RID_GENESIS, "other", 3000, 0, wait=False, reads=False
    )
    other.step(Call(1, claim), world.now)
    player = world.add_player()
    world.run(2500)
    assert player.node.members.names == ["other", player.owner]
    assert player.held == [f"{PLAYER}/db/0"]
    assert "were trimmed" in player.task("db", 1).error


def test_new_cursors_begin_at_the_start_of_the_settings() -> None:
    target = Sink("db")
    world = World([target])
    world.fill(10)
    start = world.log.gsns[4]
    settings = World([target], start=world.log.owner(start)).settings
    world.add_player(settings)
    world.run(2000)
    assert len(world.payloads()) == 6


def test_a_target_that_joins_later_begins_at_the_start() -> None:
    world, [first] = shared(players=1)
    target = world.targets["db"]
    first.stop()
    more = Sink("more")
    world.targets["more"] = more
    settings = World([target, more], [spec(target, partitions=4), spec(more)]).settings
    other = world.add_player(settings)
    world.run(8000)
    assert f"{PLAYER}/more/0" in other.held
    assert len(world.payloads("more")) == 60


def test_processes_change_their_file_one_after_the_other() -> None:
    """Records come all the time; the changed file has other options and one more target."""
    world, [first, second] = shared()
    db, more = world.targets["db"], Store("more")
    world.targets["more"] = more
    changed = World(
        [db, more], [spec(db, partitions=4, batch_records=2), spec(more, batch_records=3)],
        lease_ms=5_000, commit_ms=70,
    ).settings  # fmt: skip
    for former in (first, second):
        world.fill(20, keys=17)
        call = former.stop()
        while call not in former.results:
            world.fill(1, keys=17)
            world.run(1)
        assert former.results[call] is None
        newer = world.add_player(changed)
        for _ in range(300):
            world.fill(1, keys=17)
            world.run(10)
        tasks = [f"{PLAYER}/db/{n}" for n in range(4)]
        assert all(world.service.get(name).owner for name in tasks), "a task has no owner"
        assert f"{PLAYER}/more/0" in newer.held or former is second
    world.run(6_000)
    check_all_done(world)
    rows: Any = more.rows[0].records
    records = world.log.records
    assert [one.payload for one in rows] == [records[gsn].payload for gsn in sorted(records)]


def test_a_changed_map_counts_from_the_position_of_a_pause_on() -> None:
    world, [first, second] = shared(partitions=2)
    at = max(world.log.gsns) + 1
    for partition in range(2):
        world.edit("pause", at, partition=partition)
    world.fill(40, keys=17)
    world.run(2000)
    assert {world.cursor("db", n).position for n in range(2)} == {at}

    def new(record: Record) -> Record:
        return replace(record, payload=b"new " + record.payload)

    changed = World([], [spec(world.targets["db"], partitions=2, map=new)]).settings
    for former in (first, second):
        former.stop()
        world.add_player(changed)
        world.run(3000)
    for partition in range(2):
        world.edit("resume", partition=partition)
    world.run(3000)
    rows: Any = world.targets["db"].rows
    found = {one.rid.gsn: one.payload for row in rows.values() for one in row.records}
    assert found == {
        gsn: one.payload if gsn < at else b"new " + one.payload
        for gsn, one in world.log.records.items()
    }


def test_a_round_that_fails_is_logged_once_until_one_succeeds() -> None:
    world, [player] = shared(partitions=1, players=1)
    warnings = player.warnings
    for outage in (1, 2):
        world.service.is_down = True
        world.run(15_000)
        assert player.node.members.error == "silence"
        found = [text for text in warnings if "cannot share the tasks" in text]
        assert len(found) == outage
        assert found[-1].endswith("silence")
        world.service.is_down = False
        world.run(6000)
        assert not player.node.members.error
