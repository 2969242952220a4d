"""Supervisor of a storage server's archive: a thread of the server that mostly sleeps.

It starts the archive's process when a sealed segment exists, restarts it after a pause when it
ended, and publishes the last stable entry. Rule: a server never waits for its archive; when the
server ends in any way, the archive's stdin closes and the archive ends (docs/protocol.md,
section 14.2).
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog import event_log
from ziplog.runtime.child_processes import environment, python

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.archive.shared_state import SharedState

#: First and maximum pause before a restart. An archive that ran for the maximum resets the pause.
_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
#: First and maximum interval between checks whether a sealed segment is stable.
_CHECK_S: Final = 0.25
_MAX_CHECK_S: Final = 5.0
#: Timeouts for the end of the archive, and of the supervisor.
_END_TIMEOUT_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 3.0


class ArchiveFacts(NamedTuple):
    """The server's facts that its archive needs."""

    #: The cluster's number; 0 if unknown.
    cluster: int
    #: The last entry that is known to be stable.
    stable: int
    trim: int


class ArchiveSupervisor:
    """Starts, notifies and stops one server's archive."""

    def __init__(
        self,
        arguments: list[str],
        state: SharedState,
        read_facts: Callable[[], ArchiveFacts],
        on_port: Callable[[int], object],
    ) -> None:
        """Create a supervisor; `start` runs it.

        Args:
            arguments: of the archive's process.
            state: the memory shared with the archive.
            read_facts: returns the server's facts; called on the supervisor's thread.
            on_port: receives the archive's port, 0 when it has ended; called on the same thread.

        """
        self._command = python("shard.archive", *arguments, "--shared-fd", str(state.fd))
        self._state, self._read_facts, self._on_port = state, read_facts, on_port
        #: The last entry of the newest sealed segment; 0: there is none.
        self._sealed = 0
        #: The archive is to be notified: a sealed segment is stable, or has lost its block file.
        self._has_work = False
        self._stopping = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def on_sealed(self, last_fseq: int) -> None:
        """Record a sealed segment by its last entry. Thread-safe."""
        self._sealed = max(self._sealed, last_fseq)
        self._wake()

    def on_repaired(self) -> None:
        """Record that a repair deleted the block file of its segment. Thread-safe."""
        self._has_work = True
        self._wake()

    def stop(self) -> None:
        """Stop the archive, with a short timeout. Call once, after `start`."""
        self._stopping.set()
        self._wake()
        self._thread.join(_STOP_TIMEOUT_S)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"!")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not self._stopping.is_set():
            if not self._sealed:
                self._sleep(None)
                continue
            started = time.monotonic()
            try:
                self._run_once()
            except Exception:  # noqa: BLE001 - a bug must not end the thread
                # The server is unaffected, and starts another archive.
                event_log.exception("the archive's supervisor failed")
            if self._stopping.is_set():
                return
            if time.monotonic() - started > _MAX_PAUSE_S:
                pause_s = _PAUSE_S
            event_log.warning("the archive has ended and is restarted", pause_s=pause_s)
            until = time.monotonic() + pause_s
            while not self._stopping.is_set() and (left_s := until - time.monotonic()) > 0:
                self._sleep(left_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait until another thread wakes this one."""
        _ready([self._wake_reader], timeout_s)
        self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)

    def _run_once(self) -> None:
        """Run an archive until it ends, or the server stops."""
        try:
            child = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment(),
                pass_fds=[self._state.fd],
            )
        except OSError as error:
            event_log.warning("the archive cannot be started", error=str(error))
            return
        try:
            self._supervise(child)
        finally:
            self._on_port(0)
            _end(child)

    def _supervise(self, child: subprocess.Popen[bytes]) -> None:
        """Notify a child of stable segments until it ends, or the server stops."""
        assert child.stdin is not None
        assert child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        notified = due = 0
        check_s, output = _CHECK_S, b""
        while not self._stopping.is_set():
            # One after the other: while segments are sealed fast, the newest is never stable.
            if due == notified:
                due = self._sealed
            if notified < due <= self._publish():
                notified = due
                self._has_work = True
            if self._has_work:
                self._has_work = False
                with suppress(OSError):
                    child.stdin.write(b"\n")
            is_done = notified >= self._sealed
            stdout = child.stdout.fileno()
            ready = _ready([self._wake_reader, stdout], None if is_done else check_s)
            check_s = min(2 * check_s, _MAX_CHECK_S)
            if self._wake_reader in ready:
                self._drain_wakeups()
                check_s = _CHECK_S
            if stdout in ready:
                part = child.stdout.read(64)
                if not part or not self._on_output(output := output + part):
                    return

    def _on_output(self, output: bytes) -> bool:
        """Handle a child's output so far; False: it is no port."""
        line, end, rest = output.partition(b"\n")
        if rest or len(line) > 5 or not line.isdigit():
            event_log.warning("the archive did not report a port", output=repr(output))
            return False
        if end:
            self._on_port(int(line))
        return True

    def _publish(self) -> int:
        """Publish the server's facts to the archive; return the last stable entry.

        0 if the cluster is unknown: the archive cannot serve yet.
        """
        facts = self._read_facts()
        state = self._state
        state.cluster, state.stable, state.trim = facts
        return facts.stable if facts.cluster else 0


def _ready(files: list[int], timeout_s: float | None) -> set[int]:
    """Wait until some files are readable or closed; return them."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close a child's stdin, and wait for its end; kill it after the timeout."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_TIMEOUT_S)
    child.stdout.close()
