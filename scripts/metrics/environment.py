"""Where and when figures were measured: the code, the machine and Python of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Return what tells this run from others: its date and commit, the machine, and Python."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "python": sys.version,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def _commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; "": it is none."""
    git = ["git", "-C", str(_ROOT)]
    found = subprocess.run(
        [*git, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    return found.stdout.strip()


def _processor() -> str:
    """Return the processor's name, as far as the system gives one."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
    return platform.processor() or platform.machine()
