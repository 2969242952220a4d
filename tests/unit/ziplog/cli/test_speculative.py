"""`ziplog tail --speculative`: a line for each event."""

from __future__ import annotations

import json

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, run
from ziplog.types import Confirmed, Delivery, Failed, RecordId


def record(gsn: int) -> ziplog.Record:
    return ziplog.Record(RecordId(gsn, 1), b"r%d\n" % gsn, b"k", 1_769_860_800_000_000, 2)


@pytest.fixture
def events(log: FakeLog) -> FakeLog:
    log.speculated = [
        Delivery(record(3), speculative=True),
        Delivery(record(4), speculative=True),
        Failed(RecordId(3, 0)),
        Delivery(record(5), speculative=False),
        Confirmed(RecordId(5, 1)),
    ]
    return log


def test_events_are_lines(events: FakeLog) -> None:
    result = run("tail", "--speculative", "--follow")
    assert result.exit_code == 0
    assert result.stdout == "? 3@1\tr3\\n\n? 4@1\tr4\\n\n! 3@0\n+ 5@1\tr5\\n\n= 5@1\n"
    assert events.calls[-1] == ("speculate", ziplog.RID_RECENT, None)


def test_events_are_json(events: FakeLog) -> None:
    result = run("tail", "--speculative", "--follow", "--json", "--from", "3@1", "--shard", "1")
    assert events.calls[-1] == ("speculate", RecordId(3, 1), [1])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["deliver", "deliver", "fail", "deliver", "confirm"]
    assert [line.get("speculative") for line in lines] == [True, True, None, False, None]
    assert (lines[2]["after"], lines[4]["upto"]) == ("3@0", "5@1")
    assert lines[0] | json.loads(run_json_of_a_record(events)) == lines[0]


def test_events_from_the_end_of_a_trimmed_log_begin_after_the_trim(events: FakeLog) -> None:
    """The last record itself was trimmed; only a position that the user gave fails then."""
    events.insert_many([b"a", b"b"], ziplog.RID_GENESIS)
    events.trimmed_to = 3
    assert run("tail", "--speculative", "--follow", "--from", "end").exit_code == 0
    assert events.calls[-1] == ("speculate", RecordId(3, 0), None)
    assert run("tail", "--speculative", "--follow", "--from", "2").exit_code == 1


def run_json_of_a_record(log: FakeLog) -> str:
    log.records = [record(3)]
    return run("tail", "--json").stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--speculative needs --follow"),
        (["--follow", "--to", "9"], "--to"),
        (["--follow", "--last", "2"], "--last"),
        (["--follow", "--limit", "2"], "--limit"),
        (["--follow", "--key", "k"], "--key"),
        (["--follow", "--grep", "x"], "--grep"),
        (["--follow", "--format", "%r"], "--format"),
        (["--follow", "--keys-only"], "--keys-only"),
    ],
)
def test_other_options_are_bad_usage(events: FakeLog, arguments: list[str], why: str) -> None:
    result = run("tail", "--speculative", *arguments)
    assert result.exit_code == 2
    assert why in result.stderr
    assert not events.calls
