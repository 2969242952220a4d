"""The commands `ziplog player`: deliver the records of a log to targets, as a file has it.

As in `ziplog.cli`, stdout carries data only. `run` prints one line on stdout when it is ready, and
logs to stderr. It ends at SIGTERM or Ctrl-C, after the steps under way.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich import filesize
from rich.live import Live

from logplayer.cli.task_positions import document, tasks_of
from logplayer.config import read
from logplayer.example import example
from logplayer.kinds import KINDS
from logplayer.new_cursors import check_start
from logplayer.options import PlayerOptions
from logplayer.retries import text_of
from logplayer.targets.push_target import check as check_receiver
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import counted, print_json
from ziplog.config_tables import LogConfig
from ziplog.errors import ConfigError, DeadlineError, UnavailableError, ZiplogError
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.process import spare_collector
from ziplog.runtime.process_logging import configure
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    import ziplog
    from logplayer.contract import TargetSpec
    from logplayer.player import Player

app: Final = typer.Typer(
    help="Deliver the records of a log to targets, in order.",
    epilog="See docs/player.md.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_REFRESH_S: Final = 1.0
_COLUMNS: Final = ("target", "part", "state", "position", "lag", "owner")
#: Their targets may be classes of the user.
_FOREIGN_KINDS: Final = frozenset({"function", "python"})
_RIGHT: Final = frozenset({"part", "lag"})

File = Annotated[Path, typer.Argument(metavar="FILE", help="The player's file.")]


class _StopSignal(BaseException):
    """SIGTERM or SIGINT."""


@app.command()
def run(
    file: File,
    *,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s", min=0, metavar="SECONDS", help="Time limit of the steps under way at stop."
        ),
    ] = 30.0,
    log_level: Annotated[
        str, typer.Option("--log-level", help="debug, info, warning or error.")
    ] = LogConfig.level,
    log_format: Annotated[str, typer.Option("--log-format", help="logfmt or json.")] = (
        LogConfig.format
    ),
    timeout: Timeout = 10.0,
) -> None:
    """Run a player until SIGTERM or Ctrl-C. Processes with the same file share its tasks.

    At the end it finishes the steps under way and releases its tasks; a second signal ends it at
    once. Exit code 1: it cannot start, or a target did not return in time, or a task has failed and
    the file has on_failed = "exit".
    """
    log, player = LogConfig(level=log_level, format=log_format), None
    for number in _SIGNALS:
        signal.signal(number, _on_signal)
    try:
        player = read(file).player()
        configure(f"player@{player.name}", log)
        raise_limit()
        spare_collector()
        player.start_interruptible(timeout)
        _print_ready(player)
        player.join()
        for number in _SIGNALS:  # A task has failed, and the stop begins without a signal.
            signal.signal(number, _on_signal_at_stop)
    except _StopSignal:
        pass
    except OSError:  # stdout failed.
        if player is not None:
            player.stop(drain_s)
        raise
    if player is not None:
        try:
            player.stop(drain_s)
        except DeadlineError as error:
            say(f"error: {error}")
            os._exit(1)  # At an exit Python waits for the threads of what hangs.
        if player.failed_tasks:
            raise ZiplogError("; ".join(f"{n}: {why}" for n, why in player.failed_tasks.items()))


def _on_signal(*_: object) -> NoReturn:
    _on_signal_at_stop()
    raise _StopSignal


def _on_signal_at_stop(*_: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, _on_second_signal)


def _on_second_signal(number: int, _frame: object) -> NoReturn:
    os._exit(128 + number)


def _print_ready(player: Player) -> None:
    shown = player.status()
    here = sum(task["owner"] == shown["owner"] for task in shown["tasks"])
    total = sum(spec.partitions for spec in player.targets)
    sys.stdout.write(f"player {player.name} ready: {counted(total, 'task')}, {here} here\n")
    sys.stdout.flush()


@app.command()
def check(file: File, *, timeout: Timeout = 10.0) -> None:
    """Check a file, its log and its targets, and report what a player would do; change nothing.

    Exit code 2: the file is not valid. 1: the log or a target cannot be reached, or records from
    `start` on were trimmed.
    """
    found = read(file)
    options = found.options
    with connect(",".join(options.endpoints), timeout) as log:
        tasks = document(log, options.name, tasks_of(found), timeout, _refuse)["tasks"]
        start, cluster = options.find_start(log), log.cluster_number
        check_start(log, options.name, found.targets, start)
    for spec, kind in zip(found.targets, found.kinds, strict=True):
        _check_target(spec, kind)
        if spec.check_source is not None:
            spec.check_source(cluster, timeout)
        here = [task for task in tasks if task["target"] == spec.name]
        beginning = "genesis" if start == RID_GENESIS else start
        positions = sorted({task["position"] or f"new, from {beginning}" for task in here})
        promise = "exactly once" if spec.stores_position else "at least once"
        say(
            f"target {spec.name}: {kind}, {promise}, {counted(spec.partitions, 'task')},"
            f" position {', '.join(positions)}"
        )
    say(f"{file} is valid: player {options.name}, {counted(len(tasks), 'task')}")


def _refuse(why: str) -> NoReturn:
    raise UnavailableError(why)


def _check_target(spec: TargetSpec, kind: str) -> None:
    """Connect to a target that can be checked, and change nothing there."""
    try:
        target = None if spec.connect is None else spec.connect()
        if spec.dead_letter:
            _check_directory(Path(spec.dead_letter))
        # A method `check` of a class in a file of the user may do anything.
        try_target = None if kind in _FOREIGN_KINDS else getattr(target, "check", None)
        if spec.receiver:
            check_receiver(spec.receiver)
        elif try_target is not None:
            try_target()
    except (ConfigError, UnavailableError) as error:
        error.args = (f"target {spec.name}: {error}", *error.args[1:])
        raise
    except Exception as error:  # The user's class, or the one that `connect` returns.
        raise UnavailableError(f"target {spec.name}: {text_of(error)}") from error


def _check_directory(file: Path) -> None:
    """Raise UnavailableError unless a file can be written, or made."""
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UnavailableError(f"cannot write the file {file} of rejected records")


@app.command()
def status(
    player: Annotated[
        str,
        typer.Argument(metavar="FILE|NAME", help="The player's file, or its name in the log."),
    ],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every second until Ctrl-C, also after outages.")
    ] = False,
    json: Json = False,
    timeout: Timeout = 10.0,
) -> None:
    """Show the tasks of a player and how far they are; no process of it need run.

    A FILE names its log; its tasks are shown also before they have cursors. A NAME is that
    of a player of the log at --bootstrap. What exists as a file, ends with .toml or has a '/' is a
    FILE.

    lag: age of the first record of the log after the cursor, also of another task's, and about how
    many bytes one replica of each shard stores from there on; 0 if there is no such record; none
    if a shard does not reply within --timeout.
    """
    name, tasks = player, None
    if Path(player).is_file() or player.endswith(".toml") or "/" in player:
        found = read(Path(player))
        bootstrap = ",".join(found.options.endpoints)
        name, tasks = found.options.name, tasks_of(found)
    PlayerOptions(name)  # It checks the name.
    with connect(bootstrap, timeout) as log:
        shown = document(log, name, tasks, timeout, say)
        if not watch or json or not sys.stdout.isatty():
            _print(shown, json=json)
            while watch:
                time.sleep(_REFRESH_S)
                later = _read_again(log, name, tasks, timeout, say)
                if later is not None:
                    _print(later, json=json)
            return
        with Live(_table(shown), auto_refresh=False, screen=True) as live:
            while True:
                later = _read_again(log, name, tasks, timeout, live.console.log)
                if later is not None:
                    live.update(_table(later), refresh=True)
                time.sleep(_REFRESH_S)


def _read_again(
    log: ziplog.Log,
    name: str,
    tasks: Sequence[tuple[str, int]] | None,
    timeout: float,
    warn: Callable[[str], object],
) -> dict[str, Any] | None:
    """Return the status document; None: the log does not reply now, as a warning says."""
    try:
        return document(log, name, tasks, timeout, warn)
    except UnavailableError as error:
        warn(f"the log is asked again: {error}")
        return None


def _print(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(shown)
    else:
        stdout().print(_table(shown))
    sys.stdout.flush()


def _table(shown: dict[str, Any]) -> Table:
    made = table(*_COLUMNS, right=_RIGHT)
    for task in shown["tasks"]:
        lag = None
        if task["lag_s"] is not None:
            lag = f"{task['lag_s']:,.1f} s, {filesize.decimal(task['lag_bytes'])}"
        row = (task["target"], task["partition"], task["state"], task["position"], lag)
        made.add_row(*map(cell, (*row, task["owner"])))
    return made


@app.command("example")
def print_example(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"Of the target: {', '.join(KINDS)}.")
    ],
) -> None:
    """Print a file with one target, and every key with its meaning and default."""
    if kind not in KINDS:
        raise ConfigError("KIND", kind, " or ".join(repr(name) for name in KINDS))
    sys.stdout.write(example(kind))
