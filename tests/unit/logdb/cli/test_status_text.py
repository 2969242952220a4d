"""The status of a coordinator as text: groups, and what needs attention."""

from __future__ import annotations

from typing import Any

from logdb.cli.status_text import lines

DOCUMENT: dict[str, Any] = {
    "ready": True, "endpoint": "h:1", "position": "7@0", "passed": 900, "tail": 1900, "starts": 1,
    "keys": 1234, "data_bytes": 5, "records": 6, "commits": 4, "aborts": 3, "first_foreign": 0,
    "first_unreadable": 0, "since_checkpoint": 9, "last_checkpoint": "", "checkpoints": True,
    "cleaner": {"rounds": 2, "failed": 0, "left": 0, "moved_bytes": 8, "reason": ""},
    "log_bytes": 10, "moving_bytes": 11, "dead_bytes": 12, "trimmed": 1, "snapshots": 0,
    "snapshot_entries": 0, "sessions": 1, "waiting": 0, "cached_values": 0, "cache_bytes": 0,
}  # fmt: skip


def test_a_well_coordinator_has_groups_and_no_notes() -> None:
    shown = list(lines(DOCUMENT))
    assert shown[0] == "coordinator h:1: ready, 1,000 positions behind"
    assert "data        1,234 keys, 5 bytes" in shown
    assert "decided     4 commits, 3 aborts" in shown
    assert "checkpoint  none yet, 9 records since" in shown
    assert shown[-1].startswith("cache")
    assert all(len(line) <= 80 for line in shown)


def test_what_needs_attention_comes_last() -> None:
    spoilt = DOCUMENT | {
        "ready": False, "first_foreign": 5, "first_unreadable": 6, "starts": 2,
        "checkpoints": False, "last_checkpoint": "3@1",
        "cleaner": DOCUMENT["cleaner"] | {"failed": 1, "reason": "no space"},
    }  # fmt: skip
    shown = list(lines(spoilt))
    assert "not ready" in shown[0]
    assert "checkpoint  last at 3@1, 9 records since, this coordinator makes none" in shown
    assert "cleaner     2 rounds, 8 bytes moved, 1 failed (no space)" in shown
    assert shown[-3:] == [
        "an unreadable record at 6 stops the cleaner",
        "the first record of another program is at 5",
        "the tail of the log was started 2 times",
    ]
