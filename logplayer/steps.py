"""Effects and events between the player's node and the threads that run its targets.

The node starts one step of a worker at a time. A worker is one claim's connection to its target:
it begins with its first `OpenTarget` and ends with `CloseTarget`; the node ignores what it returns
afterwards.
"""

from __future__ import annotations

from logplayer.contract import Batch, Opened, Task
from ziplog.core.node import Effect, Event


class OpenTarget(Effect, frozen=True, gc=False):
    """Call `Target.open`; a `StepEnded` with an `Opened` or an exception follows."""

    worker: int
    task: Task


class Deliver(Effect, frozen=True, gc=False):
    """Call `Target.deliver`; a `StepEnded` with bytes, None or an exception follows."""

    worker: int
    batch: Batch


class CloseTarget(Effect, frozen=True, gc=False):
    """Call `Target.close` after the step under way; nothing follows."""

    worker: int


class StepEnded(Event, frozen=True, gc=False):
    """A step of a worker has ended."""

    worker: int
    result: Opened | bytes | Exception | None
