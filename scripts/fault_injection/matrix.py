"""Each fault alone, and each two of them together, on a cluster of its own under load.

A fault is a generator: it strikes, says for how many seconds that lasts, and then heals what the
system does not heal by itself. After each trial everything must be up again, take inserts at every
shard, and the history must break no rule.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fault_injection.log import LogShape, LogTrial
from fault_injection.nodes import LAUNCHER
from fault_injection.trial import first, in_one_line
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    import argparse

    from fault_injection.trial import Verdict

Fault = Callable[[LogTrial], Iterator[float]]

#: Duration of the workload before the fault, and after the recovery, in seconds.
_BEFORE_S, _AFTER_S = 1.0, 1.0
_PAUSE_S: Final = 3.0
_CUT_S: Final = 4.0
#: Duration in seconds, shorter than the suspicion timeout.
_UNHEARD_S: Final = 0.6
_PHASE_S: Final = 5.0
_SLOW_FLUSH_MS: Final = 700.0
_POLL_S: Final = 0.01

FAULTS: Final[dict[str, Fault]] = {}


def fault(function: Fault) -> Fault:
    """Register a fault under its name."""
    FAULTS[function.__name__] = function
    return function


def _replicas(trial: LogTrial) -> list[str]:
    return [replica.name for replica in trial.nodes.config.shards[0].replicas]


@fault
def primary_killed(trial: LogTrial) -> Iterator[float]:
    """A shard's primary dies."""
    trial.nodes.kill(_replicas(trial)[0])
    yield 0.0


@fault
def primary_killed_unheard(trial: LogTrial) -> Iterator[float]:
    """A primary dies, and its backups know its decisions only by their guesses."""
    primary, *backups = _replicas(trial)
    trial.nodes.cut(primary, backups, one_way=True)
    yield _UNHEARD_S
    trial.nodes.kill(primary)
    trial.nodes.heal(primary)


@fault
def backup_killed(trial: LogTrial) -> Iterator[float]:
    """A shard's last backup dies."""
    trial.nodes.kill(_replicas(trial)[-1])
    yield 0.0


@fault
def all_paused(trial: LogTrial) -> Iterator[float]:
    """All replicas of a shard hang for a while."""
    for name in _replicas(trial):
        _pause(trial, name)
    yield _PAUSE_S
    for name in _replicas(trial):
        trial.nodes.resume(name)


@fault
def primary_paused(trial: LogTrial) -> Iterator[float]:
    """A primary hangs for a while, and wakes up in an old view."""
    name = _replicas(trial)[0]
    _pause(trial, name)
    yield _PAUSE_S
    trial.nodes.resume(name)


@fault
def primary_cut_from_peers(trial: LogTrial) -> Iterator[float]:
    """A primary hears clients, but no backup."""
    trial.nodes.cut_from_peers(_replicas(trial)[0])
    yield _CUT_S
    trial.nodes.heal(_replicas(trial)[0])


@fault
def backup_cut_from_peers(trial: LogTrial) -> Iterator[float]:
    """A backup hears clients, but not the primary."""
    trial.nodes.cut_from_peers(_replicas(trial)[-1])
    yield _CUT_S
    trial.nodes.heal(_replicas(trial)[-1])


@fault
def primary_cut_from_clients(trial: LogTrial) -> Iterator[float]:
    """A primary hears its peers, but no client."""
    trial.nodes.cut_from_clients(_replicas(trial)[0])
    yield _CUT_S
    trial.nodes.heal(_replicas(trial)[0])


@fault
def backup_isolated(trial: LogTrial) -> Iterator[float]:
    """A backup receives no message at all."""
    trial.nodes.isolate(_replicas(trial)[-1])
    yield _CUT_S
    trial.nodes.heal(_replicas(trial)[-1])


@fault
def primary_deaf(trial: LogTrial) -> Iterator[float]:
    """Backups hear the primary, and it does not hear them."""
    primary, *backups = _replicas(trial)
    for backup in backups:
        trial.nodes.cut(backup, [primary], one_way=True)
    yield _CUT_S
    for backup in backups:
        trial.nodes.heal(backup)


@fault
def handler_leader_killed(trial: LogTrial) -> Iterator[float]:
    """The failure handler's leader dies."""
    _kill_leader(trial, "failure_handlers")
    yield 0.0


