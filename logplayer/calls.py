"""Calls of the application to a player's node; `Complete` answers each exactly once.

A call whose deadline has passed gets a `DeadlineError`. A call that waits gets a `ClosedError` when
the player stops, and the node's `failure` if it has one.
"""

from __future__ import annotations

from ziplog.client.common.requests import Request


class StatusCall(Request, frozen=True, gc=False):
    """Get the status. Result, at once: a dict that JSON can hold."""

    #: Unix time in ns; 0: unknown, and no lag is known.
    wall_ns: int


class PositionsCall(Request, frozen=True, gc=False):
    """Get how far the tasks of this process are, or are after the steps under way.

    Result, at once: gsns by the names of cursors; these may be behind.
    """


class StartedCall(Request, frozen=True, gc=False):
    """Wait until the first claims of this process were answered. Result: None."""


class FailureCall(Request, frozen=True, gc=False):
    """Wait until a task of this process has failed. Result: why, by the names of cursors."""


class WaitCall(Request, frozen=True, gc=False):
    """Wait until every task of the player has committed a position. Result: None.

    Tasks of other processes count as well. Paused and failed tasks do not move.
    """

    #: A gsn.
    position: int


class StopCall(Request, frozen=True, gc=False):
    """Drain all tasks, and release their cursors. Result: None.

    The deadline's error names the tasks whose step is still under way.
    """
