"""`ziplog membership`: makes the state of a lost membership service anew."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ziplog.cli.options import DataDir, Json, is_terminal, say
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import print_json
from ziplog.deploy.membership_rebuild import MembershipRebuild
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from ziplog.core.holdings import RebuildPlan

app: Final = typer.Typer(
    help="Repair the membership service.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _root() -> None:
    """Repair the membership service."""


@app.command("rebuild")
def rebuild(
    data_dir: DataDir,
    *,
    lost: Annotated[
        list[str] | None,
        typer.Option(
            "--lost",
            metavar="NODE",
            help="A storage server whose directory is lost for good; may be repeated.",
        ),
    ] = None,
    holdings: Annotated[
        list[Path] | None,
        typer.Option(
            "--holdings",
            metavar="FILE",
            help="From another machine; see `holdings`. May be repeated.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Rebuild the membership service from the storage servers' directories.

    For a stopped cluster that lost the directories of a majority of its membership nodes. It prints
    the state that it will write, and asks. All records and their positions stay.
    """
    with contextlib.closing(MembershipRebuild(data_dir)) as work:
        plan = work.plan(lost or (), holdings or ())
        if json:
            _print(_document(plan))
        else:
            _show(plan)
        if not yes:
            if not is_terminal():
                sentence = "nothing was written: stdin is not a terminal, so --yes is required"
                raise ConfigError("--yes", None, "given", message=sentence)
            typer.confirm("Write the membership service with this state?", abort=True, err=True)
        written = work.write(plan)
    nodes = ", ".join(path.name for path in written)
    say(f"wrote {nodes}; start the cluster with `ziplog up --data-dir {data_dir}`")


@app.command("holdings")
def holdings(
    data_dir: DataDir,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ],
    *,
    json: Json = False,
) -> None:
    """Write what this machine's stopped nodes hold to a small file, for a rebuild elsewhere.

    Without records. `ziplog membership rebuild --holdings FILE` takes it in place of the
    directories. Start none of these nodes before the rebuild is done.
    """
    with contextlib.closing(MembershipRebuild(data_dir)) as work:
        names = work.save_holdings(output)
    if json:
        _print({"file": str(output), "nodes": names})
    say(f"wrote what {', '.join(names)} hold to {output}")


def _document(plan: RebuildPlan) -> dict[str, Any]:
    """Return what a rebuild is about to write."""
    return {
        "cluster_id": plan.cluster,
        "trimmed_before": plan.trim,
        "known_end": plan.known_end,
        "first_free": plan.first_free,
        "shards": [
            {"id": one.shard, "state": one.state, "view": one.view, "servers": one.servers}
            for one in plan.shards
        ],
        "notes": plan.notes,
    }


def _print(document: dict[str, Any]) -> None:
    print_json(document)
    sys.stdout.flush()


def _show(plan: RebuildPlan) -> None:
    rows = table("shard", "state", "view", "servers", right=frozenset({"shard", "view"}))
    for shard in plan.shards:
        rows.add_row(str(shard.shard), shard.state, str(shard.view), cell(", ".join(shard.servers)))
    out = stdout()
    out.print(f"cluster {plan.cluster}: records were trimmed before position {plan.trim}")
    out.print(
        f"all known positions are below {plan.known_end}; the next ones start at {plan.first_free}"
    )
    out.print(rows)
    for note in plan.notes:
        say(f"note: {note}")
