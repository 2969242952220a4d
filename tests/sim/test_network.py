"""A frame's delay or loss: by the script, else by the network's conditions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulator.kernel import US, Kernel, S
from tests.simulator.network import LOST, Conditions, Network, SimTransport


def test_all_else_goes_on_while_an_action_stands_still() -> None:
    kernel, done = Kernel(1), list[tuple[str, int]]()
    began = kernel.now

    def stand_still() -> None:
        kernel.run(10 * US)
        done.append(("late", kernel.now - began))

    kernel.after(1 * US, stand_still)
    kernel.after(5 * US, lambda: done.append(("other", kernel.now - began)))
    kernel.run(8 * US)
    assert done == [("other", 5 * US), ("late", 11 * US)]
    assert kernel.now - began == 11 * US


@pytest.mark.parametrize(
    ("fate", "arrives_at"),
    [(0, [0]), (7 * US, [7 * US]), (LOST, []), (None, [50 * US])],
)
def test_a_frames_fate_is_what_the_script_says(fate: int | None, arrives_at: list[int]) -> None:
    """The conditions apply only without a script's decision; a cut link stays cut."""
    kernel = Kernel(1)
    network = Network(kernel, Conditions(delay_ns=(50 * US, 50 * US)))
    asked: list[tuple[str, str, bytes]] = []
    arrived: list[int] = []
    began = kernel.now

    def decide(src: str, dst: str, frame: bytes) -> int | None:
        asked.append((src, dst, frame))
        return fate

    network.on_carry = decide
    network.carry("a", "b", b"frame", lambda: arrived.append(kernel.now - began))
    network.cut("a", "c")
    network.carry("a", "c", b"frame", lambda: arrived.append(-1))
    kernel.run(1 * S)
    assert arrived == arrives_at
    assert asked == [("a", "b", b"frame")]


def transport(network: Network, name: str, endpoint: str | None = None) -> SimTransport:
    process: Any = SimpleNamespace(name=name, endpoint=endpoint, spent_ns=0, wake=lambda: None)
    return SimTransport(network, process)


@pytest.mark.parametrize("queues", [False, True])
def test_a_restarted_process_may_receive_what_was_sent_while_it_was_dead(*, queues: bool) -> None:
    kernel = Kernel(1)
    network = Network(kernel)
    network.queues = queues
    client, ended = transport(network, "client"), transport(network, "ended")
    for sender in (client, ended):
        sender.connect(b"server", "a:1")
        sender.send(b"server", sender.owner.encode())
    ended.close()
    kernel.run(1 * S)
    server = transport(network, "server", "a:1")
    kernel.run(1 * S)
    received = server.receive()
    assert (received is not None and received[1] == b"client") == queues
    assert client.dropped == (not queues)
    assert server.receive() is None
