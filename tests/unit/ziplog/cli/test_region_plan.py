"""`ziplog region plan`: the cluster file that it prints."""

from __future__ import annotations

from tests.unit.ziplog.cli.fakes import run


def test_a_plan_of_regions_has_their_longest_round_trip() -> None:
    trips = ("--rtt", "eu-us=40", "--rtt", "us-ap=299.5", "--rtt", "ap-eu=120")
    planned = run("region", "plan", "eu", "us", "ap", *trips)
    assert "rtt_ms = 300\n" in planned.stdout
    assert "suspicion_ms = 1200\n" in planned.stdout
    assert "set rtt_ms" not in planned.stderr
    assert "set rtt_ms to the longest round trip" in run("region", "plan", "eu", "us").stderr
