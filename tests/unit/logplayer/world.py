"""Processes of players on a log, a service and targets in memory, with one clock.

    world = World([spec(world_store)])
    player = world.add_player()
    world.log.insert(b"payload")
    world.run(2000)                                  # milliseconds

A step of a target takes `latency_ms`. Time jumps to what is due next, so a wake-up that a node
does not ask for is missed, and a node that asks for time without end fails the test.
"""

from __future__ import annotations

import itertools
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import logplayer.node
from logplayer.calls import StopCall
from logplayer.contract import Batch, Target, TargetSpec, Task, cursor_name
from logplayer.node import PlayerNode
from logplayer.settings import PlayerSettings
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.targets import Connections, Fault, Sink, Store
from tests.unit.logdb.fakelog import FakeLog
from tests.unit.logplayer.service import PlayerCore, Service
from ziplog.core.node import BatchEnd, Call, Complete, Event, Halt, LogWarning, Wakeup
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logplayer.task import PlayerTask

PLAYER: Final = "orders"
#: Steps of nodes without time passing: more mean an endless loop.
_MAX_STEPS: Final = 5000


def no_connection() -> Target:
    raise AssertionError("the core connects to nothing")


def spec(target: Store | Sink, **more: Any) -> TargetSpec:
    """Return the settings of a target of a world."""
    return TargetSpec(
        name=target.name, connect=no_connection, stores_position=target.stores_position, **more
    )


class Player:
    """One process."""

    def __init__(self, world: World, number: int, settings: PlayerSettings) -> None:
        self.world: Final = world
        self.number: Final = number
        self.owner: Final = f"host:{number}:{number:08x}"
        self.core: Final = PlayerCore(world.service, b"%016d" % number)
        with patch.object(logplayer.node, "ClientCore", lambda *_: self.core):
            self.node: Final = PlayerNode(
                b"%016d" % number, ["fake:1"], settings, owner=self.owner, now=world.now
            )
        self.connections: Final = Connections(world.targets, self._fault, self._later)
        #: Returns what goes wrong with a step of a target.
        self.fault: Callable[[str, Task | Batch], Fault] = lambda _kind, _argument: None
        #: It does nothing until the world continues it; or for good.
        self.is_paused = self.is_dead = False
        self.posted: list[Event] = []
        #: Of targets: the steps that began and did not end; and all that began.
        self.running: Final[set[int]] = set()
        self.steps: Final[list[OpenTarget | Deliver | CloseTarget]] = []
        self.warnings: Final[list[str]] = []
        self.halts: Final[list[str]] = []
        self.results: Final[dict[int, Any]] = {}
        #: Steps of targets do not end while it is set.
        self.hangs = False
        self._hung: list[Callable[[], None]] = []
        self._calls = 0

    def _fault(self, kind: str, argument: Task | Batch) -> Fault:
        return self.fault(kind, argument)

    def _later(self, act: Callable[[], Any]) -> None:
        self.world.at(self.world.now + self.world.late_ms * NS_PER_MS, act)

    # --- events ---

    def step(self) -> None:
        """Handle what waits, as one turn of a driver."""
        node, now = self.node, self.world.now
        events, self.posted = self.posted, []
        for event in (*events, Wakeup(), BatchEnd()):
            for effect in node.step(event, now):
                self._carry_out(effect)
            node.check()

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case OpenTarget() | Deliver():
                assert effect.worker not in self.running, "two steps of one worker"
                self.running.add(effect.worker)
                self.steps.append(effect)
                end = self.world.now + self.world.latency_ms * NS_PER_MS
                self.world.at(end, lambda: self._run(effect))
            case CloseTarget():
                self.steps.append(effect)
            case Complete(id=number, result=result):
                assert number not in self.results
                self.results[number] = result
            case LogWarning(text=text):
                self.warnings.append(text)
            case Halt(reason=reason):
                self.halts.append(reason)
            case _:
                raise AssertionError(effect)

    def _run(self, effect: OpenTarget | Deliver) -> None:
        if self.is_dead:
            return
        if self.hangs or self.is_paused:
            self._hung.append(lambda: self._run(effect))
            return
        if isinstance(effect, OpenTarget):
            result: Any = self.connections.open(effect.task)
        else:
            result = self.connections.deliver(effect.batch)
        self.running.discard(effect.worker)
        self.posted.append(StepEnded(effect.worker, result))
        self.world.check()

    def go_on(self) -> None:
        """End a pause of the process, or of its steps."""
        self.is_paused = self.hangs = False
        hung, self._hung = self._hung, []
        for act in hung:
            act()

    # --- what a test asks for ---

    def call(self, request: Any) -> int:
        self._calls += 1
        self.posted.append(Call(self._calls, request))
        return self._calls

    def stop(self, within_ms: int = 10_000) -> int:
        return self.call(StopCall(self.world.now + within_ms * NS_PER_MS))

    def task(self, target: str = "db", partition: int = 0) -> PlayerTask:
        return self.node.tasks[cursor_name(PLAYER, target, partition)]

    def states(self) -> list[str]:
        return [task.state for task in self.node.tasks.values()]

    def batches(self) -> list[tuple[int, int]]:
        return [(s.batch.start, s.batch.stop) for s in self.steps if isinstance(s, Deliver)]

    @property
    def held(self) -> list[str]:
        return [name for name, task in self.node.tasks.items() if task.claim.is_held]

    def deadline(self, ms: int = 10_000) -> int:
        return self.world.now + ms * NS_PER_MS


