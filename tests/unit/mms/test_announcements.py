"""Lease announcements to servers (docs/protocol.md, sections 3 and 13).

Leases of many members are announced as changes; of a long history, a server gets the part that it
needs.
"""

import random

import pytest

from shard.state.epoch_clock import EpochClock, LeaseConflictError
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import FakeServer, World, config, working
from ziplog.core.node import LeaderChanged, Received
from ziplog.core.view import (
    KEPT_RUNS,
    MANY_MEMBERS,
    NO_DIGEST,
    Lease,
    LeaseRun,
    LeaseStep,
    Member,
    difference,
    run_of,
    unfold,
)
from ziplog.wire import LeaseAnnounced, LeaseHistory, LeaseQuery, Rate, encode


def announcements(world: World, since: int = 0) -> list[LeaseAnnounced]:
    return [m for server in world.servers for m in server.announced[since:] if m.runs or m.steps]


def steps_of(runs: list[LeaseRun]) -> list[LeaseStep]:
    """Return the steps from the first of these runs (of one lease) to the last."""
    steps, before = [], runs[0].last
    for run in runs[1:]:
        change = difference(before.members, run.first.members)
        last = run.last
        steps.append(LeaseStep(run.count, last.epochs, last.epoch_size, last.epoch_ms, *change))
        before = last
    return steps


def history(noise: random.Random, length: int) -> list[LeaseRun]:
    """Return leases with members that join, leave, and change their weights."""
    members = {shard: Member(shard, 1, 1) for shard in range(20)}
    runs = [run_of(Lease(1, NO_DIGEST, 1, 0, 16, 2**20, 10, tuple(members.values())))]
    for _ in range(length):
        for shard in noise.sample(range(25), noise.randrange(1, 4)):
            if shard in members and noise.random() < 0.3:
                del members[shard]
            else:
                members[shard] = Member(shard, noise.randrange(1, 3), noise.randrange(1, 9))
        first = runs[-1].last.following(
            tuple(member for _, member in sorted(members.items())), epoch_ms=noise.choice((5, 10))
        )
        last = first
        count = noise.randrange(1, 4)
        for _ in range(count - 1):
            last = last.following()
        runs.append(LeaseRun(first, count, last))
    return runs


@pytest.mark.parametrize("seed", range(20))
def test_steps_lead_to_the_leases_from_wherever_a_server_stands(seed: int) -> None:
    runs = history(random.Random(seed), 8)
    leases = {}
    for run in runs:
        lease = run.first
        for _ in range(run.count):
            leases[lease.number] = lease
            lease = lease.following()
    last = runs[-1].last
    for held in leases.values():
        found = unfold(held, 1, steps_of(runs))
        if held == last:
            assert found == []
            continue
        assert found[-1].last == last
        assert found[0].first == leases[held.number + 1]
        assert sum(run.count for run in found) == last.number - held.number
        assert all(leases[run.last.number] == run.last for run in found)


def test_steps_from_a_lease_that_is_not_held_yet_are_ignored() -> None:
    runs = history(random.Random(1), 3)
    assert unfold(runs[0].last, 2, steps_of(runs)) == []


def test_a_server_goes_by_steps_and_halts_on_those_of_another_history() -> None:
    runs = history(random.Random(2), 6)
    clock = EpochClock(3)
    assert clock.unfold(0, steps_of(runs), NO_DIGEST) == []
    clock.announce(runs[:2], 0, 0)
    last = runs[-1].last
    found = clock.unfold(1, steps_of(runs), last.digest)
    assert clock.announce(found, 1, 1)
    assert clock.last == last
    assert list(clock.recent)[-1].last == last
    assert clock.unfold(1, steps_of(runs), NO_DIGEST) == []  # nothing is new
    further = last.following(last.members[:-1])
    with pytest.raises(LeaseConflictError, match=f"lease {further.number} does not follow"):
        clock.unfold(last.number, steps_of([run_of(last), run_of(further)]), last.digest)


def test_few_members_are_announced_whole() -> None:
    world = working(MANY_MEMBERS - 1, rate=1000)
    assert not any(message.steps for message in announcements(world))


def test_many_members_are_announced_as_changes() -> None:
    world = working(MANY_MEMBERS, rate=1000)
    since = len(world.servers[0].announced)
    world.run(2 * S)
    messages = announcements(world, since)
    assert all(message.steps and not message.runs for message in messages)
    assert all(not message.placements for message in messages)
    assert max(len(encode(message)) for message in messages) < 100
    assert all(server.lease == world.lease for server in world.servers)


def test_a_change_of_weights_is_announced_in_a_few_bytes() -> None:
    world = working(60, rate=1000)
    since = len(world.servers[0].announced)
    primary = world.servers[10]
    primary.rate = 3000
    world.step(Received(primary.route, Rate(CLUSTER, 5, 1, 3000)))
    world.run(10 * MS)
    assert world.lease.members[5].weight == 3
    messages = announcements(world, since)
    assert len(messages) == 120
    (step,) = {message.steps[-1].changed for message in messages}
    assert step == (Member(5, 1, 3),)
    assert max(len(encode(message)) for message in messages) < 200
    assert all(server.lease == world.lease for server in world.servers)


