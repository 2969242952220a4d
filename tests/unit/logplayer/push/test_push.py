"""Push as a whole: players and a receiver over a channel that loses, doubles and reorders."""

from __future__ import annotations

from typing import Any

import pytest

from logplayer.contract import Retry
from logplayer.push.messages import PushBatch, PushQuery, PushWorking
from tests.properties import seeds
from tests.sim.player.targets import Sink, Store, is_odd
from tests.unit.logplayer.push_world import PushWorld, behind, push_spec

#: Time in which everything is delivered, in ms.
_SETTLE_MS = 120_000


def insert(world: PushWorld, count: int = 1) -> None:
    """Insert records of new payloads."""
    for _ in range(count):
        payload = b"%d" % len(world.inserted)
        (gsn,) = world.insert(payload)
        world.inserted[gsn] = payload


def inserted(world: PushWorld) -> list[bytes]:
    """Return all payloads in the log's order."""
    return [payload for _, payload in sorted(world.inserted.items())]


def run_until(world: PushWorld, count: int, target: str = "db") -> None:
    for _ in range(_SETTLE_MS // 1000):
        rows = world.targets[target].rows
        if rows and len(world.payloads(target)) >= count:
            return
        world.run(1000)


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_a_store_gets_each_record_once_over_a_bad_channel(seed: int) -> None:
    """No step is refused: the receiver passes none on that is old, repeated or out of order."""
    world = PushWorld(Store("db"), seed=seed, loss=0.2, double=0.3, delay_ms=600)
    player = world.add_push_player()
    for _ in range(12):
        insert(world)
        world.run(world.random.randrange(1500))
    expected = inserted(world)
    run_until(world, len(expected))
    assert world.payloads() == expected
    assert not [text for text in player.warnings if "refuses" in text]


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_a_bad_channel_repeats_no_effect(seed: int) -> None:
    """The target stores no position, so it would take a repetition."""
    world = PushWorld(Sink("db"), seed=seed, loss=0.2, double=0.4, delay_ms=600)
    world.add_push_player()
    for _ in range(12):
        insert(world)
        world.run(world.random.randrange(1500))
    expected = inserted(world)
    run_until(world, len(expected))
    world.run(5000)
    assert world.payloads() == expected


@pytest.mark.parametrize("seed", seeds(6, 80))
def test_a_store_gets_each_record_once_although_all_processes_die(seed: int) -> None:
    world = PushWorld(Store("db"), seed=seed, loss=0.1, double=0.1, delay_ms=100)
    random = world.random
    world.receiver.fault = lambda _kind, _argument: (
        random.choice(("before", "after", "late")) if random.random() < 0.1 else None
    )
    players = [world.add_push_player(), world.add_push_player()]
    for _ in range(12):
        insert(world, 2)
        world.run(random.randrange(2500))
        match random.randrange(5):
            case 0 | 1:
                world.receiver.kill(random.randrange(1, 3000))
            case 2:
                random.choice(players).is_dead = True
                players.append(world.add_push_player())
            case 3:
                paused = random.choice(players)
                paused.is_paused = True
                world.after(random.randrange(10_000), paused.go_on)
    world.receiver.fault = lambda _kind, _argument: None
    expected = inserted(world)
    run_until(world, len(expected))
    assert world.payloads() == expected


def test_a_receiver_that_restarts_is_opened_again() -> None:
    world = PushWorld(Store("db"))
    player = world.add_push_player()
    world.insert(b"a")
    run_until(world, 1)
    world.receiver.kill()
    world.insert(b"b")
    run_until(world, 2)
    assert world.payloads() == [b"a", b"b"]
    assert player.task().retries == 1
    assert player.held


def test_a_target_without_position_is_opened_again_before_the_next_batch() -> None:
    world = PushWorld(Sink("db"))
    world.add_push_player()
    world.insert(b"a")
    run_until(world, 1)
    world.receiver.kill()
    world.insert(b"b")
    run_until(world, 2)
    assert world.payloads() == [b"a", b"b"]


def test_a_batch_is_sent_once_and_then_asked_for() -> None:
    world = PushWorld(Store("db"), step_ms=1)
    world.add_push_player()
    world.run(1000)
    world.step_ms = 8000
    world.insert(b"a")
    run_until(world, 1)
    sent = [type(one) for one in world.sent]
    assert sent.count(PushBatch) == 1
    assert sent.count(PushQuery) > 1
    assert sent.count(PushWorking) == sent.count(PushQuery)


def test_a_silent_receiver_is_an_error_of_its_tasks_alone() -> None:
    world = PushWorld(Store("db"))
    player = world.add_push_player()
    world.run(500)
    world.receiver.is_up = False
    world.insert(b"a")
    world.run(11_000)
    assert "no reply from the receiver at 127.0.0.1:7600 for 10 s" in player.task().error
    world.receiver.is_up = True
    run_until(world, 1)
    assert world.payloads() == [b"a"]
    assert player.task().error == ""


@pytest.mark.parametrize("names", [True, False])
def test_rejected_records_are_kept_by_the_target_of_the_receiver(*, names: bool) -> None:
    target: Any = Store("db")
    target.rejects = lambda record: "it is odd" if is_odd(record) else ""
    target.names_rejected = names
    world = PushWorld(target, player=push_spec(target, rejected="dead-letter", batch_records=4))
    world.add_push_player()
    world.fill(40)
    world.run(60_000)
    rejected = [one.record.payload for one in target.rows[0].rejected]
    assert rejected
    assert {one.why for one in target.rows[0].rejected} == {"it is odd"}
    assert sorted(rejected + world.payloads()) == sorted(b"%d" % number for number in range(40))


def test_the_pause_that_a_target_asks_for_reaches_the_player() -> None:
    world = PushWorld(Store("db"))
    player = world.add_push_player()
    world.run(500)
    world.receiver.fault = lambda kind, _argument: (
        Retry("busy", after_s=7.0) if kind == "deliver" else None
    )
    world.insert(b"a")
    world.run(500)
    assert player.task().error == "Retry: busy"
    world.receiver.fault = lambda _kind, _argument: None
    world.run(6000)
    assert world.payloads() == []
    run_until(world, 1)
    assert world.payloads() == [b"a"]


@pytest.mark.parametrize(
    ("player", "receiver", "text"),
    [
        ({}, {"partitions": 2}, "partitions = 2"),
        ({"stores_position": False}, {}, "stores positions"),
        ({"rejected": "dead-letter"}, {"keeps_rejected": False}, "keeps no rejected records"),
        ({}, {"name": "other"}, "the target 'other', not 'db'"),
    ],
)
def test_a_receiver_for_another_target_fails_the_task(
    player: dict[str, Any], receiver: dict[str, Any], text: str
) -> None:
    import msgspec  # noqa: PLC0415

    target = Store("db")
    world = PushWorld(
        target,
        player=msgspec.structs.replace(push_spec(target), **player),
        receiver=msgspec.structs.replace(behind(target), **receiver),
    )
    process = world.add_push_player()
    world.run(2000)
    assert process.states() == ["failed"]
    assert text in process.task().error
