"""A task: one partition of a target, from its claim to its release.

    free -> claiming -> opening -> playing <-> delivering
                           ^---- retrying <------'
    any of them: paused, failed, draining -> free

Rules: one step is under way at a time. After a step of unknown outcome a target that stores
positions is opened before anything else. The cursor moves only to what is durable at the target. A
new mark that `open` returns is committed before the first batch. A claim that is lost ends the
task's worker; what the worker returns afterwards is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from logplayer.claim import Claim
from logplayer.contract import Batch, Fenced, Opened, Rejected, Task, cursor_name
from logplayer.delivery import Delivery
from logplayer.retries import BUGS, Attempts, text_of
from logplayer.selection import Selection
from logplayer.steps import CloseTarget, Deliver, OpenTarget
from logplayer.task_reader import TaskReader
from ziplog.core.histogram import Histogram
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.errors import CursorHeldError, TrimmedError

if TYPE_CHECKING:
    from datetime import datetime

    from logplayer.context import PlayerContext
    from logplayer.contract import TargetSpec
    from logplayer.selection import Cut
    from ziplog.types import CursorInfo, RecordId

TaskState = Literal[
    "free", "claiming", "opening", "playing", "delivering", "retrying", "draining", "paused",
    "failed",
]  # fmt: skip

#: The states in which a task reads the log.
_READING: Final = {"playing", "delivering", "retrying", "opening"}


class PlayerTask:
    """The state machine of one task."""

    def __init__(self, context: PlayerContext, spec: TargetSpec, partition: int) -> None:
        """Make a free task of a partition, from 0 on."""
        settings = context.settings
        self._context: Final = context
        self.spec: Final = spec
        self.partition: Final = partition
        self.name: Final = cursor_name(settings.name, spec.name, partition)
        self.claim: Final = Claim(context.calls, self.name, context.owner, settings, self)
        self.state: TaskState = "free"
        #: The worker; 0: none.
        self.worker = 0
        self.delivery: Final = Delivery(Selection(spec, partition), spec.rejected)
        self.reader: Final = TaskReader(context, spec, partition)
        #: The last error; "": none since the last success.
        self.error = ""
        #: Numbers of records and of failed attempts, and of records that the target rejected.
        self.delivered = self.retries = self.rejected = 0
        #: From the fetch of a batch's first record until the batch is durable.
        self.delays: Final = Histogram()
        #: Number of claims in a row that were refused.
        self.refusals = 0
        self._task: Task | None = None
        self._step: Literal["", "open", "deliver"] = ""
        self._must_open = True
        self._is_opened = self._is_leaving = self._was_paused = False
        #: The target returned a new mark, which is not committed yet.
        self._awaits_mark = False
        self._attempts: Final = Attempts(self.name, spec)
        #: Since when it has passed positions without a record of its own.
        self._passed_at: int | None = None
        #: When the target has to finish what it collects.
        self._roll_at = NEVER
        #: When the cursor of a failed task was changed last, as far as it is known.
        self._changed_at: datetime | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process claims or holds its cursor, and does not give it up."""
        is_claimed = self.state == "claiming" or self.claim.is_held
        return is_claimed and not self._is_leaving

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left to release."""
        return self.state != "claiming" and self.claim.state is None

    @property
    def is_reading(self) -> bool:
        """Whether it needs records of the log at `delivery.looked`."""
        is_active = self.state in _READING and not self._is_leaving
        return self._is_opened and is_active and self.reader.trimmed is None

    @property
    def reads_feed(self) -> bool:
        """Whether it needs records, and takes from the feed what the feed has."""
        return self.reader.uses_feed and self.is_reading

    @property
    def is_step_open(self) -> bool:
        """Whether a step of its worker is under way."""
        return bool(self._step)

    def wake(self) -> None:
        """Have it polled at the end of the batch."""
        self._context.wake(self.name)

    # --- claims ---

    def start_claim(self, start: RecordId) -> None:
        """Claim the cursor; `start`: the position of a new one."""
        assert self.is_gone
        self.state = "claiming"
        self.claim.claim(start)

    def on_claimed(self) -> None:
        """Handle a claim that was granted."""
        assert self.claim.state is not None
        self.refusals = 0
        self.delivery.restart(self.claim.committed)
        self.worker = self._context.add_worker(self.name)
        self._must_open, self._is_opened, self._step = True, False, ""
        self._task, self._passed_at, self.reader.trimmed = None, None, None
        self._roll_at = NEVER
        self._attempts.reset()
        self.error = ""
        self._was_paused = self.claim.state.is_paused
        self.state = "opening"
        self._continue()

    def on_refused(self, error: Exception) -> None:
        """Handle a claim that was refused."""
        self._is_leaving = False
        self.refusals += 1
        self.state = "free"
        if isinstance(error, CursorHeldError):
            return
        former, self.error = self.error, text_of(error)
        if isinstance(error, TrimmedError):
            self.state, self.error = "failed", self._trimmed_text(error)
        if self.error != former:  # The next list claims it again.
            self._warn(f"cannot claim its cursor: {self.error}")

    def on_claim_changed(self) -> None:
        """Handle a pause or its end."""
        assert self.claim.state is not None
        was_paused, self._was_paused = self._was_paused, self.claim.state.is_paused
        if self.state == "failed" and was_paused and not self._was_paused:
            self.try_again()
        elif self.state in {"playing", "retrying", "paused", "opening"} and not self._step:
            if self._awaits_mark:
                return
            if self.state == "retrying" and not self._is_pause_reached():
                return
            if self.state == "paused":
                self._attempts.reset()  # Its target was not tried, so it did not fail.
            self._continue()

    def on_claim_lost(self, reason: str) -> None:
        """Handle the end of a claim; the result of the step under way is ignored."""
        self.error = reason
        self._context.wants_round = True
        self._end()

    def on_committed(self) -> None:
        """Handle a move that was committed; the new mark of the target may be the last of them."""
        if self._awaits_mark and self.claim.is_settled:
            self._awaits_mark = False
            self._continue()

    def on_beyond_log(self, position: int) -> None:
        """Handle a position of the target that no shard of the log owns yet."""
        if not self._is_leaving:
            self._fail(
                f"the target {self.spec.name} is at gsn {position}, where the log has no position"
                " yet: its stored position is damaged, or of another log; correct it, and continue"
                f" with `ziplog cursor resume {self.name}`"
            )

    def on_released(self) -> None:
        """Handle the end of a release."""
        self._end()

    def _end(self) -> None:
        self._close()
        self._is_leaving = self._is_opened = False
        self.state = "free"

    def _close(self) -> None:
        """Close the worker, and the subscription of its own."""
        if self.worker and self._task is not None:
            self._context.calls.effects.append(CloseTarget(self.worker))
        self._context.workers.pop(self.worker, None)
        self.worker, self._task, self._step, self._must_open = 0, None, "", True
        self._awaits_mark = False
        self.delivery.given = None
        self.reader.close()

    def drain(self) -> None:
        """End the step under way, move the cursor, close and release."""
        if self._is_leaving or self.is_gone:
            return
        self._is_leaving = True
        if self.state != "claiming":
            self.state = "draining"
            if not self._step:
                self._leave()

    def _leave(self) -> None:
        self.state = "draining"
        self._is_leaving = True
        self._close()
        self.claim.release()

    def on_listed(self, info: CursorInfo) -> None:
        """Compare the cursor with a new list; an operator's change tries a failed task again."""
        state = self.claim.state
        if state is None:
            return
        if info.term > state.term:
            self.claim.lose("another process claimed it, or an operator changed it")
        elif self.state == "failed" and self.claim.is_settled:
            if self._changed_at is None:
                self._changed_at = info.moved_at
            elif self._changed_at != info.moved_at:
                self._changed_at = info.moved_at
                self.try_again()

    # --- what to do next ---

    def poll(self) -> None:
        """Do what is due at the end of a batch."""
        now = self._context.calls.now
        if self._context.is_awaited(self.claim.committed, self.delivery.position):
            self.claim.expedite()
        self.claim.poll(now)
        self.reader.poll(self.delivery.looked, is_batch_end=True)
        if self._step:
            return
        if self.state == "retrying" and now >= self._attempts.retry_at:
            self._continue()
        elif self.state == "opening" and not self._awaits_mark:
            self._open()
        elif self.state == "playing":
            self._play()
        elif self.state == "paused" and self._can_roll():  # It was cut off when the pause began.
            self._roll()

    def _continue(self) -> None:
        """Go on after a step, a claim, a pause or a change of the cursor."""
        if self._is_leaving:
            self._leave()
        elif self._is_pause_reached():
            if self._can_roll():
                self._roll()
                return
            self.state = "paused"
            self.claim.expedite()
            self.reader.close()
        elif self._must_open:
            self.state = "opening"
            self._open()
        else:
            self.state = "playing"
            self._play()

    def _can_roll(self) -> bool:
        """Whether the target collects records, and may finish them now."""
        return self._roll_at < NEVER and not self._must_open and not self._context.is_cut_off

    def _is_pause_reached(self) -> bool:
        state = self.claim.state
        if state is None or not state.is_paused:
            return False
        return not state.pause_at or (self._is_opened and self.delivery.position >= state.pause_at)

    def _limit(self) -> int:
        """Return the position that it must not pass."""
        state = self.claim.state
        assert state is not None
        return state.pause_at if state.is_paused and state.pause_at else NEVER

    # --- opening ---

    def _open(self) -> None:
        if self._context.is_cut_off:
            return
        if self._task is None and not self.claim.is_settled:
            self.claim.expedite()  # A new worker begins where the last one has ended.
            return
        state, settings = self.claim.state, self._context.settings
        assert state is not None
        self._task = Task(
            settings.name, self.spec.name, self.partition, self.spec.partitions,
            self._context.calls.core.cluster, state.birth, state.term, state.seek,
            self.claim.committed, self.claim.mark, self.claim.has_moved,
        )  # fmt: skip
        self._step = "open"
        self.reader.stop_waiting()
        self._context.calls.effects.append(OpenTarget(self.worker, self._task))

    def _on_opened(self, opened: Opened) -> None:
        delivery, committed, spec = self.delivery, self.claim.committed, self.spec
        if opened.position is None and spec.stores_position and self.claim.has_moved:
            self._fail(
                f"the target {spec.name} stores no position, although its cursor {self.name} was"
                f" moved to gsn {committed}: the target is empty, or another one is in its place;"
                f" put the former one back, or seek: `ziplog cursor seek {self.name} genesis` fills"
                " it again, and a position instead of genesis continues from there"
            )
            return
        former = delivery.position
        if opened.position is not None:
            delivery.continue_at(opened.position)
            if opened.position < committed:
                self._warn(
                    f"its target is at gsn {opened.position}, before the cursor at {committed}: an"
                    " older state was put back; the records from there on are delivered again"
                )
            self._awaits_mark = opened.mark not in {b"", self.claim.last_mark}
            self.claim.move(opened.position, opened.mark or self.claim.last_mark)
        elif spec.stores_position:
            delivery.continue_at(committed)
        self._is_opened, self._must_open, self.reader.trimmed = True, False, None
        self._roll_at = NEVER
        self._attempts.on_opened()
        if delivery.position > former:
            self._attempts.reset()
        # If an older state of the target was put back, its position cannot be committed. A task
        # that leaves waits for nothing: the release sends the move.
        self._awaits_mark &= not self.claim.is_settled and not self._is_leaving
        if self._awaits_mark:
            self.claim.expedite()
            self.state = "opening"
        else:
            self._continue()

    # --- playing ---

    def _play(self) -> None:
        """Begin the next step, if there is something to do."""
        delivery, limit = self.delivery, self._limit()
        if self._context.is_cut_off:
            return
        if self._context.calls.now >= self._roll_at:
            self._roll()
            return
        waits = self._linger_until(limit) > self._context.calls.now
        if (delivery.cut is None or waits) and not self._look(limit):
            return
        if delivery.stopped_by:
            self.rejected += 1
            self._fail(delivery.stopped_by)
        elif delivery.cut is not None:
            if self._linger_until(limit) <= self._context.calls.now:
                self._deliver_cut(limit)
        else:
            self._pass_idle(limit)

    def _linger_until(self, limit: int) -> int:
        """Return until when the next batch waits for further records, in monotonic ns."""
        delivery, cut, now = self.delivery, self.delivery.cut, self._context.calls.now
        if cut is None or cut.is_full or not self.spec.linger_ms or delivery.looked >= limit:
            return now
        if self._context.is_awaited(delivery.position, delivery.looked):
            return now
        return cut.arrived + self.spec.linger_ms * NS_PER_MS

    def _look(self, limit: int) -> bool:
        """Look for records; return whether the task can go on."""
        ring = self.reader.ring(self.delivery.looked)
        if self.reader.trimmed is not None:
            self._fail(self._trimmed_text(self.reader.trimmed))
            return False
        if ring is not None and self.delivery.looked < min(ring.stop, limit):
            try:
                self.delivery.look(ring, limit)
            except BaseException as error:  # noqa: BLE001 - a user's map may raise anything
                self._fail(f"its map failed: {text_of(error)}")
                return False
        return True

    def _trimmed_text(self, error: TrimmedError) -> str:
        return (
            f"{error}: `ziplog cursor seek {self.name} genesis` continues at the first record left"
        )

    def _roll(self) -> None:
        """Have the target finish what it collects."""
        self._deliver_empty(self.delivery.take_nothing())

    def _deliver_empty(self, cut: Cut) -> None:
        assert self._task is not None
        self._deliver(Batch(self._task, cut.start, cut.stop, (), 0))

    def _deliver_cut(self, limit: int) -> None:
        delivery = self.delivery
        assert delivery.cut is not None
        cut = delivery.take(limit)
        rejected = delivery.rejected_of(cut)
        if not cut.records and not rejected and not self.spec.stores_position:
            delivery.skip(cut.stop)
            self._on_moved(b"")
            return
        assert self._task is not None
        self._deliver(Batch(self._task, cut.start, cut.stop, cut.records, cut.size, rejected))

    def _deliver(self, batch: Batch) -> None:
        self.state, self._step = "delivering", "deliver"
        self.reader.stop_waiting()
        self._context.calls.effects.append(Deliver(self.worker, batch))

    def _pass_idle(self, limit: int) -> None:
        """Move past the positions of others, if that is due."""
        delivery, now = self.delivery, self._context.calls.now
        stop = min(delivery.looked, limit)
        if stop <= delivery.position:
            self._passed_at = None
            return
        if self._passed_at is None:
            self._passed_at = now
        if now < self._idle_at() and stop < limit:
            return
        if not self.spec.stores_position:
            delivery.skip(stop)
            self._on_moved(b"")
            return
        self._deliver_empty(delivery.take_empty(stop))

    def _idle_at(self) -> int:
        """Return when it moves past positions without records of its own."""
        if self._passed_at is None:
            return NEVER
        delivery = self.delivery
        if self._context.is_awaited(delivery.position, delivery.looked):
            return self._passed_at
        return self._passed_at + self._context.settings.idle_ms * NS_PER_MS

    def _on_moved(self, mark: bytes) -> None:
        """Move the cursor to what the target has, and go on."""
        self._passed_at = None
        self.claim.move(self.delivery.position, mark or self.claim.last_mark)
        self._continue()

    # --- the ends of steps ---

    def on_step_ended(self, result: Opened | bytes | Exception | None) -> None:
        """Handle the end of the step under way."""
        step, self._step = self._step, ""
        if isinstance(result, Exception):
            self._on_error(result, step)
        elif step == "open":
            assert isinstance(result, Opened)
            self._on_opened(result)
        else:
            assert not isinstance(result, Opened)
            self._on_delivered(result or b"")

    def _on_delivered(self, mark: bytes) -> None:
        given = self.delivery.succeed()
        self.delivered += len(given)
        if given.records:
            self.delays.add(self._context.calls.now - given.arrived)
            if self.spec.roll_s:
                roll_at = self._context.calls.now + self.spec.roll_s * NS_PER_S
                self._roll_at = min(self._roll_at, roll_at)
        elif given.start == given.stop:
            self._roll_at = NEVER
        self._attempts.reset()
        self.error = ""
        self._on_moved(mark)

    def _on_error(self, error: Exception, step: str) -> None:
        self.error = text_of(error)
        if self._is_leaving:
            self._leave()
        elif isinstance(error, Fenced):
            self._warn(f"its target refuses the claim: {self.error}")
            self._leave()
        elif isinstance(error, BUGS):
            self._fail(self.error)
        elif isinstance(error, Rejected) and self.delivery.can_reject:
            for one in self.delivery.reject(error):
                self.rejected += 1
                self._warn(f"its target rejects the record {one.record.rid}: {one.why}")
            self._continue()
        else:
            self._retry(error, step)

    def _retry(self, error: Exception, step: str) -> None:
        spec = self.spec
        self.delivery.given = None
        self.retries += 1
        if not self._attempts.fail(step, error, self._context.calls.now):
            self._fail(f"{self.error}; it failed for {spec.retry_s} s")
            return
        self._must_open |= spec.stores_position
        self.state = "retrying"
        if self._attempts.must_warn():
            self._warn(f"its target fails, and is tried again: {self.error}")
        if self._is_pause_reached():
            self._continue()

    def _fail(self, why: str) -> None:
        """Stop until an operator resumes or seeks the cursor, which this process keeps."""
        self._close()
        self.state, self.error = "failed", why
        self._context.wants_round = True  # Other processes learn of it.
        self._changed_at = None
        self.claim.expedite()
        self._warn(f"failed: {why}")
        if self._is_leaving:
            self._leave()

    def _warn(self, text: str) -> None:
        self._context.calls.effects.append(LogWarning(f"task {self.name}: {text}"))

    def try_again(self) -> None:
        """Open the target of a failed task again."""
        assert self.state == "failed"
        self._context.wants_round = True
        self.delivery.try_again()
        self.reader.trimmed = None
        self._attempts.reset()
        self.worker = self._context.add_worker(self.name)
        self._continue()

    # --- time ---

    def next_wakeup(self) -> int:
        """Return the time of the next poll; `NEVER`: with the next event."""
        due = min(self.claim.next_wakeup(), self.reader.next_wakeup(self.delivery.looked))
        if self._step or self._context.is_cut_off:
            return due
        if self.state == "retrying":
            return min(due, self._attempts.retry_at)
        if self.state == "playing":
            delivery, limit = self.delivery, self._limit()
            if self.reader.has_more(delivery.looked, limit) or self.reader.is_next:
                return self._context.calls.now
            step_at = self._idle_at() if delivery.cut is None else self._linger_until(limit)
            return min(due, step_at, self._roll_at)
        return due

    def check(self) -> None:
        """Assert the invariants."""
        self.delivery.check()
        assert not self._step or self.worker, "a step without a worker"
        assert self.delivery.given is None or self._step == "deliver"
        if self.state in {"playing", "delivering"}:
            assert self._is_opened
            assert not self._must_open
        assert (self.state == "delivering") <= (self._step == "deliver")
        if self.claim.state is None:
            assert self.state in {"free", "claiming", "failed"}, self.state
