"""The examples of the README run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def block(section: str) -> str:
    """Return the first Python block of a section of the README."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    code = text.partition("```python\n")[2].partition("```")[0]
    assert code, f"no Python under {section!r}"
    return code


def output(section: str, directory: Path) -> str:
    """Run a section's block in a separate process, with its files in a directory."""
    script = directory / "quickstart.py"
    script.write_text(re.sub(r'"/tmp/', f'"{directory}/', block(section)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        check=False, capture_output=True, text=True, cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quick_start(tmp_path: Path) -> None:
    lines = output("Quick start", tmp_path).splitlines()
    assert lines[0] == "b'first'"
    assert [line.split()[-1] for line in lines[1:]] == [
        "b'first'", "b'second'", "b'x'", "b'y'", "b'z'",
    ]  # fmt: skip


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_quick_start_of_spark(tmp_path: Path) -> None:
    lines = output("Spark", tmp_path).splitlines()
    shown = [line for line in lines if "event" in line]
    assert [line.split("|")[-2].strip() for line in shown] == [f"event {n}" for n in range(5)]
    assert lines[-1] == "100000 200000"
