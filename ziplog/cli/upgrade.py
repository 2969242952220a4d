"""`ziplog upgrade`: ends an upgrade, once all nodes run the new release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.terminal import print_json
from ziplog.errors import UnavailableError
from ziplog.status_document import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

app: Final = typer.Typer(
    help="End an upgrade to another release.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def root() -> None:
    """End an upgrade to another release."""


@app.command("finish")
def finish(
    *, json: Json = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, timeout: Timeout = 10.0
) -> None:
    """Use the new messages and file forms of the release that all nodes run.

    Until then, `ziplog restart --rolling` can also return to the former release; afterwards that
    release does not start any more. Refused, with the names, while a node is down or runs a release
    that does not know them.
    """
    with connect(bootstrap, timeout) as log:
        document = log.cluster()
        before = document.get("wire_in_use")
        if before is None:
            raise UnavailableError(
                "the membership leader runs a release that does not know this command; restart the"
                " membership nodes with the new release first"
            )
        wire = log.finish_upgrade(max([before, *filter(None, _last_wires(document))]))
    if json:
        print_json({"wire_in_use": wire})
    elif wire == before:
        say(f"nothing to do: wire version {wire} is in use, and no node knows a later one")
    else:
        say(f"wire version {wire} is in use; releases that do not know it cannot be started again")


def unfinished(document: dict[str, Any]) -> str:
    """Return how to end the upgrade, if all nodes of a status document are ready; "": they are not.

    Args:
        document: the status document; earlier releases do not report versions in it.

    """
    in_use, last = document.get("wire_in_use"), list(_last_wires(document))
    if in_use is None or None in last or (ready := min(filter(None, last))) <= in_use:
        return ""
    return (
        f"wire version {in_use} is in use, and all nodes know version {ready}:"
        " `ziplog upgrade finish` ends the upgrade"
    )


def _last_wires(document: dict[str, Any]) -> Iterator[int | None]:
    """Yield the last wire version that each node knows; None: it has not reported it."""
    for node in nodes_of(document):
        known = node.get("wire_versions")
        yield None if known is None else known[1]
