"""The processes of a player, and its cursors as the membership service lists them.

Every process claims a member cursor, the first free one of `PLAYER/members/0`, `/1`, ...; so the
list of cursors names the processes. Three times in each lease a process lists the cursors. In
between it *probes* the members that follow it five times a second: it tries to claim their member
cursors. The service refuses while a member lives. Once a member has released its cursor, or was
silent for its lease, the probe succeeds; the process releases the cursor and lists at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.contract import cursor_name
from logplayer.member_mark import MEMBERS, decode_mark, encode_mark, hash_of_tasks
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    CommitRequest,
    ConnectRequest,
    CursorsRequest,
    EditRequest,
    ReleaseRequest,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.log_tasks import ignore
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import ConfigError, CursorHeldError, TrimmedError
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.settings import PlayerSettings
    from ziplog.client.common.requests import ClaimState, Request
    from ziplog.client.log_tasks import LogTasks, TaskSteps
    from ziplog.types import CursorInfo

#: Number of lists in each lease.
_LISTS: Final = 3
#: Interval between lists while a call waits for positions, and after a claim that was refused.
_SOON_NS: Final = 100 * NS_PER_MS
#: Interval between probes, and the number of members that each process probes.
_PROBE_NS: Final = 200 * NS_PER_MS
_PROBED: Final = 3


class Members:
    """The member cursor of this process, and what the last list said."""

    def __init__(
        self,
        calls: LogTasks,
        settings: PlayerSettings,
        owner: str,
        *,
        on_listed: Callable[[], None],
        on_joined: Callable[[], None],
        failed: Callable[[], list[int]],
        on_failure: Callable[[ConfigError], None],
    ) -> None:
        """Know nothing yet; the first `poll` begins.

        Args:
            calls: the log.
            settings: the player's.
            owner: describes this process to people, and to the others.
            on_listed: called after each list.
            on_joined: called after each list that was requested with a member cursor.
            failed: returns the terms of the claims of tasks that have failed here.
            on_failure: called with the error of settings that do not fit the cursors.

        """
        self._calls: Final = calls
        self._settings: Final = settings
        self._owner: Final = owner
        self._on_listed, self._on_joined, self._on_failure = on_listed, on_joined, on_failure
        self._failed: Final = failed
        self._tasks: Final = hash_of_tasks(
            cursor_name(settings.name, spec.name, partition)
            for spec in settings.targets
            for partition in range(spec.partitions)
        )
        #: The position of the own member cursor, and the mark that was committed last.
        self._position, self._mark = RID_GENESIS, b""
        self._prefix: Final = f"{settings.name}/"
        self._interval_ns: Final = settings.lease_ms * NS_PER_MS // _LISTS
        #: The cursors of the player, by name; and those of them that are members', by number.
        self.cursors: dict[str, CursorInfo] = {}
        self._slots: dict[int, CursorInfo] = {}
        #: The numbers of the member cursors of other processes.
        self._others: list[int] = []
        #: The number of the last list that was requested, and of the last one that was answered.
        self.requested = self.answered = 0
        #: When the last answered list was requested, in monotonic ns.
        self.answered_at = calls.now
        #: The number of the own member cursor, and of its claim; -1 and 0: none.
        self.slot = -1
        self._claim = 0
        self._is_first = True
        #: A round runs; a probe does; and the member cursor is to be released after both.
        self._is_running = self._is_probing = False
        self._on_over: Callable[[], None] | None = None
        self._list_at = self._probe_at = calls.now
        #: Why a round or a probe failed; "": none did since the last round that succeeded.
        self.error = ""

    # --- what the last list said ---

    @property
    def names(self) -> list[str]:
        """The names of all processes, in the order of their member cursors."""
        return list(dict.fromkeys(info.owner for _, info in self._owned_slots()))

    @property
    def peers(self) -> list[str]:
        """The names of the processes that have the same tasks, as `names`."""
        slots = self._owned_slots()
        found = [one.owner for _, one in slots if decode_mark(one.mark).tasks == self._tasks]
        return [name for name in self.names if name == self._owner or name in found]

    def _find_slots(self) -> dict[int, CursorInfo]:
        prefix, found = f"{self._prefix}{MEMBERS}/", {}
        for name, info in self.cursors.items():
            if name.startswith(prefix) and name[len(prefix) :].isdecimal():
                found[int(name[len(prefix) :])] = info
        return dict(sorted(found.items()))

    def _owned_slots(self) -> list[tuple[int, CursorInfo]]:
        return [(slot, info) for slot, info in self._slots.items() if info.owner]

    @property
    def failed(self) -> frozenset[int]:
        """The terms of the claims of failed tasks, in all processes."""
        return frozenset().union(*(decode_mark(one.mark).failed for one in self._slots.values()))

    def is_silent(self, now: int) -> bool:
        """Whether the service did not answer for a lease."""
        return now - self.answered_at >= self._settings.lease_ms * NS_PER_MS

    # --- rounds ---

    def poll(self, *, is_urgent: bool, is_overdue: bool = False) -> None:
        """List the cursors if that is due; `is_urgent`: soon, `is_overdue`: now."""
        now = self._calls.now
        if is_overdue:
            self._list_at = now
        if is_urgent:
            self._list_at = min(self._list_at, max(now, self.answered_at + _SOON_NS))
        if now >= self._next_list():
            self._is_running = True
            self._list_at = now + self._interval_ns
            self._calls.run(self._round(), self._on_round)
        if now >= self._next_probe():
            self._is_probing = True
            self._probe_at = now + _PROBE_NS
            self._calls.run(self._probe(), self._on_probed)

    def next_wakeup(self) -> int:
        """Return the time of the next poll."""
        return min(self._next_list(), self._next_probe())

    def _next_list(self) -> int:
        return NEVER if self._is_running or self._on_over is not None else self._list_at

    def _next_probe(self) -> int:
        is_idle = not self._is_probing and self._on_over is None
        return self._probe_at if is_idle and self._others and self.slot >= 0 else NEVER

    def _on_round(self, result: bool | Exception) -> None:
        self._is_running = False
        if self._on_over is not None:
            self._release_if_idle()
        elif isinstance(result, ConfigError):
            self._on_failure(result)
        elif isinstance(result, Exception):
            self._note_error(result)
        else:
            self.error = ""
            if result:
                self._list_at = self._calls.now

    def _note_error(self, error: Exception) -> None:
        """Keep the error of a round or a probe; log it once until the next success."""
        if not self.error:
            text = f"this process cannot share the tasks, and tries again: {error}"
            self._calls.effects.append(LogWarning(text))
        self.error = str(error)

    def _round(self) -> TaskSteps:
        """List the cursors; complete them; return whether that changed any."""
        asked_at, slot = self._calls.now, self.slot
        deadline = asked_at + self._settings.lease_ms * NS_PER_MS
        if not self._calls.core.cluster:
            yield ConnectRequest(deadline)
        self.requested += 1
        found: list[CursorInfo] = yield CursorsRequest(deadline)
        self.cursors = {one.name: one for one in found if one.name.startswith(self._prefix)}
        self._slots = self._find_slots()
        self._others = [slot for slot, one in self._owned_slots() if one.owner != self._owner]
        self.answered, self.answered_at = self.requested, asked_at
        self._on_listed()
        self._check_partitions()
        has_changed: bool = yield from self._create_missing()
        if self.slot < 0:
            return (yield from self._claim_slot())
        if slot == self.slot:
            self._on_joined()
        yield from self._commit_mark()
        return has_changed

    def _check_partitions(self) -> None:
        """Compare the cursors of each target with its partitions.

        Raises:
            ConfigError: they differ.

        """
        for spec in self._settings.targets:
            prefix = f"{self._prefix}{spec.name}/"
            ends = [name[len(prefix) :] for name in self.cursors if name.startswith(prefix)]
            last = max((int(end) for end in ends if end.isdecimal()), default=-1)
            is_fewer = self._is_first and 0 <= last < spec.partitions - 1
            if last >= spec.partitions or is_fewer:
                text = (
                    f"the target {spec.name} has {last + 1} partitions, not {spec.partitions}: the"
                    f" last cursor is {prefix}{last}; to change their number, pause the cursors at"
                    f" one position (`ziplog cursor pause '{prefix}*' --at RID`), wait, and begin a"
                    " target of another name there"
                )
                if is_fewer:
                    lost = f"{prefix}{spec.partitions - 1}"
                    text += f"; if {lost} was deleted: `ziplog cursor create {lost} --start RID`"
                raise ConfigError("partitions", spec.partitions, str(last + 1), message=text)
        self._is_first = False

    def _create_missing(self) -> TaskSteps:
        """Create the cursors that are missing, the last one of each target first."""
        settings, has_changed = self._settings, False
        lasts = [(spec.name, spec.partitions - 1) for spec in settings.targets]
        others = [(name, index) for name, last in lasts for index in range(last)]
        for group in (lasts, others):
            names = [f"{self._prefix}{name}/{index}" for name, index in group]
            missing = [name for name in names if name not in self.cursors]
            for result in (yield [self._creation(name) for name in missing]):
                # Another process may have created it by now.
                if isinstance(result, Exception) and not isinstance(result, ConfigError):
                    raise result
            has_changed |= bool(missing)
        return has_changed

    def _creation(self, name: str) -> Request:
        deadline = self._calls.now + self._settings.lease_ms * NS_PER_MS
        settings = self._settings
        return EditRequest(deadline, name, "create", settings.start, settings.hold_s)

    def _name(self, slot: int) -> str:
        return f"{self._prefix}{MEMBERS}/{slot}"

    # --- the own member cursor ---

    def _claim_slot(self) -> TaskSteps:
        """Claim the first member cursor that no process owns; return whether that worked."""
        taken = {slot for slot, _ in self._owned_slots()}
        slot = next(one for one in range(len(taken) + 1) if one not in taken)
        number = yield from self._try_to_claim(slot)
        if not number:  # Another process was faster.
            self._list_at = self._calls.now + _SOON_NS
            return False
        state: ClaimState = yield ClaimQuery(NEVER, number)
        self.slot, self._claim = slot, number
        self._position, self._mark = state.position, state.mark
        self._watch(state)
        yield from self._commit_mark()
        return True

    def _try_to_claim(self, slot: int) -> TaskSteps:
        """Return the number of the claim of a member cursor; 0: its owner is heard."""
        name = self._name(slot)
        request = ClaimRequest(
            NEVER, name, RID_GENESIS, self._owner, self._settings.lease_ms, 0,
            wait=False, reads=False,
        )  # fmt: skip
        [result] = yield [request]
        if isinstance(result, TrimmedError):
            # Its position means nothing. Only the cursor of a silent owner is found trimmed.
            deadline = self._calls.now + self._settings.lease_ms * NS_PER_MS
            yield EditRequest(deadline, name, "seek", result.first)
            [result] = yield [request]
        if isinstance(result, CursorHeldError):
            return 0
        if isinstance(result, Exception):
            raise result
        return result

    def _commit_mark(self) -> TaskSteps:
        """Have the member cursor say which tasks this process has, and which have failed."""
        mark, claim = encode_mark(self._tasks, self._failed()), self._claim
        if claim and mark != self._mark:
            deadline = self._calls.now + self._settings.lease_ms * NS_PER_MS
            yield CommitRequest(deadline, claim, self._position, mark)
            self._mark = mark

    def _watch(self, state: ClaimState) -> None:
        claim = self._claim

        def on_changed(state: ClaimState | Exception) -> None:
            if claim != self._claim:
                return
            if isinstance(state, Exception) or state.lost:
                self._forget_claim()
                self._list_at = self._calls.now
            else:
                self._watch(state)

        self._calls.call(WatchClaimRequest(NEVER, claim, state), on_changed)

    def _forget_claim(self) -> None:
        claim, self._claim, self.slot = self._claim, 0, -1
        if claim:
            self._calls.call(UnsubscribeRequest(NEVER, claim), ignore)

    def _followers(self) -> list[int]:
        """Return the numbers of the member cursors that this process probes."""
        return sorted(self._others, key=lambda slot: (slot < self.slot, slot))[:_PROBED]

    def _probe(self) -> TaskSteps:
        """Claim and release the member cursors that no living process owns; return if any was."""
        has_left = False
        for slot in self._followers():
            number = yield from self._try_to_claim(slot)
            if number:
                yield ReleaseRequest(NEVER, number)
                yield UnsubscribeRequest(NEVER, number)
                has_left = True
        return has_left

    def _on_probed(self, result: bool | Exception) -> None:
        self._is_probing = False
        if self._on_over is not None:
            self._release_if_idle()
        elif isinstance(result, Exception):
            self._note_error(result)
        elif result:
            self._list_at = self._calls.now

    def release(self, then: Callable[[], None]) -> None:
        """Release the member cursor, after the round and the probe that run; list no more."""
        self._on_over = then
        self._release_if_idle()

    def _release_if_idle(self) -> None:
        if self._on_over is not None and not self._is_running and not self._is_probing:
            self._release_claim(self._on_over)

    def _release_claim(self, then: Callable[[], None]) -> None:
        if not self._claim:
            then()
            return
        claim, self._claim, self.slot = self._claim, 0, -1

        def on_released(_result: object) -> None:
            self._calls.call(UnsubscribeRequest(NEVER, claim), ignore)
            then()

        self._calls.call(ReleaseRequest(NEVER, claim), on_released)
