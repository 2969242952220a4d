"""Connections of simulated consensus nodes: order, completeness up to the end, reconnection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulator.kernel import MS, Kernel, S
from tests.simulator.network import Conditions, Network
from tests.simulator.streams import Streams, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

ENDPOINTS = {"a": "host:1", "b": "host:2"}
ROUGH = Conditions(delay_ns=(MS, 40 * MS), loss=0.1, stalls=0.1)


class Speaker:
    """A process with one peer; it numbers its messages on each connection."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.world = name, world
        self.spent_ns = 0
        self.is_paused = False
        own, *others = sorted(ENDPOINTS, key=lambda other: other != name)
        nodes = {one: SimpleNamespace(id=ENDPOINTS[one]) for one in (own, *others)}
        self.peer = nodes[others[0]]
        self.wire = Wire(world.streams, self, nodes[own], [self.peer])
        self.wire.setOnNodeConnectedCallback(self.on_connected)
        self.wire.setOnNodeDisconnectedCallback(self.on_disconnected)
        self.wire.setOnMessageReceivedCallback(self.on_message)
        self.is_connected = False
        self.connections = self.sent = 0
        #: By connection of the peer, with the peer's name of it: the received numbers.
        self.came: dict[str, list[int]] = {}
        world.streams.enter(self.wire)

    def now_ns(self) -> int:
        return self.world.kernel.now + self.spent_ns

    def spend(self, duration_ns: int) -> None:
        self.spent_ns += duration_ns

    def wake(self) -> None:
        self.world.kernel.after(0, self.read)

    def read(self) -> None:
        if not self.is_paused:
            self.wire.read()
            self.spent_ns = 0

    def on_connected(self, _node: Any) -> None:
        assert not self.is_connected
        self.is_connected = True
        self.connections += 1
        self.sent = 0

    def on_disconnected(self, _node: Any) -> None:
        assert self.is_connected
        self.is_connected = False

    def on_message(self, _node: Any, message: tuple[str, int]) -> None:
        assert self.is_connected
        self.came.setdefault(message[0], []).append(message[1])

    def say(self) -> bool:
        token = f"{self.world.lives[self.name]}.{self.connections}"
        was_sent = self.wire.send(self.peer, [token, self.sent])
        self.sent += 1
        self.spent_ns = 0
        return was_sent


class World:
    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(seed)
        self.chance = self.kernel.random
        self.network = Network(self.kernel)
        self.streams = Streams(self.network, {e: name for name, e in ENDPOINTS.items()})
        self.lives = dict.fromkeys(ENDPOINTS, 0)
        self.up = {name: Speaker(self, name) for name in ENDPOINTS}
        #: Messages received by former processes.
        self.past: list[dict[str, list[int]]] = []

    def restart(self, name: str, *, notifies: bool) -> None:
        self.up[name].wire.vanish(notifies=notifies)
        self.past.append(self.up[name].came)
        self.lives[name] += 1
        self.up[name] = Speaker(self, name)

    def mend(self) -> None:
        self.network.heal_all()
        for speaker in self.up.values():
            speaker.is_paused = False
            speaker.read()

    def say(self, count: int = 1, pause_ns: int = 10 * MS) -> None:
        for _ in range(count):
            for speaker in self.up.values():
                speaker.say()
            self.kernel.run(pause_ns)

    def wait(self, condition: Callable[[], object], within_ns: int = 10 * S) -> int:
        """Let both send until a condition holds; return the duration."""
        begin = self.kernel.now
        while not condition():
            assert self.kernel.now - begin < within_ns
            self.say()
        return self.kernel.now - begin

    def are_connected(self) -> bool:
        return all(speaker.is_connected for speaker in self.up.values())

    def check(self) -> int:
        """Check that the received messages are a prefix of the sent ones; return their number."""
        came = [*self.past, *(speaker.came for speaker in self.up.values())]
        for numbers in (numbers for one in came for numbers in one.values()):
            assert numbers == list(range(len(numbers)))
        return sum(len(numbers) for one in came for numbers in one.values())


@pytest.mark.parametrize("seed", range(5))
def test_what_arrives_is_the_beginning_of_what_was_sent_whatever_happens(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.say(20)
        one, other = world.chance.sample(sorted(ENDPOINTS), 2)
        match world.chance.randrange(9):
            case 0:
                world.network.conditions = world.chance.choice((ROUGH, Conditions()))
            case 1:
                world.network.cut(one, other)
            case 2:
                world.network.clog(one, other)
            case 3:
                world.streams.sever(one, other)
            case 4:
                world.restart(one, notifies=world.chance.random() < 0.5)
            case 5:
                world.up[one].is_paused = not world.up[one].is_paused
            case _:
                world.mend()
        world.check()
    world.mend()
    world.wait(world.are_connected)
    assert world.check() > 200
    assert world.streams.garbage == 0


def test_a_short_cut_only_delays() -> None:
    world = World(3)
    world.wait(world.are_connected)
    world.network.cut("a", "b")
    world.say(20)
    count = world.check()
    world.network.heal_all()
    world.kernel.run(S)
    assert all(speaker.connections == 1 for speaker in world.up.values())
    assert world.check() - count >= 20


def test_a_long_cut_breaks_the_connection_and_no_other_is_made_before_it_is_healed() -> None:
    world = World(4)
    world.wait(world.are_connected)
    world.network.cut("a", "b")
    world.wait(lambda: not any(speaker.is_connected for speaker in world.up.values()))
    world.say(1000)
    assert not world.up["a"].is_connected
    world.network.heal_all()
    assert world.wait(world.are_connected) < S


def test_a_process_that_ends_is_missed_at_once_and_its_machine_after_the_time_out() -> None:
    for notifies, least_ns, most_ns in ((True, 0, S), (False, 3 * S, 5 * S)):
        world = World(5)
        world.wait(world.are_connected)
        world.up["b"].wire.vanish(notifies=notifies)
        assert least_ns <= world.wait(lambda up=world.up["a"]: not up.is_connected) < most_ns


def test_a_restarted_process_resets_unknown_connections() -> None:
    for name in ENDPOINTS:
        world = World(6)
        world.wait(world.are_connected)
        other = next(speaker for one, speaker in world.up.items() if one != name)
        world.restart(name, notifies=False)
        assert world.wait(lambda other=other: other.connections == 2) < 2 * S
        world.wait(world.are_connected)


def test_a_process_after_a_long_pause_closes_its_connections() -> None:
    world = World(7)
    world.wait(world.are_connected)
    for pause_ns, connections in ((3 * S, 1), (4 * S, 2)):
        world.up["a"].is_paused = True
        for _ in range(pause_ns // (100 * MS)):
            world.up["b"].say()
            world.kernel.run(100 * MS)
        world.up["a"].is_paused = False
        world.up["a"].read()
        world.wait(world.are_connected)
        assert world.up["a"].connections == connections


def test_invalid_frames_are_dropped_and_counted() -> None:
    world = World(8)
    world.wait(world.are_connected)

    def refuse(_node: Any, _message: Any) -> None:
        raise ValueError("it is none")

    world.up["b"].wire.setOnMessageReceivedCallback(refuse)
    assert world.up["a"].say()
    world.kernel.run(S)
    assert world.streams.garbage == 1
    assert world.up["b"].is_connected


def test_other_callbacks_of_the_library_are_taken_and_never_called() -> None:
    wire = World(9).up["a"].wire
    wire.setOnReadonlyNodeConnectedCallback(None)
    wire.setOnUtilityMessageCallback("status", None)
    with pytest.raises(AttributeError):
        wire.setOnSomethingNew(None)
