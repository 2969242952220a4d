"""The command line `ziplog`.

Rule: stdout carries data only; messages for people go to stderr. Exit codes: 0 done, 1 the
operation failed (one line says why and what to do), 2 bad usage, 130 Ctrl-C. Other packages add
verbs through the entry-point group `ziplog.commands`, loaded on first use.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar, Final

import typer

from ziplog.cli import (
    bench,
    check,
    completion,
    demo,
    monitor,
    options,
    records,
    restart,
    servers,
    settings,
    shards,
    status,
    upgrade,
)
from ziplog.cli.options import say
from ziplog.cli.plugins import PluginGroup
from ziplog.errors import ConfigError, ZiplogError


class Verbs(PluginGroup):
    """Our verbs and those of other packages; maps errors to one line and an exit code."""

    entry_points: ClassVar[str] = "ziplog.commands"

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except ConfigError as error:
            say(f"error: {error}")
            raise SystemExit(2) from None
        except ZiplogError as error:
            say(f"error: {error}")
            raise SystemExit(1) from None
        except BrokenPipeError:
            # The reader closed the pipe. The interpreter must not flush to it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        except OSError as error:
            say(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        return result


app: Final = typer.Typer(
    cls=Verbs,
    help="Ziplog, a sharded, replicated, totally ordered shared log.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(options.root)
app.command("up")(servers.up)
app.command("down")(servers.down)
app.command("restart")(restart.restart)
app.command("status")(status.status)
app.command("check")(check.check)
app.command("monitor")(monitor.monitor)
app.command("insert")(records.insert)
app.command("read")(records.read)
app.command("tail")(records.tail)
app.command("trim")(records.trim)
app.command("demo")(demo.demo)
app.command("completion")(completion.completion)
app.add_typer(bench.app, name="bench")
app.add_typer(shards.app, name="shard")
app.add_typer(upgrade.app, name="upgrade")
app.add_typer(settings.app, name="config")


def main() -> None:
    """Run the command line with the arguments of this process."""
    if sys.stdout is None:  # Its descriptor was closed when the process started.
        say("error: stdout is closed; redirect it to /dev/null to discard the output")
        raise SystemExit(1)
    completion.enable()
    app()
