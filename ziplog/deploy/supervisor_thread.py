"""Keeps a cluster's processes alive: a thread beside a supervisor.

It looks at the processes ten times a second and asks the failure handlers which nodes they miss;
`ziplog.deploy.restart_policy` says what follows. It looks at the cluster file as often, and starts
the servers of shards that were added. Every node that it starts or kills is logged as a warning.
Rule: all that it does goes through the supervisor's lock. Invariant: after `stop` it does nothing
more. See docs/protocol.md, sections 11 and 13 (joining).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from ziplog.deploy.restart_policy import Death, RestartPolicy
from ziplog.errors import ConfigError, ProtocolError, UnavailableError
from ziplog.runtime.descriptors import start_thread
from ziplog.runtime.transport import Transport
from ziplog.segments.entry import SCARCE
from ziplog.wire import Orders, OrdersQuery, decode, encode

if TYPE_CHECKING:
    from ziplog.deploy.supervisor import Supervisor

log = logging.getLogger(__name__)

_S: Final = 1_000_000_000
_POLL_NS: Final = _S // 10
#: The failure handlers are asked so often, or with every look while something is amiss.
_QUERY_NS: Final = _S // 2
#: A cluster file is read when it has been the same for so long: not all writers replace it at once.
_UNCHANGED_NS: Final = _S // 10
#: A new node that the machine could not start is tried again after so long.
_RETRY_NS: Final = _S


class SupervisorThread:
    """Starts what is dead and kills what the failure handler cannot reach, until `stop`."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Begin.

        Args:
            supervisor: whose processes these are; it must not be stopped before this is.

        """
        self._supervisor: Final = supervisor
        self._restart_policy: Final = RestartPolicy()
        self._transport: Final = Transport()
        self._handlers: Final = [
            handler.name.encode() for handler in supervisor.config.failure_handlers
        ]
        for handler in supervisor.config.failure_handlers:
            self._transport.connect(handler.name.encode(), handler.endpoint)
        #: Which cluster file was seen last (another inode, time or size is another one), and when
        #: it is to be read, if it was not yet.
        self._file: tuple[int, ...] | None = None
        self._read_at: int | None = None
        self._start_at = 0
        self._request = 0
        self._queried_at = -_QUERY_NS
        self._stopped: Final = threading.Event()
        thread = threading.Thread(target=self._run, name="ziplog-supervision", daemon=True)
        try:
            self._thread: Final = start_thread(thread, "cannot look after the cluster")
        except UnavailableError:
            self._transport.close()
            raise

    def stop(self) -> None:
        """End it; returns when the last thing that it does is done. Idempotent."""
        self._stopped.set()
        self._transport.wake()
        self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._check_cluster_file()
            self._start_new()
            self._restart_dead()
            self._query_failure_handlers()
            self._transport.wait(_POLL_NS)
            self._receive()

    def _check_cluster_file(self) -> None:
        file: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            found = self._supervisor.path.stat()
            file = (found.st_ino, found.st_mtime_ns, found.st_size)
        now = time.monotonic_ns()
        if file != self._file:
            self._file, self._read_at = file, now + _UNCHANGED_NS
        if self._read_at is None or now < self._read_at:
            return
        self._read_at = None
        try:
            self._supervisor.reload()
        except ConfigError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in SCARCE:
                self._read_at = now + _RETRY_NS
            log.warning("the cluster file was changed, and is not taken: %s", error)

    def _start_new(self) -> None:
        """Start the nodes that the cluster file has got since the others were started."""
        supervisor, now = self._supervisor, time.monotonic_ns()
        new = [name for name in supervisor.names if name not in supervisor.processes()]
        if not new or now < self._start_at:
            return
        for name in new:
            log.warning("%s is new in the cluster file; starting it", name)
            try:
                supervisor.start(name)
            except OSError as error:
                _warn(name, error)
                self._start_at = now + _RETRY_NS

    def _restart_dead(self) -> None:
        supervisor = self._supervisor
        for found in self._restart_policy.check_processes(
            supervisor.processes(), time.monotonic_ns()
        ):
            if isinstance(found, Death):
                how = supervisor.how_it_ended(found.node)
                log.warning("%s %s; starting again in %g s", found.node, how, found.pause_ns / _S)
                continue
            try:
                supervisor.start(found.node)
            except OSError as error:
                _warn(found.node, error)

    def _query_failure_handlers(self) -> None:
        now = time.monotonic_ns()
        if now - self._queried_at < (_POLL_NS if self._restart_policy.has_failures else _QUERY_NS):
            return
        self._queried_at = now
        self._request += 1
        # Cluster 0: a supervisor does not know the number. All are asked; only the leader answers.
        query = encode(OrdersQuery(0, self._request))
        for handler in self._handlers:
            self._transport.send(handler, query)

    def _receive(self) -> None:
        while (received := self._transport.receive()) is not None:
            source, frame = received
            try:
                message = decode(frame)
            except ProtocolError as error:
                log.warning("%s sent no message: %s", source.decode(errors="replace"), error)
                continue
            # An answer to an earlier question may be older than what is known by now.
            if isinstance(message, Orders) and message.request == self._request:
                self._restart_unreachable(message)

    def _restart_unreachable(self, message: Orders) -> None:
        supervisor = self._supervisor
        recoveries = {order.node: order.recovery for order in message.orders}
        now = time.monotonic_ns()
        for name in self._restart_policy.on_unreachable(recoveries, supervisor.processes(), now):
            log.warning(
                "%s runs, but cannot be reached; killing it and starting it again for recovery %d",
                name,
                recoveries[name],
            )
            try:
                supervisor.replace(name)
            except OSError as error:
                _warn(name, error)


def _warn(name: str, error: OSError) -> None:
    """Log that the system refuses to start a node, which is tried again, and what to do."""
    log.warning(
        "%s cannot be started now, and is tried again: %s. Where the system lacks processes, open"
        " files or memory, end some, or raise the limit (ulimit -u, ulimit -n)",
        name,
        error,
    )
