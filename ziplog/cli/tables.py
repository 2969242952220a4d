"""Tables on stdout."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

from ziplog.cli.terminal import one_line

#: Width in a pipe: wide enough that no cell is cut.
_NO_TERMINAL_WIDTH = 1000


class _Stdout(Console):
    """Stdout; raises an error for a closed pipe, as other output does: the exit code is 0."""

    def on_broken_pipe(self) -> None:
        """Raise it."""
        raise BrokenPipeError


def stdout() -> Console:
    """Return stdout: as wide as the terminal."""
    width = None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH
    return _Stdout(file=sys.stdout, highlight=False, width=width)


def table(*names: str, right: frozenset[str] = frozenset()) -> Table:
    """Return a table with these columns; those in `right` are aligned to the right."""
    made = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        made.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return made


def cell(value: object) -> str:
    """Return a value as the text of a cell; empty for None."""
    return "" if value is None else one_line(str(value))
