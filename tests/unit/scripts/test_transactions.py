"""Transaction checker: each anomaly is found by its name, and similar correct histories pass.

The names are those of Adya (1999), and of Kingsbury and Alvaro, *Elle* (2020). Transactions without
times overlap all the others.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import check_history
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history import events
from tests.unit.scripts.transacting import Done, Serial, did, judged, lines_of, named
from tests.unit.scripts.untruths import UNTRUTHS

if TYPE_CHECKING:
    from pathlib import Path

#: Histories and the rules that they break; each is followed by a similar correct one.
CASES: list[tuple[str, list[Done]]] = [
    # Two transactions wrote in both orders.
    ("G0", [did("a x 1, a y 1"), did("a x 2, a y 2"), did("r x [1 2]"), did("r y [2 1]")]),
    ("", [did("a x 1, a y 1"), did("a x 2, a y 2"), did("r x [1 2]"), did("r y [1 2]")]),
    # A read of an aborted write.
    ("G1a", [did("a x 1", state="fail"), did("r x [1]")]),
    ("", [did("a x 1", state="info"), did("r x [1]")]),
    ("G1a", [did("w x 1", state="fail"), did("r x 1")]),
    ("", [did("w x 1", state=""), did("r x 1")]),
    # A read of half a transaction.
    ("G-single G1b", [did("a x 1, a x 2"), did("r x [1]")]),
    ("", [did("a x 1, a x 2"), did("r x [1 2]")]),
    ("G1b", [did("w x 1, w x 2"), did("r x 1")]),
    ("", [did("w x 1, w x 2"), did("r x 2")]),
    # Two transactions read from each other.
    ("G1c", [did("a x 1, r y [2]"), did("a y 2, r x [1]")]),
    ("", [did("a x 1, r y []"), did("a y 2, r x [1]")]),
    ("G1c", [did("w x 1, r y 2"), did("w y 2, r x 1")]),
    ("", [did("w x 1, r y -"), did("w y 2, r x 1")]),
    # A transaction saw half of another one's writes.
    ("G-single", [did("a x 1, a y 1"), did("r x [1], r y []"), did("r y [1]")]),
    ("", [did("a x 1, a y 1"), did("r x [], r y []"), did("r y [1]")]),
    ("G-single", [did("w x 1, w y 1"), did("r x 1, r y -")]),
    ("", [did("w x 1, w y 1"), did("r x -, r y -")]),
    # An update that was lost.
    ("G-single", [did("r x [], a x 1"), did("r x [], a x 2"), did("r x [1 2]")]),
    ("", [did("r x [], a x 1"), did("r x [1], a x 2"), did("r x [1 2]")]),
    ("G2", [did("w x 1"), did("r x 1, w x 2"), did("r x 1, w x 3")]),
    ("", [did("w x 1"), did("r x 1, w x 2"), did("r x 2, w x 3")]),
    # Neither saw the other (write skew).
    ("G2", [did("r x [], a y 1"), did("r y [], a x 2")]),
    ("", [did("r x [], a y 1"), did("r y [1], a x 2")]),
    ("G2", [did("r x -, w y 1"), did("r y -, w x 2")]),
    ("", [did("r x -, w y 1"), did("r y 1, w x 2")]),
    # Two transactions saw two others in both orders (long fork).
    ("G2", [did("w x 1"), did("w y 2"), did("r x 1, r y -"), did("r x -, r y 2")]),
    ("", [did("w x 1"), did("w y 2"), did("r x 1, r y -"), did("r x 1, r y 2")]),
    # A process does not see its own earlier writes.
    (
        "G-single-process",
        [did("a x 1", 0, 9, process=1), did("r x []", 9, 20, process=1), did("r x [1]")],
    ),
    ("", [did("a x 1", 0, 9, process=1), did("r x []", 9, 20, process=2), did("r x [1]")]),
    # Old news.
    ("G-single-realtime", [did("a x 1", 0, 9), did("r x []", 10, 20), did("r x [1]")]),
    ("", [did("a x 1", 0, 9), did("r x []", 9, 20), did("r x [1]")]),
    ("G-single-realtime", [did("w x 1", 0, 9), did("r x -", 10, 20)]),
    ("", [did("w x 1", 0, 9), did("r x -", 9, 20)]),
    ("G-single-realtime", [did("w x 1", 0, 9), did("w x 2", 10, 20), did("r x 1", 30, 40)]),
    ("", [did("w x 1", 0, 9), did("w x 2", 10, 20), did("r x 1", 20, 40)]),
    ("", [did("w x 1", 0, 9), did("w x 2", 8, 20), did("r x 1", 30, 40)]),
    # News of the future.
    ("G1c-realtime", [did("r x 1", 0, 9), did("w x 1", 10, 20)]),
    ("", [did("r x 1", 0, 9), did("w x 1", 9, 20)]),
    ("G0-realtime", [did("a x 1", 0, 9), did("a x 2", 10, 20), did("r x [2 1]")]),
    ("", [did("a x 1", 0, 9), did("a x 2", 9, 20), did("r x [2 1]")]),
    ("G2-realtime", [did("r x []", 50, 60), did("a x 1, r y []"), did("a y 2", 0, 49)]),
    ("", [did("r x []", 50, 60), did("a x 1, r y []"), did("a y 2", 0, 50)]),
    # Commits that took effect in an order different from their positions.
    ("G0-log", [did("a x 1", position=5), did("a x 2", position=3), did("r x [1 2]")]),
    ("", [did("a x 1", position=3), did("a x 2", position=5), did("r x [1 2]")]),
    ("G0-log", [did("a x 1", 0, 9, position=5), did("a y 2", 10, 20, position=3)]),
    ("", [did("a x 1", 0, 9, position=5), did("a y 2", 9, 20, position=3)]),
    ("G-single-log", [did("r x -, w y 1", position=5), did("w x 2", position=3)]),
    ("", [did("r x -, w y 1", position=3), did("w x 2", position=5)]),
    (
        "G1c-log incompatible-order",
        [did("w x 1", position=5), did("r x 1, w x 2", position=3)],
    ),
    ("", [did("w x 1", position=3), did("r x 1, w x 2", position=5)]),
    # The position is the versions' order where nothing else says it.
    (
        "G-single",
        [did("w x 1, w y 1", position=3), did("w x 2", position=5), did("r x 2, r y -")],
    ),
    ("", [did("w x 1, w y 1", position=5), did("w x 2", position=3), did("r x 2, r y -")]),
    ("position", [did("a x 1", position=5), did("a y 2", position=5)]),
    # Lost writes.
    ("lost-append", [did("a x 1", 0, 9), did("r x []", 10, 20)]),
    ("", [did("a x 1", 0, 9), did("r x []", 9, 20)]),
    ("", [did("a x 1", 0, 9, state="info"), did("r x []", 10, 20)]),
    # Duplicate and invented elements.
    ("duplicate-append", [did("a x 1"), did("r x [1 1]")]),
    ("", [did("a x 1"), did("r x [1]")]),
    ("phantom", [did("r x [1]")]),
    ("phantom", [did("r x 1")]),
    # A transaction contradicts itself.
    ("internal", [did("a x 1"), did("r x [], r x [1]")]),
    ("", [did("a x 1"), did("r x [1], r x [1]")]),
    ("internal", [did("a x 1, r x []")]),
    ("", [did("a x 1, r x [1]")]),
    ("internal", [did("r x [], a x 1, a x 2, r x [1]")]),
    ("", [did("r x [], a x 1, a x 2, r x [1 2]")]),
    ("internal", [did("w x 1, r x -")]),
    ("", [did("w x 1, r x 1")]),
    ("internal", [did("w x 1"), did("r x -, r x 1")]),
    ("", [did("w x 1"), did("r x 1, r x 1")]),
    # Reads of one key that no order explains.
    ("incompatible-order", [did("a x 1"), did("a x 2"), did("r x [1]"), did("r x [2]")]),
    ("", [did("a x 1"), did("a x 2"), did("r x [1]"), did("r x [1 2]")]),
    ("G1c incompatible-order", [did("r x 2, w x 1"), did("r x 1, w x 2")]),
    ("", [did("r x 2, w x 1"), did("r x -, w x 2")]),
    # Reads of an aborted transaction may be old, but come from one state.
    ("G-single-aborted", [did("w x 1, w y 1"), did("r x 1, r y -", state="fail")]),
    ("", [did("w x 1, w y 1", 0, 9), did("r x -, r y -", 10, 20, state="fail")]),
    # A transaction in doubt took effect if a read returned its write; it may be later than before.
    ("G-single", [did("w x 1, w y 1", state=""), did("r x 1, r y -")]),
    ("", [did("w x 1, w y 1", state=""), did("r x -, r y -"), did("r x 1, r y 1")]),
    ("", [did("w x 1", 0, 9, state="info"), did("r x -", 10, 20), did("r x 1", 30, 40)]),
    (
        "G-single-realtime",
        [did("w x 1", 0, 9, state="info"), did("r x 1", 10, 20), did("r x -", 30, 40)],
    ),
    # The reads of a transaction in doubt count once a read returned one of its writes.
    ("G2", [did("r x -, w y 1", state="info"), did("r y -, w x 2"), did("r y 1")]),
    ("", [did("r x -, w y 1", state="info"), did("r y -, w x 2")]),
    # Histories that are none.
    ("history", [did("w x 1"), did("w x 1")]),
    ("history", [did("a x 1"), did("a x 1")]),
    ("history", [did("a x 1"), did("w x 2")]),
]


@pytest.mark.parametrize(("rules", "transactions"), CASES)
def test_each_anomaly_has_its_name(tmp_path: Path, rules: str, transactions: list[Done]) -> None:
    assert named(tmp_path, transactions) == rules.split()


# --- histories by chance -------------------------------------------------------------------------


@given(
    st.integers(min_value=0),
    st.integers(min_value=1, max_value=12),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_serial_store_is_never_blamed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, threads: int, positions: float
) -> None:
    store = Serial(seed, 120, threads=threads, positions=positions)
    assert named(tmp_path_factory.mktemp("serial"), store.done) == []


@pytest.mark.parametrize("name", UNTRUTHS)
def test_each_injected_error_is_found(tmp_path: Path, name: str) -> None:
    mutate, rules = UNTRUTHS[name]
    applied = 0
    for seed in range(40):
        store = Serial(seed, 60, threads=1 + seed % 8, positions=seed % 3 / 2)
        untrue = mutate(store.done, Random(seed))
        if untrue is None:
            continue
        applied += 1
        found = set(named(tmp_path, untrue))
        assert found & rules if rules else found, f"seed {seed}: {found}"
    assert applied >= 10


# --- cycles, in words ----------------------------------------------------------------------------


def test_a_cycle_is_reported_with_operations_and_lines(tmp_path: Path) -> None:
    around = [did(f"w k{n} {n}", 10 * n, 10 * n + 5) for n in range(2, 9)]
    stale = [did("w x 1", 0, 9), did("r x -, w z 4", 100, 110), did("r z 4", 120, 130)]
    (violation,) = judged(tmp_path, lines_of([*stale, *around]))
    assert violation.rule == "G-single-realtime"
    assert violation.text == (
        "2 transactions each of which must come before the next:"
        " {r x None, w z 4} [clients.history:19] read x as None, before the next one wrote 1; then"
        " {w x 1} [clients.history:3] and returned before the next one was called;"
        " which is the first again"
    )


@pytest.mark.parametrize(
    ("transactions", "words"),
    [
        (CASES[0][1], "appended 1 to x, before the next one appended 2"),
        (CASES[10][1], "appended 2 to y, which the next one read"),
        (CASES[12][1], "wrote 1 to x, which the next one read"),
        (CASES[14][1], "read y as [], before the next one appended 1"),
        (CASES[16][1], "read y as None, before the next one wrote 1"),
    ],
)
def test_every_kind_of_edge_has_a_description(
    tmp_path: Path, transactions: list[Done], words: str
) -> None:
    (violation,) = judged(tmp_path, lines_of(transactions))
    assert words in violation.text


def test_cycles_are_counted_and_a_long_one_is_found(tmp_path: Path) -> None:
    many = [
        did(text, 100 * n, 100 * n + 50)
        for n in range(60)
        for text in (f"r x{n} -, w y{n} 1", f"r y{n} -, w x{n} 2")
    ]
    rules = named(tmp_path, many)
    assert rules == ["G2"] * 50 + ["cycle"]
    ring = [did(f"r k{n} -, w k{(n + 1) % 300} {n}") for n in range(300)]
    (violation,) = judged(tmp_path, lines_of(ring))
    assert violation.rule == "G2"
    assert violation.text.startswith("300 transactions")


def test_a_stale_read_is_reported_by_a_short_cycle_too(tmp_path: Path) -> None:
    """By data alone it is seen, but only together with all that came between."""
    chain = [did(f"r k{n} {n}, w k{n + 1} {n + 1}", 100 * n, 100 * n + 50) for n in range(1, 20)]
    first, last = did("r old -, w k1 1", 0, 50), did("r k20 20, w old 5", 2000, 2050)
    again = did("r old 5, w k0 7", 2100, 2150)
    stale = did("r k0 7, r k1 -", 2200, 2250)
    found = judged(tmp_path, lines_of([first, *chain, last, again, stale]))
    lengths = {violation.rule: int(violation.text.split()[0]) for violation in found}
    assert lengths == {"G-single": 23, "G-single-realtime": 2}


# --- the command ---------------------------------------------------------------------------------


def test_the_command_judges_transactions_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(tmp_path, lines_of([did("w x 1", state="info"), did("r x 1")])) == []
    assert check_history.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "transactions 2, committed 1, in doubt 1, in doubt but seen 1" in said
    assert judged(tmp_path, lines_of([did("w x 1, w x 2"), did("r x 1")]))
    assert check_history.main([str(tmp_path)]) == 1
    assert "VIOLATION G1b: {r x 1} read 1 in x" in capsys.readouterr().out


def test_a_result_without_a_call_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with events.Recorder(tmp_path / "a.history", "a") as recorder:
        recorder.result(events.Ok(1, 5, []))
    assert check_history.main([str(tmp_path)]) == 2
    assert "a.history:2: no call for it" in capsys.readouterr().err


def test_an_error_that_is_not_public_is_blamed(tmp_path: Path) -> None:
    lines: list[events.Event] = [
        events.Invoke(1, 5, 1, [("w", "x", 1)]),
        events.Info(1, 6, "AssertionError"),
    ]
    assert [v.rule for v in judged(tmp_path, lines)] == ["errors"]
    assert judged(tmp_path, [lines[0], events.Fail(1, 6, "TransactionAborted")]) == []
