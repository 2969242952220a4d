"""Measure a path from inside a region: `probe.py serve`, `ping HOST COUNT`, `stream HOST MIB`."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from typing import Final

_PORT: Final = 7
_MIB: Final = 1024 * 1024
_TIMEOUT_S: Final = 2.0
_NS_PER_MS: Final = 1_000_000


def serve() -> None:
    """Echo datagrams, and swallow streams, until the input ends."""
    threading.Thread(target=_echo, daemon=True).start()
    threading.Thread(target=_swallow, daemon=True).start()
    sys.stdin.read()


def _echo() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", _PORT))
        while True:
            data, peer = server.recvfrom(2048)
            server.sendto(data, peer)


def _swallow() -> None:
    with socket.create_server(("", _PORT)) as server:
        while True:
            peer, _ = server.accept()
            with peer:
                while peer.recv(_MIB):
                    pass
                # The sender ends its measurement when the last byte has arrived.
                peer.sendall(b".")


def ping(host: str, count: int) -> list[float]:
    """Return the round trips of `count` datagrams, in ms; lost ones are left out."""
    found: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((host, _PORT))
        client.settimeout(_TIMEOUT_S)
        for number in range(count):
            started = time.monotonic_ns()
            client.send(number.to_bytes(8))
            with contextlib.suppress(TimeoutError):
                while client.recv(2048) != number.to_bytes(8):
                    pass
                found.append((time.monotonic_ns() - started) / _NS_PER_MS)
    return found


def stream(host: str, mib: int) -> float:
    """Return the MB/s of one TCP stream of `mib` MiB, its slow start included."""
    piece = bytes(_MIB)
    with socket.create_connection((host, _PORT)) as client:
        started = time.monotonic()
        for _ in range(mib):
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        client.recv(1)
        return mib * _MIB / 1e6 / (time.monotonic() - started)


def main() -> None:
    """Do what the arguments ask for, and print the result as JSON."""
    task, *arguments = sys.argv[1:]
    if task == "serve":
        serve()
    elif task == "ping":
        print(json.dumps(ping(arguments[0], int(arguments[1]))))
    else:
        print(json.dumps(stream(arguments[0], int(arguments[1]))))


if __name__ == "__main__":
    main()
