"""Polling with a deadline, for conditions that a test cannot be notified of."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Interval between two checks of a condition, in seconds.
_PAUSE_S = 0.01


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 40.0) -> None:
    """Return once the condition holds; fail if that takes too long."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(_PAUSE_S)


async def until(condition: Callable[[], object], what: str, deadline_s: float = 40.0) -> None:
    """Run the event loop's tasks until the condition holds; fail if that takes too long."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0)


async def next_turn() -> None:
    """Suspend until the event loop's next turn."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


@contextmanager
def explicit_collections() -> Iterator[None]:
    """Let garbage be collected by `gc.collect` only.

    `gc.collect` returns at once while another thread collects, so a test of collected owners must
    not have automatic collections beside it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
