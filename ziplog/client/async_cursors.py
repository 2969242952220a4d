"""A claimed cursor: a subscription whose position the membership service keeps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, Final

from ziplog.client import cursor_arguments
from ziplog.client.async_iterators import AsyncSubscription
from ziplog.client.common.requests import ClaimQuery, ClaimState, ReleaseRequest
from ziplog.core.units import NEVER
from ziplog.errors import DeadlineError, ZiplogError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.arguments import BytesLike
    from ziplog.client.common.requests import ClaimRequest
    from ziplog.client.engines.asyncio_engine import AsyncioEngine


class AsyncCursor(AsyncSubscription):
    """A cursor that this client owns: an async iterator and async context manager.

    Iteration begins at the committed position and follows the log. Nothing is committed by itself:
    records that were returned and not committed are returned again, to the next owner. When the
    claim ends in another way than by `close`, `commit` raises CursorLostError, at the latest after
    a third of the lease. So does iteration, after the records that it has fetched, at most 1,000.
    """

    #: After an operator's pause, or a loss, iteration still returns what it fetched.
    _READ_AHEAD: ClassVar[int] = 1000
    _CLOSED: ClassVar[tuple[str, str]] = ("this cursor", "claim it again to continue")

    def __init__(
        self,
        engine: AsyncioEngine,
        request: ClaimRequest,
        deadline_ns: Callable[[float | None], int],
    ) -> None:
        """Use `Log.cursor`."""
        self._deadline_ns: Final = deadline_ns
        self._state = ClaimState(request.name, 0, RID_GENESIS, b"", is_paused=False, lost="")
        super().__init__(engine, request, RID_GENESIS, None)
        engine.drive_timers()

    @property
    def name(self) -> str:
        """The cursor's name."""
        return self._state.name

    @property
    def term(self) -> int:
        """The number of this claim; a later claim of the same name has a greater one."""
        return self._claim().term

    @property
    def position(self) -> RecordId:
        """The committed position: where the next claim continues."""
        return self._claim().position

    @property
    def reached(self) -> RecordId:
        """The position from which this claim continues: after the last record that it returned."""
        return max(super().position, self._claim().position)

    @property
    def mark(self) -> bytes:
        """What was committed with the position."""
        return self._claim().mark

    @property
    def is_paused(self) -> bool:
        """Whether an operator paused it; then no further records are returned."""
        return self._claim().is_paused

    def _claim(self) -> ClaimState:
        if not self._buffer.closed and self._is_open:
            self._state = self._engine.call_now(ClaimQuery(NEVER, self._number))
        return self._state

    async def commit(
        self,
        position: RecordId | None = None,
        mark: BytesLike | None = None,
        *,
        timeout: float | None = None,
    ) -> RecordId:
        """Move the cursor forward; return the position once consensus has committed it.

        Args:
            position: from the committed position to `reached`; None: `reached`.
            mark: stored with the position, at most 512 bytes; None: the present mark stays.
            timeout: in seconds.

        Raises:
            CursorLostError: the claim ended.
            ConfigError: `position` was not reached yet, or is below the committed one or that of
                an earlier commit without a known outcome.
            DeadlineError: it was not confirmed in time, and may be committed.

        """
        deadline_ns = self._deadline_ns(timeout)
        if not await self._opens_by(deadline_ns):
            raise DeadlineError(
                f"nothing is committed: the cursor {self.name} is not claimed yet; try again"
            )
        self._check_open()
        request = cursor_arguments.commit(
            self._number, self._claim(), self.reached, position, mark, deadline_ns
        )
        committed: RecordId = await self._engine.call(request)
        return committed

    def commit_soon(self, position: RecordId | None = None, mark: BytesLike | None = None) -> None:
        """Move the cursor forward within a second, at most once a second; the last call counts.

        `commit` and `close` send what is left. Arguments and errors are those of `commit`.
        """
        self._check_open()
        request = cursor_arguments.commit(
            self._number, self._claim(), self.reached, position, mark, NEVER, is_soon=True
        )
        self._engine.call_now(request)

    async def close(self) -> None:
        """Commit what `commit_soon` left, and end the ownership. Idempotent.

        If the service does not confirm it in time, another client waits for the end of the lease.
        """
        if self._buffer.closed:
            return
        try:
            with contextlib.suppress(ZiplogError):
                await self._release()
        finally:
            # Also after an interruption: then the release is sent, and its reply is not awaited.
            await super().close()

    async def _release(self) -> None:
        if not self._is_open:
            return
        self._claim()
        await self._engine.call(ReleaseRequest(self._deadline_ns(None), self._number))
