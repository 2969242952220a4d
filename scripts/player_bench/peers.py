"""From publish to callback: push targets, beside other systems, and beside a second log.

`beside_systems`: 20 consumers in processes of their own, 1 KB, 50 records a second. NATS JetStream:
a stream with three replicas, durable push consumers, an ack for each message. Redis: a stream with
one replica, a group for each consumer, `XREADGROUP BLOCK`, `XACK`. `second_log`: ten targets of a
player on a mirror of the log, beside ten on the log itself, 10 KB, 100 records a second.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from log_bench.other_systems import Nats, Redis
from metrics.rounds import ratio
from metrics.setup import cluster as new_cluster
from metrics.workers import FORK_SERVER, Workers

import ziplog
from player_bench import receivers
from player_bench.receivers import PushTargets, paced
from player_bench.records import Applied, delays_ms, head, payload
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from log_bench.other_systems import Peer

    from ziplog.local import Cluster
    from ziplog.types import RecordId

Figures = dict[str, Any]

_CONSUMERS: Final = 20
#: Time limit of a call of JetStream; twenty consumers are created at the same time.
_CALL_S: Final = 60
#: Of a read at Redis; below the time limit of its client.
_BLOCK_MS: Final = 1000
_PER_S: Final = 50
_SECONDS: Final = 4.0
_ROUNDS: Final = 3
_SECOND_TARGETS: Final = 10
_SECOND_PER_S: Final = 100
_SECOND_KEYS: Final = 10
_SECOND_ROUNDS: Final = 2
_SECOND_GOAL: Final = 2.0
_NATS_GOAL: Final = 1.0


def _turns(actions: dict[str, Callable[[int, int], list[int]]], count: int, rounds: int) -> Figures:
    """Run all actions in turns; the first turn does not count."""
    found: dict[str, list[list[int]]] = {name: [] for name in actions}
    number = 0
    for turn in range(rounds + 1):
        for name, act in actions.items():
            taken = act(number, count)
            if turn:
                found[name].append(taken)
        number += count
    medians = {name: [delays_ms(values) for values in per_turn] for name, per_turn in found.items()}
    ours = next(iter(medians.values()))
    return {
        name: delays_ms(value for values in found[name] for value in values)
        | {
            f"{key}_over_{next(iter(actions))}": ratio(
                [one[f"{key}_ms"] for one in theirs], [one[f"{key}_ms"] for one in ours]
            )
            for key in ("mean", "p50", "p99")
        }
        for name, theirs in medians.items()
    }


# --- other systems -----------------------------------------------------------------------------


def beside_systems(scale: float) -> Figures:
    """Return the time from publish to callback of Ziplog, NATS JetStream and Redis."""
    count = max(50, int(_PER_S * _SECONDS * scale))
    with ExitStack() as stack:
        cluster = stack.enter_context(new_cluster())
        targets = stack.enter_context(PushTargets(cluster, "peers", _CONSUMERS, is_split=False))

        def ours(first: int, size: int) -> list[int]:
            _, noted = targets.take(receivers.insert(cluster, first, size, 1, _PER_S))
            return [one.at - one.inserted_at for target in noted for one in target]

        actions: dict[str, Callable[[int, int], list[int]]] = {"ziplog": ours}
        for name, system, consume in (("nats", Nats, _of_nats), ("redis", Redis, _of_redis)):
            if system.is_installed():
                peer = stack.enter_context(system())
                arguments = [(peer.port, number) for number in range(_CONSUMERS)]
                consumers = stack.enter_context(Workers(consume, arguments, FORK_SERVER))
                consumers.receive()
                actions[name] = _peer_turn(peer, consumers)
        found = _turns(actions, count, _ROUNDS)
    return {"L5": {**found, "goal_p50_of_nats": _NATS_GOAL}}


def _peer_turn(peer: Peer, consumers: Workers) -> Callable[[int, int], list[int]]:
    def turn(first: int, count: int) -> list[int]:
        for number in paced(first, count, _PER_S):
            peer.insert(payload(number, 1, now_ns()))
        consumers.send(count)
        return [one.at - one.inserted_at for noted in consumers.receive() for one in noted]

    return turn


def _of_nats(port: int, number: int, pipe: Connection) -> None:
    """Consume; at each message with a count, send what was noted once it is so much."""
    asyncio.run(_consume_nats(port, number, pipe))


async def _consume_nats(port: int, number: int, pipe: Connection) -> None:
    import nats  # noqa: PLC0415 - an optional peer

    noted: list[Applied] = []

    async def on_message(message: Any) -> None:
        noted.append(Applied(*head(message.data), now_ns()))
        await message.ack()

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = client.jetstream(timeout=_CALL_S)
    await stream.subscribe("log", durable=f"c{number}", cb=on_message, manual_ack=True)
    _serve_noted(noted, pipe)
    await asyncio.Event().wait()


def _serve_noted(noted: list[Applied], pipe: Connection) -> None:
    """Send what was noted, in a thread that does not keep a failed consumer's process alive."""

    def serve() -> None:
        while True:
            count = pipe.recv()
            while len(noted) < count:
                time.sleep(0.05)
            pipe.send(noted[:])
            noted.clear()

    pipe.send("ready")
    threading.Thread(target=serve, daemon=True).start()


