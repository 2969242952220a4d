"""Positions on the command line: one grammar, and searches beside a list of records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, FakeSubscription, run
from ziplog.cli import search
from ziplog.cli.positions import parse, parse_stop
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = 1_769_860_800_000_000


def record(gsn: int, timestamp_us: int = NOON_US) -> ziplog.Record:
    return ziplog.Record(ziplog.RecordId(gsn, gsn % 3), b"%d" % gsn, None, timestamp_us, gsn // 100)


def log_of(records: list[ziplog.Record], trim: int = 0) -> FakeLog:
    found = FakeLog()
    found.records, found.trimmed_to = records, trim
    return found


gsns = st.lists(
    st.integers(1, 60) | st.integers(1, 2**50), min_size=1, max_size=40, unique=True
).map(sorted)


@given(gsns, st.integers(1, 50))
def test_the_last_records_are_found_however_sparse_they_are(places: list[int], count: int) -> None:
    log = log_of([record(gsn) for gsn in places])
    found = search.first_of_last(log, count)  # type: ignore[arg-type]
    delivered = [each.rid.gsn for each in log.records if each.rid.gsn >= found.gsn]
    assert delivered == places[-count:]


@given(gsns, st.data())
def test_a_dense_log_is_read_in_small_parts(places: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    last = max(places)
    dense = [record(gsn) for gsn in range(last, last + 2000)]
    log = log_of([*(record(gsn) for gsn in places if gsn < last), *dense])
    assert search.first_of_last(log, count).gsn == last + 2000 - count  # type: ignore[arg-type]


@given(gsns, st.data())
def test_the_first_record_since_a_time_is_found(places: list[int], data: st.DataObject) -> None:
    offsets = data.draw(st.lists(st.integers(0, 9), min_size=len(places), max_size=len(places)))
    times = [NOON_US + offset for offset in sorted(offsets)]
    log = log_of([record(*each) for each in zip(places, times, strict=True)])
    since = NOON_US + data.draw(st.integers(-1, 11))
    found = search.first_since(log, since)  # type: ignore[arg-type]
    later = [each.rid.gsn for each in log.records if each.timestamp_us >= since]
    assert [each.rid.gsn for each in log.records if each.rid.gsn >= found.gsn] == later
    assert found.gsn <= places[-1] + 1


def test_a_search_holds_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    log, alive, most = log_of([record(gsn) for gsn in range(1, 2001)]), 0, 0

    class Payload(bytes):
        def __init__(self, _: bytes) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    class Read(FakeSubscription):
        def __iter__(self) -> Iterator[ziplog.Record]:
            for each in super().__iter__():
                yield replace(each, payload=Payload(each.payload))

    subscribe = log.subscribe
    monkeypatch.setattr(log, "subscribe", lambda start, **more: Read(subscribe(start, **more)))
    assert search.first_of_last(log, 1500).gsn == 501  # type: ignore[arg-type]
    assert most <= 2


def test_searches_begin_at_the_trim_point_and_end_at_the_tail() -> None:
    log = log_of([record(50), record(60)], trim=40)
    assert search.first_of_last(log, 9).gsn == 40  # type: ignore[arg-type]
    assert search.first_since(log, 0).gsn == 40  # type: ignore[arg-type]
    empty = log_of([record(50)], trim=70)
    assert search.first_of_last(empty, 9).gsn == 70  # type: ignore[arg-type]
    assert search.first_since(empty, 0).gsn == 70  # type: ignore[arg-type]
    assert search.first_since(log_of([]), 0).gsn == 1  # type: ignore[arg-type]
    assert search.first_of_last(log_of([]), 3).gsn == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("end", 60, 61),
        ("7", 7, 7),
        ("50@2", 50, 50),
        ("-1", 60, 60),
        ("epoch:2", 201, 201),
        ("@2026-01-31T12:00:00Z", 41, 41),
        ("@2026-01-31T13:00:00+01:00", 41, 41),
        ("@2026-01-31T12:00:00.000001", 61, 61),
        ("@1d", 61, 61),
        ("@999999999w", 1, 1),
        ("@0001-01-01T00:00:00+23:59", 1, 1),
    ],
)
def test_forms_of_a_position(text: str, start: int, end: int) -> None:
    log = log_of([record(40, NOON_US - 1), record(50), record(60)])
    assert parse(text)(log).gsn == start  # type: ignore[arg-type]
    assert parse_stop(text)(log).gsn == end  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "x", "-", "-0", "--1", "@", "@noon", "@5", "epoch:", "epoch:x", "1@", "1e3"]
)
def test_other_words_are_refused_with_the_name_of_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--from is"):
        parse(text, "--from")


def test_recent_is_no_end() -> None:
    with pytest.raises(ConfigError, match="--to is 'recent'"):
        parse_stop("recent")


@pytest.mark.parametrize("text", ["recent", "soon"])
@pytest.mark.parametrize("command", [("insert", "x", "--after"), ("append", "x", "--after")])
def test_a_record_goes_after_no_position_of_readers(
    log: FakeLog, command: tuple[str, ...], text: str
) -> None:
    result = run(*command, text)
    assert result.exit_code == 2
    assert f"--after is {text!r}; it must be 'genesis', 'end', a gsn" in result.stderr
    assert not log.records


def printed(log: FakeLog, *arguments: str) -> list[str]:
    result = run("tail", *arguments, "--format", "%g")
    assert result.exit_code == 0, result.stderr
    return result.stdout.split()


def test_tail_reads_a_range(log: FakeLog) -> None:
    log.records = [record(gsn) for gsn in (10, 20, 30, 40)]
    assert printed(log, "--last", "2") == ["30", "40"]
    assert printed(log, "--from", "-3", "--to", "-1") == ["20", "30"]
    assert printed(log, "--from", "20", "--to", "40@1") == ["20", "30"]
    assert printed(log, "--to", "end") == ["10", "20", "30", "40"]
    assert printed(log, "--from", "epoch:0", "--limit", "1") == ["10"]


def test_tail_filters_and_counts_after_the_filters(log: FakeLog) -> None:
    keys = (b"a1", b"b", None, b"a2", b"a1")
    log.records = [
        ziplog.Record(ziplog.RecordId(gsn, 0), b"x%d\xff" % gsn, key, NOON_US, 0)
        for gsn, key in enumerate(keys, 1)
    ]
    assert printed(log, "--key", "a1") == ["1", "5"]
    assert printed(log, "--key-prefix", "a", "--limit", "2") == ["1", "4"]
    assert printed(log, "--grep", "x[23]") == ["2", "3"]
    assert printed(log, "--last", "2", "--key", "a1") == ["5"]
    assert run("tail", "--keys-only", "--key-prefix", "a").stdout == "a1\na2\na1\n"


def test_insert_and_tail_take_shards(log: FakeLog) -> None:
    for shard in "012":
        run("insert", "x", "--shard", shard)
    assert [rid.shard for rid in (record.rid for record in log.records)] == [0, 1, 2]
    assert printed(log, "--shard", "1") == ["2"]
    assert printed(log, "--shard", "2", "--shard", "0") == ["1", "3"]


def test_a_format_has_fields_and_escapes(log: FakeLog) -> None:
    log.records = [ziplog.Record(ziplog.RecordId(7, 2), b"v\n%\\", b"k\x1b", NOON_US, 3)]
    shown = run("tail", "--format", r"%r %g %s %e %T\t%k=%v 100%%\\").stdout
    assert shown == f"7@2 7 2 3 {NOON.isoformat()}\tk\\x1b=v\\n%\\ 100%\\\\\n"
    for wrong in ("%x", "%", "a %"):
        result = run("tail", "--format", wrong)
        assert result.exit_code == 2
        assert "its fields are %r, %g" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--last", "2", "--from", "end"),
        ("--format", "%k", "--json"),
        ("--format", "%k", "--keys-only"),
        ("--grep", "("),
        ("--to", "recent"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_are_refused(log: FakeLog, arguments: tuple[str, ...]) -> None:
    log.records = [record(1)]
    assert run("tail", *arguments).exit_code == 2
