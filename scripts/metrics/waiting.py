"""Waiting for a server of another system until it answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], object], interval_s: float, within_s: float = 30.0) -> None:
    """Wait until a condition is true, checked each `interval_s` seconds.

    Raises:
        TimeoutError: it is still false after `within_s` seconds; an error of its last check is
            raised instead.

    """
    end = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            message = f"still not so after {within_s:g} s"
            raise TimeoutError(message)
        time.sleep(interval_s)
