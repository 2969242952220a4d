"""Which name was meant by one that does not exist."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: How like it a name is at least that may be meant (see difflib).
_LIKENESS: Final = 0.5


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return that of some names which is the most like another, None if none is.

    Args:
        name: what was given; case does not count.
        names: those that there are.

    """
    lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, _LIKENESS)
    return lower[near[0]] if near else None
