"""The player's end of push: carries out the steps of targets that are behind receivers.

Rules: a batch is sent once, so one copy of it is under way at most. While no reply comes, the
sender asks for the result (`PushQuery`), or repeats `PushOpen`. A receiver that does not know the
batch, or is silent for 10 seconds, leaves the outcome unknown: the step ends with `Retry`, and the
next batch is sent only after a `PushOpen` that was answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.push.messages import (
    ROLE,
    VERSIONS,
    PushBatch,
    PushClose,
    PushDone,
    PushedRejection,
    PushFailed,
    PushOpen,
    PushOpened,
    PushQuery,
    PushWorking,
    check_records,
    frame_size,
    pushed,
)
from logplayer.retries import BUGS, MAX_TEXT
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from ziplog.client.common.other_nodes import describe
from ziplog.core.fields import MAX_FRAME
from ziplog.core.node import Connect, Disconnect, ReportBadMessage, Send
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.core.wire_use import WireRange
from ziplog.errors import ConfigError
from ziplog.wire import NodeInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logplayer.contract import Batch, TargetSpec, Task
    from logplayer.push.messages import PushMessage
    from ziplog.core.message import Message
    from ziplog.core.node import Effect

#: Pauses between the queries of a step double from the first to the last.
QUERY_FIRST_NS: Final = 250 * NS_PER_MS
QUERY_LAST_NS: Final = 2 * NS_PER_S
#: Silence of a receiver after which the outcome of a step is unknown.
SILENCE_NS: Final = 10 * NS_PER_S
_REPLIES: Final = (PushOpened, PushDone, PushFailed, PushWorking)
_BUGS: Final[dict[str, Any]] = {bug.__name__: bug for bug in BUGS}


class _Worker:
    """One claim's connection to a target."""

    __slots__ = (
        "batch", "endpoint", "is_open", "name", "number", "pause", "query_at", "request",
        "silent_at", "spec", "task",
    )  # fmt: skip

    def __init__(self, spec: TargetSpec, task: Task) -> None:
        self.spec: Final = spec
        self.endpoint: Final = spec.receiver
        self.name: Final = name_of(spec.receiver)
        self.task = task
        #: The receiver has opened the target, and no outcome is unknown since.
        self.is_open = False
        #: The number of the request under way; 0: none.
        self.number = 0
        #: What to send while there is no reply; the batch that follows the open.
        self.request: PushMessage | None = None
        self.batch: Batch | None = None
        self.query_at = self.silent_at = NEVER
        self.pause = QUERY_FIRST_NS


def name_of(endpoint: str) -> bytes:
    """Return the name of the connection to a receiver."""
    return b"receiver " + endpoint.encode()


