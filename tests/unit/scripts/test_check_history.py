"""The checker of histories blames no correct log, and sees each way of breaking one."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING, Any

import check_history
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history import events
from tests.history.observed import gather
from tests.history.rules import check
from tests.unit.scripts import mutations_of_appends
from tests.unit.scripts.mutations import LATE, MUTATIONS, Lines
from tests.unit.scripts.simulated import World, write

if TYPE_CHECKING:
    from pathlib import Path

# The imported module registers its mutations.
assert mutations_of_appends

SEEDS = range(12)


def found(directory: Path, lines: Lines, *, allow_loss: bool = False) -> set[str]:
    """Return the rules that a history breaks."""
    write(directory, lines)
    observed = gather(events.files_of([directory]))
    return {v.rule for v in check(observed, allow_loss=allow_loss).violations}


@pytest.fixture(scope="module")
def worlds() -> list[Lines]:
    return [World(seed, steps=500).lines for seed in SEEDS]


@given(st.integers(min_value=0), st.booleans(), st.booleans())
def test_a_correct_log_is_never_blamed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, faults: bool, trims: bool
) -> None:
    world = World(seed, steps=300, faults=faults, trims=trims)
    directory = tmp_path_factory.mktemp("world") / "history"
    assert found(directory, world.lines, allow_loss=True) == set()


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(tmp_path: Path, name: str, worlds: list[Lines]) -> None:
    mutate, rules = MUTATIONS[name]
    broken = 0
    for seed, world in zip(SEEDS, worlds, strict=True):
        lines = deepcopy(world)
        if not mutate(lines, Random(seed)):
            continue
        broken += 1
        seen = found(tmp_path / str(seed), lines, allow_loss=True)
        assert seen & rules, f"seed {seed}: {seen}"
    assert broken >= 3


# --- losses --------------------------------------------------------------------------------------


def a_loss(*, reported: bool = True, synced: bool = False, sync_op: int = 2) -> Lines:
    """Two records are acknowledged; the first is missing in a read of the whole log."""
    first = [events.Insert(1, 10, 0, [1, 2]), events.Inserted(1, 20, [5, 8], [1, 1])]
    sync = [events.Sync(sync_op, 30), events.Synced(sync_op, 40, 8)]
    after = [
        events.Subscribe(1, 60, 0, follow=False),
        events.Delivered(1, 70, [8], [1], [2]),
        events.Ended(1, 80),
    ]
    losses = [events.Losses(90, [(1, 4, 6)])]
    return {
        "client": [*first, *(sync if synced else [])],
        "final": after,
        "workload": losses if reported else [],
    }


def test_a_loss_is_allowed_only_where_it_was_reported(tmp_path: Path) -> None:
    assert found(tmp_path / "1", a_loss(), allow_loss=True) == set()
    assert found(tmp_path / "2", a_loss(), allow_loss=False) == {"loss"}
    assert found(tmp_path / "3", a_loss(reported=False), allow_loss=True) == {"loss"}


@pytest.mark.parametrize("ranges", [[(0, 4, 6)], [(1, 6, 9)], [(1, 1, 5)]])
def test_a_loss_outside_the_reported_range_is_an_error(
    tmp_path: Path, ranges: list[tuple[int, int, int]]
) -> None:
    lines = a_loss() | {"workload": [events.Losses(90, ranges)]}
    assert found(tmp_path / "1", lines, allow_loss=True) == {"loss"}


def test_a_sync_that_reports_a_loss_ends_the_coverage_of_later_ones(tmp_path: Path) -> None:
    trimmed = events.Failed(2, 29, "NoSuchRecordError", retriable=False, first=5)
    lines = a_loss(synced=True, sync_op=3)
    first, acked, *sync = lines["client"]
    lines["client"] = [first, acked, events.Sync(2, 25), trimmed, *sync]
    assert found(tmp_path / "1", lines, allow_loss=True) == set()
    elsewhere = msgspec.structs.replace(trimmed, first=7)
    lines["client"] = [first, acked, events.Sync(2, 25), elsewhere, *sync]
    assert found(tmp_path / "2", lines, allow_loss=True) == {"sync"}
    lines["client"] = [first, events.Sync(2, 15), acked, trimmed, *sync]
    assert found(tmp_path / "3", lines, allow_loss=True) == set()
    earlier = msgspec.structs.replace(trimmed, at=18)
    lines["client"] = [first, events.Sync(2, 15), earlier, acked, *sync]
    assert found(tmp_path / "4", lines, allow_loss=True) == {"sync"}


@pytest.mark.parametrize(("trim", "broken"), [(6, set()), (5, {"sync"})])
def test_a_sync_does_not_cover_trimmed_records(tmp_path: Path, trim: int, broken: set[str]) -> None:
    lines = a_loss(synced=True)
    lines["other client"] = [events.Trim(1, 35, trim)]
    lines["final"][0] = events.Subscribe(1, 60, trim, follow=False)
    assert found(tmp_path / "1", lines, allow_loss=True) == broken


def test_synced_records_cannot_be_lost(tmp_path: Path) -> None:
    assert found(tmp_path / "1", a_loss(synced=True), allow_loss=True) == {"sync"}
    assert found(tmp_path / "0", a_loss(synced=True), allow_loss=False) == {"loss"}
    other = a_loss()
    other["other client"] = [events.Sync(1, 30), events.Synced(1, 40, 8)]
    assert found(tmp_path / "2", other, allow_loss=True) == set()


def test_lost_records_stay_lost(tmp_path: Path) -> None:
    lines = a_loss()
    lines["late"] = [
        events.Subscribe(1, 100, 0, follow=False),
        events.Delivered(1, 110, [5, 8], [1, 1], [1, 2]),
        events.Ended(1, 120),
    ]
    assert found(tmp_path / "1", lines, allow_loss=True) == {"loss"}
    lines["late"] = [events.Read(1, 100, 5, 1), events.Found(1, 110, 1)]
    assert found(tmp_path / "2", lines, allow_loss=True) == {"loss"}
    lines["late"] = [events.Read(1, 50, 5, 1), events.Found(1, 55, 1)]
    assert found(tmp_path / "3", lines, allow_loss=True) == set()


# --- single rules --------------------------------------------------------------------------------


@pytest.mark.parametrize(("trim", "broken"), [(9, set()), (8, {"tail"})])
def test_a_tail_does_not_cover_trimmed_records(tmp_path: Path, trim: int, broken: set[str]) -> None:
    first = [events.Insert(1, 10, 0, [1, 2]), events.Inserted(1, 20, [5, 8], [1, 1])]
    tail = [events.Trim(2, 30, trim), events.Tail(3, 40), events.TailIs(3, 50, 5)]
    assert found(tmp_path / "1", {"client": [*first, *tail]}) == broken


def test_a_gap_that_only_another_subscriber_shows(tmp_path: Path) -> None:
    lines: Lines = {
        "client": [events.Insert(1, 10, 0, [1]), events.Insert(2, 11, 0, [2])],
        "a": [
            events.Subscribe(1, 12, 0, follow=True),
            events.Delivered(1, 20, [3, 5], [0, 0], [1, 2]),
        ],
        "b": [
            events.Subscribe(1, 12, 0, follow=True),
            events.Delivered(1, 20, [5], [0], [2]),
        ],
    }
    assert found(tmp_path / "1", lines) == {"gap"}
    lines["b"][0] = events.Subscribe(1, 12, 4, follow=True)
    assert found(tmp_path / "2", lines) == set()


def test_a_resumed_subscription_continues_without_loss(tmp_path: Path) -> None:
    lines: Lines = {
        "client": [events.Insert(1, 1, 0, [1, 2, 3]), events.Inserted(1, 9, [2, 4, 6], [0, 0, 0])],
        "a": [
            events.Subscribe(1, 12, 0, follow=True),
            events.Delivered(1, 20, [2], [0], [1]),
            events.Subscribe(2, 30, 5, follow=True, resumes=1),
            events.Delivered(2, 40, [6], [0], [3]),
        ],
    }
    assert found(tmp_path / "1", lines) == {"loss"}
    lines["a"][2] = events.Subscribe(2, 30, 5, follow=True)
    assert found(tmp_path / "2", lines) == set()


def test_an_insert_that_fails_in_part(tmp_path: Path) -> None:
    """Records with a rid are in the log; the others are not, or may be, depending on the error."""
    call = events.Insert(1, 10, 0, [1, 2])
    seen = [
        events.Subscribe(1, 30, 0, follow=False),
        events.Delivered(1, 40, [3, 6], [0, 0], [1, 2]),
        events.Ended(1, 50),
    ]
    for error, rules in (("UnavailableError", {"phantom"}), ("OutcomeUnknownError", set())):
        failed = events.Failed(1, 20, error, retriable=True, gsns=[3, 0], shards=[0, 0])
        lines: Lines = {"client": [call, failed], "final": seen}
        assert found(tmp_path / error, lines) == rules
        lines["final"] = [seen[0], seen[2]]
        assert found(tmp_path / f"{error} and lost", lines) == {"loss"}


def test_a_record_acknowledged_during_a_scan_may_be_missing(tmp_path: Path) -> None:
    scan = [events.Subscribe(1, 15, 0, follow=False), events.Ended(1, 50)]
    call = events.Insert(1, 10, 0, [1])
    late: Lines = {"client": [call, events.Inserted(1, 20, [7], [0])], "scan": list(scan)}
    assert found(tmp_path / "1", late) == set()
    early: Lines = {"client": [call, events.Inserted(1, 14, [7], [0])], "scan": list(scan)}
    assert found(tmp_path / "2", early) == {"loss"}


# --- files and the command -----------------------------------------------------------------------


def test_a_killed_process_leaves_half_a_line(tmp_path: Path) -> None:
    write(tmp_path / "h", a_loss(reported=False))
    path = tmp_path / "h" / f"final{events.SUFFIX}"
    whole = path.read_bytes()
    path.write_bytes(whole + b'["deliv')
    assert check_history.main([str(tmp_path / "h")]) == 1
    path.write_bytes(whole + b'["deliv\n')
    assert check_history.main([str(tmp_path / "h")]) == 2


def test_exit_codes_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "clean", World(1, faults=False).lines)
    assert check_history.main([str(tmp_path / "clean")]) == 0
    assert "clean: no rule is broken" in capsys.readouterr().out
    write(tmp_path / "broken", a_loss())
    assert check_history.main([str(tmp_path / "broken")]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATION loss: 5@1 (payload 1), acknowledged, was not delivered" in printed
    assert f"[final{events.SUFFIX}:3]" in printed
    assert f"client{events.SUFFIX}:3 Inserted(" in printed
    assert check_history.main([str(tmp_path / "broken"), "--allow-loss"]) == 0
    capsys.readouterr()
    assert check_history.main([str(tmp_path / "broken"), "--json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["broken"], document["acknowledged"]) == (1, 2)
    assert document["violations"][0]["rule"] == "loss"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'["inserted",7,1,[1],[0]]\n', "no call for it"),
        (b'["history",1,"x",{}]\n', "a second header"),
        (b'["insert",1,1,0,[4]]\n["insert",2,2,0,[4]]\n', "payload 4 was inserted before"),
        (b'["nothing"]\n', "no line of a history"),
    ],
)
def test_a_file_that_is_not_a_history_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, complaint: str
) -> None:
    path = tmp_path / f"a{events.SUFFIX}"
    path.write_bytes(b'["history",1,"a",{}]\n' + line)
    assert check_history.main([str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_no_history_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_history.main([str(tmp_path)]) == 2
    assert "no history in" in capsys.readouterr().err
    assert check_history.main([str(tmp_path / f"missing{events.SUFFIX}")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_history_without_an_operation_is_not_called_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a{events.SUFFIX}"
    path.write_bytes(b'["history",1,"a",{}]\n["fault",1,"all clients are dead"]\n')
    assert check_history.main([str(path)]) == 2
    assert "no operation" in capsys.readouterr().err
    path.write_bytes(b"")
    assert check_history.main([str(path)]) == 2


def test_a_file_without_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"a{events.SUFFIX}"
    path.write_bytes(b'["insert",1,1,0,[4]]\n')
    assert check_history.main([str(path)]) == 2


def test_no_time_is_later_than_late(worlds: list[Lines]) -> None:
    """The mutations put events at the end of time: no history may reach it."""
    assert all(getattr(e, "at", 0) < LATE for world in worlds for s in world.values() for e in s)
