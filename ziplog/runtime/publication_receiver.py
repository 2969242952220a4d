"""Receives what other processes publish: one subscription for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog import event_log
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.publications import Subscription


class PublicationReceiver:
    """Receives the publications of other processes. Of one thread."""

    def __init__(self, on_frame: Callable[[bytes, bytes], object]) -> None:
        """Receive nothing yet.

        `on_frame` is called with a publisher's name and a frame, on a thread for each publisher.
        """
        self._on_frame: Final = on_frame
        self._subscriptions: Final[dict[bytes, Subscription]] = {}

    def receive_from(self, name: bytes, endpoint: str) -> None:
        """Receive what `name` publishes at `endpoint` ("host:port") from now on, only there.

        If the system refuses descriptors or a thread, it logs a warning, and receives nothing.
        """
        former = self._subscriptions.pop(name, None)
        if former is not None:
            former.close()
        # Importing ZeroMQ takes a tenth of a second, and only large clusters publish.
        from ziplog.runtime.publications import Subscription  # noqa: PLC0415

        try:
            self._subscriptions[name] = Subscription(name, endpoint, self._on_frame)
        except UnavailableError as error:
            event_log.warning("no publications", publisher=endpoint, why=str(error))

    def close(self) -> None:
        """Close all connections and end the threads. Idempotent."""
        while self._subscriptions:
            self._subscriptions.popitem()[1].close()
