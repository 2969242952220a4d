"""The measurements of players that need no other system, on a small scale."""

from __future__ import annotations

import pytest
from player_bench import copies, delays, ownership

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def test_rates_into_databases_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SIZES", ((100, 2000),))
    for row in copies.sql(0.01)["L6"].values():
        assert row["player_per_s"] > 0
        assert row["ratio"] > 0
    found = copies.files(0.01)["L7"]
    assert found["files"]["ratio"] > 0
    assert found["mirror"]["player_per_s"] > 0


def test_delays_of_push_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "_TARGETS", (2, 3))
    found = delays.over_targets(0.1)
    for row in (found["L1"]["2 targets"], found["L1"]["3 targets"]):
        # Each record has a part at both or all targets, but for few.
        assert row["player"]["count"] == row["floor"]["count"] > 100
    assert found["L3"]["growth"] > 0


def test_takeover_by_another_process() -> None:
    found = ownership.failover(0.1)["L9"]
    assert 0 < found["SIGTERM"]["median_s"] < found["killed"]["worst_s"]
