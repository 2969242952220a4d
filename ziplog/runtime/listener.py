"""The listening sockets of a server: they accept connections while the process has descriptors.

One listens for TCP connections, the other for Unix connections of its machine (`local_socket`). A
server keeps descriptors free for its files. If too few are left, it closes idle connections and
accepts none of clients for a second (`descriptors`). (docs/protocol.md, section 4: rules of every
server.)
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from typing import TYPE_CHECKING, Final

from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime import local_socket
from ziplog.runtime.descriptors import AcceptPause, Reserve, open_descriptors
from ziplog.segments.entry import SCARCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.runtime.connection import Connection

_BACKLOG: Final = 4096
#: Connections accepted before other input is read.
_MAX_ACCEPTS: Final = 64
#: Interval between checks of the free descriptors, and between attempts to accept without any.
_CHECK_INTERVAL_NS: Final = NS_PER_S
_RETRY_NS: Final = 100 * NS_PER_MS
#: TCP keepalive for silent peers; a peer that acknowledges no data is disconnected.
_SILENT_S: Final = 1
_PROBE_INTERVAL_S: Final = 1
_PROBES: Final = 3
_UNACKNOWLEDGED_MS: Final = 3_000
_MAX_PORT: Final = 65_535


class Listener:
    """The listening sockets of one endpoint. Of the transport's thread."""

    #: The endpoint, "host:port", with the actual port.
    endpoint: str

    def __init__(self, endpoint: str, epoll: select.epoll) -> None:
        """Listen at `endpoint` ("host:port"; port 0: any free one), and watch for connections.

        Raises:
            UnavailableError: the port is in use, or the system refuses a descriptor.
            ConfigError: it is not an address of this machine.

        """
        self._socket: Final = _listen(endpoint)
        self._address: Final[tuple[str, int]] = self._socket.getsockname()
        self.endpoint = "{}:{}".format(*self._address)
        self._epoll: Final = epoll
        epoll.register(self._socket, select.EPOLLIN)
        #: None: the system refused it, or clients are not accepted.
        self._local: socket.socket | None = None
        self._open_local()
        self._reserve: Final = Reserve()
        self._pause: Final = AcceptPause()
        #: Time from which on `check` is to be called: after each `accept`, and once a second.
        self.check_at = 0
        #: Time of the next `check` that may accept connections again; None: it accepts them.
        self.retry_at: int | None = None
        #: The system refused a connection; since then, no check was made.
        self._is_refused = self._is_unchecked = False

    def accept(self) -> list[socket.socket]:
        """Return connections that wait, up to a limit for each socket."""
        self.check_at = 0
        found = self._accept(self._socket)
        return found if self._local is None else found + self._accept(self._local)

    def _accept(self, listening: socket.socket) -> list[socket.socket]:
        found: list[socket.socket] = []
        while len(found) < _MAX_ACCEPTS:
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in SCARCE:
                    self._set_refused(True)
                    self._is_unchecked = True
                    break
                continue  # The connection ended while it waited.
            connection.setblocking(False)
            found.append(connection)
        return found

    def check(self, connections: Iterable[Connection], now: int) -> list[Connection]:
        """Return the connections to close so that enough descriptors are free."""
        self._pause.end_if_due(self._socket, now)
        chosen = self._reserve.choose(connections, open_descriptors(), now)
        # Without connections to close, the system would refuse the next one, too.
        self._set_refused(self._is_unchecked and not chosen)
        self._is_unchecked = False
        self.check_at = now + (_RETRY_NS if self._is_refused else _CHECK_INTERVAL_NS)
        if chosen:
            self._pause.start(self._socket, now)
            self._close_local()
        accepts_all = not (self._pause.is_active or self._is_refused)
        if accepts_all and self._local is None:
            self._open_local()
        self.retry_at = None if accepts_all else self.check_at
        return chosen

    @property
    def checks(self) -> int:
        """Number of checks so far."""
        return self._reserve.checks

    @property
    def shed(self) -> int:
        """Number of connections that `check` returned so far."""
        return self._reserve.shed

    def _set_refused(self, is_refused: bool) -> None:
        """Stop or start watching for connections, which wait while the system has no descriptor."""
        if self._is_refused != is_refused:
            self._is_refused = is_refused
            self._epoll.modify(self._socket, 0 if is_refused else select.EPOLLIN)
            self._close_local()

    def _open_local(self) -> None:
        self._local = local_socket.listen(*self._address, _BACKLOG)
        if self._local is not None:
            self._epoll.register(self._local, select.EPOLLIN)

    def _close_local(self) -> None:
        """Refuse Unix connections: peers use TCP, where the kernel tells nodes from clients."""
        if self._local is not None:
            self._epoll.unregister(self._local)
            self._local.close()
            self._local = None

    def shut_down(self) -> None:
        """Refuse connections, also while a forked child keeps the sockets open."""
        for listening in (self._socket, self._local):
            if listening is not None:
                with contextlib.suppress(OSError):
                    listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets; a finalizer may do it in a forked child, which changes no more."""
        if self._local is not None:
            self._local.close()
        self._socket.close()


def parse_endpoint(option: str, endpoint: str) -> tuple[str, int]:
    """Return the host and the port of "host:port".

    Raises:
        ConfigError: it is something else; `option` names it.

    """
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _MAX_PORT:
        raise ConfigError(option, endpoint, f"'host:port', with a port up to {_MAX_PORT}")
    return host, int(port)


def open_socket() -> socket.socket:
    """Return a non-blocking TCP socket; connections that it accepts have the same options.

    Raises:
        OSError: the system refuses it.

    """
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS),
    ):
        opened.setsockopt(level, option, value)
    return opened


def _listen(endpoint: str) -> socket.socket:
    host, port = parse_endpoint("bind", endpoint)
    listening = open_socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            advice = "stop the process that listens there, or choose another port"
            raise UnavailableError(
                f"cannot listen at {endpoint}: it is in use; {advice}"
            ) from error
        if error.errno in SCARCE:
            raise
        allowed = f"'host:port' of this machine ({error.strerror or error})"
        raise ConfigError("bind", endpoint, allowed) from error
    return listening