@fault
def handler_leader_killed_before_a_recovery(trial: LogTrial) -> Iterator[float]:
    """... at the moment at which a server should be suspected."""
    trial.nodes.kill(_replicas(trial)[-1])
    _kill_leader(trial, "failure_handlers")
    yield 0.0


@fault
def handler_leader_killed_when_a_shard_is_removed(trial: LogTrial) -> Iterator[float]:
    """... when the shard is out of the leases: in the middle of state acquisition."""
    trial.nodes.kill(_replicas(trial)[-1])
    _await(trial, lambda shard: shard["state"] == "recovering")
    _kill_leader(trial, "failure_handlers")
    yield 0.0


@fault
def handler_leader_killed_when_a_view_is_decided(trial: LogTrial) -> Iterator[float]:
    """... when the survivor is chosen, and the others copy its state."""
    trial.nodes.kill(_replicas(trial)[-1])
    _wait(lambda: _handlers_said(trial, "is decided"))
    _kill_leader(trial, "failure_handlers")
    yield 0.0


@fault
def membership_leader_killed(trial: LogTrial) -> Iterator[float]:
    """The membership service's leader dies."""
    _kill_leader(trial, "mms")
    yield 0.0


@fault
def membership_leader_killed_in_a_recovery(trial: LogTrial) -> Iterator[float]:
    """... when a shard is out of the leases."""
    trial.nodes.kill(_replicas(trial)[-1])
    _await(trial, lambda shard: shard["state"] == "recovering")
    _kill_leader(trial, "mms")
    yield 0.0


@fault
def survivor_killed(trial: LogTrial) -> Iterator[float]:
    """The survivor dies during the state transfer; with f=1 it is the last replica."""
    *others, last = _replicas(trial)
    trial.nodes.kill(last)
    _await(trial, lambda shard: shard["state"] == "recovering")
    trial.nodes.kill(others[0])
    yield 0.0


@fault
def client_killed(trial: LogTrial) -> Iterator[float]:
    """A client dies during an operation; another one replaces it."""
    trial.clients.kill(trial.clients.running()[0])
    trial.clients.start()
    yield 0.0


@fault
def disk_lost(trial: LogTrial) -> Iterator[float]:
    """A backup dies, and its data directory with it."""
    name = _replicas(trial)[-1]
    _pause(trial, name)
    shutil.rmtree(trial.nodes.data_dir / name)
    trial.nodes.kill(name)
    yield 0.0


@fault
def tail_torn(trial: LogTrial) -> Iterator[float]:
    """A backup dies in the middle of a write to its log."""
    trial.nodes.torn_tail(_replicas(trial)[-1], trial.shape.seed)
    yield 0.0


@fault
def bit_flipped(trial: LogTrial) -> Iterator[float]:
    """A backup dies, and a bit of its log is another one."""
    trial.nodes.bitflip(_replicas(trial)[-1], trial.shape.seed)
    yield 0.0


@fault
def disk_full(trial: LogTrial) -> Iterator[float]:
    """A backup's disk takes nothing for a while."""
    name = _replicas(trial)[-1]
    trial.nodes.fill_disk(name)
    yield _CUT_S
    trial.nodes.heal(name)


@fault
def shard_killed(trial: LogTrial) -> Iterator[float]:
    """All replicas of a shard die at once."""
    trial.nodes.kill_all(_replicas(trial))
    yield 0.0


@fault
def shard_killed_before_it_wrote(trial: LogTrial) -> Iterator[float]:
    """All replicas of a shard die, with slow disks: at level `memory` acked records are lost."""
    for name in _replicas(trial):
        trial.nodes.slow(name, flush_ms=_SLOW_FLUSH_MS)
    yield 2 * _SLOW_FLUSH_MS / 1000
    trial.nodes.kill_all(_replicas(trial))
    for name in _replicas(trial):
        trial.nodes.heal(name)


@fault
def power_lost(trial: LogTrial) -> Iterator[float]:
    """All replicas of a shard die at once, in the middle of a flush."""
    for name in _replicas(trial):
        trial.nodes.slow(name, flush_ms=_SLOW_FLUSH_MS / 10, notes_syncs=True)
    yield _SLOW_FLUSH_MS / 1000
    said = trial.nodes.power_cut(_replicas(trial), trial.shape.seed)
    trial.note("; ".join(said))
    for name in _replicas(trial):
        trial.nodes.heal(name)


@fault
def everything_killed(trial: LogTrial) -> Iterator[float]:
    """All nodes die at once."""
    trial.nodes.kill_all(trial.nodes.names)
    yield 0.0


