"""Command lines of tests: bad usage is one line that says what is wrong, and exit code 2."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong; the usage is for --help."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number that is not less."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[-+]?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
        return int(text)

    return number


def refusal(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
) -> str:
    """Return the one line with which a command refuses its arguments."""
    code: object = None
    try:
        main(arguments)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line
