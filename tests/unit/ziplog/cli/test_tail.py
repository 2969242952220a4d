"""`ziplog tail --follow` with a log in memory: what stdout shows while it waits."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, FakeSubscription, run
from ziplog.cli.tail import tail

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Waiting(FakeSubscription):
    """A subscription that notes what stdout shows whenever more records are requested."""

    def __init__(self, records: list[ziplog.Record], shown: Callable[[], bytes]) -> None:
        super().__init__(records)
        self.waits: list[bytes] = []
        self._shown = shown

    def fetch(self) -> list[ziplog.Record]:
        self.waits.append(self._shown())
        return super().fetch()


def test_each_record_is_shown_before_the_next_wait(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last record does not match, so no printed record follows the first one."""
    log.insert_many([b"wanted"], ziplog.RID_GENESIS, key="a")
    log.insert_many([b"other"], ziplog.RID_GENESIS, key="b")
    shown = io.BytesIO()
    followed = Waiting(log.records, shown.getvalue)
    monkeypatch.setattr(log, "subscribe", lambda *_, **__: followed)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(shown)))
    tail(key="a", follow=True)
    assert followed.waits == [b"", b"1@0\twanted\n"]


def test_a_limit_may_exceed_every_count(log: FakeLog) -> None:
    log.insert_many([b"a", b"b"], ziplog.RID_GENESIS)
    done = run("tail", "--limit", "99999999999999999999999")
    assert (done.exit_code, done.stdout) == (0, "1@0\ta\n2@0\tb\n")


def test_a_format_keeps_bytes_that_are_no_utf8(log: FakeLog) -> None:
    log.insert_many([b"\xfe"], ziplog.RID_GENESIS)
    done = run("tail", "--format", os.fsdecode(b"\xff %v"))
    assert done.stdout_bytes == b"\xff \\xfe\n"
