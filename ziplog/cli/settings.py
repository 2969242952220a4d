"""`ziplog config`: prints and checks cluster files, and has running nodes apply changes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ziplog.cli.options import Json, Timeout, connect, say
from ziplog.cli.progress import waiting
from ziplog.cli.terminal import counted, print_json
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, load
from ziplog.config_changes import names_of, refuse
from ziplog.config_tables import MonitorConfig
from ziplog.config_text import dump
from ziplog.deploy import config_reload
from ziplog.errors import ConfigError
from ziplog.regions import config_warnings

app: Final = typer.Typer(
    help="Show or check a cluster file, or apply its changes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_EXAMPLE: Final = ClusterConfig(
    name="local",
    data_dir=Path("/var/lib/ziplog"),
    monitor=MonitorConfig(),
    mms=(NodeConfig("mms-0", "127.0.0.1", 7400, 7401),),
    failure_handlers=(NodeConfig("fh-0", "127.0.0.1", 7402, 7403),),
    shards=(
        ShardConfig(
            0,
            (
                NodeConfig("shard-0-0", "127.0.0.1", 7404),
                NodeConfig("shard-0-1", "127.0.0.1", 7405),
            ),
        ),
    ),
)


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="A cluster file. [default: an example]")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Print a cluster file with every key, its meaning, range and default; --json: its values."""
    config = _EXAMPLE if file is None else load(file)
    if json:
        document = dataclasses.asdict(config) | {"data_dir": str(config.data_dir)}
        if config.raft_password is not None:
            document["raft_password"] = "(not shown)"  # noqa: S105 - a text
        print_json(document)
        return
    sys.stdout.write(dump(config, explain=True))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The cluster file.")], *, json: Json = False
) -> None:
    """Check a cluster file. Exit code 2: it is not valid."""
    from ziplog.raft.raft import check_password  # noqa: PLC0415 - slow to import

    config = load(file)
    check_password([node.endpoint for node in config.nodes], config.raft_password)
    if json:
        print_json({"file": str(file), "valid": True})
    say(
        f"{file} is valid: {counted(len(config.mms), 'membership node')},"
        f" {counted(len(config.failure_handlers), 'failure handler')},"
        f" {counted(len(config.shards), 'shard')} x {counted(config.f + 1, 'replica')},"
        f" durability {config.durability}"
    )
    for warning in config_warnings(config):
        say(f"warning: {warning}")


@app.command()
def reload(
    file: Annotated[Path, typer.Argument(help="The cluster file.")],
    *,
    yes: Annotated[
        bool, typer.Option("--yes", help="Allow a change of durability from disk to memory.")
    ] = False,
    json: Json = False,
    timeout: Timeout = 10.0,
) -> None:
    """Apply a changed cluster file to the running nodes of this machine.

    Nodes take changes of [log], [monitor], [limits], durability, disk_reserve_bytes, cache_bytes
    and suspicion_ms while they run. If another key has changed, it is named, and nothing is applied
    (exit code 2). A change of durability is in force when the command returns.
    """
    plan = config_reload.plan(file)
    if "durability" in plan.changes and plan.config.durability == "memory" and not yes:
        sentence = (
            "no change was applied: durability = 'memory' weakens the log, because an insert is"
            " then done before any disk has it, and a power cut may lose it. Repeat the command"
            " with --yes"
        )
        raise ConfigError("durability", "memory", "--yes", message=sentence)
    others = [key for key, change in plan.changes.items() if change != "reload"]
    applied = [] if others else names_of(plan.changes, "reload")
    if not others:
        with waiting("the nodes apply the changes"):
            config_reload.apply(plan, timeout)
    if "durability" in applied:
        bootstrap = ",".join(node.endpoint for node in plan.config.mms)
        with connect(bootstrap, timeout) as log, waiting("all servers change their durability"):
            since = config_reload.await_level(log, plan.config.durability, timeout)
        say(f"durability is {plan.config.durability} from epoch {since} on")
    if json:
        document = {"applied": applied, "nodes": sorted(plan.nodes) if applied else []}
        document |= {kind: names_of(plan.changes, kind) for kind in ("restart", "stop", "never")}
        print_json(document)
    refuse(plan.changes)
    if applied:
        say(f"applied {', '.join(applied)} to {', '.join(plan.nodes)}")
    else:
        say(f"nothing has changed: the running nodes use the settings of {file}")
