"""`ziplog restart`: restart nodes one after the other, while the cluster serves."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ziplog.cli.options import DataDir, connect, say
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
        typer.Option("--node", metavar="NAME", help="Only this node; may be repeated."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Limit of each node.")
    ] = 60.0,
) -> None:
    """Restart the nodes of a running cluster, for example after an upgrade.

    Backups come before primaries, the membership leader comes last. Each node must be back, and all
    shards live, before the next one is stopped.
    """
    if not rolling:
        sentence = "give --rolling; to restart all nodes at once, run `ziplog down` and `ziplog up`"
        raise ConfigError("--rolling", rolling, "given", message=sentence)
    with connect(load(data_dir / CLUSTER_FILE).bootstrap, _STATUS_S) as log:
        RollingRestart(data_dir, log, timeout).run(
            node or [], lambda name, seconds: say(f"{name} restarted ({seconds:.1f} s)")
        )
