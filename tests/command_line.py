"""Argument parser of the tests' programs: a usage error prints one line and exits with 2."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line; --help shows the usage."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from a minimum."""

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
    """Return the one-line usage error of a command."""
    code: object = None
    try:
        main(arguments)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line
