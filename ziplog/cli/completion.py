"""`ziplog completion`: scripts that let a shell complete verbs and options."""

from __future__ import annotations

import enum
import os
import sys
from typing import Annotated, Final

import typer
from typer import completion as scripts

#: A shell sets it when it requests completions.
_VARIABLE: Final = "_ZIPLOG_COMPLETE"


class Shell(enum.StrEnum):
    """A shell for which there is a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion script of a shell; for bash: eval "$(ziplog completion bash)"."""
    script = scripts.get_completion_script(  # type: ignore[attr-defined]
        prog_name="ziplog", complete_var=_VARIABLE, shell=shell.value
    )
    sys.stdout.write(f"{script}\n")


def enable() -> None:
    """Let the command line reply to a shell that requests completions."""
    if _VARIABLE in os.environ:
        scripts.completion_init()  # type: ignore[attr-defined]
