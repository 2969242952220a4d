"""A node that runs in a thread of the program, beside the program's own threads.

It does not survive `os.fork`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.node import Event
    from ziplog.runtime.driver import Driver
    from ziplog.runtime.transport import Transport


class NodeThread:
    """The thread that runs a node's driver, and closes its transport at the end."""

    def __init__(
        self, name: str, driver: Driver, transport: Transport, on_end: Callable[[], object]
    ) -> None:
        """Start no thread yet.

        Args:
            name: the thread's.
            driver: runs the node.
            transport: the driver's.
            on_end: called once the transport is closed, also if the thread could not start.

        """
        self._driver: Final = driver
        self._transport: Final = transport
        self._on_end: Final = on_end
        self._thread: Final = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def endpoint(self) -> str | None:
        """Where the node listens, "host:port"; None: nowhere."""
        return self._transport.endpoint

    def start(self, what: str) -> None:
        """Start the thread. Call once.

        Raises:
            UnavailableError: the system has no thread for `what` now.

        """
        try:
            start_thread(self._thread, what)
        except BaseException:  # A signal handler may raise, too; then the thread ends by itself.
            self._driver.stop()
            if self._thread.ident is None:
                self._end()
            raise

    def post(self, event: Event) -> None:
        """Queue an event for the node. From any thread."""
        self._driver.post(event)

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the node, and wait for the end of the thread, unless called by it. Idempotent.

        Args:
            timeout_s: time limit of the wait, in seconds; None: without limit.

        """
        self._driver.stop()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._driver.run()
        finally:
            self._end()

    def _end(self) -> None:
        self._transport.close()
        self._on_end()
