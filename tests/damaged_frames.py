"""Frames that processes sent, and what damage makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from tests.sim.script import Client, Reader, stage
from tests.simulator.kernel import S
from ziplog import wire

if TYPE_CHECKING:
    import random


def recorded(number: int) -> list[bytes]:
    """Return what the processes of a simulated cluster send each other, for this cluster.

    One client inserts and reads, another one follows the log.
    """
    with stage(mms=3, epoch_ms=10) as s:
        alice = Client(s, "alice")
        reader = Reader(s, "reader", 0)
        call = alice.wait(alice.insert(b"a", b"b", b"c"))
        alice.read(call.gsns[0])
        alice.wait(alice.insert(b"d", after=call.gsns[-1]))
        reader.until(4)
        s.settle()
        s.run(3 * S)
        messages = [sent.message for sent in s.sent]
    return list(dict.fromkeys(wire.encode(structs.replace(m, cluster=number)) for m in messages))


def damaged(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Return some of the frames: cut, flipped, repeated and in another order."""
    chosen = chance.sample(frames, 20)
    for index, frame in enumerate(tuple(chosen)):
        match chance.randrange(4):
            case 0:
                chosen[index] = frame[: chance.randrange(len(frame))]
            case 1:
                changed = bytearray(frame)
                for _ in range(chance.randint(1, 4)):
                    changed[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
                chosen[index] = bytes(changed)
            case 2:
                chosen += [frame] * chance.randint(1, 50)
    chance.shuffle(chosen)
    return chosen
