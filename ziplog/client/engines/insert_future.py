"""The future of an insert of a blocking client, which a background thread of the client completes.

Rule: nothing that a callback or a signal handler raises ends or blocks that thread.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_log: Final = logging.getLogger("ziplog.client")


class InsertFuture(Future[Any]):
    """The future of one insert."""

    _done_callbacks: list[Callable[[Future[Any]], object]]

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    def _invoke_callbacks(self) -> None:
        """Call the callbacks; the base class logs exceptions, but lets `SystemExit` pass."""
        for callback in self._done_callbacks:
            try:
                callback(self)
            except BaseException:  # noqa: BLE001 - a caller's callback may raise anything
                _log.exception("a callback of %r failed", self)


class _Condition(threading.Condition):
    """A condition that a signal handler's exception cannot leave locked.

    `Condition.__enter__` is written in Python, so a handler may raise between the lock and the
    return. The lock would then stay locked, and the background thread would hang.
    """

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__  # type: ignore[attr-defined, no-any-return]
