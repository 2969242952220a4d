"""The parts of the blocking client that are not generated from the asyncio one.

`async_base` has the same names for the asyncio client.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from ziplog.client import arguments, placement_arguments
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import ConnectRequest, EndClaimsRequest
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.requests import Policy, Request
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId


class Connection:
    """A connected engine."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None,
        policy: Policy | None = None,
        timeout: float | None = None,
        cluster_id: str | None = "",
        region: str | None = None,
        min_regions: int | None = None,
    ) -> None:
        """Connect; see `ziplog.connect`."""
        self._timeout: Final = arguments.timeout_s(timeout, arguments.DEFAULT_TIMEOUT_S)
        endpoints, cluster = arguments.log_address(bootstrap, cluster_id)
        preferences = placement_arguments.preferences(policy, region, min_regions)
        self._core: Final = ClientCore(os.urandom(16), endpoints, preferences, cluster)
        self._engine: Final = BlockingEngine(self._core)
        self._engine.resolve = self._resolve
        try:
            self._limits: Final = self._engine.call(ConnectRequest(self._deadline_ns(None)))
        except BaseException:
            self._engine.close()
            raise
        if self._core.has_unknown_region:
            placement_arguments.warn_of_region()

    def _deadline_ns(self, timeout: float | None) -> int:
        # `arguments.deadline_ns` without its calls, for inserts.
        if timeout is None and self._timeout < arguments.LIMITLESS_S:
            return now_ns() + int(self._timeout * 1e9)
        return arguments.deadline_ns(timeout, self._timeout)

    def _resolve(
        self, error: OutcomeUnknownError, timeout: float | None
    ) -> RecordId | list[RecordId | None] | None:
        """Wait for the outcome of an insert; see `OutcomeUnknownError.resolve`."""
        request = arguments.resolve(error, self._deadline_ns(timeout))
        return arguments.resolved(error, self._engine.call(request))

    def _end_claims(self) -> None:
        """Release what the service grants of other threads' claims; wait a second at most."""
        if self._core.has_cursor_calls and not self._engine.is_closed:
            with contextlib.suppress(ClosedError):
                deadline_ns = arguments.deadline_ns(arguments.END_CLAIMS_S, 0)
                self._engine.call(EndClaimsRequest(deadline_ns))


class Stream:
    """An open subscription or scan."""

    def __init__(
        self,
        engine: BlockingEngine,
        request: Request,
        closing: Callable[[int, int], Request],
        on_fork: Callable[[], None] | None = None,
    ) -> None:
        """Open it; `closing` makes the request that closes it; `on_fork`: see `Owners`."""
        self._engine: Final = engine
        self._number: Final = engine.next_number()
        requests = (closing(NEVER, self._number),)
        # Before the call: whatever happens to the call, the owner closes the stream.
        self._owned: Final = engine.owners.add(self, lambda: requests, on_fork)
        engine.call(request, self._number)

    def _opens_by(self, _deadline_ns: int) -> bool:
        """Return True: it is open once it exists."""
        return True

    @property
    def _is_open(self) -> bool:
        return not self._engine.is_closed