class World:
    """A log, a service, targets, and processes."""

    def __init__(
        self,
        targets: Sequence[Store | Sink] = (),
        specs: Sequence[TargetSpec] = (),
        *,
        seed: int = 0,
        latency_ms: int = 1,
        **settings: Any,
    ) -> None:
        self.log: Final = FakeLog(seed=seed, holes=2)
        self.service: Final = Service(self.log)
        self.targets: Final[dict[str, Store | Sink]] = {one.name: one for one in targets}
        chosen = {"lease_ms": 3000, "commit_ms": 100, "idle_ms": 500, **settings}
        self.settings: Final = PlayerSettings(
            name=PLAYER, targets=tuple(specs) or tuple(map(spec, targets)), **chosen
        )
        self.latency_ms, self.late_ms = latency_ms, 300
        self.now = 1_000_000_000
        self.players: Final[list[Player]] = []
        self._due: Final[list[tuple[int, int, Callable[[], Any]]]] = []
        self._numbers: Final = itertools.count()
        #: Called after every step of a target.
        self.checks: Final[list[Callable[[], None]]] = []

    def add_player(self, settings: PlayerSettings | None = None) -> Player:
        player = Player(self, len(self.players) + 1, settings or self.settings)
        self.players.append(player)
        return player

    def at(self, time: int, act: Callable[[], Any]) -> None:
        """Have a function called at a time, in ns."""
        heappush(self._due, (time, next(self._numbers), act))

    def after(self, ms: int, act: Callable[[], Any]) -> None:
        self.at(self.now + ms * NS_PER_MS, act)

    def check(self) -> None:
        for check in self.checks:
            check()

    def run(self, ms: int) -> None:
        """Pass time."""
        end, steps = self.now + ms * NS_PER_MS, 0
        while True:
            alive = [one for one in self.players if not one.is_dead and not one.is_paused]
            for player in alive:
                if player.posted or (player.node.next_wakeup() or end + 1) <= self.now:
                    player.step()
            steps += 1
            assert steps < _MAX_STEPS, "a node asks for time without end"
            due = [one.node.next_wakeup() or end for one in alive]
            due += [self.now for one in alive if one.posted]
            due += [self._due[0][0]] if self._due else []
            next_at = max(self.now, min(due, default=end))
            if next_at > end:
                self.now = end
                return
            if next_at > self.now:
                steps = 0
            self.now = next_at
            while self._due and self._due[0][0] <= self.now:
                heappop(self._due)[2]()
            if next_at == end and not any(one.posted for one in alive) and steps > 20:
                return

    # --- what a test asks for ---

    def insert(self, *payloads: bytes, key: bytes | None = None) -> list[int]:
        return [rid.gsn for payload in payloads for rid in self.log.insert(payload, key=key)]

    def fill(self, count: int, keys: int = 0) -> list[int]:
        """Insert records; with `keys`, of so many keys."""
        found = []
        for number in range(count):
            key = b"key-%d" % (number % keys) if keys else None
            found += self.insert(b"%d" % number, key=key)
        return found

    def cursor(self, target: str = "db", partition: int = 0) -> Any:
        return self.service.get(cursor_name(PLAYER, target, partition))

    def edit(self, what: str, position: int = 0, target: str = "db", partition: int = 0) -> None:
        refusal = self.service.edit(cursor_name(PLAYER, target, partition), what, position)
        assert not refusal, refusal

    def payloads(self, target: str = "db", partition: int = 0) -> list[bytes]:
        rows = self.targets[target].rows[partition]
        records = rows.records if not isinstance(rows, list) else [one[2] for one in rows]
        return [record.payload for record in records]


def played(target: Store | Sink | None = None, **more: Any) -> tuple[World, Player]:
    """Return a world with one player that has opened its target, and 20 records."""
    target = target or Store("db")
    settings = {name: more.pop(name) for name in ("commit_ms", "idle_ms") if name in more}
    world = World([target], [spec(target, **more)], **settings)
    player = world.add_player()
    world.fill(20)
    return world, player


def once(kind: str, fault: Any, nth: int = 1) -> Callable[[str, Any], Any]:
    """Return a fault of the nth step of a kind."""
    seen = 0

    def chooses(step: str, _argument: Any) -> Any:
        nonlocal seen
        seen += step == kind
        return fault if step == kind and seen == nth else None

    return chooses


def log_payloads(world: World) -> list[bytes]:
    return [world.log.records[gsn].payload for gsn in world.log.gsns]
