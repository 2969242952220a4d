"""`ziplog node`: lists the nodes of a running cluster; runs one node of a cluster file."""

from __future__ import annotations

import os
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Final

import msgspec
import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect
from ziplog.cli.status import nodes_table, with_roles
from ziplog.cli.tables import stdout
from ziplog.config import load
from ziplog.deploy.supervisor import environment, module_of, python

app: Final = typer.Typer(
    help="List the nodes of a cluster, or run one.", no_args_is_help=True, rich_markup_mode=None
)


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
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")


@app.command()
def run(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The cluster file.")],
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="The node's name in it.")],
) -> None:
    """Run one node until SIGTERM or Ctrl-C, in place of this process; log to stderr.

    It is `python -m mms`, `failure_handler` or `shard`, as the cluster file says.
    """
    module = module_of(load(config), node)
    command = python(module, "--config", str(config), "--node", node)
    os.execve(command[0], command, environment())  # noqa: S606 - our own interpreter and module
