"""When a node is started again, and when it is killed first."""

from __future__ import annotations

from ziplog.deploy.restart_policy import (
    BREAK_NS,
    FIRST_GRACE_NS,
    FIRST_PAUSE_NS,
    LAST_GRACE_NS,
    LAST_PAUSE_NS,
    LONG_LIFE_NS,
    PATIENCE_NS,
    START_NS,
    Death,
    Process,
    Revival,
    Start,
)

ASK_NS = BREAK_NS // 2


def dead(started: int = 0) -> dict[str, Process]:
    return {"a": Process(started, is_dead=True)}


def alive(started: int = 0) -> dict[str, Process]:
    return {"a": Process(started, is_dead=False)}


def die(revival: Revival, started: int, now: int) -> int:
    """Let a process that was started at `started` be seen dead at `now`; return its pause."""
    (death,) = revival.look(dead(started), now)
    assert isinstance(death, Death)
    return death.pause_ns


def test_a_dead_node_is_started_once_its_pause_is_over() -> None:
    revival = Revival()
    assert revival.look(alive(), 5) == []
    assert not revival.is_amiss
    assert revival.look(dead(), 10) == [Death("a", FIRST_PAUSE_NS)]
    assert revival.is_amiss
    assert revival.look(dead(), 10 + FIRST_PAUSE_NS - 1) == []
    assert revival.look(dead(), 10 + FIRST_PAUSE_NS) == [Start("a")]
    assert revival.look(alive(10 + FIRST_PAUSE_NS), 11 + FIRST_PAUSE_NS) == []
    assert not revival.is_amiss


def test_a_node_that_somebody_else_started_meanwhile_is_left_alone() -> None:
    revival = Revival()
    die(revival, 0, 10)
    assert revival.look(alive(20), 20) == []
    assert revival.look(alive(20), 10 + FIRST_PAUSE_NS) == []


def test_one_that_keeps_dying_is_started_ever_more_slowly_until_it_lives_long() -> None:
    revival, now, pauses = Revival(), 0, []
    for _ in range(8):
        pauses.append(die(revival, now, now + 1))
        now += 1 + pauses[-1]
        assert revival.look(dead(), now) == [Start("a")]
    assert pauses == [min(FIRST_PAUSE_NS * 2**n, LAST_PAUSE_NS) for n in range(8)]
    assert pauses[-1] == LAST_PAUSE_NS
    now += LONG_LIFE_NS
    assert die(revival, now - LONG_LIFE_NS, now) == FIRST_PAUSE_NS


def test_a_life_that_was_not_long_forgives_nothing() -> None:
    revival = Revival()
    die(revival, 0, LONG_LIFE_NS - 1)
    revival.look(alive(LONG_LIFE_NS), LONG_LIFE_NS)
    assert die(revival, LONG_LIFE_NS, 2 * LONG_LIFE_NS - 1) == 2 * FIRST_PAUSE_NS


def test_a_start_that_failed_is_another_death() -> None:
    revival = Revival()
    pause = die(revival, 0, 0)
    assert revival.look(dead(), pause) == [Start("a")]
    assert revival.look(dead(), pause) == [Death("a", 2 * pause)]


def order(
    revival: Revival, begin: int, end: int, started: int = -START_NS, names: str = "a"
) -> int | None:
    """Name nodes in every answer until one has to go; return when, or None if none had to."""
    for now in range(begin, end + 1, ASK_NS):
        if revival.ordered(names.split(), alive(started), now):
            return now
    return None


def test_a_running_node_that_is_named_without_a_break_is_killed() -> None:
    revival = Revival()
    assert order(revival, 100, 10 * PATIENCE_NS) == 100 + PATIENCE_NS
    assert revival.is_amiss


def test_one_that_was_started_just_before_it_was_named_has_time_to_start() -> None:
    assert order(Revival(), 0, 10 * START_NS, started=0) == START_NS


def test_one_that_was_started_since_gets_more_time_and_more_with_each_kill() -> None:
    revival, graces = Revival(), []
    started = order(revival, 0, 10 * PATIENCE_NS)
    for _ in range(6):
        assert started is not None
        killed = order(revival, started + ASK_NS, started + 2 * LAST_GRACE_NS, started)
        assert killed is not None
        graces.append(killed - started)
        started = killed
    assert graces == [min(FIRST_GRACE_NS * 2**n, LAST_GRACE_NS) for n in range(6)]


def test_an_answer_that_does_not_name_it_clears_it() -> None:
    revival = Revival()
    assert order(revival, 0, PATIENCE_NS - ASK_NS) is None
    assert revival.ordered([], alive(), PATIENCE_NS - ASK_NS) == []
    assert not revival.is_amiss
    assert order(revival, PATIENCE_NS, 10 * PATIENCE_NS) == 2 * PATIENCE_NS


def test_time_without_an_answer_accuses_nobody() -> None:
    revival = Revival()
    assert order(revival, 0, 0) is None
    later = 10 * PATIENCE_NS
    assert order(revival, later, later + 2 * PATIENCE_NS) == later + PATIENCE_NS


def test_a_dead_node_is_not_killed_but_started() -> None:
    revival = Revival()
    for now in range(0, 10 * PATIENCE_NS, ASK_NS):
        assert revival.ordered(["a"], dead(), now) == []
    assert isinstance(revival.look(dead(), 10 * PATIENCE_NS)[0], Death)


def test_nodes_of_other_machines_are_not_ours() -> None:
    assert order(Revival(), 0, 10 * PATIENCE_NS, names="b c") is None
