"""File descriptors of a process: raises the limit, and keeps a reserve free.

A running server needs descriptors: for the next segment, for a file that it reads, for a connection
to another server. Each client uses one, so many clients must not use up the limit. `Reserve`
selects the connections to close: first those without a greeting, then those with the longest
silence. A closed peer may connect again, but the port does not answer clients for a second
(`AcceptPause`), so that the process spends no time on connections that it has no descriptor for.
(docs/protocol.md, section 4: rules of every server.)
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import resource
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from ziplog import event_log
from ziplog.core.units import NS_PER_S
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.runtime.connection import Connection

#: Upper bound of the limit that this process requests; some systems allow 1,000 times as many.
_MAX_USEFUL: Final = 1_048_576
#: A server with a lower limit logs a warning at its start.
_MIN_COMFORTABLE: Final = 1024
#: The reserve: an eighth of the limit stays free, but at most `_MAX_FREE` descriptors.
_FREE_PART: Final = 8
_MAX_FREE: Final = 64
#: Time for which the port does not answer after connections were closed for lack of descriptors.
_PAUSE_NS: Final = NS_PER_S
#: IP type of service of the connections that nodes open: low-latency data (AF21, RFC 4594).
NODE_TOS: Final = 0x48
#: From <asm-generic/socket.h>.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
#: A classic BPF program (code, jump if true, jump if false, operand) that keeps packets of nodes.
_NODES_ONLY: Final = (
    (0x30, 0, 0, 0xFFF0_0001),  # load byte 1 of the IP header: type of service
    (0x54, 0, 0, 0xFC),  # without the two bits of congestion control
    (0x15, 0, 1, NODE_TOS),  # skip the next instruction unless equal
    (0x06, 0, 0, 0xFFFF_FFFF),  # keep the packet
    (0x06, 0, 0, 0),  # drop the packet
)
_FILTER: Final = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in _NODES_ONLY))
#: Interval between warnings.
_WARNING_NS: Final = 60_000_000_000
ADVICE: Final = "raise the hard limit of open files (ulimit -Hn), or close idle clients"


def raise_limit() -> int:
    """Raise this process's limit of open files as far as the system allows; return the limit.

    Logs a warning if the limit is low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_USEFUL if hard == resource.RLIM_INFINITY else min(hard, _MAX_USEFUL)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = descriptor_limit()
    if limit < _MIN_COMFORTABLE:
        event_log.warning("this process may open few files", limit=limit, advice=ADVICE)
    return limit


def descriptor_limit() -> int:
    """Return this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_USEFUL if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - without objects for the paths
    except OSError:  # None is left for the list.
        return descriptor_limit()


def require(count: int, what: str) -> None:
    """Check that this process can open `count` more descriptors now.

    Raises:
        UnavailableError: the system refuses some of them; `what` names the purpose.

    """
    taken: list[int] = []
    try:
        taken.extend(os.dup(2) for _ in range(count))
    except OSError as error:
        raise shortage_error(what, error) from error
    finally:
        for fd in taken:
            os.close(fd)


def require_threads(count: int, what: str) -> None:
    """Check that this process can start `count` more threads now.

    Raises:
        UnavailableError: the system refuses some of them; `what` names the purpose.

    """
    ended = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=ended.wait, name="probe", daemon=True)
            started.append(start_thread(thread, what))
    finally:
        ended.set()
        for thread in started:
            thread.join()


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


def shortage_error(what: str, error: Exception) -> UnavailableError:
    """Return the error for `what`, for which the system refused a descriptor or memory."""
    why = getattr(error, "strerror", None) or error
    return UnavailableError(
        f"{what}: the system refuses it ({why}). Close connections or files of this process, or"
        " raise its limit of open files (ulimit -n), and try again"
    )


class Reserve:
    """Selects connections to close, so that a listening process keeps descriptors free.

    For one thread.
    """

    #: Number of connections selected so far.
    shed: int
    #: Number of checks so far. A connection's `last_active` is this number at its last input.
    checks: int

    def __init__(self) -> None:
        """Start without connections."""
        self.shed = self.checks = 0
        #: Loaded now: importing a module needs a descriptor.
        self._warn_at = 0

    def choose(self, connections: Iterable[Connection], used: int, now: int) -> list[Connection]:
        """Return the connections to close so that enough descriptors are free.

        First those without a greeting, unless they are new, then those that are silent longest.

        Args:
            connections: the connections that peers opened.
            used: number of open descriptors of the process.
            now: monotonic nanoseconds.

        """
        self.checks += 1
        limit = descriptor_limit()
        excess = used - (limit - min(limit // _FREE_PART, _MAX_FREE))
        if excess <= 0:
            return []
        chosen = heapq.nsmallest(excess, connections, key=self._rank)
        self.shed += len(chosen)
        if chosen and now >= self._warn_at:
            self._warn_at = now + _WARNING_NS
            event_log.warning(
                "too many connections: closing idle ones",
                open_files=used,
                limit=limit,
                closed_so_far=self.shed,
                advice=ADVICE,
            )
        return chosen

    def _rank(self, connection: Connection) -> int:
        """Return the order in which connections are closed: the lowest first."""
        is_new = connection.last_active >= self.checks - 1
        return connection.last_active if connection.is_greeted or is_new else -1


def accept_only_nodes(listening: socket.socket) -> None:
    """Make a listening socket ignore connections, except of nodes, until `accept_all`."""
    program = struct.pack("HP", len(_NODES_ONLY), ctypes.addressof(_FILTER))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def accept_all(listening: socket.socket) -> None:
    """End `accept_only_nodes`."""
    listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


class AcceptPause:
    """Makes a listening socket ignore new connections of clients for a second. For one thread.

    The kernel drops the packets, so the clients try again after a second or more. If they waited in
    the queue instead, the process would spend its time on them while it lacks descriptors.
    Connections of nodes are accepted: a recovery must not wait for idle clients. The kernel
    recognizes nodes by `NODE_TOS`; on a network that changes it, they wait as clients do.
    """

    def __init__(self) -> None:
        """Start without a pause."""
        self._ends_at: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether new connections of clients are ignored now."""
        return self._ends_at is not None

    def start(self, listening: socket.socket, now: int) -> None:
        """Ignore new connections of clients for a second from now on."""
        if self._ends_at is None:
            accept_only_nodes(listening)
        self._ends_at = now + _PAUSE_NS

    def end_if_due(self, listening: socket.socket, now: int) -> None:
        """Answer new connections again, if the second is over."""
        if self._ends_at is not None and now >= self._ends_at:
            accept_all(listening)
            self._ends_at = None
