"""Run a node that counts its frames: `counted_node.py FOLDER MODULE ...`.

It replaces `python -m MODULE`. On SIGUSR1 it writes its counters since the start to a file in
FOLDER with the name of its pid.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from metrics import frames


def main() -> None:
    """Run the module that the arguments name."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    counts = frames.count()
    path = folder / str(os.getpid())

    def write(*_: object) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(counts))
        new.replace(path)

    signal.signal(signal.SIGUSR1, write)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