def _of_redis(port: int, number: int, pipe: Connection) -> None:
    """Consume, as `_of_nats` does."""
    asyncio.run(_consume_redis(port, number, pipe))


async def _consume_redis(port: int, number: int, pipe: Connection) -> None:
    import redis.asyncio  # noqa: PLC0415 - an optional peer

    noted: list[Applied] = []
    group = f"g{number}"
    client = redis.asyncio.Redis(host="127.0.0.1", port=port)
    await client.xgroup_create("log", group, id="$", mkstream=True)

    _serve_noted(noted, pipe)
    while True:
        found = await client.xreadgroup(group, "c", {"log": ">"}, count=100, block=_BLOCK_MS)
        for _, messages in found:
            now = now_ns()
            noted.extend(Applied(*head(fields[b"p"]), now) for _, fields in messages)
            await client.xack("log", group, *(name for name, _ in messages))


# --- a second log ------------------------------------------------------------------------------


def second_log(scale: float) -> Figures:
    """Return the time from insert to target, directly and through a mirror."""
    count = max(50, int(_SECOND_PER_S * _SECONDS * scale))
    with ExitStack() as stack:
        direct, source, mirror = (stack.enter_context(new_cluster()) for _ in range(3))
        near = stack.enter_context(PushTargets(direct, "direct", _SECOND_TARGETS))
        far = stack.enter_context(PushTargets(mirror, "far", _SECOND_TARGETS))
        mirroring = Workers(_mirror, [(source.endpoint, mirror.endpoint)], FORK_SERVER)
        stack.enter_context(mirroring).receive()

        def through_one(first: int, size: int) -> list[int]:
            _, noted = near.take(_insert(direct, first, size))
            return [one.at - one.inserted_at for target in noted for one in target]

        def through_two(first: int, size: int) -> list[int]:
            mirroring.send(_insert(source, first, size))
            mirroring.receive()
            with mirror.connect() as log:
                last = log.check_tail()
            _, noted = far.take(last)
            return [one.at - one.inserted_at for target in noted for one in target]

        found = _turns({"direct": through_one, "mirror": through_two}, count, _SECOND_ROUNDS)
    return {"L4": {**found, "goal_over_direct": _SECOND_GOAL}}


def _insert(cluster: Cluster, first: int, count: int) -> RecordId:
    return receivers.insert(cluster, first, count, _SECOND_KEYS, _SECOND_PER_S, _SECOND_TARGETS)


def _mirror(source: str, mirror: str, pipe: Connection) -> None:
    """Run a player that mirrors; at each message with a rid, wait for it and reply."""
    from logplayer import Player, targets  # noqa: PLC0415 - in the worker

    spec = targets.log("mirror", mirror)
    with Player(source, "mirror", [spec], start=ziplog.RID_RECENT, hold_s=0) as player:
        pipe.send("ready")
        while True:
            player.wait_until(pipe.recv(), timeout=120)
            pipe.send("done")
