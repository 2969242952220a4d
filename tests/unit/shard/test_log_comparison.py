"""The digest of a log, and promises and joins of a server with a partly unreadable log."""

from __future__ import annotations

from tests.unit.shard.recovery_world import (
    BACKUP,
    PRIMARY,
    crash,
    decision,
    joined,
    log,
    order,
    promise,
    send,
    start,
)
from tests.world import MS, S, insert

UNKNOWN = bytes(16)


def test_a_promise_does_not_wait_for_unreadable_entries() -> None:
    """The digest is only a check: a wait for it would keep the shard unavailable for ever."""
    world = start()
    for seq in range(1, 6):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(300 * MS)
    crash(world, BACKUP)
    last = world.stores[PRIMARY].last_fseq + 1
    world.stores[PRIMARY].damaged = {last}  # the entries added by the promise
    frozen = promise(world, PRIMARY)
    assert (frozen.last, frozen.digest) == (last, UNKNOWN)
    world.stores[PRIMARY].damaged = set()
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_a_log_that_can_be_read_is_checked() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    assert promise(world, PRIMARY).digest != UNKNOWN
