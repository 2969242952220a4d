"""A process of a player: claims its share of the tasks, and plays the log into their targets.

The node emits `OpenTarget`, `Deliver` and `CloseTarget`; what carries them out posts `StepEnded`.
Rules: a process plays only tasks whose cursors it holds; it begins no step after the membership
service was silent for a lease; a process that stops drains its tasks and releases their cursors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logplayer import status
from logplayer.calls import FailureCall, PositionsCall, StartedCall, StatusCall, StopCall, WaitCall
from logplayer.context import PlayerContext
from logplayer.members import Members
from logplayer.push.sender import PushSender
from logplayer.shares import share
from logplayer.steps import StepEnded
from logplayer.task import PlayerTask
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import Preferences
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import BatchEnd, Call, Cancelled, Complete, Halt, LogWarning, Received
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import ClosedError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logplayer.settings import PlayerSettings
    from ziplog.client.common.requests import Request
    from ziplog.core.node import Effect, Event
    from ziplog.errors import ZiplogError

#: Maximum number of tasks that are polled in a row. What they send leaves, and waiting messages are
#: handled, before the next ones.
MAX_POLLED: Final = 8


class PlayerNode:
    """One process of a player, as a deterministic node."""

    def __init__(
        self,
        client: bytes,
        endpoints: Sequence[str],
        settings: PlayerSettings,
        *,
        owner: str,
        now: int,
        region: str = "",
    ) -> None:
        """Make a process of a player; it starts with its first step.

        Args:
            client: 16 random bytes, never used by another client of the log.
            endpoints: "host:port" of the log's membership service.
            settings: the player's, the same ones in all its processes.
            owner: describes this process to people; no other process has the same text.
            now: monotonic nanoseconds.
            region: where it runs, so that it reads near; "": none.

        """
        core = ClientCore(client, endpoints, Preferences(_no_shard, region))
        calls = self._calls = LogTasks(core, now)
        self._context: Final = PlayerContext(calls, settings, owner, self._on_feed_change)
        self.feed: Final = self._context.feed
        #: By the names of their cursors.
        self.tasks: Final = {one.name: one for one in _tasks(self._context)}
        self._wake_all()
        self.members: Final = Members(
            calls, settings, owner,
            on_listed=self._on_listed, on_joined=self._share_tasks, failed=self._failed,
            on_failure=self._fail,
        )  # fmt: skip
        #: The positions of the tasks that read the feed, as of their last polls.
        self._positions: Final[dict[str, int]] = {}
        #: Tasks that are due were left for the next batch, which follows at once.
        self._is_behind = False
        self._push: Final = PushSender(settings.targets)
        #: The error that ended the player; None: it runs.
        self.failure: ZiplogError | None = None
        #: Calls that wait, by their ids, and the numbers of the log's calls.
        self._waiting: Final[dict[int, Request]] = {}
        #: Of the calls for positions: the last list of cursors that was requested before them.
        self._listed_before: Final[dict[int, int]] = {}
        self._forwarded: Final[dict[int, int]] = {}
        self._has_shared = self._is_stopping = self._is_released = self._is_stopped = False
        self._has_warned = self._has_halted = False
        self._halt_at = NEVER

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        calls = self._calls
        calls.now = now
        self._context.is_cut_off = self.members.is_silent(now)
        if isinstance(event, StepEnded):
            self._on_step_ended(event)
        elif isinstance(event, Received) and event.src in self._push.names:
            self._push.on_message(event.src, event.message, now)
        elif isinstance(event, Call):
            self._on_call(event.id, event.request)
        elif isinstance(event, Cancelled):
            self._cancel(event.id)
        else:
            calls.step(event, now)
        if isinstance(event, BatchEnd):
            self._poll()
            # Fetches of the poll may have freed credit, which servers wait for.
            calls.step(event, now)
        effects = self._push.pop_effects()
        if calls.effects:
            effects += self._push.carry_out(calls.pop_effects(), now)
        return effects

    def next_wakeup(self) -> int | None:
        """Return the time of the next wake-up."""
        due = min(
            self.members.next_wakeup(), self.feed.next_wakeup(), self._push.next_wakeup(),
            self._halt_at, *self._context.due.values(),
        )  # fmt: skip
        for request in self._waiting.values():
            due = min(due, request.deadline)
        core = self._calls.core.next_wakeup()
        due = due if core is None else min(core, due)
        return due if due != NEVER else None

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._calls.core.check()
        self.feed.check()
        self._context.turns.check()
        self._push.check()
        workers = [task.worker for task in self.tasks.values() if task.worker]
        assert len(workers) == len(set(workers)), "two tasks have one worker"
        now, due = self._calls.now, self._context.due
        for name, task in self.tasks.items():
            task.check()
            assert due[name] <= max(now, task.next_wakeup()), f"{name} is polled too late"
            assert (task.reader.source is not None) == (name in self._context.own_readers)
            assert not task.worker or self._context.workers[task.worker] == name
        assert not self._is_stopped or all(task.is_gone for task in self.tasks.values())

    def status(self, wall_ns: int) -> dict[str, Any]:
        """Return the status, which JSON can hold; `wall_ns`: Unix time in ns, 0: unknown."""
        return status.document(
            self._context,
            self.members,
            list(self.tasks.values()),
            failure=str(self.failure or ""),
            wall_ns=wall_ns,
        )

    def _on_step_ended(self, event: StepEnded) -> None:
        name = self._context.workers.get(event.worker)
        if name is not None and self.tasks[name].is_step_open:
            self._context.wake(name)
            self.tasks[name].on_step_ended(event.result)

    def _poll(self) -> None:
        """Do what is due after the events of a batch."""
        context, now = self._context, self._calls.now
        for ended in self._push.poll(now):
            self._on_step_ended(ended)
        self._note_awaited()
        is_urgent = context.wants_round or bool(context.awaited)
        context.wants_round = False
        is_overdue = any(self.members.requested <= one for one in self._listed_before.values())
        self.members.poll(is_urgent=is_urgent, is_overdue=is_overdue)
        was_polled = self._poll_tasks()
        self.feed.on_batch_end(now, is_urgent=bool(context.awaited))
        if was_polled or now >= self.feed.next_wakeup():
            self._poll_feed()
        self._warn_of_silence()
        if self._is_stopping and not self._is_released:
            self._release_if_drained()
        if self._waiting:
            self._answer_waiting()
        self._halt_if_due()

    def _note_awaited(self) -> None:
        """Note the positions that calls wait for."""
        calls = self._waiting.values()
        awaited = tuple(one.position for one in calls if isinstance(one, WaitCall))
        if awaited != self._context.awaited:
            self._context.awaited = awaited
            self._wake_all()

    def _poll_tasks(self) -> bool:
        """Poll tasks that are due, or that read for themselves; return whether there was any."""
        due, now, positions = self._context.due, self._calls.now, self._positions
        if not self._is_behind:
            for name in self._context.own_readers:
                due[name] = now
        found = [name for name, at in due.items() if at <= now]
        self._is_behind = len(found) > MAX_POLLED
        for name in found[:MAX_POLLED]:
            task = self.tasks[name]
            task.poll()
            del due[name]  # It is the last one now, so each task has its turn.
            due[name] = task.next_wakeup()
            if task.reads_feed:
                positions[name] = task.delivery.looked
            else:
                positions.pop(name, None)
        return bool(found)

    def _wake_all(self) -> None:
        for name in self.tasks:
            self._context.wake(name)

    def _on_feed_change(self) -> None:
        """Poll the tasks that wait for records."""
        for task in self.tasks.values():
            if task.state == "playing":
                task.wake()

    def _poll_feed(self) -> None:
        self.feed.poll(self._positions.values())
        trimmed = self.feed.pop_trimmed()
        if trimmed is not None:
            for name, position in self._positions.items():
                self._context.wake(name)
                if position < trimmed.first.gsn:
                    self.tasks[name].reader.on_trimmed(trimmed)

    def _warn_of_silence(self) -> None:
        is_cut_off = self._context.is_cut_off and any(one.is_held for one in self.tasks.values())
        if is_cut_off and not self._has_warned:
            text = "the membership service did not answer for a lease: no step begins until it does"
            self._calls.effects.append(LogWarning(text))
        self._has_warned = is_cut_off

    # --- shares ---

    def _on_listed(self) -> None:
        """Compare the claims with a new list."""
        self._context.is_cut_off = False
        self._wake_all()
        for name, info in self.members.cursors.items():
            task = self.tasks.get(name)
            if task is not None:
                task.on_listed(info)

    def _share_tasks(self) -> None:
        """Claim and drain tasks, by the last list, after which all tasks are polled."""
        members, owner = self.members, self._context.owner
        names = members.peers
        if self._is_stopping or owner not in names:
            return
        listed = members.cursors
        owners = {name: listed[name].owner if name in listed else "" for name in self.tasks}
        held = [name for name, task in self.tasks.items() if task.is_held]
        found = share(owner, members.slot, names, owners, held)
        for name in found.drain:
            self.tasks[name].drain()
        free = [self.tasks[name] for name in found.claim if self.tasks[name].is_gone]
        free.sort(key=lambda task: task.refusals)
        for task in free[: found.missing]:
            # Not at the listed position: an operator may have deleted the cursor since.
            task.start_claim(self._context.settings.start)
        self._has_shared = True

    def _failed(self) -> list[int]:
        """Return the terms of the claims of failed tasks."""
        states = [task.claim.state for task in self.tasks.values() if task.state == "failed"]
        return [state.term for state in states if state is not None]

    # --- the end ---

    def _stop(self) -> None:
        """Drain every task."""
        self._is_stopping = True
        for task in self.tasks.values():
            task.wake()
            task.drain()

    def _release_if_drained(self) -> None:
        if all(task.is_gone for task in self.tasks.values()):
            self._is_released = True
            self.members.release(self._on_released)

    def _on_released(self) -> None:
        self._is_stopped = True

    def _fail(self, error: ConfigError) -> None:
        """Stop: the settings do not fit the cursors; halt once the tasks are released."""
        if self.failure is None:
            self.failure = error
            self._halt_at = self._calls.now + self._context.settings.lease_ms * NS_PER_MS
            self._stop()

    def _halt_if_due(self) -> None:
        if self.failure is not None and (self._is_stopped or self._calls.now >= self._halt_at):
            self._halt_at = NEVER
            if not self._has_halted:
                self._has_halted = True
                self._calls.effects.append(Halt(str(self.failure)))

    # --- calls ---

    def _on_call(self, number: int, request: Any) -> None:
        if isinstance(request, StatusCall):
            self._complete(number, self.status(request.wall_ns))
        elif isinstance(request, PositionsCall):
            self._complete(number, self._positions_of_targets())
        elif isinstance(request, StartedCall | FailureCall | WaitCall | StopCall):
            if isinstance(request, StopCall):
                self._stop()
            if isinstance(request, WaitCall):
                self._listed_before[number] = self.members.requested
            self._waiting[number] = request
        else:
            self._forward(number, request)

    def _positions_of_targets(self) -> dict[str, int]:
        held = {name: one.delivery for name, one in self.tasks.items() if one.claim.is_held}
        return {
            name: one.position if one.given is None else one.given.stop
            for name, one in held.items()
        }

    def _forward(self, number: int, request: Request) -> None:
        """Pass a call to the log."""
        is_answered = False

        def on_result(result: object) -> None:
            nonlocal is_answered
            is_answered = True
            self._forwarded.pop(number, None)
            self._complete(number, result)

        call = self._calls.call(request, on_result)
        if not is_answered:
            self._forwarded[number] = call

    def _cancel(self, number: int) -> None:
        self._drop_waiting(number)
        call = self._forwarded.pop(number, None)
        if call is not None:
            self._calls.cancel(call)

    def _drop_waiting(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._listed_before.pop(number, None)

    def _complete(self, number: int, result: object) -> None:
        self._calls.effects.append(Complete(number, result))

    def _answer_waiting(self) -> None:
        """Answer the calls that are done, or whose deadline has passed."""
        now = self._calls.now
        for number, request in list(self._waiting.items()):
            done, result = self._result_of(number, request)
            if not done and now >= request.deadline:
                done, result = True, self._deadline_error(request)
            if done:
                self._drop_waiting(number)
                self._complete(number, result)

    def _result_of(self, number: int, request: Request) -> tuple[bool, object]:
        """Return whether a call is done, and its result."""
        if isinstance(request, StopCall):
            return self._is_stopped, None
        if self.failure is not None:
            return True, self.failure
        if self._is_stopping:
            return True, ClosedError("this player", "make another one to continue")
        if isinstance(request, StartedCall):
            is_claiming = any(task.state == "claiming" for task in self.tasks.values())
            return self._has_shared and not is_claiming, None
        if isinstance(request, FailureCall):
            failed = {name: one.error for name, one in self.tasks.items() if one.state == "failed"}
            return bool(failed), failed
        assert isinstance(request, WaitCall)
        # An operator may have sought a cursor before the call: an older list does not show it.
        is_new = self.members.answered > self._listed_before[number]
        return is_new and not self._behind(request.position), None

    def _behind(self, position: int) -> list[str]:
        """Return the tasks that have not committed a position."""
        listed = self.members.cursors
        found = []
        for name, task in self.tasks.items():
            info = listed.get(name)
            committed = info.position.gsn if info is not None else -1
            if task.claim.state is not None:
                committed = task.claim.committed
            if committed < position:
                found.append(name)
        return found

    def _deadline_error(self, request: Request) -> DeadlineError:
        if isinstance(request, StopCall):
            left = [name for name, task in self.tasks.items() if not task.is_gone]
            text = f"these tasks did not end before the deadline: {', '.join(left) or 'none'}"
            return DeadlineError(text)
        if isinstance(request, StartedCall):
            why = self.members.error or "the claims were not answered"
            return DeadlineError(f"the player did not start before the deadline: {why}")
        if isinstance(request, FailureCall):
            return DeadlineError("no task failed before the deadline")
        assert isinstance(request, WaitCall)
        behind = ", ".join(
            _with_obstacle(self.tasks[name]) for name in self._behind(request.position)
        )
        if not behind:
            why = self.members.error or "no reply to the request for the cursors"
            return DeadlineError(
                f"the membership service did not answer before the deadline: {why}"
            )
        return DeadlineError(f"these tasks are before gsn {request.position}: {behind}")


def _with_obstacle(task: PlayerTask) -> str:
    """Return the name of a task, and why this process does not deliver its records now."""
    if task.state not in {"failed", "paused", "retrying"}:
        return task.name
    why = f"{task.state}: {task.error}" if task.error else task.state
    return f"{task.name} ({why})"


def _no_shard(_payload: bytes, _key: bytes | None, _shards: Sequence[int]) -> int:
    """Select no shard: a player inserts nothing."""
    raise AssertionError("a player inserted a record")


def _tasks(context: PlayerContext) -> list[PlayerTask]:
    """Return all tasks of a player, whose targets `options.check_targets` has checked."""
    return [
        PlayerTask(context, spec, index)
        for spec in context.settings.targets
        for index in range(spec.partitions)
    ]
