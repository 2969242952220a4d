"""The command line `ziplog`.

Rule: stdout carries data only; messages for people go to stderr. Exit codes: 0 done, 1 the
operation failed (one line says why and what to do), 2 bad usage, 130 Ctrl-C. Other packages add
verbs through the entry-point group `ziplog.commands`. Each verb is loaded on first use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

import typer

from ziplog.cli import completion, options
from ziplog.cli.options import say
from ziplog.cli.plugins import PluginGroup, Verb
from ziplog.errors import ConfigError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


#: The verbs, in the order of the help text.
_VERBS: Final = {
    "up": Verb("ziplog.cli.servers", "up"),
    "down": Verb("ziplog.cli.servers", "down"),
    "restart": Verb("ziplog.cli.restart", "restart"),
    "status": Verb("ziplog.cli.status", "status"),
    "top": Verb("ziplog.cli.top", "top"),
    "events": Verb("ziplog.cli.events", "events"),
    "epochs": Verb("ziplog.cli.epochs", "epochs"),
    "check": Verb("ziplog.cli.check", "check"),
    "monitor": Verb("ziplog.cli.monitor", "monitor"),
    "insert": Verb("ziplog.cli.records", "insert"),
    "append": Verb("ziplog.cli.records", "append"),
    "read": Verb("ziplog.cli.records", "read", takes_signs=True),
    "tail": Verb("ziplog.cli.tail", "tail"),
    "trim": Verb("ziplog.cli.trim", "trim", takes_signs=True),
    "demo": Verb("ziplog.cli.demo", "demo"),
    "completion": Verb("ziplog.cli.completion", "completion"),
    "version": Verb("ziplog.cli.version", "version"),
    "bench": Verb("ziplog.cli.bench", "app"),
    "node": Verb("ziplog.cli.nodes", "app"),
    "shard": Verb("ziplog.cli.shards", "app"),
    "upgrade": Verb("ziplog.cli.upgrade", "app"),
    "membership": Verb("ziplog.cli.membership", "app"),
    "config": Verb("ziplog.cli.settings", "app"),
    "region": Verb("ziplog.cli.regions", "app"),
    "cursor": Verb("ziplog.cli.cursors", "app"),
}


class Verbs(PluginGroup):
    """Our verbs and those of other packages; maps errors to one line and an exit code."""

    verbs: ClassVar[Mapping[str, Verb]] = _VERBS
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
