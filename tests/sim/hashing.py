"""Check that a program's output does not depend on the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def printed_under_any_hashes(program: str) -> str:
    """Run a program with two hash seeds; return its output, which must be equal."""
    printed = {
        seed: subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(set(printed.values())) == 1, printed
    return printed["1"]
