"""Suggestions for unknown names: "did you mean"."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Minimum similarity of a suggestion (the `cutoff` of difflib).
_LIKENESS: Final = 0.5


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar known name, or None if none is similar enough.

    Args:
        name: the unknown name; case is ignored.
        names: the known names.

    """
    lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, _LIKENESS)
    return lower[near[0]] if near else None