def test_a_lost_announcement_is_repeated() -> None:
    world = working(20, rate=1000)
    chance = random.Random(7)
    for turn in range(40):
        for server in world.servers:
            server.is_disconnected = chance.random() < 0.5
        shard = chance.randrange(20)
        primary = world.servers[2 * shard]
        primary.rate = chance.choice((500, 1000, 2500))
        world.step(Received(primary.route, Rate(CLUSTER, shard, 1, primary.rate)))
        world.run(chance.randrange(300) * MS)
        assert not any(server.halted for server in world.servers), turn
    for server in world.servers:
        server.is_disconnected = False
    world.run(3 * S)
    assert all(server.lease == world.lease for server in world.servers)


def test_a_server_that_was_away_while_its_leases_were_trimmed_gets_whole_leases() -> None:
    world = working(20, rate=1000)
    away = world.servers[0]
    away.is_disconnected = True
    for turn in range(6):
        primary = world.servers[2]
        primary.rate = 1000 + 2000 * (turn % 2)
        world.step(Received(primary.route, Rate(CLUSTER, 1, 1, primary.rate)))
        world.run(500 * MS)
    state = world.service.state
    state.runs = state.runs[-1:]  # like a trim
    state.history_bytes = state.runs[0].max_bytes
    since = len(away.announced)
    away.is_disconnected = False
    world.run(2 * S)
    first, *_ = [message for message in away.announced[since:] if message.runs]
    assert first.runs[0].first.number == world.service.state.runs[0].first.number
    assert not first.steps


def test_with_many_members_each_server_gets_its_own_placement() -> None:
    world = working(20, rate=1000)
    for server in world.servers:
        mentioned = {p.shard for message in server.announced for p in message.placements}
        assert mentioned == {server.shard}


def test_a_lost_placement_is_announced_again_while_leases_come() -> None:
    world = working(20, rate=1000)
    server = world.servers[4]
    server.is_disconnected = True
    world.servers[5].state = "limbo"
    world.run(4 * S)
    assert world.service.state.placements[2].state == "parked"
    assert server.placed == "live"
    server.is_disconnected = False
    world.run(1600 * MS)
    assert server.placed == "parked"


def started_anew(world: World) -> FakeServer:
    server = world.servers[6]
    server.incarnation += 1
    server.lease, server.state, server.placed = None, "starting", ""
    return server


def test_a_heartbeat_from_before_an_announcement_causes_no_other_one() -> None:
    world = working(20, rate=1000)
    server = started_anew(world)
    server.is_disconnected = True
    before = len(world.sent)
    counts = []
    for pause in (50, 50, 50, 50, 500, 0):
        world.send_heartbeat(server)
        answers = [m for dst, m in world.sent[before:] if dst == server.route]
        counts.append(sum(isinstance(m, LeaseAnnounced) and bool(m.runs) for m in answers))
        world.now += pause * MS
    assert counts == [1, 1, 1, 1, 1, 2]


def test_a_new_server_that_missed_its_first_lease_gets_it_again_while_leases_come() -> None:
    world = working(20, rate=1000)
    server = started_anew(world)
    server.is_disconnected = True
    world.run(5 * S)
    server.is_disconnected = False
    world.run(1600 * MS)
    assert server.lease == world.lease
    assert (server.state, server.placed) == ("up", "live")


def test_an_announced_lease_counts_as_held_until_the_server_reports_a_gap() -> None:
    world = working(20, rate=1000)
    disconnected, other = world.servers[4], world.servers[5]
    disconnected.is_disconnected = True
    world.run(200 * MS)  # a lease or two that it misses
    disconnected.is_disconnected = False
    since = len(other.announced)
    world.heartbeat_times[disconnected.name] = world.now + S  # its own heartbeat is far away
    world.run(300 * MS)
    assert disconnected.lease == world.lease
    assert not disconnected.has_gap
    assert all(step.count == 1 for m in other.announced[since:] for step in m.steps)
    assert all(len(message.steps) <= 1 for message in other.announced[since:])


# --- relays of followers -----------------------------------------------------------------------


def test_a_follower_relays_to_the_server_that_lacks_leases_for_a_second() -> None:
    """Its link to the leader is cut, and readers wait for its shard's positions."""
    world = World(config(mms=3)).lead().run(5 * S)
    behind, held = world.servers[0], world.servers[0].lease
    behind.is_disconnected = True
    behind.active = world.servers[1].active = True
    world.run(2 * S)
    assert behind.lease == held != world.lease
    world.step(LeaderChanged("mms-1", is_self=False))
    behind.is_disconnected = False
    world.sent.clear()
    world.run(900 * MS)
    assert behind.lease == held
    world.run(2 * S)
    assert behind.lease == world.lease
    assert {dst for dst, message in world.sent if isinstance(message, LeaseAnnounced)} == {
        behind.route
    }


