"""Frame counters: the number of frames of a process's transports, by kind of message.

As a program, `frames.py FOLDER MODULE ...` takes the place of `python -m MODULE ...`. On SIGUSR1 it
writes its counters since the start to a file in FOLDER with the name of its pid.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import logdb.wire
import ziplog.wire
from ziplog.core.message import Message
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

#: An array of up to 15 elements, or of more, and then the message's tag.
_HEAD: Final = re.compile(rb"(?:[\x90-\x9f]|\xdc..)\xcd(..)", re.DOTALL)
_NAMES: Final = {
    getattr(module, name).__struct_config__.tag: name
    for module in (ziplog.wire, logdb.wire)
    for name in dir(module)
    if isinstance(getattr(module, name), type) and issubclass(getattr(module, name), Message)
}


def kind(frame: bytes) -> str:
    """Return the name of a frame's message."""
    head = _HEAD.match(frame)
    return "unknown" if head is None else _NAMES.get(int.from_bytes(head[1], "big"), "unknown")


def count() -> Counter[str]:
    """Count the frames of all transports of this process from now on: "sent Insert"."""
    counts: Counter[str] = Counter()
    transport: Any = Transport
    send: Callable[..., bool] = transport.send
    receive: Callable[..., tuple[bytes, bytes] | None] = transport.receive

    def sent(self: Transport, dst: bytes, frame: bytes) -> bool:
        counts[f"sent {kind(frame)}"] += 1
        return send(self, dst, frame)

    def received(self: Transport) -> tuple[bytes, bytes] | None:
        found = receive(self)
        if found is not None:
            counts[f"received {kind(found[1])}"] += 1
        return found

    def waited(self: Transport, timeout_ns: int | None) -> tuple[bytes, bytes] | None:
        self.wait(timeout_ns)
        return self.receive()

    transport.send, transport.receive, transport.wait_and_receive = sent, received, waited
    return counts


def main() -> None:
    """Run the module that the arguments name."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    counts = count()
    path = folder / str(os.getpid())

    def write(*_: object) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(counts))
        new.replace(path)

    signal.signal(signal.SIGUSR1, write)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
