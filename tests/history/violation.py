"""A rule that a history breaks."""

from __future__ import annotations

from typing import Final, NamedTuple

#: Later than everything.
END: Final = 2**63 - 1


class Violation(NamedTuple):
    """A rule that was broken, and where it shows."""

    rule: str
    text: str
    source: int
    #: The position and the payload that it is about, if it is about one.
    gsn: int = 0
    payload: int = 0
