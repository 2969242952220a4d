"""`ziplog node`: lists nodes, runs or restarts one, and changes the log level of a running one."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ziplog.cli import known_names, moments
from ziplog.cli.options import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    DataDir,
    Json,
    Timeout,
    connect,
    say,
)
from ziplog.cli.progress import waiting
from ziplog.cli.restart import restart
from ziplog.cli.status import nodes_table, with_roles
from ziplog.cli.tables import stdout
from ziplog.cli.terminal import print_json
from ziplog.config import load
from ziplog.deploy import config_reload
from ziplog.deploy.supervisor import module_of
from ziplog.errors import ConfigError
from ziplog.runtime.child_processes import environment, python

app: Final = typer.Typer(
    help="List the nodes of a cluster, run or restart one, or change its log level.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The cluster file.")]


class LogLevel(enum.StrEnum):
    """A level of `[log]`, or the one in the cluster file."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    DEFAULT = "default"


@app.command("list")
def list_nodes(
    *, json: Json = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, timeout: Timeout = 10.0
) -> None:
    """List all nodes with role, state, last heartbeat, address and process; --json: one a line."""
    with connect(bootstrap, timeout) as log:
        document = log.cluster()
    if not json:
        stdout().print(nodes_table(document))
        return
    for node, role in with_roles(document):
        line = node | {"role": role.removesuffix(" leader")}
        print_json(line)


@app.command()
def run(
    config: ConfigFile,
    node: Annotated[
        str,
        typer.Option(
            "--node",
            metavar="NAME",
            help="The node's name in it.",
            autocompletion=known_names.nodes,
        ),
    ],
) -> None:
    """Run one node until SIGTERM or Ctrl-C, in place of this process; log to stderr.

    It is `python -m mms`, `failure_handler` or `shard`, as the cluster file says.
    """
    module = module_of(load(config), node)
    command = python(module, "--config", str(config), "--node", node)
    os.execve(command[0], command, environment())  # noqa: S606 - our own interpreter and module


@app.command("restart")
def restart_nodes(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="The nodes' names.", autocompletion=known_names.nodes
        ),
    ],
    data_dir: DataDir,
    *,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Limit of each node.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Restart nodes of this machine one after the other, as `ziplog restart --rolling --node`."""
    restart(data_dir, rolling=True, node=names, timeout=timeout, json=json)


@app.command("log-level")
def log_level(
    node: Annotated[
        str,
        typer.Argument(metavar="NODE", help="The node's name.", autocompletion=known_names.nodes),
    ],
    level: Annotated[LogLevel, typer.Argument(help="default: that of the cluster file.")],
    config: ConfigFile,
    *,
    span: Annotated[
        str | None,
        typer.Option("--for", metavar="10m|2h", help="How long. [default: until its restart]"),
    ] = None,
    json: Json = False,
    timeout: Timeout = 10.0,
) -> None:
    """Change the log level of a running node of this machine; the cluster file stays as it is.

    The level holds until the node is restarted, or `ziplog config reload` applies another level.

    Example: ziplog node log-level shard-0-0 debug --for 10m --config D/cluster.toml
    """
    seconds = None if span is None else moments.span_s("--for", span)
    chosen = None if level is LogLevel.DEFAULT else level.value
    if chosen is None and seconds is not None:
        sentence = "--for needs another level than default"
        raise ConfigError("--for", span, "left out", message=sentence)
    with waiting(f"{node} changes its log level"):
        config_reload.set_log_level(config, node, chosen, seconds, timeout)
    if json:
        line = {"node": node, "level": level.value, "seconds": seconds}
        print_json(line)
    limit = "" if span is None else f" for {span}"
    say(f"{node} logs with level {level.value}{limit}")
