"""Receives what other processes publish: one subscription for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog import event_log
from ziplog.errors import UnavailableError
from ziplog.runtime.descriptors import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.publications import Subscription

#: Descriptors that the import of ZeroMQ needs at once.
_IMPORT_DESCRIPTORS: Final = 4


class PublicationReceiver:
    """Receives the publications of other processes. Of one thread."""

    def __init__(self, on_frame: Callable[[bytes, bytes], object]) -> None:
        """Receive nothing yet.

        `on_frame` is called with a publisher's name and a frame, on a thread for each publisher.
        """
        self._on_frame: Final = on_frame
        #: By the publisher's name: its endpoint, and the subscription there.
        self._subscriptions: Final[dict[bytes, tuple[str, Subscription]]] = {}

    def receive_from(self, name: bytes, endpoint: str) -> None:
        """Receive what `name` publishes at `endpoint` ("host:port") from now on, only there.

        If the system refuses descriptors or a thread, it logs a warning, and receives nothing; then
        the call may be repeated.
        """
        former = self._subscriptions.get(name)
        if former is not None:
            if former[0] == endpoint:
                return
            del self._subscriptions[name]
            former[1].close()
        try:
            require(_IMPORT_DESCRIPTORS, f"cannot receive publications of {endpoint}")
            # Importing ZeroMQ takes a tenth of a second, and only large clusters publish.
            from ziplog.runtime.publications import Subscription  # noqa: PLC0415

            found = Subscription(name, endpoint, self._on_frame)
        except UnavailableError as error:
            event_log.warning("no publications", publisher=endpoint, why=str(error))
        else:
            self._subscriptions[name] = endpoint, found

    def close(self) -> None:
        """Close all connections and end the threads. Idempotent."""
        while self._subscriptions:
            self._subscriptions.popitem()[1][1].close()
