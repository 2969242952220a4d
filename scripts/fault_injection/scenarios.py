"""The faults of the matrix by name: each is one scenario on shard 0 or on the services.

A fault is a generator: it strikes, yields the number of seconds that it lasts, and then heals what
the system does not heal by itself.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from fault_injection.log import LogTrial
from fault_injection.nodes import Nodes

Fault = Callable[[LogTrial], Iterator[float]]
T = TypeVar("T")

_PRIMARY, _BACKUP = 0, -1
_PAUSE_S: Final = 3.0
_CUT_S: Final = 4.0
#: Duration in seconds, shorter than the suspicion timeout.
_UNHEARD_S: Final = 0.6
_PHASE_S: Final = 5.0
_SLOW_FLUSH_MS: Final = 700.0
_POLL_S: Final = 0.01


def _replicas(trial: LogTrial) -> list[str]:
    return [replica.name for replica in trial.nodes.config.shards[0].replicas]


def _wait(condition: Callable[[], T]) -> T:
    """Wait for the moment of a fault; another fault may keep it from coming: strike anyway.

    Returns:
        What the condition returned last.

    """
    deadline = time.monotonic() + _PHASE_S
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def _once(strike: Callable[[LogTrial], object]) -> Fault:
    """Return a fault that the system heals by itself."""

    def fault(trial: LogTrial) -> Iterator[float]:
        strike(trial)
        yield 0.0

    return fault


def _pause(nodes: Nodes, name: str) -> None:
    """Freeze a node, once it runs: another fault may have killed it."""
    _wait(lambda: nodes.find(name) is not None)
    nodes.pause(name)


def _lose_disk(nodes: Nodes, name: str) -> None:
    """Kill a node, and remove its data directory."""
    _pause(nodes, name)
    shutil.rmtree(nodes.data_dir / name)
    nodes.kill(name)


# --- one replica ---


def _of_replica(index: int, strike: Callable[[Nodes, str], object], seconds: float = 0.0) -> Fault:
    """Return a fault of one replica that ends after `seconds`."""

    def fault(trial: LogTrial) -> Iterator[float]:
        name = _replicas(trial)[index]
        strike(trial.nodes, name)
        yield seconds
        trial.nodes.heal(name)

    return fault


def _damaged(damage: Callable[[Nodes, str, int], object]) -> Fault:
    """Return a fault that kills a backup and damages its log."""
    return _once(lambda trial: damage(trial.nodes, _replicas(trial)[_BACKUP], trial.shape.seed))


def _primary_killed_unheard(trial: LogTrial) -> Iterator[float]:
    primary, *backups = _replicas(trial)
    trial.nodes.cut(primary, backups, one_way=True)
    yield _UNHEARD_S
    trial.nodes.kill(primary)
    trial.nodes.heal(primary)


def _primary_deaf(trial: LogTrial) -> Iterator[float]:
    primary, *backups = _replicas(trial)
    for backup in backups:
        trial.nodes.cut(backup, [primary], one_way=True)
    yield _CUT_S
    for backup in backups:
        trial.nodes.heal(backup)


# --- a leader ---


def _at_once(_trial: LogTrial) -> None:
    """Wait for nothing."""


def _backup_dead(trial: LogTrial) -> None:
    """Begin a recovery."""
    trial.nodes.kill(_replicas(trial)[_BACKUP])


def _shard_removed(trial: LogTrial) -> None:
    """Begin a recovery, and wait until the shard is out of the leases."""
    _backup_dead(trial)

    def is_recovering() -> bool:
        status = trial.health.status()
        return status is not None and status["shards"][0]["state"] == "recovering"

    _wait(is_recovering)


def _view_decided(trial: LogTrial) -> None:
    """Begin a recovery, and wait until the survivor is chosen and the others copy its state."""
    _backup_dead(trial)
    logs = trial.nodes.data_dir / "logs"
    handlers = [logs / f"{node.name}.log" for node in trial.nodes.config.failure_handlers]
    _wait(lambda: any("is decided" in log.read_text() for log in handlers))


def _leader_killed(group: str, moment: Callable[[LogTrial], None] = _at_once) -> Fault:
    """Return a fault that kills the leader of a service at a moment."""

    def strike(trial: LogTrial) -> None:
        moment(trial)
        leader = _wait(lambda: trial.health.leader(group))
        if leader is not None:
            trial.nodes.kill(leader)

    return _once(strike)


# --- several processes ---


def _all_paused(trial: LogTrial) -> Iterator[float]:
    for name in _replicas(trial):
        _pause(trial.nodes, name)
    yield _PAUSE_S
    for name in _replicas(trial):
        trial.nodes.resume(name)


def _kill_survivor(trial: LogTrial) -> None:
    _shard_removed(trial)
    trial.nodes.kill(_replicas(trial)[_PRIMARY])


def _kill_client(trial: LogTrial) -> None:
    trial.clients.kill(trial.clients.running()[0])
    trial.clients.start()


def _shard_killed_before_it_wrote(trial: LogTrial) -> Iterator[float]:
    for name in _replicas(trial):
        trial.nodes.slow(name, flush_ms=_SLOW_FLUSH_MS)
    yield 2 * _SLOW_FLUSH_MS / 1000
    trial.nodes.kill_all(_replicas(trial))
    for name in _replicas(trial):
        trial.nodes.heal(name)


def _power_lost(trial: LogTrial) -> Iterator[float]:
    for name in _replicas(trial):
        trial.nodes.slow(name, flush_ms=_SLOW_FLUSH_MS / 10, notes_syncs=True)
    yield _SLOW_FLUSH_MS / 1000
    trial.note("; ".join(trial.nodes.power_cut(_replicas(trial), trial.shape.seed)))
    for name in _replicas(trial):
        trial.nodes.heal(name)


FAULTS: Final[dict[str, Fault]] = {
    "primary_killed": _of_replica(_PRIMARY, Nodes.kill),
    # Its backups know its last decisions only by their guesses.
    "primary_killed_unheard": _primary_killed_unheard,
    "backup_killed": _of_replica(_BACKUP, Nodes.kill),
    "all_paused": _all_paused,
    # It wakes up in an old view.
    "primary_paused": _of_replica(_PRIMARY, _pause, _PAUSE_S),
    # It hears clients, but no backup.
    "primary_cut_from_peers": _of_replica(_PRIMARY, Nodes.cut_from_peers, _CUT_S),
    "backup_cut_from_peers": _of_replica(_BACKUP, Nodes.cut_from_peers, _CUT_S),
    # It hears its peers, but no client.
    "primary_cut_from_clients": _of_replica(_PRIMARY, Nodes.cut_from_clients, _CUT_S),
    "backup_isolated": _of_replica(_BACKUP, Nodes.isolate, _CUT_S),
    # Backups hear the primary, and it does not hear them.
    "primary_deaf": _primary_deaf,
    "handler_leader_killed": _leader_killed("failure_handlers"),
    # At the moment at which a server should be suspected.
    "handler_leader_killed_before_a_recovery": _leader_killed("failure_handlers", _backup_dead),
    # In the middle of state acquisition.
    "handler_leader_killed_when_a_shard_is_removed": _leader_killed(
        "failure_handlers", _shard_removed
    ),
    "handler_leader_killed_when_a_view_is_decided": _leader_killed(
        "failure_handlers", _view_decided
    ),
    "membership_leader_killed": _leader_killed("mms"),
    "membership_leader_killed_in_a_recovery": _leader_killed("mms", _shard_removed),
    # During the state transfer; with f=1 it is the last replica.
    "survivor_killed": _once(_kill_survivor),
    # During an operation; another client replaces it.
    "client_killed": _once(_kill_client),
    "disk_lost": _of_replica(_BACKUP, _lose_disk),
    # In the middle of a write to its log.
    "tail_torn": _damaged(Nodes.torn_tail),
    "bit_flipped": _damaged(Nodes.bitflip),
    # It takes nothing for a while.
    "disk_full": _of_replica(_BACKUP, Nodes.fill_disk, _CUT_S),
    "shard_killed": _once(lambda trial: trial.nodes.kill_all(_replicas(trial))),
    # With slow disks: at level `memory` acknowledged records are lost.
    "shard_killed_before_it_wrote": _shard_killed_before_it_wrote,
    # All replicas die at once, in the middle of a flush.
    "power_lost": _power_lost,
    "everything_killed": _once(lambda trial: trial.nodes.kill_all(trial.nodes.names)),
}
