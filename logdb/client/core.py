"""The client of a database as one deterministic node: calls in, messages and results out.

It contains the log's `ClientCore`, which it makes when the first coordinator has reported the log's
endpoints. Both use one transport, so one `step` sees an insert's acks and its decision. Invariant:
every call completes exactly once, at its deadline at the latest. Messages that are not from a
coordinator go to the log's core. See docs/logdb.md.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from logdb import wire
from logdb.client.commits import Commits
from logdb.client.coordinators import REPLIES, Coordinators
from logdb.client.known_states import KnownStates
from logdb.client.operation_steps import StepRunner
from logdb.client.operations import OPERATIONS
from logdb.client.requests import DropRequest, UnwatchRequest, WatchRequest
from logdb.errors import TransactionAborted
from ziplog.client.client_node import ClientCore
from ziplog.client.common import requests
from ziplog.client.common.requests import Preferences
from ziplog.client.common.step_context import StepContext
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import Call, Cancelled, ConnectionChanged, Received, Wakeup
from ziplog.core.units import NEVER
from ziplog.wire import NodeInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logdb.client.requests import SnapshotId, WatchHandle
    from ziplog.client.common.requests import Policy
    from ziplog.client.log_tasks import Task
    from ziplog.core.node import Effect, Event
    from ziplog.types import RecordId
    from ziplog.wire import InsertAck, Limits


class Counters(requests.Counters):
    """Counters of a client: the log's, and LogDB's."""

    commits: int = 0
    aborts: int = 0
    #: Writes without reads that were retried.
    repeated_puts: int = 0
    #: Reads in transactions that needed no request.
    known_reads: int = 0


class DatabaseCore:
    """The state of a database's client."""

    def __init__(
        self,
        client: bytes,
        endpoints: Sequence[str],
        policy: Policy,
        *,
        wall_offset_ns: Callable[[], int] = lambda: 0,
        region: str = "",
    ) -> None:
        """Make a client.

        Args:
            client: 24 random bytes, never used by another client: the log's client, and the
                session.
            endpoints: "host:port" of coordinators, one or more.
            policy: selects the shard of each insert.
            wall_offset_ns: returns Unix time minus the monotonic time.
            region: where it runs, so that it reads near; "": none.

        """
        assert len(client) == 24, "16 bytes for the log, and 8 for the session"
        self.session: Final = client[16:]
        context = self._context = StepContext(client[:16])
        self._preferences: Final = Preferences(policy, region)
        self._coordinators: Final = Coordinators(context, endpoints, self.session)
        self._coordinators.on_opened = self._on_opened
        self.known_states: Final = KnownStates()
        self._commits: Final = Commits(context, self._coordinators, self.session, wall_offset_ns)
        self._step_runner: Final = StepRunner(context, self._coordinators, self._commits)
        self._calls: LogTasks | None = None
        self._tasks: Final[dict[int, Task]] = {}
        #: The watches of open calls, so that closing a watch cancels its call.
        self._watch_handles: Final[dict[int, WatchHandle]] = {}
        self.counters: Final = Counters()
        self.next_number: Final = self._commits.next_number

    # --- the operations' context ---

    @property
    def now(self) -> int:
        """Monotonic nanoseconds."""
        return self._context.now

    @property
    def known_position(self) -> RecordId:
        """The greatest position that a coordinator has reported."""
        return self._coordinators.known_position

    @property
    def limits(self) -> Limits:
        """The cluster's limits."""
        assert self._calls is not None
        return self._calls.core.limits

    def endpoint(self, name: bytes) -> str:
        """Return a coordinator's address."""
        return self._coordinators.endpoint(name)

    @property
    def description(self) -> str:
        """The addresses of the coordinators, for errors."""
        return self._coordinators.description

    def accept_connected_log(self) -> bool:
        """Whether the coordinator tails the connected log; if not, the client uses the next one."""
        assert self._calls is not None
        core = self._calls.core
        if self._coordinators.accept_cluster(core.cluster, ", ".join(core.endpoints)):
            return True
        self.known_states.reset()
        return False

    def stats(self) -> dict[str, int]:
        """Return all counters."""
        own = asdict(self.counters)
        own["protocol_errors"] += self._context.counters.protocol_errors
        if self._calls is not None:
            for name, count in asdict(self._calls.core.counters).items():
                own[name] += count
        return own

    def _on_opened(self, opened: wire.Opened) -> None:
        core = ClientCore(self._context.client, opened.endpoints, self._preferences)
        self._calls = self._step_runner.calls = self._commits.calls = LogTasks(
            core, self._context.now
        )

    # --- events ---

    @property
    def has_claims(self) -> bool:
        """False: a database owns no cursors."""
        return False

    @property
    def is_batch_open(self) -> bool:
        """Whether `step` of a `BatchEnd` would do anything."""
        return self._calls is not None and self._calls.core.is_batch_open

    def step_call(self, number: int, request: Any, now: int) -> list[Effect]:
        """Do the same as `step(Call(number, request), now)`."""
        self._set_time(now)
        self._start(number, request)
        return self._pop_effects()

    def step_ack(self, src: bytes, ack: InsertAck, now: int) -> list[Effect]:
        """Do the same as `step(Received(src, ack), now)`."""
        self._set_time(now)
        if self._calls is not None:
            self._calls.step_ack(src, ack, now)
        return self._pop_effects()

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        self._set_time(now)
        context, calls = self._context, self._calls
        if type(event) is Received:
            if type(event.message) in REPLIES:
                self._coordinators.receive(event.src, event.message)
            elif type(event.message) is NodeInfo and self._coordinators.has(event.src):
                self._coordinators.on_node_info(event.src, event.message)
            elif calls is not None:
                calls.step(event, now)
        elif type(event) is Call:
            self._start(event.id, event.request)
        elif type(event) is Cancelled:
            task = self._tasks.get(event.id)
            if task is not None:
                self._forget(event.id)
                task.cancel()
        elif type(event) is ConnectionChanged and self._coordinators.has(event.name):
            self._coordinators.on_connection_changed(event.name, event.problem)
        elif calls is not None:
            calls.step(event, now)
        if type(event) is Wakeup and now >= context.next_timer:
            self._tick()
        return self._pop_effects()

    def _set_time(self, now: int) -> None:
        self._context.now = now
        if self._calls is not None:
            self._calls.now = now

    def _pop_effects(self) -> list[Effect]:
        effects, calls = self._context.pop_effects(), self._calls
        if calls is not None and calls.effects:
            return effects + calls.pop_effects() if effects else calls.pop_effects()
        return effects

    def next_wakeup(self) -> int | None:
        """Return the time of the next wake-up."""
        due = self._context.next_timer
        if self._calls is not None:
            other = self._calls.core.next_wakeup()
            if other is not None and other < due:
                return other
        return due if due != NEVER else None

    def _start(self, call: int, request: Any) -> None:
        kind = type(request)
        if kind is DropRequest:
            self._drop_snapshot(request.snapshot)
            self._context.complete(call, None)
            return
        if kind is UnwatchRequest:
            self._close_watch(request.handle)
            self._context.complete(call, None)
            return
        if kind is WatchRequest and request.handle is not None:
            if request.handle.is_closed:
                self._context.complete(call, None)
                return
            self._watch_handles[call] = request.handle
        operation = OPERATIONS[kind](request, self)
        task = self._step_runner.prepare(operation, partial(self._on_done, call))
        self._tasks[call] = task
        task.resume()

    def _drop_snapshot(self, snapshot: SnapshotId) -> None:
        message = wire.DropSnapshot(self._coordinators.cluster, snapshot.number)
        self._coordinators.post(snapshot.coordinator, message)

    def _close_watch(self, closed: WatchHandle) -> None:
        for call in [call for call, handle in self._watch_handles.items() if handle is closed]:
            task = self._tasks[call]
            self._forget(call)
            task.cancel()
            self._context.complete(call, None)

    def _forget(self, call: int) -> None:
        del self._tasks[call]
        self._watch_handles.pop(call, None)

    def _on_done(self, call: int, result: Any) -> None:
        self._forget(call)
        if type(result) is TransactionAborted:
            # What the next attempt reads must not be what this one has read.
            self.known_states.clear()
        self._context.complete(call, result)

    def _tick(self) -> None:
        self._context.next_timer = NEVER
        self._coordinators.tick()
        self._commits.tick()
        self._step_runner.wake_sleepers()

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._coordinators.check()
        self._commits.check()
        self._step_runner.check()
        assert self._watch_handles.keys() <= self._tasks.keys(), "a watch has no open call"
        if self._calls is not None:
            self._calls.core.check()
