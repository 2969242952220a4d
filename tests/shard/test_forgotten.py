"""A unit that may have been placed in a session that is forgotten is never placed again (rule 13).

The client stamps each unit with what it knows to be decided when it makes it (`since`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from shard.recovery.failure_detector import STALE_NS
from tests.checkers import places
from tests.shard.test_recovery import (
    BACKUP,
    PRIMARY,
    acks,
    crash,
    heard,
    recover,
    replica,
    send,
    start,
)
from tests.world import CLUSTER, MS, S, World, insert
from ziplog import wire
from ziplog.core.entries import SessionTable

if TYPE_CHECKING:
    from shard.state.sessions import Sessions

OTHER = b"d" * 16
#: The client made it before it knew of any position.
OLD = replace(insert(1), since=1, copy=1)
AGAIN = replace(OLD, copy=2)


def forgotten(f: int = 1) -> World:
    """Return a shard that has placed a unit, and forgotten its client."""
    world = start(f, session_timeout_s=2)
    send(world, OLD, PRIMARY, BACKUP)
    assert len(acks(world)) == 2
    world.run(4 * S)
    for name in (PRIMARY, BACKUP):
        assert not sessions(world, name).by_client
    return world


def sessions(world: World, name: str) -> Sessions:
    return replica(world, name)._state.sessions


def refused(world: World) -> list[tuple[int, int, str]]:
    return [(m.request, m.server, m.code) for m in heard(world, wire.Refused, "c")]


def placed(world: World, name: str = PRIMARY) -> list[int]:
    return [place.seq for place in places(world, name)]


def test_copy_of_a_forgotten_unit_is_refused_by_all() -> None:
    world = forgotten()
    gsn = places(world, PRIMARY)[0].gsns[-1]
    send(world, AGAIN, PRIMARY, BACKUP)
    assert refused(world) == [(1, 0, "expired"), (1, 1, "expired")]
    assert all(m.since > gsn for m in heard(world, wire.Refused, "c"))
    assert placed(world) == placed(world, BACKUP) == [1]
    assert not sessions(world, PRIMARY).by_client, "what is refused leaves no trace"


def test_unit_that_was_made_later_is_taken_and_the_forgotten_one_is_not() -> None:
    """The same client is back, and old bytes of it come behind new ones."""
    world = forgotten()
    send(world, AGAIN, PRIMARY, BACKUP)
    since = heard(world, wire.Refused, "c")[0].since
    send(world, replace(insert(2), since=since), PRIMARY, BACKUP)
    send(world, OLD, PRIMARY, BACKUP)
    assert placed(world) == [1, 2]
    assert refused(world)[2:] == [(1, 0, "expired"), (1, 1, "expired")]


def test_client_that_only_the_backup_forgot_is_answered_once_the_primary_has_decided() -> None:
    """The backup forgets a session without units by its own clock."""
    world = start(session_timeout_s=2)
    send(world, OLD, PRIMARY, BACKUP)
    send(world, replace(insert(2, first_incomplete=2), since=2), PRIMARY, BACKUP)
    sessions(world, BACKUP).expire(OLD.client)
    late = replace(insert(3, first_incomplete=2), since=1, copy=1)
    send(world, late, PRIMARY, BACKUP)
    assert refused(world) == [(3, 1, "expired")]
    world.run(50 * MS)
    send(world, replace(late, copy=2), PRIMARY, BACKUP)
    assert {server for seq, server, _ in acks(world) if seq == late.seq} == {0, 1}
    assert placed(world) == placed(world, BACKUP) == [1, 2, 3]


def test_expiry_at_the_backup_raises_the_horizon_of_what_it_keeps() -> None:
    world = start(session_timeout_s=2)
    send(world, OLD, PRIMARY, BACKUP)
    send(world, replace(insert(2), since=2), BACKUP)  # a promise: it stays
    state = replica(world, BACKUP)._state
    gsn = places(world, BACKUP)[0].gsns[-1]
    world.run_until(lambda: 1 not in state.sessions.by_client[OLD.client].units, 4 * S)
    assert state.sessions.by_client[OLD.client].horizon == state.sessions.horizon == gsn
    send(world, AGAIN, BACKUP)
    assert (1, 1, "expired") in refused(world)


@pytest.mark.parametrize("survivor", [PRIMARY, BACKUP])
def test_recovery_remembers_what_was_forgotten(survivor: str) -> None:
    world = forgotten()
    other = BACKUP if survivor == PRIMARY else PRIMARY
    crash(world, other)
    recover(world, survivor, other)
    send(world, replace(AGAIN, view=2), PRIMARY, BACKUP)
    assert sorted(refused(world)) == [(1, 0, "expired"), (1, 1, "expired")]
    assert sessions(world, PRIMARY).horizon == sessions(world, BACKUP).horizon > 0


def test_recovery_from_disk_alone_remembers_what_was_forgotten() -> None:
    world = forgotten()
    crash(world, PRIMARY)
    crash(world, BACKUP)
    recover(world, BACKUP, PRIMARY)
    send(world, replace(AGAIN, view=2), PRIMARY, BACKUP)
    assert sorted(refused(world)) == [(1, 0, "expired"), (1, 1, "expired")]


def test_clean_restart_remembers_what_was_forgotten() -> None:
    world = forgotten()
    send(world, replace(insert(1, client=OTHER), since=9), PRIMARY, BACKUP)
    world.restart(PRIMARY)
    world.run(10 * MS)
    send(world, AGAIN, PRIMARY)
    assert refused(world)[-1] == (1, 0, "expired")
    send(world, replace(insert(1, client=OTHER), since=9, copy=2), PRIMARY)
    assert placed(world) == [1, 1], "the other client is still known"


def test_server_that_forgot_a_unit_never_calls_it_absent() -> None:
    world = forgotten()
    crash(world, BACKUP)
    recover(world, PRIMARY, BACKUP)
    known = places(world, PRIMARY)[0].gsns[-1]
    for since in (1, known, known + 1, 0):
        send(world, wire.Locate(CLUSTER, 0, 1, OLD.client, 1, since), PRIMARY)
    verdicts = [m.verdict for m in heard(world, wire.Located, "c")]
    # A client of before there was `since` may be told wrong, as before.
    assert verdicts == ["pending", "pending", "absent", "absent"]


def test_finalized_shard_promises_nothing_about_a_forgotten_unit() -> None:
    """A `redirect` would let the client insert the record elsewhere, a second time."""
    world = forgotten()
    for name in (PRIMARY, BACKUP):
        replica(world, name)._state.shard_state = "finalized"
    send(world, AGAIN, PRIMARY, BACKUP)
    assert refused(world) == [(1, 0, "expired"), (1, 1, "expired")]
    send(world, replace(AGAIN, client=OTHER, since=1 << 40), PRIMARY)
    assert refused(world)[-1] == (1, 0, "redirect")


def test_client_that_stamps_nothing_is_served_as_before() -> None:
    world = forgotten()
    send(world, insert(1), PRIMARY, BACKUP)
    assert not refused(world)
    assert placed(world) == [1, 1]


def test_server_that_did_not_run_counts_no_client_as_silent() -> None:
    """Its clock counts the time in which its machine was suspended."""
    world = start(session_timeout_s=20)
    send(world, OLD, PRIMARY, BACKUP)
    before = {name: dict(sessions(world, name).by_client) for name in (PRIMARY, BACKUP)}
    world.paused |= {PRIMARY, BACKUP}
    world.run(STALE_NS + 30 * S)
    world.paused.clear()
    world.run(3 * S)
    assert all(sessions(world, name).by_client == before[name] for name in (PRIMARY, BACKUP))


def test_sessions_of_older_peers_have_no_horizon() -> None:
    table: Any = [OLD.client, 1, []]
    assert SessionTable(*table).horizon == 0


def test_servers_of_a_new_view_forget_alike() -> None:
    """A unit that the primary refuses for ever may not be promised by a backup."""
    world = start(session_timeout_s=4)
    send(world, OLD, PRIMARY, BACKUP)
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY)
    known = places(world, BACKUP)[0].gsns[-1] + 1
    world.run(6 * S)
    assert not sessions(world, PRIMARY).by_client
    assert sessions(world, PRIMARY).horizon == sessions(world, BACKUP).horizon >= known
    send(world, replace(insert(1, client=OTHER), since=known, view=2), PRIMARY, BACKUP)
    assert refused(world) == [(1, 0, "expired"), (1, 1, "expired")]


def test_backup_gives_up_what_came_just_before_its_client_was_forgotten() -> None:
    """Or the client would wait for a unit that the primary refuses for ever."""
    world = start(session_timeout_s=2)
    send(world, OLD, PRIMARY, BACKUP)
    late = replace(insert(2), since=places(world, PRIMARY)[0].gsns[-1], copy=1)
    send(world, late, BACKUP)
    world.run(4 * S)
    for copy in (2, 3):
        send(world, replace(late, copy=copy), PRIMARY, BACKUP)
        world.run(1 * S)
    assert refused(world)[-2:] == [(2, 0, "expired"), (2, 1, "expired")]
    assert placed(world) == placed(world, BACKUP) == [1]
    assert not sessions(world, BACKUP).by_client[late.client].units


def test_clean_restart_keeps_what_is_known_of_each_session() -> None:
    """Else this server would refuse units for ever that the others take."""
    world = start(session_timeout_s=60)
    send(world, OLD, PRIMARY, BACKUP)
    session = sessions(world, PRIMARY).by_client[OLD.client]
    sessions(world, PRIMARY).horizon = 1 << 20
    send(world, replace(insert(1, client=OTHER), since=1 << 21), PRIMARY, BACKUP)
    world.restart(PRIMARY)
    again = sessions(world, PRIMARY).by_client[OLD.client]
    assert (again.horizon, again.last) == (session.horizon, session.last) == (0, 1)
