"""Candidate selection among servers in limbo, some of them with damaged logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from failure_handler.candidate_selection import Candidate, hides_damage, longest, unheard_by_enough
from failure_handler.members import Member
from failure_handler.state import Begin
from tests.services import MS, S
from tests.unit.failure_handler.world import World, config
from ziplog.wire import Suspect

if TYPE_CHECKING:
    from tests.unit.failure_handler.servers import FakeServer


def candidate(index: int, last: int, last_view: int = 1, *, is_damaged: bool = False) -> Candidate:
    report = Suspect(
        1, f"shard-0-{index}", 0, 0, index, 7, "limbo", [], last, last_view, 0, "id", is_damaged
    )
    return Candidate(Member(report.node, index), report)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate(0, 9, is_damaged=True), candidate(1, 10)], 1),
        ([candidate(0, 9, is_damaged=True), candidate(1, 9)], 1),
        ([candidate(0, 9), candidate(1, 9)], 0),
        ([candidate(0, 9, is_damaged=True), candidate(1, 9, is_damaged=True)], 0),
        # Its readable part is longer than the other log, and is not dropped.
        ([candidate(0, 9, is_damaged=True), candidate(1, 8)], 0),
        ([candidate(0, 9, 2, is_damaged=True), candidate(1, 10, 1)], 0),
    ],
)
def test_the_longest_log_that_can_be_read_counts(candidates: list[Candidate], chosen: int) -> None:
    found = longest(candidates)
    assert found is not None
    assert found.member.index == chosen


def test_damage_does_not_lose_confirmed_entries() -> None:
    """Without damage, a log that ends before the confirmed view is all that remains."""
    old, new = candidate(0, 9, 1), candidate(1, 20, 3)
    damaged = candidate(1, 8, 1, is_damaged=True)
    assert hides_damage(old, [old, damaged], 3)
    assert not hides_damage(old, [old, damaged], 1)
    assert not hides_damage(old, [old], 3)
    assert not hides_damage(new, [old, new, damaged], 3)
    joined = damaged._replace(report=replace(damaged.report, state="joined"))
    assert not hides_damage(old, [old, joined], 3), "its log does not end before the damage"


@pytest.mark.parametrize(
    ("suspects", "copies", "unheard"),
    [
        ({0: [], 1: [], 2: []}, 2, []),
        ({0: [1, 2], 1: [0], 2: [0]}, 2, [0]),
        ({0: [1, 2], 1: [0]}, 2, [0, 1]),  # nothing is known of server 2
        ({0: [1, 2]}, 2, [0, 1, 2]),
        ({0: [1, 2]}, 1, []),
        ({0: [], 1: [2], 2: [1]}, 3, [1, 2]),
    ],
)
def test_a_view_needs_servers_that_hear_its_survivor(
    suspects: dict[int, list[int]], copies: int, unheard: list[int]
) -> None:
    members = [Member(f"shard-0-{index}", index) for index in range(3)]
    for index, suspected in suspects.items():
        report = replace(candidate(index, 9).report, suspects=suspected)
        members[index].suspect, members[index].heard_at = report, 5 * S
    assert unheard_by_enough(members, copies, 5 * S) == unheard
    expected = list(range(3)) if copies > 1 else []
    assert unheard_by_enough(members, copies, 9 * S) == expected, "these reports are too old"


def claim(server: FakeServer, last: int, last_view: int = 1) -> None:
    """Have a server in limbo report this many entries."""
    world = server.world
    send = world.send_handler

    def send_claim(sender: FakeServer, handler: str, message: object) -> None:
        if isinstance(message, Suspect) and message.state == "limbo" and sender is server:
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            fields |= {"last": last, "last_view": last_view, "is_damaged": True}
            message = Suspect(**fields)
        send(sender, handler, message)  # type: ignore[arg-type]

    world.send_handler = send_claim  # type: ignore[method-assign, assignment]


def test_a_server_that_reports_damage_is_not_chosen_again() -> None:
    world = World(config(durability="disk")).live()
    assert world.insert("one")
    first = world.server(0, 0)
    claim(first, 0)
    world.kill(*world.servers)
    world.until_live(view=2)
    assert [begin.attempt.candidate for begin in world.decided(Begin)] == [1]


def test_a_shard_with_an_unreadable_confirmed_view_waits() -> None:
    world = World(config(durability="disk")).live()
    assert world.insert("one")
    world.kill(world.server(0, 1))
    world.until_live(view=2)
    world.run(1 * S)
    begun = len(world.decided(Begin))
    for index in (0, 1):
        claim(world.server(0, index), 1)
    world.kill(*world.servers)
    world.run(20 * S + 100 * MS)
    assert len(world.decided(Begin)) == begun
    texts = [text for text in world.warnings if "all readable logs end before it" in text]
    assert len(texts) == 1
