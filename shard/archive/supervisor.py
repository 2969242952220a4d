"""Keeps a storage server's archive running: a thread of the server that mostly sleeps.

It starts the archive's process when there is a sealed segment, again after a pause when it has
died, and tells it what is stable. Rule: a server never waits for its archive; when the server ends,
however it ends, so does the archive, since its stdin does (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from ziplog.deploy.supervisor import environment, python

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.archive.shared_state import SharedState

#: How long an archive that died stays away, at first and at most; one that lived for so long had
#: a good start.
_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
#: How often it is looked whether a sealed segment is stable by now, at first and at least.
_LOOK_S: Final = 0.25
_MAX_LOOK_S: Final = 5.0
#: What an archive may take to end, and its keeper then.
_END_S: Final = 1.0
_STOP_S: Final = 3.0


class ArchiveFacts(NamedTuple):
    """What a server knows and its archive needs."""

    #: The cluster's number; 0: not known yet.
    cluster: int
    #: The last entry that is known to be stable.
    stable: int
    trim: int


class ArchiveSupervisor:
    """Starts, tells and ends one server's archive."""

    def __init__(
        self,
        arguments: list[str],
        state: SharedState,
        read_facts: Callable[[], ArchiveFacts],
        on_port: Callable[[int], object],
    ) -> None:
        """Make a keeper; `start` lets it begin.

        Args:
            arguments: of the archive's process.
            board: what it is told is written there.
            look: tells what the server knows; from another thread.
            on_port: gets the port when an archive listens, 0 when it is gone; likewise.

        """
        self._command = python("shard.archive", *arguments, "--shared-fd", str(state.fd))
        self._state, self._read_facts, self._on_port = state, read_facts, on_port
        #: The last entry of the newest sealed segment; 0: there is none.
        self._sealed = 0
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)

    def start(self) -> None:
        """Begin. Once."""
        self._thread.start()

    def on_sealed(self, last_fseq: int) -> None:
        """Take note that a segment is sealed, whose last entry is this. From any thread."""
        self._sealed = max(self._sealed, last_fseq)
        self._wake()

    def stop(self) -> None:
        """End the archive; it is not waited for long. Once, after `start`."""
        self._stopping.set()
        self._wake()
        self._thread.join(_STOP_S)

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
            except Exception:  # noqa: BLE001 - whatever it is, it is our error
                # The server is none the worse for it, and gets another archive.
                self._log.exception("the archive's keeper failed")
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - started
            pause_s = _PAUSE_S if lived_s > _MAX_PAUSE_S else min(2 * pause_s, _MAX_PAUSE_S)
            self._log.warning("the archive has ended", again_s=pause_s)
            until = time.monotonic() + pause_s
            while not self._stopping.is_set() and (left_s := until - time.monotonic()) > 0:
                self._sleep(left_s)

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait until somebody calls."""
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
            self._log.warning("no archive", error=str(error))
            return
        try:
            self._supervise(child)
        finally:
            self._on_port(0)
            _end(child)

    def _supervise(self, child: subprocess.Popen[bytes]) -> None:
        """Tell a child what is new until it ends, or the server stops."""
        assert child.stdin is not None
        assert child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        told = due = 0
        look_s, said = _LOOK_S, b""
        while not self._stopping.is_set():
            # One after the other: the newest is never stable while they are sealed fast.
            if due == told:
                due = self._sealed
            if told < due <= self._publish():
                told = due
                with suppress(OSError):
                    child.stdin.write(b"\n")
            is_all = told >= self._sealed
            look_s = _LOOK_S if is_all else min(2 * look_s, _MAX_LOOK_S)
            output = child.stdout.fileno()
            ready = _ready([self._wake_reader, output], None if is_all else look_s)
            if self._wake_reader in ready:
                self._drain_wakeups()
                look_s = _LOOK_S
            if output in ready:
                part = child.stdout.read(64)
                if not part or not self._on_output(said := said + part):
                    return

    def _on_output(self, said: bytes) -> bool:
        """Take what a child said so far; False: it is not its port."""
        line, end, rest = said.partition(b"\n")
        if rest or len(line) > 5 or not line.isdigit():
            self._log.warning("no archive", said=repr(said))
            return False
        if end:
            self._on_port(int(line))
        return True

    def _publish(self) -> int:
        """Put what the server knows on the board; return what the archive can do with it.

        That is the last entry that is known to be stable, 0 if the cluster is not known yet.
        """
        known = self._read_facts()
        state = self._state
        state.cluster, state.stable, state.trim = known
        return known.stable if known.cluster else 0


def _ready(files: list[int], timeout_s: float | None) -> set[int]:
    """Wait until one of them has something to read, or has ended; return which."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, which ends by itself when its stdin does."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
    child.stdout.close()
