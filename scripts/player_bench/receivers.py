"""Receivers in processes of their own, a player that pushes to them, and the floor of both.

A receiver's process also listens at a second port, for the floor: the same bytes from one loop,
over a plain TCP connection, with nothing else. All clocks are one, as all run on one machine.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from metrics.workers import FORK_SERVER, Workers

import ziplog
from logplayer import Opened, Player, Receiver, targets
from logplayer.ring import Ring
from player_bench.records import Applied, Part, head, part, payload
from ziplog.core.units import NS_PER_S
from ziplog.deploy.new_shard import free_ports
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from typing import Self

    from logplayer import Batch
    from ziplog.local import Cluster
    from ziplog.types import RecordId

_HOST: Final = "127.0.0.1"
_SIZE: Final = struct.Struct(">I")
_LIMIT_S: Final = 120.0


def paced(first: int, count: int, per_s: float) -> Iterator[int]:
    """Yield numbers at a steady pace; one that is late comes at once."""
    due = now_ns()
    for number in range(first, first + count):
        time.sleep(max(due - now_ns(), 0) / NS_PER_S)
        yield number
        due += int(NS_PER_S / per_s)


# --- a receiver's process ----------------------------------------------------------------------


class _Noting:
    """A target that notes when it had each record."""

    def __init__(self, noted: list[Applied]) -> None:
        self._noted: Final = noted

    def open(self, _task: Any) -> Opened:
        """Store nothing."""
        return Opened()

    def deliver(self, batch: Batch) -> None:
        """Note the records."""
        now = now_ns()
        self._noted.extend(Applied(*head(record.payload), now) for record in batch.records)

    def close(self) -> None:
        """Close nothing."""


def _receive(name: str, port: int, floor_port: int, pipe: Connection) -> None:
    """Run a receiver; send what was noted, of pushes and of the floor, at each message."""
    pushed: list[Applied] = []
    plain: list[Applied] = []
    spec = targets.custom(name, lambda: _Noting(pushed), stores_position=False)
    with (
        Receiver(f"{_HOST}:{port}", spec),
        socket.create_server((_HOST, floor_port)) as listener,
    ):
        threading.Thread(target=_read, args=(listener, plain), daemon=True).start()
        pipe.send("ready")
        while True:
            pipe.recv()
            pipe.send((pushed[:], plain[:]))
            pushed.clear()
            plain.clear()


def _read(listener: socket.socket, noted: list[Applied]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            while size := stream.read(_SIZE.size):
                data = stream.read(_SIZE.unpack(size)[0])
                noted.append(Applied(*head(data), now_ns()))


# --- the player's process ----------------------------------------------------------------------


def _play(
    endpoint: str, name: str, addresses: list[str], options: dict[str, Any], pipe: Connection
) -> None:
    """Run a player; at each message with a rid, wait for it and send when records were there."""
    dispatched: dict[int, int] = {}
    append = Ring.append

    def noting(ring: Ring, records: Any, now: int) -> None:
        for record in records:
            dispatched.setdefault(head(record.payload)[0], now)
        append(ring, records, now)

    Ring.append = noting  # type: ignore[method-assign]
    is_split = options.pop("is_split")
    specs = [
        targets.push(
            f"target-{number}", address, stores_position=False, retry_last_ms=1000,
            map=Part(number) if is_split else None,
        )
        for number, address in enumerate(addresses)
    ]  # fmt: skip
    with Player(endpoint, name, specs, start=ziplog.RID_RECENT, hold_s=0, **options) as player:
        _wait_until_playing(player)
        pipe.send("ready")
        while True:
            player.wait_until(pipe.recv(), timeout=_LIMIT_S)
            pipe.send(dict(dispatched))
            dispatched.clear()


def _wait_until_playing(player: Player) -> None:
    end = time.monotonic() + _LIMIT_S
    while any(task["state"] not in {"playing", "delivering"} for task in player.status()["tasks"]):
        if time.monotonic() > end:
            raise TimeoutError("not all targets opened in two minutes")
        time.sleep(0.05)


# --- all of them -------------------------------------------------------------------------------


class PushTargets:
    """Receivers, and a player that pushes the records of a log to them; a context manager."""

    def __init__(
        self, cluster: Cluster, name: str, count: int, *, is_split: bool = True, **options: Any
    ) -> None:
        """Prepare; `options`: further ones of `Player`; `is_split`: keys belong to targets."""
        self._cluster, self._name, self.count = cluster, name, count
        self._options: Final = {"is_split": is_split, **options}
        ports = list(free_ports(2 * count, _HOST))
        self._ports: Final = list(zip(ports[:count], ports[count:], strict=True))
        self._receivers: Final[list[Workers]] = []
        self._stack: Final = ExitStack()
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack.push(stack.enter_context(ExitStack()))
            for number in range(self.count):
                self._receivers.append(stack.enter_context(self._receiver(number)))
            for receiver in self._receivers:
                receiver.receive()
            addresses = [f"{_HOST}:{port}" for port, _ in self._ports]
            arguments = (self._cluster.endpoint, self._name, addresses, self._options)
            self._player = stack.enter_context(Workers(_play, [arguments], FORK_SERVER))
            self._player.receive()
            self._connections = [
                stack.enter_context(socket.create_connection((_HOST, port)))
                for _, port in self._ports
            ]
            for connection in self._connections:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _receiver(self, number: int) -> Workers:
        arguments = (f"target-{number}", *self._ports[number])
        return Workers(_receive, [arguments], FORK_SERVER)

    def kill(self, number: int) -> None:
        """Kill a receiver."""
        self._receivers[number].__exit__(None, None, None)

    def restart(self, number: int) -> None:
        """Start a receiver that was killed; the floor has no connection to it."""
        receiver = self._receivers[number] = self._receiver(number)
        self._stack.enter_context(receiver)
        receiver.receive()

    def take(self, last: RecordId) -> tuple[dict[int, int], list[list[Applied]]]:
        """Wait for a record; return when the player had the records, and each target."""
        self._player.send(last)
        (dispatched,) = self._player.receive()
        return dispatched, [pushed for pushed, _ in self._noted()]

    def floor(self, first: int, count: int, keys: int, per_s: float) -> list[Applied]:
        """Send what the targets would get, in a loop; return what the receivers noted."""
        for number in paced(first, count, per_s):
            whole = payload(number, keys, now_ns(), self.count)
            for target, connection in enumerate(self._connections):
                data = part(whole, target)
                if data is not None:
                    connection.sendall(_SIZE.pack(len(data)) + data)
        time.sleep(0.2)
        return [one for _, plain in self._noted() for one in plain]

    def _noted(self) -> list[tuple[list[Applied], list[Applied]]]:
        for receiver in self._receivers:
            receiver.send("take")
        return [receiver.receive()[0] for receiver in self._receivers]


def insert(
    cluster: Cluster, first: int, count: int, keys: int, per_s: float, targets: int = 1
) -> RecordId:
    """Insert records for so many targets at a steady pace; return the last one's rid."""
    with cluster.connect(timeout=60.0) as log:
        rids = [
            log.insert_after(payload(number, keys, now_ns(), targets))
            for number in paced(first, count, per_s)
        ]
    return rids[-1]
