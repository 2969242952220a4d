"""Processes of players and a receiver in memory, with a channel that loses, doubles and reorders.

The channel encodes every message. It loses at most `_MAX_LOSSES` messages in a row, so a receiver
that runs is never silent for long.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import TargetSpec
from logplayer.push.messages import decode
from logplayer.push.receiver_node import ReceiverNode
from logplayer.push.sender import name_of
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.targets import Connections, Fault, Sink, Store
from tests.unit.logplayer.world import Player, World, no_connection
from ziplog.core.node import (
    Connect,
    Disconnect,
    Event,
    LogWarning,
    Received,
    ReportBadMessage,
    Send,
)
from ziplog.core.units import NS_PER_MS
from ziplog.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import Batch, Task
    from ziplog.core.message import Message

ENDPOINT: Final = "127.0.0.1:7600"
_MAX_LOSSES: Final = 3


def push_spec(target: Store | Sink, **more: Any) -> TargetSpec:
    """Return the settings of the player's target."""
    return TargetSpec(
        name=target.name, connect=None, stores_position=target.stores_position,
        keeps_rejected=True, receiver=ENDPOINT, **more,
    )  # fmt: skip


def behind(target: Store | Sink, **more: Any) -> TargetSpec:
    """Return the settings of the receiver's target."""
    return TargetSpec(
        name=target.name, connect=no_connection, stores_position=target.stores_position,
        keeps_rejected=True, **more,
    )  # fmt: skip


class PushPlayer(Player):
    """One process of a player."""

    def _carry_out(self, effect: Any) -> None:
        world: Any = self.world
        match effect:
            case Connect() | Disconnect():
                assert effect.name == name_of(ENDPOINT)
            case Send(message=message):
                route = b"\0%d" % self.number
                world.transfer(message, lambda copy: world.receiver.on_message(route, copy))
            case ReportBadMessage():
                raise AssertionError(effect)
            case _:
                super()._carry_out(effect)

    def on_message(self, message: Message) -> None:
        if not self.is_dead:
            self.posted.append(Received(name_of(ENDPOINT), message))


class ReceiverProcess:
    """A receiver that can be killed: the next one has forgotten everything."""

    def __init__(self, world: PushWorld, spec: TargetSpec) -> None:
        self._world: Final = world
        self._spec: Final = spec
        self.fault: Callable[[str, Task | Batch], Fault] = lambda _kind, _argument: None
        self._connections: Final = Connections(world.targets, self._fault, world.later)
        self.is_up = True
        self.starts = 1
        self.node = ReceiverNode(spec)
        #: Numbers of the tasks whose steps are under way.
        self.running: Final[set[tuple[int, int]]] = set()
        self.closed: Final[list[int]] = []

    def _fault(self, kind: str, argument: Task | Batch) -> Fault:
        return self.fault(kind, argument)

    def kill(self, for_ms: int = 500) -> None:
        self.is_up = False
        self.starts += 1
        self.running.clear()
        self._world.after(for_ms, self._start)

    def _start(self) -> None:
        self.is_up, self.node = True, ReceiverNode(self._spec)

    def on_message(self, route: bytes, message: Message) -> None:
        if self.is_up:
            self.step(Received(route, message))

    def step(self, event: Event) -> None:
        world = self._world
        for effect in self.node.step(event, world.now):
            match effect:
                case Send(dst=route, message=message):
                    player: Any = world.players[int(route[1:]) - 1]
                    world.transfer(message, player.on_message)
                case OpenTarget(worker=worker) | Deliver(worker=worker):
                    key = (self.starts, worker)
                    assert key not in self.running, "two steps of one worker"
                    self.running.add(key)
                    pause = world.random.randrange(1 + world.step_ms // 2, world.step_ms + 2)
                    world.after(pause, self._run_later(effect))
                case CloseTarget(worker=worker):
                    assert (self.starts, worker) not in self.running
                    self.closed.append(worker)
                case LogWarning():
                    pass
                case _:
                    raise AssertionError(effect)
        self.node.check()

    def _run_later(self, effect: OpenTarget | Deliver) -> Callable[[], None]:
        starts = self.starts

        def run() -> None:
            is_alive = starts == self.starts and self.is_up
            if not is_alive and self._world.random.random() < 0.5:
                return  # Killed before the effect; or after it, but without a reply.
            if isinstance(effect, OpenTarget):
                result: Any = self._connections.open(effect.task)
            else:
                result = self._connections.deliver(effect.batch)
            self._world.check()
            if is_alive:
                self.running.discard((starts, effect.worker))
                self.step(StepEnded(effect.worker, result))

        return run


class PushWorld(World):
    """A world with one receiver, which has all targets of its spec."""

    def __init__(
        self, target: Store | Sink, *, seed: int = 0, loss: float = 0.0, double: float = 0.0,
        delay_ms: int = 1, step_ms: int = 20, receiver: TargetSpec | None = None,
        player: TargetSpec | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__([target], [player or push_spec(target)], seed=seed, **settings)
        self.random: Final = random.Random(seed)
        self.loss, self.double, self.delay_ms, self.step_ms = loss, double, delay_ms, step_ms
        self.receiver: Final = ReceiverProcess(self, receiver or behind(target))
        #: Payloads by their positions, as far as a test keeps them.
        self.inserted: Final[dict[int, bytes]] = {}
        #: All messages that were sent.
        self.sent: Final[list[Message]] = []
        self._losses = 0

    def later(self, act: Callable[[], Any]) -> None:
        self.after(self.late_ms, act)

    def add_push_player(self) -> PushPlayer:
        player = PushPlayer(self, len(self.players) + 1, self.settings)
        self.players.append(player)
        return player

    def transfer(self, message: Message, to: Callable[[Message], None]) -> None:
        """Send a message over the channel."""
        self.sent.append(message)
        frame = encode(message)
        if self.random.random() < self.loss and self._losses < _MAX_LOSSES:
            self._losses += 1
            return
        self._losses = 0
        for _ in range(1 + (self.random.random() < self.double)):
            delay = self.random.randrange(1, self.delay_ms + 1)
            self.at(self.now + delay * NS_PER_MS, lambda: to(decode(frame)))
