"""A process's file descriptors: how many it may have, and how some of them stay free.

A server needs descriptors of its own while it runs: for the next segment, for a file that is read,
for a connection to another server. Clients take one each, so their number alone must not use up the
limit. Rule: `Reserve` names the connections to close so that some descriptors stay free: those that
never even greeted first, then those that were silent for longest. A peer may connect again, but
for a second the port does not answer, so that the process does not spend its time on callers that
it has no descriptor for. (docs/protocol.md, section 4: rules of every server.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    import threading

#: More is of no use, and some systems allow a thousand times that.
_MAX_USEFUL: Final = 1_048_576
#: With less, a server warns when it starts.
_MIN_COMFORTABLE: Final = 1024
#: Of a limit, this part stays free, but no more than so many.
_FREE_PART: Final = 8
_MAX_FREE: Final = 64
#: What brought less has not greeted as a peer of the log does.
_GREETING_BYTES: Final = 64
#: How long a port does not answer after connections were closed for want of descriptors.
_PAUSE_NS: Final = 1_000_000_000
#: From <asm-generic/socket.h>, and the one instruction of a filter that drops every packet.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_DROP: Final = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
#: From one warning to the next.
_WARNING_NS: Final = 60_000_000_000
ADVICE: Final = "raise the hard limit of open files (ulimit -Hn), or close idle clients"


def _log() -> Any:
    import structlog  # noqa: PLC0415 - it loads asyncio, and clients that block need neither

    return structlog.get_logger()


def raise_limit() -> int:
    """Let this process have as many descriptors as the system allows; return how many.

    Logs a warning if these are few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_USEFUL if hard == resource.RLIM_INFINITY else min(hard, _MAX_USEFUL)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = descriptor_limit()
    if limit < _MIN_COMFORTABLE:
        _log().warning("this process may open few files", limit=limit, advice=ADVICE)
    return limit


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_USEFUL if soft == resource.RLIM_INFINITY else soft


def require(count: int, what: str) -> None:
    """Make sure that this process gets so many descriptors now.

    libzmq ends the process where it lacks one in the middle of its own start.

    Raises:
        UnavailableError: the system does not give them.

    """
    taken: list[int] = []
    try:
        taken.extend(os.dup(2) for _ in range(count))
    except OSError as error:
        raise shortage_error(what, error) from error
    finally:
        for fd in taken:
            os.close(fd)


def start_thread(thread: threading.Thread, what: str) -> threading.Thread:
    """Start a thread and return it.

    Raises:
        UnavailableError: the system has no thread for this process now.

    """
    try:
        thread.start()
    except RuntimeError as error:
        raise UnavailableError(
            f"{what}: the system refuses a thread ({error}). End threads or processes of this user,"
            " or raise their limit (ulimit -u), and try again"
        ) from error
    return thread


def shortage_error(what: str, error: OSError) -> UnavailableError:
    """Return the error of something that the system refused a descriptor, memory or thread."""
    return UnavailableError(
        f"{what}: the system refuses it ({error.strerror or error}). Close connections or files of"
        " this process, or raise its limit of open files (ulimit -n), and try again"
    )


class Reserve:
    """Keeps some descriptors of a process that listens free. For one thread."""

    #: Connections that were named so far.
    shed: int

    def __init__(self) -> None:
        """Begin."""
        self.shed = 0
        #: Loaded now: without a descriptor, no module can be.
        self._log: Final = _log()
        self._number = 0
        self._warn_at = 0
        #: Of each connection: the bytes that it had brought, and the look at which they grew.
        self._activity: dict[int, tuple[int, int]] = {}
        self._connections: list[tuple[int, int, int]] = []

    def observe(self, fd: int, cookie: int, received: int) -> None:
        """Note a connection to the port, and how many bytes it has brought so far."""
        before, number = self._activity.get(cookie, (-1, 0))
        if received != before:
            number = self._number
            self._activity[cookie] = received, number
        self._connections.append((number if received >= _GREETING_BYTES else -1, fd, cookie))

    def choose(self, used: int, now: int) -> list[int]:
        """Return those of the connections looked at to close so that enough descriptors are free.

        Args:
            used: how many descriptors the process has.
            now: monotonic nanoseconds.

        """
        self._number += 1
        connections, self._connections = self._connections, []
        if len(self._activity) > len(connections):
            self._activity = {cookie: self._activity[cookie] for _, _, cookie in connections}
        limit = descriptor_limit()
        excess = used - (limit - min(limit // _FREE_PART, _MAX_FREE))
        if excess <= 0:
            return []
        chosen = [fd for _, fd, _ in sorted(connections)[:excess]]
        self.shed += len(chosen)
        if now >= self._warn_at:
            self._warn_at = now + _WARNING_NS
            self._log.warning(
                "too many connections: those that are idle are closed",
                open_files=used,
                limit=limit,
                closed_so_far=self.shed,
                advice=ADVICE,
            )
        return chosen


class AcceptPause:
    """A listening socket that answers no callers for a while. For one thread.

    The kernel drops their packets, so they call again after a second or more. A caller that waits
    in the queue instead, while the process lacks a descriptor for it, keeps libzmq's thread busy.
    """

    def __init__(self) -> None:
        """Begin with an open door."""
        self._ends_at: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether callers get no answer now."""
        return self._ends_at is not None

    def start(self, listening: socket.socket, now: int) -> None:
        """Answer no callers for a second from now on."""
        if self._ends_at is None:
            program = struct.pack("HP", 1, ctypes.addressof(_DROP))
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self._ends_at = now + _PAUSE_NS

    def end_if_due(self, listening: socket.socket, now: int) -> None:
        """Answer callers again, if the second is over."""
        if self._ends_at is not None and now >= self._ends_at:
            listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._ends_at = None
