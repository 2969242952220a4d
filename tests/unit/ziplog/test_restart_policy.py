"""The restart policy: when a node is restarted, and when it is killed first."""

from __future__ import annotations

from ziplog.deploy.restart_policy import (
    FIRST_GRACE_NS,
    FIRST_PAUSE_NS,
    MAX_GAP_NS,
    MAX_GRACE_NS,
    MAX_PAUSE_NS,
    MIN_START_NS,
    STABLE_NS,
    UNREACHABLE_NS,
    Death,
    Process,
    RestartPolicy,
    Start,
)

ASK_NS = MAX_GAP_NS // 2


def dead(started: int = 0) -> dict[str, Process]:
    return {"a": Process(started, is_dead=True)}


def alive(started: int = 0) -> dict[str, Process]:
    return {"a": Process(started, is_dead=False)}


def die(policy: RestartPolicy, started: int, now: int) -> int:
    """Report a process, started at `started`, as dead at `now`; return its pause."""
    (death,) = policy.check_processes(dead(started), now)
    assert isinstance(death, Death)
    return death.pause_ns


def test_a_dead_node_is_started_once_its_pause_is_over() -> None:
    policy = RestartPolicy()
    assert policy.check_processes(alive(), 5) == []
    assert not policy.has_failures
    assert policy.check_processes(dead(), 10) == [Death("a", FIRST_PAUSE_NS)]
    assert policy.has_failures
    assert policy.check_processes(dead(), 10 + FIRST_PAUSE_NS - 1) == []
    assert policy.check_processes(dead(), 10 + FIRST_PAUSE_NS) == [Start("a")]
    assert policy.check_processes(alive(10 + FIRST_PAUSE_NS), 11 + FIRST_PAUSE_NS) == []
    assert not policy.has_failures


def test_a_node_that_was_started_meanwhile_is_left_alone() -> None:
    policy = RestartPolicy()
    die(policy, 0, 10)
    assert policy.check_processes(alive(20), 20) == []
    assert policy.check_processes(alive(20), 10 + FIRST_PAUSE_NS) == []


def test_one_that_keeps_dying_is_started_ever_more_slowly_until_it_lives_long() -> None:
    policy, now, pauses = RestartPolicy(), 0, []
    for _ in range(8):
        pauses.append(die(policy, now, now + 1))
        now += 1 + pauses[-1]
        assert policy.check_processes(dead(), now) == [Start("a")]
    assert pauses == [min(FIRST_PAUSE_NS * 2**n, MAX_PAUSE_NS) for n in range(8)]
    assert pauses[-1] == MAX_PAUSE_NS
    now += STABLE_NS
    assert die(policy, now - STABLE_NS, now) == FIRST_PAUSE_NS


def test_a_short_life_does_not_reset_the_pause() -> None:
    policy = RestartPolicy()
    die(policy, 0, STABLE_NS - 1)
    policy.check_processes(alive(STABLE_NS), STABLE_NS)
    assert die(policy, STABLE_NS, 2 * STABLE_NS - 1) == 2 * FIRST_PAUSE_NS


def test_a_start_that_failed_is_another_death() -> None:
    policy = RestartPolicy()
    pause = die(policy, 0, 0)
    assert policy.check_processes(dead(), pause) == [Start("a")]
    assert policy.check_processes(dead(), pause) == [Death("a", 2 * pause)]


def order(
    policy: RestartPolicy, begin: int, end: int, started: int = -MIN_START_NS, names: str = "a"
) -> int | None:
    """Report nodes as unreachable until one is to be killed; return when, or None."""
    for now in range(begin, end + 1, ASK_NS):
        if policy.on_unreachable(names.split(), alive(started), now):
            return now
    return None


def test_a_running_node_that_is_named_without_a_break_is_killed() -> None:
    policy = RestartPolicy()
    assert order(policy, 100, 10 * UNREACHABLE_NS) == 100 + UNREACHABLE_NS
    assert policy.has_failures


def test_one_that_was_started_just_before_it_was_named_has_time_to_start() -> None:
    assert order(RestartPolicy(), 0, 10 * MIN_START_NS, started=0) == MIN_START_NS


def test_one_that_was_started_since_gets_more_time_and_more_with_each_kill() -> None:
    policy, graces = RestartPolicy(), []
    started = order(policy, 0, 10 * UNREACHABLE_NS)
    for _ in range(6):
        assert started is not None
        killed = order(policy, started + ASK_NS, started + 2 * MAX_GRACE_NS, started)
        assert killed is not None
        graces.append(killed - started)
        started = killed
    assert graces == [min(FIRST_GRACE_NS * 2**n, MAX_GRACE_NS) for n in range(6)]


def test_one_that_a_kill_has_not_ended_is_killed_again_as_late_as_a_new_one() -> None:
    policy = RestartPolicy()
    killed = order(policy, 0, 10 * UNREACHABLE_NS)
    assert killed is not None
    again = order(policy, killed + ASK_NS, killed + 2 * FIRST_GRACE_NS)
    assert again == killed + FIRST_GRACE_NS


def test_one_that_is_reachable_for_a_moment_after_each_kill_gets_more_time_too() -> None:
    policy, graces = RestartPolicy(), []
    started = order(policy, 0, 10 * UNREACHABLE_NS)
    for _ in range(6):
        assert started is not None
        assert policy.on_unreachable([], alive(started), started + ASK_NS) == []
        killed = order(policy, started + 2 * ASK_NS, started + 2 * MAX_GRACE_NS, started)
        assert killed is not None
        graces.append(killed - started)
        started = killed
    assert graces == [min(FIRST_GRACE_NS * 2**n, MAX_GRACE_NS) for n in range(6)]


def test_kills_before_a_long_time_without_a_report_do_not_count() -> None:
    policy = RestartPolicy()
    started = order(policy, 0, 10 * UNREACHABLE_NS)
    assert started is not None
    for now in range(started + ASK_NS, started + STABLE_NS + 1, ASK_NS):
        assert policy.on_unreachable([], alive(started), now) == []
    later = started + STABLE_NS + ASK_NS
    assert order(policy, later, later + MAX_GRACE_NS, started) == later + UNREACHABLE_NS


def test_an_answer_that_does_not_name_it_clears_it() -> None:
    policy = RestartPolicy()
    assert order(policy, 0, UNREACHABLE_NS - ASK_NS) is None
    assert policy.on_unreachable([], alive(), UNREACHABLE_NS - ASK_NS) == []
    assert not policy.has_failures
    assert order(policy, UNREACHABLE_NS, 10 * UNREACHABLE_NS) == 2 * UNREACHABLE_NS


def test_time_without_a_reply_does_not_count_against_a_node() -> None:
    policy = RestartPolicy()
    assert order(policy, 0, 0) is None
    later = 10 * UNREACHABLE_NS
    assert order(policy, later, later + 2 * UNREACHABLE_NS) == later + UNREACHABLE_NS


def test_a_dead_node_is_not_killed_but_started() -> None:
    policy = RestartPolicy()
    for now in range(0, 10 * UNREACHABLE_NS, ASK_NS):
        assert policy.on_unreachable(["a"], dead(), now) == []
    assert isinstance(policy.check_processes(dead(), 10 * UNREACHABLE_NS)[0], Death)


def test_nodes_of_other_machines_are_not_ours() -> None:
    assert order(RestartPolicy(), 0, 10 * UNREACHABLE_NS, names="b c") is None
