"""`ziplog tail --follow` with a log in memory: what stdout shows while it waits."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, FakeSubscription, run
from ziplog.cli.tail import tail

if TYPE_CHECKING:
    from collections.abc import Callable


class Waiting(FakeSubscription):
    """A subscription that notes what stdout shows whenever more records are requested."""

    def __init__(self, records: list[ziplog.Record], shown: Callable[[], bytes]) -> None:
        super().__init__(records)
        self.waits: list[bytes] = []
        self._shown = shown

    def fetch(self, *, timeout: float | None = None) -> list[ziplog.Record]:
        self.waits.append(self._shown())
        return super().fetch(timeout=timeout)


class Idle(FakeSubscription):
    """A subscription of a log without new records, which passes one more position in each fetch."""

    def __init__(self, records: list[ziplog.Record], at: int) -> None:
        super().__init__(records)
        self.position = ziplog.RecordId(at, 0)

    def fetch(self, *, timeout: float | None = None) -> list[ziplog.Record]:
        assert timeout is not None, "it would wait for a record after the end"
        self.position = ziplog.RecordId(self.position.gsn + 1, 0)
        return super().fetch(timeout=timeout)


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


def test_a_tail_from_the_end_of_a_trimmed_log_begins_after_the_trim(log: FakeLog) -> None:
    """The last record itself was trimmed; only a position that the user gave fails then."""
    log.insert_many([b"a", b"b"], ziplog.RID_GENESIS)
    log.trimmed_to = 3
    assert run("tail", "--from", "end").output == ""
    assert run("tail", "--from", "end").exit_code == 0
    assert run("tail", "--from", "2").exit_code == 1


def test_a_limit_may_exceed_every_count(log: FakeLog) -> None:
    log.insert_many([b"a", b"b"], ziplog.RID_GENESIS)
    done = run("tail", "--limit", "99999999999999999999999")
    assert (done.exit_code, done.stdout) == (0, "1@0\ta\n2@0\tb\n")


def test_a_format_keeps_bytes_that_are_no_utf8(log: FakeLog) -> None:
    log.insert_many([b"\xfe"], ziplog.RID_GENESIS)
    done = run("tail", "--format", os.fsdecode(b"\xff %v"))
    assert done.stdout_bytes == b"\xff \\xfe\n"


@pytest.mark.parametrize("pattern", ["{nope}", "", "100%%", r"\t", "%q", "%"])
def test_a_format_without_a_known_field_is_a_usage_error(log: FakeLog, pattern: str) -> None:
    done = run("tail", "--format", pattern)
    assert done.exit_code == 2
    assert "its fields are %r, %g, %s, %e, %T, %k, %v, %%" in done.stderr
    assert not log.calls


@pytest.mark.parametrize("verb", ["tail", "insert", "append"])
def test_a_negative_shard_is_a_usage_error_that_names_the_option(log: FakeLog, verb: str) -> None:
    done = run(verb, "--shard", "-1")
    assert done.exit_code == 2
    assert "Invalid value for '--shard'" in done.stderr
    assert not log.calls


def test_follow_stops_at_its_end_although_no_record_comes_after_it(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.insert_many([b"a", b"b"], ziplog.RID_GENESIS)
    followed = Idle(log.records, 1)
    monkeypatch.setattr(log, "subscribe", lambda *_, **__: followed)
    done = run("tail", "--follow", "--to", "5")
    assert (done.exit_code, done.stdout) == (0, "1@0\ta\n2@0\tb\n")
    assert followed.position.gsn == 5


@pytest.mark.parametrize("expression", ["a{99999999999}", "(" * 5000 + ")" * 5000])
def test_an_expression_that_cannot_be_compiled_is_a_usage_error(
    log: FakeLog, expression: str
) -> None:
    done = run("tail", "--grep", expression)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert not log.calls
