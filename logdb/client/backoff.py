"""Exponential backoff with jitter between the attempts of an aborted transaction.

The delay doubles up to a maximum; a random share of its second half is left out, so that competing
transactions separate. It ends after a number of attempts, or at a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.units import NEVER
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from logdb.errors import TransactionAborted

_FIRST_DELAY_S: Final = 0.002
_LAST_DELAY_S: Final = 0.1


class Backoff:
    """The attempts of one transaction."""

    __slots__ = ("_deadline_ns", "_delay_s", "_left")

    def __init__(self, retries: int | None, deadline_ns: int = NEVER) -> None:
        """Allow `retries` attempts after the first (None: any number) before a deadline.

        Raises:
            ConfigError: `retries` is not a number from 0 on.

        """
        self._left = check_retries(retries)
        self._deadline_ns: Final = deadline_ns
        self._delay_s = _FIRST_DELAY_S

    def next_delay_s(self, error: TransactionAborted, jitter: float, now: int) -> float:
        """Return the delay before the next attempt, in seconds; raise `error` if there is none.

        Args:
            error: the error of the last attempt.
            jitter: a random number from 0 to 1.
            now: monotonic nanoseconds.

        """
        if self._left == 0 or now >= self._deadline_ns:
            raise error
        if self._left is not None:
            self._left -= 1
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _LAST_DELAY_S)
        return delay_s * (1 + jitter) / 2


def check_retries(retries: object) -> int | None:
    """Return a number of retries; None: any number.

    Raises:
        ConfigError: the argument is not a number from 0 on.

    """
    if retries is None:
        return None
    if not isinstance(retries, int) or retries < 0:
        raise ConfigError("retries", retries, "a whole number from 0 on, or None for any number")
    return retries
