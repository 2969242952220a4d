"""The driver role of a blocking client: a lock that knows the thread that holds it.

Without that, a call of the client from its own policy or log handler would wait for itself.
"""

from __future__ import annotations

from threading import Lock, get_ident
from typing import Final

from ziplog.errors import LocalProtocolError


class DriverRole:
    """A lock, held by at most one thread; not reentrant."""

    __slots__ = ("_holder", "_lock")

    def __init__(self) -> None:
        self._lock: Final = Lock()
        #: The thread that has the role; 0: none.
        self._holder = 0

    def acquire(self) -> bool:
        """Take the role if it is free; return whether this thread has it now."""
        if self._lock.acquire(False):
            self._holder = get_ident()
            return True
        return False

    def release(self) -> None:
        """Give the role up."""
        self._holder = 0
        self._lock.release()

    def locked(self) -> bool:
        """Whether a thread has the role."""
        return self._lock.locked()

    def __enter__(self) -> None:
        """Wait for the role."""
        self._lock.acquire()
        self._holder = get_ident()

    def __exit__(self, *_: object) -> None:
        """Give the role up."""
        self.release()

    def refuse_holder(self) -> None:
        """Refuse a call of the thread that has the role: it would wait for itself.

        Raises:
            LocalProtocolError: this thread has the role.

        """
        if self._holder == get_ident():
            raise LocalProtocolError(
                "a policy or a handler of log messages called the client in the middle of one of"
                " its calls, which would wait for itself; use another client there"
            )
