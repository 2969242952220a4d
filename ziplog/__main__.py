"""The command `ziplog`, also as `python -m ziplog`.

Ctrl-C ends it with code 130 and without a word, also while the command line is being loaded and
while the interpreter ends; `ziplog.cli` handles it while a verb runs.
"""

from __future__ import annotations

import os
import signal

#: 128 + SIGINT, as shells report an interrupted command.
_INTERRUPTED = 130


def main() -> None:
    """Run the command line with the arguments of this process."""
    # A shell starts a command in the background with the signal ignored; that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from ziplog import cli  # noqa: PLC0415 - the handler comes first

    cli.main()


if __name__ == "__main__":
    main()
