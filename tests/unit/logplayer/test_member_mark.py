"""The mark of a member cursor: which tasks its process has, and which of them have failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer.cli.task_positions import _Lag, document
from logplayer.contract import Rejected
from logplayer.member_mark import decode_mark, encode_mark, hash_of_tasks
from tests.properties import examples
from tests.sim.player.targets import Sink
from tests.unit.logplayer.test_members import shared
from tests.unit.logplayer.world import World
from ziplog.client.cursors.edits import _info
from ziplog.core.cursors import MAX_MARK_BYTES

if TYPE_CHECKING:
    from tests.unit.logplayer.world import Player


@examples(60)
@given(st.sets(st.integers(1, 2**62), max_size=300))
def test_a_mark_has_as_many_terms_as_fit(terms: set[int]) -> None:
    tasks = hash_of_tasks(["orders/db/0"])
    mark = encode_mark(tasks, terms)
    assert len(mark) <= MAX_MARK_BYTES
    found = decode_mark(mark)
    assert found.tasks == tasks
    assert sorted(found.failed) == sorted(terms)[: len(found.failed)]
    assert len(found.failed) >= min(len(terms), 50)


@pytest.mark.parametrize("mark", [b"", b"text", b"\xc0", b"\x91\xa1a", b"\x92\xc4\x00\xa0"])
def test_a_mark_of_another_form_says_nothing(mark: bytes) -> None:
    assert decode_mark(mark) == (b"", frozenset())


def listed(world: World) -> dict[int, str]:
    """Return the states of the tasks as `ziplog player status` prints them."""
    cursors = [_info(cursor, 0) for cursor in world.service.table.in_order()]
    log: Any = SimpleNamespace(cursors=lambda _pattern, timeout: cursors if timeout else [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logplayer.cli.task_positions._lag", lambda *_: _Lag(0.0, 0))
        tasks = document(log, "orders", None, 1.0, pytest.fail)["tasks"]
    return {one["partition"]: one["state"] for one in tasks}


def seen_by(player: Player) -> dict[int, str]:
    """Return the states of the tasks in the status of a process."""
    tasks = player.node.status(0)["tasks"]
    return {one["partition"]: one["state"] for one in tasks}


def test_other_processes_see_that_a_task_has_failed_and_goes_on() -> None:
    world, [first, second] = shared(partitions=4)
    first.fault = lambda kind, _batch: Rejected(0, "too odd") if kind == "deliver" else None
    world.fill(40, keys=17)
    world.run(1000)
    mine = {task.partition for task in first.node.tasks.values() if task.claim.state is not None}
    failed = {partition for partition, state in seen_by(second).items() if state == "failed"}
    assert failed == mine
    assert {n for n, state in listed(world).items() if state == "failed"} == mine
    assert {n for n, state in listed(world).items() if state == "owned"} == {0, 1, 2, 3} - mine
    first.fault = lambda *_: None
    for partition in mine:
        world.edit("resume", partition=partition)
    world.run(3000)
    assert set(listed(world).values()) == {"owned"}
    assert "failed" not in seen_by(second).values()


def test_the_failures_of_a_former_claim_do_not_count() -> None:
    world, [first, second] = shared(partitions=2)
    first.fault = lambda kind, _batch: Rejected(0, "too odd") if kind == "deliver" else None
    world.fill(20, keys=17)
    world.run(1000)
    assert "failed" in listed(world).values()
    first.is_dead = True
    world.run(500)
    assert "failed" in listed(world).values(), "it is owned until the lease is over"
    world.run(10_000)
    assert set(listed(world).values()) == {"owned"}
    assert "failed" not in seen_by(second).values()


def test_processes_with_other_targets_count_for_no_share() -> None:
    world, [first] = shared(partitions=3, players=1)
    sink = Sink("sink")
    world.targets["sink"] = sink
    other = world.add_player(World([sink]).settings)
    world.run(10_000)
    assert len(first.held) == 3
    assert other.held == ["orders/sink/0"]
    same = world.add_player()
    world.run(10_000)
    assert sorted([len(first.held), len(same.held)]) == [1, 2]
    assert other.held == ["orders/sink/0"]
