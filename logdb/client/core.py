"""A client of a database as one deterministic node: calls in, messages out, answers to the calls.

Around the log's `ClientCore`, which it makes when the first coordinator has told where the log is:
both speak over one transport, so the acks of an insert and the decision about it come to the same
`step`. Rules: every call is answered exactly once, at its deadline at the latest; what is not a
coordinator's message is the log's. Invariants: `check()`. See docs/logdb.md.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from logdb import wire
from logdb.client.commits import Commits
from logdb.client.coordinators import REPLIES, Coordinators
from logdb.client.operation_steps import Machines
from logdb.client.operations import OPERATIONS
from logdb.client.requests import DropRequest, UnwatchRequest, WatchRequest
from logdb.tasks import LogCalls
from ziplog.client.client_node import ClientCore
from ziplog.client.common import requests
from ziplog.client.common.requests import NEVER
from ziplog.client.common.step_context import StepContext
from ziplog.core.node import Call, Cancelled, Received, Wakeup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logdb.client.requests import SnapshotId, Watching
    from logdb.tasks import Running
    from ziplog.client.common.requests import Policy
    from ziplog.core.node import Effect, Event
    from ziplog.types import RecordId
    from ziplog.wire import Limits


class Counters(requests.Counters):
    """What a client did: the log's counts, and its own."""

    commits: int = 0
    aborts: int = 0
    #: Blind writes that had to be done again.
    repeated_puts: int = 0


class DatabaseCore:
    """Everything that a client of a database knows and has under way."""

    def __init__(
        self,
        client: bytes,
        endpoints: Sequence[str],
        policy: Policy,
        *,
        wall_offset_us: int = 0,
    ) -> None:
        """Make a client.

        Args:
            client: 24 random bytes, never used by another client: the log's client, the session.
            endpoints: "host:port" of coordinators, one or more.
            policy: chooses the shard of each insert.
            wall_offset_us: what microseconds since 1970 are above those of the monotonic clock.

        """
        assert len(client) == 24, "16 bytes for the log, and 8 for the session"
        self.session: Final = client[16:]
        turn = self._turn = StepContext(client[:16])
        self._policy: Final = policy
        self._coordinators: Final = Coordinators(turn, endpoints, self.session)
        self._coordinators.on_opened = self._opened
        self._commits: Final = Commits(turn, self._coordinators, self.session, wall_offset_us)
        self._machines: Final = Machines(turn, self._coordinators, self._commits)
        self._calls: LogCalls | None = None
        self._running: Final[dict[int, Running]] = {}
        #: The watches that calls are of, for whoever closes one.
        self._watching: Final[dict[int, Watching]] = {}
        self.counters: Final = Counters()
        self.next_number: Final = self._commits.next_number

    # --- what operations ask ---

    @property
    def now(self) -> int:
        """Monotonic nanoseconds."""
        return self._turn.now

    @property
    def known(self) -> RecordId:
        """The last position that a coordinator told."""
        return self._coordinators.known

    @property
    def limits(self) -> Limits:
        """What the cluster allows."""
        assert self._calls is not None
        return self._calls.core.limits

    def endpoint(self, name: bytes) -> str:
        """Return where a coordinator listens."""
        return self._coordinators.endpoint(name)

    @property
    def description(self) -> str:
        """Where the coordinators are, for errors."""
        return self._coordinators.description

    def is_of_the_log(self) -> bool:
        """Whether the coordinator follows the log that answers; if not, the next one is asked."""
        assert self._calls is not None
        core = self._calls.core
        return self._coordinators.accept_log(core.cluster, ", ".join(core.endpoints))

    def stats(self) -> dict[str, int]:
        """Return all counts."""
        own = asdict(self.counters)
        own["protocol_errors"] += self._turn.counters.protocol_errors
        if self._calls is not None:
            for name, count in asdict(self._calls.core.counters).items():
                own[name] += count
        return own

    def _opened(self, opened: wire.Opened) -> None:
        core = ClientCore(self._turn.client, opened.endpoints, self._policy)
        self._calls = self._machines.calls = self._commits.calls = LogCalls(core, self._turn.now)

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        turn, calls = self._turn, self._calls
        turn.now = now
        if calls is not None:
            calls.now = now
        if type(event) is Received:
            if type(event.message) in REPLIES:
                self._coordinators.receive(event.src, event.message)
            elif calls is not None:
                calls.step(event, now)
        elif type(event) is Call:
            self._start(event.id, event.request)
        elif type(event) is Cancelled:
            running = self._running.get(event.id)
            if running is not None:
                self._forget(event.id)
                running.cancel()
        elif calls is not None:
            calls.step(event, now)
        if type(event) is Wakeup and now >= turn.next_timer:
            self._tick()
        effects, calls = turn.effects, self._calls
        if effects:
            turn.effects = []
        if calls is not None and calls.effects:
            return effects + calls.take() if effects else calls.take()
        return effects

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        alarm = self._turn.next_timer
        if self._calls is not None:
            other = self._calls.core.next_wakeup()
            if other is not None and other < alarm:
                return other
        return alarm if alarm != NEVER else None

    def _start(self, call: int, request: Any) -> None:
        kind = type(request)
        if kind is DropRequest:
            self._drop(request.snapshot)
            self._turn.complete(call, None)
            return
        if kind is UnwatchRequest:
            self._unwatch(request.watching)
            self._turn.complete(call, None)
            return
        if kind is WatchRequest and request.watching is not None:
            if request.watching.is_closed:
                self._turn.complete(call, None)
                return
            self._watching[call] = request.watching
        operation = OPERATIONS[kind](request, self)
        running = self._machines.prepare(operation, partial(self._done, call))
        self._running[call] = running
        running.resume()

    def _drop(self, snapshot: SnapshotId) -> None:
        message = wire.DropSnapshot(self._coordinators.cluster, snapshot.number)
        self._coordinators.tell(snapshot.coordinator, message)

    def _unwatch(self, closed: Watching) -> None:
        for call in [call for call, watching in self._watching.items() if watching is closed]:
            running = self._running[call]
            self._forget(call)
            running.cancel()
            self._turn.complete(call, None)

    def _forget(self, call: int) -> None:
        del self._running[call]
        self._watching.pop(call, None)

    def _done(self, call: int, result: Any) -> None:
        self._forget(call)
        self._turn.complete(call, result)

    def _tick(self) -> None:
        self._turn.next_timer = NEVER
        self._coordinators.tick()
        self._commits.tick()
        self._machines.wake()

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._coordinators.check()
        self._commits.check()
        self._machines.check()
        assert self._watching.keys() <= self._running.keys(), "a watch was half forgotten"
        if self._calls is not None:
            self._calls.core.check()
