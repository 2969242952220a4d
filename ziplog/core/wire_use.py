"""The versions of messages and files: what a release knows, and what its cluster uses.

One number covers both. A message, a field or a file form of version n is sent or stored only while
the cluster uses version n or a later one. `ziplog upgrade finish` raises the version in use, once
all nodes have reported that their releases know the higher one. Rules: the version in use never
decreases; a node stores it in its directory before it uses it; a release that does not know it does
not run (docs/protocol.md, section 15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.node import Halt, RecordWire

if TYPE_CHECKING:
    from ziplog.core.node import Effect


class WireRange(NamedTuple):
    """The versions that a release knows: the first and the last."""

    first: int = 1
    last: int = 1

    def has(self, wire: int) -> bool:
        """Whether the release knows a version."""
        return self.first <= wire <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


class Release(NamedTuple):
    """The release that a process runs."""

    #: The version of Ziplog; "": unknown.
    version: str = ""
    wires: WireRange = WireRange()

    def problem(self, wire: int) -> str:
        """Return why this release must not run in a cluster that uses version `wire`; "": it may.

        The names of both versions are in the text.
        """
        if self.wires.has(wire):
            return ""
        return (
            f"the cluster uses wire version {wire}, but this release (Ziplog"
            f" {self.version or 'of unknown version'}) knows {self.wires}: install a release that"
            f" knows {wire}, and start this node again"
        )


class WireUse:
    """The version in use, as one node knows it."""

    def __init__(self, release: Release, recorded: int) -> None:
        """`recorded`: the version in the node's directory, which the release knows."""
        self.release: Final = release
        #: Newer forms than these are neither sent nor stored.
        self.wire = max(recorded, release.wires.first)

    def on_report(self, wire: int) -> list[Effect]:
        """Handle the membership service's report of the version in use.

        Reports may be late. The version counts once it is in the node's directory.
        """
        if problem := self.release.problem(wire):
            return [Halt(problem)]
        return [RecordWire(wire)] if wire > self.wire else []

    def on_recorded(self, wire: int) -> None:
        """Use a version that is in the node's directory now."""
        self.wire = max(self.wire, wire)
