"""The two processes of an archive: a block server and a builder; neither runs alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from shard.archive import __main__ as main_module
from shard.archive.shared_state import SharedState
from tests.unit.shard.archive.logs import fill, log, make, open_store
from tests.unit.shard.archive.processes import Process, is_running
from tests.waiting import wait_until
from ziplog.deploy.new_shard import free_ports
from ziplog.runtime.child_processes import environment, python
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def priority(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_only_the_builder_runs_at_the_lowest_priority(
    segments: Path, started: Callable[..., Process]
) -> None:
    serving, making = started(segments).halves()
    wait_until(lambda: priority(making) == 19, "the builder has the lowest priority")
    assert priority(serving) == priority(os.getpid())


def test_serving_goes_on_while_rows_are_not_made(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    store.close()
    process = started(segments)
    os.kill(process.halves()[1], signal.SIGSTOP)
    with process.client() as client:
        for _ in range(3):
            process.notify()
            assert isinstance(client.block(1), Block)


def test_a_process_that_does_not_read_commands_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, its = socket.socketpair()
    line.setblocking(False)
    with suppress(BlockingIOError):
        while line.send(b"\n" * 4096):
            pass
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, line, its:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(writing, b"\n")
        ended: list[int] = []
        thread = threading.Thread(
            target=lambda: ended.append(main_module._relay(line)), daemon=True
        )
        thread.start()
        os.close(writing)
        thread.join(20)
        assert ended == [0]


def test_both_end_with_the_server(segments: Path, started: Callable[..., Process]) -> None:
    process = started(segments)
    halves = process.halves()
    assert process.leave() == (0, "")
    # Immediately.
    assert [pid for pid in halves if is_running(pid)] == []


def test_the_end_of_the_server_during_the_start_is_no_failure(segments: Path) -> None:
    shared = SharedState()
    arguments = [
        *("--directory", str(segments), "--node", "shard-3-0", "--host", "127.0.0.1"),
        *("--shard", "3", "--shared-fd", str(shared.fd)),
    ]
    child = subprocess.Popen(
        python("shard.archive", *arguments),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), pass_fds=[shared.fd],
    )  # fmt: skip
    for file in (child.stdin, child.stdout):
        assert file is not None
        file.close()
    assert child.stderr is not None
    assert (child.stderr.read(), child.wait(60)) == (b"", 0)
    child.stderr.close()
    shared.close()


def test_a_paused_process_ends_with_the_server_too(
    segments: Path, started: Callable[..., Process]
) -> None:
    process = started(segments)
    _, making = process.halves()
    os.kill(making, signal.SIGSTOP)
    assert process.leave()[0] == 0
    assert not is_running(making)


def test_the_builder_ends_with_the_block_server(
    segments: Path, started: Callable[..., Process]
) -> None:
    process = started(segments)
    serving, making = process.halves()
    os.kill(serving, signal.SIGKILL)
    wait_until(lambda: not is_running(making), "it ends")


def test_the_block_server_ends_with_the_builder(
    segments: Path, started: Callable[..., Process]
) -> None:
    process = started(segments)
    os.kill(process.halves()[1], signal.SIGKILL)
    # The storage server sees it, and starts another archive.
    assert process.child.stdout is not None
    assert process.child.stdout.read() == b""
    assert process.child.wait(20) == 1
    assert process.child.stderr is not None
    assert b"the process that builds block files has ended" in process.child.stderr.read()


def test_the_end_of_the_block_server_is_seen_while_the_builder_is_paused(
    segments: Path, started: Callable[..., Process]
) -> None:
    process = started(segments)
    serving, making = process.halves()
    wait_until(lambda: priority(making) == 19, "it has closed the server's files")
    os.kill(making, signal.SIGSTOP)
    os.kill(serving, signal.SIGKILL)
    assert process.child.stdout is not None
    assert process.child.stdout.read() == b""
    os.kill(making, signal.SIGCONT)
    wait_until(lambda: not is_running(making), "it ends when it resumes")


def test_an_unavailable_port_leaves_no_process(
    segments: Path, started: Callable[..., Process]
) -> None:
    # An address for documentation.
    process = started(segments, host="192.0.2.1")
    # Both hold stderr, so its end means that both have ended.
    code, error = process.leave()
    assert code == 1
    assert "192.0.2.1" in error or "assign requested address" in error


def test_archive_listens_at_its_port_or_ends(
    segments: Path, started: Callable[..., Process]
) -> None:
    (port,) = free_ports(1, "127.0.0.1")
    assert started(segments, port=port).port == port
    other = started(segments, port=port)
    assert other.port == 0, "the port is in use"
    code, stderr = other.leave()
    assert code == 1
    assert f"127.0.0.1:{port}" in stderr
    assert "the archive cannot be started" in stderr
    assert "Traceback" not in stderr
