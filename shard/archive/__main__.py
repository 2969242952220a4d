"""The archive process: `python -m shard.archive`; a storage server starts and stops it.

The archive consists of two processes. One serves blocks as promptly as the server. Its child
builds block files with the lowest priority, and slowly while records arrive, unless a reader waits.
A line on stdin means that a segment may be ready; it is relayed to the child. The first line on
stdout is the port. The server's facts are in shared memory. Rule: neither process outlives the
other, nor the server: each ends at the end of its input, and unfinished work is dropped. No timer
runs, unless a block file could not be written (docs/protocol.md, section 14.2).
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

from shard.archive.block_builder import BlockBuilder
from shard.archive.block_server import ArchiveServer
from shard.archive.shared_state import SharedState
from ziplog import event_log
from ziplog.config_tables import LogConfig
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.process_logging import configure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard.archive.throttle import Throttle

#: Pause after a failed write.
_RETRY_S: Final = 10.0
#: Niceness of the building process.
_NICE: Final = 19
#: Commands to the building process: a segment may be ready; a reader waits for blocks.
_CHECK: Final = b"\n"
_EXPEDITE: Final = b"!"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an archive until the server that started it is gone."""
    parser = argparse.ArgumentParser(prog="python -m shard.archive", description="An archive.")
    parser.add_argument("--directory", type=Path, required=True, help="the server's segments")
    parser.add_argument("--node", required=True, help="the server's name")
    parser.add_argument("--host", required=True, help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="its port; 0: any free one")
    parser.add_argument("--shard", type=int, required=True, help="the server's shard")
    parser.add_argument("--shared-fd", type=int, required=True, help="a file descriptor")
    parser.add_argument(
        "--reserve", type=int, default=0, help="bytes of disk space reserved for the server"
    )
    parser.add_argument("--log-level", default=LogConfig.level, help="as in the cluster file")
    parser.add_argument("--log-format", default=LogConfig.format, help="as in the cluster file")
    options = parser.parse_args(arguments)
    # Ctrl-C is meant for the server, which stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A starting server blocks signals, and this process may inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    log = LogConfig(level=options.log_level, format=options.log_format)
    configure(f"{options.node}-archive", log)
    raise_limit()
    state = SharedState(options.shared_fd)
    line, child_line = socket.socketpair()
    # Fork before any thread exists: threads are not forked.
    builder_pid = os.fork()
    if not builder_pid:
        line.close()
        _run_builder(
            BlockBuilder(options.directory, reserve_bytes=options.reserve), state, child_line
        )
    child_line.close()
    line.setblocking(False)
    try:
        code = _serve(options, state, line)
    finally:
        # SIGKILL works on a hung child, too. Unfinished work is repeated.
        os.kill(builder_pid, signal.SIGKILL)
        os.waitpid(builder_pid, 0)
    # End immediately, with the server.
    os._exit(code)


def _serve(options: argparse.Namespace, state: SharedState, line: socket.socket) -> int:
    """Serve blocks until the server or the child has ended; return the exit code."""
    try:
        server = ArchiveServer(
            options.directory,
            state,
            options.host,
            options.shard,
            lambda: _send_command(line, _EXPEDITE),
            options.port,
        )
    except OSError as error:
        where = f"{options.host}:{options.port}"
        event_log.warning("the archive cannot be started", error=f"{where}: {error}")
        return 1
    server.start()
    # One write, without Python's buffer: the server reads it as one line. If the server is gone
    # already, stdin has ended, too.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"%d\n" % server.port)
    return _relay(line)


def _relay(line: socket.socket) -> int:
    """Relay the server's notifications until the server (0) or the child (1) has ended."""
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
        # The child sends nothing: readable means that it has ended.
        if line.fileno() in ready:
            event_log.warning("the process that builds block files has ended")
            return 1


def _send_command(line: socket.socket, command: bytes) -> None:
    """Send a command to the child; a full pipe means that enough commands wait already."""
    with suppress(OSError):
        line.send(command)


def _run_builder(builder: BlockBuilder, state: SharedState, line: socket.socket) -> NoReturn:
    """Run the building process until the serving one ends."""
    try:
        # The end of stdout signals the end of the serving process to the server.
        devnull = os.open(os.devnull, os.O_RDWR)
        for file in (sys.stdin, sys.stdout):
            os.dup2(devnull, file.fileno())
        with suppress(OSError):
            os.nice(_NICE)
        called = threading.Event()
        threading.Thread(
            target=_build_loop, args=(builder, state, called), name="block-files", daemon=True
        ).start()
        _receive_commands(line, builder.throttle, called)
    except Exception:  # noqa: BLE001 - as in `_build_loop`
        event_log.exception("the archive failed")
    os._exit(1)


def _receive_commands(line: socket.socket, throttle: Throttle, called: threading.Event) -> None:
    """Receive commands until the serving process ends."""
    while commands := line.recv(4096):
        if _EXPEDITE in commands:
            throttle.expedite()
        if _CHECK in commands:
            called.set()


def _build_loop(builder: BlockBuilder, state: SharedState, called: threading.Event) -> None:
    """Build block files whenever a segment may be ready."""
    is_done = True
    while True:
        called.wait(None if is_done else _RETRY_S)
        called.clear()
        try:
            builder.build(lambda: state.stable, lambda fseq: setattr(state, "archive_next", fseq))
            is_done = True
        except OSError as error:
            if is_done:
                event_log.warning("block files cannot be written now", error=str(error))
            is_done = False
        except Exception:  # noqa: BLE001 - a bug ends the archive; the server restarts it
            event_log.exception("the archive failed")
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
