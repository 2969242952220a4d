"""The main loop of a process that runs one node: its signals, and its garbage collection."""

from __future__ import annotations

import gc
import signal
from typing import TYPE_CHECKING, Final

from ziplog.runtime.connection_log import ConnectionLog

if TYPE_CHECKING:
    from ziplog.runtime.driver import Driver
    from ziplog.runtime.transport import Transport

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run_process(driver: Driver, transport: Transport) -> None:
    """Run a driver as its process's main loop, until SIGTERM or SIGINT; from the main thread."""
    # A signal just before the poll would not interrupt it; the byte does.
    signal.set_wakeup_fd(transport.wake_fd, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: driver.stop())
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
