"""Run a command inside a region: `inside.py ROUTER_PID REGION COMMAND ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wan import namespaces

if __name__ == "__main__":
    namespaces.enter(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606 - no shell is wanted