def _pause(trial: LogTrial, name: str) -> None:
    """Freeze a node, once it runs: another fault may have killed it."""
    _wait(lambda: trial.nodes.find(name) is not None)
    trial.nodes.pause(name)


def _kill_leader(trial: LogTrial, group: str) -> None:
    found: list[str | None] = [None]

    def is_known() -> bool:
        found[0] = trial.health.leader(group)
        return found[0] is not None

    _wait(is_known)
    if found[0] is not None:
        trial.nodes.kill(found[0])


def _handlers_said(trial: LogTrial, text: str) -> bool:
    logs = trial.nodes.data_dir / "logs"
    handlers = trial.nodes.config.failure_handlers
    return any(text in (logs / f"{handler.name}.log").read_text() for handler in handlers)


def _await(trial: LogTrial, condition: Callable[[dict[str, object]], bool]) -> None:
    """Wait until shard 0 looks so."""

    def is_so() -> bool:
        status = trial.health.status()
        return status is not None and condition(status["shards"][0])

    _wait(is_so)


def _wait(condition: Callable[[], bool]) -> None:
    """Wait for the moment of a fault; another fault may keep it from coming: strike anyway."""
    deadline = time.monotonic() + _PHASE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


# --- trials --------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Result of one trial."""

    name: str
    #: From the first strike until everything was whole, in seconds; and from the end of the faults.
    since_strike: float
    since_heal: float
    verdict: Verdict | None
    #: Violations.
    wrong: str


def run_trial(names: tuple[str, ...], shape: LogShape, folder: Path) -> Row:
    """Run one cluster through these faults at once."""
    name = " + ".join(names)
    verdict = None
    struck = healed = whole = math.nan
    try:
        with LogTrial(folder, shape) as trial:
            _run(trial, _BEFORE_S)
            struck = time.monotonic()
            running = [FAULTS[name](trial) for name in names]
            lasts = [next(one) for one in running]
            for seconds, one in sorted(zip(lasts, running, strict=True), key=lambda row: row[0]):
                _run(trial, struck + seconds - time.monotonic())
                next(one, None)
            healed = time.monotonic()
            trial.settle()
            whole = time.monotonic()
            _run(trial, _AFTER_S)
            verdict = trial.judge()
    except (ZiplogError, RuntimeError, OSError) as error:
        return Row(name, whole - struck, whole - healed, verdict, in_one_line(error))
    bad = "; ".join(first(verdict.broken, 3))
    return Row(name, whole - struck, whole - healed, verdict, bad)


def _run(trial: LogTrial, seconds: float) -> None:
    """Run the workload for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        trial.look()
        time.sleep(_POLL_S)


def run_matrix(options: argparse.Namespace) -> int:
    """Run the trials that the arguments name, print a row for each, return the exit code."""
    assert Path(LAUNCHER).exists()
    chosen = options.only or list(FAULTS)
    unknown = set(chosen) - set(FAULTS)
    if unknown:
        print(f"faults: no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
        return 2
    trials: list[tuple[str, ...]] = [(name,) for name in chosen]
    trials += combinations(chosen, 2) if options.pairs else []
    shape = LogShape(
        f=options.f, durability=options.durability, seed=options.seed, rate_per_s=options.rate
    )
    print(f"{'fault':64} {'whole after':>11} {'healed':>7} {'acked':>6} {'lost':>5}  verdict")
    bad = 0
    for names in trials:
        row = _in_folder(names, shape, options.keep)
        bad += bool(row.wrong)
        figures = row.verdict.figures if row.verdict else {}
        acked, lost = (figures.get(name, "-") for name in ("acknowledged", "lost_as_reported"))
        print(
            f"{row.name:64} {row.since_strike:9.2f} s {row.since_heal:5.2f} s {acked:>6} {lost:>5}"
            f"  {row.wrong or 'clean'}",
            flush=True,
        )
    print(f"{len(trials)} trials, {bad} of them not as promised")
    return 1 if bad else 0


def _in_folder(names: tuple[str, ...], shape: LogShape, keep: Path | None) -> Row:
    """Run a trial in a folder that stays if it is asked for, or if something was wrong."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="+".join(names)[:80] + "-", dir=keep))
    row = run_trial(names, shape, folder)
    if row.wrong:
        return row._replace(wrong=f"{row.wrong} (see {folder})")
    if keep is None:
        shutil.rmtree(folder)
    return row
