"""The command line `ziplog`.

Rule: stdout carries data only; messages for people go to stderr. Exit codes: 0 done, 1 the
operation failed (one line says why and what to do), 2 bad usage, 130 Ctrl-C. Other packages add
verbs through the entry-point group `ziplog.commands`, loaded on first use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

import typer

from ziplog.cli import (
    bench,
    check,
    completion,
    cursors,
    demo,
    epochs,
    events,
    membership,
    monitor,
    nodes,
    options,
    records,
    restart,
    servers,
    settings,
    shards,
    status,
    tail,
    top,
    trim,
    upgrade,
    version,
)
from ziplog.cli.options import say
from ziplog.cli.plugins import PluginGroup
from ziplog.errors import ConfigError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Verbs(PluginGroup):
    """Our verbs and those of other packages; maps errors to one line and an exit code."""

    entry_points: ClassVar[str] = "ziplog.commands"

    def invoke(self, ctx: Any) -> Any:
        """Run a verb. Ctrl-C raises KeyboardInterrupt meanwhile, so that what is open is closed."""
        with _interrupts_raised():
            try:
                result = super().invoke(ctx)
                sys.stdout.flush()
            except ConfigError as error:
                say(f"error: {error}")
                raise SystemExit(2) from None
            except ZiplogError as error:
                say(f"error: {error}")
                raise SystemExit(1) from None
            except OSError as error:
                raise SystemExit(_on_os_error(error)) from None
            except KeyboardInterrupt:
                raise SystemExit(130) from None
            except typer.Abort as error:
                # A question was not answered with yes; Ctrl-C counts as an answer there.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise SystemExit(130) from None
                raise
            return result


@contextlib.contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C; outside, `ziplog.__main__` ends the process."""
    former = signal.getsignal(signal.SIGINT)
    if not callable(former) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _on_os_error(error: OSError) -> int:
    """Report an error of the system, and return the exit code."""
    if isinstance(error, BrokenPipeError) or error.filename is None:
        # Perhaps stdout failed: the interpreter must not flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0  # The reader closed the pipe.
    say(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
    return 1


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
app.command("top")(top.top)
app.command("events")(events.events)
app.command("epochs")(epochs.epochs)
app.command("check")(check.check)
app.command("monitor")(monitor.monitor)
app.command("insert")(records.insert)
app.command("append")(records.append)
app.command("read", context_settings={"ignore_unknown_options": True})(records.read)
app.command("tail")(tail.tail)
app.command("trim", context_settings={"ignore_unknown_options": True})(trim.trim)
app.command("demo")(demo.demo)
app.command("completion")(completion.completion)
app.command("version")(version.version)
app.add_typer(bench.app, name="bench")
app.add_typer(nodes.app, name="node")
app.add_typer(shards.app, name="shard")
app.add_typer(upgrade.app, name="upgrade")
app.add_typer(membership.app, name="membership")
app.add_typer(settings.app, name="config")
app.add_typer(cursors.app, name="cursor")


def main() -> None:
    """Run the command line with the arguments of this process."""
    _open_closed_streams()
    completion.enable()
    try:
        app()
    except OSError as error:  # from --help and --version, which no verb prints
        raise SystemExit(_on_os_error(error)) from None


def _open_closed_streams() -> None:
    """Open /dev/null where a standard stream was closed at the start, so that no socket is there.

    stdin stays absent, because an empty input could be taken for a record. A closed stdout is an
    error.
    """
    closed = [n for n, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for descriptor in closed:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        say("error: stdout is closed; redirect it to /dev/null to discard the output")
        raise SystemExit(1)
