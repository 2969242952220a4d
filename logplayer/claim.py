"""One cursor that this process claims: the claim, its state, its moves, its release.

    free --claim--> claiming --granted--> held --release--> free
                       '--refused--> free    '--lost--> free

Rules: at most one move is under way; it carries the greatest position. A position that is not above
the committed one is not sent, except with another mark.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    CommitRequest,
    ReleaseRequest,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.log_tasks import ignore
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import CursorLostError, NoSuchRecordError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.settings import PlayerSettings
    from ziplog.client.common.requests import ClaimState, Request
    from ziplog.client.log_tasks import LogTasks


class ClaimListener(Protocol):
    """What a claim reports to."""

    def wake(self) -> None:
        """Poll the claim soon: it got a reply."""
        ...

    def on_claimed(self) -> None:
        """Handle a claim that was granted."""
        ...

    def on_refused(self, error: Exception) -> None:
        """Handle a claim that was refused."""
        ...

    def on_claim_changed(self) -> None:
        """Handle a pause or its end."""
        ...

    def on_claim_lost(self, reason: str) -> None:
        """Handle the end of a claim by another owner, a seek, a release or a deletion."""
        ...

    def on_committed(self) -> None:
        """Handle a move that was committed."""
        ...

    def on_beyond_log(self, position: int) -> None:
        """Handle the refusal of a move to a position that no shard owns yet."""
        ...

    def on_released(self) -> None:
        """Handle the end of a release."""
        ...


class Claim:
    """The claims of one cursor, one after the other."""

    def __init__(
        self,
        calls: LogTasks,
        name: str,
        owner: str,
        settings: PlayerSettings,
        listener: ClaimListener,
    ) -> None:
        """Claim nothing yet.

        Args:
            calls: the log.
            name: the cursor's.
            owner: describes this process to people.
            settings: the player's.
            listener: gets what happens.

        """
        self._calls: Final = calls
        self.name: Final = name
        self._owner: Final = owner
        self._settings: Final = settings
        self._listener: Final = listener
        #: What the service granted; None: nothing.
        self.state: ClaimState | None = None
        #: The position that was committed last, and its mark; both as of the last claim.
        self.committed = 0
        self.mark = b""
        #: The mark of the last move that was not refused, also of one that is not committed yet.
        self.last_mark = b""
        #: It was moved since it was created or sought, as far as this process knows.
        self.has_moved = False
        self._number = 0
        self._is_claiming = self._is_releasing = self._is_moving = False
        #: The move that is due.
        self._wanted: tuple[int, bytes] | None = None
        self._is_urgent = False
        self._move_at = 0

    @property
    def is_held(self) -> bool:
        """Whether this process holds the cursor, and does not release it."""
        return self.state is not None and not self._is_releasing

    @property
    def is_settled(self) -> bool:
        """Whether no move is due or under way."""
        return self._wanted is None and not self._is_moving

    # --- claiming ---

    def claim(self, start: RecordId) -> None:
        """Claim the cursor; `start`: the position of a new one."""
        assert self.state is None
        assert not self._is_claiming
        self._is_claiming = True
        settings = self._settings
        request = ClaimRequest(
            NEVER, self.name, start, self._owner, settings.lease_ms, settings.hold_s,
            wait=False, reads=False,
        )  # fmt: skip
        self._call(request, self._on_number)

    def _call(self, request: Request, then: Callable[[Any], None]) -> None:
        """Start a call; its result wakes the listener."""

        def on_result(result: Any) -> None:
            self._listener.wake()
            then(result)

        self._calls.call(request, on_result)

    def _on_number(self, number: int | Exception) -> None:
        if isinstance(number, Exception):
            self._is_claiming = False
            self._listener.on_refused(number)
            return
        self._number = number
        self._call(ClaimQuery(NEVER, number), self._on_state)

    def _on_state(self, state: ClaimState | Exception) -> None:
        self._is_claiming = False
        if not isinstance(state, Exception) and state.lost:
            state = CursorLostError(self.name, state.term, state.lost)
        if isinstance(state, Exception):
            self._forget()
            self._listener.on_refused(state)
            return
        self.state = state
        self.committed, self.mark = state.position.gsn, state.mark
        self.last_mark = state.mark
        self.has_moved = state.has_moved
        self._wanted, self._is_urgent, self._is_moving = None, False, False
        self._move_at = self._calls.now
        self._watch()
        self._listener.on_claimed()

    def _watch(self) -> None:
        assert self.state is not None
        request = WatchClaimRequest(NEVER, self._number, self.state)
        self._call(request, partial(self._on_watched, self._number))

    def _on_watched(self, number: int, state: ClaimState | Exception) -> None:
        if number != self._number or self.state is None:
            return
        if isinstance(state, Exception):
            if not self._is_releasing:  # Else the release closes it.
                self._lose(str(state))
        elif state.lost:
            self._lose(state.lost)
        else:
            self.state = state
            self._watch()
            self._listener.on_claim_changed()

    def lose(self, reason: str) -> None:
        """Note that the cursor has another term."""
        if self.state is not None:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        is_releasing = self._is_releasing
        self._forget()
        if is_releasing:
            self._listener.on_released()
        else:
            self._listener.on_claim_lost(reason)

    def _forget(self) -> None:
        number, self._number = self._number, 0
        self.state = self._wanted = None
        self._is_releasing = self._is_moving = self._is_urgent = False
        if number:
            self._calls.call(UnsubscribeRequest(NEVER, number), ignore)

    # --- moves ---

    def move(self, position: int, mark: bytes) -> None:
        """Move the cursor within `commit_ms`; the target has everything below the position."""
        self.last_mark = mark
        if (position, mark) != (self.committed, self.mark) and position >= self.committed:
            self._wanted = (position, mark)

    def expedite(self) -> None:
        """Send the move that is due with the next poll."""
        self._is_urgent = True

    def poll(self, now: int) -> None:
        """Send what is due."""
        if self.state is None or self._is_moving:
            return
        if self._wanted is not None and (self._is_urgent or now >= self._move_at):
            self._send_move(now)
        elif self._wanted is None:
            self._is_urgent = False

    def _send_move(self, now: int) -> None:
        assert self._wanted is not None
        position, mark = self._wanted
        had_moved, self.has_moved = self.has_moved, True
        self._wanted, self._is_moving = None, True
        self._move_at = now + self._settings.commit_ms * NS_PER_MS
        request = CommitRequest(NEVER, self._number, RecordId(position, 0), mark)
        self._call(request, partial(self._on_moved, self._number, position, mark, had_moved))

    def _on_moved(
        self, number: int, position: int, mark: bytes, had_moved: bool, result: Any
    ) -> None:
        if number != self._number or self.state is None:
            return
        self._is_moving = False
        if isinstance(result, CursorLostError):
            self._lose(result.reason)
        elif isinstance(result, NoSuchRecordError):
            self._wanted, self.last_mark, self.has_moved = None, self.mark, had_moved
            self._listener.on_beyond_log(position)
            if self._is_releasing:
                self._send_release()
        elif isinstance(result, Exception):
            self._calls.effects.append(LogWarning(f"cannot move the cursor {self.name}: {result}"))
            self._wanted = self._wanted or (position, mark)
            self._is_urgent = False
        else:
            self.committed, self.mark = position, mark
            if self._wanted is not None and self._wanted[0] < position:
                self._wanted = None  # It would be refused.
            self._listener.on_committed()
            if self._is_releasing:
                self._send_release()

    # --- the end ---

    def release(self) -> None:
        """Send the move that is due, then end the ownership."""
        if self.state is None or self._is_releasing:
            return
        self._is_releasing = True
        if not self._is_moving:
            self._send_release()

    def _send_release(self) -> None:
        if self._wanted is not None:
            self._send_move(self._calls.now)
            return
        number = self._number

        def on_result(_result: object) -> None:
            if number == self._number and self._is_releasing:
                self._forget()
                self._listener.on_released()

        self._call(ReleaseRequest(NEVER, number), on_result)

    def next_wakeup(self) -> int:
        """Return when a move is due; `NEVER`: none is."""
        if self._wanted is None or self._is_moving or self.state is None:
            return NEVER
        return self._calls.now if self._is_urgent else self._move_at