def test_a_follower_relays_twice_a_second_at_most() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    behind = world.servers[0]
    behind.lease = None
    behind.is_disconnected = True
    world.step(LeaderChanged("mms-1", is_self=False))
    world.run(3 * S)
    world.sent.clear()
    for _ in range(20):
        world.now += 100 * MS
        world.send_heartbeat(behind)
    assert len([m for _, m in world.sent if isinstance(m, LeaseAnnounced)]) == 4


# --- a long history ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aged() -> World:
    """A service that granted 250,000 runs while its servers were away."""
    world = World().lead().run(5 * S)
    for server in world.servers:
        server.is_disconnected = True
    world.age(250_000)
    for server in world.servers:
        server.is_disconnected = False
    world.sent.clear()
    return world


def restarted(world: World, needs_from: int = 1) -> FakeServer:
    server = world.servers[-1]
    server.incarnation += 1
    server.lease, server.state, server.placed = None, "starting", ""
    server.needs_from = needs_from
    server.announced.clear()
    world.sent.clear()
    return server


def frames(world: World) -> list[bytes]:
    """Return all messages that were sent, encoded; each must fit a frame."""
    return [encode(message) for _, message in world.sent]


def test_a_server_without_leases_is_sent_the_newest_of_a_long_history(aged: World) -> None:
    server = restarted(aged)
    aged.send_heartbeat(server)
    (announced,) = server.announced
    assert announced.is_cut
    assert announced.runs == aged.service.state.runs[-KEPT_RUNS:]
    assert max(map(len, frames(aged))) < 16 * 1024
    assert (server.lease, server.state) == (aged.lease, "up")


def test_a_server_without_leases_needs_none_before_its_stable_frontier(aged: World) -> None:
    needed = aged.service.state.runs[-3]
    server = restarted(aged, needs_from=needed.last.stop - 1)
    aged.send_heartbeat(server)
    assert server.announced[0].runs == aged.service.state.runs[-3:]
    server = restarted(aged, needs_from=aged.lease.stop)
    aged.send_heartbeat(server)
    assert server.announced[0].runs == aged.service.state.runs[-1:]


def test_a_server_that_holds_an_old_lease_skips_to_the_newest(aged: World) -> None:
    server = restarted(aged)
    server.lease, server.state, server.placed = aged.service.state.runs[9].last, "up", "live"
    aged.send_heartbeat(server)
    (announced,) = server.announced
    assert (announced.is_cut, len(announced.runs)) == (True, KEPT_RUNS)
    assert server.lease == aged.lease
    server.lease = aged.service.state.runs[-KEPT_RUNS].first
    server.announced.clear()
    aged.now += S
    aged.send_heartbeat(server)
    assert (server.announced[0].is_cut, len(server.announced[0].runs)) == (False, KEPT_RUNS - 1)


def test_every_server_that_lacks_a_long_history_is_sent_its_end_with_the_next_lease(
    aged: World,
) -> None:
    since = aged.lease.number
    for server in aged.servers:
        server.lease = aged.service.state.runs[0].last
        server.announced.clear()
        aged.send_heartbeat(server)
    aged.sent.clear()
    aged.run(10 * S)
    assert aged.lease.number > since
    assert all(server.lease == aged.lease for server in aged.servers)
    assert max(map(len, frames(aged))) < 16 * 1024


def test_a_server_of_an_older_version_is_sent_one_part_after_the_other(aged: World) -> None:
    server = restarted(aged, needs_from=0)
    numbers = [0]
    while server.lease != aged.lease:
        aged.now += S
        aged.send_heartbeat(server)
        assert server.lease is not None
        numbers.append(server.lease.number)
    assert numbers == sorted(set(numbers)), "each part follows the one before"
    assert len(numbers) > 5
    assert not any(message.is_cut for message in server.announced)
    assert len(frames(aged)) >= len(numbers) - 1


def test_readers_query_a_long_history_part_by_part(aged: World) -> None:
    aged.sent.clear()
    gsn, runs = 1, 0
    while gsn < aged.lease.stop:
        aged.send(LeaseQuery(CLUSTER, gsn, gsn))
        aged.run(200 * MS)
        history = aged.answers(LeaseHistory)[-1]
        assert history.request == gsn
        runs += len(history.runs)
        gsn = history.runs[-1].last.stop
    assert runs >= 250_000
    assert frames(aged)


def test_steps_that_would_not_fit_are_sent_as_whole_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    world = working(20, rate=1000)
    away = world.servers[0]
    away.is_disconnected = True
    for turn in range(6):
        primary = world.servers[2]
        primary.rate = 1000 + 2000 * (turn % 2)
        world.step(Received(primary.route, Rate(CLUSTER, 1, 1, primary.rate)))
        world.run(500 * MS)
    monkeypatch.setattr("mms.announcements._MAX_STEPS_BYTES", 300)
    since = len(away.announced)
    away.is_disconnected = False
    world.run(2 * S)
    first, *_ = [message for message in away.announced[since:] if message.runs]
    assert not first.steps
    assert away.lease == world.lease
