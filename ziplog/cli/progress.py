"""Progress of long work: on a terminal only, so that pipes and logs hold no control sequences."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

#: A shorter wait is not shown.
_DELAY_S: Final = 1.0


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show what a command waits for, once it has waited for a second; yield how to change it."""
    console = _terminal()
    if console is None:
        yield lambda _: None
        return
    from rich.live import Live  # noqa: PLC0415 - slow to import
    from rich.spinner import Spinner  # noqa: PLC0415

    spinner = Spinner("dots", text, style="status.spinner")
    live = Live(
        spinner,
        console=console,
        refresh_per_second=12.5,
        transient=True,
        redirect_stdout=_shares_the_terminal(),
    )
    timer = threading.Timer(_DELAY_S, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: spinner.update(text=text)
    finally:
        timer.cancel()
        timer.join()
        live.stop()


@contextlib.contextmanager
def bar(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Show a bar, unless the total is unknown; yield how to set what is done of it."""
    console = _terminal()
    if console is None or total is None:
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415
    from rich.progress import TimeRemainingColumn as Remaining  # noqa: PLC0415 - slow to import

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
    redirect = _shares_the_terminal()
    with Progress(*columns, console=console, transient=True, redirect_stdout=redirect) as shown:
        task = shown.add_task(text, total=total)
        yield lambda done: shown.update(task, completed=done)


def _terminal() -> Console | None:
    """Return stderr if it is a terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console  # noqa: PLC0415 - slow to import

    console = Console(stderr=True)
    return None if console.is_dumb_terminal else console


def _shares_the_terminal() -> bool:
    """Whether stdout is a terminal too, so that its lines must go above what is shown.

    Otherwise rich would write the lines to the terminal, in place of the file or pipe.
    """
    return sys.stdout.isatty()
