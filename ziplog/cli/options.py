"""Options that several verbs share, and messages on stderr."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

import ziplog
from ziplog import defaults
from ziplog.cli.progress import waiting
from ziplog.cli.terminal import one_line
from ziplog.errors import ConfigError
from ziplog.version import FILES
from ziplog.wire.node_info import VERSIONS

#: The environment variable of `Bootstrap` overrides it.
DEFAULT_BOOTSTRAP = defaults.BOOTSTRAP

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        envvar=defaults.VARIABLE,
        metavar="HOST:PORT",
        help="Nodes of the membership service, separated by commas.",
    ),
]
Region = Annotated[
    str | None,
    typer.Option(
        "--region",
        metavar="NAME",
        help="The region of this command: near servers are preferred. [default: $ZIPLOG_REGION]",
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Time limit."),
]
DataDir = Annotated[
    Path,
    typer.Option("--data-dir", metavar="D", help="The cluster's directory."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]


def versions_text() -> str:
    """Return the versions of the command, of its messages, of a node's files, and of Python."""
    python = platform.python_version()
    return f"ziplog {ziplog.__version__}, wire {VERSIONS}, files {FILES}, Python {python}"


def _print_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"{versions_text()}\n")
        raise typer.Exit


def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Ziplog, a sharded, replicated, totally ordered shared log."""


def connect(bootstrap: str, timeout: float, region: str | None = None) -> ziplog.Log:
    """Return a client for one verb; `region`: where it runs, None: as the environment says."""
    with waiting(f"connecting to {bootstrap}"):
        return ziplog.connect(bootstrap, timeout=timeout, region=region)


def typed_bytes(text: str) -> bytes:
    """Return the bytes of an argument as they were typed, also if they are no UTF-8."""
    return text.encode(errors="surrogateescape")


def is_terminal() -> bool:
    """Whether a person can answer a question, or type a record."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdin() -> BinaryIO:
    """Return standard input.

    Raises:
        ConfigError: its descriptor was closed when the process started.

    """
    if sys.stdin is None:
        sentence = "stdin is closed; give a file, or redirect stdin from /dev/null"
        raise ConfigError("stdin", None, "open", message=sentence)
    return sys.stdin.buffer


def say(text: str) -> None:
    """Print a message for people, in one line on stderr."""
    line = one_line(" ".join(text.split()))
    sys.stderr.write(f"ziplog: {line}\n")
    sys.stderr.flush()
