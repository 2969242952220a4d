"""A process that runs one node: its assertions, main loop, signals and garbage collection."""

from __future__ import annotations

import gc
import signal
from typing import TYPE_CHECKING, Final

from ziplog.core.node import StopRequested
from ziplog.errors import ConfigError
from ziplog.runtime.connection_log import ConnectionLog

if TYPE_CHECKING:
    from ziplog.runtime.driver import Driver
    from ziplog.runtime.transport import Transport

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def require_assertions() -> None:
    """Refuse to run without the assertions that stop a node before it harms the log.

    Raises:
        ConfigError: Python was started without assertions.

    """
    if not __debug__:
        raise ConfigError(
            "PYTHONOPTIMIZE", "1", "unset",
            message="Python runs without assertions, which stop a node before it harms the log:"
            " unset PYTHONOPTIMIZE, and start Python without -O",
        )  # fmt: skip


def run_process(driver: Driver, transport: Transport, *, asks_node: bool = False) -> None:
    """Run a driver as its process's main loop, until SIGTERM or SIGINT; from the main thread.

    `asks_node`: SIGTERM only asks the node to stop; a second signal, or SIGINT, ends the loop.
    """

    def on_signal(number: int, _frame: object) -> None:
        nonlocal asks_node
        if asks_node and number == signal.SIGTERM:
            asks_node = False
            driver.post(StopRequested())
        else:
            driver.stop()

    # A signal just before the poll would not interrupt it; the byte does.
    signal.set_wakeup_fd(transport.wake_fd, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    # A process may block these signals while it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    transport.changes = ConnectionLog()
    spare_collector()
    try:
        driver.run()
    finally:
        signal.set_wakeup_fd(-1)


def spare_collector() -> None:
    """Exclude long-lived objects from garbage collection: a full collection takes milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
