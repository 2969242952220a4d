"""Pauses between the attempts of a task, and which errors are attempted again.

The jitter of a pause comes from a checksum of the task and the attempt, so a run can be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from logplayer.contract import Retry
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from logplayer.contract import TargetSpec

#: Errors of a program or its settings: no further attempt helps.
BUGS: Final = (TypeError, AttributeError, NameError, ImportError, ConfigError)
#: The longest pause that a target may ask for, in seconds.
MAX_AFTER_S: Final = 3600.0
#: Maximum length of an error's text.
MAX_TEXT: Final = 2000
#: From the first failed attempt to the next one, in ns, until the operator is warned.
_WARN_NS: Final = NS_PER_S
#: The jitter of a pause is up to a fifth of it.
_JITTER: Final = 5
_UNIT: Final = 2**32
#: Doublings after which every pause is the last one.
_MAX_DOUBLINGS: Final = 32


def pause_ns(
    name: str, attempt: int, first_ms: int, last_ms: int, after_s: float | None = None
) -> int:
    """Return the pause before the next attempt, in ns.

    Args:
        name: the task's.
        attempt: number of attempts that failed in a row, from 1.
        first_ms: the pause after the first one, in ms; it doubles with each further one.
        last_ms: the longest pause, in ms.
        after_s: the pause that the target asked for, in seconds, at most `MAX_AFTER_S`; a shorter
            one than the first pause becomes the first pause.

    """
    if after_s is not None:
        return max(int(min(max(after_s, 0.0), MAX_AFTER_S) * NS_PER_S), first_ms * NS_PER_MS)
    doubled = first_ms << min(attempt - 1, _MAX_DOUBLINGS)
    pause = min(doubled, last_ms) * NS_PER_MS
    share = crc32c(f"{name}/{attempt}".encode())
    return pause - pause // _JITTER * share // _UNIT


class Attempts:
    """The failed attempts of a task, since the last success."""

    __slots__ = (
        "_count", "_has_failed_delivery", "_has_warned", "_name", "_since", "_spec", "retry_at"
    )  # fmt: skip

    def __init__(self, name: str, spec: TargetSpec) -> None:
        """Count nothing yet; `name`: the task's."""
        self._name: Final = name
        self._spec: Final = spec
        self._count = 0
        self._since: int | None = None
        self._has_failed_delivery = self._has_warned = False
        #: When the next one is due, in monotonic ns.
        self.retry_at = NEVER

    def reset(self) -> None:
        """Forget them after a success."""
        self._count, self._since, self.retry_at = 0, None, NEVER
        self._has_failed_delivery = self._has_warned = False

    def on_opened(self) -> None:
        """Forget them if all were opens: the success of one says nothing of deliveries."""
        if not self._has_failed_delivery:
            self.reset()

    def fail(self, step: str, error: Exception, now: int) -> bool:
        """Count a failure; return whether there is a next attempt, at `retry_at`.

        Args:
            step: what failed, "open" or "deliver".
            error: why.
            now: monotonic ns.

        """
        spec = self._spec
        self._count += 1
        self._has_failed_delivery |= step == "deliver"
        if self._since is None:
            self._since = now
        if spec.retry_s and now - self._since >= spec.retry_s * NS_PER_S:
            return False
        after_s = error.after_s if isinstance(error, Retry) else None
        first, last = spec.retry_first_ms, spec.retry_last_ms
        self.retry_at = now + pause_ns(self._name, self._count, first, last, after_s)
        return True

    def must_warn(self) -> bool:
        """Whether these attempts need a warning: once, and only if the last success is long ago."""
        if self._has_warned or self._since is None:
            return False
        self._has_warned = self.retry_at - self._since >= _WARN_NS
        return self._has_warned


def text_of(error: BaseException) -> str:
    """Return an error as one line."""
    text = reason_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return the text of an error as one line that every log, file and database can hold."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a foreign class
        text = "its text cannot be shown"
    line = " ".join(text[:MAX_TEXT].split())
    return line.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