class PushSender:
    """All connections of one player to targets behind receivers."""

    def __init__(self, targets: Iterable[TargetSpec]) -> None:
        """Send nothing yet; `targets`: the player's, also those without a receiver."""
        self._specs: Final = {spec.name: spec for spec in targets if spec.receiver}
        #: The names of the connections to receivers.
        self.names: Final = frozenset(name_of(spec.receiver) for spec in self._specs.values())
        self._workers: Final[dict[int, _Worker]] = {}
        #: The workers by the numbers of their requests.
        self._waiting: Final[dict[int, int]] = {}
        self._number = 0
        self._ended: list[StepEnded] = []
        self._effects: list[Effect] = []
        self._now = 0
        #: No query is due before it.
        self._due = NEVER

    # --- the player's node ---

    def carry_out(self, effects: list[Effect], now: int) -> list[Effect]:
        """Return effects with messages in place of the steps of targets behind receivers."""
        if not self._specs:
            return effects
        self._now = now
        found: list[Effect] = []
        for effect in effects:
            if not self._begin(effect):
                found.append(effect)
            elif self._effects:
                found += self._effects
                self._effects.clear()
        return found

    def poll(self, now: int) -> list[StepEnded]:
        """Send what is due; return the steps that have ended since the last call."""
        self._now = now
        if now >= self._due:
            self._query()
        ended, self._ended = self._ended, []
        return ended

    def _query(self) -> None:
        """Ask for the results that are due; a receiver that is silent for too long ends a step."""
        now = self._now
        for number, worker in [(one, self._workers[of]) for one, of in self._waiting.items()]:
            if now >= worker.silent_at:
                text = f"no reply from the receiver at {worker.endpoint}"
                self._fail_open(number, Retry(f"{text} for {SILENCE_NS // NS_PER_S} s"))
            elif now >= worker.query_at:
                assert worker.request is not None, "a request is under way"
                self._send(worker, worker.request)
                worker.pause = min(2 * worker.pause, QUERY_LAST_NS)
                worker.query_at = now + worker.pause
        waiting = [self._workers[of] for of in self._waiting.values()]
        self._due = min((min(one.query_at, one.silent_at) for one in waiting), default=NEVER)

    def pop_effects(self) -> list[Effect]:
        """Return the messages to send since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def next_wakeup(self) -> int:
        """Return the time of the next poll; `NEVER`: with the next message."""
        return self._now if self._ended else self._due

    def check(self) -> None:
        """Assert the invariants."""
        for number, of in self._waiting.items():
            worker = self._workers[of]
            assert worker.number == number, "a request of no worker"
            assert self._due <= min(worker.query_at, worker.silent_at), "a query is late"
        numbers = [worker.number for worker in self._workers.values() if worker.number]
        assert sorted(numbers) == sorted(self._waiting), "a worker without its request"

    # --- steps ---

    def _begin(self, effect: Effect) -> bool:
        """Begin a step; return False if it is none of a target behind a receiver."""
        if isinstance(effect, OpenTarget):
            spec = self._specs.get(effect.task.target)
            if spec is None:
                return False
            worker = self._workers.get(effect.worker)
            if worker is None:
                worker = self._workers[effect.worker] = _Worker(spec, effect.task)
                self._effects.append(Connect(worker.name, worker.endpoint))
            worker.task = effect.task
            self._open(effect.worker, worker)
        elif isinstance(effect, Deliver) and effect.worker in self._workers:
            self._deliver(effect.worker, effect.batch)
        elif isinstance(effect, CloseTarget) and effect.worker in self._workers:
            self._close(self._workers.pop(effect.worker))
        else:
            return False
        return True

    def _next(self, number: int, worker: _Worker) -> tuple[int, str, str, int, int, int]:
        """Begin a request of a worker; return the fields that all messages have."""
        self._forget(worker)
        fields = self._fields(worker)
        worker.number = fields[-1]
        self._waiting[worker.number] = number
        worker.pause = QUERY_FIRST_NS
        worker.query_at, worker.silent_at = self._now + worker.pause, self._now + SILENCE_NS
        self._due = min(self._due, worker.query_at)
        return fields

    def _fields(self, worker: _Worker) -> tuple[int, str, str, int, int, int]:
        self._number += 1
        task = worker.task
        return task.cluster, task.player, task.target, task.partition, task.term, self._number

    def _forget(self, worker: _Worker) -> None:
        self._waiting.pop(worker.number, None)
        worker.number, worker.request = 0, None

    def _send(self, worker: _Worker, message: Message) -> None:
        self._effects.append(Send(worker.name, message))

    def _open(self, number: int, worker: _Worker) -> None:
        worker.is_open = False
        task, spec = worker.task, worker.spec
        worker.request = message = PushOpen(
            *self._next(number, worker), task.partitions, task.birth, task.seek, task.position,
            task.mark, task.has_moved, spec.stores_position, spec.rejected == "dead-letter",
        )  # fmt: skip
        self._send(worker, message)

    def _deliver(self, number: int, batch: Batch) -> None:
        worker = self._workers[number]
        size = frame_size(batch)
        if size > MAX_FRAME:
            text = f"a message to a receiver has at most {MAX_FRAME} bytes; this batch needs {size}"
            self._ended.append(StepEnded(number, Rejected(text)))
        elif not worker.is_open:
            worker.batch = batch
            self._open(number, worker)
        else:
            self._send_batch(number, worker, batch)

    def _send_batch(self, number: int, worker: _Worker, batch: Batch) -> None:
        rejected = [
            PushedRejection(pushed(one.record), one.why[:MAX_TEXT]) for one in batch.rejected
        ]
        try:
            records = list(map(pushed, batch.records))
            if worker.spec.map is not None:
                check_records(records)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            text = f"the map returned a record that no message can have: {error}"
            self._ended.append(StepEnded(number, TypeError(text)))
            return
        fields = self._next(number, worker)
        worker.request = PushQuery(*fields)
        message = PushBatch(*fields, batch.start, batch.stop, batch.size, records, rejected)
        self._send(worker, message)

    def _close(self, worker: _Worker) -> None:
        self._forget(worker)
        self._send(worker, PushClose(*self._fields(worker)))
        if all(one.endpoint != worker.endpoint for one in self._workers.values()):
            self._effects.append(Disconnect(worker.name))

    # --- replies ---

    def on_message(self, src: bytes, message: Message, now: int) -> None:
        """Handle a message of a receiver."""
        self._now = now
        if isinstance(message, NodeInfo):
            self._on_info(src, message)
            return
        if not isinstance(message, _REPLIES):
            reason = f"{type(message).__name__} from a receiver"
            self._effects.append(ReportBadMessage(src, reason))
            return
        number = self._waiting.get(message.number)
        if number is None:
            return  # A repetition, or the worker has ended.
        worker = self._workers[number]
        is_of_task = (message.cursor, message.term) == (worker.task.cursor, worker.task.term)
        if src != worker.name or not is_of_task:
            self._effects.append(ReportBadMessage(src, "a reply to another task"))
            return
        is_open = isinstance(worker.request, PushOpen)
        if isinstance(message, PushWorking):
            worker.silent_at = now + SILENCE_NS
        elif isinstance(message, PushFailed):
            self._on_failed(message, worker)
        elif isinstance(message, PushOpened) is not is_open:
            self._effects.append(ReportBadMessage(src, "a reply to another request"))
        elif isinstance(message, PushOpened):
            self._on_opened(number, worker, message)
        else:
            self._end(message.number, message.mark)

    def _on_opened(self, number: int, worker: _Worker, message: PushOpened) -> None:
        batch, worker.batch, worker.is_open = worker.batch, None, True
        if batch is None:
            self._end(message.number, Opened(message.position, message.mark))
        else:
            self._deliver(number, batch)

    def _on_failed(self, message: PushFailed, worker: _Worker) -> None:
        number, text = message.number, message.text
        if message.kind == "rejected":
            self._end(number, Rejected(message.index, text))
        elif message.kind == "retry":
            # The receiver knows the outcome, and what it needs before the next batch.
            self._end(number, Retry(text, message.after_s))
        elif message.kind == "fenced":
            self._fail_open(number, Fenced(text))
        elif message.kind == "bug":
            self._fail_open(number, _bug(message))
        else:
            text = f"the receiver at {worker.endpoint} does not know the batch: {text}"
            self._fail_open(number, Retry(text))

    def _on_info(self, src: bytes, info: NodeInfo) -> None:
        """Handle the description of what listens there: it did not understand a message."""
        for number, of in list(self._waiting.items()):
            worker = self._workers[of]
            problem = mismatch(info, worker.endpoint)
            if worker.name == src and problem:
                is_receiver = info.role == ROLE  # A release may be replaced at any time.
                error = Retry(problem) if is_receiver else _config_error(problem)
                self._fail_open(number, error)

    def _fail_open(self, request: int, error: Exception) -> None:
        """End a step; the target is opened again before the next batch."""
        self._workers[self._waiting[request]].is_open = False
        self._end(request, error)

    def _end(self, request: int, result: Opened | bytes | Exception | None) -> None:
        number = self._waiting[request]
        worker = self._workers[number]
        self._forget(worker)
        worker.batch = None
        self._ended.append(StepEnded(number, result))


def mismatch(info: NodeInfo, endpoint: str) -> str:
    """Return why what listens at an endpoint is no receiver for this release; "": it is one."""
    if info.role != ROLE:
        return f"there is no receiver at {endpoint}: {describe(info)}"
    versions = WireRange(info.first_wire, info.last_wire)
    if versions != VERSIONS:
        return (
            f"the receiver at {endpoint} runs Ziplog {info.version}, with version {versions} of"
            f" push; this player needs {VERSIONS}: install one release on both sides"
        )
    return ""


def _config_error(text: str) -> Exception:
    return ConfigError("receiver", None, "", message=text)


def _bug(message: PushFailed) -> Exception:
    """Return an error of the receiver's program, or of its settings."""
    kind = _BUGS.get(message.error, TypeError)
    error: Exception = (_config_error if kind is ConfigError else kind)(message.text)
    return error
