"""Progress on a terminal leaves redirected output alone."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
from typing import TYPE_CHECKING

from ziplog.cli import progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@contextlib.contextmanager
def redirected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, io.StringIO]]:
    """Make stderr a terminal, but not stdout; yield the terminal's other end, and stdout."""
    terminal, descriptor = pty.openpty()
    stdout = io.StringIO()
    stderr = os.fdopen(descriptor, "w", encoding="utf-8")
    with stderr, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stdout", stdout)
        patched.setattr(sys, "stderr", stderr)
        yield terminal, stdout
    os.close(terminal)


def read_until(terminal: int, text: bytes) -> None:
    """Read until the terminal shows a text."""
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)


def test_lines_below_a_bar_go_to_the_redirected_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    with redirected(monkeypatch) as (terminal, stdout), progress.bar("inserting", 10):
        read_until(terminal, b"inserting")
        sys.stdout.write("1@0\n")
    assert stdout.getvalue() == "1@0\n"


def test_lines_during_a_wait_go_to_the_redirected_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    with redirected(monkeypatch) as (terminal, stdout), progress.waiting("restarting") as show:
        read_until(terminal, b"restarting")
        show("the next node")
        read_until(terminal, b"the next node")
        sys.stdout.write("shard-0-0\n")
    assert stdout.getvalue() == "shard-0-0\n"
