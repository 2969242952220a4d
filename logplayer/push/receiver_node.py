"""The receiver's end of push: a target's steps, at the request of players.

For each task the receiver remembers the highest term, the last number of the term and the reply to
it. Rules:

* A lower term is refused, a lower number ignored. A repetition of the last number is answered from
  memory; `PushWorking` while its step is under way.
* One step of a task is under way at a time: an open of a new claim waits for the end of the last
  one's step.
* A batch is refused unless it starts where the task stands. After a failure of unknown outcome the
  task stands nowhere until it is opened.
* What the receiver does not know, it did not do in this process: `lost`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import Batch, Fenced, Opened, Rejected, Retry, Task
from logplayer.push.messages import (
    PushBatch,
    PushClose,
    PushDone,
    PushFailed,
    PushMessage,
    PushOpen,
    PushOpened,
    PushQuery,
    PushWorking,
    received,
    received_rejection,
)
from logplayer.retries import BUGS, MAX_AFTER_S, MAX_TEXT, reason_of, text_of
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from ziplog.core.node import Received, ReportBadMessage, Send, Wakeup
from ziplog.core.units import NEVER, NS_PER_S

if TYPE_CHECKING:
    from logplayer.contract import TargetSpec
    from logplayer.push.messages import Failure
    from ziplog.core.node import Effect, Event

#: Maximum number of tasks that a receiver remembers.
MAX_TASKS: Final = 1024
#: Time without messages after which a task is closed and forgotten.
IDLE_NS: Final = 900 * NS_PER_S
_REQUESTS: Final = (PushOpen, PushBatch, PushQuery, PushClose)
_FORGOT: Final = "it was lost, or the receiver has restarted since"


class _Session:
    """What the receiver remembers of a task."""

    __slots__ = (
        "batch", "idle_at", "number", "position", "reply", "route", "step", "task", "term",
        "waiting", "worker",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Where replies go.
        self.route = b""
        #: The last request and its reply; None: it is under way.
        self.term = self.number = 0
        self.reply: PushMessage | None = None
        #: The claim that the worker serves, and the worker's number; 0: none.
        self.task: Task | None = None
        self.worker = 0
        #: The number of the request that the worker carries out; 0: none. Its batch.
        self.step = 0
        self.batch: Batch | None = None
        #: Where the next batch starts; None: the target must be opened first.
        self.position: int | None = None
        #: The request to open or to close that waits for the step under way.
        self.waiting: PushOpen | PushClose | None = None
        self.idle_at = NEVER


class ReceiverNode:
    """A receiver, as a deterministic node."""

    def __init__(self, target: TargetSpec) -> None:
        """Receive nothing yet; `target`: what is behind the receiver."""
        self._spec: Final = target
        self._sessions: Final[dict[tuple[int, str], _Session]] = {}
        #: By their workers.
        self._working: Final[dict[int, _Session]] = {}
        self._workers = 0
        self._effects: list[Effect] = []
        self._now = 0

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        self._now = now
        if isinstance(event, Received):
            if isinstance(event.message, _REQUESTS):
                self._on_request(event.src, event.message)
            else:
                reason = f"{type(event.message).__name__} for a receiver"
                self._effects.append(ReportBadMessage(event.src, reason))
        elif isinstance(event, StepEnded):
            self._on_step_ended(event)
        elif isinstance(event, Wakeup):
            self._forget_idle()
        effects, self._effects = self._effects, []
        return effects

    def next_wakeup(self) -> int | None:
        """Return when the first task is forgotten."""
        due = min((one.idle_at for one in self._sessions.values() if not one.step), default=NEVER)
        return None if due == NEVER else due

    def check(self) -> None:
        """Assert the invariants."""
        for number, session in self._working.items():
            assert session.worker == number, "a worker of no task"
        for session in self._sessions.values():
            assert not session.step or session.worker, "a step without a worker"
            assert session.waiting is None or session.step, "nothing to wait for"

    def _forget_idle(self) -> None:
        for key, session in list(self._sessions.items()):
            if self._now >= session.idle_at and not session.step:
                self._close(session)
                del self._sessions[key]

    # --- requests ---

    def _on_request(
        self, src: bytes, message: PushOpen | PushBatch | PushQuery | PushClose
    ) -> None:
        key = (message.cluster, message.cursor)
        session = self._sessions.get(key)
        if session is None:
            if not isinstance(message, PushOpen):
                self._refuse(src, message, "lost", _FORGOT)
                return
            problem = self._mismatch(message)
            if problem:
                self._refuse(src, message, "bug", problem, error="ConfigError")
                return
            if len(self._sessions) >= MAX_TASKS:
                self._refuse(src, message, "retry", f"the receiver has {MAX_TASKS} tasks already")
                return
            session = self._sessions[key] = _Session()
        if message.term < session.term:
            text = f"term {session.term} has opened the target after term {message.term}"
            self._refuse(src, message, "fenced", text)
            return
        if message.term > session.term and not isinstance(message, PushOpen):
            self._refuse(src, message, "lost", _FORGOT)
            return
        is_new = message.term > session.term or message.number > session.number
        if not is_new and message.number < session.number:
            return
        session.route, session.idle_at = src, self._now + IDLE_NS
        if not is_new:
            reply = session.reply or PushWorking(*_fields(message))
            self._effects.append(Send(src, reply))
            return
        session.term, session.number, session.reply = message.term, message.number, None
        self._on_new(session, message)

    def _on_new(
        self, session: _Session, message: PushOpen | PushBatch | PushQuery | PushClose
    ) -> None:
        """Handle a request that is new."""
        if isinstance(message, PushBatch):
            self._deliver(session, message)
            return
        session.position = None
        if isinstance(message, PushQuery):
            self._reply_failure(session, message, "lost", _FORGOT)
        elif session.step:
            session.waiting = message
        else:
            self._carry_out(session, message)

    def _carry_out(self, session: _Session, message: PushOpen | PushClose) -> None:
        if isinstance(message, PushOpen):
            self._open(session, message)
        else:
            self._close(session)

    def _refuse(
        self, src: bytes, message: PushMessage, kind: Failure, text: str, **more: Any
    ) -> None:
        """Refuse a request that no task remembers."""
        if not isinstance(message, PushClose):
            self._effects.append(Send(src, PushFailed(*_fields(message), kind, text, **more)))

    def _reply(self, session: _Session, reply: PushMessage) -> None:
        session.reply = reply
        self._effects.append(Send(session.route, reply))

    def _reply_failure(
        self, session: _Session, message: PushMessage, kind: Failure, text: str, **more: Any
    ) -> None:
        reply = PushFailed(*_fields(message), kind, text[:MAX_TEXT], **more)
        self._reply(session, reply)

    # --- steps ---

    def _open(self, session: _Session, message: PushOpen) -> None:
        problem = self._mismatch(message)
        if problem:
            self._reply_failure(session, message, "bug", problem, error="ConfigError")
            return
        task = Task(
            message.player, message.target, message.partition, message.partitions, message.cluster,
            message.birth, message.term, message.seek, message.position, message.mark,
            message.has_moved,
        )  # fmt: skip
        if session.task is None or session.task.term != task.term:
            self._close(session)
        if not session.worker:
            self._workers += 1
            session.worker = self._workers
            self._working[session.worker] = session
        session.task, session.step = task, message.number
        self._effects.append(OpenTarget(session.worker, task))

    def _mismatch(self, message: PushOpen) -> str:
        """Return what the player and the receiver disagree on; "": nothing."""
        spec = self._spec
        if message.target != spec.name:
            return f"the receiver has the target {spec.name!r}, not {message.target!r}"
        if message.partitions != spec.partitions:
            has = f"the receiver's target has partitions = {spec.partitions}"
            return f"{has}, the player's {message.partitions}; use one number"
        if message.stores_position != spec.stores_position:
            has = "stores positions" if spec.stores_position else "stores no position"
            return f"the receiver's target {has}: use push(stores_position={spec.stores_position})"
        can_keep = spec.keeps_rejected or spec.rejected == "dead-letter"
        if message.keeps_rejected and not can_keep:
            return (
                "the receiver's target keeps no rejected records: give it rejected='dead-letter'"
                " and a file dead_letter"
            )
        return ""

    def _close(self, session: _Session) -> None:
        """Close the worker, which carries out no step."""
        if session.worker:
            del self._working[session.worker]
            self._effects.append(CloseTarget(session.worker))
        session.worker, session.task, session.position = 0, None, None

    def _deliver(self, session: _Session, message: PushBatch) -> None:
        position, task = session.position, session.task
        if session.step or position is None or task is None:
            session.position = None
            self._reply_failure(session, message, "lost", "the target was not opened before it")
            return
        stores = self._spec.stores_position
        # A task whose target stores no position passes positions without a step.
        is_next = message.start == position if stores else message.start >= position
        if not is_next or message.stop < message.start:
            session.position = None
            text = f"the target is at gsn {position}, not {message.start}"
            self._reply_failure(session, message, "fenced", text)
            return
        records = list(map(received, message.records))
        rejected = tuple(map(received_rejection, message.rejected))
        batch = Batch(task, message.start, message.stop, records, message.size, rejected)
        session.step, session.batch = message.number, batch
        self._effects.append(Deliver(session.worker, batch))

    # --- the ends of steps ---

    def _on_step_ended(self, event: StepEnded) -> None:
        session = self._working.get(event.worker)
        if session is None:
            return
        step, session.step = session.step, 0
        batch, session.batch = session.batch, None
        waiting, session.waiting = session.waiting, None
        if waiting is not None:
            self._carry_out(session, waiting)
        elif step == session.number:
            self._on_result(session, batch, event.result)

    def _on_result(
        self, session: _Session, batch: Batch | None, result: Opened | bytes | Exception | None
    ) -> None:
        assert session.task is not None, "a worker has a task"
        task = session.task
        fields = (
            task.cluster, task.player, task.target, task.partition, task.term, session.number
        )  # fmt: skip
        if isinstance(result, Exception):
            self._on_error(session, batch, PushWorking(*fields), result)
        elif isinstance(result, Opened):
            position = result.position
            session.position = task.position if position is None else position
            self._reply(session, PushOpened(*fields, position, result.mark))
        else:
            assert batch is not None, "only a batch ends without a position"
            session.position = batch.stop
            self._reply(session, PushDone(*fields, result))

    def _on_error(
        self, session: _Session, batch: Batch | None, request: PushMessage, error: Exception
    ) -> None:
        text = reason_of(error)
        if isinstance(error, Rejected) and batch is not None:
            index = error.index
            if index is not None and index >= len(batch.records):
                index = None
            self._reply_failure(session, request, "rejected", text, index=index)
            return
        if self._spec.stores_position or batch is None or isinstance(error, (Fenced, *BUGS)):
            session.position = None
        if isinstance(error, Fenced):
            self._reply_failure(session, request, "fenced", text)
        elif isinstance(error, BUGS):
            kind = next(bug.__name__ for bug in BUGS if isinstance(error, bug))
            self._reply_failure(session, request, "bug", text, error=kind)
        else:
            after_s = None
            if isinstance(error, Retry) and error.after_s is not None:
                after_s = float(min(max(error.after_s, 0), MAX_AFTER_S))
            why = text if isinstance(error, Retry) else text_of(error)
            self._reply_failure(session, request, "retry", why, after_s=after_s)


def _fields(message: PushMessage) -> tuple[int, str, str, int, int, int]:
    """Return the fields that all messages have."""
    return (
        message.cluster, message.player, message.target, message.partition, message.term,
        message.number,
    )  # fmt: skip
