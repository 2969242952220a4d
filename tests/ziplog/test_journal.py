"""The consensus journal: what it wrote is there after any crash, and damage is never swallowed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziplog.runtime.journal import Entry, Journal, JournalError

ENTRIES = [Entry(b"command %d" % index, index, 1 + index // 3) for index in range(1, 7)]
#: The file header.
HEADER = 8


def written(directory: Path, entries: list[Entry] = ENTRIES) -> Path:
    journal = Journal(directory)
    for entry in entries:
        journal.append(entry)
    journal.set_vote(7, "node:1")
    journal.close()
    return directory / "journal"


def reopened(directory: Path) -> Journal:
    journal = Journal(directory)
    journal.close()
    return journal


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    written(tmp_path)
    journal = reopened(tmp_path)
    assert journal.entries == ENTRIES
    assert (journal.term, journal.voted_for) == (7, "node:1")


def test_every_torn_tail_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    ends = []
    for size in range(len(whole), HEADER, -1):
        path.write_bytes(whole[:size])
        journal = reopened(tmp_path)
        assert journal.entries == ENTRIES[: len(journal.entries)]
        ends.append(len(journal.entries))
    assert ends == sorted(ends, reverse=True)
    assert set(ends) == set(range(7))


def test_a_journal_goes_on_after_a_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    journal = Journal(tmp_path)
    after = Entry(b"after", journal.entries[-1].index + 1, 9)
    expected = [*journal.entries, after]
    journal.append(after)
    journal.close()
    assert len(expected) < 7
    assert reopened(tmp_path).entries == expected


@pytest.mark.parametrize("content", [b"", b"\0" * 5, b"\0" * 8, b"ZIPRA", b"ZIPRAFT2"])
def test_a_file_from_a_crash_before_the_first_record_opens_empty(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "journal").write_bytes(content)
    journal = reopened(tmp_path)
    assert (journal.entries, journal.term, journal.voted_for) == ([], 0, None)
    written(tmp_path)
    assert reopened(tmp_path).entries == ENTRIES


def test_zeros_behind_the_last_record_are_a_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"\0" * 4096)
    assert reopened(tmp_path).entries == ENTRIES


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            journal = reopened(tmp_path)
        except JournalError as error:
            assert str(path) in str(error)  # noqa: PT017 - either outcome is right
        else:
            # Only the last record, the vote, may be lost: damage there looks like a torn write.
            assert journal.entries == ENTRIES
            assert at > len(whole) - 30
            assert journal.term in (0, 7)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"PYSYNCOBJ" + b"\0" * 100)
    with pytest.raises(JournalError, match="no journal of this version"):
        Journal(tmp_path)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(JournalError, match="another process"):
        Journal(tmp_path)
    first.close()
    reopened(tmp_path)


def test_a_trim_that_a_crash_cut_short_is_finished(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    journal.begin_with(*ENTRIES[3:5])
    journal.close()
    assert reopened(tmp_path).entries == ENTRIES[3:]


@pytest.mark.parametrize(
    ("previous", "last"),
    [
        (ENTRIES[3], Entry(b"another", 5, 9)),
        (Entry(b"another", 4, 9), ENTRIES[4]),
        (ENTRIES[5], Entry(b"behind the last", 7, 9)),
        (Entry(b"far", 98, 9), Entry(b"behind the last", 99, 9)),
    ],
)
def test_what_a_snapshot_contradicts_is_replaced(
    tmp_path: Path, previous: Entry, last: Entry
) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    journal.begin_with(previous, last)
    journal.close()
    again = reopened(tmp_path)
    assert again.entries == [previous, last]
    assert (again.term, again.voted_for) == (7, "node:1")


def test_a_gap_between_snapshot_and_journal_is_refused(tmp_path: Path) -> None:
    written(tmp_path, ENTRIES[3:])
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="begins with entry 4, behind the snapshot"):
        journal.begin_with(*ENTRIES[2:4])
    journal.close()


def test_who_a_directory_is_outlives_restarts_and_trims(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    assert not journal.is_voter
    journal.set_voter({"a:1": journal.identity})
    journal.set_voter({"b:1": "another"})  # it is one already
    journal.close()
    for _ in range(2):
        again = Journal(tmp_path)
        assert (again.identity, again.is_voter) == (journal.identity, True)
        assert again.founders == {"a:1": journal.identity}
        again.drop_first(1)
        again.close()
    assert reopened(tmp_path / "other").identity not in {"", journal.identity}


def test_several_entries_are_there_together_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(ENTRIES[0])
    before = (tmp_path / "journal").stat().st_size
    journal.extend(ENTRIES[1:])
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    assert reopened(tmp_path).entries == ENTRIES
    for size in range(before, len(whole)):
        # The kernel may have written the middle before the beginning.
        (tmp_path / "journal").write_bytes(whole[:before] + bytes(20) + whole[before + 20 : size])
        assert reopened(tmp_path).entries == ENTRIES[:1]


def test_a_rewrite_that_a_crash_cut_short_changes_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "journal.new").write_bytes(b"ZIPRAFT2 half of")
    journal = Journal(tmp_path)
    assert journal.entries == ENTRIES
    journal.drop_first(2)
    journal.close()
    assert reopened(tmp_path).entries == ENTRIES[2:]


def test_a_failed_write_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(ENTRIES[0])

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ziplog.runtime.journal.os.fdatasync", fail)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.append(ENTRIES[1])
    with pytest.raises(JournalError, match="the process must stop"):
        journal.append(ENTRIES[1])
    journal.close()


def test_everything_is_private_to_the_user(tmp_path: Path) -> None:
    path = written(tmp_path / "raft")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@given(st.lists(st.tuples(st.sampled_from("aekdcvf"), st.integers(0, 8)), max_size=25))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_operations_survives_a_restart(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal(directory)
    model: list[Entry] = []
    index = 0
    vote: tuple[int, str | None] = (0, None)
    for step, number in steps:
        match step:
            case "a":
                index = model[-1].index + 1 if model else number
                model.append(Entry(bytes(number), index, number))
                journal.append(model[-1])
            case "e":
                index = model[-1].index + 1 if model else number
                fresh = [Entry(b"", index + n, 7) for n in range(number)]
                model += fresh
                journal.extend(fresh)
            case "k":
                journal.keep_first(number)
                del model[number:]
            case "d":
                journal.drop_first(min(number, len(model)))
                del model[:number]
            case "c":
                journal.clear()
                model.clear()
            case "v":
                vote = (number, f"node{number}")
                journal.set_vote(*vote)
            case "f":
                journal.commit_index = number
                journal.flush_commit()
        assert journal.entries == model
    commit = journal.commit_index
    journal.close()
    again = reopened(directory)
    assert again.entries == model
    assert (again.term, again.voted_for) == vote
    assert again.commit_index == commit


def test_nothing_returns_before_it_is_on_stable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "fdatasync", "fsync"):
        real = getattr(os, name)

        def note(*arguments: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(f"ziplog.runtime.journal.os.{name}", note)
    journal = Journal(tmp_path)
    steps: list[Callable[[], None]] = [
        lambda: journal.append(ENTRIES[0]),
        lambda: journal.extend(ENTRIES[1:3]),
        lambda: journal.set_vote(3, "a"),
        lambda: journal.delete_from(3),
        lambda: journal.keep_first(1),
        lambda: journal.set_voter({}),
    ]
    for step in steps:
        calls.clear()
        step()
        assert calls == ["write", "fdatasync"]
    calls.clear()
    journal.drop_first(1)
    assert calls == ["fsync", "fsync", "fsync"]  # the snapshot's name, the new file, its name
    journal.close()
