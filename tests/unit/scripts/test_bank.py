"""Bank check: lost or created money, invented transfers, and transfers that happened twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.scripts.transacting import Done, named

if TYPE_CHECKING:
    from pathlib import Path

OPENED = Done(0, 5, [("accounts", "", [10, 10, 10])])
FIRST = Done(10, 20, [("transfer", "a-1", [0, 1, 3])])
SECOND = Done(10, 20, [("transfer", "a-2", [1, 2, 4])])


def read(balances: list[int] | None, ledger: dict[str, Any] | None = None, **more: Any) -> Done:
    return Done(30, 40, [("balances", "", balances), ("ledger", "", ledger)], **more)


LINES = {"a-1": [0, 1, 3, 1], "a-2": [1, 2, 4, 1]}


@pytest.mark.parametrize(
    ("rules", "done"),
    [
        ("", [FIRST, SECOND, read([7, 9, 14], LINES)]),
        # Money.
        ("sum", [FIRST, read([7, 10, 10])]),
        ("", [FIRST, read([7, 13, 10])]),
        ("sum", [FIRST, read([7, 10, 10], state="fail")]),
        # A line that should be there, and one that may be.
        ("lost-transfer", [FIRST, SECOND, read([7, 13, 10], {"a-1": LINES["a-1"]})]),
        ("", [FIRST, SECOND._replace(at=30), read([7, 13, 10], {"a-1": LINES["a-1"]})]),
        ("", [FIRST, SECOND._replace(state="info"), read([7, 13, 10], {"a-1": LINES["a-1"]})]),
        ("", [FIRST, SECOND._replace(state="info"), read([7, 9, 14], LINES)]),
        # A line that should not.
        ("phantom-transfer", [FIRST, SECOND._replace(state="fail"), read([7, 9, 14], LINES)]),
        ("phantom-transfer", [FIRST, read([7, 9, 14], LINES)]),
        ("phantom-transfer", [FIRST, read([6, 14, 10], {"a-1": [0, 1, 4, 1]})]),
        # Twice: by its line, or by the balances.
        ("double-transfer", [FIRST, read([7, 13, 10], {"a-1": [0, 1, 3, 2]})]),
        ("double-transfer double-transfer", [FIRST, read([4, 16, 10], {"a-1": [0, 1, 3, 1]})]),
        ("double-transfer double-transfer", [FIRST, read([10, 10, 10], {"a-1": [0, 1, 3, 1]})]),
    ],
)
def test_errors_of_a_bank_are_found(tmp_path: Path, rules: str, done: list[Done]) -> None:
    assert named(tmp_path, [OPENED, *done]) == rules.split()
