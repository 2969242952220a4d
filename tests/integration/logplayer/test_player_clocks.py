"""Jumps of the wall clock of a process with a player and its targets: nothing depends on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import logplayer
from logplayer import targets
from tests.integration.logplayer.playing import (
    LEASE_S,
    Filled,
    assert_exactly_once,
    history,
    insert,
)
from tests.waiting import wait_until
from ziplog.types import RecordId

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog
    from ziplog.types import Record

pytestmark = pytest.mark.timeout(240)
_DAY_S = 86_400


class WallClock:
    """The wall clock of this process, which jumps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shift_s = 0
        seconds, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: seconds() + self.shift_s)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + self.shift_s * 10**9)


def states(player: logplayer.Player) -> set[str]:
    return {task["state"] for task in player.status()["tasks"]}


@pytest.mark.parametrize("jumps_s", [(_DAY_S, -2 * _DAY_S)], ids=["a day forward, and two back"])
def test_the_wall_clock_may_jump(
    log: ziplog.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jumps_s: tuple[int, ...]
) -> None:
    clock, name = WallClock(monkeypatch), "clocks"
    start = RecordId(log.check_tail().gsn + 1, 0)
    filled, seen = Filled(tmp_path, log, name, start), list[RecordId]()
    failures = 0

    def handle(record: Record) -> None:
        nonlocal failures
        seen.append(record.rid)
        if len(seen) % 40 == 0:
            failures += 1
            raise logplayer.Retry("not now", after_s=1.0)

    copy = targets.sqlite("copy", filled.path, "INSERT INTO events VALUES (:gsn, :key_text, :text)")
    function = targets.function("function", handle)
    player = logplayer.Player(
        log, name, [copy, function], start=start, lease_s=LEASE_S, commit_ms=50
    )
    with player:
        terms = {one.name: one.term for one in log.cursors(f"{name}/*")}
        for jump_s in (0, *jumps_s):
            last = insert(log, 60)[-1]
            wait_until(lambda: "retrying" in states(player), "a pause is under way")
            clock.shift_s += jump_s
            player.wait_until(last, timeout=60)
        assert states(player) == {"playing"}
        assert {one.name: one.term for one in log.cursors(f"{name}/*")} == terms, "a lease ended"
        assert not any(one.is_silent for one in log.cursors(f"{name}/*"))
    expected = history(log, start)
    assert len(expected) == 180
    assert_exactly_once(filled.rows(), expected)
    assert [rid.gsn for rid in dict.fromkeys(seen)] == [gsn for gsn, _, _ in expected]
    assert len(seen) == len(expected) + failures, "the function got more repetitions"
