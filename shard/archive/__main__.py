"""The archive: `python -m shard.archive`, which a storage server starts and ends.

It is two processes: one that serves blocks, as promptly as the server, and its child, which makes
rows with the lowest priority, and slowly while records come, unless somebody asks for what is not
there yet. A line on stdin means that there may be something to do, and is passed on; the first line
on stdout is the port; what the server knows is on a board that all share.
Rule: neither half outlives the other, nor the server: what each reads ends with who writes it, and
what is half made is not waited for. Nothing here wakes up by itself, unless rows could not be
written (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from shard.archive.block_builder import BlockBuilder
from shard.archive.block_server import ArchiveServer
from shard.archive.shared_state import SharedState
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.process_logging import configure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard.archive.throttle import Throttle

#: After a failure to write, the disk is left alone for so long.
_RETRY_S: Final = 10.0
#: Of the half that makes rows.
_NICE: Final = 19
#: What it is told: there may be something to do; somebody waits for it.
_CHECK: Final = b"\n"
_EXPEDITE: Final = b"!"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an archive until the server that started it is gone."""
    parser = argparse.ArgumentParser(prog="python -m shard.archive", description="An archive.")
    parser.add_argument("--directory", type=Path, required=True, help="the server's segments")
    parser.add_argument("--node", required=True, help="the server's name")
    parser.add_argument("--host", required=True, help="where to listen")
    parser.add_argument("--shard", type=int, required=True, help="the server's shard")
    parser.add_argument("--shared-fd", type=int, required=True, help="a file descriptor")
    parser.add_argument("--reserve", type=int, default=0, help="bytes of space that are left alone")
    options = parser.parse_args(arguments)
    # Ctrl-C is meant for the server, which ends this process when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A server holds signals back while it starts, and this may have been started by then.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    configure(f"{options.node}-archive")
    raise_limit()
    state = SharedState(options.shared_fd)
    line, its = socket.socketpair()
    # Before there are threads: they would not come along.
    builder_pid = os.fork()
    if not builder_pid:
        line.close()
        _run_builder(BlockBuilder(options.directory, reserve_bytes=options.reserve), state, its)
    its.close()
    line.setblocking(False)
    try:
        server = ArchiveServer(
            options.directory,
            state,
            options.host,
            options.shard,
            lambda: _send_command(line, _EXPEDITE),
        )
        server.start()
        # At once, also where Python does not buffer: the server reads it as one line.
        os.write(sys.stdout.fileno(), b"%d\n" % server.port)
        code = _relay(line)
    finally:
        # Even one that stands still. What is half made is made again.
        os.kill(builder_pid, signal.SIGKILL)
        os.waitpid(builder_pid, 0)
    # Not a moment longer than the server.
    os._exit(code)


def _relay(line: socket.socket) -> int:
    """Pass on what the server says, until it is gone (0) or the half that makes rows is (1)."""
    stdin = sys.stdin.fileno()
    poll = select.poll()
    for file in (stdin, line.fileno()):
        poll.register(file, select.POLLIN)
    while True:
        ready = {file for file, _ in poll.poll()}
        if stdin in ready:
            if not os.read(stdin, 4096):
                return 0
            _send_command(line, _CHECK)
        # Nothing but its end is ever heard of it.
        if line.fileno() in ready:
            structlog.get_logger().warning("who makes rows has ended")
            return 1


def _send_command(line: socket.socket, word: bytes) -> None:
    """Tell the half that makes rows; one that does not take it was told often enough."""
    with suppress(OSError):
        line.send(word)


def _run_builder(builder: BlockBuilder, state: SharedState, line: socket.socket) -> NoReturn:
    """Be the half that makes rows, as long as the other one lives."""
    try:
        # The end of stdout tells the server that the other half is gone.
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in (sys.stdin, sys.stdout):
            os.dup2(nothing, file.fileno())
        with suppress(OSError):
            os.nice(_NICE)
        called = threading.Event()
        threading.Thread(
            target=_build_loop, args=(builder, state, called), name="rows", daemon=True
        ).start()
        _receive_commands(line, builder.throttle, called)
    except Exception:  # noqa: BLE001 - as in `_build_loop`
        structlog.get_logger().exception("the archive failed")
    os._exit(1)


def _receive_commands(line: socket.socket, throttle: Throttle, called: threading.Event) -> None:
    """Take what the other half says, as long as it lives."""
    while words := line.recv(4096):
        if _EXPEDITE in words:
            throttle.expedite()
        if _CHECK in words:
            called.set()


def _build_loop(builder: BlockBuilder, state: SharedState, called: threading.Event) -> None:
    """Make rows whenever there may be something to do."""
    is_done = True
    while True:
        called.wait(None if is_done else _RETRY_S)
        called.clear()
        try:
            builder.build(lambda: state.stable)
            is_done = True
        except OSError as error:
            if is_done:
                structlog.get_logger().warning("no rows for now", error=str(error))
            is_done = False
        except Exception:  # noqa: BLE001 - our error, whatever it is: another one is started
            structlog.get_logger().exception("the archive failed")
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
