"""The thread that steps a blocking client between its calls, while the client owns cursors.

A blocking client is stepped by its calls. An owner of cursors must renew its claims also while the
caller computes. So this thread steps the engine a few times a second, unless a call does.

Rule: the thread keeps no dropped client alive, and ends with the last claim.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:

    class Stepped(Protocol):
        """A blocking engine."""

        def step_between_calls(self) -> bool:
            """Step it once, unless a call does; return whether it must be stepped further."""
            ...


_log: Final = logging.getLogger("ziplog.client")
_INTERVAL_S: Final = 0.1


class TimerThread:
    """The thread of one engine; it runs while it is needed."""

    def __init__(self, engine: Stepped) -> None:
        self._engine: Final = weakref.ref(engine)
        self._lock: Final = threading.Lock()
        self._signal: Final[SimpleQueue[None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        #: The last step failed; the log has its error.
        self._has_failed = False

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ziplog-timers", daemon=True)
                self._thread = start_thread(thread, "cannot keep cursors")

    def _run(self) -> None:
        while self._is_needed():
            with contextlib.suppress(Empty):
                self._signal.get(timeout=_INTERVAL_S)

    def _is_needed(self) -> bool:
        with self._lock:
            engine = self._engine()
            if engine is None or not self._step(engine):
                self._thread = None
            return self._thread is not None

    def _step(self, engine: Stepped) -> bool:
        """Step the engine; after an internal error the thread goes on, or the claims would end."""
        try:
            is_needed = engine.step_between_calls()
        except Exception:  # noqa: BLE001 - no call gets it
            if not self._has_failed:
                _log.exception("a step of the client failed")
            self._has_failed = is_needed = True
        else:
            self._has_failed = False
        return is_needed

    def stop(self) -> None:
        """Wait for the end of the thread, after its engine was closed."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._signal.put(None)
            thread.join()
