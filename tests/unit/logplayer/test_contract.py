"""The errors that targets raise."""

from __future__ import annotations

from typing import Any

import pytest

from logplayer import Rejected


@pytest.mark.parametrize(
    ("error", "index"),
    [
        (Rejected("no"), None),
        (Rejected(None, "no"), None),
        (Rejected(0, "no"), 0),
        (Rejected(index=3, why="no"), 3),
    ],
)
def test_a_rejection_has_its_reason_and_its_index(error: Rejected, index: int | None) -> None:
    assert (str(error), error.index) == ("no", index)


@pytest.mark.parametrize(
    "values", [("no", 1), (0,), (None,), ("no", "5"), (0.5, "no"), (-1, "no"), (True, "no"), (0, 0)]
)
def test_a_rejection_of_other_types_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"Rejected takes \(why\) or \(index, why\)"):
        Rejected(*values)
