"""The Raft journal: written data survives any crash, and damage is always detected."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.logged_events import captured_events
from tests.properties import examples
from ziplog.raft.journal import HEADER_BYTES, Entry, Journal, JournalError, note_of, pack_note

ENTRIES = [Entry(b"command %d" % index, index, 1 + index // 3) for index in range(1, 7)]


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


def test_journal_returns_what_was_written(tmp_path: Path) -> None:
    written(tmp_path)
    journal = reopened(tmp_path)
    assert journal.entries == ENTRIES
    assert (journal.term, journal.voted_for) == (7, "node:1")


def made_bytes(path: Path) -> int:
    """Return the size of a journal's file at its creation."""
    header = note_of(path.read_bytes()[8:HEADER_BYTES])
    assert header is not None
    return header[1]


def lose_note(path: Path) -> None:
    """Make a journal's note as old as a power cut can leave it."""
    (path.parent / "flushed").unlink(missing_ok=True)


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_every_torn_tail_is_cut_off_and_logged(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    ends = []
    for size in range(len(whole), made_bytes(path), -1):
        path.write_bytes(whole[:size])
        lose_note(path)
        with captured_events() as logs:
            journal = reopened(tmp_path)
        assert journal.entries == ENTRIES[: len(journal.entries)]
        assert [log["cut_bytes"] for log in logs] == [size - len(path.read_bytes())][: len(logs)]
        assert bool(logs) == (len(path.read_bytes()) < size)
        ends.append(len(journal.entries))
    assert ends == sorted(ends, reverse=True)
    assert set(ends) == set(range(7))


def test_journal_continues_after_a_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    lose_note(path)
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


def test_zeros_after_the_last_record_are_a_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"\0" * 4096)
    assert reopened(tmp_path).entries == ENTRIES


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    """This includes the last record, which was on stable storage when the process was killed."""
    path = written(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(flipped(whole, at, bit))
            with pytest.raises(
                JournalError, match=r"damaged.*empty.*membership rebuild"
            ) as refused:
                Journal(tmp_path)
            assert str(path) in str(refused.value)
            assert path.read_bytes() == flipped(whole, at, bit)
    path.write_bytes(whole)
    assert reopened(tmp_path).entries == ENTRIES


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalError, match=r"(damaged|missing or empty).*empty this directory"):
            Journal(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match="missing or empty, but `flushed` exists"):
        Journal(tmp_path)


def test_the_error_names_the_byte_and_how_much_was_stored(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    last = whole.rindex(b"node:1")
    path.write_bytes(flipped(whole, last, 0))
    with pytest.raises(JournalError, match=rf"at byte \d+, but its first {len(whole)} bytes"):
        Journal(tmp_path)


def test_without_the_note_only_the_last_record_may_be_lost(tmp_path: Path) -> None:
    """After a power cut the note may be old; damage in the last record is like a torn write."""
    path = written(tmp_path)
    whole = path.read_bytes()
    outcomes = set()
    for at in range(len(whole)):
        path.write_bytes(flipped(whole, at, at % 8))
        lose_note(path)
        try:
            journal = reopened(tmp_path)
        except JournalError:
            outcomes.add("refused")
        else:
            assert journal.entries == ENTRIES
            assert (journal.term, journal.voted_for) == (0, None)
            assert at > len(whole) - 30
            outcomes.add("cut off")
    assert outcomes == {"refused", "cut off"}


def test_a_flipped_bit_in_the_note_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    note = path.parent / "flushed"
    whole = note.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            note.write_bytes(flipped(whole, at, bit))
            with captured_events() as logs:
                journal = reopened(tmp_path)
            assert [log["log_level"] for log in logs] == ["warning"]
            assert (journal.entries, journal.term, journal.voted_for) == (ENTRIES, 7, "node:1")
            assert note.read_bytes() == whole


def test_a_journal_of_an_earlier_release_is_read_and_protected_from_then_on(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    old = b"ZIPRAFT2" + path.read_bytes()[HEADER_BYTES:]
    path.write_bytes(old)
    lose_note(path)
    journal = reopened(tmp_path)
    assert (journal.entries, journal.term, journal.voted_for) == (ENTRIES, 7, "node:1")
    whole = path.read_bytes()
    assert whole.startswith(b"ZIPRAFT3")
    path.write_bytes(whole[:-1] + b"!")
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path)
    path.write_bytes(old[:-1] + b"!")
    lose_note(path)
    with captured_events() as logs:
        assert reopened(tmp_path).entries == ENTRIES
    assert [log["event"] for log in logs] == ["cut off a torn end of the consensus journal"]


def test_note_about_an_earlier_file_does_not_count(tmp_path: Path) -> None:
    """Simulates a crash between the rename of a new file and its note."""
    path = written(tmp_path)
    note = (path.parent / "flushed").read_bytes()
    journal = Journal(tmp_path)
    journal.drop_first(5)
    size = path.stat().st_size
    journal.close()
    assert len(path.read_bytes()) < note_of(note)[1]  # type: ignore[index]
    (path.parent / "flushed").write_bytes(note)
    assert reopened(tmp_path).entries == ENTRIES[5:]
    (path.parent / "flushed").write_bytes(note)
    path.write_bytes(path.read_bytes()[: size - 1])
    with pytest.raises(JournalError, match=f"its first {size} bytes were on stable storage"):
        Journal(tmp_path)


def test_a_note_states_no_more_than_what_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    path = tmp_path / "journal"
    synced = [path.stat().st_size]
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        noted = note_of((tmp_path / "flushed").read_bytes())
        assert noted is not None
        assert noted[1] == synced[-1]
        real(descriptor)
        synced.append(path.stat().st_size)

    monkeypatch.setattr("ziplog.raft.journal.os.fdatasync", sync)
    for entry in ENTRIES:
        journal.append(entry)
    assert len(synced) == 1 + len(ENTRIES)
    assert note_of((tmp_path / "flushed").read_bytes()) == note_of(
        pack_note(journal._salt, synced[-1])
    )
    journal.close()


def test_a_journal_works_without_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ziplog.raft.journal.os.pwrite", fail)
    written(tmp_path)
    assert reopened(tmp_path).entries == ENTRIES


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"PYSYNCOBJ" + b"\0" * 100)
    with pytest.raises(JournalError, match="not a journal of this version"):
        Journal(tmp_path)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(JournalError, match="another process"):
        Journal(tmp_path)
    first.close()
    reopened(tmp_path)


def test_trim_interrupted_by_a_crash_is_completed(tmp_path: Path) -> None:
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
def test_entries_that_contradict_a_snapshot_are_replaced(
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
    with pytest.raises(JournalError, match="starts with entry 4, but its snapshot ends"):
        journal.begin_with(*ENTRIES[2:4])
    journal.close()


def test_identity_survives_restarts_and_trims(tmp_path: Path) -> None:
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


def test_several_entries_are_stored_atomically(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(ENTRIES[0])
    before = (tmp_path / "journal").stat().st_size
    journal.extend(ENTRIES[1:])
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    assert reopened(tmp_path).entries == ENTRIES
    for size in range(before, len(whole)):
        # The kernel may write the middle before the start.
        (tmp_path / "journal").write_bytes(whole[:before] + bytes(20) + whole[before + 20 : size])
        lose_note(tmp_path / "journal")
        assert reopened(tmp_path).entries == ENTRIES[:1]


def test_rewrite_interrupted_by_a_crash_changes_nothing(tmp_path: Path) -> None:
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
        patch.setattr("ziplog.raft.journal.os.fdatasync", fail)
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
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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

        monkeypatch.setattr(f"ziplog.raft.journal.os.{name}", note)
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
