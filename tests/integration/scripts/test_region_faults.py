"""The drive that fails whole regions: its verdict, and that of a cluster that breaks a rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from wan import namespaces

SCRIPT: Final = Path(__file__).resolve().parents[3] / "scripts" / "region_faults.py"
_REASON: Final = namespaces.why_not()
needs_namespaces = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def drive(
    tmp_path: Path, *arguments: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    changed = {"TMPDIR": str(tmp_path)} | ({} if path is None else {"PATH": path})
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False, env=os.environ | changed,
    )  # fmt: skip


def test_a_machine_without_namespaces_is_reported(tmp_path: Path) -> None:
    done = drive(tmp_path, path=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("no regions on this machine: cannot run `unshare`")


@needs_namespaces
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_the_rest_continues_without_a_region(tmp_path: Path) -> None:
    done = drive(tmp_path, "--kinds", "kill,cut", "--faults", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is lost" in done.stdout


@needs_namespaces
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_shards_within_a_region_fail_the_verdict(tmp_path: Path) -> None:
    done = drive(tmp_path, "--kinds", "cut", "--faults", "1", "--scale", "0.3", "--broken")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "were acknowledged in the region that was cut off" in done.stdout
    assert "and 2 were requested" in done.stdout
