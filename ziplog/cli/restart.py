"""`ziplog restart`: restart nodes one after the other, while the cluster serves."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from ziplog.cli import known_names
from ziplog.cli.options import DataDir, Json, connect, say
from ziplog.cli.progress import waiting
from ziplog.cli.terminal import print_json
from ziplog.config import load
from ziplog.deploy.rolling_restart import RollingRestart
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError

#: Time limit of the first status.
_STATUS_S: Final = 10.0


def restart(
    data_dir: DataDir,
    *,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One node after the other; required.")
    ] = False,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Only this node; may be repeated.",
            autocompletion=known_names.nodes,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Limit of each node.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Restart the nodes of a running cluster, for example after an upgrade.

    Backups come before primaries, the membership leader comes last. Each node must be back, and all
    shards live, before the next one is stopped.
    """
    if not rolling:
        sentence = "give --rolling; to restart all nodes at once, run `ziplog down` and `ziplog up`"
        raise ConfigError("--rolling", rolling, "given", message=sentence)
    bootstrap = load(data_dir / CLUSTER_FILE).bootstrap
    with connect(bootstrap, _STATUS_S) as log, waiting("restarting the first node") as show:

        def report(name: str, seconds: float) -> None:
            show(f"{name} is back; restarting the next node")
            if json:
                line = {"node": name, "seconds": round(seconds, 3)}
                print_json(line)
                sys.stdout.flush()
            else:
                say(f"{name} restarted ({seconds:.1f} s)")

        RollingRestart(data_dir, log, timeout).run(node or [], report)
