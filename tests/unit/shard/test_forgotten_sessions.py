"""A unit that may have been placed in a forgotten session is never placed again (rule 13).

The client stamps each unit with a decided position of the time when it created it (`since`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from shard.recovery.failure_detector import STALE_NS
from tests.checkers import places
from tests.unit.shard.recovery_world import (
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
#: The client created the unit before it knew of any position.
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
    return replica(world, name).state.sessions


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
    assert not sessions(world, PRIMARY).by_client, "a refused unit leaves no state"


def test_later_unit_is_accepted_and_the_forgotten_one_is_not() -> None:
    """The same client is back, and its old messages arrive after new ones."""
    world = forgotten()
    send(world, AGAIN, PRIMARY, BACKUP)
    since = heard(world, wire.Refused, "c")[0].since
    send(world, replace(insert(2), since=since), PRIMARY, BACKUP)
    send(world, OLD, PRIMARY, BACKUP)
    assert placed(world) == [1, 2]
    assert refused(world)[2:] == [(1, 0, "expired"), (1, 1, "expired")]


def test_client_forgotten_by_the_backup_is_acked_after_the_decision() -> None:
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


def test_expiry_at_the_backup_raises_the_horizon_of_kept_sessions() -> None:
    world = start(session_timeout_s=2)
    send(world, OLD, PRIMARY, BACKUP)
    send(world, replace(insert(2), since=2), BACKUP)  # a promise is kept
    state = replica(world, BACKUP).state
    gsn = places(world, BACKUP)[0].gsns[-1]
    world.run_until(lambda: 1 not in state.sessions.by_client[OLD.client].units, 4 * S)
    assert state.sessions.by_client[OLD.client].horizon == state.sessions.horizon == gsn
    send(world, AGAIN, BACKUP)
    assert (1, 1, "expired") in refused(world)


@pytest.mark.parametrize("survivor", [PRIMARY, BACKUP])
def test_recovery_keeps_the_horizon(survivor: str) -> None:
    world = forgotten()
    other = BACKUP if survivor == PRIMARY else PRIMARY
    crash(world, other)
    recover(world, survivor, other)
    send(world, replace(AGAIN, view=2), PRIMARY, BACKUP)
    assert sorted(refused(world)) == [(1, 0, "expired"), (1, 1, "expired")]
    assert sessions(world, PRIMARY).horizon == sessions(world, BACKUP).horizon > 0


def test_recovery_from_disk_alone_keeps_the_horizon() -> None:
    world = forgotten()
    crash(world, PRIMARY)
    crash(world, BACKUP)
    recover(world, BACKUP, PRIMARY)
    send(world, replace(AGAIN, view=2), PRIMARY, BACKUP)
    assert sorted(refused(world)) == [(1, 0, "expired"), (1, 1, "expired")]


def test_clean_restart_keeps_the_horizon() -> None:
    world = forgotten()
    send(world, replace(insert(1, client=OTHER), since=9), PRIMARY, BACKUP)
    world.restart(PRIMARY)
    world.run(10 * MS)
    send(world, AGAIN, PRIMARY)
    assert refused(world)[-1] == (1, 0, "expired")
    send(world, replace(insert(1, client=OTHER), since=9, copy=2), PRIMARY)
    assert placed(world) == [1, 1], "the other client is still known"


def test_server_that_forgot_a_unit_never_reports_it_absent() -> None:
    world = forgotten()
    crash(world, BACKUP)
    recover(world, PRIMARY, BACKUP)
    known = places(world, PRIMARY)[0].gsns[-1]
    for since in (1, known, known + 1, 0):
        send(world, wire.Locate(CLUSTER, 0, 1, OLD.client, 1, since), PRIMARY)
    verdicts = [m.verdict for m in heard(world, wire.Located, "c")]
    # A client without `since` stamps may get a wrong reply.
    assert verdicts == ["pending", "pending", "absent", "absent"]


def test_finalized_shard_promises_nothing_about_a_forgotten_unit() -> None:
    """A `redirect` would let the client insert the record elsewhere, a second time."""
    world = forgotten()
    for name in (PRIMARY, BACKUP):
        replica(world, name).state.shard_state = "finalized"
    send(world, AGAIN, PRIMARY, BACKUP)
    assert refused(world) == [(1, 0, "expired"), (1, 1, "expired")]
    send(world, replace(AGAIN, client=OTHER, since=1 << 40), PRIMARY)
    assert refused(world)[-1] == (1, 0, "redirect")


def test_client_without_since_stamps_is_served() -> None:
    world = forgotten()
    send(world, insert(1), PRIMARY, BACKUP)
    assert not refused(world)
    assert placed(world) == [1, 1]


def test_time_while_the_server_was_suspended_expires_no_session() -> None:
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


def test_servers_of_a_new_view_have_equal_horizons() -> None:
    """A backup may not promise a unit that the primary refuses permanently."""
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


def test_backup_refuses_a_unit_that_arrived_before_its_client_was_forgotten() -> None:
    """Otherwise the client would wait for a unit that the primary refuses permanently."""
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


def test_clean_restart_keeps_the_bounds_of_each_session() -> None:
    """Otherwise this server would permanently refuse units that the others accept."""
    world = start(session_timeout_s=60)
    send(world, OLD, PRIMARY, BACKUP)
    session = sessions(world, PRIMARY).by_client[OLD.client]
    sessions(world, PRIMARY).horizon = 1 << 20
    send(world, replace(insert(1, client=OTHER), since=1 << 21), PRIMARY, BACKUP)
    world.restart(PRIMARY)
    again = sessions(world, PRIMARY).by_client[OLD.client]
    assert (again.horizon, again.last) == (session.horizon, session.last) == (0, 1)
